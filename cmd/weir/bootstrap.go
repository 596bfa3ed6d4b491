package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs/agentcfg"
)

// What is written before an API can: the first token of a tenant, and the
// agents of the config file.

const (
	defaultTenant = "default"
	defaultAgent  = "default"
)

// errTokenExists says that the tenant has a token of that id.
var errTokenExists = errors.New("there is a token of that id already; tokens.rotate replaces its secret")

// newToken is a token to be stored.
type newToken struct {
	Tenant, ID, Secret string
	Scopes             []string
	// Replace lets it take the place of a token of the same id.
	Replace bool
}

// storeToken stores a token's hash, and makes its tenant, with its agent
// default, in the same transaction if it is new.
func storeToken(ctx context.Context, conn interface {
	Begin(context.Context) (pgx.Tx, error)
}, t newToken) error {
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `INSERT INTO tenant (id) VALUES ($1) ON CONFLICT DO NOTHING`, t.Tenant)
		if err != nil {
			return fmt.Errorf("tenant %s: %w", t.Tenant, err)
		}
		if tag.RowsAffected() == 1 {
			if _, err := insertAgent(ctx, tx, t.Tenant, agentcfg.Default(defaultAgent)); err != nil {
				return err
			}
		}
		_, err = tx.Exec(ctx, `
			INSERT INTO api_token (tenant_id, id, secret_hash, scopes)
			VALUES (@tenant, @id, @hash, @scopes)`+map[bool]string{true: `
			ON CONFLICT (tenant_id, id) DO UPDATE SET secret_hash = excluded.secret_hash, scopes = excluded.scopes, revoked_at = NULL
			WHERE api_token.secret_hash <> excluded.secret_hash OR api_token.revoked_at IS NOT NULL`}[t.Replace],
			pgx.NamedArgs{"tenant": t.Tenant, "id": t.ID, "hash": db.HashToken(t.Secret), "scopes": t.Scopes})
		var e *pgconn.PgError
		if errors.As(err, &e) && e.ConstraintName == "api_token_pkey" {
			return fmt.Errorf("token %s: %w", t.ID, errTokenExists)
		}
		if err != nil {
			return fmt.Errorf("token %s: %w", t.ID, err)
		}
		return nil
	})
}

// insertAgent makes an agent unless there is, or was, one of its name.
func insertAgent(ctx context.Context, tx pgx.Tx, tenant string, c *agentcfg.Config) (made bool, err error) {
	args := pgx.NamedArgs{"tenant": tenant, "name": c.Name, "id": uuid.New(), "config": c.JSON()}
	tag, err := tx.Exec(ctx, `INSERT INTO agent (tenant_id, name, id, version) VALUES (@tenant, @name, @id, 1) ON CONFLICT DO NOTHING`, args)
	if err == nil && tag.RowsAffected() == 1 {
		made = true
		_, err = tx.Exec(ctx, `INSERT INTO agent_version (tenant_id, name, version, config) VALUES (@tenant, @name, 1, @config)`, args)
	}
	if err != nil {
		return false, fmt.Errorf("agent %s: %w", c.Name, err)
	}
	return made, nil
}

// seedAgents makes the agents of the config file that the default tenant does
// not have. One that exists, or that somebody deleted, is the API's to change.
func seedAgents(ctx context.Context, pool *pgxpool.Pool, agents []*agentcfg.Config, log *slog.Logger) error {
	for _, a := range agents {
		var made bool
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
			made, err = insertAgent(ctx, tx, defaultTenant, a)
			return err
		})
		if err != nil {
			return err
		}
		if made {
			log.Info("agent made from the config file", "agent", a.Name)
		}
	}
	return nil
}

// takeProvider gives the agent default, which nobody has changed yet, another
// provider and model.
func takeProvider(ctx context.Context, pool *pgxpool.Pool, provider, model string) error {
	c := agentcfg.Default(defaultAgent)
	c.Provider, c.Model = provider, model
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		args := pgx.NamedArgs{"tenant": defaultTenant, "name": c.Name, "config": c.JSON()}
		tag, err := tx.Exec(ctx, `UPDATE agent SET version = 2, updated_at = now() WHERE tenant_id = @tenant AND name = @name AND version = 1`, args)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		_, err = tx.Exec(ctx, `INSERT INTO agent_version (tenant_id, name, version, config) VALUES (@tenant, @name, 2, @config)`, args)
		return err
	})
	if err != nil {
		return fmt.Errorf("give agent %s the model %s/%s: %w", c.Name, provider, model, err)
	}
	return nil
}

// defaultModel is the provider and model of the agent default.
func defaultModel(ctx context.Context, pool *pgxpool.Pool) (provider, model string, err error) {
	var raw []byte
	err = pool.QueryRow(ctx, `
		SELECT v.config FROM agent a JOIN agent_version v USING (tenant_id, name, version)
		WHERE a.tenant_id = $1 AND a.name = $2`, defaultTenant, defaultAgent).Scan(&raw)
	if err != nil {
		return "", "", fmt.Errorf("agent %s: %w", defaultAgent, err)
	}
	c, err := agentcfg.Parse(raw)
	if err != nil {
		return "", "", fmt.Errorf("agent %s: %w", defaultAgent, err)
	}
	return c.Provider, c.Model, nil
}
