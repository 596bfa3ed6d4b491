-- The statements of the committer's unit of work: it locks rows, judges them
-- in Go and writes what changed, many runs at once. Lock queries come in two
-- forms: one passes over what another transaction holds, one waits for it.

-- name: UnitBegin :one
SELECT pg_current_xact_id()::text AS xid, weir_now()::timestamptz AS now, clock_timestamp()::timestamptz AS clock;

-- name: UnitIdempotencyClaim :many
-- Keys older than a day are free again.
INSERT INTO idempotency AS i (tenant_id, scope, key, digest, run_id)
SELECT unnest(@tenant_ids::text[]), unnest(@scopes::text[]), unnest(@keys::text[]), unnest(@digests::bytea[]), unnest(@run_ids::uuid[])
ON CONFLICT (tenant_id, scope, key) DO UPDATE
    SET digest = excluded.digest, run_id = excluded.run_id, result = NULL, created_at = excluded.created_at
    WHERE i.created_at < weir_now() - interval '24 hours'
RETURNING i.tenant_id, i.scope, i.key;

-- name: UnitIdempotencyHolders :many
SELECT i.tenant_id, i.scope, i.key, i.digest, i.run_id, i.result
FROM (SELECT unnest(@tenant_ids::text[]) AS tenant_id, unnest(@scopes::text[]) AS scope, unnest(@keys::text[]) AS key) k
JOIN idempotency i USING (tenant_id, scope, key);

-- name: UnitIdempotencyDrop :exec
DELETE FROM idempotency i
USING (SELECT unnest(@tenant_ids::text[]) AS tenant_id, unnest(@scopes::text[]) AS scope, unnest(@keys::text[]) AS key) k
WHERE i.tenant_id = k.tenant_id AND i.scope = k.scope AND i.key = k.key;

-- name: UnitSessionInsert :many
-- Returns the sessions that are new. The others exist already, under one of
-- their names.
INSERT INTO session (tenant_id, id, conversation_ref, external_id, name, kind, channel_type, scope, agent, user_id,
                     owner_token, task_status, task_status_reason, task_params, task_metadata, event_seq, message_seq, head_run_id, turns)
SELECT unnest(@tenant_ids::text[]), unnest(@ids::uuid[]), unnest(@conversation_refs::text[]),
       nullif(unnest(@external_ids::text[]), ''), nullif(unnest(@names::text[]), ''), unnest(@kinds::text[]),
       unnest(@channel_types::text[]), unnest(@session_scopes::text[])::jsonb, unnest(@agents::text[]),
       nullif(unnest(@user_ids::text[]), ''), nullif(unnest(@owner_tokens::text[]), ''),
       nullif(unnest(@task_statuses::text[]), ''), nullif(unnest(@task_status_reasons::text[]), ''),
       nullif(unnest(@task_params::text[]), '')::jsonb, nullif(unnest(@task_metadatas::text[]), '')::jsonb,
       unnest(@event_seqs::bigint[]), unnest(@message_seqs::bigint[]),
       nullif(unnest(@head_run_ids::uuid[]), '00000000-0000-0000-0000-000000000000'::uuid), unnest(@turns::bigint[])
ON CONFLICT DO NOTHING
RETURNING id;

-- name: UnitSessionLock :many
SELECT s.id, s.tenant_id, s.conversation_ref, s.external_id, s.name, s.agent, s.user_id, s.channel_type, s.event_seq, s.message_seq, s.epoch,
       s.head_run_id, s.queued, s.context_from_seq, s.task_status, s.xmin::text AS version
FROM session s
WHERE s.id = ANY (@ids::uuid[])
ORDER BY s.id
FOR NO KEY UPDATE SKIP LOCKED;

-- name: UnitSessionLockWait :many
SELECT s.id, s.tenant_id, s.conversation_ref, s.external_id, s.name, s.agent, s.user_id, s.channel_type, s.event_seq, s.message_seq, s.epoch,
       s.head_run_id, s.queued, s.context_from_seq, s.task_status, s.xmin::text AS version
FROM session s
WHERE s.id = ANY (@ids::uuid[])
ORDER BY s.id
FOR NO KEY UPDATE;

