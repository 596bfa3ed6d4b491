package workers

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/google/uuid"
)

var (
	errCancelRequested = errors.New("a caller cancelled the run")
	errNotOurs         = errors.New("another worker owns the run")
	errTurnTimeout     = errors.New("the turn passed its deadline")
	errDrained         = errors.New("the worker drains")
)

// held are the runs in a worker's hands.
type held struct {
	mu   sync.Mutex
	runs map[uuid.UUID]*holding
}

type holding struct {
	epoch  int32
	since  time.Time
	cancel context.CancelCauseFunc
}

func (h *held) add(id uuid.UUID, epoch int32, cancel context.CancelCauseFunc) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.runs[id] = &holding{epoch, time.Now(), cancel}
}

func (h *held) remove(id uuid.UUID, epoch int32) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if r := h.runs[id]; r != nil && r.epoch == epoch {
		delete(h.runs, id)
	}
}

func (h *held) len() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.runs)
}

func (h *held) has(id uuid.UUID) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.runs[id] != nil
}

// interrupt cancels one run's work.
func (h *held) interrupt(id uuid.UUID, cause error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if r := h.runs[id]; r != nil {
		r.cancel(cause)
	}
}

// missing cancels what was held before the database was asked and is not
// among what it says we hold, and returns what it says and we do not hold.
func (h *held) missing(asked time.Time, ours map[uuid.UUID]bool) (unknown []uuid.UUID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, r := range h.runs {
		if !ours[id] && r.since.Before(asked) {
			r.cancel(errNotOurs)
		}
	}
	for id := range ours {
		if h.runs[id] == nil {
			unknown = append(unknown, id)
		}
	}
	return unknown
}

// all cancels everything.
func (h *held) all(cause error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range h.runs {
		r.cancel(cause)
	}
}
