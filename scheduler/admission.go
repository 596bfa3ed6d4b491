package scheduler

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
)

const (
	admissionKey   = -7_301_003
	admissionHangs = 3 * time.Second // without a question of the one who admits
	roundWithin    = 10 * time.Second
)

// Admission admits what waits, on one process at a time.
type Admission struct {
	pool   *pgxpool.Pool
	direct *pgx.ConnConfig
	runs   *jobs.Runs
	log    *slog.Logger
}

// NewAdmission makes the duty; Run does it. With nil for direct, where a pooler
// is in the way, each round is a transaction of its own.
func NewAdmission(pool *pgxpool.Pool, direct *pgx.ConnConfig, runs *jobs.Runs, log *slog.Logger) *Admission {
	if direct != nil {
		direct = db.HotConfig(direct)
	}
	return &Admission{pool: pool, direct: direct, runs: runs, log: log}
}

// Run admits, or stands by, until ctx ends.
func (a *Admission) Run(ctx context.Context) {
	ready := make(chan struct{}, 1)
	defer a.runs.Ready(func() {
		select {
		case ready <- struct{}{}:
		default:
		}
	})()
	for ctx.Err() == nil {
		session := a.session
		if a.direct == nil {
			session = a.terms
		}
		err := session(ctx, ready)
		if ctx.Err() != nil {
			return
		}
		a.log.Debug("admission connection", "error", err)
		pause(ctx, electEvery)
	}
}

// session is one connection: the election and the rounds share it, so that
// nobody admits who does not lead.
func (a *Admission) session(ctx context.Context, ready <-chan struct{}) error {
	conn, err := pgx.ConnectConfig(ctx, a.direct)
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(closing)
	}()
	if err := db.RegisterTypes(ctx, conn); err != nil {
		return err
	}
	var looked time.Time // for a leader that hangs
	for {
		look := time.Since(looked) > standBy
		if look {
			looked = time.Now()
		}
		asking, cancel := context.WithTimeout(ctx, roundWithin)
		leads, err := elect(asking, conn, admissionKey, admissionHangs, look)
		cancel()
		switch {
		case err != nil:
			return err
		case leads:
			return a.lead(ctx, conn, ready)
		case !pause(ctx, electEvery):
			return context.Cause(ctx)
		}
	}
}

// lead does round after round: the next at its time, or when something begins
// to wait.
func (a *Admission) lead(ctx context.Context, conn *pgx.Conn, ready <-chan struct{}) error {
	admitter := a.runs.NewAdmitter()
	for {
		asking, cancel := context.WithTimeout(ctx, roundWithin)
		next, err := admitter.Round(asking, conn)
		cancel()
		if err != nil {
			return err
		}
		if err := untilNext(ctx, next, ready); err != nil {
			return err
		}
	}
}

// untilNext waits for the next round.
func untilNext(ctx context.Context, next time.Duration, ready <-chan struct{}) error {
	if next < jobs.IdleRound { // something waits anyhow
		ready = nil
	}
	t := time.NewTimer(next)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ready:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

// terms is session through a pooler.
func (a *Admission) terms(ctx context.Context, ready <-chan struct{}) error {
	t := newTerm(a.pool, "admission", admissionKey)
	defer t.leave(ctx)
	var admitter *jobs.Admitter
	for {
		leads, err := t.leads(ctx)
		if err != nil {
			return err
		}
		if !leads {
			admitter = nil // what it knew is soon old
			if !pause(ctx, electEvery) {
				return context.Cause(ctx)
			}
			continue
		}
		if admitter == nil {
			admitter = a.runs.NewAdmitter()
		}
		next, err := a.roundWithin(ctx, admitter)
		if err != nil {
			return err
		}
		if err := untilNext(ctx, next, ready); err != nil {
			return err
		}
	}
}

func (a *Admission) roundWithin(ctx context.Context, admitter *jobs.Admitter) (next time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, roundWithin)
	defer cancel()
	conn, err := a.pool.Acquire(ctx)
	if err != nil {
		return 0, err
	}
	defer conn.Release() // closes what a round that failed left open
	return admitter.RoundUnder(ctx, conn.Conn(), admissionKey)
}
