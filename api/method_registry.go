package api

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"

	"github.com/weir-run/weir/api/rpc"
	"github.com/weir-run/weir/db"
)

// Registry holds the methods of the API and finds the one a caller asks for.
// It is the rpc.Dispatcher; its errors are for wireError. rpc.discover, which
// describes the others, is always part of it.
//
// The order of what is refused: an unknown method, a missing scope, bad
// params. Credentials were looked at before.
type Registry struct {
	methods  []*Method // as declared
	byName   map[string]*served
	openRPC  func() (json.RawMessage, error)
	repeated Repeated
}

// served is a method of a registry.
type served struct {
	*Method
	registry *Registry
}

// KeyedCall is a call with an idempotency key, whose params were checked.
type KeyedCall struct {
	Method *Method
	// Params are those of rpc.Call.
	Params json.RawMessage
	// IdempotencyKey is the member of params, else the header; never empty.
	IdempotencyKey string
}

// Repeated runs a call that comes with an idempotency key, or answers it as it
// was answered before. It gets the calls of methods that change something and
// have no member idempotencyKey of their own.
type Repeated func(ctx context.Context, call *KeyedCall, run func(context.Context) (any, rpc.Wait, error)) (any, rpc.Wait, error)

// NewRegistry makes a registry. It panics if a name is used twice.
func NewRegistry(methods ...Method) *Registry {
	r := &Registry{byName: make(map[string]*served, len(methods)+1)}
	r.openRPC = sync.OnceValues(r.document)
	for _, m := range methods {
		r.add(m)
	}
	r.add(Define("rpc.discover", ScopeRPC, "Describes the methods of this server as an OpenRPC document.", r.discover, Ours, ReadOnly))
	return r
}

// OnRepeat sets what runs calls with an idempotency key. It must be called
// before the registry is used; without it such calls run as the others do.
func (r *Registry) OnRepeat(f Repeated) {
	r.repeated = f
}

func (r *Registry) add(m Method) {
	if _, ok := r.byName[m.Name]; ok {
		panic(fmt.Sprintf("api: method %s is declared twice", m.Name))
	}
	r.byName[m.Name] = &served{Method: &m, registry: r}
	r.methods = append(r.methods, &m)
}

// Methods returns the methods in the order they were declared.
func (r *Registry) Methods() []*Method {
	return r.methods
}

// Method returns a method by name, whatever its scopes, or nil.
func (r *Registry) Method(name string) *Method {
	if m, ok := r.byName[name]; ok {
		return m.Method
	}
	return nil
}

// Lookup finds a method for the caller of ctx. Errors: *UnknownMethodError,
// *ScopeError.
func (r *Registry) Lookup(ctx context.Context, name string) (rpc.Handler, error) {
	m, ok := r.byName[name]
	if !ok || m.Scopes == 0 {
		return nil, &UnknownMethodError{name}
	}
	if !m.allows(callerFrom(ctx).Scopes) {
		return nil, &ScopeError{m.Scopes.Names()[0]}
	}
	return m, nil
}

// allows reports whether a caller with these scopes may call the method.
func (m *Method) allows(caller Scopes) bool {
	return caller.Has(m.Scopes) || m.readBy(caller)
}

// readBy reports whether scope read opens the admin route to the caller.
func (m *Method) readBy(caller Scopes) bool {
	return m.ReadOnly && m.Scopes&ScopeAdmin != 0 && caller&ScopeRead != 0
}

// Accept runs a call of the method, up to its wait.
func (m *served) Accept(ctx context.Context, call *rpc.Call) (any, rpc.Wait, error) {
	if m.Fleet && callerFrom(ctx).TenantID != db.DefaultTenant {
		return nil, nil, &OperatorError{}
	}
	params, key, err := m.bind(call.Params, call.IdempotencyKey)
	if err != nil {
		return nil, nil, err
	}
	if m.Scopes == ScopeRPC|ScopeAdmin {
		caller := callerFrom(ctx).Scopes
		if caller.Has(ScopeAdmin) || !caller.Has(ScopeRPC) && m.readBy(caller) {
			ctx = context.WithValue(ctx, adminRouteKey{}, true)
		}
	}
	if key != "" && !m.ReadOnly && m.registry.repeated != nil && !m.plan.hasKey() {
		c := &KeyedCall{Method: m.Method, Params: call.Params, IdempotencyKey: key}
		return m.registry.repeated(ctx, c, func(ctx context.Context) (any, rpc.Wait, error) {
			return m.invoke(ctx, params)
		})
	}
	return m.invoke(ctx, params)
}

// discover is the handler of rpc.discover.
func (r *Registry) discover(context.Context, *struct{}) (*json.RawMessage, error) {
	document, err := r.openRPC()
	if err != nil {
		return nil, err
	}
	return &document, nil
}
