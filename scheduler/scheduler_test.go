package scheduler

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/db/dbtest"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/jobs/bus"
	"github.com/weir-run/weir/policy/mask"
)

func TestMain(m *testing.M) { dbtest.Main(m) }

type fixture struct {
	t    *testing.T
	ctx  context.Context
	pool *pgxpool.Pool
	runs *jobs.Runs
	log  *slog.Logger
	n    int
}

func setup(t *testing.T) *fixture {
	t.Helper()
	url := dbtest.URL(t)
	f := &fixture{t: t, log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))}
	var stop context.CancelFunc
	f.ctx, stop = context.WithCancel(context.Background())
	var err error
	f.pool, err = db.Open(f.ctx, url, func(c *pgxpool.Config) { c.MaxConns = 8 })
	require.NoError(t, err)
	hot, err := db.OpenHot(f.ctx, url, func(c *pgxpool.Config) { c.MaxConns = 4 })
	require.NoError(t, err)
	f.exec(`UPDATE queue SET open = true, free = 1000000, looked_at = 'infinity'`) // no admitter works here
	b := bus.New(f.pool, f.pool.Config().ConnConfig, f.log)
	done := make(chan struct{})
	go func() { defer close(done); b.Run(f.ctx) }()
	f.runs, err = jobs.New(jobs.Config{Pool: f.pool, Hot: hot, Bus: b, Masker: mask.New(), Log: f.log})
	require.NoError(t, err)
	t.Cleanup(func() {
		stop()
		f.runs.Close()
		<-done
		f.pool.Close()
		hot.Close()
	})
	return f
}

// start runs a duty until the test ends.
func (f *fixture) start(run func(context.Context)) {
	done := make(chan struct{})
	ctx, cancel := context.WithCancel(f.ctx)
	go func() { defer close(done); run(ctx) }()
	f.t.Cleanup(func() { cancel(); <-done })
}

// body is a worker without a process: a row, and the connection of its lock.
type body struct {
	id   uuid.UUID
	conn *pgx.Conn
}

func (f *fixture) body(lease time.Duration, locked bool) *body {
	f.t.Helper()
	b := &body{id: uuid.Must(uuid.NewV7())}
	row, err := db.New().WorkerInsert(f.ctx, f.pool, db.WorkerInsertParams{
		ID: b.id, Hostname: "test", Pid: 1, Version: "test", Queues: []string{"turns"}, Slots: 1, LeaseMs: lease.Milliseconds(),
	})
	require.NoError(f.t, err)
	if locked {
		b.conn, err = pgx.ConnectConfig(f.ctx, f.pool.Config().ConnConfig)
		require.NoError(f.t, err)
		_, err = b.conn.Exec(f.ctx, `SELECT pg_advisory_lock($1)`, row.LockKey)
		require.NoError(f.t, err)
		f.t.Cleanup(func() { _ = b.conn.Close(context.Background()) })
	}
	return b
}

func (f *fixture) claimed(worker uuid.UUID) *jobs.Run {
	f.t.Helper()
	f.n++
	name := string(rune('a' + f.n))
	a, err := f.runs.Accept(f.ctx, jobs.AcceptParams{
		TenantID: "default", Input: json.RawMessage(`{"text":"hi"}`),
		Session: jobs.SessionSpec{ConversationRef: name, ExternalID: name, ChannelType: "rpc", Scope: json.RawMessage(`[]`)},
		Terms: func(context.Context, string) (jobs.Terms, error) {
			return jobs.Terms{Agent: "default", Version: 1, TurnTimeout: time.Minute, QueueCap: 20}, nil
		},
	})
	require.NoError(f.t, err)
	run, err := f.runs.Claim(f.ctx, worker, a.RunID)
	require.NoError(f.t, err)
	return run
}

func (f *fixture) row(id uuid.UUID) db.Run {
	f.t.Helper()
	row, err := db.New().RunGet(f.ctx, f.pool, db.RunGetParams{TenantID: "default", ID: id})
	require.NoError(f.t, err)
	return row
}

func (f *fixture) exec(sql string, args ...any) {
	f.t.Helper()
	_, err := f.pool.Exec(f.ctx, sql, args...)
	require.NoError(f.t, err)
}

func (f *fixture) eventually(what string, ok func() bool) {
	f.t.Helper()
	require.Eventually(f.t, ok, 30*time.Second, 5*time.Millisecond, what)
}

func (f *fixture) workerState(id uuid.UUID) (state string) {
	f.t.Helper()
	require.NoError(f.t, f.pool.QueryRow(f.ctx, `SELECT state FROM worker WHERE id = $1`, id).Scan(&state))
	return state
}

// looks waits until the reaper has looked at all locks n times more.
func (f *fixture) looks(n int) {
	f.t.Helper()
	var last time.Time
	f.eventually("looks of the reaper", func() bool {
		var at *time.Time
		require.NoError(f.t, f.pool.QueryRow(f.ctx, `SELECT max(query_start) FROM pg_stat_activity
			WHERE datname = current_database() AND query LIKE '-- name: WorkerLocks%'`).Scan(&at))
		if at != nil && at.After(last) {
			last = *at
			n--
		}
		return n < 0
	})
}

