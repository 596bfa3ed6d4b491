package api

import (
	"context"
	"encoding/json"
	"reflect"

	"github.com/weir-run/weir/api/rpc"
)

// Method is one method of the API: one Go declaration, from which come the
// decoding and validation of its params, its entry in the OpenRPC document and
// on the reference page, and the types of clients.
//
// Params are a struct whose tags say everything about each member:
//
//	type SessionSpawnParams struct {
//		Task     string `json:"task" jsonschema:"required,minLength=1" jsonschema_extras:"x-max-bytes=262144" jsonschema_description:"The run's instruction."`
//		MaxSteps int    `json:"max_steps" jsonschema:"minimum=0,maximum=1000" jsonschema_description:"Bounds the model calls; 0 means the agent's own limit."`
//	}
//
// The keywords are those of JSON Schema, as github.com/invopop/jsonschema
// reads them: required, minLength and maxLength (in characters), minimum,
// maximum, exclusiveMinimum, exclusiveMaximum, pattern, enum, minItems,
// maxItems and default, which is what the handler sees when the member is
// absent. x-max-bytes is ours. A keyword that would not be enforced makes
// Define panic. What tags cannot say goes into a method Validate() error, of
// the params or of the type of any member; it returns an *InvalidError whose
// field counts from there.
//
// Names match exactly. null is the same as absent, except for types that
// decode it themselves (json.RawMessage, any, json.Unmarshaler). Members that
// are not named are ignored, or refused by a Strict method; a field
// map[string]json.RawMessage with the tags json:"-" params:"rest" collects
// them.
//
// A member of the result is required unless its tag says omitempty or
// omitzero.
type Method struct {
	Name    string
	Scopes  Scopes // the routes it is served on; none means it is not for tokens
	Summary string // one sentence
	// Description is what else a caller must know, in Markdown.
	Description string
	Ours        bool // not in the published reference
	ReadOnly    bool // changes nothing
	Strict      bool // refuses members of params that it does not know
	Fleet       bool // for tokens of the operators' tenant only

	params, result reflect.Type
	plan           *plan

	newParams func() any // *P
	invoke    func(ctx context.Context, params any) (any, rpc.Wait, error)
}

// Option is a further property of a method.
type Option func(*Method)

// Ours marks a method that the published reference does not have.
func Ours(m *Method) { m.Ours = true }

// ReadOnly marks a method that changes nothing.
func ReadOnly(m *Method) { m.ReadOnly = true }

// Fleet marks a method that changes, or shows, what belongs to no tenant: only
// tokens of the tenant default, the operators', may call it.
func Fleet(m *Method) { m.Fleet = true }

// Strict makes a method refuse members of params that it does not know.
func Strict(m *Method) { m.Strict = true }

// Describe adds to the summary what else a caller must know, in Markdown.
func Describe(text string) Option {
	return func(m *Method) { m.Description = text }
}

// Define declares a method. The handler gets params that were checked. It
// panics if their type cannot be used.
func Define[P, R any](name string, scopes Scopes, summary string, h func(context.Context, *P) (*R, error), options ...Option) Method {
	m := declare[P, R](name, scopes, summary, options)
	m.invoke = func(ctx context.Context, params any) (any, rpc.Wait, error) {
		result, err := h(ctx, params.(*P))
		if err != nil {
			return nil, nil, err
		}
		return result, nil, nil
	}
	return m
}

// DefineWait declares a method that first accepts and then waits, as rpc.Wait
// says. The handler does all that has an effect; the wait it returns is called
// exactly once, with a context that may already be cancelled. A nil wait with
// a nil error is a bug.
func DefineWait[P, R any](name string, scopes Scopes, summary string, h func(context.Context, *P) (func(context.Context) (*R, error), error), options ...Option) Method {
	m := declare[P, R](name, scopes, summary, options)
	m.invoke = func(ctx context.Context, params any) (any, rpc.Wait, error) {
		wait, err := h(ctx, params.(*P))
		if err != nil {
			return nil, nil, err
		}
		return nil, func(ctx context.Context) (any, error) {
			result, err := wait(ctx)
			if err != nil {
				return nil, err
			}
			return result, nil
		}, nil
	}
	return m
}

func declare[P, R any](name string, scopes Scopes, summary string, options []Option) Method {
	m := Method{
		Name:      name,
		Scopes:    scopes,
		Summary:   summary,
		params:    reflect.TypeFor[P](),
		result:    reflect.TypeFor[R](),
		newParams: func() any { return new(P) },
	}
	for _, option := range options {
		option(&m)
	}
	m.plan = compile(m.params, m.Strict)
	return m
}

// bind decodes and checks params. The key is that of the Idempotency-Key
// header, or empty; the member idempotencyKey wins over it, and bind returns
// the one that counts. Error: *InvalidError.
func (m *Method) bind(params json.RawMessage, key string) (any, string, error) {
	p := m.newParams()
	key, err := m.plan.decode(params, reflect.ValueOf(p).Elem(), key)
	if err != nil {
		return nil, "", err
	}
	return p, key, nil
}