-- name: UnitRunLock :many
SELECT r.id, r.tenant_id, r.kind, r.state, r.queue, r.worker_id, r.epoch, r.wake_seq, r.root_run_id, r.parent_run_id, r.depth, r.agent,
       r.agent_version, r.session_id, r.request_seq, r.in_lane, r.user_id, r.owner_token, r.steps, r.model_calls, r.call_attempts, r.call_limited,
       r.losses, r.open_children, r.time_left_ms, r.deadline_at, r.ready_at, r.admitted_at, r.nudged_at, r.nudges,
       r.cancel_requested_at, r.killed_at, r.evicted_at, r.started_at, r.finished_at, r.waits_for, r.end_reason, r.xmin::text AS version
FROM run r
WHERE r.id = ANY (@ids::uuid[])
ORDER BY r.depth, r.id
FOR NO KEY UPDATE SKIP LOCKED;

-- name: UnitRunLockWait :many
SELECT r.id, r.tenant_id, r.kind, r.state, r.queue, r.worker_id, r.epoch, r.wake_seq, r.root_run_id, r.parent_run_id, r.depth, r.agent,
       r.agent_version, r.session_id, r.request_seq, r.in_lane, r.user_id, r.owner_token, r.steps, r.model_calls, r.call_attempts, r.call_limited,
       r.losses, r.open_children, r.time_left_ms, r.deadline_at, r.ready_at, r.admitted_at, r.nudged_at, r.nudges,
       r.cancel_requested_at, r.killed_at, r.evicted_at, r.started_at, r.finished_at, r.waits_for, r.end_reason, r.xmin::text AS version
FROM run r
WHERE r.id = ANY (@ids::uuid[])
ORDER BY r.depth, r.id
FOR NO KEY UPDATE;

-- name: UnitSessionGuard :one
-- Locks sessions that nobody has written since versions, and fails, dividing by
-- zero, unless that is all of them.
SELECT (1 / (CASE WHEN count(*) = cardinality(@ids::uuid[]) THEN 1 ELSE 0 END))::int AS guarded
FROM (SELECT s.id FROM session s JOIN (SELECT unnest(@ids::uuid[]) AS id, unnest(@versions::text[]) AS version) g ON g.id = s.id
      WHERE s.xmin::text = g.version ORDER BY s.id FOR NO KEY UPDATE OF s SKIP LOCKED) l;

-- name: UnitRunGuard :one
-- UnitSessionGuard for runs.
SELECT (1 / (CASE WHEN count(*) = cardinality(@ids::uuid[]) THEN 1 ELSE 0 END))::int AS guarded
FROM (SELECT r.id FROM run r JOIN (SELECT unnest(@ids::uuid[]) AS id, unnest(@versions::text[]) AS version) g ON g.id = r.id
      WHERE r.xmin::text = g.version ORDER BY r.depth, r.id FOR NO KEY UPDATE OF r SKIP LOCKED) l;

-- name: UnitUsageGuard :one
-- Fails, dividing by zero, if usage of these calls may be stored.
SELECT (1 / (CASE WHEN EXISTS (SELECT FROM usage WHERE run_id = ANY (@run_ids::uuid[]) AND call_id = ANY (@call_ids::text[])) THEN 0 ELSE 1 END))::int AS guarded;

-- name: UnitWorkerShare :many
-- A reaper that declares a worker dead waits for the claims that share its row.
SELECT w.id, w.state FROM worker w WHERE w.id = ANY (@ids::uuid[]) FOR KEY SHARE;

-- name: UnitLaneNext :many
-- Locks the next turn of each lane, unless somebody holds it. It runs after the
-- lock of the sessions, so its snapshot holds every turn accepted before.
SELECT r.session_id, r.id, r.tenant_id, r.agent, r.kind, r.queue
FROM run r
WHERE r.id IN (SELECT DISTINCT ON (q.session_id) q.id FROM run q
               WHERE q.session_id = ANY (@session_ids::uuid[]) AND q.state = 'queued' AND q.in_lane AND q.admitted_at IS NULL AND q.ready_at IS NULL
               ORDER BY q.session_id, q.request_seq)
