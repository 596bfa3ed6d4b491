package api

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/api/rpc"
	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
)

var update = flag.Bool("update", false, "write docs/methods.md")

// TestReference fails when docs/methods.md is not what go generate ./api makes.
func TestReference(t *testing.T) {
	t.Parallel()
	const path = "../docs/methods.md"
	var page strings.Builder
	require.NoError(t, realRegistry().WriteReference(&page))
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(page.String()), 0o644))
		return
	}
	stored, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(stored), page.String(), "run go generate ./api")
}

// TestEveryMethodIsCalled keeps the tests of this package complete.
func TestEveryMethodIsCalled(t *testing.T) {
	t.Parallel()
	entries, err := os.ReadDir(".")
	require.NoError(t, err)
	var tests strings.Builder
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), "_test.go") && e.Name() != "contract_test.go" && e.Name() != "method_test.go" {
			text, err := os.ReadFile(e.Name())
			require.NoError(t, err)
			tests.Write(text)
		}
	}
	for _, m := range realRegistry().Methods() {
		require.Contains(t, tests.String(), `"`+m.Name+`"`)
	}
}

func TestHealth(t *testing.T) {
	t.Parallel()
	t.Run("NeedsNoCredentials", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for _, path := range []string{"/livez", "/healthz"} {
			status, _, body := f.do("GET", path, "", "")
			require.Equal(t, 200, status)
			require.JSONEq(t, `{"status":"ok"}`, body)
		}
		status, _, body := f.do("GET", "/readyz", "", "")
		require.Equal(t, 200, status)
		require.JSONEq(t, `{"status":"ok","checks":{"postgres":{"healthy":true},"schema":{"healthy":true},"draining":false}}`, body)
		status, _, body = f.do("POST", "/healthz", "", "")
		require.Equal(t, 405, status)
		require.JSONEq(t, `{"detail":"Method Not Allowed"}`, body)
	})
	t.Run("NotReadyWhileItDrains", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.server.Drain()
		f.server.Drain()
		status, _, body := f.do("GET", "/readyz", "", "")
		require.Equal(t, 503, status)
		require.Contains(t, body, `"draining":true`)
		status, _, _ = f.do("GET", "/livez", "", "")
		require.Equal(t, 200, status)
	})
	t.Run("ReadinessGoesBeforeAnythingElse", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.server.Unready()
		status, _, body := f.do("GET", "/readyz", "", "")
		require.Equal(t, 503, status)
		require.Contains(t, body, `"draining":true`)
		f.result(f.rpc, "agent.request", request("s", "x")) // who has not noticed yet is served
	})
	t.Run("NotReadyWithAnOldSchema", func(t *testing.T) {
		t.Parallel()
		problem := error(&db.SchemaError{Pending: []db.MigrationState{{Source: "weir", Version: 9}}})
		f := setupWith(t, func(c *Config) { c.Schema = func(context.Context) error { return problem } })
		status, _, body := f.do("GET", "/readyz", "", "")
		require.Equal(t, 503, status)
		require.Contains(t, body, `"schema":{"healthy":false}`)
		problem = nil // somebody migrated it
		f.eventually("ready", func() bool {
			status, _, _ := f.do("GET", "/readyz", "", "")
			return status == 200
		})
	})
	t.Run("WithoutADatabase", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.result(f.rpc, "agent.request", request("s", "x"))
		f.cutOff()
		status, header, _ := f.do("GET", "/readyz", "", "")
		require.Equal(t, 503, status)
		require.NotEmpty(t, header.Get("Retry-After"))
		f.server.forget()
		for _, method := range []string{"agents.list", "system.ping"} {
			status, header, body := f.do("POST", "/rpc", f.all, fmt.Sprintf(`{"jsonrpc":"2.0","id":1,"method":%q}`, method))
			require.Equal(t, 503, status)
			require.NotEmpty(t, header.Get("Retry-After"))
			require.Contains(t, body, `"code":-32014`)
		}
		status, _, body := f.do("GET", "/agents", f.rpc, "")
		require.Equal(t, 503, status)
		require.Contains(t, body, `"code":503`)
		status, _, body = f.do("GET", "/metrics", "", "")
		require.Equal(t, 200, status)
		require.Contains(t, body, "weir_database_up 0")
	})
}

