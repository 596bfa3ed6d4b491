package load

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const accepted = `{"jsonrpc":"2.0","id":1,"result":{"phase":"thinking","status":"accepted","sessionId":"s","turnId":"turn_1","runId":"run_1","seq":1}}`

// call is a request as the API got it.
type call struct {
	token  string
	method string
	params struct {
		SessionID, AgentID, UserID, Message, RunID string
		Content                                    struct{ Text string }
		TimeoutMs, WaitMs                          int64
	}
}

// fakeAPI answers calls, and remembers them.
type fakeAPI struct {
	*httptest.Server
	mu          sync.Mutex
	calls       []call
	now, most   int // calls at once
	connections int
}

// newAPI has each call answered by answer, which may write the answer itself and
// return "".
func newAPI(t testing.TB, answer func(w http.ResponseWriter, c call) string) *fakeAPI {
	a := &fakeAPI{}
	a.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var c call
		body, err := io.ReadAll(r.Body)
		message := struct {
			JSONRPC, Method string
			ID              int
			Params          any
		}{Params: &c.params}
		if err == nil {
			err = json.Unmarshal(body, &message)
		}
		if err != nil || message.JSONRPC != "2.0" || message.ID != 1 || r.Method != http.MethodPost || r.URL.Path != "/rpc" {
			t.Errorf("not a request: %v %s %s %s", err, r.Method, r.URL, body)
		}
		c.method, c.token = message.Method, strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
		a.mu.Lock()
		a.calls = append(a.calls, c)
		a.now++
		a.most = max(a.most, a.now)
		a.mu.Unlock()
		defer func() {
			a.mu.Lock()
			a.now--
			a.mu.Unlock()
		}()
		if text := answer(w, c); text != "" {
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, text)
		}
	}))
	a.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			a.mu.Lock()
			a.connections++
			a.mu.Unlock()
		}
	}
	a.Start()
	t.Cleanup(a.Close)
	return a
}

func ok(http.ResponseWriter, call) string {
	return `{"jsonrpc":"2.0","id":1,"result":{"response":"an \"error\": none","runId":"run_1"}}`
}

func (a *fakeAPI) seen() []call {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.calls)
}

// config is a small load on a.
func (a *fakeAPI) config() Config {
	return Config{URL: a.URL, Tenants: []Tenant{{Name: "x", Token: "wt_x", Weight: 1}}, Messages: []string{"hi"}, Users: Constant(4), Turns: 40}
}

func run1(t *testing.T, c Config) *Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	r, err := Run(ctx, nil, c)
	require.NoError(t, err)
	require.NoError(t, ctx.Err())
	return r
}

func TestClosedLoop(t *testing.T) {
	t.Parallel()
	a := newAPI(t, ok)
	c := a.config()
	c.Agent, c.User, c.Timeout = "writer", "ann", 5*time.Second
	c.Messages = []string{"one", "a \"second\"\nline <&>"}
	r := run1(t, c)
	require.Equal(t, "closed", r.Loop)
	require.EqualValues(t, 40, r.Total.Sent)
	require.EqualValues(t, 40, r.Total.OK)
	require.Empty(t, r.Total.Errors)
	require.EqualValues(t, 40, r.Total.LatencyMs["total"].Count)
	require.Positive(t, r.Total.OKPerSecond)
	require.Nil(t, r.LatenessMs)
	require.LessOrEqual(t, a.most, 4)
	require.LessOrEqual(t, a.connections, 4, "connections are kept")
	messages := map[string]int{}
	for _, c := range a.seen() {
		require.Equal(t, "agent.execute", c.method)
		require.Equal(t, "wt_x", c.token)
		require.Equal(t, "writer", c.params.AgentID)
		require.Equal(t, "ann", c.params.UserID)
		require.Empty(t, c.params.SessionID, "each turn has a conversation of its own")
		require.EqualValues(t, 5000, c.params.TimeoutMs)
		messages[c.params.Message]++
	}
	require.Equal(t, map[string]int{c.Messages[0]: 20, c.Messages[1]: 20}, messages)
}

