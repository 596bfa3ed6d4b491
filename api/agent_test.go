package api

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/api/rpc"
	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
)

func request(session, message string, more ...string) map[string]any {
	p := map[string]any{"sessionId": session, "content": map[string]any{"text": message}}
	for i := 0; i < len(more); i += 2 {
		p[more[i]] = more[i+1]
	}
	return p
}

func TestAgentRequest(t *testing.T) {
	t.Parallel()
	t.Run("RC-20/RC-21/RC-22/RC-24/IsAcceptedWithoutAnyWorker", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		r := f.result(f.rpc, "agent.request", request("s", "hi", "userId", "alice"))
		require.Equal(t, "thinking", r["phase"])
		require.Equal(t, "accepted", r["status"])
		require.Equal(t, "s", r["sessionId"])
		require.Equal(t, 1.0, r["seq"])
		require.NotContains(t, r, "position")
		require.NotContains(t, r, "duplicate")
		id := strings.TrimPrefix(text(t, r, "runId"), "run_")
		require.Equal(t, "turn_"+id, r["turnId"])
		var input, event, owner, user, job, ref string
		f.scan(`SELECT r.input, e.content, r.owner_token, r.user_id, (SELECT args->>'run_id' FROM river_job), s.conversation_ref
			FROM run r JOIN event e ON e.run_id = r.id AND e.type = 'agent.request' JOIN session s ON s.id = r.session_id`, &input, &event, &owner, &user, &job, &ref)
		require.JSONEq(t, `{"text":"hi","userId":"alice"}`, input)
		require.Equal(t, input, event)
		require.Equal(t, "rpc", owner)
		require.Equal(t, "alice", user)
		require.Equal(t, id, job)
		require.Equal(t, refOf(t, "default", "default", "rpc", nil, "s", nil, nil), ref)
	})
	t.Run("RC-5/RC-9/RC-10/RC-13/RC-4/BadParams", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		content := map[string]any{"text": "x"}
		for _, test := range []struct {
			field, reason string
			params        any
		}{
			{"sessionId", "required", map[string]any{"content": content}},
			{"sessionId", "invalid", map[string]any{"sessionId": "", "content": content}},
			{"sessionId", "invalid", map[string]any{"sessionId": "a\nb", "content": content}},
			{"content", "required", map[string]any{"sessionId": "s"}},
			{"content.text", "required", map[string]any{"sessionId": "s", "content": map[string]any{}}},
			{"content.text", "required", request("s", " \n")},
			{"content.text", "too_large", request("s", strings.Repeat("a", 262145))},
			{"content.images", "not_supported", map[string]any{"sessionId": "s", "content": map[string]any{"text": "x", "images": []any{map[string]any{"type": "url"}}}}},
			{"content.images[0].type", "invalid", map[string]any{"sessionId": "s", "content": map[string]any{"text": "x", "images": []any{map[string]any{"type": "ftp"}}}}},
			{"userId", "invalid", request("s", "x", "userId", "")},
			{"userId", "invalid", request("s", "x", "userId", "a\x7f")},
			{"agentId", "unknown_agent", request("s", "x", "agentId", "nobody")},
			{"agentId", "unknown_agent", request("s", "x", "agentId", "Not A Name")},
			{"idempotencyKey", "invalid", request("s", "x", "idempotencyKey", "")},
			{"idempotencyKey", "invalid", request("s", "x", "idempotencyKey", strings.Repeat("k", 129))},
		} {
			f.invalid(test.field, test.reason, f.rpc, "agent.request", test.params)
		}
	})
	t.Run("RC-18/NulAndSurrogatesAreReplaced", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.rpc, "agent.request", `{"sessionId":"s\u0000","content":{"text":"a\u0000\ud800b"}}`)
		var input, name string
		f.scan(`SELECT r.input, s.external_id FROM run r, session s`, &input, &name)
		require.JSONEq(t, `{"text":"a\ufffd\ufffdb"}`, input)
		require.Equal(t, "s\ufffd", name)
	})
	t.Run("RC-7/UserIsRequiredByAgentsWithFactsOfUsers", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.admin, "agents.create", map[string]any{"name": "remembers", "memory": map[string]any{"scope": "user"}})
		f.invalid("userId", "required_by_agent", f.rpc, "agent.request", request("s", "x", "agentId", "remembers"))
		f.result(f.rpc, "agent.request", request("s", "x", "agentId", "remembers", "userId", "u"))
	})
	t.Run("RC-6/UserIsOptionalElse", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.rpc, "agent.request", request("s", "x"))
	})
	t.Run("RC-13/SessionIsBoundToItsFirstAgent", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.admin, "agents.create", map[string]any{"name": "one"})
		f.result(f.admin, "agents.create", map[string]any{"name": "two"})
		f.result(f.rpc, "agent.request", request("s", "x", "agentId", "one"))
		f.invalid("agentId", "session_agent_mismatch", f.rpc, "agent.request", request("s", "x", "agentId", "two"))
		f.result(f.rpc, "agent.request", request("s", "x")) // names none
		f.result(f.rpc, "agent.request", request("s", "x", "agentId", "one"))
		var agents string
		f.scan(`SELECT string_agg(DISTINCT agent, ',') FROM run`, &agents)
		require.Equal(t, "one", agents)
	})
	t.Run("RC-26/TheIDOfACallIsNoKey", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		a, b := f.result(f.rpc, "agent.request", request("s", "x")), f.result(f.rpc, "agent.request", request("s", "x"))
		require.NotEqual(t, a["runId"], b["runId"])
	})
	t.Run("RC-29/RC-30/TurnsQueueUpToABound", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for i := range 21 {
			r := f.result(f.rpc, "agent.request", request("s", fmt.Sprint(i)))
			if i == 0 {
				require.Equal(t, "thinking", r["phase"])
				continue
			}
			require.Equal(t, "queued", r["phase"])
			require.Equal(t, float64(i), r["position"])
		}
		before := f.stored()
		e := f.refused(rpc.SessionBusy, f.rpc, "agent.request", request("s", "one too many"))
		require.Equal(t, map[string]any{"queued": 20.0, "retryable": true}, e.Data)
		require.Equal(t, before, f.stored())
		f.result(f.rpc, "agent.request", request("other", "has room"))
	})
	t.Run("RC-14/WithoutIDItIsProcessedAndNotAnswered", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		status, _, body := f.do("POST", "/rpc", f.rpc, `{"jsonrpc":"2.0","method":"agent.request","params":{"sessionId":"s","content":{"text":"x"}}}`)
		require.Equal(t, http.StatusNoContent, status)
		require.Empty(t, body)
		require.Equal(t, true, f.result(f.rpc, "agent.status", request("s", ""))["known"])
	})
	t.Run("RC-17/MembersOfABatchTakeEffectInOrder", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		var calls []string
		for i := range 10 {
			calls = append(calls, fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"agent.request","params":{"sessionId":"s","content":{"text":"x"}}}`, i))
		}
		_, _, body := f.do("POST", "/rpc", f.rpc, "["+strings.Join(calls, ",")+"]")
		var answers []struct {
			ID     int
			Result struct{ Position int }
		}
		require.NoError(t, json.Unmarshal([]byte(body), &answers))
		require.Len(t, answers, 10)
		for i, a := range answers {
			require.Equal(t, i, a.ID)
			require.Equal(t, i, a.Result.Position)
		}
	})
	t.Run("RC-16/UnknownMembersAreIgnored", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.rpc, "agent.request", `{"sessionId":"s","content":{"text":"x","more":1},"_agentId":"x","more":{}}`)
	})
	t.Run("RC-150/CredentialsAreMasked", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.rpc, "agent.request", request("s", "use sk-ant-api03-abcdefghijklmnopqrstuvwxyz0123456789ABCDEF please"))
		var input string
		f.scan(`SELECT input FROM run`, &input)
		require.NotContains(t, input, "abcdefghijkl")
	})
	t.Run("Scope", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for _, token := range []string{f.admin, f.read} {
			e := f.refused(rpc.InternalError, token, "agent.request", request("s", "x"))
			require.Equal(t, "Insufficient scope: requires 'rpc'", e.Message)
		}
	})
	t.Run("RC-149/AnotherTenantsSessionIsNotThere", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.rpc, "agent.request", request("s", "x"))
		require.Equal(t, false, f.result(f.otherRPC, "agent.status", request("s", ""))["known"])
		f.result(f.otherRPC, "agent.request", request("s", "y"))
		var n int
		f.scan(`SELECT count(*) FROM session WHERE external_id = 's'`, &n)
		require.Equal(t, 2, n)
	})
	t.Run("AddressesASessionByItsReference", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.rpc, "agent.request", request("s", "x"))
		var ref string
		f.scan(`SELECT conversation_ref FROM session`, &ref)
		r := f.result(f.rpc, "agent.request", request(ref, "y"))
		require.Equal(t, 1.0, r["position"])
		require.Equal(t, ref, r["sessionId"])
		f.result(f.otherRPC, "agent.request", request(ref, "z")) // a name like any other
		var n int
		f.scan(`SELECT count(*) FROM session`, &n)
		require.Equal(t, 2, n)
	})
	t.Run("NothingIsLookedUp", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.rpc, "agent.request", request("s", "x")) // fills the caches
		n := 0
		f.eventually("no look", func() bool { // unless what is remembered was too old just then
			n++
			asked := f.asked.Load()
			f.result(f.rpc, "agent.request", request(fmt.Sprint("s", n), "x"))
			return f.asked.Load()-asked == 0
		})
		_, err := f.server.activeAgent(f.ctx, "default", "default")
		require.NoError(t, err)
		asked := f.asked.Load()
		wait, err := f.server.agentExecute(withCaller(f.ctx, &Caller{TenantID: "default", TokenID: "t", Scopes: ScopeRPC}), &AgentExecuteParams{Message: "x"})
		require.NoError(t, err)
		require.Equal(t, int64(0), f.asked.Load()-asked)
		ctx, cancel := context.WithCancel(f.ctx)
		cancel()
		_, err = wait(ctx)
		require.ErrorIs(t, err, context.Canceled)
	})
}

// refOf computes a conversationRef as the contract says it.
func refOf(t testing.TB, scope ...any) string {
	t.Helper()
	text, err := json.Marshal(scope)
	require.NoError(t, err)
	sum := sha256.Sum256(text)
	return "cv_" + base64.RawURLEncoding.EncodeToString(sum[:])
}

func TestAgentRequestRepeats(t *testing.T) {
	t.Parallel()
	t.Run("RC-25/IsAnsweredAsBefore", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		p := request("s", "x", "idempotencyKey", "k")
		first := f.result(f.rpc, "agent.request", p)
		f.result(f.rpc, "agent.request", request("s", "y")) // the queue grows
		again := f.result(f.rpc, "agent.request", p)
		require.Equal(t, true, again["duplicate"])
		delete(again, "duplicate")
		require.Equal(t, first, again)
		header := f.result(f.rpc, "agent.request", request("s", "x"), "Idempotency-Key", "k")
		require.Equal(t, first["runId"], header["runId"])
		elsewhere := f.result(f.rpc, "agent.request", request("t", "x", "idempotencyKey", "k"))
		require.NotEqual(t, first["runId"], elsewhere["runId"])
	})
	t.Run("RC-25/OtherContentIsAConflict", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.rpc, "agent.request", request("s", "x", "idempotencyKey", "k"))
		before := f.stored()
		f.refused(rpc.IdempotencyConflict, f.rpc, "agent.request", request("s", "y", "idempotencyKey", "k"))
		f.refused(rpc.IdempotencyConflict, f.rpc, "agent.request", request("s", "x", "idempotencyKey", "k", "userId", "u"))
		require.Equal(t, before, f.stored())
	})
	t.Run("RC-25/OnTwoPodsAtOnce", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		pods := []*pod{f.pod, f.another()}
		ids := gather(t, 40, func(i int) (string, error) {
			a, err := pods[i%2].tryCall(f.ctx, f.rpc, "agent.request", request("s", "x", "idempotencyKey", "k"))
			if err != nil || a.Error != nil {
				return "", fmt.Errorf("%w %v", err, a.Error)
			}
			var r AgentRequestResult
			err = json.Unmarshal(a.Result, &r)
			return r.RunID, err
		})
		require.Len(t, ids, 1)
		var n int
		f.scan(`SELECT count(*) FROM run`, &n)
		require.Equal(t, 1, n)
	})
	t.Run("ARefusedCallIsNotStored", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.admin, "agents.create", map[string]any{"name": "a"})
		f.result(f.admin, "agents.suspend", map[string]any{"agentId": "a"})
		p := request("s", "x", "idempotencyKey", "k", "agentId", "a")
		f.invalid("agentId", "agent_suspended", f.rpc, "agent.request", p)
		f.result(f.admin, "agents.resume", map[string]any{"agentId": "a"})
		first := f.result(f.rpc, "agent.request", p)
		require.NotContains(t, first, "duplicate")
		f.result(f.admin, "agents.delete", map[string]any{"agentId": "a"})
		again := f.result(f.rpc, "agent.request", p) // it was accepted then
		require.Equal(t, first["runId"], again["runId"])
	})
}

// gather runs f at once n times and returns the different answers.
func gather(t testing.TB, n int, f func(i int) (string, error)) map[string]int {
	t.Helper()
	answers, errs := make([]string, n), make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { answers[i], errs[i] = f(i) })
	}
	wg.Wait()
	different := map[string]int{}
	for i := range n {
		require.NoError(t, errs[i])
		different[answers[i]]++
	}
	return different
}

func TestAgentExecute(t *testing.T) {
	t.Parallel()
	t.Run("AnswersAsTheContractSays", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.work()
		r := f.result(f.rpc, "agent.execute", map[string]any{"message": "hi", "agentId": "default"})
		require.Equal(t, "echo: hi", r["response"])
		require.Equal(t, map[string]any{"input": 6.0, "output": 9.0, "total": 15.0}, r["tokensUsed"])
		require.Equal(t, "stop", r["finishReason"])
		require.Equal(t, 7.0, r["costMicros"])
		require.Equal(t, strings.TrimPrefix(text(t, r, "runId"), "run_"), strings.TrimPrefix(text(t, r, "turnId"), "turn_"))
		require.True(t, isRef(text(t, r, "conversationRef")))
		asks := f.result(f.rpc, "agent.execute", map[string]any{"message": "!clarify which?"})
		require.Equal(t, "which?", asks["response"])
		require.Equal(t, "clarify", asks["finishReason"])
	})
	t.Run("SessionsHaveThreeNames", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.work()
		f.result(f.admin, "agents.create", map[string]any{"name": "b"})
		ref := func(more map[string]any) string {
			t.Helper()
			p := map[string]any{"message": "x"}
			for k, v := range more {
				p[k] = v
			}
			return text(t, f.result(f.rpc, "agent.execute", p), "conversationRef")
		}
		key := map[string]any{"tenantId": "default", "userId": "alice", "channelId": "cli"}
		byKey := ref(map[string]any{"sessionKey": key})
		require.Equal(t, refOf(t, "default", "default", "api", nil, "cli", nil, "alice"), byKey)
		require.Equal(t, byKey, ref(map[string]any{"sessionKey": key}))
		require.Equal(t, refOf(t, "default", "b", "api", nil, "cli", nil, "alice"), ref(map[string]any{"sessionKey": key, "agentId": "b"}))
		require.Equal(t, byKey, ref(map[string]any{"sessionKey": map[string]any{"conversationRef": byKey}}))
		require.Equal(t, byKey, ref(map[string]any{"sessionId": byKey}))
		require.Equal(t, refOf(t, "default", "default", "rpc", nil, "s", nil, nil), ref(map[string]any{"sessionId": "s"}))
		require.NotEqual(t, ref(nil), ref(nil))
		var users string
		f.scan(`SELECT string_agg(DISTINCT coalesce(user_id, '-'), ',' ORDER BY coalesce(user_id, '-')) FROM run`, &users)
		require.Equal(t, "-,alice", users)
		var id uuid.UUID
		f.scan(`SELECT id FROM session WHERE external_id = 's'`, &id)
		require.Equal(t, false, f.result(f.rpc, "agent.status", request(id.String(), ""))["known"]) // no task
	})
	t.Run("BadParams", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for _, test := range []struct {
			field, reason string
			more          map[string]any
		}{
			{"message", "required", map[string]any{}},
			{"message", "required", map[string]any{"message": " "}},
			{"message", "too_large", map[string]any{"message": strings.Repeat("x", 262145)}},
			{"timeoutMs", "invalid", map[string]any{"message": "x", "timeoutMs": 0}},
			{"timeoutMs", "invalid", map[string]any{"message": "x", "timeoutMs": 3600001}},
			{"agentId", "unknown_agent", map[string]any{"message": "x", "agentId": "nobody"}},
			{"sessionKey", "invalid", map[string]any{"message": "x", "sessionKey": map[string]any{}, "sessionId": "s"}},
			{"sessionKey.tenantId", "unknown", map[string]any{"message": "x", "sessionKey": map[string]any{"tenantId": "other"}}},
			{"sessionKey.channelId", "invalid", map[string]any{"message": "x", "sessionKey": map[string]any{"channelId": "a\nb"}}},
			{"sessionKey.channelId", "invalid", map[string]any{"message": "x", "sessionKey": map[string]any{"channelId": "a", "conversationRef": "b"}}},
			{"sessionKey.userId", "invalid", map[string]any{"message": "x", "sessionKey": map[string]any{"userId": ""}}},
			{"sessionKey.conversationRef", "unknown", map[string]any{"message": "x", "sessionKey": map[string]any{"conversationRef": refOf(t, "nothing")}}},
			{"scopes[0]", "invalid", map[string]any{"message": "x", "scopes": []string{"admin"}}},
			{"scopes[1]", "invalid", map[string]any{"message": "x", "scopes": []string{"rpc", "root"}}},
		} {
			f.invalid(test.field, test.reason, f.rpc, "agent.execute", test.more)
		}
	})
	t.Run("RC-149/AnotherTenantsConversationIsNotThere", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.work()
		r := f.result(f.rpc, "agent.execute", map[string]any{"message": "x"})
		f.invalid("sessionKey.conversationRef", "unknown", f.otherRPC, "agent.execute", map[string]any{"message": "x", "sessionKey": map[string]any{"conversationRef": r["conversationRef"]}})
	})
	t.Run("ATurnThatFails", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.work()
		e := f.refused(rpc.TurnFailed, f.rpc, "agent.execute", map[string]any{"message": "!fail", "sessionId": "s"})
		require.Equal(t, "provider_error", e.Data["kind"])
		require.Equal(t, "no luck", e.Data["message"])
		require.Equal(t, true, e.Data["retryable"])
		require.Equal(t, "so far", e.Data["partial"])
		require.Equal(t, map[string]any{"input": 6.0, "output": 9.0, "total": 15.0}, e.Data["tokensUsed"])
		require.Equal(t, refOf(t, "default", "default", "rpc", nil, "s", nil, nil), e.Data["conversationRef"])
		require.Equal(t, strings.TrimPrefix(text(t, e.Data, "runId"), "run_"), strings.TrimPrefix(text(t, e.Data, "turnId"), "turn_"))
	})
	t.Run("AWaitThatEndsBeforeItsTurnMayWaitAgain", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w := f.work()
		p := map[string]any{"message": "!hold", "timeoutMs": 50, "idempotencyKey": "k", "sessionId": "s"}
		e := f.refused(rpc.StillRunning, f.rpc, "agent.execute", p)
		require.Equal(t, "thinking", e.Data["phase"])
		require.Equal(t, []any{}, e.Data["pendingCalls"])
		queued := f.refused(rpc.StillRunning, f.rpc, "agent.execute", map[string]any{"message": "x", "timeoutMs": 50, "sessionId": "s"})
		require.Equal(t, "queued", queued.Data["phase"])
		w.letGo()
		p["timeoutMs"] = 20000
		r := f.result(f.rpc, "agent.execute", p)
		require.Equal(t, e.Data["runId"], r["runId"])
		require.Equal(t, "echo: !hold", r["response"])
		require.Equal(t, r["runId"], f.another().result(f.rpc, "agent.execute", p)["runId"])
		p["message"] = "other"
		f.refused(rpc.IdempotencyConflict, f.rpc, "agent.execute", p)
	})
	t.Run("AClientThatLeavesLosesNothing", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w := f.work()
		ctx, cancel := context.WithCancel(f.ctx)
		left := make(chan error)
		p := map[string]any{"message": "!hold", "idempotencyKey": "k"}
		go func() {
			_, err := f.tryCall(ctx, f.rpc, "agent.execute", p)
			left <- err
		}()
		f.eventually("the turn runs", func() bool {
			var n int
			f.scan(`SELECT count(*) FROM run WHERE state = 'running'`, &n)
			return n == 1
		})
		cancel()
		require.Error(t, <-left)
		w.letGo()
		require.Equal(t, "echo: !hold", f.result(f.rpc, "agent.execute", p)["response"])
		require.NotContains(t, f.log.String(), `"ERROR"`)
	})
	t.Run("RC-17a/MembersOfABatchWaitTogether", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.work()
		var calls []string
		for i := range 5 {
			calls = append(calls, fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"agent.execute","params":{"sessionId":"s","message":"%d"}}`, i, i))
		}
		_, _, body := f.do("POST", "/rpc", f.rpc, "["+strings.Join(calls, ",")+"]")
		var answers []struct{ Result AgentExecuteResult }
		require.NoError(t, json.Unmarshal([]byte(body), &answers))
		for i, a := range answers {
			require.Equal(t, fmt.Sprintf("echo: %d", i), a.Result.Response)
		}
	})
	t.Run("ADrainEndsTheWaitAndNotTheTurn", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		w := f.work()
		answer := make(chan rpcAnswer, 1)
		p := map[string]any{"message": "!hold", "idempotencyKey": "k"}
		go func() {
			a, _ := f.tryCall(f.ctx, f.rpc, "agent.execute", p)
			answer <- a
		}()
		f.eventually("the turn runs", func() bool {
			var n int
			f.scan(`SELECT count(*) FROM run WHERE state = 'running'`, &n)
			return n == 1
		})
		f.server.Drain()
		a := <-answer
		require.NotNil(t, a.Error)
		require.Equal(t, rpc.StillRunning, a.Error.Code)
		w.letGo()
		require.Equal(t, "echo: !hold", f.another().result(f.rpc, "agent.execute", p)["response"])
	})
	t.Run("Scope", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		require.Equal(t, "Insufficient scope: requires 'rpc'", f.refused(rpc.InternalError, f.admin, "agent.execute", map[string]any{}).Message)
	})
}