FOR NO KEY UPDATE SKIP LOCKED;

-- name: UnitClaim :many
-- Makes workers, which UnitWorkerShare has locked, the owners of admitted runs,
-- but of those that others hold. It locks and judges by the same row alone. The
-- stored steps tell how far a run is that was claimed before. The state is
-- compared as text, here and where runs are admitted, so that no plan reads the
-- whole of a partial index that was empty when it was made.
UPDATE run r
SET state = 'running', worker_id = c.worker_id, epoch = r.epoch + 1, nudges = 0,
    started_at = coalesce(r.started_at, weir_now()),
    deadline_at = coalesce(r.deadline_at, weir_now() + r.time_left_ms * interval '1 millisecond'),
    steps = CASE WHEN r.epoch = 0 THEN r.steps ELSE (SELECT count(*) FROM step s WHERE s.run_id = r.id AND s.status = 'done') END,
    model_calls = CASE WHEN r.epoch = 0 THEN r.model_calls
                       ELSE (SELECT count(*) FROM step s WHERE s.run_id = r.id AND s.status = 'done' AND s.kind = 'model') END
FROM (SELECT q.id, w.id AS worker_id
      FROM (SELECT unnest(@ids::uuid[]) AS id, unnest(@worker_ids::uuid[]) AS worker_id) u
      JOIN run q ON q.id = u.id JOIN worker w ON w.id = u.worker_id
      WHERE q.state::text = 'queued' AND q.admitted_at IS NOT NULL AND w.state = 'live'
      ORDER BY q.depth, q.id
      FOR NO KEY UPDATE OF q SKIP LOCKED) c
WHERE r.id = c.id
RETURNING r.id, r.tenant_id, r.kind, r.epoch, r.wake_seq, r.root_run_id, r.parent_run_id, r.depth, r.agent, r.agent_version, r.session_id,
    r.request_seq, r.user_id, r.input, r.steps, r.model_calls, r.call_attempts, r.call_limited, r.losses, r.deadline_at, r.started_at,
    r.traceparent;

-- name: UnitClaimWait :many
-- UnitClaim, but waits for what others hold.
UPDATE run r
SET state = 'running', worker_id = c.worker_id, epoch = r.epoch + 1, nudges = 0,
    started_at = coalesce(r.started_at, weir_now()),
    deadline_at = coalesce(r.deadline_at, weir_now() + r.time_left_ms * interval '1 millisecond'),
    steps = CASE WHEN r.epoch = 0 THEN r.steps ELSE (SELECT count(*) FROM step s WHERE s.run_id = r.id AND s.status = 'done') END,
    model_calls = CASE WHEN r.epoch = 0 THEN r.model_calls
                       ELSE (SELECT count(*) FROM step s WHERE s.run_id = r.id AND s.status = 'done' AND s.kind = 'model') END
FROM (SELECT q.id, w.id AS worker_id
      FROM (SELECT unnest(@ids::uuid[]) AS id, unnest(@worker_ids::uuid[]) AS worker_id) u
      JOIN run q ON q.id = u.id JOIN worker w ON w.id = u.worker_id
      WHERE q.state::text = 'queued' AND q.admitted_at IS NOT NULL AND w.state = 'live'
      ORDER BY q.depth, q.id
      FOR NO KEY UPDATE OF q) c
WHERE r.id = c.id
RETURNING r.id, r.tenant_id, r.kind, r.epoch, r.wake_seq, r.root_run_id, r.parent_run_id, r.depth, r.agent, r.agent_version, r.session_id,
    r.request_seq, r.user_id, r.input, r.steps, r.model_calls, r.call_attempts, r.call_limited, r.losses, r.deadline_at, r.started_at,
    r.traceparent;

-- name: UnitClaimable :many
-- Which runs may still be claimed.
SELECT id FROM run WHERE id = ANY (@ids::uuid[]) AND state::text = 'queued' AND admitted_at IS NOT NULL;

