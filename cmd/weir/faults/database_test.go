package faults

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/db/cluster"
)

// postgresFails restarts, crashes and freezes the server under load.
func postgresFails(t *testing.T) {
	f := newFleetOn(t, newServer(t, nil))
	f.judge()
	f.api()
	f.api()
	f.workers(2)
	stopWatch := f.watch(500 * time.Millisecond)
	stop := f.load(4, 200*time.Millisecond, f.mixed)
	calm := func() { pause(t.Context(), f.random.between(2*time.Second, 4*time.Second)) }
	serves := func(what string, since time.Time) {
		t.Helper()
		f.ended(f.send(say(line(again, label("at")))))
		t.Logf("%s: a new turn was answered %s after it began", what, time.Since(since).Round(100*time.Millisecond))
	}
	calm()
	for _, c := range []struct {
		what string
		how  syscall.Signal
		down time.Duration
	}{
		{"fast restart", syscall.SIGINT, 0},
		{"immediate crash", syscall.SIGQUIT, 0},
		{"kill of the postmaster", syscall.SIGKILL, time.Second},
		{"longer than a lease", syscall.SIGINT, lease + 2*time.Second},
	} {
		began := time.Now()
		f.server.restart(t, c.how, c.down)
		serves(c.what, began)
		calm()
	}
	began := time.Now()
	backends := children(f.server.pid())
	_ = syscall.Kill(drawn(f.random, backends), syscall.SIGKILL) // all others end, and it recovers
	serves("kill of one backend", began)
	calm()
	began = time.Now()
	f.server.freeze(t.Context(), 30*time.Second)
	serves("frozen for 30 s", began)
	require.True(t, f.is(`SELECT count(*) = 1 FROM river_leader`), "River has a leader again")
	stop()
	stopWatch()
	f.promises(leave{repairs: true, late: true})
}

// terminateBackends ends one connection after the other, whatever it is for.
func terminateBackends(t *testing.T) {
	f := newFleet(t)
	f.judge()
	f.api()
	f.workers(2)
	stopWatch := f.watch(300 * time.Millisecond)
	stop := f.load(3, 150*time.Millisecond, f.mixed)
	ended := 0
	for until := time.Now().Add(time.Duration(size(20, 8)) * time.Second); time.Now().Before(until); {
		ended += one[int](f, `SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity
			WHERE datname = current_database() AND application_name <> 'test' ORDER BY hashtextextended(pid::text, $1) LIMIT 1) x`, f.random.n(1<<30))
		pause(t.Context(), f.random.between(20*time.Millisecond, 180*time.Millisecond))
	}
	stop()
	stopWatch()
	t.Logf("%d connections were terminated", ended)
	f.promises(leave{repairs: true, late: true})
}

// failover loses the primary and promotes its replica. A synchronous one knows
// everything that was answered; an asynchronous one may not, and what it does
// not know is lost: that is what the operator chose.
func failover(t *testing.T) {
	for name, synchronous := range map[string]bool{"Asynchronous": false, "Synchronous": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newServer(t, map[string]string{"wal_level": "replica", "max_wal_senders": "4", "hot_standby": "on", "wal_keep_size": "512MB"})
			f := newFleetOn(t, s)
			f.proxy = newProxy(t, s.address()) // the address that follows the primary
			replica := newReplica(t, s, synchronous)
			f.judge()
			f.api()
			f.workers(2)
			stop := f.load(4, 50*time.Millisecond, f.mixed)
			pause(t.Context(), f.random.between(3*time.Second, 6*time.Second))
			// The replica falls behind for a moment: commits of a synchronous pair
			// have no answer yet, an asynchronous one gives answers that will not last.
			replica.detach(t)
			f.until(stepLimit, "the replica is detached", func() bool { return f.is(`SELECT NOT EXISTS (SELECT FROM pg_stat_replication)`) })
			pause(t.Context(), f.random.between(200*time.Millisecond, 600*time.Millisecond))
			answered := f.accepted()
			began := time.Now()
			s.lose(t)
			replica.promote(t)
			f.proxy.to(replica.address)
			f.pool.Close()
			f.pool = replica.pool(t, f.dbname)
			f.ended(f.send(say(line(again, label("at")))))
			t.Logf("%d turns were answered before the primary's end; a new turn was answered %s after it", answered, time.Since(began).Round(100*time.Millisecond))
			stop()
			f.promises(leave{repairs: true, late: true, forgets: !synchronous})
		})
	}
}

