package jobs

import (
	"context"
	"encoding/json"
	"maps"
	"time"

	"github.com/google/uuid"

	"github.com/weir-run/weir/db"
)

// Run is a claimed run: what its worker knows and may write under Epoch.
type Run struct {
	ID              uuid.UUID
	TenantID        string
	Kind            db.RunKind
	Epoch           int32
	WakeSeq         int32 // as last seen; a park must show it
	RootRunID       uuid.UUID
	ParentRunID     *uuid.UUID
	Depth           int32
	Agent           string
	AgentVersion    int32
	SessionID       uuid.UUID
	ConversationRef string
	ExternalID      string
	ChannelType     string
	RequestSeq      int64
	ContextFromSeq  int64
	UserID          string
	Input           json.RawMessage
	Steps           []Step
	ModelCalls      int32
	CallAttempts    int32 // failed attempts of the call that is due
	CallLimited     int32 // those among them that a rate limit refused
	Losses          int32
	TimeLeft        time.Duration  // until the deadline, at the claim
	done            int32          // completed steps that are stored
	started         map[int32]bool // steps that are stored and not done
	StartedAt       time.Time      // of the turn's first attempt, the database's clock
}

// Step is one recorded call.
type Step struct {
	Seq         int32
	Kind        db.StepKind
	Status      db.StepStatus
	CallID      string
	Name        string // the tool, or provider/model
	Attempt     int32
	InputDigest []byte
	Output      json.RawMessage
	Epoch       int32
	DurationMS  int64
}

// Claim makes worker the owner of a queued, admitted run, under a new epoch.
// Errors: ErrNotQueued for a spare nudge, ErrWorkerGone.
func (r *Runs) Claim(ctx context.Context, worker, id uuid.UUID) (*Run, error) {
	o := &claimOp{worker: worker, id: id}
	if err := r.committer.do(ctx, o); err != nil {
		return nil, err
	}
	return o.out, nil
}

// copy is what an op keeps of r: its caller may give up waiting for it, and go
// on.
func (r *Run) copy() *Run {
	c := *r
	c.started = maps.Clone(r.started)
	return &c
}

// note keeps what is stored of a step.
func (r *Run) note(seq int32, status db.StepStatus) {
	switch status {
	case db.StepStatusDone:
		r.done++
		delete(r.started, seq)
	case db.StepStatusStarted:
		if r.started == nil {
			r.started = map[int32]bool{}
		}
		r.started[seq] = true
	}
}

type claimOp struct {
	worker, id uuid.UUID
	out        *Run
}

func (o *claimOp) lane() uuid.UUID { return o.id }

func (o *claimOp) needs(n *needs) {
	n.workers = append(n.workers, o.worker)
	n.runs = append(n.runs, o.id)
	n.inputs = append(n.inputs, o.id)
}

func (o *claimOp) apply(u *unit) error {
	r, err := u.run(o.id)
	if err != nil {
		return err
	}
	if r.State != db.RunStateQueued || r.AdmittedAt == nil {
		return ErrNotQueued
	}
	if u.workers[o.worker] != db.WorkerStateLive {
		return ErrWorkerGone
	}
	r.State, r.WorkerID = db.RunStateRunning, &o.worker
	r.Epoch++
	r.Nudges = 0
	if r.StartedAt == nil {
		r.StartedAt = &u.now
	}
	if r.DeadlineAt == nil {
		deadline := u.now.Add(time.Duration(r.TimeLeftMs) * time.Millisecond)
		r.DeadlineAt = &deadline
	}
	r.dirty = true

	in := u.inputs[o.id]
	o.out = &Run{
		ID: r.ID, TenantID: r.TenantID, Kind: r.Kind, Epoch: r.Epoch, WakeSeq: r.WakeSeq, RootRunID: r.RootRunID,
		ParentRunID: r.ParentRunID, Depth: r.Depth, Agent: r.Agent, AgentVersion: r.AgentVersion, SessionID: r.SessionID,
		ConversationRef: in.ConversationRef, ExternalID: orEmpty(in.ExternalID), ChannelType: in.ChannelType, RequestSeq: r.RequestSeq,
		ContextFromSeq: in.ContextFromSeq, UserID: orEmpty(r.UserID), Input: in.Input, ModelCalls: r.ModelCalls,
		CallAttempts: r.CallAttempts, CallLimited: r.CallLimited, Losses: r.Losses, TimeLeft: r.DeadlineAt.Sub(u.now), StartedAt: *r.StartedAt,
	}
	o.out.ModelCalls = 0
	for _, s := range u.steps[o.id] {
		o.out.note(s.Seq, s.Status)
		if s.Kind == db.StepKindModel && s.Status == db.StepStatusDone {
			o.out.ModelCalls++
		}
		o.out.Steps = append(o.out.Steps, Step{
			Seq: s.Seq, Kind: s.Kind, Status: s.Status, CallID: s.CallID, Name: s.Name, Attempt: s.Attempt, Output: s.Output, Epoch: s.Epoch,
		})
	}
	r.Steps, r.ModelCalls = o.out.done, o.out.ModelCalls
	return nil
}
