package load

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestParseRamp(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]Ramp{
		"0:100":                     {{0, 100}},
		"0:100,30s:500":             {{0, 100}, {30 * time.Second, 500}},
		" 0s:0.5 , 1m30s:2":         {{0, 0.5}, {90 * time.Second, 2}},
		"10s:100,10s:200,500ms:1":   nil,
		"0:1,10s:1,10s:5":           {{0, 1}, {10 * time.Second, 1}, {10 * time.Second, 5}},
		"":                          nil,
		"100":                       nil,
		"0:100,":                    nil,
		"0:-1":                      nil,
		"0:NaN":                     nil,
		"0:+Inf":                    nil,
		"0:2e6":                     nil,
		"-1s:5":                     nil,
		"10:5":                      nil, // 10 what?
		"0:5;10s:7":                 nil,
		"0:5,9999999999999999999h:": nil,
	} {
		r, err := ParseRamp(text)
		if want == nil {
			require.Error(t, err, text)
			continue
		}
		require.NoError(t, err, text)
		require.Equal(t, want, r)
	}
}

func TestRampLevel(t *testing.T) {
	t.Parallel()
	r := Ramp{{10 * time.Second, 100}, {20 * time.Second, 200}, {20 * time.Second, 50}, {30 * time.Second, 0}}
	for at, want := range map[time.Duration]float64{
		0: 100, 10 * time.Second: 100, 15 * time.Second: 150, 20*time.Second - 1: 200, 20 * time.Second: 50, 25 * time.Second: 25,
		30 * time.Second: 0, time.Hour: 0,
	} {
		require.InDelta(t, want, r.Level(at), 1e-6, at)
	}
	require.InDelta(t, 200, r.Peak(), 0)
	require.Equal(t, 30*time.Second, r.Last())
	require.InDelta(t, 100, r.behind(time.Minute).Level(time.Minute), 0)
	require.InDelta(t, 150, r.behind(time.Minute).Level(75*time.Second), 1e-6)
}

func TestRampWhen(t *testing.T) {
	t.Parallel()
	r := Ramp{{0, 0}, {10 * time.Second, 100}, {20 * time.Second, 0}}
	for n, want := range map[float64]time.Duration{
		0: 0, 5: time.Second, 125: 5 * time.Second, 500: 10 * time.Second, 875: 15 * time.Second, 995: 19 * time.Second, 1000: 20 * time.Second,
	} {
		at, ever := r.When(n)
		require.True(t, ever, n)
		require.InDelta(t, want.Seconds(), at.Seconds(), 1e-6, n)
	}
	_, ever := r.When(1001)
	require.False(t, ever, "the rate is 0 for ever")
	at, _ := Constant(0.001).When(1)
	require.Equal(t, 1000*time.Second, at)
	_, ever = Constant(1e-9).When(1e6)
	require.False(t, ever, "in more than a hundred years")
}

// TestRampWhenInvertsItsIntegral sums the level up to When(n), which must be n.
func TestRampWhenInvertsItsIntegral(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var r Ramp
		at := time.Duration(0)
		for range rapid.IntRange(1, 6).Draw(t, "points") {
			at += time.Duration(rapid.IntRange(0, 60_000).Draw(t, "ms")) * time.Millisecond
			r = append(r, Point{at, float64(rapid.IntRange(0, 5000).Draw(t, "level"))})
		}
		n := rapid.Float64Range(0, 1e5).Draw(t, "n")
		end, ever := r.When(n)
		if !ever {
			require.Zero(t, r[len(r)-1].Level)
			require.LessOrEqual(t, sum(r, r.Last()), n)
			return
		}
		// A duration has whole nanoseconds.
		require.InDelta(t, n, sum(r, end), 1e-5*max(1, r.Peak()/100), "%v to %s", r, end)
		if more, ever := r.When(n + 1); ever {
			require.GreaterOrEqual(t, more, end)
		}
	})
}

// sum is the integral of a ramp, by trapezia between its corners.
func sum(r Ramp, until time.Duration) float64 {
	total := r[0].Level * min(r[0].At, until).Seconds()
	for i, p := range r {
		if p.At >= until {
			break
		}
		next := Point{until, p.Level}
		if i+1 < len(r) {
			next = r[i+1]
		}
		end := min(next.At, until)
		if end == p.At {
			continue
		}
		level := p.Level + (next.Level-p.Level)*float64(end-p.At)/float64(next.At-p.At)
		total += (p.Level + level) / 2 * (end - p.At).Seconds()
	}
	return math.Max(0, total)
}
