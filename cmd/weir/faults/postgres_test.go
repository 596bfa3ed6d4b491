package faults

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/db/cluster"
)

// settings of all servers: a commit is answered once it is in the kernel, which
// outlives whatever these tests kill.
var settings = map[string]string{
	"fsync": "off", "synchronous_commit": "on", "full_page_writes": "off",
	"max_connections": "600", "shared_buffers": "128MB",
}

const template = "template_weir"

// server is a Postgres that tests may hurt.
type server struct {
	config  cluster.Config
	cluster *cluster.Cluster
	log     *tail
	lost    bool // killed for good
}

// shared is the server of the rows that leave it alone.
var shared sharedServer

type sharedServer struct {
	once sync.Once
	dir  string
	s    *server
	err  error
}

func (s *sharedServer) get(t *testing.T) *server {
	t.Helper()
	s.once.Do(func() {
		if s.dir, s.err = os.MkdirTemp("", "weir-faults-pg-"); s.err == nil {
			s.s, s.err = startServer(filepath.Join(s.dir, "data"), nil)
		}
	})
	require.NoError(t, s.err)
	return s.s
}

func (s *sharedServer) stop() (err error) {
	if s.s != nil {
		err = s.s.stop()
	}
	if s.dir != "" {
		err = errors.Join(err, os.RemoveAll(s.dir))
	}
	return err
}

// newServer is a server for one row.
func newServer(t *testing.T, more map[string]string) *server {
	t.Helper()
	s, err := startServer(filepath.Join(t.TempDir(), "data"), more)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := s.stop(); err != nil && !s.lost {
			t.Errorf("stop Postgres: %v", err)
		}
	})
	return s
}

func startServer(dir string, more map[string]string) (*server, error) {
	s := &server{log: &tail{}}
	s.config = cluster.Config{DataDir: dir, Settings: map[string]string{}, Log: s.log}
	for _, from := range []map[string]string{settings, more} {
		for name, value := range from {
			s.config.Settings[name] = value
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), readyLimit)
	defer cancel()
	if err := s.start(ctx); err != nil {
		return nil, err
	}
	err := s.cluster.EnsureDatabase(ctx, template)
	if err == nil {
		err = db.Migrate(ctx, s.cluster.URL(template))
	}
	if err != nil {
		return nil, errors.Join(err, s.stop())
	}
	return s, nil
}

func (s *server) start(ctx context.Context) (err error) {
	s.cluster, err = cluster.Start(ctx, s.config)
	return err
}

func (s *server) stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), exitLimit)
	defer cancel()
	return s.cluster.Stop(ctx)
}

var databases atomic.Int64

// database makes a migrated database and returns its name.
func (s *server) database(t *testing.T) string {
	t.Helper()
	name := fmt.Sprintf("faults_%d", databases.Add(1))
	s.exec(t, "CREATE DATABASE "+name+" TEMPLATE "+template+" STRATEGY FILE_COPY")
	return name
}

// exec runs a statement on the maintenance database.
func (s *server) exec(t *testing.T, sql string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), readyLimit)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.cluster.URL("postgres"))
	require.NoError(t, err)
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql)
	require.NoError(t, err, sql)
}

// url reaches a database over TCP, as a process of that name.
func (s *server) url(database, application string) string {
	return named(s.cluster.TCPURL(database), application)
}

func named(text, application string) string {
	u, err := url.Parse(text)
	if err != nil {
		panic(err) // the cluster made it
	}
	q := u.Query()
	q.Set("application_name", application)
	u.RawQuery = q.Encode()
	return u.String()
}

// via is url through a proxy.
func via(text, address string) string {
	u, err := url.Parse(text)
	if err != nil {
		panic(err)
	}
	u.Host = address
	return u.String()
}

// address is where the server listens.
func (s *server) address() string {
	u, err := url.Parse(s.cluster.TCPURL("postgres"))
	if err != nil {
		panic(err)
	}
	return u.Host
}

// pid is the postmaster's.
func (s *server) pid() int {
	text, err := os.ReadFile(filepath.Join(s.cluster.DataDir(), "pgdata", "postmaster.pid"))
	if err != nil {
		return 0
	}
	line, _, _ := bytes.Cut(text, []byte("\n"))
	pid, _ := strconv.Atoi(string(line)) // 0 while it is being written
	return pid
}

// restart stops the server with a signal (SIGINT is a fast shutdown, SIGQUIT
// and SIGKILL are crashes) and starts it again on the same data.
func (s *server) restart(t *testing.T, how syscall.Signal, down time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), readyLimit)
	defer cancel()
	require.NoError(t, syscall.Kill(s.pid(), how))
	select {
	case <-s.cluster.Done():
	case <-ctx.Done():
		t.Fatalf("Postgres did not end: %s", s.log)
	}
	_ = s.cluster.Stop(ctx) // it says that the server ended by itself
	pause(ctx, down)
	require.NoError(t, s.start(ctx), "%s", s.log)
}

// lose kills the server as if its machine were gone.
func (s *server) lose(t *testing.T) {
	t.Helper()
	s.lost = true
	require.NoError(t, syscall.Kill(s.pid(), syscall.SIGKILL))
	<-s.cluster.Done()
}

// freeze stops every process of the server, and lets them go on later.
func (s *server) freeze(ctx context.Context, d time.Duration) {
	pids := append([]int{s.pid()}, children(s.pid())...)
	for _, pid := range pids { // the postmaster first: it starts no more
		_ = syscall.Kill(pid, syscall.SIGSTOP)
	}
	pause(ctx, d)
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGCONT)
	}
}

// children lists the processes that a process started and that still are.
func children(parent int) (pids []int) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, name := range stats {
		text, err := os.ReadFile(name)
		if err != nil {
			continue // it has just ended
		}
		fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
		if ppid, _ := strconv.Atoi(fields[1]); ppid == parent {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(name)))
			pids = append(pids, pid)
		}
	}
	return pids
}
