-- +goose Up
-- River's tables exist before this file runs: Migrate keeps that order.

-- weir_now is the clock of schedules, budgets, deadlines and waits. Tests
-- replace it. Liveness reads clock_timestamp() and cannot be moved.
-- +goose StatementBegin
CREATE FUNCTION weir_now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE AS 'SELECT now()';
-- +goose StatementEnd

CREATE TYPE run_kind AS ENUM ('turn', 'spawn', 'graph', 'graph_node', 'cron', 'wake_gate', 'memory_sweep', 'delivery');
CREATE TYPE run_state AS ENUM ('queued', 'running', 'waiting',
    'completed', 'failed', 'cancelled', 'killed', 'timed_out', 'orphaned', 'poisoned');
CREATE TYPE step_kind AS ENUM ('model', 'tool', 'spawn', 'effect');
CREATE TYPE step_status AS ENUM ('started', 'done');
CREATE TYPE wait_kind AS ENUM ('children', 'tool', 'approval', 'timer', 'rate_limit', 'capacity', 'probe');
CREATE TYPE worker_state AS ENUM ('live', 'draining', 'dead', 'reaped', 'left');
CREATE TYPE event_type AS ENUM ('agent.request', 'agent.clarify', 'agent.response', 'agent.status', 'agent.warning',
    'agent.error', 'agent.usage', 'agent.plan', 'agent.summary', 'agent.debug', 'tool.request', 'tool.response',
    'memory.read', 'memory.write');

CREATE TABLE tenant (
    id         text        NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT tenant_pkey PRIMARY KEY (id),
    CONSTRAINT tenant_id_form CHECK (id ~ '^[a-z0-9][a-z0-9_-]{0,62}$')
);

CREATE TABLE api_token (
    tenant_id   text        NOT NULL,
    id          text        NOT NULL,
    secret_hash bytea       NOT NULL, -- SHA-256; the secret itself is stored nowhere
    scopes      text[]      NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    revoked_at  timestamptz,
    CONSTRAINT api_token_pkey PRIMARY KEY (tenant_id, id),
    CONSTRAINT api_token_tenant_fkey FOREIGN KEY (tenant_id) REFERENCES tenant (id),
    CONSTRAINT api_token_secret_hash_key UNIQUE (secret_hash),
    CONSTRAINT api_token_scopes_known CHECK (scopes <@ ARRAY ['rpc', 'admin', 'read', '*'] AND cardinality(scopes) > 0)
);

CREATE TABLE agent (
    tenant_id    text        NOT NULL,
    name         text        NOT NULL,
    id           uuid        NOT NULL, -- the id of the Agentex surface; survives delete and re-create
    version      int         NOT NULL,
    suspended_at timestamptz,
    deleted_at   timestamptz,
    created_at   timestamptz NOT NULL DEFAULT now(),
    updated_at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT agent_pkey PRIMARY KEY (tenant_id, name),
    CONSTRAINT agent_tenant_fkey FOREIGN KEY (tenant_id) REFERENCES tenant (id),
    CONSTRAINT agent_id_key UNIQUE (id)
);

-- A turn keeps the configuration it began with, so versions are never changed.
CREATE TABLE agent_version (
    tenant_id  text        NOT NULL,
    name       text        NOT NULL,
    version    int         NOT NULL,
    config     jsonb       NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT agent_version_pkey PRIMARY KEY (tenant_id, name, version)
);