// replica is a standby of a server.
type replica struct {
	address, socketDir string
	port               int
	cmd                *exec.Cmd
	log                *tail
}

func newReplica(t *testing.T, primary *server, synchronous bool) *replica {
	t.Helper()
	binaries, err := cluster.Find(t.Context(), cluster.Config{NoFetch: true})
	require.NoError(t, err)
	dir, err := os.MkdirTemp("/tmp", "weir-replica-") // a folder that its user can enter
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	r := &replica{socketDir: dir, log: &tail{}}
	as := serverUser(t, dir)
	config, err := pgx.ParseConfig(primary.cluster.URL("postgres"))
	require.NoError(t, err)
	data := filepath.Join(dir, "data")
	command := func(program string, args ...string) *exec.Cmd {
		cmd := exec.Command(filepath.Join(binaries.Dir, program), args...)
		cmd.Env, cmd.Dir = []string{"LC_ALL=C", "TZ=UTC", "PATH=/usr/bin:/bin"}, "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: as}
		cmd.Stdout, cmd.Stderr = r.log, r.log
		return cmd
	}
	base := command("pg_basebackup", "-D", data, "-R", "-X", "stream", "-c", "fast", "-d",
		fmt.Sprintf("host=127.0.0.1 port=%d user=%s password=%s application_name=replica", config.Port, config.User, password(t, primary)))
	require.NoError(t, base.Run(), "%s", r.log)
	r.port = freePort(t)
	r.address = "127.0.0.1:" + strconv.Itoa(r.port)
	args := []string{"-D", data, "-c", "port=" + strconv.Itoa(r.port), "-c", "unix_socket_directories=" + dir, "-c", "listen_addresses=127.0.0.1",
		"-c", "logging_collector=off", "-c", "hot_standby=on"}
	for name, value := range settings {
		args = append(args, "-c", name+"="+value)
	}
	r.cmd = command("postgres", args...)
	require.NoError(t, startLeashed(r.cmd, syscall.SIGQUIT))
	done := make(chan error, 1)
	go func() { done <- r.cmd.Wait() }()
	t.Cleanup(func() {
		_ = r.cmd.Process.Signal(syscall.SIGQUIT)
		<-done
	})
	streams := func(state string) {
		t.Helper()
		for began := time.Now(); ; pause(t.Context(), 50*time.Millisecond) {
			conn, err := pgx.Connect(t.Context(), primary.cluster.URL("postgres"))
			require.NoError(t, err)
			var yes bool
			err = conn.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_replication WHERE state = 'streaming' AND sync_state = $1)`, state).Scan(&yes)
			_ = conn.Close(t.Context())
			require.NoError(t, err)
			if yes {
				return
			}
			require.Less(t, time.Since(began), stepLimit, "the replica does not stream: %s", r.log)
		}
	}
	streams("async")
	if synchronous {
		primary.exec(t, `ALTER SYSTEM SET synchronous_standby_names = 'replica'`)
		primary.exec(t, `SELECT pg_reload_conf()`)
		streams("sync")
	}
	return r
}

func (r *replica) pool(t *testing.T, dbname string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), r.url(dbname))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

func password(t *testing.T, s *server) string {
	t.Helper()
	config, err := pgx.ParseConfig(s.cluster.TCPURL("postgres"))
	require.NoError(t, err)
	return config.Password
}

// serverUser gives a folder to the user that Postgres runs as when we are
// root; nil is ourselves.
func serverUser(t *testing.T, dir string) *syscall.Credential {
	t.Helper()
	if os.Geteuid() != 0 {
		return nil
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		u, err = user.Lookup("nobody")
	}
	require.NoError(t, err)
	uid, _ := strconv.Atoi(u.Uid)
	gid, _ := strconv.Atoi(u.Gid)
	require.NoError(t, os.Chown(dir, uid, gid))
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
}

func (r *replica) url(dbname string) string {
	return fmt.Sprintf("postgres://weir@/%s?host=%s&port=%d&application_name=test", dbname, r.socketDir, r.port)
}

// exec runs statements on the replica, each by itself.
func (r *replica) exec(t *testing.T, statements ...string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), r.url("postgres"))
	require.NoError(t, err)
	defer conn.Close(context.Background())
	for _, sql := range statements {
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(t, err, sql)
	}
}

// detach ends the stream from the primary.
func (r *replica) detach(t *testing.T) {
	t.Helper()
	r.exec(t, `ALTER SYSTEM SET primary_conninfo = ''`, `SELECT pg_reload_conf()`)
}

// promote makes the replica a primary, whose other clients come first: it gives
// the numbers of the transactions that it does not know away again. Its first
// checkpoint takes a while, as one of a large server does.
func (r *replica) promote(t *testing.T) {
	t.Helper()
	for _, pid := range children(r.cmd.Process.Pid) {
		if title, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); strings.Contains(string(title), "checkpointer") {
			require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
			resume := time.AfterFunc(5*time.Second, func() { _ = syscall.Kill(pid, syscall.SIGCONT) })
			t.Cleanup(func() {
				resume.Stop()
				_ = syscall.Kill(pid, syscall.SIGCONT)
			})
		}
	}
	r.exec(t, `SELECT pg_promote()`)
	r.exec(t, slices.Repeat([]string{`SELECT pg_current_xact_id()`}, 300)...)
}

// longSnapshot keeps a snapshot open, as a forgotten report does, and compares
// how much gets done.
func longSnapshot(t *testing.T) {
	f := newFleet(t)
	f.judge()
	f.api()
	f.workers(2)
	measure := func() int {
		before := one[int](f, `SELECT count(*) FROM run WHERE state = 'completed'`)
		stop := f.load(6, time.Millisecond, func(int) message { m, _ := chain(2, again); return m })
		pause(t.Context(), 6*time.Second)
		after := one[int](f, `SELECT count(*) FROM run WHERE state = 'completed'`)
		stop()
		return after - before
	}
	measure() // warm
	alone := measure()
	conn, err := pgx.Connect(t.Context(), f.server.cluster.URL(f.dbname))
	require.NoError(t, err)
	defer conn.Close(context.Background())
	_, err = conn.Exec(t.Context(), `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM run`)
	require.NoError(t, err)
	first := measure()
	second := measure()
	_, err = conn.Exec(t.Context(), `COMMIT`)
	require.NoError(t, err)
	t.Logf("turns in 6 s: %d without, %d and then %d under an open snapshot", alone, first, second)
	require.Greater(t, second, alone/4, "it goes on")
	f.promises(leave{})
}

// lockedJobs takes the table of jobs away for five seconds.
func lockedJobs(t *testing.T) {
	f := newFleet(t)
	f.judge()
	f.api()
	f.workers(2)
	stopWatch := f.watch(300 * time.Millisecond)
	stop := f.load(3, 100*time.Millisecond, f.mixed)
	pause(t.Context(), 2*time.Second)
	conn, err := pgx.Connect(t.Context(), f.server.cluster.URL(f.dbname))
	require.NoError(t, err)
	defer conn.Close(context.Background())
	_, err = conn.Exec(t.Context(), `BEGIN; LOCK TABLE river_job IN ACCESS EXCLUSIVE MODE`)
	require.NoError(t, err)
	pause(t.Context(), 5*time.Second)
	_, err = conn.Exec(t.Context(), `COMMIT`)
	require.NoError(t, err)
	took := f.ended(f.send(say(line(again, label("at")))))
	t.Logf("a turn sent at the end of the lock took %s", took.Round(time.Millisecond))
	pause(t.Context(), 2*time.Second)
	stop()
	stopWatch()
	require.Zero(t, one[int](f, `SELECT coalesce(sum(losses), 0) FROM run`), "nobody was taken for dead")
	f.promises(leave{repairs: true})
}

// duplicateDelivery inserts spare jobs for everything, and has completed ones
// delivered again.
func duplicateDelivery(t *testing.T) {
	f := newFleet(t)
	f.judge()
	f.api()
	f.workers(2)
	stopWatch := f.watch(300 * time.Millisecond)
	stop := f.load(3, 100*time.Millisecond, f.mixed)
	spare, repeated := int64(0), int64(0)
	for until := time.Now().Add(time.Duration(size(15, 6)) * time.Second); time.Now().Before(until); {
		spare += f.exec(`INSERT INTO river_job (args, kind, max_attempts, queue)
			SELECT jsonb_build_object('run_id', id), kind::text, 1, 'turns' FROM run WHERE kind = 'turn' ORDER BY id DESC LIMIT 8`)
		repeated += f.exec(`UPDATE river_job SET state = 'available', finalized_at = NULL, max_attempts = 25, scheduled_at = now()
			WHERE id IN (SELECT id FROM river_job WHERE state = 'completed' ORDER BY id DESC LIMIT 4)`)
		pause(t.Context(), 100*time.Millisecond)
	}
	stop()
	stopWatch()
	t.Logf("%d spare jobs, %d delivered again", spare, repeated)
	f.promises(leave{})
	require.Zero(t, one[int](f, `SELECT coalesce(sum(losses), 0) FROM run`))
}

// lostFetch has a worker fetch a job, with the commit done and its answer lost:
// the database says that a live worker has it, and the worker knows nothing.
func lostFetch(t *testing.T) {
	f := newFleet(t)
	f.judge()
	f.api()
	w := f.worker()
	f.ended(f.send(say("")))
	w.signal(syscall.SIGSTOP)
	s := f.send(say(line(once, label("at"))))
	f.until(stepLimit, "the run has its job", func() bool {
		return f.exec(`UPDATE river_job SET state = 'running', attempt = 1, attempted_at = clock_timestamp(), attempted_by = ARRAY[$2::text]
			WHERE args ->> 'run_id' = $1 AND state = 'available'`, s.id, w.ready.WorkerID) == 1
	})
	w.signal(syscall.SIGCONT)
	t.Logf("the run went on and ended %s after its fetch was lost", f.ended(s).Round(100*time.Millisecond))
	f.promises(leave{repairs: true})
}

// cancelRaces cancels runs at any moment of their lives, while workers die.
func cancelRaces(t *testing.T) {
	f := newFleet(t)
	f.judge()
	f.api()
	f.workers(3)
	stopWatch := f.watch(200 * time.Millisecond)
	any := []string{"completed", "cancelled"}
	var mu sync.Mutex
	said := map[string]int{}
	var wg sync.WaitGroup
	ctx, done := context.WithCancel(t.Context())
	wg.Go(func() { // the reaper is in the race
		for pause(ctx, f.random.between(time.Second, 2*time.Second)) {
			if living := f.living("worker"); len(living) > 2 {
				drawn(f.random, living).kill()
				f.worker()
			}
		}
	})
	var senders sync.WaitGroup
	for range 6 {
		senders.Go(func() {
			for range size(60, 15) {
				m, _ := chain(1+f.random.n(3), again)
				if f.random.n(3) == 0 {
					m = say("!sleep 100ms\n")
				}
				m.ends = any
				s, err := f.trySend(ctx, f.client(), m)
				if err != nil {
					t.Errorf("send: %v", err)
					return
				}
				pause(ctx, f.random.between(0, 150*time.Millisecond))
				c, err := f.client().CancelRun(ctx, s.id, "race")
				if err != nil {
					t.Errorf("cancel %s: %v", s.id, err)
					return
				}
				mu.Lock()
				said[c.Status+" "+c.State]++
				mu.Unlock()
				f.book.mu.Lock()
				switch c.Status { // what was said must come true
				case "already_ended":
					s.ends = []string{c.State}
				case "cancelling", "cancelled":
					s.ends = []string{"cancelled"}
				}
				f.book.mu.Unlock()
			}
		})
	}
	senders.Wait()
	done()
	wg.Wait()
	stopWatch()
	t.Logf("answers of the cancels: %v", said)
	f.promises(leave{repairs: true})
}

// killTree would kill a tree that grows; the agents here cannot make one
// before the tool that spawns is built.
func killTree(t *testing.T) {
	f := newFleet(t)
	a := f.api()
	config := []byte(`{"name": "spawning", "tools": [{"type": "builtin", "name": "session_spawn"}]}`)
	if _, err := a.client.CreateAgent(f.limited(), config, "spawning"); err != nil {
		t.Skipf("agents cannot spawn yet: %v; jobs/fault_test.go races kill and spawn without processes", err)
	}
	f.judge()
	f.workers(2)
	kills := 0
	for range 10 {
		var r struct{ RunID string }
		script := strings.Repeat("!spawn @spawning !sleep 200ms\n", 8)
		key := label("tree")
		require.NoError(t, a.client.Call(f.limited(), "agent.request", map[string]any{
			"sessionId": key, "agentId": "spawning", "content": map[string]string{"text": script}, "idempotencyKey": key,
		}, &r))
		pause(t.Context(), f.random.between(0, 400*time.Millisecond))
		_, err := a.client.KillRun(f.limited(), r.RunID)
		require.NoError(t, err)
		kills++
		f.book.runs[strings.TrimPrefix(r.RunID, "run_")] = &sent{message: message{session: key, ends: []string{"killed", "completed"}}}
	}
	t.Logf("%d trees were killed", kills)
	f.promises(leave{repairs: true})
}
