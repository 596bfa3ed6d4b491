package jobs

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/google/uuid"

	"github.com/weir-run/weir/db"
)

// Usage is what one model call consumed.
type Usage struct {
	CallID                                          string
	Provider, Model                                 string
	Input, CacheRead, CacheWrite, Output, Reasoning int64
	CostMicros                                      *int64 // nil when no price is known
	Estimated                                       bool
	// Content is the agent.usage event's content.
	Content json.RawMessage
}

// Fact is a remembered key and value, written by a step.
type Fact struct {
	Scope, ScopeID string // session or user, and which
	Key            string
	Value          json.RawMessage
	Kind           string
}

// Park makes a run wait without a worker.
type Park struct {
	Kind db.WaitKind
	Key  string        // the rate-limit key, for WaitKindRateLimit
	For  time.Duration // until it is woken at the latest
	// Failed says that the due call was made and failed: its attempts grow.
	Failed bool
	// Limited says that a rate limit refused it.
	Limited bool
	// Limit blocks Key for everyone as long as this; 0 sets no limit.
	Limit time.Duration
}

// Advance is what one attempt writes at once: steps with their events, and
// where the run goes from there. Only one of Park, End and Release is set;
// none of them means that the attempt goes on.
type Advance struct {
	Steps      []Step
	Events     []Event
	Usage      []Usage
	Facts      []Fact
	ModelCalls int32 // among Steps
	ToolCalls  int32
	Park       *Park
	End        *Ending
	Release    *Release
}

// Release hands a run back before it is done. It is no loss of the run's.
type Release struct {
	After time.Duration // backoff; 0 queues it at once
}

// Gate is what every write of an attempt brings back.
type Gate struct {
	CancelRequested bool
}

// Advance commits a step. ErrFenced means that the run is not the caller's any
// more; ErrLookAgain that nothing was written: a park would have slept over a
// wake-up or waited for no child, or an answer came after a cancel. run.WakeSeq
// follows the database.
func (r *Runs) Advance(ctx context.Context, run *Run, a Advance) (Gate, error) {
	o := &advanceOp{run: run.copy(), a: a}
	for i := range a.Steps {
		a.Steps[i].Output = r.masker.Bytes(a.Steps[i].Output)
	}
	for i := range a.Events {
		a.Events[i].Content = r.masker.Bytes(a.Events[i].Content)
	}
	for i := range a.Facts {
		a.Facts[i].Value = r.masker.Bytes(a.Facts[i].Value)
	}
	if a.End != nil {
		e := *a.End
		e.Result, e.Error = r.masker.Bytes(e.Result), r.masker.Bytes(e.Error)
		e.Last.Content, e.Message = r.masker.Bytes(e.Last.Content), r.masker.Bytes(e.Message)
		o.a.End = &e
	}
	err := r.committer.do(ctx, o)
	if err == nil {
		for i := range a.Steps {
			run.note(a.Steps[i].Seq, a.Steps[i].Status)
		}
		run.ModelCalls += a.ModelCalls
	}
	if err != nil && !errors.Is(err, ErrLookAgain) {
		return Gate{}, err // o may still be in work
	}
	run.WakeSeq = o.wakeSeq
	return o.gate, err
}

type advanceOp struct {
	run     *Run
	a       Advance
	gate    Gate
	wakeSeq int32
}

func (o *advanceOp) lane() uuid.UUID { return o.run.SessionID }

func (o *advanceOp) size() (n int) {
	for _, st := range o.a.Steps {
		n += len(st.Output)
	}
	for _, e := range o.a.Events {
		n += len(e.Content)
	}
	for _, f := range o.a.Facts {
		n += len(f.Value)
	}
	if e := o.a.End; e != nil {
		n += len(e.Result) + len(e.Error) + len(e.Last.Content) + len(e.Message)
	}
	return n
}

func (o *advanceOp) needs(n *needs) {
	n.sessions = append(n.sessions, o.run.SessionID)
	n.runs = append(n.runs, o.run.ID)
	if o.a.End != nil {
		n.ending = append(n.ending, o.run.SessionID)
		n.gate = true
		if o.run.ParentRunID != nil {
			n.runs = append(n.runs, *o.run.ParentRunID)
		}
	}
	for _, use := range o.a.Usage {
		n.usage = append(n.usage, usageKey{o.run.ID, use.CallID})
	}
}

