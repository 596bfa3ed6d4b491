-- name: SessionFind :one
-- A session by the name its client knows: exactly one of the three is given.
SELECT id, agent, conversation_ref FROM session
WHERE tenant_id = @tenant_id
  AND (external_id = sqlc.narg('external_id') OR conversation_ref = sqlc.narg('conversation_ref') OR name = sqlc.narg('name'));

-- name: SessionGet :one
SELECT * FROM session WHERE tenant_id = @tenant_id AND id = @id;

-- name: SessionLane :one
SELECT head_run_id, queued FROM session WHERE id = @id;
