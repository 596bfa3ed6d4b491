package agentcfg

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"

	"github.com/weir-run/weir/policy"
)

// Reason says why a member was refused, for programs.
type Reason string

// Why a member can be refused.
const (
	Unknown   Reason = "unknown"   // no such member, or no such built-in tool
	NotBuilt  Reason = "not_built" // the contract has it, this version does not
	Required  Reason = "required"
	Invalid   Reason = "invalid"
	Duplicate Reason = "duplicate"
	TooLarge  Reason = "too_large"
	Immutable Reason = "immutable"
)

// FieldError names the member of a configuration that was refused.
type FieldError struct {
	Field   string // such as "tools[1].url"; "" is the configuration itself
	Reason  Reason
	Message string // for people; never a value that could be a secret
}

func (e *FieldError) Error() string {
	if e.Field == "" {
		return "agent configuration: " + e.Message
	}
	return e.Field + ": " + e.Message
}

// Sizes that no configuration needs more of.
const (
	maxConfigBytes       = 1 << 20
	maxInstructionsBytes = 256 << 10 // as much as a request's text (RC-10)
	maxURLBytes          = 8192
)

var (
	namePattern     = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)
	providerPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,62}$`)
	secretPattern   = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,255}$`) // of env.set, and of environment variables
	toolPattern     = regexp.MustCompile(`^[a-zA-Z0-9_.:-]{1,64}$`)
)

// builtins says of every built-in tool of the contract whether it is built.
var builtins = map[string]bool{
	"memory_read": true, "memory_write": true, "web_fetch": true,
	"session_spawn": false, "subagent_wait": false, "subagent_kill": false, "memory_search": false, "memory_store": false,
	"cron_add": false, "cron_list": false, "graph_execute": false, "message_send": false,
	"workspace_read": false, "workspace_write": false, "ask_approval": false,
}

// Builtins returns the names of the built-in tools that can be configured, sorted.
func Builtins() []string {
	var names []string
	for name, built := range builtins {
		if built {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Parse reads and checks a configuration. An absent or null member has its
// default. The error is a *FieldError.
func Parse(raw json.RawMessage) (*Config, error) {
	if len(raw) > maxConfigBytes {
		return nil, &FieldError{"", TooLarge, fmt.Sprintf("is larger than %d bytes", maxConfigBytes)}
	}
	c := Default("")
	c.Model = ""
	err := object("", raw, readers{
		"name":            text(&c.Name, "must be 1 to 63 of a-z 0-9 -, and not start with -", namePattern.MatchString),
		"kind":            choice(&c.Kind, []Kind{KindModel}, "acp"),
		"acp":             notBuilt("agents of kind acp"),
		"provider":        provider(&c.Provider),
		"model":           modelName(&c.Model),
		"baseUrl":         optional(&c.BaseURL, httpURL),
		"apiKeySecret":    optional(&c.APIKeySecret, secretName),
		"secondary":       c.readSecondary,
		"instructions":    instructions(&c.Instructions),
		"tools":           c.readTools,
		"context":         nested(readers{"mode": choice(&c.Context.Mode, []ContextMode{ContextFull}, "summary", "lastn", "none"), "window": notBuilt("a context window")}),
		"memory":          nested(readers{"scope": choice(&c.Memory.Scope, []MemoryScope{MemorySession, MemoryUser})}),
		"budgets":         emptyList("budgets"),
		"limits":          c.readLimits,
		"onBusy":          choice(&c.OnBusy, []OnBusy{OnBusyEnqueue}, "reject", "interrupt", "rollback", "steer", "collect"),
		"profile":         choice(&c.Profile, []policy.Profile{policy.Assistant, policy.Standard}, policy.Unattended, policy.Max),
		"capabilities":    c.readCapabilities,
		"concurrency":     nested(readers{"maxRunning": c.readMaxRunning}),
		"modelParameters": parameters(&c.ModelParameters),
		"debug":           falseOnly("debug events"),
	})
	if err != nil {
		return nil, err
	}
	if c.Name == "" {
		return nil, &FieldError{"name", Required, "is required"}
	}
	if c.Model == "" {
		if c.Provider != offline {
			return nil, &FieldError{"model", Required, "is required for provider " + c.Provider}
		}
		c.Model = offlineModel
	}
	return c, nil
}

// Merge returns base with the top-level members of patch in place of its own.
// A member that patch sets to null goes back to its default. What comes out is
// for Parse to check, except that the name cannot change.
func Merge(base, patch json.RawMessage) (json.RawMessage, error) {
	merged, err := members("", base)
	if err != nil {
		return nil, err
	}
	changes, err := members("", patch)
	if err != nil {
		return nil, err
	}
	for _, change := range changes {
		i := slices.IndexFunc(merged, func(m member) bool { return m.name == change.name })
		switch {
		case change.name == "name":
			var was, is any
			if i >= 0 {
				_ = json.Unmarshal(merged[i].raw, &was) // both were read by members
			}
			if _ = json.Unmarshal(change.raw, &is); was != is {
				return nil, &FieldError{"name", Immutable, "cannot change"}
			}
		case i < 0:
			merged = append(merged, change)
		default:
			merged[i] = change
		}
	}
	var out bytes.Buffer
	for i, m := range merged {
		out.WriteByte("{,"[min(i, 1)])
		name, err := marshal(m.name)
		if err != nil {
			return nil, err
		}
		out.Write(name)
		out.WriteByte(':')
		out.Write(m.raw)
	}
	if len(merged) == 0 {
		out.WriteByte('{')
	}
	out.WriteByte('}')
	return out.Bytes(), nil
}
