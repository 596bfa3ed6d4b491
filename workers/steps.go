package workers

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/jobs/agentcfg"
	"github.com/weir-run/weir/workers/model"
	"github.com/weir-run/weir/workers/tool"
	"github.com/weir-run/weir/workers/turn"
)

const maxToolAttempts = 3 // of an idempotent tool that asks to be tried again

// modelRequest is a model.Request and what its making had to leave out.
type modelRequest struct {
	model.Request
	truncated bool // facts
}

func (t *attempt) modelRequest(next turn.CallModel) *modelRequest {
	messages := t.state.Context(slices.Clip(t.history), t.request)
	facts, truncated := t.facts.forModel()
	return &modelRequest{truncated: truncated, Request: model.Request{
		System: t.agent.instructions, Facts: facts, Tools: t.agent.catalogue.Models(), Messages: messages, Now: time.Now().UTC(),
		MaxOutputTokens: t.agent.maxOutputTokens, Parameters: t.agent.parameters,
		CallIndex: next.CallIndex, Attempt: int(t.run.CallAttempts),
	}}
}

// usageContent is the content of an agent.usage event (RC-124).
type usageContent struct {
	Provider   string `json:"provider"`
	Model      string `json:"model"`
	Input      int64  `json:"input"`
	CacheRead  int64  `json:"cacheRead"`
	CacheWrite int64  `json:"cacheWrite"`
	Output     int64  `json:"output"`
	Reasoning  int64  `json:"reasoning"`
	CostMicros *int64 `json:"costMicros"`
	Estimated  bool   `json:"estimated"`
	DurationMS int64  `json:"durationMs"`
	Attempt    int32  `json:"attempt"`
}

func (t *attempt) usage(callID string, m modelRef, answered string, u model.Usage, tookMS int64) jobs.Usage {
	if answered == "" {
		answered = m.Model
	}
	if u.CostMicros == nil {
		u.CostMicros = t.w.Models.Cost(m.Provider, answered, u)
	}
	return jobs.Usage{
		CallID: callID, Provider: m.Provider, Model: answered, Input: u.Input, CacheRead: u.CacheRead, CacheWrite: u.CacheWrite,
		Output: u.Output, Reasoning: u.Reasoning, CostMicros: u.CostMicros, Estimated: u.Estimated,
		Content: mustJSON(usageContent{m.Provider, answered, u.Input, u.CacheRead, u.CacheWrite, u.Output, u.Reasoning, u.CostMicros, u.Estimated, tookMS, t.run.CallAttempts}),
	}
}

// modelDone commits a finished model call. With its step travel the results of
// calls that are refused or touch our tables alone, and the start of every
// call that will leave.
func (t *attempt) modelDone(ctx context.Context, next turn.CallModel, m modelRef, resp *model.Response, a jobs.Advance) error {
	out := &turn.ModelOutput{
		Provider: m.Provider, Model: resp.Model, Text: resp.Text, Clarify: resp.Clarify, Finish: resp.Finish, Usage: resp.Usage,
	}
	if len(a.Usage) > 0 {
		out.Usage.CostMicros = a.Usage[len(a.Usage)-1].CostMicros
	}
	for _, c := range resp.Calls {
		out.Calls = append(out.Calls, turn.Call{CallID: newCallID(), Tool: c.Tool, Args: c.Args})
	}
	var results []jobs.Step
	for i := range out.Calls {
		c := &out.Calls[i]
		seq := next.Seq + 1 + int32(i)
		settled, started := t.judge(c, i, &a)
		switch {
		case settled != nil:
			t.traceSettled(ctx, c, settled)
			results = append(results, toolStep(seq, c, 0, settled))
			a.ToolCalls++
		case started:
			results = append(results, jobs.Step{Seq: seq, Kind: db.StepKindTool, Status: db.StepStatusStarted, CallID: c.CallID, Name: c.Tool, InputDigest: digest(c.Args)})
		}
		if !isFactTool(c.Tool) {
			a.Events = append(a.Events, t.requestEvent(out.Calls, i, next.Seq))
			if settled != nil {
				a.Events = append(a.Events, t.responseEvent(c, i, next.Seq, settled))
			}
		}
	}
	step := jobs.Step{
		Seq: next.Seq, Kind: db.StepKindModel, Status: db.StepStatusDone, CallID: "m" + strconv.Itoa(int(next.Seq)), Name: m.Provider + "/" + resp.Model,
		Attempt: t.run.CallAttempts, Output: mustJSON(out),
	}
	a.Steps = append([]jobs.Step{step}, results...)
	t.run.CallAttempts, t.run.CallLimited = 0, 0
	if len(out.Calls) == 0 {
		return t.finish(out, nil, a)
	}
	return t.advanceWith(a, out)
}

