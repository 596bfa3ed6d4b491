package tool

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

func fetchPage(t *testing.T, r *Runner, args string) Page {
	t.Helper()
	result := r.Run(t.Context(), webFetch(t), call(args))
	require.Nil(t, result.Err, "%+v", result.Err)
	var page Page
	require.NoError(t, json.Unmarshal(result.Output, &page))
	return page
}

func TestFetchReadsPages(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, contentType, body, text string }{
		{"HTML", "text/html; charset=utf-8", "<html><head><title>A &amp; B</title><style>p{}</style><script>x<y</script></head><body><h1>Head</h1>\n <p>One\n two&nbsp;three <b>four</b>.</p><ul><li>a</li><li>b</li></ul>" +
			"<pre>x\n  y</pre><table><tr><td>1</td><td>2</td></tr></table><noscript>no</noscript><svg><text>pic</text></svg><!-- c -->end</body></html>",
			"A & B\nHead\nOne two three four.\na\nb\nx\n  y\n1 2\nend"},
		{"XHTML", "application/xhtml+xml", "<p>x</p>", "x"},
		{"Sniffed", "", "<!DOCTYPE html><p>x</p>", "x"},
		{"BrokenHTML", "text/html", "<p>a<div><b>c<script>never closed", "a\nc"},
		{"NestedSkip", "text/html", "a<template>x<template>y</template>z</template>b", "ab"},
		{"Text", "text/plain", "a <b>\n c", "a <b>\n c"},
		{"JSON", "application/json", `{"a":"b"}`, `{"a":"b"}`},
		{"XML", "application/rss+xml", `<rss/>`, `<rss/>`},
		{"Latin1", "text/plain; charset=iso-8859-1", "caf\xe9", "café"},
		{"Latin1Undeclared", "text/plain", "caf\xe9", "café"},
		{"MetaCharset", "text/html", `<meta charset="iso-8859-2"><p>` + "\xb3", "ł"},
		{"UTF8Undeclared", "text/html", "<p>über", "über"},
		{"NUL", "text/plain", "a\x00b", "a\uFFFDb"},
		{"Empty", "text/html", "", ""},
		{"UnknownTypeOfText", "application/x-sh", "echo", "echo"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			url := serve(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Method != http.MethodGet || r.ContentLength > 0 {
					w.WriteHeader(http.StatusMethodNotAllowed)
				}
				if tc.contentType != "" {
					w.Header().Set("Content-Type", tc.contentType)
				}
				fmt.Fprint(w, tc.body)
			})
			page := fetchPage(t, anywhere(t, Config{}), `{"url":"`+url+`"}`)
			require.Equal(t, tc.text, page.Text)
			require.Equal(t, 200, page.Status)
			require.Equal(t, url, page.URL)
			require.False(t, page.Truncated)
			if tc.contentType != "" {
				require.Equal(t, tc.contentType, page.ContentType)
			}
		})
	}
}

func TestFetchTruncates(t *testing.T) {
	t.Parallel()
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/html" {
			w.Header().Set("Content-Type", "text/html")
			fmt.Fprint(w, "<p>"+strings.Repeat("ü ", 200_000))
			return
		}
		w.Header().Set("Content-Type", "text/plain")
		fmt.Fprint(w, "x"+strings.Repeat("ü", 200_000))
	})
	r := anywhere(t, Config{MaxResponseBytes: 100_000})

	page := fetchPage(t, r, `{"url":"`+url+`"}`)
	require.True(t, page.Truncated)
	require.Equal(t, "x"+strings.Repeat("ü", (65536-1)/2), page.Text, "the default limit, in whole runes")

	page = fetchPage(t, r, `{"url":"`+url+`","maxBytes":1000000}`)
	require.True(t, page.Truncated, "the limit of the answer, which is no failure here")
	require.Equal(t, "x"+strings.Repeat("ü", (100_000-1)/2), page.Text)

	page = fetchPage(t, r, `{"url":"`+url+`","maxBytes":4}`)
	require.True(t, page.Truncated)
	require.Equal(t, "xü", page.Text)

	page = fetchPage(t, r, `{"url":"`+url+`/html","maxBytes":7}`)
	require.True(t, page.Truncated)
	require.Equal(t, "ü ü ", page.Text[:6])
}

