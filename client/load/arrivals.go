package load

import (
	"math/rand/v2"
	"time"
)

// Spacing says how arrivals of an open loop are spread.
type Spacing string

// The spacings.
const (
	// Poisson arrivals know nothing of each other, as those of many people.
	Poisson Spacing = "poisson"
	// Even arrivals keep the same distance.
	Even Spacing = "even"
)

// arrivals says when the turns of an open loop are due.
type arrivals struct {
	ramp    Ramp
	spacing Spacing
	random  *rand.Rand
	n       float64 // where the integral is at the latest arrival
}

// next is when the next turn is due; false when none ever is.
func (a *arrivals) next() (time.Duration, bool) {
	switch {
	case a.spacing == Poisson:
		a.n += a.random.ExpFloat64()
	case a.n == 0:
		a.n = 0.5
	default:
		a.n++
	}
	return a.ramp.When(a.n)
}

// picker gives each turn its tenant, so that each tenant has its share.
type picker struct {
	weights []float64
	sum     float64
	credit  []float64  // what each tenant is owed, when they take turns
	random  *rand.Rand // nil: they take turns
}

// newPicker makes a picker. With a source of chance each turn's tenant is drawn,
// so that the arrivals of each are a Poisson process if those of all are one;
// without, shares are exact and well mixed.
func newPicker(tenants []Tenant, random *rand.Rand) *picker {
	p := &picker{credit: make([]float64, len(tenants)), random: random}
	for _, t := range tenants {
		p.weights = append(p.weights, t.Weight)
		p.sum += t.Weight
	}
	return p
}

func (p *picker) next() int {
	if len(p.weights) == 1 {
		return 0
	}
	if p.random != nil {
		left := p.random.Float64() * p.sum
		for i, w := range p.weights {
			if left -= w; left < 0 {
				return i
			}
		}
		return len(p.weights) - 1
	}
	most := 0
	for i, w := range p.weights {
		p.credit[i] += w
		if p.credit[i] > p.credit[most] {
			most = i
		}
	}
	p.credit[most] -= p.sum
	return most
}
