package jobs

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/db/dbtest"
)

func TestWarmRows(t *testing.T) {
	t.Parallel()
	warm := func(f *fixture) int64 { return f.runs.committer.metrics.warm.Load() }
	cold := func(f *fixture) int64 { return f.runs.committer.metrics.cold.Load() }
	step := func(f *fixture, run *Run, seq int32) {
		t.Helper()
		_, err := f.runs.Advance(f.ctx, run, modelStep(seq))
		require.NoError(t, err)
	}
	t.Run("AStepAfterAStepReadsNothing", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a, run := f.claimed("s")
		step(f, run, 0)
		require.Zero(t, warm(f))
		step(f, run, 1)
		step(f, run, 2)
		last := modelStep(3)
		last.End = completed()
		_, err := f.runs.Advance(f.ctx, run, last)
		require.NoError(t, err)
		require.Equal(t, int64(3), warm(f))
		require.Equal(t, 1, f.count(`SELECT count(*) FROM run WHERE state = 'completed' AND finished_at BETWEEN started_at AND now()`))
		require.Equal(t, 1, f.count(`SELECT count(*) FROM session WHERE event_seq = 8 AND model_calls = 4 AND head_run_id IS NULL`))
		require.Equal(t, db.RunStateCompleted, f.state(a.RunID))
		_, err = f.runs.Advance(f.ctx, run, modelStep(4))
		require.ErrorIs(t, err, ErrFenced)
		f.holds("default")
	})
	t.Run("WhatOthersWroteIsSeen", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		g := f.another()
		a, run := f.claimed("s")
		step(f, run, 0)
		next, err := g.runs.Accept(f.ctx, f.params("s")) // the session's events grow
		require.NoError(t, err)
		step(f, run, 1)
		require.Equal(t, []int64{0, 1}, []int64{warm(f), cold(f)})
		step(f, run, 2)
		_, err = g.runs.Cancel(f.ctx, "default", a.RunID, "")
		require.NoError(t, err)
		gate, err := f.runs.Advance(f.ctx, run, modelStep(3))
		require.NoError(t, err)
		require.True(t, gate.CancelRequested)
		end := CancelEnding("")
		_, err = f.runs.Advance(f.ctx, run, Advance{End: &end}) // others wait in the lane: it has to be read
		require.NoError(t, err)
		require.Equal(t, []int64{1, 2}, []int64{warm(f), cold(f)})
		f.claim(next.RunID)
		f.holds("default")
	})
	t.Run("AZombieIsFenced", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		g := f.another()
		a := f.accept("s")
		worker := f.worker()
		run, err := f.runs.Claim(f.ctx, worker, a.RunID)
		require.NoError(t, err)
		step(f, run, 0)
		_, err = g.runs.Reap(f.ctx, a.Ref(), worker, true, false)
		require.NoError(t, err)
		_, err = f.runs.Advance(f.ctx, run, modelStep(1))
		require.ErrorIs(t, err, ErrFenced)
		require.Equal(t, 1, f.count(`SELECT count(*) FROM step`))
	})
	t.Run("UsageIsStoredOnce", func(t *testing.T) { // RC-123
		t.Parallel()
		f := setup(t)
		_, run := f.claimed("s")
		step(f, run, 0)
		require.NoError(t, f.runs.RecordUsage(f.ctx, run, modelStep(1).Usage[0]))
		step(f, run, 1)
		step(f, run, 2)
		require.Equal(t, 3, f.count(`SELECT count(*) FROM usage`))
		require.Equal(t, 3, f.count(`SELECT input_tokens FROM session`))
		require.Equal(t, 3, f.count(`SELECT count(*) FROM event WHERE type = 'agent.usage'`))
	})
	t.Run("AnAnswerThatIsLostIsFoundInTheRows", func(t *testing.T) {
		t.Parallel()
		w := &wire{}
		f := machine(t, dbtest.URL(t), w.configure)
		a, run := f.claimed("s")
		step(f, run, 0)
		var once sync.Once
		f.runs.committer.afterLoad = func(u *unit) error {
			if u.warm {
				once.Do(func() { w.deafen.Store(true) })
			}
			return nil
		}
		step(f, run, 1)
		last := modelStep(2)
		last.End = completed()
		_, err := f.runs.Advance(f.ctx, run, last)
		require.NoError(t, err)
		require.Equal(t, db.RunStateCompleted, f.state(a.RunID))
		require.Equal(t, 3, f.count(`SELECT count(*) FROM step`))
		require.Equal(t, 7, f.count(`SELECT count(*) FROM event`))
		f.holds("default")
	})
	t.Run("WhatNeverArrivedIsMadeOnce", func(t *testing.T) {
		t.Parallel()
		w := &wire{}
		f := machine(t, dbtest.URL(t), w.configure)
		_, run := f.claimed("s")
		step(f, run, 0)
		step(f, run, 1)
		w.cut.Store(true)
		step(f, run, 2)
		require.Equal(t, 3, f.count(`SELECT count(*) FROM step`))
		f.holds("default")
	})
	t.Run("WhatArrivesTooLateIsRefused", func(t *testing.T) {
		// A transaction on known rows that was under way while its writer gave it
		// up and made it again: its guards fail.
		t.Parallel()
		f := setup(t)
		_, run := f.claimed("s")
		step(f, run, 0)
		o := &advanceOp{run: run.copy(), a: modelStep(1)}
		late := f.runs.committer.warm.unit([]*item{{op: o}})
		require.NotNil(t, late)
		step(f, run, 1)
		conn, err := f.hot.Acquire(f.ctx)
		require.NoError(t, err)
		defer conn.Release()
		var p db.Pipeline
		var now, clock time.Time
		p.Begin(&late.xid, &now, &clock)
		for _, s := range late.sessions {
			p.UnitGuard(db.UnitSessionGuardParams{Ids: []uuid.UUID{s.ID}, Versions: []string{s.Version}}, db.UnitRunGuardParams{}, db.UnitUsageGuardParams{})
		}
		require.True(t, db.IsGuard(p.Send(f.ctx, conn.Conn())))
		_, err = conn.Exec(context.Background(), "ROLLBACK")
		require.NoError(t, err)
	})
}