-- name: UnitRunSession :many
-- What a claimed run has to know of its session.
SELECT r.id, s.conversation_ref, s.context_from_seq, s.channel_type, s.external_id
FROM run r JOIN session s ON s.id = r.session_id
WHERE r.id = ANY (@ids::uuid[]);

-- name: UnitRunAdmit :exec
-- Admits the next turns of lanes, which UnitLaneNext has locked.
UPDATE run SET admitted_at = weir_now(), nudged_at = clock_timestamp() WHERE id = ANY (@ids::uuid[]);

-- name: UnitStepsOf :many
SELECT run_id, seq, kind, status, call_id, name, attempt, output, epoch
FROM step
WHERE run_id = ANY (@run_ids::uuid[])
ORDER BY run_id, seq;

-- name: UnitRunInsert :exec
-- traceparents may end before the others: what is missing is NULL.
INSERT INTO run (id, tenant_id, kind, queue, root_run_id, parent_run_id, depth, agent, agent_version, session_id, request_seq,
                 in_lane, user_id, owner_token, input, time_left_ms, admitted_at, nudged_at, ready_at, retry_of, steps, model_calls, traceparent)
SELECT u.id, u.tenant_id, u.kind::run_kind, u.queue, u.root_run_id, nullif(u.parent_run_id, '00000000-0000-0000-0000-000000000000'::uuid),
       u.depth, u.agent, u.agent_version, u.session_id, u.request_seq, u.in_lane, nullif(u.user_id, ''), nullif(u.owner_token, ''),
       u.input::json, u.time_left_ms, CASE WHEN u.admitted THEN weir_now() END, CASE WHEN u.admitted THEN clock_timestamp() END,
       CASE WHEN u.ready THEN clock_timestamp() END, nullif(u.retry_of, '00000000-0000-0000-0000-000000000000'::uuid), u.steps, u.model_calls,
       u.traceparent
FROM (SELECT unnest(@ids::uuid[]) AS id, unnest(@tenant_ids::text[]) AS tenant_id, unnest(@kinds::text[]) AS kind, unnest(@queues::text[]) AS queue,
             unnest(@root_run_ids::uuid[]) AS root_run_id, unnest(@parent_run_ids::uuid[]) AS parent_run_id,
             unnest(@depths::int[]) AS depth, unnest(@agents::text[]) AS agent, unnest(@agent_versions::int[]) AS agent_version,
             unnest(@session_ids::uuid[]) AS session_id, unnest(@request_seqs::bigint[]) AS request_seq,
             unnest(@in_lanes::bool[]) AS in_lane, unnest(@user_ids::text[]) AS user_id, unnest(@owner_tokens::text[]) AS owner_token,
             unnest(@inputs::text[]) AS input, unnest(@time_left_ms::bigint[]) AS time_left_ms, unnest(@admitted::bool[]) AS admitted, unnest(@ready::bool[]) AS ready,
             unnest(@retry_ofs::uuid[]) AS retry_of, unnest(@steps::int[]) AS steps, unnest(@model_calls::int[]) AS model_calls,
             unnest(@traceparents::text[]) AS traceparent) u;

-- name: UnitRunUpdate :exec
UPDATE run r
SET state = u.state::run_state, worker_id = nullif(u.worker_id, '00000000-0000-0000-0000-000000000000'::uuid), epoch = u.epoch,
    queue = u.queue, wake_seq = u.wake_seq, steps = u.steps, model_calls = u.model_calls, call_attempts = u.call_attempts, call_limited = u.call_limited,
    losses = u.losses, open_children = u.open_children, time_left_ms = u.time_left_ms, nudges = u.nudges,
    deadline_at = nullif(u.deadline_at, 'epoch'::timestamptz),
    ready_at = nullif(u.ready_at, 'epoch'::timestamptz),
    admitted_at = nullif(u.admitted_at, 'epoch'::timestamptz),
    nudged_at = nullif(u.nudged_at, 'epoch'::timestamptz),
    cancel_requested_at = nullif(u.cancel_requested_at, 'epoch'::timestamptz),
    killed_at = nullif(u.killed_at, 'epoch'::timestamptz),
    started_at = nullif(u.started_at, 'epoch'::timestamptz),
    finished_at = CASE WHEN u.finished_at = '9999-01-01Z'::timestamptz THEN weir_now() ELSE nullif(u.finished_at, 'epoch'::timestamptz) END,
    waits_for = nullif(u.waits_for, '')::wait_kind, end_reason = nullif(u.end_reason, ''), 
    result = coalesce(nullif(u.result, '')::json, r.result), error = coalesce(nullif(u.error, '')::json, r.error)
