package db

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

// The range of schemas that this binary works with, by the versions of weir's
// own migrations. Tests lower both at link time, to have an older release:
// -ldflags "-X github.com/weir-run/weir/db.newest=3 -X …/db.needs=3".
var newest, needs string

// Newest is the newest migration that this binary has.
func Newest() int64 {
	all := ourMigrations()
	return linked(newest, all[len(all)-1].Version)
}

// Needs is the oldest schema that this binary works with: its own, since a
// database is migrated before its processes are replaced.
func Needs() int64 { return min(linked(needs, Newest()), Newest()) }

func linked(text string, otherwise int64) int64 {
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		panic(fmt.Sprintf("linked with the schema version %q", text))
	}
	return n
}

// Schema is what a database has, compared with what this binary knows.
type Schema struct {
	// Migrations are all that either of them has, in the order of application.
	Migrations []MigrationState
	// Version is the newest of weir's migrations that is applied; 0 means none.
	Version int64
	// MinBinary is the oldest binary, by its Newest, that the schema still works
	// with; 0 means that it does not say.
	MinBinary int64
}

// Inspect reads the schema of a database. It changes nothing, not even in an
// empty database, and works through any pooler.
func Inspect(ctx context.Context, databaseURL string) (*Schema, error) {
	config, err := pgx.ParseConfig(databaseURL)
	if err != nil {
		return nil, fmt.Errorf("parse database URL: %w", err)
	}
	config.DefaultQueryExecMode = pgx.QueryExecModeExec
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("read applied migrations: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	s := &Schema{}
	if s.Migrations, err = migrationStates(ctx, conn); err != nil {
		return nil, err
	}
	for _, m := range s.Migrations {
		if m.Source == weirMigrations && !m.AppliedAt.IsZero() {
			s.Version = max(s.Version, m.Version)
		}
	}
	var says bool
	if err := conn.QueryRow(ctx, "SELECT to_regclass('schema_compat') IS NOT NULL").Scan(&says); err != nil {
		return nil, fmt.Errorf("read schema range: %w", err)
	}
	if says {
		if err := conn.QueryRow(ctx, "SELECT coalesce(max(min_binary_schema), 0) FROM schema_compat").Scan(&s.MinBinary); err != nil {
			return nil, fmt.Errorf("read schema range: %w", err)
		}
	}
	return s, nil
}

// Exact returns nil when the schema is the binary's own, else a *SchemaError.
func (s *Schema) Exact() error {
	e := &SchemaError{}
	if e.Pending, e.Unknown = compareStates(s.Migrations); len(e.Pending)+len(e.Unknown) > 0 {
		return e
	}
	return nil
}

// Usable returns nil when this binary works with the schema, although it may be
// another release's, else a *SchemaError.
func (s *Schema) Usable() error {
	e := &SchemaError{}
	pending, unknown := compareStates(s.Migrations)
	for _, m := range pending {
		if m.Source != weirMigrations || m.Version <= Needs() {
			e.Pending = append(e.Pending, m)
		}
	}
	if Newest() < s.MinBinary {
		e.MinBinary, e.Unknown = s.MinBinary, unknown
	}
	if len(e.Pending) > 0 || e.MinBinary > 0 {
		return e
	}
	return nil
}

// Range says in words which schemas and binaries go together.
func (s *Schema) Range() string {
	database := fmt.Sprintf("the database's schema is %d", s.Version)
	if s.MinBinary > 0 {
		database += fmt.Sprintf(" and serves binaries from %d", s.MinBinary)
	}
	return fmt.Sprintf("%s; this binary's is %d and needs %d", database, Newest(), Needs())
}

// SchemaError says how database and binary differ. The schema is older when
// something is Pending, newer when something is Unknown, and both when the two
// come from different branches.
type SchemaError struct {
	Pending []MigrationState
	Unknown []MigrationState
	// MinBinary is above 0 when the schema no longer works with this binary.
	MinBinary int64
}

func (e *SchemaError) Error() string {
	var parts []string
	if len(e.Pending) > 0 {
		parts = append(parts, "the database's schema is older than this binary: not applied yet: "+
			joinStates(e.Pending)+"; run `weir migrate up`")
	}
	switch {
	case e.MinBinary > 0:
		parts = append(parts, fmt.Sprintf("the database's schema has left this binary behind: it serves binaries from schema %d, and this one's is %d; "+
			"run the release that migrated it", e.MinBinary, Newest()))
	case len(e.Unknown) > 0:
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

// MigrationStatus lists every migration that the binary or the database knows,
// in the order of application.
func MigrationStatus(ctx context.Context, databaseURL string) ([]MigrationState, error) {
	s, err := Inspect(ctx, databaseURL)
	if err != nil {
		return nil, err
	}
	return s.Migrations, nil
}

// Validate returns nil when the database's schema is exactly the binary's, a
// *SchemaError when it is older or newer, and another error when it cannot tell.
func Validate(ctx context.Context, databaseURL string) error {
	s, err := Inspect(ctx, databaseURL)
	if err != nil {
		return err
	}
	return s.Exact()
}

// Usable returns nil when this binary works with the database's schema, a
// *SchemaError when it does not, and another error when it cannot tell.
func Usable(ctx context.Context, databaseURL string) error {
	s, err := Inspect(ctx, databaseURL)
	if err != nil {
		return err
	}
	return s.Usable()
}
