package workers

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/weir-run/weir/api"
	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/jobs/tracing"
	"github.com/weir-run/weir/workers/tool"
)

// The caller's trace of these tests.
const (
	callerTrace = "4bf92f3577b34da6a3ce929d0e0e4736"
	callerSpan  = "00f067aa0ba902b7"
	caller      = "00-" + callerTrace + "-" + callerSpan + "-01"
)

// traced is a fixture with an API, whose spans and log lines are kept.
type traced struct {
	*fixture
	memory *tracetest.InMemoryExporter
	traces trace.TracerProvider // nil: nobody collects
	url    string
	lines  *syncBuffer
}

type syncBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

func setupTraced(t *testing.T, on bool) *traced {
	f := &traced{fixture: setup(t), memory: tracetest.NewInMemoryExporter(), lines: &syncBuffer{}}
	f.log = slog.New(tracing.LogHandler(slog.NewJSONHandler(f.lines, nil)))
	if on {
		f.traces = sdktrace.NewTracerProvider(sdktrace.WithSyncer(f.memory))
	}
	edge, err := api.New(api.Config{
		Pool: f.pool, Runs: f.runs, Log: f.log, Traces: f.traces, DrainWait: time.Millisecond,
		TrustLoopback: &api.Caller{TenantID: "default", TokenID: "test", Scopes: api.ScopeAll},
	})
	require.NoError(t, err)
	t.Cleanup(edge.Close)
	server := httptest.NewServer(edge.Handler())
	t.Cleanup(server.Close)
	f.url = server.URL
	return f
}

func (f *traced) worker() (w *Worker, stop func()) {
	f.t.Helper()
	return f.fixture.worker(func(c *Config) { c.Traces, c.Log = f.traces, f.log })
}

