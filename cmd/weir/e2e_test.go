package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/client"
)

// post is curl: one JSON request, and what came back.
func post(t *testing.T, url, token string, body string) (int, map[string]any) {
	t.Helper()
	req, err := http.NewRequestWithContext(limited(t), http.MethodPost, url, strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	var answer map[string]any
	require.NoError(t, json.Unmarshal(text, &answer), string(text))
	return resp.StatusCode, answer
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(limited(t), http.MethodGet, url, nil)
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(text)
}

// member digs into an answer.
func member(t *testing.T, v any, path ...string) any {
	t.Helper()
	for _, name := range path {
		object, ok := v.(map[string]any)
		require.True(t, ok, "%v has no %s", v, name)
		v = object[name]
	}
	return v
}

// TestDev is a newcomer's first minutes.
func TestDev(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	start := func() *role { return startRoleIn(t, dir, "dev", "--listen", "127.0.0.1:0") }
	d := start()
	url := d.ready.API
	require.Equal(t, "ready", d.ready.Event)
	require.Equal(t, "dev", d.ready.Role)
	require.Equal(t, url+"/ui", d.ready.Console)
	require.Contains(t, d.ready.DatabaseURL, "postgres://")
	require.NoError(t, uuid.Validate(d.ready.WorkerID))
	require.Contains(t, d.ready.Token, "wt_")

	t.Run("Serves", func(t *testing.T) {
		t.Run("AnswersWithoutCredentials", func(t *testing.T) {
			t.Parallel()
			status, answer := post(t, url+"/rpc", "", `{"jsonrpc":"2.0","id":1,"method":"agent.execute","params":{"message":"hello there"}}`)
			require.Equal(t, http.StatusOK, status)
			require.Equal(t, "offline: hello there", member(t, answer, "result", "response"))
			require.Equal(t, "stop", member(t, answer, "result", "finishReason"))
		})
		t.Run("RefusesWrongCredentials", func(t *testing.T) {
			t.Parallel()
			status, _ := post(t, url+"/rpc", "wt_wrong", `{"jsonrpc":"2.0","id":1,"method":"system.ping"}`)
			require.Equal(t, http.StatusUnauthorized, status)
		})
		t.Run("TakesItsToken", func(t *testing.T) {
			t.Parallel()
			status, answer := post(t, url+"/rpc", d.ready.Token, `{"jsonrpc":"2.0","id":1,"method":"agents.list"}`)
			require.Equal(t, http.StatusOK, status)
			require.Contains(t, member(t, answer, "result", "agents"), "default")
		})
		t.Run("SpeaksAgentex", func(t *testing.T) {
			t.Parallel()
			status, task := post(t, url+"/agents/name/default/rpc", "", `{"jsonrpc":"2.0","id":1,"method":"task/create","params":{"name":"first"}}`)
			require.Equal(t, http.StatusOK, status, task)
			id, ok := member(t, task, "result", "id").(string)
			require.True(t, ok, task)
			_, sent := post(t, url+"/agents/name/default/rpc", "", fmt.Sprintf(`{"jsonrpc":"2.0","id":2,"method":"message/send","params":
				{"task_id":%q,"content":{"type":"text","author":"user","content":"hello task"},"stream":false}}`, id))
			require.Contains(t, fmt.Sprint(sent), "offline: hello task")
			code, text := get(t, url+"/tasks/"+id)
			require.Equal(t, http.StatusOK, code, text)
		})
		t.Run("HasHealthPages", func(t *testing.T) {
			t.Parallel()
			for _, path := range []string{"/livez", "/readyz", "/metrics"} {
				code, text := get(t, url+path)
				require.Equal(t, http.StatusOK, code, text)
			}
		})
		t.Run("Chats", func(t *testing.T) {
			t.Parallel()
			r := weir(t, "", "chat", "--url", url, "hello chat")
			require.Equal(t, result{stdout: "offline: hello chat\n"}, r)
			r = weir(t, "from a pipe\n", "chat", "--url", url)
			require.Equal(t, result{stdout: "offline: from a pipe\n"}, r)

			r = weirEnv(t, "", []string{"WEIR_URL=" + url, "WEIR_TOKEN=" + d.ready.Token}, "chat", "-o", "json", "--session", "s1", "one")
			require.Zero(t, r.code, r.stderr)
			var answer struct{ Response, RunID, SessionID, ConversationRef string }
			require.NoError(t, json.Unmarshal([]byte(r.stdout), &answer))
			require.Equal(t, "offline: one", answer.Response)
			require.Equal(t, "s1", answer.SessionID)

			r = weir(t, "", "chat", "--url", url, "--session", "s1", "!context")
			require.Contains(t, r.stdout, "offline: one", "the session goes on")
		})
		t.Run("ListsAndShows", func(t *testing.T) {
			t.Parallel()
			require.Zero(t, weir(t, "", "chat", "--url", url, "--session", "listed", "hello").code)
			r := weir(t, "", "runs", "ls", "--url", url, "-o", "json", "--session", "listed")
			require.Zero(t, r.code, r.stderr)
			var runs []client.Run
			require.NoError(t, json.Unmarshal([]byte(r.stdout), &runs))
			require.Len(t, runs, 1)
			r = weir(t, "", "runs", "get", "--url", url, runs[0].RunID)
			require.Zero(t, r.code, r.stderr)
			require.Contains(t, r.stdout, "completed")
			r = weir(t, "", "runs", "watch", "--url", url, "-o", "ndjson", runs[0].RunID)
			require.Zero(t, r.code, r.stderr)
			require.Contains(t, r.stdout, `"state":"completed"`)

			r = weir(t, `{"name": "made", "instructions": "hi"}`, "agents", "create", "--url", url, "-f", "-", "--model", "offline-priced")
			require.Zero(t, r.code, r.stderr)
			r = weir(t, "", "agents", "ls", "--url", url)
			require.Contains(t, r.stdout, "made")
			r = weir(t, "", "agents", "get", "--url", url, "made")
			require.Contains(t, r.stdout, "offline-priced")
		})
		t.Run("ExitsAsPromised", func(t *testing.T) {
			t.Parallel()
			for name, c := range map[string]struct {
				args []string
				code int
			}{
				"NotFound":    {[]string{"runs", "get", uuid.NewString()}, exitNotFound},
				"NoAgent":     {[]string{"agents", "get", "nobody"}, exitNotFound},
				"WrongToken":  {[]string{"runs", "ls", "--token", "wt_wrong"}, exitDenied},
				"TurnFailed":  {[]string{"chat", "!error broken"}, exitRunFailed},
				"Timeout":     {[]string{"chat", "--timeout", "300ms", "!sleep 20s"}, exitTimeout},
				"Unknown":     {[]string{"agents", "create", "Bad Name"}, exitUsage},
				"UnknownFlag": {[]string{"runs", "ls", "--colour"}, exitUsage},
				"BadOutput":   {[]string{"runs", "ls", "-o", "xml"}, exitUsage},
			} {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					r := weirEnv(t, "", []string{"WEIR_URL=" + url}, c.args...)
					require.Equal(t, c.code, r.code, r.stderr)
					require.Contains(t, r.stderr, "weir: ")
				})
			}
		})
		t.Run("CancelsAndKills", func(t *testing.T) {
			t.Parallel()
			c := client.New(client.Config{URL: url})
			id := accept(t, c, "default", "cancelled", "!stall")
			await(t, c, id, func(r *client.RunDetail) bool { return r.State == "running" })
			r := weir(t, "", "runs", "cancel", "--url", url, id)
			require.Zero(t, r.code, r.stderr)
			require.Equal(t, "cancelled", await(t, c, id, ended).State)
			require.Equal(t, exitRunFailed, weir(t, "", "runs", "watch", "--url", url, id).code)

			id = accept(t, c, "default", "killed", "!stall")
			r = weir(t, "", "runs", "kill", "--url", url, id)
			require.Zero(t, r.code, r.stderr)
			require.Equal(t, "killed", await(t, c, id, ended).State)
		})
		t.Run("IsHealthy", func(t *testing.T) {
			t.Parallel()
			r := weir(t, "", "doctor", "--data-dir", filepath.Join(dir, ".weir"))
			require.Zero(t, r.code, r.stdout+r.stderr)
		})
		t.Run("SecondOneIsRefused", func(t *testing.T) {
			t.Parallel()
			r := weir(t, "", "dev", "--listen", "127.0.0.1:0", "--data-dir", filepath.Join(dir, ".weir"))
			require.Equal(t, exitBusy, r.code)
			require.Contains(t, r.stderr, url)
		})
		t.Run("KeepsItsTokenAndDataSafe", func(t *testing.T) {
			t.Parallel()
			info, err := os.Stat(filepath.Join(dir, ".weir", "dev-token"))
			require.NoError(t, err)
			require.EqualValues(t, 0o600, info.Mode().Perm())
		})
	})
	if t.Failed() {
		return
	}

	d.signal(syscall.SIGTERM)
	require.Zero(t, d.exit(), d.log)
	_, more := <-d.lines
	require.False(t, more, "stdout has one line")

	began := time.Now()
	again := start()
	t.Logf("warm start to ready: %s", time.Since(began).Round(time.Millisecond))
	require.Equal(t, d.ready.Token, again.ready.Token)
	c := client.New(client.Config{URL: again.ready.API, Token: again.ready.Token})
	runs, err := c.Runs(limited(t), client.RunListParams{})
	require.NoError(t, err)
	require.NotEmpty(t, runs.Runs, "data is kept")

	// A crash leaves nothing that the next start trips over.
	again.kill()
	third := start()
	third.signal(syscall.SIGINT)
	require.Zero(t, third.exit(), third.log)
}

