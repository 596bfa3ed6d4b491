package jobs

import (
	"context"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/weir-run/weir/db"
)

// A worker that carries a run knows its row and its session's as its own last
// unit has left them, and nobody else writes them but who cancels, kills, reaps
// or accepts. So a small unit of steps need not read them again: it judges what
// it knows, and takes one round trip whose first statements lock the rows and
// fail unless they are of the versions it knows. Then the unit is made again as
// any other.

const (
	maxWarm     = 4      // ops of one unit: one stale row spoils it for all
	maxWarmRuns = 20_000 // more than a process carries; beyond, all are forgotten
)

// whenWritten stands for the time of a transaction that has not begun yet; the
// statements put the database's in its place.
var whenWritten = time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)

type warmRows struct {
	mu    sync.Mutex
	byRun map[uuid.UUID]warmRow
}

// warmRow is a run and its session with their versions (xmin).
type warmRow struct {
	run     db.UnitRunLockRow
	session db.UnitSessionLockRow
}

// remember keeps the rows of those runs of a committed unit that go on, and
// forgets the others.
func (w *warmRows) remember(u *unit, items []*item) {
	version := versionOf(u.xid)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.byRun == nil || len(w.byRun) >= maxWarmRuns {
		w.byRun = map[uuid.UUID]warmRow{}
	}
	for _, it := range items {
		o, ok := it.op.(*advanceOp)
		if !ok {
			continue
		}
		r, s := u.runs[o.run.ID], u.sessions[o.run.SessionID]
		if r == nil || s == nil || r.State != db.RunStateRunning {
			delete(w.byRun, o.run.ID)
			continue
		}
		row := warmRow{r.UnitRunLockRow, s.UnitSessionLockRow}
		if r.dirty {
			row.run.Version = version
		}
		if s.dirty || s.opened != nil || slices.Contains(u.put.tasks.Ids, s.ID) {
			row.session.Version = version
		}
		w.byRun[o.run.ID] = row
	}
}

// versionOf is the xmin of the rows that a transaction writes: its number
// without the epoch.
func versionOf(xid string) string {
	n, err := strconv.ParseUint(xid, 10, 64)
	if err != nil {
		return ""
	}
	return strconv.FormatUint(n&0xffff_ffff, 10)
}

// unit makes a unit of what is known, if that is enough for all its ops: steps
// of runs that go on, and ends that nothing follows from.
func (w *warmRows) unit(items []*item) *unit {
	if len(items) > maxWarm {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	u := newUnit()
	u.warm, u.now, u.clock = true, whenWritten, whenWritten
	u.knownUse = map[usageKey]bool{}
	for _, it := range items {
		o, ok := it.op.(*advanceOp)
		if !ok || it.prior != nil || o.a.Park != nil || o.a.Release != nil {
			return nil
		}
		row, ok := w.byRun[o.run.ID]
		if !ok || row.run.Epoch != o.run.Epoch || o.a.End != nil && (row.session.Queued > 0 || row.run.ParentRunID != nil) {
			return nil
		}
		if u.runs[row.run.ID] == nil {
			u.runs[row.run.ID] = &runRow{UnitRunLockRow: row.run}
		}
		if u.sessions[row.session.ID] == nil {
			u.sessions[row.session.ID] = &sessionRow{UnitSessionLockRow: row.session}
		}
	}
	return u
}

// forget drops what turned out to be stale.
func (w *warmRows) forget(items []*item) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, it := range items {
		if o, ok := it.op.(*advanceOp); ok {
			delete(w.byRun, o.run.ID)
		}
	}
}

// changeWarm tries a unit on rows that are known. It returns nil when it has to
// be made as any other; nothing is written then.
func (c *committer) changeWarm(ctx context.Context, conn *pgx.Conn, items []*item) (u *unit, uncertain bool, err error) {
	if u = c.warm.unit(items); u == nil {
		return nil, false, nil
	}
	var sessions db.UnitSessionGuardParams
	var runs db.UnitRunGuardParams
	for _, s := range u.sessions {
		sessions.Ids, sessions.Versions = append(sessions.Ids, s.ID), append(sessions.Versions, s.Version)
	}
	for _, r := range u.runs {
		runs.Ids, runs.Versions = append(runs.Ids, r.ID), append(runs.Versions, r.Version)
	}
	if slices.ContainsFunc(items, func(it *item) bool { return it.op.apply(u) != nil }) {
		return nil, false, nil // who refuses has to see the rows themselves
	}
	if len(u.nudges) > 0 || u.changes.ready {
		return nil, false, nil
	}
	if c.afterLoad != nil {
		if err := c.afterLoad(u); err != nil {
			return u, false, err
		}
	}
	var p db.Pipeline
	u.pooled = c.pooled
	u.begin(&p)
	p.UnitGuard(sessions, runs, db.UnitUsageGuardParams{RunIds: u.put.usage.RunIds, CallIds: u.put.usage.CallIds})
	u.write(&p)
	for _, n := range c.embed(u) {
		p.Notify(n.Channel, n.Payload)
	}
	p.Commit()
	err = p.Send(ctx, conn)
	if db.IsGuard(err) {
		c.warm.forget(items)
		c.metrics.cold.Add(1)
		if _, err := conn.Exec(ctx, "ROLLBACK"); err != nil {
			return nil, false, err
		}
		return nil, false, nil
	}
	return u, err != nil && isConnError(err), err
}

// settled says whether a prior unit of it has committed after all. The rows it
// would have written are locked: if it has not, it never will, since what is
// written now gives them other versions.
func (it *item) settled(ctx context.Context, q *db.Queries, conn db.DBTX) (bool, error) {
	if it.prior == nil {
		return false, nil
	}
	there, err := it.prior.evidence(ctx, q, conn)
	if err == nil && !there {
		it.prior = nil
	}
	return there, err
}
