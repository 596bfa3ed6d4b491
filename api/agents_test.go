package api

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/api/rpc"
)

func agent(name string) map[string]any { return map[string]any{"agentId": name} }

func TestAgents(t *testing.T) {
	t.Parallel()
	t.Run("LifeOfAnAgent", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		require.Equal(t, []any{"default"}, f.result(f.admin, "agents.list", `{}`)["agents"])
		made := f.result(f.admin, "agents.create", map[string]any{"name": "a", "provider": "openai", "model": "m", "instructions": "Be <brief>.", "limits": map[string]any{"maxSteps": 3}})
		require.Equal(t, "a", made["agentId"])
		config := made["config"].(map[string]any)
		require.Equal(t, "openai", config["provider"])
		require.Equal(t, "Be <brief>.", config["instructions"])
		require.Equal(t, 3.0, config["limits"].(map[string]any)["maxSteps"])
		require.Equal(t, 16.0, config["limits"].(map[string]any)["maxCallsPerGroup"], "defaults are spelled out")
		require.Equal(t, []any{"a", "default"}, f.result(f.admin, "agents.list", `{}`)["agents"])

		got := f.result(f.admin, "agents.get", agent("a"))
		require.Equal(t, map[string]any{"agentId": "a", "config": config, "suspended": false, "isDefault": false}, got)
		require.Equal(t, true, f.result(f.admin, "agents.get", agent("default"))["isDefault"])

		updated := f.result(f.admin, "agents.update", map[string]any{"agentId": "a", "model": "n", "instructions": nil, "name": "a"})
		require.Equal(t, "n", updated["config"].(map[string]any)["model"])
		require.Equal(t, "", updated["config"].(map[string]any)["instructions"], "null sets back")
		var version, versions int
		f.scan(`SELECT a.version, (SELECT count(*) FROM agent_version v WHERE v.name = 'a') FROM agent a WHERE a.name = 'a'`, &version, &versions)
		require.Equal(t, []int{2, 2}, []int{version, versions})
		f.result(f.admin, "agents.update", map[string]any{"agentId": "a", "model": "n"}) // nothing new
		f.scan(`SELECT version FROM agent WHERE name = 'a'`, &version)
		require.Equal(t, 2, version)

		for range 2 {
			require.Equal(t, true, f.result(f.admin, "agents.suspend", agent("a"))["suspended"])
		}
		require.Equal(t, true, f.result(f.admin, "agents.get", agent("a"))["suspended"])
		f.invalid("agentId", "agent_suspended", f.rpc, "agent.request", request("s", "x", "agentId", "a"))
		for range 2 {
			require.Equal(t, true, f.result(f.admin, "agents.resume", agent("a"))["resumed"])
		}
		f.result(f.rpc, "agent.request", request("s", "x", "agentId", "a"))

		var id, revived uuid.UUID
		f.scan(`SELECT id FROM agent WHERE name = 'a'`, &id)
		require.Equal(t, true, f.result(f.admin, "agents.delete", agent("a"))["deleted"])
		require.Equal(t, []any{"default"}, f.result(f.admin, "agents.list", `{}`)["agents"])
		f.invalid("agentId", "unknown_agent", f.rpc, "agent.request", request("s", "x", "agentId", "a"))
		f.invalid("agentId", "unknown_agent", f.rpc, "agent.request", request("s", "x")) // its session
		for _, method := range []string{"agents.get", "agents.update", "agents.delete", "agents.suspend", "agents.resume"} {
			f.missing("agent", f.admin, method, agent("a"))
		}
		f.result(f.admin, "agents.create", map[string]any{"name": "a"})
		f.scan(`SELECT id, version FROM agent WHERE name = 'a'`, &revived, &version)
		require.Equal(t, id, revived)
		require.Equal(t, 3, version)
		f.result(f.rpc, "agent.request", request("s", "x"))
	})
	t.Run("DryRunStoresNothing", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		before := f.stored()
		r := f.result(f.admin, "agents.update", map[string]any{"agentId": "default", "model": "offline-vision", "dryRun": true})
		require.Equal(t, "offline-vision", r["config"].(map[string]any)["model"])
		require.Equal(t, before, f.stored())
		f.invalid("model", "invalid", f.admin, "agents.update", map[string]any{"agentId": "default", "model": "", "dryRun": true})
	})
	t.Run("BadParams", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for _, test := range []struct {
			field, reason, method string
			params                map[string]any
		}{
			{"name", "required", "agents.create", map[string]any{}},
			{"name", "invalid", "agents.create", map[string]any{"name": "A"}},
			{"name", "exists", "agents.create", map[string]any{"name": "default"}},
			{"nope", "unknown", "agents.create", map[string]any{"name": "a", "nope": 1}},
			{"dryRun", "unknown", "agents.create", map[string]any{"name": "a", "dryRun": true}},
			{"budgets", "not_built", "agents.create", map[string]any{"name": "a", "budgets": []any{map[string]any{}}}},
			{"tools[0].url", "required", "agents.create", map[string]any{"name": "a", "tools": []any{map[string]any{"type": "http", "name": "t", "description": "d", "parameters": map[string]any{}}}}},
			{"provider", "invalid", "agents.create", map[string]any{"name": "a", "provider": 7}},
			{"model", "required", "agents.create", map[string]any{"name": "a", "provider": "openai"}},
			{"name", "immutable", "agents.update", map[string]any{"agentId": "default", "name": "b"}},
			{"nope", "unknown", "agents.update", map[string]any{"agentId": "default", "nope": 1}},
			{"limits.maxSteps", "invalid", "agents.update", map[string]any{"agentId": "default", "limits": map[string]any{"maxSteps": 0}}},
			{"agentId", "required", "agents.get", map[string]any{}},
			{"agentId", "required", "agents.update", map[string]any{}},
			{"agentId", "required", "agents.delete", map[string]any{}},
			{"agentId", "required", "agents.suspend", map[string]any{}},
			{"agentId", "required", "agents.resume", map[string]any{}},
			{"agentId", "default_agent", "agents.delete", agent("default")},
		} {
			f.invalid(test.field, test.reason, f.admin, test.method, test.params)
		}
		for _, method := range []string{"agents.get", "agents.update", "agents.delete", "agents.suspend", "agents.resume"} {
			f.missing("agent", f.admin, method, agent("nobody"))
		}
	})
	t.Run("Scopes", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for _, method := range []string{"agents.list", "agents.create", "agents.get", "agents.update", "agents.delete", "agents.suspend", "agents.resume"} {
			require.Equal(t, "Insufficient scope: requires 'admin'", f.refused(rpc.InternalError, f.rpc, method, `{}`).Message)
		}
		for _, method := range []string{"agents.create", "agents.update", "agents.delete", "agents.suspend", "agents.resume"} {
			f.refused(rpc.InternalError, f.read, method, `{}`)
		}
		f.result(f.read, "agents.list", `{}`)
		f.result(f.read, "agents.get", agent("default"))
	})
	t.Run("RC-149/AnotherTenantsAgentIsNotThere", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.admin, "agents.create", map[string]any{"name": "a"})
		require.Equal(t, []any{"default"}, f.result(f.otherAdmin, "agents.list", `{}`)["agents"])
		for _, method := range []string{"agents.get", "agents.update", "agents.delete", "agents.suspend", "agents.resume"} {
			theirs, nobodys := f.missing("agent", f.otherAdmin, method, agent("a")), f.missing("agent", f.otherAdmin, method, agent("b"))
			require.Equal(t, strings.ReplaceAll(nobodys.Message, ": b", ": a"), theirs.Message)
		}
		f.invalid("agentId", "unknown_agent", f.otherRPC, "agent.request", request("s", "x", "agentId", "a"))
		f.result(f.otherAdmin, "agents.create", map[string]any{"name": "a"})
	})
	t.Run("ParallelCreatesMakeOne", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		pods := []*pod{f.pod, f.another()}
		answers := gather(t, 20, func(i int) (string, error) {
			a, err := pods[i%2].tryCall(f.ctx, f.admin, "agents.create", map[string]any{"name": "a", "instructions": fmt.Sprint(i)})
			if err == nil && a.Error != nil {
				return fmt.Sprint(a.Error.Data["reason"]), nil
			}
			return "created", err
		})
		require.Equal(t, map[string]int{"created": 1, "exists": 19}, answers)
	})
	t.Run("ParallelUpdatesAllCount", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		pods := []*pod{f.pod, f.another()}
		gather(t, 20, func(i int) (string, error) {
			a, err := pods[i%2].tryCall(f.ctx, f.admin, "agents.update", map[string]any{"agentId": "default", "instructions": fmt.Sprint(i)})
			if err == nil && a.Error != nil {
				err = fmt.Errorf("%v", a.Error)
			}
			return "", err
		})
		var version int
		f.scan(`SELECT version FROM agent WHERE tenant_id = 'default' AND name = 'default'`, &version)
		require.Equal(t, 21, version)
	})
	t.Run("AnotherPodLearnsOfASuspension", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		other := f.another()
		for i := range 3 {
			other.result(f.rpc, "agent.request", request(fmt.Sprint("s", i), "x")) // it remembers the agent
			f.result(f.admin, "agents.suspend", agent("default"))
			other.eventually("it refuses", func() bool {
				a, err := other.tryCall(f.ctx, f.rpc, "agent.request", request(fmt.Sprint("t", i), "x"))
				return err == nil && a.Error != nil && a.Error.Data["reason"] == "agent_suspended"
			})
			f.result(f.admin, "agents.resume", agent("default"))
			other.eventually("it accepts", func() bool {
				a, err := other.tryCall(f.ctx, f.rpc, "agent.request", request(fmt.Sprint("u", i), "x"))
				return err == nil && a.Error == nil
			})
		}
	})
	t.Run("RC-90/ATurnKeepsItsConfiguration", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.rpc, "agent.request", request("s", "x"))
		f.result(f.admin, "agents.update", map[string]any{"agentId": "default", "instructions": "new"})
		f.result(f.rpc, "agent.request", request("s", "y"))
		var versions string
		f.scan(`SELECT string_agg(agent_version::text, ',' ORDER BY request_seq) FROM run`, &versions)
		require.Equal(t, "1,2", versions)
	})
}