func TestDevEphemeral(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	d := startRoleIn(t, dir, "dev", "--ephemeral", "--listen", "127.0.0.1:0")
	other := startRoleIn(t, dir, "dev", "--ephemeral", "--listen", "127.0.0.1:0")
	require.NotEqual(t, d.ready.DatabaseURL, other.ready.DatabaseURL)
	d.signal(syscall.SIGTERM)
	require.Zero(t, d.exit(), d.log)
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, entries)
}

func TestFirstStartTakesTheKeyOfItsEnvironment(t *testing.T) {
	t.Parallel()
	model := func(env string, args ...string) string {
		p := launchEnv(t, t.TempDir(), []string{env}, append([]string{"dev", "--listen", "127.0.0.1:0", "--json"}, args...)...)
		var ready readiness
		select {
		case line := <-p.lines:
			require.NoError(t, json.Unmarshal([]byte(line), &ready))
		case <-time.After(readyLimit):
			t.Fatalf("not ready:\n%s", p.log)
		}
		a, err := client.New(client.Config{URL: ready.API}).Agent(limited(t), "default")
		require.NoError(t, err)
		var c struct{ Provider string }
		require.NoError(t, json.Unmarshal(a.Config, &c))
		p.signal(syscall.SIGTERM)
		require.Zero(t, p.exit(), p.log)
		return c.Provider
	}
	require.Equal(t, "openai", model("OPENAI_API_KEY=sk-not-a-real-key", "--ephemeral"))
	require.Equal(t, "offline", model("OPENAI_API_KEY=sk-not-a-real-key", "--ephemeral", "--offline"))
}

