package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/invopop/jsonschema"
	validation "github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/api/contract"
)

// realRegistry is that of the server, whose handlers are of no use without one.
func realRegistry() *Registry { return NewRegistry((&Server{}).methods()...) }

// toCome are the methods that are neither built nor in pending.txt, which only
// gets shorter.
var toCome = []string{"tool.response"}

func TestContract(t *testing.T) {
	t.Parallel()
	checkContract(t, realRegistry(), toCome...)
}

// checkContract compares a registry with the contract. Missing are methods
// that need be neither in it nor in pending.txt.
func checkContract(t *testing.T, r *Registry, missing ...string) {
	t.Helper()
	problems := contractProblems(t, r, missing...)
	require.Empty(t, problems, strings.Join(problems, "\n"))
}

func contractProblems(t *testing.T, r *Registry, missing ...string) []string {
	t.Helper()
	c, err := contract.Load()
	require.NoError(t, err)
	cmp := comparer{contract: c, shared: newSchemaSet()}
	for _, m := range r.Methods() {
		_, err := cmp.shared.of(m.result, false, false) // all results before any params
		require.NoError(t, err, m.Name)
	}
	for _, m := range r.Methods() {
		cmp.method(m)
	}
	for _, m := range c.Methods {
		registered, pending := r.Method(m.Name) != nil, slices.Contains(c.Pending, m.Name)
		switch {
		case registered && pending:
			cmp.problem(m.Name, "exists: take it out of pending.txt")
		case registered || pending || slices.Contains(missing, m.Name):
		default:
			cmp.problem(m.Name, "is neither registered nor in pending.txt")
		}
	}
	for _, name := range c.Pending {
		if c.Method(name) == nil {
			cmp.problem(name, "is in pending.txt and not in the contract")
		}
	}
	return cmp.problems
}

// comparer compares the types of methods with the shapes of the contract.
type comparer struct {
	contract *contract.Contract
	shared   *schemaSet
	params   bool // what is compared
	problems []string
}

func (c *comparer) problem(where, format string, args ...any) {
	c.problems = append(c.problems, where+": "+fmt.Sprintf(format, args...))
}

func (c *comparer) method(m *Method) {
	want := c.contract.Method(m.Name)
	if want == nil {
		c.problem(m.Name, "is not in the contract")
		return
	}
	if scopes := m.Scopes.Names(); !slices.Equal(scopes, want.Scopes) && len(scopes)+len(want.Scopes) > 0 {
		c.problem(m.Name, "scopes %v, want %v", scopes, want.Scopes)
	}
	if m.Ours != want.Ours {
		c.problem(m.Name, "ours %t, want %t", m.Ours, want.Ours)
	}
	if m.ReadOnly != want.ReadOnly {
		c.problem(m.Name, "read-only %t, want %t", m.ReadOnly, want.ReadOnly)
	}
	params, result := want.Params, want.Result
	if params.Open && want.ProposedParams != nil {
		params = want.ProposedParams
	}
	if result.Open && want.ProposedResult != nil {
		result = want.ProposedResult
	}
	if strict := string(params.AdditionalProperties) == "false"; m.Strict != strict {
		c.problem(m.Name, "strict %t, want %t", m.Strict, strict)
	}
	got, err := c.shared.of(m.params, true, m.Strict)
	if err != nil {
		c.problem(m.Name, "%v", err)
		return
	}
	if !m.Strict && got.Properties != nil && params.Properties["idempotencyKey"] == nil {
		got.Properties.Delete("idempotencyKey") // every method that is not strict may have it
	}
	c.params = true
	c.compare(m.Name+" params", params, got)
	if got, err = c.shared.of(m.result, false, false); err != nil {
		c.problem(m.Name, "%v", err)
		return
	}
	c.params = false
	c.compare(m.Name+" result", result, got)
}

