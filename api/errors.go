package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/puddle/v2"

	"github.com/weir-run/weir/api/rpc"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/jobs/agentcfg"
)

// InvalidError says what is wrong with which member of the params.
type InvalidError struct {
	// Field is the path of the member in params, as in "content.images[2].mime".
	// It is empty when params as a whole are meant.
	Field string
	// Reason is a word for programs. Decoding says "required", "invalid",
	// "too_large", "unknown" or "duplicate"; handlers add theirs.
	Reason string
	// Message says it for people; it follows the field: "must be a string".
	// Empty means that the reason says enough.
	Message string
}

func (e *InvalidError) Error() string {
	field := e.Field
	if field == "" {
		field = "params"
	}
	if e.Message == "" {
		return field + ": " + e.Reason
	}
	return field + " " + e.Message
}

func (e *InvalidError) data() any {
	return struct {
		Field  string `json:"field"`
		Reason string `json:"reason"`
	}{e.Field, e.Reason}
}

// within returns err with its field, if it has one to say, inside that of an
// object or list: "text" within "content" is "content.text".
func within(field string, err error) error {
	e, ok := errors.AsType[*InvalidError](err)
	if !ok {
		return fmt.Errorf("%s: %w", field, err)
	}
	inner := *e
	switch {
	case e.Field == "":
		inner.Field = field
	case e.Field[0] == '[':
		inner.Field = field + e.Field
	default:
		inner.Field = field + "." + e.Field
	}
	return &inner
}

// NotFoundError says that the caller's tenant has no such object.
type NotFoundError struct {
	Kind string // "run", "session", …
	ID   string // as the caller wrote it
}

func (e *NotFoundError) Error() string {
	return fmt.Sprintf("%s not found: %s", e.Kind, e.ID)
}

// UnknownMethodError says that there is no such method.
type UnknownMethodError struct {
	Name string
}

func (e *UnknownMethodError) Error() string {
	return "method not found: " + e.Name
}

// OperatorError says that a method is for tokens of the operators' tenant.
type OperatorError struct{}

func (*OperatorError) Error() string {
	return "Insufficient scope: requires a token of tenant 'default'"
}

// ScopeError says that the caller lacks a scope.
type ScopeError struct {
	Scope string
}

func (e *ScopeError) Error() string {
	return fmt.Sprintf("Insufficient scope: requires '%s'", e.Scope)
}

// TurnFailedError says that a turn ended in agent.error.
type TurnFailedError struct {
	Kind            string     `json:"kind"`
	Message         string     `json:"message"`
	Reason          string     `json:"reason,omitempty"`
	Retryable       bool       `json:"retryable"`
	Partial         string     `json:"partial"`
	TokensUsed      TokensUsed `json:"tokensUsed"`
	RunID           string     `json:"runId"`
	TurnID          string     `json:"turnId"`
	ConversationRef string     `json:"conversationRef"`
}

func (e *TurnFailedError) Error() string { return "turn failed: " + e.Kind + ": " + e.Message }

// StillRunningError says that a wait ended before its turn did. The turn goes
// on.
type StillRunningError struct {
	RunID           string        `json:"runId"`
	TurnID          string        `json:"turnId"`
	ConversationRef string        `json:"conversationRef"`
	Phase           string        `json:"phase"`
	PendingCalls    []PendingCall `json:"pendingCalls"` // never nil
}

func (e *StillRunningError) Error() string { return "the turn is still running: " + e.Phase }

// retryAfter is when a caller may ask again that was refused for want of a
// database, or of a process that takes calls.
const retryAfter = time.Second

// unavailable reports whether the database could not be asked.
func unavailable(err error) bool {
	if errors.Is(err, jobs.ErrClosed) || errors.Is(err, context.DeadlineExceeded) {
		return true
	}
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return true
	}
	if e, ok := errors.AsType[*pgconn.PgError](err); ok {
		switch e.Code[:2] {
		case "08", "53", "57", "58": // connection, resources, shutdown, system
			return true
		}
		return e.Code == "25006" // read-only: a failover
	}
	if _, ok := errors.AsType[net.Error](err); ok {
		return true
	}
	for _, gone := range []error{io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, puddle.ErrClosedPool} {
		if errors.Is(err, gone) {
			return true
		}
	}
	_, ok := errors.AsType[*jobs.UnavailableError](err)
	return ok || pgconn.SafeToRetry(err)
}

