package jobs

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/db"
)

// closed closes the fast path, as a busy fleet does.
func (f *fixture) closed() {
	f.t.Helper()
	f.exec(`UPDATE queue SET open = false`)
}

func (f *fixture) tenant(name string, weight float64, maxRunning *int) {
	f.t.Helper()
	f.exec(`INSERT INTO tenant (id, weight, max_running) VALUES ($1, $2, $3) ON CONFLICT (id) DO UPDATE SET weight = $2, max_running = $3`, name, weight, maxRunning)
}

// waiting accepts n turns of a tenant, each in a session of its own.
func (f *fixture) waiting(tenant string, n int) (ids []uuid.UUID) {
	f.t.Helper()
	ids = make([]uuid.UUID, n)
	f.parallel(n, func(i int) error {
		p := f.params(fmt.Sprintf("%s-%d", tenant, i))
		p.TenantID = tenant
		a, err := f.runs.Accept(f.ctx, p)
		if err == nil {
			ids[i] = a.RunID
		}
		return err
	})
	return ids
}

// fetched takes the jobs that River holds, as a worker would.
func (f *fixture) fetched() (ids []uuid.UUID) {
	f.t.Helper()
	rows, err := f.pool.Query(f.ctx, `WITH j AS (UPDATE river_job SET state = 'completed', finalized_at = now() WHERE state = 'available' RETURNING id, args)
		SELECT (args ->> 'run_id')::uuid FROM j ORDER BY id`)
	require.NoError(f.t, err)
	for rows.Next() {
		var id uuid.UUID
		require.NoError(f.t, rows.Scan(&id))
		ids = append(ids, id)
	}
	require.NoError(f.t, rows.Err())
	return ids
}

// started claims everything that may start, round after round, until n have.
// It returns the tenants in the order of their starts.
func (f *fixture) started(worker uuid.UUID, n int) (tenants []string, runs []*Run) {
	f.t.Helper()
	deadline := time.Now().Add(limit)
	for len(runs) < n {
		require.Less(f.t, time.Now(), deadline, "%d of %d started", len(runs), n)
		require.NoError(f.t, f.admit())
		for _, id := range f.fetched() {
			run, err := f.runs.Claim(f.ctx, worker, id)
			require.NoError(f.t, err)
			tenants, runs = append(tenants, run.TenantID), append(runs, run)
		}
		time.Sleep(busyRound)
	}
	return tenants, runs
}

