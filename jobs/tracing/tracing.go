// Package tracing puts what API and workers do for a run into one trace.
//
// The trace begins with the request that brings the run, or with whoever sent
// it: a W3C traceparent. Accept stores the request's span with the run, in the
// run's row. It is not in the job's metadata, since a run outlives its jobs:
// reaper, sweeper and the lane's promotion insert new ones. Every attempt, on
// whatever worker, goes on from there.
//
// Where nobody collects spans a Tracer makes none and costs nothing, and the
// caller's trace context still passes through: into the log, and to the tools.
//
// A span holds ids, names of ours and numbers. It never holds what a user, a
// model or a tool said, and no text of an error.
package tracing

import (
	"context"
	"net/http"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// The attributes of spans. Those that the semantic conventions of OpenTelemetry
// name are spelled as there.
const (
	Tenant   = attribute.Key("weir.tenant.id")
	Run      = attribute.Key("weir.run.id")
	Session  = attribute.Key("weir.session.id")
	Epoch    = attribute.Key("weir.run.epoch")
	Attempt  = attribute.Key("weir.attempt") // of the call that is due: how often it failed before
	State    = attribute.Key("weir.run.state")
	Reason   = attribute.Key("weir.run.end_reason")
	WaitKind = attribute.Key("weir.wait.kind")
	WaitMS   = attribute.Key("weir.wait.ms")
	Worker   = attribute.Key("weir.worker.id")
	Status   = attribute.Key("weir.tool.status") // ok, or the kind of failure

	ErrorType = attribute.Key("error.type")

	HTTPMethod = attribute.Key("http.request.method")
	HTTPRoute  = attribute.Key("http.route")
	HTTPStatus = attribute.Key("http.response.status_code")
	RPCSystem  = attribute.Key("rpc.system.name")
	RPCMethod  = attribute.Key("rpc.method")

	Operation     = attribute.Key("gen_ai.operation.name")
	Agent         = attribute.Key("gen_ai.agent.name")
	Conversation  = attribute.Key("gen_ai.conversation.id")
	Provider      = attribute.Key("gen_ai.provider.name")
	System        = attribute.Key("gen_ai.system") // Provider, as it was called before
	RequestModel  = attribute.Key("gen_ai.request.model")
	MaxTokens     = attribute.Key("gen_ai.request.max_tokens")
	ResponseModel = attribute.Key("gen_ai.response.model")
	Finish        = attribute.Key("gen_ai.response.finish_reasons")
	InputTokens   = attribute.Key("gen_ai.usage.input_tokens")  // those of the two below among them
	OutputTokens  = attribute.Key("gen_ai.usage.output_tokens") // reasoning among them
	CacheRead     = attribute.Key("gen_ai.usage.cache_read.input_tokens")
	CacheWrite    = attribute.Key("gen_ai.usage.cache_creation.input_tokens")
	ToolName      = attribute.Key("gen_ai.tool.name")
	ToolCall      = attribute.Key("gen_ai.tool.call.id")
)

// Tracer makes spans. The zero Tracer makes none.
type Tracer struct{ tracer trace.Tracer }

// New returns a Tracer whose spans go to p, in the name of scope, a package. p
// may be nil.
func New(p trace.TracerProvider, scope string) Tracer {
	if p == nil {
		return Tracer{}
	}
	return Tracer{p.Tracer("github.com/weir-run/weir/" + scope)}
}

// On says whether spans are made.
func (t Tracer) On() bool { return t.tracer != nil }

var none trace.Span = noop.Span{}

// Start begins a span, a child of the one in ctx. It is called operation, or
// operation and object. Without spans it returns ctx as it is. Attributes are
// set afterwards, if the span is recording, so that nobody makes them in vain.
func (t Tracer) Start(ctx context.Context, kind trace.SpanKind, operation, object string) (context.Context, trace.Span) {
	if t.tracer == nil {
		return ctx, none
	}
	if object != "" {
		operation += " " + object
	}
	return t.tracer.Start(ctx, operation, trace.WithSpanKind(kind))
}

// Failed marks a span as failed, by a kind of failure.
func Failed(span trace.Span, kind string) {
	span.SetStatus(codes.Error, "")
	span.SetAttributes(ErrorType.String(kind))
}

var w3c propagation.TraceContext

// header is what is kept of a trace context; tracestate ends with the process.
const header = "traceparent"

// FromRequest returns ctx in the trace that a request's header names; ok says
// that it names one.
func FromRequest(ctx context.Context, h http.Header) (_ context.Context, ok bool) {
	if len(h["Traceparent"]) == 0 {
		return ctx, false
	}
	ctx = w3c.Extract(ctx, propagation.HeaderCarrier(h))
	return ctx, trace.SpanContextFromContext(ctx).IsValid()
}

// Parent is the traceparent by which others go on from the span in ctx; ""
// when there is none.
func Parent(ctx context.Context) string {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return ""
	}
	carrier := propagation.MapCarrier{}
	w3c.Inject(ctx, carrier)
	return carrier[header]
}

// WithParent returns ctx in the trace of a traceparent, or as it is when that
// is "" or none.
func WithParent(ctx context.Context, traceparent string) context.Context {
	if traceparent == "" {
		return ctx
	}
	return w3c.Extract(ctx, propagation.MapCarrier{header: traceparent})
}
