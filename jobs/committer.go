package jobs

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs/bus"
)

const (
	maxUnit      = 512                    // ops of one transaction
	maxUnitBytes = 4 << 20                // of what they store, and one op more
	maxMisses    = 3                      // units that pass over a held row before one waits for it
	heldWait     = 250 * time.Millisecond // for held rows, at a time
	treeWait     = 2 * time.Second        // for held rows, by what ends a tree
	retryPause   = 25 * time.Millisecond  // after a failed transaction
	settleGrace  = 2 * time.Second        // for an outcome, after its caller's context ended
	settlePause  = 50 * time.Millisecond  // between questions after a lost commit
	unitTimeout  = 20 * time.Second
	giveUpAfter  = 10 * time.Second // of database failures, for a caller without a deadline
	rollbackTime = 2 * time.Second
)

// committer lets the changes of many runs share transactions: callers hand
// over an op each and wait for their own commit. A writer takes what waits
// when it becomes free, without a timer, so that a change alone loses no time
// and under load the commits are few.
type committer struct {
	pool    *pgxpool.Pool
	queries *db.Queries
	insert  *river.Client[pgx.Tx]
	embed   func(*unit) []bus.Notification // what to notify in its transaction
	publish func(*unit)                    // after its commit
	log     *slog.Logger
	metrics *committerMetrics

	writers []chan *item
	claims  chan *item // to a writer of their own
	held    chan *item // ops that the writers passed over too often
	seed    maphash.Seed
	giveUp  time.Duration
	warm    warmRows
	fast    fastPath
	pooled  bool          // a connection keeps no settings
	done    chan struct{} // closed by close: nothing is taken any more
	ended   chan struct{} // closed when everything is answered
	wg      sync.WaitGroup

	// afterLoad and afterCommit let tests break a unit at its seams.
	afterLoad   func(*unit) error
	afterCommit func(*unit) error
}

type committerMetrics struct {
	units, ops, misses, retries, steps atomic.Int64
	warm, cold                         atomic.Int64 // units on known rows, and those whose rows were stale
}

// item is an op on its way.
type item struct {
	op     op
	ctx    context.Context // of the caller; an item not yet in a unit may be given up
	since  time.Time
	misses int
	prior  *unit      // one it may have committed in already
	apart  bool       // it waited in vain among others: now its lane waits alone
	result chan error // buffered: the writer never waits for the caller
}

// size is about what an op stores, in bytes.
func (it *item) size() int {
	if o, ok := it.op.(interface{ size() int }); ok {
		return o.size()
	}
	return 0
}

func newCommitter(r *Runs, pool *pgxpool.Pool, writers int) *committer {
	c := &committer{
		pool: pool, queries: db.New(), insert: r.insert, embed: r.embed, publish: r.publish, log: r.log, metrics: &committerMetrics{},
		claims: make(chan *item, 4*maxUnit), held: make(chan *item, maxUnit), seed: maphash.MakeSeed(), giveUp: giveUpAfter, pooled: r.pooled,
		done: make(chan struct{}), ended: make(chan struct{}),
	}
	for range writers {
		c.writers = append(c.writers, make(chan *item, 4*maxUnit))
	}
	for _, ch := range append(slices.Clone(c.writers), c.claims) {
		c.wg.Add(1)
		go c.write(ch)
	}
	go c.writeHeld()
	return c
}

// close refuses new ops, lets the writers finish what they have and waits.
func (c *committer) close() {
	close(c.done)
	c.wg.Wait()
	close(c.held)
	<-c.ended
}

// do hands o over and waits for its commit. Once a unit has o, do waits for its
// outcome also beyond the end of ctx, but not for long: a database that is away
// may keep it for as long as it stays away. Then the answer is
// ErrUnknownOutcome; the writer goes on to settle the change.
func (c *committer) do(ctx context.Context, o op) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	it := &item{op: o, ctx: ctx, since: time.Now(), result: make(chan error, 1)}
	lane := o.lane()
	writer := c.writers[maphash.Bytes(c.seed, lane[:])%uint64(len(c.writers))]
	if isClaim(it) {
		writer = c.claims
	}
	select {
	case <-c.done:
		return ErrClosed
	default:
	}
	select {
	case writer <- it:
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-c.done:
		return ErrClosed
	}
	gone := ctx.Done()
	var patience <-chan time.Time
	for {
		select {
		case err := <-it.result:
			return err
		case <-gone:
			gone = nil
			t := time.NewTimer(settleGrace)
			defer t.Stop()
			patience = t.C
		case <-patience:
			return fmt.Errorf("%w: %w", ErrUnknownOutcome, context.Cause(ctx))
		case <-c.ended:
			// The writers drain their channels before they end; what came too late
			// for that is still in one.
			select {
			case err := <-it.result:
				return err
			default:
				return ErrClosed
			}
		}
	}
}