// cutOff makes the database refuse all connections.
func (f *fixture) cutOff() {
	f.t.Helper()
	c := f.pool.Config().ConnConfig.Copy()
	name := c.Database
	c.Database = "postgres"
	conn, err := pgx.ConnectConfig(f.ctx, c)
	require.NoError(f.t, err)
	defer conn.Close(context.Background())
	_, err = conn.Exec(f.ctx, `ALTER DATABASE `+pgx.Identifier{name}.Sanitize()+` ALLOW_CONNECTIONS false`)
	require.NoError(f.t, err)
	_, err = conn.Exec(f.ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1`, name)
	require.NoError(f.t, err)
}

func TestUnavailable(t *testing.T) {
	t.Parallel()
	for _, err := range []error{
		&net.OpError{Op: "dial", Err: errors.New("refused")}, jobs.ErrClosed, &jobs.UnavailableError{Err: errors.New("x")}, context.DeadlineExceeded,
	} {
		e := wireError(fmt.Errorf("list: %w", err))
		require.Equal(t, rpc.Unavailable, e.Code)
		require.Equal(t, http.StatusServiceUnavailable, e.Status)
	}
	require.Equal(t, rpc.InternalError, wireError(errors.New("x")).Code)
}

func TestDrain(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.result(f.rpc, "agent.request", request("s", "x"))
	f.server.Drain()
	before := f.stored()
	for _, method := range []string{"agent.request", "agent.execute", "agents.create", "run.kill"} {
		status, header, body := f.do("POST", "/rpc", f.all, fmt.Sprintf(`{"jsonrpc":"2.0","id":7,"method":%q}`, method))
		require.Equal(t, 503, status)
		require.Equal(t, "1", header.Get("Retry-After"))
		require.Contains(t, body, `"id":7,"error":{"code":-32014`)
	}
	require.Equal(t, "Insufficient scope: requires 'admin'", f.refused(rpc.InternalError, f.rpc, "agents.create", `{}`).Message)
	require.Equal(t, true, f.result(f.rpc, "agent.status", request("s", ""))["known"])
	status, header, _ := f.do("POST", "/agents/name/default/rpc", f.rpc, `{"method":"task/create","params":{}}`)
	require.Equal(t, 503, status)
	require.Equal(t, "1", header.Get("Retry-After"))
	require.Equal(t, before, f.stored())
}

func TestRoutes(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for _, test := range []struct {
		method, path string
		status       int
		body         string
	}{
		{"GET", "/nothing", 404, `{"detail":"Not Found"}`},
		{"GET", "/health", 404, `{"detail":"Not Found"}`},
		{"GET", "/livez/", 404, `{"detail":"Not Found"}`},
		{"GET", "/rpc", 405, `{"detail":"Method Not Allowed"}`},
		{"DELETE", "/tasks/x", 405, `{"detail":"Method Not Allowed"}`},
		{"OPTIONS", "/rpc", 204, ""},
		{"OPTIONS", "/agents/name/default/rpc", 204, ""},
	} {
		status, header, body := f.do(test.method, test.path, "", "", "Origin", "http://localhost:3000", "Access-Control-Request-Method", "POST")
		require.Equal(t, test.status, status, test.path)
		require.Empty(t, header.Get("Access-Control-Allow-Origin"))
		if test.body != "" {
			require.JSONEq(t, test.body, body)
		}
	}
	t.Run("RC-10/LargeBody", func(t *testing.T) {
		for path, want := range map[string]string{"/rpc": `"code":-32600`, "/agents/name/default/rpc": `"code":413`} {
			r := httptest.NewRequest("POST", path, strings.NewReader(strings.Repeat(" ", rpc.DefaultMaxBody+1)))
			r.Header.Set("Authorization", "Bearer "+f.rpc)
			r.ContentLength = -1 // as a client that does not say it
			w := httptest.NewRecorder()
			f.server.Handler().ServeHTTP(w, r)
			require.Equal(t, http.StatusRequestEntityTooLarge, w.Code)
			require.Contains(t, w.Body.String(), want)
		}
	})
	t.Run("OpenAPI", func(t *testing.T) {
		status, _, body := f.do("GET", "/openapi.json", "", "")
		require.Equal(t, 200, status)
		var d openAPI
		require.NoError(t, json.Unmarshal([]byte(body), &d))
		require.Equal(t, "0.1.0", d.Info.Version)
		require.Equal(t, "test", d.Info.Binary)
		require.Contains(t, d.Paths, "/agents/name/{agent_name}/rpc")
		var ids []string
		for path, methods := range d.Paths {
			for method, op := range methods {
				ids = append(ids, op.OperationID)
				require.NotEmpty(t, op.Responses)
				for _, m := range regexp.MustCompile(`\{(\w+)\}`).FindAllStringSubmatch(path, -1) {
					require.True(t, slices.ContainsFunc(op.Parameters, func(p openAPIParameter) bool { return p.Name == m[1] && p.In == "path" && p.Required }))
				}
				status, _, _ := f.do(strings.ToUpper(method), regexp.MustCompile(`\{\w+\}`).ReplaceAllString(path, "x"), "", "")
				if len(op.Security) == 0 {
					require.Equal(t, 200, status, path)
				} else {
					require.Equal(t, 401, status, path)
				}
			}
		}
		require.Len(t, slices.Compact(slices.Sorted(slices.Values(ids))), len(f.server.routes()))
	})
	t.Run("APanicIsOneRequests", func(t *testing.T) {
		f.server.agents.load = func(context.Context, agentKey) (*agentView, error) { panic("bug") }
		f.server.forget()
		status, header, body := f.do("POST", "/agents/name/default/rpc", f.rpc, `{"method":"task/create","params":{}}`)
		require.Equal(t, 500, status)
		require.Equal(t, "false", header.Get("X-Should-Retry"))
		require.JSONEq(t, `{"message":"Internal Server Error","code":500,"data":null}`, body)
		require.Contains(t, f.log.String(), "panic in a handler")
		require.Equal(t, "internal error", f.refused(rpc.InternalError, f.rpc, "agent.request", request("s", "x")).Message)
	})
}

// TestBodyLimit: what limits the time of a body must not cancel who waits for a
// turn, as http.Server.ReadTimeout would.
func TestBodyLimit(t *testing.T) {
	t.Parallel()
	deadlines := &deadlineRecorder{ResponseRecorder: httptest.NewRecorder()}
	r := httptest.NewRequest("POST", "/", strings.NewReader("x"))
	limitBody(deadlines, r)
	require.WithinDuration(t, time.Now().Add(bodyTime), deadlines.last, time.Minute/2)
	text, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	require.Equal(t, "x", string(text))
	require.True(t, deadlines.last.IsZero(), "the body is here")

	deadlines.last = time.Unix(1, 0)
	limitBody(deadlines, httptest.NewRequest("GET", "/", nil))
	require.Equal(t, time.Unix(1, 0), deadlines.last)
}

type deadlineRecorder struct {
	*httptest.ResponseRecorder
	last time.Time
}

func (d *deadlineRecorder) SetReadDeadline(t time.Time) error {
	d.last = t
	return nil
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	t.Run("ShowsWhatTheRowsSay", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.claim(f.start("running", "x"))
		f.start("queued", "x")
		f.start("queued", "behind")
		done := f.claim(f.start("done", "x"))
		f.advance(done, answerOf(done, "x"))
		waits := f.claim(f.start("waits", "x"))
		f.advance(waits, jobs.Advance{Park: &jobs.Park{Kind: db.WaitKindTimer, For: time.Hour}})
		status, header, body := f.do("GET", "/metrics", "", "")
		require.Equal(t, 200, status)
		require.Contains(t, header.Get("Content-Type"), "text/plain")
		for _, line := range []string{
			`weir_runs{kind="turn",state="running"} 1`, `weir_runs{kind="turn",state="queued"} 2`, `weir_runs{kind="turn",state="completed"} 1`,
			`weir_runs{kind="turn",state="waiting"} 1`, `weir_runs{kind="spawn",state="poisoned"} 0`, `weir_queue_depth{queue="turns"} 1`,
			`weir_queue_depth{queue="spawns"} 0`, `weir_queue_oldest_seconds{queue="spawns"} 0`, `weir_workers{state="live"} 3`,
			`weir_steps_total 1`, `weir_database_up 1`, `weir_http_requests_total{code="200",method="POST",route="/rpc"} 5`,
		} {
			require.Contains(t, body, line+"\n")
		}
		require.Regexp(t, `weir_queue_oldest_seconds\{queue="turns"\} 0\.\d`, body)
		require.Regexp(t, `weir_committer_units_total \d`, body)
		require.Regexp(t, `weir_committer_ops_total \d`, body)
		for _, label := range []string{"default", "tenant", "session"} {
			for _, line := range strings.Split(body, "\n") {
				if !strings.HasPrefix(line, "#") {
					require.NotContains(t, line, `="`+label)
				}
			}
		}
	})
	t.Run("OneLookASecond", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		m := jobs.NewMetrics(f.runs, func() map[string]int64 { return map[string]int64{"nudge": 3} })
		r := prometheus.NewPedanticRegistry()
		r.MustRegister(m)
		_, err := r.Gather()
		require.NoError(t, err)
		asked := f.asked.Load()
		for range 10 {
			families, err := r.Gather()
			require.NoError(t, err)
			names := ""
			for _, family := range families {
				names += family.GetName() + " "
			}
			require.Contains(t, names, "weir_sweeper_repairs_total")
		}
		require.LessOrEqual(t, f.asked.Load()-asked, int64(12), "one more look, if these took long")
	})
	t.Run("UnknownPathsAreOneRoute", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for i := range 3 {
			f.do("GET", fmt.Sprint("/x", i), "", "")
		}
		_, _, body := f.do("GET", "/metrics", "", "")
		require.Contains(t, body, `weir_http_requests_total{code="404",method="any",route="unknown"} 3`)
	})
}

func TestNew(t *testing.T) {
	t.Parallel()
	f := setup(t)
	small, err := db.Open(f.ctx, f.url+"&pool_max_conns=2", nil)
	require.NoError(t, err)
	defer small.Close()
	_, err = New(Config{Pool: small, Runs: f.runs, Log: f.server.log})
	require.ErrorContains(t, err, "want at least 4")
}
