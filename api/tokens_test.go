package api

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/api/rpc"
)

func TestTokens(t *testing.T) {
	t.Parallel()
	ping := func(p *pod, token string) int {
		status, _, _ := p.do("POST", "/rpc", token, `{"jsonrpc":"2.0","id":1,"method":"system.ping"}`)
		return status
	}
	t.Run("LifeOfAToken", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		made := f.result(f.admin, "tokens.create", map[string]any{"id": "new", "scopes": []string{"read", "rpc", "rpc"}})
		secret := text(t, made, "secret")
		require.Regexp(t, `^wt_[A-Za-z0-9_-]{43}$`, secret)
		require.Equal(t, []any{"rpc", "read"}, made["scopes"])
		require.Equal(t, http.StatusOK, ping(f.pod, secret))
		var hash []byte
		f.scan(`SELECT secret_hash FROM api_token WHERE id = 'new'`, &hash)
		sum := sha256.Sum256([]byte(secret))
		require.Equal(t, sum[:], hash)

		rotated := f.result(f.admin, "tokens.rotate", map[string]any{"id": "new"})
		require.Equal(t, []any{"rpc", "read"}, rotated["scopes"])
		require.Equal(t, http.StatusUnauthorized, ping(f.pod, secret), "at the next request")
		require.Equal(t, http.StatusOK, ping(f.pod, text(t, rotated, "secret")))

		for range 2 {
			require.Equal(t, true, f.result(f.admin, "tokens.revoke", map[string]any{"id": "new"})["revoked"])
		}
		require.Equal(t, http.StatusUnauthorized, ping(f.pod, text(t, rotated, "secret")), "at the next request")
		f.missing("token", f.admin, "tokens.rotate", map[string]any{"id": "new"})
		f.result(f.admin, "tokens.create", map[string]any{"id": "new", "scopes": []string{"rpc"}})
		require.Equal(t, http.StatusUnauthorized, ping(f.pod, secret))
	})
	t.Run("ListShowsNoSecret", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.admin, "tokens.revoke", map[string]any{"id": "read"})
		a := f.call(f.admin, "tokens.list", `{}`)
		require.NotContains(t, string(a.Result), "wt_")
		var ids []string
		for _, token := range f.result(f.admin, "tokens.list", `{}`)["tokens"].([]any) {
			m := token.(map[string]any)
			require.Regexp(t, `^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$`, m["createdAt"])
			ids = append(ids, text(t, m, "id"))
		}
		require.Equal(t, []string{"admin", "all", "rpc"}, ids)
	})
	t.Run("AnotherPodRefusesAtOnce", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		other := f.another()
		require.Equal(t, http.StatusOK, ping(other, f.rpc)) // it remembers the token
		f.result(f.admin, "tokens.revoke", map[string]any{"id": "rpc"})
		other.eventually("it refuses", func() bool { return ping(other, f.rpc) == http.StatusUnauthorized })
	})
	t.Run("WhatIsRememberedIsNeverOlderThanHalfASecond", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		require.Equal(t, http.StatusOK, ping(f.pod, f.rpc))
		_, err := f.pool.Exec(f.ctx, `UPDATE api_token SET revoked_at = now() WHERE id = 'rpc'`) // and the bus is not told
		require.NoError(t, err)
		f.eventually("it refuses", func() bool { return ping(f.pod, f.rpc) == http.StatusUnauthorized })
	})
	t.Run("OnlyAllMintsAll", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		before := f.stored()
		e := f.refused(rpc.InternalError, f.admin, "tokens.create", map[string]any{"id": "x", "scopes": []string{"rpc", "*"}})
		require.Equal(t, "Insufficient scope: requires '*'", e.Message)
		e = f.refused(rpc.InternalError, f.admin, "tokens.rotate", map[string]any{"id": "all"})
		require.Equal(t, "Insufficient scope: requires '*'", e.Message)
		require.Equal(t, before, f.stored())
		f.result(f.all, "tokens.create", map[string]any{"id": "x", "scopes": []string{"*"}})
		f.result(f.all, "tokens.rotate", map[string]any{"id": "x"})
	})
	t.Run("BadParams", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for _, test := range []struct {
			field, reason, method string
			params                map[string]any
		}{
			{"id", "required", "tokens.create", map[string]any{"scopes": []string{"rpc"}}},
			{"id", "invalid", "tokens.create", map[string]any{"id": "a b", "scopes": []string{"rpc"}}},
			{"id", "exists", "tokens.create", map[string]any{"id": "rpc", "scopes": []string{"rpc"}}},
			{"scopes", "required", "tokens.create", map[string]any{"id": "x"}},
			{"scopes", "invalid", "tokens.create", map[string]any{"id": "x", "scopes": []string{}}},
			{"scopes[1]", "invalid", "tokens.create", map[string]any{"id": "x", "scopes": []string{"rpc", "root"}}},
			{"id", "required", "tokens.revoke", map[string]any{}},
			{"id", "required", "tokens.rotate", map[string]any{}},
		} {
			f.invalid(test.field, test.reason, f.admin, test.method, test.params)
		}
	})
	t.Run("RC-149/AnotherTenantsTokenIsNotThere", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for _, method := range []string{"tokens.revoke", "tokens.rotate"} {
			f.missing("token", f.otherAdmin, method, map[string]any{"id": "all"})
			f.missing("token", f.otherAdmin, method, map[string]any{"id": "nobody"})
		}
		require.Len(t, f.result(f.otherAdmin, "tokens.list", `{}`)["tokens"], 2)
	})
	t.Run("Scopes", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for _, method := range []string{"tokens.list", "tokens.create", "tokens.revoke", "tokens.rotate"} {
			require.Equal(t, "Insufficient scope: requires 'admin'", f.refused(rpc.InternalError, f.rpc, method, `{}`).Message)
		}
		f.refused(rpc.InternalError, f.read, "tokens.create", `{}`)
		f.result(f.read, "tokens.list", `{}`)
	})
}

