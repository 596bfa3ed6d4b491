package faults

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"
)

// The tools of the agent that rows use. Both count; they differ in what weir is
// told about repeating them.
const (
	again = "again" // idempotent
	once  = "once"  // at_most_once
)

// tools is the outside world: an HTTP server that remembers every call it got.
// A call's only argument, at, names the place in its script, so that a place
// which two calls name was reached twice.
type tools struct {
	*httptest.Server

	mu    sync.Mutex
	calls []toolCall
	hooks map[string]hook // by place, for its first call
	slow  func() time.Duration
}

type toolCall struct {
	Tool, At string
	Call     string // X-Weir-Call-Id
	Key      string
	Run      string
	Begun    time.Time
	Gone     time.Time // when the caller hung up before the answer
}

// hook is told of a call and answers it, or does not. It may wait for the
// caller to hang up.
type hook func(c toolCall, r *http.Request, answer func())

func newTools(t *testing.T) *tools {
	s := &tools{hooks: map[string]hook{}}
	s.Server = httptest.NewServer(s)
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

func (s *tools) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	var args struct{ At string }
	_ = json.Unmarshal(body, &args)
	c := toolCall{
		Tool: r.URL.Path[1:], At: args.At, Call: r.Header.Get("X-Weir-Call-Id"), Key: r.Header.Get("Idempotency-Key"),
		Run: r.Header.Get("X-Weir-Run-Id"), Begun: time.Now(),
	}
	s.mu.Lock()
	i := len(s.calls)
	s.calls = append(s.calls, c)
	h := s.hooks[c.At]
	delete(s.hooks, c.At)
	slow := s.slow
	s.mu.Unlock()
	answered := false
	answer := func() {
		answered = true
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"at":%q}`, c.At)
		_ = http.NewResponseController(w).Flush() // the caller may be dead
	}
	if h != nil {
		h(c, r, answer)
	} else {
		if slow != nil {
			pause(r.Context(), slow())
		}
		answer()
	}
	if !answered {
		s.mu.Lock()
		s.calls[i].Gone = time.Now()
		s.mu.Unlock()
		panic(http.ErrAbortHandler)
	}
}

// on hooks the first call from a place.
func (s *tools) on(at string, h hook) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hooks[at] = h
}

// hang answers the first call from a place never, and tells when it came.
func (s *tools) hang(at string) (came <-chan toolCall) {
	ch := make(chan toolCall, 1)
	s.on(at, func(c toolCall, r *http.Request, _ func()) {
		ch <- c
		<-r.Context().Done()
	})
	return ch
}

// from returns the calls from a place, in order.
func (s *tools) from(at string) (calls []toolCall) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.calls {
		if c.At == at {
			calls = append(calls, c)
		}
	}
	return calls
}

func (s *tools) all() []toolCall {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

// config is the configuration of an agent with both tools.
func (s *tools) config(agent string) json.RawMessage {
	tool := func(name, idempotency string) map[string]any {
		return map[string]any{
			"type": "http", "name": name, "description": "counts", "url": s.URL + "/" + name, "idempotency": idempotency,
			"parameters": map[string]any{"type": "object"},
		}
	}
	text, err := json.Marshal(map[string]any{
		"name": agent, "tools": []any{tool(again, "idempotent"), tool(once, "at_most_once")}, "limits": map[string]any{"maxSteps": 100},
	})
	if err != nil {
		panic(err) // only values made here
	}
	return text
}
