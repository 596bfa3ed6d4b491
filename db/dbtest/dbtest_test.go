package dbtest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/db/cluster"
)

const (
	// patience bounds whatever a test waits for, on a busy machine.
	patience = time.Minute
	// shortGrace makes a shared server end soon after its last user.
	shortGrace = 300 * time.Millisecond
)

// Copies of this binary play other test binaries, by these names.
const (
	userName  = "dbtest-test-user"  // attaches to the server of its argument and waits
	leakyName = "dbtest-test-leaky" // is a package that leaks a goroutine
)

func TestMain(m *testing.M) {
	if os.Args[0] == userName {
		use(os.Args[1])
		return
	}
	Main(m)
}

func use(folder string) {
	s, held, err := attach(context.Background(), folder, shortGrace)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(s.adminURL)
	time.Sleep(time.Hour)
	held.Close()
}

// startUser returns a process that uses the folder's server, and the server.
func startUser(t *testing.T, folder string) (*exec.Cmd, *server) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self)
	cmd.Args = []string{userName, folder}
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { kill(cmd) })
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	require.Contains(t, line, "postgres://")
	return cmd, &server{adminURL: strings.TrimSpace(line)}
}

func kill(cmd *exec.Cmd) {
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
}

// newFolder returns where a shared server of this test's own may meet.
func newFolder(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "weir-dbtest-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return filepath.Join(dir, filepath.Base(dir))
}

// requireGone waits until the folder's server and all its files are gone.
func requireGone(t *testing.T, folder string, s *server) {
	t.Helper()
	require.Eventually(t, func() bool {
		for _, name := range []string{folder, dataDir(folder)} {
			if _, err := os.Stat(name); !errors.Is(err, os.ErrNotExist) {
				return false
			}
		}
		return true
	}, patience, 20*time.Millisecond)
	config, err := pgx.ParseConfig(s.adminURL)
	require.NoError(t, err)
	_, err = os.Stat(config.Host)
	require.ErrorIs(t, err, os.ErrNotExist, "the socket's folder")
	leftovers, err := filepath.Glob(filepath.Join(filepath.Dir(folder), "*"))
	require.NoError(t, err)
	require.Empty(t, leftovers)
}

func TestPool(t *testing.T) {
	t.Parallel()

	t.Run("TwentyAtOnceAreStrangers", func(t *testing.T) {
		t.Parallel()
		var mu sync.Mutex
		var names []string
		t.Cleanup(func() {
			require.Len(t, names, 20)
			s, err := theServer()
			require.NoError(t, err)
			conn, err := pgx.Connect(context.Background(), s.adminURL)
			require.NoError(t, err)
			defer conn.Close(context.Background())
			var left int
			err = conn.QueryRow(context.Background(), "SELECT count(*) FROM pg_database WHERE datname = ANY($1)", names).Scan(&left)
			require.NoError(t, err)
			require.Zero(t, left, "databases are dropped")
		})
		begin := time.Now()
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				pool := Pool(t)
				var name string
				if err := pool.QueryRow(t.Context(), "SELECT current_database()").Scan(&name); err != nil {
					t.Error(err)
				}
				if _, err := pool.Exec(t.Context(), "CREATE TABLE mine ()"); err != nil {
					t.Error(err) // with a stranger's table in it
				}
				mu.Lock()
				defer mu.Unlock()
				names = append(names, name)
			})
		}
		wg.Wait()
		t.Logf("20 pools: %s", time.Since(begin))
	})

	t.Run("IsMigrated", func(t *testing.T) {
		t.Parallel()
		begin := time.Now()
		url := URL(t)
		t.Logf("one database: %s", time.Since(begin))
		require.NoError(t, db.Validate(t.Context(), url))
	})

	t.Run("EmptyURLIsNot", func(t *testing.T) {
		t.Parallel()
		err := db.Validate(t.Context(), EmptyURL(t))
		_, ok := errors.AsType[*db.SchemaError](err)
		require.True(t, ok, "%v", err)
	})

	t.Run("ConnectionsLeftOpenAreCut", func(t *testing.T) {
		t.Parallel()
		var conn *pgx.Conn
		t.Run("", func(t *testing.T) {
			var err error
			conn, err = pgx.Connect(context.Background(), URL(t))
			require.NoError(t, err)
		})
		require.Error(t, conn.Ping(t.Context()))
	})
}

