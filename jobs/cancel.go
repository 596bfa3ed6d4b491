package jobs

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/weir-run/weir/db"
)

// Ref locates a run among the rows an op has to lock with it. None of it ever
// changes.
type Ref struct {
	ID, Session uuid.UUID
	Parent      *uuid.UUID
	root        uuid.UUID
}

func (h Ref) lane() uuid.UUID { return h.Session }

func (h Ref) needs(n *needs) {
	n.sessions = append(n.sessions, h.Session)
	n.ending = append(n.ending, h.Session)
	n.gate = true
	n.runs = append(n.runs, h.ID)
	if h.Parent != nil {
		n.runs = append(n.runs, *h.Parent)
	}
}

// refOf finds a run; *NotFoundError when tenant has
// no such run. An empty tenant is the fleet's own view.
func (r *Runs) refOf(ctx context.Context, tenant string, id uuid.UUID) (Ref, error) {
	var row db.RunHeaderRow
	err := r.repeat(ctx, func() (err error) {
		row, err = r.queries.RunHeader(ctx, r.pool, id)
		return err
	})
	if errors.Is(err, pgx.ErrNoRows) || err == nil && tenant != "" && row.TenantID != tenant {
		return Ref{}, &NotFoundError{"run", id.String()}
	} else if err != nil {
		return Ref{}, err
	}
	return Ref{ID: id, Session: row.SessionID, Parent: row.ParentRunID, root: row.RootRunID}, nil
}

// Cancelled says what a cancel did.
type Cancelled struct {
	Status string // cancelled, cancelling (its worker has to confirm), already_ended
	State  db.RunState
}

// Cancel ends a queued or waiting run at once, and asks the worker of a running
// one to stop it at its next safe point. Sub-agents of the run end with it.
func (r *Runs) Cancel(ctx context.Context, tenant string, id uuid.UUID, reason string) (Cancelled, error) {
	h, err := r.refOf(ctx, tenant, id)
	if err != nil {
		return Cancelled{}, err
	}
	o := &cancelOp{Ref: h, reason: string(r.masker.Bytes([]byte(reason)))}
	if err := r.committer.do(ctx, o); err != nil {
		return Cancelled{}, err
	}
	if o.children {
		if _, err := r.endTree(ctx, h, func(id uuid.UUID) bool { return id != h.ID }, db.RunStateCancelled); err != nil {
			return Cancelled{}, err
		}
	}
	return o.out, nil
}

type cancelOp struct {
	Ref
	reason   string
	out      Cancelled
	children bool
}

func (o *cancelOp) apply(u *unit) error {
	r, err := u.run(o.ID)
	if err != nil {
		return err
	}
	// A cancel that is repeated ends what the first had no time for.
	o.children = r.OpenChildren > 0 && (!r.final() || r.State == db.RunStateCancelled)
	switch {
	case r.final():
		o.out = Cancelled{"already_ended", r.State}
		return nil
	case r.State == db.RunStateRunning:
		s, err := u.session(r.SessionID)
		if err != nil {
			return err
		}
		if r.CancelRequestedAt == nil {
			r.CancelRequestedAt = &u.now
			r.WakeSeq++
			r.dirty = true
			if s.isHead(r) {
				u.event(s, r.ID, statusEvent(PhaseCancelling))
			}
		}
		u.changes.control = append(u.changes.control, r.ID)
		o.out = Cancelled{"cancelling", r.State}
		return nil
	}
	if err := u.end(r, cancelEnding(o.reason)); err != nil {
		return err
	}
	o.out = Cancelled{"cancelled", r.State}
	return nil
}

func cancelEnding(reason string) Ending {
	if reason == "" {
		reason = "cancelled by a caller"
	}
	return failEnding(db.RunStateCancelled, ErrorContent{Kind: "cancelled", Message: reason})
}

// CancelEnding ends a run whose cancel its worker has confirmed; partial is
// the text that had been streamed.
func CancelEnding(partial string) Ending {
	return failEnding(db.RunStateCancelled, ErrorContent{Kind: "cancelled", Message: "cancelled by a caller", Partial: partial})
}

// FailEnding ends a run with an agent.error.
func FailEnding(c ErrorContent) Ending {
	state := db.RunStateFailed
	if c.Kind == "turn_timeout" {
		state = db.RunStateTimedOut
	}
	return failEnding(state, c)
}