func (c *comparer) compare(where string, want *contract.Schema, got *jsonschema.Schema) {
	inferred := want.Inferred
	want, got = c.flatten(c.contract.Resolve(want)), c.shared.resolve(got)
	inferred = inferred || want.Inferred
	if want.Open && want.Properties == nil {
		return
	}
	wanted := typesOf(want)
	if len(wanted) == 0 && want.Properties == nil {
		return // any value
	}
	if len(got.OneOf)+len(got.AnyOf) > 0 && got.Properties == nil {
		return // the type says its schema itself
	}
	switch {
	case slices.Contains(wanted, got.Type):
	case got.Type == "integer" && slices.Contains(wanted, "number"):
	case inferred && want.Properties == nil:
		return
	case got.Type == "" && slices.Equal(wanted, []string{"object"}) && want.Properties == nil:
		return // an object of any shape, as json.RawMessage
	default:
		c.problem(where, "type %q, want %v", got.Type, wanted)
		return
	}
	if want.Properties != nil {
		c.members(where, want, got)
	}
	if want.Items != nil && got.Items != nil {
		c.compare(where+"[]", want.Items, got.Items)
	}
	if text := want.AdditionalProperties; len(text) > 0 && text[0] == '{' && got.AdditionalProperties != nil {
		var values contract.Schema
		if err := json.Unmarshal(text, &values); err != nil {
			c.problem(where, "%v", err)
			return
		}
		c.compare(where+"{}", &values, got.AdditionalProperties)
	}
	if slices.Contains(wanted, "string") && (c.params || len(got.Enum) > 0) {
		c.enum(where, want, got)
	}
	if c.params {
		c.bounds(where, want, got)
	}
}

// members compares the members of objects.
func (c *comparer) members(where string, want *contract.Schema, got *jsonschema.Schema) {
	if got.Properties == nil {
		c.problem(where, "has no members in Go, want %v", slices.Sorted(maps.Keys(want.Properties)))
		return
	}
	more := want.Open || len(want.AdditionalProperties) > 0 && string(want.AdditionalProperties) != "false"
	for p := got.Properties.Oldest(); p != nil; p = p.Next() {
		member, ok := want.Properties[p.Key]
		required := slices.Contains(got.Required, p.Key)
		if !ok {
			if !more {
				c.problem(where+"."+p.Key, "is not in the contract")
			}
			continue
		}
		if wanted := slices.Contains(want.Required, p.Key); required != wanted {
			c.problem(where+"."+p.Key, "required %t, want %t", required, wanted)
		}
		c.compare(where+"."+p.Key, member, p.Value)
	}
	for _, name := range slices.Sorted(maps.Keys(want.Properties)) {
		if _, ok := got.Properties.Get(name); !ok {
			c.problem(where+"."+name, "is missing")
		}
	}
}

// enum compares the values that are allowed.
func (c *comparer) enum(where string, want *contract.Schema, got *jsonschema.Schema) {
	values := func(list []any) []string {
		var texts []string
		for _, v := range list {
			if v != nil {
				texts = append(texts, fmt.Sprint(v))
			}
		}
		slices.Sort(texts)
		return texts
	}
	wanted := values(want.Enum)
	if s, ok := want.Const.(string); ok {
		wanted = []string{s}
	}
	if len(wanted) == 0 && !c.params {
		return // a result may be narrower
	}
	if names := values(got.Enum); !slices.Equal(names, wanted) {
		c.problem(where, "enum %v, want %v", names, wanted)
	}
}

// bounds compares the bounds and defaults that the contract gives a param.
func (c *comparer) bounds(where string, want *contract.Schema, got *jsonschema.Schema) {
	number := func(n json.Number) any {
		if f, err := n.Float64(); err == nil {
			return f
		}
		return nil
	}
	length := func(n *uint64) any {
		if n == nil {
			return nil
		}
		return float64(*n)
	}
	wanted := func(f *float64) any {
		if f == nil {
			return nil
		}
		return *f
	}
	fallback := got.Default
	if n, ok := fallback.(json.Number); ok {
		fallback = number(n)
	}
	var pattern any
	if got.Pattern != "" {
		pattern = got.Pattern
	}
	var wantedPattern any
	if want.Pattern != "" {
		wantedPattern = want.Pattern
	}
	for _, bound := range []struct {
		name      string
		got, want any
	}{
		{"minimum", number(got.Minimum), wanted(want.Minimum)},
		{"maximum", number(got.Maximum), wanted(want.Maximum)},
		{"minLength", length(got.MinLength), wanted(want.MinLength)},
		{"maxLength", length(got.MaxLength), wanted(want.MaxLength)},
		{"minItems", length(got.MinItems), wanted(want.MinItems)},
		{"maxItems", length(got.MaxItems), wanted(want.MaxItems)},
		{"pattern", pattern, wantedPattern},
		{"default", fallback, want.Default},
	} {
		if bound.want != nil && bound.got != bound.want {
			c.problem(where, "%s %v, want %v", bound.name, bound.got, bound.want)
		}
	}
}

