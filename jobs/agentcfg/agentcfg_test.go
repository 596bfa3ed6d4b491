package agentcfg_test

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/jobs/agentcfg"
	"github.com/weir-run/weir/policy"
)

// full has every member that is built, away from its default where it can be.
const full = `{
	"name": "researcher", "kind": "model", "provider": "openai", "model": "gpt-x",
	"baseUrl": "https://gateway.example.com/v1", "apiKeySecret": "OPENAI_API_KEY",
	"secondary": {"provider": "anthropic", "model": "claude-x"},
	"instructions": "You are <careful> & brief.",
	"tools": [
		{"type": "builtin", "name": "web_fetch"},
		{"type": "http", "name": "orders_get", "description": "Finds an order.",
		 "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
		 "url": "https://orders.example.com/get?v=1", "method": "GET", "timeoutMs": 5000,
		 "capability": "orch:web", "idempotency": "idempotent", "approval": "never"}
	],
	"context": {"mode": "full"}, "memory": {"scope": "user"}, "budgets": [],
	"limits": {"maxSteps": 3, "turnTimeoutMs": 60000, "maxCallsPerGroup": 2, "loopThreshold": 4, "maxOutputTokens": 100},
	"onBusy": "enqueue", "profile": "standard", "capabilities": ["orch:read", "orch:web"],
	"concurrency": {"maxRunning": null}, "modelParameters": {"temperature": 0.5, "seed": 9007199254740993, "stop": ["a"]}, "debug": false
}`

func TestEveryBuiltMemberIsRead(t *testing.T) {
	t.Parallel()
	c, err := agentcfg.Parse(json.RawMessage(full))
	require.NoError(t, err)

	require.Equal(t, "researcher", c.Name)
	require.Equal(t, "openai", c.Provider)
	require.Equal(t, "gpt-x", c.Model)
	require.Equal(t, "https://gateway.example.com/v1", *c.BaseURL)
	require.Equal(t, "OPENAI_API_KEY", *c.APIKeySecret)
	require.Equal(t, &agentcfg.Secondary{Provider: "anthropic", Model: "claude-x"}, c.Secondary)
	require.Equal(t, agentcfg.MemoryUser, c.Memory.Scope)
	require.Equal(t, agentcfg.Limits{MaxSteps: 3, TurnTimeoutMs: 60000, MaxCallsPerGroup: 2, LoopThreshold: 4, MaxOutputTokens: 100}, c.Limits)
	require.Equal(t, time.Minute, c.Limits.TurnTimeout())
	require.Equal(t, []string{"orch:read", "orch:web"}, c.Held().Names())
	require.Equal(t, map[string]any{"temperature": 0.5, "seed": int64(9007199254740993), "stop": []any{"a"}}, c.ModelParameters)

	require.Len(t, c.Tools, 2)
	tool := c.Tools[1]
	require.Equal(t, policy.Web, tool.Capability)
	require.Equal(t, agentcfg.Idempotent, tool.Idempotency)
	require.Equal(t, 5*time.Second, tool.Timeout())
	require.Equal(t, "GET", tool.Method)
	require.NoError(t, tool.Schema.Validate(map[string]any{"id": 1}))
	require.Error(t, tool.Schema.Validate(map[string]any{"id": "1"}))
}

