package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// server answers each request with the next of answers; the last one stays.
func server(t *testing.T, answers ...http.HandlerFunc) (*httptest.Server, func() []*http.Request) {
	var mu sync.Mutex
	var seen []*http.Request
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		seen = append(seen, r)
		answer := answers[min(len(seen), len(answers))-1]
		mu.Unlock()
		answer(w, r)
	}))
	t.Cleanup(s.Close)
	return s, func() []*http.Request {
		mu.Lock()
		defer mu.Unlock()
		return seen
	}
}

func newTestClient(t *testing.T, url string) *Client {
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return New(Config{URL: url, Token: "wt_x", Patience: 20 * time.Second, HTTP: &http.Client{Transport: transport}})
}

func result(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"jsonrpc":"2.0","id":1,"result":%s}`, text)
	}
}

func refusal(status int, text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		fmt.Fprintf(w, `{"jsonrpc":"2.0","id":1,"error":%s}`, text)
	}
}

func broken(w http.ResponseWriter, _ *http.Request) { panic(http.ErrAbortHandler) }

func TestCall(t *testing.T) {
	t.Parallel()
	unavailable := refusal(http.StatusServiceUnavailable, `{"code":-32014,"message":"draining"}`)

	t.Run("KeyedCallIsRepeatedUnderItsKey", func(t *testing.T) {
		t.Parallel()
		s, seen := server(t, broken, unavailable, result(`{"response":"hi"}`))
		r, err := newTestClient(t, s.URL).Execute(t.Context(), ExecuteParams{Message: "hello", IdempotencyKey: "k"})
		require.NoError(t, err)
		require.Equal(t, "hi", r.Response)
		require.Len(t, seen(), 3)
		for _, r := range seen() {
			require.Equal(t, "k", r.Header.Get("Idempotency-Key"))
			require.Equal(t, "Bearer wt_x", r.Header.Get("Authorization"))
		}
	})
	t.Run("OtherCallsAreSentOnce", func(t *testing.T) {
		t.Parallel()
		s, seen := server(t, unavailable)
		_, err := newTestClient(t, s.URL).KillRun(t.Context(), "run_x")
		var e *Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, CodeUnavailable, e.Code)
		require.Len(t, seen(), 1)
	})
	t.Run("RefusalIsNotRepeated", func(t *testing.T) {
		t.Parallel()
		s, seen := server(t, refusal(http.StatusOK, `{"code":-32602,"message":"run not found: x","data":{"reason":"not_found"}}`))
		_, err := newTestClient(t, s.URL).Run(t.Context(), "x")
		var e *Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, "not_found", e.Reason())
		require.Len(t, seen(), 1)
	})
	t.Run("NobodyThereIsToldAtOnce", func(t *testing.T) {
		t.Parallel()
		s, _ := server(t, result("{}"))
		url := s.URL
		s.Close()
		_, err := newTestClient(t, url).Ping(t.Context())
		var e *UnreachableError
		require.ErrorAs(t, err, &e)
		require.Equal(t, url, e.URL)
	})
	t.Run("NoJSONRPCIsAnError", func(t *testing.T) {
		t.Parallel()
		s, _ := server(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") })
		_, err := newTestClient(t, s.URL).Ping(t.Context())
		require.ErrorContains(t, err, "no JSON-RPC")
	})
	t.Run("EndOfContextEndsTheTries", func(t *testing.T) {
		t.Parallel()
		s, _ := server(t, unavailable)
		cause := errors.New("enough")
		ctx, cancel := context.WithTimeoutCause(t.Context(), 300*time.Millisecond, cause)
		defer cancel()
		_, err := newTestClient(t, s.URL).Ping(ctx)
		require.ErrorIs(t, err, cause)
	})
	t.Run("FailedTurnSaysWhy", func(t *testing.T) {
		t.Parallel()
		e := &Error{Code: CodeTurnFailed, Message: "turn failed", Data: json.RawMessage(`{"kind":"provider_error","message":"no key"}`)}
		require.EqualError(t, e, "the turn failed: no key (provider_error)")
	})
}
