package db

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"log/slog"
	"path"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/riverqueue/river/riverdriver"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

//go:embed migrations/*.sql
var migrationFiles embed.FS

// migrationLock is the advisory lock that Migrate holds: "weir" and a 1, in
// ASCII and binary. Every release uses the same key, or two releases could
// migrate one database at once.
const migrationLock = 0x7765697200000001

// migrationLockRetry is how long a Migrate waits before it asks for the lock
// again.
const migrationLockRetry = 50 * time.Millisecond

// The two lines of migrations, in the order in which they are applied: ours
// alter River's tables, never the other way round.
const (
	riverMigrations = "river"
	weirMigrations  = "weir"
)

// MigrationState is one migration that the binary or the database knows.
type MigrationState struct {
	// Source says whose migration it is: "river" (the queue's tables) or "weir".
	Source string
	// Version counts from 1 within its source.
	Version int64
	// Name is the file's name in words, without version and extension, or ""
	// when only the database knows the migration.
	Name string
	// AppliedAt is zero while the migration is pending.
	AppliedAt time.Time
	// Known is false when the binary does not have the migration: a newer
	// release has applied it.
	Known bool
}

func (s MigrationState) String() string {
	return strings.TrimSpace(fmt.Sprintf("%s %03d %s", s.Source, s.Version, s.Name))
}

// SchemaError is what Validate returns when database and binary differ. The
// schema is older when something is Pending, newer when something is Unknown,
// and both when the two come from different branches.
type SchemaError struct {
	Pending []MigrationState
	Unknown []MigrationState
}

func (e *SchemaError) Error() string {
	var parts []string
	if len(e.Pending) > 0 {
		parts = append(parts, "the database's schema is older than this binary: not applied yet: "+
			joinStates(e.Pending)+"; run `weir migrate up`")
	}
	if len(e.Unknown) > 0 {
		parts = append(parts, "the database's schema is newer than this binary: applied by a later release: "+
			joinStates(e.Unknown)+"; run that release")
	}
	return strings.Join(parts, "; and ")
}

func joinStates(states []MigrationState) string {
	names := make([]string, len(states))
	for i, s := range states {
		names[i] = s.String()
	}
	return strings.Join(names, ", ")
}

// Migrate brings River's tables, then ours, to the state this binary knows. It
// is safe to call from any number of processes at once, and costs two queries
// when there is nothing to do. A database that a later release has migrated is
// left as it is, without an error: migrations work with the release before
// them, so that a fleet can be upgraded process by process.
//
// Each migration is a transaction of its own, unless its file says otherwise;
// after an error the ones before it stay, and the next call goes on from there.
// databaseURL must reach Postgres itself or a pooler in session mode, since the
// lock belongs to a session.
func Migrate(ctx context.Context, databaseURL string) error {
	pool, err := migrationPool(ctx, databaseURL)
	if err != nil {
		return err
	}
	defer pool.Close()
	states, err := migrationStates(ctx, pool)
	if err != nil {
		return err
	}
	if pending, _ := compareStates(states); len(pending) == 0 {
		return nil
	}
	return withMigrationLock(ctx, databaseURL, func() error {
		if err := migrateRiver(ctx, pool); err != nil {
			return err
		}
		return migrateWeir(ctx, pool)
	})
}

// MigrationStatus lists every migration that the binary or the database knows,
// in the order of application. It changes nothing, not even in an empty
// database.
func MigrationStatus(ctx context.Context, databaseURL string) ([]MigrationState, error) {
	pool, err := migrationPool(ctx, databaseURL)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	return migrationStates(ctx, pool)
}

// Validate returns nil when the database's schema is exactly the binary's, a
// *SchemaError when it is older or newer, and another error when it cannot tell.
func Validate(ctx context.Context, databaseURL string) error {
	states, err := MigrationStatus(ctx, databaseURL)
	if err != nil {
		return err
	}
	if pending, unknown := compareStates(states); len(pending)+len(unknown) > 0 {
		return &SchemaError{Pending: pending, Unknown: unknown}
	}
	return nil
}

// SchemaHash names the schema that Migrate makes: 16 hex digits over the text
// of all migrations, River's and ours. dbtest names its template by it.
func SchemaHash() string {
	sum := sha256.New()
	for _, files := range []fs.FS{riverpgxv5.New(nil).GetMigrationFS(riverdriver.MigrationLineMain), migrationFiles} {
		err := fs.WalkDir(files, ".", func(name string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			text, err := fs.ReadFile(files, name)
			if err != nil {
				return err
			}
			fmt.Fprintf(sum, "%s %d\n", name, len(text))
			sum.Write(text)
			return nil
		})
		if err != nil {
			panic(fmt.Sprintf("read embedded migrations: %v", err))
		}
	}
	return hex.EncodeToString(sum.Sum(nil)[:8])
}

// migrationPool opens the few connections that a migration needs. Time limits
// that an operator has set for the role's ordinary queries must not cut a
// migration short.
func migrationPool(ctx context.Context, databaseURL string) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(databaseURL)
	if err != nil {
		return nil, fmt.Errorf("parse database URL: %w", err)
	}
	config.MinConns, config.MinIdleConns, config.MaxConns = 0, 0, 3
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "SET statement_timeout = 0; SET idle_in_transaction_session_timeout = 0")
		return err
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	return pool, nil
}

