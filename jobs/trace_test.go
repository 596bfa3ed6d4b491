package jobs

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs/tracing"
)

// traceparent is the n-th trace of a test.
func traceparent(n int) string { return fmt.Sprintf("00-%032x-%016x-01", n, n) }

func TestTrace(t *testing.T) {
	t.Parallel()
	accept := func(f *fixture, session string, n int) *Accepted {
		ctx := f.ctx
		if n > 0 {
			ctx = tracing.WithParent(ctx, traceparent(n))
		}
		a, err := f.runs.Accept(ctx, f.params(session))
		require.NoError(t, err)
		return a
	}
	claim := func(f *fixture, worker uuid.UUID, id uuid.UUID) *Run {
		run, err := f.runs.Claim(f.ctx, worker, id)
		require.NoError(t, err)
		return run
	}
	t.Run("IsTheSameForEveryClaim", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w := f.worker()
		a := accept(f, "s", 1)
		run := claim(f, w, a.RunID)
		require.Equal(t, traceparent(1), run.Traceparent)
		_, err := f.runs.Advance(f.ctx, run, Advance{Release: &Release{}}) // handed over
		require.NoError(t, err)
		require.Equal(t, traceparent(1), claim(f, w, a.RunID).Traceparent)
		done, err := f.runs.Reap(f.ctx, a.Ref(), w, true, false) // its worker died
		require.NoError(t, err)
		require.True(t, done)
		run = claim(f, w, a.RunID)
		require.Equal(t, traceparent(1), run.Traceparent)
		_, err = f.runs.Advance(f.ctx, run, Advance{Park: &Park{Kind: db.WaitKindTool}})
		require.NoError(t, err)
		_, err = f.runs.Wake(f.ctx, a.Ref(), db.WaitKindTool)
		require.NoError(t, err)
		_, err = f.runs.Renudge(f.ctx, a.Ref()) // a job that got lost
		require.NoError(t, err)
		require.Equal(t, traceparent(1), claim(f, w, a.RunID).Traceparent)
	})
	t.Run("OfATurnThatWaitedIsItsOwn", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w := f.worker()
		first, second, third := accept(f, "s", 1), accept(f, "s", 2), accept(f, "s", 0)
		for _, c := range []struct {
			a    *Accepted
			want string
		}{{first, traceparent(1)}, {second, traceparent(2)}, {third, ""}} {
			run := claim(f, w, c.a.RunID)
			require.Equal(t, c.want, run.Traceparent)
			_, err := f.runs.Advance(f.ctx, run, Advance{End: completed()})
			require.NoError(t, err)
		}
	})
	t.Run("GoesOnInAChild", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w := f.worker()
		run := claim(f, w, accept(f, "s", 1).RunID)
		spawn := func(ctx context.Context, seq int32) string {
			terms, _ := terms(ctx, "")
			child, err := f.runs.Spawn(ctx, run, SpawnParams{
				Terms: terms, Spec: f.session(fmt.Sprint("child", seq)), Input: json.RawMessage(`{"text":"x"}`),
				Step: Step{Seq: seq, CallID: fmt.Sprint(seq), Name: "session_spawn"}, MaxDepth: 3, MaxChildren: 3,
			})
			require.NoError(t, err)
			return claim(f, w, child).Traceparent
		}
		require.Equal(t, traceparent(2), spawn(tracing.WithParent(f.ctx, traceparent(2)), 0), "of the call that made it")
		require.Equal(t, traceparent(1), spawn(f.ctx, 1), "or of its parent")
	})
	t.Run("OfARetryIsThatOfTheRelease", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w := f.worker()
		retry := func(ctx context.Context, session string) string {
			a := accept(f, session, 1)
			claim(f, w, a.RunID)
			_, err := f.runs.Reap(f.ctx, a.Ref(), w, true, true)
			require.NoError(t, err)
			again, err := f.runs.Retry(ctx, RetryParams{TenantID: "default", RunID: a.RunID})
			require.NoError(t, err)
			return claim(f, w, again.RunID).Traceparent
		}
		require.Equal(t, traceparent(2), retry(tracing.WithParent(f.ctx, traceparent(2)), "a"))
		require.Equal(t, traceparent(1), retry(f.ctx, "b"))
	})
	t.Run("OfManyRunsInOneUnit", func(t *testing.T) {
		t.Parallel()
		row := func(trace string) *runRow { return &runRow{created: true, traceparent: trace} }
		require.Equal(t, []string{"", "a", "", "b"}, runInsertParams([]*runRow{row(""), row("a"), row(""), row("b"), row("")}).Traceparents)
		require.Nil(t, runInsertParams([]*runRow{row(""), row("")}).Traceparents, "no array for what nobody has")
	})
	t.Run("JobsHaveIdsAlone", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a := accept(f, "s", 1)
		var args, metadata string
		require.NoError(t, f.pool.QueryRow(f.ctx, `SELECT args::text, metadata::text FROM river_job`).Scan(&args, &metadata))
		require.JSONEq(t, `{"run_id":"`+a.RunID.String()+`"}`, args)
		require.JSONEq(t, `{}`, metadata)
	})
}
