package workers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/trace"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/jobs/agentcfg"
	"github.com/weir-run/weir/jobs/tracing"
	"github.com/weir-run/weir/workers/model"
	"github.com/weir-run/weir/workers/turn"
)

const (
	maxLimited  = 100         // calls refused by a provider's rate limit, of one step
	maxFailed   = 4           // calls that failed otherwise, before the secondary model or the end
	maxBroken   = 10          // attempts that ended in an error of ours
	backoffBase = time.Second // doubled with each failure
	backoffMax  = time.Minute
	limitSpread = 2 * time.Second // over which those who waited for one limit return
	lastWrite   = 2 * time.Second // for what is worth storing although the run is another's
)

// attempt is one claim of a turn, carried forward step by step. It may be
// killed at any line: the steps already stored are not made again.
type attempt struct {
	w     *Worker
	seat  *seat
	run   *jobs.Run
	agent *agent
	log   *slog.Logger
	span  trace.Span // of the attempt

	state   *turn.State
	request string
	history []model.Message
	facts   *facts
	warned  bool // facts_truncated, once a turn
	over    bool // the run has moved on: nothing more is written
}

func (s *seat) carry(run *jobs.Run) {
	ctx, cancel := context.WithCancelCause(s.member.ctx)
	defer cancel(nil)
	ctx, stop := context.WithTimeoutCause(ctx, max(run.TimeLeft, 0), errTurnTimeout)
	defer stop()
	s.held.add(run.ID, run.Epoch, cancel)
	defer s.held.remove(run.ID, run.Epoch)
	t := &attempt{w: s.w, seat: s, run: run, log: s.w.Log.With("run_id", run.ID, "epoch", run.Epoch)}
	ctx = t.trace(ctx)
	defer t.span.End()
	defer func() {
		p := recover()
		if p != nil {
			t.log.ErrorContext(ctx, "panic in a turn", "panic", p, "stack", string(debug.Stack()))
			tracing.Failed(t.span, "panic")
		}
		if !t.over {
			t.handBack(ctx, p != nil)
		}
	}()
	if err := t.loop(ctx); err != nil && !t.over {
		t.log.WarnContext(ctx, "turn", "error", err)
	}
}

// handBack returns a run that this attempt could not carry on, with a backoff;
// one that breaks us again and again is ended.
func (t *attempt) handBack(ctx context.Context, broken bool) {
	writing, cancel := context.WithTimeout(t.seat.member.ctx, lastWrite)
	defer cancel()
	a := jobs.Advance{Park: &jobs.Park{Kind: db.WaitKindTimer, For: backoff(int(t.run.CallAttempts)), Failed: true}}
	if int(t.run.CallAttempts) >= maxBroken {
		e := jobs.FailEnding(jobs.ErrorContent{Kind: "internal", Message: "the turn failed inside the runtime", Retryable: true})
		a = jobs.Advance{End: &e}
	}
	_, err := t.w.Runs.Advance(writing, t.run, a)
	if errors.Is(err, jobs.ErrLookAgain) {
		a = jobs.Advance{Release: &jobs.Release{}}
		_, err = t.w.Runs.Advance(writing, t.run, a)
	}
	t.traceMove(&a, err)
	if err != nil && !errors.Is(err, jobs.ErrFenced) {
		t.log.WarnContext(ctx, "hand back", "broken", broken, "error", err) // the look hands it back
	}
}

