package api

import (
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/api/rpc"
)

// queue returns a queue as queue.list shows it.
func (f *fixture) queue(name string) map[string]any {
	f.t.Helper()
	for _, q := range f.result(f.read, "queue.list", `{}`)["queues"].([]any) {
		if q := q.(map[string]any); q["queue"] == name {
			return q
		}
	}
	f.t.Fatalf("no queue %s", name)
	return nil
}

func TestQueues(t *testing.T) {
	t.Parallel()
	turns := map[string]any{"queue": "turns"}
	t.Run("APausedQueueAcceptsAndStartsNothing", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		before := f.start("before", "x")
		r := f.result(f.admin, "queue.pause", turns)
		require.InDelta(t, 1, r["takenBack"], 0)
		require.Equal(t, true, f.queue("turns")["paused"])
		after := f.start("after", "x")
		for _, id := range []uuid.UUID{before, after} {
			_, err := f.runs.Claim(f.ctx, f.registerWorker(), id)
			require.ErrorContains(t, err, "not queued")
		}
		f.result(f.admin, "queue.pause", turns) // again is no error
		f.result(f.admin, "queue.resume", turns)
		require.Equal(t, false, f.queue("turns")["paused"])
		require.Nil(t, f.queue("turns")["pausedAt"])
	})
	t.Run("LimitsAreSetKeptAndRemoved", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		limit := func(more ...any) {
			p := map[string]any{"queue": "turns"}
			for i := 0; i < len(more); i += 2 {
				p[more[i].(string)] = more[i+1]
			}
			f.result(f.admin, "queue.limit", p)
		}
		limit("maxRunning", 5, "maxWaiting", 7)
		limit("maxRunning", 6)
		q := f.queue("turns")
		require.Equal(t, []any{6.0, 7.0, false}, []any{q["maxRunning"], q["maxWaiting"], q["fastPath"]})
		limit("maxRunning", nil, "maxWaiting", nil)
		q = f.queue("turns")
		require.Equal(t, []any{nil, nil}, []any{q["maxRunning"], q["maxWaiting"]})
	})
	t.Run("AFullQueueRefusesAndStoresNothing", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.admin, "queue.limit", map[string]any{"queue": "turns", "maxWaiting": 2})
		f.exec(`UPDATE queue SET open = false WHERE name = 'turns'`) // no admitter lives, or there is no room
		f.result(f.rpc, "agent.request", request("one", "x"))
		f.result(f.rpc, "agent.request", request("two", "x"))
		f.result(f.rpc, "agent.request", request("one", "behind its session's turn"))
		require.InDelta(t, 2, f.queue("turns")["waiting"], 0)
		before := f.stored()
		e := f.refused(rpc.Unavailable, f.rpc, "agent.request", request("s", "x", "idempotencyKey", "k"))
		require.Equal(t, map[string]any{"queue": "turns", "retryable": true}, e.Data)
		require.Equal(t, before, f.stored())
		f.result(f.admin, "queue.limit", map[string]any{"queue": "turns", "maxWaiting": nil})
		f.result(f.rpc, "agent.request", request("s", "x", "idempotencyKey", "k"))
	})
	t.Run("BadParams", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for _, method := range []string{"queue.pause", "queue.resume", "queue.limit"} {
			f.invalid("queue", "required", f.admin, method, `{}`)
			f.invalid("queue", "invalid", f.admin, method, `{"queue":"nope"}`)
		}
		for _, bad := range []any{-1, 1.5, "7", 1_000_001, []any{}} {
			f.invalid("maxRunning", "invalid", f.admin, "queue.limit", map[string]any{"queue": "turns", "maxRunning": bad})
		}
		f.invalid("maxWaiting", "invalid", f.admin, "queue.limit", map[string]any{"queue": "turns", "maxWaiting": 10_001})
	})
}

func TestTenants(t *testing.T) {
	t.Parallel()
	f := setup(t)
	set := f.result(f.admin, "tenant.set", map[string]any{"tenantId": "other", "weight": 2.5, "maxRunning": 10})
	require.Equal(t, []any{"other", 2.5, 10.0}, []any{set["tenantId"], set["weight"], set["maxRunning"]})
	set = f.result(f.admin, "tenant.set", map[string]any{"tenantId": "other", "maxRunning": nil})
	require.Equal(t, []any{2.5, nil}, []any{set["weight"], set["maxRunning"]})
	list := f.result(f.read, "tenant.list", `{"limit":1,"after":"default"}`)["tenants"].([]any)
	require.Len(t, list, 1)
	require.Equal(t, "other", list[0].(map[string]any)["tenantId"])
	f.missing("tenant", f.admin, "tenant.set", map[string]any{"tenantId": "nobody", "weight": 1})
	f.invalid("weight", "invalid", f.admin, "tenant.set", map[string]any{"tenantId": "other", "weight": 0})
	f.invalid("tenantId", "invalid", f.admin, "tenant.set", map[string]any{"tenantId": "No Tenant"})
	f.invalid("maxRunning", "invalid", f.admin, "tenant.set", map[string]any{"tenantId": "other", "maxRunning": "x"})
}

func TestWorkerIsAsked(t *testing.T) {
	t.Parallel()
	f := setup(t)
	id := f.registerWorker()
	require.Equal(t, "quiet", f.result(f.admin, "worker.quiet", map[string]any{"workerId": id.String()})["wanted"])
	require.Equal(t, "quiet", f.result(f.read, "worker.list", `{}`)["workers"].([]any)[0].(map[string]any)["wanted"])
	require.Equal(t, "drain", f.result(f.admin, "worker.drain", map[string]any{"workerId": id.String()})["wanted"])
	require.Equal(t, "drain", f.result(f.admin, "worker.quiet", map[string]any{"workerId": id.String()})["wanted"], "a drain is not taken back")
	f.missing("worker", f.admin, "worker.drain", map[string]any{"workerId": uuid.NewString()})
	f.missing("worker", f.admin, "worker.quiet", map[string]any{"workerId": "me"})
	f.exec(`UPDATE worker SET state = 'left', ended_at = now()`)
	f.missing("worker", f.admin, "worker.drain", map[string]any{"workerId": id.String()})
}

// What belongs to the fleet is the operators': no admin of another tenant sees
// or changes it.
func TestFleetIsTheOperators(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for method, params := range map[string]string{
		"queue.list": `{}`, "queue.pause": `{"queue":"turns"}`, "queue.resume": `{"queue":"turns"}`, "queue.limit": `{"queue":"turns","maxRunning":1}`,
		"tenant.list": `{}`, "tenant.set": `{"tenantId":"other","weight":100}`,
		"worker.quiet": `{"workerId":"x"}`, "worker.drain": `{"workerId":"x"}`,
	} {
		e := f.refused(rpc.InternalError, f.otherAdmin, method, params)
		require.Equal(t, "Insufficient scope: requires a token of tenant 'default'", e.Message)
		e = f.refused(rpc.InternalError, f.rpc, method, params)
		require.Equal(t, "Insufficient scope: requires 'admin'", e.Message)
	}
	require.Equal(t, 1.0, f.result(f.admin, "tenant.set", `{"tenantId":"other"}`)["weight"])
}

func (f *fixture) exec(sql string) {
	f.t.Helper()
	_, err := f.pool.Exec(f.ctx, sql)
	require.NoError(f.t, err)
}