func TestAdmission(t *testing.T) {
	t.Parallel()
	t.Run("WhatCannotStartAtOnceWaitsInItsRow", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.closed()
		a := f.accept("s")
		require.Equal(t, db.RunStateQueued, f.state(a.RunID))
		require.Empty(t, f.fetched())
		_, err := f.runs.Claim(f.ctx, f.worker(), a.RunID)
		require.ErrorIs(t, err, ErrNotQueued)
		require.NoError(t, f.admit())
		require.Equal(t, []uuid.UUID{a.RunID}, f.fetched())
		f.claim(a.RunID)
		require.Equal(t, 1, f.count(`SELECT count(*) FROM run WHERE ready_at IS NULL AND admitted_at IS NOT NULL`))
	})
	t.Run("TheFastPathOpensWhenNobodyWaitsAndClosesWhenTheFleetIsFull", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.exec(`UPDATE queue SET open = false, looked_at = '-infinity'`)
		worker := f.worker()
		open := func() int { return f.count(`SELECT count(*) FROM queue WHERE name = 'turns' AND open`) }
		require.NoError(t, f.admit())
		require.Equal(t, 1, open())
		for i := range 20 { // one slot: River holds more than starts
			f.accept(fmt.Sprint("s", i))
		}
		require.NoError(t, f.admit())
		require.Equal(t, 0, open())
		late := f.accept("late")
		require.Equal(t, 20, f.count(`SELECT count(*) FROM run WHERE ready_at IS NOT NULL`))
		_, runs := f.started(worker, 21)
		require.Equal(t, late.RunID, runs[20].ID)
		for _, r := range runs {
			_, err := f.runs.Advance(f.ctx, r, Advance{End: completed()})
			require.NoError(t, err)
		}
		f.admitter.counted = time.Time{} // it counts once a second
		require.NoError(t, f.admit())
		require.Equal(t, 1, open())
	})
	t.Run("ABurstIsNotAdmittedWhole", func(t *testing.T) { // between two looks of the admitter
		t.Parallel()
		f := setup(t)
		f.worker()
		f.exec(`UPDATE worker SET queue_slots = array_fill(8, ARRAY[cardinality(queues)])`)
		require.NoError(t, f.admit())
		f.waiting("default", 40)
		require.Len(t, f.fetched(), 9, "eight slots, and what the fleet starts soon")
		require.Equal(t, 31, f.count(`SELECT count(*) FROM run WHERE ready_at IS NOT NULL`))
	})
	t.Run("OnlySoManyMayWait", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.exec(`UPDATE queue SET max_waiting = 5, open = false`)
		accepted := make([]bool, 40)
		f.parallel(40, func(i int) error {
			_, err := f.runs.Accept(f.ctx, f.params(fmt.Sprint("s", i)))
			accepted[i] = err == nil
			if _, full := errors.AsType[*FullError](err); full {
				return nil
			}
			return err
		})
		n := f.count(`SELECT count(*) FROM run`)
		require.GreaterOrEqual(t, n, 5)
		require.LessOrEqual(t, n, 10, "each of the two writers sees what the other has committed")
		require.Equal(t, n, f.count(`SELECT count(*) FROM session`))
	})
	t.Run("AFastPathWhoseAdmitterIsGoneIsClosed", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.exec(`UPDATE queue SET open = true, free = 100, looked_at = clock_timestamp() - interval '6 seconds'`)
		f.accept("s")
		require.Empty(t, f.fetched())
	})
	t.Run("RIVER-19TenantsShareByTheirWeights", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.closed()
		f.tenant("light", 1, nil)
		f.tenant("heavy", 3, nil)
		f.waiting("light", 60)
		f.waiting("heavy", 60)
		tenants, _ := f.started(f.worker(), 80)
		heavy := 0
		for _, tenant := range tenants[:80] {
			if tenant == "heavy" {
				heavy++
			}
		}
		require.InDelta(t, 60, heavy, 6)
	})
	t.Run("RIVER-19ALongQueueDelaysNobodyElse", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.closed()
		f.tenant("big", 1, nil)
		f.waiting("big", 300)
		worker := f.worker()
		f.started(worker, 20)
		var small []string
		for i := range 10 {
			name := fmt.Sprint("small", i)
			f.tenant(name, 1, nil)
			f.waiting(name, 2)
			small = append(small, name, name)
		}
		tenants, _ := f.started(worker, 80)
		first := slices.DeleteFunc(slices.Clone(tenants[:60]), func(s string) bool { return s == "big" })
		slices.Sort(first)
		slices.Sort(small)
		require.Equal(t, small, first)
	})
	t.Run("ALimitIsNeverExceeded", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		three := 3
		f.tenant("capped", 1, &three)
		f.tenant("free", 1, nil)
		f.exec(`UPDATE queue SET open = true, free = 1000000, looked_at = 'infinity'`) // also while others take the fast path
		f.waiting("capped", 12)
		f.waiting("free", 5)
		worker := f.worker()
		held := func() int {
			return f.count(`SELECT count(*) FROM run WHERE tenant_id = 'capped' AND (state = 'running' OR state = 'queued' AND admitted_at IS NOT NULL)`)
		}
		done := 0
		deadline := time.Now().Add(limit)
		for done < 12 {
			require.Less(t, time.Now(), deadline)
			require.NoError(t, f.admit())
			require.LessOrEqual(t, held(), 3)
			for i, id := range f.fetched() {
				run, err := f.runs.Claim(f.ctx, worker, id)
				require.NoError(t, err)
				if run.TenantID != "capped" {
					continue
				}
				if i%2 == 0 && run.Epoch == 1 { // its worker dies: the slot stays the run's
					_, err := f.runs.Reap(f.ctx, Ref{ID: run.ID, Session: run.SessionID}, worker, false, false)
					require.NoError(t, err)
					require.LessOrEqual(t, held(), 3)
					continue
				}
				_, err = f.runs.Advance(f.ctx, run, Advance{End: completed()})
				require.NoError(t, err)
				done++
			}
		}
		require.Equal(t, 0, held())
	})
	t.Run("AllLimitsOrNone", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		worker := f.worker()
		two, five := 2, 5
		f.tenant("default", 1, &five)
		f.exec(`UPDATE agent SET max_running = $1 WHERE name = 'default'`, two)
		f.exec(`UPDATE queue SET max_running = 4 WHERE name = 'turns'`)
		f.waiting("default", 6)
		for i := range 4 {
			f.exec(`INSERT INTO agent (tenant_id, name, id, version) VALUES ('default', $1, gen_random_uuid(), 1)`, fmt.Sprint("other", i))
			p := f.params(fmt.Sprint("o", i))
			p.Terms = agentTerms(fmt.Sprint("other", i))
			_, err := f.runs.Accept(f.ctx, p)
			require.NoError(t, err)
		}
		_, runs := f.started(worker, 4)
		for range 5 {
			time.Sleep(busyRound)
			require.NoError(t, f.admit())
		}
		require.Empty(t, f.fetched(), "of the queue")
		by := map[string]int{}
		for _, run := range runs {
			by[run.Agent]++
		}
		require.LessOrEqual(t, by["default"], two, "of the agent: %v", by)
		_, err := f.runs.Advance(f.ctx, runs[0], Advance{End: completed()})
		require.NoError(t, err)
		f.started(worker, 1)
	})
	t.Run("APausedQueueAdmitsNothing", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		before := f.accept("before")
		n, err := f.runs.queries.QueuePause(f.ctx, f.pool, QueueTurns)
		require.NoError(t, err)
		require.Equal(t, int64(1), n)
		n, err = f.runs.queries.QueueTakeBack(f.ctx, f.pool, QueueTurns)
		require.NoError(t, err)
		require.Equal(t, int64(1), n)
		after := f.accept("after")
		require.NoError(t, f.admit())
		for _, id := range f.fetched() { // the nudge from before is spare
			_, err := f.runs.Claim(f.ctx, f.worker(), id)
			require.ErrorIs(t, err, ErrNotQueued)
		}
		_, err = f.runs.queries.QueueResume(f.ctx, f.pool, QueueTurns)
		require.NoError(t, err)
		_, runs := f.started(f.worker(), 2)
		require.ElementsMatch(t, []uuid.UUID{before.RunID, after.RunID}, []uuid.UUID{runs[0].ID, runs[1].ID})
	})
	t.Run("AWaitingRunHoldsNoSlotAndComesBackFirst", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		one := 1
		f.tenant("default", 1, &one)
		ids := f.waiting("default", 1)
		worker := f.worker()
		_, runs := f.started(worker, 1)
		f.waiting("default", 2)
		_, err := f.runs.Advance(f.ctx, runs[0], Advance{Park: &Park{Kind: db.WaitKindTimer, For: time.Hour}})
		require.NoError(t, err)
		_, next := f.started(worker, 1) // another has its slot
		require.NotEqual(t, ids[0], next[0].ID)
		_, err = f.runs.Wake(f.ctx, Ref{ID: ids[0]}, db.WaitKindTimer)
		require.NoError(t, err)
		require.NoError(t, f.admit())
		require.Empty(t, f.fetched(), "it waits for the slot")
		_, err = f.runs.Advance(f.ctx, next[0], Advance{End: completed()})
		require.NoError(t, err)
		_, again := f.started(worker, 1)
		require.Equal(t, ids[0], again[0].ID, "before what has not begun")
	})
	t.Run("TheNextOfALaneWaitsItsTurnToo", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.tenant("big", 1, nil)
		var lane []uuid.UUID
		for range 3 {
			p := f.params("lane")
			p.TenantID = "big"
			a, err := f.runs.Accept(f.ctx, p)
			require.NoError(t, err)
			lane = append(lane, a.RunID)
		}
		run, err := f.runs.Claim(f.ctx, f.worker(), f.fetched()[0])
		require.NoError(t, err)
		f.closed()
		_, err = f.runs.Advance(f.ctx, run, Advance{End: completed()})
		require.NoError(t, err)
		require.Equal(t, 1, f.count(`SELECT count(*) FROM run WHERE ready_at IS NOT NULL`))
		c, err := f.runs.Cancel(f.ctx, "big", lane[1], "")
		require.NoError(t, err)
		require.Equal(t, "cancelled", c.Status)
		_, runs := f.started(f.worker(), 1)
		require.Equal(t, lane[2], runs[0].ID)
	})
	t.Run("TwoAdmittersAtOnceDoubleNothing", func(t *testing.T) { // as when a leader's end goes unnoticed
		t.Parallel()
		f := setup(t)
		g := f.another()
		f.closed()
		f.waiting("default", 200)
		worker := f.worker()
		seen := map[uuid.UUID]int{}
		deadline := time.Now().Add(limit)
		for len(seen) < 200 {
			require.Less(t, time.Now(), deadline)
			var wg sync.WaitGroup
			for _, m := range []*fixture{f, g} {
				wg.Go(func() { require.NoError(t, m.admit()) })
			}
			wg.Wait()
			for _, id := range f.fetched() {
				seen[id]++
				_, err := f.runs.Claim(f.ctx, worker, id)
				require.NoError(t, err)
			}
		}
		for id, n := range seen {
			require.Equal(t, 1, n, id)
		}
	})
}

