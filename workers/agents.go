package workers

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs/agentcfg"
	"github.com/weir-run/weir/workers/model"
	"github.com/weir-run/weir/workers/tool"
	"github.com/weir-run/weir/workers/turn"
)

// modelRef names a model to call.
type modelRef struct {
	Provider, Model, BaseURL, APIKeySecret string
}

func (m modelRef) name() string { return m.Provider + "/" + m.Model }

// agent is a version of an agent's configuration, made ready for turns. It
// never changes.
type agent struct {
	instructions    string
	primary         modelRef
	secondary       *modelRef
	parameters      map[string]any
	maxOutputTokens int
	limits          turn.Limits
	maxCalls        int
	memory          agentcfg.MemoryScope
	catalogue       *tool.Catalogue
}

func newAgent(raw json.RawMessage) (*agent, error) {
	c, err := agentcfg.Parse(raw)
	if err != nil {
		return nil, fmt.Errorf("stored configuration: %w", err)
	}
	a := &agent{
		instructions: c.Instructions, primary: modelRef{Provider: c.Provider, Model: c.Model},
		parameters: c.ModelParameters, maxOutputTokens: c.Limits.MaxOutputTokens,
		limits:   turn.Limits{MaxSteps: c.Limits.MaxSteps, LoopThreshold: c.Limits.LoopThreshold},
		maxCalls: c.Limits.MaxCallsPerGroup, memory: c.Memory.Scope, catalogue: tool.NewCatalogue(c),
	}
	if c.BaseURL != nil {
		a.primary.BaseURL = *c.BaseURL
	}
	if c.APIKeySecret != nil {
		a.primary.APIKeySecret = *c.APIKeySecret
	}
	if c.Secondary != nil {
		a.secondary = &modelRef{Provider: c.Secondary.Provider, Model: c.Secondary.Model}
	}
	return a, nil
}

// agents caches configurations: versions are immutable.
type agents struct {
	queries *db.Queries
	pool    *pgxpool.Pool

	mu    sync.RWMutex
	known map[agentKey]*agent
}

type agentKey struct {
	tenant, name string
	version      int32
}

const maxAgents = 4096 // cached versions; all are dropped beyond

func newAgents(q *db.Queries, pool *pgxpool.Pool) *agents {
	return &agents{queries: q, pool: pool, known: map[agentKey]*agent{}}
}

func (c *agents) get(ctx context.Context, tenant, name string, version int32) (*agent, error) {
	key := agentKey{tenant, name, version}
	c.mu.RLock()
	a := c.known[key]
	c.mu.RUnlock()
	if a != nil {
		return a, nil
	}
	raw, err := c.queries.AgentConfig(ctx, c.pool, db.AgentConfigParams{TenantID: tenant, Name: name, Version: version})
	if err != nil {
		return nil, fmt.Errorf("agent %s version %d: %w", name, version, err)
	}
	if a, err = newAgent(raw); err != nil {
		return nil, fmt.Errorf("agent %s version %d: %w", name, version, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.known) >= maxAgents {
		clear(c.known)
	}
	c.known[key] = a
	return a, nil
}

// provider finds the provider of a model, with the key its secret names.
func (w *Worker) provider(m modelRef) (model.Provider, error) {
	var key string
	if m.APIKeySecret != "" {
		var ok bool
		if key, ok = w.Secret(m.APIKeySecret); !ok {
			return nil, fmt.Errorf("secret %q is not set", m.APIKeySecret)
		}
	} else if k, ok := w.Secret(defaultKey(m.Provider)); ok {
		key = k
	}
	return w.Models.Provider(m.Provider, m.BaseURL, key)
}

// defaultKey is where a provider's key is looked for when the agent names no
// secret: the environment variable of the vendor's own SDK.
func defaultKey(provider string) string {
	switch provider {
	case model.ProviderOpenAI:
		return "OPENAI_API_KEY"
	case model.ProviderAnthropic:
		return "ANTHROPIC_API_KEY"
	default:
		return ""
	}
}

func digest(b []byte) []byte {
	sum := sha256.Sum256(b)
	return sum[:]
}
