package api

import (
	"errors"
	"fmt"

	"github.com/weir-run/weir/api/rpc"
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

// ScopeError says that the caller lacks a scope.
type ScopeError struct {
	Scope string
}

func (e *ScopeError) Error() string {
	return fmt.Sprintf("Insufficient scope: requires '%s'", e.Scope)
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
	return rpc.Internal(err)
}
