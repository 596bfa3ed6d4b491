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
	"sync"
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

// Migrate brings River's tables, then ours, to the state this binary knows. It
// is safe to call from any number of processes at once, and costs two queries
// when there is nothing to do. A database that a later release has migrated is
// left as it is, without an error: migrations work with the release before
// them, so that a fleet can be upgraded process by process.
//
// Each migration is a transaction of its own, unless its file says otherwise;
// after an error the ones before it stay, and the next call goes on from there.
// It works through a pooler too, where a time limit of the role's may cut a
// migration short.
func Migrate(ctx context.Context, databaseURL string) error {
	schema, err := Inspect(ctx, databaseURL)
	if err != nil {
		return err
	}
	if pending, _ := compareStates(schema.Migrations); len(pending) == 0 {
		return nil
	}
	pool, err := migrationPool(ctx, databaseURL)
	if err != nil {
		return err
	}
	defer pool.Close()
	return withMigrationLock(ctx, databaseURL, func() error {
		if err := migrateRiver(ctx, pool); err != nil {
			return err
		}
		return migrateWeir(ctx, pool)
	})
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
// migration short; through a pooler they stay, since what is set there would be
// another client's too.
func migrationPool(ctx context.Context, databaseURL string) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(databaseURL)
	if err != nil {
		return nil, fmt.Errorf("parse database URL: %w", err)
	}
	pooled, err := Pooled(ctx, databaseURL)
	if err != nil {
		return nil, err
	}
	config.MinConns, config.MinIdleConns, config.MaxConns = 0, 0, 3
	if pooled {
		config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	} else {
		config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "SET statement_timeout = 0; SET idle_in_transaction_session_timeout = 0")
			return err
		}
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	return pool, nil
}

// withMigrationLock runs do while it holds the migration lock. The lock has a
// connection and a transaction of its own, idle meanwhile and without a
// snapshot: CREATE INDEX CONCURRENTLY in a migration would wait for that, for
// ever. Hence the simple protocol, since the portal of the other one keeps its
// snapshot until the next statement; and hence the lock is asked for again and
// again, since a session that waits inside pg_advisory_lock has a snapshot too.
func withMigrationLock(ctx context.Context, databaseURL string, do func() error) (err error) {
	config, err := pgx.ParseConfig(databaseURL)
	if err != nil {
		return fmt.Errorf("parse database URL: %w", err)
	}
	config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return fmt.Errorf("connect for the migration lock: %w", err)
	}
	defer func() {
		// Unlocked in words, since the server notices a closed connection only
		// a moment later.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_, unlockErr := conn.Exec(ctx, "ROLLBACK")
		if unlockErr != nil && err == nil {
			// Whoever cut this connection has freed the lock with it.
			err = fmt.Errorf("lost the migration lock's connection: %w", unlockErr)
		}
		_ = conn.Close(ctx)
	}()
	if _, err := conn.Exec(ctx, "BEGIN; SET LOCAL idle_in_transaction_session_timeout = 0"); err != nil {
		return fmt.Errorf("take the migration lock: %w", err)
	}
	for {
		var locked bool
		if err := conn.QueryRow(ctx, "SELECT pg_try_advisory_xact_lock($1)", int64(migrationLock)).Scan(&locked); err != nil {
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
	if _, err := provider.UpTo(ctx, Newest()); err != nil {
		return fmt.Errorf("migrate weir's tables: %w", err)
	}
	return nil
}

// migrationStates joins what the binary has with what the database has.
func migrationStates(ctx context.Context, conn *pgx.Conn) ([]MigrationState, error) {
	rows, err := appliedMigrations(ctx, conn)
	if err != nil {
		return nil, fmt.Errorf("read applied migrations: %w", err)
	}
	migrator, err := newRiverMigrator(nil)
	if err != nil {
		return nil, fmt.Errorf("prepare river's migrations: %w", err)
	}
	var known []MigrationState
	for _, m := range migrator.AllVersions() {
		known = append(known, MigrationState{Source: riverMigrations, Version: int64(m.Version), Name: m.Name, Known: true})
	}
	for _, m := range ourMigrations() {
		if m.Version <= Newest() {
			known = append(known, m)
		}
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

// ourMigrations are those of the embedded files, by version.
var ourMigrations = sync.OnceValue(func() (all []MigrationState) {
	entries, err := fs.ReadDir(migrationFiles, "migrations") // sorted by name, hence by version
	if err != nil {
		panic(fmt.Sprintf("read embedded migrations: %v", err))
	}
	for _, entry := range entries {
		version, err := goose.NumericComponent(entry.Name())
		if err != nil {
			panic(fmt.Sprintf("migration file %s: %v", entry.Name(), err))
		}
		_, name, _ := strings.Cut(strings.TrimSuffix(entry.Name(), path.Ext(entry.Name())), "_")
		all = append(all, MigrationState{Source: weirMigrations, Version: version, Name: strings.ReplaceAll(name, "_", " "), Known: true})
	}
	return all
})

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
func appliedMigrations(ctx context.Context, conn *pgx.Conn) (map[string][]MigrationState, error) {
	bookkeeping := []struct{ source, table, query string }{
		{riverMigrations, "river_migration", `SELECT version, created_at AS applied_at FROM river_migration m
			WHERE coalesce(to_jsonb(m)->>'line', 'main') = 'main' ORDER BY version`},
		{weirMigrations, goose.DefaultTablename, `SELECT version_id, tstamp::timestamptz FROM ` + goose.DefaultTablename + `
			WHERE is_applied AND version_id > 0 ORDER BY version_id`},
	}
	applied := map[string][]MigrationState{}
	for _, b := range bookkeeping {
		var exists bool
		if err := conn.QueryRow(ctx, "SELECT to_regclass($1) IS NOT NULL", b.table).Scan(&exists); err != nil {
			return nil, err
		}
		if !exists {
			continue
		}
		rows, err := conn.Query(ctx, b.query)
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
