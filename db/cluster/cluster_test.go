//go:build unix

package cluster

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// limit bounds whatever a test waits for, on a busy machine.
const limit = time.Minute

// Copies of this binary play the processes that tests kill, by these names.
const (
	ownerName   = "cluster-test-owner"   // starts a cluster in its argument and waits
	watchedName = "cluster-test-watched" // starts a sleep under startWatched and waits
)

func TestMain(m *testing.M) {
	switch os.Args[0] {
	case ownerName:
		own(os.Args[1])
	case watchedName:
		watch()
	default:
		goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
			_ = os.RemoveAll(originalDir)
			os.Exit(code)
		}))
	}
}

// own prints the postmaster's PID and the URL, or "in use" and the owner's PID.
func own(dataDir string) {
	c, err := Start(context.Background(), Config{DataDir: dataDir, FastUnsafe: true, NoFetch: true})
	if inUse, ok := errors.AsType[*InUseError](err); ok {
		fmt.Println("in use", inUse.PID)
		return
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGTERM)
	fmt.Println(c.server.pid, c.URL("postgres"))
	<-asked
	_ = c.Stop(context.Background())
}

func watch() {
	sleep := exec.Command("/bin/sleep", "300")
	if _, err := startWatched(sleep, syscall.SIGQUIT); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(sleep.Process.Pid)
	select {}
}

// actor is a copy of this binary at work.
type actor struct {
	cmd   *exec.Cmd
	lines *bufio.Scanner
}

func (a *actor) line(t *testing.T) string {
	t.Helper()
	require.True(t, a.lines.Scan(), "the process said nothing")
	return a.lines.Text()
}

func (a *actor) kill(t *testing.T) {
	t.Helper()
	require.NoError(t, a.cmd.Process.Kill())
	_ = a.cmd.Wait() // "signal: killed"
}

// act starts a copy of this binary as that user, or as ourselves.
func act(t *testing.T, as *user.User, name string, args ...string) *actor {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	if as != nil {
		self = publicCopy(t, self)
	}
	cmd := exec.Command(self)
	cmd.Args = append([]string{name}, args...)
	cmd.Dir = "/"
	cmd.Stderr = os.Stderr
	if as != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: credential(t, as)}
	}
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Signal(syscall.SIGTERM); _ = cmd.Wait() })
	return &actor{cmd: cmd, lines: bufio.NewScanner(stdout)}
}

func credential(t *testing.T, u *user.User) *syscall.Credential {
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	require.NoError(t, err)
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	require.NoError(t, err)
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
}

// publicDir is a temporary folder that every user can enter, in memory if it can
// be: each cluster is a thousand files.
func publicDir(t *testing.T) string {
	t.Helper()
	dir, err := newPublicDir()
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func newPublicDir() (string, error) {
	dir, err := os.MkdirTemp("/dev/shm", "weir-cluster-test-")
	if err != nil {
		dir, err = os.MkdirTemp("/tmp", "weir-cluster-test-")
	}
	if err != nil {
		return "", err
	}
	return dir, os.Chmod(dir, 0o755)
}

var (
	originalDir string
	original    = sync.OnceValue(func() (err error) {
		if originalDir, err = newPublicDir(); err != nil {
			return err
		}
		c, err := Start(context.Background(), Config{DataDir: originalDir, FastUnsafe: true, NoFetch: true})
		if err != nil {
			return err
		}
		return errors.Join(c.Stop(context.Background()), os.Remove(c.lock.Name()))
	})
)

// madeDir is a data directory that has been used before. It is copied, which
// takes a tenth of the time that initdb does.
func madeDir(t *testing.T) string {
	t.Helper()
	require.NoError(t, original())
	dir := publicDir(t)
	output, err := exec.Command("cp", "-a", originalDir+"/.", dir).CombinedOutput()
	require.NoError(t, err, string(output))
	return dir
}

// publicCopy copies a program to where every user can run it: go test builds in
// a private folder.
func publicCopy(t *testing.T, program string) string {
	t.Helper()
	text, err := os.ReadFile(program)
	require.NoError(t, err)
	dir, err := os.MkdirTemp("/tmp", "weir-cluster-test-") // memory may forbid programs
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o755))
	name := filepath.Join(dir, "program")
	require.NoError(t, os.WriteFile(name, text, 0o755))
	return name
}

