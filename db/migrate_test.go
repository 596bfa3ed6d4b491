package db_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/db/dbtest"
)

func TestMain(m *testing.M) { dbtest.Main(m) }

// exec runs statements on a connection of its own.
func exec(t *testing.T, url string, statements ...string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	for _, sql := range statements {
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(t, err, sql)
	}
}

func schemaError(t *testing.T, err error) *db.SchemaError {
	t.Helper()
	e, ok := errors.AsType[*db.SchemaError](err)
	require.True(t, ok, "%v", err)
	return e
}

func TestMigrate(t *testing.T) {
	t.Parallel()

	t.Run("ManyAtOnceDoItOnce", func(t *testing.T) {
		t.Parallel()
		url := dbtest.EmptyURL(t)
		var wg sync.WaitGroup
		errs := make(chan error, 8)
		for range cap(errs) {
			wg.Go(func() { errs <- db.Migrate(t.Context(), url) })
		}
		wg.Wait()
		close(errs)
		for err := range errs {
			require.NoError(t, err)
		}
		require.NoError(t, db.Validate(t.Context(), url))

		begin := time.Now()
		require.NoError(t, db.Migrate(t.Context(), url))
		t.Logf("with nothing to do: %s", time.Since(begin))
	})

	t.Run("RepairsAnInterruptedRun", func(t *testing.T) {
		t.Parallel()
		url := dbtest.EmptyURL(t)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(20*time.Millisecond, cancel)
		_ = db.Migrate(ctx, url) // cut at some point, or not
		require.NoError(t, db.Migrate(t.Context(), url))
		require.NoError(t, db.Validate(t.Context(), url))
	})

	t.Run("WaitsForTheLockOnlyAsLongAsItsContext", func(t *testing.T) {
		t.Parallel()
		url := dbtest.EmptyURL(t)
		holder, err := pgx.Connect(t.Context(), url)
		require.NoError(t, err)
		defer holder.Close(context.Background())
		_, err = holder.Exec(t.Context(), "SELECT pg_advisory_lock(x'7765697200000001'::bigint)")
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		err = db.Migrate(ctx, url)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		states, err := db.MigrationStatus(t.Context(), url)
		require.NoError(t, err)
		require.Zero(t, states[0].AppliedAt, "nothing was migrated without the lock")
	})

	t.Run("LeavesANewerDatabaseAlone", func(t *testing.T) {
		t.Parallel()
		url := dbtest.URL(t)
		exec(t, url,
			"INSERT INTO goose_db_version (version_id, is_applied) VALUES (999999, true)",
			"INSERT INTO river_migration (line, version) VALUES ('main', 999)")
		require.NoError(t, db.Migrate(t.Context(), url))

		err := db.Validate(t.Context(), url)
		require.Empty(t, schemaError(t, err).Pending)
		require.ErrorContains(t, err, "newer than this binary")
		require.ErrorContains(t, err, "river 999, weir 999999")
	})

	t.Run("NamesTheServerItCannotReach", func(t *testing.T) {
		t.Parallel()
		require.ErrorContains(t, db.Migrate(t.Context(), "postgres://127.0.0.1:1/x"), "127.0.0.1:1")
		require.ErrorContains(t, db.Migrate(t.Context(), "postgres://%zz"), "parse database URL")
	})
}

func TestMigrationStatus(t *testing.T) {
	t.Parallel()

	t.Run("EmptyDatabaseIsAllPendingAndStaysEmpty", func(t *testing.T) {
		t.Parallel()
		url := dbtest.EmptyURL(t)
		states, err := db.MigrationStatus(t.Context(), url)
		require.NoError(t, err)
		require.Equal(t, "river 001 create river migration", states[0].String())
		last := states[len(states)-1]
		require.Equal(t, "weir", last.Source, "ours come after River's")
		for _, s := range states {
			require.True(t, s.Known, s)
			require.Zero(t, s.AppliedAt, s)
		}
		exec(t, url, "CREATE TABLE goose_db_version ()", "CREATE TABLE river_migration ()") // were not there
	})

	t.Run("TellsWhenEachWasApplied", func(t *testing.T) {
		t.Parallel()
		states, err := db.MigrationStatus(t.Context(), dbtest.URL(t))
		require.NoError(t, err)
		for _, s := range states {
			require.WithinDuration(t, time.Now(), s.AppliedAt, 24*time.Hour, s)
		}
	})
}

