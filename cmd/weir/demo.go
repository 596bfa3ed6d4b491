package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/weir-run/weir/api"
	"github.com/weir-run/weir/client"
	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/db/cluster"
)

const (
	demoTenant    = "demo"
	demoTool      = "stamp"
	demoSteps     = 5
	demoKilledAt  = 3 // the step in which the worker dies
	demoLatency   = 200 * time.Millisecond
	demoIntoStep  = 100 * time.Millisecond // how long the fatal step has been under way
	demoLease     = 2 * time.Second
	demoHeartbeat = 500 * time.Millisecond
	demoWithin    = 90 * time.Second
	demoStop      = 5 * time.Second
	demoAnswer    = "all steps are done"
)

func newDemo() *cobra.Command {
	return parent("demo", "Shows what weir promises, for real", newDemoCrash())
}

func newDemoCrash() *cobra.Command {
	s := newSettings([]setting{settingDB})
	var out output
	cmd := &cobra.Command{
		Use: "crash", Short: "Kills a worker in the middle of a step, and shows who goes on", Args: cobra.NoArgs,
		Long: `Starts two workers and a tool that counts its executions, kills the busy worker
with SIGKILL in the middle of a step, and shows how the other one goes on. It
uses a Postgres of its own that it throws away, unless --database-url names one;
there it works in a tenant of its own, "demo".

Exits 0 only if every completed step ran exactly once and the call that was cut
off was repeated with the same Idempotency-Key.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := s.load(cmd)
			if err != nil {
				return err
			}
			return runDemoCrash(cmd, c, &out)
		},
	}
	s.flags(cmd)
	out.flag(cmd)
	return cmd
}

// crash is one run of the demonstration.
type crash struct {
	config  *config
	story   *story
	log     *slog.Logger
	tool    *countingTool
	pool    *pgxpool.Pool
	api     *client.Client
	workers []*demoWorker
}

// demoWorker is a worker process with a name that people can tell apart.
type demoWorker struct {
	name  string
	id    string // in the fleet
	child *child
	log   *tail
}

// crashReport is what the demonstration found; its JSON is stable.
type crashReport struct {
	RunID        string        `json:"runId"`
	Killed       string        `json:"killed"`
	WentOn       string        `json:"wentOn"`
	ResumedMs    int64         `json:"resumedMs"` // from the kill until the other worker owned the run
	RepeatedMs   int64         `json:"repeatedMs"`
	Answer       string        `json:"answer"`
	Executions   []stepCount   `json:"executions"`
	Requirements []requirement `json:"requirements"`
	OK           bool          `json:"ok"`
}

type stepCount struct {
	Step      int      `json:"step"`
	Sent      int      `json:"sent"`
	Completed int      `json:"completed"`
	Keys      []string `json:"keys"` // different Idempotency-Keys
}

type requirement struct {
	What string `json:"what"`
	OK   bool   `json:"ok"`
}

func runDemoCrash(cmd *cobra.Command, c *config, out *output) (err error) {
	soft, hard, stop := withSignals(cmd.Context())
	defer stop()
	ctx, cancel := context.WithTimeoutCause(soft, demoWithin, fmt.Errorf("%w: the demonstration took longer than %s", errTimeout, demoWithin))
	defer cancel()
	storyTo := io.Discard
	if out.people() {
		storyTo = cmd.OutOrStdout()
	}
	d := &crash{config: c, story: &story{w: storyTo}, log: slog.New(slog.DiscardHandler)}
	d.story.say("weir demo crash: two workers, and one is killed in the middle of a step\n")

	if c.DatabaseURL == "" {
		pg, err := cluster.Start(ctx, cluster.Config{Ephemeral: true})
		if err != nil {
			return err
		}
		defer func() {
			ctx, cancel := context.WithTimeout(context.Background(), demoStop)
			defer cancel()
			_ = pg.Stop(ctx)
		}()
		if err := pg.EnsureDatabase(ctx, devDatabase); err != nil {
			return err
		}
		c.DatabaseURL = pg.URL(devDatabase)
		d.story.say("  a Postgres %s of its own, thrown away at the end", pg.Version())
	}
	if err := db.Migrate(ctx, c.DatabaseURL); err != nil {
		return err
	}
	c.Listen, c.Lease, c.Heartbeat, c.Drain = "127.0.0.1:0", demoLease, demoHeartbeat, demoStop
	c.Tools.HTTP.AllowPrivate = true

	if d.tool, err = startCountingTool(); err != nil {
		return err
	}
	defer d.tool.close()
	p, err := openProcess(ctx, c, d.log, newMasker())
	if err != nil {
		return err
	}
	defer p.close()
	d.pool = p.pool
	if err := aloneInFleet(ctx, p.pool); err != nil {
		return err
	}
	token := newToken{Tenant: demoTenant, ID: "demo-" + strings.ToLower(rand.Text()[:8]), Secret: db.NewTokenSecret(), Scopes: []string{"*"}}
	if err := storeToken(ctx, p.pool, token); err != nil {
		return err
	}
	defer dropToken(p.pool, token)

	serving, stopServing := context.WithCancelCause(ctx)
	var served sync.WaitGroup
	defer served.Wait()
	defer stopServing(errStopping)
	url := make(chan string, 1)
	failed := make(chan error, 1)
	judgesFrom := time.Now().Add(demoLease)
	served.Go(func() {
		failed <- p.run(serving, hard, duties{api: true, reaper: true, scheduler: true}, api.Config{}, func(r readiness) error {
			url <- r.API
			return nil
		})
	})
	select {
	case at := <-url:
		d.api = client.New(client.Config{URL: at, Token: token.Secret})
	case err := <-failed:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}

	defer d.stopWorkers()
	if err := d.startWorkers(ctx, "ada", "ben"); err != nil {
		return err
	}
	if wait := time.Until(judgesFrom.Add(demoHeartbeat)); wait > 0 {
		d.story.say("  nobody may declare a worker dead before watching for one lease (%s): %s to go", demoLease, brief(wait))
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	report, err := d.play(ctx)
	if err != nil {
		return d.explain(stopped(err))
	}
	if err := out.one(cmd, report, func() { d.conclude(report) }); err != nil {
		return err
	}
	if !report.OK {
		return d.explain(errors.New("the demonstration failed: a requirement above does not hold"))
	}
	return nil
}

// aloneInFleet refuses a database whose workers would take the demonstration's
// run.
func aloneInFleet(ctx context.Context, pool *pgxpool.Pool) error {
	var others int
	err := pool.QueryRow(ctx, `SELECT count(*) FROM worker WHERE state = 'live' AND clock_timestamp() - heartbeat_at <= lease_ms * interval '1 millisecond'`).Scan(&others)
	if err != nil {
		return err
	}
	if others > 0 {
		return &exitError{exitBusy, fmt.Errorf("%d other workers are alive on this database and would take the run; name another, or none", others)}
	}
	return nil
}

func dropToken(pool *pgxpool.Pool, t newToken) {
	ctx, cancel := context.WithTimeout(context.Background(), demoStop)
	defer cancel()
	_, _ = pool.Exec(ctx, `DELETE FROM api_token WHERE tenant_id = $1 AND id = $2`, t.Tenant, t.ID)
}

// startWorkers starts the worker processes and returns when all are ready.
func (d *crash) startWorkers(ctx context.Context, names ...string) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	lines := make([]*io.PipeReader, len(names))
	for i, name := range names {
		w := &demoWorker{name: name, log: &tail{}}
		cmd := exec.Command(exe, "worker", "--json")
		cmd.Env = append(os.Environ(), d.config.childEnv()...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		var into *io.PipeWriter
		lines[i], into = io.Pipe()
		cmd.Stdout, cmd.Stderr = into, w.log
		if w.child, err = startChild(cmd); err != nil {
			return fmt.Errorf("start worker %s: %w", name, err)
		}
		go func() {
			<-w.child.done
			into.Close()
		}()
		d.workers = append(d.workers, w)
	}
	for i, w := range d.workers {
		ready := make(chan error, 1)
		go func() {
			var r readiness
			err := json.NewDecoder(lines[i]).Decode(&r)
			w.id = r.WorkerID
			ready <- err
			_, _ = io.Copy(io.Discard, lines[i])
		}()
		select {
		case err := <-ready:
			if err != nil {
				return d.explain(fmt.Errorf("worker %s did not become ready: %w", w.name, err))
			}
			d.story.say("  worker %s is ready (process %d)", w.name, w.child.cmd.Process.Pid)
		case <-ctx.Done():
			return d.explain(context.Cause(ctx))
		}
	}
	return nil
}

func (d *crash) stopWorkers() {
	for _, w := range d.workers {
		_ = w.child.cmd.Process.Signal(syscall.SIGTERM)
	}
	limit := time.After(demoStop)
	for _, w := range d.workers {
		select {
		case <-w.child.done:
		case <-limit:
			_ = w.child.cmd.Process.Kill()
			<-w.child.done
		}
	}
}

// play lets the turn run, kills its worker and watches what follows.
func (d *crash) play(ctx context.Context) (*crashReport, error) {
	agent := "crash-" + strings.ToLower(rand.Text()[:6])
	config, err := json.Marshal(map[string]any{
		"name": agent, "provider": "offline", "tools": []any{map[string]any{
			"type": "http", "name": demoTool, "description": "Counts its executions.", "url": d.tool.url, "idempotency": "idempotent",
			"timeoutMs":  20000,
			"parameters": map[string]any{"type": "object", "properties": map[string]any{"step": map[string]any{"type": "integer"}}},
		}},
	})
	if err != nil {
		return nil, err
	}
	if _, err := d.api.CreateAgent(ctx, config, uuid.NewString()); err != nil {
		return nil, fmt.Errorf("create the agent: %w", err)
	}
	var script strings.Builder
	for step := 1; step <= demoSteps; step++ {
		fmt.Fprintf(&script, "!tool %s {\"step\":%d}\n", demoTool, step)
	}
	script.WriteString("!say " + demoAnswer)

	d.story.say("\nThe turn has %d steps, each a call of a tool that takes %s and counts:\n", demoSteps, brief(demoLatency))
	d.story.start()
	d.tool.start(d.story)
	type ending struct {
		result *client.ExecuteResult
		err    error
	}
	ended := make(chan ending, 1)
	go func() {
		result, err := d.api.Execute(ctx, client.ExecuteParams{
			Message: script.String(), AgentID: agent, SessionID: agent, IdempotencyKey: uuid.NewString(),
			TimeoutMs: demoWithin.Milliseconds(),
		})
		ended <- ending{result, err}
	}()
	select {
	case <-d.tool.fatal:
	case e := <-ended:
		return nil, fmt.Errorf("the turn ended before step %d: %w", demoKilledAt, errors.Join(e.err, errors.New("too early")))
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	run, err := d.api.Run(ctx, d.tool.run())
	if err != nil {
		return nil, err
	}
	report := &crashReport{RunID: run.RunID}
	i := slices.IndexFunc(d.workers, func(w *demoWorker) bool { return w.id == run.WorkerID })
	if i < 0 {
		return nil, fmt.Errorf("run %s is with worker %s, which is none of ours", run.RunID, run.WorkerID)
	}
	victim, other := d.workers[i], d.workers[1-i]
	report.Killed = victim.name
	time.Sleep(demoIntoStep) // so that the call is well under way
	if err := victim.child.cmd.Process.Kill(); err != nil {
		return nil, err
	}
	killed := time.Now()
	d.story.event("%s is killed with SIGKILL, in the middle of step %d", victim.name, demoKilledAt)

	owner, err := d.nextOwner(ctx, run.RunID, victim.id)
	if err != nil {
		return nil, err
	}
	report.ResumedMs = time.Since(killed).Milliseconds()
	if owner == other.id {
		report.WentOn = other.name
	}
	d.story.event("%s goes on with the run, %d ms after the kill", other.name, report.ResumedMs)
	var e ending
	select {
	case e = <-ended:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if e.err != nil {
		return nil, fmt.Errorf("the turn: %w", e.err)
	}
	report.Answer = e.result.Response
	d.story.event("the turn is answered: %q", report.Answer)
	report.RepeatedMs = d.tool.repeated().Sub(killed).Milliseconds()
	d.judge(report)
	return report, nil
}

// lookEvery is how often nextOwner looks. What it measures is a few hundred
// milliseconds.
const lookEvery = 5 * time.Millisecond

// nextOwner waits until a run belongs to another worker, and returns which.
func (d *crash) nextOwner(ctx context.Context, run, before string) (string, error) {
	id, err := uuid.Parse(strings.TrimPrefix(run, "run_"))
	if err != nil {
		return "", err
	}
	for {
		var owner *string
		var state string
		if err := d.pool.QueryRow(ctx, `SELECT worker_id::text, state::text FROM run WHERE id = $1`, id).Scan(&owner, &state); err != nil {
			return "", err
		}
		if owner != nil && *owner != before {
			return *owner, nil
		}
		if state != "running" && state != "queued" && state != "waiting" {
			return "", fmt.Errorf("the run is %s although its worker died", state)
		}
		select {
		case <-time.After(lookEvery):
		case <-ctx.Done():
			return "", context.Cause(ctx)
		}
	}
}

// judge counts.
func (d *crash) judge(r *crashReport) {
	r.Executions = d.tool.counts()
	once, sent, keys := true, true, map[string]bool{}
	for _, c := range r.Executions {
		once = once && c.Completed == 1
		want := 1
		if c.Step == demoKilledAt {
			want = 2
		}
		sent = sent && c.Sent == want && len(c.Keys) == 1 && c.Keys[0] != ""
		for _, k := range c.Keys {
			keys[k] = true
		}
	}
	r.Requirements = []requirement{
		{fmt.Sprintf("all %d steps were carried out, each completed exactly once", demoSteps), once && len(r.Executions) == demoSteps},
		{"only the call that was cut off was sent again, with the same Idempotency-Key", sent},
		{"each step had a key of its own", len(keys) == demoSteps},
		{"the other worker went on", r.WentOn != ""},
		{"the client, which kept waiting, got the answer", r.Answer == demoAnswer},
	}
	r.OK = true
	for _, q := range r.Requirements {
		r.OK = r.OK && q.OK
	}
}

func (d *crash) conclude(r *crashReport) {
	d.story.say("\nWhat the tool counted:\n")
	t := newTable(d.story.w, "  STEP", "SENT", "COMPLETED", "IDEMPOTENCY-KEY")
	for _, c := range r.Executions {
		keys := make([]string, len(c.Keys))
		for i, k := range c.Keys {
			keys[i] = short(k, 24)
		}
		t.row(fmt.Sprintf("  %d", c.Step), c.Sent, c.Completed, strings.Join(keys, " and "))
	}
	_ = t.flush()
	d.story.say("")
	for _, q := range r.Requirements {
		mark := "yes"
		if !q.OK {
			mark = "NO "
		}
		d.story.say("  %s  %s", mark, q.What)
	}
	if r.OK {
		d.story.say("\n%s died in step %d; %s went on %d ms later, and nothing that was done was done again.", r.Killed, demoKilledAt, r.WentOn, r.ResumedMs)
	}
}

// explain adds the last words of the workers to an error.
func (d *crash) explain(err error) error {
	if err == nil {
		return nil
	}
	text := ""
	for _, w := range d.workers {
		if log := w.log.String(); log != "" {
			text += fmt.Sprintf("\n  the log of %s:\n%s", w.name, log)
		}
	}
	return fmt.Errorf("%w%s", err, text)
}

// story is what people read, with times since the turn began.
type story struct {
	mu    sync.Mutex
	w     io.Writer
	began time.Time
}

func (s *story) start() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.began = time.Now()
}

func (s *story) say(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.w, format+"\n", args...)
}

func (s *story) event(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.w, "  %7d ms  %s\n", time.Since(s.began).Milliseconds(), fmt.Sprintf(format, args...))
}

// countingTool is an HTTP tool that counts how often each step was asked of it
// and how often it completed. The first call of the fatal step takes so long
// that its caller does not live to see the end.
type countingTool struct {
	url    string
	server *http.Server
	story  *story
	fatal  chan struct{} // closed when the fatal step is under way

	mu    sync.Mutex
	runID string
	steps map[int]*stepCount
	again time.Time // when the fatal step came for the second time
}

func startCountingTool() (*countingTool, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	t := &countingTool{url: "http://" + listener.Addr().String() + "/" + demoTool, fatal: make(chan struct{}), steps: map[int]*stepCount{}}
	t.server = &http.Server{Handler: t, ReadHeaderTimeout: demoStop}
	go func() { _ = t.server.Serve(listener) }()
	return t, nil
}

func (t *countingTool) start(s *story) { t.story = s }
func (t *countingTool) close()         { _ = t.server.Close() }

func (t *countingTool) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var args struct {
		Step int `json:"step"`
	}
	// The body is read to its end, or net/http does not see the caller go.
	body, err := io.ReadAll(io.LimitReader(r.Body, 1<<16))
	if err == nil {
		err = json.Unmarshal(body, &args)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	key := r.Header.Get("Idempotency-Key")
	t.mu.Lock()
	t.runID = r.Header.Get("X-Weir-Run-Id")
	c := t.steps[args.Step]
	if c == nil {
		c = &stepCount{Step: args.Step}
		t.steps[args.Step] = c
	}
	c.Sent++
	sent := c.Sent
	same := slices.Contains(c.Keys, key)
	if !same {
		c.Keys = append(c.Keys, key)
	}
	if args.Step == demoKilledAt && sent == 2 {
		t.again = time.Now()
	}
	t.mu.Unlock()

	latency := demoLatency
	switch {
	case sent > 1 && same:
		t.story.event("step %d is asked for again, with the same Idempotency-Key", args.Step)
	case sent > 1:
		t.story.event("step %d is asked for again, with ANOTHER Idempotency-Key", args.Step)
	case args.Step == demoKilledAt:
		t.story.event("step %d begins …", args.Step)
		close(t.fatal)
		latency = demoWithin
	}
	select {
	case <-time.After(latency):
	case <-r.Context().Done():
		t.story.event("step %d is cut off: its caller is gone", args.Step)
		return
	}
	t.mu.Lock()
	c.Completed++
	t.mu.Unlock()
	t.story.event("step %d is done", args.Step)
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"step":%d,"done":true}`, args.Step)
}

func (t *countingTool) run() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.runID
}

func (t *countingTool) repeated() time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.again
}

func (t *countingTool) counts() []stepCount {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []stepCount
	for _, c := range t.steps {
		all = append(all, *c)
	}
	slices.SortFunc(all, func(a, b stepCount) int { return a.Step - b.Step })
	return all
}

// tail keeps the end of a log.
type tail struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

const tailBytes = 4000

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf.Write(p)
	if extra := t.buf.Len() - tailBytes; extra > 0 {
		t.buf.Next(extra)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.buf.String()
}
