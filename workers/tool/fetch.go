package tool

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"mime"
	"net/http"
	"net/url"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/html/charset"
)

// Page is the output of web_fetch.
type Page struct {
	URL         string `json:"url"` // where the redirects ended
	Status      int    `json:"status"`
	ContentType string `json:"contentType"`
	Text        string `json:"text"`
	Truncated   bool   `json:"truncated"`
}

// defaultFetchBytes bounds the text of a page that asks for no other limit.
const defaultFetchBytes = 64 << 10

// fetch carries out web_fetch. 429 and 5xx are failures, since they may pass;
// other answers are for the model to read.
func (r *Runner) fetch(ctx context.Context, call Call) (Result, error) {
	args := struct {
		URL      string `json:"url"`
		MaxBytes int    `json:"maxBytes"`
	}{MaxBytes: defaultFetchBytes}
	if err := json.Unmarshal(call.Args, &args); err != nil {
		return Result{Err: invalid("the arguments do not fit web_fetch")}, nil
	}
	if at, err := url.Parse(args.URL); err != nil || at.Scheme != "http" && at.Scheme != "https" || at.Hostname() == "" {
		return Result{Err: invalid("url must be an absolute http or https URL")}, nil
	} else if at.User != nil {
		return Result{Err: invalid("url must not hold a user or a password")}, nil
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, args.URL, nil)
	if err != nil {
		return Result{}, err
	}
	req.Header.Set("Accept", "text/html, text/*;q=0.9, application/json;q=0.9, */*;q=0.1")
	req.Header.Set("User-Agent", "weir")
	if call.Traceparent != "" {
		req.Header.Set("Traceparent", call.Traceparent)
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return Result{}, err
	}
	defer func() { _ = resp.Body.Close() }() // it was read, or is given up
	if resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode >= 500 {
		return Result{Err: statusFailure(resp)}, nil
	}
	body, complete, err := r.read(resp)
	if err != nil {
		return Result{}, err
	}
	if !complete {
		body = wholeRunes(body)
	}
	page := Page{URL: resp.Request.URL.String(), Status: resp.StatusCode, ContentType: resp.Header.Get("Content-Type"), Truncated: !complete}
	if page.ContentType == "" {
		page.ContentType = http.DetectContentType(body)
	}
	media, params, _ := mime.ParseMediaType(page.ContentType)
	switch {
	case media == "text/html" || media == "application/xhtml+xml":
		var cutOff bool
		page.Text, cutOff = htmlText(toUTF8(body, page.ContentType, params["charset"]), args.MaxBytes)
		page.Truncated = page.Truncated || cutOff
	case strings.HasPrefix(media, "text/") || isJSON(media) || strings.HasSuffix(media, "xml") || textual(body):
		page.Text = string(toUTF8(body, page.ContentType, params["charset"]))
	case len(body) > 0:
		return failed(NotText, fmt.Sprintf("the page is no text: %d bytes of type %q", len(body), cut(media, 100))), nil
	}
	page.URL, page.ContentType = cleanText(page.URL), excerpt(cleanText(page.ContentType), 200)
	text := cleanText(page.Text)
	page.Text = cut(text, args.MaxBytes)
	page.Truncated = page.Truncated || len(page.Text) < len(text)
	return Result{Output: marshal(page)}, nil
}

// wholeRunes returns b without the start of a rune that was cut off.
func wholeRunes(b []byte) []byte {
	for n := 1; n <= min(utf8.UTFMax, len(b)); n++ {
		if tail := b[len(b)-n:]; utf8.RuneStart(tail[0]) {
			if !utf8.FullRune(tail) {
				return b[:len(b)-n]
			}
			break
		}
	}
	return b
}

// textual reports whether a body of another type can be read as text.
func textual(body []byte) bool { return utf8.Valid(body) && bytes.IndexByte(body, 0) < 0 }

// toUTF8 decodes a page by its declared character set, else by what it seems.
func toUTF8(body []byte, contentType, declared string) []byte {
	if declared == "" && utf8.Valid(body) {
		return body
	}
	encoding, _, _ := charset.DetermineEncoding(body, contentType)
	decoded, err := encoding.NewDecoder().Bytes(body)
	if err != nil {
		return body // cleanText replaces what is wrong in it
	}
	return decoded
}
