package model

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"sync"
)

// Rates are prices in US dollars per million tokens, which is also millionths
// of a dollar per token. Reasoning is paid for as output.
type Rates struct {
	Input      float64  `json:"input"`
	CacheRead  *float64 `json:"cacheRead,omitempty"`  // nil means Input
	CacheWrite *float64 `json:"cacheWrite,omitempty"` // nil means Input
	Output     float64  `json:"output"`
}

// Price is what a model costs.
type Price struct {
	Rates
	// Long replaces the rates of a whole call whose prompt is long; nil means
	// that length does not matter.
	Long *LongPrice `json:"long,omitempty"`
}

// LongPrice are the rates of a call whose input, cached or not, is above so
// many tokens.
type LongPrice struct {
	Above int64 `json:"above"`
	Rates
}

//go:embed prices.json
var pricesJSON []byte

// priceFile is the form of prices.json.
type priceFile struct {
	Unit      string `json:"unit"`
	Providers map[string]struct {
		Source string           `json:"source"` // where the prices were published
		Date   string           `json:"date"`   // when they were
		Models map[string]Price `json:"models"`
	} `json:"providers"`
}

// priceTable holds the prices of one provider's models by name.
type priceTable map[string]price

// builtinPrices are the tables of prices.json by provider.
var builtinPrices = sync.OnceValue(func() map[string]priceTable {
	tables, err := parsePrices(pricesJSON)
	if err != nil {
		panic("model: prices.json: " + err.Error()) // it is part of the binary
	}
	return tables
})

func parsePrices(data []byte) (map[string]priceTable, error) {
	var file priceFile
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&file); err != nil {
		return nil, err
	}
	tables := make(map[string]priceTable, len(file.Providers))
	for name, provider := range file.Providers {
		table, err := newPriceTable(provider.Models)
		if err != nil {
			return nil, fmt.Errorf("provider %s: %w", name, err)
		}
		tables[name] = table
	}
	return tables, nil
}

func newPriceTable(prices map[string]Price) (priceTable, error) {
	table := make(priceTable, len(prices))
	for model, p := range prices {
		compiled := price{short: p.Rates.compile()}
		compiled.long, compiled.above = compiled.short, math.MaxInt64
		if p.Long != nil {
			compiled.long, compiled.above = p.Long.Rates.compile(), p.Long.Above
		}
		if !compiled.short.valid() || !compiled.long.valid() || compiled.above < 0 {
			return nil, fmt.Errorf("model %s: a price is negative or too large", model)
		}
		table[model] = compiled
	}
	return table, nil
}

// snapshot is the date at the end of a model's name, as in
// gpt-4o-2024-08-06 and claude-haiku-4-5-20251001.
var snapshot = regexp.MustCompile(`-(20\d\d-\d\d-\d\d|20\d{6})$`)

// cost returns what the usage costs in millionths of a dollar, rounded half
// up, or nil for a model without a price. A dated snapshot without a price of
// its own costs what its model does.
func (t priceTable) cost(model string, u Usage) *int64 {
	p, ok := t[model]
	if !ok {
		date := snapshot.FindStringIndex(model)
		if date == nil {
			return nil
		}
		if p, ok = t[model[:date[0]]]; !ok {
			return nil
		}
	}
	micros := p.micros(u)
	return &micros
}

// price is a Price in whole numbers, so that costs add up exactly.
type price struct {
	short, long rates
	above       int64
}

func (p *price) micros(u Usage) int64 {
	input, cacheRead, cacheWrite := count(u.Input), count(u.CacheRead), count(u.CacheWrite)
	r := &p.short
	if input+cacheRead+cacheWrite > p.above {
		r = &p.long
	}
	picos := input*r.input + cacheRead*r.cacheRead + cacheWrite*r.cacheWrite +
		(count(u.Output)+count(u.Reasoning))*r.output
	return (picos + 500_000) / 1_000_000
}

// rates are in picodollars (millionths of a microdollar) per token.
type rates struct{ input, cacheRead, cacheWrite, output int64 }

// maxRate keeps five times maxCount tokens below the largest int64.
const maxRate = 1_000 * 1_000_000

func (r Rates) compile() rates {
	picos := func(usd float64) int64 {
		if math.IsNaN(usd) || usd < 0 || usd*1e6 > maxRate {
			return -1
		}
		return int64(math.Round(usd * 1e6))
	}
	or := func(usd *float64) float64 {
		if usd == nil {
			return r.Input
		}
		return *usd
	}
	return rates{input: picos(r.Input), cacheRead: picos(or(r.CacheRead)), cacheWrite: picos(or(r.CacheWrite)), output: picos(r.Output)}
}

func (r rates) valid() bool { return min(r.input, r.cacheRead, r.cacheWrite, r.output) >= 0 }
