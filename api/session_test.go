package api

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/api/rpc"
)

func TestSessionStatus(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.work()
	zero := map[string]any{"totalTokens": 0.0, "totalCost": 0.0}
	require.Equal(t, map[string]any{"model": "offline-1", "agentName": "default", "tokensUsed": zero, "stepsExecuted": 0.0, "maxSteps": 25.0},
		f.result(f.rpc, "session.status", `{}`))
	first := f.result(f.rpc, "agent.execute", map[string]any{"message": "x", "sessionId": "s"})
	f.result(f.rpc, "agent.execute", map[string]any{"message": "x", "sessionId": "s"})
	used := map[string]any{"totalTokens": 30.0, "totalCost": 14e-6}
	want := map[string]any{"model": "offline-1", "agentName": "default", "tokensUsed": used, "stepsExecuted": 1.0, "maxSteps": 25.0}
	require.Equal(t, want, f.result(f.rpc, "session.status", `{}`))
	require.Equal(t, want, f.result(f.rpc, "session.status", map[string]any{"conversation_ref": first["conversationRef"], "agentId": "default"}))
	require.Equal(t, zero, f.result(f.all, "session.status", `{}`)["tokensUsed"], "another token has none of its own")
	f.missing("session", f.rpc, "session.status", map[string]any{"conversation_ref": refOf(t, "x")})
	f.missing("session", f.rpc, "session.status", map[string]any{"conversation_ref": first["conversationRef"], "agentId": "b"})
	f.missing("session", f.otherRPC, "session.status", map[string]any{"conversation_ref": first["conversationRef"]})
	f.invalid("agentId", "unknown_agent", f.rpc, "session.status", map[string]any{"agentId": "nobody"})
	require.Equal(t, "Insufficient scope: requires 'rpc'", f.refused(rpc.InternalError, f.read, "session.status", `{}`).Message)
}

func TestSessionHistory(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.work()
	began := time.Now().Add(-time.Minute).UnixMilli()
	var ref any
	for i := range 3 {
		ref = f.result(f.rpc, "agent.execute", map[string]any{"message": fmt.Sprint(i), "sessionId": "s"})["conversationRef"]
	}
	f.refused(rpc.TurnFailed, f.rpc, "agent.execute", map[string]any{"message": "!fail", "sessionId": "s"})
	p := map[string]any{"tenant_id": "default", "agent_id": "default", "conversation_ref": ref}
	r := f.result(f.rpc, "session.history", p)
	require.Equal(t, 7.0, r["total"])
	require.Equal(t, false, r["hasMore"])
	facts := r["session"].(map[string]any)
	require.Equal(t, ref, facts["key"])
	require.Equal(t, "rpc", facts["channelType"])
	require.Equal(t, []any{60.0, 24.0, 36.0, 7.0}, []any{facts["totalTokens"], facts["inputTokens"], facts["outputTokens"], facts["messageCount"]})
	require.Greater(t, facts["createdAt"], float64(began))
	said := ""
	for _, m := range r["messages"].([]any) {
		said += fmt.Sprintf("%s: %s|", m.(map[string]any)["role"], m.(map[string]any)["content"])
	}
	require.Equal(t, "user: 0|assistant: echo: 0|user: 1|assistant: echo: 1|user: 2|assistant: echo: 2|user: !fail|", said)
	p["offset"], p["limit"] = 2, 3
	r = f.result(f.rpc, "session.history", p)
	require.Len(t, r["messages"], 3)
	require.Equal(t, "1", r["messages"].([]any)[0].(map[string]any)["content"])
	require.Equal(t, true, r["hasMore"])

	for _, wrong := range []map[string]any{
		{"tenant_id": "other"}, {"agent_id": "b"}, {"agent_id": ""}, {"conversation_ref": "s"}, {"conversation_ref": refOf(t, "x")},
	} {
		q := map[string]any{"tenant_id": "default", "agent_id": "default", "conversation_ref": ref}
		for k, v := range wrong {
			q[k] = v
		}
		f.missing("session", f.rpc, "session.history", q)
	}
	f.missing("session", f.otherRPC, "session.history", map[string]any{"tenant_id": "other", "agent_id": "default", "conversation_ref": ref})
	f.missing("session", f.otherRPC, "session.history", map[string]any{"tenant_id": "default", "agent_id": "default", "conversation_ref": ref})
	for _, field := range []string{"tenant_id", "agent_id", "conversation_ref"} {
		q := map[string]any{"tenant_id": "default", "agent_id": "default", "conversation_ref": ref}
		delete(q, field)
		f.invalid(field, "required", f.rpc, "session.history", q)
	}
	for field, value := range map[string]int{"offset": -1, "limit": 0} {
		f.invalid(field, "invalid", f.rpc, "session.history", map[string]any{"tenant_id": "default", "agent_id": "default", "conversation_ref": ref, field: value})
	}
	require.Equal(t, "Insufficient scope: requires 'rpc'", f.refused(rpc.InternalError, f.admin, "session.history", `{}`).Message)
}

func TestSessionList(t *testing.T) {
	t.Parallel()
	f := setup(t)
	w := f.work()
	for _, session := range []string{"a", "b"} {
		f.result(f.rpc, "agent.execute", map[string]any{"message": "x", "sessionId": session})
	}
	w.end() // so that the next is ours
	f.spawn(f.claim(f.start("c", "x")))
	p := map[string]any{"tenant_id": "default", "agent_id": "default"}
	r := f.result(f.rpc, "session.list", p)
	require.Equal(t, 4.0, r["total"])
	last := r["sessions"].([]any)[3].(map[string]any)
	require.Equal(t, refOf(t, "default", "default", "rpc", nil, "a", nil, nil), last["conversationRef"])
	require.Equal(t, []any{"dm", 2.0, 15.0}, []any{last["kind"], last["messageCount"], last["totalTokens"]})
	p["kind"] = "sub-agent"
	require.Equal(t, 1.0, f.result(f.rpc, "session.list", p)["total"])
	p["kind"], p["since_minutes"] = "all", 60
	require.Equal(t, 4.0, f.result(f.rpc, "session.list", p)["total"])
	p["since_minutes"] = 0
	require.Equal(t, 0.0, f.result(f.rpc, "session.list", p)["total"])
	p["kind"] = "odd"
	f.invalid("kind", "invalid", f.rpc, "session.list", p)
	f.invalid("tenant_id", "required", f.rpc, "session.list", `{"agent_id":"default"}`)
	f.invalid("agent_id", "required", f.rpc, "session.list", `{"tenant_id":"default"}`)
	f.invalid("since_minutes", "invalid", f.rpc, "session.list", `{"tenant_id":"default","agent_id":"default","since_minutes":-1}`)
	nothing := map[string]any{"sessions": []any{}, "total": 0.0}
	require.Equal(t, nothing, f.result(f.rpc, "session.list", map[string]any{"tenant_id": "other", "agent_id": "default"}))
	require.Equal(t, nothing, f.result(f.otherRPC, "session.list", map[string]any{"tenant_id": "default", "agent_id": "default"}))
	require.Equal(t, nothing, f.result(f.rpc, "session.list", map[string]any{"tenant_id": "default", "agent_id": "nobody"}))
	require.Equal(t, "Insufficient scope: requires 'rpc'", f.refused(rpc.InternalError, f.admin, "session.list", `{}`).Message)
}
