package faults

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/client"
)

// killAtEveryStep kills the worker at each step of a turn: while the tool has
// the call, and when it has just answered and the answer is not stored.
func killAtEveryStep(t *testing.T) {
	f := newFleet(t)
	f.judge()
	f.api()
	f.workers(3)
	steps := size(5, 2)
	var took []time.Duration
	for n := range steps {
		for _, tool := range []string{again, once} {
			for _, answered := range []bool{false, true} {
				m, places := chain(steps, tool)
				var s *sent
				known := make(chan struct{})
				var victim int
				killed := make(chan time.Time, 1)
				f.tools.on(places[n], func(_ toolCall, r *http.Request, answer func()) {
					<-known
					_, victim = f.holder(s.id)
					if answered {
						answer()
					}
					_ = syscall.Kill(victim, syscall.SIGKILL)
					killed <- time.Now()
					<-r.Context().Done()
				})
				s = f.send(m)
				close(known)
				var at time.Time
				select {
				case at = <-killed:
				case <-time.After(stepLimit):
					t.Fatalf("step %d of %s was never reached\n%s", n, s.id, f.describe())
				}
				p := f.byPID(victim)
				require.NotNil(t, p, "run %s is with process %d", s.id, victim)
				<-p.done
				// Either it goes on elsewhere, or the answer was stored before the end.
				f.until(30*time.Second, "run "+s.id+" goes on", func() bool {
					return f.is(`SELECT r.finished_at IS NOT NULL OR w.pid <> $2 FROM run r LEFT JOIN worker w ON w.id = r.worker_id WHERE r.id = $1`, s.id, victim)
				})
				took = append(took, time.Since(at))
				f.worker()
				f.ended(s)
			}
		}
	}
	slices.Sort(took)
	t.Logf("%d kills; the run went on after %s at the median, %s at most", len(took), quantile(took, 0.5), quantile(took, 1))
	f.promises(leave{repairs: true})
}

// killAfterWork kills a worker whose run has just ended, while River has not
// yet been told that the job is done.
func killAfterWork(t *testing.T) {
	f := newFleet(t)
	f.judge()
	f.api()
	f.workers(2)
	hits := 0
	for range 6 {
		m, _ := chain(2, again, once)
		s := f.send(m)
		pid := 0
		f.until(stepLimit, "the run ends", func() bool {
			if _, now := f.holder(s.id); now != 0 {
				pid = now
			}
			return f.is(`SELECT finished_at IS NOT NULL FROM run WHERE id = $1`, s.id)
		})
		p := f.byPID(pid)
		require.NotNil(t, p)
		p.kill()
		if f.is(`SELECT EXISTS (SELECT FROM river_job WHERE args ->> 'run_id' = $1 AND state = 'running')`, s.id) {
			hits++
		}
		f.worker()
		f.until(stepLimit, "the job ends", func() bool {
			return f.is(`SELECT NOT EXISTS (SELECT FROM river_job WHERE args ->> 'run_id' = $1 AND state IN ('available', 'running'))`, s.id)
		})
	}
	require.NotZero(t, hits, "no kill came before River's completion")
	t.Logf("%d of 6 kills came between the end of the run and that of its job", hits)
	f.promises(leave{repairs: true})
}

