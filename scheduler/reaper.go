package scheduler

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
)

// Keys of the advisory locks that elect one process for a duty. The numbers of
// workers' own locks start at 1.
const (
	reaperKey  = -7_301_001
	sweeperKey = -7_301_002
)

const (
	lookEvery   = 100 * time.Millisecond // at all workers' locks
	leaseEvery  = 500 * time.Millisecond // at their leases, where there are no locks
	electEvery  = 200 * time.Millisecond
	lockGrace   = 250 * time.Millisecond // from a lost lock to a death, without a newer heartbeat
	maxPause    = time.Second            // between two answers of the database, for a process that may judge others
	reapChunk   = 500
	reapTimeout = 30 * time.Second
)

// Reaper declares workers dead and takes their runs from them. Any process may
// be the one that does; the others stand by.
type Reaper struct {
	pool    *pgxpool.Pool
	direct  *pgx.ConnConfig
	queries *db.Queries
	runs    *jobs.Runs
	log     *slog.Logger
	lease   time.Duration
}

// NewReaper makes a reaper. With nil for direct, where a pooler is in the way, it
// goes by the leases alone. lease is this process's own: it judges others only
// after the database has answered it on time for as long.
func NewReaper(pool *pgxpool.Pool, direct *pgx.ConnConfig, runs *jobs.Runs, log *slog.Logger, lease time.Duration) *Reaper {
	return &Reaper{pool: pool, direct: direct, queries: db.New(), runs: runs, log: log, lease: lease}
}

// Run looks after the fleet until ctx ends.
func (r *Reaper) Run(ctx context.Context) {
	steady := time.Now() // since when the database has answered on time
	for ctx.Err() == nil {
		err := r.session(ctx, &steady)
		if ctx.Err() != nil {
			return
		}
		r.log.Debug("reaper connection", "error", err)
		steady = time.Now()
		pause(ctx, electEvery)
	}
}

// sight is what this reaper saw of a worker on one unbroken connection.
type sight struct {
	held      bool // its lock, at some time
	freeSince time.Time
	heartbeat time.Time // when the lock was first seen free
}

// elect tries to take a duty's lock. A holder whose connection has been silent
// for as long as limit is a process that hangs (stopped, frozen, cut off): its
// backend is ended, and the lock is free at the next try. look says whether to
// look for that now.
func elect(ctx context.Context, conn *pgx.Conn, key int64, limit time.Duration, look bool) (leads bool, err error) {
	err = conn.QueryRow(ctx, `SELECT pg_try_advisory_lock($1)`, key).Scan(&leads)
	if err != nil || leads || !look {
		return leads, err
	}
	_, err = conn.Exec(ctx, `SELECT pg_terminate_backend(a.pid)
		FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
		WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
		  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
		  AND (l.classid::bigint << 32) | l.objid::bigint = $1
		  AND a.state_change < clock_timestamp() - $2::bigint * interval '1 millisecond'`, key, limit.Milliseconds())
	return false, err
}

// electorate is what a reaper looks through, and how it learns whether it leads.
func (r *Reaper) electorate(ctx context.Context) (look db.DBTX, leads func(context.Context) (bool, error), end func(), err error) {
	if r.direct == nil {
		t := newTerm(r.pool, "reaper", reaperKey)
		return r.pool, t.leads, func() { t.leave(ctx) }, nil
	}
	conn, err := pgx.ConnectConfig(ctx, r.direct)
	if err != nil {
		return nil, nil, nil, err
	}
	elected := false
	var looked time.Time // for a leader that hangs
	leads = func(ctx context.Context) (bool, error) {
		if elected {
			return true, nil
		}
		look := time.Since(looked) > standBy
		if look {
			looked = time.Now()
		}
		var err error
		elected, err = elect(ctx, conn, reaperKey, r.lease, look)
		return elected, err
	}
	return conn, leads, func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(closing)
	}, nil
}

func (r *Reaper) session(ctx context.Context, steady *time.Time) error {
	database, elected, end, err := r.electorate(ctx)
	if err != nil {
		return err
	}
	var reaping sync.WaitGroup
	defer reaping.Wait()
	defer end()
	seen := map[uuid.UUID]*sight{}
	busy := map[uuid.UUID]bool{}
	done := make(chan uuid.UUID, 64)
	last := time.Now()
	for {
		for drained := false; !drained; {
			select {
			case id := <-done:
				delete(busy, id)
			default:
				drained = true
			}
		}
		asking, cancel := context.WithTimeout(ctx, r.lease)
		leads, err := elected(asking)
		var rows []db.WorkerLocksRow
		if err == nil { // standbys look too: what they saw held counts when they lead
			rows, err = r.queries.WorkerLocks(asking, database)
		}
		cancel()
		if err != nil {
			return err
		}
		now := time.Now()
		if now.Sub(last) > maxPause { // the database, or this process, stood still: everybody gets a lease to return
			*steady = now
			clear(seen)
		}
		last = now
		maySay := now.Sub(*steady) >= r.lease
		for _, w := range rows {
			if busy[w.ID] {
				continue
			}
			dead := w.State == db.WorkerStateDead // by a reaper that died over it
			if !dead {
				why := r.judge(seen, w, now) // what it sees counts also before it may say so
				dead = why != "" && leads && maySay && r.declare(ctx, w, why)
			}
			if !dead || !leads {
				continue
			}
			busy[w.ID] = true
			reaping.Add(1)
			go func() {
				defer reaping.Done()
				r.reap(ctx, w)
				select {
				case done <- w.ID:
				case <-ctx.Done():
				}
			}()
		}
		wait := electEvery
		switch {
		case r.direct == nil:
			wait = leaseEvery
		case leads:
			wait = lookEvery
		}
		if !pause(ctx, wait) {
			return context.Cause(ctx)
		}
	}
}

