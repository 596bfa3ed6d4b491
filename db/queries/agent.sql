-- name: AgentCurrent :one
-- An agent as it is now, also when it is deleted.
SELECT a.id, a.name, a.version, (a.suspended_at IS NOT NULL)::bool AS suspended, (a.deleted_at IS NOT NULL)::bool AS deleted, v.config
FROM agent a JOIN agent_version v USING (tenant_id, name, version)
WHERE a.tenant_id = @tenant_id AND a.name = @name;

-- name: AgentNameOf :one
-- The name of an agent by its id of the Agentex surface, also when it is deleted.
SELECT name FROM agent WHERE tenant_id = @tenant_id AND id = @id;

-- name: AgentNames :many
SELECT name FROM agent WHERE tenant_id = @tenant_id AND deleted_at IS NULL ORDER BY name;

-- name: AgentList :many
-- What the Agentex surface shows of agents: all of a tenant, or that of one task.
SELECT a.id, a.name, a.suspended_at, a.created_at, a.updated_at, (v.config ->> 'provider')::text AS provider, (v.config ->> 'model')::text AS model
FROM agent a JOIN agent_version v USING (tenant_id, name, version)
WHERE a.tenant_id = @tenant_id AND a.deleted_at IS NULL
  AND (sqlc.narg('task_id')::uuid IS NULL
       OR a.name = (SELECT s.agent FROM session s WHERE s.tenant_id = @tenant_id AND s.id = sqlc.narg('task_id') AND s.task_status IS NOT NULL))
ORDER BY a.updated_at DESC, a.created_at DESC, a.name;

-- name: AgentPut :one
-- Makes an agent, or revives a deleted one under its id. No row means that
-- there is one of that name.
INSERT INTO agent AS a (tenant_id, name, id, version) VALUES (@tenant_id, @name, @id, 1)
ON CONFLICT (tenant_id, name) DO UPDATE
    SET version = a.version + 1, deleted_at = NULL, suspended_at = NULL, updated_at = clock_timestamp()
    WHERE a.deleted_at IS NOT NULL
RETURNING version;

-- name: AgentVersionInsert :exec
-- The current version, of an agent that this transaction has written; admission
-- reads its limit.
WITH v AS (
    INSERT INTO agent_version (tenant_id, name, version, config) VALUES (@tenant_id, @name, @version, @config)
    RETURNING tenant_id, name, config
)
UPDATE agent a SET max_running = (v.config -> 'concurrency' ->> 'maxRunning')::int FROM v WHERE a.tenant_id = v.tenant_id AND a.name = v.name;

-- name: AgentLock :one
-- Locks an agent against other changes of its configuration.
SELECT version FROM agent WHERE tenant_id = @tenant_id AND name = @name AND deleted_at IS NULL FOR NO KEY UPDATE;

-- name: AgentBump :exec
UPDATE agent SET version = @version, updated_at = clock_timestamp() WHERE tenant_id = @tenant_id AND name = @name;

-- name: AgentDelete :execrows
UPDATE agent SET deleted_at = clock_timestamp(), suspended_at = NULL, updated_at = clock_timestamp()
WHERE tenant_id = @tenant_id AND name = @name AND deleted_at IS NULL;

-- name: AgentSuspend :execrows
UPDATE agent SET suspended_at = coalesce(suspended_at, clock_timestamp()),
    updated_at = CASE WHEN suspended_at IS NULL THEN clock_timestamp() ELSE updated_at END
WHERE tenant_id = @tenant_id AND name = @name AND deleted_at IS NULL;

-- name: AgentResume :execrows
UPDATE agent SET suspended_at = NULL, updated_at = CASE WHEN suspended_at IS NULL THEN updated_at ELSE clock_timestamp() END
WHERE tenant_id = @tenant_id AND name = @name AND deleted_at IS NULL;
