package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/weir-run/weir/policy/mask"
)

// collector receives spans, as an OpenTelemetry collector does.
type collector struct {
	*httptest.Server
	mu     sync.Mutex
	header http.Header // of the last request
	path   string
	got    []collected
}

type collected struct {
	instance string // of the process
	service  string
	*tracepb.Span
}

// newCollector starts one. answer may refuse a request with a status.
func newCollector(t *testing.T, answer func(w http.ResponseWriter) bool) *collector {
	t.Helper()
	c := &collector{}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if answer != nil && !answer(w) {
			return
		}
		body := io.Reader(r.Body)
		if r.Header.Get("Content-Encoding") == "gzip" {
			body, _ = gzip.NewReader(r.Body)
		}
		raw, _ := io.ReadAll(body)
		var data tracepb.TracesData
		if err := proto.Unmarshal(raw, &data); err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.header, c.path = r.Header, r.URL.Path
		for _, rs := range data.ResourceSpans {
			var from collected
			for _, a := range rs.GetResource().GetAttributes() {
				switch a.Key {
				case "service.instance.id":
					from.instance = a.Value.GetStringValue()
				case "service.name":
					from.service = a.Value.GetStringValue()
				}
			}
			for _, ss := range rs.ScopeSpans {
				for _, s := range ss.Spans {
					c.got = append(c.got, collected{from.instance, from.service, s})
				}
			}
		}
	}))
	t.Cleanup(c.Close)
	return c
}

// spans are those whose names begin so.
func (c *collector) spans(name string) (found []collected) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.got {
		if strings.HasPrefix(s.Name, name) {
			found = append(found, s)
		}
	}
	return found
}

// TestTraceSurvivesAKill kills a worker between two steps: what the others send
// of the run belongs to the trace that began with its request.
func TestTraceSurvivesAKill(t *testing.T) {
	t.Parallel()
	col := newCollector(t, nil)
	f := newFleet(t)
	f.env = []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + col.URL, "OTEL_BSP_SCHEDULE_DELAY=20", "OTEL_SERVICE_NAME=weir-test",
		"OTEL_EXPORTER_OTLP_HEADERS=x-collector-token=abc%20def"}
	f.reaper()
	edge, c := f.api()
	workers := map[string]*role{}
	for range 2 {
		w := f.worker()
		workers[w.ready.WorkerID] = w
	}
	inStep := make(chan struct{})
	var once sync.Once
	tool := newTestTool(t, func(call toolCall, r *http.Request) bool {
		first := false
		if call.N == 2 {
			once.Do(func() { first = true; close(inStep) })
		}
		if first {
			<-r.Context().Done() // it never answers
		}
		return !first
	})
	tool.agent(t, c, "counter", "idempotent")
	id := accept(t, c, "counter", "traced", script(3))
	<-inStep
	run, err := c.Run(limited(t), id)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return len(col.spans("execute_tool count")) == 1 && len(col.spans("chat")) == 2 }, stepLimit, 10*time.Millisecond)
	workers[run.WorkerID].kill()
	require.Equal(t, "completed", await(t, c, id, ended).State)
	for workerID, w := range workers {
		if workerID != run.WorkerID {
			w.signal(syscall.SIGTERM)
			require.Zero(t, w.exit())
		}
	}
	edge.signal(syscall.SIGTERM)
	require.Zero(t, edge.exit())

	turns, tools := col.spans("turn"), col.spans("execute_tool count")
	require.Len(t, turns, 1, "that of the dead worker had not ended")
	require.Len(t, tools, 3)
	require.NotEqual(t, tools[0].instance, turns[0].instance, "the first step was another process's")
	var request collected
	for _, s := range col.spans("POST /rpc") {
		if bytes.Equal(s.SpanId, turns[0].ParentSpanId) {
			request = s
		}
	}
	require.NotNil(t, request.Span, "the turn is a child of its request")
	require.Empty(t, request.ParentSpanId)
	calls := col.spans("chat")
	require.Len(t, calls, 4)
	for _, s := range slices.Concat(turns, tools, calls) {
		require.Equal(t, request.TraceId, s.TraceId)
		require.Equal(t, "weir-test", s.service)
	}
	require.NotEmpty(t, col.spans("TokenByHash"), "the queries of requests are traced by name")
	require.Equal(t, "abc def", col.header.Get("X-Collector-Token"))
	require.Equal(t, "/v1/traces", col.path)
}

