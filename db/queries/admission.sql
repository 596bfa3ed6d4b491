-- name: UnitGate :many
-- What may be admitted without the admitter: so many of the open queues since
-- the look at version; not of tenants and agents with a limit, whose number is
-- bounded. And how many more may wait, where that is limited.
SELECT 'open'::text AS what, q.name AS scope, ''::text AS name, q.free AS n, extract(epoch FROM q.looked_at)::float8 AS version FROM queue q
WHERE q.open AND q.paused_at IS NULL AND q.max_running IS NULL AND q.looked_at > clock_timestamp() - interval '3 seconds'
UNION ALL
SELECT 'wait', q.name, '', q.max_waiting
       - (SELECT count(*) FROM (SELECT FROM run r WHERE r.state = 'queued' AND r.ready_at IS NOT NULL AND r.admitted_at IS NULL AND r.queue = q.name
                                LIMIT q.max_waiting) r)::int, 0
FROM queue q WHERE q.max_waiting IS NOT NULL
UNION ALL
(SELECT 'tenant', t.id, '', 0, 0 FROM tenant t WHERE t.max_running IS NOT NULL LIMIT 201)
UNION ALL
(SELECT 'agent', a.tenant_id, a.name, 0, 0 FROM agent a WHERE a.max_running IS NOT NULL LIMIT 201);

-- name: UnitRunReady :exec
-- The next turns of lanes, which UnitLaneNext has locked, wait for admission.
UPDATE run SET ready_at = clock_timestamp() WHERE id = ANY (@ids::uuid[]);

-- name: AdmissionQueues :many
-- Every queue with what River still holds of it, counted up to a bound, and the
-- live workers that serve it.
SELECT q.name, (q.paused_at IS NOT NULL)::bool AS paused, coalesce(q.max_running, -1)::int AS max_running, coalesce(q.max_waiting, -1)::int AS max_waiting,
       q.open, q.free,
       (SELECT count(*) FROM (SELECT FROM run r WHERE r.state = 'queued' AND r.admitted_at IS NOT NULL AND r.queue = q.name
                              LIMIT @bound) r)::bigint AS unclaimed,
       (SELECT count(*) FROM worker w WHERE w.state = 'live' AND w.wanted IS NULL AND NOT w.solitary AND q.name = ANY (w.queues)
          AND w.heartbeat_at > clock_timestamp() - w.lease_ms * interval '1 millisecond')::bigint AS workers,
       (SELECT coalesce(sum(w.queue_slots[array_position(w.queues, q.name)]), 0)
        FROM worker w WHERE w.state = 'live' AND w.wanted IS NULL AND NOT w.solitary AND q.name = ANY (w.queues)
          AND w.heartbeat_at > clock_timestamp() - w.lease_ms * interval '1 millisecond')::bigint AS slots
FROM queue q ORDER BY q.name;

-- name: AdmissionFlows :many
-- The flows that wait, found by leaps over the index.
WITH RECURSIVE flow AS (
    (SELECT r.queue, r.tenant_id, r.agent, r.ready_at FROM run r
     WHERE r.state = 'queued' AND r.ready_at IS NOT NULL AND r.admitted_at IS NULL
     ORDER BY r.queue, r.tenant_id, r.agent, r.ready_at LIMIT 1)
    UNION ALL
    SELECT n.queue, n.tenant_id, n.agent, n.ready_at FROM flow f CROSS JOIN LATERAL (
        SELECT r.queue, r.tenant_id, r.agent, r.ready_at FROM run r
        WHERE r.state = 'queued' AND r.ready_at IS NOT NULL AND r.admitted_at IS NULL
          AND (r.queue, r.tenant_id, r.agent) > (f.queue, f.tenant_id, f.agent)
        ORDER BY r.queue, r.tenant_id, r.agent, r.ready_at LIMIT 1) n
)
SELECT f.queue, f.tenant_id, f.agent, coalesce(t.weight, 1)::float8 AS weight, coalesce(t.max_running, -1)::int AS tenant_max,
       coalesce(a.max_running, -1)::int AS agent_max
FROM flow f LEFT JOIN tenant t ON t.id = f.tenant_id LEFT JOIN agent a ON a.tenant_id = f.tenant_id AND a.name = f.agent;

-- name: AdmissionHeads :many
-- The runs of each flow that have waited longest, from where the last look
-- ended.
SELECT h.id, h.kind, h.ready_at, f.n::int AS flow
FROM (SELECT unnest(@numbers::int[]) AS n, unnest(@tenants::text[]) AS tenant_id, unnest(@agents::text[]) AS agent,
             unnest(@since::timestamptz[]) AS since, unnest(@most::int[]) AS most) f
CROSS JOIN LATERAL (
    SELECT r.id, r.kind, r.ready_at FROM run r
    WHERE r.state = 'queued' AND r.ready_at IS NOT NULL AND r.admitted_at IS NULL AND r.queue = @queue::text
      AND r.tenant_id = f.tenant_id AND r.agent = f.agent AND r.ready_at >= f.since
    ORDER BY r.ready_at, r.id LIMIT f.most) h;

