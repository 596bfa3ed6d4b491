package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/api/rpc"
	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/db/dbtest"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/jobs/bus"
	"github.com/weir-run/weir/policy/mask"
)

func TestMain(m *testing.M) { dbtest.Main(m) }

const waitLimit = 20 * time.Second // of a test, for something that must happen

// fixture is a server on a database of its own, with a token of each scope.
type fixture struct {
	*pod
	url                   string // of the database
	all, rpc, admin, read string // tokens of tenant default
	otherRPC, otherAdmin  string // tokens of tenant other
	worker                *testWorker
}

// pod is a process: a state machine and a server over HTTP.
type pod struct {
	t      testing.TB
	ctx    context.Context
	pool   *pgxpool.Pool
	runs   *jobs.Runs
	server *Server
	http   *httptest.Server
	log    *logBuffer
	asked  *queryCounter
}

func setup(t testing.TB) *fixture { return setupWith(t, func(*Config) {}) }

func setupWith(t testing.TB, configure func(*Config)) *fixture {
	t.Helper()
	f := &fixture{url: dbtest.URL(t)}
	f.pod = startPod(t, f.url, configure)
	for token, spec := range map[*string][3]string{
		&f.all: {"default", "all", "*"}, &f.rpc: {"default", "rpc", "rpc"}, &f.admin: {"default", "admin", "admin"}, &f.read: {"default", "read", "read"},
		&f.otherRPC: {"other", "rpc", "rpc"}, &f.otherAdmin: {"other", "admin", "admin"},
	} {
		*token = f.token(spec[0], spec[1], spec[2])
	}
	return f
}

// token makes a token, and its tenant with the agent default.
func (f *fixture) token(tenant, id string, scopes ...string) string {
	f.t.Helper()
	secret := db.NewTokenSecret()
	_, err := f.pool.Exec(f.ctx, `WITH t AS (INSERT INTO tenant (id) VALUES ($1) ON CONFLICT DO NOTHING RETURNING id),
		a AS (INSERT INTO agent (tenant_id, name, id, version) SELECT id, 'default', gen_random_uuid(), 1 FROM t),
		v AS (INSERT INTO agent_version (tenant_id, name, version, config) SELECT id, 'default', 1, '{"name":"default"}' FROM t)
		INSERT INTO api_token (tenant_id, id, secret_hash, scopes) VALUES ($1, $2, $3, $4)`, tenant, id, db.HashToken(secret), scopes)
	require.NoError(f.t, err)
	return secret
}

// another starts a second process on the same database.
func (f *fixture) another() *pod { return startPod(f.t, f.url, func(*Config) {}) }

func startPod(t testing.TB, url string, configure func(*Config)) *pod {
	t.Helper()
	p := &pod{t: t, ctx: t.Context(), log: new(logBuffer), asked: new(queryCounter)}
	var err error
	p.pool, err = db.Open(context.Background(), url, func(c *pgxpool.Config) { c.MaxConns, c.ConnConfig.Tracer = 6, p.asked })
	require.NoError(t, err)
	t.Cleanup(p.pool.Close)
	hot, err := db.OpenHot(context.Background(), url, func(c *pgxpool.Config) { c.MaxConns = 4 })
	require.NoError(t, err)
	t.Cleanup(hot.Close)
	log := slog.New(slog.NewJSONHandler(p.log, nil))
	_, err = p.pool.Exec(context.Background(), `UPDATE queue SET open = true, free = 1000000, looked_at = 'infinity'`) // no admitter works here
	require.NoError(t, err)
	b := bus.New(p.pool, p.pool.Config().ConnConfig, log)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); b.Run(ctx) }()
	p.runs, err = jobs.New(jobs.Config{Pool: p.pool, Hot: hot, Bus: b, Masker: mask.New(), Log: log})
	require.NoError(t, err)
	t.Cleanup(func() {
		p.runs.Close()
		cancel()
		<-done
	})
	c := Config{Pool: p.pool, Runs: p.runs, Log: log, Version: "test", DrainWait: time.Millisecond}
	configure(&c)
	p.server, err = New(c)
	require.NoError(t, err)
	t.Cleanup(p.server.Close)
	p.http = httptest.NewServer(p.server.Handler())
	t.Cleanup(p.http.Close)
	return p
}

// queryCounter counts the queries of a process, outside the committer and the
// bus.
type queryCounter struct{ atomic.Int64 }

func (c *queryCounter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.Add(1)
	return ctx
}