FROM (SELECT unnest(@ids::uuid[]) AS id, unnest(@states::text[]) AS state, unnest(@worker_ids::uuid[]) AS worker_id,
             unnest(@epochs::int[]) AS epoch, unnest(@queues::text[]) AS queue, unnest(@wake_seqs::int[]) AS wake_seq,
             unnest(@steps::int[]) AS steps, unnest(@model_calls::int[]) AS model_calls,
             unnest(@call_attempts::int[]) AS call_attempts, unnest(@call_limited::int[]) AS call_limited, unnest(@losses::int[]) AS losses,
             unnest(@open_children::int[]) AS open_children, unnest(@time_left_ms::bigint[]) AS time_left_ms,
             unnest(@nudges::int[]) AS nudges,
             unnest(@deadline_ats::timestamptz[]) AS deadline_at, unnest(@admitted_ats::timestamptz[]) AS admitted_at, unnest(@ready_ats::timestamptz[]) AS ready_at,
             unnest(@nudged_ats::timestamptz[]) AS nudged_at,
             unnest(@cancel_requested_ats::timestamptz[]) AS cancel_requested_at, unnest(@killed_ats::timestamptz[]) AS killed_at,
             unnest(@started_ats::timestamptz[]) AS started_at, unnest(@finished_ats::timestamptz[]) AS finished_at,
             unnest(@waits_for::text[]) AS waits_for, unnest(@end_reasons::text[]) AS end_reason, unnest(@results::text[]) AS result, unnest(@errors::text[]) AS error) u
WHERE r.id = u.id;

-- name: UnitSessionUpdate :exec
UPDATE session s
SET event_seq = u.event_seq, message_seq = u.message_seq,
    head_run_id = nullif(u.head_run_id, '00000000-0000-0000-0000-000000000000'::uuid), queued = u.queued,
    turns = s.turns + u.turns, model_calls = s.model_calls + u.model_calls, tool_calls = s.tool_calls + u.tool_calls,
    input_tokens = s.input_tokens + u.input_tokens, output_tokens = s.output_tokens + u.output_tokens,
    cost_micros = s.cost_micros + u.cost_micros, updated_at = clock_timestamp()
FROM (SELECT unnest(@ids::uuid[]) AS id, unnest(@event_seqs::bigint[]) AS event_seq, unnest(@message_seqs::bigint[]) AS message_seq,
             unnest(@head_run_ids::uuid[]) AS head_run_id, unnest(@queued::int[]) AS queued, unnest(@turns::bigint[]) AS turns,
             unnest(@model_calls::bigint[]) AS model_calls, unnest(@tool_calls::bigint[]) AS tool_calls,
             unnest(@input_tokens::bigint[]) AS input_tokens, unnest(@output_tokens::bigint[]) AS output_tokens,
             unnest(@cost_micros::bigint[]) AS cost_micros) u
WHERE s.id = u.id;

-- name: UnitEventInsert :exec
INSERT INTO event (session_id, seq, tenant_id, type, run_id, content)
SELECT unnest(@session_ids::uuid[]), unnest(@seqs::bigint[]), unnest(@tenant_ids::text[]), unnest(@types::text[])::event_type,
       unnest(@run_ids::uuid[]), unnest(@contents::text[])::json;

-- name: UnitMessageInsert :exec
INSERT INTO message (session_id, seq, id, tenant_id, run_id, content, streaming_status)
SELECT unnest(@session_ids::uuid[]), unnest(@seqs::bigint[]), unnest(@ids::uuid[]), unnest(@tenant_ids::text[]),
       unnest(@run_ids::uuid[]), unnest(@contents::text[])::jsonb, nullif(unnest(@streaming_statuses::text[]), '');

