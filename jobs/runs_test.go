package jobs

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/db"
)

func TestTurn(t *testing.T) {
	t.Parallel()
	t.Run("IsAcceptedClaimedSteppedAndEnded", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a := f.accept("s")
		require.Equal(t, PhaseThinking, a.Phase)
		require.Equal(t, int64(1), a.Seq)

		run, err := f.runs.Claim(f.ctx, f.worker(), a.RunID)
		require.NoError(t, err)
		require.JSONEq(t, `{"text":"hi"}`, string(run.Input))
		require.Equal(t, int32(1), run.Epoch)
		_, err = f.runs.Claim(f.ctx, f.worker(), a.RunID)
		require.ErrorIs(t, err, ErrNotQueued)

		_, err = f.runs.Advance(f.ctx, run, modelStep(0))
		require.NoError(t, err)
		last := modelStep(1)
		last.End = completed()
		_, err = f.runs.Advance(f.ctx, run, last)
		require.NoError(t, err)

		o, err := f.runs.Wait(f.ctx, "default", a.RunID)
		require.NoError(t, err)
		require.Equal(t, db.RunStateCompleted, o.State)
		require.JSONEq(t, `{"text":"ok"}`, string(o.Result))
		var events string
		require.NoError(t, f.pool.QueryRow(f.ctx, `SELECT string_agg(seq || ' ' || type, ',' ORDER BY seq) FROM event`).Scan(&events))
		require.Equal(t, "1 agent.request,2 agent.status,3 agent.usage,4 agent.usage,5 agent.response,6 agent.status", events)
		_, err = f.runs.Advance(f.ctx, run, modelStep(2))
		require.ErrorIs(t, err, ErrFenced)
	})
	t.Run("WaitsBehindItsLane", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w := f.worker()
		first, second, third := f.accept("s"), f.accept("s"), f.accept("s")
		require.Equal(t, []int{0, 1, 2}, []int{first.Position, second.Position, third.Position})
		_, err := f.runs.Claim(f.ctx, w, second.RunID)
		require.ErrorIs(t, err, ErrNotQueued)
		run, err := f.runs.Claim(f.ctx, w, first.RunID)
		require.NoError(t, err)
		c, err := f.runs.Cancel(f.ctx, "default", second.RunID, "")
		require.NoError(t, err)
		require.Equal(t, "cancelled", c.Status)
		_, err = f.runs.Advance(f.ctx, run, Advance{End: completed()})
		require.NoError(t, err)
		_, err = f.runs.Claim(f.ctx, w, third.RunID)
		require.NoError(t, err)
	})
	t.Run("ParksWithoutAWorkerAndWakes", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w := f.worker()
		a := f.accept("s")
		run, err := f.runs.Claim(f.ctx, w, a.RunID)
		require.NoError(t, err)
		_, err = f.runs.Wake(f.ctx, a.Ref(), db.WaitKindTimer) // while it runs
		require.NoError(t, err)
		park := Advance{Park: &Park{Kind: db.WaitKindTimer, For: time.Hour}}
		_, err = f.runs.Advance(f.ctx, run, park)
		require.ErrorIs(t, err, ErrLookAgain)
		_, err = f.runs.Advance(f.ctx, run, park)
		require.NoError(t, err)
		require.Equal(t, db.RunStateWaiting, f.state(a.RunID))
		woken, err := f.runs.Wake(f.ctx, a.Ref(), db.WaitKindTimer)
		require.NoError(t, err)
		require.True(t, woken)
		_, err = f.runs.Claim(f.ctx, w, a.RunID)
		require.NoError(t, err)
	})
	t.Run("IsCancelledByItsWorkerWhenItRuns", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a := f.accept("s")
		run, err := f.runs.Claim(f.ctx, f.worker(), a.RunID)
		require.NoError(t, err)
		c, err := f.runs.Cancel(f.ctx, "default", a.RunID, "")
		require.NoError(t, err)
		require.Equal(t, "cancelling", c.Status)
		_, err = f.runs.Advance(f.ctx, run, Advance{End: completed()})
		require.ErrorIs(t, err, ErrLookAgain)
		e := CancelEnding("")
		_, err = f.runs.Advance(f.ctx, run, Advance{End: &e})
		require.NoError(t, err)
		require.Equal(t, db.RunStateCancelled, f.state(a.RunID))
		c, err = f.runs.Cancel(f.ctx, "default", a.RunID, "")
		require.NoError(t, err)
		require.Equal(t, "already_ended", c.Status)
	})
	t.Run("IsReapedThenSuspectThenPoisoned", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a := f.accept("s")
		for i, solitary := range []bool{false, false, true} {
			w := f.worker()
			_, err := f.runs.Claim(f.ctx, w, a.RunID)
			require.NoError(t, err)
			done, err := f.runs.Reap(f.ctx, a.Ref(), w, true, solitary)
			require.NoError(t, err)
			require.True(t, done)
			row, err := f.runs.queries.RunGet(f.ctx, f.pool, db.RunGetParams{TenantID: "default", ID: a.RunID})
			require.NoError(t, err)
			require.Equal(t, int32(i+1), row.Losses)
			require.Equal(t, []string{QueueTurns, QueueSuspect, QueueSuspect}[i], row.Queue)
		}
		require.Equal(t, db.RunStatePoisoned, f.state(a.RunID))
	})
	t.Run("IsKilledWithItsTree", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a := f.accept("s")
		run, err := f.runs.Claim(f.ctx, f.worker(), a.RunID)
		require.NoError(t, err)
		tm, _ := terms(f.ctx, "")
		spawn := SpawnParams{Terms: tm, Spec: SessionSpec{ConversationRef: "cv_child", ChannelType: "spawn", Scope: []byte(`[]`)}, Input: []byte(`{"text":"sub"}`), Step: Step{Seq: 0, CallID: "c0", Name: "session_spawn"}, MaxDepth: 3, MaxChildren: 2}
		child, err := f.runs.Spawn(f.ctx, run, spawn)
		require.NoError(t, err)
		n, err := f.runs.Kill(f.ctx, "default", a.RunID)
		require.NoError(t, err)
		require.Equal(t, 2, n)
		require.Equal(t, db.RunStateKilled, f.state(a.RunID))
		require.Equal(t, db.RunStateKilled, f.state(child))
		_, err = f.runs.Advance(f.ctx, run, modelStep(1))
		require.ErrorIs(t, err, ErrFenced)
	})
}
