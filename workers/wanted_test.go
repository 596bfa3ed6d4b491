package workers

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/db"
)

// TestWanted is what an operator asked of a worker that loses its lease.
func TestWanted(t *testing.T) {
	t.Parallel()
	short := func(c *Config) { c.Heartbeat, c.Lease = 50*time.Millisecond, time.Second }
	// declared declares a worker dead, and says what is wanted of it at the last
	// moment, when it will not hear it any more.
	declared := func(f *fixture, id uuid.UUID, wanted string) {
		_, err := f.pool.Exec(f.ctx, `UPDATE worker SET state = 'dead', ended_at = clock_timestamp(), wanted = nullif($2, '') WHERE id = $1`, id, wanted)
		require.NoError(f.t, err)
	}

	t.Run("QuietStaysQuiet", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w, _ := f.worker(short)
		before := w.ID()
		said, err := w.queries.WorkerWant(f.ctx, f.pool, db.WorkerWantParams{ID: before, Wanted: "quiet"})
		require.NoError(t, err)
		require.Equal(t, []string{"quiet"}, said)
		declared(f, before, "quiet")
		require.Eventually(t, func() bool { return w.ID() != before }, 20*time.Second, 10*time.Millisecond, "it joins again")
		var wanted string
		require.NoError(t, f.pool.QueryRow(f.ctx, `SELECT coalesce(wanted, '') FROM worker WHERE id = $1`, w.ID()).Scan(&wanted))
		require.Equal(t, "quiet", wanted)

		a := f.send("s", "hello")
		other, _ := f.worker(nil)
		f.outcome(a.RunID)
		var by uuid.UUID
		require.NoError(t, f.pool.QueryRow(f.ctx, `SELECT (attempted_by[array_upper(attempted_by, 1)])::uuid FROM river_job`).Scan(&by))
		require.Equal(t, other.ID(), by)
	})
	t.Run("DrainLeaves", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w, _ := f.worker(short)
		declared(f, w.ID(), "drain")
		require.Eventually(t, func() bool {
			var left int
			require.NoError(t, f.pool.QueryRow(f.ctx, `SELECT count(*) FROM worker WHERE state = 'left' AND wanted = 'drain'`).Scan(&left))
			return left == 1
		}, 20*time.Second, 10*time.Millisecond)
	})
	t.Run("NothingWantedFetchesAgain", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w, _ := f.worker(short)
		before := w.ID()
		declared(f, before, "")
		require.Eventually(t, func() bool { return w.ID() != before }, 20*time.Second, 10*time.Millisecond)
		require.True(t, f.outcome(f.send("s", "hello").RunID).Ended())
	})
}

// TestPolls is a worker behind a pooler that nothing goes past.
func TestPolls(t *testing.T) {
	t.Parallel()
	f := setup(t)
	w, _ := f.worker(func(c *Config) { c.Direct = nil })
	require.True(t, f.outcome(f.send("s", "hello").RunID).Ended())
	var locks int
	require.NoError(t, f.pool.QueryRow(f.ctx, `SELECT count(*) FROM pg_locks l JOIN worker w ON w.lock_key = (l.classid::bigint << 32) | l.objid::bigint
		WHERE l.locktype = 'advisory' AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND w.id = $1`, w.ID()).Scan(&locks))
	require.Zero(t, locks)
}
