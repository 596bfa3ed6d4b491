package rpc

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"time"
)

// The error codes of the contract.
const (
	ParseError          = -32700 // not JSON, invalid UTF-8
	InvalidRequest      = -32600 // not a JSON-RPC 2.0 request, or too large
	MethodNotFound      = -32601
	InvalidParams       = -32602 // data says which member and why
	InternalError       = -32603 // our fault, or a missing scope
	RateLimited         = -32000
	Unauthorized        = -32001
	IdempotencyConflict = -32009 // the key came before with other content
	SessionBusy         = -32010
	UnknownCall         = -32011
	ToolMismatch        = -32012
	PayloadTooLarge     = -32013
	Unavailable         = -32014 // database down, pod draining, queue full
	TurnFailed          = -32015
	StillRunning        = -32016
)

// Error is the error member of a response.
type Error struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
	// Data is any value that encodes as JSON; nil is left out.
	Data any `json:"data,omitempty"`

	// Status is the HTTP status of a response that is not part of a batch: 401,
	// 413, 429 or 503 (RC-19). 0 means 200.
	Status int `json:"-"`
	// RetryAfter goes out as the header of that name with 429 and 503, in whole
	// seconds and at least one.
	RetryAfter time.Duration `json:"-"`

	cause error  // what InternalError hides from the caller
	stack []byte // of a panic
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s (%d)", e.Message, e.Code)
}

// Unwrap returns what Internal was given: for the log, never for the caller.
func (e *Error) Unwrap() error {
	return e.cause
}

// Internal hides cause from the caller behind an id. Who answers the caller
// logs it once, under that id; a Server does.
func Internal(cause error) *Error {
	return &Error{
		Code:    InternalError,
		Message: "internal error",
		Data:    &internalData{ErrorID: fmt.Sprintf("%016x", rand.Uint64())},
		cause:   cause,
	}
}

type internalData struct {
	ErrorID string `json:"errorId"`
}

// ErrorID is the id that Internal gave the error, else empty.
func (e *Error) ErrorID() string {
	if data, ok := e.Data.(*internalData); ok {
		return data.ErrorID
	}
	return ""
}

// NotAuthorized answers a request without valid credentials: HTTP 401.
func NotAuthorized() *Error {
	return &Error{Code: Unauthorized, Message: "Unauthorized", Status: http.StatusUnauthorized}
}

// TooManyRequests answers a request beyond the rate: HTTP 429.
func TooManyRequests(retryAfter time.Duration) *Error {
	return &Error{Code: RateLimited, Message: "Rate limit exceeded", Status: http.StatusTooManyRequests, RetryAfter: retryAfter}
}

// NotAvailable answers while the database is down or the process drains: HTTP
// 503. A full queue is no such case; it is an Error with Status 0.
func NotAvailable(message string, retryAfter time.Duration) *Error {
	return &Error{Code: Unavailable, Message: message, Status: http.StatusServiceUnavailable, RetryAfter: retryAfter}
}

// Request is a request as a client writes it. A Server reads them without it.
type Request struct {
	JSONRPC string          `json:"jsonrpc"` // "2.0"
	ID      json.RawMessage `json:"id,omitempty"`
	Method  string          `json:"method"`
	Params  json.RawMessage `json:"params,omitempty"`
}

// Response is a response as a client reads it: Result or Error is set.
type Response struct {
	JSONRPC string          `json:"jsonrpc"`
	ID      json.RawMessage `json:"id"`
	Result  json.RawMessage `json:"result,omitempty"`
	Error   *Error          `json:"error,omitempty"`
}
