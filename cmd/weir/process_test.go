package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/weir-run/weir/client"
	"github.com/weir-run/weir/db/dbtest"
)

// Limits of the tests of the built binary. They are far above what a step
// takes: on a busy machine with -race everything takes long.
const (
	readyLimit = 60 * time.Second
	stepLimit  = 60 * time.Second
	exitLimit  = 40 * time.Second
)

// raceEnabled says that this test, and so the binary it builds, detects races.
var raceEnabled bool

var binary struct {
	sync.Once
	dir, path string
	err       error
}

func TestMain(m *testing.M) {
	// The tests mostly wait for processes, so more of them run at once than
	// there are cores.
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f != nil && f.Value.String() == f.DefValue {
		_ = f.Value.Set("6")
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if binary.dir != "" {
			_ = os.RemoveAll(binary.dir)
		}
		os.Exit(code)
	}))
}

// weirBinary builds the command once for all tests.
func weirBinary(t *testing.T) string {
	t.Helper()
	binary.Do(func() {
		if binary.dir, binary.err = os.MkdirTemp("", "weir-e2e-"); binary.err != nil {
			return
		}
		binary.path = filepath.Join(binary.dir, "weir")
		args := []string{"build", "-o", binary.path}
		if raceEnabled {
			args = append(args, "-race")
		}
		if extra := os.Getenv("WEIR_TEST_BUILDFLAGS"); extra != "" {
			args = append(args, strings.Fields(extra)...)
		}
		if out, err := exec.Command("go", append(args, ".")...).CombinedOutput(); err != nil {
			binary.err = fmt.Errorf("build weir: %w\n%s", err, out)
		}
	})
	require.NoError(t, binary.err)
	return binary.path
}

// cleanEnv is the environment without what would change what weir does.
func cleanEnv(extra ...string) []string {
	var env []string
	for _, entry := range os.Environ() {
		name, _, _ := strings.Cut(entry, "=")
		if strings.HasPrefix(name, "WEIR_") || strings.HasPrefix(name, "OTEL_") || name == "DATABASE_URL" || strings.HasSuffix(name, "_API_KEY") {
			continue
		}
		env = append(env, entry)
	}
	return append(env, extra...)
}

// role is a running process of weir.
type role struct {
	t     *testing.T
	cmd   *exec.Cmd
	lines chan string // of stdout
	log   *tail
	done  chan struct{}
	ready readiness
}

// startRoleIn starts a role in a folder and waits until it is ready.
func startRoleIn(t *testing.T, dir string, args ...string) *role {
	t.Helper()
	return startBinary(t, weirBinary(t), dir, nil, args...)
}

func startBinary(t *testing.T, path, dir string, env []string, args ...string) *role {
	t.Helper()
	r := launchBinary(t, path, dir, env, append(args, "--json")...)
	select {
	case line := <-r.lines:
		require.NoError(t, json.Unmarshal([]byte(line), &r.ready), line)
	case <-r.done:
		t.Fatalf("weir %s ended before it was ready:\n%s", strings.Join(args, " "), r.log)
	case <-time.After(readyLimit):
		t.Fatalf("weir %s was not ready in %s:\n%s", strings.Join(args, " "), readyLimit, r.log)
	}
	require.Equal(t, r.cmd.Process.Pid, r.ready.PID)
	return r
}

func launch(t *testing.T, dir string, args ...string) *role {
	t.Helper()
	return launchEnv(t, dir, nil, args...)
}

func launchEnv(t *testing.T, dir string, env []string, args ...string) *role {
	t.Helper()
	return launchBinary(t, weirBinary(t), dir, env, args...)
}

func launchBinary(t *testing.T, path, dir string, env []string, args ...string) *role {
	t.Helper()
	r := &role{t: t, cmd: exec.Command(path, args...), lines: make(chan string, 16), log: &tail{}, done: make(chan struct{})}
	r.cmd.Dir, r.cmd.Env, r.cmd.Stderr = dir, cleanEnv(env...), r.log
	stdout, err := r.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, r.cmd.Start())
	go func() {
		defer close(r.done)
		for s := bufio.NewScanner(stdout); s.Scan(); {
			r.lines <- s.Text()
		}
		close(r.lines)
		_ = r.cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill()
		<-r.done
		if t.Failed() {
			t.Logf("log of weir %s (process %d):\n%s", strings.Join(args, " "), r.cmd.Process.Pid, r.log)
		}
	})
	return r
}

func (r *role) signal(s syscall.Signal) { _ = r.cmd.Process.Signal(s) }

// kill ends the process as a crash would, and waits for its end.
func (r *role) kill() {
	r.signal(syscall.SIGKILL)
	<-r.done
}

// exit waits for the process's end and returns its code.
func (r *role) exit() int {
	r.t.Helper()
	select {
	case <-r.done:
		return r.cmd.ProcessState.ExitCode()
	case <-time.After(exitLimit):
		r.t.Fatalf("process %d has not ended in %s:\n%s", r.cmd.Process.Pid, exitLimit, r.log)
		return -1
	}
}

// result is what a command printed and how it ended.
type result struct {
	code           int
	stdout, stderr string
}

// weir runs a command to its end.
func weir(t *testing.T, stdin string, args ...string) result {
	t.Helper()
	return weirEnv(t, stdin, nil, args...)
}

