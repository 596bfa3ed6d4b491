package workers

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/google/uuid"

	"github.com/weir-run/weir/jobs"
)

// RunSolitary carries one suspect, alone in its process: a member of the fleet
// with one slot and no queue. When the process dies the death is the run's
// own, and its last loss. It returns when the run has moved on.
func (w *Worker) RunSolitary(ctx, hard context.Context, id uuid.UUID) error {
	host, _ := os.Hostname()
	m, err := join(ctx, w.Pool, w.Direct, w.Log, w.Heartbeat, w.Lease, memberParams{
		Hostname: host, Version: w.Version, PID: os.Getpid(), Queues: []Queue{{jobs.QueueSuspect, 1}}, Slots: 1, Solitary: true,
	})
	if err != nil {
		return err
	}
	s := &seat{w: w, member: m, held: held{runs: map[uuid.UUID]*holding{}}}
	s.listen()
	s.wg.Add(1)
	go func() { defer s.wg.Done(); s.look() }()
	w.mu.Lock()
	w.id, w.seat = m.id, s
	w.mu.Unlock()
	w.onceOK.Do(func() { close(w.ready) })

	done := make(chan struct{})
	go func() {
		select {
		case <-ctx.Done():
			w.drain.Store(true)
			select {
			case <-hard.Done():
				s.held.all(errDrained)
			case <-done:
			}
		case <-done:
		}
	}()
	run, err := w.Runs.Claim(m.ctx, m.id, id)
	if err == nil {
		s.carry(run)
	}
	close(done)
	s.unbind()
	m.close(context.WithoutCancel(ctx))
	s.wg.Wait()
	if err != nil && !errors.Is(err, jobs.ErrNotQueued) {
		return fmt.Errorf("claim suspect %s: %w", id, err)
	}
	return nil
}
