package jobs

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

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
	Traceparent     string         // of the trace it was accepted in; "" for none
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
// Errors: ErrNotQueued for a spare nudge, ErrWorkerGone; ErrUnknownOutcome when
// the connection broke: if worker owns the run now, nobody carries it.
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

// claimOp is no op like the others: claims have units of their own, which take
// one round trip, since whether a run may be claimed its row alone tells.
type claimOp struct {
	worker, id uuid.UUID
	out        *Run
}

var errClaim = errors.New("claims have units of their own")

func (o *claimOp) lane() uuid.UUID   { return o.id }
func (o *claimOp) needs(*needs)      {}
func (o *claimOp) apply(*unit) error { return errClaim }

func isClaim(it *item) bool { _, ok := it.op.(*claimOp); return ok }

// claim is the transaction of a unit of claims. It waits so long for each lock;
// with 0 it passes over runs that others hold. It reports whether COMMIT was on
// its way when it failed.
func (u *unit) claim(ctx context.Context, conn *pgx.Conn, items []*item, wait time.Duration) (errs []error, uncertain bool, err error) {
	var (
		p         db.Pipeline
		arg       db.UnitClaimParams
		live      []uuid.UUID
		workers   []db.UnitWorkerShareRow
		claimable []uuid.UUID
		sessions  []db.UnitRunSessionRow
		steps     []db.UnitStepsOfRow
	)
	errs = make([]error, len(items))
	asked := make(map[uuid.UUID]*claimOp, len(items))
	for i, it := range items {
		o := it.op.(*claimOp)
		if asked[o.id] != nil {
			errs[i] = errRequeue // two nudges of one run: the other's outcome decides
			continue
		}
		o.out = nil
		asked[o.id] = o
		arg.Ids, arg.WorkerIds = append(arg.Ids, o.id), append(arg.WorkerIds, o.worker)
	}
	u.begin(&p)
	if wait > 0 {
		p.LockTimeout(wait.String())
	}
	p.UnitWorkerShare(distinct(arg.WorkerIds), &workers)
	p.UnitClaim(arg, wait > 0, &u.claimed)
	p.UnitClaimable(arg.Ids, &claimable)
	p.UnitRunSession(arg.Ids, &sessions)
	p.UnitStepsOf(arg.Ids, &steps)
	p.Commit()
	if err := p.Send(ctx, conn); err != nil {
		return nil, isConnError(err), err
	}

	for _, w := range workers {
		if w.State == db.WorkerStateLive {
			live = append(live, w.ID)
		}
	}
	for _, r := range u.claimed {
		asked[r.ID].out = u.claimedRun(r)
	}
	for _, s := range sessions {
		if run := asked[s.ID].out; run != nil {
			run.ConversationRef, run.ExternalID = s.ConversationRef, orEmpty(s.ExternalID)
			run.ChannelType, run.ContextFromSeq = s.ChannelType, s.ContextFromSeq
		}
	}
	for _, s := range steps {
		run := asked[s.RunID].out
		if run == nil {
			continue
		}
		run.note(s.Seq, s.Status)
		run.Steps = append(run.Steps, Step{
			Seq: s.Seq, Kind: s.Kind, Status: s.Status, CallID: s.CallID, Name: s.Name, Attempt: s.Attempt, Output: s.Output, Epoch: s.Epoch,
		})
	}
	for i, it := range items {
		switch o := it.op.(*claimOp); {
		case errs[i] != nil, o.out != nil:
		case !slices.Contains(claimable, o.id):
			errs[i] = ErrNotQueued
		case !slices.Contains(live, o.worker):
			errs[i] = ErrWorkerGone
		default:
			errs[i] = errRowHeld
		}
	}
	return errs, false, nil
}

func (u *unit) claimedRun(r db.UnitClaimRow) *Run {
	return &Run{
		ID: r.ID, TenantID: r.TenantID, Kind: r.Kind, Epoch: r.Epoch, WakeSeq: r.WakeSeq, RootRunID: r.RootRunID,
		ParentRunID: r.ParentRunID, Depth: r.Depth, Agent: r.Agent, AgentVersion: r.AgentVersion, SessionID: r.SessionID,
		RequestSeq: r.RequestSeq, UserID: orEmpty(r.UserID), Input: r.Input, ModelCalls: r.ModelCalls,
		CallAttempts: r.CallAttempts, CallLimited: r.CallLimited, Losses: r.Losses, TimeLeft: r.DeadlineAt.Sub(u.now), StartedAt: *r.StartedAt,
		Traceparent: orEmpty(r.Traceparent),
	}
}