func (c *committer) write(ch chan *item) {
	defer c.wg.Done()
	var again []*item // what the last unit could not do yet, in order, first
	for {
		batch := again
		if len(batch) == 0 {
			select {
			case it := <-ch:
				batch = append(batch, it)
			case <-c.done:
				select {
				case it := <-ch:
					batch = append(batch, it)
				default:
					return
				}
			}
		}
		bytes := 0
		for _, it := range batch {
			bytes += it.size()
		}
	fill:
		for len(batch) < maxUnit && bytes < maxUnitBytes {
			select {
			case it := <-ch:
				batch = append(batch, it)
				bytes += it.size()
			default:
				break fill
			}
		}
		again = c.commit(batch)
	}
}

// writeHeld carries what the writers passed over. It waits for the rows that
// others hold, so that the writers and their callers need not. All of it waits
// together as long as that goes well, since many want the same parent or root;
// when it does not, one lane after another.
func (c *committer) writeHeld() {
	defer close(c.ended)
	var items []*item
	for {
		if len(items) == 0 {
			it, ok := <-c.held
			if !ok {
				return
			}
			items = append(items, it)
		}
	fill:
		for len(items) < maxUnit {
			select {
			case it, ok := <-c.held:
				if !ok {
					break fill
				}
				items = append(items, it)
			default:
				break fill
			}
		}
		var unit, rest []*item
		for _, it := range items {
			if first := items[0]; isClaim(it) == isClaim(first) && it.apart == first.apart && (!it.apart || it.op.lane() == first.op.lane()) {
				unit = append(unit, it)
			} else {
				rest = append(rest, it)
			}
		}
		again := c.attempt(unit, heldWait)
		if len(again) == len(unit) {
			c.pause()
		}
		items = append(c.patient(rest, errRowHeld), again...)
	}
}

// commit carries a batch to the database and answers its items, but those it
// returns: they belong into the next unit.
func (c *committer) commit(batch []*item) (again []*item) {
	live := batch[:0:0]
	for _, it := range batch {
		if it.ctx.Err() != nil {
			it.result <- context.Cause(it.ctx)
			continue
		}
		if it.misses >= maxMisses {
			select {
			case c.held <- it:
				continue
			default: // many wait already
			}
		}
		live = append(live, it)
	}
	if len(live) == 0 {
		return nil
	}
	return c.attempt(live, 0)
}

// attempt runs one unit and answers its items, but those it returns: another
// may do what this one could not. What fails by an op's fault is halved until
// the culprit is alone.
func (c *committer) attempt(items []*item, wait time.Duration) (again []*item) {
	u, errs, err := c.unit(items, wait)
	switch {
	case err == nil:
		c.publish(u)
		for i, it := range items {
			switch {
			case errors.Is(errs[i], errRowHeld) && wait > 0:
				it.result <- &NotFoundError{"run or session of", it.op.lane().String()} // nobody holds it: there is none
			case errors.Is(errs[i], errRowHeld), errors.Is(errs[i], errRequeue):
				c.metrics.misses.Add(1)
				it.misses++
				again = append(again, it)
			default:
				it.result <- errs[i]
			}
		}
		return c.patient(again, errRowHeld)
	case errors.Is(err, ErrUnknownOutcome):
		for _, it := range items {
			it.result <- err
		}
		return nil
	case isLockTimeout(err) && wait > 0:
		for _, it := range items {
			it.apart = true
		}
		return c.later(items, errRowHeld)
	case isRetryable(err):
		c.metrics.retries.Add(1)
		return c.later(items, err)
	case len(items) > 1:
		half := len(items) / 2
		return append(c.attempt(items[:half], wait), c.attempt(items[half:], wait)...)
	default:
		if !isDataError(err) {
			c.log.ErrorContext(items[0].ctx, "op failed", "op", fmt.Sprintf("%T", items[0].op), "error", err)
		}
		items[0].result <- err
		return nil
	}
}

// later pauses and returns the items that may try again; none do when the
// committer is closing.
func (c *committer) later(items []*item, err error) []*item {
	items = c.patient(items, err)
	if len(items) > 0 && !c.pause() {
		for _, it := range items {
			it.result <- &UnavailableError{time.Since(it.since), err}
		}
		return nil
	}
	return items
}

// pause waits before another try; false says that the committer is closing.
func (c *committer) pause() bool {
	t := time.NewTimer(retryPause)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-c.done:
		return false
	}
}

// patient answers the items that have waited long enough, for a database that
// does not work or a row that is held, and returns the others.
func (c *committer) patient(items []*item, err error) []*item {
	return keep(items, func(it *item) bool {
		_, bounded := it.ctx.Deadline()
		if it.ctx.Err() == nil && (bounded || time.Since(it.since) < c.giveUp) {
			return true
		}
		it.result <- &UnavailableError{time.Since(it.since), err}
		return false
	})
}

