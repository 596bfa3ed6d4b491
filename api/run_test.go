package api

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/api/rpc"
	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
)

// start accepts a turn and returns its run.
func (f *fixture) start(session, message string) uuid.UUID {
	f.t.Helper()
	r := f.result(f.rpc, "agent.request", request(session, message))
	return uuid.MustParse(strings.TrimPrefix(text(f.t, r, "runId"), "run_"))
}

// claim makes a worker of the run's owner.
func (f *fixture) claim(id uuid.UUID) *jobs.Run {
	f.t.Helper()
	run, err := f.runs.Claim(f.ctx, f.registerWorker(), id)
	require.NoError(f.t, err)
	return run
}

func (f *fixture) advance(run *jobs.Run, a jobs.Advance) {
	f.t.Helper()
	_, err := f.runs.Advance(f.ctx, run, a)
	require.NoError(f.t, err)
}

// spawn adds a sub-agent to a claimed run.
func (f *fixture) spawn(parent *jobs.Run) uuid.UUID {
	f.t.Helper()
	id := newID()
	child, err := f.runs.Spawn(f.ctx, parent, jobs.SpawnParams{
		Terms: jobs.Terms{Agent: "default", Version: 1, TurnTimeout: time.Minute, QueueCap: 20},
		Spec:  jobs.SessionSpec{ConversationRef: "cv_" + id.String(), ChannelType: "spawn", Kind: "sub-agent", Scope: []byte(`[]`)},
		Input: []byte(`{"text":"sub"}`), Step: jobs.Step{Seq: int32(len(parent.Steps)), CallID: "c" + id.String(), Name: "session_spawn"}, MaxDepth: 3, MaxChildren: 5,
	})
	require.NoError(f.t, err)
	return child
}

// poison makes a run lose its workers until it is set aside.
func (f *fixture) poison(id uuid.UUID, first *jobs.Run) {
	f.t.Helper()
	for i := range 3 {
		w := f.registerWorker()
		if i == 0 && first != nil {
			f.scan(fmt.Sprintf(`SELECT worker_id FROM run WHERE id = '%s'`, id), &w)
		} else {
			_, err := f.runs.Claim(f.ctx, w, id)
			require.NoError(f.t, err)
		}
		var session uuid.UUID
		f.scan(fmt.Sprintf(`SELECT session_id FROM run WHERE id = '%s'`, id), &session)
		done, err := f.runs.Reap(f.ctx, jobs.Ref{ID: id, Session: session}, w, true, i == 2)
		require.NoError(f.t, err)
		require.True(f.t, done)
	}
}

func runParam(id uuid.UUID) map[string]any { return map[string]any{"runId": runID(id)} }