// wireError gives err its code and what the caller may read of it. It is the
// only place that does. A type without a case is our fault: the caller gets an
// error id, and who answers logs the error under it.
func wireError(err error) *rpc.Error {
	if e, ok := errors.AsType[*rpc.Error](err); ok {
		return e
	}
	if e, ok := errors.AsType[*InvalidError](err); ok {
		return &rpc.Error{Code: rpc.InvalidParams, Message: e.Error(), Data: e.data()}
	}
	if e, ok := errors.AsType[*NotFoundError](err); ok {
		return &rpc.Error{Code: rpc.InvalidParams, Message: e.Error(), Data: struct {
			Kind   string `json:"kind"`
			Reason string `json:"reason"`
		}{e.Kind, "not_found"}}
	}
	if _, ok := errors.AsType[*UnknownMethodError](err); ok {
		return &rpc.Error{Code: rpc.MethodNotFound, Message: "Method not found"}
	}
	if e, ok := errors.AsType[*ScopeError](err); ok {
		return &rpc.Error{Code: rpc.InternalError, Message: e.Error()}
	}
	if e, ok := errors.AsType[*OperatorError](err); ok {
		return &rpc.Error{Code: rpc.InternalError, Message: e.Error()}
	}
	if e := wireJobsError(err); e != nil {
		return e
	}
	if e, ok := errors.AsType[*agentcfg.FieldError](err); ok {
		return wireError(&InvalidError{Field: e.Field, Reason: string(e.Reason), Message: e.Message})
	}
	if e, ok := errors.AsType[*TurnFailedError](err); ok {
		return &rpc.Error{Code: rpc.TurnFailed, Message: e.Error(), Data: e}
	}
	if e, ok := errors.AsType[*StillRunningError](err); ok {
		return &rpc.Error{Code: rpc.StillRunning, Message: e.Error(), Data: e}
	}
	if unavailable(err) {
		return rpc.NotAvailable("database unavailable", retryAfter)
	}
	return rpc.Internal(err)
}

// wireJobsError is wireError for the errors of the state machine; nil for
// others.
func wireJobsError(err error) *rpc.Error {
	if e, ok := errors.AsType[*jobs.BusyError](err); ok {
		return &rpc.Error{Code: rpc.SessionBusy, Message: e.Error(), Data: struct {
			Queued    int  `json:"queued"`
			Retryable bool `json:"retryable"`
		}{e.Queued, true}}
	}
	if e, ok := errors.AsType[*jobs.FullError](err); ok {
		full := rpc.NotAvailable(e.Error(), retryAfter)
		full.Data = struct {
			Queue     string `json:"queue"`
			Retryable bool   `json:"retryable"`
		}{e.Queue, true}
		return full
	}
	if e, ok := errors.AsType[*jobs.ConflictError](err); ok {
		return &rpc.Error{Code: rpc.IdempotencyConflict, Message: e.Error()}
	}
	if e, ok := errors.AsType[*jobs.SessionAgentError](err); ok {
		return wireError(&InvalidError{Field: "agentId", Reason: "session_agent_mismatch", Message: fmt.Sprintf("must be %q: its session is bound to that agent", e.Agent)})
	}
	if e, ok := errors.AsType[*jobs.TaskEndedError](err); ok {
		return wireError(&InvalidError{Field: "sessionId", Reason: "task_ended", Message: "names a task that is " + e.Status})
	}
	if e, ok := errors.AsType[*jobs.StateError](err); ok {
		return wireError(&InvalidError{Field: "runId", Reason: "invalid_state", Message: fmt.Sprintf("names a run that is %s, not %s", e.State, e.Want)})
	}
	if e, ok := errors.AsType[*jobs.NotFoundError](err); ok {
		return wireError(&NotFoundError{e.Kind, e.ID})
	}
	return nil
}
