package faults

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// noFault is a mixed load and nothing else: the sweeper finds nothing to repair.
func noFault(t *testing.T) {
	f := newFleet(t)
	f.judge()
	f.api()
	f.workers(2)
	stopWatch := f.watch(200 * time.Millisecond)
	stop := f.load(4, 100*time.Millisecond, f.mixed)
	pause(t.Context(), 15*time.Second)
	stop()
	stopWatch()
	f.promises(leave{})
	require.Zero(t, one[int](f, `SELECT coalesce(sum(losses), 0) FROM run`))
}

// backlog has one tenant queue far more than there are slots for, and another
// send one turn after the other.
func backlog(t *testing.T) {
	f := newFleet(t)
	f.judge()
	a := f.api()
	f.workers(2, "--slots", "4")
	small := f.clientOf(a.ready.API, f.newToken("small"))
	_, err := small.CreateAgent(f.limited(), f.tools.config(agentName), "small")
	require.NoError(t, err)
	const turn = 400 * time.Millisecond
	const queued = 250
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			for range queued / 10 {
				if _, err := f.trySend(t.Context(), a.client, say("!sleep 400ms\n")); err != nil {
					t.Errorf("send: %v", err)
				}
			}
		})
	}
	wg.Wait()
	var waits []time.Duration
	for range 12 {
		s, err := f.trySend(t.Context(), small, say("!sleep 400ms\n"))
		require.NoError(t, err)
		f.ended(s)
		waits = append(waits, time.Duration(one[float64](f, `SELECT extract(epoch FROM started_at - created_at)::float8 FROM run WHERE id = $1`, s.id)*float64(time.Second)))
	}
	left := one[int](f, `SELECT count(*) FROM run WHERE tenant_id = 'default' AND finished_at IS NULL`)
	require.Positive(t, left, "the backlog ended too early to delay anybody")
	slices.Sort(waits)
	t.Logf("beside a backlog of %d on 8 slots, of which %d were left, the other tenant's turns of %s began after %s at the median, %s at most",
		queued, left, turn, quantile(waits, 0.5), quantile(waits, 1))
	require.Less(t, quantile(waits, 0.5), 2*turn, "within two turns")
	require.Less(t, quantile(waits, 1), 2*turn+2*time.Second) // on a busy machine
	f.promises(leave{})
}

// providerFaults has the model fail in every way it can.
func providerFaults(t *testing.T) {
	f := newFleet(t)
	f.judge()
	a := f.api()
	f.workers(2)
	stopWatch := f.watch(200 * time.Millisecond)
	var list []*sent
	for _, script := range []string{
		"!status 429 retry-after=1\n", "!status 429 times=3 retry-after=1\n", "!status 500\n", "!status 500 times=2\n", "!status 503 retry-after=1\n",
		"!status 529 times=2\n", "!status 502\n!tool again {\"at\":\"AT\"}\n", "!tool once {\"at\":\"AT\"}\n!status 500\n",
	} {
		for range 3 {
			list = append(list, f.send(say(strings.ReplaceAll(script, "AT", label("at")))))
		}
	}
	for script, end := range map[string]string{
		"!error broken\n": "failed", "!status 400\n": "failed", "!status 401\n": "failed", "!status 500 times=9\n": "failed",
	} {
		m := say(script)
		m.ends = []string{end}
		list = append(list, f.send(m))
	}
	m := say("!stall\n")
	m.ends = []string{"cancelled"}
	stalled := f.send(m)
	f.ended(list...)
	_, err := a.client.CancelRun(f.limited(), stalled.id, "it never answers")
	require.NoError(t, err)
	f.ended(stalled)
	stopWatch()
	f.promises(leave{})
	for _, c := range f.tools.all() {
		require.Len(t, f.tools.from(c.At), 1)
	}
}

