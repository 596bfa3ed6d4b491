package load

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Result is what a load has measured. Its JSON is stable: members are added, not
// changed.
type Result struct {
	URL   string `json:"url"`
	Mode  Mode   `json:"mode"`
	Agent string `json:"agent,omitempty"`
	// Loop is "open" or "closed".
	Loop string `json:"loop"`
	// Spacing is that of an open loop.
	Spacing Spacing `json:"spacing,omitempty"`
	// Level is the rate in turns per second, or the number of users: at the
	// points of the ramp, or at 0 for one that stays.
	Level     []Level `json:"level"`
	StartedAt string  `json:"startedAt"` // RFC 3339, the begin of the window
	WarmupMs  float64 `json:"warmupMs"`
	// WindowMs is how long turns were due after the warm-up.
	WindowMs float64 `json:"windowMs"`
	// Interrupted says that it ended before its time.
	Interrupted bool `json:"interrupted"`
	// WarmupFailed is how many turns of the warm-up failed.
	WarmupFailed int64 `json:"warmupFailed"`
	// LatenessMs is how late turns of the open loop were sent: above what the
	// latencies are to be precise to, the generator was too slow.
	LatenessMs *Latency `json:"latenessMs,omitempty"`

	Total Stats `json:"total"`
	// Tenants are in the order of the Config.
	Tenants []TenantStats `json:"tenants"`
}

// Level is a point of a ramp.
type Level struct {
	AtMs  float64 `json:"atMs"`
	Level float64 `json:"level"`
}

// TenantStats are those of one tenant.
type TenantStats struct {
	Name   string  `json:"name"`
	Weight float64 `json:"weight"`
	Stats
}

// Stats count turns. Sent are OK, Rejected, Failed or Abandoned.
type Stats struct {
	Sent int64 `json:"sent"`
	OK   int64 `json:"ok"`
	// Rejected turns were refused for now: 429, 503 and what says that it is
	// retryable.
	Rejected int64 `json:"rejected"`
	Failed   int64 `json:"failed"`
	// Abandoned turns were under way when the load was cut off.
	Abandoned int64 `json:"abandoned"`
	// Unsent turns were due, but found MaxInFlight under way.
	Unsent int64 `json:"unsent"`
	// SentPerSecond and OKPerSecond are rates over the window.
	SentPerSecond float64 `json:"sentPerSecond"`
	OKPerSecond   float64 `json:"okPerSecond"`
	// LatencyMs has those of "accept", "queued", "running" and "total" that the
	// mode measures, of turns that were answered, and of "rejected".
	LatencyMs map[string]*Latency `json:"latencyMs"`
	// Errors are those of rejected and failed turns, the most frequent first;
	// never nil.
	Errors []Error `json:"errors"`
}

// Latency is a distribution, in milliseconds.
type Latency struct {
	Count int64   `json:"count"`
	Mean  float64 `json:"mean"`
	Min   float64 `json:"min"`
	P50   float64 `json:"p50"`
	P90   float64 `json:"p90"`
	P99   float64 `json:"p99"`
	P999  float64 `json:"p999"`
	Max   float64 `json:"max"`
}

// Error counts the turns that ended for one reason.
type Error struct {
	// Code is the code of a JSON-RPC error, http_STATUS of an answer that is
	// none, run_STATE of a run that ended so (Split), or "timeout", "connect" or
	// "network".
	Code     string `json:"code"`
	Rejected bool   `json:"rejected"`
	Count    int64  `json:"count"`
	Message  string `json:"message"` // of the first one
}

// Progress is what happened since the Progress before.
type Progress struct {
	// Elapsed is the time since the begin of the window, negative in the warm-up.
	Elapsed time.Duration
	// Draining says that all is sent, and answers are waited for.
	Draining bool
	InFlight int64
	// Interval is how long it is since the Progress before, or the begin.
	Interval                           time.Duration
	Sent, OK, Rejected, Failed, Unsent int64
	P50, P99, Max                      time.Duration // of what was OK
}

// Histograms have 3 significant digits from 1 µs to maxLatency.
const maxLatency = 2 * time.Hour

