package load

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// MaxLevel bounds the levels of a ramp.
const MaxLevel = 1_000_000

// Ramp is a level that changes over time: a rate in arrivals per second, or a
// number of users. It runs straight from point to point, and stays level before
// the first and behind the last. Two points at one time are a jump.
type Ramp []Point

// Point is the level at a time.
type Point struct {
	At    time.Duration
	Level float64
}

// Constant is a ramp that stays at one level.
func Constant(level float64) Ramp { return Ramp{{0, level}} }

// ParseRamp reads "0:100,30s:500": a time, as Go writes durations, and the level
// at that time.
func ParseRamp(text string) (Ramp, error) {
	var r Ramp
	for part := range strings.SplitSeq(text, ",") {
		at, level, ok := strings.Cut(strings.TrimSpace(part), ":")
		if !ok {
			return nil, fmt.Errorf("%q is no TIME:LEVEL, such as 30s:500", part)
		}
		t, err := time.ParseDuration(at)
		if err != nil || t < 0 {
			return nil, fmt.Errorf("%q is no time; write 0, 30s or 1m30s", at)
		}
		l, err := strconv.ParseFloat(level, 64)
		if err != nil || !(l >= 0 && l <= MaxLevel) {
			return nil, fmt.Errorf("%q is no level; write a number from 0 to %d", level, MaxLevel)
		}
		if len(r) > 0 && t < r.Last() {
			return nil, fmt.Errorf("%s comes after %s: times must rise", t, r.Last())
		}
		r = append(r, Point{t, l})
	}
	return r, nil
}

// Last is the time of the last point; 0 of no ramp.
func (r Ramp) Last() time.Duration {
	if len(r) == 0 {
		return 0
	}
	return r[len(r)-1].At
}

// Peak is the highest level.
func (r Ramp) Peak() float64 {
	peak := 0.0
	for _, p := range r {
		peak = max(peak, p.Level)
	}
	return peak
}

// Level is the level at a time; in a jump, that behind it.
func (r Ramp) Level(t time.Duration) float64 {
	if t < r[0].At {
		return r[0].Level
	}
	for i := len(r) - 1; i >= 0; i-- {
		if t < r[i].At {
			continue
		}
		if i == len(r)-1 {
			return r[i].Level
		}
		part := float64(t-r[i].At) / float64(r[i+1].At-r[i].At)
		return r[i].Level + part*(r[i+1].Level-r[i].Level)
	}
	return r[0].Level
}

// When is the time at which n arrivals are due, of a ramp of a rate: where its
// integral reaches n. It is false when it never does.
func (r Ramp) When(n float64) (time.Duration, bool) {
	from := Point{0, r[0].Level}
	for _, to := range r {
		seconds := (to.At - from.At).Seconds()
		if all := (from.Level + to.Level) / 2 * seconds; n > all {
			n -= all
			from = to
			continue
		}
		if seconds > 0 {
			return from.At + reach(n, from.Level, (to.Level-from.Level)/seconds), true
		}
		from = to
	}
	if from.Level == 0 {
		return 0, false
	}
	if n/from.Level > math.MaxInt64/2e9 {
		return 0, false
	}
	return from.At + reach(n, from.Level, 0), true
}

// reach is when a level that begins at v and grows by k each second has summed
// up to n. This form of the quadratic formula is also good for k near 0.
func reach(n, v, k float64) time.Duration {
	if n <= 0 {
		return 0
	}
	seconds := 2 * n / (v + math.Sqrt(max(0, v*v+2*k*n)))
	return time.Duration(seconds * float64(time.Second))
}

// behind is the ramp that begins later.
func (r Ramp) behind(d time.Duration) Ramp {
	out := make(Ramp, len(r))
	for i, p := range r {
		out[i] = Point{p.At + d, p.Level}
	}
	return out
}