// parkedRuns parks many runs at once on a provider's limit: they must hold no
// slot and little memory, and all come back soon after.
func parkedRuns(t *testing.T) {
	n := 10_000
	if text := os.Getenv(envParked); text != "" {
		var err error
		n, err = strconv.Atoi(text)
		require.NoError(t, err)
	}
	f := newFleet(t)
	f.judge()
	f.api()
	w := f.worker()
	f.ended(f.send(say(""))) // warm
	type gauge struct{ rss, goroutines float64 }
	gaugeOf := func() gauge {
		return gauge{f.metric(w, "process_resident_memory_bytes") / (1 << 20), f.metric(w, "go_goroutines")}
	}
	before := gaugeOf()
	hold := 100 * time.Second // so that all are parked at once
	var wg sync.WaitGroup
	began := time.Now()
	for i := range 32 {
		wg.Go(func() {
			for range n/32 + map[bool]int{true: 1}[i < n%32] {
				if _, err := f.trySend(t.Context(), f.client(), say(fmt.Sprintf("!status 429 key=k retry-after=%d\n", int(hold.Seconds())))); err != nil {
					t.Errorf("send: %v", err)
					return
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d turns were accepted in %s", n, time.Since(began).Round(100*time.Millisecond))
	f.until(hold-time.Since(began), "all are parked", func() bool { return f.is(`SELECT count(*) = $1 FROM wait`, n) })
	parked := gaugeOf()
	require.True(t, f.is(`SELECT count(*) = 0 FROM run WHERE state = 'running' OR admitted_at IS NOT NULL AND state = 'queued'`), "none holds a slot")
	s := f.send(say("")) // and the slots are there for others
	require.Less(t, f.ended(s), 5*time.Second)
	// The provider relents: all may go on from now, give or take their jitter.
	f.exec(`UPDATE wait SET until = clock_timestamp() + random() * interval '2 seconds'`)
	due := time.Now()
	f.until(2*stepLimit, "all have ended", func() bool { return f.is(`SELECT NOT EXISTS (SELECT FROM run WHERE finished_at IS NULL)`) })
	took := time.Since(due)
	after := gaugeOf()
	t.Logf("%d parked runs came back and ended in %s; the worker had %.0f MB and %.0f goroutines before, %.0f MB and %.0f with all parked, %.0f MB and %.0f at the end",
		n, took.Round(100*time.Millisecond), before.rss, before.goroutines, parked.rss, parked.goroutines, after.rss, after.goroutines)
	require.Less(t, took, 30*time.Second)
	require.Less(t, parked.goroutines, before.goroutines+50, "a parked run has no goroutine")
	require.Less(t, parked.rss, before.rss+100, "nor memory")
	f.promises(leave{repairs: true})
}

// soak draws faults for as long as it is told, under a mixed load.
func soak(t *testing.T, d time.Duration) {
	f := newFleetOn(t, newServer(t, nil))
	f.judge()
	f.judge()
	apis := []*api{f.api(), f.api()}
	type seat struct {
		*process
		proxy *proxy
	}
	var seats []*seat
	for range 3 {
		s := &seat{proxy: newProxy(t, f.server.address())}
		seats = append(seats, s)
	}
	sit := func(s *seat) {
		f.proxy = s.proxy
		s.process = f.worker()
		f.proxy = nil
	}
	for _, s := range seats {
		sit(s)
	}
	stopWatch := f.watch(2 * time.Second)
	stop := f.load(6, 400*time.Millisecond, f.mixed)
	stopCancels := f.cancelSome()
	said := map[string]int{}
	faults := []struct {
		name string
		do   func()
	}{
		{"kill a worker", func() { s := drawn(f.random, seats); s.kill(); sit(s) }},
		{"kill two workers", func() {
			s := seats[f.random.n(3)]
			other := seats[f.random.n(3)]
			s.kill()
			other.kill()
			sit(s)
			if other != s {
				sit(other)
			}
		}},
		{"stop a worker", func() {
			s := drawn(f.random, seats)
			s.signal(syscall.SIGSTOP)
			pause(t.Context(), f.random.between(100*time.Millisecond, 2*lease))
			s.signal(syscall.SIGCONT)
		}},
		{"drain a worker", func() {
			s := drawn(f.random, seats)
			s.signal(syscall.SIGTERM)
			if code := s.exit(); code != 0 {
				t.Errorf("a drained worker ended with %d", code)
			}
			sit(s)
		}},
		{"kill an API", func() { a := drawn(f.random, apis); a.kill(); f.restart(a) }},
		{"kill a judge", func() { drawn(f.random, f.living("scheduler")).kill(); f.judge() }},
		{"terminate connections", func() {
			for range 10 {
				_, _ = f.pool.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name <> 'test' ORDER BY random() LIMIT 2`)
				pause(t.Context(), 100*time.Millisecond)
			}
		}},
		{"restart Postgres", func() { f.server.restart(t, syscall.SIGINT, f.random.between(0, 2*time.Second)) }},
		{"crash Postgres", func() { f.server.restart(t, syscall.SIGQUIT, f.random.between(0, 2*lease)) }},
		{"freeze Postgres", func() { f.server.freeze(t.Context(), f.random.between(200*time.Millisecond, 2*lease)) }},
		{"drop a worker's packets", func() {
			s := drawn(f.random, seats)
			s.proxy.drop()
			pause(t.Context(), f.random.between(time.Second, 2*lease))
			s.proxy.heal()
		}},
		{"hold a worker's packets", func() {
			s := drawn(f.random, seats)
			s.proxy.hold()
			pause(t.Context(), f.random.between(100*time.Millisecond, 2*lease))
			s.proxy.heal()
		}},
		{"cut a worker's connections", func() { drawn(f.random, seats).proxy.cut() }},
		{"deafen a worker", func() {
			s := drawn(f.random, seats)
			s.proxy.deafListeners()
			pause(t.Context(), f.random.between(time.Second, 10*time.Second))
			s.proxy.heal()
		}},
		{"pause a queue", func() {
			c := f.client()
			for _, method := range []string{"queue.pause", "queue.resume"} {
				if err := c.Call(f.limited(), method, map[string]any{"queue": "turns"}, nil); err != nil {
					t.Errorf("%s: %v", method, err)
				}
				pause(t.Context(), f.random.between(0, 2*time.Second))
			}
		}},
	}
	began := time.Now()
	for time.Since(began) < d && !t.Failed() {
		fault := drawn(f.random, faults)
		said[fault.name]++
		fault.do()
		pause(t.Context(), f.random.between(500*time.Millisecond, 4*time.Second))
		for _, s := range seats {
			if s.ended() {
				t.Errorf("a worker ended by itself after %q", fault.name)
			}
		}
		if said[fault.name]%10 == 0 {
			t.Logf("%s: %d turns accepted; faults so far %v", time.Since(began).Round(time.Second), f.accepted(), said)
		}
	}
	stopCancels()
	stop()
	stopWatch()
	t.Logf("soak: seed %d, %s, %d turns, faults %v", seed, time.Since(began).Round(time.Second), f.accepted(), said)
	f.promises(leave{repairs: true, late: true})
}

func (f *fleet) accepted() int {
	f.book.mu.Lock()
	defer f.book.mu.Unlock()
	return len(f.book.runs)
}

// cancelSome sends turns that never end by themselves, and cancels them.
func (f *fleet) cancelSome() (stop func()) {
	ctx, cancel := context.WithCancel(f.t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			m := say("!stall\n")
			m.ends = []string{"cancelled"}
			sending, done := context.WithTimeout(context.WithoutCancel(ctx), 4*time.Minute)
			s, err := f.trySend(sending, f.client(), m)
			if err == nil {
				pause(ctx, f.random.between(0, 3*time.Second))
				_, err = f.client().CancelRun(sending, s.id, "soak")
			}
			done()
			if err != nil {
				f.t.Errorf("cancel: %v", err)
				return
			}
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}
}

// TestSoak is row RIVER-30: make soak DURATION=30m SEED=1.
func TestSoak(t *testing.T) {
	text := os.Getenv(envSoak)
	if text == "" {
		t.Skipf("runs with %s=30m (make soak)", envSoak)
	}
	d, err := time.ParseDuration(text)
	require.NoError(t, err)
	t.Logf("%s=%d repeats what this run draws", envSeed, seed)
	soak(t, d)
}