-- name: UnitStepInsert :exec
-- Steps that were not stored before.
INSERT INTO step (run_id, seq, tenant_id, kind, status, call_id, name, attempt, input_digest, output, epoch, started_at, finished_at)
SELECT u.run_id, u.seq, u.tenant_id, u.kind::step_kind, u.status::step_status, u.call_id, u.name, u.attempt,
       nullif(u.input_digest, ''::bytea), nullif(u.output, '')::json, u.epoch,
       clock_timestamp() - u.duration_ms * interval '1 millisecond', CASE WHEN u.status = 'done' THEN clock_timestamp() END
FROM (SELECT unnest(@run_ids::uuid[]) AS run_id, unnest(@seqs::int[]) AS seq, unnest(@tenant_ids::text[]) AS tenant_id,
             unnest(@kinds::text[]) AS kind, unnest(@statuses::text[]) AS status, unnest(@call_ids::text[]) AS call_id,
             unnest(@names::text[]) AS name, unnest(@attempts::int[]) AS attempt, unnest(@input_digests::bytea[]) AS input_digest,
             unnest(@outputs::text[]) AS output, unnest(@epochs::int[]) AS epoch, unnest(@durations_ms::bigint[]) AS duration_ms) u;

-- name: UnitStepUpdate :exec
-- Steps that were started before: they are done now, or started once more.
-- What is done never changes.
UPDATE step s
SET status = u.status::step_status, output = nullif(u.output, '')::json, attempt = u.attempt, epoch = u.epoch,
    started_at = CASE WHEN u.status = 'started' THEN clock_timestamp() ELSE s.started_at END,
    finished_at = CASE WHEN u.status = 'done' THEN clock_timestamp() END
FROM (SELECT unnest(@run_ids::uuid[]) AS run_id, unnest(@seqs::int[]) AS seq, unnest(@statuses::text[]) AS status,
             unnest(@attempts::int[]) AS attempt, unnest(@outputs::text[]) AS output, unnest(@epochs::int[]) AS epoch) u
WHERE s.run_id = u.run_id AND s.seq = u.seq AND s.status = 'started';

-- name: UnitUsageInsert :exec
INSERT INTO usage (run_id, call_id, tenant_id, session_id, user_id, agent, provider, model, input, cache_read, cache_write, output,
                   reasoning, cost_micros, estimated)
SELECT unnest(@run_ids::uuid[]), unnest(@call_ids::text[]), unnest(@tenant_ids::text[]), unnest(@session_ids::uuid[]),
       nullif(unnest(@user_ids::text[]), ''), unnest(@agents::text[]), unnest(@providers::text[]), unnest(@models::text[]),
       unnest(@inputs::bigint[]), unnest(@cache_reads::bigint[]), unnest(@cache_writes::bigint[]), unnest(@outputs::bigint[]),
       unnest(@reasonings::bigint[]), nullif(unnest(@costs_micros::bigint[]), -1), unnest(@estimateds::bool[])
ON CONFLICT (run_id, call_id) DO NOTHING;

-- name: UnitUsageKnown :many
-- Calls among these that are stored. It may name others of the same runs: a
-- join on pairs lets the planner start from the table while that is small.
SELECT run_id, call_id FROM usage WHERE run_id = ANY (@run_ids::uuid[]) AND call_id = ANY (@call_ids::text[]);

-- name: UnitFactPut :exec
-- In the order of the key: users share facts between sessions.
INSERT INTO fact (tenant_id, agent, scope, scope_id, key, value, kind)
SELECT unnest(@tenant_ids::text[]), unnest(@agents::text[]), unnest(@scopes::text[]), unnest(@scope_ids::text[]),
       unnest(@keys::text[]), nullif(unnest(@values::text[]), 'null')::json, nullif(unnest(@kinds::text[]), '')
ORDER BY 1, 2, 3, 4, 5
ON CONFLICT (tenant_id, agent, scope, scope_id, key) DO UPDATE
    SET value = excluded.value, kind = excluded.kind, updated_at = excluded.updated_at;

