-- name: MetricRunning :many
SELECT kind, count(*) AS n FROM run WHERE state = 'running' GROUP BY kind;

-- name: MetricQueued :many
-- Runs that wait for a worker, counted up to a bound in each queue, the longest
-- waiting first: so their ages are right also where their number is not.
SELECT r.kind, q.queue::text AS queue, count(*) AS n, coalesce(extract(epoch FROM weir_now() - min(r.admitted_at)), 0)::float8 AS oldest_seconds
FROM unnest(@queues::text[]) AS q (queue)
CROSS JOIN LATERAL (SELECT w.kind, w.admitted_at FROM run w
                    WHERE w.state = 'queued' AND w.admitted_at IS NOT NULL AND w.queue = q.queue ORDER BY w.nudged_at LIMIT @max_rows) r
GROUP BY r.kind, q.queue;

-- name: MetricInLane :one
-- Turns that wait behind others of their session.
SELECT count(*) AS sessions, coalesce(sum(queued), 0)::bigint AS n FROM (SELECT s.queued FROM session s WHERE s.queued > 0 LIMIT @max_rows) q;

-- name: MetricWaiting :many
SELECT r.kind, count(*) AS n FROM (SELECT w.run_id FROM wait w LIMIT @max_rows) w JOIN run r ON r.id = w.run_id
WHERE r.state = 'waiting' GROUP BY r.kind;

-- name: MetricSizes :one
-- How large the tables and partial indexes are: pages now, rows as of the last
-- vacuum.
SELECT pg_relation_size('run') / 8192 AS run_pages,
       (SELECT greatest(reltuples, 0)::bigint FROM pg_catalog.pg_class WHERE oid = 'run_admitted'::regclass)::bigint AS admitted,
       (SELECT greatest(reltuples, 0)::bigint FROM pg_catalog.pg_class WHERE oid = 'run_lane'::regclass)::bigint AS in_lane,
       (SELECT greatest(reltuples, 0)::bigint FROM pg_catalog.pg_class WHERE oid = 'wait'::regclass)::bigint AS waiting;

-- name: MetricFinal :many
-- Runs that have ended, counted in a sample of the table's pages.
SELECT kind, state, count(*) AS n FROM run TABLESAMPLE SYSTEM (@percent::float4) REPEATABLE (7)
WHERE state >= 'completed' GROUP BY kind, state;

-- name: MetricAdmission :many
-- What waits for admission in each queue, counted up to a bound, and how long
-- the heads of its flows have waited.
WITH RECURSIVE flow AS (
    (SELECT r.queue, r.tenant_id, r.agent, r.ready_at, 1 AS n FROM run r
     WHERE r.state = 'queued' AND r.ready_at IS NOT NULL AND r.admitted_at IS NULL
     ORDER BY r.queue, r.tenant_id, r.agent, r.ready_at LIMIT 1)
    UNION ALL
    SELECT n.queue, n.tenant_id, n.agent, n.ready_at, f.n + 1 FROM flow f CROSS JOIN LATERAL (
        SELECT r.queue, r.tenant_id, r.agent, r.ready_at FROM run r
        WHERE r.state = 'queued' AND r.ready_at IS NOT NULL AND r.admitted_at IS NULL
          AND (r.queue, r.tenant_id, r.agent) > (f.queue, f.tenant_id, f.agent)
        ORDER BY r.queue, r.tenant_id, r.agent, r.ready_at LIMIT 1) n
    WHERE f.n < sqlc.arg('max_flows')::int
)
SELECT q.name, (q.paused_at IS NOT NULL)::bool AS paused,
       (SELECT count(*) FROM (SELECT FROM run r WHERE r.state = 'queued' AND r.ready_at IS NOT NULL AND r.admitted_at IS NULL AND r.queue = q.name
                              LIMIT sqlc.arg('max_rows')::int) r)::bigint AS waiting,
       coalesce((SELECT extract(epoch FROM clock_timestamp() - min(f.ready_at)) FROM flow f WHERE f.queue = q.name), 0)::float8 AS oldest_seconds
FROM queue q;

-- name: MetricWorkers :many
SELECT state, count(*) AS n FROM worker WHERE state IN ('live', 'draining', 'dead') GROUP BY state;