-- name: AdmissionInFlight :many
-- What runs or is about to, of the limited scopes: the slots they hold. A
-- suspect keeps that of its own queue, to which it returns with its next step.
SELECT h.queue::text AS queue, h.tenant_id, h.agent, count(*) AS n FROM (
    SELECT CASE WHEN r.queue <> 'suspect' THEN r.queue
                ELSE CASE r.kind WHEN 'spawn' THEN 'spawns' WHEN 'graph_node' THEN 'graphs' WHEN 'wake_gate' THEN 'gates'
                                 WHEN 'memory_sweep' THEN 'memory' WHEN 'delivery' THEN 'delivery' ELSE 'turns' END END AS queue,
           r.tenant_id, r.agent
    FROM (SELECT queue, kind, tenant_id, agent FROM run WHERE state = 'running'
          UNION ALL
          SELECT queue, kind, tenant_id, agent FROM run WHERE state = 'queued' AND admitted_at IS NOT NULL) r) h
GROUP BY h.queue, h.tenant_id, h.agent;

-- name: AdmissionXact :one
-- Gives the transaction its number, by which a pause waits for it.
SELECT pg_current_xact_id()::text AS xid;

-- name: AdmissionAdmit :many
-- Admits those among the runs that still wait and that nobody holds, and whose
-- queue was not paused before the transaction had its number.
UPDATE run r SET admitted_at = weir_now(), nudged_at = clock_timestamp(), ready_at = NULL
FROM (SELECT q.id FROM run q
      WHERE q.id = ANY (@ids::uuid[]) AND q.state::text = 'queued' AND q.ready_at IS NOT NULL AND q.admitted_at IS NULL
        AND NOT EXISTS (SELECT FROM queue p WHERE p.name = q.queue AND p.paused_at IS NOT NULL)
      ORDER BY q.depth, q.id FOR NO KEY UPDATE SKIP LOCKED) c
WHERE r.id = c.id
RETURNING r.id, r.kind;

-- name: AdmissionGate :exec
UPDATE queue q SET open = g.open, free = g.free, looked_at = clock_timestamp()
FROM (SELECT unnest(@names::text[]) AS name, unnest(@opens::bool[]) AS open, unnest(@frees::int[]) AS free) g
WHERE q.name = g.name;

-- name: AdmissionRunning :many
SELECT queue, count(*) AS n FROM run WHERE state = 'running' GROUP BY queue;

-- name: QueueList :many
SELECT q.name, q.paused_at, q.max_running, q.max_waiting, (q.open AND q.looked_at > clock_timestamp() - interval '3 seconds')::bool AS open,
       (SELECT count(*) FROM (SELECT FROM run r WHERE r.state = 'queued' AND r.ready_at IS NOT NULL AND r.admitted_at IS NULL AND r.queue = q.name
                              LIMIT 10000) r)::bigint AS waiting,
       (SELECT count(*) FROM (SELECT FROM run r WHERE r.state = 'queued' AND r.admitted_at IS NOT NULL AND r.queue = q.name
                              LIMIT 10000) r)::bigint AS admitted,
       b.running::bigint AS running, b.slots::bigint AS slots
FROM queue q JOIN weir_backlog b ON b.queue = q.name ORDER BY q.name;

-- name: QueuePause :execrows
UPDATE queue SET paused_at = coalesce(paused_at, clock_timestamp()), open = false WHERE name = @name;

-- name: XactNow :one
SELECT pg_current_xact_id()::text AS xid;

-- name: XactsBefore :one
-- Whether a transaction that writes began before this one and has not ended.
SELECT (pg_snapshot_xmin(pg_current_snapshot()) < (@xid::text)::xid8)::bool AS going_on;

-- name: QueueResume :execrows
UPDATE queue SET paused_at = NULL WHERE name = @name;

-- name: QueueLimit :execrows
-- -1 leaves a limit as it is, NULL removes it.
UPDATE queue SET max_running = CASE WHEN sqlc.narg('max_running')::int = -1 THEN max_running ELSE sqlc.narg('max_running') END,
    max_waiting = CASE WHEN sqlc.narg('max_waiting')::int = -1 THEN max_waiting ELSE sqlc.narg('max_waiting') END,
    open = open AND sqlc.narg('max_running')::int IS NULL
WHERE name = @name;

-- name: QueueTakeBack :execrows
-- Admitted runs that nobody claimed wait for admission again; the nudges they
-- had are spare.
UPDATE run r SET admitted_at = NULL, nudged_at = NULL, ready_at = coalesce(r.started_at, clock_timestamp())
FROM (SELECT q.id FROM run q WHERE q.state = 'queued' AND q.admitted_at IS NOT NULL AND q.queue = @queue
      ORDER BY q.depth, q.id LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED) c
WHERE r.id = c.id;

-- name: TenantList :many
SELECT id, weight, max_running, created_at FROM tenant WHERE id > @after ORDER BY id LIMIT @max_rows;

-- name: TenantSet :many
-- A negative weight, or limit, leaves it as it is.
UPDATE tenant SET weight = CASE WHEN @weight::float8 < 0 THEN weight ELSE @weight END,
    max_running = CASE WHEN sqlc.narg('max_running')::int = -1 THEN max_running ELSE sqlc.narg('max_running')::int END
WHERE id = @id
RETURNING id, weight, max_running, created_at;