-- name: UnitWaitPut :exec
INSERT INTO wait (run_id, tenant_id, kind, key, until)
SELECT unnest(@run_ids::uuid[]), unnest(@tenant_ids::text[]), unnest(@kinds::text[])::wait_kind, nullif(unnest(@keys::text[]), ''),
       weir_now() + unnest(@for_ms::bigint[]) * interval '1 millisecond'
ON CONFLICT (run_id) DO UPDATE SET kind = excluded.kind, key = excluded.key, until = excluded.until, created_at = now();

-- name: UnitWaitDrop :exec
DELETE FROM wait WHERE run_id = ANY (@run_ids::uuid[]);

-- name: UnitRateLimitPut :exec
INSERT INTO rate_limit (tenant_id, key, blocked_until)
SELECT unnest(@tenant_ids::text[]), unnest(@keys::text[]), weir_now() + unnest(@for_ms::bigint[]) * interval '1 millisecond'
ORDER BY 1, 2
ON CONFLICT (tenant_id, key) DO UPDATE
    SET blocked_until = greatest(rate_limit.blocked_until, excluded.blocked_until), updated_at = now();

-- name: UnitTaskStatus :exec
UPDATE session s SET task_status = u.status, task_status_reason = u.reason, updated_at = clock_timestamp()
FROM (SELECT unnest(@ids::uuid[]) AS id, unnest(@statuses::text[]) AS status, unnest(@reasons::text[]) AS reason) u
WHERE s.id = u.id;

-- name: UnitTreeRuns :many
-- The runs of a tree, parents first. It cannot grow while its root is locked.
SELECT r.id, r.session_id, r.parent_run_id, (r.state >= 'completed')::bool AS final FROM run r
WHERE r.root_run_id = @root_run_id AND r.depth > 0 OR r.id = @root_run_id
ORDER BY r.depth, r.id;

-- name: UnitXactStatus :one
-- What became of a commit whose answer was lost. restarted says that the server
-- may have recovered from a crash since, and given the transaction's number
-- away again: it was started, or a crashed backend took the others along, which
-- ends in a checkpoint; or it is a replica that was promoted, which is on
-- another timeline than its last checkpoint until it has made one.
SELECT coalesce(pg_xact_status((@xid::text)::xid8), 'unknown')::text AS status,
       (greatest(pg_postmaster_start_time(), (to_jsonb(pg_control_checkpoint()) ->> 'checkpoint_time')::timestamptz + interval '1 second')
        > @since::timestamptz
        OR left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)
           <> upper(lpad(to_hex((to_jsonb(pg_control_checkpoint()) ->> 'timeline_id')::int), 8, '0')))::bool AS restarted;

-- name: UnitEventExists :one
SELECT EXISTS (SELECT FROM event WHERE session_id = @session_id AND seq = @seq AND run_id = @run_id AND type = (@type::text)::event_type);

-- name: UnitStepIs :one
SELECT EXISTS (SELECT FROM step WHERE run_id = @run_id AND seq = @seq AND status = (@status::text)::step_status AND epoch = @epoch);

-- name: UnitRunIs :one
SELECT EXISTS (SELECT FROM run WHERE id = @id AND epoch = @epoch AND wake_seq = @wake_seq AND state = (@state::text)::run_state AND steps = @steps);

-- name: UnitIdempotencyResult :exec
UPDATE idempotency i SET result = k.result::json
FROM (SELECT unnest(@tenant_ids::text[]) AS tenant_id, unnest(@scopes::text[]) AS scope, unnest(@keys::text[]) AS key,
             unnest(@results::text[]) AS result) k
WHERE i.tenant_id = k.tenant_id AND i.scope = k.scope AND i.key = k.key;

-- name: UnitSessionDrop :exec
-- Sessions this transaction made for ops that were then refused.
DELETE FROM session WHERE id = ANY (@ids::uuid[]);

-- name: UnitWaitDue :many
-- Which of these waits are over. It runs after the lock of the runs.
SELECT run_id FROM wait WHERE run_id = ANY (@run_ids::uuid[]) AND until <= weir_now();
