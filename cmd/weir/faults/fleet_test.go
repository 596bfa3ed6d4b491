package faults

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/client"
)

const (
	stepLimit = 60 * time.Second // of one thing that a row waits for
	lease     = 3 * time.Second  // of the workers
	heartbeat = 500 * time.Millisecond
	judgeWait = time.Second // the lease of the process that judges them

	agentName = "counting"
)

// fleet is a database and the processes that work on it.
type fleet struct {
	t      *testing.T
	random *random
	server *server
	dbname string
	pool   *pgxpool.Pool // the test's own, past every proxy
	tools  *tools
	token  string
	proxy  *proxy // of the processes that are started while it is set

	mu        sync.Mutex
	number    int
	processes []*process
	apis      []*api
	next      atomic.Int64 // which API is asked
	book      book
	errors    atomic.Int64 // of calls that the client repeated
}

// api is a process that serves the API, and how to call it.
type api struct {
	*process
	client *client.Client
}

// newFleet makes a fleet without processes on the shared server.
func newFleet(t *testing.T) *fleet {
	t.Helper()
	return newFleetOn(t, shared.get(t))
}

func newFleetOn(t *testing.T, s *server) *fleet {
	t.Helper()
	f := &fleet{t: t, random: newRandom(t.Name()), server: s, dbname: s.database(t), tools: newTools(t)}
	f.book.runs, f.book.unanswered = map[string]*sent{}, map[string]bool{}
	t.Logf("seed: %s=%d", envSeed, seed)
	config, err := pgxpool.ParseConfig(named(s.cluster.URL(f.dbname), "test"))
	require.NoError(t, err)
	config.MaxConns = 6
	f.pool, err = pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(f.pool.Close)
	f.token = f.newToken("default")
	return f
}

// newToken makes a token of a tenant, and the tenant if there is none.
func (f *fleet) newToken(tenant string) string {
	f.t.Helper()
	cmd := exec.Command(weirBinary(f.t), "tokens", "create", "--database-url", f.url("tokens"), "--id", "test-"+tenant,
		"--scopes", "rpc,admin", "--tenant", tenant)
	cmd.Env = cleanEnv()
	out, err := cmd.Output()
	require.NoError(f.t, err)
	return strings.TrimSpace(string(out))
}

// url is what a process is told; it goes through the fleet's proxy, if any.
func (f *fleet) url(application string) string {
	url := f.server.url(f.dbname, application)
	if f.proxy != nil {
		return via(url, f.proxy.address())
	}
	return url
}

func (f *fleet) start(role string, args ...string) *process {
	f.t.Helper()
	f.mu.Lock()
	f.number++
	name := role + strconv.Itoa(f.number)
	f.mu.Unlock()
	p := launch(f.t, name, append([]string{role, "--database-url", f.url(name)}, args...)...)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.processes = append(f.processes, p)
	return p
}

// worker starts a worker with a short lease, so that no row waits long for a
// death that no lock shows.
func (f *fleet) worker(args ...string) *process {
	f.t.Helper()
	return f.start("worker", append([]string{
		"--lease", lease.String(), "--heartbeat", heartbeat.String(), "--tools-http-allow-private", "--listen", "127.0.0.1:0",
		"--slots", "32", "--drain", "20s",
	}, args...)...)
}

func (f *fleet) workers(n int, args ...string) (list []*process) {
	f.t.Helper()
	for range n {
		list = append(list, f.worker(args...))
	}
	return list
}

// judge starts the process that judges the workers.
func (f *fleet) judge() *process {
	f.t.Helper()
	return f.start("scheduler", "--lease", judgeWait.String(), "--listen", "127.0.0.1:0")
}

// api starts an API, and makes the agent if it is the first.
func (f *fleet) api() *api {
	f.t.Helper()
	p := f.start("api", "--listen", "127.0.0.1:0")
	a := &api{p, f.clientOf(p.ready.API, f.token)}
	f.mu.Lock()
	f.apis = append(f.apis, a)
	first := len(f.apis) == 1
	f.mu.Unlock()
	if first {
		_, err := a.client.CreateAgent(f.limited(), f.tools.config(agentName), agentName)
		require.NoError(f.t, err)
	}
	return a
}

// clientOf calls an API as long as any caller would: until it is back.
func (f *fleet) clientOf(url, token string) *client.Client {
	return client.New(client.Config{URL: url, Token: token, Patience: 2 * time.Minute, OnRetry: func(error) { f.errors.Add(1) }})
}

// restart starts a killed API again at its old address.
func (f *fleet) restart(a *api) {
	f.t.Helper()
	a.process = f.start("api", "--listen", strings.TrimPrefix(a.ready.API, "http://"))
}

// client is one of the APIs', in turn.
func (f *fleet) client() *client.Client {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.apis[int(f.next.Add(1))%len(f.apis)].client
}

func (f *fleet) limited() context.Context {
	ctx, cancel := context.WithTimeout(f.t.Context(), stepLimit)
	f.t.Cleanup(cancel)
	return ctx
}

