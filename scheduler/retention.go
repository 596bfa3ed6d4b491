package scheduler

import (
	"context"
	"encoding/binary"
	"time"

	"github.com/google/uuid"

	"github.com/weir-run/weir/db"
)

// Retention says how long what has ended is kept; 0 keeps it for ever.
// Sessions, their events and messages, and what calls have cost are kept.
type Retention struct {
	Runs time.Duration // finished runs with their steps
}

const (
	purgeRows   = 1000                  // of one statement
	purgePause  = 50 * time.Millisecond // between statements, for everyone else
	purgeWithin = 10 * time.Second      // of one statement
	keptKeys    = 24 * time.Hour        // idempotency keys: a promise, no setting
	keptWorkers = 7 * 24 * time.Hour    // rows of workers that are gone
)

// keepSmall deletes what nobody needs any more, once a minute.
func (s *Sweeper) keepSmall(ctx context.Context) {
	for {
		s.purge(ctx)
		if !pause(ctx, purgeEvery) {
			return
		}
	}
}

func (s *Sweeper) purge(ctx context.Context) {
	s.batches(ctx, "idempotency keys", func(ctx context.Context) (bool, error) {
		n, err := s.queries.IdempotencyPurge(ctx, s.pool, db.IdempotencyPurgeParams{KeptMs: keptKeys.Milliseconds(), MaxRows: purgeRows})
		return n == purgeRows, err
	})
	s.batches(ctx, "workers", func(ctx context.Context) (bool, error) {
		return false, s.queries.WorkerPurge(ctx, s.pool, keptWorkers.Milliseconds())
	})
	if s.retention.Runs > 0 {
		s.purgeRuns(ctx)
	}
}

// purgeRuns goes through the runs from the oldest on: their ids are in the
// order of their making, so no index of their ends is needed. What is old and
// not ended is passed over.
func (s *Sweeper) purgeRuns(ctx context.Context) {
	now, err := s.queries.ClockNow(ctx, s.pool)
	if err != nil {
		s.log.Warn("purge runs", "error", err)
		return
	}
	after, before := uuid.UUID{}, idAt(now.Add(-s.retention.Runs))
	s.batches(ctx, "runs", func(ctx context.Context) (more bool, err error) {
		rows, err := s.queries.RunOld(ctx, s.pool, db.RunOldParams{
			AfterID: after, BeforeID: before, KeptMs: s.retention.Runs.Milliseconds(), MaxRows: purgeRows,
		})
		if err != nil || len(rows) == 0 {
			return false, err
		}
		after = rows[len(rows)-1].ID
		var old []uuid.UUID
		for _, r := range rows {
			if r.Purge {
				old = append(old, r.ID)
			}
		}
		if len(old) > 0 { // first the steps: whoever dies between the two begins with the run again
			if err := s.queries.StepDelete(ctx, s.pool, old); err != nil {
				return false, err
			}
			if err := s.queries.RunDelete(ctx, s.pool, old); err != nil {
				return false, err
			}
		}
		return len(rows) == purgeRows, nil
	})
}

// idAt is the least UUIDv7 of a moment.
func idAt(t time.Time) (id uuid.UUID) {
	binary.BigEndian.PutUint64(id[:8], uint64(t.UnixMilli())<<16)
	id[6] = 0x70
	return id
}

// batches repeats a delete while it says that there is more.
func (s *Sweeper) batches(ctx context.Context, what string, f func(context.Context) (more bool, err error)) {
	for {
		limited, cancel := context.WithTimeout(ctx, purgeWithin)
		more, err := f(limited)
		cancel()
		if err != nil && ctx.Err() == nil {
			s.log.Warn("purge", "what", what, "error", err)
		}
		if err != nil || !more || !pause(ctx, purgePause) {
			return
		}
	}
}
