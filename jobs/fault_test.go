package jobs

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/db/dbtest"
	"github.com/weir-run/weir/jobs/bus"
)

// limit is how long a test waits for what comes at once on an idle machine.
const limit = 30 * time.Second

// TestOneUnit has ops judged one after another in one transaction: each must
// see what those before it did.
func TestOneUnit(t *testing.T) {
	t.Parallel()
	t.Run("RunParksAndIsWokenAndHasNoWaitLeft", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a, run := f.claimed("s")
		errs := f.oneUnit(
			&advanceOp{run: run, a: Advance{Park: &Park{Kind: db.WaitKindTimer, For: time.Hour}}},
			&wakeOp{Ref: a.Ref(), by: db.WaitKindTimer},
		)
		require.Equal(t, []error{nil, nil}, errs)
		require.Equal(t, db.RunStateQueued, f.state(a.RunID))
		f.holds("default")
	})
	t.Run("RunIsWokenAndMayNotParkOverIt", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a, run := f.claimed("s")
		errs := f.oneUnit(
			&wakeOp{Ref: a.Ref(), by: db.WaitKindTimer},
			&advanceOp{run: run, a: Advance{Park: &Park{Kind: db.WaitKindTimer, For: time.Hour}}},
		)
		require.Equal(t, []error{nil, ErrLookAgain}, errs)
	})
	t.Run("ParentParksWhileItsLastChildEnds", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a, run := f.claimed("s")
		child := f.claim(f.spawn(run, 0).ID)
		errs := f.oneUnit(
			&advanceOp{run: run, a: Advance{Park: &Park{Kind: db.WaitKindChildren, For: time.Hour}}},
			&advanceOp{run: child, a: Advance{End: completed()}},
		)
		require.Equal(t, []error{nil, nil}, errs)
		require.Equal(t, db.RunStateQueued, f.state(a.RunID))
		f.holds("default")
	})
	t.Run("AllChildrenOfAParentEnd", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a, run := f.claimed("s")
		var ops []op
		for i := range int32(20) {
			ops = append(ops, &advanceOp{run: f.claim(f.spawn(run, i).ID), a: Advance{End: completed()}})
		}
		_, err := f.runs.Advance(f.ctx, run, Advance{Park: &Park{Kind: db.WaitKindChildren, For: time.Hour}})
		require.NoError(t, err)
		for _, err := range f.oneUnit(ops...) {
			require.NoError(t, err)
		}
		require.Equal(t, db.RunStateQueued, f.state(a.RunID))
		f.holds("default")
	})
	t.Run("TurnIsNotOvertakenByOneAcceptedBesideIt", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a, run := f.claimed("s")
		second, third := f.accept("s"), f.accept("s")
		fourth := f.acceptOp(a.SessionID)
		errs := f.oneUnit(
			&advanceOp{run: run, a: Advance{End: completed()}}, // promotes the second
			fourth,
			&cancelOp{Ref: second.Ref()}, // promotes the third, which the unit does not know
		)
		require.Equal(t, []error{nil, nil, nil}, errs)
		f.claim(third.RunID)
		_, err := f.runs.Claim(f.ctx, f.worker(), fourth.run)
		require.ErrorIs(t, err, ErrNotQueued)
		f.holds("default")
	})
	t.Run("TurnEndsBesideTheCancelOfTheNext", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		_, run := f.claimed("s")
		second, third := f.accept("s"), f.accept("s")
		errs := f.oneUnit(&cancelOp{Ref: second.Ref()}, &advanceOp{run: run, a: Advance{End: completed()}})
		require.Equal(t, []error{nil, nil}, errs)
		f.claim(third.RunID)
		f.holds("default")
	})
	t.Run("WholeLaneIsCancelled", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		var ops []op
		for range 8 {
			ops = append(ops, &cancelOp{Ref: f.accept("s").Ref()})
		}
		for _, err := range f.oneUnit(ops...) {
			require.NoError(t, err)
		}
		f.holds("default")
	})
	t.Run("ReapThatHasToComeAgainCountsOneLoss", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a, run := f.claimed("s")
		second, _ := f.accept("s"), f.accept("s")
		_, err := f.runs.Cancel(f.ctx, "default", a.RunID, "")
		require.NoError(t, err)
		worker := f.row(a.RunID).WorkerID
		errs := f.oneUnit(
			&cancelOp{Ref: second.Ref()},
			&reapOp{Ref: a.Ref(), worker: *worker, counts: true}, // ends the run, once the lane's next is known
			&wakeOp{Ref: a.Ref(), by: db.WaitKindTimer},
		)
		require.Equal(t, []error{nil, nil, nil}, errs)
		require.Equal(t, run.Losses+1, f.row(a.RunID).Losses)
		f.holds("default")
	})
	t.Run("RepeatsOfAKeyAreAnsweredWithTheFirst", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a := f.accept("s")
		first, repeat, other := f.acceptOp(a.SessionID), f.acceptOp(a.SessionID), f.acceptOp(a.SessionID)
		for o, digest := range map[*acceptOp]string{first: "1", repeat: "1", other: "2"} {
			o.p.Key, o.p.KeyScope, o.p.Digest = "k", "accept", []byte(digest)
			o.prepare()
		}
		errs := f.oneUnit(first, repeat, other)
		require.NoError(t, errs[0])
		require.NoError(t, errs[1])
		require.Equal(t, first.out.RunID, repeat.out.RunID)
		require.True(t, repeat.out.Duplicate)
		require.ErrorAs(t, errs[2], new(*ConflictError))
		f.holds("default")
	})
	t.Run("KeyOfARefusedTurnConflictsWithNothing", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a := f.accept("s")
		f.accept("s")
		first, other := f.acceptOp(a.SessionID), f.acceptOp(a.SessionID)
		first.terms.QueueCap = 1
		for o, digest := range map[*acceptOp]string{first: "1", other: "2"} {
			o.p.Key, o.p.KeyScope, o.p.Digest = "k", "accept", []byte(digest)
			o.prepare()
		}
		errs := f.oneUnit(first, other)
		require.ErrorAs(t, errs[0], new(*BusyError))
		require.NoError(t, errs[1])
		f.holds("default")
	})
	t.Run("StepStartsAgainAndIsDone", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		_, run := f.claimed("s")
		done := modelStep(0).Steps[0]
		started := done
		started.Status, started.Output = db.StepStatusStarted, nil
		_, err := f.runs.Advance(f.ctx, run, Advance{Steps: []Step{started}})
		require.NoError(t, err)
		_, err = f.runs.Advance(f.ctx, run, Advance{Steps: []Step{started, done}})
		require.NoError(t, err)
		require.Equal(t, 1, f.count(`SELECT count(*) FROM step WHERE status = 'done'`))
	})
	t.Run("BadDataHarmsNoNeighbour", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		var ops []op
		for i := range 9 {
			_, run := f.claimed("s" + strconv.Itoa(i))
			step := modelStep(0)
			if i == 4 {
				step.Steps[0].Name = "nul \x00 in a text"
			}
			if i == 7 {
				step.Events = []Event{{EventWarning, json.RawMessage(`no json`)}}
			}
			ops = append(ops, &advanceOp{run: run, a: step})
		}
		for i, err := range f.oneUnit(ops...) {
			if i == 4 || i == 7 {
				var pg *pgconn.PgError
				require.ErrorAs(t, err, &pg)
				require.Equal(t, "22", pg.Code[:2])
			} else {
				require.NoError(t, err)
			}
		}
		require.Equal(t, 7, f.count(`SELECT count(*) FROM step`))
		f.holds("default")
	})
	t.Run("KeyTooLongForItsIndexHarmsNoNeighbour", func(t *testing.T) { // program_limit_exceeded: neither class 22 nor 23
		t.Parallel()
		f := setup(t)
		a := f.accept("s")
		long, neighbour := f.acceptOp(a.SessionID), f.acceptOp(a.SessionID)
		for range 500 {
			long.p.Key += uuid.NewString()
		}
		long.prepare()
		errs := f.oneUnit(neighbour, long)
		require.NoError(t, errs[0])
		require.Error(t, errs[1])
	})
	t.Run("PanicIsTheAnswerOfItsOpAlone", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.runs.committer.log = slog.New(slog.DiscardHandler)
		a, run := f.claimed("s")
		errs := f.oneUnit(
			&advanceOp{run: run, a: modelStep(0)},
			&brokenOp{},
			&wakeOp{Ref: a.Ref(), by: db.WaitKindTimer},
		)
		require.NoError(t, errs[0])
		require.ErrorContains(t, errs[1], "no such luck")
		require.NoError(t, errs[2])
		steps, err := f.runs.queries.RunSteps(f.ctx, f.pool, a.RunID)
		require.NoError(t, err)
		require.Len(t, steps, 1)
		f.accept("s") // and the committer goes on
	})
}

