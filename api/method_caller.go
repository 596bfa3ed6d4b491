package api

import (
	"context"
	"fmt"
)

// Scopes is a set of scopes: what a token may do, or where a method is served.
type Scopes uint8

// The scopes. ScopeAll stands for every one; ScopeAdmin does not include
// ScopeRPC. ScopeRead allows what ScopeAdmin does to methods that only read.
const (
	ScopeRPC Scopes = 1 << iota
	ScopeAdmin
	ScopeRead
	ScopeAll
)

var scopeNames = [...]string{"rpc", "admin", "read", "*"}

// ParseScopes reads the names of scopes. Error: *InvalidError for a name that
// is none.
func ParseScopes(names []string) (Scopes, error) {
	var s Scopes
next:
	for i, name := range names {
		for bit, known := range scopeNames {
			if name == known {
				s |= 1 << bit
				continue next
			}
		}
		return 0, &InvalidError{Field: fmt.Sprintf("scopes[%d]", i), Reason: "invalid", Message: "must be one of rpc, admin, read, *"}
	}
	return s, nil
}

// Names returns the scopes by name, in the order of their constants.
func (s Scopes) Names() []string {
	var names []string
	for bit, name := range scopeNames {
		if s&(1<<bit) != 0 {
			names = append(names, name)
		}
	}
	return names
}

// Has reports whether s allows at least one of wanted.
func (s Scopes) Has(wanted Scopes) bool {
	return s&(wanted|ScopeAll) != 0
}

// Caller is who makes a call.
type Caller struct {
	TenantID string
	TokenID  string
	Scopes   Scopes
}

type callerKey struct{}

// withCaller returns a context of calls made by c, which must not change.
func withCaller(ctx context.Context, c *Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// callerFrom returns who makes a call. It is never nil: without withCaller it
// is nobody, who has no scope.
func callerFrom(ctx context.Context) *Caller {
	if c, ok := ctx.Value(callerKey{}).(*Caller); ok {
		return c
	}
	return &nobody
}

var nobody Caller

type adminRouteKey struct{}

// onAdminRoute reports whether a method that is on both routes is called on
// the admin one.
func onAdminRoute(ctx context.Context) bool {
	return ctx.Value(adminRouteKey{}) != nil
}
