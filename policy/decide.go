package policy

import "strconv"

// The names of the rules, as audit and error results carry them.
const (
	RuleAllowList  = "allow_list"
	RuleCapability = "capability"
)

// AllowList is the set of tools an agent has. The zero value allows nothing.
// It is not changed after it was made, so that it needs no lock.
type AllowList struct{ names map[string]struct{} }

// NewAllowList returns the list of names.
func NewAllowList(names ...string) AllowList {
	list := AllowList{names: make(map[string]struct{}, len(names))}
	for _, name := range names {
		list.names[name] = struct{}{}
	}
	return list
}

// Has reports whether name is on the list.
func (l AllowList) Has(name string) bool {
	_, ok := l.names[name]
	return ok
}

// Facts are all that a decision depends on.
type Facts struct {
	// Tool is weir's name of the tool to be called.
	Tool string
	// Allowed are the agent's tools.
	Allowed AllowList
	// Needs is the capability that the tool declares; NoCapability for a tool
	// that touches nothing but the facts of its own scope.
	Needs Capability
	// Held are the capabilities in force: the profile's, narrowed by the agent.
	Held Capabilities
}

// DeniedError is a decision against a call.
type DeniedError struct {
	Rule    string // which rule decided: allow_list, capability
	Message string // for the model and the audit log
}

func (e *DeniedError) Error() string { return "denied by " + e.Rule + ": " + e.Message }

// Decide returns nil when the call may be made, else a *DeniedError that names
// the first rule against it. The rules are tried in one order on every node:
// allow-list, deny-list, origin, capability, rules, quota, budget, breaker,
// approval. Those not listed here do not exist yet.
func Decide(f Facts) error {
	if !f.Allowed.Has(f.Tool) {
		return &DeniedError{RuleAllowList, "the agent has no tool " + quote(f.Tool)}
	}
	if f.Needs != NoCapability && !f.Held.Has(f.Needs) {
		return &DeniedError{RuleCapability, "tool " + quote(f.Tool) + " needs capability " + f.Needs.String() + ", which the agent does not hold"}
	}
	return nil
}

// quote bounds a name that a model may have invented: 64 bytes are the longest
// that a tool can have.
func quote(name string) string { return strconv.Quote(name[:min(len(name), 64)]) }
