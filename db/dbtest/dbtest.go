// Package dbtest gives each test a migrated database of its own on a real
// Postgres.
//
// # Which server
//
// The one that WEIR_TEST_DATABASE_URL names, if set: its role must be allowed
// to create databases. Otherwise a private one, which all test binaries of this
// user share, since `go test ./...` runs several at once and a server takes a
// second to make and 100 MB to run: the first comer starts it, later ones
// attach, and it ends by itself some seconds after the last has gone, even if
// all of them were killed. See server.go.
//
// Without any Postgres on the machine the test fails; it is never skipped.
//
// # Which database
//
// A copy of a template, which is migrated once for each state of the migration
// files. On a server of your own the templates of old states stay; they are
// called weir_tmpl_… and may be dropped at any time.
package dbtest

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/weir-run/weir/db"
)

const (
	// maxConns bounds a test's pool. Some 40 tests may use a server with 500
	// connections at once.
	maxConns = 10
	// opLimit bounds each thing that dbtest itself asks of the server.
	opLimit = 60 * time.Second
	// closeLimit is how long a test's connections may take to come home.
	closeLimit = 10 * time.Second
	// strategy of CREATE DATABASE. On a busy 2-core machine a copy took 100 ms
	// with FILE_COPY and 300 ms with WAL_LOG, the default.
	strategy = "FILE_COPY"
	// prefix of the databases of tests; then come time, process and a number.
	prefix = "weir_test_"
)

// Main runs the package's tests and fails the package when a goroutine is left
// at the end:
//
//	func TestMain(m *testing.M) { dbtest.Main(m) }
func Main(m *testing.M) {
	goleak.VerifyTestMain(m)
}

// Pool returns a pool on a migrated, otherwise empty database that only this
// test has. Both are gone when the test ends; a connection that the test has
// not given back by then fails it.
func Pool(t testing.TB) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(URL(t))
	if err != nil {
		t.Fatalf("dbtest: %v", err)
	}
	config.MaxConns = maxConns
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		t.Fatalf("dbtest: open pool: %v", err)
	}
	t.Cleanup(func() {
		closed := make(chan struct{})
		go func() { pool.Close(); close(closed) }()
		select {
		case <-closed:
		case <-time.After(closeLimit):
			t.Errorf("dbtest: %d connections were still in use %s after the test", pool.Stat().AcquiredConns(), closeLimit)
		}
	})
	return pool
}

// URL is Pool for tests that connect in their own way, or start processes that
// do. Connections that are still open at the end of the test are cut.
func URL(t testing.TB) string {
	t.Helper()
	server := requireServer(t)
	ctx, cancel := context.WithTimeout(context.Background(), opLimit)
	defer cancel()
	template, err := server.template(ctx)
	if err != nil {
		t.Fatalf("dbtest: make the template database: %v", err)
	}
	return createDatabase(t, server, template)
}

// EmptyURL is URL with a database that has nothing in it, not even migrations.
func EmptyURL(t testing.TB) string {
	t.Helper()
	return createDatabase(t, requireServer(t), "template0")
}

func requireServer(t testing.TB) *server {
	t.Helper()
	s, err := theServer()
	if err != nil {
		t.Fatalf("dbtest: no Postgres to test with; install one or set %s: %v", envURL, err)
	}
	return s
}

func createDatabase(t testing.TB, s *server, template string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), opLimit)
	defer cancel()
	name := databaseName()
	if err := s.exec(ctx, "CREATE DATABASE "+quote(name)+" TEMPLATE "+quote(template)+" STRATEGY "+strategy); err != nil {
		t.Fatalf("dbtest: create database: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), opLimit)
		defer cancel()
		if err := s.exec(ctx, "DROP DATABASE IF EXISTS "+quote(name)+" WITH (FORCE)"); err != nil {
			t.Errorf("dbtest: drop database: %v", err)
		}
	})
	return s.url(name)
}

var databases struct {
	sync.Mutex
	count int
}

