package model

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// wire is a provider's side of a scripted exchange.
type wire struct {
	url string

	mu       sync.Mutex
	requests []wireRequest
}

type wireRequest struct {
	path   string
	header http.Header
	body   []byte
}

// serve starts a server that records each request and answers with the handler.
func serve(t *testing.T, answer http.HandlerFunc) *wire {
	t.Helper()
	w := &wire{}
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.mu.Lock()
		w.requests = append(w.requests, wireRequest{path: r.URL.Path, header: r.Header.Clone(), body: body})
		w.mu.Unlock()
		answer(rw, r)
	}))
	t.Cleanup(server.Close)
	w.url = server.URL
	return w
}

// sent returns the body of the only request.
func (w *wire) sent(t *testing.T) []byte {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	require.Len(t, w.requests, 1)
	return w.requests[0].body
}

// events answers with a stream of exactly these bytes.
func events(parts ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		flush(w, parts...)
	}
}

// eventsThenSilence answers with these bytes and keeps the connection open until
// the client closes it, which it reports.
func eventsThenSilence(closed chan<- struct{}, parts ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		flush(w, parts...)
		<-r.Context().Done()
		close(closed)
	}
}

// flush writes each part so that it travels alone.
func flush(w http.ResponseWriter, parts ...string) {
	for _, part := range parts {
		_, _ = io.WriteString(w, part)
		w.(http.Flusher).Flush()
	}
}

// status answers with a status, headers and body.
func status(code int, body string, headers ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		for i := 0; i < len(headers); i += 2 {
			w.Header().Set(headers[i], headers[i+1])
		}
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	}
}

const testKey = "sk-test-0123456789"

// config of a provider at an address, with connections that end with the test.
func testConfig(t *testing.T, baseURL string, change ...func(*Config)) Config {
	t.Helper()
	transport := newTransport(time.Minute)
	t.Cleanup(transport.CloseIdleConnections)
	config := Config{APIKey: testKey, ProviderConfig: ProviderConfig{BaseURL: baseURL, Transport: transport}}
	for _, f := range change {
		f(&config)
	}
	return config
}

func openAIAt(t *testing.T, baseURL string, change ...func(*Config)) *OpenAI {
	t.Helper()
	p, err := NewOpenAI(testConfig(t, baseURL, append([]func(*Config){func(c *Config) { c.Name = ProviderOpenAI }}, change...)...))
	require.NoError(t, err)
	return p
}

func anthropicAt(t *testing.T, baseURL string, change ...func(*Config)) *Anthropic {
	t.Helper()
	p, err := NewAnthropic(testConfig(t, baseURL, append([]func(*Config){func(c *Config) { c.Name = ProviderAnthropic }}, change...)...))
	require.NoError(t, err)
	return p
}

func gap(d time.Duration) func(*Config) {
	return func(c *Config) { c.GapTimeout = d }
}

func firstByte(d time.Duration) func(*Config) {
	return func(c *Config) { c.FirstByteTimeout = d }
}

// ask is the request of a user who says this and nothing else.
func ask(model, text string) *Request {
	return &Request{Model: model, Messages: []Message{{Role: RoleUser, Text: text}}}
}

// requireError returns the *Error that a call failed with.
func requireError(t *testing.T, err error) *Error {
	t.Helper()
	var e *Error
	require.ErrorAs(t, err, &e)
	require.NotContains(t, e.Error(), testKey)
	return e
}

// micros is a cost.
func micros(n int64) *int64 { return &n }

// deltas is a sink that remembers.
type deltas struct{ list []string }

func (d *deltas) sink(text string) { d.list = append(d.list, text) }

func (d *deltas) text() string { return strings.Join(d.list, "") }

// pipes is a network within the process. In a synctest bubble its time is that
// of the bubble.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
}

// servePipes serves on a network of its own and returns the way there.
func servePipes(t *testing.T, handler http.Handler) *http.Transport {
	t.Helper()
	p := &pipes{conns: make(chan net.Conn), closed: make(chan struct{})}
	server := &http.Server{Handler: handler}
	var running sync.WaitGroup
	running.Go(func() { _ = server.Serve(p) })
	transport := newTransport(time.Minute)
	transport.Proxy = nil
	transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		here, there := net.Pipe()
		select {
		case p.conns <- there:
			return here, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		_ = server.Close()
		running.Wait()
	})
	return transport
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case conn := <-p.conns:
		return conn, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	select {
	case <-p.closed:
	default:
		close(p.closed)
	}
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "pipe"} }

// object decodes JSON into what can be looked into.
func object(t *testing.T, data []byte) map[string]any {
	t.Helper()
	var m map[string]any
	require.NoError(t, json.Unmarshal(data, &m), "%s", data)
	return m
}
