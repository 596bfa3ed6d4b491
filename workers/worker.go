package workers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"go.opentelemetry.io/otel/trace"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/jobs/bus"
	"github.com/weir-run/weir/jobs/tracing"
	"github.com/weir-run/weir/workers/model"
	"github.com/weir-run/weir/workers/tool"
)

const (
	fetchCooldown  = time.Millisecond       // River's default of 100 ms caps a worker at slots x 10 runs/s
	fetchPoll      = 2 * time.Second        // behind the notifications; also how long a lost one delays a run
	pooledPoll     = 100 * time.Millisecond // where there are none
	jobTimeout     = 13 * time.Hour         // above the longest turn: River's last net, never its own judgement
	rescueAfter    = 24 * time.Hour
	keptJobs       = 24 * time.Hour  // ended nudges: the runs tell what happened
	lookInterval   = time.Second     // between looks at what the database says we hold
	limitsInterval = 5 * time.Second // between looks at the fleet's rate limits that nobody asked for
	stopWithin     = 10 * time.Second
	suspectSlots   = 4
	rejoinInterval = 200 * time.Millisecond
)

// Config is what a Worker needs.
type Config struct {
	Pool   *pgxpool.Pool
	Direct *pgx.ConnConfig // of connections that hold locks or listen; nil where a pooler is in the way: then the worker polls
	Runs   *jobs.Runs
	Models *model.Registry
	Log    *slog.Logger
	// Traces takes the spans of turns. Nil means that there are none.
	Traces trace.TracerProvider

	Version string
	Slots   int     // runs at once, of a queue that names no number; 0 means 256
	Queues  []Queue // none means all
	// Heartbeat renews the lease, Lease is how long one renewal lasts, Drain how
	// long a stopping worker lets steps finish; 0 means 2 s, 10 s, 30 s.
	Heartbeat, Lease, Drain time.Duration

	// Secret gives the value of a named secret.
	Secret func(name string) (string, bool)
	// AllowPrivate lets tools call private addresses.
	AllowPrivate bool
	// Solitary runs one suspect in a process of its own and returns when that
	// has ended, however it ended. nil means that this worker takes no suspects.
	Solitary func(ctx context.Context, run uuid.UUID) error
}

// Queue is a queue that a worker serves, with slots of its own.
type Queue struct {
	Name  string
	Slots int // 0 means the worker's
}

// ParseQueue reads name or name=slots.
func ParseQueue(text string) (Queue, error) {
	name, number, has := strings.Cut(text, "=")
	q := Queue{Name: strings.TrimSpace(name)}
	if !knows(q.Name) {
		return q, fmt.Errorf("there is no queue %q", q.Name)
	}
	if has {
		var err error
		if q.Slots, err = strconv.Atoi(strings.TrimSpace(number)); err != nil || q.Slots < 1 || q.Slots > maxSlots {
			return q, fmt.Errorf("%s must have 1 to %d slots, not %q", q.Name, maxSlots, number)
		}
	}
	return q, nil
}

const maxSlots = 10_000 // River's limit

// Worker is one process's work. It outlives its place in the fleet: a worker
// that lost its lease stops what it does and joins again under a new id.
type Worker struct {
	Config
	queries *db.Queries
	agents  *agents
	limits  *limits
	tools   *tool.Runner
	tracer  tracing.Tracer

	mu     sync.Mutex
	id     uuid.UUID
	seat   *seat
	drain  atomic.Bool
	ready  chan struct{}
	onceOK sync.Once
}

// New makes a worker. Run makes it work.
func New(c Config) *Worker {
	if c.Slots == 0 {
		c.Slots = 256
	}
	if c.Heartbeat == 0 {
		c.Heartbeat = 2 * time.Second
	}
	if c.Lease == 0 {
		c.Lease = 10 * time.Second
	}
	if c.Drain == 0 {
		c.Drain = 30 * time.Second
	}
	if len(c.Queues) == 0 {
		c.Queues = []Queue{{Name: jobs.QueueTurns}, {Name: jobs.QueueTurnsBg}, {Name: jobs.QueueSpawns}}
	}
	c.Queues = slices.Clone(c.Queues)
	for i := range c.Queues {
		c.Queues[i].Slots = cmp.Or(c.Queues[i].Slots, c.Slots)
	}
	w := &Worker{Config: c, queries: db.New(), ready: make(chan struct{})}
	w.agents = newAgents(w.queries, c.Pool)
	w.limits = newLimits(w.queries, c.Pool)
	w.tools = tool.New(tool.Config{AllowPrivate: c.AllowPrivate})
	w.tracer = tracing.New(c.Traces, "workers")
	return w
}

