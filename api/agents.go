package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs/agentcfg"
)

// defaultAgent is the agent of who names none. Every tenant has it.
const defaultAgent = "default"

var agentName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)

// agentKey is an agent's name in its tenant.
type agentKey struct{ tenant, name string }

// agentView is what the edge needs to know of an agent. It never changes.
type agentView struct {
	id                 uuid.UUID
	version            int32
	suspended, deleted bool
	needsUser          bool // it has facts of users (RC-7)
	turnTimeout        time.Duration
	model              string
	maxSteps           int
	config             *agentcfg.Config
}

var errNoAgent = errors.New("there is no such agent")

// loadAgent reads an agent, also a deleted one. Error: errNoAgent.
func (s *Server) loadAgent(ctx context.Context, key agentKey) (*agentView, error) {
	row, err := s.queries.AgentCurrent(ctx, s.pool, db.AgentCurrentParams{TenantID: key.tenant, Name: key.name})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, errNoAgent
	} else if err != nil {
		return nil, fmt.Errorf("agent %s: %w", key.name, err)
	}
	c, err := agentcfg.Parse(row.Config)
	if err != nil { // not the caller's fault, so no *agentcfg.FieldError may get out
		return nil, fmt.Errorf("stored configuration of agent %s: %s", key.name, err.Error())
	}
	return &agentView{
		id: row.ID, version: row.Version, suspended: row.Suspended, deleted: row.Deleted, needsUser: c.Memory.Scope == agentcfg.MemoryUser,
		turnTimeout: c.Limits.TurnTimeout(), model: c.Model, maxSteps: c.Limits.MaxSteps, config: c,
	}, nil
}

// activeAgent returns an agent that takes turns. Error: *InvalidError of
// agentId.
func (s *Server) activeAgent(ctx context.Context, tenant, name string) (*agentView, error) {
	unknown := &InvalidError{Field: "agentId", Reason: "unknown_agent", Message: "names no agent"}
	if !agentName.MatchString(name) {
		return nil, unknown
	}
	a, err := s.agents.get(ctx, agentKey{tenant, name})
	switch {
	case errors.Is(err, errNoAgent):
		return nil, unknown
	case err != nil:
		return nil, err
	case a.deleted:
		return nil, unknown
	case a.suspended:
		return nil, &InvalidError{Field: "agentId", Reason: "agent_suspended", Message: "names an agent that is suspended"}
	}
	return a, nil
}

// AgentsListResult is the result of agents.list.
type AgentsListResult struct {
	Agents []string `json:"agents"`
}

func (s *Server) agentsList(ctx context.Context, _ *struct{}) (*AgentsListResult, error) {
	names, err := s.queries.AgentNames(ctx, s.pool, callerFrom(ctx).TenantID)
	return &AgentsListResult{notNil(names)}, err
}

// AgentsCreateParams are the parameters of agents.create: a configuration.
type AgentsCreateParams struct {
	Name     string                     `json:"name" jsonschema:"required" jsonschema_description:"Also the agent's id: [a-z0-9][a-z0-9-]{0,62}."`
	Provider *string                    `json:"provider"`
	Model    *string                    `json:"model"`
	Rest     map[string]json.RawMessage `json:"-" params:"rest"`
}

// AgentsCreateResult is the result of agents.create.
type AgentsCreateResult struct {
	AgentID      string          `json:"agentId"`
	Config       json.RawMessage `json:"config" jsonschema_description:"The whole configuration, with its defaults."`
	Created      bool            `json:"created"` // always true
	WorkspaceDir string          `json:"workspaceDir,omitempty"`
}

func (s *Server) defineAgentsCreate() Method {
	return Define("agents.create", ScopeAdmin, "Makes an agent.", s.agentsCreate, Describe(
		"The other members of its configuration stand beside these; an unknown one is refused by name, and so is one whose effect is not built yet. "+
			"The name of a deleted agent revives it under its id."))
}