// judge says why a worker is dead, "" when it is not: its lease has lapsed, or its lock, seen
// held before on this connection, is gone and no heartbeat came since.
func (r *Reaper) judge(seen map[uuid.UUID]*sight, w db.WorkerLocksRow, now time.Time) string {
	if w.Expired {
		return "lease lapsed"
	}
	if r.direct == nil { // its looks share no unbroken connection
		return ""
	}
	s := seen[w.ID]
	if s == nil {
		s = &sight{}
		seen[w.ID] = s
	}
	switch {
	case !w.Free:
		s.held, s.freeSince = true, time.Time{}
	case !s.held:
	case s.freeSince.IsZero() || !w.HeartbeatAt.Equal(s.heartbeat):
		s.freeSince, s.heartbeat = now, w.HeartbeatAt
	case now.Sub(s.freeSince) >= lockGrace:
		return "its connection is gone"
	}
	return ""
}

func (r *Reaper) declare(ctx context.Context, w db.WorkerLocksRow, why string) bool {
	_, err := r.queries.WorkerDeclareDead(ctx, r.pool, db.WorkerDeclareDeadParams{ID: w.ID, HeartbeatAt: w.HeartbeatAt})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return false // it showed a sign of life
	case err != nil:
		r.log.Warn("declare dead", "dead_worker", w.ID, "error", err)
		return false
	}
	r.log.Warn("worker is dead", "dead_worker", w.ID, "reason", why, "silent_ms", w.SilentMs)
	return true
}

// reap hands the runs of a dead worker on, in chunks. What a reaper that dies
// leaves is the next one's.
func (r *Reaper) reap(ctx context.Context, w db.WorkerLocksRow) {
	ctx, cancel := context.WithTimeout(ctx, reapTimeout)
	defer cancel()
	counts := w.State != db.WorkerStateDraining
	log := r.log.With("dead_worker", w.ID)
	// Read first: what is reaped gets a successor of its own.
	lost, err := r.queries.WorkerNudgesLost(ctx, r.pool, w.ID.String())
	if err != nil {
		log.Warn("reap", "error", err)
		return
	}
	n := 0
	for {
		rows, err := r.queries.RunHeldByDead(ctx, r.pool, db.RunHeldByDeadParams{WorkerID: &w.ID, MaxRows: reapChunk})
		if err != nil {
			log.Warn("reap", "error", err)
			return
		}
		if len(rows) == 0 {
			break
		}
		refs := make([]jobs.Ref, len(rows))
		for i, row := range rows {
			refs[i] = jobs.Ref{ID: row.ID, Session: row.SessionID, Parent: row.ParentRunID}
		}
		if !each(refs, func(ref jobs.Ref) error {
			_, err := r.runs.Reap(ctx, ref, w.ID, counts, w.Solitary)
			return err
		}, log, "reap") {
			return
		}
		n += len(rows)
	}
	if _, err := r.queries.WorkerJobsDiscard(ctx, r.pool, w.ID.String()); err != nil {
		log.Warn("discard nudges", "error", err)
		return
	}
	refs := make([]jobs.Ref, len(lost))
	for i, row := range lost {
		refs[i] = jobs.Ref{ID: row.ID, Session: row.SessionID, Parent: row.ParentRunID}
	}
	if !each(refs, func(ref jobs.Ref) error {
		_, err := r.runs.Renudge(ctx, ref)
		return err
	}, log, "renudge") {
		return
	}
	if err := r.queries.WorkerReaped(ctx, r.pool, w.ID); err != nil {
		log.Warn("reaped", "error", err)
		return
	}
	log.Info("worker reaped", "runs", n, "nudges", len(refs))
}

// each calls f for all refs at once, so that their changes share commits. It
// reports whether all passed.
func each(refs []jobs.Ref, f func(jobs.Ref) error, log *slog.Logger, what string) bool {
	var wg sync.WaitGroup
	errs := make([]error, len(refs))
	for i, ref := range refs {
		wg.Add(1)
		go func() {
			defer wg.Done()
			errs[i] = f(ref)
		}()
	}
	wg.Wait()
	ok := true
	for i, err := range errs {
		if err != nil {
			ok = false
			log.Warn(what, "run_id", refs[i].ID, "error", err)
		}
	}
	return ok
}

// pause waits; false means that ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