// histogram is a distribution of durations. Its extremes are exact.
type histogram struct {
	h        *hdrhistogram.Histogram
	min, max time.Duration
	sum      time.Duration
}

func newHistogram() *histogram {
	return &histogram{h: hdrhistogram.New(1, maxLatency.Microseconds(), 3)}
}

func (h *histogram) record(d time.Duration) {
	n := h.h.TotalCount()
	_ = h.h.RecordValue(min(max(d, 0), maxLatency).Microseconds()) // it is in range
	if h.min = min(h.min, d); n == 0 {
		h.min = d
	}
	h.max = max(h.max, d)
	h.sum += d
}

func (h *histogram) merge(from *histogram) {
	if from.h.TotalCount() == 0 {
		return
	}
	if h.min = min(h.min, from.min); h.h.TotalCount() == 0 {
		h.min = from.min
	}
	h.max = max(h.max, from.max)
	h.sum += from.sum
	h.h.Merge(from.h)
}

func (h *histogram) reset() {
	h.h.Reset()
	h.min, h.max, h.sum = 0, 0, 0
}

// quantile is that of 0 to 100, and at most the maximum, which its bucket may
// exceed.
func (h *histogram) quantile(q float64) time.Duration {
	return min(time.Duration(h.h.ValueAtQuantile(q))*time.Microsecond, h.max)
}

// latency is nil when nothing was recorded.
func (h *histogram) latency() *Latency {
	n := h.h.TotalCount()
	if n == 0 {
		return nil
	}
	return &Latency{
		Count: n, Mean: ms(h.sum / time.Duration(n)), Min: ms(h.min), P50: ms(h.quantile(50)), P90: ms(h.quantile(90)),
		P99: ms(h.quantile(99)), P999: ms(h.quantile(99.9)), Max: ms(h.max),
	}
}

// ms is in milliseconds, to the microsecond.
func ms(d time.Duration) float64 { return math.Round(d.Seconds()*1e6) / 1e3 }

// tally counts the turns of one tenant.
type tally struct {
	Stats
	inWindow int64 // OK answers within the window
	phases   [phases]*histogram
	errors   map[errorKey]*Error
}

type errorKey struct {
	code     string
	rejected bool
}

func newTally() *tally { return &tally{errors: map[errorKey]*Error{}} }

func (t *tally) record(o *outcome) {
	t.Sent++
	switch o.verdict {
	case verdictOK:
		t.OK++
	case verdictRejected:
		t.Rejected++
	case verdictFailed:
		t.Failed++
	case verdictAbandoned:
		t.Abandoned++
		return
	}
	if o.verdict != verdictOK {
		key := errorKey{o.code, o.verdict == verdictRejected}
		e := t.errors[key]
		if e == nil {
			e = &Error{Code: o.code, Rejected: key.rejected, Message: o.message}
			t.errors[key] = e
		}
		e.Count++
	}
	for p := range phases {
		if !o.has[p] || o.verdict == verdictFailed || o.verdict == verdictRejected && p != phaseRejected {
			continue
		}
		if t.phases[p] == nil {
			t.phases[p] = newHistogram()
		}
		t.phases[p].record(o.took[p])
	}
}

func (t *tally) merge(from *tally) {
	t.Sent += from.Sent
	t.OK += from.OK
	t.Rejected += from.Rejected
	t.Failed += from.Failed
	t.Abandoned += from.Abandoned
	t.Unsent += from.Unsent
	t.inWindow += from.inWindow
	for p, h := range from.phases {
		if h == nil {
			continue
		}
		if t.phases[p] == nil {
			t.phases[p] = newHistogram()
		}
		t.phases[p].merge(h)
	}
	for key, e := range from.errors {
		if t.errors[key] == nil {
			t.errors[key] = &Error{Code: e.Code, Rejected: e.Rejected, Message: e.Message}
		}
		t.errors[key].Count += e.Count
	}
}

func (t *tally) stats(window time.Duration) Stats {
	s := t.Stats
	if window > 0 {
		s.SentPerSecond = math.Round(1000*float64(s.Sent)/window.Seconds()) / 1000
		s.OKPerSecond = math.Round(1000*float64(t.inWindow)/window.Seconds()) / 1000
	}
	s.LatencyMs = map[string]*Latency{}
	for p, h := range t.phases {
		if h != nil {
			s.LatencyMs[Phases[p]] = h.latency()
		}
	}
	s.Errors = []Error{}
	for _, e := range slices.SortedFunc(maps.Values(t.errors), func(a, b *Error) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Code, b.Code))
	}) {
		s.Errors = append(s.Errors, *e)
	}
	return s
}