func TestAbsentAndNullAreTheDefault(t *testing.T) {
	t.Parallel()
	want := agentcfg.Default("default")
	require.Equal(t, agentcfg.Limits{MaxSteps: 25, TurnTimeoutMs: 1800000, MaxCallsPerGroup: 16, LoopThreshold: 5, MaxOutputTokens: 4096}, want.Limits)
	require.Equal(t, policy.Standard.Capabilities(), want.Held())

	for _, raw := range []string{
		`{"name":"default"}`,
		`{"name":"default","limits":{},"context":{},"memory":{},"concurrency":{},"tools":[],"budgets":[],"modelParameters":{}}`,
		`{"name":"default","kind":null,"acp":null,"provider":null,"model":null,"baseUrl":null,"apiKeySecret":null,"secondary":null,"instructions":null,
		  "tools":null,"context":{"mode":null,"window":null},"memory":null,"budgets":null,"limits":{"maxSteps":null,"maxDepth":null},"onBusy":null,
		  "profile":null,"capabilities":null,"concurrency":null,"modelParameters":null,"debug":null}`,
	} {
		c, err := agentcfg.Parse(json.RawMessage(raw))
		require.NoError(t, err, raw)
		require.Equal(t, want, c)
		require.Equal(t, string(want.JSON()), string(c.JSON()))
	}
}

func TestCanonicalFormIsReadBack(t *testing.T) {
	t.Parallel()
	for _, raw := range []string{full, `{"name":"a"}`, `{"name":"a","capabilities":[],"profile":"assistant"}`, `{"name":"a","tools":[{"type":"http","name":"x","url":"http://h"}]}`} {
		c, err := agentcfg.Parse(json.RawMessage(raw))
		require.NoError(t, err)
		again, err := agentcfg.Parse(c.JSON())
		require.NoError(t, err)
		require.Equal(t, string(c.JSON()), string(again.JSON()))
		require.Equal(t, c.Held(), again.Held())
	}
	c, err := agentcfg.Parse(json.RawMessage(full))
	require.NoError(t, err)
	require.Contains(t, string(c.JSON()), `<careful> & brief`)
	require.JSONEq(t, full, string(c.JSON()), "nothing is lost, nothing is added")
}

