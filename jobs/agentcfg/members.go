package agentcfg

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/weir-run/weir/policy"
)

func (c *Config) readSecondary(field string, raw json.RawMessage) error {
	var s Secondary
	err := object(field, raw, readers{"provider": provider(&s.Provider), "model": modelName(&s.Model)})
	switch {
	case err != nil:
		return err
	case s.Provider == "":
		return &FieldError{field + ".provider", Required, "is required"}
	case s.Model == "":
		return &FieldError{field + ".model", Required, "is required"}
	}
	c.Secondary = &s
	return nil
}

func (c *Config) readLimits(field string, raw json.RawMessage) error {
	l := &c.Limits
	return object(field, raw, readers{
		"maxSteps":         integer(&l.MaxSteps, 1, 1000),
		"turnTimeoutMs":    integer(&l.TurnTimeoutMs, 1000, maxTimeoutMs),
		"maxCallsPerGroup": integer(&l.MaxCallsPerGroup, 1, 128),
		"loopThreshold":    integer(&l.LoopThreshold, 2, 1000),
		"maxOutputTokens":  integer(&l.MaxOutputTokens, 1, 1_000_000),
		"maxDepth":         notBuilt("a limit on the depth of sub-agents"),
		"maxChildren":      notBuilt("a limit on sub-agents"),
		"maxTreeRuns":      notBuilt("a limit on the runs of a tree"),
	})
}

func (c *Config) readMaxRunning(field string, raw json.RawMessage) error {
	n := 0
	if err := integer(&n, 1, 100_000)(field, raw); err != nil {
		return err
	}
	c.Concurrency.MaxRunning = &n
	return nil
}

// maxTimeoutMs is 12 hours, the longest that a turn can take.
const maxTimeoutMs = 43_200_000

func (c *Config) readCapabilities(field string, raw json.RawMessage) error {
	var names []string
	if json.Unmarshal(raw, &names) != nil {
		return &FieldError{field, Invalid, "must be a list of strings"}
	}
	set, err := policy.ParseCapabilities(field, names)
	if err != nil {
		return capabilityError(err)
	}
	c.Capabilities = &set
	return nil
}

func capabilityError(err error) error {
	if bad, ok := errors.AsType[*policy.CapabilityError](err); ok {
		return &FieldError{bad.Field, Invalid, fmt.Sprintf("unknown capability %.64q", bad.Name)}
	}
	return err
}

func (c *Config) readTools(field string, raw json.RawMessage) error {
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil {
		return &FieldError{field, Invalid, "must be a list"}
	}
	names := make(map[string]bool, len(list))
	c.Tools = make([]Tool, len(list))
	for i := range list {
		at := fmt.Sprintf("%s[%d]", field, i)
		if err := c.Tools[i].read(at, list[i]); err != nil {
			return err
		}
		name := c.Tools[i].Name
		if names[name] {
			return &FieldError{at + ".name", Duplicate, fmt.Sprintf("another tool is called %q", name)}
		}
		names[name] = true
	}
	return nil
}

func (t *Tool) read(field string, raw json.RawMessage) error {
	found, err := members(field, raw)
	if err != nil {
		return err
	}
	for _, m := range found {
		if m.name == "type" && !isNull(m.raw) {
			if err := choice(&t.Type, []ToolType{ToolBuiltin, ToolHTTP}, "client", "mcp")(field+".type", m.raw); err != nil {
				return err
			}
		}
	}
	switch t.Type {
	case ToolBuiltin:
		return t.readBuiltin(field, raw)
	case ToolHTTP:
		return t.readHTTP(field, raw)
	}
	return &FieldError{field + ".type", Required, "is required"}
}

// ignore reads what was read already.
func ignore(string, json.RawMessage) error { return nil }

func (t *Tool) readBuiltin(field string, raw json.RawMessage) error {
	if err := object(field, raw, readers{"type": ignore, "name": text(&t.Name, "must be a string", withoutNUL)}); err != nil {
		return err
	}
	switch built, known := builtins[t.Name]; {
	case t.Name == "":
		return &FieldError{field + ".name", Required, "is required"}
	case !known:
		return &FieldError{field + ".name", Unknown, fmt.Sprintf("there is no built-in tool %.64q", t.Name)}
	case !built:
		return &FieldError{field + ".name", NotBuilt, "the built-in tool " + t.Name + " is not built yet"}
	}
	return nil
}

func (t *Tool) readHTTP(field string, raw json.RawMessage) error {
	t.Method, t.TimeoutMs, t.Idempotency, t.Approval = "POST", 30_000, AtMostOnce, ApprovalNever
	err := object(field, raw, readers{
		"type":        ignore,
		"name":        text(&t.Name, "must be 1 to 64 of a-z A-Z 0-9 _ . : -", toolPattern.MatchString),
		"description": text(&t.Description, "must not hold U+0000", withoutNUL),
		"parameters":  schema(&t.Parameters, &t.Schema),
		"url":         httpURL(&t.URL),
		"method":      choice(&t.Method, []string{"POST", "GET", "PUT", "PATCH", "DELETE"}),
		"timeoutMs":   integer(&t.TimeoutMs, 1, maxTimeoutMs),
		"capability":  capability(&t.Capability),
		"idempotency": choice(&t.Idempotency, []Idempotency{Idempotent, AtMostOnce}, "approve_on_retry"),
		"approval":    choice(&t.Approval, []Approval{ApprovalNever}, "always", "policy"),
	})
	if err != nil {
		return err
	}
	_, builtin := builtins[t.Name]
	switch {
	case t.Name == "":
		return &FieldError{field + ".name", Required, "is required"}
	case strings.Contains(t.Name, "::"):
		return &FieldError{field + ".name", Invalid, "must not hold ::, which belongs to client and MCP tools"}
	case builtin:
		return &FieldError{field + ".name", Invalid, t.Name + " is the name of a built-in tool"}
	case t.URL == "":
		return &FieldError{field + ".url", Required, "is required"}
	}
	if t.Schema == nil {
		return schema(&t.Parameters, &t.Schema)(field+".parameters", json.RawMessage(`{"type":"object"}`))
	}
	return nil
}

func capability(to *policy.Capability) reader {
	return func(field string, raw json.RawMessage) error {
		var name string
		if json.Unmarshal(raw, &name) != nil {
			return &FieldError{field, Invalid, "must be a string"}
		}
		c, err := policy.ParseCapability(field, name)
		if err != nil {
			return capabilityError(err)
		}
		*to = c
		return nil
	}
}
