package jobs

import (
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/weir-run/weir/db"
)

var (
	// ErrNotQueued answers a claim whose run is not there to be claimed: a
	// spare nudge, or one for a run that is not admitted.
	ErrNotQueued = errors.New("run is not queued")
	// ErrFenced answers a write under an old epoch: another worker owns the
	// run, or it has ended. The loser writes nothing more.
	ErrFenced = errors.New("run is owned by another epoch")
	// ErrLookAgain answers a park that would sleep over an event, and an answer
	// or a spawn that a cancel came before: the run is still the caller's, and
	// something changed since it looked.
	ErrLookAgain = errors.New("run was woken or cancelled meanwhile")
	// ErrWorkerGone answers a claim by a worker that was declared dead or is
	// draining.
	ErrWorkerGone = errors.New("worker may not claim")
	// ErrUnknownOutcome answers a caller who, or whose committer, could not wait
	// until the outcome of a commit was known. It may have happened, or may yet.
	ErrUnknownOutcome = errors.New("outcome of a commit is unknown")
	// ErrClosed answers whatever is handed to a committer that has stopped.
	ErrClosed = errors.New("committer is closed")

	errRequeue       = errors.New("op goes into the next unit") // one unit changes one thing once
	errRowHeld       = errors.New("row is held by another transaction")
	errSessionExists = errors.New("session exists already")
)

// BusyError refuses a turn because its session's queue is full.
type BusyError struct {
	Queued int
}

func (e *BusyError) Error() string {
	return fmt.Sprintf("session is busy: %d turns wait already", e.Queued)
}

// FullError refuses a turn because as many runs wait for admission to its
// queue as an operator allows.
type FullError struct {
	Queue string
}

func (e *FullError) Error() string { return fmt.Sprintf("queue %q is full", e.Queue) }

// ConflictError refuses an idempotency key that was used with other content.
type ConflictError struct {
	Key string
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("idempotency key %q was used with other content", e.Key)
}

// SessionAgentError refuses a turn of another agent than its session's.
type SessionAgentError struct {
	Agent string
}

func (e *SessionAgentError) Error() string {
	return fmt.Sprintf("session belongs to agent %q", e.Agent)
}

// TaskEndedError refuses a message to an Agentex task that has ended.
type TaskEndedError struct {
	ID     uuid.UUID
	Status string
}

func (e *TaskEndedError) Error() string {
	return fmt.Sprintf("Task %s is %s", e.ID, e.Status)
}

// NotFoundError names a missing object, or another tenant's.
type NotFoundError struct {
	Kind, ID string
}

func (e *NotFoundError) Error() string { return fmt.Sprintf("%s %s does not exist", e.Kind, e.ID) }

// StateError refuses what a run's state does not allow.
type StateError struct {
	ID    uuid.UUID
	State db.RunState
	Want  string
}

func (e *StateError) Error() string {
	return fmt.Sprintf("run %s is %s, not %s", e.ID, e.State, e.Want)
}

// UnavailableError says that the database could not take a change in time.
// Nothing of it is stored.
type UnavailableError struct {
	After time.Duration
	Err   error
}

func (e *UnavailableError) Error() string {
	return fmt.Sprintf("database unavailable for %s: %v", e.After, e.Err)
}

func (e *UnavailableError) Unwrap() error { return e.Err }
