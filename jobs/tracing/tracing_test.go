package tracing

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
)

const parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

func TestParent(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	require.Empty(t, Parent(ctx))
	for _, none := range []string{"", "00", "nonsense", "00-00000000000000000000000000000000-00f067aa0ba902b7-01", parent[:54]} {
		require.Empty(t, Parent(WithParent(ctx, none)), none)
	}
	require.Equal(t, parent, Parent(WithParent(ctx, parent)))
	require.Equal(t, parent[:54]+"0", Parent(WithParent(ctx, parent[:54]+"0")), "what was not sampled stays so")

	in, ok := FromRequest(ctx, http.Header{"Traceparent": {parent}})
	require.True(t, ok)
	require.Equal(t, parent, Parent(in))
	_, ok = FromRequest(ctx, http.Header{"Traceparent": {"nonsense"}})
	require.False(t, ok)
	_, ok = FromRequest(ctx, http.Header{})
	require.False(t, ok)
}

func TestTracer(t *testing.T) {
	t.Parallel()
	t.Run("GoesOnWithATrace", func(t *testing.T) {
		t.Parallel()
		memory := tracetest.NewInMemoryExporter()
		tracer := New(sdktrace.NewTracerProvider(sdktrace.WithSyncer(memory)), "test")
		require.True(t, tracer.On())
		ctx, span := tracer.Start(WithParent(t.Context(), parent), trace.SpanKindClient, "chat", "m")
		require.NotEqual(t, parent, Parent(ctx))
		require.Equal(t, parent[:36], Parent(ctx)[:36])
		Failed(span, "network")
		span.End()
		s := memory.GetSpans()[0]
		require.Equal(t, "chat m", s.Name)
		require.Equal(t, parent[36:52], s.Parent.SpanID().String())
		require.Contains(t, s.Attributes, ErrorType.String("network"))
	})
}

func TestIsFreeWhereNobodyCollects(t *testing.T) { // not parallel: it counts allocations
	tracer := New(nil, "test")
	require.False(t, tracer.On())
	type key struct{}
	ctx := context.WithValue(t.Context(), key{}, "some caller")
	object := "o"
	require.Zero(t, testing.AllocsPerRun(100, func() {
		in, _ := FromRequest(ctx, http.Header(nil))
		in, span := tracer.Start(WithParent(in, ""), trace.SpanKindServer, "operation", object)
		if span.IsRecording() {
			span.SetAttributes(ToolName.String(object))
		}
		span.AddEvent("event")
		Parent(in)
		span.End()
	}))
	in, _ := tracer.Start(WithParent(ctx, parent), trace.SpanKindServer, "operation", object)
	require.Equal(t, parent, Parent(in), "the caller's trace passes through")
}

func TestLogHandler(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	log := slog.New(LogHandler(slog.NewJSONHandler(&out, nil))).With("worker_id", "w")
	line := func(ctx context.Context) (l map[string]any) {
		out.Reset()
		log.WarnContext(ctx, "turn", "error", errors.New("no"))
		require.NoError(t, json.Unmarshal(out.Bytes(), &l))
		return l
	}
	l := line(WithParent(t.Context(), parent))
	require.Equal(t, parent[3:35], l["trace_id"])
	require.Equal(t, parent[36:52], l["span_id"])
	require.Equal(t, "w", l["worker_id"])
	require.NotContains(t, line(t.Context()), "trace_id")
}
