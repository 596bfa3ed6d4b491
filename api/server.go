package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/weir-run/weir/api/rpc"
	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/jobs/bus"
	"github.com/weir-run/weir/jobs/tracing"
)

// Config is what a Server needs. Pool, Runs and Log must be set.
type Config struct {
	Pool *pgxpool.Pool // of at least 4 connections, on the database of Runs
	Runs *jobs.Runs
	Log  *slog.Logger
	// Version is that of the binary, for people.
	Version string
	// TrustLoopback is who a program on this machine is that shows no
	// credentials. Nil, as everywhere but in weir dev, means nobody.
	TrustLoopback *Caller
	// ConfigPaths and Sections are the configuration files that were read and
	// their top-level members, for gateway.status.
	ConfigPaths, Sections []string
	// Metrics is what GET /metrics shows beside the server's own: the process's
	// registry. Nil means jobs.NewMetrics alone.
	Metrics prometheus.Gatherer
	// Traces takes the spans of requests. Nil means that there are none.
	Traces trace.TracerProvider
	// Schema checks that this binary works with the database's schema. Nil means
	// db.Usable with the URL of Pool.
	Schema func(context.Context) error
	// MaxQueued is how many turns may wait in a session; 0 means 20 (RC-30).
	MaxQueued int
	// DrainWait is how long callers may wait on for their turns once the server
	// drains; 0 means 5 s. Then they are told that the turn is still running.
	DrainWait time.Duration
}

const (
	minConns         = 4
	defaultMaxQueued = 20
	defaultDrainWait = 5 * time.Second
)

// Server is the HTTP edge. It may be used until Close.
type Server struct {
	config   Config
	pool     *pgxpool.Pool
	runs     *jobs.Runs
	queries  *db.Queries
	log      *slog.Logger
	began    time.Time
	registry *Registry
	rpc      *rpc.Server
	http     *httpMetrics
	tracer   tracing.Tracer
	openAPI  func() *openAPI
	handler  http.Handler

	tokens *cache[tokenHash, *Caller]
	agents *cache[agentKey, *agentView]
	ready  readiness
	keyed  chan struct{} // slots of calls with an idempotency key

	unready   atomic.Bool // readyz says no
	draining  atomic.Bool
	waiting   context.Context // ends when callers may wait no longer
	endWaits  context.CancelCauseFunc
	drainOnce sync.Once
	unhandle  func()
}

// errWaitOver is why a wait for a turn ends before the turn.
var errWaitOver = errors.New("the wait is over")

// New makes a server. Close ends it.
func New(c Config) (*Server, error) {
	if n := c.Pool.Config().MaxConns; n < minConns {
		return nil, fmt.Errorf("the pool has %d connections, want at least %d", n, minConns)
	}
	if c.MaxQueued == 0 {
		c.MaxQueued = defaultMaxQueued
	}
	if c.DrainWait == 0 {
		c.DrainWait = defaultDrainWait
	}
	if c.Schema == nil {
		url := c.Pool.Config().ConnString()
		c.Schema = func(ctx context.Context) error { return db.Usable(ctx, url) }
	}
	if c.Metrics == nil {
		r := prometheus.NewRegistry()
		r.MustRegister(jobs.NewMetrics(c.Runs, nil))
		c.Metrics = r
	}
	s := &Server{
		config: c, pool: c.Pool, runs: c.Runs, queries: db.New(), log: c.Log, began: time.Now(),
		keyed: make(chan struct{}, c.Pool.Config().MaxConns/2),
	}
	s.tokens = newCache(s.loadToken)
	s.agents = newCache(s.loadAgent)
	s.waiting, s.endWaits = context.WithCancelCause(context.Background())
	s.registry = NewRegistry(s.methods()...)
	s.registry.OnRepeat(s.repeated)
	s.rpc = &rpc.Server{Dispatcher: dispatcher{s}, MapError: wireError, Log: c.Log}
	s.http = newHTTPMetrics()
	s.tracer = tracing.New(c.Traces, "api")
	s.openAPI = sync.OnceValue(s.describeRoutes)
	s.handler = s.routed()
	s.unhandle = c.Runs.Bus().Handle(bus.Agents, func(uuid.UUID) { s.forget() })
	return s, nil
}