// ID is the worker's current id in the fleet; uuid.Nil before it has joined.
func (w *Worker) ID() uuid.UUID {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.id
}

// Ready is closed when the worker has first joined and fetches.
func (w *Worker) Ready() <-chan struct{} { return w.ready }

// Running counts the runs in hand.
func (w *Worker) Running() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.seat == nil {
		return 0
	}
	return w.seat.held.len()
}

// Alive says whether the worker has a place in the fleet.
func (w *Worker) Alive() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.seat != nil && w.seat.member.ctx.Err() == nil
}

// errStuck ends a process whose work does not end when it must.
var errStuck = errors.New("work did not end within 10 s of losing the lease")

// Run works until ctx ends, then drains. A second signal is the caller's to
// handle: cancelling hard cuts the drain short.
func (w *Worker) Run(ctx, hard context.Context) error {
	joining := false
	for {
		s, err := w.sit(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return nil //nolint:nilerr // it was told to stop before it began
			}
			if !joining { // once for each absence of the database
				w.Log.Warn("join the fleet", "error", err)
				joining = true
			}
			select {
			case <-time.After(rejoinInterval):
				continue
			case <-ctx.Done():
				return nil
			}
		}
		joining = false
		w.onceOK.Do(func() { close(w.ready) })
		for sits := true; sits; {
			select {
			case <-ctx.Done():
				return w.leave(s, hard)
			case wanted := <-s.member.wanted:
				w.Log.Info("an operator asks", "wants", wanted)
				if wanted == wantsDrain {
					return w.leave(s, hard)
				}
				go s.fetchNoMore()
			case <-s.member.ctx.Done():
				if err := w.abandon(s); err != nil {
					return err
				}
				sits = false
			}
		}
	}
}

const wantsDrain = "drain" // the other word is quiet: nothing new is fetched, what is in hand goes on

// fetchNoMore lets the runs in hand end and takes no others. The worker stays
// a member, so nobody takes them for lost.
func (s *seat) fetchNoMore() {
	ctx, cancel := context.WithCancel(s.member.ctx)
	defer cancel()
	if err := s.client.Stop(ctx); err != nil && s.member.ctx.Err() == nil {
		s.w.Log.Warn("quiet", "error", err)
	}
}

// seat is one place in the fleet and what runs under it.
type seat struct {
	w      *Worker
	member *member
	held   held
	client *river.Client[pgx.Tx]
	active atomic.Int64   // nudges at work
	wg     sync.WaitGroup // the look loop
	unbind func()
}

// sit joins the fleet and starts to fetch.
func (w *Worker) sit(ctx context.Context) (*seat, error) {
	host, _ := os.Hostname()
	serves := slices.Clone(w.Queues)
	if w.Solitary != nil {
		serves = append(serves, Queue{jobs.QueueSuspect, suspectSlots})
	}
	m, err := join(ctx, w.Pool, w.Direct, w.Log, w.Heartbeat, w.Lease, memberParams{
		Before: w.ID(), Hostname: host, Version: w.Version, PID: os.Getpid(), Queues: serves, Slots: w.Slots,
	})
	if err != nil {
		return nil, err
	}
	s := &seat{w: w, member: m, held: held{runs: map[uuid.UUID]*holding{}}}
	work := river.NewWorkers()
	river.AddWorker(work, &nudged[jobs.Turn]{seat: s, run: func(a jobs.Turn) uuid.UUID { return a.RunID }})
	river.AddWorker(work, &nudged[jobs.Spawn]{seat: s, run: func(a jobs.Spawn) uuid.UUID { return a.RunID }})
	queues := map[string]river.QueueConfig{}
	for _, q := range serves {
		queues[q.Name] = river.QueueConfig{MaxWorkers: q.Slots}
	}
	poll := fetchPoll
	if w.Direct == nil {
		poll = pooledPoll
	}
	s.client, err = river.NewClient(riverpgxv5.New(w.Pool), &river.Config{
		ID: m.id.String(), Queues: queues, Workers: work, FetchCooldown: fetchCooldown, FetchPollInterval: poll,
		JobTimeout: jobTimeout, RescueStuckJobsAfter: rescueAfter,
		CompletedJobRetentionPeriod: keptJobs, CancelledJobRetentionPeriod: keptJobs, DiscardedJobRetentionPeriod: keptJobs,
		MaxAttempts: 1, Logger: quiet(w.Log), PollOnly: w.Direct == nil,
	})
	// A worker that lost its lease still owes an operator what he asked it for.
	switch {
	case err != nil:
	case m.owed == "":
		err = s.client.Start(context.WithoutCancel(ctx))
	default:
		m.log.Info("what an operator asked still holds", "wants", m.owed)
		m.wanted <- m.owed
	}
	if err != nil {
		m.close(context.WithoutCancel(ctx))
		return nil, fmt.Errorf("start to fetch: %w", err)
	}
	s.listen()
	s.wg.Add(1)
	go func() { defer s.wg.Done(); s.look() }()
	w.mu.Lock()
	w.id, w.seat = m.id, s
	w.mu.Unlock()
	return s, nil
}

