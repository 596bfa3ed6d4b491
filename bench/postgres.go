package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-run/weir/db/cluster"
)

// settings are the server's, the same for every contestant. Durability is
// Postgres's default: fsync and synchronous commits are on.
var settings = map[string]string{
	"max_connections": "400", // the resume section runs six fleets at once
	// The server notes when each transaction committed, so that what happens
	// between two commits is measured by one clock and without a probe.
	"track_commit_timestamp": "on",
}

// postgres is the private server of a run.
type postgres struct {
	cluster *cluster.Cluster
	pid     int // of the postmaster
	admin   *pgxpool.Pool

	mu        sync.Mutex
	templates map[string]bool
	clones    atomic.Int64
}

func startPostgres(ctx context.Context, dir string) (*postgres, error) {
	const tmpfsMagic = 0x01021994
	var fs syscall.Statfs_t
	if err := syscall.Statfs(dir, &fs); err == nil && fs.Type == tmpfsMagic {
		fmt.Fprintf(os.Stderr, "bench: %s is in memory, so commits cost nothing; name a folder on a disk with -dir\n", dir)
	}
	log, err := os.Create(filepath.Join(dir, "postgres.log"))
	if err != nil {
		return nil, err
	}
	c, err := cluster.Start(ctx, cluster.Config{DataDir: filepath.Join(dir, "postgres"), Ephemeral: true, Settings: settings, Log: log})
	if err != nil {
		return nil, err
	}
	p := &postgres{cluster: c, templates: map[string]bool{}}
	if p.admin, err = openPool(ctx, c.URL("postgres"), 8); err == nil {
		p.pid, err = postmasterPID(c.DataDir())
	}
	if err != nil {
		_ = p.stop()
		return nil, err
	}
	return p, nil
}

func postmasterPID(dataDir string) (int, error) {
	text, err := os.ReadFile(filepath.Join(dataDir, "pgdata", "postmaster.pid"))
	if err != nil {
		return 0, err
	}
	first, _, _ := strings.Cut(string(text), "\n")
	return strconv.Atoi(first)
}

func (p *postgres) stop() error {
	if p.admin != nil {
		p.admin.Close()
	}
	return p.cluster.Stop(context.Background())
}

func (p *postgres) version() string { return p.cluster.Version() }

// cpu is the CPU seconds of the postmaster, of its live processes and of those
// it has reaped.
func (p *postgres) cpu() float64 {
	total := cpuOf(procStat(p.pid))
	postmaster := strconv.Itoa(p.pid)
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if stat := procStat(pid); len(stat) > statParent && stat[statParent] == postmaster {
			total += cpuOf(stat)
		}
	}
	return total
}

// database is a contestant's own, a copy of a template that is dropped after
// the measurement. So everyone starts from the same files, round after round.
type database struct {
	name, url string
	pool      *pgxpool.Pool // the bench's
	pg        *postgres
}

// template makes a database that clones are copied from, once: empty, or a copy
// of another template, and then filled.
func (p *postgres) template(ctx context.Context, name, from string, fill func(url string) error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.templates[name] {
		return nil
	}
	statement := "CREATE DATABASE " + name
	if from != "" {
		statement += " TEMPLATE " + from
	}
	if _, err := p.admin.Exec(ctx, statement); err != nil {
		return err
	}
	if err := fill(p.cluster.URL(name)); err != nil {
		return fmt.Errorf("fill database %s: %w", name, err)
	}
	p.templates[name] = true
	return nil
}

// clone copies a template and brings the copy's statistics and the server's
// checkpoint up to date.
func (p *postgres) clone(ctx context.Context, template string) (*database, error) {
	d := &database{name: "bench_" + strconv.FormatInt(p.clones.Add(1), 10), pg: p}
	d.url = p.cluster.URL(d.name)
	if _, err := p.admin.Exec(ctx, "CREATE DATABASE "+d.name+" TEMPLATE "+template); err != nil {
		return nil, err
	}
	var err error
	if d.pool, err = openPool(ctx, d.url, 8); err != nil {
		return nil, err
	}
	for _, statement := range []string{"VACUUM ANALYZE", "CHECKPOINT"} {
		if _, err := d.pool.Exec(ctx, statement); err != nil {
			d.drop()
			return nil, err
		}
	}
	return d, nil
}

// drop removes the database and cuts off whoever is still connected.
func (d *database) drop() {
	d.pool.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	// An error leaves it to the end of the cluster.
	_, _ = d.pg.admin.Exec(ctx, "DROP DATABASE IF EXISTS "+d.name+" WITH (FORCE)")
}

// alone waits until nobody but the bench's own pool is connected, so that what
// the others have counted is in the server's statistics.
func (d *database) alone(ctx context.Context) error {
	return until(ctx, 20*time.Millisecond, 10*time.Second, "other connections to end", func() (bool, error) {
		var others int
		err := d.pg.admin.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = $1 AND backend_type = 'client backend' AND application_name <> $2`, d.name, poolName).Scan(&others)
		return others == 0, err
	})
}

// poolName tells the bench's own connections from those of contestants.
const poolName = "weir-bench"

func openPool(ctx context.Context, url string, conns int32) (*pgxpool.Pool, error) {
	c, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	c.MaxConns = conns
	c.ConnConfig.RuntimeParams["application_name"] = poolName
	return pgxpool.NewWithConfig(ctx, c)
}

// openChildPool is a contestant's.
func openChildPool(ctx context.Context, url string, conns int32) (*pgxpool.Pool, error) {
	c, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	c.MaxConns, c.MinConns = conns, min(conns, 4)
	return pgxpool.NewWithConfig(ctx, c)
}

var quiet = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
