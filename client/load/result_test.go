package load

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestHistogram(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(5, 6))
	all, parts := newHistogram(), []*histogram{newHistogram(), newHistogram(), newHistogram()}
	var took []time.Duration
	for i := range 50_000 {
		d := time.Duration(random.ExpFloat64() * float64(20*time.Millisecond))
		took = append(took, d)
		all.record(d)
		parts[i%2].record(d) // and the third stays empty
	}
	slices.Sort(took)
	for _, q := range []float64{50, 90, 99, 99.9} {
		exact := took[int(q/100*float64(len(took)))]
		require.InEpsilon(t, exact.Seconds(), all.quantile(q).Seconds(), 0.002, q)
	}
	require.Equal(t, took[0], all.min)
	require.Equal(t, took[len(took)-1], all.max)
	merged := newHistogram()
	for _, p := range parts {
		merged.merge(p)
	}
	require.Equal(t, all.latency(), merged.latency())
	require.EqualValues(t, 50_000, merged.latency().Count)

	require.Nil(t, newHistogram().latency())
	one := newHistogram()
	one.record(1234567 * time.Nanosecond)
	require.Equal(t, &Latency{1, 1.235, 1.235, 1.234, 1.234, 1.234, 1.234, 1.235}, one.latency())
	one.record(-time.Second)
	one.record(100 * time.Hour)
	require.InDelta(t, ms(100*time.Hour), one.latency().Max, 0, "the maximum is exact even where the histogram ends")
}

// TestResult is the JSON that others read: its members stay.
func TestResult(t *testing.T) {
	t.Parallel()
	c := Config{
		URL: "http://api", Mode: Split, Agent: "a", Rate: Ramp{{0, 10}, {time.Second, 20}}, Spacing: Even, Warmup: time.Second,
		Tenants: []Tenant{{Name: "x", Weight: 2}, {Name: "y", Weight: 1}},
	}
	r := newRecorder(2, time.Second, 3*time.Second)
	ended := func(phases map[phase]time.Duration) *outcome {
		o := &outcome{}
		for p, d := range phases {
			o.measured(p, d)
		}
		return o
	}
	at := func(ms int) time.Duration { return time.Duration(ms) * time.Millisecond }
	r.record(turn{due: at(500)}, at(500), at(1500), ended(map[phase]time.Duration{phaseTotal: at(1000)})) // of the warm-up, into the window
	r.record(turn{due: at(600)}, at(600), at(700), &outcome{verdict: verdictFailed, code: "timeout"})
	r.record(turn{due: at(1000)}, at(1001), at(1020), ended(map[phase]time.Duration{
		phaseAccept: at(5), phaseQueued: at(6), phaseRunning: at(4), phaseTotal: at(20),
	}))
	r.record(turn{due: at(2900)}, at(2900), at(3100), ended(map[phase]time.Duration{phaseTotal: at(200)})) // ends behind the window
	rejected := ended(map[phase]time.Duration{phaseRejected: at(2)})
	rejected.verdict, rejected.code, rejected.message = verdictRejected, "-32010", "busy"
	r.record(turn{due: at(1100), tenant: 1}, at(1100), at(1102), rejected)
	for range 2 {
		r.record(turn{due: at(1200), tenant: 1}, at(1200), at(1300), &outcome{verdict: verdictFailed, code: "-32015", message: "the turn failed"})
	}
	r.record(turn{due: at(1300), tenant: 1}, at(1300), at(9000), &outcome{verdict: verdictAbandoned})
	r.unsent(turn{due: at(1400), tenant: 1})
	r.unsent(turn{due: at(900), tenant: 1})

	result := r.result(&c, time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), false)
	text, err := json.Marshal(result)
	require.NoError(t, err)
	y := `"sent": 4, "ok": 0, "rejected": 1, "failed": 2, "abandoned": 1, "unsent": 1, "sentPerSecond": 2, "okPerSecond": 0`
	same := func(count int, ms string) string {
		return `{"count": ` + string(rune('0'+count)) + `, "mean": ` + ms + `, "min": ` + ms + `, "p50": ` + ms + `, "p90": ` + ms + `, "p99": ` + ms + `, "p999": ` + ms + `, "max": ` + ms + `}`
	}
	totals := `{"count": 2, "mean": 110, "min": 20, "p50": 20.015, "p90": 200, "p99": 200, "p999": 200, "max": 200}`
	xs := `"accept": ` + same(1, "5") + `, "queued": ` + same(1, "6") + `, "running": ` + same(1, "4") + `, "total": ` + totals
	ys := `"rejected": ` + same(1, "2")
	errors := `[{"code": "-32015", "rejected": false, "count": 2, "message": "the turn failed"}, {"code": "-32010", "rejected": true, "count": 1, "message": "busy"}]`
	require.JSONEq(t, `{
		"url": "http://api", "mode": "split", "agent": "a", "loop": "open", "spacing": "even",
		"level": [{"atMs": 0, "level": 10}, {"atMs": 1000, "level": 20}],
		"startedAt": "2026-01-02T03:04:06Z", "warmupMs": 1000, "windowMs": 2000, "interrupted": false, "warmupFailed": 1,
		"latenessMs": {"count": 6, "mean": 0.167, "min": 0, "p50": 0, "p90": 0, "p99": 1, "p999": 1, "max": 1},
		"total": {"sent": 6, "ok": 2, "rejected": 1, "failed": 2, "abandoned": 1, "unsent": 1, "sentPerSecond": 3, "okPerSecond": 1,
			"latencyMs": {`+xs+`, `+ys+`}, "errors": `+errors+`},
		"tenants": [
			{"name": "x", "weight": 2, "sent": 2, "ok": 2, "rejected": 0, "failed": 0, "abandoned": 0, "unsent": 0, "sentPerSecond": 1, "okPerSecond": 1,
				"latencyMs": {`+xs+`}, "errors": []},
			{"name": "y", "weight": 1, `+y+`, "latencyMs": {`+ys+`}, "errors": `+errors+`}
		]}`, string(text))

	p := r.progress()
	require.Equal(t, Progress{OK: 3, Rejected: 1, Failed: 3, Unsent: 2, P50: p.P50, P99: p.P99, Max: at(1000)}, p)
	require.Equal(t, Progress{}, r.progress(), "each is told once")
}

func TestWindowEndsEarly(t *testing.T) {
	t.Parallel()
	c := Config{Users: Constant(1), Tenants: []Tenant{{Name: "x", Weight: 1}}}
	answer := func(r *recorder, now time.Duration) {
		o := &outcome{}
		o.measured(phaseTotal, time.Millisecond)
		r.record(turn{due: now - time.Millisecond}, now, now, o)
	}
	r := newRecorder(1, 0, 10*time.Second)
	answer(r, time.Second)
	r.cut(2 * time.Second)
	answer(r, 3*time.Second)
	result := r.result(&c, time.Now(), true)
	require.True(t, result.Interrupted)
	require.InDelta(t, 2000, result.WindowMs, 0)
	require.InDelta(t, 0.5, result.Total.OKPerSecond, 0)
	require.EqualValues(t, 2, result.Total.OK, "what was under way counts, but not as throughput")

	r = newRecorder(1, 0, 10*time.Second)
	answer(r, time.Second)
	r.limited()
	answer(r, 4*time.Second)
	result = r.result(&c, time.Now(), false)
	require.InDelta(t, 4000, result.WindowMs, 0, "a number of turns ends with the last answer")
	require.InDelta(t, 0.5, result.Total.OKPerSecond, 0)
}