func TestRunGet(t *testing.T) {
	t.Parallel()
	t.Run("ShowsARunWithItsSteps", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		id := f.start("s", "x")
		r := f.result(f.rpc, "run.get", runParam(id))
		require.Equal(t, "queued", r["state"])
		require.Equal(t, "turn", r["kind"])
		require.Equal(t, "s", r["sessionId"])
		require.Equal(t, refOf(t, "default", "default", "rpc", nil, "s", nil, nil), r["conversationRef"])
		require.Equal(t, r["runId"], r["rootRunId"])
		require.Equal(t, []any{}, r["steps"])
		for _, absent := range []string{"workerId", "endReason", "error", "waitsFor", "parentRunId", "startedAt", "finishedAt"} {
			require.NotContains(t, r, absent)
		}
		run := f.claim(id)
		f.advance(run, jobs.Advance{Steps: []jobs.Step{
			{Seq: 0, Kind: db.StepKindModel, Status: db.StepStatusDone, CallID: "m0", Name: "offline/offline-1", Output: []byte(`{}`)},
			{Seq: 1, Kind: db.StepKindTool, Status: db.StepStatusDone, CallID: "c1", Name: "orders_get", Output: []byte(`{"error":{"kind":"http","message":"broken"}}`)},
			{Seq: 2, Kind: db.StepKindTool, Status: db.StepStatusStarted, CallID: "c2", Name: "orders_get"},
		}, ModelCalls: 1})
		r = f.result(f.rpc, "run.get", map[string]any{"runId": id.String()}) // bare
		require.Equal(t, "running", r["state"])
		require.Equal(t, 1.0, r["stepsExecuted"])
		require.Contains(t, r, "workerId")
		require.Contains(t, r, "deadlineAt")
		steps := r["steps"].([]any)
		require.Len(t, steps, 3)
		require.NotContains(t, steps[0], "tool")
		require.Equal(t, "broken", steps[1].(map[string]any)["error"])
		require.Equal(t, "started", steps[2].(map[string]any)["status"])
		require.NotContains(t, steps[2], "finishedAt")
		end := jobs.FailEnding(jobs.ErrorContent{Kind: "provider_error", Message: "no luck"})
		f.advance(run, jobs.Advance{End: &end})
		r = f.result(f.admin, "run.get", runParam(id))
		require.Equal(t, "failed", r["state"])
		require.Equal(t, "provider_error: no luck", r["error"])
		require.Equal(t, "provider_error", r["endReason"])
	})
	t.Run("WaitsForAVersion", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		id := f.start("s", "x")
		var seen []float64
		version := func() float64 {
			v := f.result(f.rpc, "run.get", runParam(id))["version"].(float64)
			seen = append(seen, v)
			return v
		}
		known := version()
		waited := func(params map[string]any) <-chan map[string]any {
			answer := make(chan map[string]any, 1)
			params["runId"], params["waitMs"] = id.String(), 20000
			go func() { answer <- f.result(f.rpc, "run.get", params) }()
			return answer
		}
		answer := waited(map[string]any{"afterVersion": known})
		run := f.claim(id)
		require.Equal(t, "running", (<-answer)["state"])
		require.Equal(t, "running", (<-waited(map[string]any{"afterVersion": known}))["state"], "it has passed")
		version()
		f.advance(run, jobs.Advance{Park: &jobs.Park{Kind: db.WaitKindTimer, For: time.Hour}})
		version()
		_, err := f.runs.Wake(f.ctx, jobs.Ref{ID: id, Session: run.SessionID}, db.WaitKindTimer)
		require.NoError(t, err)
		version()
		run = f.claim(id)
		version()
		f.advance(run, jobs.Advance{Release: &jobs.Release{}})
		version()
		run = f.claim(id)
		version()
		answer = waited(map[string]any{})
		f.advance(run, answerOf(run, "x"))
		require.Equal(t, "completed", (<-answer)["state"])
		version()
		require.IsIncreasing(t, seen)
		require.Equal(t, "completed", (<-waited(map[string]any{"afterVersion": 1 << 40}))["state"], "it has ended")
		started := time.Now()
		f.result(f.rpc, "run.get", map[string]any{"runId": f.start("s", "y").String(), "waitMs": 1})
		require.Less(t, time.Since(started), waitLimit)
	})
	t.Run("OnTheRPCRouteOnlyTheTokensOwn", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		second := f.token("default", "second", "rpc")
		id := f.start("s", "x")
		child := f.spawn(f.claim(id))
		for _, run := range []uuid.UUID{id, child} {
			f.result(f.rpc, "run.get", runParam(run))
			f.result(f.admin, "run.get", runParam(run))
			f.result(f.all, "run.get", runParam(run))
			f.result(f.read, "run.get", runParam(run))
			for _, method := range []string{"run.get", "run.cancel"} {
				theirs := f.missing("run", second, method, runParam(run))
				require.Equal(t, "run not found: "+runID(run), theirs.Message)
			}
		}
		r := f.result(f.rpc, "run.get", runParam(child))
		require.Equal(t, runID(id), r["parentRunId"])
		require.Equal(t, runID(id), r["rootRunId"])
		require.Equal(t, "spawn", r["kind"])
		require.NotContains(t, r, "turnId")
		require.Equal(t, r["conversationRef"], r["sessionId"])
	})
	t.Run("RC-149/MissingAndAnotherTenants", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		id := f.start("s", "x")
		for _, method := range []string{"run.get", "run.cancel", "run.release"} {
			for _, missing := range []string{runID(id), runID(newID()), "run_x", "", "{" + id.String() + "}", strings.ReplaceAll(id.String(), "-", "")} {
				e := f.missing("run", f.otherAdmin, method, map[string]any{"runId": missing})
				require.Equal(t, "run not found: "+missing, e.Message)
			}
		}
		f.missing("run", f.otherAdmin, "run.kill", map[string]any{"rootRunId": runID(id)})
		f.missing("run", f.otherRPC, "run.get", runParam(id))
	})
	t.Run("BadParams", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for _, method := range []string{"run.get", "run.cancel", "run.release"} {
			f.invalid("runId", "required", f.admin, method, `{}`)
		}
		f.invalid("rootRunId", "required", f.admin, "run.kill", `{}`)
		f.invalid("runId", "invalid", f.admin, "run.get", map[string]any{"runId": strings.Repeat("x", 65)})
		f.invalid("waitMs", "invalid", f.admin, "run.get", map[string]any{"runId": "x", "waitMs": 60001})
		f.invalid("reason", "too_large", f.admin, "run.cancel", map[string]any{"runId": "x", "reason": strings.Repeat("x", 1025)})
	})
	t.Run("Scopes", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for _, method := range []string{"run.list", "run.release", "run.kill", "worker.list", "gateway.status"} {
			require.Equal(t, "Insufficient scope: requires 'admin'", f.refused(rpc.InternalError, f.rpc, method, `{}`).Message)
		}
		require.Equal(t, "Insufficient scope: requires 'rpc'", f.refused(rpc.InternalError, f.read, "run.cancel", `{}`).Message)
		for _, method := range []string{"run.release", "run.kill"} {
			f.refused(rpc.InternalError, f.read, method, `{}`)
		}
	})
}

