-- name: WorkerInsert :one
-- before is the id that the same process had until it lost its lease: what an
-- operator wants of it still holds.
INSERT INTO worker (id, hostname, pid, version, queues, queue_slots, slots, solitary, lease_ms, wanted)
VALUES (@id, @hostname, @pid, @version, @queues, coalesce(@queue_slots::int[], '{}'), @slots, @solitary, @lease_ms,
        (SELECT b.wanted FROM worker b WHERE b.id = @before))
RETURNING lock_key, coalesce(wanted, '')::text AS wanted;

-- name: WorkerHeartbeat :one
UPDATE worker SET heartbeat_at = clock_timestamp() WHERE id = @id AND state IN ('live', 'draining') RETURNING coalesce(wanted, '')::text AS wanted;

-- name: WorkerWant :many
-- What an operator wants of a worker; a drain is not taken back.
UPDATE worker SET wanted = CASE WHEN wanted = 'drain' THEN wanted ELSE @wanted::text END
WHERE id = @id AND state IN ('live', 'draining') RETURNING wanted::text AS wanted;

-- name: WorkerDrain :exec
UPDATE worker SET state = 'draining' WHERE id = @id AND state = 'live';

-- name: WorkerLeave :exec
-- A clean exit: whatever it still holds is handed back by the caller before.
UPDATE worker SET state = 'left', ended_at = clock_timestamp() WHERE id = @id AND state IN ('live', 'draining');

-- name: WorkerLocks :many
-- Tries every current worker's lock at once; free means that its connection is gone.
SELECT w.id, w.state, w.heartbeat_at, w.lease_ms, w.solitary,
       pg_try_advisory_xact_lock_shared(w.lock_key)::bool AS free,
       (clock_timestamp() - w.heartbeat_at > w.lease_ms * interval '1 millisecond')::bool AS expired,
       (extract(epoch FROM clock_timestamp() - w.heartbeat_at) * 1000)::bigint AS silent_ms
FROM worker w WHERE w.state IN ('live', 'draining', 'dead');

-- name: WorkerDeclareDead :one
-- The compare is on the heartbeat that was judged: a later one saves the worker.
WITH locked AS (SELECT w.id FROM worker w WHERE w.id = @id FOR UPDATE)
UPDATE worker SET state = 'dead', ended_at = clock_timestamp()
FROM locked
WHERE worker.id = locked.id AND worker.state IN ('live', 'draining') AND worker.heartbeat_at = @heartbeat_at
RETURNING worker.id, worker.solitary;

-- name: WorkerReaped :exec
UPDATE worker SET state = 'reaped' WHERE id = @id AND state = 'dead';

-- name: WorkerNudgesLost :many
-- Admitted runs whose nudge a dead worker had fetched and not claimed.
SELECT r.id, r.session_id, r.parent_run_id
FROM river_job j JOIN run r ON r.id = (j.args ->> 'run_id')::uuid
WHERE j.state = 'running' AND j.attempted_by[array_upper(j.attempted_by, 1)] = @worker_id::text
  AND r.state = 'queued' AND r.admitted_at IS NOT NULL;

-- name: WorkerJobsDiscard :execrows
-- Finalises the nudges of a dead worker; their successors depend on the runs
-- alone, so none is normal.
UPDATE river_job SET state = 'discarded', finalized_at = now(),
    errors = array_append(errors, jsonb_build_object('at', now(), 'attempt', attempt, 'error', 'worker lost', 'trace', ''))
WHERE state = 'running' AND attempted_by[array_upper(attempted_by, 1)] = @worker_id::text;

-- name: WorkerPurge :exec
DELETE FROM worker WHERE state IN ('reaped', 'left') AND ended_at < clock_timestamp() - sqlc.arg('kept_ms')::bigint * interval '1 millisecond';

-- name: IdempotencyPurge :execrows
DELETE FROM idempotency WHERE ctid = ANY (ARRAY(SELECT ctid FROM idempotency
    WHERE created_at < weir_now() - sqlc.arg('kept_ms')::bigint * interval '1 millisecond' LIMIT @max_rows));

-- name: ClockNow :one
SELECT weir_now()::timestamptz AS at;

-- name: DutyTake :execrows
-- Takes or renews a duty; no row: another process has it, by its row or, with a
-- session of its own, by the duty's lock.
UPDATE duty SET holder = @holder, until = clock_timestamp() + make_interval(secs => @seconds::float8)
WHERE name = @name AND (holder = @holder OR until < clock_timestamp()) AND pg_try_advisory_xact_lock(@lock_key::bigint);

-- name: DutyLeave :exec
UPDATE duty SET until = '-infinity' WHERE name = @name AND holder = @holder;