func TestReaper(t *testing.T) {
	t.Parallel()
	const lease = time.Second // the reaper's own: how long it must have been steady
	reaper := func(f *fixture) *Reaper {
		return NewReaper(f.pool, f.pool.Config().ConnConfig, f.runs, f.log, lease)
	}
	t.Run("RC-146ALostLockIsADeath", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		dead, alive := f.body(time.Hour, true), f.body(time.Hour, true)
		run, other := f.claimed(dead.id), f.claimed(alive.id)
		f.exec(`UPDATE river_job SET state = 'running', attempt = 1, attempted_by = ARRAY[$1::text] WHERE args @> jsonb_build_object('run_id', $2::text)`, dead.id.String(), run.ID.String())
		f.start(reaper(f).Run)
		f.looks(3) // its lock must have been seen before it can be missed
		require.NoError(t, dead.conn.Close(f.ctx))
		f.eventually("reaped", func() bool { return f.workerState(dead.id) == "reaped" })
		row := f.row(run.ID)
		require.Equal(t, db.RunStateQueued, row.State)
		require.Equal(t, run.Epoch+1, row.Epoch)
		require.Equal(t, int32(1), row.Losses)
		var states []string
		require.NoError(t, f.pool.QueryRow(f.ctx, `SELECT array_agg(state::text ORDER BY id) FROM river_job WHERE args @> jsonb_build_object('run_id', $1::text)`, run.ID.String()).Scan(&states))
		require.Equal(t, []string{"discarded", "available"}, states)
		require.Equal(t, db.RunStateRunning, f.row(other.ID).State)
		_, err := f.runs.Advance(f.ctx, run, jobs.Advance{Release: &jobs.Release{}})
		require.ErrorIs(t, err, jobs.ErrFenced)
	})
	t.Run("RC-146ALapsedLeaseIsADeathAlsoWithTheLockHeld", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		frozen := f.body(500*time.Millisecond, true)
		run := f.claimed(frozen.id)
		f.start(reaper(f).Run)
		f.eventually("reaped", func() bool { return f.workerState(frozen.id) == "reaped" })
		require.Equal(t, db.RunStateQueued, f.row(run.ID).State)
	})
	t.Run("AHeartbeatSavesAWorkerWhoseConnectionBroke", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w, gone := f.body(time.Hour, true), f.body(time.Hour, true)
		f.start(func(ctx context.Context) {
			for pause(ctx, 20*time.Millisecond) {
				_, _ = db.New().WorkerHeartbeat(ctx, f.pool, w.id)
			}
		})
		f.start(reaper(f).Run)
		f.looks(3)
		require.NoError(t, w.conn.Close(f.ctx))
		require.NoError(t, gone.conn.Close(f.ctx))
		f.eventually("the silent one is dead", func() bool { return f.workerState(gone.id) == "reaped" })
		require.Equal(t, "live", f.workerState(w.id))
	})
	t.Run("NobodyIsJudgedBeforeTheJudgeWasSteadyForALease", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w := f.body(time.Millisecond, false)
		r := NewReaper(f.pool, f.pool.Config().ConnConfig, f.runs, f.log, time.Hour)
		f.start(r.Run)
		f.looks(10)
		require.Equal(t, "live", f.workerState(w.id))
	})
	t.Run("RC-146ALeaderThatHangsLosesItsDuty", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		hung, err := pgx.ConnectConfig(f.ctx, f.pool.Config().ConnConfig) // as a stopped process leaves it: open and silent
		require.NoError(t, err)
		t.Cleanup(func() { _ = hung.Close(context.Background()) })
		for _, key := range []int64{reaperKey, sweeperKey} {
			_, err = hung.Exec(f.ctx, `SELECT pg_advisory_lock($1)`, key)
			require.NoError(t, err)
		}
		w := f.body(100*time.Millisecond, false)
		run := f.claimed(w.id)
		f.start(reaper(f).Run)
		f.eventually("reaped", func() bool { return f.workerState(w.id) == "reaped" })
		require.Equal(t, db.RunStateQueued, f.row(run.ID).State)
	})
	t.Run("ADeathWhileDrainingIsNoLossOfTheRuns", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w := f.body(100*time.Millisecond, false)
		run := f.claimed(w.id)
		f.exec(`UPDATE worker SET state = 'draining' WHERE id = $1`, w.id)
		f.start(reaper(f).Run)
		f.eventually("reaped", func() bool { return f.workerState(w.id) == "reaped" })
		require.Zero(t, f.row(run.ID).Losses)
	})
}