func TestSessions(t *testing.T) {
	t.Parallel()
	a := newAPI(t, ok)
	for _, c := range []struct {
		mode     Mode
		sessions int
		want     int // different sessions of 40 turns; those of no name count 1
	}{{Execute, 0, 1}, {Execute, 8, 8}, {Accept, 8, 8}, {Accept, 0, 40}} {
		before := len(a.seen())
		config := a.config()
		config.Mode, config.Sessions = c.mode, c.sessions
		run1(t, config)
		sessions := map[string]bool{}
		for _, c := range a.seen()[before:] {
			sessions[c.params.SessionID] = true
		}
		require.Len(t, sessions, c.want, "%s %d", c.mode, c.sessions)
	}
}

func TestClosedLoopFollowsItsRamp(t *testing.T) {
	t.Parallel()
	// Each call is answered once three are there, which one user alone would
	// never get.
	three := make(chan struct{})
	var a *fakeAPI
	a = newAPI(t, func(w http.ResponseWriter, c call) string {
		a.mu.Lock()
		if a.now == 3 {
			select {
			case <-three:
			default:
				close(three)
			}
		}
		a.mu.Unlock()
		<-three
		return ok(w, c)
	})
	c := a.config()
	c.Users, c.Turns = Ramp{{0, 1}, {200 * time.Millisecond, 3}}, 30
	r := run1(t, c)
	require.EqualValues(t, 30, r.Total.OK)
	require.Equal(t, 3, a.most)
}

func TestTenants(t *testing.T) {
	t.Parallel()
	a := newAPI(t, func(w http.ResponseWriter, c call) string {
		if c.token == "wt_y" {
			return `{"jsonrpc":"2.0","id":1,"error":{"code":-32010,"message":"busy","data":{"queued":20,"retryable":true}}}`
		}
		return ok(w, c)
	})
	c := a.config()
	c.Tenants = append(c.Tenants, Tenant{Name: "y", Token: "wt_y", Weight: 3})
	r := run1(t, c)
	require.EqualValues(t, 10, r.Total.OK)
	require.EqualValues(t, 30, r.Total.Rejected)
	require.Zero(t, r.Total.Failed)
	require.EqualValues(t, 10, r.Tenants[0].OK)
	require.EqualValues(t, 30, r.Tenants[1].Rejected)
	require.Nil(t, r.Tenants[1].LatencyMs["total"])
	require.EqualValues(t, 30, r.Tenants[1].LatencyMs["rejected"].Count)
	require.Equal(t, []Error{{Code: "-32010", Rejected: true, Count: 30, Message: "busy"}}, r.Tenants[1].Errors)
	tokens := map[string]int{}
	for _, c := range a.seen() {
		tokens[c.token]++
	}
	require.Equal(t, map[string]int{"wt_x": 10, "wt_y": 30}, tokens)
}

func TestOpenLoop(t *testing.T) {
	t.Parallel()
	for _, spacing := range []Spacing{Poisson, Even} {
		a := newAPI(t, ok)
		c := a.config()
		c.Users, c.Rate, c.Spacing, c.Mode = nil, Constant(400), spacing, Accept
		c.Turns, c.Warmup, c.Duration = 0, 100*time.Millisecond, 500*time.Millisecond
		r := run1(t, c)
		require.Equal(t, "open", r.Loop)
		require.InDelta(t, 500, r.WindowMs, 0)
		if spacing == Even {
			require.EqualValues(t, 200, r.Total.Sent+r.Total.Unsent)
			require.Len(t, a.seen(), 240, "with the warm-up")
		}
		require.Equal(t, r.Total.Sent, r.Total.OK)
		require.EqualValues(t, r.Total.Sent, r.Total.LatencyMs["accept"].Count)
		require.EqualValues(t, r.Total.Sent, r.LatenessMs.Count)
	}
}