// abandon stops everything after the lease is lost: what is under way may not
// be finished here. Its writes are fenced; its calls must not go on.
func (w *Worker) abandon(s *seat) error {
	s.held.all(context.Cause(s.member.ctx))
	ctx, cancel := context.WithTimeout(context.Background(), stopWithin)
	defer cancel()
	err := s.client.StopAndCancel(ctx)
	s.unbind()
	s.member.close(ctx)
	s.wg.Wait()
	if err != nil && s.active.Load() > 0 {
		return errStuck
	}
	// What River itself still has under way, its completions, may wait for the
	// database as long as it likes: it changes no run.
	// Nothing of ours runs any more, so its runs may go on elsewhere at once.
	if err := w.queries.WorkerLeave(ctx, w.Pool, s.member.id); err != nil {
		w.Log.Debug("leave the fleet", "error", err)
	}
	return nil
}

// leave drains: nothing new is claimed, runs are handed over at their next
// step boundary, and what outlasts the drain time is cut.
func (w *Worker) leave(s *seat, hard context.Context) error {
	w.drain.Store(true)
	ctx := context.WithoutCancel(hard)
	if err := w.queries.WorkerDrain(ctx, w.Pool, s.member.id); err != nil {
		w.Log.Warn("drain", "error", err)
	}
	cut := make(chan struct{})
	go func() {
		defer close(cut)
		t := time.NewTimer(w.Drain)
		defer t.Stop()
		select {
		case <-t.C:
		case <-hard.Done():
		case <-s.member.ctx.Done():
		}
		s.held.all(errDrained)
	}()
	stopping, cancel := context.WithTimeout(ctx, w.Drain+stopWithin)
	defer cancel()
	err := s.client.Stop(stopping)
	s.unbind()
	s.member.close(ctx)
	s.wg.Wait()
	<-cut
	if err != nil && hard.Err() == nil {
		return fmt.Errorf("drain: %w", err)
	}
	return nil
}

// listen has the bus ask for a look when a run in hand, or a rate limit, may
// have changed.
func (s *seat) listen() {
	stopControl := s.w.Runs.Bus().Handle(bus.RunControl, func(id uuid.UUID) {
		if id == uuid.Nil || s.held.has(id) {
			s.lookSoon()
		}
	})
	stopLimits := s.w.Runs.Bus().Handle(bus.Limits, func(uuid.UUID) { s.lookSoon() })
	stopWorkers := s.w.Runs.Bus().Handle(bus.Workers, func(id uuid.UUID) {
		if id == s.member.id {
			select {
			case s.member.renew <- struct{}{}:
			default:
			}
		}
	})
	s.unbind = func() { stopControl(); stopLimits(); stopWorkers() }
}

// lookSoon asks for a look at the database before its time.
func (s *seat) lookSoon() {
	select {
	case s.member.look <- struct{}{}:
	default:
	}
}

