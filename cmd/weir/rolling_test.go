package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/api/rpc"
	"github.com/weir-run/weir/client"
	"github.com/weir-run/weir/db"
)

// olderBinary is this release linked as the one before its newest migration.
func olderBinary(t *testing.T) string {
	t.Helper()
	weirBinary(t) // what it compiles is all there is to compile
	path := filepath.Join(t.TempDir(), "weir-older")
	const schema = "github.com/weir-run/weir/db."
	flags := fmt.Sprintf("-X %[1]snewest=%[2]d -X %[1]sneeds=%[2]d -X main.version=older", schema, db.Newest()-1)
	args := []string{"build", "-o", path, "-ldflags", flags}
	if raceEnabled {
		args = append(args, "-race")
	}
	out, err := exec.Command("go", append(args, ".")...).CombinedOutput()
	require.NoError(t, err, string(out))
	return path
}

// balancer is a load balancer: it sends to those APIs whose readyz said yes
// last, and elsewhere when a connection is refused.
type balancer struct {
	t     *testing.T
	token string

	mu      sync.Mutex
	targets []*target
	next    int
	refused int // calls to a port that was closed
	again   int // calls that were sent once more
}

type target struct {
	role   *role
	client *client.Client
	ready  bool
	said   bool // that it is not ready, while its port was open
	closed bool
}

func (b *balancer) add(r *role) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.targets = append(b.targets, &target{role: r, client: client.New(client.Config{URL: r.ready.API, Token: b.token, Patience: -1}), ready: true})
}