func TestValidate(t *testing.T) {
	t.Parallel()

	t.Run("OlderSchemaSaysWhatIsMissing", func(t *testing.T) {
		t.Parallel()
		url := dbtest.EmptyURL(t)
		err := db.Validate(t.Context(), url)
		require.Empty(t, schemaError(t, err).Unknown)
		require.ErrorContains(t, err, "older than this binary")
		require.ErrorContains(t, err, "weir migrate up")
		require.ErrorContains(t, err, "river 001 create river migration")
	})

	t.Run("DivergedSchemaIsBothOlderAndNewer", func(t *testing.T) {
		t.Parallel()
		url := dbtest.URL(t)
		exec(t, url, "UPDATE goose_db_version SET version_id = 999999 WHERE version_id = (SELECT max(version_id) FROM goose_db_version)")
		e := schemaError(t, db.Validate(t.Context(), url))
		require.Len(t, e.Pending, 1)
		require.Len(t, e.Unknown, 1)
	})

	t.Run("RiverTablesOlderThanItsLines", func(t *testing.T) {
		t.Parallel()
		url := dbtest.EmptyURL(t)
		exec(t, url,
			"CREATE TABLE river_migration (id bigserial PRIMARY KEY, created_at timestamptz NOT NULL DEFAULT now(), version bigint NOT NULL)",
			"INSERT INTO river_migration (version) VALUES (1), (2)")
		states, err := db.MigrationStatus(t.Context(), url)
		require.NoError(t, err)
		require.NotZero(t, states[1].AppliedAt)
		require.Zero(t, states[2].AppliedAt)
	})
}

func TestUsable(t *testing.T) {
	t.Parallel()

	t.Run("LaterReleaseThatServesThisBinary", func(t *testing.T) {
		t.Parallel()
		url := dbtest.URL(t)
		exec(t, url, "INSERT INTO goose_db_version (version_id, is_applied) VALUES (999999, true)")
		require.NoError(t, db.Usable(t.Context(), url))
		require.Error(t, db.Validate(t.Context(), url))
	})

	t.Run("LaterReleaseThatHasLeftItBehind", func(t *testing.T) {
		t.Parallel()
		url := dbtest.URL(t)
		exec(t, url,
			"INSERT INTO goose_db_version (version_id, is_applied) VALUES (999999, true)",
			"UPDATE schema_compat SET min_binary_schema = 999999")
		err := db.Usable(t.Context(), url)
		require.EqualValues(t, 999999, schemaError(t, err).MinBinary)
		require.ErrorContains(t, err, "serves binaries from schema 999999")
		require.ErrorContains(t, err, "run the release that migrated it")
		s, err := db.Inspect(t.Context(), url)
		require.NoError(t, err)
		require.Equal(t, fmt.Sprintf("the database's schema is 999999 and serves binaries from 999999; this binary's is %d and needs %d", db.Newest(), db.Needs()), s.Range())
	})

	t.Run("OlderSchema", func(t *testing.T) {
		t.Parallel()
		url := dbtest.EmptyURL(t)
		require.NotEmpty(t, schemaError(t, db.Usable(t.Context(), url)).Pending)
	})
}

func TestSchemaHash(t *testing.T) {
	t.Parallel()
	require.Regexp(t, "^[0-9a-f]{16}$", db.SchemaHash())
	require.Equal(t, db.SchemaHash(), db.SchemaHash())
}
