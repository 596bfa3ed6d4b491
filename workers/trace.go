package workers

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/trace"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/jobs/tracing"
	"github.com/weir-run/weir/workers/model"
	"github.com/weir-run/weir/workers/tool"
	"github.com/weir-run/weir/workers/turn"
)

// The spans of a worker: one for each attempt, called turn, and below it one
// for each model call and each tool call. Where the attempt leaves the run is
// an event of its span.
const (
	opTurn  = "turn"
	opAgent = "invoke_agent"
	opModel = "chat"
	opTool  = "execute_tool"

	eventEnd     = "end"
	eventPark    = "park"
	eventRelease = "release"
	eventFenced  = "fenced" // the run is another's, a write has shown
	eventLost    = "lost"   // the run is another's, or the lease is gone
)

// trace begins the attempt's span, in the trace in which the run was accepted.
func (t *attempt) trace(ctx context.Context) context.Context {
	r := t.run
	ctx, t.span = t.w.tracer.Start(tracing.WithParent(ctx, r.Traceparent), trace.SpanKindConsumer, opTurn, "")
	if t.span.IsRecording() {
		t.span.SetAttributes(
			tracing.Operation.String(opAgent), tracing.Agent.String(r.Agent), tracing.Conversation.String(r.ConversationRef),
			tracing.Tenant.String(r.TenantID), tracing.Run.String(r.ID.String()), tracing.Session.String(r.SessionID.String()),
			tracing.Epoch.Int64(int64(r.Epoch)), tracing.Attempt.Int64(int64(r.CallAttempts)), tracing.Worker.String(t.seat.member.id.String()),
		)
	}
	return ctx
}

// traceMove notes where a commit left the run.
func (t *attempt) traceMove(a *jobs.Advance, err error) {
	if !t.span.IsRecording() {
		return
	}
	switch {
	case errors.Is(err, jobs.ErrFenced):
		t.span.AddEvent(eventFenced)
	case err != nil:
	case a.End != nil:
		t.span.AddEvent(eventEnd, trace.WithAttributes(tracing.State.String(string(a.End.State)), tracing.Reason.String(a.End.Reason)))
		if a.End.State != db.RunStateCompleted && a.End.State != db.RunStateCancelled {
			tracing.Failed(t.span, a.End.Reason)
		}
	case a.Park != nil:
		t.span.AddEvent(eventPark, trace.WithAttributes(tracing.WaitKind.String(string(a.Park.Kind)), tracing.WaitMS.Int64(a.Park.For.Milliseconds())))
	case a.Release != nil:
		t.span.AddEvent(eventRelease, trace.WithAttributes(tracing.WaitMS.Int64(a.Release.After.Milliseconds())))
	}
}

// traceModel describes a model call that has come to its end.
func (t *attempt) traceModel(span trace.Span, m modelRef, req *model.Request, resp *model.Response, err error) {
	if !span.IsRecording() {
		return
	}
	span.SetAttributes(
		tracing.Operation.String(opModel), tracing.Provider.String(m.Provider), tracing.System.String(m.Provider),
		tracing.RequestModel.String(m.Model), tracing.MaxTokens.Int(req.MaxOutputTokens), tracing.Attempt.Int64(int64(t.run.CallAttempts)),
	)
	var failed *model.Error
	var aborted *model.AbortedError
	var use *model.Usage
	switch {
	case err == nil:
		use = &resp.Usage
		span.SetAttributes(tracing.ResponseModel.String(resp.Model), tracing.Finish.StringSlice([]string{string(resp.Finish)}))
	case errors.As(err, &aborted):
		use = &aborted.Usage
		tracing.Failed(span, "aborted")
	case errors.As(err, &failed):
		use = failed.Usage
		tracing.Failed(span, failed.Reason)
		if failed.Status != 0 {
			span.SetAttributes(tracing.HTTPStatus.Int(failed.Status))
		}
	default:
		tracing.Failed(span, "internal")
	}
	if use != nil {
		span.SetAttributes(
			tracing.InputTokens.Int64(use.Input+use.CacheRead+use.CacheWrite), tracing.OutputTokens.Int64(use.Output+use.Reasoning),
			tracing.CacheRead.Int64(use.CacheRead), tracing.CacheWrite.Int64(use.CacheWrite),
		)
	}
}

// traceTool describes a tool call that has come to its end.
func traceTool(span trace.Span, name, callID string, attempt int, failed *tool.Failure) {
	if !span.IsRecording() {
		return
	}
	span.SetAttributes(tracing.Operation.String(opTool), tracing.ToolName.String(name), tracing.ToolCall.String(callID), tracing.Attempt.Int(attempt))
	if failed == nil {
		span.SetAttributes(tracing.Status.String("ok"))
		return
	}
	span.SetAttributes(tracing.Status.String(string(failed.Kind)))
	tracing.Failed(span, string(failed.Kind))
}

// traceSettled gives a span to a call that never left the worker. The name of a
// tool that there is not is the model's invention, and stays out.
func (t *attempt) traceSettled(ctx context.Context, c *turn.Call, out *turn.ToolOutput) {
	if !t.w.tracer.On() {
		return
	}
	name := "unknown"
	if known, ok := t.agent.catalogue.Lookup(c.Tool); ok {
		name = known.Name
	}
	_, span := t.w.tracer.Start(ctx, trace.SpanKindInternal, opTool, name)
	defer span.End()
	var failed *tool.Failure
	if out.Error != nil {
		failed = &tool.Failure{Kind: tool.Kind(out.Error.Kind)}
	}
	traceTool(span, name, c.CallID, 0, failed)
}