func (c *queryCounter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// logBuffer is what a process logs.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// do sends a request and returns status, header and body.
func (p *pod) do(method, path, token, body string, header ...string) (int, http.Header, string) {
	p.t.Helper()
	status, h, text, err := p.try(p.ctx, method, path, token, body, header...)
	require.NoError(p.t, err)
	return status, h, text
}

func (p *pod) try(ctx context.Context, method, path, token, body string, header ...string) (int, http.Header, string, error) {
	r, err := http.NewRequestWithContext(ctx, method, p.http.URL+path, strings.NewReader(body))
	if err != nil {
		return 0, nil, "", err
	}
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	resp, err := p.http.Client().Do(r)
	if err != nil {
		return 0, nil, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, resp.Header, string(text), err
}

// rpcAnswer is the answer of a call.
type rpcAnswer struct {
	ID     json.RawMessage
	Result json.RawMessage
	Error  *rpcError
}

type rpcError struct {
	Code    int
	Message string
	Data    map[string]any
}

// call calls a method with params, which may be JSON or a value.
func (p *pod) call(token, method string, params any, header ...string) rpcAnswer {
	p.t.Helper()
	a, err := p.tryCall(p.ctx, token, method, params, header...)
	require.NoError(p.t, err)
	return a
}

func (p *pod) tryCall(ctx context.Context, token, method string, params any, header ...string) (a rpcAnswer, err error) {
	text, ok := params.(string)
	if !ok {
		raw, err := json.Marshal(params)
		if err != nil {
			return a, err
		}
		text = string(raw)
	}
	_, _, body, err := p.try(ctx, "POST", "/rpc", token, fmt.Sprintf(`{"jsonrpc":"2.0","id":"i","method":%q,"params":%s}`, method, text), header...)
	if err == nil {
		err = json.Unmarshal([]byte(body), &a)
	}
	return a, err
}

// result calls a method that must succeed, and checks its result with the
// contract.
func (p *pod) result(token, method string, params any, header ...string) map[string]any {
	p.t.Helper()
	a := p.call(token, method, params, header...)
	require.Nil(p.t, a.Error, "%s %v", method, a.Error)
	var result map[string]any
	require.NoError(p.t, json.Unmarshal(a.Result, &result))
	if t, ok := p.t.(*testing.T); ok {
		requireContractResult(t, method, result)
	}
	return result
}

// refused calls a method that must be refused, with a code.
func (p *pod) refused(code int, token, method string, params any, header ...string) *rpcError {
	p.t.Helper()
	a := p.call(token, method, params, header...)
	require.NotNil(p.t, a.Error, "%s answered %s", method, a.Result)
	require.Equal(p.t, code, a.Error.Code, a.Error.Message)
	return a.Error
}

// invalid calls a method whose params must be refused, and nothing be stored.
func (p *pod) invalid(field, reason, token, method string, params any) {
	p.t.Helper()
	before := p.stored()
	e := p.refused(rpc.InvalidParams, token, method, params)
	require.Equal(p.t, map[string]any{"field": field, "reason": reason}, e.Data, e.Message)
	require.Equal(p.t, before, p.stored())
}

// missing calls a method about something that is not there.
func (p *pod) missing(kind, token, method string, params any) *rpcError {
	p.t.Helper()
	before := p.stored()
	e := p.refused(rpc.InvalidParams, token, method, params)
	require.Equal(p.t, map[string]any{"kind": kind, "reason": "not_found"}, e.Data, e.Message)
	require.Equal(p.t, before, p.stored())
	return e
}

// stored counts the rows of what a call may write.
func (p *pod) stored() string {
	p.t.Helper()
	var counts string
	require.NoError(p.t, p.pool.QueryRow(p.ctx, `SELECT concat_ws(' ', (SELECT count(*) FROM session), (SELECT count(*) FROM run),
		(SELECT count(*) FROM event), (SELECT count(*) FROM river_job), (SELECT count(*) FROM idempotency), (SELECT count(*) FROM message),
		(SELECT count(*) FROM agent_version), (SELECT count(*) FROM api_token WHERE revoked_at IS NULL),
		(SELECT count(*) FROM agent WHERE deleted_at IS NULL AND suspended_at IS NULL))`).Scan(&counts))
	return counts
}

func (p *pod) scan(sql string, into ...any) {
	p.t.Helper()
	require.NoError(p.t, p.pool.QueryRow(p.ctx, sql).Scan(into...))
}

// registerWorker makes a live worker without any process behind it.
func (p *pod) registerWorker() uuid.UUID {
	p.t.Helper()
	id := newID()
	_, err := db.New().WorkerInsert(p.ctx, p.pool, db.WorkerInsertParams{
		ID: id, Hostname: "test", Pid: 1, Version: "test", Queues: []string{"turns"}, Slots: 1, LeaseMs: 10_000,
	})
	require.NoError(p.t, err)
	return id
}

// work starts a worker that carries out whatever is admitted, by its text.
func (f *fixture) work() *testWorker {
	f.t.Helper()
	w := &testWorker{pod: f.pod, id: f.registerWorker(), held: make(chan struct{}), stop: make(chan struct{})}
	w.wg.Go(w.loop)
	f.t.Cleanup(w.end)
	f.worker = w
	return w
}

// testWorker is the least of a worker. "!fail" fails, "!clarify X" asks back,
// "!hold" waits until let go, anything else is answered "echo: " and the text.
type testWorker struct {
	*pod
	id   uuid.UUID
	held chan struct{}
	once sync.Once
	over sync.Once
	stop chan struct{}
	wg   sync.WaitGroup
}

// letGo ends all holds.
func (w *testWorker) letGo() { w.once.Do(func() { close(w.held) }) }

func (w *testWorker) end() {
	w.over.Do(func() { close(w.stop) })
	w.letGo()
	w.wg.Wait()
}

func (w *testWorker) loop() {
	ctx := context.WithoutCancel(w.ctx)
	tick := time.NewTicker(3 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-w.stop:
			return
		}
		rows, err := w.pool.Query(ctx, `SELECT id FROM run WHERE state = 'queued' AND admitted_at IS NOT NULL ORDER BY id LIMIT 20`)
		if err != nil {
			continue
		}
		var ids []uuid.UUID
		for rows.Next() {
			var id uuid.UUID
			if rows.Scan(&id) == nil {
				ids = append(ids, id)
			}
		}
		rows.Close()
		for _, id := range ids {
			run, err := w.runs.Claim(ctx, w.id, id)
			if err == nil {
				w.wg.Go(func() { w.carry(ctx, run) })
			}
		}
	}
}

func (w *testWorker) carry(ctx context.Context, run *jobs.Run) {
	var in turnInput
	if err := json.Unmarshal(run.Input, &in); err != nil {
		panic(err)
	}
	if strings.HasPrefix(in.Text, "!hold") {
		<-w.held
	}
	_, err := w.runs.Advance(ctx, run, answerOf(run, in.Text))
	if err == jobs.ErrLookAgain {
		e := jobs.CancelEnding("partial")
		w.runs.Advance(ctx, run, jobs.Advance{End: &e})
	}
}

// answerOf is one model call and the end of a turn.
func answerOf(run *jobs.Run, text string) jobs.Advance {
	seq := int32(len(run.Steps))
	cost := int64(7)
	a := jobs.Advance{
		Steps: []jobs.Step{{
			Seq: seq, Kind: db.StepKindModel, Status: db.StepStatusDone, CallID: fmt.Sprintf("m%d", seq), Name: "offline/offline-1", Output: json.RawMessage(`{}`),
		}},
		Usage: []jobs.Usage{{
			CallID: fmt.Sprintf("m%d", seq), Provider: "offline", Model: "offline-1", Input: 3, CacheRead: 2, CacheWrite: 1, Output: 4, Reasoning: 5,
			CostMicros: &cost, Content: json.RawMessage(`{}`),
		}},
		ModelCalls: 1,
	}
	const usage = `"usage":{"input":3,"cacheRead":2,"cacheWrite":1,"output":4,"reasoning":5,"costMicros":7,"estimated":false},"steps":1`
	end := jobs.Ending{State: db.RunStateCompleted, Reason: "completed"}
	quoted, _ := json.Marshal("echo: " + text)
	finish, event := "stop", jobs.EventResponse
	switch question, asks := strings.CutPrefix(text, "!clarify "); {
	case strings.HasPrefix(text, "!fail"):
		end = jobs.FailEnding(jobs.ErrorContent{Kind: "provider_error", Message: "no luck", Reason: "stalled", Retryable: true, Partial: "so far"})
		a.End = &end
		return a
	case asks:
		quoted, _ = json.Marshal(question)
		finish, event, end.Phase, end.Reason = "clarify", jobs.EventClarify, jobs.PhaseClarify, "clarify"
	}
	end.Result = json.RawMessage(fmt.Sprintf(`{"text":%s,"finishReason":%q,%s}`, quoted, finish, usage))
	end.Last = jobs.Event{Type: event, Content: json.RawMessage(fmt.Sprintf(`{"text":%s,"final":true}`, quoted))}
	if run.ChannelType == channelAgentex {
		end.Message = json.RawMessage(fmt.Sprintf(`{"type":"text","author":"agent","style":"static","format":"plain","content":%s,"attachments":null}`, quoted))
	}
	a.End = &end
	return a
}

// text returns a string member.
func text(t testing.TB, m map[string]any, name string) string {
	t.Helper()
	s, ok := m[name].(string)
	require.True(t, ok, "%s of %v", name, m)
	return s
}

// eventually waits for something that the database will show.
func (p *pod) eventually(what string, f func() bool) {
	p.t.Helper()
	require.Eventually(p.t, f, waitLimit, 5*time.Millisecond, what)
}
