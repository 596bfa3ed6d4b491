-- name: IdempotencyClaim :execrows
-- Takes a key for a call. It waits for a call that holds the key and has not
-- committed; no row means that one has, within a day.
INSERT INTO idempotency AS i (tenant_id, scope, key, digest) VALUES (@tenant_id, @scope, @key, @digest)
ON CONFLICT (tenant_id, scope, key) DO UPDATE
    SET digest = excluded.digest, run_id = NULL, result = NULL, created_at = excluded.created_at
    WHERE i.created_at < weir_now() - interval '24 hours';

-- name: IdempotencyGet :one
SELECT digest, result FROM idempotency
WHERE tenant_id = @tenant_id AND scope = @scope AND key = @key AND created_at >= weir_now() - interval '24 hours';

-- name: IdempotencyStore :exec
UPDATE idempotency SET result = @result WHERE tenant_id = @tenant_id AND scope = @scope AND key = @key;

-- name: SessionTask :one
-- The session of an Agentex task.
SELECT id FROM session WHERE id = @id AND tenant_id = @tenant_id AND task_status IS NOT NULL;

-- name: SessionStatus :one
-- The state of a session's lane, and for an idle one its last phase.
SELECT s.event_seq, s.queued, s.head_run_id, r.state, r.waits_for, (r.cancel_requested_at IS NOT NULL)::bool AS cancelling,
       coalesce(CASE WHEN s.head_run_id IS NULL THEN
           (SELECT e.content ->> 'phase' FROM event e WHERE e.session_id = s.id AND e.type = 'agent.status' ORDER BY e.seq DESC LIMIT 1)
       END, 'idle')::text AS last_phase
FROM session s LEFT JOIN run r ON r.id = s.head_run_id
WHERE s.tenant_id = @tenant_id AND s.id = @id;

-- name: SessionLatest :one
-- The newest session of an agent that a token has made.
SELECT * FROM session WHERE tenant_id = @tenant_id AND agent = @agent AND owner_token = @owner_token::text ORDER BY id DESC LIMIT 1;

-- name: SessionSteps :one
-- The model calls of a session's executing turn, or of its last one.
SELECT count(*) FROM step st
WHERE st.kind = 'model' AND st.status = 'done' AND st.run_id = coalesce((SELECT s.head_run_id FROM session s WHERE s.id = @session_id),
                      (SELECT e.run_id FROM event e WHERE e.session_id = @session_id ORDER BY e.seq DESC LIMIT 1));

-- name: SessionPage :many
-- The newest sessions of an agent.
SELECT s.conversation_ref, s.agent, s.kind, s.input_tokens, s.output_tokens, s.created_at, s.updated_at,
       (SELECT count(*) FROM event e WHERE e.session_id = s.id AND e.type IN ('agent.request', 'agent.response', 'agent.clarify')) AS messages
FROM session s
WHERE s.tenant_id = @tenant_id AND s.agent = @agent AND (sqlc.arg('kind')::text = 'all' OR s.kind = sqlc.arg('kind')::text)
  AND (sqlc.arg('since_ms')::bigint < 0 OR s.updated_at >= clock_timestamp() - sqlc.arg('since_ms')::bigint * interval '1 millisecond')
ORDER BY s.id DESC LIMIT @max_rows;

-- name: SessionCount :one
SELECT count(*) FROM session s
WHERE s.tenant_id = @tenant_id AND s.agent = @agent AND (sqlc.arg('kind')::text = 'all' OR s.kind = sqlc.arg('kind')::text)
  AND (sqlc.arg('since_ms')::bigint < 0 OR s.updated_at >= clock_timestamp() - sqlc.arg('since_ms')::bigint * interval '1 millisecond');

-- name: SessionMessages :many
-- What was said in a session, the oldest first.
SELECT e.type, coalesce(e.content ->> 'text', '')::text AS text, e.ts FROM event e
WHERE e.session_id = @session_id AND e.type IN ('agent.request', 'agent.response', 'agent.clarify')
ORDER BY e.seq OFFSET @skip LIMIT @max_rows;

-- name: SessionMessageCount :one
SELECT count(*) FROM event e WHERE e.session_id = @session_id AND e.type IN ('agent.request', 'agent.response', 'agent.clarify');

-- name: RunView :one
-- A run as callers see it, and the token that its tree belongs to. Its own
-- counters are of the last change of its row: it may have done more.
SELECT r.id, r.kind, r.state, r.agent, r.session_id, r.root_run_id, r.parent_run_id, r.depth, r.worker_id, r.epoch, r.wake_seq,
       greatest(r.steps, (SELECT count(*) FROM step st WHERE st.run_id = r.id AND st.status = 'done'))::int AS steps,
       greatest(r.model_calls, (SELECT count(*) FROM step st WHERE st.run_id = r.id AND st.status = 'done' AND st.kind = 'model'))::int AS model_calls,
       r.losses, r.end_reason, r.error, r.waits_for, r.deadline_at, r.created_at, r.started_at, r.finished_at,
       s.external_id, s.conversation_ref, (s.task_status IS NOT NULL)::bool AS is_task, root.owner_token