// rpc calls a method within a trace; "" for none.
func (f *traced) rpc(traceparent, method, params string) json.RawMessage {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.ctx, time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "POST", f.url+"/rpc", strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"`+method+`","params":`+params+`}`))
	require.NoError(f.t, err)
	if traceparent != "" {
		req.Header.Set("Traceparent", traceparent)
	}
	resp, err := http.DefaultClient.Do(req)
	require.NoError(f.t, err)
	defer func() { _ = resp.Body.Close() }()
	var answer struct{ Result, Error json.RawMessage }
	require.NoError(f.t, json.NewDecoder(resp.Body).Decode(&answer))
	require.Nil(f.t, answer.Error, string(answer.Error))
	return answer.Result
}

// spans waits for that many spans whose names begin so, in the order in which
// they began.
func (f *traced) spans(n int, name string) (found tracetest.SpanStubs) {
	f.t.Helper()
	f.eventually(fmt.Sprintf("%d spans %s", n, name), func() bool {
		found = nil
		for _, s := range f.memory.GetSpans() {
			if strings.HasPrefix(s.Name, name) {
				found = append(found, s)
			}
		}
		return len(found) >= n
	})
	require.Len(f.t, found, n, name)
	slices.SortFunc(found, func(a, b tracetest.SpanStub) int { return a.StartTime.Compare(b.StartTime) })
	return found
}

func attributes(s tracetest.SpanStub) map[attribute.Key]any {
	m := map[attribute.Key]any{}
	for _, a := range s.Attributes {
		m[a.Key] = a.Value.AsInterface()
	}
	return m
}

func events(s tracetest.SpanStub) (names []string) {
	for _, e := range s.Events {
		names = append(names, e.Name)
	}
	return names
}

func quoted(text string) string { return string(mustJSON(text)) }

func TestTraces(t *testing.T) {
	t.Parallel()
	t.Run("ATurnIsOneTraceFromTheRequestToItsLastStep", func(t *testing.T) {
		t.Parallel()
		f := setupTraced(t, true)
		var mu sync.Mutex
		var sent []string
		said := newCountingTool(t, func(w http.ResponseWriter, r *http.Request, _ int) {
			mu.Lock()
			sent = append(sent, r.Header.Get("Traceparent"))
			mu.Unlock()
			_, _ = io.WriteString(w, `"SECRETRESULT"`)
		})
		f.agent(said.agent("idempotent"))
		w, _ := f.worker()
		result := f.rpc(caller, "agent.execute", `{"message":`+quoted("!tool slow {\"text\":\"SECRETARGS\"}\n!tool slow {}\n!say SECRETANSWER")+`}`)
		require.Contains(t, string(result), "SECRETANSWER")

		request, turn := f.spans(1, "POST /rpc")[0], f.spans(1, "turn")[0]
		calls, tools := f.spans(3, "chat offline-1"), f.spans(2, "execute_tool slow")
		require.Len(t, f.memory.GetSpans(), 7)
		for _, s := range f.memory.GetSpans() {
			require.Equal(t, callerTrace, s.SpanContext.TraceID().String(), s.Name)
		}
		require.Equal(t, callerSpan, request.Parent.SpanID().String())
		require.True(t, request.Parent.IsRemote())
		require.Equal(t, request.SpanContext.SpanID(), turn.Parent.SpanID())
		for i, s := range append(calls, tools...) {
			require.Equal(t, turn.SpanContext.SpanID(), s.Parent.SpanID(), i)
		}
		require.Len(t, sent, 2)
		for i, s := range tools {
			require.Equal(t, "00-"+callerTrace+"-"+s.SpanContext.SpanID().String()+"-01", sent[i], "the tool goes on from the span of its call")
		}

		var runID, session string
		require.NoError(t, f.pool.QueryRow(f.ctx, `SELECT id::text, session_id::text FROM run`).Scan(&runID, &session))
		edge := attributes(request)
		require.Equal(t, "agent.execute", edge[tracing.RPCMethod])
		require.Equal(t, "/rpc", edge[tracing.HTTPRoute])
		require.EqualValues(t, 200, edge[tracing.HTTPStatus])
		require.Equal(t, runID, edge[tracing.Run])
		a := attributes(turn)
		require.Equal(t, "default", a[tracing.Tenant])
		require.Equal(t, runID, a[tracing.Run])
		require.Equal(t, session, a[tracing.Session])
		require.Equal(t, "default", a[tracing.Agent])
		require.EqualValues(t, 1, a[tracing.Epoch])
		require.EqualValues(t, 0, a[tracing.Attempt])
		require.Equal(t, w.ID().String(), a[tracing.Worker])
		require.Equal(t, []string{eventEnd}, events(turn))
		require.Contains(t, turn.Events[0].Attributes, tracing.State.String("completed"))
		call := attributes(calls[0])
		require.Equal(t, "offline", call[tracing.System])
		require.Equal(t, "offline-1", call[tracing.RequestModel])
		require.Equal(t, []string{"tools"}, call[tracing.Finish])
		require.NotZero(t, call[tracing.InputTokens])
		require.Contains(t, call, tracing.OutputTokens)
		called := attributes(tools[0])
		require.Equal(t, "slow", called[tracing.ToolName])
		require.Equal(t, said.keys()[0], called[tracing.ToolCall])
		require.Equal(t, "ok", called[tracing.Status])
		everything, err := json.Marshal(f.memory.GetSpans())
		require.NoError(t, err)
		require.NotContains(t, string(everything), "SECRET", "spans hold nothing that anybody said")
	})
	t.Run("IsOneTraceStillWhenTheWorkerIsLostBetweenSteps", func(t *testing.T) {
		t.Parallel()
		f := setupTraced(t, true)
		hold := make(chan struct{})
		slow := newCountingTool(t, func(w http.ResponseWriter, r *http.Request, n int) {
			if n == 2 {
				<-hold // beyond the death of whoever asked
			}
			_, _ = io.WriteString(w, `1`)
		})
		f.agent(slow.agent("idempotent"))
		first, stop := f.worker()
		var accepted struct {
			RunID string `json:"runId"`
		}
		require.NoError(t, json.Unmarshal(f.rpc(caller, "agent.request", `{"sessionId":"s","content":{"text":`+quoted("!tool slow {}\n!tool slow {}\n!say done")+`}}`), &accepted))
		<-slow.called
		<-slow.called
		var ref jobs.Ref
		require.NoError(t, f.pool.QueryRow(f.ctx, `SELECT id, session_id FROM run`).Scan(&ref.ID, &ref.Session))
		f.fixture.worker(func(c *Config) { c.Traces, c.Log, c.Slots = f.traces, f.log, 1 })
		_, err := f.pool.Exec(f.ctx, `UPDATE worker SET state = 'draining' WHERE id = $1`, first.ID()) // claims no more
		require.NoError(t, err)
		reaped, err := f.runs.Reap(f.ctx, ref, first.ID(), true, false) // as the reaper does to the runs of the dead
		require.NoError(t, err)
		require.True(t, reaped)
		require.Contains(t, string(f.outcome(ref.ID).Result), "done")
		close(hold)
		stop()

		turns := f.spans(2, "turn")
		require.EqualValues(t, 1, attributes(turns[0])[tracing.Epoch])
		require.EqualValues(t, 3, attributes(turns[1])[tracing.Epoch], "the reaper took one")
		require.NotEqual(t, attributes(turns[0])[tracing.Worker], attributes(turns[1])[tracing.Worker])
		require.NotContains(t, events(turns[0]), eventEnd)
		require.Equal(t, []string{eventEnd}, events(turns[1]))
		request := f.spans(1, "POST /rpc")[0]
		for _, s := range turns {
			require.Equal(t, request.SpanContext.SpanID(), s.Parent.SpanID())
		}
		last := f.spans(3, "execute_tool slow")[2]
		require.Equal(t, turns[1].SpanContext.SpanID(), last.Parent.SpanID())
		require.EqualValues(t, 1, attributes(last)[tracing.Attempt], "it was made again")
		for _, s := range f.memory.GetSpans() {
			require.Equal(t, callerTrace, s.SpanContext.TraceID().String(), s.Name)
		}
	})
	t.Run("NotesParksFailuresAndWhatIsRefused", func(t *testing.T) {
		t.Parallel()
		f := setupTraced(t, true)
		f.agent(withFacts)
		f.worker()
		f.outcome(f.send("parks", "!status 429 times=1 retry-after=1\n!say there").RunID)
		f.failure("fails", "!error SECRETREASON")
		f.outcome(f.send("refused", "!tools memory_read {\"key\":\"a\"} ;; SECRETTOOL {}\n!say x").RunID)
		turns := f.spans(4, "turn")
		require.Equal(t, []string{eventPark}, events(turns[0]))
		require.Contains(t, turns[0].Events[0].Attributes, tracing.WaitKind.String("rate_limit"))
		require.Equal(t, []string{eventEnd}, events(turns[1]))
		require.Equal(t, "provider_error", attributes(turns[2])[tracing.ErrorType])
		calls := f.spans(5, "chat")
		require.Equal(t, "rate_limited", attributes(calls[0])[tracing.ErrorType])
		require.EqualValues(t, 429, attributes(calls[0])[tracing.HTTPStatus])
		require.EqualValues(t, 1, attributes(calls[1])[tracing.Attempt])
		require.Equal(t, "ok", attributes(f.spans(1, "execute_tool memory_read")[0])[tracing.Status])
		require.Equal(t, string(tool.UnknownTool), attributes(f.spans(1, "execute_tool unknown")[0])[tracing.Status])
		for _, s := range f.memory.GetSpans() {
			require.Empty(t, s.Status.Description)
		}
		everything, err := json.Marshal(f.memory.GetSpans())
		require.NoError(t, err)
		require.NotContains(t, string(everything), "SECRET")
	})
	t.Run("TheCallersTraceReachesLogAndToolsWhereNobodyCollects", func(t *testing.T) {
		t.Parallel()
		f := setupTraced(t, false)
		var sent string
		slow := newCountingTool(t, func(w http.ResponseWriter, r *http.Request, _ int) {
			sent = r.Header.Get("Traceparent")
			_, _ = io.WriteString(w, `1`)
		})
		f.agent(slow.agent("idempotent"))
		f.worker()
		f.rpc(caller, "agent.execute", `{"message":"!tool slow {}\n!say x"}`)
		require.Equal(t, caller, sent)
		_, err := f.pool.Exec(f.ctx, `UPDATE agent_version SET config = '{"name":"default","limits":1}'`) // nobody can read it
		require.NoError(t, err)
		f.agent(`{"name":"default","limits":1}`)
		ctx := tracing.WithParent(f.ctx, caller)
		_, err = f.runs.Accept(ctx, jobs.AcceptParams{
			TenantID: "default", Input: json.RawMessage(`{"text":"x"}`), Terms: f.terms,
			Session: jobs.SessionSpec{ConversationRef: "cv_x", ChannelType: "rpc", Scope: json.RawMessage(`[]`)},
		})
		require.NoError(t, err)
		f.eventually("a log line of the turn", func() bool { return strings.Contains(f.lines.String(), `"msg":"turn"`) })
		for line := range strings.Lines(f.lines.String()) {
			if strings.Contains(line, `"msg":"turn"`) {
				require.Contains(t, line, `"trace_id":"`+callerTrace+`","span_id":"`+callerSpan+`"`)
			}
		}
		require.Empty(t, f.memory.GetSpans())
	})
	t.Run("ProbesHaveNone", func(t *testing.T) {
		t.Parallel()
		f := setupTraced(t, true)
		for _, path := range []string{"/livez", "/readyz", "/metrics", "/nowhere"} {
			resp, err := http.Get(f.url + path)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
		}
		f.rpc("", "system.ping", `{}`)
		require.Equal(t, "system.ping", attributes(f.spans(1, "")[0])[tracing.RPCMethod])
	})
	t.Run("NotSampledIsNotCollected", func(t *testing.T) {
		t.Parallel()
		f := setupTraced(t, true)
		f.worker()
		f.rpc(caller[:54]+"0", "agent.execute", `{"message":"x"}`)
		require.Empty(t, f.memory.GetSpans())
	})
}

func TestTracesAreFreeWhereNobodyCollects(t *testing.T) { // not parallel: it counts allocations
	a := &attempt{run: &jobs.Run{}, span: noop.Span{}, w: &Worker{}}
	failed := &tool.Failure{Kind: tool.Timeout}
	require.Zero(t, testing.AllocsPerRun(100, func() {
		ctx := a.trace(t.Context())
		move := jobs.Advance{Steps: []jobs.Step{{Kind: db.StepKindModel}}, ModelCalls: 1}
		a.traceMove(&move, nil)
		a.traceModel(a.span, modelRef{}, nil, nil, nil)
		a.traceSettled(ctx, nil, nil)
		traceTool(a.span, "t", "c", 1, failed)
		a.span.End()
	}))
}
