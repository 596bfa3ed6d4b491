package jobs

import (
	"context"
	"errors"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/weir-run/weir/db"
)

// MaxLosses is how many workers a run may lose at one step: after one less it
// is a suspect and runs alone, and only a death in that solitude is the last.
const MaxLosses = 3

// Reap takes a run from a worker that is dead or has left. The loss counts
// unless the worker was draining or fenced itself.
func (r *Runs) Reap(ctx context.Context, h Ref, worker uuid.UUID, counts, solitary bool) (bool, error) {
	o := &reapOp{Ref: h, worker: worker, counts: counts, solitary: solitary}
	if err := r.committer.do(ctx, o); err != nil {
		return false, err // o may still be in work
	}
	return o.done, nil
}

type reapOp struct {
	Ref
	worker           uuid.UUID
	counts, solitary bool
	done             bool
}

func (o *reapOp) apply(u *unit) error {
	o.done = false
	r, err := u.run(o.ID)
	if err != nil {
		return err
	}
	if r.State != db.RunStateRunning || orZero(r.WorkerID) != o.worker {
		return nil // it moved on
	}
	if _, err := u.session(r.SessionID); err != nil {
		return err
	}
	losses, epoch := r.Losses, r.Epoch+1
	if o.counts {
		switch {
		case o.solitary:
			losses = MaxLosses
		case losses < MaxLosses-1:
			losses++
		}
	}
	switch {
	case r.CancelRequestedAt != nil:
		err = u.end(r, cancelEnding(""))
	case losses >= MaxLosses:
		err = u.end(r, failEnding(db.RunStatePoisoned, ErrorContent{
			Kind: "poisoned", Message: "the run lost its worker three times at one step and is set aside",
		}))
	default:
		if losses == MaxLosses-1 {
			r.Queue = QueueSuspect
		}
		r.WorkerID = nil
		u.admit(r)
	}
	if err != nil {
		return err
	}
	r.Losses, r.Epoch = losses, epoch
	o.done = true
	return nil
}

// GiveBack queues a run that worker holds in the database and not in its
// hands: the answer to the claim was lost.
func (r *Runs) GiveBack(ctx context.Context, id, worker uuid.UUID) (bool, error) {
	h, err := r.refOf(ctx, "", id)
	if err != nil {
		return false, err
	}
	return r.Reap(ctx, h, worker, false, false)
}

// Renudge gives an admitted run another job: the one it had is lost.
func (r *Runs) Renudge(ctx context.Context, h Ref) (bool, error) {
	o := &renudgeOp{Ref: h}
	if err := r.committer.do(ctx, o); err != nil {
		return false, err // o may still be in work
	}
	return o.done, nil
}

type renudgeOp struct {
	Ref
	done bool
}

func (o *renudgeOp) needs(n *needs) { n.runs = append(n.runs, o.ID) }

func (o *renudgeOp) apply(u *unit) error {
	r, err := u.run(o.ID)
	if err != nil {
		return err
	}
	o.done = r.State == db.RunStateQueued && r.AdmittedAt != nil
	if o.done {
		admitted := r.AdmittedAt
		u.admit(r)
		r.AdmittedAt = admitted
		r.Nudges++
	}
	return nil
}

// Wake tells a run that what it may wait for has happened. It is queued again
// if it waited for that; if it is about to, its park fails.
func (r *Runs) Wake(ctx context.Context, h Ref, by db.WaitKind) (bool, error) {
	o := &wakeOp{Ref: h, by: by}
	if err := r.committer.do(ctx, o); err != nil {
		return false, err // o may still be in work
	}
	return o.done, nil
}

type wakeOp struct {
	Ref
	by   db.WaitKind
	done bool
}

func (o *wakeOp) needs(n *needs) {
	n.runs = append(n.runs, o.ID)
	n.gate = true
}

func (o *wakeOp) apply(u *unit) error {
	r, err := u.run(o.ID)
	if err != nil {
		return err
	}
	if r.final() {
		o.done = false
		return nil
	}
	before := r.State
	u.wake(r, o.by)
	o.done = r.State != before
	return nil
}

// Expire wakes a run whose wait has come to its end, whatever it waits for.
func (r *Runs) Expire(ctx context.Context, h Ref) (bool, error) {
	o := &expireOp{Ref: h}
	if err := r.committer.do(ctx, o); err != nil {
		return false, err // o may still be in work
	}
	return o.done, nil
}

type expireOp struct {
	Ref
	done bool
}

func (o *expireOp) needs(n *needs) {
	n.runs = append(n.runs, o.ID)
	n.waits = append(n.waits, o.ID)
	n.gate = true
}

func (o *expireOp) apply(u *unit) error {
	r, err := u.run(o.ID)
	if err != nil {
		return err
	}
	o.done = r.State == db.RunStateWaiting && u.waitDue[o.ID]
	if o.done {
		r.WakeSeq++
		u.waitDrop = append(u.waitDrop, r.ID)
		u.enqueue(r, u.starts(r))
	}
	return nil
}

// TimeOut ends a run that its deadline has passed and whose worker did not
// stop it; a fence goes with it.
func (r *Runs) TimeOut(ctx context.Context, h Ref) (bool, error) {
	o := &timeOutOp{Ref: h}
	if err := r.committer.do(ctx, o); err != nil {
		return false, err // o may still be in work
	}
	return o.done, nil
}

type timeOutOp struct {
	Ref
	done bool
}

func (o *timeOutOp) apply(u *unit) error {
	o.done = false
	r, err := u.run(o.ID)
	if err != nil {
		return err
	}
	if r.State != db.RunStateRunning || r.DeadlineAt == nil || r.DeadlineAt.After(u.now) {
		return nil
	}
	epoch := r.Epoch + 1
	if err := u.end(r, FailEnding(ErrorContent{Kind: "turn_timeout", Message: "the turn passed its deadline"})); err != nil {
		return err
	}
	r.Epoch = epoch
	u.changes.control = append(u.changes.control, r.ID)
	o.done = true
	return nil
}

// PromoteLane repairs a lane that has turns waiting and no live head.
func (r *Runs) PromoteLane(ctx context.Context, session uuid.UUID) (bool, error) {
	head := uuid.Nil
	s, err := r.queries.SessionLane(ctx, r.pool, session)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	if s.HeadRunID != nil {
		head = *s.HeadRunID
	}
	o := &promoteOp{session: session, head: head}
	if err = r.committer.do(ctx, o); err != nil {
		return false, err // o may still be in work
	}
	return o.done, nil
}

type promoteOp struct {
	session, head uuid.UUID
	done          bool
}

func (o *promoteOp) lane() uuid.UUID { return o.session }

func (o *promoteOp) needs(n *needs) {
	n.sessions = append(n.sessions, o.session)
	n.ending = append(n.ending, o.session)
	n.gate = true
	if o.head != uuid.Nil {
		n.runs = append(n.runs, o.head)
	}
}

func (o *promoteOp) apply(u *unit) error {
	o.done = false
	s, err := u.session(o.session)
	if err != nil {
		return err
	}
	if s.Queued == 0 || orZero(s.HeadRunID) != o.head {
		return nil
	}
	if o.head != uuid.Nil {
		head, err := u.run(o.head)
		if err != nil {
			return err
		}
		if !head.final() {
			return nil
		}
	}
	if _, err := u.next(s); err != nil {
		return err
	}
	u.promote(s)
	o.done = true
	return nil
}