func TestSharedServer(t *testing.T) {
	t.Parallel()

	t.Run("EndsAfterItsKilledUsers", func(t *testing.T) {
		t.Parallel()
		folder := newFolder(t)
		first, s := startUser(t, folder)
		second, same := startUser(t, folder)
		require.Equal(t, s, same)

		kill(first)
		time.Sleep(2*shortGrace + 2*keeperPoll) // nothing to wait for: nothing must happen
		require.NoError(t, s.exec(t.Context(), "SELECT 1"), "it stays while one is left")

		kill(second)
		requireGone(t, folder, s)
	})

	t.Run("SurvivesTheOneThatStartedIt", func(t *testing.T) {
		t.Parallel()
		folder := newFolder(t)
		first, s := startUser(t, folder)
		_, held, err := attach(t.Context(), folder, shortGrace)
		require.NoError(t, err)
		kill(first)
		require.NoError(t, s.exec(t.Context(), "SELECT 1"))
		require.NoError(t, held.Close())
		requireGone(t, folder, s)
	})

	t.Run("IsStartedAnewAfterItsKeeperWasKilled", func(t *testing.T) {
		t.Parallel()
		folder := newFolder(t)
		s, held, err := attach(t.Context(), folder, shortGrace)
		require.NoError(t, err)
		killKeeper(t, folder, syscall.SIGKILL)
		again, heldToo, err := attach(t.Context(), folder, shortGrace)
		require.NoError(t, err)
		require.NoError(t, again.exec(t.Context(), "SELECT 1"))
		require.NoError(t, held.Close())
		require.NoError(t, heldToo.Close())
		requireGone(t, folder, s)
	})

	t.Run("IsStartedAnewAfterItsKeeperWasAskedToEnd", func(t *testing.T) {
		t.Parallel()
		folder := newFolder(t)
		s, held, err := attach(t.Context(), folder, shortGrace)
		require.NoError(t, err)
		killKeeper(t, folder, syscall.SIGTERM)
		require.Eventually(t, func() bool { return s.exec(t.Context(), "SELECT 1") != nil }, patience, 10*time.Millisecond)
		again, heldToo, err := attach(t.Context(), folder, shortGrace)
		require.NoError(t, err)
		require.NoError(t, again.exec(t.Context(), "SELECT 1"))
		require.NoError(t, held.Close())
		require.NoError(t, heldToo.Close())
		requireGone(t, folder, s)
	})

	t.Run("ServesWhoeverComesWhileItEnds", func(t *testing.T) {
		t.Parallel()
		folder := newFolder(t)
		// Each round leaves at once and comes back about when the keeper gives up.
		var mu sync.Mutex
		var last *server
		for round := range 4 {
			var wg sync.WaitGroup
			for range 4 {
				wg.Go(func() {
					s, held, err := attach(t.Context(), folder, time.Millisecond)
					if err != nil {
						t.Errorf("round %d: %v", round, err)
						return
					}
					defer held.Close()
					if err := s.exec(t.Context(), "SELECT 1"); err != nil {
						t.Errorf("round %d: %v", round, err)
					}
					mu.Lock()
					defer mu.Unlock()
					last = s
				})
			}
			wg.Wait()
			time.Sleep(keeperPoll + time.Duration(round)*20*time.Millisecond)
		}
		requireGone(t, folder, last)
	})

	t.Run("SomebodyElsesFolderIsRefused", func(t *testing.T) {
		t.Parallel()
		folder := newFolder(t)
		require.NoError(t, os.Mkdir(folder, 0o700))
		require.NoError(t, os.Chmod(folder, 0o777))
		_, _, err := attach(t.Context(), folder, shortGrace)
		require.ErrorContains(t, err, "belongs to somebody else")
		require.NoError(t, os.Remove(folder))
	})
}