func TestSweeper(t *testing.T) {
	t.Parallel()
	sweeper := func(f *fixture) *Sweeper {
		s := NewSweeper(f.pool, f.pool.Config().ConnConfig, f.runs, f.log, Retention{})
		f.start(s.Run)
		return s
	}
	t.Run("NudgesAgainWhatLostItsJob", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w := f.body(time.Hour, false)
		run := f.claimed(w.id)
		_, err := f.runs.Advance(f.ctx, run, jobs.Advance{Release: &jobs.Release{}})
		require.NoError(t, err)
		f.exec(`DELETE FROM river_job`)
		f.exec(`UPDATE run SET nudged_at = nudged_at - interval '6 seconds'`)
		s := sweeper(f)
		f.eventually("nudged", func() bool { return s.Repairs()[RepairNudge] == 1 })
		var n int
		require.NoError(t, f.pool.QueryRow(f.ctx, `SELECT count(*) FROM river_job WHERE state = 'available'`).Scan(&n))
		require.Equal(t, 1, n)
	})
	t.Run("NudgesAgainWhatAWorkerFetchedWithoutAnAnswer", func(t *testing.T) { // its commit came, and the connection broke
		t.Parallel()
		f := setup(t)
		w := f.body(time.Hour, false)
		fetched := func(ago string) uuid.UUID {
			run := f.claimed(w.id)
			_, err := f.runs.Advance(f.ctx, run, jobs.Advance{Release: &jobs.Release{}})
			require.NoError(t, err)
			f.exec(`UPDATE river_job SET state = 'running', attempt = 1, attempted_by = ARRAY[$1::text], attempted_at = clock_timestamp() - $2::interval
				WHERE args ->> 'run_id' = $3 AND state = 'available'`, w.id.String(), ago, run.ID.String())
			return run.ID
		}
		lost, inHand := fetched("11 seconds"), fetched("2 seconds")
		f.exec(`UPDATE run SET nudged_at = nudged_at - interval '1 minute'`)
		s := sweeper(f)
		f.eventually("nudged", func() bool { return s.Repairs()[RepairNudge] == 1 })
		available := func(id uuid.UUID) (n int) {
			require.NoError(t, f.pool.QueryRow(f.ctx, `SELECT count(*) FROM river_job WHERE state = 'available' AND args ->> 'run_id' = $1`, id.String()).Scan(&n))
			return n
		}
		require.Equal(t, 1, available(lost))
		require.Zero(t, available(inHand))
	})
	t.Run("LeavesWhatWaitsForASlotAlone", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w := f.body(time.Hour, false)
		run := f.claimed(w.id)
		_, err := f.runs.Advance(f.ctx, run, jobs.Advance{Release: &jobs.Release{}})
		require.NoError(t, err)
		f.exec(`UPDATE run SET nudged_at = nudged_at - interval '1 hour'`)
		f.exec(`UPDATE river_job SET scheduled_at = scheduled_at - interval '1 hour'`)
		orphan := f.claimed(w.id) // its repair shows that a whole sweep has passed
		f.exec(`UPDATE worker SET state = 'reaped' WHERE id = $1`, w.id)
		s := sweeper(f)
		f.eventually("orphan", func() bool { return s.Repairs()[RepairOrphan] == 1 })
		require.Equal(t, db.RunStateQueued, f.row(orphan.ID).State)
		require.Zero(t, s.Repairs()[RepairNudge])
	})
	t.Run("EndsWaitsWhenTheyAreDue", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		s := sweeper(f)
		run := f.claimed(f.body(time.Hour, false).id)
		_, err := f.runs.Advance(f.ctx, run, jobs.Advance{Park: &jobs.Park{Kind: db.WaitKindTimer, For: 50 * time.Millisecond}})
		require.NoError(t, err)
		f.eventually("queued", func() bool { return f.row(run.ID).State == db.RunStateQueued })
		require.Zero(t, s.Repairs()[RepairWait])
	})
	t.Run("PromotesALaneWithoutAHead", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		run := f.claimed(f.body(time.Hour, false).id)
		f.n-- // the same session again
		second, err := f.runs.Accept(f.ctx, jobs.AcceptParams{
			TenantID: "default", Input: json.RawMessage(`{"text":"hi"}`), SessionID: run.SessionID,
			Terms: func(context.Context, string) (jobs.Terms, error) {
				return jobs.Terms{Agent: "default", Version: 1, TurnTimeout: time.Minute, QueueCap: 20}, nil
			},
		})
		require.NoError(t, err)
		require.Equal(t, 1, second.Position)
		f.exec(`UPDATE run SET state = 'completed', worker_id = NULL, finished_at = now() WHERE id = $1`, run.ID) // behind the state machine's back
		s := sweeper(f)
		f.eventually("promoted", func() bool { return s.Repairs()[RepairLane] == 1 })
		require.NotNil(t, f.row(second.RunID).AdmittedAt)
	})
	t.Run("EndsWhatItsDeadlineHasPassed", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		run := f.claimed(f.body(time.Hour, false).id)
		f.exec(`UPDATE run SET deadline_at = now() - interval '1 minute'`)
		s := sweeper(f)
		f.eventually("timed out", func() bool { return s.Repairs()[RepairDeadline] == 1 })
		require.Equal(t, db.RunStateTimedOut, f.row(run.ID).State)
	})
}
