package jobs

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/db/dbtest"
	"github.com/weir-run/weir/jobs/bus"
)

func TestMain(m *testing.M) { dbtest.Main(m) }

type noMask struct{}

func (noMask) Bytes(b []byte) []byte { return b }

// fixture is a state machine on its own database.
type fixture struct {
	t    testing.TB
	ctx  context.Context
	pool *pgxpool.Pool
	hot  *pgxpool.Pool // the committer's
	bus  *bus.Bus
	runs *Runs

	admitting sync.Mutex
	admitter  *Admitter
	conn      *pgx.Conn // the admitter's
}

func setup(t testing.TB) *fixture {
	t.Helper()
	return machine(t, dbtest.URL(t))
}

// another is a second process on the same database: a state machine with
// pools, bus and committer of its own.
func (f *fixture) another() *fixture {
	f.t.Helper()
	return machine(f.t, f.pool.Config().ConnString())
}

func machine(t testing.TB, url string, configure ...func(*pgxpool.Config)) *fixture {
	t.Helper()
	conns := func(n int32) func(*pgxpool.Config) {
		return func(c *pgxpool.Config) {
			c.MaxConns = n
			for _, f := range configure {
				f(c)
			}
		}
	}
	pool, err := db.Open(context.Background(), url, conns(8))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	hot, err := db.OpenHot(context.Background(), url, conns(3)) // Writers + 1
	require.NoError(t, err)
	t.Cleanup(hot.Close)
	// No admitter works here: the queues stay open.
	_, err = pool.Exec(context.Background(), `UPDATE queue SET open = true, free = 1000000, looked_at = 'infinity'`)
	require.NoError(t, err)
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	ctx, cancel := context.WithCancel(context.Background())
	b := bus.New(pool, pool.Config().ConnConfig, log)
	done := make(chan struct{})
	go func() { defer close(done); b.Run(ctx) }()
	runs, err := New(Config{Pool: pool, Hot: hot, Bus: b, Masker: noMask{}, Log: log})
	require.NoError(t, err)
	t.Cleanup(func() {
		runs.Close()
		cancel()
		<-done
	})
	return &fixture{t: t, ctx: ctx, pool: pool, hot: hot, bus: b, runs: runs}
}

// terms are the default agent's.
func terms(context.Context, string) (Terms, error) {
	return Terms{Agent: "default", Version: 1, TurnTimeout: time.Minute, QueueCap: 20}, nil
}

func (f *fixture) session(name string) SessionSpec {
	return SessionSpec{ConversationRef: "cv_" + name, ExternalID: name, ChannelType: "rpc", Scope: json.RawMessage(`[]`)}
}

func (f *fixture) accept(session string) *Accepted {
	f.t.Helper()
	a, err := f.runs.Accept(f.ctx, AcceptParams{
		TenantID: "default", Session: f.session(session), Terms: terms, Input: json.RawMessage(`{"text":"hi"}`),
	})
	require.NoError(f.t, err)
	return a
}

// worker registers a live worker without any process behind it.
func (f *fixture) worker() uuid.UUID {
	f.t.Helper()
	id := newID()
	_, err := f.runs.queries.WorkerInsert(f.ctx, f.pool, db.WorkerInsertParams{
		ID: id, Hostname: "test", Pid: 1, Version: "test", Queues: Queues, Slots: 1, LeaseMs: 10_000,
	})
	require.NoError(f.t, err)
	return id
}

// admit does one round of the fixture's own admitter; two of them at once would
// need the lock of their duty.
func (f *fixture) admit() error {
	f.admitting.Lock()
	defer f.admitting.Unlock()
	if f.admitter == nil {
		conn, err := pgx.ConnectConfig(f.ctx, db.HotConfig(f.pool.Config().ConnConfig))
		if err != nil {
			return err
		}
		f.t.Cleanup(func() { _ = conn.Close(context.Background()) })
		if err := db.RegisterTypes(f.ctx, conn); err != nil {
			return err
		}
		f.admitter, f.conn = f.runs.NewAdmitter(), conn
		f.admitter.costly = time.Hour // a busy machine changes nothing
	}
	_, err := f.admitter.Round(f.ctx, f.conn)
	return err
}

func (f *fixture) state(id uuid.UUID) db.RunState {
	f.t.Helper()
	o, err := f.runs.Outcome(f.ctx, "default", id)
	require.NoError(f.t, err)
	return o.State
}

// modelStep is a finished model call with its usage.
func modelStep(seq int32) Advance {
	return Advance{
		Steps:      []Step{{Seq: seq, Kind: db.StepKindModel, Status: db.StepStatusDone, CallID: fmt.Sprint("m", seq), Name: "offline/offline-1", Output: json.RawMessage(`{}`)}},
		Usage:      []Usage{{CallID: fmt.Sprint("m", seq), Provider: "offline", Model: "offline-1", Input: 1, Output: 1, Content: json.RawMessage(`{}`)}},
		ModelCalls: 1,
	}
}

func completed() *Ending {
	return &Ending{
		State: db.RunStateCompleted, Reason: "completed", Result: json.RawMessage(`{"text":"ok"}`),
		Last: Event{EventResponse, json.RawMessage(`{"text":"ok","final":true}`)},
	}
}
