package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestJudge(t *testing.T) {
	t.Parallel()
	ours, other := series{"weir", "x"}, series{"peer", "x"}
	judged := func(g goal, samples ...sample) verdict {
		r := newReport("15")
		r.samples = samples
		return r.judge(section{goals: []goal{g}})[0]
	}
	at := func(round int, s series, v float64) sample { return sample{"", round, s.contestant, s.metric, v} }
	t.Run("TakesTheMedianOfTheRoundsRatios", func(t *testing.T) {
		t.Parallel()
		v := judged(atLeast(2, "", ours, other), at(1, ours, 10), at(1, other, 5), at(2, ours, 90), at(2, other, 10), at(3, ours, 2), at(3, other, 2))
		require.Equal(t, []float64{2, 9, 1}, v.Ratios)
		require.InDelta(t, 2, v.Reached, 0)
		require.True(t, v.Pass)
	})
	t.Run("MissesWhatWasNotMeasured", func(t *testing.T) {
		t.Parallel()
		require.False(t, judged(atMost(1, "", ours, series{})).Pass)
		require.False(t, judged(atMost(1, "", ours, other), at(1, ours, 0)).Pass)
	})
	t.Run("TakesAnAbsoluteGoalAsItIs", func(t *testing.T) {
		t.Parallel()
		require.True(t, judged(atMost(0, "", ours, series{}), at(1, ours, 0)).Pass)
		require.False(t, judged(atMost(45, "", ours, series{}), at(1, ours, 46)).Pass)
	})
}

func TestNumber(t *testing.T) {
	t.Parallel()
	for v, want := range map[float64]string{0: "0", 0.6: "0.600", 1.25: "1.25", 12.34: "12.3", 123.4: "123", 12345.6: "12,346", -1234567: "-1,234,567", 400: "400"} {
		require.Equal(t, want, number(v))
	}
}

func TestDealGivesOutEveryRow(t *testing.T) {
	t.Parallel()
	rows := turnRows{RunUpdates: 3, SessionUpdates: 2, Steps: 4, Events: 6, Usage: 2, Facts: 1}
	for _, own := range []bool{false, true} {
		got := turnRows{RunUpdates: 1} // the claim's
		shares := rows.deal(own)
		for _, s := range shares {
			got.Steps, got.Events, got.Usage, got.Facts = got.Steps+s.steps, got.Events+s.events, got.Usage+s.usage, got.Facts+s.facts
			if s.run {
				got.RunUpdates++
			}
			if s.session {
				got.SessionUpdates++
			}
		}
		require.Equal(t, rows, got)
		require.True(t, shares[len(shares)-1].last)
	}
}