// agentsCreate makes an agent, or revives a deleted one. Errors:
// *agentcfg.FieldError, *InvalidError for a name that is taken.
func (s *Server) agentsCreate(ctx context.Context, p *AgentsCreateParams) (*AgentsCreateResult, error) {
	raw, err := configOf(p.Rest, &p.Name, p.Provider, p.Model)
	if err != nil {
		return nil, err
	}
	c, err := agentcfg.Parse(raw)
	if err != nil {
		return nil, err
	}
	tenant := callerFrom(ctx).TenantID
	err = s.inTx(ctx, func(tx pgx.Tx) error {
		version, err := s.queries.AgentPut(ctx, tx, db.AgentPutParams{TenantID: tenant, Name: c.Name, ID: newID()})
		if errors.Is(err, pgx.ErrNoRows) {
			return &InvalidError{Field: "name", Reason: "exists", Message: "is the name of an agent already"}
		} else if err != nil {
			return fmt.Errorf("make agent %s: %w", c.Name, err)
		}
		return s.queries.AgentVersionInsert(ctx, tx, db.AgentVersionInsertParams{TenantID: tenant, Name: c.Name, Version: version, Config: c.JSON()})
	}, s.agentsChanged)
	if err != nil {
		return nil, err
	}
	return &AgentsCreateResult{AgentID: c.Name, Config: c.JSON(), Created: true}, nil
}

// configOf puts the members of a configuration together again.
func configOf(rest map[string]json.RawMessage, name, provider, model *string) (json.RawMessage, error) {
	members := make(map[string]any, len(rest)+3)
	for member, value := range rest {
		members[member] = value
	}
	for member, value := range map[string]*string{"name": name, "provider": provider, "model": model} {
		if value != nil {
			members[member] = *value
		}
	}
	return marshal(members)
}

// AgentParams are the parameters of methods about one agent.
type AgentParams struct {
	AgentID string `json:"agentId" jsonschema:"required" jsonschema_description:"The agent's name."`
}

// AgentsGetResult is the result of agents.get.
type AgentsGetResult struct {
	AgentID      string          `json:"agentId"`
	Config       json.RawMessage `json:"config"`
	Suspended    bool            `json:"suspended"`
	IsDefault    bool            `json:"isDefault" jsonschema_description:"Whether it answers who names no agent."`
	WorkspaceDir string          `json:"workspaceDir,omitempty"`
}

func (s *Server) agentsGet(ctx context.Context, p *AgentParams) (*AgentsGetResult, error) {
	// Not from the cache: an operator reads what was just written elsewhere.
	a, err := s.loadAgent(ctx, agentKey{callerFrom(ctx).TenantID, p.AgentID})
	if errors.Is(err, errNoAgent) || err == nil && a.deleted {
		return nil, noAgent(p.AgentID)
	} else if err != nil {
		return nil, err
	}
	return &AgentsGetResult{AgentID: p.AgentID, Config: a.config.JSON(), Suspended: a.suspended, IsDefault: p.AgentID == defaultAgent}, nil
}

// noAgent says that there is no agent of a name, which may be anything.
func noAgent(name string) error { return &NotFoundError{"agent", fmt.Sprintf("%.80s", name)} }

// AgentsUpdateParams are the parameters of agents.update: the members of a
// configuration that change.
type AgentsUpdateParams struct {
	AgentID  string                     `json:"agentId" jsonschema:"required" jsonschema_description:"The agent's name."`
	Name     *string                    `json:"name" jsonschema_description:"Cannot change."`
	Provider *string                    `json:"provider"`
	Model    *string                    `json:"model"`
	DryRun   bool                       `json:"dryRun" jsonschema:"default=false" jsonschema_description:"Check only; store nothing."`
	Rest     map[string]json.RawMessage `json:"-" params:"rest"`
}

// AgentsUpdateResult is the result of agents.update.
type AgentsUpdateResult struct {
	AgentID string          `json:"agentId"`
	Updated bool            `json:"updated"` // always true
	Config  json.RawMessage `json:"config,omitempty" jsonschema_description:"The whole configuration as it is now, or, with dryRun, would be."`
}

func (s *Server) defineAgentsUpdate() Method {
	return Define("agents.update", ScopeAdmin, "Changes an agent's configuration.", s.agentsUpdate, Describe(
		"Members that are given replace those of before as a whole; null sets one back to its default. Turns that were accepted keep the configuration they have."))
}

