package workers

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/jobs/agentcfg"
	"github.com/weir-run/weir/workers/model"
	"github.com/weir-run/weir/workers/tool"
	"github.com/weir-run/weir/workers/turn"
)

const (
	maxFacts     = 200       // of one scope (RC-103)
	maxFactBytes = 32 * 1024 // sent with one model call (RC-103)
)

func isFactTool(name string) bool { return name == tool.MemoryRead || name == tool.MemoryWrite }

// facts are what a turn's scope remembers, as of the turn's start and with its
// own writes. The scope comes from the request, never from a model (RC-96).
type facts struct {
	scope, scopeID string
	list           []db.FactListRow // most recently written first; empty ones too
}

func (t *attempt) loadFacts(ctx context.Context) (*facts, error) {
	f := &facts{scope: string(t.agent.memory)}
	if t.agent.memory == agentcfg.MemoryUser {
		f.scopeID = t.run.UserID
	} else {
		f.scopeID = t.run.SessionID.String()
		if t.run.RequestSeq == 1 && len(t.run.Steps) == 0 { // a session that is new has none
			return f, nil
		}
	}
	var err error
	f.list, err = t.w.queries.FactList(ctx, t.w.Pool, db.FactListParams{
		TenantID: t.run.TenantID, Agent: t.run.Agent, Scope: f.scope, ScopeID: f.scopeID,
	})
	if err != nil {
		return nil, fmt.Errorf("facts: %w", err)
	}
	return f, nil
}

// forModel returns the facts a model call is sent, by key. The least recently
// written are left out beyond the limit.
func (f *facts) forModel() (out []model.Fact, truncated bool) {
	size := 0
	for _, r := range f.list {
		if len(r.Value) == 0 || strings.HasPrefix(r.Key, "__") {
			continue
		}
		if size += len(r.Key) + len(r.Value); size > maxFactBytes {
			truncated = true
			break
		}
		out = append(out, model.Fact{Key: r.Key, Value: r.Value})
	}
	slices.SortFunc(out, func(a, b model.Fact) int { return cmp.Compare(a.Key, b.Key) })
	return out, truncated
}

func (f *facts) index(key string) int {
	return slices.IndexFunc(f.list, func(r db.FactListRow) bool { return r.Key == key })
}

func (f *facts) put(key string, value json.RawMessage) {
	if i := f.index(key); i >= 0 {
		f.list = slices.Delete(f.list, i, i+1)
	}
	if string(value) == "null" {
		value = nil
	}
	f.list = slices.Insert(f.list, 0, db.FactListRow{Key: key, Value: value})
}

type factRead struct {
	Found bool            `json:"found"`
	Value json.RawMessage `json:"value"`
}

type factReadContent struct {
	CallID string `json:"callId"`
	Key    string `json:"key"`
	Found  bool   `json:"found"`
}

func (t *attempt) memoryRead(c *turn.Call, a *jobs.Advance) *turn.ToolOutput {
	key, bad := tool.ParseFactRead(c.Args)
	if bad != nil {
		return refusal(bad)
	}
	r := factRead{Value: json.RawMessage("null")}
	if i := t.facts.index(key); i >= 0 {
		r.Found = true
		if v := t.facts.list[i].Value; len(v) > 0 {
			r.Value = v
		}
	}
	a.Events = append(a.Events, jobs.Event{Type: jobs.EventMemoryRead, Content: mustJSON(factReadContent{c.CallID, key, r.Found})})
	return &turn.ToolOutput{Data: mustJSON(r)}
}

type factWriteContent struct {
	CallID string `json:"callId"`
	Key    string `json:"key"`
	Kind   string `json:"kind,omitempty"`
	Scope  string `json:"scope"`
}

func (t *attempt) memoryWrite(c *turn.Call, a *jobs.Advance) *turn.ToolOutput {
	fact, bad := tool.ParseFactWrite(c.Args)
	if bad != nil {
		return refusal(bad)
	}
	if t.facts.index(fact.Key) < 0 && len(t.facts.list) >= maxFacts {
		return failure("limit", fmt.Sprintf("a scope holds at most %d facts", maxFacts))
	}
	a.Facts = append(a.Facts, jobs.Fact{Scope: t.facts.scope, ScopeID: t.facts.scopeID, Key: fact.Key, Value: fact.Value, Kind: fact.Kind})
	a.Events = append(a.Events, jobs.Event{Type: jobs.EventMemoryWrite, Content: mustJSON(factWriteContent{c.CallID, fact.Key, fact.Kind, t.facts.scope})})
	t.facts.put(fact.Key, fact.Value)
	return &turn.ToolOutput{Data: json.RawMessage(`{"stored":true}`)}
}