func (o *advanceOp) apply(u *unit) error {
	r, s, err := u.owned(o.run.ID, o.run.Epoch)
	if err != nil {
		return err
	}
	o.wakeSeq = r.WakeSeq
	o.gate.CancelRequested = r.CancelRequestedAt != nil
	if p := o.a.Park; p != nil && (r.WakeSeq != o.run.WakeSeq || o.gate.CancelRequested || p.Kind == db.WaitKindChildren && r.OpenChildren == 0) {
		return ErrLookAgain
	}
	if o.a.End != nil && o.gate.CancelRequested && o.a.End.State == db.RunStateCompleted {
		return ErrLookAgain // the cancel came first: no answer follows it
	}
	if o.a.End != nil {
		// The end can refuse (its parent is held); ask before anything changes.
		if err := u.canEnd(r, s); err != nil {
			return err
		}
	}

	done := false
	r.Steps, r.ModelCalls = o.run.done, o.run.ModelCalls+o.a.ModelCalls
	for i := range o.a.Steps {
		st := &o.a.Steps[i]
		u.step(r, st, o.run.started[st.Seq])
		if st.Status == db.StepStatusDone {
			r.Steps++
			done = true
		}
	}
	s.modelCalls += int64(o.a.ModelCalls)
	s.tools += int64(o.a.ToolCalls)
	if done {
		r.progressed()
	}
	for i := range o.a.Usage {
		u.usage(r, s, &o.a.Usage[i])
	}
	for _, e := range o.a.Events {
		u.event(s, r.ID, e)
	}
	for _, f := range o.a.Facts {
		u.fact(r, f)
	}
	switch {
	case o.a.End != nil:
		return u.end(r, *o.a.End)
	case o.a.Park != nil:
		u.park(r, *o.a.Park)
	case o.a.Release != nil:
		u.release(r, *o.a.Release)
	}
	return nil
}

// step stores a step: a new row, or the end of one that was started before.
func (u *unit) step(r *runRow, st *Step, before bool) {
	key := stepKey{r.ID, st.Seq}
	if i, ok := u.putSteps[key]; ok { // started and done within one unit: one row
		p := &u.put.steps
		p.Statuses[i], p.Outputs[i], p.Attempts[i], p.DurationsMs[i] = string(st.Status), string(st.Output), st.Attempt, st.DurationMS
		return
	}
	if i, ok := u.putEnds[key]; ok { // started again and done
		p := &u.put.ends
		p.Statuses[i], p.Outputs[i], p.Attempts[i] = string(st.Status), string(st.Output), st.Attempt
		return
	}
	if before {
		p := &u.put.ends
		u.putEnds[key] = len(p.RunIds)
		p.RunIds, p.Seqs, p.Statuses = append(p.RunIds, r.ID), append(p.Seqs, st.Seq), append(p.Statuses, string(st.Status))
		p.Attempts, p.Outputs, p.Epochs = append(p.Attempts, st.Attempt), append(p.Outputs, string(st.Output)), append(p.Epochs, r.Epoch)
		return
	}
	p := &u.put.steps
	u.putSteps[key] = len(p.RunIds)
	p.RunIds, p.Seqs, p.TenantIds = append(p.RunIds, r.ID), append(p.Seqs, st.Seq), append(p.TenantIds, r.TenantID)
	p.Kinds, p.Statuses = append(p.Kinds, string(st.Kind)), append(p.Statuses, string(st.Status))
	p.CallIds, p.Names = append(p.CallIds, st.CallID), append(p.Names, st.Name)
	p.Attempts, p.InputDigests = append(p.Attempts, st.Attempt), append(p.InputDigests, st.InputDigest)
	p.Outputs, p.Epochs = append(p.Outputs, string(st.Output)), append(p.Epochs, r.Epoch)
	p.DurationsMs = append(p.DurationsMs, st.DurationMS)
}

// usage stores what a call consumed, once, whoever owns the run now (RC-123,
// RC-124).
func (u *unit) usage(r *runRow, s *sessionRow, use *Usage) {
	key := usageKey{r.ID, use.CallID}
	if u.knownUse[key] {
		return
	}
	u.knownUse[key] = true
	p := &u.put.usage
	p.RunIds, p.CallIds, p.TenantIds = append(p.RunIds, r.ID), append(p.CallIds, use.CallID), append(p.TenantIds, r.TenantID)
	p.SessionIds, p.UserIds, p.Agents = append(p.SessionIds, s.ID), append(p.UserIds, orEmpty(r.UserID)), append(p.Agents, r.Agent)
	p.Providers, p.Models = append(p.Providers, use.Provider), append(p.Models, use.Model)
	p.Inputs, p.CacheReads, p.CacheWrites = append(p.Inputs, use.Input), append(p.CacheReads, use.CacheRead), append(p.CacheWrites, use.CacheWrite)
	p.Outputs, p.Reasonings = append(p.Outputs, use.Output), append(p.Reasonings, use.Reasoning)
	cost := int64(-1)
	if use.CostMicros != nil {
		cost = *use.CostMicros
		s.costs += cost
	}
	p.CostsMicros, p.Estimateds = append(p.CostsMicros, cost), append(p.Estimateds, use.Estimated)
	s.inputTokens += use.Input + use.CacheRead + use.CacheWrite
	s.outputs += use.Output + use.Reasoning
	u.event(s, r.ID, Event{EventUsage, use.Content})
}