// methods is the table of what the server can do.
func (s *Server) methods() []Method {
	return []Method{
		Define("system.ping", ScopeRPC, "Proves liveness and credentials.", s.systemPing, ReadOnly),
		s.defineAgentExecute(),
		s.defineAgentRequest(),
		s.defineAgentStatus(),
		Define("gateway.status", ScopeAdmin, "Describes the process that answers.", s.gatewayStatus, ReadOnly),
		s.defineSessionStatus(),
		s.defineSessionHistory(),
		s.defineSessionList(),
		Define("agents.list", ScopeAdmin, "Lists the names of the agents.", s.agentsList, ReadOnly),
		s.defineAgentsCreate(),
		Define("agents.get", ScopeAdmin, "Returns the configuration of an agent, with its defaults.", s.agentsGet, ReadOnly),
		s.defineAgentsUpdate(),
		s.defineAgentsDelete(),
		s.defineAgentsSuspend(),
		Define("agents.resume", ScopeAdmin, "Lets a suspended agent accept messages again.", s.agentsResume),
		Define("tokens.list", ScopeAdmin, "Lists the tokens that are in force, without their secrets.", s.tokensList, ReadOnly),
		s.defineTokensCreate(),
		s.defineTokensRevoke(),
		s.defineTokensRotate(),
		s.defineRunList(),
		s.defineRunGet(),
		s.defineRunCancel(),
		s.defineRunRelease(),
		s.defineRunKill(),
		Define("queue.list", ScopeAdmin, "Lists the queues of the fleet.", s.queueList, Ours, ReadOnly, Fleet),
		s.defineQueuePause(),
		s.defineQueueResume(),
		s.defineQueueLimit(),
		Define("tenant.list", ScopeAdmin, "Lists the tenants with their shares.", s.tenantList, Ours, ReadOnly, Fleet),
		s.defineTenantSet(),
		s.defineWorkerQuiet(),
		s.defineWorkerDrain(),
		Define("worker.list", ScopeAdmin, "Lists the worker processes of the fleet.", s.workerList, Ours, ReadOnly),
	}
}

// dispatcher is the registry, closed to changes while the server drains.
type dispatcher struct{ *Server }

func (d dispatcher) Lookup(ctx context.Context, name string) (rpc.Handler, error) {
	h, err := d.registry.Lookup(ctx, name)
	if err == nil && d.draining.Load() && !d.registry.Method(name).ReadOnly {
		return nil, errDraining()
	}
	if span := trace.SpanFromContext(ctx); err == nil && span.IsRecording() {
		span.SetAttributes(tracing.RPCSystem.String("jsonrpc"), tracing.RPCMethod.String(name)) // of a batch, the last
	}
	return h, err
}

func errDraining() *rpc.Error { return rpc.NotAvailable("this process is shutting down", retryAfter) }

// Handler serves everything.
func (s *Server) Handler() http.Handler { return s.handler }

// Unready makes readyz say no. Everything else goes on, so that load balancers
// may take their time to notice.
func (s *Server) Unready() { s.unready.Store(true) }

// Drain makes readyz say no and refuses new changes. Whoever waits for a turn
// may do so for Config.DrainWait.
func (s *Server) Drain() {
	s.drainOnce.Do(func() {
		s.unready.Store(true)
		s.draining.Store(true)
		time.AfterFunc(s.config.DrainWait, func() { s.endWaits(errWaitOver) })
	})
}

// Close ends all waits, and listens to the bus no longer.
func (s *Server) Close() {
	s.Drain()
	s.endWaits(errWaitOver)
	s.unhandle()
}

// forget drops what is remembered of tokens and agents.
func (s *Server) forget() {
	s.tokens.forget()
	s.agents.forget()
}

// agentsChanged tells every process, this one at once, that a token or an agent
// has changed.
func (s *Server) agentsChanged() {
	s.runs.Bus().Publish(nil, bus.Message{Topic: bus.Agents})
}

// serveRPC answers POST /rpc.
func (s *Server) serveRPC(c *gin.Context) {
	caller, err := s.authenticate(c.Request, false)
	if err != nil {
		rpc.WriteError(c.Writer, s.authError(c.Request.Context(), err))
		return
	}
	s.rpc.ServeHTTP(c.Writer, c.Request.WithContext(withCaller(c.Request.Context(), caller)))
}

// authError is what a caller learns that could not be authenticated.
func (s *Server) authError(ctx context.Context, err error) *rpc.Error {
	if errors.Is(err, errUnauthorized) {
		return rpc.NotAuthorized()
	}
	s.log.WarnContext(ctx, "authenticate", "error", err)
	return rpc.NotAvailable("credentials cannot be checked", retryAfter)
}