func TestAgentStatus(t *testing.T) {
	t.Parallel()
	t.Run("RC-144/AnUnusedSessionIsNotMade", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		before := f.stored()
		r := f.result(f.rpc, "agent.status", request("s", ""))
		require.Equal(t, map[string]any{
			"sessionId": "s", "known": false, "phase": "idle", "queued": 0.0, "seq": 0.0, "pendingCalls": []any{}, "budgets": []any{},
		}, r)
		require.Equal(t, before, f.stored())
	})
	t.Run("RC-142/RC-143/RC-145/Phases", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		status := func() map[string]any { return f.result(f.rpc, "agent.status", request("s", "")) }
		first := f.result(f.rpc, "agent.request", request("s", "x"))
		f.result(f.rpc, "agent.request", request("s", "y"))
		r := status()
		require.Equal(t, "thinking", r["phase"])
		require.Equal(t, first["runId"], r["runId"])
		require.Equal(t, first["turnId"], r["turnId"])
		require.Equal(t, 1.0, r["queued"])
		require.Equal(t, 3.0, r["seq"])

		id := uuid.MustParse(strings.TrimPrefix(text(t, first, "runId"), "run_"))
		run, err := f.runs.Claim(f.ctx, f.registerWorker(), id)
		require.NoError(t, err)
		require.Equal(t, "thinking", status()["phase"])
		_, err = f.runs.Advance(f.ctx, run, jobs.Advance{Park: &jobs.Park{Kind: db.WaitKindApproval, For: 1 << 40}})
		require.NoError(t, err)
		require.Equal(t, "approval", status()["phase"])
		_, err = f.runs.Wake(f.ctx, jobs.Ref{ID: id, Session: run.SessionID}, db.WaitKindApproval)
		require.NoError(t, err)
		run, err = f.runs.Claim(f.ctx, f.registerWorker(), id)
		require.NoError(t, err)
		require.Equal(t, "cancelling", f.result(f.rpc, "run.cancel", map[string]any{"runId": first["runId"]})["status"])
		require.Equal(t, "cancelling", status()["phase"])
		end := jobs.CancelEnding("")
		_, err = f.runs.Advance(f.ctx, run, jobs.Advance{End: &end})
		require.NoError(t, err)
		require.Equal(t, "thinking", status()["phase"]) // the next one
		f.work()
		f.eventually("idle", func() bool { return status()["phase"] == "idle" })
		require.NotContains(t, status(), "runId")
		f.result(f.rpc, "agent.execute", map[string]any{"sessionId": "s", "message": "!clarify what?"})
		require.Equal(t, "clarify", status()["phase"])
	})
	t.Run("RC-4/RC-11/Params", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.invalid("sessionId", "required", f.rpc, "agent.status", `{}`)
		f.result(f.rpc, "agent.status", `{"sessionId":"s","content":7}`)
		require.Equal(t, "Insufficient scope: requires 'rpc'", f.refused(rpc.InternalError, f.read, "agent.status", `{}`).Message)
	})
}
