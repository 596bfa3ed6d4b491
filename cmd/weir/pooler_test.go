package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/client"
	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/db/dbtest"
)

// startBouncer starts a PgBouncer in transaction mode before the server of a
// database and returns the database's URL through it. It refuses startup
// parameters, and gives a backend to whoever begins a transaction.
func startBouncer(t *testing.T, databaseURL string) string {
	t.Helper()
	path, err := exec.LookPath("pgbouncer")
	if err != nil {
		path = "/usr/sbin/pgbouncer" // Debian's, which is not on everybody's PATH
	}
	if _, err := os.Stat(path); err != nil {
		t.Skip("there is no pgbouncer on PATH or in /usr/sbin; install the package pgbouncer, or run make test as root")
	}
	server, err := pgx.ParseConfig(databaseURL)
	require.NoError(t, err)
	dir, err := os.MkdirTemp("", "weir-pgbouncer-")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o755)) // its user is not ours

	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := free.Addr().(*net.TCPAddr).Port
	require.NoError(t, free.Close())
	password := ""
	if server.Password != "" {
		password = " password='" + strings.ReplaceAll(server.Password, "'", "''") + "'"
	}
	// Few backends and the one that is free longest goes first, so that whatever
	// would stay with a backend meets another client soon.
	config := fmt.Sprintf(`[databases]
* = host=%s port=%d user=%s%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 12
max_client_conn = 500
server_round_robin = 1
log_connections = 0
log_disconnections = 0
`, server.Host, server.Port, server.User, password, port)
	file := filepath.Join(dir, "pgbouncer.ini")
	require.NoError(t, os.WriteFile(file, []byte(config), 0o644))

	cmd := exec.Command(path, file)
	log := &tail{}
	cmd.Stderr, cmd.Stdout = log, log
	if os.Geteuid() == 0 { // it refuses to be root, and must be let into the server's socket
		owner := uint32(65534)
		if info, err := os.Stat(server.Host); err == nil {
			owner = info.Sys().(*syscall.Stat_t).Uid
		}
		if owner == 0 {
			t.Skip("pgbouncer refuses to run as root, and only root may use the server's socket")
		}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: owner, Gid: owner}}
	}
	require.NoError(t, cmd.Start())
	done := make(chan struct{})
	go func() { defer close(done); _ = cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-done
		if t.Failed() {
			t.Logf("log of pgbouncer:\n%s", log)
		}
	})
	through := url.URL{Scheme: "postgres", User: url.User(server.User), Host: net.JoinHostPort("127.0.0.1", fmt.Sprint(port)), Path: "/" + server.Database, RawQuery: "sslmode=disable"}
	require.Eventually(t, func() bool {
		pooled, err := db.Pooled(t.Context(), through.String())
		return err == nil && pooled
	}, readyLimit, 20*time.Millisecond, "pgbouncer does not answer")
	return through.String()
}

// TestPoolers takes a fleet through the same fate on each way to Postgres.
func TestPoolers(t *testing.T) {
	t.Parallel()
	for name, setup := range map[string]struct {
		flags  func(server, bouncer string) []string
		polls  bool
		doctor map[string]string
	}{
		"Direct": {
			flags:  func(server, _ string) []string { return []string{"--database-url", server} },
			doctor: map[string]string{"direct connection": checkOK, "schema": checkOK},
		},
		"PastTheBouncer": {
			flags: func(server, bouncer string) []string {
				return []string{"--database-url", bouncer, "--database-url-direct", server}
			},
			doctor: map[string]string{"pooler": checkOK, "direct connection": checkOK, "schema": checkOK},
		},
		"BouncerAlone": {
			flags:  func(_, bouncer string) []string { return []string{"--database-url", bouncer} },
			polls:  true,
			doctor: map[string]string{"pooler": checkWarning, "schema": checkOK},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := dbtest.EmptyURL(t)
			bouncer := startBouncer(t, server)
			flags := setup.flags(server, bouncer)
			r := weir(t, "", append([]string{"migrate", "up"}, flags...)...)
			require.Zero(t, r.code, r.stderr)
			r = weir(t, "", "tokens", "create", "--database-url", flags[1], "--id", "test", "--scopes", "rpc,admin")
			require.Zero(t, r.code, r.stderr)
			f := &fleet{t: t, url: server, token: r.stdout[:len(r.stdout)-1], flags: flags}

			_, c := f.api()
			workers := map[string]*role{}
			for range 2 {
				w := f.worker("--listen", "127.0.0.1:0")
				workers[w.ready.WorkerID] = w
			}
			inStep := make(chan struct{})
			var once sync.Once
			tool := newTestTool(t, func(call toolCall, r *http.Request) bool {
				if call.N != 99 {
					return true
				}
				first := false
				once.Do(func() { first = true; close(inStep) })
				if first {
					<-r.Context().Done() // it never answers
				}
				return !first
			})
			tool.agent(t, c, "counter", "at_most_once")
			tool.agent(t, c, "again", "idempotent")

			began := time.Now()
			f.turns(c, 100)
			t.Logf("100 turns of 2 tool steps: %s", time.Since(began).Round(time.Millisecond))
			require.Len(t, tool.sent(1), 100, "each step ran once")
			require.Len(t, tool.sent(2), 100)

			var took []time.Duration
			for i := range 9 {
				began := time.Now()
				_, err := c.Execute(limited(t), client.ExecuteParams{Message: "hello", SessionID: fmt.Sprintf("alone-%d", i), IdempotencyKey: fmt.Sprintf("alone-%d", i)})
				require.NoError(t, err)
				took = append(took, time.Since(began))
			}
			slices.Sort(took)
			t.Logf("a turn alone, median: %s", took[len(took)/2].Round(time.Millisecond))

			id := accept(t, c, "default", "stalls", "!stall")
			await(t, c, id, func(r *client.RunDetail) bool { return r.State == "running" })
			began = time.Now()
			_, err := c.CancelRun(limited(t), id, "test")
			require.NoError(t, err)
			require.Equal(t, "cancelled", await(t, c, id, ended).State)
			t.Logf("cancelled in %s", time.Since(began).Round(time.Millisecond))
			require.Less(t, time.Since(began), 5*time.Second)

			f.leavesNothing(bouncer, setup.polls)
			f.doctor(setup.doctor)
			if setup.polls {
				r := weir(t, "", append([]string{"doctor", "--pooler", "none"}, flags...)...)
				require.Equal(t, exitFailed, r.code, "it is told that there is no pooler")
				require.Contains(t, r.stderr, "broken: pooler")
			}

			// Nobody may judge others before its own lease has passed.
			require.Eventually(t, func() bool { return time.Since(began) > 4*time.Second }, stepLimit, 50*time.Millisecond)
			id = accept(t, c, "again", "dies", "!tool count {\"N\":99}\n!say counted")
			<-inStep
			run, err := c.Run(limited(t), id)
			require.NoError(t, err)
			victim := workers[run.WorkerID]
			require.NotNil(t, victim, "run %s is with worker %q", id, run.WorkerID)
			victim.kill()
			began = time.Now()
			await(t, c, id, func(r *client.RunDetail) bool { return r.WorkerID != "" && r.WorkerID != run.WorkerID || r.Final() })
			t.Logf("running elsewhere %s after the kill", time.Since(began).Round(time.Millisecond))
			require.Equal(t, "completed", await(t, c, id, ended).State)
			require.Len(t, tool.sent(99), 2)

			for id, w := range workers {
				if id != run.WorkerID {
					w.signal(syscall.SIGTERM)
					require.Zero(t, w.exit(), w.log)
				}
			}
		})
	}
}

