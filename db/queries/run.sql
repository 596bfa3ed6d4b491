-- name: RunGet :one
SELECT * FROM run WHERE tenant_id = @tenant_id AND id = @id;

-- name: RunHeader :one
-- What never changes of a run, for ops that lock it by its neighbours' order.
SELECT id, tenant_id, kind, session_id, root_run_id, parent_run_id, depth FROM run WHERE id = @id;

-- name: RunSteps :many
SELECT seq, kind, status, call_id, name, attempt, output, started_at, finished_at FROM step WHERE run_id = @run_id ORDER BY seq;

-- name: RunOutcome :one
-- What a waiting caller needs to know of a run.
SELECT state, end_reason, result, error, waits_for FROM run WHERE tenant_id = @tenant_id AND id = @id;

-- name: RunHistory :many
-- The stored conversation before a turn: what earlier turns of the lane asked,
-- answered and did. Requests that wait behind the turn are not part of it, nor
-- are the runs it was released from: it has their steps itself.
WITH RECURSIVE old AS (
    SELECT r.retry_of AS id FROM run r WHERE r.id = @run_id AND r.retry_of IS NOT NULL
    UNION ALL
    SELECT r.retry_of FROM old JOIN run r ON r.id = old.id WHERE r.retry_of IS NOT NULL
)
SELECT e.seq, e.type, e.run_id, e.content
FROM event e
WHERE e.session_id = @session_id AND e.seq > @from_seq AND e.run_id <> @run_id
  AND e.type IN ('agent.request', 'agent.response', 'agent.clarify', 'tool.request', 'tool.response')
  AND NOT (e.type = 'agent.request' AND e.seq > @request_seq)
  AND e.run_id NOT IN (SELECT old.id FROM old)
ORDER BY e.seq;

-- name: RunHeldBy :many
-- The runs a worker holds, as the database sees it.
SELECT id, epoch, (cancel_requested_at IS NOT NULL)::bool AS cancel_requested FROM run WHERE worker_id = @worker_id AND state = 'running';

-- name: RunAdmittedUnclaimed :many
-- Admitted runs nobody claimed although their nudge is older than 5 s * 2^n
-- and than every job that still waits in their queue, and no live worker has
-- it in hand: it is lost. A worker claims what it has fetched, or gives up,
-- within 10 s (giveUpAfter in jobs/committer.go); one that has had a job for
-- longer does not know of it: the answer to its fetch was lost.
WITH oldest AS MATERIALIZED (
    SELECT q.queue, (SELECT j.scheduled_at FROM river_job j WHERE j.state = 'available' AND j.queue = q.queue
                     ORDER BY j.priority, j.scheduled_at, j.id LIMIT 1) AS at
    FROM unnest(@queues::text[]) AS q(queue)
), in_hand AS MATERIALIZED (
    SELECT (j.args ->> 'run_id')::uuid AS run_id
    FROM river_job j JOIN worker w ON w.id::text = j.attempted_by[array_upper(j.attempted_by, 1)]
    WHERE j.state = 'running' AND w.state IN ('live', 'draining') AND j.attempted_at > clock_timestamp() - interval '10 seconds'
)
SELECT r.id, r.session_id, r.parent_run_id
FROM oldest o CROSS JOIN LATERAL (
    SELECT r.id, r.session_id, r.parent_run_id, r.nudged_at, r.nudges FROM run r
    WHERE r.state = 'queued' AND r.admitted_at IS NOT NULL AND r.queue = o.queue
      AND r.nudged_at < least(clock_timestamp() - interval '5 seconds', o.at - interval '1 second')
    ORDER BY r.nudged_at LIMIT 2000
) r
WHERE r.nudged_at < clock_timestamp() - interval '5 seconds' * (2 ^ least(r.nudges, 7))
  AND r.id NOT IN (SELECT h.run_id FROM in_hand h)
LIMIT @max_rows;

-- name: RunOfDeadWorker :many
SELECT r.id, r.session_id, r.parent_run_id, r.worker_id, (w.id IS NULL OR w.state <> 'left')::bool AS counts
FROM run r LEFT JOIN worker w ON w.id = r.worker_id
WHERE r.state = 'running' AND (w.id IS NULL OR w.state IN ('reaped', 'left'))
ORDER BY r.depth, r.id LIMIT @max_rows;

-- name: RunHeldByDead :many
SELECT r.id, r.session_id, r.parent_run_id
FROM run r WHERE r.worker_id = @worker_id AND r.state = 'running'
ORDER BY r.depth, r.id LIMIT @max_rows;

-- name: RunPastDeadline :many
-- Running past the deadline although its worker should have stopped it.
SELECT r.id, r.session_id, r.parent_run_id FROM run r
WHERE r.state = 'running' AND r.deadline_at < weir_now() - interval '5 seconds' LIMIT @max_rows;

-- name: WaitDue :many
-- Waits whose time has come, the earliest first.
SELECT w.run_id, r.session_id, r.parent_run_id FROM wait w JOIN run r ON r.id = w.run_id
WHERE w.until <= weir_now() AND r.state = 'waiting' ORDER BY w.until LIMIT @max_rows;

-- name: WaitOverdue :one
-- Waits that the timekeeper should have ended.
SELECT count(*) FROM wait w WHERE w.until <= weir_now() - interval '10 seconds';

-- name: WaitNext :one
-- How long until the earliest wait ends, in milliseconds; at most a minute.
SELECT coalesce(least(extract(epoch FROM min(until) - weir_now()) * 1000, 60000), 60000)::bigint AS in_ms FROM wait;

-- name: LaneStalled :many
-- Sessions whose lane has turns waiting but no live head.
SELECT s.id FROM session s
WHERE s.queued > 0 AND (s.head_run_id IS NULL
    OR NOT EXISTS (SELECT FROM run r WHERE r.id = s.head_run_id AND r.state IN ('queued', 'running', 'waiting')))
LIMIT @max_rows;

-- name: RateLimits :many
SELECT tenant_id, key, (extract(epoch FROM blocked_until - weir_now()) * 1000)::bigint AS for_ms FROM rate_limit WHERE blocked_until > weir_now();

-- name: FactList :many
-- All facts of a scope, the most recently written first.
SELECT key, value FROM fact
WHERE tenant_id = @tenant_id AND agent = @agent AND scope = @scope AND scope_id = @scope_id
ORDER BY updated_at DESC, key LIMIT 1000;

-- name: AgentConfig :one
SELECT config FROM agent_version WHERE tenant_id = @tenant_id AND name = @name AND version = @version;

-- name: RunEndedAmong :many
SELECT id FROM run WHERE id = ANY (@ids::uuid[]) AND state >= 'completed';

-- name: RunOld :many
-- Runs between two ids, the oldest first, and whether they have long ended.
SELECT id, coalesce(state >= 'completed' AND finished_at < weir_now() - sqlc.arg('kept_ms')::bigint * interval '1 millisecond', false)::bool AS purge
FROM run WHERE id > sqlc.arg('after_id') AND id < sqlc.arg('before_id') ORDER BY id LIMIT @max_rows;

-- name: RunDelete :exec
DELETE FROM run WHERE id = ANY (@ids::uuid[]) AND state >= 'completed';

-- name: StepDelete :exec
DELETE FROM step WHERE run_id = ANY (@run_ids::uuid[]);