func TestFetchStatuses(t *testing.T) {
	t.Parallel()
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		var status int
		_, _ = fmt.Sscanf(r.URL.Path, "/%d", &status)
		w.Header().Set("Retry-After", "3")
		w.Header().Set("Content-Type", "text/plain")
		w.WriteHeader(status)
		fmt.Fprint(w, "said")
	})
	r := anywhere(t, Config{})
	for _, status := range []int{200, 404, 403} {
		page := fetchPage(t, r, fmt.Sprintf(`{"url":"%s/%d"}`, url, status))
		require.Equal(t, status, page.Status)
		require.Equal(t, "said", page.Text)
	}
	for _, status := range []int{429, 500, 503} {
		f := r.Run(t.Context(), webFetch(t), fetchCall(fmt.Sprintf("%s/%d", url, status))).Err
		require.Equal(t, HTTPStatus, f.Kind)
		require.True(t, f.Retryable)
		require.Equal(t, 3*time.Second, f.RetryAfter)
	}
}

func TestFetchRefusesAddresses(t *testing.T) {
	t.Parallel()
	r := anywhere(t, Config{})
	for _, url := range []string{"", "example.com", "/etc/passwd", "file:///etc/passwd", "ftp://example.com", "gopher://x", "http://", "https://user:pw@example.com/", "http://exa mple", "javascript:1", "http://h:99999999/"} {
		f := r.Run(t.Context(), webFetch(t), fetchCall(url)).Err
		require.NotNil(t, f, url)
		require.Contains(t, []Kind{InvalidArguments, Network}, f.Kind, url)
		require.NotContains(t, f.Message, "pw")
	}
}

func TestFetchRefusesWhatIsNoText(t *testing.T) {
	t.Parallel()
	url := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "image/png")
		fmt.Fprint(w, "\x89PNG\x00\xff")
	})
	f := anywhere(t, Config{}).Run(t.Context(), webFetch(t), fetchCall(url)).Err
	require.Equal(t, NotText, f.Kind)
	require.Contains(t, f.Message, "image/png")
}

func TestFetchNamesWhereRedirectsEnded(t *testing.T) {
	t.Parallel()
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/end" {
			http.Redirect(w, r, "/end", http.StatusMovedPermanently)
			return
		}
		fmt.Fprint(w, "here")
	})
	page := fetchPage(t, anywhere(t, Config{}), `{"url":"`+url+`/start"}`)
	require.Equal(t, url+"/end", page.URL)
	require.Equal(t, "here", page.Text)
}

func TestLocalToolsAreNotRun(t *testing.T) {
	t.Parallel()
	c := catalogue(t, with(""))
	write, _ := c.Lookup(MemoryWrite)
	require.Equal(t, UnknownTool, New(Config{}).Run(t.Context(), write, call(`{"key":"a","value":1}`)).Err.Kind)
}

func FuzzHTMLText(f *testing.F) {
	f.Add("<p>a<script>b</script><pre>c</pre>", 10)
	f.Add("<svg><svg></svg>x", 1)
	f.Fuzz(func(t *testing.T, page string, limit int) {
		limit = min(max(limit, 1), 1<<16)
		text, _ := htmlText([]byte(page), limit)
		require.LessOrEqual(t, len(text), len(page)*2+1)
	})
}

func FuzzCleanJSON(f *testing.F) {
	f.Add([]byte(`["\u0000\ud800\ud83d\ude00\\u0000"]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if !json.Valid(b) {
			return
		}
		var before, after any
		require.NoError(t, json.Unmarshal(b, &before))
		got := cleanJSON(append([]byte(nil), b...))
		require.True(t, json.Valid(got), "%s", got)
		require.NoError(t, json.Unmarshal(got, &after))
		require.False(t, holdsNUL(after), "%s", got)
		if !holdsNUL(before) && utf8.Valid(b) { // each run of invalid bytes is one replacement
			require.Equal(t, before, after)
		}
	})
}

func holdsNUL(v any) bool {
	switch v := v.(type) {
	case string:
		return strings.Contains(v, "\x00")
	case []any:
		return slices.ContainsFunc(v, holdsNUL)
	case map[string]any:
		for key, value := range v {
			if holdsNUL(key) || holdsNUL(value) {
				return true
			}
		}
	}
	return false
}