// TestWorkerDies kills the busy worker with SIGKILL while another is idle.
func TestWorkerDies(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.reaper()
	_, c := f.api()
	workers := map[string]*role{}
	for range 2 {
		w := f.worker()
		workers[w.ready.WorkerID] = w
	}
	inStep := make(chan struct{})
	var once sync.Once
	tool := newTestTool(t, func(call toolCall, r *http.Request) bool {
		first := false
		if call.N == 2 {
			once.Do(func() { first = true; close(inStep) })
		}
		if first {
			<-r.Context().Done() // it never answers
			return false
		}
		return true
	})
	tool.agent(t, c, "counter", "idempotent")
	id := accept(t, c, "counter", "dies", script(3))
	<-inStep
	run, err := c.Run(limited(t), id)
	require.NoError(t, err)
	victim := workers[run.WorkerID]
	require.NotNil(t, victim, "run %s is with worker %q", id, run.WorkerID)
	victim.kill()
	killed := time.Now()
	await(t, c, id, func(r *client.RunDetail) bool { return r.WorkerID != "" && r.WorkerID != run.WorkerID || r.Final() })
	t.Logf("running elsewhere %s after the kill", time.Since(killed).Round(time.Millisecond))
	run = await(t, c, id, ended)
	require.Equal(t, "completed", run.State)
	require.Len(t, tool.sent(1), 1, "a completed step does not run again")
	require.Len(t, tool.sent(3), 1)
	keys := tool.sent(2)
	require.Len(t, keys, 2, "the call that was cut off is made again")
	require.NotEmpty(t, keys[0])
	require.Equal(t, keys[0], keys[1], "under the same key")
}