// judge settles a call that is not sent out, or says that it starts. Facts are
// read and written here: their rows commit with the step.
func (t *attempt) judge(c *turn.Call, index int, a *jobs.Advance) (settled *turn.ToolOutput, started bool) {
	if index >= t.agent.maxCalls {
		return failure(tool.TooManyCalls, "at most "+strconv.Itoa(t.agent.maxCalls)+" calls may be made at once"), false
	}
	if _, f := t.agent.catalogue.Check(c.Tool, c.Args); f != nil {
		if f.Kind == tool.SecretRefused { // the value is stored nowhere, the call's arguments included
			c.Args = tool.RedactFactWrite(c.Args)
		}
		return refusal(f), false
	}
	switch c.Tool {
	case tool.MemoryRead:
		return t.memoryRead(c, a), false
	case tool.MemoryWrite:
		return t.memoryWrite(c, a), false
	}
	return nil, true
}

func failure(kind tool.Kind, message string) *turn.ToolOutput {
	return &turn.ToolOutput{Error: &turn.ToolError{Kind: string(kind), Message: message}}
}

func refusal(f *tool.Failure) *turn.ToolOutput {
	out := failure(f.Kind, f.Message)
	out.Error.Rule = f.Rule
	return out
}

func toolStep(seq int32, c *turn.Call, attempt int32, out *turn.ToolOutput) jobs.Step {
	return jobs.Step{
		Seq: seq, Kind: db.StepKindTool, Status: db.StepStatusDone, CallID: c.CallID, Name: c.Tool, Attempt: attempt,
		Output: mustJSON(out), InputDigest: digest(c.Args),
	}
}

type toolRequestContent struct {
	CallID    string          `json:"callId"`
	Tool      string          `json:"tool"`
	Args      json.RawMessage `json:"args"`
	GroupID   string          `json:"groupId"`
	GroupSize int             `json:"groupSize"`
	Index     int             `json:"index"`
}

type toolResponseContent struct {
	CallID  string          `json:"callId"`
	Tool    string          `json:"tool"`
	GroupID string          `json:"groupId"`
	Index   int             `json:"index"`
	Data    json.RawMessage `json:"data,omitempty"`
	Error   *turn.ToolError `json:"error,omitempty"`
}

func (t *attempt) groupID(model int32) string {
	return "grp_" + t.run.ID.String() + "_" + strconv.Itoa(int(model))
}

func (t *attempt) requestEvent(group []turn.Call, i int, model int32) jobs.Event {
	c := &group[i]
	return jobs.Event{Type: jobs.EventToolRequest, Content: mustJSON(toolRequestContent{c.CallID, c.Tool, c.Args, t.groupID(model), len(group), i})}
}

func (t *attempt) responseEvent(c *turn.Call, i int, model int32, out *turn.ToolOutput) jobs.Event {
	return jobs.Event{Type: jobs.EventToolResponse, Content: mustJSON(toolResponseContent{c.CallID, c.Tool, t.groupID(model), i, out.Data, out.Error})}
}

// result is a finished turn's, as agent.execute returns it.
type result struct {
	Text         string      `json:"text"`
	FinishReason string      `json:"finishReason"` // stop, length or clarify
	Usage        model.Usage `json:"usage"`
	Steps        int         `json:"steps"`
}

type responseContent struct {
	Text         string `json:"text"`
	Final        bool   `json:"final"`
	FinishReason string `json:"finishReason"`
}

type clarifyContent struct {
	Text string `json:"text"`
}

// finish ends the turn with an answer, a question or an error.
func (t *attempt) finish(out *turn.ModelOutput, failed *jobs.ErrorContent, a jobs.Advance) error {
	if failed != nil {
		e := jobs.FailEnding(*failed)
		a.End = &e
		return t.end(a)
	}
	if out.Finish == model.FinishFilter && out.Text == "" {
		e := jobs.FailEnding(jobs.ErrorContent{Kind: "provider_error", Message: "the provider refused to answer", Reason: "content_filter"})
		a.End = &e
		return t.end(a)
	}
	r := result{Text: out.Text, FinishReason: "stop", Usage: t.total(a), Steps: int(t.run.ModelCalls + a.ModelCalls)}
	e := jobs.Ending{State: db.RunStateCompleted, Reason: "completed"}
	switch {
	case out.Clarify != "":
		r.Text, r.FinishReason, e.Reason, e.Phase = out.Clarify, "clarify", "clarify", jobs.PhaseClarify
		e.Last = jobs.Event{Type: jobs.EventClarify, Content: mustJSON(clarifyContent{out.Clarify})}
	default:
		if out.Finish == model.FinishLength {
			r.FinishReason = "length"
		}
		e.Last = jobs.Event{Type: jobs.EventResponse, Content: mustJSON(responseContent{out.Text, true, r.FinishReason})}
	}
	e.Result = mustJSON(r)
	if t.run.ChannelType == "agentex" {
		e.Message = mustJSON(map[string]any{
			"type": "text", "author": "agent", "style": "static", "format": "plain", "content": r.Text, "attachments": nil,
		})
	}
	a.End = &e
	return t.end(a)
}