func (t *attempt) loop(ctx context.Context) error {
	if err := t.prepare(ctx); err != nil {
		return t.interrupted(ctx, err, cut{})
	}
	for !t.over {
		if ctx.Err() != nil {
			return t.interrupted(ctx, nil, cut{})
		}
		next := t.state.Next(t.agent.limits)
		if t.w.drain.Load() && !t.owes(next) {
			return t.advance(jobs.Advance{Release: &jobs.Release{}})
		}
		var err error
		switch next := next.(type) {
		case turn.CallModel:
			err = t.callModel(ctx, next)
		case turn.RunTools:
			err = t.runTools(ctx, next)
		case turn.End:
			err = t.finish(next.Output, next.Error, jobs.Advance{})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// owes says whether next has calls that this attempt must make itself: it has
// committed their start, so another would have to take them for sent, and may
// not send them again.
func (t *attempt) owes(next turn.Action) bool {
	g, ok := next.(turn.RunTools)
	return ok && slices.ContainsFunc(g.Open, func(o turn.Open) bool {
		spec, known := t.agent.catalogue.Lookup(o.Call.Tool)
		return o.Started && o.Epoch == t.run.Epoch && !(known && spec.Idempotency == agentcfg.Idempotent)
	})
}

// prepare reads what the turn begins with: its agent as it was when the turn
// was accepted, the conversation before it, and the facts of its scope.
func (t *attempt) prepare(ctx context.Context) (err error) {
	if t.agent, err = t.w.agents.get(ctx, t.run.TenantID, t.run.Agent, t.run.AgentVersion); err != nil {
		return err
	}
	if t.state, err = turn.Read(t.run.Steps); err != nil {
		return err
	}
	var input struct {
		Text string `json:"text"`
	}
	if err := json.Unmarshal(t.run.Input, &input); err != nil {
		return fmt.Errorf("input: %w", err)
	}
	t.request = input.Text
	if t.run.RequestSeq > 1 { // the session has a past
		rows, err := t.w.queries.RunHistory(ctx, t.w.Pool, db.RunHistoryParams{
			SessionID: t.run.SessionID, FromSeq: t.run.ContextFromSeq, RunID: t.run.ID, RequestSeq: t.run.RequestSeq,
		})
		if err != nil {
			return fmt.Errorf("history: %w", err)
		}
		entries := make([]turn.Entry, len(rows))
		for i, r := range rows {
			entries[i] = turn.Entry{Seq: r.Seq, Type: r.Type, RunID: r.RunID, Content: r.Content}
		}
		if t.history, err = turn.History(entries); err != nil {
			return fmt.Errorf("history: %w", err)
		}
	}
	t.facts, err = t.loadFacts(ctx)
	return err
}

// advance commits, and follows what the commit brought back. A call that was
// made is stored even if the run was cancelled meanwhile; only a lost lease
// ends the wait for the database.
func (t *attempt) advance(a jobs.Advance) error { return t.advanceWith(a, nil) }

// advanceWith spares reading the output of a model step, the first of a.
func (t *attempt) advanceWith(a jobs.Advance, answered *turn.ModelOutput) error {
	gate, err := t.w.Runs.Advance(t.seat.member.ctx, t.run, a)
	t.traceMove(&a, err)
	if err != nil {
		if errors.Is(err, jobs.ErrFenced) {
			t.over = true
		}
		return err
	}
	for i, st := range a.Steps {
		st.Epoch = t.run.Epoch
		var out *turn.ModelOutput
		if i == 0 {
			out = answered
		}
		if err := t.state.Put(st, out, nil); err != nil {
			return err
		}
	}
	if a.Park != nil || a.End != nil || a.Release != nil {
		t.over = true
	} else if gate.CancelRequested {
		t.seat.held.interrupt(t.run.ID, errCancelRequested)
	}
	return nil
}

// cut is what an interrupted call leaves to be stored.
type cut struct {
	usage     []jobs.Usage
	steps     []jobs.Step
	events    []jobs.Event
	toolCalls int32
	partial   string // text that had been streamed
}

// interrupted ends an attempt whose context was cancelled, by its cause; when
// it was not, err stands.
func (t *attempt) interrupted(ctx context.Context, err error, c cut) error {
	cause := context.Cause(ctx)
	if cause == nil {
		return err
	}
	a := jobs.Advance{Usage: c.usage, Steps: c.steps, Events: c.events, ToolCalls: c.toolCalls}
	switch {
	case errors.Is(cause, errCancelRequested):
		e := jobs.CancelEnding(c.partial)
		a.End = &e
	case errors.Is(cause, errTurnTimeout):
		e := jobs.FailEnding(jobs.ErrorContent{Kind: "turn_timeout", Message: "the turn passed its time limit", Partial: c.partial})
		a.End = &e
	case errors.Is(cause, errDrained):
		// What was cut has no result: it is made again elsewhere.
		a = jobs.Advance{Usage: c.usage, Release: &jobs.Release{}}
	default:
		// The run is another's, or the lease is lost: nothing may be written but
		// the usage of calls really made.
		t.over = true
		t.span.AddEvent(eventLost)
		t.recordUsage(ctx, c.usage)
		return cause
	}
	err = t.advance(a)
	if errors.Is(err, jobs.ErrFenced) {
		t.recordUsage(ctx, c.usage)
	}
	return err
}

func (t *attempt) recordUsage(ctx context.Context, usage []jobs.Usage) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWrite)
	defer cancel()
	for _, use := range usage {
		if err := t.w.Runs.RecordUsage(ctx, t.run, use); err != nil {
			t.log.WarnContext(ctx, "record usage", "error", err)
		}
	}
}

// callModel makes one model call and commits its step with whatever needs no
// call of its own: the answer's end, refused tool calls, facts read and
// written.
func (t *attempt) callModel(ctx context.Context, next turn.CallModel) error {
	target := t.agent.primary
	if t.failures() >= maxFailed && t.agent.secondary != nil {
		target = *t.agent.secondary
	}
	req := t.modelRequest(next)
	var warnings []jobs.Event
	if req.truncated && !t.warned {
		t.warned = true
		warnings = append(warnings, warning("facts_truncated", "facts beyond 32 KiB were left out of the context"))
	}
	resp, use, partial, err := t.ask(ctx, target, req, next)
	var blocked *blockedError
	if errors.As(err, &blocked) {
		return t.waitForLimit(blocked, jobs.Advance{Events: warnings})
	}
	if err != nil {
		var failed *model.Error
		if !errors.As(err, &failed) || ctx.Err() != nil {
			return t.interrupted(ctx, err, cut{usage: use, partial: partial})
		}
		if !failed.Retryable && t.agent.secondary != nil && target.name() != t.agent.secondary.name() {
			warnings = append(warnings, warning("model_fallback", "the secondary model answers: "+failed.Reason))
			target = *t.agent.secondary
			var more []jobs.Usage
			resp, more, partial, err = t.ask(ctx, target, req, next)
			use = append(use, more...)
			if err != nil && (!errors.As(err, &failed) || ctx.Err() != nil) {
				if errors.As(err, &blocked) {
					return t.waitForLimit(blocked, jobs.Advance{Events: warnings, Usage: use})
				}
				return t.interrupted(ctx, err, cut{usage: use, partial: partial})
			}
		}
		if err != nil {
			return t.modelFailed(target, failed, jobs.Advance{Usage: use, Events: warnings})
		}
	} else if target.name() != t.agent.primary.name() {
		warnings = append(warnings, warning("model_fallback", "the secondary model answers: the primary model failed repeatedly"))
	}
	return t.modelDone(ctx, next, target, resp, jobs.Advance{Usage: use, Events: warnings, ModelCalls: 1})
}

// failures counts the due call's failed attempts; to be refused by a rate
// limit is none.
func (t *attempt) failures() int { return int(t.run.CallAttempts - t.run.CallLimited) }

func (t *attempt) limitKey(m modelRef) string {
	if m.Provider == model.ProviderOffline {
		return t.run.SessionID.String()
	}
	return m.Provider + " " + m.BaseURL + " " + m.APIKeySecret
}

// ask makes the call. The usage it returns is of calls really made, whatever
// became of them; partial is the text of one that failed.
func (t *attempt) ask(ctx context.Context, m modelRef, req *modelRequest, next turn.CallModel) (_ *model.Response, _ []jobs.Usage, partial string, _ error) {
	key := t.limitKey(m)
	if wait := t.w.limits.blocked(t.run.TenantID, key); wait > 0 {
		return nil, nil, "", &blockedError{key, wait}
	}
	provider, err := t.w.provider(m)
	if err != nil {
		return nil, nil, "", &model.Error{Reason: "config", Message: err.Error()}
	}
	r := req.Request
	r.Model, r.RateLimitKey = m.Model, key
	var text strings.Builder
	ctx, span := t.w.tracer.Start(ctx, trace.SpanKindClient, opModel, m.Model)
	defer span.End()
	began := time.Now()
	resp, err := provider.Call(ctx, &r, func(delta string) { text.WriteString(delta) })
	t.traceModel(span, m, &r, resp, err)
	took := time.Since(began).Milliseconds()
	call := fmt.Sprintf("%d.%d.%d.%s", next.Seq, t.run.Epoch, t.run.CallAttempts, m.Model)
	if err == nil {
		return resp, []jobs.Usage{t.usage(call, m, resp.Model, resp.Usage, took)}, "", nil
	}
	// What a call consumed counts although it failed or was cut (RC-123).
	var failed *model.Error
	var aborted *model.AbortedError
	switch {
	case errors.As(err, &aborted):
		return nil, []jobs.Usage{t.usage(call, m, m.Model, aborted.Usage, took)}, text.String(), err
	case errors.As(err, &failed) && failed.Usage != nil:
		return nil, []jobs.Usage{t.usage(call, m, m.Model, *failed.Usage, took)}, text.String(), err
	}
	return nil, nil, text.String(), err
}

// blockedError says that nobody was called: the provider's key is blocked.
type blockedError struct {
	key  string
	wait time.Duration
}

func (e *blockedError) Error() string { return "the provider asked everyone to wait" }

// waitForLimit parks the run until its provider's key is free again.
func (t *attempt) waitForLimit(e *blockedError, a jobs.Advance) error {
	a.Park = &jobs.Park{Kind: db.WaitKindRateLimit, Key: e.key, For: e.wait + rand.N(limitSpread)}
	return t.park(a)
}

// park commits a park. One that is refused would sleep over something that
// happened: what it carried is stored, and the loop looks again.
func (t *attempt) park(a jobs.Advance) error {
	err := t.advance(a)
	if errors.Is(err, jobs.ErrLookAgain) {
		a.Park = nil
		return t.advance(a)
	}
	return err
}

// modelFailed parks the run until the call may succeed, or ends the turn.
func (t *attempt) modelFailed(m modelRef, e *model.Error, a jobs.Advance) error {
	rateLimit := e.Status == 429 || e.Status == 529 || e.Status == 503
	spent := int(t.run.CallLimited) >= maxLimited
	if !rateLimit {
		tries := maxFailed
		if t.agent.secondary != nil {
			tries = 2 * maxFailed
		}
		spent = t.failures() >= tries-1
	}
	if !e.Retryable || spent {
		end := jobs.FailEnding(jobs.ErrorContent{Kind: kindOf(e), Message: e.Error(), Reason: e.Reason, Retryable: e.Retryable})
		a.End = &end
		return t.advance(a)
	}
	wait := e.RetryAfter
	if wait <= 0 {
		wait = backoff(int(t.run.CallAttempts))
	}
	park := &jobs.Park{Kind: db.WaitKindTimer, Failed: true, For: wait}
	if rateLimit {
		key := e.RateLimitKey
		if key == "" {
			key = t.limitKey(m)
		}
		park.Kind, park.Key, park.Limit, park.Limited = db.WaitKindRateLimit, key, wait, true
		park.For = wait + rand.N(wait/10+time.Millisecond)
		t.w.limits.set(t.run.TenantID, key, wait)
		if t.run.CallLimited == 0 {
			a.Events = append(a.Events, warning("rate_limited_waiting", "the provider is rate limited; the turn waits"))
		}
	}
	a.Park = park
	return t.park(a)
}

func kindOf(e *model.Error) string {
	if e.Reason == "context_exhausted" {
		return "context_exhausted"
	}
	return "provider_error"
}

func backoff(failures int) time.Duration {
	d := min(backoffBase<<min(failures, 10), backoffMax)
	return d/2 + rand.N(d)
}

func warning(kind, message string) jobs.Event {
	return jobs.Event{Type: jobs.EventWarning, Content: mustJSON(map[string]string{"kind": kind, "message": message})}
}

func mustJSON(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("marshal %T: %v", v, err)) // only values made here
	}
	return b
}

func newCallID() string {
	return "call_" + strings.ReplaceAll(uuid.Must(uuid.NewV7()).String(), "-", "")
}
