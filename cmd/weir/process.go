package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/jobs/bus"
	"github.com/weir-run/weir/policy/mask"
)

const (
	// poolConns serve everything that is not hot. Like the others they do not grow
	// with the slots, since no run holds a connection.
	poolConns = 12
	workConns = 8           // of a worker: River's fetches and completions, looks, heartbeats
	writers   = 2           // of the committer
	hotConns  = writers + 3 // one each, one for claims, one for held rows, one for a lost COMMIT's verdict
	// connectWithin is how long a starting process waits for its database.
	connectWithin = 30 * time.Second
	connectRetry  = 250 * time.Millisecond
	// closeWithin bounds the last commits of a process that stops.
	closeWithin = 10 * time.Second
)

// process is what all roles of one process share.
type process struct {
	config *config
	log    *slog.Logger
	pool   *pgxpool.Pool
	hot    *pgxpool.Pool
	direct *pgx.ConnConfig // past any pooler: locks and LISTEN; nil where nothing goes past it
	bus    *bus.Bus
	runs   *jobs.Runs
	traces *traces // nil when there are none

	stopBus context.CancelFunc
	busDone chan struct{}
}

// openProcess connects a process to its database, whose schema must be there.
func openProcess(ctx context.Context, c *config, log *slog.Logger, masker *mask.Masker) (_ *process, err error) {
	if err := awaitDatabase(ctx, c, log); err != nil {
		return nil, err
	}
	p := &process{config: c, log: log, traces: openTraces(ctx, log, masker)}
	defer func() {
		if err != nil {
			p.closePools()
			p.traces.close(log)
		}
	}()
	if c.polls() {
		log.Warn("nothing goes past the pooler: this process polls, and deaths are noticed by the lease alone")
	} else if p.direct, err = pgx.ParseConfig(c.direct()); err != nil {
		return nil, fmt.Errorf("direct database url: %w", err)
	}
	open := db.Open
	if c.pooled() {
		open = db.OpenPooled
	}
	p.pool, err = open(ctx, c.DatabaseURL, func(pc *pgxpool.Config) {
		pc.MaxConns = poolConns
		if p.traces != nil {
			pc.ConnConfig.Tracer = p.traces.queries()
		}
	})
	if err != nil {
		return nil, err
	}
	p.hot, err = p.openHot(ctx, hotConns)
	if err != nil {
		return nil, err
	}
	p.bus = bus.New(p.pool, p.direct, log)
	p.runs, err = jobs.New(jobs.Config{Pool: p.pool, Hot: p.hot, Pooled: c.polls(), Bus: p.bus, Masker: masker, Log: log, Writers: writers})
	if err != nil {
		return nil, err
	}
	listening, stop := context.WithCancel(context.WithoutCancel(ctx))
	p.stopBus, p.busDone = stop, make(chan struct{})
	go func() {
		defer close(p.busDone)
		p.bus.Run(listening)
	}()
	return p, nil
}

// workPool is what a worker uses. It goes past a pooler, since River hears of
// new jobs through LISTEN. It plans anew: a plan of River's fetch that was made
// while its table was empty takes a third of a second on a full one.
func (p *process) workPool(ctx context.Context) (*pgxpool.Pool, error) {
	open := db.Open
	if p.config.polls() {
		open = db.OpenPooled
	}
	return open(ctx, p.config.direct(), func(c *pgxpool.Config) { c.MaxConns = workConns })
}

// openHot opens what goes past a pooler, where that can be: its settings belong
// to a session.
func (p *process) openHot(ctx context.Context, conns int32) (*pgxpool.Pool, error) {
	open := db.OpenHot
	if p.config.polls() {
		open = db.OpenPooled
	}
	return open(ctx, p.config.direct(), func(c *pgxpool.Config) { c.MaxConns = conns })
}

// close commits what was handed over, tells of it, disconnects and sends the
// last spans.
func (p *process) close() {
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.runs.Close()
		p.stopBus()
		<-p.busDone
		p.closePools()
	}()
	select {
	case <-done:
	case <-time.After(closeWithin):
		p.log.Warn("the database did not take the last changes in time")
	}
	p.traces.close(p.log)
}

func (p *process) closePools() {
	if p.hot != nil {
		p.hot.Close()
	}
	if p.pool != nil {
		p.pool.Close()
	}
}

// awaitDatabase returns when the database has a schema that this binary works
// with, and it is known what is in front of it. It waits a while for a database
// that is not up.
func awaitDatabase(ctx context.Context, c *config, log *slog.Logger) error {
	ctx, cancel := context.WithTimeout(ctx, connectWithin)
	defer cancel()
	for told := false; ; {
		schema, err := db.Inspect(ctx, c.direct())
		if err == nil {
			if err := schema.Usable(); err != nil {
				return err
			}
			if schema.Exact() != nil {
				log.Warn("the schema is another release's, and serves this one", "range", schema.Range())
			}
			err = c.findPooler(ctx, log)
		}
		switch {
		case err == nil:
			return nil
		case !isAway(err) || ctx.Err() != nil:
			return fmt.Errorf("database: %w", err)
		}
		if !told {
			told = true
			log.Warn("waiting for the database", "error", err)
		}
		select {
		case <-time.After(connectRetry):
		case <-ctx.Done():
			if cause := context.Cause(ctx); errors.Is(cause, errStopping) {
				return cause
			}
			return fmt.Errorf("database: %w", err)
		}
	}
}

// isAway says whether err means that Postgres cannot be reached at the moment,
// rather than that it refuses us.
func isAway(err error) bool {
	var answer *pgconn.PgError
	if errors.As(err, &answer) {
		switch answer.Code {
		case "57P01", "57P02", "57P03", "53300": // shutting down, crashed, starting up, too many connections
			return true
		}
		return answer.Code[:2] == "08"
	}
	return true
}
