-- name: TokenByHash :one
SELECT tenant_id, id, scopes FROM api_token WHERE secret_hash = @secret_hash AND revoked_at IS NULL;

-- name: TokenList :many
SELECT id, scopes, created_at FROM api_token WHERE tenant_id = @tenant_id AND revoked_at IS NULL ORDER BY id;

-- name: TokenPut :execrows
-- Makes a token, or one in place of a revoked one. No row means that there is
-- one of that id.
INSERT INTO api_token AS t (tenant_id, id, secret_hash, scopes) VALUES (@tenant_id, @id, @secret_hash, @scopes)
ON CONFLICT (tenant_id, id) DO UPDATE
    SET secret_hash = excluded.secret_hash, scopes = excluded.scopes, created_at = clock_timestamp(), revoked_at = NULL
    WHERE t.revoked_at IS NOT NULL;

-- name: TokenLock :one
SELECT scopes, revoked_at FROM api_token WHERE tenant_id = @tenant_id AND id = @id FOR NO KEY UPDATE;

-- name: TokenRevoke :execrows
UPDATE api_token SET revoked_at = coalesce(revoked_at, clock_timestamp()) WHERE tenant_id = @tenant_id AND id = @id;

-- name: TokenRotate :exec
UPDATE api_token SET secret_hash = @secret_hash, created_at = clock_timestamp() WHERE tenant_id = @tenant_id AND id = @id;
