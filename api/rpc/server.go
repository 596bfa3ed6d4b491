package rpc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"runtime/debug"
	"strconv"
	"sync"
	"time"
)

// Limits of a Server that sets none.
const (
	DefaultMaxBody  = 24 << 20 // RC-10
	DefaultMaxBatch = 50       // RC-17
)

// Dispatcher finds methods.
type Dispatcher interface {
	// Lookup finds the method called name for the caller in ctx. Its error is
	// answered before anything is said about params.
	Lookup(ctx context.Context, name string) (Handler, error)
}

// Handler is a method.
type Handler interface {
	// Accept runs a call, or as much of it as must happen in the order of the
	// calls: then it returns a Wait for the rest, and no result. It is called
	// for one member of a batch after the other.
	Accept(ctx context.Context, call *Call) (result any, wait Wait, err error)
}

// Wait waits for the result of an accepted call. It is called exactly once for
// each call that returned it; Waits of one batch run at the same time. When
// nobody waits for the result (a notification, a socket that closed), ctx is
// already cancelled, so that Wait can let go of what it holds.
type Wait func(ctx context.Context) (any, error)

// Call is one call of a method.
type Call struct {
	Method string
	// Params is an object, {} if the request had none. It is part of the body:
	// neither it nor a slice of it may be kept beyond the call and its Wait.
	Params json.RawMessage
	// IdempotencyKey is the header of that name. It is empty in a batch, where
	// it could not tell the members apart.
	IdempotencyKey string
	// Notification says that no answer will be sent.
	Notification bool
}

// Server answers messages. Its fields must not change once it is in use.
type Server struct {
	Dispatcher Dispatcher
	// MapError gives an error of the Dispatcher its code. Nil, or a nil result,
	// means that every error but *Error is Internal.
	MapError func(error) *Error
	// Log gets internal errors and panics; nil means slog.Default.
	Log *slog.Logger
	// MaxBody is the size in bytes of the largest HTTP body; 0 means
	// DefaultMaxBody.
	MaxBody int64
	// MaxBatch is the length of the longest batch; 0 means DefaultMaxBatch.
	MaxBatch int
}

var exchanges = sync.Pool{New: func() any { return newExchange() }}

// Accept parses a message and runs its calls up to their Waits, in order. It
// writes to body, which must stay untouched until Close. The key is that of
// Call.IdempotencyKey.
func (s *Server) Accept(ctx context.Context, body []byte, key string) *Exchange {
	x := exchanges.Get().(*Exchange)
	x.server = s
	x.accept(ctx, body, key)
	return x
}

// The values of headers are shared by all responses.
var (
	contentType = []string{"application/json"}
	noSniff     = []string{"nosniff"}
)

// ServeHTTP answers POST requests. The context of r holds the caller.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		http.Error(w, "JSON-RPC is spoken by POST", http.StatusMethodNotAllowed)
		return
	}
	x := exchanges.Get().(*Exchange)
	defer x.Close()
	x.server = s
	switch err := x.read(r, s.maxBody()); {
	case errors.Is(err, errTooLarge):
		// What was not read is not ours to skip: the connection is of no more use.
		w.Header().Set("Connection", "close")
		WriteError(w, &Error{
			Code:    InvalidRequest,
			Message: fmt.Sprintf("Request body over %d bytes", s.maxBody()),
			Status:  http.StatusRequestEntityTooLarge,
		})
		return
	case err != nil:
		WriteError(w, &Error{Code: ParseError, Message: "Request body ended early"})
		return
	}
	x.accept(r.Context(), x.body, r.Header.Get("Idempotency-Key"))
	answer := x.Answer(r.Context())
	if len(answer) == 0 {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	write(w, x.failure(), answer)
}

// WriteError answers a request that is refused before it is parsed, with id
// null.
func WriteError(w http.ResponseWriter, e *Error) {
	x := exchanges.Get().(*Exchange)
	defer x.Close()
	x.appendError(nil, e)
	write(w, e, x.out.Bytes())
}

// write sends an answer with the status of e, which may be nil.
func write(w http.ResponseWriter, e *Error, answer []byte) {
	header := w.Header()
	header["Content-Type"] = contentType
	header["X-Content-Type-Options"] = noSniff
	status := http.StatusOK
	if e != nil && e.Status != 0 {
		status = e.Status
		switch status {
		case http.StatusUnauthorized:
			header.Set("WWW-Authenticate", "Bearer")
		case http.StatusTooManyRequests, http.StatusServiceUnavailable:
			header.Set("Retry-After", retryAfter(e.RetryAfter))
		}
	}
	if len(answer) > 2048 { // below that net/http counts by itself
		header.Set("Content-Length", strconv.Itoa(len(answer)))
	}
	w.WriteHeader(status)
	w.Write(answer) // an error means that the client is gone: nobody is left to tell
}

func retryAfter(d time.Duration) string {
	return strconv.Itoa(max(1, int(math.Ceil(d.Seconds()))))
}

func (s *Server) maxBody() int64 {
	if s.MaxBody > 0 {
		return s.MaxBody
	}
	return DefaultMaxBody
}

func (s *Server) maxBatch() int {
	if s.MaxBatch > 0 {
		return s.MaxBatch
	}
	return DefaultMaxBatch
}

// toError gives err its code and logs what the caller is not told.
func (s *Server) toError(ctx context.Context, method string, err error) *Error {
	e, ok := errors.AsType[*Error](err)
	if !ok && s.MapError != nil {
		e = s.MapError(err)
	}
	if e == nil {
		e = Internal(err)
	}
	if e.cause != nil {
		s.log(ctx, method, e)
	}
	return e
}

func (s *Server) log(ctx context.Context, method string, e *Error) {
	log := s.Log
	if log == nil {
		log = slog.Default()
	}
	level := slog.LevelError
	if ctx.Err() != nil && errors.Is(e.cause, context.Canceled) {
		level = slog.LevelDebug // the client left
	}
	attrs := []slog.Attr{
		slog.String("errorId", e.ErrorID()),
		slog.String("method", method),
		slog.Any("error", e.cause),
	}
	if e.stack != nil {
		attrs = append(attrs, slog.String("stack", string(e.stack)))
	}
	log.LogAttrs(ctx, level, "rpc: internal error", attrs...)
}

// recovered turns a panic into an internal error. It is deferred.
func recovered(err *error) {
	if r := recover(); r != nil {
		e := Internal(fmt.Errorf("panic: %v", r))
		e.stack = debug.Stack()
		*err = e
	}
}
