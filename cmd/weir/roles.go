package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/weir-run/weir/api"
	"github.com/weir-run/weir/scheduler"
	"github.com/weir-run/weir/workers"
)

// duties say what a process does.
type duties struct {
	api       bool
	worker    bool
	reaper    bool // declares workers dead, and admits what waits
	scheduler bool // keeps time, repairs
}

func (d duties) String() string {
	switch {
	case d.api && d.worker:
		return "serve"
	case d.api:
		return "api"
	case d.worker:
		return "worker"
	default:
		return "scheduler"
	}
}

func newServe() *cobra.Command {
	return roleCommand("serve", "Runs API, worker and scheduler in one process",
		`Runs API, worker and scheduler against an existing, migrated database: all that
one machine needs in production. "weir migrate up" prepares the database.`,
		duties{api: true, worker: true, reaper: true, scheduler: true},
		newSettings([]setting{settingListen, settingNotice}, settingsCommon, settingsWork))
}

func newAPI() *cobra.Command {
	return roleCommand("api", "Runs the HTTP edge only", `Runs the HTTP edge: it accepts requests and answers them; workers do the work.`,
		duties{api: true}, newSettings([]setting{settingListen, settingNotice}, settingsCommon, []setting{settingPrivate}))
}

func newScheduler() *cobra.Command {
	return roleCommand("scheduler", "Keeps time and repairs only",
		`Admits what waits, ends waits when they are due, repairs what crashes left behind
and reaps dead workers. Any number may run; one at a time does each of it. Workers do the same
unless they run with --no-scheduler.`,
		duties{reaper: true, scheduler: true}, newSettings([]setting{settingHealth}, settingsCommon, []setting{settingLease, settingKeepRuns}))
}

