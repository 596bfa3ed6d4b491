package rpc

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
)

// accepted is a result as agent.request has it.
type accepted struct {
	Phase     string `json:"phase"`
	Status    string `json:"status"`
	SessionID string `json:"sessionId"`
	TurnID    string `json:"turnId"`
	RunID     string `json:"runId"`
	Seq       int64  `json:"seq"`
}

type acceptDispatcher struct{ result *accepted }

func (d *acceptDispatcher) Lookup(context.Context, string) (Handler, error) { return d, nil }

func (d *acceptDispatcher) Accept(context.Context, *Call) (any, Wait, error) {
	return d.result, nil, nil
}

var acceptResult = &accepted{
	Phase: "thinking", Status: "accepted", SessionID: "session-0001",
	TurnID: "0199c0de-0000-7000-8000-000000000001", RunID: "run_0199c0de-0000-7000-8000-000000000002", Seq: 7,
}

const acceptBody = `{"jsonrpc":"2.0","id":12345,"method":"agent.request","params":{"sessionId":"session-0001","userId":"alice",` +
	`"content":{"text":"Summarize today's commits in two bullet points, please.\nThen send them to the team."}}}`

// BenchmarkEnvelope measures a message from its bytes to the bytes of its
// answer, with a handler that does nothing.
func BenchmarkEnvelope(b *testing.B) {
	image := strings.Repeat("iVBORw0KGgoAAAANSUhEUgAA", 1<<20/24)
	for name, body := range map[string]string{
		"Request":  acceptBody,
		"Batch10":  "[" + strings.TrimSuffix(strings.Repeat(acceptBody+",", 10), ",") + "]",
		"Image1MB": strings.Replace(acceptBody, `"text":`, `"images":[{"type":"base64","mime":"image/png","data":"`+image+`"}],"text":`, 1),
	} {
		b.Run(name, func(b *testing.B) {
			s := &Server{Dispatcher: &acceptDispatcher{acceptResult}}
			buf := []byte(body)
			b.ReportAllocs()
			b.SetBytes(int64(len(buf)))
			for b.Loop() {
				x := s.Accept(b.Context(), buf, "")
				if len(x.Answer(b.Context())) == 0 {
					b.Fatal("no answer")
				}
				x.Close()
			}
		})
	}
}

type discard struct{ header http.Header }

func (w *discard) Header() http.Header         { return w.header }
func (w *discard) Write(p []byte) (int, error) { return len(p), nil }
func (w *discard) WriteHeader(int)             {}

// BenchmarkServeHTTP measures the same with reading and writing, but without
// net/http's own work.
func BenchmarkServeHTTP(b *testing.B) {
	s := &Server{Dispatcher: &acceptDispatcher{acceptResult}}
	reader := bytes.NewReader([]byte(acceptBody))
	r, err := http.NewRequest(http.MethodPost, "/rpc", io.NopCloser(reader))
	if err != nil {
		b.Fatal(err)
	}
	r.ContentLength = reader.Size()
	w := &discard{header: http.Header{}}
	b.ReportAllocs()
	for b.Loop() {
		reader.Seek(0, io.SeekStart)
		clear(w.header)
		s.ServeHTTP(w, r)
	}
}