func (u *unit) fact(r *runRow, f Fact) {
	p := &u.put.facts
	key := [5]string{r.TenantID, r.Agent, f.Scope, f.ScopeID, f.Key}
	if i, ok := u.putFacts[key]; ok { // two writes of one key in one unit: the later wins whole
		p.Values[i], p.Kinds[i] = string(f.Value), f.Kind
		return
	}
	u.putFacts[key] = len(p.Keys)
	p.TenantIds, p.Agents = append(p.TenantIds, r.TenantID), append(p.Agents, r.Agent)
	p.Scopes, p.ScopeIds = append(p.Scopes, f.Scope), append(p.ScopeIds, f.ScopeID)
	p.Keys, p.Values, p.Kinds = append(p.Keys, f.Key), append(p.Values, string(f.Value)), append(p.Kinds, f.Kind)
}

func (u *unit) park(r *runRow, p Park) {
	if p.Failed {
		r.CallAttempts++
	}
	if p.Limited {
		r.CallLimited++
	}
	r.stopClock(u.now)
	r.State, r.WorkerID, r.AdmittedAt, r.NudgedAt = db.RunStateWaiting, nil, nil, nil
	kind := p.Kind
	r.WaitsFor = &kind
	r.dirty = true
	u.wait(r, kind, p.Key, p.For)
	if p.Limit > 0 {
		u.limit(r.TenantID, p.Key, p.Limit)
	}
}

func (u *unit) release(r *runRow, rel Release) {
	r.WorkerID = nil
	if rel.After <= 0 || r.CancelRequestedAt != nil { // a cancel is confirmed soon
		u.admit(r)
		return
	}
	kind := db.WaitKindTimer
	r.stopClock(u.now)
	r.State, r.AdmittedAt, r.NudgedAt, r.WaitsFor, r.dirty = db.RunStateWaiting, nil, nil, &kind, true
	u.wait(r, kind, "", rel.After)
}

// stopClock turns the deadline into time that is left: parked time does not
// count (RC-136).
func (r *runRow) stopClock(now time.Time) {
	if r.DeadlineAt != nil {
		r.TimeLeftMs = max(r.DeadlineAt.Sub(now).Milliseconds(), 0)
		r.DeadlineAt = nil
	}
}

func (u *unit) wait(r *runRow, kind db.WaitKind, key string, d time.Duration) {
	p := &u.put.waits
	p.RunIds, p.TenantIds = append(p.RunIds, r.ID), append(p.TenantIds, r.TenantID)
	p.Kinds, p.Keys, p.ForMs = append(p.Kinds, string(kind)), append(p.Keys, key), append(p.ForMs, d.Milliseconds())
	u.changes.waits = true
}

func (u *unit) limit(tenant, key string, d time.Duration) {
	p := &u.put.limits
	u.changes.limits = true
	for i := range p.Keys {
		if p.Keys[i] == key && p.TenantIds[i] == tenant {
			p.ForMs[i] = max(p.ForMs[i], d.Milliseconds())
			return
		}
	}
	p.TenantIds, p.Keys, p.ForMs = append(p.TenantIds, tenant), append(p.Keys, key), append(p.ForMs, d.Milliseconds())
}

// RecordUsage stores what a call consumed whose run the caller may have lost.
func (r *Runs) RecordUsage(ctx context.Context, run *Run, use Usage) error {
	return r.committer.do(ctx, &usageOp{run: run, use: use})
}

type usageOp struct {
	run *Run
	use Usage
}

func (o *usageOp) lane() uuid.UUID { return o.run.SessionID }

func (o *usageOp) needs(n *needs) {
	n.sessions = append(n.sessions, o.run.SessionID)
	n.runs = append(n.runs, o.run.ID)
	n.usage = append(n.usage, usageKey{o.run.ID, o.use.CallID})
}

func (o *usageOp) apply(u *unit) error {
	r, err := u.run(o.run.ID)
	if err != nil {
		return err
	}
	s, err := u.session(r.SessionID)
	if err != nil {
		return err
	}
	u.usage(r, s, &o.use)
	return nil
}