func (s *Server) agentsUpdate(ctx context.Context, p *AgentsUpdateParams) (*AgentsUpdateResult, error) {
	tenant := callerFrom(ctx).TenantID
	patch, err := configOf(p.Rest, p.Name, p.Provider, p.Model)
	if err != nil {
		return nil, err
	}
	var c *agentcfg.Config
	err = s.inTx(ctx, func(tx pgx.Tx) error {
		version, err := s.queries.AgentLock(ctx, tx, db.AgentLockParams{TenantID: tenant, Name: p.AgentID})
		if errors.Is(err, pgx.ErrNoRows) {
			return noAgent(p.AgentID)
		} else if err != nil {
			return fmt.Errorf("lock agent: %w", err)
		}
		old, err := s.queries.AgentConfig(ctx, tx, db.AgentConfigParams{TenantID: tenant, Name: p.AgentID, Version: version})
		if err != nil {
			return fmt.Errorf("agent %s version %d: %w", p.AgentID, version, err)
		}
		merged, err := agentcfg.Merge(old, patch)
		if err != nil {
			return err
		}
		if c, err = agentcfg.Parse(merged); err != nil {
			return err
		}
		if was, err := agentcfg.Parse(old); p.DryRun || err == nil && string(was.JSON()) == string(c.JSON()) {
			return nil
		}
		err = s.queries.AgentVersionInsert(ctx, tx, db.AgentVersionInsertParams{TenantID: tenant, Name: p.AgentID, Version: version + 1, Config: c.JSON()})
		if err != nil {
			return fmt.Errorf("store configuration of agent %s: %w", p.AgentID, err)
		}
		return s.queries.AgentBump(ctx, tx, db.AgentBumpParams{TenantID: tenant, Name: p.AgentID, Version: version + 1})
	}, s.agentsChanged)
	if err != nil {
		return nil, err
	}
	return &AgentsUpdateResult{AgentID: p.AgentID, Updated: true, Config: c.JSON()}, nil
}

// AgentsDeleteResult is the result of agents.delete.
type AgentsDeleteResult struct {
	AgentID string `json:"agentId"`
	Deleted bool   `json:"deleted"` // always true
}

func (s *Server) defineAgentsDelete() Method {
	return Define("agents.delete", ScopeAdmin, "Deletes an agent.", s.agentsDelete, Describe(
		"Its sessions stay, and take no new turns; turns that were accepted end as they would have. The agent `default` cannot be deleted, but suspended."))
}

func (s *Server) agentsDelete(ctx context.Context, p *AgentParams) (*AgentsDeleteResult, error) {
	if p.AgentID == defaultAgent {
		return nil, &InvalidError{Field: "agentId", Reason: "default_agent", Message: "names the default agent, which cannot be deleted"}
	}
	err := s.changeAgent(ctx, p.AgentID, func(tx pgx.Tx, tenant string) (int64, error) {
		return s.queries.AgentDelete(ctx, tx, db.AgentDeleteParams{TenantID: tenant, Name: p.AgentID})
	})
	if err != nil {
		return nil, err
	}
	return &AgentsDeleteResult{AgentID: p.AgentID, Deleted: true}, nil
}

// changeAgent runs an update of one agent. Error: *NotFoundError.
func (s *Server) changeAgent(ctx context.Context, name string, update func(tx pgx.Tx, tenant string) (int64, error)) error {
	return s.inTx(ctx, func(tx pgx.Tx) error {
		n, err := update(tx, callerFrom(ctx).TenantID)
		if err == nil && n == 0 {
			return noAgent(name)
		}
		return err
	}, s.agentsChanged)
}

// AgentsSuspendResult is the result of agents.suspend.
type AgentsSuspendResult struct {
	AgentID   string `json:"agentId"`
	Suspended bool   `json:"suspended"` // always true
}

func (s *Server) defineAgentsSuspend() Method {
	return Define("agents.suspend", ScopeAdmin, "Stops an agent from accepting messages.", s.agentsSuspend, Describe(
		"Turns that were accepted go on. Other processes refuse within half a second, this one at once."))
}

func (s *Server) agentsSuspend(ctx context.Context, p *AgentParams) (*AgentsSuspendResult, error) {
	err := s.changeAgent(ctx, p.AgentID, func(tx pgx.Tx, tenant string) (int64, error) {
		return s.queries.AgentSuspend(ctx, tx, db.AgentSuspendParams{TenantID: tenant, Name: p.AgentID})
	})
	if err != nil {
		return nil, err
	}
	return &AgentsSuspendResult{AgentID: p.AgentID, Suspended: true}, nil
}

// AgentsResumeResult is the result of agents.resume.
type AgentsResumeResult struct {
	AgentID string `json:"agentId"`
	Resumed bool   `json:"resumed"` // always true
}

func (s *Server) agentsResume(ctx context.Context, p *AgentParams) (*AgentsResumeResult, error) {
	err := s.changeAgent(ctx, p.AgentID, func(tx pgx.Tx, tenant string) (int64, error) {
		return s.queries.AgentResume(ctx, tx, db.AgentResumeParams{TenantID: tenant, Name: p.AgentID})
	})
	if err != nil {
		return nil, err
	}
	return &AgentsResumeResult{AgentID: p.AgentID, Resumed: true}, nil
}