// TestOpenLoopDoesNotWait has a server that answers nobody until more turns were
// due than may be under way.
func TestOpenLoopDoesNotWait(t *testing.T) {
	t.Parallel()
	goOn := make(chan struct{})
	a := newAPI(t, func(w http.ResponseWriter, c call) string {
		<-goOn
		return ok(w, c)
	})
	c := a.config()
	c.Users, c.Rate, c.Spacing, c.Turns, c.MaxInFlight = nil, Constant(500), Even, 200, 5
	c.ProgressEvery = 5 * time.Millisecond
	var once sync.Once
	total := int64(0)
	c.OnProgress = func(p Progress) {
		if total += p.Unsent; total >= 20 {
			once.Do(func() { close(goOn) })
		}
	}
	r := run1(t, c)
	require.EqualValues(t, 200, r.Total.Sent+r.Total.Unsent)
	require.GreaterOrEqual(t, r.Total.Unsent, int64(20))
	require.Equal(t, r.Total.Sent, r.Total.OK)
	require.Equal(t, 5, a.most)
}

// TestLatencyCountsFromWhenTheTurnWasDue sends a turn an hour late.
func TestLatencyCountsFromWhenTheTurnWasDue(t *testing.T) {
	t.Parallel()
	a := newAPI(t, ok)
	c := a.config()
	c.Rate, c.Users = Constant(1), nil
	require.NoError(t, c.Check())
	to, err := newTarget(c.URL)
	require.NoError(t, err)
	r := &run{
		Config: c, to: to, began: time.Now().Add(-time.Hour), end: forever, recorder: newRecorder(1, 0, forever),
		requests: [][]request{{turnRequest(to, &c, "", "00000000", "hi")}},
	}
	s := r.newSender()
	defer s.conn.close()
	s.turn(t.Context(), turn{due: 0})
	result := r.recorder.result(&c, r.began, false)
	require.GreaterOrEqual(t, result.Total.LatencyMs["total"].P50, ms(time.Hour))
	require.GreaterOrEqual(t, result.LatenessMs.P50, ms(time.Hour))
}

func TestSplit(t *testing.T) {
	t.Parallel()
	state := func(state, more string) string {
		return `{"jsonrpc":"2.0","id":1,"result":{"runId":"run_1","state":"` + state + `","createdAt":"2026-01-01T00:00:00.000Z"` + more + `}}`
	}
	looks := 0
	a := newAPI(t, func(_ http.ResponseWriter, c call) string {
		if c.method == "agent.request" {
			return accepted
		}
		if looks++; looks == 1 {
			return state("running", "")
		}
		if looks == 2 {
			return state("completed", `,"startedAt":"2026-01-01T00:00:00.020Z","finishedAt":"2026-01-01T00:00:00.050Z"`)
		}
		return state("poisoned", `,"error":"internal: worn out"`)
	})
	c := a.config()
	c.Mode, c.Users, c.Turns = Split, Constant(1), 2
	r := run1(t, c)
	require.EqualValues(t, 1, r.Total.OK)
	require.EqualValues(t, 1, r.Total.LatencyMs["accept"].Count)
	require.InDelta(t, 20, r.Total.LatencyMs["queued"].P50, 0.1)
	require.InDelta(t, 30, r.Total.LatencyMs["running"].P50, 0.1)
	require.EqualValues(t, 1, r.Total.LatencyMs["total"].Count)
	require.Equal(t, []Error{{Code: "run_poisoned", Count: 1, Message: "internal: worn out"}}, r.Total.Errors)
	calls := a.seen()
	require.Equal(t, "agent.request", calls[0].method)
	require.Equal(t, "hi", calls[0].params.Content.Text)
	require.Equal(t, "run.get", calls[1].method)
	require.Equal(t, "run_1", calls[1].params.RunID)
	require.Positive(t, calls[1].params.WaitMs)
}