func nobody(t *testing.T) *user.User {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to become another user")
	}
	u, err := user.Lookup("nobody")
	require.NoError(t, err)
	return u
}

func start(t *testing.T, config Config) *Cluster {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	config.NoFetch = true
	config.FastUnsafe = true
	c, err := Start(ctx, config)
	require.NoError(t, err)
	t.Cleanup(func() { stop(t, c) })
	return c
}

func stop(t *testing.T, c *Cluster) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	require.NoError(t, c.Stop(ctx))
}

// query runs a statement that returns one text.
func query(t *testing.T, url, sql string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	require.NoError(t, err)
	defer conn.Close(ctx)
	var text string
	require.NoError(t, conn.QueryRow(ctx, sql).Scan(&text))
	return text
}

// mark changes the database, and marked tells whether the change is there.
func mark(t *testing.T, url string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	conn, err := pgx.Connect(ctx, url)
	require.NoError(t, err)
	defer conn.Close(ctx)
	for _, sql := range []string{"CREATE TABLE kept ()", "CHECKPOINT"} { // commits are asynchronous here
		_, err = conn.Exec(ctx, sql)
		require.NoError(t, err)
	}
}

func marked(t *testing.T, url string) bool {
	t.Helper()
	return query(t, url, "SELECT coalesce(to_regclass('kept')::text, '')") == "kept"
}

func exists(t *testing.T, name string) bool {
	t.Helper()
	_, err := os.Lstat(name)
	if !errors.Is(err, os.ErrNotExist) {
		require.NoError(t, err)
	}
	return err == nil
}

// gone waits until the process has ended, and returns how long that took. A
// zombie has ended: reaping it is up to whoever is process 1 here.
func gone(t *testing.T, pid int, within time.Duration) time.Duration {
	t.Helper()
	begin := time.Now()
	for {
		state, err := exec.Command("ps", "-o", "stat=", "-p", strconv.Itoa(pid)).Output()
		if err != nil || strings.HasPrefix(string(state), "Z") {
			return time.Since(begin)
		}
		require.Less(t, time.Since(begin), within, "process %d is still there", pid)
		time.Sleep(5 * time.Millisecond)
	}
}

