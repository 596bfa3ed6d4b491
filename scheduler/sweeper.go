// Package scheduler does what time starts: it ends waits when they are due,
// repairs what a crash left behind, and reaps dead workers. Each duty is one
// process's at a time, elected by an advisory lock; any process may take over
// at once.
package scheduler

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/jobs/bus"
)

const (
	sweepEvery  = time.Second
	purgeEvery  = time.Minute
	sweepRows   = 500
	standBy     = time.Second // between tries for the sweeper's lock
	sweepWithin = 20 * time.Second
	hangLimit   = 5 * time.Second // without a ping of the one who leads
)

// The kinds of repair the sweeper counts. Without faults all stay 0.
const (
	RepairNudge    = "nudge"    // an admitted run whose job was lost
	RepairOrphan   = "orphan"   // a run under a worker that is gone
	RepairDeadline = "deadline" // a run past its deadline that its worker did not stop
	RepairLane     = "lane"     // turns waiting behind no live head
	RepairWait     = "wait"     // a wait nobody ended in time
)

// Sweeper keeps time and repairs from the rows.
type Sweeper struct {
	pool    *pgxpool.Pool
	direct  *pgx.ConnConfig
	queries *db.Queries
	runs    *jobs.Runs
	log     *slog.Logger
	repairs map[string]*atomic.Int64

	retention Retention
}

// NewSweeper makes a sweeper; nil for direct means that a pooler is in the way.
func NewSweeper(pool *pgxpool.Pool, direct *pgx.ConnConfig, runs *jobs.Runs, log *slog.Logger, keep Retention) *Sweeper {
	s := &Sweeper{pool: pool, direct: direct, queries: db.New(), runs: runs, log: log, repairs: map[string]*atomic.Int64{}, retention: keep}
	for _, k := range []string{RepairNudge, RepairOrphan, RepairDeadline, RepairLane, RepairWait} {
		s.repairs[k] = &atomic.Int64{}
	}
	return s
}

// Repairs are this process's counts, by kind.
func (s *Sweeper) Repairs() map[string]int64 {
	out := make(map[string]int64, len(s.repairs))
	for k, n := range s.repairs {
		out[k] = n.Load()
	}
	return out
}

// Run sweeps until ctx ends, whenever this process is the one that does.
func (s *Sweeper) Run(ctx context.Context) {
	for ctx.Err() == nil {
		if err := s.session(ctx); err != nil && ctx.Err() == nil {
			s.log.Debug("sweeper connection", "error", err)
		}
		pause(ctx, standBy)
	}
}

func (s *Sweeper) session(ctx context.Context) error {
	if s.direct == nil {
		t := newTerm(s.pool, "sweeper", sweeperKey)
		defer t.leave(ctx)
		return s.serve(ctx, t.leads, func(ctx context.Context) error {
			if leads, err := t.leads(ctx); !leads {
				return cmp.Or(err, errTermOver)
			}
			return nil
		})
	}
	conn, err := pgx.ConnectConfig(ctx, s.direct)
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(closing)
	}()
	// The lock goes with the connection.
	return s.serve(ctx, func(ctx context.Context) (bool, error) { return elect(ctx, conn, sweeperKey, hangLimit, true) }, conn.Ping)
}

var errTermOver = errors.New("another process has the duty")

// serve waits until this process leads and sweeps until still says that it does
// no longer.
func (s *Sweeper) serve(ctx context.Context, lead func(context.Context) (bool, error), still func(context.Context) error) error {
	for leads := false; !leads; {
		var err error
		if leads, err = lead(ctx); err != nil {
			return err
		}
		if !leads && !pause(ctx, standBy) {
			return context.Cause(ctx)
		}
	}
	leading, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Add(1)
	go func() {
		defer wg.Done()
		s.keepTime(leading)
	}()
	wg.Add(1)
	go func() {
		defer wg.Done()
		s.keepRows(leading)
	}()
	wg.Add(1)
	go func() {
		defer wg.Done()
		s.keepSmall(leading)
	}()
	for {
		if err := still(ctx); err != nil {
			stop(err)
			return err
		}
		if !pause(ctx, sweepEvery) {
			return context.Cause(ctx)
		}
	}
}

// keepRows repairs, again and again.
func (s *Sweeper) keepRows(ctx context.Context) {
	for {
		s.sweep(ctx)
		if !pause(ctx, sweepEvery) {
			return
		}
	}
}

