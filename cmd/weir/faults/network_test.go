package faults

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/client"
)

// takenWithin is how long after a partition others have all runs of the one cut
// off: the lease, or what the server leaves an open transaction (5 s), and time
// to claim on a busy machine.
const takenWithin = 5*time.Second + 7*time.Second

// partition cuts a worker off from the database in several ways, with calls in
// its hands. It must let go of them before others may take its runs.
func partition(t *testing.T) {
	for _, c := range []struct {
		name   string
		always bool
		inside bool // a transaction
		cut    func(*proxy)
	}{
		{"Drop", true, false, (*proxy).drop},
		{"HoldInsideATransaction", true, true, (*proxy).hold}, // what was said arrives when the partition heals
		{"Hold", false, false, (*proxy).hold},
		{"HalfOpen", false, false, (*proxy).halfOpen},
	} {
		t.Run(c.name, func(t *testing.T) {
			if !all && !c.always {
				t.Skipf("runs with %s=1", envAll)
			}
			t.Parallel()
			f := newFleet(t)
			f.judge()
			f.api()
			f.proxy = newProxy(t, f.server.address())
			w := f.worker()
			proxy := f.proxy
			f.proxy = nil
			hangs, hangsOnce := label("at"), label("at")
			came, cameOnce := f.tools.hang(hangs), f.tools.hang(hangsOnce)
			list := []*sent{
				f.send(say(line(again, hangs) + line(once, label("at")))),
				f.send(say(line(once, hangsOnce))),
				f.send(say("!sleep 4s\n")),
			}
			<-came
			<-cameOnce
			for _, s := range list {
				f.running(s)
			}
			f.worker()
			for range 8 { // some of them are in its hands, at any point
				m, _ := chain(60, again, once)
				list = append(list, f.send(m))
			}
			pause(t.Context(), f.random.between(0, heartbeat))
			if c.inside {
				proxy.delay(400, 0) // now a transaction takes that long between two statements
				f.until(stepLimit, "the worker is inside a transaction with rows locked", func() bool {
					return f.is(`SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = $1 AND state = 'idle in transaction')`, w.name)
				})
			}
			c.cut(proxy)
			cut := time.Now()
			f.until(stepLimit, "the hanging call is made again elsewhere", func() bool { return len(f.tools.from(hangs)) == 2 })
			calls := f.tools.from(hangs)
			require.False(t, calls[0].Gone.IsZero(), "the worker still held its call when another made it")
			fenced, repeated := calls[0].Gone.Sub(cut), calls[1].Begun.Sub(cut)
			require.Less(t, fenced, lease+heartbeat, "it let go within its lease")
			require.True(t, calls[0].Gone.Before(calls[1].Begun), "two workers were at one call: one let go %s after the cut, the other began after %s", fenced, repeated)
			require.Less(t, f.tools.from(hangsOnce)[0].Gone.Sub(cut), lease+heartbeat)
			t.Logf("the worker let go of its calls %s after the cut, another made one again after %s; the lease is %s",
				fenced.Round(time.Millisecond), repeated.Round(time.Millisecond), lease)
			others := f.until(stepLimit, "others have all its runs", func() bool {
				return f.is(`SELECT NOT EXISTS (SELECT FROM run WHERE worker_id = $1)`, w.ready.WorkerID)
			})
			require.Less(t, time.Since(cut), takenWithin, "a transaction of the one cut off must not keep its runs for long")
			f.ended(list...)
			t.Logf("others had all its runs %s later; all ended %s after the cut", others.Round(time.Millisecond), time.Since(cut).Round(time.Millisecond))
			proxy.heal()
			healed := time.Now()
			f.until(stepLimit, "the worker is back", func() bool {
				return f.is(`SELECT EXISTS (SELECT FROM worker WHERE pid = $1 AND state = 'live' AND id <> $2)`, w.pid(), w.ready.WorkerID)
			})
			t.Logf("it was back %s after the partition had healed", time.Since(healed).Round(time.Millisecond))
			f.promises(leave{repairs: true, late: true})
		})
	}
	t.Run("Delay", func(t *testing.T) { // slow is not dead
		if !all {
			t.Skipf("runs with %s=1", envAll)
		}
		t.Parallel()
		f := newFleet(t)
		f.judge()
		f.api()
		f.proxy = newProxy(t, f.server.address())
		w := f.worker()
		stop := f.load(3, 200*time.Millisecond, f.mixed)
		f.proxy.delay(150, 100)
		pause(t.Context(), 2*lease)
		f.proxy.undelay()
		stop()
		f.promises(leave{repairs: true})
		require.True(t, f.is(`SELECT state = 'live' FROM worker WHERE id = $1`, w.ready.WorkerID), "it kept its place")
	})
}

// deafListeners has no process hear a notification any more, without a break
// that anybody could notice.
func deafListeners(t *testing.T) {
	f := newFleet(t)
	f.proxy = newProxy(t, f.server.address())
	f.judge()
	a := f.api()
	f.workers(2)
	hears := func() { f.ended(f.send(say(""))) }
	hears()
	f.proxy.deafListeners()
	pause(t.Context(), 200*time.Millisecond)

	m := say("!stall\n")
	m.ends = []string{"cancelled"}
	s := f.send(m)
	f.running(s)
	_, err := a.client.CancelRun(f.limited(), s.id, "deaf")
	require.NoError(t, err)
	cancelled := f.ended(s)
	require.Less(t, cancelled, 5*time.Second)

	began := time.Now()
	m = say("")
	r, err := a.client.Execute(f.limited(), client.ExecuteParams{Message: m.text, AgentID: agentName, SessionID: m.session, IdempotencyKey: m.session})
	require.NoError(t, err)
	require.Equal(t, m.answer, r.Response)
	f.book.runs[r.RunID[len("run_"):]] = &sent{message: m}
	executed := time.Since(began)
	require.Less(t, executed, 8*time.Second)

	require.NoError(t, a.client.Call(f.limited(), "queue.pause", map[string]any{"queue": "turns"}, nil))
	s = f.send(say(""))
	pause(t.Context(), 3*time.Second)
	require.True(t, f.is(`SELECT state = 'queued' AND started_at IS NULL FROM run WHERE id = $1`, s.id), "a paused queue starts nothing")
	require.NoError(t, a.client.Call(f.limited(), "queue.resume", map[string]any{"queue": "turns"}, nil))
	resumed := f.ended(s)
	require.Less(t, resumed, 8*time.Second)

	limited := f.ended(f.send(say("!status 429 retry-after=1\n")))
	require.Less(t, limited, 10*time.Second)
	t.Logf("without any notification: a cancel took %s, a turn to its answer %s, a resumed queue's turn %s, one of a rate limit of 1 s %s",
		cancelled.Round(time.Millisecond), executed.Round(time.Millisecond), resumed.Round(time.Millisecond), limited.Round(time.Millisecond))

	// Dead connections, on the other hand, are noticed: news flow again.
	f.proxy.heal()
	f.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND query ~* '^ *listen'`)
	pause(t.Context(), time.Second)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(hears)
	}
	wg.Wait()
	f.promises(leave{repairs: true})
}
