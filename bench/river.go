package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// riverTemplate is a database with River's tables and those of the hand-built
// designs.
const riverTemplate = "template_river"

// handTables: run is what an accept stores and a claim changes; step and
// message are what a turn writes. run.accepted names the accepting
// transaction, whose commit the server has noted.
const handTables = `
CREATE TABLE run (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    state text NOT NULL DEFAULT 'queued',
    payload jsonb,
    accepted xid8 NOT NULL DEFAULT pg_current_xact_id(),
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX run_queued ON run (id) WHERE state = 'queued';
CREATE TABLE step (run bigint, seq int, payload jsonb, at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (run, seq));
CREATE TABLE message (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, run bigint, role text, body text, at timestamptz NOT NULL DEFAULT now());
`

func (b *bench) riverDatabase(ctx context.Context) (*database, error) {
	if err := b.makeRiverTemplate(ctx); err != nil {
		return nil, err
	}
	return b.pg.clone(ctx, riverTemplate)
}

func (b *bench) makeRiverTemplate(ctx context.Context) error {
	return b.pg.template(ctx, riverTemplate, "", func(url string) error {
		pool, err := openPool(ctx, url, 2)
		if err != nil {
			return err
		}
		defer pool.Close()
		migrator, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Logger: quiet})
		if err != nil {
			return err
		}
		if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
			return err
		}
		_, err = pool.Exec(ctx, handTables)
		return err
	})
}

// handTurn is the job of a hand-built turn.
type handTurn struct {
	Run int64 `json:"run"`
}

func (handTurn) Kind() string { return "turn" }

type riverClient = river.Client[pgx.Tx]

// River's default cooldown caps a worker far below what the machine can do, and
// an inserting client notifies no more often than its own.
const (
	defaultCooldown  = 100 * time.Millisecond
	shortestCooldown = time.Millisecond
)

// newInserter is a client that inserts only.
func newInserter(pool *pgxpool.Pool, cooldown time.Duration) (*riverClient, error) {
	return river.NewClient(riverpgxv5.New(pool), &river.Config{FetchCooldown: cooldown, Logger: quiet})
}

// newWorker is a client that works one queue, so many jobs at once.
func newWorker[A river.JobArgs](pool *pgxpool.Pool, queue string, width int, work func(context.Context, *river.Job[A]) error) (*riverClient, error) {
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(work))
	return river.NewClient(riverpgxv5.New(pool), &river.Config{
		Queues: map[string]river.QueueConfig{queue: {MaxWorkers: width}}, Workers: workers,
		FetchCooldown: shortestCooldown, JobTimeout: time.Hour, Logger: quiet,
	})
}