// flatten makes one shape of alternatives. Of objects it has all members, and
// requires those that all require: so one Go struct can stand for them.
func (c *comparer) flatten(s *contract.Schema) *contract.Schema {
	if s == nil {
		return &contract.Schema{Open: true}
	}
	if len(s.OneOf) == 0 || s.Properties != nil {
		return s
	}
	var flat *contract.Schema
	for _, alternative := range s.OneOf {
		a := c.flatten(c.contract.Resolve(alternative))
		if slices.Equal(a.Type, []string{"null"}) {
			continue
		}
		values := a.Enum
		if a.Const != nil {
			values = []any{a.Const}
		}
		if flat == nil {
			first := *a
			first.Const, first.Enum = nil, slices.Clone(values)
			first.Type = typesOf(a)
			first.Properties = maps.Clone(a.Properties)
			flat = &first
			continue
		}
		flat.Enum = append(flat.Enum, values...)
		if flat.Properties == nil && a.Properties != nil {
			flat.Properties = map[string]*contract.Schema{}
		}
		for name, p := range a.Properties {
			if other, ok := flat.Properties[name]; ok && !same(other, p) {
				// A discriminator, or a member whose shape depends on one.
				p = &contract.Schema{OneOf: []*contract.Schema{other, p}, Inferred: other.Inferred || p.Inferred}
			}
			flat.Properties[name] = p
		}
		flat.Required = slices.DeleteFunc(slices.Clone(flat.Required), func(name string) bool {
			return !slices.Contains(a.Required, name)
		})
		if string(a.AdditionalProperties) != "false" {
			flat.AdditionalProperties = a.AdditionalProperties
		}
	}
	if flat == nil {
		return &contract.Schema{Open: true}
	}
	return flat
}

func same(a, b *contract.Schema) bool {
	x, _ := json.Marshal(a)
	y, _ := json.Marshal(b)
	return bytes.Equal(x, y)
}

// typesOf returns the types a value may have, null aside.
func typesOf(s *contract.Schema) []string {
	var types []string
	add := func(name string) {
		if name != "null" && !slices.Contains(types, name) {
			types = append(types, name)
		}
	}
	for _, name := range s.Type {
		add(name)
	}
	for _, value := range append(slices.Clone(s.Enum), s.Const) {
		switch value.(type) {
		case string:
			add("string")
		case bool:
			add("boolean")
		case float64:
			add("number")
		}
	}
	if s.Properties != nil && types == nil {
		add("object")
	}
	return types
}

// requireContractResult checks that a result is, on the wire, as the contract
// says. It sees what types cannot show, as null for a list.
func requireContractResult(t *testing.T, method string, result any) {
	t.Helper()
	require.NoError(t, contractResult(t, method, result))
}

func contractResult(t *testing.T, method string, result any) error {
	t.Helper()
	methods, definitions, err := contract.Documents()
	require.NoError(t, err)
	compiler := validation.NewCompiler()
	shared, err := validation.UnmarshalJSON(bytes.NewReader(definitions))
	require.NoError(t, err)
	require.NoError(t, compiler.AddResource("weir:///definitions.json", shared))
	var entries []map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(methods, &entries))
	i := slices.IndexFunc(entries, func(e map[string]json.RawMessage) bool { return string(e["method"]) == `"`+method+`"` })
	require.GreaterOrEqual(t, i, 0, method)
	shape := entries[i]["result"]
	if proposed := entries[i]["proposed_result"]; proposed != nil {
		shape = proposed
	}
	document, err := validation.UnmarshalJSON(bytes.NewReader(shape))
	require.NoError(t, err)
	require.NoError(t, compiler.AddResource("weir:///result", document))
	schema, err := compiler.Compile("weir:///result")
	require.NoError(t, err)
	text, err := json.Marshal(result)
	require.NoError(t, err)
	value, err := validation.UnmarshalJSON(bytes.NewReader(text))
	require.NoError(t, err)
	return schema.Validate(value)
}