// TestWorkerDrains asks a worker to stop in the middle of a turn.
func TestWorkerDrains(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	_, c := f.api()
	first := f.worker("--listen", "127.0.0.1:0")
	inStep, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	tool := newTestTool(t, func(call toolCall, r *http.Request) bool {
		if call.N == 2 {
			once.Do(func() {
				close(inStep)
				select {
				case <-goOn:
				case <-r.Context().Done():
				}
			})
		}
		return true
	})
	tool.agent(t, c, "counter", "at_most_once")
	id := accept(t, c, "counter", "drains", script(3))
	<-inStep
	first.signal(syscall.SIGTERM)
	// The worker says that it drains before the step ends.
	require.Eventually(t, func() bool {
		workers, err := c.Workers(limited(t))
		require.NoError(t, err)
		for _, w := range workers {
			if w.WorkerID == first.ready.WorkerID {
				return w.State == "draining"
			}
		}
		return false
	}, stepLimit, 20*time.Millisecond)
	close(goOn)
	require.Zero(t, first.exit(), first.log)
	run, err := c.Run(limited(t), id)
	require.NoError(t, err)
	require.Equal(t, "queued", run.State, "handed over")
	f.worker()
	run = await(t, c, id, ended)
	require.Equal(t, "completed", run.State)
	require.Zero(t, run.Losses, "a drain is no loss")
	for n := 1; n <= 3; n++ {
		require.Len(t, tool.sent(n), 1, "step %d", n)
	}
}

// TestSecondSignalStopsAtOnce does not wait for a call that takes long.
func TestSecondSignalStopsAtOnce(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	_, c := f.api()
	w := f.worker("--drain", "10m")
	inStep := make(chan struct{})
	var once sync.Once
	tool := newTestTool(t, func(_ toolCall, r *http.Request) bool {
		once.Do(func() { close(inStep) })
		<-r.Context().Done()
		return false
	})
	tool.agent(t, c, "counter", "idempotent")
	accept(t, c, "counter", "twice", script(1))
	<-inStep
	w.signal(syscall.SIGTERM)
	require.Eventually(t, func() bool { return strings.Contains(w.log.String(), "draining") }, stepLimit, 10*time.Millisecond)
	w.signal(syscall.SIGTERM)
	w.exit()
}