// recorder collects what becomes of turns. One lock does: what it guards takes
// a hundred nanoseconds.
type recorder struct {
	mu       sync.Mutex
	warmup   time.Duration
	end      time.Duration // of the window
	last     time.Duration // latest answer
	tenants  []*tally
	lateness *histogram
	warmFail int64
	interval tally // since the latest progress; unlike the others with the warm-up
	took     *histogram
}

func newRecorder(tenants int, warmup, end time.Duration) *recorder {
	r := &recorder{warmup: warmup, end: end, lateness: newHistogram(), took: newHistogram()}
	for range tenants {
		r.tenants = append(r.tenants, newTally())
	}
	return r
}

// turn is one that is due.
type turn struct {
	due    time.Duration // since the load began
	tenant int
	n      uint64 // its number among all
}

// record takes the outcome of a turn that was sent and answered at these times.
func (r *recorder) record(t turn, sent, now time.Duration, o *outcome) {
	r.mu.Lock()
	defer r.mu.Unlock()
	tenant := r.tenants[t.tenant]
	switch o.verdict {
	case verdictOK:
		r.interval.OK++
		if now >= r.warmup && now < r.end {
			tenant.inWindow++
		}
		p := phaseTotal
		if !o.has[p] {
			p = phaseAccept
		}
		r.took.record(o.took[p])
	case verdictRejected:
		r.interval.Rejected++
	case verdictFailed:
		r.interval.Failed++
	}
	if o.verdict != verdictAbandoned {
		r.last = max(r.last, now)
	}
	if t.due < r.warmup {
		if o.verdict == verdictFailed {
			r.warmFail++
		}
		return
	}
	tenant.record(o)
	r.lateness.record(max(0, sent-t.due))
}

// began counts a turn that is sent, for the progress.
func (r *recorder) began() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.interval.Sent++
}

// unsent counts a turn that found no place.
func (r *recorder) unsent(t turn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.interval.Unsent++
	if t.due >= r.warmup {
		r.tenants[t.tenant].Unsent++
	}
}

// cut ends the window early.
func (r *recorder) cut(now time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.end = min(r.end, now)
}

// limited says that the number of turns has ended the load: the window ends with
// the last answer.
func (r *recorder) limited() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.end = forever
}

// progress returns what happened since it was called before.
func (r *recorder) progress() Progress {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := &r.interval
	p := Progress{
		Sent: i.Sent, OK: i.OK, Rejected: i.Rejected, Failed: i.Failed, Unsent: i.Unsent,
		P50: r.took.quantile(50), P99: r.took.quantile(99), Max: r.took.max,
	}
	r.interval = tally{}
	r.took.reset()
	return p
}

// result is what c has measured.
func (r *recorder) result(c *Config, began time.Time, interrupted bool) *Result {
	r.mu.Lock()
	defer r.mu.Unlock()
	end := r.end
	if end == forever {
		end = r.last
	}
	window := max(0, end-r.warmup)
	out := &Result{
		URL: c.URL, Mode: c.Mode, Agent: c.Agent, Loop: "closed", StartedAt: began.Add(r.warmup).UTC().Format(time.RFC3339Nano),
		WarmupMs: ms(c.Warmup), WindowMs: ms(window), Interrupted: interrupted, WarmupFailed: r.warmFail,
	}
	for _, p := range c.level() {
		out.Level = append(out.Level, Level{ms(p.At), p.Level})
	}
	if c.open() {
		out.Loop, out.Spacing, out.LatenessMs = "open", c.Spacing, r.lateness.latency()
	}
	all := newTally()
	for i, t := range r.tenants {
		all.merge(t)
		out.Tenants = append(out.Tenants, TenantStats{c.Tenants[i].Name, c.Tenants[i].Weight, t.stats(window)})
	}
	out.Total = all.stats(window)
	return out
}