// look compares, once a second and whenever a control message names one of
// ours, what the database says this worker holds with what it has in hand. So
// cancels and kills reach it also when no message does, and a claim whose
// commit's answer was lost is handed back.
func (s *seat) look() {
	tick := time.NewTicker(lookInterval)
	defer tick.Stop()
	var refreshed time.Time
	suspects := map[uuid.UUID]bool{} // ours by the database alone, at the last look
	for {
		told := false
		select {
		case <-tick.C:
		case <-s.member.look:
			told = true
		case <-s.member.ctx.Done():
			return
		}
		if told || s.w.Direct == nil || time.Since(refreshed) > limitsInterval {
			if err := s.w.limits.refresh(s.member.ctx); err != nil && s.member.ctx.Err() == nil {
				s.w.Log.Debug("rate limits", "error", err)
			}
			refreshed = time.Now()
		}
		asked := time.Now()
		rows, err := s.w.queries.RunHeldBy(s.member.ctx, s.w.Pool, &s.member.id)
		if err != nil {
			continue // the heartbeat decides what that means
		}
		ours := make(map[uuid.UUID]bool, len(rows))
		for _, r := range rows {
			ours[r.ID] = true
			if r.CancelRequested {
				s.held.interrupt(r.ID, errCancelRequested)
			}
		}
		unknown := s.held.missing(asked, ours)
		again := map[uuid.UUID]bool{}
		for _, id := range unknown {
			if !suspects[id] { // its claim may be on its way: look twice
				again[id] = true
				continue
			}
			if _, err := s.w.Runs.GiveBack(s.member.ctx, id, s.member.id); err != nil {
				s.w.Log.Warn("give back", "run_id", id, "error", err)
			}
		}
		suspects = again
	}
}

// nudged works the nudges of one kind of run.
type nudged[A river.JobArgs] struct {
	river.WorkerDefaults[A]
	seat *seat
	run  func(A) uuid.UUID
}

// Work carries a run forward. It never returns an error: the run's row decides
// what comes next, and a nudge that failed is no attempt of the run's.
func (n *nudged[A]) Work(_ context.Context, job *river.Job[A]) error {
	n.seat.work(n.run(job.Args), job.Queue)
	return nil
}

func (s *seat) work(id uuid.UUID, queue string) {
	s.active.Add(1)
	defer s.active.Add(-1)
	w := s.w
	if queue == jobs.QueueSuspect && w.Solitary != nil {
		if w.drain.Load() {
			s.renudge(id)
			return
		}
		if err := w.Solitary(s.member.ctx, id); err != nil {
			w.Log.Warn("solitary worker", "run_id", id, "error", err)
		}
		return
	}
	run, err := w.Runs.Claim(s.member.ctx, s.member.id, id)
	switch {
	case errors.Is(err, jobs.ErrNotQueued):
		return // a spare nudge
	case errors.Is(err, jobs.ErrWorkerGone), errors.Is(err, jobs.ErrUnknownOutcome): // the look hands it back, if it is ours
		s.renudge(id)
		return
	case err != nil:
		w.Log.Warn("claim", "run_id", id, "error", err) // the sweeper nudges again
		return
	}
	s.carry(run)
}

// renudge passes a nudge on that this worker fetched and may not claim. A
// worker that lost its lease must end its work within stopWithin, and what it
// cannot pass on the reaper finds.
func (s *seat) renudge(id uuid.UUID) {
	within := stopWithin
	if s.member.ctx.Err() != nil {
		within = lastWrite
	}
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	if _, err := s.w.Runs.Renudge(ctx, jobs.Ref{ID: id}); err != nil {
		s.w.Log.Warn("pass on a nudge", "run_id", id, "error", err)
	}
}

// quiet keeps River's own log to what an operator has to know.
func quiet(log *slog.Logger) *slog.Logger {
	return slog.New(minLevel{log.Handler(), slog.LevelError})
}

type minLevel struct {
	slog.Handler
	level slog.Level
}

func (h minLevel) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= h.level && h.Handler.Enabled(ctx, l)
}

func (h minLevel) WithAttrs(a []slog.Attr) slog.Handler {
	return minLevel{h.Handler.WithAttrs(a), h.level}
}
func (h minLevel) WithGroup(n string) slog.Handler { return minLevel{h.Handler.WithGroup(n), h.level} }

func knows(queue string) bool {
	return slices.Contains([]string{
		jobs.QueueTurns, jobs.QueueTurnsBg, jobs.QueueSpawns, jobs.QueueGraphs, jobs.QueueGates, jobs.QueueMemory, jobs.QueueDelivery,
	}, queue)
}