// unit is one transaction. The errors of single ops come back by index; err
// means that nothing is committed, unless it is ErrUnknownOutcome.
func (c *committer) unit(items []*item, wait time.Duration) (u *unit, errs []error, err error) {
	// A unit that began is not given up by its callers; a server that does not
	// answer ends it.
	ctx, cancel := context.WithTimeout(context.Background(), unitTimeout)
	defer cancel()
	conn, err := c.pool.Acquire(ctx)
	if err != nil {
		return nil, nil, err
	}
	defer conn.Release()
	u = c.newUnit()
	defer func() {
		if p := recover(); p != nil { // a bug in an op must not take the process and its other runs along
			rollback(conn)
			u, errs, err = nil, nil, &panicError{p, debug.Stack()}
		}
	}()
	var uncertain bool
	if isClaim(items[0]) {
		errs, uncertain, err = c.claim(ctx, conn.Conn(), u, items, wait)
	} else {
		u, errs, uncertain, err = c.change(ctx, conn.Conn(), items, wait)
	}
	if err == nil && c.afterCommit != nil {
		err = c.afterCommit(u)
		uncertain = err != nil
	}
	switch {
	case uncertain && u.xid == "":
		_ = conn.Conn().Close(ctx)
		if _, said := errors.AsType[*pgconn.PgError](err); said || pgconn.SafeToRetry(err) { // before it began
			return nil, nil, err
		}
		if isClaim(items[0]) {
			return nil, nil, fmt.Errorf("%w: %w", ErrUnknownOutcome, err)
		}
		for _, it := range items { // made without a read: the rows have to tell
			it.prior = u
		}
		return nil, nil, err
	case uncertain:
		_ = conn.Conn().Close(ctx)
		conn.Release() // all units may be in this at once, and each needs another connection
		if err := c.settle(context.Background(), u, err); err != nil {
			return nil, nil, err
		}
		u.embedded = false // what it said may be lost with the connection's server: say it again
	case err != nil:
		rollback(conn)
		return nil, nil, err
	}
	if u.warm {
		c.metrics.warm.Add(1)
	}
	c.warm.remember(u, items)
	c.metrics.units.Add(1)
	c.metrics.ops.Add(int64(len(items)))
	c.metrics.steps.Add(u.finishedSteps())
	return u, errs, nil
}

func (c *committer) newUnit() *unit {
	u := newUnit()
	u.pooled, u.fast = c.pooled, &c.fast
	return u
}

// change makes a unit of ops: on rows that are known, if it can; else it loads
// what they need, lets them judge and writes what they changed.
func (c *committer) change(ctx context.Context, conn *pgx.Conn, items []*item, wait time.Duration) (u *unit, errs []error, uncertain bool, err error) {
	errs = make([]error, len(items))
	if wait == 0 {
		if u, uncertain, err = c.changeWarm(ctx, conn, items); u != nil || err != nil {
			return u, errs, uncertain, err
		}
	}
	u = c.newUnit()
	var n needs
	for _, it := range items {
		it.op.needs(&n)
	}
	if err := u.load(ctx, conn, &n, wait); err != nil {
		return u, nil, false, err
	}
	if c.afterLoad != nil {
		if err := c.afterLoad(u); err != nil {
			return u, nil, false, err
		}
	}
	for i, it := range items {
		committed, err := it.settled(ctx, c.queries, conn)
		if err != nil {
			return u, nil, false, err
		}
		if !committed {
			errs[i] = it.op.apply(u)
		}
	}
	uncertain, err = u.flush(ctx, conn, c.insert, c.embed)
	return u, errs, uncertain, err
}

func (c *committer) claim(ctx context.Context, conn *pgx.Conn, u *unit, items []*item, wait time.Duration) (errs []error, uncertain bool, err error) {
	if c.afterLoad != nil {
		if err := c.afterLoad(u); err != nil {
			return nil, false, err
		}
	}
	return u.claim(ctx, conn, items, wait)
}

// settle finds out, on another connection, what became of a commit whose
// answer was lost. nil means that it is done; the cause means that it is not,
// and may be repeated.
func (c *committer) settle(ctx context.Context, u *unit, cause error) error {
	for {
		status, err := c.queries.UnitXactStatus(ctx, c.pool, db.UnitXactStatusParams{Xid: u.xid, Since: u.clock})
		switch {
		case isRetryable(err): // the database is away: ask until it is back
		case err == nil && status.Status == "aborted":
			return fmt.Errorf("commit was lost: %w", cause)
		case err == nil && status.Status == "in progress" && !status.Restarted:
		case err == nil && status.Status == "committed" && !status.Restarted:
			return nil
		default:
			// Recovery may give an unlogged transaction's number away again, so the
			// rows themselves have to tell.
			there, err := u.evidence(ctx, c.queries, c.pool)
			if err == nil && there {
				return nil
			}
			if err == nil {
				return fmt.Errorf("commit was lost: %w", cause)
			}
		}
		select {
		case <-c.done:
			return fmt.Errorf("%w: %w", ErrUnknownOutcome, cause)
		case <-time.After(settlePause):
		}
	}
}