// TestNoWorkers accepts without anybody to work, and works when one comes; the
// API that accepted is gone by then.
func TestNoWorkers(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	api, c := f.api()
	id := accept(t, c, "default", "alone", "hello")
	api.kill()
	_, c = f.api()
	run, err := c.Run(limited(t), id)
	require.NoError(t, err)
	require.Equal(t, "queued", run.State)
	f.worker()
	require.Equal(t, "completed", await(t, c, id, ended).State)
}

// TestChatSurvivesTheAPI kills the API under a waiting chat and starts it again.
func TestChatSurvivesTheAPI(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	api, c := f.api()
	f.worker()
	inStep, goOn := make(chan struct{}), make(chan struct{})
	tool := newTestTool(t, func(_ toolCall, r *http.Request) bool {
		close(inStep) // a second call would panic: the turn runs once
		select {
		case <-goOn:
		case <-r.Context().Done():
		}
		return true
	})
	tool.agent(t, c, "counter", "idempotent")
	answered := make(chan result, 1)
	go func() {
		answered <- weir(t, "", "chat", "--url", api.ready.API, "--token", f.token, "-a", "counter", script(1))
	}()
	<-inStep
	api.kill()
	f.start("api", "--listen", strings.TrimPrefix(api.ready.API, "http://"))
	close(goOn)
	r := <-answered
	require.Zero(t, r.code, r.stderr)
	require.Equal(t, "counted\n", r.stdout)
	require.Len(t, tool.sent(1), 1)
}

// TestPoisoned has a turn kill each of its workers at the same step.
func TestPoisoned(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	f.reaper()
	_, c := f.api()
	pool, err := pgxpool.New(t.Context(), f.url)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	var workers []*role
	for range 3 {
		workers = append(workers, f.worker())
	}
	var mu sync.Mutex
	solitary := 0
	tool := newTestTool(t, func(call toolCall, r *http.Request) bool {
		var pid int
		var alone bool
		err := pool.QueryRow(context.Background(), `SELECT w.pid, w.solitary FROM run r JOIN worker w ON w.id = r.worker_id WHERE r.id = $1`,
			strings.TrimPrefix(call.Run, "run_")).Scan(&pid, &alone)
		if err != nil {
			return false
		}
		if alone {
			mu.Lock()
			solitary++
			mu.Unlock()
		}
		_ = syscall.Kill(pid, syscall.SIGKILL)
		<-r.Context().Done()
		return false
	})
	tool.agent(t, c, "killer", "idempotent")
	id := accept(t, c, "killer", "poison", script(1))
	run := await(t, c, id, ended)
	require.Equal(t, "poisoned", run.State)
	require.Equal(t, 3, run.Losses)
	require.Len(t, tool.sent(1), 3)
	mu.Lock()
	require.Equal(t, 1, solitary, "the last one died alone")
	mu.Unlock()
	alive := 0
	for _, w := range workers {
		select {
		case <-w.done:
		default:
			alive++
		}
	}
	require.Equal(t, 1, alive, "the worker whose child died lives on")
	require.Equal(t, "completed", await(t, c, accept(t, c, "default", "after", "hello"), ended).State)
}

func TestDemoCrash(t *testing.T) {
	t.Parallel()
	r := weir(t, "", "demo", "crash")
	require.Zero(t, r.code, r.stdout+r.stderr)
	require.Contains(t, r.stdout, "killed with SIGKILL")
	require.NotContains(t, r.stdout, "NO ")
	t.Log(r.stdout)
}

func TestDemoCrashJSON(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	r := weir(t, "", "demo", "crash", "-o", "json", "--database-url", f.url)
	require.Zero(t, r.code, r.stdout+r.stderr)
	var report crashReport
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &report))
	require.True(t, report.OK)
	require.Len(t, report.Executions, demoSteps)
}