func TestRefused(t *testing.T) {
	t.Parallel()
	const http = `{"type":"http","name":"x","url":"https://h"%s}`
	tool := func(more string) string { return `{"name":"a","tools":[` + fmt.Sprintf(http, more) + `]}` }

	for _, tc := range []struct {
		raw    string
		field  string
		reason agentcfg.Reason
	}{
		// The configuration as a whole.
		{``, "", agentcfg.Invalid},
		{`[]`, "", agentcfg.Invalid},
		{`null`, "", agentcfg.Invalid},
		{`{"name":"a"} {}`, "", agentcfg.Invalid},
		{`{"name":"a"`, "", agentcfg.Invalid},
		{"{\"name\":\"\xff\"}", "", agentcfg.Invalid},
		{`{"name":"a","name":"b"}`, "name", agentcfg.Duplicate},
		{`{"name":"a","instructions":"` + strings.Repeat("x", 1<<20) + `"}`, "", agentcfg.TooLarge},
		{`{"name":"a","instructions":"` + strings.Repeat("x", 1<<18+1) + `"}`, "instructions", agentcfg.TooLarge},

		// Unknown members, at every level.
		{`{"name":"a","colour":"red"}`, "colour", agentcfg.Unknown},
		{`{"name":"a","Model":"x"}`, "Model", agentcfg.Unknown},
		{`{"name":"a","colour":null}`, "colour", agentcfg.Unknown},
		{`{"name":"a","limits":{"maxSteps":1,"maxTokens":1}}`, "limits.maxTokens", agentcfg.Unknown},
		{`{"name":"a","context":{"modus":"full"}}`, "context.modus", agentcfg.Unknown},
		{`{"name":"a","secondary":{"provider":"openai","model":"x","apiKey":"y"}}`, "secondary.apiKey", agentcfg.Unknown},
		{tool(`,"headers":{}`), "tools[0].headers", agentcfg.Unknown},
		{`{"name":"a","tools":[{"type":"builtin","name":"web_fetch","url":"https://h"}]}`, "tools[0].url", agentcfg.Unknown},
		{`{"name":"a","tools":[{"type":"builtin","name":"rm_rf"}]}`, "tools[0].name", agentcfg.Unknown},

		// Known, but without an effect yet.
		{`{"name":"a","kind":"acp"}`, "kind", agentcfg.NotBuilt},
		{`{"name":"a","acp":{"url":"http://h","type":"sync"}}`, "acp", agentcfg.NotBuilt},
		{`{"name":"a","context":{"mode":"summary"}}`, "context.mode", agentcfg.NotBuilt},
		{`{"name":"a","context":{"mode":"full","window":20}}`, "context.window", agentcfg.NotBuilt},
		{`{"name":"a","budgets":[{"unit":"tokens"}]}`, "budgets", agentcfg.NotBuilt},
		{`{"name":"a","limits":{"maxDepth":3}}`, "limits.maxDepth", agentcfg.NotBuilt},
		{`{"name":"a","limits":{"maxChildren":3}}`, "limits.maxChildren", agentcfg.NotBuilt},
		{`{"name":"a","limits":{"maxTreeRuns":3}}`, "limits.maxTreeRuns", agentcfg.NotBuilt},
		{`{"name":"a","onBusy":"steer"}`, "onBusy", agentcfg.NotBuilt},
		{`{"name":"a","profile":"max"}`, "profile", agentcfg.NotBuilt},
		{`{"name":"a","concurrency":{"maxRunning":0}}`, "concurrency.maxRunning", agentcfg.Invalid},
		{`{"name":"a","debug":true}`, "debug", agentcfg.NotBuilt},
		{`{"name":"a","tools":[{"type":"client","name":"crm::lookup"}]}`, "tools[0].type", agentcfg.NotBuilt},
		{`{"name":"a","tools":[{"type":"mcp","server":"fs"}]}`, "tools[0].type", agentcfg.NotBuilt},
		{`{"name":"a","tools":[{"type":"builtin","name":"session_spawn"}]}`, "tools[0].name", agentcfg.NotBuilt},
		{tool(`,"idempotency":"approve_on_retry"`), "tools[0].idempotency", agentcfg.NotBuilt},
		{tool(`,"approval":"always"`), "tools[0].approval", agentcfg.NotBuilt},

		// Values.
		{`{}`, "name", agentcfg.Required},
		{`{"name":null}`, "name", agentcfg.Required},
		{`{"name":7}`, "name", agentcfg.Invalid},
		{`{"name":""}`, "name", agentcfg.Invalid},
		{`{"name":"-a"}`, "name", agentcfg.Invalid},
		{`{"name":"Researcher"}`, "name", agentcfg.Invalid},
		{`{"name":"a\n"}`, "name", agentcfg.Invalid},
		{`{"name":"` + strings.Repeat("a", 64) + `"}`, "name", agentcfg.Invalid},
		{`{"name":"a","kind":"human"}`, "kind", agentcfg.Invalid},
		{`{"name":"a","provider":"openai"}`, "model", agentcfg.Required},
		{`{"name":"a","provider":"Open AI","model":"x"}`, "provider", agentcfg.Invalid},
		{`{"name":"a","model":""}`, "model", agentcfg.Invalid},
		{`{"name":"a","baseUrl":"ftp://h"}`, "baseUrl", agentcfg.Invalid},
		{`{"name":"a","baseUrl":"https://user:pw@h"}`, "baseUrl", agentcfg.Invalid},
		{`{"name":"a","apiKeySecret":"sk-0123456789abcdef"}`, "apiKeySecret", agentcfg.Invalid},
		{`{"name":"a","secondary":{"provider":"openai"}}`, "secondary.model", agentcfg.Required},
		{`{"name":"a","secondary":{"model":"x"}}`, "secondary.provider", agentcfg.Required},
		{`{"name":"a","instructions":"a\u0000"}`, "instructions", agentcfg.Invalid},
		{`{"name":"a","instructions":["a"]}`, "instructions", agentcfg.Invalid},
		{`{"name":"a","memory":{"scope":"tenant"}}`, "memory.scope", agentcfg.Invalid},
		{`{"name":"a","memory":"user"}`, "memory", agentcfg.Invalid},
		{`{"name":"a","budgets":{}}`, "budgets", agentcfg.Invalid},
		{`{"name":"a","debug":"no"}`, "debug", agentcfg.Invalid},
		{`{"name":"a","limits":{"maxSteps":0}}`, "limits.maxSteps", agentcfg.Invalid},
		{`{"name":"a","limits":{"maxSteps":1001}}`, "limits.maxSteps", agentcfg.Invalid},
		{`{"name":"a","limits":{"maxSteps":2.5}}`, "limits.maxSteps", agentcfg.Invalid},
		{`{"name":"a","limits":{"maxSteps":"25"}}`, "limits.maxSteps", agentcfg.Invalid},
		{`{"name":"a","limits":{"turnTimeoutMs":999}}`, "limits.turnTimeoutMs", agentcfg.Invalid},
		{`{"name":"a","limits":{"turnTimeoutMs":43200001}}`, "limits.turnTimeoutMs", agentcfg.Invalid},
		{`{"name":"a","limits":{"maxSteps":99999999999999999999}}`, "limits.maxSteps", agentcfg.Invalid},
		{`{"name":"a","onBusy":"drop"}`, "onBusy", agentcfg.Invalid},
		{`{"name":"a","capabilities":["orch:read","orch:*"]}`, "capabilities[1]", agentcfg.Invalid},
		{`{"name":"a","capabilities":"orch:read"}`, "capabilities", agentcfg.Invalid},
		{`{"name":"a","modelParameters":[]}`, "modelParameters", agentcfg.Invalid},
		{`{"name":"a","modelParameters":{"a":1e999}}`, "modelParameters", agentcfg.Invalid},
		{`{"name":"a","modelParameters":{"a":["\u0000"]}}`, "modelParameters", agentcfg.Invalid},

		// Tools.
		{`{"name":"a","tools":{}}`, "tools", agentcfg.Invalid},
		{`{"name":"a","tools":[null]}`, "tools[0]", agentcfg.Invalid},
		{`{"name":"a","tools":[{"name":"x"}]}`, "tools[0].type", agentcfg.Required},
		{`{"name":"a","tools":[{"type":"shell"}]}`, "tools[0].type", agentcfg.Invalid},
		{`{"name":"a","tools":[{"type":"builtin"}]}`, "tools[0].name", agentcfg.Required},
		{`{"name":"a","tools":[{"type":"http","url":"https://h"}]}`, "tools[0].name", agentcfg.Required},
		{`{"name":"a","tools":[{"type":"http","name":"x"}]}`, "tools[0].url", agentcfg.Required},
		{`{"name":"a","tools":[{"type":"builtin","name":"web_fetch"},{"type":"builtin","name":"web_fetch"}]}`, "tools[1].name", agentcfg.Duplicate},
		{`{"name":"a","tools":[{"type":"http","name":"memory_write","url":"https://h"}]}`, "tools[0].name", agentcfg.Invalid},
		{`{"name":"a","tools":[{"type":"http","name":"a::b","url":"https://h"}]}`, "tools[0].name", agentcfg.Invalid},
		{`{"name":"a","tools":[{"type":"http","name":"a b","url":"https://h"}]}`, "tools[0].name", agentcfg.Invalid},
		{tool(`,"url":"https://h"`), "tools[0].url", agentcfg.Duplicate},
		{`{"name":"a","tools":[{"type":"http","name":"x","url":"/relative"}]}`, "tools[0].url", agentcfg.Invalid},
		{`{"name":"a","tools":[{"type":"http","name":"x","url":"https://"}]}`, "tools[0].url", agentcfg.Invalid},
		{`{"name":"a","tools":[{"type":"http","name":"x","url":"https://h:0/"}]}`, "tools[0].url", agentcfg.Invalid},
		{`{"name":"a","tools":[{"type":"http","name":"x","url":"https://h:70000/"}]}`, "tools[0].url", agentcfg.Invalid},
		{`{"name":"a","tools":[{"type":"http","name":"x","url":"https://h/#part"}]}`, "tools[0].url", agentcfg.Invalid},
		{`{"name":"a","tools":[{"type":"http","name":"x","url":"file:///etc/passwd"}]}`, "tools[0].url", agentcfg.Invalid},
		{tool(`,"method":"BREW"`), "tools[0].method", agentcfg.Invalid},
		{tool(`,"timeoutMs":0`), "tools[0].timeoutMs", agentcfg.Invalid},
		{tool(`,"capability":"orch:sudo"`), "tools[0].capability", agentcfg.Invalid},
		{tool(`,"idempotency":"maybe"`), "tools[0].idempotency", agentcfg.Invalid},
		{tool(`,"parameters":true`), "tools[0].parameters", agentcfg.Invalid},
		{tool(`,"parameters":{"type":"string"}`), "tools[0].parameters", agentcfg.Invalid},
		{tool(`,"parameters":{"type":"objekt"}`), "tools[0].parameters", agentcfg.Invalid},
		{tool(`,"parameters":{"type":5}`), "tools[0].parameters", agentcfg.Invalid},
		{tool(`,"parameters":{"properties":{"a":{"type":"strang"}}}`), "tools[0].parameters", agentcfg.Invalid},
		{tool(`,"parameters":{"properties":{"a":{"pattern":"("}}}`), "tools[0].parameters", agentcfg.Invalid},
		{tool(`,"parameters":{"$ref":"#/$defs/none"}`), "tools[0].parameters", agentcfg.Invalid},
		{tool(`,"parameters":{"$ref":"https://example.com/schema.json"}`), "tools[0].parameters", agentcfg.Invalid},
		{tool(`,"parameters":{"description":"\u0000"}`), "tools[0].parameters", agentcfg.Invalid},
	} {
		_, err := agentcfg.Parse(json.RawMessage(tc.raw))
		var refused *agentcfg.FieldError
		require.ErrorAs(t, err, &refused, "%.300s", tc.raw)
		require.Equal(t, tc.field, refused.Field, "%.300s: %v", tc.raw, err)
		require.Equal(t, tc.reason, refused.Reason, "%.300s: %v", tc.raw, err)
		require.NotEmpty(t, refused.Message)
		require.NotContains(t, err.Error(), "\n")
	}
}