func TestStart(t *testing.T) {
	t.Parallel()

	t.Run("KeepsDataBetweenRuns", func(t *testing.T) {
		t.Parallel()
		dir := filepath.Join(publicDir(t), "some", "where")
		var log bytes.Buffer
		c := start(t, Config{DataDir: dir, Log: &log, Settings: map[string]string{"work_mem": "5MB", "port": "1"}})
		require.Equal(t, "5MB", query(t, c.URL("postgres"), "SHOW work_mem"))
		require.Equal(t, "UTF8", query(t, c.URL("postgres"), "SHOW server_encoding"))
		ctx := t.Context()
		require.NoError(t, c.EnsureDatabase(ctx, `we"ir`))
		require.NoError(t, c.EnsureDatabase(ctx, `we"ir`))
		query(t, c.URL(`we"ir`), "SELECT set_config('x.y', 'z', false)")
		mark(t, c.URL("postgres"))
		stop(t, c)
		stop(t, c) // again
		require.Contains(t, log.String(), "ready to accept connections")
		require.False(t, exists(t, c.socketDir))
		<-c.Done()

		again := start(t, Config{DataDir: dir})
		require.Equal(t, c.port, again.port, "a port that is free is kept")
		require.True(t, marked(t, again.URL("postgres")))
	})

	t.Run("GivesTCPOnlyToThePassword", func(t *testing.T) {
		t.Parallel()
		c := start(t, Config{Ephemeral: true})
		require.Equal(t, "scram-sha-256", query(t, c.TCPURL("postgres"), "SHOW password_encryption"))
		require.Equal(t, "127.0.0.1", query(t, c.TCPURL("postgres"), "SHOW listen_addresses"))
		_, err := pgx.Connect(t.Context(), strings.Replace(c.TCPURL("postgres"), c.password, "wrong", 1))
		require.ErrorContains(t, err, "password authentication failed")
		for name, mode := range map[string]os.FileMode{c.passwordFile(): 0o600, c.lock.Name(): 0o600,
			c.socketDir: 0o700 | os.ModeDir, c.pgdata(): 0o700 | os.ModeDir} {
			info, err := os.Stat(name)
			require.NoError(t, err)
			require.Equal(t, mode, info.Mode(), name)
		}
	})

	t.Run("EphemeralLeavesNothing", func(t *testing.T) {
		t.Parallel()
		c := start(t, Config{Ephemeral: true})
		require.True(t, exists(t, c.DataDir()))
		stop(t, c)
		require.False(t, exists(t, c.DataDir()))
		require.False(t, exists(t, c.socketDir))
	})

	t.Run("EphemeralSparesOtherFiles", func(t *testing.T) {
		t.Parallel()
		dir := publicDir(t)
		mine := filepath.Join(dir, "mine")
		require.NoError(t, os.WriteFile(mine, nil, 0o600))
		stop(t, start(t, Config{DataDir: dir, Ephemeral: true}))
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Len(t, entries, 1)
	})

	t.Run("SecondIsRefused", func(t *testing.T) {
		t.Parallel()
		c := start(t, Config{DataDir: madeDir(t)})
		_, err := Start(t.Context(), Config{DataDir: c.DataDir()})
		inUse, ok := errors.AsType[*InUseError](err)
		require.True(t, ok, "%v", err)
		require.Equal(t, &InUseError{DataDir: c.DataDir(), PID: os.Getpid(), URL: c.URL("postgres")}, inUse)
		require.Equal(t, "1", query(t, inUse.URL, "SELECT '1'"), "the first is unharmed")
	})

	t.Run("OneOfManyAtOnceWins", func(t *testing.T) {
		t.Parallel()
		dir := madeDir(t)
		var wg sync.WaitGroup
		results := make(chan error, 8)
		for range cap(results) {
			wg.Go(func() {
				c, err := Start(context.Background(), Config{DataDir: dir, FastUnsafe: true, NoFetch: true})
				if err == nil {
					t.Cleanup(func() { stop(t, c) })
				}
				results <- err
			})
		}
		wg.Wait()
		close(results)
		winners := 0
		for err := range results {
			if err == nil {
				winners++
				continue
			}
			_, ok := errors.AsType[*InUseError](err)
			require.True(t, ok, "%v", err)
		}
		require.Equal(t, 1, winners)
	})

	t.Run("TakenPortIsAnError", func(t *testing.T) {
		t.Parallel()
		first := start(t, Config{Ephemeral: true})
		dir := publicDir(t)
		_, err := Start(t.Context(), Config{DataDir: dir, Ephemeral: true, Port: first.port, NoFetch: true})
		require.ErrorContains(t, err, "Address already in use")
		require.False(t, exists(t, dir), "a failed start cleans up")
	})

	t.Run("BadSettingIsAnErrorThatNamesIt", func(t *testing.T) {
		t.Parallel()
		_, err := Start(t.Context(), Config{DataDir: publicDir(t), Ephemeral: true, NoFetch: true,
			Settings: map[string]string{"no_such_setting": "1"}})
		require.ErrorContains(t, err, "no_such_setting")
	})

	t.Run("EndsWithItsContext", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		dir := publicDir(t)
		_, err := Start(ctx, Config{DataDir: dir, Ephemeral: true, NoFetch: true})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.False(t, exists(t, dir))
	})

	t.Run("ForeignFilesAreNotOverwritten", func(t *testing.T) {
		t.Parallel()
		dir := publicDir(t)
		require.NoError(t, os.Mkdir(filepath.Join(dir, "pgdata"), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "pgdata", "thesis.tex"), nil, 0o600))
		_, err := Start(t.Context(), Config{DataDir: dir, NoFetch: true})
		require.ErrorContains(t, err, "not empty")
	})

	t.Run("HalfMadeDataIsMadeAnew", func(t *testing.T) {
		t.Parallel()
		dir := publicDir(t)
		require.NoError(t, os.Mkdir(filepath.Join(dir, "pgdata.new"), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "pgdata.new", "PG_VERSION"), []byte("15\n"), 0o600))
		start(t, Config{DataDir: dir})
	})

	t.Run("TakenSocketFolderIsAvoided", func(t *testing.T) {
		t.Parallel()
		other := nobody(t)
		dir := madeDir(t)
		first := start(t, Config{DataDir: dir})
		socketDir := first.socketDir
		stop(t, first)
		require.NoError(t, os.Mkdir(socketDir, 0o700))
		t.Cleanup(func() { _ = os.RemoveAll(socketDir) })
		cred := credential(t, other)
		require.NoError(t, os.Chown(socketDir, int(cred.Uid), int(cred.Gid)))
		require.NotEqual(t, socketDir, start(t, Config{DataDir: dir}).socketDir)
	})

	t.Run("RootReachesFoldersClosedToTheServer", func(t *testing.T) {
		t.Parallel()
		nobody(t)
		dir := filepath.Join(publicDir(t), "closed", "data")
		require.NoError(t, os.Mkdir(filepath.Dir(dir), 0o700))
		c := start(t, Config{DataDir: dir})
		mark(t, c.URL("postgres"))
		query(t, c.URL("postgres"), "SELECT pg_reload_conf()::text")
		stop(t, c)
		c = start(t, Config{DataDir: dir})
		require.True(t, marked(t, c.URL("postgres")))
	})

	t.Run("RootKeepsTheOwnerOfTheData", func(t *testing.T) {
		t.Parallel()
		as := nobody(t)
		dir := filepath.Join(publicDir(t), "data")
		require.NoError(t, os.Mkdir(dir, 0o700))
		cred := credential(t, as)
		require.NoError(t, os.Chown(dir, int(cred.Uid), int(cred.Gid)))
		theirs := act(t, as, ownerName, dir)
		theirs.line(t)
		theirs.kill(t)

		c := start(t, Config{DataDir: dir})
		info, err := os.Stat(fmt.Sprintf("/proc/%d", c.server.pid))
		require.NoError(t, err)
		require.Equal(t, int(cred.Uid), owner(info))
		stop(t, c)

		theirs = act(t, as, ownerName, dir)
		require.Contains(t, theirs.line(t), "postgres://")
	})
}

