package jobs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs/bus"
)

// Masker hides credentials in what is about to be stored. It returns its
// argument when there is nothing to hide.
type Masker interface {
	Bytes(b []byte) []byte
}

// Config is what a Runs needs.
type Config struct {
	Pool    *pgxpool.Pool
	Hot     *pgxpool.Pool // the committer's, of db.OpenHot; it needs Writers + 1 connections
	Pooled  bool          // Hot is of db.OpenPooled: settings last for a transaction, and the bus hears nobody else
	Bus     *bus.Bus
	Masker  Masker
	Log     *slog.Logger
	Writers int // of the committer; 0 means 2
}

// Runs is the run state machine: the only code that moves runs.
type Runs struct {
	pool      *pgxpool.Pool
	pooled    bool
	queries   *db.Queries
	insert    *river.Client[pgx.Tx]
	committer *committer
	bus       *bus.Bus
	masker    Masker
	log       *slog.Logger
	outcomes  outcomes
	known     knownSessions
	admission *admissionMetrics
}

// New makes the state machine. Close ends it.
func New(c Config) (*Runs, error) {
	// An insert-only client. Its cooldown silences River's NOTIFY inside our
	// transactions, which would serialise the commits of the whole database;
	// the bus notifies after the commit.
	insert, err := river.NewClient(riverpgxv5.New(c.Pool), &river.Config{
		FetchCooldown: time.Hour, FetchPollInterval: time.Hour, Logger: c.Log,
	})
	if err != nil {
		return nil, fmt.Errorf("river insert client: %w", err)
	}
	if c.Writers == 0 {
		c.Writers = 2
	}
	r := &Runs{pool: c.Pool, pooled: c.Pooled, queries: db.New(), insert: insert, bus: c.Bus, masker: c.Masker, log: c.Log, admission: newAdmissionMetrics()}
	r.committer = newCommitter(r, c.Hot, c.Writers)
	r.outcomes.init(r)
	return r, nil
}

// Close lets what was handed over be committed, then ends the writers.
func (r *Runs) Close() {
	r.outcomes.close()
	r.committer.close()
}

// Bus tells of changes.
func (r *Runs) Bus() *bus.Bus { return r.bus }

// publish tells this and other processes what a unit has done.
func (r *Runs) publish(u *unit) {
	queues, messages := u.news()
	switch {
	case u.embedded:
		r.bus.Deliver(messages)
	case len(queues)+len(messages) > 0:
		r.bus.Publish(queues, messages...)
	}
}

// embed lets a unit of a quiet process notify in its own transaction.
func (r *Runs) embed(u *unit) []bus.Notification {
	queues, messages := u.news()
	if len(queues)+len(messages) == 0 {
		return nil
	}
	var n []bus.Notification
	n, u.embedded = r.bus.Embed(queues, messages)
	return n
}

// news is what others have to know of a unit: queues that received jobs, and
// messages.
func (u *unit) news() (queues []string, messages []bus.Message) {
	for _, n := range u.nudges {
		if !slices.Contains(queues, n.queue) {
			queues = append(queues, n.queue)
		}
	}
	for _, id := range u.changes.ended {
		messages = append(messages, bus.Message{Topic: bus.RunEnded, ID: id})
	}
	for _, id := range u.changes.control {
		messages = append(messages, bus.Message{Topic: bus.RunControl, ID: id})
	}
	if u.changes.limits {
		messages = append(messages, bus.Message{Topic: bus.Limits})
	}
	if u.changes.ready {
		messages = append(messages, bus.Message{Topic: bus.Ready})
	}
	if u.changes.waits {
		messages = append(messages, bus.Message{Topic: bus.Waits})
	}
	return queues, messages
}

// Outcome is how a run ended.
type Outcome struct {
	State     db.RunState
	EndReason string
	Result    json.RawMessage
	Error     json.RawMessage
	WaitsFor  db.WaitKind // of an unfinished run that waits
}

// Ended says whether the run is final.
func (o Outcome) Ended() bool { return isFinal(o.State) }