func TestRunList(t *testing.T) {
	t.Parallel()
	t.Run("PagesNewestFirst", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		var want []string
		for i := range 7 {
			want = append([]string{runID(f.start(fmt.Sprint("s", i), "x"))}, want...)
		}
		var got []string
		p := map[string]any{"limit": 3}
		for pages := 1; ; pages++ {
			r := f.result(f.read, "run.list", p)
			for _, run := range r["runs"].([]any) {
				got = append(got, text(t, run.(map[string]any), "runId"))
			}
			cursor, more := r["nextCursor"]
			if !more {
				require.Equal(t, 3, pages)
				break
			}
			p["cursor"] = cursor
		}
		require.Equal(t, want, got)
	})
	t.Run("Filters", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.admin, "agents.create", map[string]any{"name": "b"})
		a, b := f.start("s", "x"), f.start("s", "y")
		f.result(f.rpc, "agent.request", request("t", "z", "agentId", "b"))
		child := f.spawn(f.claim(a))
		list := func(filter map[string]any) (ids []string) {
			t.Helper()
			for _, run := range f.result(f.admin, "run.list", filter)["runs"].([]any) {
				ids = append(ids, text(t, run.(map[string]any), "runId"))
			}
			return ids
		}
		require.Len(t, list(map[string]any{}), 4)
		require.Equal(t, []string{runID(a)}, list(map[string]any{"state": "running"}))
		require.Equal(t, []string{runID(child)}, list(map[string]any{"kind": "spawn"}))
		require.Len(t, list(map[string]any{"agentId": "b"}), 1)
		require.Equal(t, []string{runID(b), runID(a)}, list(map[string]any{"sessionId": "s"}))
		require.Equal(t, []string{runID(b), runID(a)}, list(map[string]any{"sessionId": refOf(t, "default", "default", "rpc", nil, "s", nil, nil)}))
		require.Equal(t, []string{runID(child), runID(a)}, list(map[string]any{"rootRunId": runID(a)}))
		require.Equal(t, []string{runID(child), runID(a)}, list(map[string]any{"rootRunId": a.String()}))
		require.Equal(t, []string{runID(a)}, list(map[string]any{"rootRunId": a.String(), "kind": "turn", "state": "running", "agentId": "default", "sessionId": "s"}))
		for _, nothing := range []map[string]any{{"sessionId": "nobody"}, {"rootRunId": "x"}, {"rootRunId": runID(newID())}, {"agentId": "nobody"}, {"state": "poisoned"}} {
			require.Empty(t, list(nothing))
		}
		require.Empty(t, f.result(f.otherAdmin, "run.list", map[string]any{"sessionId": "s"})["runs"])
		require.Empty(t, f.result(f.otherAdmin, "run.list", map[string]any{"rootRunId": runID(a)})["runs"])
	})
	t.Run("BadParams", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for field, value := range map[string]any{"state": "odd", "kind": "odd", "limit": 101, "cursor": "!", "sessionId": ""} {
			f.invalid(field, "invalid", f.admin, "run.list", map[string]any{field: value})
		}
		f.invalid("cursor", "invalid", f.admin, "run.list", map[string]any{"cursor": "YWJj"})
	})
}

