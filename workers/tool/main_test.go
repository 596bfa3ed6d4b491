package tool

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/weir-run/weir/jobs/agentcfg"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// anywhere is a Runner that may call the test's own servers.
func anywhere(t *testing.T, cfg Config) *Runner {
	t.Helper()
	cfg.AllowPrivate = true
	r := New(cfg)
	t.Cleanup(r.Close)
	return r
}

func serve(t *testing.T, handler http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewServer(handler)
	t.Cleanup(s.Close)
	return s.URL
}

// httpTool returns a tool as an agent's configuration makes it.
func httpTool(t *testing.T, url, more string) *Tool {
	t.Helper()
	cfg, err := agentcfg.Parse(json.RawMessage(`{"name":"a","tools":[{"type":"http","name":"x","url":"` + url + `"` + more + `}]}`))
	require.NoError(t, err)
	found, ok := NewCatalogue(cfg).Lookup("x")
	require.True(t, ok)
	return found
}

func webFetch(t *testing.T) *Tool {
	t.Helper()
	cfg, err := agentcfg.Parse(json.RawMessage(`{"name":"a","tools":[{"type":"builtin","name":"web_fetch"}]}`))
	require.NoError(t, err)
	found, _ := NewCatalogue(cfg).Lookup(WebFetch)
	return found
}

func call(args string) Call {
	return Call{RunID: "run_1", CallID: "call_1", Tool: "x", Args: json.RawMessage(args), IdempotencyKey: "key-1", Traceparent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
}

func fetchCall(url string) Call { return call(`{"url":"` + url + `"}`) }

// resolver answers every A query with what answer says for the name.
func resolver(t *testing.T, answer func(name string) netip.Addr) *net.Resolver {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan struct{})
	t.Cleanup(func() {
		_ = conn.Close()
		<-done
	})
	go func() {
		defer close(done)
		buf := make([]byte, 1500)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(buf[:n]) != nil || len(m.Questions) != 1 {
				continue
			}
			q := m.Questions[0]
			m.Response, m.RecursionAvailable, m.Additionals = true, true, nil
			if q.Type == dnsmessage.TypeA {
				m.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 0},
					Body:   &dnsmessage.AResource{A: answer(q.Name.String()).As4()},
				}}
			}
			if packed, err := m.Pack(); err == nil {
				_, _ = conn.WriteTo(packed, from)
			}
		}
	}()
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "udp", conn.LocalAddr().String())
	}}
}
