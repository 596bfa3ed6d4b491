-- +goose Up
-- The trace in which a run was accepted, as W3C traceparent: every worker that
-- carries the run goes on with it. NULL when there was none.
ALTER TABLE run ADD COLUMN traceparent text;