// killKeeper signals the process that owns the folder's cluster and, for
// SIGKILL, waits until it is gone.
func killKeeper(t *testing.T, folder string, signal syscall.Signal) {
	t.Helper()
	_, err := cluster.Start(t.Context(), cluster.Config{DataDir: dataDir(folder), NoFetch: true})
	inUse, ok := errors.AsType[*cluster.InUseError](err)
	require.True(t, ok, "%v", err)
	require.NoError(t, syscall.Kill(inUse.PID, signal))
	if signal == syscall.SIGKILL {
		// It is a child of this process, which nobody waits for.
		_, err = syscall.Wait4(inUse.PID, nil, 0, nil)
		require.NoError(t, err)
	}
}

func TestGivenServer(t *testing.T) {
	t.Parallel()
	url := EmptyURL(t) // any database on any server will do as the given one
	s, err := external(t.Context(), url)
	require.NoError(t, err)

	t.Run("MakesTemplateAndDatabasesThere", func(t *testing.T) {
		template, err := s.template(t.Context())
		require.NoError(t, err)
		require.NoError(t, db.Validate(t.Context(), createDatabase(t, s, template)))
	})

	t.Run("DropsWhatWasForgottenThere", func(t *testing.T) {
		old := fmt.Sprintf("%s%x_%d_1", prefix, time.Now().Add(-25*time.Hour).UnixMicro(), os.Getpid())
		young := fmt.Sprintf("%s%x_%d_1", prefix, time.Now().Add(-23*time.Hour).UnixMicro(), os.Getpid())
		for _, name := range []string{old, young} {
			require.NoError(t, s.exec(t.Context(), "CREATE DATABASE "+quote(name)))
		}
		_, err := external(t.Context(), url)
		require.NoError(t, err)
		require.ErrorContains(t, s.exec(t.Context(), "DROP DATABASE "+quote(old)), "does not exist")
		require.NoError(t, s.exec(t.Context(), "DROP DATABASE "+quote(young)))
	})

	t.Run("MustBeAURL", func(t *testing.T) {
		_, err := external(t.Context(), "host=localhost")
		require.ErrorContains(t, err, envURL)
	})
}

// Processes with different databases of one given server do not exclude each
// other by advisory locks.
func TestTemplateIsBuiltOnceByServersApart(t *testing.T) {
	t.Parallel()
	name := "weir_tmpl_test_" + databaseName()
	var servers []*server
	for range 3 {
		s, err := external(t.Context(), EmptyURL(t))
		require.NoError(t, err)
		servers = append(servers, s)
	}
	var wg sync.WaitGroup
	for _, s := range servers {
		wg.Go(func() {
			conn, err := pgx.Connect(context.Background(), s.adminURL)
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close(context.Background())
			if err := s.buildTemplate(t.Context(), conn, name); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.NoError(t, db.Validate(t.Context(), createDatabase(t, servers[0], name)))
	require.NoError(t, servers[0].exec(t.Context(), "DROP DATABASE "+quote(name)))
}

func TestMainFailsAPackageThatLeaks(t *testing.T) {
	if os.Args[0] == leakyName {
		go func() { select {} }()
		return
	}
	t.Parallel()
	self, err := os.Executable()
	require.NoError(t, err)
	leaky := exec.Command(self, "-test.run=^TestMainFailsAPackageThatLeaks$")
	leaky.Args[0] = leakyName
	output, err := leaky.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(output), "found unexpected goroutines")
	require.Contains(t, string(output), "PASS", "the tests themselves passed")
}
