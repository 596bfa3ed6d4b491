package jobs

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs/tracing"
)

// RetryParams are a poisoned run to be released.
type RetryParams struct {
	TenantID string
	RunID    uuid.UUID
	// Agent of the run, as it was when the caller found that it may run turns.
	Terms Terms
}

// Retry puts a new run in place of a poisoned one, at the end of its session's
// lane: the same input under the same version of the agent, with the completed
// steps copied, so that they are not made again. A call that had started and
// did not end is made again: that is what the operator decides by it. The new
// run is a root of its own: whoever waited for the old one has its end. Its
// trace is that of the release, or without one that of the old run. A
// second retry of one run, within a day, is answered with the first. Errors:
// *NotFoundError, *StateError, *UnavailableError.
func (r *Runs) Retry(ctx context.Context, p RetryParams) (*Accepted, error) {
	var old db.RetrySourceRow
	err := r.repeat(ctx, func() (err error) {
		old, err = r.queries.RetrySource(ctx, r.pool, db.RetrySourceParams{TenantID: p.TenantID, ID: p.RunID})
		return err
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, &NotFoundError{"run", p.RunID.String()}
	} else if err != nil {
		return nil, err
	}
	// Only a final run has a source that cannot change under us; the op looks
	// again, with the run under lock.
	if old.State != db.RunStatePoisoned {
		return nil, &StateError{p.RunID, old.State, string(db.RunStatePoisoned)}
	}
	o := &retryOp{p: p, old: old, run: newID(), traceparent: cmp.Or(tracing.Parent(ctx), orEmpty(old.Traceparent))}
	o.key = &keyClaim{tenant: p.TenantID, scope: retryScope, key: p.RunID.String(), digest: retryDigest, run: o.run}
	if err := r.committer.do(ctx, o); err != nil {
		return nil, err
	}
	return &o.out, nil
}

// A retry claims an idempotency key of its own, named after the run it
// replaces: two operators who release one run start one.
const retryScope = "retry_of"

var retryDigest = []byte{0}

type retryOp struct {
	p   RetryParams
	old db.RetrySourceRow
	run uuid.UUID
	key *keyClaim
	out Accepted

	traceparent string
}

func (o *retryOp) lane() uuid.UUID { return o.old.SessionID }

func (o *retryOp) size() int { return 2 * len(o.old.Input) }

func (o *retryOp) needs(n *needs) {
	n.keys = append(n.keys, o.key)
	n.gate = true
	n.sessions = append(n.sessions, o.old.SessionID)
	n.runs = append(n.runs, o.p.RunID)
}

func (o *retryOp) apply(u *unit) (err error) {
	holder := u.keys[o.key.id()]
	if orZero(holder.RunID) != o.run {
		if len(holder.Result) == 0 { // another op of this unit claims it, and may yet be refused
			return errRequeue
		}
		o.out = Accepted{}
		if err := json.Unmarshal(holder.Result, &o.out); err != nil {
			return err
		}
		o.out.Duplicate = true
		return nil
	}
	defer func() {
		if err != nil {
			u.dropKeys = append(u.dropKeys, o.key) // what is refused is not stored
		}
	}()
	old, err := u.run(o.p.RunID)
	if err != nil {
		return err
	}
	s, err := u.session(old.SessionID)
	if err != nil {
		return err
	}
	if old.State != db.RunStatePoisoned {
		return &StateError{old.ID, old.State, string(db.RunStatePoisoned)}
	}
	timeLeft := o.p.Terms.TurnTimeout
	if timeLeft <= 0 {
		timeLeft = time.Duration(old.TimeLeftMs) * time.Millisecond
	}
	run := &runRow{created: true, input: o.old.Input, retryOf: old.ID, traceparent: o.traceparent}
	run.UnitRunLockRow = db.UnitRunLockRow{
		ID: o.run, TenantID: old.TenantID, Kind: old.Kind, State: db.RunStateQueued, Queue: queueOf(old.Kind), RootRunID: o.run,
		Agent: old.Agent, AgentVersion: old.AgentVersion, SessionID: s.ID, InLane: true, UserID: old.UserID, OwnerToken: old.OwnerToken,
		TimeLeftMs: timeLeft.Milliseconds(), Steps: o.old.Steps, ModelCalls: o.old.ModelCalls,
	}
	run.RequestSeq = u.event(s, run.ID, Event{EventRequest, o.old.Input})
	o.out = Accepted{RunID: run.ID, SessionID: s.ID, ConversationRef: s.ConversationRef, Agent: run.Agent, Seq: run.RequestSeq}
	u.enlist(s, run, &o.out, s.HeadRunID == nil && u.starts(run))
	u.newRuns = append(u.newRuns, run)
	u.put.copies.OldIds, u.put.copies.NewIds = append(u.put.copies.OldIds, old.ID), append(u.put.copies.NewIds, run.ID)
	stored, err := json.Marshal(o.out)
	if err != nil {
		return err
	}
	k := &u.put.keys
	k.TenantIds, k.Scopes = append(k.TenantIds, o.key.tenant), append(k.Scopes, o.key.scope)
	k.Keys, k.Results = append(k.Keys, o.key.key), append(k.Results, string(stored))
	return nil
}
