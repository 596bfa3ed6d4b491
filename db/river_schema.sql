-- The columns of River's job table that our queries name. sqlc reads this
-- file; the table itself is made by River's own migrations.
CREATE TYPE river_job_state AS ENUM ('available', 'cancelled', 'completed', 'discarded', 'pending', 'retryable', 'running', 'scheduled');
CREATE TABLE river_job (
    id           bigserial PRIMARY KEY,
    state        river_job_state NOT NULL,
    attempt      smallint        NOT NULL,
    attempted_by text[],
    finalized_at timestamptz,
    args         jsonb           NOT NULL,
    errors       jsonb[],
    kind         text            NOT NULL,
    queue        text            NOT NULL,
    priority     smallint        NOT NULL,
    scheduled_at timestamptz     NOT NULL
);
