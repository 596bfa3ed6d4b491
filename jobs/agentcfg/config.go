package agentcfg

import (
	"bytes"
	"encoding/json"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/weir-run/weir/policy"
)

// Config is the configuration of one agent. Parse and Default make it; it is
// not changed afterwards.
type Config struct {
	Name     string `json:"name"` // also the agent's id
	Kind     Kind   `json:"kind"`
	Provider string `json:"provider"`
	Model    string `json:"model"`
	// BaseURL replaces the provider's own; nil means that one.
	BaseURL *string `json:"baseUrl"`
	// APIKeySecret is the name of a secret, never its value; nil means the
	// provider's own.
	APIKeySecret *string `json:"apiKeySecret"`
	// Secondary answers when the primary model cannot (RC-133); nil means none.
	Secondary    *Secondary `json:"secondary"`
	Instructions string     `json:"instructions"`
	Tools        []Tool     `json:"tools"` // never nil
	Context      Context    `json:"context"`
	Memory       Memory     `json:"memory"`
	Budgets      []struct{} `json:"budgets"` // always empty: not built
	Limits       Limits     `json:"limits"`
	OnBusy       OnBusy     `json:"onBusy"`
	// Profile is where the agent's capabilities start from.
	Profile policy.Profile `json:"profile"`
	// Capabilities narrow the profile's; nil means all of them. Held tells
	// what comes out.
	Capabilities *policy.Capabilities `json:"capabilities"`
	Concurrency  Concurrency          `json:"concurrency"`
	// ModelParameters are passed to the provider as they are. Whole numbers are
	// int64, others float64.
	ModelParameters map[string]any `json:"modelParameters"` // never nil
	Debug           bool           `json:"debug"`           // always false: not built
}

// Kind says what answers for an agent.
type Kind string

// KindModel is a model that weir calls. The other kind, acp, is not built.
const KindModel Kind = "model"

// Secondary is a model of last resort.
type Secondary struct {
	Provider string `json:"provider"`
	Model    string `json:"model"`
}

// Context says how much of a session's history a model is sent.
type Context struct {
	Mode ContextMode `json:"mode"`
}

// ContextMode is one of RC-76 to RC-79.
type ContextMode string

// ContextFull sends the whole stored conversation. The others are not built.
const ContextFull ContextMode = "full"

// Memory says whose facts an agent sees.
type Memory struct {
	Scope MemoryScope `json:"scope"`
}

// MemoryScope is what facts belong to (RC-95).
type MemoryScope string

// The scopes of facts. MemoryUser makes userId required (RC-7).
const (
	MemorySession MemoryScope = "session"
	MemoryUser    MemoryScope = "user"
)

// OnBusy says what happens to a request that arrives during a turn (RC-28).
type OnBusy string

// OnBusyEnqueue lets it wait. The others are not built.
const OnBusyEnqueue OnBusy = "enqueue"

// Limits bound a turn.
type Limits struct {
	MaxSteps         int   `json:"maxSteps"`         // model calls, 1 to 1000, default 25 (RC-134)
	TurnTimeoutMs    int64 `json:"turnTimeoutMs"`    // 1 s to 12 h, default 30 min; parked time is not counted (RC-136)
	MaxCallsPerGroup int   `json:"maxCallsPerGroup"` // tool calls of one step, 1 to 128, default 16 (RC-68)
	LoopThreshold    int   `json:"loopThreshold"`    // equal calls in a row that end the turn, 2 to 1000, default 5 (RC-135)
	MaxOutputTokens  int   `json:"maxOutputTokens"`  // of one model call, 1 to 1000000, default 4096
}

// TurnTimeout is TurnTimeoutMs as a duration.
func (l Limits) TurnTimeout() time.Duration { return time.Duration(l.TurnTimeoutMs) * time.Millisecond }

// Concurrency bounds how many runs of the agent are running at once.
type Concurrency struct {
	MaxRunning *int `json:"maxRunning"` // 1 to 100000 over the whole fleet; nil is no limit
}

// ToolType says who carries out a tool's calls.
type ToolType string