func TestServerDiesWithOwner(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		as   func(*testing.T) *user.User
	}{
		{"AsOurselves", func(*testing.T) *user.User { return nil }},
		{"AsNobody", nobody},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			as := test.as(t)
			dir := filepath.Join(publicDir(t), "data")
			require.NoError(t, os.Mkdir(dir, 0o711))
			if as != nil {
				cred := credential(t, as)
				require.NoError(t, os.Chown(dir, int(cred.Uid), int(cred.Gid)))
			}
			first := act(t, as, ownerName, dir)
			line := first.line(t)
			var pid int
			var url string
			_, err := fmt.Sscan(line, &pid, &url)
			require.NoError(t, err, line)
			mark(t, url)

			second := act(t, as, ownerName, dir)
			require.Equal(t, fmt.Sprintf("in use %d", first.cmd.Process.Pid), second.line(t))

			first.kill(t)
			t.Logf("the postmaster was gone %s after its owner", gone(t, pid, 2*time.Second))

			third := act(t, as, ownerName, dir)
			line = third.line(t)
			_, err = fmt.Sscan(line, &pid, &url)
			require.NoError(t, err, line)
			require.True(t, marked(t, url))
		})
	}
}

// The next owner comes while the old server is still dying, so that it must
// wait, not fail.
func TestSuccessorWaitsForOrphans(t *testing.T) {
	t.Parallel()
	dir := madeDir(t)
	for range 3 {
		owner := act(t, nil, ownerName, dir)
		require.Contains(t, owner.line(t), "postgres://")
		owner.kill(t)
	}
	start(t, Config{DataDir: dir})
}

