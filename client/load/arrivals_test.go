package load

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// dueBefore are the arrivals before a time.
func dueBefore(a arrivals, end time.Duration) (due []time.Duration) {
	for {
		at, ever := a.next()
		if !ever || at >= end {
			return due
		}
		due = append(due, at)
	}
}

func TestEvenArrivals(t *testing.T) {
	t.Parallel()
	due := dueBefore(arrivals{ramp: Constant(100), spacing: Even}, 10*time.Second)
	require.Len(t, due, 1000)
	require.Equal(t, 5*time.Millisecond, due[0])
	for i := 1; i < len(due); i++ {
		require.InDelta(t, 0.01, (due[i] - due[i-1]).Seconds(), 1e-8)
	}
	up := dueBefore(arrivals{ramp: Ramp{{0, 0}, {10 * time.Second, 200}}, spacing: Even}, 10*time.Second)
	require.Len(t, up, 1000)
	require.Len(t, dueBefore(arrivals{ramp: Ramp{{0, 0}, {10 * time.Second, 200}}, spacing: Even}, 5*time.Second), 250)
	late := dueBefore(arrivals{ramp: Ramp{{0, 0}, {5 * time.Second, 0}, {5 * time.Second, 10}}, spacing: Even}, 6*time.Second)
	require.Len(t, late, 10)
	require.Equal(t, 5050*time.Millisecond, late[0], "nothing before the jump")
}

// TestPoissonArrivals checks the marks of a Poisson process: counts of disjoint
// windows vary as much as their mean, and gaps as much as theirs.
func TestPoissonArrivals(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	const rate, seconds = 500, 400
	due := dueBefore(arrivals{ramp: Constant(rate), spacing: Poisson, random: random}, seconds*time.Second)
	require.InDelta(t, rate*seconds, len(due), 5*math.Sqrt(rate*seconds))
	counts := make([]float64, seconds)
	gaps := make([]float64, 0, len(due))
	for i, at := range due {
		counts[int(at.Seconds())]++
		if i > 0 {
			gaps = append(gaps, (at - due[i-1]).Seconds())
		}
	}
	mean, variance := moments(counts)
	require.InDelta(t, 1, variance/mean, 0.4)
	mean, variance = moments(gaps)
	require.InDelta(t, 1, math.Sqrt(variance)/mean, 0.02)

	up := dueBefore(arrivals{ramp: Ramp{{0, 0}, {100 * time.Second, 1000}}, spacing: Poisson, random: random}, 100*time.Second)
	require.InDelta(t, 50_000, len(up), 5*math.Sqrt(50_000))
	half := 0
	for _, at := range up {
		if at < 50*time.Second {
			half++
		}
	}
	require.InDelta(t, 12_500, half, 5*math.Sqrt(12_500), "a quarter comes in the first half of a ramp")
}

func moments(xs []float64) (mean, variance float64) {
	for _, x := range xs {
		mean += x / float64(len(xs))
	}
	for _, x := range xs {
		variance += (x - mean) * (x - mean) / float64(len(xs)-1)
	}
	return mean, variance
}

func TestTenantsHaveTheirShares(t *testing.T) {
	t.Parallel()
	tenants := []Tenant{{Name: "a", Weight: 6}, {Name: "b", Weight: 3}, {Name: "c", Weight: 1}}
	t.Run("InTurn", func(t *testing.T) {
		t.Parallel()
		p := newPicker(tenants, nil)
		for range 10 {
			counts, run, longest, before := [3]int{}, 0, 0, -1
			for range 10 {
				i := p.next()
				counts[i]++
				if run++; i != before {
					run = 1
				}
				before, longest = i, max(longest, run)
			}
			require.Equal(t, [3]int{6, 3, 1}, counts, "in every ten")
			require.LessOrEqual(t, longest, 3, "well mixed")
		}
	})
	t.Run("ByChance", func(t *testing.T) {
		t.Parallel()
		p := newPicker(tenants, rand.New(rand.NewPCG(3, 4)))
		counts := [3]float64{}
		const n = 100_000
		for range n {
			counts[p.next()]++
		}
		for i, share := range []float64{0.6, 0.3, 0.1} {
			require.InDelta(t, share*n, counts[i], 5*math.Sqrt(n*share*(1-share)))
		}
	})
	t.Run("OneAlone", func(t *testing.T) {
		t.Parallel()
		require.Zero(t, newPicker(tenants[:1], nil).next())
	})
}