// zombie stops a worker for longer than its lease and lets it go on when
// others have finished what it had.
func zombie(t *testing.T) {
	f := newFleet(t)
	f.judge()
	f.api()
	z := f.worker()
	hangs, hangsOnce := label("at"), label("at")
	came, cameOnce := f.tools.hang(hangs), f.tools.hang(hangsOnce)
	list := []*sent{
		f.send(say(line(again, hangs) + line(once, label("at")))),
		f.send(say(line(once, hangsOnce) + line(again, label("at")))),
		f.send(say("!sleep 8s\n" + line(again, label("at")))),
		f.send(say("!sleep 9s\n")),
		f.send(say("!stream 150 delay=60ms\n")),
	}
	list[4].answer = "" // words of the stream
	<-came
	<-cameOnce
	for _, s := range list {
		f.running(s)
	}
	f.worker()
	for range 8 { // some of them are in the zombie's hands, at any point
		m, _ := chain(60, again)
		list = append(list, f.send(m))
	}
	pause(t.Context(), f.random.between(0, 200*time.Millisecond))
	z.signal(syscall.SIGSTOP)
	stopped := time.Now()
	f.until(stepLimit, "the stopped worker is declared dead", func() bool {
		return f.is(`SELECT state IN ('dead', 'reaped') FROM worker WHERE id = $1`, z.ready.WorkerID)
	})
	t.Logf("declared dead %s after it was stopped; the lease is %s", time.Since(stopped).Round(time.Millisecond), lease)
	f.until(stepLimit, "others have all its runs", func() bool {
		return f.is(`SELECT NOT EXISTS (SELECT FROM run WHERE worker_id = $1)`, z.ready.WorkerID)
	})
	require.Less(t, time.Since(stopped), takenWithin, "a transaction of the one stopped must not keep its runs for long")
	f.ended(list...)
	const rows = `SELECT concat_ws(' ',
		(SELECT md5(string_agg(r::text, ' ' ORDER BY r.id)) FROM run r),
		(SELECT md5(string_agg(st::text, ' ' ORDER BY st.run_id, st.seq)) FROM step st),
		(SELECT md5(string_agg(e::text, ' ' ORDER BY e.session_id, e.seq)) FROM event e WHERE e.type <> 'agent.usage'))`
	before := one[string](f, rows)
	calls := len(f.tools.all())
	z.signal(syscall.SIGCONT)
	back := f.until(stepLimit, "the zombie is back under a new id", func() bool {
		return f.is(`SELECT EXISTS (SELECT FROM worker WHERE pid = $1 AND state = 'live' AND id <> $2)`, z.pid(), z.ready.WorkerID)
	})
	require.Contains(t, z.log.String(), "lease lost")
	pause(t.Context(), 2*time.Second)
	require.Equal(t, before, one[string](f, rows), "the zombie wrote")
	require.Len(t, f.tools.all(), calls, "the zombie called a tool")
	t.Logf("the zombie was back %s after it went on, and wrote nothing but usage", back.Round(time.Millisecond))
	for _, p := range f.living("worker") { // its slots are free: it can work
		if p != z {
			p.signal(syscall.SIGTERM)
			require.Zero(t, p.exit(), p.log)
		}
	}
	f.ended(f.send(say(line(again, label("at")))))
	f.promises(leave{repairs: true})
}

// poison has a run take every worker along that carries it, while neighbours
// share its workers.
func poison(t *testing.T) {
	f := newFleet(t)
	f.judge()
	f.api()
	f.workers(3)
	var neighbours []*sent
	for range 12 {
		m, _ := chain(20, again)
		m.text = strings.ReplaceAll(m.text, "!tool", "!sleep 300ms\n!tool")
		neighbours = append(neighbours, f.send(m))
	}
	at := label("at")
	m := say("!sleep 300ms\n" + line(again, at) + "!stall\n")
	m.ends = []string{"poisoned"}
	marked := f.send(m)
	killed := map[string]bool{} // a worker is killed once, however long it takes to be noticed
	f.until(2*stepLimit, "the run is poisoned", func() bool {
		// Always at the same step: the one after the tool.
		if f.is(`SELECT r.state = 'running' AND EXISTS (SELECT FROM step WHERE run_id = r.id AND kind = 'tool' AND status = 'done') FROM run r WHERE r.id = $1`, marked.id) {
			if worker, pid := f.holder(marked.id); pid != 0 && !killed[worker] {
				killed[worker] = true
				_ = syscall.Kill(pid, syscall.SIGKILL)
				if f.byPID(pid) != nil { // or it was the child of one, which lives on
					f.worker()
				}
			}
		}
		return f.is(`SELECT finished_at IS NOT NULL FROM run WHERE id = $1`, marked.id)
	})
	require.Len(t, killed, 3)
	require.EqualValues(t, 3, one[int](f, `SELECT losses FROM run WHERE id = $1`, marked.id))
	f.ended(neighbours...)
	require.EqualValues(t, 0, one[int](f, `SELECT count(*) FROM run WHERE state = 'poisoned' AND id <> $1`, marked.id))
	t.Logf("poisoned after %d kills; all %d neighbours finished", len(killed), len(neighbours))
	f.promises(leave{repairs: true})
}

