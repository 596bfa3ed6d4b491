package tool

import (
	"bufio"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestHTTPToolSendsWhatIsPromised(t *testing.T) {
	t.Parallel()
	for _, idempotency := range []string{"idempotent", "at_most_once"} {
		var got *http.Request
		var body string
		url := serve(t, func(w http.ResponseWriter, r *http.Request) {
			b, _ := io.ReadAll(r.Body)
			got, body = r, string(b)
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"id": 12345678901234567890, "b":1}`)
		})
		r := anywhere(t, Config{})

		result := r.Run(t.Context(), httpTool(t, url+"/v1?x=1", `,"method":"PUT","idempotency":"`+idempotency+`"`), call(`{"a":"ü"}`))
		require.Nil(t, result.Err)
		require.Equal(t, `{"id": 12345678901234567890, "b":1}`, string(result.Output), "as it came, numbers too")
		require.Equal(t, `{"a":"ü"}`, body)
		require.Equal(t, "PUT", got.Method)
		require.Equal(t, "/v1?x=1", got.URL.String())
		require.Equal(t, "application/json", got.Header.Get("Content-Type"))
		require.Equal(t, "key-1", got.Header.Get("Idempotency-Key"))
		require.Equal(t, "run_1", got.Header.Get("X-Weir-Run-Id"))
		require.Equal(t, "call_1", got.Header.Get("X-Weir-Call-Id"))
		require.Equal(t, "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", got.Header.Get("traceparent"))
	}
}

func TestHTTPToolResults(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, contentType, body string
		output                  string
		kind                    Kind
	}{
		{"JSON", "application/json; charset=utf-8", " [1,2] \n", `[1,2]`, ""},
		{"JSONScalar", "application/json", `"x"`, `"x"`, ""},
		{"JSONSuffix", "application/problem+json", `{"a":null}`, `{"a":null}`, ""},
		{"ObjectWithoutItsType", "text/plain", `{"a":1}`, `{"a":1}`, ""},
		{"ScalarWithoutItsTypeIsText", "text/plain", `17`, `"17"`, ""},
		{"Text", "text/plain", "a <b> & \"c\"\n", `"a <b> & \"c\"\n"`, ""},
		{"BrokenJSONIsText", "application/json", `{"a":`, `"{\"a\":"`, ""},
		{"Empty", "application/json", "", `null`, ""},
		{"EmptyWithoutType", "", "", `null`, ""},
		{"BlankJSON", "application/json", " \n", `null`, ""},
		{"NULInText", "text/plain", "a\x00b\xff", `"a` + replacement + `b` + replacement + `"`, ""},
		{"NULInJSON", "application/json", `["\u0000","\ud800","\ud83d\ude00","\\u0000","\ud83dx"]`, `["\ufffd","\ufffd","\ud83d\ude00","\\u0000","\ufffdx"]`, ""},
		{"InvalidUTF8InJSON", "application/json", "[\"\xff\"]", `["` + replacement + `"]`, ""},
		{"Binary", "image/png", "\x89PNG\x00\xff", "", NotText},
		{"TextOfUnknownType", "application/x-thing", "plain words", `"plain words"`, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			url := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				w.Header()["Content-Type"] = []string{tc.contentType}
				fmt.Fprint(w, tc.body)
			})
			result := anywhere(t, Config{}).Run(t.Context(), httpTool(t, url, ""), call(`{}`))
			if tc.kind != "" {
				require.Equal(t, tc.kind, result.Err.Kind)
				require.Nil(t, result.Output)
				return
			}
			require.Nil(t, result.Err)
			require.Equal(t, tc.output, string(result.Output))
		})
	}
}

func TestHTTPToolStatuses(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		status    int
		header    http.Header
		retryable bool
		after     time.Duration
	}{
		{400, nil, false, 0},
		{401, http.Header{"Retry-After": {"5"}}, false, 0},
		{404, nil, false, 0},
		{302, http.Header{"Location": {"/elsewhere"}}, false, 0},
		{304, nil, false, 0},
		{429, http.Header{"Retry-After": {"7"}}, true, 7 * time.Second},
		{429, http.Header{"Retry-After": {"-1"}}, true, 0},
		{429, http.Header{"Retry-After": {"soon"}}, true, 0},
		{429, http.Header{"Retry-After": {"99999999999999999999"}}, true, 24 * time.Hour},
		{503, http.Header{"Date": {"Sun, 01 Mar 2026 12:00:00 GMT"}, "Retry-After": {"Sun, 01 Mar 2026 12:01:30 GMT"}}, true, 90 * time.Second},
		{503, http.Header{"Date": {"Sun, 01 Mar 2026 12:00:00 GMT"}, "Retry-After": {"Sun, 01 Mar 2026 11:00:00 GMT"}}, true, 0},
		{500, nil, true, 0},
		{599, nil, true, 0},
	} {
		url := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			for name, values := range tc.header {
				w.Header()[name] = values
			}
			w.WriteHeader(tc.status)
			if tc.status != 304 {
				fmt.Fprint(w, "the reason ", strings.Repeat("ü", 100_000))
			}
		})
		f := anywhere(t, Config{}).Run(t.Context(), httpTool(t, url, ""), call(`{}`)).Err
		require.NotNil(t, f, tc.status)
		require.Equal(t, HTTPStatus, f.Kind)
		require.Equal(t, tc.retryable, f.Retryable, tc.status)
		require.Equal(t, tc.after, f.RetryAfter, "%d %v", tc.status, tc.header)
		require.Contains(t, f.Message, fmt.Sprint(tc.status))
		require.LessOrEqual(t, len(f.Message), maxExcerptBytes)
		if tc.status != 304 {
			require.Contains(t, f.Message, "the reason ü")
			require.True(t, strings.HasSuffix(f.Message, "…"))
		}
	}
}

func TestLargeAnswerIsRefused(t *testing.T) {
	t.Parallel()
	send := func(size int, zip bool) string {
		return serve(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			var out io.Writer = w
			if zip {
				w.Header().Set("Content-Encoding", "gzip")
				z := gzip.NewWriter(w)
				defer func() { _ = z.Close() }()
				out = z
			}
			for chunk := strings.Repeat("x", 1000); size > 0; size -= 1000 {
				if _, err := io.WriteString(out, chunk[:min(size, 1000)]); err != nil {
					return
				}
			}
		})
	}
	r := anywhere(t, Config{MaxResponseBytes: 10_000})
	require.Nil(t, r.Run(t.Context(), httpTool(t, send(10_000, false), ""), call(`{}`)).Err, "exactly the limit fits")
	for _, url := range []string{send(10_001, false), send(5_000_000, false), send(5_000_000, true)} {
		f := r.Run(t.Context(), httpTool(t, url, ""), call(`{}`)).Err
		require.NotNil(t, f)
		require.Equal(t, TooLarge, f.Kind)
		require.False(t, f.Retryable)
	}
	declared := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "999999999999")
		_, _ = w.Write([]byte("x"))
	})
	require.Equal(t, TooLarge, r.Run(t.Context(), httpTool(t, declared, ""), call(`{}`)).Err.Kind, "without reading it")
	require.Equal(t, int64(1<<20), New(Config{}).maxResponse)
}

func TestSlowToolTimesOut(t *testing.T) {
	t.Parallel()
	for name, handler := range map[string]http.HandlerFunc{
		"BeforeHeaders": func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
		"InTheBody": func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprint(w, "half")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := serve(t, func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				handler(w, r)
			})
			f := anywhere(t, Config{}).Run(t.Context(), httpTool(t, url, `,"timeoutMs":50`), call(`{}`)).Err
			require.NotNil(t, f)
			require.Equal(t, Timeout, f.Kind)
			require.Contains(t, f.Message, "50ms")
		})
	}
}

// FC-7: a cancelled call closes its connection at once.
func TestCancelClosesTheConnection(t *testing.T) {
	t.Parallel()
	started, gone := make(chan struct{}), make(chan time.Time, 1)
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, "started")
		w.(http.Flusher).Flush()
		close(started)
		<-r.Context().Done()
		gone <- time.Now()
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan Result, 1)
	r := anywhere(t, Config{})
	slow := httpTool(t, url, `,"timeoutMs":600000`)
	go func() { ended <- r.Run(ctx, slow, call(`{}`)) }()

	<-started
	cancelled := time.Now()
	cancel()
	require.Equal(t, Cancelled, (<-ended).Err.Kind)
	require.Less(t, (<-gone).Sub(cancelled), 2*time.Second)

	f := r.Run(ctx, slow, call(`{}`)).Err
	require.Equal(t, Cancelled, f.Kind, "nothing is sent for a turn that went away")
}

func TestUnreachableToolIsANetworkFailure(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	url := "http://" + l.Addr().String()
	require.NoError(t, l.Close())
	f := anywhere(t, Config{}).Run(t.Context(), httpTool(t, url+"/x?key=visible", ""), call(`{}`)).Err
	require.Equal(t, Network, f.Kind)
	require.False(t, f.Retryable, "only 429 and 5xx are retried")
	require.NotContains(t, f.Message, "visible", "the tool's URL is not for the model")
}

// breaking is a server whose connections serve one request and break during
// the second, before its answer. It counts the requests that arrived.
func breaking(t *testing.T) (url string, requests *atomic.Int32) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	requests = new(atomic.Int32)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			in := bufio.NewReader(conn)
			for n := range 2 {
				req, err := http.ReadRequest(in)
				if err != nil {
					break
				}
				_, _ = io.Copy(io.Discard, req.Body)
				requests.Add(1)
				if n == 0 {
					fmt.Fprint(conn, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}")
				}
			}
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	return "http://" + l.Addr().String(), requests
}

func TestOnlyIdempotentCallsAreRepeatedByTheTransport(t *testing.T) {
	t.Parallel()
	for _, method := range []string{"POST", "GET"} {
		t.Run("AtMostOnce"+method, func(t *testing.T) {
			t.Parallel()
			url, requests := breaking(t)
			r := anywhere(t, Config{})
			tool := httpTool(t, url, `,"method":"`+method+`"`)
			require.Nil(t, r.Run(t.Context(), tool, call(`{}`)).Err)
			second := r.Run(t.Context(), tool, call(`{}`))
			r.Close()
			if method == "POST" {
				require.NotNil(t, second.Err)
				require.Equal(t, Network, second.Err.Kind)
			}
			require.EqualValues(t, 2, requests.Load(), "each call arrived once")
		})
		t.Run("Idempotent"+method, func(t *testing.T) {
			t.Parallel()
			url, requests := breaking(t)
			r := anywhere(t, Config{})
			tool := httpTool(t, url, `,"idempotency":"idempotent","method":"`+method+`"`)
			require.Nil(t, r.Run(t.Context(), tool, call(`{}`)).Err)
			require.Nil(t, r.Run(t.Context(), tool, call(`{}`)).Err)
			r.Close()
			require.EqualValues(t, 3, requests.Load())
		})
	}
}

func BenchmarkHTTPTool(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"ok":true}`)
	})}
	go func() { _ = server.Serve(l) }()
	defer func() { _ = server.Close() }()
	r := New(Config{AllowPrivate: true})
	defer r.Close()
	tool := &Tool{Name: "x", Timeout: time.Minute, url: "http://" + l.Addr().String(), method: "POST"}
	b.ReportAllocs()
	for b.Loop() {
		if result := r.Run(b.Context(), tool, call(`{"a":1}`)); result.Err != nil {
			b.Fatal(result.Err)
		}
	}
}