func TestRunCancelAndKill(t *testing.T) {
	t.Parallel()
	t.Run("RC-28a/AQueuedTurnEndsAtOnce", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.start("s", "x")
		second := f.start("s", "y")
		r := f.result(f.rpc, "run.cancel", map[string]any{"runId": runID(second), "reason": "no need, password=hunter22secret"})
		require.Equal(t, map[string]any{"runId": runID(second), "status": "cancelled", "state": "cancelled"}, r)
		require.Equal(t, 0.0, f.result(f.rpc, "agent.status", request("s", ""))["queued"])
		got := text(t, f.result(f.rpc, "run.get", runParam(second)), "error")
		require.Contains(t, got, "cancelled: no need")
		require.NotContains(t, got, "hunter22secret")
		require.Equal(t, "already_ended", f.result(f.rpc, "run.cancel", runParam(second))["status"])
	})
	t.Run("ARunningTurnIsAskedTo", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		id := f.start("s", "x")
		f.claim(id)
		for range 2 {
			require.Equal(t, map[string]any{"runId": runID(id), "status": "cancelling", "state": "running"}, f.result(f.admin, "run.cancel", runParam(id)))
		}
	})
	t.Run("ARepeatIsAnsweredAsBefore", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		id := f.start("s", "x")
		first := f.result(f.rpc, "run.cancel", runParam(id), "Idempotency-Key", "k")
		require.Equal(t, first, f.result(f.rpc, "run.cancel", runParam(id), "Idempotency-Key", "k"))
	})
	t.Run("KillEndsATree", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		id := f.start("s", "x")
		child := f.spawn(f.claim(id))
		f.invalid("rootRunId", "not_a_root", f.admin, "run.kill", map[string]any{"rootRunId": runID(child)})
		require.Equal(t, 2.0, f.result(f.admin, "run.kill", map[string]any{"rootRunId": runID(id)})["killed"])
		require.Equal(t, 0.0, f.result(f.admin, "run.kill", map[string]any{"rootRunId": id.String()})["killed"])
		require.Equal(t, "killed", f.result(f.admin, "run.get", runParam(child))["state"])
	})
}