// TestRepeats is about the idempotency of every other method that changes
// something.
func TestRepeats(t *testing.T) {
	t.Parallel()
	const key = "Idempotency-Key"
	t.Run("IsAnsweredAsBefore", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		p := map[string]any{"name": "a", "instructions": "x"}
		first := f.result(f.admin, "agents.create", p, key, "k")
		again := f.another().result(f.admin, "agents.create", p, key, "k")
		require.Equal(t, first, again)
		p["idempotencyKey"] = "k" // as a member, beside others in another order
		require.Equal(t, first, f.result(f.admin, "agents.create", p))
		f.refused(rpc.IdempotencyConflict, f.admin, "agents.create", map[string]any{"name": "b"}, key, "k")
		f.result(f.admin, "agents.suspend", agent("a"), key, "k") // the key of another method
		f.result(f.otherAdmin, "agents.create", map[string]any{"name": "c"}, key, "k")
	})
	t.Run("ARefusedCallIsNotStored", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		before := f.stored()
		f.refused(rpc.InvalidParams, f.admin, "agents.create", map[string]any{"name": "default"}, key, "k")
		f.refused(rpc.InvalidParams, f.admin, "agents.delete", agent("nobody"), key, "k")
		f.refused(rpc.InvalidParams, f.admin, "run.cancel", map[string]any{"runId": "run_x"}, key, "k")
		require.Equal(t, before, f.stored())
		f.result(f.admin, "agents.create", map[string]any{"name": "b"}, key, "k")
	})
	t.Run("AfterADayTheKeyIsFree", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.admin, "agents.create", map[string]any{"name": "a"}, key, "k")
		_, err := f.pool.Exec(f.ctx, `UPDATE idempotency SET created_at = created_at - interval '25 hours'`)
		require.NoError(t, err)
		f.result(f.admin, "agents.create", map[string]any{"name": "b"}, key, "k")
	})
	t.Run("OnTwoPodsAtOnce", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		pods := []*pod{f.pod, f.another()}
		for round := range 5 {
			answers := gather(t, 20, func(i int) (string, error) {
				a, err := pods[i%2].tryCall(f.ctx, f.admin, "agents.create", map[string]any{"name": fmt.Sprint("a", round)}, key, fmt.Sprint("k", round))
				if err == nil && a.Error != nil {
					err = fmt.Errorf("%v", a.Error)
				}
				return string(a.Result), err
			})
			require.Len(t, answers, 1)
		}
	})
	t.Run("MoreCallsThanConnections", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		answers := gather(t, 60, func(i int) (string, error) {
			a, err := f.tryCall(f.ctx, f.all, "run.kill", map[string]any{"rootRunId": newID().String()}, key, fmt.Sprint("k", i))
			if err == nil && a.Error.Code != rpc.InvalidParams {
				err = fmt.Errorf("%v", a.Error)
			}
			return "", err
		})
		require.Len(t, answers, 1)
	})
	t.Run("SecretsAreShownOnce", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		p := map[string]any{"id": "x", "scopes": []string{"rpc"}}
		secret := text(t, f.result(f.admin, "tokens.create", p, key, "k"), "secret")
		again := f.result(f.admin, "tokens.create", p, key, "k")
		require.Equal(t, map[string]any{"id": "x", "secret": "", "scopes": []any{"rpc"}}, again)
		rotated := text(t, f.result(f.admin, "tokens.rotate", map[string]any{"id": "x"}, key, "k"), "secret")
		again = f.result(f.admin, "tokens.rotate", map[string]any{"id": "x"}, key, "k")
		require.Equal(t, map[string]any{"id": "x", "secret": "", "scopes": []any{"rpc"}, "rotated": true}, again)
		f.result(rotated, "system.ping", `{}`)
		var stored string
		f.scan(`SELECT string_agg(result::text, ' ') FROM idempotency`, &stored)
		require.NotContains(t, stored, secret)
		require.NotContains(t, stored, rotated)
		require.False(t, strings.Contains(f.log.String(), secret))
	})
	t.Run("ChangesAreSeenAtOnce", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.rpc, "agent.request", request("s", "x"))
		f.result(f.admin, "agents.suspend", agent("default"), key, "k")
		f.invalid("agentId", "agent_suspended", f.rpc, "agent.request", request("s", "x"))
	})
}