func TestServerStartedByHandIsSpared(t *testing.T) {
	t.Parallel()
	c := start(t, Config{DataDir: madeDir(t)})
	err := awaitOrphans(t.Context(), c.DataDir(), 50*time.Millisecond)
	inUse, ok := errors.AsType[*InUseError](err)
	require.True(t, ok, "%v", err)
	require.NotZero(t, inUse.PID)
	require.True(t, exists(t, filepath.Join(c.pgdata(), "postmaster.pid")))
}

func TestStalePidFile(t *testing.T) {
	t.Parallel()

	t.Run("OfAnotherProcessNow", func(t *testing.T) {
		t.Parallel()
		dir := madeDir(t)
		c := start(t, Config{DataDir: dir})
		name := filepath.Join(c.pgdata(), "postmaster.pid")
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		stop(t, c)

		// A process of the server's own user, which Postgres takes for a server.
		account, err := serverAccount(c.pgdata())
		require.NoError(t, err)
		sleep := account.command("/bin/sleep", "300")
		require.NoError(t, sleep.Start())
		t.Cleanup(func() { _ = sleep.Process.Kill(); _ = sleep.Wait() })
		_, rest, _ := bytes.Cut(text, []byte("\n"))
		stale := fmt.Appendf(nil, "%d\n%s", sleep.Process.Pid, rest)
		require.NoError(t, os.WriteFile(name, stale, 0o600))
		require.NoError(t, account.own(name))

		c = start(t, Config{DataDir: dir})
		require.Equal(t, "1", query(t, c.URL("postgres"), "SELECT '1'"))
		require.NoError(t, sleep.Process.Signal(syscall.Signal(0)), "that process is unharmed")
	})

	t.Run("OfAKilledPostmaster", func(t *testing.T) {
		t.Parallel()
		dir := madeDir(t)
		c := start(t, Config{DataDir: dir})
		mark(t, c.URL("postgres"))
		require.NoError(t, c.server.signal(syscall.SIGKILL))
		<-c.Done()
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		require.ErrorContains(t, c.Stop(ctx), "ended by itself: signal: killed")
		c.stopErr = nil // for the cleanup

		c = start(t, Config{DataDir: dir})
		require.True(t, marked(t, c.URL("postgres")))
	})
}

func TestStop(t *testing.T) {
	t.Parallel()

	t.Run("CutsClientsOff", func(t *testing.T) {
		t.Parallel()
		c := start(t, Config{DataDir: madeDir(t)})
		conn, err := pgx.Connect(t.Context(), c.URL("postgres"))
		require.NoError(t, err)
		defer conn.Close(context.Background())
		_, err = conn.Exec(t.Context(), "BEGIN; CREATE TABLE t ()")
		require.NoError(t, err)
		stop(t, c)
	})

	t.Run("DoesNotOutwaitItsContext", func(t *testing.T) {
		t.Parallel()
		c := start(t, Config{DataDir: madeDir(t)})
		// A server that is stopped hears neither SIGINT nor SIGQUIT.
		require.NoError(t, c.server.signal(syscall.SIGSTOP))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		begin := time.Now()
		require.NoError(t, c.Stop(ctx))
		require.Less(t, time.Since(begin), quitLimit+5*time.Second)
	})
}