func TestErrors(t *testing.T) {
	t.Parallel()
	text := func(status int, text string) func(http.ResponseWriter, call) string {
		return func(w http.ResponseWriter, _ call) string {
			w.WriteHeader(status)
			return text
		}
	}
	rpc := func(code int, data string) string {
		return fmt.Sprintf(`{"jsonrpc":"2.0","id":1,"error":{"code":%d,"message":"no","data":%s}}`, code, data)
	}
	for name, c := range map[string]struct {
		answer   func(http.ResponseWriter, call) string
		code     string
		rejected bool
	}{
		"Unavailable":  {text(503, rpc(-32014, `{}`)), "-32014", true},
		"RateLimited":  {text(429, rpc(-32000, `null`)), "-32000", true},
		"Busy":         {text(200, rpc(-32010, `{"retryable":true}`)), "-32010", true},
		"TurnFailed":   {text(200, rpc(-32015, `{"retryable":true}`)), "-32015", false}, // it was accepted
		"StillRunning": {text(200, rpc(-32016, `{}`)), "-32016", false},
		"Internal":     {text(200, rpc(-32603, `{"errorId":"1"}`)), "-32603", false},
		"Gateway":      {text(502, `<html>bad gateway</html>`), "http_502", false},
		"Overloaded":   {text(503, `overloaded`), "http_503", true},
		"Nothing":      {text(200, `{}`), "http_200", false},
		"CutOff":       {func(http.ResponseWriter, call) string { panic(http.ErrAbortHandler) }, "network", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newAPI(t, c.answer)
			config := a.config()
			config.Turns = 8
			r := run1(t, config)
			require.Len(t, r.Total.Errors, 1)
			require.Equal(t, Error{Code: c.code, Rejected: c.rejected, Count: 8, Message: r.Total.Errors[0].Message}, r.Total.Errors[0])
			require.NotEmpty(t, r.Total.Errors[0].Message)
			require.Zero(t, r.Total.OK)
			require.Equal(t, c.rejected, r.Total.Rejected == 8)
			require.Equal(t, !c.rejected, r.Total.Failed == 8)
		})
	}
	t.Run("NobodyListens", func(t *testing.T) {
		t.Parallel()
		a := newAPI(t, ok)
		c := a.config()
		a.Close()
		c.Turns = 4
		r := run1(t, c)
		require.Equal(t, "connect", r.Total.Errors[0].Code)
		require.EqualValues(t, 4, r.Total.Failed)
	})
	t.Run("NoAnswerInTime", func(t *testing.T) {
		t.Parallel()
		over := make(chan struct{})
		a := newAPI(t, func(http.ResponseWriter, call) string { <-over; return accepted })
		t.Cleanup(func() { close(over) })
		c := a.config()
		c.Turns, c.Timeout, c.Mode = 4, time.Second, Accept
		r := run1(t, c)
		require.Equal(t, []Error{{Code: "timeout", Count: 4, Message: "no answer in time"}}, r.Total.Errors)
	})
	t.Run("RunDoesNotEndInTime", func(t *testing.T) {
		t.Parallel()
		a := newAPI(t, func(_ http.ResponseWriter, c call) string {
			if c.method == "agent.request" {
				return accepted
			}
			return `{"jsonrpc":"2.0","id":1,"result":{"state":"running"}}`
		})
		c := a.config()
		c.Turns, c.Timeout, c.Mode = 4, 50*time.Millisecond, Split
		require.Equal(t, []Error{{Code: "timeout", Count: 4, Message: "the run has not ended in time"}}, run1(t, c).Total.Errors)
	})
}

