-- +goose Up
-- Which binaries work with this schema: a migration that takes away what older
-- ones need raises the number.
CREATE TABLE schema_compat (
    one               bool NOT NULL DEFAULT true,
    min_binary_schema int  NOT NULL, -- binaries whose newest migration is older refuse to start
    CONSTRAINT schema_compat_pkey PRIMARY KEY (one),
    CONSTRAINT schema_compat_one_row CHECK (one)
);
INSERT INTO schema_compat (min_binary_schema) VALUES (2);

-- Who has a duty, for processes that reach Postgres through a pooler in
-- transaction mode alone: there no lock outlives its transaction.
CREATE TABLE duty (
    name   text        NOT NULL,
    holder uuid,
    until  timestamptz NOT NULL DEFAULT '-infinity',
    CONSTRAINT duty_pkey PRIMARY KEY (name)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 50);
INSERT INTO duty (name) VALUES ('reaper'), ('sweeper'), ('admission');