// Kill ends a whole tree at once: every run of it that has not ended, running
// and queued ones too. Their epochs grow, so that a worker that cannot hear it
// still cannot write; the root is marked, so that nothing is spawned past it.
func (r *Runs) Kill(ctx context.Context, tenant string, root uuid.UUID) (int, error) {
	h, err := r.refOf(ctx, tenant, root)
	if err != nil {
		return 0, err
	}
	if h.root != h.ID {
		return 0, &StateError{h.ID, "part of a tree", "a root run"}
	}
	return r.endTree(ctx, h, func(uuid.UUID) bool { return true }, db.RunStateKilled)
}

// endTree ends those runs of a tree that pass the filter and descend from
// h.ID. It is a transaction of its own: the root first, then, in a later
// statement, whatever the tree holds.
func (r *Runs) endTree(ctx context.Context, h Ref, ends func(uuid.UUID) bool, state db.RunState) (int, error) {
	n := 0
	err := r.repeat(ctx, func() (err error) {
		n, err = r.tryEndTree(ctx, h, ends, state)
		return err
	})
	return n, err
}

func (r *Runs) tryEndTree(ctx context.Context, h Ref, ends func(uuid.UUID) bool, state db.RunState) (ended int, err error) {
	conn, err := r.pool.Acquire(ctx)
	if err != nil {
		return 0, err
	}
	defer conn.Release()
	u := r.committer.newUnit()
	// Sessions are locked before runs, and which they are is known only with
	// the root locked: so the tree is read first, locked, and read again.
	parents := map[uuid.UUID]uuid.UUID{} // of all runs: one that ended may have children that did not
	var ids []uuid.UUID                  // of those that had not ended, parents first
	read := func() (n needs, err error) {
		rows, err := r.queries.UnitTreeRuns(ctx, conn, h.root)
		for _, row := range rows {
			if _, ok := parents[row.ID]; ok {
				continue
			}
			parents[row.ID] = orZero(row.ParentRunID)
			if !row.Final {
				ids = append(ids, row.ID)
				n.runs, n.sessions = append(n.runs, row.ID, orZero(row.ParentRunID)), append(n.sessions, row.SessionID)
			}
		}
		return n, err
	}
	n, err := read()
	if err != nil {
		return 0, err
	}
	n.runs, n.sessions = append(n.runs, h.root, h.ID), append(n.sessions, h.Session)
	n.ending, n.gate = n.sessions, true
	err = u.load(ctx, conn.Conn(), &n, treeWait)
	defer func() {
		if err != nil {
			rollback(conn)
		}
	}()
	if err != nil {
		return 0, err
	}
	grown, err := read()
	if err != nil {
		return 0, err
	}
	if len(grown.runs) > 0 { // spawned before the root was locked
		if err := u.holdMore(ctx, conn.Conn(), grown.sessions, grown.runs); err != nil {
			return 0, err
		}
	}
	if state == db.RunStateKilled {
		root, err := u.run(h.root)
		if err != nil {
			return 0, err
		}
		if root.KilledAt == nil {
			root.KilledAt, root.dirty = &u.now, true
		}
	}
	below := func(id uuid.UUID) bool {
		for id != uuid.Nil {
			if id == h.ID {
				return true
			}
			id = parents[id]
		}
		return false
	}
	// Leaves first: an end wakes its parent only while that is unfinished.
	for i := len(ids) - 1; i >= 0; i-- {
		if !ends(ids[i]) || !below(ids[i]) {
			continue
		}
		run, err := u.run(ids[i])
		if err != nil {
			return 0, err
		}
		if run.final() {
			continue
		}
		run.Epoch++
		kind, message := "killed", "killed by an operator"
		if state == db.RunStateCancelled {
			kind, message = "cancelled", "its parent was cancelled"
		}
		if err := u.end(run, failEnding(state, ErrorContent{Kind: kind, Message: message})); err != nil {
			return 0, err
		}
		u.changes.control = append(u.changes.control, run.ID)
		ended++
	}
	// A parent that was woken and then ended needs no job.
	u.nudges = keep(u.nudges, func(j nudge) bool { row := u.runs[j.run]; return row == nil || !row.final() })
	uncertain, err := u.flush(ctx, conn.Conn(), r.insert, r.embed)
	if uncertain {
		_ = conn.Conn().Close(ctx)
		err = r.committer.settle(context.WithoutCancel(ctx), u, err)
	}
	if err != nil {
		return 0, fmt.Errorf("end tree of run %s: %w", h.root, err)
	}
	r.committer.publish(u)
	return ended, nil
}

func keep[T any](s []T, f func(T) bool) []T {
	out := s[:0]
	for _, v := range s {
		if f(v) {
			out = append(out, v)
		}
	}
	return out
}