func TestVirtualTime(t *testing.T) {
	t.Parallel()
	q := &admissionQueue{name: "turns", virtual: map[string]float64{}}
	flowOf := func(tenant string, weight float64) *flow {
		return &flow{flowKey{"turns", tenant, "a"}, weight, -1, -1}
	}
	a, b := flowOf("a", 1), flowOf("b", 1)
	q.nextUp([]*flow{a}, 10)
	q.virtual["a"] = 100 // a had the fleet for itself
	next, weights := q.nextUp([]*flow{a, b}, 10)
	require.Len(t, next, 2)
	require.InDelta(t, 2, weights, 0)
	require.InDelta(t, 100, q.virtual["b"], 0, "who comes earns nothing by having been away")
	q.virtual["a"] = 150
	q.nextUp([]*flow{b}, 10) // a has nothing just now
	q.nextUp([]*flow{a, b}, 10)
	require.InDelta(t, 150, q.virtual["a"], 0, "and loses no debt")
	next, _ = q.nextUp([]*flow{a, b}, 1)
	require.Equal(t, []*flow{b}, next)
	q.virtual["b"] = math.Inf(1)
	next, _ = q.nextUp([]*flow{a, b}, 1)
	require.Equal(t, []*flow{a}, next)
}

func agentTerms(name string) func(context.Context, string) (Terms, error) {
	return func(context.Context, string) (Terms, error) {
		return Terms{Agent: name, Version: 1, TurnTimeout: time.Minute, QueueCap: 20}, nil
	}
}
