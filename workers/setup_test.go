package workers

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/db/dbtest"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/jobs/bus"
	"github.com/weir-run/weir/policy/mask"
	"github.com/weir-run/weir/scheduler"
	"github.com/weir-run/weir/workers/model"
)

func TestMain(m *testing.M) { dbtest.Main(m) }

// fixture is a database with a state machine, and as many workers as a test
// starts.
type fixture struct {
	t       *testing.T
	ctx     context.Context
	url     string
	pool    *pgxpool.Pool
	bus     *bus.Bus
	runs    *jobs.Runs
	models  *model.Registry
	log     *slog.Logger
	sweeper *scheduler.Sweeper
}

func setup(t *testing.T) *fixture {
	t.Helper()
	url := dbtest.URL(t)
	f := &fixture{t: t, url: url, log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))}
	var stop context.CancelFunc
	f.ctx, stop = context.WithCancel(context.Background())
	var err error
	f.pool, err = db.Open(f.ctx, url, func(c *pgxpool.Config) { c.MaxConns = 12 })
	require.NoError(t, err)
	hot, err := db.OpenHot(f.ctx, url, func(c *pgxpool.Config) { c.MaxConns = 4 })
	require.NoError(t, err)
	_, err = f.pool.Exec(f.ctx, `UPDATE queue SET open = true, free = 1000000, looked_at = 'infinity'`) // no admitter works here
	require.NoError(t, err)
	f.bus = bus.New(f.pool, f.pool.Config().ConnConfig, f.log)
	busDone := make(chan struct{})
	go func() { defer close(busDone); f.bus.Run(f.ctx) }()
	f.runs, err = jobs.New(jobs.Config{Pool: f.pool, Hot: hot, Bus: f.bus, Masker: mask.New(), Log: f.log})
	require.NoError(t, err)
	f.models, err = model.NewRegistry(nil)
	require.NoError(t, err)
	f.sweeper = scheduler.NewSweeper(f.pool, f.pool.Config().ConnConfig, f.runs, f.log, scheduler.Retention{})
	sweeperDone := make(chan struct{})
	go func() { defer close(sweeperDone); f.sweeper.Run(f.ctx) }()
	t.Cleanup(func() {
		stop()
		<-sweeperDone
		f.runs.Close()
		<-busDone
		f.models.Close()
		f.pool.Close()
		hot.Close()
	})
	return f
}

// worker starts a worker and stops it with the test, or by the result.
func (f *fixture) worker(configure func(*Config)) (w *Worker, stop func()) {
	f.t.Helper()
	c := Config{
		Pool: f.pool, Direct: f.pool.Config().ConnConfig, Runs: f.runs, Models: f.models, Log: f.log, Version: "test", Slots: 50,
		AllowPrivate: true, Drain: 5 * time.Second, Secret: func(string) (string, bool) { return "", false },
	}
	if configure != nil {
		configure(&c)
	}
	w = New(c)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx, context.Background()) }()
	select {
	case <-w.Ready():
	case <-time.After(20 * time.Second):
		f.t.Fatal("the worker did not get ready")
	}
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			cancel()
			require.NoError(f.t, <-done)
		}
	}
	f.t.Cleanup(stop)
	return w, stop
}

// agent stores a version of the default agent.
func (f *fixture) agent(config string) {
	f.t.Helper()
	_, err := f.pool.Exec(f.ctx, `WITH v AS (UPDATE agent SET version = version + 1 WHERE name = 'default' RETURNING version)
		INSERT INTO agent_version (tenant_id, name, version, config) SELECT 'default', 'default', version, $1 FROM v`, config)
	require.NoError(f.t, err)
}

func (f *fixture) terms(ctx context.Context, _ string) (jobs.Terms, error) {
	var version int32
	err := f.pool.QueryRow(ctx, `SELECT version FROM agent WHERE name = 'default'`).Scan(&version)
	return jobs.Terms{Agent: "default", Version: version, TurnTimeout: time.Minute, QueueCap: 20}, err
}

// send accepts a turn in the session of that name.
func (f *fixture) send(session, text string) *jobs.Accepted {
	f.t.Helper()
	input, err := json.Marshal(map[string]string{"text": text})
	require.NoError(f.t, err)
	a, err := f.runs.Accept(f.ctx, jobs.AcceptParams{
		TenantID: "default", Input: input, Terms: f.terms,
		Session: jobs.SessionSpec{ConversationRef: "cv_" + session, ExternalID: session, ChannelType: "rpc", Scope: json.RawMessage(`[]`)},
	})
	require.NoError(f.t, err)
	return a
}

// outcome waits for a turn's end.
func (f *fixture) outcome(id uuid.UUID) jobs.Outcome {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.ctx, 60*time.Second)
	defer cancel()
	o, err := f.runs.Wait(ctx, "default", id)
	require.NoError(f.t, err)
	return o
}

// answer is the text of a turn that completed.
func (f *fixture) answer(session, text string) string {
	f.t.Helper()
	o := f.outcome(f.send(session, text).RunID)
	require.Equal(f.t, db.RunStateCompleted, o.State, string(o.Error))
	var r result
	require.NoError(f.t, json.Unmarshal(o.Result, &r))
	return r.Text
}

// failure is the error of a turn that failed.
func (f *fixture) failure(session, text string) jobs.ErrorContent {
	f.t.Helper()
	o := f.outcome(f.send(session, text).RunID)
	var c jobs.ErrorContent
	require.NoError(f.t, json.Unmarshal(o.Error, &c), string(o.Result))
	return c
}

// events lists the types of a session's events.
func (f *fixture) events(id uuid.UUID) (types []string) {
	f.t.Helper()
	rows, err := f.pool.Query(f.ctx, `SELECT type::text FROM event WHERE session_id = $1 ORDER BY seq`, id)
	require.NoError(f.t, err)
	defer rows.Close()
	for rows.Next() {
		var s string
		require.NoError(f.t, rows.Scan(&s))
		types = append(types, s)
	}
	require.NoError(f.t, rows.Err())
	return types
}

// eventually waits for a condition without a guess at its time.
func (f *fixture) eventually(what string, ok func() bool) {
	f.t.Helper()
	require.Eventually(f.t, ok, 30*time.Second, 5*time.Millisecond, what)
}