func TestRequireContractResult(t *testing.T) {
	t.Parallel()
	requireContractResult(t, "system.ping", map[string]any{"pong": true, "ts": 1})
	require.Error(t, contractResult(t, "system.ping", map[string]any{"pong": true}))
	require.Error(t, contractResult(t, "agents.list", map[string]any{"agents": nil}))
	requireContractResult(t, "run.release", map[string]any{"runId": "run_a", "retryOf": "run_b"})
}

// TestComparer gives the comparer methods that differ from the contract.
func TestComparer(t *testing.T) {
	t.Parallel()
	type pong struct {
		Pong bool    `json:"pong"`
		TS   float64 `json:"ts"`
	}
	type id struct {
		ID string `json:"id" jsonschema:"required"`
	}
	ping := func(m Method) Method {
		m.ReadOnly = true
		return named("system.ping", ScopeRPC, m)
	}
	tests := map[string]struct {
		method Method
		want   []string
	}{
		"Same": {ping(shape[struct{}, pong]()), nil},
		"UnknownMethod": {
			named("system.pong", ScopeRPC, shape[struct{}, struct{}]()), []string{"system.pong: is not in the contract"},
		},
		"Marks": {
			named("system.ping", ScopeAdmin, shape[struct{}, pong](Ours, Strict)),
			[]string{
				"system.ping: scopes [admin], want [rpc]", "system.ping: ours true, want false",
				"system.ping: read-only false, want true", "system.ping: strict true, want false",
			},
		},
		"MemberThatIsNotThere": {ping(shape[id, pong]()), []string{"system.ping params.id: is not in the contract"}},
		"MissingMember": {
			ping(shape[struct{}, struct {
				Pong bool `json:"pong"`
			}]()), []string{"system.ping result.ts: is missing"},
		},
		"OptionalMember": {
			ping(shape[struct{}, struct {
				Pong bool    `json:"pong,omitempty"`
				TS   float64 `json:"ts"`
			}]()), []string{"system.ping result.pong: required false, want true"},
		},
		"OtherType": {
			ping(shape[struct{}, struct {
				Pong string `json:"pong"`
				TS   bool   `json:"ts"`
			}]()), []string{`system.ping result.pong: type "string", want [boolean]`, `system.ping result.ts: type "boolean", want [number]`},
		},
		"Untyped": {ping(shape[struct{}, json.RawMessage]()), []string{`system.ping result: type "", want [object]`}},
		"UntypedList": {named("agents.list", ScopeAdmin, shape[struct{}, struct {
			Agents []any `json:"agents"`
		}](ReadOnly)), []string{`agents.list result.agents[]: type "", want [string]`}},
		"IdempotencyKeyIsAllowed": {
			named("run.kill", ScopeAdmin, shape[struct {
				RootRunID      string `json:"rootRunId" jsonschema:"required"`
				IdempotencyKey string `json:"idempotencyKey"`
			}, struct {
				Killed int `json:"killed"`
			}]()), nil,
		},
		"EnumAndBounds": {
			named("run.list", ScopeAdmin, shape[struct {
				State     string `json:"state" jsonschema:"enum=queued,enum=running"`
				Kind      string `json:"kind"`
				AgentID   string `json:"agentId"`
				SessionID string `json:"sessionId"`
				RootRunID string `json:"rootRunId"`
				Limit     int    `json:"limit" jsonschema:"minimum=1,maximum=50"`
				Cursor    string `json:"cursor"`
			}, struct {
				Runs       []struct{} `json:"runs"`
				NextCursor string     `json:"nextCursor,omitempty"`
			}](Ours, ReadOnly)),
			[]string{"run.list params.state: enum", "run.list params.kind: enum", "run.list params.limit: maximum 50, want 100", "run.list params.limit: default <nil>, want 20", "run.list result.runs[].agentId: is missing"},
		},
		"AnyFurtherMembers": {
			named("agents.create", ScopeAdmin, shape[struct {
				Name        string                     `json:"name" jsonschema:"required"`
				Provider    string                     `json:"provider"`
				Model       string                     `json:"model"`
				Temperature float64                    `json:"temperature"`
				Config      map[string]json.RawMessage `json:"-" params:"rest"`
			}, struct {
				AgentID      string          `json:"agentId"`
				Config       json.RawMessage `json:"config"`
				Created      bool            `json:"created"`
				WorkspaceDir string          `json:"workspaceDir,omitempty"`
			}]()), nil,
		},
		"AlternativesOfObjects": {
			named("subagent.steer", ScopeRPC|ScopeAdmin, shape[struct {
				Target          string `json:"target" jsonschema:"required"`
				Message         string `json:"message" jsonschema:"required"`
				AgentID         string `json:"agentId"`
				ConversationRef string `json:"conversation_ref"`
			}, struct {
				Status   string `json:"status"`
				OldRunID string `json:"oldRunId,omitempty"`
				NewRunID string `json:"newRunId,omitempty"`
				RunID    string `json:"runId"`
			}]()), []string{"subagent.steer result.runId: required true, want false"},
		},
		"StrictAndAlternatives": {
			named("cron.remove", ScopeRPC, shape[struct {
				JobID   string `json:"jobId"`
				JobName string `json:"jobName"`
			}, struct {
				Removed bool `json:"removed"`
			}](Strict)), []string{"cron.remove result.jobName: is missing"},
		},
		"References": {
			named("session.list", ScopeRPC, shape[struct {
				TenantID     string  `json:"tenant_id" jsonschema:"required"`
				AgentID      string  `json:"agent_id" jsonschema:"required"`
				Kind         string  `json:"kind" jsonschema:"enum=all,enum=sub-agent,enum=group,enum=dm"`
				SinceMinutes float64 `json:"since_minutes"`
			}, struct {
				Sessions []testSession `json:"sessions"`
				Total    int           `json:"total"`
			}](ReadOnly)), []string{"session.list result.sessions[].endpoint.channelInstanceId: is missing"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, err := contract.Load()
			require.NoError(t, err)
			var missing []string
			for _, m := range c.Methods {
				missing = append(missing, m.Name)
			}
			var problems []string
			for _, p := range contractProblems(t, NewRegistry(test.method), missing...) {
				if !strings.HasSuffix(p, "take it out of pending.txt") {
					problems = append(problems, p)
				}
			}
			if test.want == nil {
				require.Empty(t, problems)
			}
			for _, want := range test.want {
				require.True(t, slices.ContainsFunc(problems, func(p string) bool { return strings.HasPrefix(p, want) }), "%q is not in\n%s", want, strings.Join(problems, "\n"))
			}
		})
	}
	t.Run("Coverage", func(t *testing.T) {
		t.Parallel()
		problems := contractProblems(t, NewRegistry(named("tts.synthesize", ScopeRPC, shape[struct{}, struct{}]())), toCome...)
		require.Contains(t, problems, "tts.synthesize: exists: take it out of pending.txt")
		require.Contains(t, problems, "system.ping: is neither registered nor in pending.txt")
	})
}

type testSession struct {
	ConversationRef string `json:"conversationRef"`
	Endpoint        *struct {
		ChannelType string `json:"channelType"`
	} `json:"endpoint,omitempty"`
}

// shape is a method of certain types that does nothing.
func shape[P, R any](options ...Option) Method {
	return Define("", 0, "", func(context.Context, *P) (*R, error) { return new(R), nil }, options...)
}

func named(name string, scopes Scopes, m Method) Method {
	m.Name, m.Scopes = name, scopes
	return m
}
