package scheduler

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func TestTerm(t *testing.T) {
	t.Parallel()
	f := setup(t)
	leads := func(term *term) bool {
		t.Helper()
		ok, err := term.leads(f.ctx)
		require.NoError(t, err)
		return ok
	}
	first, second := newTerm(f.pool, "sweeper", sweeperKey), newTerm(f.pool, "sweeper", sweeperKey)
	require.True(t, leads(first))
	require.True(t, leads(first), "without a question")
	require.False(t, leads(second), "one at a time")
	first.leave(f.ctx)
	require.True(t, leads(second), "it was left")

	// One with a session of its own goes first.
	direct, err := pgx.ConnectConfig(f.ctx, f.pool.Config().ConnConfig)
	require.NoError(t, err)
	defer direct.Close(context.Background())
	led, err := elect(f.ctx, direct, sweeperKey, time.Hour, false)
	require.NoError(t, err)
	require.True(t, led)
	second.asked = time.Time{} // it is time to renew
	require.False(t, leads(second))
	_, err = direct.Exec(f.ctx, "SELECT pg_advisory_unlock_all()")
	require.NoError(t, err)
	require.True(t, leads(second))

	// Whoever hangs loses it.
	_, err = f.pool.Exec(f.ctx, "UPDATE duty SET until = clock_timestamp() WHERE name = 'sweeper'")
	require.NoError(t, err)
	require.True(t, leads(first))
	second.asked = time.Time{}
	require.False(t, leads(second))
}

// TestDutiesThroughAPooler are the duties of processes that hold no lock.
func TestDutiesThroughAPooler(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for range 2 { // of which one leads
		f.start(NewReaper(f.pool, nil, f.runs, f.log, 200*time.Millisecond).Run)
		f.start(NewSweeper(f.pool, nil, f.runs, f.log, Retention{}).Run)
		f.start(NewAdmission(f.pool, nil, f.runs, f.log).Run)
	}
	w := f.body(300*time.Millisecond, true)
	run := f.claimed(w.id)
	require.NoError(t, w.conn.Close(f.ctx)) // says nothing to it
	require.Eventually(t, func() bool { return f.workerState(w.id) == "reaped" }, 20*time.Second, 10*time.Millisecond, "its lease lapsed")
	var state string
	require.NoError(t, f.pool.QueryRow(f.ctx, `SELECT state FROM run WHERE id = $1`, run.ID).Scan(&state))
	require.Equal(t, "queued", state)

	// The admitter opens the fast path, and admits what waits.
	require.Eventually(t, func() bool {
		var looked bool
		require.NoError(t, f.pool.QueryRow(f.ctx, `SELECT looked_at > clock_timestamp() - interval '5 seconds' AND isfinite(looked_at) FROM queue WHERE name = 'turns'`).Scan(&looked))
		return looked
	}, 20*time.Second, 10*time.Millisecond)
}
