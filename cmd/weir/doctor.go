package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/weir-run/weir/client"
	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/db/cluster"
)

const (
	checkWithin  = 10 * time.Second
	clockWarn    = time.Second
	diskBroken   = 200 << 20
	diskWarn     = 2 << 30
	postgresOld  = 150000 // server_version_num below which we do not work
	workerConns  = poolConns + workConns + hotConns + 5
	fewConns     = 2 * workerConns
	doctorProbes = 3
)

// finding is the result of one check.
type finding struct {
	Check  string `json:"check"`
	State  string `json:"state"` // ok, warning, broken, skipped
	Found  string `json:"found"`
	Remedy string `json:"remedy,omitempty"`
}

const (
	checkOK      = "ok"
	checkWarning = "warning"
	checkBroken  = "broken"
	checkSkipped = "skipped"
)

func newDoctor() *cobra.Command {
	s := newSettings(settingsClient, []setting{settingDB, settingDirect, settingPooler, settingDataDir})
	var out output
	cmd := &cobra.Command{
		Use: "doctor", Short: "Checks what weir needs, and says what to do", Args: cobra.NoArgs,
		Long: `Checks the Postgres binaries, the database and its settings, the schema, poolers,
clocks, disk, the API and the workers. Without --database-url it looks at the
database of the "weir dev" that has --data-dir. Exits 1 when something is broken.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := s.load(cmd)
			if err != nil {
				return err
			}
			running, dev := runningDev(c.DataDir)
			if dev {
				if c.DatabaseURL == "" {
					c.DatabaseURL = running.DatabaseURL
				}
				if !cmd.Flags().Changed("url") && os.Getenv("WEIR_URL") == "" {
					c.URL = running.API
				}
			}
			api, err := newClient(c, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			named := cmd.Flags().Changed("url") || os.Getenv("WEIR_URL") != "" || dev || c.DatabaseURL == ""
			d := &doctor{config: c, needAPI: named, api: client.New(client.Config{URL: api.URL(), Token: c.Token, Patience: -1})}
			d.examine(cmd.Context())
			err = list(&out, cmd, d.findings, "CHECK STATE FOUND", func(f finding) []any {
				found := f.Found
				if f.Remedy != "" {
					found += "; " + f.Remedy
				}
				return []any{f.Check, f.State, found}
			})
			if err != nil {
				return err
			}
			if broken := d.broken(); len(broken) > 0 {
				return fmt.Errorf("broken: %s", strings.Join(broken, ", "))
			}
			return nil
		},
	}
	s.flags(cmd)
	out.flag(cmd)
	return cmd
}

type doctor struct {
	config   *config
	api      *client.Client
	needAPI  bool // somebody named it, or there is nothing else to look at
	findings []finding
}

func (d *doctor) say(check, state, remedy, format string, args ...any) {
	d.findings = append(d.findings, finding{check, state, fmt.Sprintf(format, args...), remedy})
}

func (d *doctor) broken() []string {
	var names []string
	for _, f := range d.findings {
		if f.State == checkBroken && !slices.Contains(names, f.Check) {
			names = append(names, f.Check)
		}
	}
	return names
}

func (d *doctor) examine(ctx context.Context) {
	d.disk()
	d.binaries(ctx)
	if d.config.DatabaseURL == "" {
		d.say("database", checkSkipped, "give --database-url to look at it", "no database named, and no weir dev has %s", d.config.DataDir)
	} else {
		d.database(ctx)
	}
	d.edge(ctx)
}

func (d *doctor) binaries(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, checkWithin)
	defer cancel()
	// As dev would look, but without its download.
	b, err := cluster.Find(ctx, cluster.Config{DataDir: filepath.Join(d.config.DataDir, "postgres"), NoFetch: true})
	if err != nil {
		d.say("postgres binaries", checkWarning, "only weir dev needs them; it downloads some, or install Postgres", "%s", firstLine(err))
		return
	}
	d.say("postgres binaries", checkOK, "", "%s in %s", b.Version, b.Dir)
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

func (d *doctor) disk() {
	dir, err := filepath.Abs(d.config.DataDir)
	if err != nil {
		return
	}
	for ; ; dir = filepath.Dir(dir) { // the folder need not be there yet
		var s syscall.Statfs_t
		if err := syscall.Statfs(dir, &s); err != nil {
			if dir == filepath.Dir(dir) {
				return
			}
			continue
		}
		free := s.Bavail * uint64(s.Bsize)
		state, remedy := checkOK, ""
		switch {
		case free < diskBroken:
			state, remedy = checkBroken, "make room: Postgres stops when the disk is full"
		case free < diskWarn:
			state, remedy = checkWarning, "make room before it runs out"
		}
		d.say("disk", state, remedy, "%s free at %s", bytesText(free), dir)
		return
	}
}

func bytesText(n uint64) string {
	if n >= 1<<30 {
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	}
	return fmt.Sprintf("%d MiB", n>>20)
}

func (d *doctor) database(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, checkWithin)
	defer cancel()
	began := time.Now()
	config, err := pgx.ParseConfig(d.config.DatabaseURL)
	if err != nil {
		d.say("database", checkBroken, "", "%s", firstLine(err))
		return
	}
	config.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe // it may be a pooler
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		d.say("database", checkBroken, "is Postgres running, and are the URL and its credentials right?", "%s", firstLine(err))
		return
	}
	defer conn.Close(context.WithoutCancel(ctx))
	d.say("database", checkOK, "", "connected to %s in %s", redacted(d.config.DatabaseURL), brief(time.Since(began)))
	d.server(ctx, conn)
	d.clock(ctx, conn)
	d.schema(ctx)
	d.pooler(ctx)
	d.fleet(ctx, conn)
}

// server looks at the version and the settings that our promises stand on.
func (d *doctor) server(ctx context.Context, conn *pgx.Conn) {
	rows, err := conn.Query(ctx, `SELECT name, setting FROM pg_settings WHERE name IN
		('server_version', 'server_version_num', 'fsync', 'full_page_writes', 'synchronous_commit', 'max_connections', 'autovacuum',
		 'track_counts', 'default_transaction_isolation', 'transaction_read_only', 'statement_timeout', 'idle_session_timeout')`)
	if err != nil {
		d.say("postgres settings", checkBroken, "", "%s", firstLine(err))
		return
	}
	is := map[string]string{}
	var name, value string
	if _, err := pgx.ForEachRow(rows, []any{&name, &value}, func() error { is[name] = value; return nil }); err != nil {
		d.say("postgres settings", checkBroken, "", "%s", firstLine(err))
		return
	}
	number := func(name string) int {
		n, _ := strconv.Atoi(is[name])
		return n
	}
	if number("server_version_num") < postgresOld {
		d.say("postgres version", checkBroken, "use Postgres 15 or newer", "%s", is["server_version"])
	} else {
		d.say("postgres version", checkOK, "", "%s", is["server_version"])
	}
	wrong := 0
	bad := func(state, name, remedy string) {
		wrong++
		d.say("postgres settings", state, remedy, "%s is %s", name, is[name])
	}
	for _, name := range []string{"fsync", "full_page_writes"} {
		if is[name] != "on" {
			bad(checkWarning, name, "a crash of the machine can destroy the database; only throw-away data may have it off")
		}
	}
	if is["synchronous_commit"] == "off" {
		bad(checkWarning, "synchronous_commit", "a crash can lose what was accepted; set it on")
	}
	for _, name := range []string{"autovacuum", "track_counts"} {
		if is[name] != "on" {
			bad(checkBroken, name, "set it on: dead rows make queues slow")
		}
	}
	if is["default_transaction_isolation"] != "read committed" {
		bad(checkBroken, "default_transaction_isolation", "weir locks first and reads then, which needs read committed; set it for the role")
	}
	if is["transaction_read_only"] != "off" {
		bad(checkBroken, "transaction_read_only", "this is a replica or read-only; connect to the primary")
	}
	for _, name := range []string{"statement_timeout", "idle_session_timeout"} {
		if n := number(name); n != 0 {
			bad(checkWarning, name, "0 for weir's role: it bounds its own work, and its locks and LISTEN stay connected")
		}
	}
	if n := number("max_connections"); n < fewConns {
		bad(checkWarning, "max_connections", fmt.Sprintf("a process of weir takes up to %d; set it to 100 or more", workerConns))
	}
	if wrong == 0 {
		d.say("postgres settings", checkOK, "", "fsync on, %s connections", is["max_connections"])
	}
}

// clock compares this machine's clock with the database's, which alone decides.
func (d *doctor) clock(ctx context.Context, conn *pgx.Conn) {
	var best, diff time.Duration
	for i := range doctorProbes {
		began := time.Now()
		var there time.Time
		if err := conn.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&there); err != nil {
			d.say("clock", checkBroken, "", "%s", firstLine(err))
			return
		}
		took := time.Since(began)
		if i == 0 || took < best {
			best, diff = took, began.Add(took/2).Sub(there)
		}
	}
	state, remedy := checkOK, ""
	if diff.Abs() > clockWarn {
		state, remedy = checkWarning, "weir goes by the database's clock; logs of this machine will not match, so synchronise both"
	}
	d.say("clock", state, remedy, "this machine is %s from the database", diff.Abs().Round(time.Millisecond))
}

func (d *doctor) schema(ctx context.Context) {
	schema, err := db.Inspect(ctx, d.config.direct())
	if err != nil {
		d.say("schema", checkBroken, "", "%s", firstLine(err))
		return
	}
	err = schema.Usable()
	late, _ := errors.AsType[*db.SchemaError](err)
	switch {
	case err != nil && len(late.Pending) > 0:
		d.say("schema", checkBroken, "run \"weir migrate up\"", "%d migrations are missing", len(late.Pending))
	case err != nil:
		d.say("schema", checkBroken, "run the release that migrated it", "%s", schema.Range())
	case schema.Exact() != nil:
		d.say("schema", checkWarning, "run the same release everywhere", "another release's, which serves this one: %s", schema.Range())
	default:
		d.say("schema", checkOK, "", "%s, this binary's; %s", db.SchemaHash(), schema.Range())
	}
}

// pooler tells what is between weir and Postgres, and which way weir works
// because of it: a process decides as this does.
func (d *doctor) pooler(ctx context.Context) {
	pooled, err := db.Pooled(ctx, d.config.DatabaseURL)
	if err != nil {
		d.say("pooler", checkBroken, "", "%s", firstLine(err))
		return
	}
	mode := "in transaction mode"
	if pooled {
		if shares, err := sharesBackends(ctx, d.config.DatabaseURL); err == nil && !shares {
			mode = "that may be in session mode"
		}
	}
	direct := d.config.DatabaseURLDirect
	if direct != "" && direct != d.config.DatabaseURL {
		through, err := db.Pooled(ctx, direct)
		if err != nil {
			d.say("direct connection", checkBroken, "is --database-url-direct right?", "%s", firstLine(err))
			return
		}
		if through {
			d.say("direct connection", checkWarning, "name Postgres itself with --database-url-direct, or nothing", "goes through a pooler too, and is not used")
			direct = ""
		}
	}
	switch {
	case pooled && d.config.Pooler == poolerNone && direct == "":
		d.say("pooler", checkBroken, "leave --pooler out, or name Postgres itself with --database-url", "--pooler none, and --database-url goes through one %s", mode)
	case pooled && direct == "":
		d.say("pooler", checkWarning, "name Postgres itself with --database-url-direct to have them at once",
			"poll mode: --database-url goes through a pooler %s and nothing goes past it; weir works, and polls: turns start within %s, cancels act within %s, deaths show by the lease alone",
			mode, pollStarts, pollCancels)
		return
	case pooled:
		d.say("pooler", checkOK, "", "--database-url goes through a pooler %s; locks, LISTEN and commits go past it", mode)
	case d.config.Pooler == poolerTransaction:
		d.say("pooler", checkWarning, "leave --pooler out", "--pooler transaction, and --database-url leads to Postgres itself")
	}
	if err := notifies(ctx, d.config.direct()); err != nil {
		d.say("direct connection", checkBroken, "LISTEN must work there; name Postgres itself with --database-url-direct", "%s", firstLine(err))
		return
	}
	d.say("direct connection", checkOK, "", "keeps its session; NOTIFY arrives")
}

// What to expect of a process that polls.
const (
	pollStarts  = "some 100 ms"
	pollCancels = "2 s"
)

// sharesBackends tells whether a pooler is in transaction mode, where two
// clients can be given one backend, and one client two: while a transaction
// holds the backend that a second connection just had, the second must be given
// another.
func sharesBackends(ctx context.Context, url string) (bool, error) {
	config, err := pgx.ParseConfig(url)
	if err != nil {
		return false, err
	}
	config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol // poolers may not know prepared statements
	first, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return false, err
	}
	defer first.Close(context.WithoutCancel(ctx))
	second, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return false, err
	}
	defer second.Close(context.WithoutCancel(ctx))
	backend := func(q interface {
		QueryRow(context.Context, string, ...any) pgx.Row
	}) (pid int, err error) {
		err = q.QueryRow(ctx, `SELECT pg_backend_pid()`).Scan(&pid)
		return pid, err
	}
	before, err := backend(first)
	if err != nil {
		return false, err
	}
	tx, err := second.Begin(ctx)
	if err != nil {
		return false, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	held, err := backend(tx)
	if err != nil {
		return false, err
	}
	after, err := backend(first)
	if err != nil {
		return false, err
	}
	return before == held || before != after, nil
}

// notifies waits for a notification of its own.
func notifies(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, checkWithin/2)
	defer cancel()
	listener, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer listener.Close(context.WithoutCancel(ctx))
	channel := fmt.Sprintf("weir_doctor_%d", os.Getpid())
	if _, err := listener.Exec(ctx, "LISTEN "+channel); err != nil {
		return err
	}
	sender, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer sender.Close(context.WithoutCancel(ctx))
	if _, err := sender.Exec(ctx, `SELECT pg_notify($1, '')`, channel); err != nil {
		return err
	}
	if _, err := listener.WaitForNotification(ctx); err != nil {
		return fmt.Errorf("NOTIFY does not arrive: %w", err)
	}
	return nil
}

// fleet looks at the workers' rows.
func (d *doctor) fleet(ctx context.Context, conn *pgx.Conn) {
	var alive, silent, waiting int
	err := conn.QueryRow(ctx, `
		SELECT count(*) FILTER (WHERE clock_timestamp() - heartbeat_at <= lease_ms * interval '1 millisecond'),
		       count(*) FILTER (WHERE clock_timestamp() - heartbeat_at > lease_ms * interval '1 millisecond'),
		       (SELECT count(*) FROM run WHERE state = 'queued' AND admitted_at < clock_timestamp() - interval '10 seconds')
		FROM worker WHERE state = 'live' AND NOT solitary`).Scan(&alive, &silent, &waiting)
	switch {
	case err != nil:
		d.say("workers", checkSkipped, "", "%s", firstLine(err))
	case alive == 0:
		state := checkWarning
		if waiting > 0 {
			state = checkBroken
		}
		d.say("workers", state, "start one with \"weir worker\"", "none is alive; %d runs have waited for more than 10 s", waiting)
	case silent > 0:
		d.say("workers", checkWarning, "they are reaped within a lease if any worker or scheduler runs", "%d alive, %d silent for longer than their lease", alive, silent)
	case waiting > 0:
		d.say("workers", checkWarning, "all slots may be busy: start more workers", "%d alive; %d runs have waited for more than 10 s", alive, waiting)
	default:
		d.say("workers", checkOK, "", "%d alive", alive)
	}
}

// edge looks at the API as a client does.
func (d *doctor) edge(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, checkWithin)
	defer cancel()
	status, body, err := d.api.Get(ctx, "/readyz")
	if err != nil {
		state := checkWarning
		if d.needAPI {
			state = checkBroken
		}
		d.say("api", state, "start one with \"weir dev\", \"weir serve\" or \"weir api\", or name it with --url", "%s", firstLine(err))
		return
	}
	if status != http.StatusOK {
		d.say("api", checkBroken, "it starts, drains or has no database", "%s answers %d: %s", d.api.URL(), status, short(strings.TrimSpace(string(body)), 80))
		return
	}
	began := time.Now()
	if _, err := d.api.Ping(ctx); err != nil {
		remedy := "give a valid --token"
		if e, ok := errors.AsType[*client.Error](err); !ok || rpcExitCode(e) != exitDenied {
			remedy = ""
		}
		d.say("api", checkBroken, remedy, "%s is ready, and refuses a call: %s", d.api.URL(), firstLine(err))
		return
	}
	d.say("api", checkOK, "", "%s is ready and answers in %s", d.api.URL(), brief(time.Since(began)))
	if d.config.DatabaseURL != "" {
		return // the workers were seen in their rows
	}
	all, err := d.api.Workers(ctx)
	if err != nil {
		d.say("workers", checkSkipped, "", "%s", firstLine(err))
		return
	}
	alive := 0
	for _, w := range all {
		if w.State == "live" {
			alive++
		}
	}
	if alive == 0 {
		d.say("workers", checkWarning, "start one with \"weir worker\"", "none is alive")
		return
	}
	d.say("workers", checkOK, "", "%d alive", alive)
}