// laneOrder sends many messages to one session through two APIs while workers
// are killed.
func laneOrder(t *testing.T) {
	f := newFleet(t)
	f.judge()
	a, b := f.api(), f.api()
	f.workers(3)
	defer f.watch(200 * time.Millisecond)()
	const messages = 50
	var list []*sent
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i, edge := range []*api{a, b} {
		wg.Go(func() {
			for n := range messages / 2 {
				name := label("s")
				m := message{session: "one", text: line(again, label("at")) + "!say " + name, answer: name}
				s, err := f.trySend(f.t.Context(), edge.client, m)
				if err != nil {
					t.Errorf("message %d through API %d: %v", n, i, err)
					return
				}
				mu.Lock()
				list = append(list, s)
				mu.Unlock()
			}
		})
	}
	kills := 0
	f.until(2*stepLimit, "all messages are answered", func() bool {
		if kills < 12 && pause(t.Context(), f.random.between(200*time.Millisecond, 800*time.Millisecond)) {
			if living := f.living("worker"); len(living) > 1 {
				drawn(f.random, living).kill()
				kills++
				f.worker()
			}
		}
		return f.is(`SELECT count(*) = $1 FROM run WHERE finished_at IS NOT NULL`, messages)
	})
	wg.Wait()
	t.Logf("%d messages in one lane, %d workers killed", len(list), kills)
	f.promises(leave{repairs: true})
}

// acceptedIsStored kills the API as it answers; nobody works yet.
func acceptedIsStored(t *testing.T) {
	f := newFleet(t)
	a := f.api()
	for range 8 {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		answered := make(chan struct{}, 64)
		for range 4 { // some are answered, some are under way
			wg.Go(func() {
				for ctx.Err() == nil {
					if _, err := f.trySend(ctx, a.client, say("")); err == nil {
						answered <- struct{}{}
					}
				}
			})
		}
		for range 1 + f.random.n(12) {
			<-answered
		}
		a.kill()
		cancel()
		wg.Wait()
		f.restart(a)
	}
	t.Logf("%d turns were accepted, %d requests had no answer", len(f.book.runs), len(f.book.unanswered))
	f.judge()
	f.worker()
	f.promises(leave{repairs: true})
}

// everyWorkerDies kills all workers at once, with all slots taken and more
// waiting; nobody is left to judge, so a new one must have lived for a lease.
func everyWorkerDies(t *testing.T) {
	f := newFleet(t)
	f.api()
	first := f.workers(2, "--slots", "4")
	for range 14 {
		m, _ := chain(10, again, once)
		m.text = strings.ReplaceAll(m.text, "!tool", "!sleep 200ms\n!tool")
		f.send(m)
	}
	f.until(stepLimit, "all slots are taken", func() bool { return f.is(`SELECT count(*) = 8 FROM run WHERE state = 'running'`) })
	for _, p := range first {
		p.signal(syscall.SIGKILL)
	}
	killed := time.Now()
	for _, p := range first {
		<-p.done
	}
	f.workers(2, "--slots", "4")
	f.until(30*time.Second, "all go on", func() bool {
		return f.is(`SELECT NOT EXISTS (SELECT FROM run r JOIN worker w ON w.id = r.worker_id WHERE w.id = ANY ($1::uuid[]))`,
			[]string{first[0].ready.WorkerID, first[1].ready.WorkerID})
	})
	t.Logf("all went on %s after everybody's death; the lease is %s", time.Since(killed).Round(time.Millisecond), lease)
	f.promises(leave{repairs: true})
}