-- A session is a conversation. Its row is the lane's lock and hands out the
-- gap-free numbers of its events and messages.
CREATE TABLE session (
    tenant_id          text        NOT NULL,
    id                 uuid        NOT NULL,
    conversation_ref   text        NOT NULL,
    external_id        text,        -- the client's sessionId
    name               text,        -- of an Agentex task
    kind               text        NOT NULL DEFAULT 'dm',
    channel_type       text        NOT NULL,
    scope              jsonb       NOT NULL, -- [tenant, agent, channelType, channelInstanceId, conversationId, threadId, userId]
    agent              text        NOT NULL,
    user_id            text,
    owner_token        text,        -- token that created it, for self-scoped methods
    event_seq          bigint      NOT NULL DEFAULT 0,
    message_seq        bigint      NOT NULL DEFAULT 0,
    epoch              int         NOT NULL DEFAULT 0,
    head_run_id        uuid,        -- the lane's executing turn
    queued             int         NOT NULL DEFAULT 0, -- turns that wait behind it
    context_from_seq   bigint      NOT NULL DEFAULT 0,
    turns              bigint      NOT NULL DEFAULT 0,
    model_calls        bigint      NOT NULL DEFAULT 0,
    tool_calls         bigint      NOT NULL DEFAULT 0,
    input_tokens       bigint      NOT NULL DEFAULT 0, -- uncached + cache read + cache write
    output_tokens      bigint      NOT NULL DEFAULT 0, -- visible + reasoning
    cost_micros        bigint      NOT NULL DEFAULT 0,
    task_status        text,
    task_status_reason text,
    task_params        jsonb,
    task_metadata      jsonb,
    created_at         timestamptz NOT NULL DEFAULT now(),
    updated_at         timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT session_pkey PRIMARY KEY (id),
    CONSTRAINT session_conversation_ref_key UNIQUE (tenant_id, conversation_ref),
    CONSTRAINT session_lane CHECK (queued >= 0 AND (queued = 0 OR head_run_id IS NOT NULL))
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.05, autovacuum_analyze_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
CREATE UNIQUE INDEX session_external_id_key ON session (tenant_id, external_id) WHERE external_id IS NOT NULL;
CREATE UNIQUE INDEX session_name_key ON session (tenant_id, name) WHERE name IS NOT NULL;
CREATE INDEX session_waiting ON session (id) WHERE queued > 0;
CREATE INDEX session_agent ON session (tenant_id, agent, id);

CREATE TABLE event (
    session_id uuid        NOT NULL,
    seq        bigint      NOT NULL,
    tenant_id  text        NOT NULL,
    type       event_type  NOT NULL,
    run_id     uuid        NOT NULL,
    content    json        NOT NULL,
    ts         timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT event_pkey PRIMARY KEY (session_id, seq)
) WITH (autovacuum_vacuum_insert_scale_factor = 0.1, autovacuum_analyze_scale_factor = 0.05);

-- What the Agentex surface shows of a task. Sessions that are no tasks have none.
CREATE TABLE message (
    session_id       uuid        NOT NULL,
    seq              bigint      NOT NULL,
    id               uuid        NOT NULL,
    tenant_id        text        NOT NULL,
    run_id           uuid,
    content          jsonb       NOT NULL,
    streaming_status text,
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at       timestamptz,
    CONSTRAINT message_pkey PRIMARY KEY (session_id, seq),
    CONSTRAINT message_id_key UNIQUE (id)
);

CREATE TABLE run (
    id                  uuid        NOT NULL,
    tenant_id           text        NOT NULL,
    kind                run_kind    NOT NULL,
    state               run_state   NOT NULL DEFAULT 'queued',
    queue               text        NOT NULL,
    worker_id           uuid,
    epoch               int         NOT NULL DEFAULT 0,
    wake_seq            int         NOT NULL DEFAULT 0,
    root_run_id         uuid        NOT NULL,
    parent_run_id       uuid,
    depth               int         NOT NULL DEFAULT 0,
    agent               text        NOT NULL,
    agent_version       int         NOT NULL,
    session_id          uuid        NOT NULL,
    request_seq         bigint      NOT NULL, -- of the event that began it: the order of the lane
    in_lane             bool        NOT NULL, -- it takes its turn in the session's lane
    user_id             text,
    owner_token         text,
    input               json        NOT NULL,
    steps               int         NOT NULL DEFAULT 0, -- completed ones
    model_calls         int         NOT NULL DEFAULT 0,
    call_attempts       int         NOT NULL DEFAULT 0, -- failed attempts of the call that is due
    call_limited        int         NOT NULL DEFAULT 0, -- those among them that a rate limit refused
    losses              int         NOT NULL DEFAULT 0, -- workers that died at this step
    open_children       int         NOT NULL DEFAULT 0, -- the join: children that have not ended
    time_left_ms        bigint      NOT NULL, -- of the deadline, while there is none
    deadline_at         timestamptz,
    admitted_at         timestamptz,
    nudged_at           timestamptz,
    nudges              int         NOT NULL DEFAULT 0, -- repeats by the sweeper
    cancel_requested_at timestamptz,
    killed_at           timestamptz, -- on a root: its whole tree is dead
    evicted_at          timestamptz,
    waits_for           wait_kind,
    end_reason          text,
    result              json,
    error               json,
    retry_of            uuid,
    created_at          timestamptz NOT NULL DEFAULT now(),
    started_at          timestamptz,
    finished_at         timestamptz,
    CONSTRAINT run_pkey PRIMARY KEY (id),
    CONSTRAINT run_running_has_worker CHECK ((state = 'running') = (worker_id IS NOT NULL)),
    CONSTRAINT run_final_has_end CHECK ((state >= 'completed') = (finished_at IS NOT NULL)),
    CONSTRAINT run_waiting_waits CHECK ((state = 'waiting') = (waits_for IS NOT NULL)),
    CONSTRAINT run_waiting_is_not_admitted CHECK (admitted_at IS NULL OR state <> 'waiting'),
    CONSTRAINT run_root_has_depth_0 CHECK ((depth = 0) = (id = root_run_id))
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.05, autovacuum_analyze_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX run_tenant ON run (tenant_id, id);
CREATE INDEX run_tree ON run (root_run_id) WHERE depth > 0;
CREATE INDEX run_lane ON run (session_id, request_seq) WHERE state = 'queued' AND in_lane AND admitted_at IS NULL;
CREATE INDEX run_held ON run (worker_id) WHERE state = 'running';
CREATE INDEX run_admitted ON run (queue, nudged_at) WHERE state = 'queued' AND admitted_at IS NOT NULL;

CREATE TABLE wait (
    run_id     uuid        NOT NULL,
    tenant_id  text        NOT NULL,
    kind       wait_kind   NOT NULL,
    key        text,
    until      timestamptz NOT NULL, -- every wait ends: when its time comes, or at this deadline
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT wait_pkey PRIMARY KEY (run_id)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);
CREATE INDEX wait_until ON wait (until);

CREATE TABLE step (
    run_id       uuid        NOT NULL,
    seq          int         NOT NULL,
    tenant_id    text        NOT NULL,
    kind         step_kind   NOT NULL,
    status       step_status NOT NULL,
    call_id      text        NOT NULL,
    name         text        NOT NULL, -- the tool, or provider/model
    attempt      int         NOT NULL DEFAULT 0,
    input_digest bytea,
    output       json,
    epoch        int         NOT NULL,
    started_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at  timestamptz,
    CONSTRAINT step_pkey PRIMARY KEY (run_id, seq),
    CONSTRAINT step_done_has_output CHECK ((status = 'done') = (finished_at IS NOT NULL))
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.05);

-- One row for each model call that was really made, whoever owns the run now.
CREATE TABLE usage (
    run_id      uuid        NOT NULL,
    call_id     text        NOT NULL,
    tenant_id   text        NOT NULL,
    session_id  uuid        NOT NULL,
    user_id     text,
    agent       text        NOT NULL,
    provider    text        NOT NULL,
    model       text        NOT NULL,
    input       bigint      NOT NULL,
    cache_read  bigint      NOT NULL,
    cache_write bigint      NOT NULL,
    output      bigint      NOT NULL,
    reasoning   bigint      NOT NULL,
    cost_micros bigint,
    estimated   bool        NOT NULL,
    at          timestamptz NOT NULL DEFAULT weir_now(),
    CONSTRAINT usage_pkey PRIMARY KEY (run_id, call_id)
);

CREATE TABLE fact (
    tenant_id  text        NOT NULL,
    agent      text        NOT NULL,
    scope      text        NOT NULL,
    scope_id   text        NOT NULL,
    key        text        NOT NULL,
    value      json,
    kind       text,
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT fact_pkey PRIMARY KEY (tenant_id, agent, scope, scope_id, key),
    CONSTRAINT fact_scope_known CHECK (scope IN ('session', 'user'))
);

CREATE TABLE idempotency (
    tenant_id  text        NOT NULL,
    scope      text        NOT NULL, -- the method, or session and method
    key        text        NOT NULL,
    digest     bytea       NOT NULL, -- of the canonical params
    run_id     uuid,                 -- an accepted turn: its row holds the answer
    result     json,                 -- any other method: the stored answer
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT idempotency_pkey PRIMARY KEY (tenant_id, scope, key)
);
CREATE INDEX idempotency_created_at ON idempotency (created_at);

-- A provider key that answered 429 or 529: nobody calls it before blocked_until.
CREATE TABLE rate_limit (
    tenant_id     text        NOT NULL,
    key           text        NOT NULL,
    blocked_until timestamptz NOT NULL,
    updated_at    timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT rate_limit_pkey PRIMARY KEY (tenant_id, key)
);

CREATE TABLE worker (
    id           uuid         NOT NULL, -- also the River client id
    state        worker_state NOT NULL DEFAULT 'live',
    hostname     text         NOT NULL,
    pid          int          NOT NULL,
    version      text         NOT NULL,
    queues       text[]       NOT NULL,
    slots        int          NOT NULL,
    solitary     bool         NOT NULL DEFAULT false, -- the child process of one suspect
    lock_key     bigint       NOT NULL GENERATED ALWAYS AS IDENTITY,
    lease_ms     bigint       NOT NULL,
    heartbeat_at timestamptz  NOT NULL DEFAULT clock_timestamp(),
    started_at   timestamptz  NOT NULL DEFAULT clock_timestamp(),
    ended_at     timestamptz,
    CONSTRAINT worker_pkey PRIMARY KEY (id)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 50);
CREATE INDEX worker_current ON worker (id) WHERE state IN ('live', 'draining', 'dead');

ALTER TABLE river_job SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 2000,
    autovacuum_analyze_scale_factor = 0.02, autovacuum_analyze_threshold = 2000,
    autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0, fillfactor = 80);

INSERT INTO tenant (id) VALUES ('default');
INSERT INTO agent (tenant_id, name, id, version) VALUES ('default', 'default', gen_random_uuid(), 1);
INSERT INTO agent_version (tenant_id, name, version, config)
VALUES ('default', 'default', 1, '{"name": "default", "kind": "model", "provider": "offline", "model": "offline-1"}');
