package model

import (
	"encoding/json"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPriceFile(t *testing.T) {
	t.Parallel()
	var file priceFile
	require.NoError(t, json.Unmarshal(pricesJSON, &file))
	for _, name := range []string{ProviderOffline, ProviderOpenAI, ProviderAnthropic} {
		provider := file.Providers[name]
		require.NotEmpty(t, provider.Source, name)
		require.NotEmpty(t, provider.Models, name)
		_, err := time.Parse(time.DateOnly, provider.Date)
		require.NoError(t, err, name)
		for model, p := range provider.Models {
			if name != ProviderOffline {
				require.Positive(t, p.Input, model)
				require.Greater(t, p.Output, p.Input, model)
			}
			if p.Long != nil {
				require.Positive(t, p.Long.Above, model)
				require.Greater(t, p.Long.Input, p.Input, model)
			}
		}
	}
}

func TestCost(t *testing.T) {
	t.Parallel()
	million := int64(1_000_000)
	for name, c := range map[string]struct {
		provider, model string
		usage           Usage
		want            *int64
	}{
		"Every count":              {"anthropic", "claude-haiku-4-5", Usage{Input: million, CacheRead: million, CacheWrite: million, Output: million, Reasoning: million}, micros(1_000_000 + 100_000 + 1_250_000 + 10_000_000)},
		"One token":                {"openai", "gpt-4o", Usage{Output: 1}, micros(10)},
		"Half a micro rounds up":   {"openai", "gpt-4o", Usage{Input: 1}, micros(3)},
		"Less rounds down":         {"openai", "gpt-5-nano", Usage{Input: 9}, micros(0)},
		"Parts add up first":       {"openai", "gpt-5-nano", Usage{Input: 9, CacheRead: 10}, micros(1)},
		"Cache write as input":     {"openai", "gpt-5", Usage{CacheWrite: 4}, micros(5)},
		"Snapshot of a model":      {"openai", "gpt-4o-2024-08-06", Usage{Input: 2}, micros(5)},
		"Snapshot with its own":    {"openai", "gpt-4o-2024-05-13", Usage{Input: 2}, micros(10)},
		"Compact snapshot":         {"anthropic", "claude-haiku-4-5-20251001", Usage{Input: 2}, micros(2)},
		"Short prompt":             {"anthropic", "claude-haiku-5-5", Usage{Input: 50_000, CacheRead: 50_000, Output: 10}, micros(5_000 + 500 + 5)},
		"Long prompt":              {"anthropic", "claude-haiku-5-5", Usage{Input: 50_001, CacheRead: 50_000, Output: 10}, micros(25_001 + 2_500 + 25)},
		"Offline is free":          {"offline", "offline-1", Usage{Input: 5}, micros(0)},
		"Offline priced":           {"offline", "offline-priced", Usage{Input: 5, CacheRead: 1, Output: 3}, micros(12)},
		"Unknown model":            {"openai", "gpt-9", Usage{Input: 1}, nil},
		"Unknown snapshot":         {"openai", "gpt-9-2029-01-01", Usage{Input: 1}, nil},
		"Unknown provider":         {"mine", "gpt-4o", Usage{Input: 1}, nil},
		"Model of another":         {"openai", "claude-haiku-4-5", Usage{Input: 1}, nil},
		"Nonsense does not wrap":   {"anthropic", "claude-fable-5", Usage{Input: math.MaxInt64, CacheRead: math.MaxInt64, CacheWrite: math.MaxInt64, Output: math.MaxInt64, Reasoning: math.MaxInt64}, micros(1_000_000_000*(10+1+50+50) + 12_500_000_000)},
		"Negative counts as zero":  {"openai", "gpt-4o", Usage{Input: -5, Output: 1}, micros(10)},
		"Empty usage costs 0":      {"openai", "gpt-4o", Usage{}, micros(0)},
		"Name that is only a date": {"openai", "-2024-08-06", Usage{Input: 1}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, err := NewRegistry(nil)
			require.NoError(t, err)
			require.Equal(t, c.want, r.Cost(c.provider, c.model, c.usage))
		})
	}
}

func TestEstimateUsage(t *testing.T) {
	t.Parallel()
	req := &Request{
		System:   "12345678",
		Facts:    []Fact{{Key: "key", Value: json.RawMessage(`"x"`)}},
		Tools:    []Tool{{Name: "tool", Description: "does", Parameters: json.RawMessage(`{}`)}},
		Messages: []Message{{Role: RoleUser, Text: "hello"}, {Role: RoleAssistant, Calls: []ToolCall{{Tool: "tool", Args: json.RawMessage(`{"a":1}`)}}}},
	}
	require.Equal(t, Usage{Input: 10, Output: 2, Estimated: true}, EstimateUsage(req, "12345"), "bytes / 4, rounded up")
	require.Equal(t, Usage{Estimated: true}, EstimateUsage(&Request{}, ""))
}
