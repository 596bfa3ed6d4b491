package db

import (
	"context"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// RunListParams select runs of a tenant, the newest first. Zero values do not
// restrict.
type RunListParams struct {
	TenantID  string
	State     RunState
	Kind      RunKind
	Agent     string
	SessionID uuid.UUID
	RootRunID uuid.UUID
	Before    uuid.UUID // runs with a smaller id: those of the next page
	MaxRows   int
}

// RunList is written by hand since its filters differ from call to call.
func (q *Queries) RunList(ctx context.Context, db DBTX, p RunListParams) ([]RunViewRow, error) {
	var where strings.Builder
	where.WriteString("r.tenant_id = @tenant_id")
	args := pgx.NamedArgs{"tenant_id": p.TenantID, "max_rows": p.MaxRows}
	and := func(condition, name string, value any) {
		where.WriteString(" AND " + condition)
		args[name] = value
	}
	if p.State != "" {
		and("r.state = @state::run_state", "state", string(p.State))
	}
	if p.Kind != "" {
		and("r.kind = @kind::run_kind", "kind", string(p.Kind))
	}
	if p.Agent != "" {
		and("r.agent = @agent", "agent", p.Agent)
	}
	if p.SessionID != uuid.Nil { // every run of a session began with an event of it
		and("r.id = ANY (ARRAY(SELECT e.run_id FROM event e WHERE e.session_id = @session_id AND e.type = 'agent.request'))", "session_id", p.SessionID)
	}
	if p.RootRunID != uuid.Nil {
		and("(r.root_run_id = @root AND r.depth > 0 OR r.id = @root)", "root", p.RootRunID)
	}
	if p.Before != uuid.Nil {
		and("r.id < @before", "before", p.Before)
	}
	rows, err := db.Query(ctx, `
SELECT r.id, r.kind, r.state, r.agent, r.session_id, r.root_run_id, r.parent_run_id, r.depth, r.worker_id, r.epoch, r.wake_seq,
       greatest(r.steps, (SELECT count(*) FROM step st WHERE st.run_id = r.id AND st.status = 'done'))::int AS steps,
       greatest(r.model_calls, (SELECT count(*) FROM step st WHERE st.run_id = r.id AND st.status = 'done' AND st.kind = 'model'))::int AS model_calls,
       r.losses, r.end_reason, r.error, r.waits_for, r.deadline_at, r.created_at, r.started_at, r.finished_at,
       s.external_id, s.conversation_ref, s.task_status IS NOT NULL, NULL::text
FROM run r JOIN session s ON s.id = r.session_id
WHERE `+where.String()+` ORDER BY r.id DESC LIMIT @max_rows`, args)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[RunViewRow])
}