// deployment stops a worker in order, with 20 turns in its hands.
func deployment(t *testing.T) {
	f := newFleet(t)
	f.judge()
	f.api()
	old := f.worker()
	for range 20 {
		m, _ := chain(6, again, once)
		m.text = strings.ReplaceAll(m.text, "!tool", "!sleep 150ms\n!tool")
		f.send(m)
	}
	f.until(stepLimit, "all run", func() bool { return f.is(`SELECT count(*) = 20 FROM run WHERE state = 'running'`) })
	pause(t.Context(), f.random.between(0, 500*time.Millisecond))
	f.worker()
	old.signal(syscall.SIGTERM)
	began := time.Now()
	require.Zero(t, old.exit(), old.log)
	t.Logf("drained in %s", time.Since(began).Round(time.Millisecond))
	f.promises(leave{})
	require.Zero(t, one[int](f, `SELECT sum(losses) FROM run`))
	for _, c := range f.tools.all() {
		require.Len(t, f.tools.from(c.At), 1, "no tool is called twice")
	}
}

// Keys of the advisory locks of the duties (scheduler/).
var duties = []struct {
	name string
	key  int64
}{{"reaper", -7_301_001}, {"sweeper", -7_301_002}, {"admission", -7_301_003}}

// leader is who has a duty: what its connections call themselves.
func (f *fleet) leader(key int64) (name string) {
	_ = f.pool.QueryRow(f.t.Context(), `SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
		WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
		  AND (l.classid::bigint << 32) | l.objid::bigint = $1`, key).Scan(&name)
	return name
}

// leadersFail kills, and then stops, the process that has each duty, under
// load. What the duty is for must go on.
func leadersFail(t *testing.T) {
	f := newFleet(t)
	f.judge()
	f.api()
	f.workers(3)
	stop := f.load(2, 200*time.Millisecond, f.mixed)
	stopWatch := f.watch(300 * time.Millisecond)
	takesOver := func(key int64, old string, limit time.Duration) time.Duration {
		return f.until(limit, "another leads than "+old, func() bool {
			now := f.leader(key)
			return now != "" && now != old
		})
	}
	works := func() { // a turn that needs the timekeeper, and one that needs a claim
		f.ended(f.send(say("!status 429 retry-after=1\n")), f.send(say(line(again, label("at")))))
	}
	for _, d := range duties {
		f.until(stepLimit, "somebody leads", func() bool { return f.leader(d.key) != "" })
		old := f.leader(d.key)
		p := f.byName(old)
		require.NotNil(t, p, old)
		p.kill()
		took := takesOver(d.key, old, 20*time.Second)
		if strings.HasPrefix(old, "worker") {
			f.worker()
		} else {
			f.judge()
		}
		works()
		t.Logf("%s: %s was killed, another led after %s", d.name, old, took.Round(time.Millisecond))

		old = f.leader(d.key)
		p = f.byName(old)
		require.NotNil(t, p, old)
		p.signal(syscall.SIGSTOP)
		took = takesOver(d.key, old, 20*time.Second)
		works()
		p.signal(syscall.SIGCONT)
		works()
		t.Logf("%s: %s was stopped, another led after %s", d.name, old, took.Round(time.Millisecond))
	}
	// River's own leader has no duty of ours.
	leader := one[string](f, `SELECT coalesce((SELECT leader_id FROM river_leader), '')`)
	for _, p := range f.living("worker") {
		if p.ready.WorkerID == leader {
			p.kill()
			f.worker()
			works()
			t.Logf("River's leader was killed")
		}
	}
	stop()
	stopWatch()
	f.promises(leave{repairs: true, late: true})
}