func newWorker() *cobra.Command {
	s := newSettings([]setting{settingHealth}, settingsCommon, settingsWork, []setting{settingNoSched, settingSolitary})
	cmd := &cobra.Command{
		Use: "worker", Short: "Works queued runs", Args: cobra.NoArgs,
		Long: `Works queued runs. It may die at any moment: another worker goes on from the last
committed step. It also keeps time and reaps dead workers, unless others do.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := s.load(cmd)
			if err != nil {
				return err
			}
			if c.Solitary != "" {
				return runSolitary(cmd, c)
			}
			return runRole(cmd, c, duties{worker: true, reaper: true, scheduler: !c.NoScheduler})
		},
	}
	s.flags(cmd)
	return cmd
}

func roleCommand(use, short, long string, d duties, s *settings) *cobra.Command {
	cmd := &cobra.Command{
		Use: use, Short: short, Long: long, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := s.load(cmd)
			if err != nil {
				return err
			}
			return runRole(cmd, c, d)
		},
	}
	s.flags(cmd)
	return cmd
}

// runRole runs a role until a signal asks it to stop.
func runRole(cmd *cobra.Command, c *config, d duties) error {
	if err := c.needDatabase(); err != nil {
		return err
	}
	soft, hard, stop := withSignals(cmd.Context())
	defer stop()
	masker := newMasker(c.DatabaseURL, c.DatabaseURLDirect)
	log := newLog(cmd.ErrOrStderr(), c, masker)
	began := time.Now()
	p, err := openProcess(soft, c, log, masker)
	if err != nil {
		return stopped(err)
	}
	defer p.close()
	if d.api {
		if err := seedAgents(soft, p.pool, c.agents, log); err != nil {
			return stopped(err)
		}
	}
	return p.run(soft, hard, d, api.Config{}, func(r readiness) error {
		r.Role, r.DatabaseURL = d.String(), redacted(c.DatabaseURL)
		if c.JSON {
			return r.print(cmd.OutOrStdout())
		}
		log.Info("ready", "role", r.Role, "api", r.API, "worker_id", r.WorkerID, "database", c.connections(), "took_ms", time.Since(began).Milliseconds())
		return nil
	})
}

// stopped turns the end that a signal asked for into success.
func stopped(err error) error {
	if errors.Is(err, errStopping) || errors.Is(err, errStopNow) {
		return nil
	}
	return err
}

// run carries the duties out until soft ends, then drains: readiness goes
// first, then the worker hands its runs over, and after a notice to load
// balancers no request is accepted; then everything else stops. ready is called
// once everything serves.
func (p *process) run(soft, hard context.Context, d duties, edge api.Config, ready func(readiness) error) error {
	failed := make(chan error, 4) // what ends the process beside a signal
	var worker *workers.Worker
	if d.worker {
		models, err := p.config.models()
		if err != nil {
			return err
		}
		defer models.Close()
		pool, err := p.workPool(soft)
		if err != nil {
			return err
		}
		defer pool.Close()
		worker = workers.New(workers.Config{
			Pool: pool, Direct: p.direct, Runs: p.runs, Models: models, Log: p.log, Traces: p.traces.provider(), Version: buildVersion(),
			Slots: p.config.Slots, Queues: p.config.queues, Heartbeat: p.config.Heartbeat, Lease: p.config.Lease, Drain: p.config.Drain,
			Secret: secretOf, AllowPrivate: p.config.Tools.HTTP.AllowPrivate, Solitary: p.solitary(soft, hard),
		})
	}

	// Duties end after the worker has handed its runs over.
	onDuty, offDuty := context.WithCancel(context.WithoutCancel(soft))
	var duty sync.WaitGroup
	defer duty.Wait()
	defer offDuty()
	lease := cmp.Or(p.config.Lease, settingLease.value.(time.Duration))
	if d.reaper {
		reaper := scheduler.NewReaper(p.pool, p.direct, p.runs, p.log, lease)
		duty.Go(func() { reaper.Run(onDuty) })
		admission := scheduler.NewAdmission(p.pool, p.direct, p.runs, p.log)
		duty.Go(func() { admission.Run(onDuty) })
	}
	if worker != nil {
		duty.Go(func() { paceGC(onDuty, worker.Running) })
	}
	var sweeper *scheduler.Sweeper
	if d.scheduler {
		sweeper = scheduler.NewSweeper(p.pool, p.direct, p.runs, p.log, scheduler.Retention{Runs: p.config.Retention.Runs})
		duty.Go(func() { sweeper.Run(onDuty) })
	}

	var r readiness
	front, err := p.front(d, edge, worker, sweeper)
	if err != nil {
		return err
	}
	if front != nil {
		go func() { failed <- front.serve() }()
		defer front.close()
		if d.api {
			r.API = front.url()
			r.Console = r.API + "/ui"
		} else {
			r.Listen = front.url()
		}
	}

	// A worker begins to drain when readiness is gone, not with the signal.
	working, stopWork := context.WithCancel(context.WithoutCancel(soft))
	defer stopWork()
	worked := make(chan struct{})
	if worker != nil {
		go func() {
			defer close(worked)
			if err := worker.Run(working, hard); err != nil {
				failed <- fmt.Errorf("worker: %w", err)
			}
		}()
		select {
		case <-worker.Ready():
			r.WorkerID = worker.ID().String()
		case <-worked:
		case <-soft.Done():
		}
	} else {
		close(worked)
	}
	if soft.Err() == nil {
		if front != nil {
			front.ready.Store(true)
		}
		err = ready(r)
	}
	var alone <-chan struct{} // a worker that an operator has drained ends its process, unless that serves too
	if d.worker && !d.api {
		alone = worked
	}
	if err == nil {
		select {
		case <-alone:
			p.log.Info("drained")
		case <-soft.Done():
			p.log.Info("draining", "reason", context.Cause(soft).Error(), "within_ms", p.config.Drain.Milliseconds())
		case err = <-failed:
		}
	}
	if front != nil {
		front.unready()
	}
	stopWork()
	if front != nil {
		front.drain(hard, d, worked, p.config.Notice, p.config.Drain)
	}
	if err != nil {
		return err // the process cannot go on; its lease hands its runs over
	}
	<-worked
	select {
	case err := <-failed:
		return err
	default:
		return nil
	}
}

// front is a process's HTTP side: the API, or for a worker or scheduler what
// operators ask.
type front struct {
	listener net.Listener
	http     *http.Server
	api      *api.Server // nil unless the process has that role
	ready    *readyFlag
}

// front makes the HTTP side; nil when the process has none.
func (p *process) front(d duties, edge api.Config, worker *workers.Worker, sweeper *scheduler.Sweeper) (*front, error) {
	if p.config.Listen == "" {
		if d.api {
			return nil, usagef("--listen must not be empty for the API")
		}
		return nil, nil
	}
	f := &front{ready: &readyFlag{}}
	metrics := p.metrics(worker, sweeper)
	var handler http.Handler
	if d.api {
		edge.Pool, edge.Runs, edge.Log, edge.Version, edge.Metrics = p.pool, p.runs, p.log, buildVersion(), metrics
		edge.Traces = p.traces.provider()
		edge.DrainWait = min(p.config.Drain, maxDrainWait)
		if edge.Sections = p.config.sections; p.config.file != "" {
			edge.ConfigPaths = []string{p.config.file}
		}
		server, err := api.New(edge)
		if err != nil {
			return nil, fmt.Errorf("api: %w", err)
		}
		f.api, handler = server, server.Handler()
	} else {
		handler = p.health(f.ready, worker, metrics)
	}
	var err error
	if f.listener, err = net.Listen("tcp", p.config.Listen); err != nil {
		if f.api != nil {
			f.api.Close()
		}
		if errors.Is(err, syscall.EADDRINUSE) {
			return nil, fmt.Errorf("%s is taken by another process; name another address with --listen, port 0 for a free one: %w", p.config.Listen, err)
		}
		return nil, err
	}
	f.http = &http.Server{
		Handler: handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(p.log.Handler(), slog.LevelDebug),
	}
	return f, nil
}

// url is how to reach the front from this machine.
func (f *front) url() string {
	addr := f.listener.Addr().(*net.TCPAddr)
	host := addr.IP.String()
	if addr.IP.IsUnspecified() {
		host = "127.0.0.1"
	}
	return "http://" + net.JoinHostPort(host, fmt.Sprint(addr.Port))
}

func (f *front) serve() error {
	if err := f.http.Serve(f.listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", f.listener.Addr(), err)
	}
	return nil
}

const (
	// maxDrainWait is how long requests that wait for a turn may do so once the
	// process drains. Then they are told that the turn goes on, and ask again
	// elsewhere.
	maxDrainWait = 5 * time.Second
	// lastAnswers is how long they may once no worker of this process is left.
	lastAnswers = time.Second
	// sendAnswers is how long it may take to send them.
	sendAnswers = 2 * time.Second
)

// unready makes readyz say no.
func (f *front) unready() {
	f.ready.Store(false)
	if f.api != nil {
		f.api.Unready()
	}
}

// drain, after a notice, refuses what is new and lets what is under way end.
// worked is closed when the process's worker, if it has one, has handed its runs
// over.
func (f *front) drain(hard context.Context, d duties, worked <-chan struct{}, notice, within time.Duration) {
	ctx, cancel := context.WithTimeout(hard, notice+within+sendAnswers)
	defer cancel()
	if f.api != nil {
		t := time.NewTimer(notice)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
		}
	}
	if f.api == nil { // operators look on while the worker drains
		select {
		case <-worked:
		case <-ctx.Done():
		}
	} else {
		f.api.Drain()
		if d.worker {
			go func() {
				select {
				case <-worked:
					t := time.NewTimer(lastAnswers)
					defer t.Stop()
					select {
					case <-t.C:
					case <-ctx.Done():
					}
				case <-ctx.Done():
				}
				f.api.Close()
			}()
		}
	}
	if f.http.Shutdown(ctx) != nil {
		_ = f.http.Close()
	}
}

func (f *front) close() {
	if f.api != nil {
		f.api.Close()
	}
	_ = f.http.Close()
}

// solitary returns how this process's worker has a suspect carried: by a child
// process, which takes nobody with it when it dies.
func (p *process) solitary(soft, hard context.Context) func(context.Context, uuid.UUID) error {
	return func(ctx context.Context, id uuid.UUID) error { return startSolitary(ctx, soft, hard, p.config, id) }
}