// withMigrationLock runs do while it holds the migration lock. The lock has a
// connection of its own, idle and outside any transaction meanwhile. It is
// asked for again and again rather than waited for: a session that waits inside
// pg_advisory_lock keeps its snapshot, and CREATE INDEX CONCURRENTLY in the
// holder's migration would wait for that snapshot, for ever.
func withMigrationLock(ctx context.Context, databaseURL string, do func() error) (err error) {
	conn, err := pgx.Connect(ctx, databaseURL)
	if err != nil {
		return fmt.Errorf("connect for the migration lock: %w", err)
	}
	defer func() {
		// Unlocked in words, since the server notices a closed connection only
		// a moment later.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_, unlockErr := conn.Exec(ctx, "SELECT pg_advisory_unlock_all()")
		if unlockErr != nil && err == nil {
			// Whoever cut this connection has freed the lock with it.
			err = fmt.Errorf("lost the migration lock's connection: %w", unlockErr)
		}
		_ = conn.Close(ctx)
	}()
	for {
		var locked bool
		if err := conn.QueryRow(ctx, "SELECT pg_try_advisory_lock($1)", int64(migrationLock)).Scan(&locked); err != nil {
			return fmt.Errorf("take the migration lock: %w", err)
		}
		if locked {
			return do()
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for another process's migration: %w", context.Cause(ctx))
		case <-time.After(migrationLockRetry):
		}
	}
}

func newRiverMigrator(pool *pgxpool.Pool) (*rivermigrate.Migrator[pgx.Tx], error) {
	return rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Logger: slog.New(slog.DiscardHandler)})
}

func migrateRiver(ctx context.Context, pool *pgxpool.Pool) error {
	migrator, err := newRiverMigrator(pool)
	if err != nil {
		return fmt.Errorf("prepare river's migrations: %w", err)
	}
	if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return fmt.Errorf("migrate river's tables: %w", err)
	}
	return nil
}

func migrateWeir(ctx context.Context, pool *pgxpool.Pool) error {
	files, err := fs.Sub(migrationFiles, "migrations")
	if err != nil {
		return err
	}
	sqlDB := stdlib.OpenDBFromPool(pool)
	defer sqlDB.Close()
	provider, err := goose.NewProvider(goose.DialectPostgres, sqlDB, files, goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return fmt.Errorf("prepare weir's migrations: %w", err)
	}
	if _, err := provider.Up(ctx); err != nil {
		return fmt.Errorf("migrate weir's tables: %w", err)
	}
	return nil
}

// migrationStates joins what the binary has with what the database has.
func migrationStates(ctx context.Context, pool *pgxpool.Pool) ([]MigrationState, error) {
	rows, err := appliedMigrations(ctx, pool)
	if err != nil {
		return nil, fmt.Errorf("read applied migrations: %w", err)
	}
	migrator, err := newRiverMigrator(pool)
	if err != nil {
		return nil, fmt.Errorf("prepare river's migrations: %w", err)
	}
	var known []MigrationState
	for _, m := range migrator.AllVersions() {
		known = append(known, MigrationState{Source: riverMigrations, Version: int64(m.Version), Name: m.Name, Known: true})
	}
	entries, err := fs.ReadDir(migrationFiles, "migrations") // sorted by name, hence by version
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		version, err := goose.NumericComponent(entry.Name())
		if err != nil {
			return nil, fmt.Errorf("migration file %s: %w", entry.Name(), err)
		}
		_, name, _ := strings.Cut(strings.TrimSuffix(entry.Name(), path.Ext(entry.Name())), "_")
		known = append(known, MigrationState{Source: weirMigrations, Version: version, Name: strings.ReplaceAll(name, "_", " "), Known: true})
	}

	var states []MigrationState
	for _, source := range []string{riverMigrations, weirMigrations} {
		applied := rows[source]
		for _, s := range known {
			if s.Source != source {
				continue
			}
			for _, a := range applied {
				if a.Version == s.Version {
					s.AppliedAt = a.AppliedAt
				}
			}
			states = append(states, s)
		}
		for _, a := range applied {
			if !containsVersion(known, a) {
				states = append(states, a)
			}
		}
	}
	return states, nil
}

func containsVersion(states []MigrationState, s MigrationState) bool {
	for _, other := range states {
		if other.Source == s.Source && other.Version == s.Version {
			return true
		}
	}
	return false
}

// appliedMigrations reads both bookkeeping tables, by source, without creating
// them. river_migration has no column "line" before River's fifth migration,
// hence the detour over JSON.
func appliedMigrations(ctx context.Context, pool *pgxpool.Pool) (map[string][]MigrationState, error) {
	bookkeeping := []struct{ source, table, query string }{
		{riverMigrations, "river_migration", `SELECT version, created_at AS applied_at FROM river_migration m
			WHERE coalesce(to_jsonb(m)->>'line', 'main') = 'main' ORDER BY version`},
		{weirMigrations, goose.DefaultTablename, `SELECT version_id, tstamp::timestamptz FROM ` + goose.DefaultTablename + `
			WHERE is_applied AND version_id > 0 ORDER BY version_id`},
	}
	applied := map[string][]MigrationState{}
	for _, b := range bookkeeping {
		var exists bool
		if err := pool.QueryRow(ctx, "SELECT to_regclass($1) IS NOT NULL", b.table).Scan(&exists); err != nil {
			return nil, err
		}
		if !exists {
			continue
		}
		rows, err := pool.Query(ctx, b.query)
		if err != nil {
			return nil, err
		}
		states, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (MigrationState, error) {
			s := MigrationState{Source: b.source}
			return s, row.Scan(&s.Version, &s.AppliedAt)
		})
		if err != nil {
			return nil, err
		}
		applied[b.source] = states
	}
	return applied, nil
}

func compareStates(states []MigrationState) (pending, unknown []MigrationState) {
	for _, s := range states {
		switch {
		case !s.Known:
			unknown = append(unknown, s)
		case s.AppliedAt.IsZero():
			pending = append(pending, s)
		}
	}
	return pending, unknown
}