// databaseName is unique on the server also when several machines share it.
func databaseName() string {
	databases.Lock()
	defer databases.Unlock()
	databases.count++
	return fmt.Sprintf("%s%x_%d_%d", prefix, time.Now().UnixMicro(), os.Getpid(), databases.count)
}

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }

// server is where databases are made.
type server struct {
	// adminURL is a database that always exists.
	adminURL string

	templates sync.Mutex
	ready     string // name of the template, once it is known to exist
}

// url names another database on the same server.
func (s *server) url(dbname string) string {
	u, err := url.Parse(s.adminURL)
	if err != nil {
		panic(err) // it was parsed when the server was found
	}
	u.Path = "/" + dbname
	return u.String()
}

// exec runs a statement on a connection of its own: a few milliseconds, and
// nothing is left to close when the tests end.
func (s *server) exec(ctx context.Context, sql string) error {
	conn, err := pgx.Connect(ctx, s.adminURL)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql)
	return err
}

// template returns the name of the migrated database, which it makes if no
// other process has.
func (s *server) template(ctx context.Context) (string, error) {
	s.templates.Lock()
	defer s.templates.Unlock()
	if s.ready != "" {
		return s.ready, nil
	}
	conn, err := pgx.Connect(ctx, s.adminURL)
	if err != nil {
		return "", err
	}
	defer conn.Close(ctx) // and unlock
	name := "weir_tmpl_" + db.SchemaHash()
	// The lock only saves processes the work of others: it holds within one
	// database, and each process of a given server may have been given another.
	// It is asked for again and again, not waited for: a waiting session would
	// keep a snapshot that may hold up the holder's migration.
	for locked := false; ; {
		var exists bool
		if err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", name).Scan(&exists); err != nil {
			return "", err
		}
		if exists {
			break
		}
		if locked {
			if err := s.buildTemplate(ctx, conn, name); err != nil {
				return "", err
			}
			break
		}
		if err := conn.QueryRow(ctx, "SELECT pg_try_advisory_lock(hashtextextended($1, 0))", name).Scan(&locked); err != nil {
			return "", err
		}
		if !locked {
			time.Sleep(20 * time.Millisecond)
		}
	}
	s.ready = name
	return name, nil
}

// buildTemplate makes the template under another name first, so that one with
// the final name is complete. Nobody may connect to it then: CREATE DATABASE
// cannot copy a database that is in use. The draft of a process that was killed
// looks like a test's database, and goes like one.
func (s *server) buildTemplate(ctx context.Context, conn *pgx.Conn, name string) error {
	draft := databaseName()
	if _, err := conn.Exec(ctx, "CREATE DATABASE "+quote(draft)+" TEMPLATE template0"); err != nil {
		return err
	}
	err := db.Migrate(ctx, s.url(draft))
	for _, sql := range []string{
		"ALTER DATABASE " + quote(draft) + " ALLOW_CONNECTIONS false",
		"ALTER DATABASE " + quote(draft) + " RENAME TO " + quote(name),
	} {
		if err == nil {
			_, err = conn.Exec(ctx, sql)
		}
	}
	if err == nil {
		return nil
	}
	_, dropErr := conn.Exec(ctx, "DROP DATABASE "+quote(draft)+" WITH (FORCE)")
	// Another process may have been first: duplicate_database, or unique_violation
	// if both renamed at once.
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && (pgErr.Code == "42P04" || pgErr.Code == "23505") {
		err = nil
	}
	return errors.Join(err, dropErr)
}

// dropOld drops the databases of tests that were killed a day ago or more. It
// matters on a server that outlives them.
func (s *server) dropOld(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, s.adminURL)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	rows, err := conn.Query(ctx, "SELECT datname FROM pg_database WHERE starts_with(datname, $1)", prefix)
	if err != nil {
		return err
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, name := range names {
		var micros int64
		if _, err := fmt.Sscanf(strings.TrimPrefix(name, prefix), "%x_", &micros); err != nil || time.Since(time.UnixMicro(micros)) < 24*time.Hour {
			continue
		}
		if _, err := conn.Exec(ctx, "DROP DATABASE IF EXISTS "+quote(name)+" WITH (FORCE)"); err != nil {
			return err
		}
	}
	return nil
}