// watch asks each readyz, over a new connection each time, until ctx ends.
func (b *balancer) watch(ctx context.Context) {
	probe := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 5 * time.Second}
	for ctx.Err() == nil {
		b.mu.Lock()
		targets := append([]*target(nil), b.targets...)
		b.mu.Unlock()
		for _, t := range targets {
			resp, err := probe.Get(t.role.ready.API + "/readyz")
			b.mu.Lock()
			if err != nil {
				t.closed = t.closed || errors.Is(err, syscall.ECONNREFUSED)
				t.ready = false
			} else {
				resp.Body.Close()
				t.ready = resp.StatusCode == http.StatusOK
				t.said = t.said || !t.ready
			}
			b.mu.Unlock()
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

func (b *balancer) pick() *target {
	b.mu.Lock()
	defer b.mu.Unlock()
	for range b.targets {
		b.next++
		if t := b.targets[b.next%len(b.targets)]; t.ready {
			return t
		}
	}
	return nil
}

// turn has one turn carried out, as often as it must be asked for.
func (b *balancer) turn(ctx context.Context, name, message string) (string, error) {
	for {
		t := b.pick()
		if t == nil {
			time.Sleep(20 * time.Millisecond)
			continue
		}
		r, err := t.client.Execute(ctx, client.ExecuteParams{Message: message, AgentID: "counter", SessionID: name, IdempotencyKey: name})
		var unreachable *client.UnreachableError
		var answer *client.Error
		switch {
		case err == nil:
			return r.Response, nil
		case ctx.Err() != nil:
			return "", err
		case errors.As(err, &unreachable):
		case errors.As(err, &answer) && (answer.HTTPStatus == http.StatusServiceUnavailable || answer.Code == rpc.StillRunning):
		default:
			return "", err
		}
		b.mu.Lock()
		b.again++
		if errors.Is(err, syscall.ECONNREFUSED) {
			b.refused++
			t.ready = false
		}
		b.mu.Unlock()
	}
}

// TestRolls replaces all processes of a fleet under load, from an older release
// to this one and back.
func TestRolls(t *testing.T) {
	t.Parallel()
	older := olderBinary(t)
	f := newFleet(t)
	r := weirBy(t, older, "migrate", "validate", "--database-url", f.url)
	require.Equal(t, exitFailed, r.code)
	require.Contains(t, r.stderr, "they work together, and differ")

	tool := newTestTool(t, nil)
	b := &balancer{t: t, token: f.token}
	api := func(binary string) *role {
		r := f.startBy(binary, "api", "--listen", "127.0.0.1:0", "--notice", "2s", "--tools-http-allow-private")
		b.add(r)
		return r
	}
	worker := func(binary string) *role {
		return f.startBy(binary, "worker", "--lease", "10s", "--heartbeat", "1s", "--drain", "20s", "--tools-http-allow-private")
	}
	apis := []*role{api(older), api(older)}
	workers := []*role{worker(older), worker(older), worker(older)}
	tool.agent(t, b.targets[0].client, "counter", "at_most_once")

	watching, stopWatching := context.WithCancel(t.Context())
	defer stopWatching()
	var watcher sync.WaitGroup
	watcher.Go(func() { b.watch(watching) })
	defer watcher.Wait()
	defer stopWatching()

	var enough atomic.Bool
	var turns, failed atomic.Int64
	var load sync.WaitGroup
	for i := range 6 {
		load.Go(func() {
			for n := 0; !enough.Load(); n++ {
				answer, err := b.turn(t.Context(), fmt.Sprintf("roll-%d-%d", i, n), script(2))
				turns.Add(1)
				if err != nil || answer != "counted" {
					failed.Add(1)
					t.Errorf("turn %d of %d: %q %v", n, i, answer, err)
				}
			}
		})
	}
	var ended []*role
	for _, to := range []string{weirBinary(t), older} {
		before := turns.Load()
		for i, old := range apis {
			apis[i] = api(to)
			old.signal(syscall.SIGTERM)
			require.Zero(t, old.exit(), old.log)
			ended = append(ended, old)
		}
		for i, old := range workers {
			old.signal(syscall.SIGTERM)
			require.Zero(t, old.exit(), old.log)
			workers[i] = worker(to)
			ended = append(ended, old)
		}
		t.Logf("rolled under %d turns", turns.Load()-before)
	}
	enough.Store(true)
	load.Wait()
	stopWatching()
	watcher.Wait()

	require.Zero(t, failed.Load())
	for _, target := range b.targets[:len(b.targets)-2] {
		require.True(t, target.said, "%s closed its port before readyz said no", target.role.ready.API)
		require.True(t, target.closed)
	}
	t.Logf("%d turns, %d calls sent again, %d of them after a refused connection", turns.Load(), b.again, b.refused)
	require.Zero(t, b.refused, "who heeds readyz meets no closed port")

	conn, err := pgx.Connect(limited(t), f.url)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	var runs, completed, losses, jobs int64
	require.NoError(t, conn.QueryRow(limited(t), `SELECT count(*), count(*) FILTER (WHERE state = 'completed'), coalesce(sum(losses), 0) FROM run`).Scan(&runs, &completed, &losses))
	require.Equal(t, []int64{turns.Load(), turns.Load(), 0}, []int64{runs, completed, losses}, "every accept ended once")
	require.Eventually(t, func() bool {
		require.NoError(t, conn.QueryRow(limited(t), `SELECT count(*) FROM river_job WHERE state NOT IN ('completed', 'cancelled', 'discarded')`).Scan(&jobs))
		return jobs == 0
	}, stepLimit, 50*time.Millisecond, "no job is stuck")
	require.Len(t, tool.sent(1), int(runs), "each step ran once")
	require.Len(t, tool.sent(2), int(runs))
	for _, r := range append(ended, workers...) {
		for line := range strings.Lines(r.log.String()) {
			if strings.Contains(line, "repaired") {
				t.Logf("of process %d: %s", r.cmd.Process.Pid, strings.TrimSpace(line))
			}
		}
	}

	// The database leaves the older release behind.
	_, err = conn.Exec(limited(t), `UPDATE schema_compat SET min_binary_schema = $1`, db.Newest())
	require.NoError(t, err)
	for _, args := range [][]string{{"migrate", "validate"}, {"worker"}} {
		r = weirBy(t, older, append(args, "--database-url", f.url)...)
		require.Equal(t, exitFailed, r.code)
		require.Contains(t, r.stderr, "run the release that migrated it")
	}
	require.Zero(t, weir(t, "", "migrate", "validate", "--database-url", f.url).code)
}

// weirBy runs a command of another binary to its end.
func weirBy(t *testing.T, binary string, args ...string) result {
	t.Helper()
	cmd := exec.CommandContext(limited(t), binary, args...)
	cmd.Env = cleanEnv()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	require.True(t, err == nil || errors.As(err, &exit), "%v", err)
	return result{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// TestQuietAndDrain is what an operator asks of workers.
func TestQuietAndDrain(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	api, c := f.api()
	first := f.worker("--listen", "127.0.0.1:0")
	inStep, goOn := make(chan string, 4), make(chan struct{}, 4)
	tool := newTestTool(t, func(call toolCall, r *http.Request) bool {
		if call.N == 2 {
			inStep <- call.Run
			select {
			case <-goOn:
			case <-r.Context().Done():
			}
		}
		return true
	})
	tool.agent(t, c, "counter", "at_most_once")
	operator := func(args ...string) {
		t.Helper()
		r := weir(t, "", append(args, "--url", api.ready.API, "--token", f.token)...)
		require.Zero(t, r.code, r.stderr)
	}
	worker := func(id string) client.Worker {
		t.Helper()
		all, err := c.Workers(limited(t))
		require.NoError(t, err)
		for _, w := range all {
			if w.WorkerID == id {
				return w
			}
		}
		return client.Worker{}
	}

	// Quiet: what it has goes on to its end, what is new waits for others.
	id := accept(t, c, "counter", "held", script(3))
	<-inStep
	operator("workers", "quiet", first.ready.WorkerID)
	require.Eventually(t, func() bool { return strings.Contains(first.log.String(), `"wants":"quiet"`) }, stepLimit, 10*time.Millisecond)
	later := accept(t, c, "counter", "later", script(3))
	goOn <- struct{}{}
	require.Equal(t, "completed", await(t, c, id, ended).State)
	require.Equal(t, "quiet", worker(first.ready.WorkerID).Wanted)
	run, err := c.Run(limited(t), later)
	require.NoError(t, err)
	require.Equal(t, "queued", run.State, "a quiet worker takes nothing")
	code, text := get(t, first.ready.Listen+"/readyz")
	require.Equal(t, http.StatusOK, code, text)

	// A quiet worker that loses its lease comes back quiet.
	f.reaper()
	first.signal(syscall.SIGSTOP)
	require.Eventually(t, func() bool { s := worker(first.ready.WorkerID).State; return s == "dead" || s == "reaped" }, stepLimit, 20*time.Millisecond)
	first.signal(syscall.SIGCONT)
	var again client.Worker
	require.Eventually(t, func() bool {
		all, err := c.Workers(limited(t))
		require.NoError(t, err)
		for _, w := range all {
			if w.State == "live" && w.PID == first.cmd.Process.Pid {
				again = w
				return true
			}
		}
		return false
	}, stepLimit, 20*time.Millisecond)
	require.Equal(t, "quiet", again.Wanted)
	run, err = c.Run(limited(t), later)
	require.NoError(t, err)
	require.Equal(t, "queued", run.State)

	second := f.worker()
	require.Equal(t, later, <-inStep)

	// Drain: the run goes on elsewhere from the next step, and the process ends.
	operator("workers", "drain", second.ready.WorkerID)
	require.Eventually(t, func() bool { return worker(second.ready.WorkerID).State == "draining" }, stepLimit, 20*time.Millisecond)
	goOn <- struct{}{}
	require.Zero(t, second.exit(), second.log)
	run, err = c.Run(limited(t), later)
	require.NoError(t, err)
	require.Equal(t, "queued", run.State, "handed over")
	require.Equal(t, 2, len(tool.sent(2)))
	f.worker()
	run = await(t, c, later, ended)
	require.Equal(t, "completed", run.State)
	require.Zero(t, run.Losses, "a drain is no loss")
	for n := 1; n <= 3; n++ {
		require.Len(t, tool.sent(n), 2, "step %d of both runs", n)
	}
	operator("workers", "drain", again.WorkerID)
	require.Zero(t, first.exit(), first.log)
}

// TestReadinessGoesFirst is the order of what a stopping process does.
func TestReadinessGoesFirst(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	api := f.start("api", "--listen", "127.0.0.1:0", "--notice", "3s")
	c := client.New(client.Config{URL: api.ready.API, Token: f.token})
	w := f.worker("--listen", "127.0.0.1:0")
	inStep, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	tool := newTestTool(t, func(_ toolCall, r *http.Request) bool {
		once.Do(func() {
			close(inStep)
			select {
			case <-goOn:
			case <-r.Context().Done():
			}
		})
		return true
	})
	tool.agent(t, c, "counter", "at_most_once")
	accept(t, c, "counter", "held", script(2))
	<-inStep
	unready := func(at string) {
		t.Helper()
		require.Eventually(t, func() bool {
			resp, err := http.Get(at + "/readyz")
			require.NoError(t, err, "the port closed before readyz said no")
			defer resp.Body.Close()
			return resp.StatusCode == http.StatusServiceUnavailable
		}, stepLimit, 10*time.Millisecond)
	}

	w.signal(syscall.SIGTERM)
	unready(w.ready.Listen)
	require.Eventually(t, func() bool {
		all, err := c.Workers(limited(t))
		require.NoError(t, err)
		return len(all) == 1 && all[0].State == "draining"
	}, stepLimit, 10*time.Millisecond)
	later := accept(t, c, "counter", "later", script(1)) // it is not claimed any more
	close(goOn)
	require.Zero(t, w.exit(), w.log)
	run, err := c.Run(limited(t), later)
	require.NoError(t, err)
	require.Equal(t, "queued", run.State)
	require.Zero(t, run.StepsExecuted)

	api.signal(syscall.SIGTERM)
	unready(api.ready.API)
	accept(t, c, "counter", "noticed-late", script(1)) // who has not noticed is served
	require.Zero(t, api.exit(), api.log)
	_, err = http.Get(api.ready.API + "/readyz")
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
}
