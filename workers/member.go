// Package workers carries runs forward: it claims what a nudge names, makes
// the calls, and commits each step before the next.
package workers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-run/weir/db"
)

var (
	// errLeaseLost is the cause with which work is cancelled that this process
	// may not finish: it could not renew its lease, or was declared dead.
	errLeaseLost = errors.New("worker lost its lease")
	errStopped   = errors.New("worker stops")
)

const relock = 100 * time.Millisecond // between tries to hold the lock again

// member is a worker's place in the fleet: a row, a heartbeat, and an advisory
// lock whose loss shows a death at once. The lease is the truth; the lock only
// makes it faster. A member that lost its place is done; its process joins
// again under a new id.
type member struct {
	id      uuid.UUID
	pool    *pgxpool.Pool
	direct  *pgx.ConnConfig // nil: no lock can be held
	queries *db.Queries
	log     *slog.Logger
	every   time.Duration
	lease   time.Duration
	lockKey int64

	ctx    context.Context // ends, with a cause, when the place is lost or given up
	cancel context.CancelCauseFunc
	locked atomic.Bool
	renew  chan struct{} // asks for a heartbeat now
	look   chan struct{} // asks for a look at the runs held
	wanted chan string   // what an operator wants: quiet, drain
	owed   string        // of it, by the id that the process had before
	wg     sync.WaitGroup
}

// memberParams describe a worker to the fleet.
type memberParams struct {
	Before            uuid.UUID // the id it had until it lost its lease, if it did
	Hostname, Version string
	PID               int
	Queues            []Queue
	Slots             int
	Solitary          bool
}

func join(ctx context.Context, pool *pgxpool.Pool, direct *pgx.ConnConfig, log *slog.Logger, every, lease time.Duration, p memberParams) (*member, error) {
	m := &member{
		id: uuid.Must(uuid.NewV7()), pool: pool, direct: direct, queries: db.New(), every: every, lease: lease, renew: make(chan struct{}, 1),
		look: make(chan struct{}, 1), wanted: make(chan string, 2),
	}
	m.log = log.With("worker_id", m.id)
	row := db.WorkerInsertParams{
		ID: m.id, Hostname: p.Hostname, Pid: int32(p.PID), Version: p.Version, Slots: int32(p.Slots), Solitary: p.Solitary, LeaseMs: lease.Milliseconds(),
		Before: p.Before,
	}
	for _, q := range p.Queues {
		row.Queues, row.QueueSlots = append(row.Queues, q.Name), append(row.QueueSlots, int32(q.Slots))
	}
	inserted, err := m.queries.WorkerInsert(ctx, pool, row)
	if err != nil {
		return nil, fmt.Errorf("join the fleet: %w", err)
	}
	m.lockKey, m.owed = inserted.LockKey, inserted.Wanted
	m.ctx, m.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	m.wg.Go(m.heartbeats)
	if direct == nil {
		return m, nil
	}
	ready := make(chan struct{})
	m.wg.Go(func() { m.holdLock(ready) })
	select { // until the lock is held a death is seen by the lease alone
	case <-ready:
	case <-time.After(lease / 4):
	}
	return m, nil
}

// close ends the place; a worker that still holds runs has handed them back
// before.
func (m *member) close(ctx context.Context) {
	if m.ctx.Err() == nil {
		if err := m.queries.WorkerLeave(ctx, m.pool, m.id); err != nil {
			m.log.Warn("leave the fleet", "error", err)
		}
	}
	m.cancel(errStopped)
	m.wg.Wait()
}

// heartbeats renews the lease. The database's clock measures it for others;
// here a monotonic clock does, from before each renewal, so that this side
// always gives up first: after three quarters of the lease.
func (m *member) heartbeats() {
	renewed := time.Now()
	limit := m.lease * 3 / 4
	tick := time.NewTicker(m.every)
	defer tick.Stop()
	lapse := time.NewTimer(limit)
	defer lapse.Stop()
	type answer struct {
		wanted string
		err    error
	}
	result := make(chan answer, 1)
	var began time.Time
	obeyed := m.owed
	inFlight := false
	beat := func() {
		if inFlight {
			return
		}
		inFlight, began = true, time.Now()
		go func() {
			ctx, cancel := context.WithTimeout(m.ctx, limit)
			defer cancel()
			wanted, err := m.queries.WorkerHeartbeat(ctx, m.pool, m.id)
			result <- answer{wanted, err}
		}()
	}
	defer func() {
		if inFlight {
			<-result //nolint:errcheck // whatever it said, the place is gone
		}
	}()
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-tick.C:
			beat()
		case <-m.renew:
			beat()
		case a := <-result:
			inFlight = false
			if a.wanted != "" && a.wanted != obeyed {
				obeyed = a.wanted
				m.wanted <- a.wanted // there are two words, and a drain is the last
			}
			switch {
			case errors.Is(a.err, pgx.ErrNoRows): // declared dead, or deleted
				m.lost("declared dead")
				return
			case a.err != nil:
				m.log.Warn("heartbeat", "error", a.err)
			case time.Since(began) < limit: // an answer that took longer renewed nothing we may rely on
				renewed = began
				lapse.Reset(limit - time.Since(renewed))
			}
		case <-lapse.C:
			// A process that was stopped finds this timer due before it sees
			// anything else, and asks the row whether it is still alive.
			if time.Since(renewed) >= limit {
				m.lost("lease could not be renewed")
				return
			}
		}
	}
}

func (m *member) lost(why string) {
	m.log.Warn("lease lost", "reason", why)
	m.cancel(fmt.Errorf("%w: %s", errLeaseLost, why))
}

// holdLock keeps the advisory lock on a connection of its own, with a read
// pending, so that a break is noticed at once. Then it renews the lease
// through the pool, which tells the reaper that only the connection died, and
// locks again.
func (m *member) holdLock(ready chan<- struct{}) {
	for m.ctx.Err() == nil {
		err := m.holdOnce(func() {
			if ready != nil {
				close(ready)
				ready = nil
			}
		})
		if m.ctx.Err() != nil {
			return
		}
		if m.locked.Swap(false) { // once for each loss, not for each try
			m.log.Warn("lock connection", "error", err)
			select {
			case m.renew <- struct{}{}:
			default:
			}
		}
		select {
		case <-time.After(relock):
		case <-m.ctx.Done():
		}
	}
}

func (m *member) holdOnce(held func()) error {
	conn, err := pgx.ConnectConfig(m.ctx, m.direct)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	}()
	for { // never a blocking lock: it would pin a snapshot
		var ok bool
		if err := conn.QueryRow(m.ctx, `SELECT pg_try_advisory_lock($1)`, m.lockKey).Scan(&ok); err != nil {
			return err
		}
		if ok {
			break
		}
		select {
		case <-time.After(10 * time.Millisecond): // a reaper was just looking
		case <-m.ctx.Done():
			return context.Cause(m.ctx)
		}
	}
	m.locked.Store(true)
	held()
	_, err = conn.WaitForNotification(m.ctx) // nothing is listened to: it returns when the connection breaks
	if err == nil {
		err = errors.New("unexpected notification")
	}
	return err
}