FROM run r JOIN session s ON s.id = r.session_id LEFT JOIN run root ON root.id = r.root_run_id
WHERE r.tenant_id = @tenant_id AND r.id = @id;

-- name: RunPhase :one
-- What a run is doing, for who waits for it.
SELECT state, waits_for, (cancel_requested_at IS NOT NULL)::bool AS cancelling, (state = 'queued' AND admitted_at IS NULL)::bool AS behind
FROM run WHERE id = @id;

-- name: RunOwner :one
-- The token that a run's tree belongs to.
SELECT root.owner_token FROM run r LEFT JOIN run root ON root.id = r.root_run_id WHERE r.tenant_id = @tenant_id AND r.id = @id;

-- name: RunStepList :many
SELECT seq, kind, status, call_id, name, attempt, coalesce(output -> 'error' ->> 'message', '')::text AS error, started_at, finished_at
FROM step WHERE run_id = @run_id ORDER BY seq;

-- name: RunUsage :one
-- What a run's model calls consumed.
SELECT coalesce(sum(input + cache_read + cache_write), 0)::bigint AS input, coalesce(sum(output + reasoning), 0)::bigint AS output
FROM usage WHERE run_id = @run_id;

-- name: WorkerStatus :many
-- WorkerList with the advisory locks as the server holds them.
SELECT w.id, w.state, w.hostname, w.pid, w.version, w.queues, w.slots, coalesce(w.wanted, '')::text AS wanted, w.started_at, w.heartbeat_at,
       (SELECT count(*) FROM run r WHERE r.worker_id = w.id AND r.state = 'running') AS running,
       EXISTS (SELECT FROM pg_catalog.pg_locks l
               WHERE l.locktype = 'advisory' AND l.granted AND l.mode = 'ExclusiveLock' AND l.objsubid = 1
                 AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())
                 AND (l.classid::bigint << 32) | l.objid::bigint = w.lock_key)::bool AS lock
FROM worker w WHERE w.state IN ('live', 'draining', 'dead') OR w.ended_at > clock_timestamp() - interval '1 hour'
ORDER BY w.started_at DESC LIMIT 500;

-- name: TaskInsert :one
-- Makes a task. No row means that there is one of that name.
INSERT INTO session (tenant_id, id, conversation_ref, name, channel_type, scope, agent, owner_token, task_status, task_status_reason,
                     task_params, task_metadata)
VALUES (@tenant_id, @id, @conversation_ref, sqlc.narg('name'), 'agentex', @scope, @agent, @owner_token, 'RUNNING',
        @task_status_reason, sqlc.narg('task_params'), sqlc.narg('task_metadata'))
ON CONFLICT DO NOTHING
RETURNING id, name, agent, task_status, task_status_reason, task_params, task_metadata, created_at, updated_at;

-- name: TaskFind :one
-- A task by id, or by name. The conversation ref of a name finds the task
-- without a name whose id is that text.
SELECT id, name, agent, task_status, task_status_reason, task_params, task_metadata, created_at, updated_at
FROM session
WHERE tenant_id = @tenant_id AND task_status IS NOT NULL
  AND (id = sqlc.narg('id')::uuid OR name = sqlc.narg('name')::text OR conversation_ref = sqlc.narg('conversation_ref')::text)
ORDER BY (name IS NOT NULL) DESC LIMIT 1;

-- name: TaskUpdate :one
-- Puts new params in place of the old ones, and resumes an interrupted task.
-- No row means that nothing changes.
UPDATE session SET task_params = coalesce(sqlc.narg('task_params'), task_params),
    task_status = CASE WHEN @resume::bool AND task_status = 'INTERRUPTED' THEN 'RUNNING' ELSE task_status END,
    task_status_reason = CASE WHEN @resume::bool AND task_status = 'INTERRUPTED' THEN 'Task resumed on next turn' ELSE task_status_reason END,
    updated_at = clock_timestamp()
WHERE tenant_id = @tenant_id AND id = @id
  AND (@resume::bool AND task_status = 'INTERRUPTED'
       OR sqlc.narg('task_params')::jsonb IS NOT NULL AND task_params IS DISTINCT FROM sqlc.narg('task_params')::jsonb)
RETURNING id, name, agent, task_status, task_status_reason, task_params, task_metadata, created_at, updated_at;

-- name: MessagesOldest :many
SELECT id, session_id, content, streaming_status, created_at, updated_at FROM message
WHERE tenant_id = @tenant_id AND session_id = @session_id ORDER BY seq OFFSET @skip LIMIT @max_rows;

-- name: MessagesNewest :many
SELECT id, session_id, content, streaming_status, created_at, updated_at FROM message
WHERE tenant_id = @tenant_id AND session_id = @session_id ORDER BY seq DESC OFFSET @skip LIMIT @max_rows;

-- name: MessagesOfRun :many
-- The messages of a turn, after the one that asked for it.
SELECT id, session_id, content, streaming_status, created_at, updated_at FROM message x
WHERE x.tenant_id = @tenant_id AND x.session_id = @session_id AND x.run_id = @run_id::uuid
  AND x.seq >= coalesce((SELECT m.seq FROM message m WHERE m.id = @request_id::uuid), 0)
ORDER BY seq OFFSET 1;
