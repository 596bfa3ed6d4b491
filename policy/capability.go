package policy

import (
	"encoding/json"
	"fmt"
	"strings"
)

// Capability is one right from a closed set. The zero value, NoCapability, is
// what a tool declares that needs none.
type Capability uint8

// The closed set of contract/behaviour.md §8. There is no wildcard.
const (
	NoCapability Capability = iota
	Read
	Web
	Write
	Analyze
	Spawn
	Graph
	Cron
	Skill
	Message
	Browse
	MCP
	capabilityEnd
)

// capabilityNames is indexed by Capability.
var capabilityNames = [capabilityEnd]string{
	"", "orch:read", "orch:web", "orch:write", "orch:analyze", "orch:spawn", "orch:graph",
	"orch:cron", "orch:skill", "orch:message", "orch:browse", "orch:mcp",
}

// String returns the name on the wire, "" for NoCapability.
func (c Capability) String() string {
	if c < capabilityEnd {
		return capabilityNames[c]
	}
	return fmt.Sprintf("capability(%d)", uint8(c))
}

// MarshalText implements encoding.TextMarshaler.
func (c Capability) MarshalText() ([]byte, error) {
	if c >= capabilityEnd {
		return nil, fmt.Errorf("unknown %s", c)
	}
	return []byte(capabilityNames[c]), nil
}

// ParseCapability reads a capability's name; "" is NoCapability. field is where
// the name stands and goes into the error, which is a *CapabilityError.
func ParseCapability(field, name string) (Capability, error) {
	for c, known := range capabilityNames {
		if known == name {
			return Capability(c), nil
		}
	}
	return NoCapability, &CapabilityError{Field: field, Name: name}
}

// CapabilityError reports a name outside the closed set.
type CapabilityError struct {
	Field string // where the name stands, such as "capabilities[1]"
	Name  string
}

func (e *CapabilityError) Error() string {
	return fmt.Sprintf("%s: unknown capability %.64q, want one of %s", e.Field, e.Name, strings.Join(capabilityNames[1:], ", "))
}

// Capabilities is a set of capabilities. The zero value is the empty set.
type Capabilities uint16

// CapabilitiesOf returns the set of cs. NoCapability and unknown ones are left out.
func CapabilitiesOf(cs ...Capability) Capabilities {
	var set Capabilities
	for _, c := range cs {
		if c != NoCapability && c < capabilityEnd {
			set |= 1 << c
		}
	}
	return set
}

// ParseCapabilities reads a list of names. A name that is unknown, or empty, is
// a *CapabilityError for "field[i]".
func ParseCapabilities(field string, names []string) (Capabilities, error) {
	var set Capabilities
	for i, name := range names {
		at := fmt.Sprintf("%s[%d]", field, i)
		c, err := ParseCapability(at, name)
		if err != nil {
			return 0, err
		}
		if c == NoCapability {
			return 0, &CapabilityError{Field: at, Name: name}
		}
		set |= 1 << c
	}
	return set, nil
}

// Has reports whether c is in the set. NoCapability never is.
func (s Capabilities) Has(c Capability) bool { return s&(1<<c) != 0 }

// Narrow returns what is in both sets. It never adds a capability.
func (s Capabilities) Narrow(to Capabilities) Capabilities { return s & to }

// Names returns the names in the set, in the order of the constants; never nil.
func (s Capabilities) Names() []string {
	names := []string{}
	for c := NoCapability + 1; c < capabilityEnd; c++ {
		if s.Has(c) {
			names = append(names, capabilityNames[c])
		}
	}
	return names
}

// String returns the names, separated by commas.
func (s Capabilities) String() string { return strings.Join(s.Names(), ",") }

// MarshalJSON writes the set as its list of names.
func (s Capabilities) MarshalJSON() ([]byte, error) { return json.Marshal(s.Names()) }

// Profile is a named set of capabilities that an agent starts from.
type Profile string

// The profiles of contract/behaviour.md §8. They hold the same capabilities
// except Assistant, and differ in what happens where a person would be asked.
const (
	Assistant  Profile = "assistant"
	Standard   Profile = "standard"
	Unattended Profile = "unattended"
	Max        Profile = "max"
)

// floor is every capability but Browse, which always escalates.
const floor = 1<<capabilityEnd - 1<<(NoCapability+1) - 1<<Browse

// Known reports whether p is one of the profiles.
func (p Profile) Known() bool {
	switch p {
	case Assistant, Standard, Unattended, Max:
		return true
	}
	return false
}

// Capabilities returns what the profile holds: none for Assistant and for an
// unknown one.
func (p Profile) Capabilities() Capabilities {
	switch p {
	case Standard, Unattended, Max:
		return floor
	}
	return 0
}