// Outcome reads a run as it stands.
func (r *Runs) Outcome(ctx context.Context, tenant string, id uuid.UUID) (Outcome, error) {
	row, err := r.queries.RunOutcome(ctx, r.pool, db.RunOutcomeParams{TenantID: tenant, ID: id})
	if errors.Is(err, pgx.ErrNoRows) {
		return Outcome{}, &NotFoundError{"run", id.String()}
	} else if err != nil {
		return Outcome{}, err
	}
	o := Outcome{State: row.State, EndReason: orEmpty(row.EndReason), Result: row.Result, Error: row.Error}
	if row.WaitsFor != nil {
		o.WaitsFor = *row.WaitsFor
	}
	return o, nil
}

// repeat does again what fails because the database is away or a row is held,
// for as long as the committer repeats a change: then *UnavailableError.
func (r *Runs) repeat(ctx context.Context, f func() error) error {
	since := time.Now()
	_, bounded := ctx.Deadline()
	for {
		err := f()
		if err == nil || !isRetryable(err) {
			return err
		}
		if !bounded && time.Since(since) >= r.committer.giveUp {
			return &UnavailableError{time.Since(since), err}
		}
		if err := sleep(ctx, retryPause); err != nil {
			return err
		}
	}
}

// Wait returns a run's outcome once it has ended; when ctx ends before, the
// outcome so far and the context's cause.
func (r *Runs) Wait(ctx context.Context, tenant string, id uuid.UUID) (Outcome, error) {
	sub := r.bus.Subscribe(bus.RunEnded, id)
	defer sub.Close()
	defer r.outcomes.watch(id, sub)()
	for {
		o, err := r.Outcome(ctx, tenant, id)
		if ctx.Err() != nil {
			return o, context.Cause(ctx)
		}
		if err == nil && o.Ended() {
			return o, nil
		}
		if err != nil && !isRetryable(err) {
			return Outcome{}, err
		}
		select {
		case <-sub.C:
		case <-ctx.Done():
			return o, context.Cause(ctx)
		}
	}
}

// outcomes polls, in one statement, the runs that somebody waits for: a
// notification may be lost.
type outcomes struct {
	runs *Runs
	mu   sync.Mutex
	ids  map[uuid.UUID]map[*bus.Subscription]func()
	stop context.CancelFunc
	done chan struct{}
}

const (
	outcomePoll       = time.Second
	pooledOutcomePoll = 100 * time.Millisecond // without notifications of others
)

func (o *outcomes) init(r *Runs) {
	ctx, cancel := context.WithCancel(context.Background())
	o.runs, o.ids, o.stop, o.done = r, map[uuid.UUID]map[*bus.Subscription]func(){}, cancel, make(chan struct{})
	go o.poll(ctx)
}

func (o *outcomes) close() {
	o.stop()
	<-o.done
}

func (o *outcomes) watch(id uuid.UUID, sub *bus.Subscription) (forget func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ids[id] == nil {
		o.ids[id] = map[*bus.Subscription]func(){}
	}
	o.ids[id][sub] = sub.Signal
	return func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		delete(o.ids[id], sub)
		if len(o.ids[id]) == 0 {
			delete(o.ids, id)
		}
	}
}

func (o *outcomes) poll(ctx context.Context) {
	defer close(o.done)
	every := outcomePoll
	if o.runs.pooled {
		every = pooledOutcomePoll
	}
	for {
		if sleep(ctx, every) != nil {
			return
		}
		o.mu.Lock()
		ids := make([]uuid.UUID, 0, len(o.ids))
		for id := range o.ids {
			ids = append(ids, id)
		}
		o.mu.Unlock()
		if len(ids) == 0 {
			continue
		}
		ended, err := o.runs.queries.RunEndedAmong(ctx, o.runs.pool, ids)
		if err != nil {
			continue // the waiters are told when the database is back
		}
		o.mu.Lock()
		for _, id := range ended {
			for _, signal := range o.ids[id] {
				signal()
			}
		}
		o.mu.Unlock()
	}
}
