package workers

import (
	"context"

	"go.opentelemetry.io/otel/trace"

	"github.com/weir-run/weir/jobs/tracing"
	"github.com/weir-run/weir/workers/tool"
)

// callTool makes a call that leaves the process. A tool that the agent no
// longer has cannot be called: its name came from a stored step.
func (w *Worker) callTool(ctx context.Context, a *agent, c tool.Call) tool.Result {
	t, ok := a.catalogue.Lookup(c.Tool)
	if !ok {
		return tool.Result{Err: &tool.Failure{Kind: tool.UnknownTool, Message: "the agent has no such tool"}}
	}
	ctx, span := w.tracer.Start(ctx, trace.SpanKindInternal, opTool, t.Name)
	defer span.End()
	if t.Name != tool.WebFetch { // a model's choice of address gets no trace of ours
		c.Traceparent = tracing.Parent(ctx)
	}
	r := w.tools.Run(ctx, t, c)
	traceTool(span, t.Name, c.CallID, c.Attempt, r.Err)
	return r
}