// book is what was asked of the fleet, and what it answered.
type book struct {
	mu         sync.Mutex
	runs       map[string]*sent // by run
	unanswered map[string]bool  // keys of requests without an answer yet
}

// sent is an accepted turn and how it may end.
type sent struct {
	message
	id  string // the run's, without prefix
	seq int64
}

// message is a turn to be sent.
type message struct {
	session, text string
	answer        string   // of a turn that completes
	ends          []string // states; nil means completed
}

// send hands a message over and returns its run.
func (f *fleet) send(m message) *sent {
	f.t.Helper()
	s, err := f.trySend(f.t.Context(), f.client(), m)
	require.NoError(f.t, err)
	return s
}

func (f *fleet) trySend(ctx context.Context, c *client.Client, m message) (*sent, error) {
	key := uuid.NewString()
	f.book.mu.Lock()
	f.book.unanswered[key] = true
	f.book.mu.Unlock()
	var r client.Accepted
	for {
		err := c.Call(ctx, "agent.request", map[string]any{
			"sessionId": m.session, "agentId": agentName, "content": map[string]string{"text": m.text}, "idempotencyKey": key,
		}, &r, client.Key(key))
		if err == nil {
			break
		}
		var refused *client.Error
		if !errors.As(err, &refused) || refused.Code != client.CodeBusy || !pause(ctx, 50*time.Millisecond) { // a full lane is no fault
			return nil, fmt.Errorf("send to %s: %w", m.session, err)
		}
	}
	s := &sent{message: m, id: strings.TrimPrefix(r.RunID, "run_"), seq: r.Seq}
	f.book.mu.Lock()
	defer f.book.mu.Unlock()
	delete(f.book.unanswered, key)
	f.book.runs[s.id] = s
	return s, nil
}

var labels atomic.Int64

// label is a name that no other place has.
func label(what string) string { return what + "-" + strconv.FormatInt(labels.Add(1), 10) }

// line calls a tool from a place.
func line(tool, at string) string { return fmt.Sprintf("!tool %s {\"at\":%q}\n", tool, at) }

// say makes a message of a script that ends with an answer of its own.
func say(script string) message {
	name := label("s")
	return message{session: name, text: script + "!say " + name, answer: name}
}

// chain is a turn of n calls of tools, and returns their places.
func chain(n int, tool ...string) (m message, places []string) {
	var b strings.Builder
	for i := range n {
		at := label("at")
		places = append(places, at)
		b.WriteString(line(tool[i%len(tool)], at))
	}
	return say(b.String()), places
}

// holder is who carries a run now; pid 0 means nobody.
func (f *fleet) holder(id string) (worker string, pid int) {
	f.t.Helper()
	err := f.pool.QueryRow(f.t.Context(), `SELECT w.id::text, w.pid FROM run r JOIN worker w ON w.id = r.worker_id WHERE r.id = $1`, id).Scan(&worker, &pid)
	if !errors.Is(err, pgx.ErrNoRows) {
		require.NoError(f.t, err)
	}
	return worker, pid
}

// byPID finds a process that the fleet started; the children of its workers
// are not among them.
func (f *fleet) byPID(pid int) *process {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, p := range f.processes {
		if p.pid() == pid {
			return p
		}
	}
	return nil
}

// byName finds a process by what its connections call themselves.
func (f *fleet) byName(name string) *process {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, p := range f.processes {
		if p.name == name {
			return p
		}
	}
	return nil
}

// living are the processes of a role that have not ended.
func (f *fleet) living(role string) (list []*process) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, p := range f.processes {
		if strings.HasPrefix(p.name, role) && !p.ended() {
			list = append(list, p)
		}
	}
	return list
}

// until asks again and again, and fails the row when the answer stays no.
func (f *fleet) until(limit time.Duration, what string, ask func() bool) time.Duration {
	f.t.Helper()
	began := time.Now()
	for !ask() {
		if time.Since(began) > limit {
			f.t.Fatalf("%s: not within %s\n%s", what, limit, f.describe())
		}
		if !pause(f.t.Context(), 10*time.Millisecond) {
			f.t.FailNow()
		}
	}
	return time.Since(began)
}

// is asks the database a question; one that it cannot answer now is a no.
func (f *fleet) is(sql string, args ...any) (yes bool) {
	ctx, cancel := context.WithTimeout(f.t.Context(), 5*time.Second)
	defer cancel()
	return f.pool.QueryRow(ctx, sql, args...).Scan(&yes) == nil && yes
}

func (f *fleet) exec(sql string, args ...any) int64 {
	f.t.Helper()
	tag, err := f.pool.Exec(f.limited(), sql, args...)
	require.NoError(f.t, err, sql)
	return tag.RowsAffected()
}

// one asks the database for one value.
func one[T any](f *fleet, sql string, args ...any) (v T) {
	f.t.Helper()
	require.NoError(f.t, f.pool.QueryRow(f.limited(), sql, args...).Scan(&v), sql)
	return v
}

