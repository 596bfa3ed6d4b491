-- +goose NO TRANSACTION
-- +goose Up
-- Runs that may start wait in their rows until the admitter, or a fast path
-- that is open while nobody waits, gives them a job.
ALTER TABLE run ADD COLUMN IF NOT EXISTS ready_at timestamptz; -- since when it waits for admission
ALTER TABLE run DROP CONSTRAINT IF EXISTS run_ready_is_queued;
ALTER TABLE run ADD CONSTRAINT run_ready_is_queued CHECK (ready_at IS NULL OR (state = 'queued' AND admitted_at IS NULL)) NOT VALID;
ALTER TABLE run VALIDATE CONSTRAINT run_ready_is_queued;

-- A flow is what one agent of one tenant has waiting in one queue.
CREATE INDEX CONCURRENTLY IF NOT EXISTS run_ready ON run (queue, tenant_id, agent, ready_at, id)
    WHERE state = 'queued' AND ready_at IS NOT NULL AND admitted_at IS NULL;

ALTER TABLE tenant ADD COLUMN IF NOT EXISTS weight float8 NOT NULL DEFAULT 1; -- share of the slots that tenants want at the same time
ALTER TABLE tenant ADD COLUMN IF NOT EXISTS max_running int;                  -- NULL: no limit
ALTER TABLE tenant DROP CONSTRAINT IF EXISTS tenant_weight_range;
ALTER TABLE tenant ADD CONSTRAINT tenant_weight_range CHECK (weight >= 0.01 AND weight <= 10000);
ALTER TABLE tenant DROP CONSTRAINT IF EXISTS tenant_max_running_range;
ALTER TABLE tenant ADD CONSTRAINT tenant_max_running_range CHECK (max_running >= 0);
CREATE INDEX CONCURRENTLY IF NOT EXISTS tenant_limited ON tenant (id) WHERE max_running IS NOT NULL;

-- The concurrency.maxRunning of an agent's current version.
ALTER TABLE agent ADD COLUMN IF NOT EXISTS max_running int;
CREATE INDEX CONCURRENTLY IF NOT EXISTS agent_limited ON agent (tenant_id, name) WHERE max_running IS NOT NULL;

ALTER TABLE worker ADD COLUMN IF NOT EXISTS queue_slots int[] NOT NULL DEFAULT '{}'; -- of queues, one by one
ALTER TABLE worker ADD COLUMN IF NOT EXISTS wanted text;                             -- quiet or drain, by an operator
ALTER TABLE worker DROP CONSTRAINT IF EXISTS worker_wanted_known;
ALTER TABLE worker ADD CONSTRAINT worker_wanted_known CHECK (wanted IN ('quiet', 'drain'));

CREATE TABLE IF NOT EXISTS queue (
    name        text        NOT NULL,
    paused_at   timestamptz,
    max_running int,                                   -- of the whole fleet; NULL: what its slots allow
    max_waiting int,                                   -- runs that may wait for admission; NULL: no limit
    -- What the admitter says. Whoever accepts admits at once while the queue is
    -- open, the admitter alive and free not used up.
    open        bool        NOT NULL DEFAULT false,
    free        int         NOT NULL DEFAULT 0,        -- runs that each process may admit until the next look
    looked_at   timestamptz NOT NULL DEFAULT '-infinity',
    CONSTRAINT queue_pkey PRIMARY KEY (name),
    CONSTRAINT queue_max_running_range CHECK (max_running >= 0),
    CONSTRAINT queue_max_waiting_range CHECK (max_waiting >= 0)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 50);
INSERT INTO queue (name) VALUES ('turns'), ('turns_bg'), ('spawns'), ('graphs'), ('gates'), ('memory'), ('delivery'), ('suspect')
ON CONFLICT DO NOTHING;

-- What autoscalers ask, and operators: right also while no process of ours
-- lives. What waits is counted up to 10,000.
CREATE OR REPLACE VIEW weir_backlog AS
SELECT q.name AS queue,
       (SELECT count(*) FROM (SELECT FROM run r WHERE r.state = 'queued' AND r.ready_at IS NOT NULL AND r.admitted_at IS NULL AND r.queue = q.name
                              LIMIT 10000) r)
       + (SELECT count(*) FROM (SELECT FROM run r WHERE r.state = 'queued' AND r.admitted_at IS NOT NULL AND r.queue = q.name LIMIT 10000) r) AS waiting,
       (SELECT count(*) FROM run r WHERE r.state = 'running' AND r.queue = q.name) AS running,
       (SELECT coalesce(sum(w.queue_slots[array_position(w.queues, q.name)]), 0)
        FROM worker w WHERE w.state = 'live' AND w.wanted IS NULL AND NOT w.solitary AND q.name = ANY (w.queues)
          AND w.heartbeat_at > clock_timestamp() - w.lease_ms * interval '1 millisecond') AS slots
FROM queue q;