func TestRunRelease(t *testing.T) {
	t.Parallel()
	t.Run("OnlyPoisonedRuns", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.invalid("runId", "invalid_state", f.admin, "run.release", runParam(f.start("s", "x")))
	})
	t.Run("GoesOnFromTheCompletedSteps", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		id := f.start("s", "x")
		run := f.claim(id)
		f.advance(run, jobs.Advance{Steps: []jobs.Step{
			{Seq: 0, Kind: db.StepKindModel, Status: db.StepStatusDone, CallID: "m0", Name: "offline/offline-1", Output: []byte(`{"calls":[{"callId":"c1"},{"callId":"c2"}]}`)},
			{Seq: 1, Kind: db.StepKindTool, Status: db.StepStatusDone, CallID: "c1", Name: "t", Output: []byte(`{"data":1}`), InputDigest: []byte("d")},
			{Seq: 2, Kind: db.StepKindTool, Status: db.StepStatusStarted, CallID: "c2", Name: "t"},
		}, ModelCalls: 1})
		f.poison(id, run)
		before := f.start("s", "y")
		r := f.result(f.admin, "run.release", runParam(id))
		require.Equal(t, runID(id), r["retryOf"])
		again := f.result(f.admin, "run.release", map[string]any{"runId": id.String()})
		require.Equal(t, r, again, "a second release starts nothing")

		retry := uuid.MustParse(strings.TrimPrefix(text(t, r, "runId"), "run_"))
		shown := f.result(f.admin, "run.get", runParam(retry))
		require.Equal(t, "queued", shown["state"])
		require.Equal(t, 1.0, shown["stepsExecuted"])
		require.Len(t, shown["steps"], 2)
		f.result(f.rpc, "run.get", runParam(retry)) // it belongs to the same token
		f.claim(before)
		f.result(f.admin, "run.kill", map[string]any{"rootRunId": runID(before)}) // the lane goes on
		next := f.claim(retry)
		require.JSONEq(t, `{"text":"x"}`, string(next.Input))
		require.Len(t, next.Steps, 2)
		require.Equal(t, []string{"m0", "c1"}, []string{next.Steps[0].CallID, next.Steps[1].CallID})
		require.JSONEq(t, `{"data":1}`, string(next.Steps[1].Output))
		require.Equal(t, int32(1), next.ModelCalls)
		f.advance(next, answerOf(next, "x"))
		var of uuid.UUID
		f.scan(fmt.Sprintf(`SELECT retry_of FROM run WHERE id = '%s'`, retry), &of)
		require.Equal(t, id, of)
		require.Equal(t, "poisoned", f.result(f.admin, "run.get", runParam(id))["state"], "what ended stays so")
	})
	t.Run("TwoOperatorsStartOne", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		id := f.start("s", "x")
		f.poison(id, nil)
		pods := []*pod{f.pod, f.another()}
		ids := gather(t, 10, func(i int) (string, error) {
			a, err := pods[i%2].tryCall(f.ctx, f.admin, "run.release", runParam(id), "Idempotency-Key", fmt.Sprint(i))
			if err == nil && a.Error != nil {
				err = fmt.Errorf("%v", a.Error)
			}
			return string(a.Result), err
		})
		require.Len(t, ids, 1)
	})
	t.Run("ASuspendedAgentRunsNothing", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		id := f.start("s", "x")
		f.poison(id, nil)
		f.result(f.admin, "agents.suspend", agent("default"))
		f.invalid("agentId", "agent_suspended", f.admin, "run.release", runParam(id))
		f.result(f.admin, "agents.resume", agent("default"))
		f.result(f.admin, "run.release", runParam(id))
	})
}

func TestWorkerList(t *testing.T) {
	t.Parallel()
	f := setup(t)
	require.Equal(t, []any{}, f.result(f.admin, "worker.list", `{}`)["workers"])
	run := f.claim(f.start("s", "x"))
	_ = run
	w := f.result(f.read, "worker.list", `{}`)["workers"].([]any)[0].(map[string]any)
	require.Equal(t, "live", w["state"])
	require.Equal(t, 1.0, w["running"])
	require.Equal(t, false, w["lock"])
	require.Equal(t, []any{"turns"}, w["queues"])
	conn, err := f.pool.Acquire(f.ctx)
	require.NoError(t, err)
	_, err = conn.Exec(f.ctx, `SELECT pg_advisory_lock(lock_key) FROM worker`)
	require.NoError(t, err)
	require.Equal(t, true, f.result(f.admin, "worker.list", `{}`)["workers"].([]any)[0].(map[string]any)["lock"])
	_, err = conn.Exec(f.ctx, `SELECT pg_advisory_unlock_all()`)
	require.NoError(t, err)
	conn.Release()
}

func TestGatewayStatus(t *testing.T) {
	t.Parallel()
	f := setupWith(t, func(c *Config) { c.ConfigPaths = []string{"/etc/weir.yaml"} })
	r := f.result(f.read, "gateway.status", `{}`)
	require.Equal(t, []any{"/etc/weir.yaml"}, r["configPaths"])
	require.Equal(t, []any{}, r["sections"])
	require.Regexp(t, "^go1", r["nodeVersion"])
	require.Positive(t, r["memoryUsage"])
	require.Positive(t, r["uptime"])
	f.invalid("workerId", "not_supported", f.admin, "gateway.status", `{"workerId":"*"}`)
}

func TestSystemPing(t *testing.T) {
	t.Parallel()
	f := setup(t)
	r := f.result(f.rpc, "system.ping", `{}`)
	require.Equal(t, true, r["pong"])
	require.InDelta(t, time.Now().UnixMilli(), r["ts"], 60_000)
	require.Equal(t, "Insufficient scope: requires 'rpc'", f.refused(rpc.InternalError, f.admin, "system.ping", `{}`).Message)
}