// TestOperators are the commands of the one who looks after a database.
func TestOperators(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	r := weir(t, "", "migrate", "validate", "--database-url", f.url)
	require.Zero(t, r.code, r.stderr)
	r = weir(t, "", "migrate", "up", "--database-url", f.url)
	require.Zero(t, r.code, r.stderr)
	require.Contains(t, r.stdout, "nothing to do")
	r = weir(t, "", "migrate", "status", "-o", "ndjson", "--database-url", f.url)
	require.Zero(t, r.code, r.stderr)
	require.NotContains(t, r.stdout, `"state":"pending"`)

	t.Run("TokenMakesItsTenant", func(t *testing.T) {
		create := []string{"tokens", "create", "--database-url", f.url, "--id", "ops", "--scopes", "rpc", "--tenant", "acme"}
		r := weir(t, "", create...)
		require.Zero(t, r.code, r.stderr)
		require.Equal(t, exitFailed, weir(t, "", create...).code, "one token of a name")
		token := strings.TrimSpace(r.stdout)
		api, _ := f.api()
		f.worker()
		chat := weir(t, "", "chat", "--url", api.ready.API, "--token", token, "hello acme")
		require.Equal(t, "offline: hello acme\n", chat.stdout, chat.stderr)
		denied := weir(t, "", "agents", "ls", "--url", api.ready.API, "--token", token)
		require.Equal(t, exitDenied, denied.code)
		require.Contains(t, denied.stderr, "Insufficient scope: requires 'admin'")
		nobody := weir(t, "", "chat", "--url", api.ready.API, "hello")
		require.Equal(t, exitDenied, nobody.code, "only dev trusts the loopback")
	})
	t.Run("RolesRefuseAnUnmigratedDatabase", func(t *testing.T) {
		conn, err := pgx.Connect(limited(t), f.url)
		require.NoError(t, err)
		defer func() { _ = conn.Close(context.Background()) }()
		name := "weir_test_empty_" + strings.ReplaceAll(uuid.NewString(), "-", "")
		_, err = conn.Exec(limited(t), "CREATE DATABASE "+name+" TEMPLATE template0")
		require.NoError(t, err)
		t.Cleanup(func() {
			conn, err := pgx.Connect(context.Background(), f.url)
			if err == nil {
				_, _ = conn.Exec(context.Background(), "DROP DATABASE "+name+" WITH (FORCE)")
				_ = conn.Close(context.Background())
			}
		})
		config, err := pgx.ParseConfig(f.url)
		require.NoError(t, err)
		empty := strings.Replace(f.url, config.Database, name, 1)
		r := weir(t, "", "worker", "--database-url", empty)
		require.Equal(t, exitFailed, r.code)
		require.Contains(t, r.stderr, "weir migrate up")
		r = weir(t, "", "migrate", "validate", "--database-url", empty)
		require.Equal(t, exitFailed, r.code)
	})
	t.Run("WorkerHasHealthPages", func(t *testing.T) {
		w := f.worker("--listen", "127.0.0.1:0")
		at := w.ready.Listen
		for _, path := range []string{"/livez", "/readyz", "/metrics"} {
			code, text := get(t, at+path)
			require.Equal(t, http.StatusOK, code, text)
		}
		_, metrics := get(t, at+"/metrics")
		require.Contains(t, metrics, `weir_sweeper_repairs_total{kind="nudge"} 0`)
	})
}

func TestCompletion(t *testing.T) {
	t.Parallel()
	var out, errs bytes.Buffer
	require.Zero(t, run(t.Context(), []string{"completion", "bash"}, strings.NewReader(""), &out, &errs), errs.String())
	require.Contains(t, out.String(), "weir")
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"bogus"}, {"worker", "--bogus"}, {"tokens"}, {"tokens", "create"}, {"runs", "get"}, {"agents", "get"}, {"dev", "extra"},
		{"chat", "--url", "ftp://x", "hello"}, {"runs", "ls", "-n", "0"},
	} {
		var out, errs bytes.Buffer
		require.Equal(t, exitUsage, run(t.Context(), args, strings.NewReader(""), &out, &errs), "%v: %s", args, errs.String())
		require.Contains(t, errs.String(), "weir: ")
	}
}
