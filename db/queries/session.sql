-- A session by one of the names its clients know: a query for each, so that
-- each uses its own index.

-- name: SessionOfExternalID :one
SELECT id, agent, conversation_ref FROM session WHERE tenant_id = @tenant_id AND external_id = @external_id::text;

-- name: SessionByRef :one
SELECT * FROM session WHERE tenant_id = @tenant_id AND conversation_ref = @conversation_ref;

-- name: SessionOfName :one
SELECT id, agent, conversation_ref FROM session WHERE tenant_id = @tenant_id AND name = @name::text;

-- name: SessionGet :one
SELECT * FROM session WHERE tenant_id = @tenant_id AND id = @id;

-- name: SessionLane :one
SELECT head_run_id, queued FROM session WHERE id = @id;
