package tool

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"golang.org/x/text/language"
	"golang.org/x/text/message"

	"github.com/weir-run/weir/jobs/agentcfg"
	"github.com/weir-run/weir/policy"
	"github.com/weir-run/weir/workers/model"
)

// Tool is one tool of an agent, ready to be called.
type Tool struct {
	Name        string
	Capability  policy.Capability
	Idempotency agentcfg.Idempotency
	// Local marks a tool that Runner does not carry out: its effect is part of
	// the transaction that commits the step.
	Local   bool
	Timeout time.Duration // of one call

	schema *jsonschema.Schema
	url    string // of an http tool; "" for a builtin
	method string
}

// Catalogue is the tools of one version of an agent. It is built once per
// version and then only read.
type Catalogue struct {
	tools   map[string]*Tool
	models  []model.Tool
	allowed policy.AllowList
	held    policy.Capabilities
}

// NewCatalogue returns the tools of an agent, whose configuration was checked.
func NewCatalogue(cfg *agentcfg.Config) *Catalogue {
	c := &Catalogue{tools: make(map[string]*Tool, len(cfg.Tools)), models: make([]model.Tool, 0, len(cfg.Tools)), held: cfg.Held()}
	names := make([]string, 0, len(cfg.Tools))
	for i := range cfg.Tools {
		from := &cfg.Tools[i]
		t := &Tool{Name: from.Name}
		described := model.Tool{Name: from.Name}
		if from.Type == agentcfg.ToolBuiltin {
			spec := Builtins[from.Name] // agentcfg lets no others in
			t.Capability, t.Idempotency, t.Local, t.Timeout, t.schema = spec.Capability, spec.Idempotency, spec.Local, builtinTimeout, builtinSchemas[from.Name]
			described.Description, described.Parameters = spec.Description, spec.Parameters
		} else {
			t.Capability, t.Idempotency, t.Timeout, t.schema = from.Capability, from.Idempotency, from.Timeout(), from.Schema
			t.url, t.method = from.URL, from.Method
			described.Description, described.Parameters = from.Description, withType(from.Parameters)
		}
		c.tools[t.Name] = t
		c.models = append(c.models, described)
		names = append(names, t.Name)
	}
	slices.SortFunc(c.models, func(a, b model.Tool) int { return strings.Compare(a.Name, b.Name) })
	c.allowed = policy.NewAllowList(names...)
	return c
}

// withType adds the type that providers insist on to a schema that has none.
func withType(schema json.RawMessage) json.RawMessage {
	var top map[string]json.RawMessage
	if json.Unmarshal(schema, &top) != nil || top["type"] != nil {
		return schema
	}
	if len(top) == 0 {
		return json.RawMessage(`{"type":"object"}`)
	}
	return append(json.RawMessage(`{"type":"object",`), bytes.TrimLeft(schema, "{ \t\r\n")...)
}

// Models returns what a model is told about the tools, sorted by name. The
// caller does not change it.
func (c *Catalogue) Models() []model.Tool { return c.models }

// Lookup returns the tool called name.
func (c *Catalogue) Lookup(name string) (*Tool, bool) {
	t, ok := c.tools[name]
	return t, ok
}

// Facts returns what policy decides a call of the tool called name by.
func (c *Catalogue) Facts(name string) policy.Facts {
	f := policy.Facts{Tool: name, Allowed: c.allowed, Held: c.held}
	if t, ok := c.tools[name]; ok {
		f.Needs = t.Capability
	}
	return f
}

// Check decides whether a call is sent out: the agent has the tool, policy
// allows it, and the arguments are what the tool takes (RC-67, RC-69), in this
// order. A call that is not sent out has the Failure for its result.
func (c *Catalogue) Check(name string, args json.RawMessage) (*Tool, *Failure) {
	t, ok := c.tools[name]
	if !ok {
		return nil, &Failure{Kind: UnknownTool, Message: fmt.Sprintf("there is no tool %.64q", name)}
	}
	if err := policy.Decide(c.Facts(name)); err != nil {
		f := &Failure{Kind: Denied, Message: err.Error()}
		if denied, ok := errors.AsType[*policy.DeniedError](err); ok {
			f.Rule = denied.Rule
		}
		return nil, f
	}
	if f := t.Validate(args); f != nil {
		return nil, f
	}
	return t, nil
}

// Validate checks arguments against the tool's schema. The tools whose effect
// is local say in their own rules all that their schema says, and more.
func (t *Tool) Validate(args json.RawMessage) *Failure {
	switch {
	case t.Local && t.Name == MemoryRead:
		_, f := ParseFactRead(args)
		return f
	case t.Local && t.Name == MemoryWrite:
		_, f := ParseFactWrite(args)
		return f
	}
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(args))
	if err != nil {
		return invalid("the arguments are not valid JSON")
	}
	if _, ok := v.(map[string]any); !ok {
		return invalid("the arguments must be a JSON object")
	}
	if err := t.schema.Validate(v); err != nil {
		return invalid(explain(err))
	}
	return nil
}

func invalid(message string) *Failure { return &Failure{Kind: InvalidArguments, Message: message} }

// What a model is told about its mistakes at most.
const (
	maxMistakes      = 5
	maxMistakesBytes = 1000
)

// explain says what in the arguments is wrong, a clause for each place.
func explain(err error) string {
	e, ok := errors.AsType[*jsonschema.ValidationError](err)
	if !ok {
		return "the arguments do not match the tool's schema"
	}
	english := message.NewPrinter(language.English)
	var mistakes []string
	var walk func(*jsonschema.ValidationError)
	walk = func(e *jsonschema.ValidationError) {
		if len(mistakes) == maxMistakes {
			return
		}
		if len(e.Causes) == 0 {
			at := ""
			if len(e.InstanceLocation) > 0 {
				at = "/" + strings.Join(e.InstanceLocation, "/") + ": "
			}
			mistakes = append(mistakes, at+e.ErrorKind.LocalizedString(english))
		}
		for _, cause := range e.Causes {
			walk(cause)
		}
	}
	walk(e)
	return excerpt("the arguments do not match the tool's schema: "+strings.Join(mistakes, "; "), maxMistakesBytes)
}
