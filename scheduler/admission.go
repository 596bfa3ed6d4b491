package scheduler

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

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
	direct *pgx.ConnConfig
	runs   *jobs.Runs
	log    *slog.Logger
}

// NewAdmission makes the duty; Run does it.
func NewAdmission(direct *pgx.ConnConfig, runs *jobs.Runs, log *slog.Logger) *Admission {
	return &Admission{direct: db.HotConfig(direct), runs: runs, log: log}
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
		err := a.session(ctx, ready)
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
		if next < jobs.IdleRound { // something waits anyhow
			if !pause(ctx, next) {
				return context.Cause(ctx)
			}
			continue
		}
		t := time.NewTimer(next)
		select {
		case <-t.C:
		case <-ready:
			t.Stop()
		case <-ctx.Done():
			t.Stop()
			return context.Cause(ctx)
		}
	}
}
