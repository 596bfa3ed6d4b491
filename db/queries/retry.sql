-- name: RetrySource :one
-- What a retry takes from the run it replaces, and how much of it is done.
SELECT r.state, r.kind, r.queue, r.agent, r.agent_version, r.session_id, r.user_id, r.owner_token, r.input, r.traceparent,
       count(s.run_id) FILTER (WHERE s.status = 'done')::int AS steps,
       count(s.run_id) FILTER (WHERE s.status = 'done' AND s.kind = 'model')::int AS model_calls
FROM run r LEFT JOIN step s ON s.run_id = r.id
WHERE r.tenant_id = @tenant_id AND r.id = @id
GROUP BY r.id;

-- name: UnitStepCopy :exec
-- Gives new runs the finished steps of those they replace. Seq and call id
-- stay, since the outputs of model calls name their calls.
INSERT INTO step (run_id, seq, tenant_id, kind, status, call_id, name, attempt, input_digest, output, epoch, started_at, finished_at)
SELECT c.new_id, s.seq, s.tenant_id, s.kind, s.status, s.call_id, s.name, s.attempt, s.input_digest, s.output, 0, s.started_at, s.finished_at
FROM (SELECT unnest(@old_ids::uuid[]) AS old_id, unnest(@new_ids::uuid[]) AS new_id) c
JOIN step s ON s.run_id = c.old_id
WHERE s.status = 'done';
