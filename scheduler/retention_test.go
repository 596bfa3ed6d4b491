package scheduler

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
)

// age makes a run as old as d, its id too, and its steps with it.
func (f *fixture) age(id uuid.UUID, d time.Duration) uuid.UUID {
	f.t.Helper()
	old := idAt(time.Now().Add(-d))
	copy(old[8:], id[8:])
	f.exec(`UPDATE step SET run_id = $2 WHERE run_id = $1`, id, old)
	f.exec(`UPDATE run SET id = $2, root_run_id = $2, finished_at = finished_at - $3::bigint * interval '1 millisecond' WHERE id = $1`, id, old, d.Milliseconds())
	return old
}

func TestRetention(t *testing.T) {
	t.Parallel()
	const keep = 30 * 24 * time.Hour
	f := setup(t)
	w := f.body(time.Hour, false)
	ended := func() uuid.UUID {
		run := f.claimed(w.id)
		_, err := f.runs.Advance(f.ctx, run, jobs.Advance{
			Steps: []jobs.Step{{Kind: db.StepKindModel, Status: db.StepStatusDone, CallID: "c", Name: "m", Output: []byte(`{}`)}}, ModelCalls: 1,
			End: &jobs.Ending{State: db.RunStateCompleted, Reason: "completed", Last: jobs.Event{Type: db.EventTypeAgentresponse, Content: []byte(`{}`)}},
		})
		require.NoError(t, err)
		return run.ID
	}
	old, young := f.age(ended(), keep+time.Hour), f.age(ended(), keep-time.Hour)
	stuck := f.age(f.claimed(w.id).ID, 2*keep)
	f.exec(`INSERT INTO idempotency (tenant_id, scope, key, digest, created_at) SELECT 'default', 's', n::text, '', now() - n * interval '1 hour' FROM generate_series(23, 3000) n`)
	f.exec(`INSERT INTO worker (id, state, hostname, pid, version, queues, slots, lease_ms, ended_at) VALUES (gen_random_uuid(), 'left', '', 1, '', '{}', 1, 1, now() - interval '8 days')`)

	s := NewSweeper(f.pool, f.pool.Config().ConnConfig, f.runs, f.log, Retention{})
	s.purge(f.ctx)
	require.Equal(t, 3, f.count(`SELECT count(*) FROM run`), "0 keeps them for ever")
	require.Equal(t, 1, f.count(`SELECT count(*) FROM idempotency`), "in as many batches as it takes")
	require.Equal(t, 1, f.count(`SELECT count(*) FROM worker`))

	s = NewSweeper(f.pool, f.pool.Config().ConnConfig, f.runs, f.log, Retention{Runs: keep})
	s.purge(f.ctx)
	require.Equal(t, 0, f.count(`SELECT count(*) FROM run WHERE id = $1`, old))
	require.Equal(t, 0, f.count(`SELECT count(*) FROM step WHERE run_id = $1`, old))
	require.Equal(t, 1, f.count(`SELECT count(*) FROM step WHERE run_id = $1`, young))
	require.Equal(t, 1, f.count(`SELECT count(*) FROM run WHERE id = $1`, stuck), "what has not ended stays")
	require.Equal(t, 3, f.count(`SELECT count(*) FROM session`))
	require.Equal(t, 2, f.count(`SELECT count(*) FROM event WHERE type = 'agent.response'`))
}

func (f *fixture) count(sql string, args ...any) (n int) {
	f.t.Helper()
	require.NoError(f.t, f.pool.QueryRow(f.ctx, sql, args...).Scan(&n))
	return n
}