func TestAnswersInOtherForms(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]func(http.ResponseWriter, call) string{
		"Chunked": func(w http.ResponseWriter, c call) string {
			_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":1,`)
			_ = http.NewResponseController(w).Flush()
			return `"result":{"response":"` + strings.Repeat("x", 100_000) + `"}}`
		},
		"OtherOrder":  func(http.ResponseWriter, call) string { return ` { "id": 1, "result": {"a": 1}, "jsonrpc": "2.0" } ` },
		"Processing":  func(w http.ResponseWriter, c call) string { w.WriteHeader(http.StatusEarlyHints); return ok(w, c) },
		"ClosesAfter": func(w http.ResponseWriter, c call) string { w.Header().Set("Connection", "close"); return ok(w, c) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newAPI(t, answer)
			r := run1(t, a.config())
			require.EqualValues(t, 40, r.Total.OK, r.Total.Errors)
			if name == "ClosesAfter" {
				require.Equal(t, 40, a.connections)
			}
		})
	}
}

func TestStop(t *testing.T) {
	t.Parallel()
	loops := map[string]func(*Config){
		"Closed": func(c *Config) {},
		"Open":   func(c *Config) { c.Users, c.Rate, c.MaxInFlight = nil, Constant(1000), 4 },
	}
	for name, loop := range loops {
		t.Run(name+"WaitsForWhatIsUnderWay", func(t *testing.T) {
			t.Parallel()
			four, goOn := make(chan struct{}, 1000), make(chan struct{})
			a := newAPI(t, func(w http.ResponseWriter, c call) string {
				four <- struct{}{}
				<-goOn
				return ok(w, c)
			})
			c := a.config()
			c.Turns, c.Duration = 0, time.Hour
			loop(&c)
			draining := make(chan struct{})
			var once sync.Once
			c.ProgressEvery = time.Millisecond
			c.OnProgress = func(p Progress) {
				if p.Draining && p.InFlight == 4 {
					once.Do(func() { close(draining) })
				}
			}
			stop := make(chan struct{})
			go func() {
				for range 4 {
					<-four
				}
				close(stop)
				<-draining
				close(goOn)
			}()
			r, err := Run(t.Context(), stop, c)
			require.NoError(t, err)
			require.True(t, r.Interrupted)
			require.EqualValues(t, 4, r.Total.OK)
			require.EqualValues(t, 4, r.Total.Sent)
			require.Zero(t, r.Total.OKPerSecond, "they ended behind the window")
		})
		t.Run(name+"CanBeCutOff", func(t *testing.T) {
			t.Parallel()
			four, over := make(chan struct{}, 1000), make(chan struct{})
			a := newAPI(t, func(w http.ResponseWriter, c call) string {
				four <- struct{}{}
				<-over
				return ok(w, c)
			})
			t.Cleanup(func() { close(over) })
			c := a.config()
			c.Turns, c.Duration = 0, time.Hour
			loop(&c)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			go func() {
				for range 4 {
					<-four
				}
				cancel()
			}()
			r, err := Run(ctx, nil, c)
			require.NoError(t, err)
			require.True(t, r.Interrupted)
			require.EqualValues(t, 4, r.Total.Abandoned)
			require.Zero(t, r.Total.Failed)
		})
	}
}

func TestWhatCannotBeDoneIsRefused(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*Config){
		"NoLoop":       func(c *Config) { c.Users = nil },
		"TwoLoops":     func(c *Config) { c.Rate = Constant(1) },
		"Nothing":      func(c *Config) { c.Users = Constant(0) },
		"NoEnd":        func(c *Config) { c.Turns = 0 },
		"TooMany":      func(c *Config) { c.Users = Constant(MaxUsers + 1) },
		"TooFast":      func(c *Config) { c.Users, c.Rate = nil, Constant(MaxLevel+1) },
		"Negative":     func(c *Config) { c.Warmup = -1 },
		"TooLong":      func(c *Config) { c.Timeout = 2 * time.Hour },
		"Spacing":      func(c *Config) { c.Spacing = "odd" },
		"Mode":         func(c *Config) { c.Mode = "guess" },
		"NoTenant":     func(c *Config) { c.Tenants = nil },
		"Twice":        func(c *Config) { c.Tenants = append(c.Tenants, c.Tenants[0]) },
		"NoWeight":     func(c *Config) { c.Tenants = []Tenant{{Name: "x"}} },
		"HeaderInside": func(c *Config) { c.Tenants = []Tenant{{Name: "x", Token: "a\r\nb", Weight: 1}} },
		"NoMessage":    func(c *Config) { c.Messages = []string{""} },
		"LongMessage":  func(c *Config) { c.Messages = []string{strings.Repeat("x", maxMessage+1)} },
		"URL":          func(c *Config) { c.URL = "ftp://host" },
	} {
		c := (&fakeAPI{Server: &httptest.Server{URL: "http://127.0.0.1:1"}}).config()
		change(&c)
		_, err := Run(t.Context(), nil, c)
		require.Error(t, err, name)
	}
}