// brokenOp has a bug.
type brokenOp struct{}

func (*brokenOp) lane() uuid.UUID   { return uuid.Nil }
func (*brokenOp) needs(*needs)      {}
func (*brokenOp) apply(*unit) error { panic("no such luck") }

func TestLostAnswers(t *testing.T) {
	t.Parallel()
	// The lifecycle of a turn with a child, of which every commit goes wrong.
	story := func(t *testing.T, f *fixture) {
		a := f.accept("s")
		run := f.claim(a.RunID)
		_, err := f.runs.Advance(f.ctx, run, modelStep(0))
		require.NoError(t, err)
		child := f.claim(f.spawn(run, 1).ID)
		_, err = f.runs.Advance(f.ctx, run, Advance{Park: &Park{Kind: db.WaitKindChildren, For: time.Hour}})
		require.NoError(t, err)
		_, err = f.runs.Advance(f.ctx, child, Advance{End: completed()})
		require.NoError(t, err)
		run = f.claim(a.RunID)
		require.Len(t, run.Steps, 2)
		require.Equal(t, int32(2), run.Epoch)
		last := modelStep(2)
		last.End = completed()
		_, err = f.runs.Advance(f.ctx, run, last)
		require.NoError(t, err)
		require.Equal(t, 3, f.count(`SELECT count(*) FROM river_job`)) // of accept, spawn and wake-up
		require.Equal(t, 3, f.count(`SELECT count(*) FROM step`))
		require.Equal(t, 2, f.count(`SELECT count(*) FROM usage`))
		f.holds("default")
	}
	t.Run("CommitIsFoundDone", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.runs.committer.afterCommit = func(*unit) error { return errBroken }
		story(t, f)
		require.Zero(t, f.runs.committer.metrics.retries.Load())
	})
	t.Run("CommitIsFoundDoneWhenTheNetworkLosesItsAnswer", func(t *testing.T) {
		t.Parallel()
		w := &wire{}
		f := machine(t, dbtest.URL(t), w.configure)
		f.runs.committer.afterLoad = func(u *unit) error { w.deafen.Store(u.xid != ""); return nil } // not of claims
		story(t, f)
		require.Zero(t, f.runs.committer.metrics.retries.Load())
	})
	t.Run("ClaimIsGivenBackWhenTheNetworkLosesItsAnswer", func(t *testing.T) {
		t.Parallel()
		w := &wire{}
		f := machine(t, dbtest.URL(t), w.configure)
		a, worker := f.accept("s"), f.worker()
		f.runs.committer.afterLoad = func(*unit) error { w.deafen.Store(true); return nil }
		_, err := f.runs.Claim(f.ctx, worker, a.RunID)
		require.ErrorIs(t, err, ErrUnknownOutcome)
		f.runs.committer.afterLoad = nil
		require.Eventually(t, func() bool { return f.state(a.RunID) == db.RunStateRunning }, limit, time.Millisecond)
		given, err := f.runs.GiveBack(f.ctx, a.RunID, worker)
		require.NoError(t, err)
		require.True(t, given)
		require.Equal(t, int32(3), f.claim(a.RunID).Epoch) // each hand-over is one, too
		f.holds("default")
	})
	t.Run("ClaimOverABrokenConnectionIsRepeated", func(t *testing.T) {
		t.Parallel()
		w := &wire{}
		f := machine(t, dbtest.URL(t), w.configure)
		a := f.accept("s")
		var once sync.Once
		f.runs.committer.afterLoad = func(*unit) error { once.Do(func() { w.cut.Store(true) }); return nil }
		require.Equal(t, int32(1), f.claim(a.RunID).Epoch)
	})
	t.Run("CommitThatNeverArrivesIsRepeatedOnce", func(t *testing.T) {
		t.Parallel()
		w := &wire{}
		f := machine(t, dbtest.URL(t), w.configure)
		var loads atomic.Int64
		f.runs.committer.afterLoad = func(*unit) error {
			if loads.Add(1)%2 == 1 {
				w.cut.Store(true)
			}
			return nil
		}
		story(t, f)
		require.Equal(t, loads.Load()/2, f.runs.committer.metrics.retries.Load())
		require.Equal(t, loads.Load()/2, f.runs.committer.metrics.units.Load())
	})
	t.Run("BackendsAreTerminatedUnderLoad", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		var loads atomic.Int64
		f.runs.committer.afterLoad = func(u *unit) error {
			if loads.Add(1)%3 == 0 {
				_, err := f.pool.Exec(f.ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_xid::text = $1`, u.xid)
				return err
			}
			return nil
		}
		worker := f.worker()
		f.parallel(200, func(i int) error {
			a, err := f.runs.Accept(f.ctx, f.params("s"+strconv.Itoa(i%150)))
			if err != nil {
				return err
			}
			run, err := f.runs.Claim(f.ctx, worker, a.RunID)
			if a.Position > 0 && errors.Is(err, ErrNotQueued) {
				return nil // its turn has not come
			}
			if err != nil {
				return err
			}
			last := modelStep(0)
			last.End = completed()
			_, err = f.runs.Advance(f.ctx, run, last)
			return err
		})
		require.NotZero(t, f.runs.committer.metrics.retries.Load())
		require.Equal(t, 200, f.count(`SELECT count(*) FROM run`))
		f.holds("default")
	})
	t.Run("RowsTellWhenTheServerMayHaveRecovered", func(t *testing.T) {
		// Recovery from a crash, also from that of one backend, gives the numbers
		// of transactions whose WAL was not written away again. It ends in a
		// checkpoint, which stands for it here.
		t.Parallel()
		f := setup(t)
		_, run := f.claimed("s")
		queued := f.accept("s")
		step := func(status db.StepStatus, output string) func() error {
			return func() error {
				_, err := f.runs.Advance(f.ctx, run, Advance{Steps: []Step{{Seq: 7, Kind: db.StepKindTool, Status: status, Output: json.RawMessage(output)}}})
				return err
			}
		}
		var last *unit
		f.runs.committer.afterLoad = func(u *unit) error { last = u; return nil }
		for _, change := range []func() error{
			func() error { _, err := f.runs.Cancel(f.ctx, "default", queued.RunID, ""); return err }, // an event tells
			step(db.StepStatusStarted, ""), // a step
			step(db.StepStatusDone, "1"),   // the end of one
			func() error { _, err := f.runs.Wake(f.ctx, Ref{ID: run.ID}, db.WaitKindTimer); return err }, // a run
		} {
			require.NoError(t, change())
			f.exec(`CHECKPOINT`)
			require.NoError(t, f.runs.committer.settle(f.ctx, last, errBroken))

			// The same of a unit whose rows are not there, under a number that is
			// committed.
			foreign := *last
			for _, ids := range [][]uuid.UUID{foreign.put.events.RunIds, foreign.put.steps.RunIds, foreign.put.ends.RunIds} {
				if len(ids) > 0 {
					ids[0] = newID()
				}
			}
			for _, r := range foreign.runs {
				r.WakeSeq += 100
			}
			require.ErrorIs(t, f.runs.committer.settle(f.ctx, &foreign, errBroken), errBroken)
		}
	})
	t.Run("OutcomeThatCannotBeAskedIsNoRefusal", func(t *testing.T) {
		t.Parallel()
		w := &wire{}
		f := machine(t, dbtest.URL(t), w.configure)
		a := f.accept("s")
		f.runs.committer.afterCommit = func(*unit) error { w.down(true); return errBroken }
		answer := make(chan error, 1)
		go func() {
			_, err := f.runs.Wake(f.ctx, a.Ref(), db.WaitKindTimer)
			answer <- err
		}()
		require.Eventually(t, w.isDown, limit, time.Millisecond)
		f.runs.committer.close()
		err := <-answer
		require.ErrorIs(t, err, ErrUnknownOutcome)
		require.NotErrorAs(t, err, new(*UnavailableError))
		f.runs.committer = newCommitter(f.runs, f.hot, 1) // for the fixture to close
	})
	t.Run("CallerThatGaveUpMayGoOn", func(t *testing.T) { // -race sees what the writer still reads
		t.Parallel()
		f := setup(t)
		a, run := f.claimed("s")
		loaded, release := make(chan struct{}), make(chan struct{})
		var once sync.Once
		f.runs.committer.afterLoad = func(*unit) error {
			once.Do(func() { close(loaded); <-release })
			return nil
		}
		ctx, cancel := context.WithCancel(f.ctx)
		go func() { <-loaded; cancel() }()
		time.AfterFunc(settleGrace+200*time.Millisecond, func() { close(release) })
		step := modelStep(0)
		_, err := f.runs.Advance(ctx, run, step)
		require.ErrorIs(t, err, ErrUnknownOutcome)
		for began := time.Now(); time.Since(began) < 400*time.Millisecond; {
			run.note(1, db.StepStatusStarted)
			run.note(1, db.StepStatusDone)
		}
		require.Eventually(t, func() bool { return f.count(`SELECT count(*) FROM step`) == 1 }, limit, 10*time.Millisecond)
		require.Equal(t, db.RunStateRunning, f.state(a.RunID))
	})
	t.Run("KillGivenUpInItsCommitReturns", func(t *testing.T) {
		t.Parallel()
		w := &wire{}
		f := machine(t, dbtest.URL(t), w.configure)
		a, run := f.claimed("s")
		f.spawn(run, 0)
		ctx, cancel := context.WithCancel(f.ctx)
		w.mu.Lock()
		w.onWrite = func(b []byte) bool {
			if bytes.Contains(b, []byte("killed by an operator")) {
				cancel()
				return true
			}
			return false
		}
		w.mu.Unlock()
		done := make(chan error, 1)
		go func() {
			_, err := f.runs.Kill(ctx, "default", a.RunID)
			done <- err
		}()
		select {
		case err := <-done:
			require.ErrorIs(t, err, context.Canceled)
		case <-time.After(limit):
			t.Fatal("kill asks for ever with a context that has ended")
		}
		require.Equal(t, db.RunStateRunning, f.state(a.RunID))
		f.holds("default")
	})
}

func TestOutage(t *testing.T) {
	t.Parallel()
	t.Run("AnswersUnavailableAndStoresNothing", func(t *testing.T) {
		t.Parallel()
		w := &wire{}
		f := machine(t, dbtest.URL(t), w.configure)
		f.runs.committer.giveUp = 300 * time.Millisecond
		f.runs.log, f.runs.committer.log = slog.New(slog.DiscardHandler), slog.New(slog.DiscardHandler)
		a, run := f.claimed("s")
		w.down(true)
		fresh := f.params("fresh")
		fresh.Fresh = true
		byID := f.params("")
		byID.SessionID = a.SessionID
		for name, try := range map[string]func() error{
			"accept, new":     func() error { _, err := f.runs.Accept(f.ctx, fresh); return err },
			"accept, by name": func() error { _, err := f.runs.Accept(f.ctx, f.params("s")); return err },
			"accept, by id":   func() error { _, err := f.runs.Accept(f.ctx, byID); return err },
			"advance":         func() error { _, err := f.runs.Advance(f.ctx, run, modelStep(0)); return err },
			"cancel":          func() error { _, err := f.runs.Cancel(f.ctx, "default", a.RunID, ""); return err },
			"kill":            func() error { _, err := f.runs.Kill(f.ctx, "default", a.RunID); return err },
		} {
			began := time.Now()
			require.ErrorAs(t, try(), new(*UnavailableError), name)
			require.GreaterOrEqual(t, time.Since(began), f.runs.committer.giveUp, name)
		}
		w.down(false)
		require.Equal(t, 1, f.count(`SELECT count(*) FROM run`))
		require.Equal(t, 1, f.count(`SELECT count(*) FROM session`))
		_, err := f.runs.Advance(f.ctx, run, modelStep(0))
		require.NoError(t, err)
		f.holds("default")
	})
	t.Run("IsOutwaitedByCallersWithADeadline", func(t *testing.T) {
		t.Parallel()
		w := &wire{}
		f := machine(t, dbtest.URL(t), w.configure)
		f.runs.committer.giveUp = 50 * time.Millisecond
		w.down(true)
		time.AfterFunc(400*time.Millisecond, func() { w.down(false) })
		ctx, cancel := context.WithTimeout(f.ctx, limit)
		defer cancel()
		_, err := f.runs.Accept(ctx, f.params("s"))
		require.NoError(t, err)
	})
	t.Run("OfTheNotificationsLosesNoEnd", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a, run := f.claimed("s")
		deaf, err := New(Config{Pool: f.pool, Hot: f.hot, Bus: bus.New(f.pool, f.pool.Config().ConnConfig, f.runs.log), Masker: noMask{}, Log: f.runs.log})
		require.NoError(t, err)
		t.Cleanup(deaf.Close)
		waited := make(chan Outcome, 1)
		go func() {
			o, _ := deaf.Wait(f.ctx, "default", a.RunID)
			waited <- o
		}()
		_, err = f.runs.Advance(f.ctx, run, Advance{End: completed()})
		require.NoError(t, err)
		select {
		case o := <-waited:
			require.Equal(t, db.RunStateCompleted, o.State)
		case <-time.After(limit):
			t.Fatal("the end was not seen")
		}
	})
	t.Run("WaitForARunThatIsNotThereIsAnswered", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		ctx, cancel := context.WithTimeout(f.ctx, limit)
		defer cancel()
		_, err := f.runs.Wait(ctx, "default", newID())
		require.ErrorAs(t, err, new(*NotFoundError))
		_, err = f.runs.Wait(ctx, "another", f.accept("s").RunID)
		require.ErrorAs(t, err, new(*NotFoundError))
	})
}

func TestHeldRows(t *testing.T) {
	t.Parallel()
	// what others hold, and an op that wants it.
	for name, test := range map[string]struct {
		sql  string
		want func(f *fixture, a *Accepted, run *Run) error
	}{
		"Session": {`SELECT FROM session WHERE external_id = 'held' FOR UPDATE`, func(f *fixture, a *Accepted, run *Run) error {
			_, err := f.runs.Accept(f.ctx, f.params("held"))
			return err
		}},
		"Run": {`SELECT FROM run WHERE state = 'running' FOR UPDATE`, func(f *fixture, a *Accepted, run *Run) error {
			_, err := f.runs.Cancel(f.ctx, "default", a.RunID, "")
			return err
		}},
		"NextOfTheLane": {`SELECT FROM run WHERE state = 'queued' AND admitted_at IS NULL FOR UPDATE`, func(f *fixture, a *Accepted, run *Run) error {
			r := *run
			_, err := f.runs.Advance(f.ctx, &r, Advance{End: completed()})
			if errors.Is(err, ErrFenced) {
				return nil // another of the test's goroutines ended it
			}
			return err
		}},
	} {
		t.Run(name+"DelaysNobodyElse", func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			a, run := f.claimed("held")
			f.accept("held")
			release := f.lock(test.sql)
			const held = 15
			answers := make(chan error, held)
			for range held {
				go func() { answers <- test.want(f, a, run) }()
			}
			began := time.Now()
			f.parallel(100, func(i int) error {
				_, err := f.runs.Accept(f.ctx, f.params("s"+strconv.Itoa(i)))
				return err
			})
			for i := range 10 { // one by one, each at once
				f.accept("s" + strconv.Itoa(i))
			}
			require.Empty(t, answers)
			require.Less(t, time.Since(began), 5*time.Second) // it is 50 ms; held ops take 2 s each
			release()
			for range held {
				select {
				case err := <-answers:
					require.NoError(t, err)
				case <-time.After(limit):
					t.Fatal("a row that is free again is not seen")
				}
			}
			f.holds("default")
		})
	}
	t.Run("CallersGiveUp", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.runs.committer.giveUp = 300 * time.Millisecond
		f.accept("held")
		release := f.lock(`SELECT FROM session FOR UPDATE`)
		ctx, cancel := context.WithTimeout(f.ctx, 300*time.Millisecond)
		defer cancel()
		_, err := f.runs.Accept(ctx, f.params("held"))
		require.Error(t, err)
		_, err = f.runs.Accept(f.ctx, f.params("held"))
		require.ErrorAs(t, err, new(*UnavailableError))
		release()
		require.Equal(t, 1, f.accept("held").Position)
		require.Equal(t, 2, f.count(`SELECT count(*) FROM run`))
		f.holds("default")
	})
	t.Run("CloseDoesNotWaitForThem", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a := f.accept("held")
		release := f.lock(`SELECT FROM run FOR UPDATE`)
		defer release()
		answer := make(chan error, 1)
		go func() {
			_, err := f.runs.Wake(f.ctx, a.Ref(), db.WaitKindTimer)
			answer <- err
		}()
		require.Eventually(t, func() bool { return f.runs.committer.metrics.misses.Load() >= maxMisses }, limit, time.Millisecond)
		began := time.Now()
		f.runs.committer.close()
		require.ErrorAs(t, <-answer, new(*UnavailableError))
		require.Less(t, time.Since(began), 5*time.Second) // it is what one wait takes
		f.runs.committer = newCommitter(f.runs, f.hot, 1) // for the fixture to close
	})
	t.Run("RunThatIsNotThereIsNotFound", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		_, err := f.runs.Wake(f.ctx, Ref{ID: newID()}, db.WaitKindTimer)
		require.ErrorAs(t, err, new(*NotFoundError))
		_, err = f.runs.Claim(f.ctx, f.worker(), newID())
		require.ErrorIs(t, err, ErrNotQueued)
	})
	t.Run("FactsOfOneUserDoNotDeadlock", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		g := f.another()
		machines := []*fixture{f, g}
		_, one := f.claimed("one")
		_, two := f.claimed("two")
		f.parallel(2, func(i int) error {
			run := []*Run{one, two}[i]
			for range 100 {
				var facts []Fact
				for k := range 50 {
					facts = append(facts, Fact{Scope: "user", ScopeID: "u", Key: strconv.Itoa(k*(1-2*i) + 49*i), Value: json.RawMessage(`1`)})
				}
				if _, err := machines[i].runs.Advance(f.ctx, run, Advance{Facts: facts}); err != nil {
					return err
				}
			}
			return nil
		})
		require.Zero(t, f.runs.committer.metrics.retries.Load()+g.runs.committer.metrics.retries.Load())
	})
}

func TestRaces(t *testing.T) {
	t.Parallel()
	t.Run("TwoProcessesAcceptInOneSession", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		machines := []*fixture{f, f.another()}
		const n = 200
		var mu sync.Mutex
		bySeq := map[int64]*Accepted{}
		f.parallel(n, func(i int) error {
			p := f.params("s")
			p.Terms = func(context.Context, string) (Terms, error) {
				return Terms{Agent: "default", Version: 1, TurnTimeout: time.Minute, QueueCap: n}, nil
			}
			a, err := machines[i%2].runs.Accept(f.ctx, p)
			if err == nil {
				mu.Lock()
				defer mu.Unlock()
				bySeq[a.Seq] = a
			}
			return err
		})
		require.Len(t, bySeq, n)
		position := 0
		for seq := int64(1); seq <= n+1; seq++ { // the head has a status event besides
			if a := bySeq[seq]; a != nil {
				require.Equal(t, position, a.Position)
				position++
			}
		}
		require.Equal(t, n, position)
		f.holds("default")
	})
	t.Run("ClaimAndReaper", func(t *testing.T) { // FC-2, FC-4
		t.Parallel()
		f := setup(t)
		machines := []*fixture{f, f.another()}
		f.parallel(8, func(i int) error {
			for round := range 25 {
				a, err := f.runs.Accept(f.ctx, f.params(fmt.Sprintf("s%d-%d", i, round)))
				if err != nil {
					return err
				}
				worker := f.worker()
				var run *Run
				var claimErr error
				var wg sync.WaitGroup
				wg.Add(1)
				go func() {
					defer wg.Done()
					run, claimErr = machines[round%2].runs.Claim(f.ctx, worker, a.RunID)
				}()
				if round%3 > 0 {
					time.Sleep(time.Duration(round*100) * time.Microsecond)
				}
				if err := f.dies(worker); err != nil {
					return err
				}
				reaped := 0
				for _, m := range machines {
					rows, err := m.runs.queries.RunHeldByDead(f.ctx, m.pool, db.RunHeldByDeadParams{WorkerID: &worker, MaxRows: 10})
					if err != nil {
						return err
					}
					for range rows {
						done, err := m.runs.Reap(f.ctx, a.Ref(), worker, true, false)
						if err != nil {
							return err
						}
						if done {
							reaped++
						}
					}
				}
				wg.Wait()
				switch {
				case claimErr == nil && reaped != 1:
					return fmt.Errorf("a run was claimed and reaped %d times", reaped)
				case claimErr != nil && (!errors.Is(claimErr, ErrWorkerGone) || reaped != 0):
					return fmt.Errorf("a claim answered %w and %d were reaped", claimErr, reaped)
				}
				if run != nil {
					if _, err := f.runs.Advance(f.ctx, run, modelStep(0)); !errors.Is(err, ErrFenced) {
						return fmt.Errorf("a zombie's step answered %w", err)
					}
				}
				next, err := f.runs.Claim(f.ctx, f.worker(), a.RunID)
				if err != nil {
					return err
				}
				if _, err := f.runs.Advance(f.ctx, next, Advance{End: completed()}); err != nil {
					return err
				}
			}
			return nil
		})
		f.holds("default")
	})
	t.Run("SpareNudgeOfATurnThatWaitsForItsLane", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		_, run := f.claimed("s")
		second := f.accept("s")
		done, err := f.runs.Renudge(f.ctx, second.Ref())
		require.NoError(t, err)
		require.False(t, done)
		worker := f.worker()
		f.parallel(20, func(i int) error { // while the head ends
			if i == 10 {
				_, err := f.runs.Advance(f.ctx, run, Advance{End: completed()})
				return err
			}
			_, err := f.runs.Claim(f.ctx, worker, second.RunID)
			if errors.Is(err, ErrNotQueued) {
				err = nil
			}
			return err
		})
		require.LessOrEqual(t, f.row(second.RunID).Epoch, int32(1))
		f.holds("default")
	})
	t.Run("KillAndSpawn", func(t *testing.T) { // RIVER.md fault 27
		t.Parallel()
		f := setup(t)
		g := f.another()
		// The spawn's unit is open a little longer, so that the kill meets it.
		var units atomic.Int64
		f.runs.committer.afterLoad = func(*unit) error {
			time.Sleep(time.Duration(units.Add(1)%4) * 500 * time.Microsecond)
			return nil
		}
		f.parallel(4, func(i int) error {
			for round := range 25 {
				a, err := f.runs.Accept(f.ctx, f.params(fmt.Sprintf("s%d-%d", i, round)))
				if err != nil {
					return err
				}
				run, err := f.runs.Claim(f.ctx, f.worker(), a.RunID)
				if err != nil {
					return err
				}
				var child uuid.UUID
				var spawnErr error
				var wg sync.WaitGroup
				wg.Add(1)
				go func() {
					defer wg.Done()
					child, spawnErr = f.runs.Spawn(f.ctx, run, f.spawnParams(0))
				}()
				time.Sleep(time.Duration(round%5) * 300 * time.Microsecond)
				n, err := g.runs.Kill(f.ctx, "default", a.RunID)
				wg.Wait()
				switch {
				case err != nil:
					return err
				case spawnErr == nil && (n != 2 || f.state(child) != db.RunStateKilled):
					return fmt.Errorf("a child was spawned and %d runs killed", n)
				case spawnErr != nil && (!errors.Is(spawnErr, ErrFenced) || n != 1):
					return fmt.Errorf("a spawn answered %w and %d runs were killed", spawnErr, n)
				}
			}
			return nil
		})
		f.holds("default")
	})
	t.Run("KillOfATreeThatGrows", func(t *testing.T) { // RIVER.md fault 27
		t.Parallel()
		f := setup(t)
		g := f.another()
		a, run := f.claimed("s")
		var spawned, seq atomic.Int64
		var wg sync.WaitGroup
		for range 8 { // some say it is an endless loop
			wg.Add(1)
			go func() {
				defer wg.Done()
				for {
					r := *run
					p := f.spawnParams(int32(seq.Add(1)))
					p.MaxChildren = 1 << 20
					if _, err := f.runs.Spawn(f.ctx, &r, p); err != nil {
						if !errors.Is(err, ErrFenced) {
							t.Error(err)
						}
						return
					}
					spawned.Add(1)
				}
			}()
		}
		require.Eventually(t, func() bool { return spawned.Load() > 200 }, limit, time.Millisecond)
		n, err := g.runs.Kill(f.ctx, "default", a.RunID)
		require.NoError(t, err)
		wg.Wait()
		require.Equal(t, spawned.Load()+1, int64(n))
		f.holds("default")
	})
	t.Run("CancelAndCompletion", func(t *testing.T) { // FC-8
		t.Parallel()
		f := setup(t)
		machines := []*fixture{f, f.another()}
		worker := f.worker()
		var completions, cancels atomic.Int64
		f.parallel(50, func(i int) error {
			for round := range 20 {
				a, err := f.runs.Accept(f.ctx, f.params(fmt.Sprintf("s%d-%d", i, round)))
				if err != nil {
					return err
				}
				run, err := f.runs.Claim(f.ctx, worker, a.RunID)
				if err != nil {
					return err
				}
				var cancelled Cancelled
				var cancelErr error
				var wg sync.WaitGroup
				wg.Add(1)
				go func() {
					defer wg.Done()
					cancelled, cancelErr = machines[i%2].runs.Cancel(f.ctx, "default", a.RunID, "")
				}()
				last := modelStep(0)
				last.End = completed()
				_, err = f.runs.Advance(f.ctx, run, last)
				wg.Wait()
				if cancelErr != nil {
					return cancelErr
				}
				want := db.RunStateCompleted
				switch {
				case err == nil && cancelled == Cancelled{"already_ended", db.RunStateCompleted}:
					completions.Add(1)
				case errors.Is(err, ErrLookAgain) && cancelled.Status == "cancelling":
					cancels.Add(1)
					want = db.RunStateCancelled
					e := CancelEnding("")
					if _, err := f.runs.Advance(f.ctx, run, Advance{End: &e}); err != nil {
						return err
					}
				default:
					return fmt.Errorf("completion answered %v, cancel %v", err, cancelled)
				}
				if got := f.state(a.RunID); got != want {
					return fmt.Errorf("run is %s, not %s", got, want)
				}
			}
			return nil
		})
		t.Logf("%d completed, %d cancelled", completions.Load(), cancels.Load())
		f.holds("default") // the last event agrees with the state
	})
	t.Run("RepeatsOfAKey", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		machines := []*fixture{f, f.another()}
		keyed := func(session, key, digest string) AcceptParams {
			p := f.params(session)
			p.KeyScope, p.Key, p.Digest = "accept", key, []byte(digest)
			return p
		}
		var mu sync.Mutex
		var answers []Accepted
		f.parallel(100, func(i int) error {
			a, err := machines[i%2].runs.Accept(f.ctx, keyed("s", "k", "1"))
			if err == nil {
				mu.Lock()
				defer mu.Unlock()
				answers = append(answers, *a)
			}
			return err
		})
		originals := 0
		for _, a := range answers {
			if !a.Duplicate {
				originals++
			}
			a.Duplicate = answers[0].Duplicate
			require.Equal(t, answers[0], a)
		}
		require.Equal(t, 1, originals)
		_, err := f.runs.Accept(f.ctx, keyed("s", "k", "2"))
		require.ErrorAs(t, err, new(*ConflictError))
		require.Equal(t, 1, f.count(`SELECT count(*) FROM run`))

		p := keyed("s", "full", "1")
		p.Terms = func(context.Context, string) (Terms, error) {
			return Terms{Agent: "default", Version: 1, TurnTimeout: time.Minute}, nil
		}
		_, err = f.runs.Accept(f.ctx, p)
		require.ErrorAs(t, err, new(*BusyError))
		require.Equal(t, 1, f.count(`SELECT count(*) FROM idempotency`))

		_, err = f.pool.Exec(f.ctx, `UPDATE idempotency SET created_at = created_at - interval '25 hours' WHERE key = 'k'`)
		require.NoError(t, err)
		a, err := f.runs.Accept(f.ctx, keyed("s", "k", "2")) // a day later it may be used again
		require.NoError(t, err)
		require.False(t, a.Duplicate)

		p = keyed("never seen", "k", "2") // the repeat of a turn that made a session of its own
		p.Fresh = true
		again, err := f.runs.Accept(f.ctx, p)
		require.NoError(t, err)
		require.Equal(t, a.RunID, again.RunID)
		require.Equal(t, 1, f.count(`SELECT count(*) FROM session`))
		f.holds("default")
	})
	t.Run("AcceptsThatMakeOneSession", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		machines := []*fixture{f, f.another()}
		f.parallel(40, func(i int) error {
			p := f.params("s" + strconv.Itoa(i%4))
			p.Fresh = i%3 == 0 // it is not, as it turns out
			_, err := machines[i%2].runs.Accept(f.ctx, p)
			return err
		})
		require.Equal(t, 4, f.count(`SELECT count(*) FROM session`))
		p := f.params("s0")
		p.Session.ExternalID = "another name of it"
		ctx, cancel := context.WithTimeout(f.ctx, limit)
		defer cancel()
		a, err := f.runs.Accept(ctx, p)
		require.NoError(t, err)
		require.Equal(t, 10, a.Position)
		f.holds("default")
	})
}

func TestTree(t *testing.T) {
	t.Parallel()
	// A root whose child has ended and left a child of its own behind.
	grown := func(t *testing.T, f *fixture) (root *Accepted, run *Run, grandchild uuid.UUID) {
		root, run = f.claimed("s")
		child := f.claim(f.spawn(run, 0).ID)
		grandchild = f.spawn(child, 0).ID
		_, err := f.runs.Advance(f.ctx, child, Advance{End: completed()})
		require.NoError(t, err)
		return root, run, grandchild
	}
	t.Run("KillReachesChildrenOfTheEnded", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		root, _, grandchild := grown(t, f)
		n, err := f.runs.Kill(f.ctx, "default", root.RunID)
		require.NoError(t, err)
		require.Equal(t, 2, n)
		require.Equal(t, db.RunStateKilled, f.state(grandchild))
		f.holds("default")
	})
	t.Run("CancelReachesChildrenOfTheEnded", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		root, run, grandchild := grown(t, f)
		f.spawn(run, 1)
		_, err := f.runs.Cancel(f.ctx, "default", root.RunID, "")
		require.NoError(t, err)
		require.Equal(t, db.RunStateCancelled, f.state(grandchild))
		f.holds("default")
	})
	t.Run("CancelOfACompletedRunSparesItsChildren", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a, run := f.claimed("s")
		child := f.spawn(run, 0)
		_, err := f.runs.Advance(f.ctx, run, Advance{End: completed()})
		require.NoError(t, err)
		c, err := f.runs.Cancel(f.ctx, "default", a.RunID, "")
		require.NoError(t, err)
		require.Equal(t, "already_ended", c.Status)
		require.Equal(t, db.RunStateQueued, f.state(child.ID))
	})
	t.Run("CancelledParentSpawnsNoMore", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a, run := f.claimed("s")
		_, err := f.runs.Cancel(f.ctx, "default", a.RunID, "")
		require.NoError(t, err)
		_, err = f.runs.Spawn(f.ctx, run, f.spawnParams(0))
		require.ErrorIs(t, err, ErrLookAgain)
		require.Equal(t, 1, f.count(`SELECT count(*) FROM session`))
	})
	t.Run("SpawnOfAStoredStepMakesNoSecondChild", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a, run := f.claimed("s")
		child := f.spawn(run, 0)
		_, err := f.runs.Advance(f.ctx, run, Advance{Release: &Release{}})
		require.NoError(t, err)
		again, err := f.runs.Spawn(f.ctx, f.claim(a.RunID), f.spawnParams(0))
		require.NoError(t, err)
		require.Equal(t, child.ID, again)
		require.Equal(t, 2, f.count(`SELECT count(*) FROM run`))
	})
	t.Run("NobodyWaitsForChildrenThatAreNone", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		_, run := f.claimed("s")
		child := f.claim(f.spawn(run, 0).ID)
		_, err := f.runs.Advance(f.ctx, child, Advance{End: completed()})
		require.NoError(t, err)
		_, err = f.runs.Advance(f.ctx, run, modelStep(1)) // has seen the wake-up, if not what it means
		require.NoError(t, err)
		_, err = f.runs.Advance(f.ctx, run, Advance{Park: &Park{Kind: db.WaitKindChildren, For: time.Hour}})
		require.ErrorIs(t, err, ErrLookAgain)
	})
	t.Run("ReleaseOfACancelledRunDoesNotWait", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a, run := f.claimed("s")
		_, err := f.runs.Cancel(f.ctx, "default", a.RunID, "")
		require.NoError(t, err)
		_, err = f.runs.Advance(f.ctx, run, Advance{Release: &Release{After: time.Hour}})
		require.NoError(t, err)
		require.Equal(t, db.RunStateQueued, f.state(a.RunID))
	})
	t.Run("BackgroundTurnStaysInTheBackground", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		p := f.params("s")
		p.Queue = QueueTurnsBg
		a, err := f.runs.Accept(f.ctx, p)
		require.NoError(t, err)
		run := f.claim(a.RunID)
		_, err = f.runs.Advance(f.ctx, run, Advance{Park: &Park{Kind: db.WaitKindTimer, For: time.Hour, Failed: true}})
		require.NoError(t, err)
		_, err = f.runs.Wake(f.ctx, a.Ref(), db.WaitKindTimer)
		require.NoError(t, err)
		_, err = f.runs.Advance(f.ctx, f.claim(a.RunID), modelStep(0)) // the call that failed has passed
		require.NoError(t, err)
		require.Equal(t, QueueTurnsBg, f.row(a.RunID).Queue)
	})
}

// wire is the network between a machine and its database.
type wire struct {
	deafen, cut atomic.Bool // the next COMMIT goes out and its answer is lost; is lost itself
	mu          sync.Mutex
	onWrite     func([]byte) bool // true cuts
	broken      bool
	conns       map[*wireConn]struct{}
}

var errWire = errors.New("wire is cut")

func (w *wire) configure(c *pgxpool.Config) {
	c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.broken {
			return nil, errWire
		}
		conn, err := new(net.Dialer).DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		wc := &wireConn{Conn: conn, wire: w}
		if w.conns == nil {
			w.conns = map[*wireConn]struct{}{}
		}
		w.conns[wc] = struct{}{}
		return wc, nil
	}
}

// down cuts all connections, and lets none be made; or again some.
func (w *wire) down(broken bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.broken = broken
	if broken {
		for c := range w.conns {
			_ = c.Conn.Close()
		}
	}
}

func (w *wire) isDown() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.broken
}

type wireConn struct {
	net.Conn
	wire *wire
	deaf atomic.Bool
}

func (c *wireConn) Write(b []byte) (int, error) {
	c.wire.mu.Lock()
	hit := c.wire.onWrite != nil && c.wire.onWrite(b)
	c.wire.mu.Unlock()
	commit := bytes.Contains(b, commitName) && !bytes.Contains(b, []byte("COMMIT"))
	if hit || commit && c.wire.cut.CompareAndSwap(true, false) {
		_ = c.Conn.Close()
		return 0, errWire
	}
	if commit && c.wire.deafen.CompareAndSwap(true, false) {
		c.deaf.Store(true)
	}
	return c.Conn.Write(b)
}

// commitName is pgx's name for the prepared COMMIT. Its text is sent before,
// to prepare it.
var commitName = func() []byte {
	digest := sha256.Sum256([]byte("COMMIT"))
	return []byte("stmtcache_" + hex.EncodeToString(digest[:24]))
}()

func (c *wireConn) Read(b []byte) (int, error) {
	if c.deaf.Load() {
		time.Sleep(100 * time.Millisecond) // the server gets it all
		_ = c.Conn.Close()
		return 0, errWire
	}
	return c.Conn.Read(b)
}

// oneUnit has ops judged in one transaction, those that go into a later one in
// the next, as a writer does.
func (f *fixture) oneUnit(ops ...op) []error {
	f.t.Helper()
	items := make([]*item, len(ops))
	for i, o := range ops {
		items[i] = &item{op: o, ctx: f.ctx, since: time.Now(), result: make(chan error, 1)}
	}
	for again := items; len(again) > 0; {
		again = f.runs.committer.attempt(again, 0)
	}
	errs := make([]error, len(ops))
	for i, it := range items {
		errs[i] = <-it.result
	}
	return errs
}

// parallel calls f n times at once, and fails on any error.
func (f *fixture) parallel(n int, do func(i int) error) {
	f.t.Helper()
	errs := make(chan error, n)
	for i := range n {
		go func() { errs <- do(i) }()
	}
	var all []error
	for range n {
		all = append(all, <-errs)
	}
	require.NoError(f.t, errors.Join(all...))
}

func (f *fixture) params(session string) AcceptParams {
	return AcceptParams{TenantID: "default", Session: f.session(session), Terms: terms, Input: json.RawMessage(`{"text":"hi"}`)}
}

func (f *fixture) acceptOp(session uuid.UUID) *acceptOp {
	o := &acceptOp{p: f.params(""), masker: noMask{}, session: session}
	o.terms, _ = terms(f.ctx, "")
	o.prepare()
	return o
}

func (f *fixture) claim(id uuid.UUID) *Run {
	f.t.Helper()
	run, err := f.runs.Claim(f.ctx, f.worker(), id)
	require.NoError(f.t, err)
	return run
}

func (f *fixture) claimed(session string) (*Accepted, *Run) {
	f.t.Helper()
	a := f.accept(session)
	return a, f.claim(a.RunID)
}

func (f *fixture) spawnParams(seq int32) SpawnParams {
	tm, _ := terms(f.ctx, "")
	return SpawnParams{
		Terms: tm, Spec: f.session("child " + newID().String()), Input: json.RawMessage(`{"text":"sub"}`),
		Step: Step{Seq: seq, CallID: "s" + strconv.Itoa(int(seq)), Name: "session_spawn"}, MaxDepth: 3, MaxChildren: 100,
	}
}

func (f *fixture) spawn(parent *Run, seq int32) Ref {
	f.t.Helper()
	id, err := f.runs.Spawn(f.ctx, parent, f.spawnParams(seq))
	require.NoError(f.t, err)
	ref, err := f.runs.refOf(f.ctx, "", id)
	require.NoError(f.t, err)
	return ref
}

func (f *fixture) row(id uuid.UUID) db.Run {
	f.t.Helper()
	row, err := f.runs.queries.RunGet(f.ctx, f.pool, db.RunGetParams{TenantID: "default", ID: id})
	require.NoError(f.t, err)
	return row
}

func (f *fixture) count(sql string) (n int) {
	f.t.Helper()
	require.NoError(f.t, f.pool.QueryRow(f.ctx, sql).Scan(&n))
	return n
}

func (f *fixture) exec(sql string, args ...any) {
	f.t.Helper()
	_, err := f.pool.Exec(f.ctx, sql, args...)
	require.NoError(f.t, err)
}

// lock holds rows in a transaction of its own until release.
func (f *fixture) lock(sql string) (release func()) {
	f.t.Helper()
	tx, err := f.pool.Begin(f.ctx)
	require.NoError(f.t, err)
	tag, err := tx.Exec(f.ctx, sql)
	require.NoError(f.t, err)
	require.NotZero(f.t, tag.RowsAffected())
	return func() { require.NoError(f.t, tx.Rollback(f.ctx)) }
}

// dies declares a worker dead.
func (f *fixture) dies(worker uuid.UUID) error {
	var at time.Time
	if err := f.pool.QueryRow(f.ctx, `SELECT heartbeat_at FROM worker WHERE id = $1`, worker).Scan(&at); err != nil {
		return err
	}
	_, err := f.runs.queries.WorkerDeclareDead(f.ctx, f.pool, db.WorkerDeclareDeadParams{ID: worker, HeartbeatAt: at})
	return err
}

// holds fails when a promise about a tenant's rows is broken.
func (f *fixture) holds(tenant string) {
	f.t.Helper()
	rows, err := f.pool.Query(f.ctx, violationsSQL, tenant)
	require.NoError(f.t, err)
	var i int
	var id uuid.UUID
	var broken []string
	_, err = pgx.ForEachRow(rows, []any{&i, &id}, func() error {
		broken = append(broken, violations[i].promise+": not so "+id.String())
		return nil
	})
	require.NoError(f.t, err)
	require.Empty(f.t, broken)
}