// turns carries n turns with two tool steps each, ten at a time.
func (f *fleet) turns(c *client.Client, n int) {
	f.t.Helper()
	var wg sync.WaitGroup
	next := make(chan int, n)
	for i := range n {
		next <- i
	}
	close(next)
	states := make([]string, n)
	for range 10 {
		wg.Go(func() {
			for i := range next {
				r, err := c.Execute(f.t.Context(), client.ExecuteParams{Message: script(2), SessionID: fmt.Sprintf("many-%d", i), IdempotencyKey: fmt.Sprintf("many-%d", i), AgentID: "counter"})
				if err != nil {
					states[i] = err.Error()
					continue
				}
				states[i] = r.Response
			}
		})
	}
	wg.Wait()
	for i, s := range states {
		require.Equal(f.t, "counted", s, "turn %d", i)
	}
}

// leavesNothing looks for what would meet another client of the pooler.
func (f *fleet) leavesNothing(bouncer string, polls bool) {
	f.t.Helper()
	ctx := limited(f.t)
	config, err := pgx.ParseConfig(bouncer)
	require.NoError(f.t, err)
	config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	backends := map[int]bool{}
	var open []*pgx.Conn
	for range 6 { // each holds another backend
		conn, err := pgx.ConnectConfig(ctx, config)
		require.NoError(f.t, err)
		open = append(open, conn)
		var pid, prepared int
		var seqscan, statement, mode string
		_, err = conn.Exec(ctx, "BEGIN")
		require.NoError(f.t, err)
		require.NoError(f.t, conn.QueryRow(ctx, `SELECT pg_backend_pid(), current_setting('enable_seqscan'), current_setting('statement_timeout'),
			current_setting('plan_cache_mode'), (SELECT count(*) FROM pg_prepared_statements)`).Scan(&pid, &seqscan, &statement, &mode, &prepared))
		require.Equal(f.t, []any{"on", "0", "auto", 0}, []any{seqscan, statement, mode, prepared}, "backend %d", pid)
		backends[pid] = true
	}
	require.Len(f.t, backends, 6)
	for _, conn := range open {
		require.NoError(f.t, conn.Close(ctx))
	}
	if !polls {
		return
	}
	direct, err := pgx.Connect(ctx, f.url)
	require.NoError(f.t, err)
	defer direct.Close(context.WithoutCancel(ctx))
	require.Eventually(f.t, func() bool { // those of a transaction come and go
		var locks int
		require.NoError(f.t, direct.QueryRow(ctx, `SELECT count(*) FROM pg_locks
			WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`).Scan(&locks))
		return locks == 0
	}, stepLimit, 5*time.Millisecond)
}

// doctor compares what weir doctor finds with what is wanted.
func (f *fleet) doctor(want map[string]string) {
	f.t.Helper()
	r := weir(f.t, "", append([]string{"doctor", "-o", "json"}, f.flags...)...)
	require.Zero(f.t, r.code, r.stdout+r.stderr)
	var findings []finding
	require.NoError(f.t, json.Unmarshal([]byte(r.stdout), &findings))
	got := map[string]string{}
	for _, found := range findings {
		if _, ok := want[found.Check]; ok || found.Check == "pooler" || found.Check == "direct connection" {
			got[found.Check] = found.State
		}
	}
	require.Equal(f.t, want, got, r.stdout)
}
