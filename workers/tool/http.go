package tool

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/weir-run/weir/jobs/agentcfg"
)

// maxExcerptBytes bounds what a failure shows of somebody else's text.
const maxExcerptBytes = 1000

// callHTTP calls an http tool. The error says that no answer came.
func (r *Runner) callHTTP(ctx context.Context, t *Tool, call Call) (Result, error) {
	req, err := newRequest(ctx, t, call)
	if err != nil {
		return Result{}, err
	}
	client := r.client
	if t.Idempotency != agentcfg.Idempotent && t.method == http.MethodGet {
		client = r.fresh
	}
	resp, err := client.Do(req)
	if err != nil {
		return Result{}, err
	}
	defer func() { _ = resp.Body.Close() }() // it was read, or is given up
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return Result{Err: statusFailure(resp)}, nil
	}
	tooLarge := failed(TooLarge, fmt.Sprintf("the answer is larger than %d bytes", r.maxResponse))
	if resp.ContentLength > r.maxResponse {
		return tooLarge, nil
	}
	body, complete, err := r.read(resp)
	if err != nil {
		return Result{}, err
	}
	if !complete {
		return tooLarge, nil
	}
	return output(resp.Header.Get("Content-Type"), body), nil
}

// newRequest builds the request of a call (contract/surface.md §2).
func newRequest(ctx context.Context, t *Tool, call Call) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, t.method, t.url, bytes.NewReader(call.Args))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/*;q=0.9, */*;q=0.1")
	req.Header.Set("User-Agent", "weir")
	req.Header.Set("X-Weir-Run-Id", call.RunID)
	req.Header.Set("X-Weir-Call-Id", call.CallID)
	if call.Traceparent != "" {
		req.Header.Set("Traceparent", call.Traceparent)
	}
	switch {
	case call.IdempotencyKey == "":
	case t.Idempotency == agentcfg.Idempotent:
		req.Header.Set("Idempotency-Key", call.IdempotencyKey)
	default:
		// net/http repeats a request whose connection broke before the answer
		// if it finds this header, and then the tool may act twice. It looks
		// for the canonical spelling only; servers read any.
		req.Header["idempotency-key"] = []string{call.IdempotencyKey}
	}
	return req, nil
}

// read returns a body up to the limit, and whether that is all of it.
func (r *Runner) read(resp *http.Response) (body []byte, complete bool, err error) {
	var buf bytes.Buffer
	if resp.ContentLength > 0 {
		buf.Grow(int(min(resp.ContentLength, r.maxResponse)) + bytes.MinRead)
	}
	n, err := buf.ReadFrom(io.LimitReader(resp.Body, r.maxResponse+1))
	if n > r.maxResponse {
		buf.Truncate(int(r.maxResponse))
		return buf.Bytes(), false, nil
	}
	return buf.Bytes(), true, err
}

// output makes a result of a body: JSON as it is, text as a JSON string.
func output(contentType string, body []byte) Result {
	media, _, _ := mime.ParseMediaType(contentType) // "" when it makes no sense
	trimmed := bytes.TrimSpace(body)
	switch {
	case len(body) == 0, len(trimmed) == 0 && isJSON(media):
		return Result{Output: json.RawMessage("null")}
	case (isJSON(media) || bytes.HasPrefix(trimmed, []byte("{")) || bytes.HasPrefix(trimmed, []byte("["))) && json.Valid(trimmed):
		return Result{Output: cleanJSON(trimmed)}
	case !strings.HasPrefix(media, "text/") && !utf8.Valid(body):
		return failed(NotText, fmt.Sprintf("the answer is neither JSON nor text: %d bytes of type %q", len(body), cut(media, 100)))
	}
	return Result{Output: marshal(cleanText(string(body)))}
}

func isJSON(media string) bool {
	return media == "application/json" || media == "text/json" || strings.HasSuffix(media, "+json")
}

// statusFailure describes an answer that is no result. 429 and 5xx may pass.
func statusFailure(resp *http.Response) *Failure {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 4*maxExcerptBytes)) // what is there is enough
	message := fmt.Sprintf("HTTP %d", resp.StatusCode)
	if name := http.StatusText(resp.StatusCode); name != "" {
		message += " " + name
	}
	if text := strings.TrimSpace(cleanText(string(body))); text != "" {
		message = excerpt(message+": "+text, maxExcerptBytes)
	}
	f := &Failure{Kind: HTTPStatus, Message: message}
	if resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode >= 500 {
		f.Retryable = true
		f.RetryAfter = retryAfter(resp.Header)
	}
	return f
}

// maxRetryAfter bounds how long a server can ask to be left alone.
const maxRetryAfter = 24 * time.Hour

// retryAfter reads the header of that name: seconds, or a date that is compared
// with the server's own clock where it tells its time.
func retryAfter(h http.Header) time.Duration {
	value := strings.TrimSpace(h.Get("Retry-After"))
	if value == "" {
		return 0
	}
	seconds, err := strconv.ParseInt(value, 10, 64)
	switch {
	case err == nil:
		return time.Duration(min(max(seconds, 0), int64(maxRetryAfter/time.Second))) * time.Second
	case errors.Is(err, strconv.ErrRange):
		return maxRetryAfter
	}
	until, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	now, err := http.ParseTime(h.Get("Date"))
	if err != nil {
		now = time.Now()
	}
	return min(max(until.Sub(now), 0), maxRetryAfter)
}