func weirEnv(t *testing.T, stdin string, env []string, args ...string) result {
	t.Helper()
	binary := weirBinary(t) // the first to come builds it
	ctx, cancel := context.WithTimeout(t.Context(), stepLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Env = cleanEnv(env...)
	cmd.Dir = t.TempDir()
	cmd.Stdin = strings.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("weir %s: %v", strings.Join(args, " "), err)
	}
	require.NoError(t, ctx.Err(), "weir %s: %s", strings.Join(args, " "), stderr.String())
	return result{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// fleet is a database and what its processes are told.
type fleet struct {
	t     *testing.T
	url   string // of the database
	token string
	env   []string // of its processes
	flags []string // how they reach the database; nil means url
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	f := &fleet{t: t, url: dbtest.URL(t)}
	r := weir(t, "", "tokens", "create", "--database-url", f.url, "--id", "test", "--scopes", "rpc,admin")
	require.Zero(t, r.code, r.stderr)
	f.token = strings.TrimSpace(r.stdout)
	return f
}

func (f *fleet) start(role string, args ...string) *role {
	f.t.Helper()
	return f.startBy(weirBinary(f.t), role, args...)
}

func (f *fleet) startBy(binary, role string, args ...string) *role {
	f.t.Helper()
	flags := f.flags
	if flags == nil {
		flags = []string{"--database-url", f.url}
	}
	return startBinary(f.t, binary, "", f.env, slices.Concat([]string{role}, flags, args)...)
}

func (f *fleet) api() (*role, *client.Client) {
	f.t.Helper()
	r := f.start("api", "--listen", "127.0.0.1:0")
	return r, client.New(client.Config{URL: r.ready.API, Token: f.token})
}

// worker starts a worker with a short lease, so that a test need not wait long
// for a death that no lock shows.
func (f *fleet) worker(args ...string) *role {
	f.t.Helper()
	return f.start("worker", append([]string{"--lease", "3s", "--heartbeat", "500ms", "--tools-http-allow-private"}, args...)...)
}

// reaper starts the process that judges the workers of a test.
func (f *fleet) reaper() *role {
	f.t.Helper()
	return f.start("scheduler", "--lease", "1s")
}

// limited is a context of one thing that a test does.
func limited(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), stepLimit)
	t.Cleanup(cancel)
	return ctx
}

// accept hands a message over and returns its run.
func accept(t *testing.T, c *client.Client, agent, session, text string) string {
	t.Helper()
	var r struct {
		RunID string `json:"runId"`
	}
	require.NoError(t, c.Call(limited(t), "agent.request", map[string]any{
		"sessionId": session, "agentId": agent, "content": map[string]string{"text": text}, "idempotencyKey": session,
	}, &r))
	return r.RunID
}

// await waits until a run is as wanted.
func await(t *testing.T, c *client.Client, id string, want func(*client.RunDetail) bool) *client.RunDetail {
	t.Helper()
	ctx := limited(t)
	run, err := c.Run(ctx, id)
	for {
		require.NoError(t, err, "run %s", id)
		if want(run) {
			return run
		}
		require.False(t, run.Final(), "run %s is %s: %s %s", id, run.State, run.EndReason, run.Error)
		run, err = c.AwaitRun(ctx, id, run.Version, 5*time.Second)
	}
}

func ended(r *client.RunDetail) bool { return r.Final() }

// testTool is a tool server that counts. Each call of it waits for its turn on
// gate, if there is one.
type testTool struct {
	*httptest.Server
	mu    sync.Mutex
	calls []toolCall
	hook  func(toolCall, *http.Request) bool // false leaves the call without an answer
}

type toolCall struct {
	N   int // of the arguments
	Key string
	Run string
}

func newTestTool(t *testing.T, hook func(toolCall, *http.Request) bool) *testTool {
	tool := &testTool{hook: hook}
	tool.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var args struct{ N int }
		body, _ := io.ReadAll(r.Body)
		_ = json.Unmarshal(body, &args)
		call := toolCall{args.N, r.Header.Get("Idempotency-Key"), r.Header.Get("X-Weir-Run-Id")}
		tool.mu.Lock()
		tool.calls = append(tool.calls, call)
		tool.mu.Unlock()
		if tool.hook != nil && !tool.hook(call, r) {
			panic(http.ErrAbortHandler)
		}
		fmt.Fprintf(w, `{"n":%d}`, args.N)
	}))
	t.Cleanup(func() {
		tool.CloseClientConnections()
		tool.Close()
	})
	return tool
}

// sent returns the keys of the calls with these arguments, in order.
func (s *testTool) sent(n int) (keys []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.calls {
		if c.N == n {
			keys = append(keys, c.Key)
		}
	}
	return keys
}

// agent creates an agent whose only tool, count, is s.
func (s *testTool) agent(t *testing.T, c *client.Client, name, idempotency string) {
	t.Helper()
	config, err := json.Marshal(map[string]any{"name": name, "tools": []any{map[string]any{
		"type": "http", "name": "count", "description": "counts", "url": s.URL, "idempotency": idempotency,
		"parameters": map[string]any{"type": "object"},
	}}})
	require.NoError(t, err)
	_, err = c.CreateAgent(limited(t), config, name)
	require.NoError(t, err)
}

// script calls count with 1 to n, one after the other.
func script(n int) string {
	var b strings.Builder
	for i := 1; i <= n; i++ {
		fmt.Fprintf(&b, "!tool count {\"N\":%d}\n", i)
	}
	return b.String() + "!say counted"
}