func TestSchemasAreNotLoadedFromFiles(t *testing.T) {
	t.Parallel()
	file := t.TempDir() + "/schema.json"
	require.NoError(t, os.WriteFile(file, []byte(`{"type":"object"}`), 0o600))
	_, err := agentcfg.Compile([]byte(`{"$ref":"file://` + file + `"}`))
	require.ErrorContains(t, err, "outside of the schema")
}

func TestSchemasThatAreAllowed(t *testing.T) {
	t.Parallel()
	for _, schema := range []string{
		`{}`, `{"type":"object"}`, `{"type":["object","null"]}`, `{"$schema":"http://json-schema.org/draft-07/schema#","type":"object"}`,
		`{"$defs":{"a":{"type":"string"}},"properties":{"x":{"$ref":"#/$defs/a"}}}`, `{"description":"no \\u0000 please"}`,
		`{"$id":"https://example.com/x","properties":{"next":{"$ref":"#"}}}`,
	} {
		_, err := agentcfg.Parse(json.RawMessage(`{"name":"a","tools":[{"type":"http","name":"x","url":"http://127.0.0.1:8080/x","parameters":` + schema + `}]}`))
		require.NoError(t, err, schema)
	}
}

func TestAssistantHoldsNothing(t *testing.T) {
	t.Parallel()
	c, err := agentcfg.Parse(json.RawMessage(`{"name":"a","profile":"assistant","capabilities":["orch:web","orch:browse"]}`))
	require.NoError(t, err)
	require.Zero(t, c.Held())
	c, err = agentcfg.Parse(json.RawMessage(`{"name":"a","capabilities":["orch:web","orch:browse"]}`))
	require.NoError(t, err)
	require.Equal(t, []string{"orch:web"}, c.Held().Names(), "narrows, never adds")
	c, err = agentcfg.Parse(json.RawMessage(`{"name":"a","capabilities":[]}`))
	require.NoError(t, err)
	require.Zero(t, c.Held())
}