// keepTime ends waits when they are due. It sleeps until the earliest, and
// looks again when one is stored.
func (s *Sweeper) keepTime(ctx context.Context) {
	stored := s.runs.Bus().Subscribe(bus.Waits, uuid.Nil)
	defer stored.Close()
	for ctx.Err() == nil {
		due, err := s.queries.WaitDue(ctx, s.pool, sweepRows)
		if err != nil {
			pause(ctx, sweepEvery)
			continue
		}
		refs := make([]jobs.Ref, len(due))
		for i, w := range due {
			refs[i] = jobs.Ref{ID: w.RunID, Session: w.SessionID, Parent: w.ParentRunID}
		}
		each(refs, func(ref jobs.Ref) error {
			_, err := s.runs.Expire(ctx, ref)
			return err
		}, s.log, "end a wait")
		if len(due) == sweepRows {
			continue
		}
		ms, err := s.queries.WaitNext(ctx, s.pool)
		if err != nil {
			ms = sweepEvery.Milliseconds()
		}
		// Never longer than a second: a test moves the clock without a word.
		t := time.NewTimer(min(time.Duration(max(ms, 1))*time.Millisecond, sweepEvery))
		select {
		case <-t.C:
		case <-stored.C:
		case <-ctx.Done():
		}
		t.Stop()
	}
}

// sweep repairs what the rows show to be wrong.
func (s *Sweeper) sweep(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, sweepWithin)
	defer cancel()
	if rows, err := s.queries.RunAdmittedUnclaimed(ctx, s.pool, db.RunAdmittedUnclaimedParams{Queues: jobs.Queues, MaxRows: sweepRows}); s.ok(err, RepairNudge) {
		refs := make([]jobs.Ref, len(rows))
		for i, r := range rows {
			refs[i] = jobs.Ref{ID: r.ID, Session: r.SessionID, Parent: r.ParentRunID}
		}
		s.repair(RepairNudge, refs, func(ref jobs.Ref) (bool, error) { return s.runs.Renudge(ctx, ref) })
	}
	if rows, err := s.queries.RunOfDeadWorker(ctx, s.pool, sweepRows); s.ok(err, RepairOrphan) {
		refs := make([]jobs.Ref, len(rows))
		holders := make(map[uuid.UUID]db.RunOfDeadWorkerRow, len(rows))
		for i, r := range rows {
			refs[i] = jobs.Ref{ID: r.ID, Session: r.SessionID, Parent: r.ParentRunID}
			holders[r.ID] = r
		}
		s.repair(RepairOrphan, refs, func(ref jobs.Ref) (bool, error) {
			h := holders[ref.ID]
			return s.runs.Reap(ctx, ref, *h.WorkerID, h.Counts, false)
		})
	}
	if rows, err := s.queries.RunPastDeadline(ctx, s.pool, sweepRows); s.ok(err, RepairDeadline) {
		refs := make([]jobs.Ref, len(rows))
		for i, r := range rows {
			refs[i] = jobs.Ref{ID: r.ID, Session: r.SessionID, Parent: r.ParentRunID}
		}
		s.repair(RepairDeadline, refs, func(ref jobs.Ref) (bool, error) { return s.runs.TimeOut(ctx, ref) })
	}
	if ids, err := s.queries.LaneStalled(ctx, s.pool, sweepRows); s.ok(err, RepairLane) {
		refs := make([]jobs.Ref, len(ids))
		for i, id := range ids {
			refs[i] = jobs.Ref{Session: id}
		}
		s.repair(RepairLane, refs, func(ref jobs.Ref) (bool, error) { return s.runs.PromoteLane(ctx, ref.Session) })
	}
	if n, err := s.queries.WaitOverdue(ctx, s.pool); s.ok(err, RepairWait) && n > 0 {
		s.repairs[RepairWait].Add(n) // the timekeeper is behind, or dead: a process of it that hangs shows here
	}
}

func (s *Sweeper) ok(err error, what string) bool {
	if err != nil {
		s.log.Warn("sweep", "repair", what, "error", err)
	}
	return err == nil
}

func (s *Sweeper) repair(kind string, refs []jobs.Ref, f func(jobs.Ref) (bool, error)) {
	each(refs, func(ref jobs.Ref) error {
		done, err := f(ref)
		if done {
			s.repairs[kind].Add(1)
			s.log.Warn("repaired", "repair", kind, "run_id", ref.ID, "session_id", ref.Session)
		}
		return err
	}, s.log, "repair "+kind)
}