// end commits the turn's end; a cancel that came first wins.
func (t *attempt) end(a jobs.Advance) error {
	err := t.advance(a)
	if errors.Is(err, jobs.ErrLookAgain) {
		e := jobs.CancelEnding("")
		a.End = &e
		return t.advance(a)
	}
	return err
}

// total sums the usage of the turn's model calls, with those of a.
func (t *attempt) total(a jobs.Advance) model.Usage {
	var sum model.Usage
	cost, priced := int64(0), true
	add := func(u model.Usage) {
		sum.Input += u.Input
		sum.CacheRead += u.CacheRead
		sum.CacheWrite += u.CacheWrite
		sum.Output += u.Output
		sum.Reasoning += u.Reasoning
		sum.Estimated = sum.Estimated || u.Estimated
		if u.CostMicros == nil {
			priced = false
		} else {
			cost += *u.CostMicros
		}
	}
	for out := range t.state.Models() {
		add(out.Usage)
	}
	for _, u := range a.Usage {
		add(model.Usage{Input: u.Input, CacheRead: u.CacheRead, CacheWrite: u.CacheWrite, Output: u.Output, Reasoning: u.Reasoning, CostMicros: u.CostMicros, Estimated: u.Estimated})
	}
	if priced {
		sum.CostMicros = &cost
	}
	return sum
}

// runTools makes the calls of a group that have no result yet, all at once.
// Each result commits by itself.
func (t *attempt) runTools(ctx context.Context, g turn.RunTools) error {
	type outcome struct {
		open  turn.Open
		out   *turn.ToolOutput
		retry time.Duration // the tool asks to be tried again after this; 0 does not
		ms    int64
	}
	results := make(chan outcome, len(g.Open))
	var wg sync.WaitGroup
	defer wg.Wait()
	waits := time.Duration(0)
	var first error
	commit := func(o outcome) error {
		st := toolStep(o.open.Seq, &o.open.Call, o.open.Attempt, o.out)
		st.DurationMS = o.ms
		return t.advance(jobs.Advance{
			Steps: []jobs.Step{st}, Events: []jobs.Event{t.responseEvent(&o.open.Call, o.open.Index, g.Model, o.out)}, ToolCalls: 1,
		})
	}
	running := 0
	for _, o := range g.Open {
		spec, known := t.agent.catalogue.Lookup(o.Call.Tool)
		idempotent := known && spec.Idempotency == agentcfg.Idempotent
		if o.Started && o.Epoch != t.run.Epoch { // an attempt that is over may have sent it
			o.Attempt++
			if !idempotent {
				out := failure(tool.Interrupted, "the call was interrupted; it may or may not have taken effect")
				t.traceSettled(ctx, &o.Call, out)
				if err := commit(outcome{open: o, out: out}); err != nil {
					return err
				}
				continue
			}
		}
		running++
		wg.Add(1)
		go func() {
			defer wg.Done()
			began := time.Now()
			r := t.w.callTool(ctx, t.agent, tool.Call{
				RunID: "run_" + t.run.ID.String(), CallID: o.Call.CallID, Tool: o.Call.Tool, Args: o.Call.Args,
				IdempotencyKey: o.Call.CallID, Attempt: int(o.Attempt),
			})
			oc := outcome{open: o, ms: time.Since(began).Milliseconds(), out: &turn.ToolOutput{Data: r.Output}}
			if r.Err != nil {
				oc.out = refusal(r.Err)
				if r.Err.Retryable && idempotent && o.Attempt+1 < maxToolAttempts {
					oc.retry = max(r.Err.RetryAfter, backoff(int(o.Attempt)))
				}
			}
			results <- oc
		}()
	}
	var lost cut
	var again []jobs.Step
	for range running {
		o := <-results
		switch {
		case ctx.Err() != nil && o.out.Error != nil:
			out := failure(tool.Cancelled, "the call was cut short")
			lost.steps = append(lost.steps, toolStep(o.open.Seq, &o.open.Call, o.open.Attempt, out))
			lost.events = append(lost.events, t.responseEvent(&o.open.Call, o.open.Index, g.Model, out))
			lost.toolCalls++
		case o.retry > 0 && ctx.Err() == nil:
			waits = max(waits, o.retry)
			again = append(again, jobs.Step{
				Seq: o.open.Seq, Kind: db.StepKindTool, Status: db.StepStatusStarted, CallID: o.open.Call.CallID, Name: o.open.Call.Tool, Attempt: o.open.Attempt,
			})
		default:
			if err := commit(o); err != nil && first == nil {
				first = err
			}
		}
	}
	if ctx.Err() != nil {
		return t.interrupted(ctx, first, lost)
	}
	if first != nil {
		return first
	}
	if waits > 0 {
		return t.park(jobs.Advance{Steps: again, Park: &jobs.Park{Kind: db.WaitKindTimer, For: waits}})
	}
	return nil
}