func TestTargets(t *testing.T) {
	t.Parallel()
	want := map[string]target{
		"http://h":              {host: "h", addr: "h:80", path: "/rpc"},
		"http://h:5003":         {host: "h:5003", addr: "h:5003", path: "/rpc"},
		"http://[::1]":          {host: "[::1]", addr: "[::1]:80", path: "/rpc"},
		"https://h.example/a b": {host: "h.example", addr: "h.example:443", path: "/a%20b/rpc"},
	}
	for _, url := range slices.Sorted(maps.Keys(want)) {
		to, err := newTarget(url)
		require.NoError(t, err, url)
		require.Equal(t, strings.HasPrefix(url, "https"), to.tls != nil)
		to.tls = nil
		require.Equal(t, want[url], *to)
	}
}

func TestTLS(t *testing.T) {
	t.Parallel()
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, accepted) }))
	s.Config.ErrorLog = log.New(io.Discard, "", 0) // of the handshake that is to fail
	s.StartTLS()
	t.Cleanup(s.Close)
	to, err := newTarget(s.URL)
	require.NoError(t, err)
	c := conn{to: to}
	deadline := time.Now().Add(time.Minute)
	request := turnRequest(to, &Config{Mode: Accept}, "", "00000000", "hi").text
	_, err = c.do(t.Context(), request, deadline)
	require.ErrorContains(t, err, "certificate", "nobody vouches for a test's server")
	to.tls.RootCAs = s.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
	for range 2 {
		status, err := c.do(t.Context(), request, deadline)
		require.NoError(t, err)
		require.Equal(t, 200, status)
		require.Equal(t, accepted, string(c.body))
	}
	c.close()
}

// BenchmarkTurn is the generator's own cost of a turn; the server's, which
// answers with one constant, is in it.
func BenchmarkTurn(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	defer l.Close()
	c := Config{URL: "http://" + l.Addr().String(), Mode: Accept, Tenants: []Tenant{{Name: "x", Token: "wt_x", Weight: 1}}, Messages: []string{"hi"}, Users: Constant(1), Turns: 1}
	require.NoError(b, c.Check())
	to, err := newTarget(c.URL)
	require.NoError(b, err)
	made := turnRequest(to, &c, "wt_x", "00000000", "hi")
	go func() {
		peer, err := l.Accept()
		if err != nil {
			return
		}
		defer peer.Close()
		answer := fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Content-Type-Options: nosniff\r\nContent-Length: %d\r\n\r\n%s", len(accepted), accepted)
		buf := make([]byte, len(made.text))
		for {
			if _, err := io.ReadFull(peer, buf); err != nil {
				return
			}
			if _, err := peer.Write(answer); err != nil {
				return
			}
		}
	}()
	r := &run{
		Config: c, to: to, began: time.Now(), end: forever, recorder: newRecorder(1, 0, forever),
		requests: [][]request{{made}}, sequence: make([]atomic.Uint64, 1),
	}
	s := r.newSender()
	defer s.conn.close()
	b.ReportAllocs()
	for b.Loop() {
		if o := s.turn(b.Context(), turn{due: r.now()}); o.verdict != verdictOK {
			b.Fatal(o.message)
		}
	}
}