// evidence looks for something that only this unit can have written.
func (u *unit) evidence(ctx context.Context, q *db.Queries, pool db.DBTX) (bool, error) {
	if e := u.put.events; len(e.Seqs) > 0 {
		return q.UnitEventExists(ctx, pool, db.UnitEventExistsParams{SessionID: e.SessionIds[0], Seq: e.Seqs[0], RunID: e.RunIds[0], Type: e.Types[0]})
	}
	if s := u.put.steps; len(s.Seqs) > 0 {
		return q.UnitStepIs(ctx, pool, db.UnitStepIsParams{RunID: s.RunIds[0], Seq: s.Seqs[0], Status: s.Statuses[0], Epoch: s.Epochs[0]})
	}
	if s := u.put.ends; len(s.Seqs) > 0 {
		return q.UnitStepIs(ctx, pool, db.UnitStepIsParams{RunID: s.RunIds[0], Seq: s.Seqs[0], Status: s.Statuses[0], Epoch: s.Epochs[0]})
	}
	for _, r := range u.claimed {
		return q.UnitRunIs(ctx, pool, db.UnitRunIsParams{ID: r.ID, Epoch: r.Epoch, WakeSeq: r.WakeSeq, State: string(db.RunStateRunning), Steps: r.Steps})
	}
	for _, r := range u.runs {
		if r.dirty {
			return q.UnitRunIs(ctx, pool, db.UnitRunIsParams{ID: r.ID, Epoch: r.Epoch, WakeSeq: r.WakeSeq, State: string(r.State), Steps: r.Steps})
		}
	}
	return true, nil // it wrote nothing
}

type panicError struct {
	value any
	stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("panic in an op: %v\n%s", e.value, e.stack) }

func rollback(conn *pgxpool.Conn) {
	if conn.Conn().IsClosed() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), rollbackTime)
	defer cancel()
	if _, err := conn.Conn().Exec(ctx, "ROLLBACK"); err != nil {
		_ = conn.Conn().Close(ctx)
	}
}

// openTx shows a connection with an open transaction as a pgx.Tx, for River.
type openTx struct{ conn *pgx.Conn }

var errNotOurs = errors.New("the unit ends its transaction itself")

func (t openTx) Begin(context.Context) (pgx.Tx, error) { return nil, errNotOurs }
func (t openTx) Commit(context.Context) error          { return errNotOurs }
func (t openTx) Rollback(context.Context) error        { return errNotOurs }
func (t openTx) LargeObjects() pgx.LargeObjects        { panic(errNotOurs) }
func (t openTx) Conn() *pgx.Conn                       { return t.conn }

func (t openTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, src pgx.CopyFromSource) (int64, error) {
	return t.conn.CopyFrom(ctx, table, columns, src)
}

func (t openTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return t.conn.SendBatch(ctx, b)
}

func (t openTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	return t.conn.Prepare(ctx, name, sql)
}

func (t openTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return t.conn.Exec(ctx, sql, args...)
}

func (t openTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return t.conn.Query(ctx, sql, args...)
}

func (t openTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return t.conn.QueryRow(ctx, sql, args...)
}

// isConnError says that the connection broke, so that what was sent may or may
// not have happened.
func isConnError(err error) bool {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code[:2] == "57" || pg.Code[:2] == "08" // shutdown, crash: the answer to COMMIT may be lost with them
	}
	return !errors.Is(err, pgx.ErrTxCommitRollback)
}

// isDataError says that the values of an op are at fault.
func isDataError(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && (pg.Code[:2] == "22" || pg.Code[:2] == "23")
}

func isLockTimeout(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == "55P03"
}

// isRetryable says that the same transaction may pass later: connection,
// deadlock, serialisation, resources, shutdown.
func isRetryable(err error) bool {
	if err == nil {
		return false
	}
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		switch pg.Code[:2] {
		case "08", "40", "53", "55", "57", "58":
			return true
		}
		return pg.Code == "25006" || pg.Code == "25P02" // read-only during a failover; failed transaction
	}
	var bug *panicError
	var missing *NotFoundError
	answered := errors.Is(err, pgx.ErrNoRows) || errors.As(err, &missing) || errors.Is(err, ErrUnknownOutcome) || errors.As(err, &bug)
	return !answered // no answer of the server at all
}

func newID() uuid.UUID { return uuid.Must(uuid.NewV7()) }

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