// running waits until a run is carried by somebody.
func (f *fleet) running(s *sent) {
	f.t.Helper()
	f.until(stepLimit, "run "+s.id+" runs", func() bool { return f.is(`SELECT state = 'running' FROM run WHERE id = $1`, s.id) })
}

// ended waits for the end of runs.
func (f *fleet) ended(list ...*sent) time.Duration {
	f.t.Helper()
	ids := make([]string, len(list))
	for i, s := range list {
		ids[i] = s.id
	}
	return f.until(2*stepLimit, "runs end", func() bool {
		return f.is(`SELECT count(*) = cardinality($1::uuid[]) FROM run WHERE id = ANY ($1::uuid[]) AND finished_at IS NOT NULL`, ids)
	})
}

// describe is what a row that hangs shows.
func (f *fleet) describe() string {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var b strings.Builder
	for _, q := range []struct{ what, sql string }{
		{"unfinished runs", `SELECT row_to_json(x)::text FROM (SELECT id, state, queue, worker_id, epoch, admitted_at, ready_at, nudged_at, nudges, waits_for, losses, call_attempts, steps, session_id, cancel_requested_at, started_at
			FROM run WHERE finished_at IS NULL ORDER BY id LIMIT 12) x`},
		{"their steps", `SELECT row_to_json(x)::text FROM (SELECT s.run_id, s.seq, s.kind, s.status, s.epoch, s.attempt, s.call_id FROM step s JOIN run r ON r.id = s.run_id WHERE r.finished_at IS NULL ORDER BY s.run_id, s.seq DESC LIMIT 20) x`},
		{"their jobs", `SELECT row_to_json(x)::text FROM (SELECT j.id, j.state, j.queue, j.args, j.attempted_by, j.attempted_at FROM river_job j JOIN run r ON r.id = (j.args ->> 'run_id')::uuid
			WHERE r.finished_at IS NULL ORDER BY j.id DESC LIMIT 20) x`},
		{"their waits", `SELECT row_to_json(x)::text FROM (SELECT * FROM wait LIMIT 12) x`},
		{"workers", `SELECT row_to_json(x)::text FROM (SELECT id, pid, state, solitary, heartbeat_at, ended_at FROM worker ORDER BY id DESC LIMIT 12) x`},
		{"queues", `SELECT row_to_json(x)::text FROM (SELECT * FROM queue WHERE name IN ('turns', 'suspect')) x`},
	} {
		fmt.Fprintf(&b, "%s:\n", q.what)
		rows, err := f.pool.Query(ctx, q.sql)
		if err == nil {
			var lines []string
			lines, err = pgx.CollectRows(rows, pgx.RowTo[string])
			for _, l := range lines {
				fmt.Fprintf(&b, "  %s\n", l)
			}
		}
		if err != nil {
			fmt.Fprintf(&b, "  %v\n", err)
		}
	}
	return b.String()
}

// metric reads a metric of a process, by its name with labels as the page
// spells them.
func (f *fleet) metric(p *process, name string) float64 {
	f.t.Helper()
	at := p.ready.Listen
	if at == "" {
		at = p.ready.API
	}
	resp, err := http.Get(at + "/metrics")
	require.NoError(f.t, err)
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	require.NoError(f.t, err)
	found := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + ` (\S+)$`).FindSubmatch(page)
	require.NotNil(f.t, found, "%s of %s", name, p.name)
	v, err := strconv.ParseFloat(string(found[1]), 64)
	require.NoError(f.t, err)
	return v
}

// load sends messages from several places at once until stop is called, and
// then waits for those under way.
func (f *fleet) load(senders int, every time.Duration, make func(sender int) message) (stop func()) {
	ctx, cancel := context.WithCancel(f.t.Context())
	var wg sync.WaitGroup
	for i := range senders {
		wg.Go(func() {
			for ctx.Err() == nil {
				sending, done := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Minute)
				_, err := f.trySend(sending, f.client(), make(i))
				done()
				if err != nil {
					f.t.Errorf("a caller was refused: %v", err)
					return
				}
				pause(ctx, f.random.between(every/2, every*3/2))
			}
		})
	}
	return func() {
		cancel()
		wg.Wait()
	}
}

// mixed is a load of everything that ends by itself.
func (f *fleet) mixed(int) message {
	switch f.random.n(8) {
	case 0:
		return say("")
	case 1:
		return say("!sleep 300ms\n")
	case 2:
		m, _ := chain(4, again)
		return m
	case 3:
		m, _ := chain(4, once)
		return m
	case 4:
		a, b, c := label("at"), label("at"), label("at")
		return say(fmt.Sprintf("!tools again {\"at\":%q} ;; once {\"at\":%q} ;; again {\"at\":%q}\n", a, b, c))
	case 5:
		return say("!status 429 retry-after=1\n")
	case 6:
		return say("!sleep 50ms\n" + line(again, label("at")) + "!sleep 100ms\n" + line(once, label("at")))
	default:
		m, _ := chain(2, again, once)
		m.session = "shared-" + strconv.Itoa(f.random.n(4)) // turns of one lane
		return m
	}
}