func TestWantsTraces(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		env     map[string]string
		want    bool
		problem string
	}{
		{},
		{env: map[string]string{"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"}},
		{env: map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, want: true},
		{env: map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, want: true},
		{env: map[string]string{"OTEL_TRACES_EXPORTER": "otlp"}, want: true},
		{env: map[string]string{"OTEL_TRACES_EXPORTER": "console, otlp"}, want: true},
		{env: map[string]string{"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}},
		{env: map[string]string{"OTEL_TRACES_EXPORTER": "zipkin"}, problem: "zipkin"},
		{env: map[string]string{"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}},
		{env: map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, problem: "grpc"},
		{env: map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
			"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, want: true},
	} {
		wanted, problem := wantsTraces(func(name string) string { return c.env[name] })
		require.Equal(t, c.want, wanted, c.env)
		require.Contains(t, problem, c.problem)
		require.Equal(t, c.problem == "", problem == "", c.env)
	}
}

func TestOTLP(t *testing.T) {
	t.Parallel()
	send := func(t *testing.T, env map[string]string) error {
		client, err := newOTLPClient(func(name string) string { return env[name] })
		require.NoError(t, err)
		return otlptrace.NewUnstarted(client).ExportSpans(t.Context(), tracetest.SpanStubs{{Name: "work"}}.Snapshots())
	}
	t.Run("TriesAgainWhatIsAskedFor", func(t *testing.T) {
		t.Parallel()
		var n atomic.Int64
		c := newCollector(t, func(w http.ResponseWriter) bool {
			if n.Add(1) == 1 {
				w.WriteHeader(http.StatusServiceUnavailable)
				return false
			}
			return true
		})
		require.NoError(t, send(t, map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": c.URL + "/", "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"}))
		require.Len(t, c.spans("work"), 1)
		require.Equal(t, "/v1/traces", c.path)
		require.EqualValues(t, 2, n.Load())
	})
	t.Run("GivesUpInTime", func(t *testing.T) {
		t.Parallel()
		c := newCollector(t, func(w http.ResponseWriter) bool { w.WriteHeader(http.StatusTooManyRequests); return false })
		began := time.Now()
		require.ErrorContains(t, send(t, map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": c.URL, "OTEL_EXPORTER_OTLP_TIMEOUT": "50"}), "429")
		require.Less(t, time.Since(began), 5*time.Second)
		require.Empty(t, c.spans(""))
	})
	t.Run("AsksNoMoreAfterARefusal", func(t *testing.T) {
		t.Parallel()
		var n atomic.Int64
		c := newCollector(t, func(w http.ResponseWriter) bool { n.Add(1); w.WriteHeader(http.StatusForbidden); return false })
		require.ErrorContains(t, send(t, map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": c.URL}), "403")
		require.EqualValues(t, 1, n.Load())
	})
	t.Run("RefusesWhatItCannotFollow", func(t *testing.T) {
		t.Parallel()
		for name, value := range map[string]string{
			"ENDPOINT": "collector:4317", "TIMEOUT": "10s", "COMPRESSION": "zstd", "CERTIFICATE": "/does/not/exist",
		} {
			_, err := newOTLPClient(func(n string) string {
				if n == "OTEL_EXPORTER_OTLP_"+name {
					return value
				}
				return ""
			})
			require.Error(t, err, name)
		}
	})
}

// TestFlushIsBounded stops a process whose collector does not answer.
func TestFlushIsBounded(t *testing.T) {
	t.Parallel()
	hold := make(chan struct{})
	c := newCollector(t, func(http.ResponseWriter) bool { <-hold; return false })
	defer close(hold)
	client, err := newOTLPClient(func(name string) string {
		return map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": c.URL}[name]
	})
	require.NoError(t, err)
	var out bytes.Buffer
	tr := &traces{sdktrace.NewTracerProvider(sdktrace.WithBatcher(otlptrace.NewUnstarted(client)))}
	_, span := tr.Tracer("t").Start(t.Context(), "work")
	span.End()
	began := time.Now()
	tr.close(slog.New(slog.NewTextHandler(&out, nil)))
	require.Less(t, time.Since(began), flushWithin+5*time.Second)
	require.Contains(t, out.String(), "the last spans are lost")
	(*traces)(nil).close(nil)
	require.Nil(t, (*traces)(nil).provider())
}

// TestSpansAreMasked sends what libraries may put into spans (RC-150).
func TestSpansAreMasked(t *testing.T) {
	t.Parallel()
	key := "sk-ant-" + "api03-q7Zp2LmX9vTfR4kWn8YbHc3JdSg6AeUo1QiVx5MzNtPwKrEy0B"
	memory := tracetest.NewInMemoryExporter()
	p := sdktrace.NewTracerProvider(sdktrace.WithSyncer(maskedSpans{memory, mask.New()}))
	_, span := p.Tracer("t").Start(context.Background(), "call "+key)
	span.SetAttributes(attribute.String("a", key), attribute.StringSlice("b", []string{"x", key}), attribute.Int("n", 1), attribute.String("p", "${API_KEY}"))
	span.RecordError(errors.New("a user wrote this"))
	span.SetStatus(codes.Error, "a user wrote this")
	span.AddEvent("e")
	span.End()
	s := memory.GetSpans()[0]
	require.Equal(t, "call ***", s.Name)
	require.Equal(t, []attribute.KeyValue{
		attribute.String("a", "***"), attribute.StringSlice("b", []string{"x", "***"}), attribute.Int("n", 1), attribute.String("p", "${API_KEY}"),
	}, s.Attributes)
	require.Equal(t, sdktrace.Status{Code: codes.Error}, s.Status)
	require.Equal(t, []attribute.KeyValue{attribute.String("exception.type", "*errors.errorString")}, s.Events[0].Attributes)
}

func TestQueryName(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string]string{
		"-- name: RunHistory :many\nSELECT 1": "RunHistory", "SELECT 1": "SELECT", "": "query", "-- name:": "query",
	} {
		require.Equal(t, want, queryName(sql))
	}
}