// The types that are built. The others are client and mcp.
const (
	ToolBuiltin ToolType = "builtin" // weir
	ToolHTTP    ToolType = "http"    // a server of the operator's
)

// Idempotency says whether a call may be made again (RC-71).
type Idempotency string

// What a tool can declare. approve_on_retry is not built.
const (
	Idempotent Idempotency = "idempotent"   // safe to repeat: it gets the same Idempotency-Key
	AtMostOnce Idempotency = "at_most_once" // the default: a call whose end is unknown is interrupted
)

// Tool is one tool of an agent. A builtin has only Type and Name; what else it
// is, the workers know.
type Tool struct {
	Type        ToolType
	Name        string // unique in the agent: [a-zA-Z0-9_.:-]{1,64}
	Description string
	Parameters  json.RawMessage    // JSON Schema of the arguments object
	Schema      *jsonschema.Schema // Parameters, compiled
	URL         string             // absolute, http or https, without credentials
	Method      string             // default POST
	TimeoutMs   int64              // of one call: 1 ms to 12 h, default 30 s
	Capability  policy.Capability  // default none
	Idempotency Idempotency
	Approval    Approval
}

// Timeout is TimeoutMs as a duration.
func (t *Tool) Timeout() time.Duration { return time.Duration(t.TimeoutMs) * time.Millisecond }

// Approval says when a person must allow a call.
type Approval string

// ApprovalNever is the default. The others, always and policy, are not built.
const ApprovalNever Approval = "never"

// MarshalJSON writes the members that the tool's type has.
func (t Tool) MarshalJSON() ([]byte, error) {
	type head struct {
		Type ToolType `json:"type"`
		Name string   `json:"name"`
	}
	if t.Type == ToolBuiltin {
		return marshal(head{t.Type, t.Name})
	}
	return marshal(struct {
		head
		Description string            `json:"description"`
		Parameters  json.RawMessage   `json:"parameters"`
		URL         string            `json:"url"`
		Method      string            `json:"method"`
		TimeoutMs   int64             `json:"timeoutMs"`
		Capability  policy.Capability `json:"capability,omitempty"`
		Idempotency Idempotency       `json:"idempotency"`
		Approval    Approval          `json:"approval"`
	}{head{t.Type, t.Name}, t.Description, t.Parameters, t.URL, t.Method, t.TimeoutMs, t.Capability, t.Idempotency, t.Approval})
}

// Default returns the configuration of an agent of which only the name is known.
func Default(name string) *Config {
	return &Config{
		Name:            name,
		Kind:            KindModel,
		Provider:        offline,
		Model:           offlineModel,
		Tools:           []Tool{},
		Context:         Context{Mode: ContextFull},
		Memory:          Memory{Scope: MemorySession},
		Budgets:         []struct{}{},
		Limits:          Limits{MaxSteps: 25, TurnTimeoutMs: 1_800_000, MaxCallsPerGroup: 16, LoopThreshold: 5, MaxOutputTokens: 4096},
		OnBusy:          OnBusyEnqueue,
		Profile:         policy.Standard,
		ModelParameters: map[string]any{},
	}
}

// The provider of an agent that names none, and its model.
const (
	offline      = "offline"
	offlineModel = "offline-1"
)

// Held returns the capabilities in force: the profile's, narrowed by the agent.
func (c *Config) Held() policy.Capabilities {
	held := c.Profile.Capabilities()
	if c.Capabilities != nil {
		held = held.Narrow(*c.Capabilities)
	}
	return held
}

// JSON returns the configuration in its canonical form: every member that is
// built, in the order of the contract, defaults spelled out. Parse reads it
// back, and equal configurations have equal bytes.
func (c *Config) JSON() json.RawMessage {
	b, err := marshal(c)
	if err != nil {
		panic("agentcfg: " + err.Error()) // Parse lets nothing in that does not marshal
	}
	return b
}

// marshal is json.Marshal without escaping <, > and &.
func marshal(v any) ([]byte, error) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(buf.Bytes(), []byte("\n")), nil
}
