package tool

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/jobs/agentcfg"
	"github.com/weir-run/weir/policy"
)

func catalogue(t testing.TB, raw string) *Catalogue {
	t.Helper()
	cfg, err := agentcfg.Parse(json.RawMessage(raw))
	require.NoError(t, err)
	return NewCatalogue(cfg)
}

const agent = `{"name":"a","tools":[
	{"type":"http","name":"orders_get","description":"Finds an order.","url":"https://h/x","capability":"orch:read",
	 "parameters":{"properties":{"id":{"type":"integer","minimum":1},"state":{"enum":["open","closed"]}},"required":["id"],"additionalProperties":false}},
	{"type":"builtin","name":"web_fetch"},
	{"type":"builtin","name":"memory_write"},
	{"type":"builtin","name":"memory_read"},
	{"type":"http","name":"anything","url":"https://h/y","method":"GET","timeoutMs":5000,"idempotency":"idempotent"}
]%s}`

func with(more string) string { return strings.Replace(agent, "%s", more, 1) }

func TestBuiltinsAreThoseOfTheConfiguration(t *testing.T) {
	t.Parallel()
	require.Equal(t, agentcfg.Builtins(), slices.Sorted(maps.Keys(Builtins)))
	for name, spec := range Builtins {
		require.NotEmpty(t, spec.Description, name)
		require.True(t, json.Valid(spec.Parameters), name)
		require.Equal(t, agentcfg.Idempotent, spec.Idempotency, name)
	}
}

func TestModelsAreSortedAndDescribed(t *testing.T) {
	t.Parallel()
	c := catalogue(t, with(""))
	var names []string
	for _, m := range c.Models() {
		names = append(names, m.Name)
		var schema struct{ Type string }
		require.NoError(t, json.Unmarshal(m.Parameters, &schema), m.Name)
		require.Equal(t, "object", schema.Type, "providers insist on it")
	}
	require.Equal(t, []string{"anything", "memory_read", "memory_write", "orders_get", "web_fetch"}, names)
	require.Equal(t, "Finds an order.", c.Models()[3].Description)
	require.Equal(t, Builtins[WebFetch].Description, c.Models()[4].Description)
	require.Equal(t, c.Models(), catalogue(t, with("")).Models(), "byte-identical prefixes (RC-91)")
	require.NotNil(t, catalogue(t, `{"name":"a"}`).Models())
}

func TestLookup(t *testing.T) {
	t.Parallel()
	c := catalogue(t, with(""))
	write, ok := c.Lookup(MemoryWrite)
	require.True(t, ok)
	require.True(t, write.Local)
	require.Equal(t, policy.NoCapability, write.Capability)
	fetch, _ := c.Lookup(WebFetch)
	require.False(t, fetch.Local)
	require.Equal(t, policy.Web, fetch.Capability)
	anything, _ := c.Lookup("anything")
	require.Equal(t, agentcfg.Idempotent, anything.Idempotency)
	require.EqualValues(t, 5e9, anything.Timeout)
	orders, _ := c.Lookup("orders_get")
	require.Equal(t, agentcfg.AtMostOnce, orders.Idempotency)
	_, ok = c.Lookup("none")
	require.False(t, ok)
}

func TestCheck(t *testing.T) {
	t.Parallel()
	standard := with("")
	for _, tc := range []struct {
		name, agent, tool, args string
		kind                    Kind // "" = sent out
		says                    string
	}{
		{"Allowed", standard, "orders_get", `{"id":1,"state":"open"}`, "", ""},
		{"AnyObject", standard, "anything", `{"x":[1]}`, "", ""},
		{"UnknownTool", standard, "rm_rf", `{}`, UnknownTool, `"rm_rf"`},
		{"UnknownToolOfAnotherCase", standard, "Orders_Get", `{"id":1}`, UnknownTool, ""},
		{"MissingArgument", standard, "orders_get", `{}`, InvalidArguments, "id"},
		{"WrongType", standard, "orders_get", `{"id":"1"}`, InvalidArguments, "/id: got string, want integer"},
		{"TooSmall", standard, "orders_get", `{"id":0}`, InvalidArguments, "/id"},
		{"NotInEnum", standard, "orders_get", `{"id":1,"state":"lost"}`, InvalidArguments, "/state"},
		{"UnknownArgument", standard, "orders_get", `{"id":1,"force":true}`, InvalidArguments, "force"},
		{"NotJSON", standard, "anything", `{`, InvalidArguments, "JSON"},
		{"NoArguments", standard, "anything", ``, InvalidArguments, "JSON"},
		{"BrokenJSONKeptAsAString", standard, "anything", `"{\"id\":"`, InvalidArguments, "object"},
		{"List", standard, "anything", `[]`, InvalidArguments, "object"},
		{"Null", standard, "anything", `null`, InvalidArguments, "object"},
		{"TwoDocuments", standard, "anything", `{} {}`, InvalidArguments, "JSON"},
		{"AssistantHasNoCapabilities", with(`,"profile":"assistant"`), "orders_get", `{"id":1}`, Denied, "orch:read"},
		{"NarrowedAway", with(`,"capabilities":["orch:read"]`), WebFetch, `{"url":"https://h"}`, Denied, "orch:web"},
		{"NarrowedButHeld", with(`,"capabilities":["orch:read"]`), "orders_get", `{"id":1}`, "", ""},
		{"FactsNeedNoCapability", with(`,"profile":"assistant"`), MemoryWrite, `{"key":"a","value":1}`, "", ""},
		{"DeniedBeforeValidated", with(`,"profile":"assistant"`), "orders_get", `{}`, Denied, ""},
		{"InternalKey", standard, MemoryRead, `{"key":"__summary"}`, Denied, "__"},
		{"Secret", standard, MemoryWrite, `{"key":"password","value":"hunter2"}`, SecretRefused, ""},
		{"FetchLimits", standard, WebFetch, `{"url":"https://h","maxBytes":0}`, InvalidArguments, "/maxBytes"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			found, f := catalogue(t, tc.agent).Check(tc.tool, json.RawMessage(tc.args))
			if tc.kind == "" {
				require.Nil(t, f)
				require.Equal(t, tc.tool, found.Name)
				return
			}
			require.Nil(t, found)
			require.Equal(t, tc.kind, f.Kind, f.Message)
			require.Contains(t, f.Message, tc.says)
			if f.Kind == Denied && tc.tool != MemoryRead {
				require.Equal(t, policy.RuleCapability, f.Rule)
			}
		})
	}
}

func TestMistakesAreBounded(t *testing.T) {
	t.Parallel()
	args := map[string]int{}
	for i := range 1000 {
		args[strings.Repeat("ü", 100)+string(rune('a'+i%26))+strings.Repeat("x", i)] = i
	}
	_, f := catalogue(t, with("")).Check("orders_get", marshal(args))
	require.Equal(t, InvalidArguments, f.Kind)
	require.LessOrEqual(t, len(f.Message), maxMistakesBytes)
	_, f = catalogue(t, with("")).Check(strings.Repeat("n", 10_000), json.RawMessage(`{}`))
	require.Less(t, len(f.Message), 200)
}

func BenchmarkCheck(b *testing.B) {
	c := catalogue(b, with(""))
	args := json.RawMessage(`{"id":17,"state":"open"}`)
	b.ReportAllocs()
	for b.Loop() {
		if _, f := c.Check("orders_get", args); f != nil {
			b.Fatal(f)
		}
	}
}