// limitsHold kills workers fifty times while a tenant, an agent and a queue
// have limits, and counts all the time.
func limitsHold(t *testing.T) {
	f := newFleet(t)
	f.judge()
	a := f.api()
	const tenantMax, agentMax, queueMax = 6, 3, 8
	limited := f.clientOf(a.ready.API, f.newToken("small"))
	free := f.clientOf(a.ready.API, f.newToken("large"))
	for name, c := range map[string]func() error{
		"small": func() error {
			_, err := limited.CreateAgent(f.limited(), f.tools.config(agentName), "small")
			return err
		},
		"large": func() error { _, err := free.CreateAgent(f.limited(), f.tools.config(agentName), "large"); return err },
		"tenant": func() error {
			return a.client.Call(f.limited(), "tenant.set", map[string]any{"tenantId": "small", "maxRunning": tenantMax}, nil)
		},
		"queue": func() error {
			return a.client.Call(f.limited(), "queue.limit", map[string]any{"queue": "turns", "maxRunning": queueMax}, nil)
		},
		"agent": func() error {
			return a.client.Call(f.limited(), "agents.update", map[string]any{"agentId": agentName, "concurrency": map[string]any{"maxRunning": agentMax}}, nil)
		},
	} {
		require.NoError(t, c(), name)
	}
	var most [3]int
	var queueLimited atomic.Bool
	queueLimited.Store(true)
	count := func(ctx context.Context) (string, error) {
		var n [3]int
		err := f.pool.QueryRow(ctx, `SELECT count(*) FILTER (WHERE r.tenant_id = 'small'), count(*) FILTER (WHERE r.tenant_id = 'default'), count(*) FILTER (WHERE r.queue = 'turns')
			FROM run r JOIN worker w ON w.id = r.worker_id WHERE r.state = 'running' AND w.state IN ('live', 'draining')`).Scan(&n[0], &n[1], &n[2])
		if !queueLimited.Load() {
			n[2] = 0
		}
		for i := range n {
			most[i] = max(most[i], n[i])
		}
		if err == nil && (n[0] > tenantMax || n[1] > agentMax || n[2] > queueMax) {
			return fmt.Sprintf("%d runs of a tenant that may have %d, %d of an agent that may have %d, %d of a queue that may have %d",
				n[0], tenantMax, n[1], agentMax, n[2], queueMax), nil
		}
		return "", err
	}
	f.workers(3)
	stopWatch := f.watch(20*time.Millisecond, count)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	backlog := func() int { return one[int](f, `SELECT count(*) FROM run WHERE finished_at IS NULL`) }
	for _, c := range []*client.Client{a.client, limited, free} {
		wg.Go(func() {
			for ctx.Err() == nil {
				if backlog() < 60 {
					m, _ := chain(2, again, once)
					m.text = strings.ReplaceAll(m.text, "!tool", "!sleep 150ms\n!tool")
					m.ends = []string{"completed", "poisoned"} // three kills may well meet one step of one run
					if _, err := f.trySend(context.WithoutCancel(ctx), c, m); err != nil {
						t.Errorf("send: %v", err)
						return
					}
				} else {
					pause(ctx, 50*time.Millisecond)
				}
			}
		})
	}
	kills := size(50, 5)
	for n := range kills {
		living := f.living("worker")
		drawn(f.random, living).kill()
		f.worker()
		if n == kills/2 { // now the fast path is open to those without a limit
			queueLimited.Store(false)
			require.NoError(t, a.client.Call(f.limited(), "queue.limit", map[string]any{"queue": "turns", "maxRunning": nil}, nil))
		}
		if n%10 == 9 {
			t.Logf("%d kills, %d runs under way", n+1, backlog())
		}
	}
	cancel()
	wg.Wait()
	f.until(3*stepLimit, "all runs end", func() bool { return backlog() == 0 })
	stopWatch()
	require.Equal(t, [3]int{tenantMax, agentMax, queueMax}, most, "each limit was reached")
	f.promises(leave{repairs: true})
}