func TestMerge(t *testing.T) {
	t.Parallel()
	base, err := agentcfg.Parse(json.RawMessage(full))
	require.NoError(t, err)

	merge := func(patch string) *agentcfg.Config {
		merged, err := agentcfg.Merge(base.JSON(), json.RawMessage(patch))
		require.NoError(t, err)
		c, err := agentcfg.Parse(merged)
		require.NoError(t, err)
		return c
	}
	require.Equal(t, string(base.JSON()), string(merge(`{}`).JSON()))
	require.Equal(t, string(base.JSON()), string(merge(`{"name":"researcher"}`).JSON()))

	c := merge(`{"model":"gpt-y","limits":{"maxSteps":9},"tools":null,"baseUrl":null,"capabilities":null}`)
	require.Equal(t, "gpt-y", c.Model)
	require.Equal(t, 9, c.Limits.MaxSteps)
	require.Equal(t, 5, c.Limits.LoopThreshold, "a member is replaced as a whole")
	require.Empty(t, c.Tools)
	require.Nil(t, c.BaseURL)
	require.Equal(t, policy.Standard.Capabilities(), c.Held())
	require.Equal(t, agentcfg.MemoryUser, c.Memory.Scope, "untouched members stay")

	for patch, want := range map[string]agentcfg.FieldError{
		`{"name":"other"}`:      {Field: "name", Reason: agentcfg.Immutable},
		`{"name":null}`:         {Field: "name", Reason: agentcfg.Immutable},
		`{"model":1,"model":2}`: {Field: "model", Reason: agentcfg.Duplicate},
		`[]`:                    {Field: "", Reason: agentcfg.Invalid},
	} {
		_, err := agentcfg.Merge(base.JSON(), json.RawMessage(patch))
		var refused *agentcfg.FieldError
		require.ErrorAs(t, err, &refused, patch)
		require.Equal(t, want.Field, refused.Field)
		require.Equal(t, want.Reason, refused.Reason)
	}

	merged, err := agentcfg.Merge(json.RawMessage(`{}`), json.RawMessage(`{}`))
	require.NoError(t, err)
	require.Equal(t, "{}", string(merged))
	merged, err = agentcfg.Merge(base.JSON(), json.RawMessage(`{"colour\"":null}`))
	require.NoError(t, err)
	_, err = agentcfg.Parse(merged)
	require.ErrorContains(t, err, "colour", "an unknown member is refused, also as null")
}

func TestBuiltins(t *testing.T) {
	t.Parallel()
	require.Equal(t, []string{"memory_read", "memory_write", "web_fetch"}, agentcfg.Builtins())
}

// FuzzParse holds that Parse never panics, and that what it accepts has a
// canonical form that means the same.
func FuzzParse(f *testing.F) {
	f.Add([]byte(full))
	f.Add([]byte(`{"name":"a","tools":[{"type":"http","name":"x","url":"http://h","parameters":{"$ref":"#"}}]}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := agentcfg.Parse(raw)
		if err != nil {
			var refused *agentcfg.FieldError
			require.ErrorAs(t, err, &refused)
			return
		}
		again, err := agentcfg.Parse(c.JSON())
		require.NoError(t, err, "%s", c.JSON())
		require.Equal(t, string(c.JSON()), string(again.JSON()))
	})
}

func BenchmarkParse(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		if _, err := agentcfg.Parse(json.RawMessage(full)); err != nil {
			b.Fatal(err)
		}
	}
}
