package policy_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/policy"
)

func TestDecide(t *testing.T) {
	t.Parallel()
	agent := policy.NewAllowList("web_fetch", "memory_read")

	for _, tc := range []struct {
		name  string
		facts policy.Facts
		rule  string // "" = allowed
	}{
		{"NothingKnownIsDenied", policy.Facts{}, policy.RuleAllowList},
		{"EmptyListDeniesAll", policy.Facts{Tool: "web_fetch", Held: policy.Standard.Capabilities()}, policy.RuleAllowList},
		{"ToolOutsideListIsDenied", policy.Facts{Tool: "shell", Allowed: agent, Held: policy.Max.Capabilities()}, policy.RuleAllowList},
		{"NameIsComparedExactly", policy.Facts{Tool: "Web_Fetch", Allowed: agent, Held: policy.Max.Capabilities()}, policy.RuleAllowList},
		{"HeldCapabilityIsAllowed", policy.Facts{Tool: "web_fetch", Allowed: agent, Needs: policy.Web, Held: policy.Standard.Capabilities()}, ""},
		{"MissingCapabilityIsDenied", policy.Facts{Tool: "web_fetch", Allowed: agent, Needs: policy.Web, Held: policy.Assistant.Capabilities()}, policy.RuleCapability},
		{"OtherCapabilityDoesNotHelp", policy.Facts{Tool: "web_fetch", Allowed: agent, Needs: policy.Web, Held: policy.CapabilitiesOf(policy.Read)}, policy.RuleCapability},
		{"NoCapabilityNeedsNone", policy.Facts{Tool: "memory_read", Allowed: agent}, ""},
		{"UnknownCapabilityIsDenied", policy.Facts{Tool: "web_fetch", Allowed: agent, Needs: 200, Held: ^policy.Capabilities(0)}, policy.RuleCapability},
		{"AllowListComesBeforeCapability", policy.Facts{Tool: "shell", Allowed: agent, Needs: policy.Web}, policy.RuleAllowList},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			err := policy.Decide(tc.facts)
			if tc.rule == "" {
				require.NoError(t, err)
				return
			}
			var denied *policy.DeniedError
			require.ErrorAs(t, err, &denied)
			require.Equal(t, tc.rule, denied.Rule)
			require.NotEmpty(t, denied.Message)
		})
	}
}

func TestProfiles(t *testing.T) {
	t.Parallel()
	all := []string{"orch:read", "orch:web", "orch:write", "orch:analyze", "orch:spawn", "orch:graph", "orch:cron", "orch:skill", "orch:message", "orch:mcp"}

	require.Empty(t, policy.Assistant.Capabilities().Names())
	for _, p := range []policy.Profile{policy.Standard, policy.Unattended, policy.Max} {
		require.Equal(t, all, p.Capabilities().Names(), p)
		require.False(t, p.Capabilities().Has(policy.Browse), p)
		require.True(t, p.Known())
	}
	require.Empty(t, policy.Profile("root").Capabilities().Names(), "an unknown profile holds nothing")
	require.False(t, policy.Profile("root").Known())
}

func TestCapabilities(t *testing.T) {
	t.Parallel()

	t.Run("NarrowNeverAdds", func(t *testing.T) {
		t.Parallel()
		asked, err := policy.ParseCapabilities("capabilities", []string{"orch:read", "orch:browse", "orch:read"})
		require.NoError(t, err)
		require.Equal(t, "orch:read,orch:browse", asked.String())
		require.Equal(t, []string{"orch:read"}, policy.Standard.Capabilities().Narrow(asked).Names())
		require.Empty(t, policy.Assistant.Capabilities().Narrow(asked).Names())
	})

	t.Run("UnknownNameNamesItsField", func(t *testing.T) {
		t.Parallel()
		for _, name := range []string{"orch:*", "*", "read", "ORCH:READ", "rpc", ""} {
			_, err := policy.ParseCapabilities("capabilities", []string{"orch:read", name})
			var bad *policy.CapabilityError
			require.ErrorAs(t, err, &bad, name)
			require.Equal(t, "capabilities[1]", bad.Field)
			require.Equal(t, name, bad.Name)
			require.ErrorContains(t, err, "capabilities[1]")
		}
		_, err := policy.ParseCapability("tools[0].capability", "orch:sudo")
		require.ErrorContains(t, err, `tools[0].capability: unknown capability "orch:sudo"`)
	})

	t.Run("NamesRoundTrip", func(t *testing.T) {
		t.Parallel()
		for c := policy.Read; c <= policy.MCP; c++ {
			parsed, err := policy.ParseCapability("capability", c.String())
			require.NoError(t, err)
			require.Equal(t, c, parsed)
			require.True(t, policy.CapabilitiesOf(c).Has(c))
		}
		none, err := policy.ParseCapability("capability", "")
		require.NoError(t, err)
		require.Equal(t, policy.NoCapability, none)
		require.Zero(t, policy.CapabilitiesOf(none, 99))
	})

	t.Run("GoesToTheWireAsNames", func(t *testing.T) {
		t.Parallel()
		got, err := json.Marshal(map[string]any{"one": policy.Web, "set": policy.CapabilitiesOf(policy.Web, policy.Read), "none": policy.Capabilities(0)})
		require.NoError(t, err)
		require.JSONEq(t, `{"one":"orch:web","set":["orch:read","orch:web"],"none":[]}`, string(got))
		_, err = policy.Capability(77).MarshalText()
		require.Error(t, err)
	})
}

func TestAllowingAllocatesNothing(t *testing.T) {
	facts := policy.Facts{Tool: "web_fetch", Allowed: policy.NewAllowList("web_fetch"), Needs: policy.Web, Held: policy.Standard.Capabilities()}
	require.Zero(t, testing.AllocsPerRun(100, func() { _ = policy.Decide(facts) }))
}

func BenchmarkDecide(b *testing.B) {
	facts := policy.Facts{Tool: "web_fetch", Allowed: policy.NewAllowList("web_fetch", "memory_read", "memory_write", "orders_get"), Needs: policy.Web, Held: policy.Standard.Capabilities()}
	b.Run("allow", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_ = policy.Decide(facts)
		}
	})
	facts.Held = 0
	b.Run("deny", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_ = policy.Decide(facts)
		}
	})
}
