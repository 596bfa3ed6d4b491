package api

import (
	"errors"
	"io"
	"net/http"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/weir-run/weir/jobs/tracing"
)

// bodyTime is how long a request's body may take to arrive.
const bodyTime = time.Minute

// route is a path that the server knows.
type route struct {
	method, path string // a path as gin writes it
	summary      string
	query        []string // names of query parameters
	body         bool     // it reads a JSON body
	public       bool     // needs no credentials
	serve        gin.HandlerFunc
}

// routes is the table of the paths. GET /openapi.json is made from it.
func (s *Server) routes() []route {
	return append([]route{
		{method: "POST", path: "/rpc", summary: "Calls JSON-RPC 2.0 methods, one or up to 50", body: true, serve: s.serveRPC},
		{method: "GET", path: "/livez", summary: "Says that the process lives", public: true, serve: s.serveLivez},
		{method: "GET", path: "/readyz", summary: "Says whether the process can serve", public: true, serve: s.serveReadyz},
		{method: "GET", path: "/healthz", summary: "Says that the process lives, to Agentex clients", public: true, serve: s.serveLivez},
		{method: "GET", path: "/openapi.json", summary: "Describes these paths", public: true, serve: s.serveOpenAPI},
		{method: "GET", path: "/metrics", summary: "Shows metrics to Prometheus", public: true, serve: s.metricsHandler()},
	}, s.agentexRoutes()...)
}

// routed makes the handler of all routes.
func (s *Server) routed() http.Handler {
	gin.SetMode(gin.ReleaseMode)
	engine := gin.New()
	engine.HandleMethodNotAllowed = true
	engine.RedirectTrailingSlash = false
	engine.UseRawPath, engine.UnescapePathValues = true, true // a name may hold a slash
	engine.ForwardedByClientIP = false
	traced := map[string]bool{} // what probes and scrapers ask is not
	for _, r := range s.routes() {
		traced[r.path] = !r.public
	}
	engine.Use(s.traced(traced), s.http.measure, s.recovered)
	for _, r := range s.routes() {
		engine.Handle(r.method, r.path, r.serve)
	}
	engine.NoRoute(func(c *gin.Context) { detail(c, http.StatusNotFound, "Not Found") })
	engine.NoMethod(func(c *gin.Context) {
		if c.Request.Method == http.MethodOptions { // a preflight: no other origin is allowed
			c.Status(http.StatusNoContent)
			return
		}
		detail(c, http.StatusMethodNotAllowed, "Method Not Allowed")
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		limitBody(w, r)
		engine.ServeHTTP(w, r)
	})
}

// detail is the error body of what stands before the routes.
func detail(c *gin.Context, status int, text string) {
	writeJSON(c, status, struct {
		Detail string `json:"detail"`
	}{text})
}

// writeJSON answers with one line of compact JSON.
func writeJSON(c *gin.Context, status int, v any) {
	text, err := marshal(v)
	if err != nil { // of values made here: a bug
		panic(err)
	}
	header := c.Writer.Header()
	header.Set("Content-Type", "application/json")
	header.Set("X-Content-Type-Options", "nosniff")
	c.Status(status)
	c.Writer.Write(append(text, '\n')) // an error means that the client is gone
}

// limitBody gives the body a time to arrive in. http.Server's own limit would
// go on, and cut off whoever waits for a turn.
func limitBody(w http.ResponseWriter, r *http.Request) {
	if r.Body == nil || r.Body == http.NoBody {
		return
	}
	control := http.NewResponseController(w)
	if control.SetReadDeadline(time.Now().Add(bodyTime)) != nil {
		return // not a connection
	}
	r.Body = &timedBody{r.Body, control}
}

type timedBody struct {
	io.ReadCloser
	control *http.ResponseController
}

func (b *timedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		_ = b.control.SetReadDeadline(time.Time{}) // it worked when it was set
	}
	return n, err
}

// traced puts a request into the trace of whoever sent it, and into a span of
// its own if its route has one.
func (s *Server) traced(routes map[string]bool) gin.HandlerFunc {
	return func(c *gin.Context) {
		r, route := c.Request, c.FullPath()
		ctx, inTrace := tracing.FromRequest(r.Context(), r.Header)
		if !s.tracer.On() || !routes[route] {
			if inTrace {
				c.Request = r.WithContext(ctx)
			}
			c.Next()
			return
		}
		ctx, span := s.tracer.Start(ctx, trace.SpanKindServer, r.Method, route)
		defer span.End()
		c.Request = r.WithContext(ctx)
		c.Next()
		status := c.Writer.Status()
		span.SetAttributes(tracing.HTTPMethod.String(r.Method), tracing.HTTPRoute.String(route), tracing.HTTPStatus.Int(status))
		if status >= http.StatusInternalServerError {
			span.SetStatus(codes.Error, "")
		}
	}
}

// recovered answers for a handler that panics. Methods have their own.
func (s *Server) recovered(c *gin.Context) {
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		if err, ok := p.(error); ok && errors.Is(err, http.ErrAbortHandler) {
			panic(p)
		}
		s.log.ErrorContext(c.Request.Context(), "panic in a handler", "route", c.FullPath(), "panic", p, "stack", string(debug.Stack()))
		if !c.Writer.Written() {
			// It may have happened: SDKs that repeat by themselves must not.
			c.Header("X-Should-Retry", "false")
			writeJSON(c, http.StatusInternalServerError, agentexProblem{Message: "Internal Server Error", Code: http.StatusInternalServerError})
		}
		c.Abort()
	}()
	c.Next()
}

// httpMetrics count requests by route, never by who asks or for what.
type httpMetrics struct {
	registry *prometheus.Registry
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
}

func newHTTPMetrics() *httpMetrics {
	m := &httpMetrics{
		registry: prometheus.NewRegistry(),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_http_requests_total", Help: "HTTP requests that were answered.",
		}, []string{"route", "method", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "weir_http_request_seconds", Help: "Time to answer, waits for turns included.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 60},
		}, []string{"route"}),
	}
	m.registry.MustRegister(m.requests, m.seconds)
	return m
}

func (m *httpMetrics) measure(c *gin.Context) {
	began := time.Now()
	c.Next()
	path, method := c.FullPath(), c.Request.Method
	if path == "" { // whatever somebody asked for
		path, method = "unknown", "any"
	}
	m.requests.WithLabelValues(path, method, strconv.Itoa(c.Writer.Status())).Inc()
	m.seconds.WithLabelValues(path).Observe(time.Since(began).Seconds())
}

func (s *Server) metricsHandler() gin.HandlerFunc {
	h := promhttp.HandlerFor(prometheus.Gatherers{s.config.Metrics, s.http.registry}, promhttp.HandlerOpts{
		ErrorHandling: promhttp.ContinueOnError, ErrorLog: slogPrinter{s},
	})
	return gin.WrapH(h)
}

type slogPrinter struct{ *Server }

func (p slogPrinter) Println(v ...any) { p.log.Warn("metrics", "error", v) }