func TestWatchedChildDiesWithUs(t *testing.T) {
	t.Parallel()

	t.Run("WhenWeAreKilled", func(t *testing.T) {
		t.Parallel()
		us := act(t, nil, watchedName)
		pid, err := strconv.Atoi(us.line(t))
		require.NoError(t, err)
		us.kill(t)
		gone(t, pid, 2*time.Second)
	})

	t.Run("AndNoSignalAfterItsOwnEnd", func(t *testing.T) {
		t.Parallel()
		child := exec.Command("/bin/cat")
		stdin, err := child.StdinPipe()
		require.NoError(t, err)
		release, err := startWatched(child, syscall.SIGQUIT)
		require.NoError(t, err)
		require.NoError(t, stdin.Close())
		require.NoError(t, child.Wait())
		release()
	})

	t.Run("AndAProgramThatDoesNotStartIsAnError", func(t *testing.T) {
		t.Parallel()
		_, err := startWatched(exec.Command("/no/such/program"), syscall.SIGQUIT)
		require.ErrorIs(t, err, os.ErrNotExist)
	})
}

func TestFind(t *testing.T) {
	t.Parallel()
	ctx := t.Context()

	t.Run("TakesBinDirOnly", func(t *testing.T) {
		t.Parallel()
		found, err := Find(ctx, Config{NoFetch: true})
		require.NoError(t, err)
		require.GreaterOrEqual(t, found.Major, minMajor)
		given, err := Find(ctx, Config{BinDir: found.Dir})
		require.NoError(t, err)
		require.Equal(t, found, given)

		_, err = Find(ctx, Config{BinDir: "/no/such/folder"})
		_, none := errors.AsType[*NoBinariesError](err)
		require.True(t, none, "%v", err)
		require.ErrorIs(t, err, os.ErrNotExist)
	})

	t.Run("InsistsOnTheVersionOfTheData", func(t *testing.T) {
		t.Parallel()
		dir := publicDir(t)
		require.NoError(t, os.Mkdir(filepath.Join(dir, "pgdata"), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "pgdata", "PG_VERSION"), []byte("9\n"), 0o600))
		_, err := Find(ctx, Config{DataDir: dir, NoFetch: true})
		none, ok := errors.AsType[*NoBinariesError](err)
		require.True(t, ok, "%v", err)
		require.Equal(t, 9, none.Want)
		require.ErrorContains(t, err, "no Postgres 9 found")
	})

	t.Run("ReadsVersionsOfAllKinds", func(t *testing.T) {
		t.Parallel()
		for output, want := range map[string]int{
			"postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)": 15,
			"postgres (PostgreSQL) 18beta1":                        18,
			"postgres (PostgreSQL) 19devel":                        19,
		} {
			dir := publicDir(t)
			for _, program := range []string{"initdb", "postgres"} {
				script := "#!/bin/sh\necho '" + output + "'\n"
				require.NoError(t, os.WriteFile(filepath.Join(dir, program), []byte(script), 0o755))
			}
			found, err := Find(ctx, Config{BinDir: dir})
			require.NoError(t, err, output)
			require.Equal(t, want, found.Major)
		}
	})

	t.Run("PrefersTheNewest", func(t *testing.T) {
		t.Parallel()
		require.Greater(t, folderVersion("/usr/lib/postgresql/17/bin"), folderVersion("/usr/lib/postgresql/9.6/bin"))
		require.Greater(t, folderVersion("/opt/homebrew/opt/postgresql@18/bin"), folderVersion("/opt/homebrew/opt/postgresql@17/bin"))
		require.Zero(t, folderVersion("/Applications/Postgres.app/Contents/Versions/latest/bin"))
	})
}
