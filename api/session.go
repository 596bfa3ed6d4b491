package api

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
)

// maxSessions is how many sessions session.list returns; total counts them all.
const maxSessions = 500

// SessionStatusParams are the parameters of session.status.
type SessionStatusParams struct {
	AgentID         string `json:"agentId" jsonschema_description:"Absent means the agent default."`
	ConversationRef string `json:"conversation_ref" jsonschema_description:"Absent means the newest session that this token made with the agent."`
}

// SessionStatusResult is the result of session.status.
type SessionStatusResult struct {
	Model         string       `json:"model"`
	AgentName     string       `json:"agentName"`
	TokensUsed    SessionUsage `json:"tokensUsed"`
	StepsExecuted int          `json:"stepsExecuted" jsonschema_description:"Model calls of the executing turn, or of the last one."`
	MaxSteps      int          `json:"maxSteps" jsonschema_description:"How many a turn may make."`
}

// SessionUsage is what a session consumed.
type SessionUsage struct {
	TotalTokens int64   `json:"totalTokens"`
	TotalCost   float64 `json:"totalCost" jsonschema_description:"In the currency unit."`
}

func (s *Server) defineSessionStatus() Method {
	return Define("session.status", ScopeRPC, "Says what a session of the caller has used.", s.sessionStatus, ReadOnly)
}

// sessionStatus answers zeros when the token has no session yet. Errors:
// *NotFoundError for a conversation_ref, *InvalidError for an agent.
func (s *Server) sessionStatus(ctx context.Context, p *SessionStatusParams) (*SessionStatusResult, error) {
	caller := callerFrom(ctx)
	name := cmp.Or(p.AgentID, defaultAgent)
	var session db.Session
	var err error
	if p.ConversationRef != "" {
		session, err = s.sessionByRef(ctx, p.ConversationRef, p.AgentID)
		name = session.Agent
	} else {
		session, err = s.queries.SessionLatest(ctx, s.pool, db.SessionLatestParams{TenantID: caller.TenantID, Agent: name, OwnerToken: caller.TokenID})
	}
	known := err == nil
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return nil, err
	}
	agent, err := s.agents.get(ctx, agentKey{caller.TenantID, name})
	if errors.Is(err, errNoAgent) || err == nil && agent.deleted && !known {
		return nil, &InvalidError{Field: "agentId", Reason: "unknown_agent", Message: "names no agent"}
	} else if err != nil {
		return nil, err
	}
	r := &SessionStatusResult{Model: agent.model, AgentName: name, MaxSteps: agent.maxSteps}
	if !known {
		return r, nil
	}
	r.TokensUsed = SessionUsage{session.InputTokens + session.OutputTokens, float64(session.CostMicros) / 1e6}
	steps, err := s.queries.SessionSteps(ctx, s.pool, session.ID)
	if err != nil {
		return nil, fmt.Errorf("steps of session %s: %w", session.ID, err)
	}
	r.StepsExecuted = int(steps)
	return r, nil
}

// sessionByRef finds a conversation of the caller's tenant; agent, unless
// empty, must be its agent. Error: *NotFoundError.
func (s *Server) sessionByRef(ctx context.Context, ref, agent string) (db.Session, error) {
	session, err := s.queries.SessionByRef(ctx, s.pool, db.SessionByRefParams{TenantID: callerFrom(ctx).TenantID, ConversationRef: ref})
	if errors.Is(err, pgx.ErrNoRows) || err == nil && agent != "" && session.Agent != agent {
		return session, &NotFoundError{"session", fmt.Sprintf("%.80s", ref)}
	}
	return session, err
}

// SessionHistoryParams are the parameters of session.history.
type SessionHistoryParams struct {
	TenantID        string `json:"tenant_id" jsonschema:"required"`
	AgentID         string `json:"agent_id" jsonschema:"required"`
	ConversationRef string `json:"conversation_ref" jsonschema:"required"`
	Offset          int32  `json:"offset" jsonschema:"minimum=0,default=0"`
	Limit           int32  `json:"limit" jsonschema:"minimum=1,maximum=500,default=50"`
}

// SessionHistoryResult is the result of session.history.
type SessionHistoryResult struct {
	Session  SessionFacts     `json:"session"`
	Messages []SessionMessage `json:"messages" jsonschema_description:"The oldest first."`
	Total    int64            `json:"total"`
	Offset   int32            `json:"offset"`
	Limit    int32            `json:"limit"`
	HasMore  bool             `json:"hasMore"`
}

// SessionFacts are what is known of a session. Times are in milliseconds since
// 1970.
type SessionFacts struct {
	Key          string           `json:"key"`
	AgentID      string           `json:"agentId"`
	ChannelType  string           `json:"channelType"`
	Endpoint     *ChannelEndpoint `json:"endpoint,omitempty"`
	MessageCount int64            `json:"messageCount"`
	TotalTokens  int64            `json:"totalTokens"`
	InputTokens  int64            `json:"inputTokens"`
	OutputTokens int64            `json:"outputTokens"`
	ToolCalls    int64            `json:"toolCalls"`
	Compactions  int64            `json:"compactions"`
	ResetCount   int64            `json:"resetCount"`
	CreatedAt    int64            `json:"createdAt"`
	LastActiveAt int64            `json:"lastActiveAt"`
	Label        string           `json:"label,omitempty"`
}

// ChannelEndpoint is where a channel's messages come from. Sessions of API
// clients have none.
type ChannelEndpoint struct {
	ChannelType       string `json:"channelType"`
	ChannelInstanceID string `json:"channelInstanceId"`
	ConversationID    string `json:"conversationId"`
	ThreadID          string `json:"threadId,omitempty"`
	ConversationKind  string `json:"conversationKind" jsonschema:"enum=direct,enum=shared"`
}

// SessionMessage is what was said at one time.
type SessionMessage struct {
	Role           string `json:"role" jsonschema_description:"user or assistant."`
	Content        string `json:"content"`
	Timestamp      int64  `json:"timestamp" jsonschema_description:"Milliseconds since 1970."`
	DeliveryStatus string `json:"deliveryStatus,omitempty"`
}

func (s *Server) defineSessionHistory() Method {
	return Define("session.history", ScopeRPC, "Returns what was said in a conversation.", s.sessionHistory, ReadOnly)
}

// sessionHistory reads a page of a conversation. Error: *NotFoundError, also
// for another tenant.
func (s *Server) sessionHistory(ctx context.Context, p *SessionHistoryParams) (*SessionHistoryResult, error) {
	if p.TenantID != callerFrom(ctx).TenantID || p.AgentID == "" {
		return nil, &NotFoundError{"session", fmt.Sprintf("%.80s", p.ConversationRef)}
	}
	session, err := s.sessionByRef(ctx, p.ConversationRef, p.AgentID)
	if err != nil {
		return nil, err
	}
	total, err := s.queries.SessionMessageCount(ctx, s.pool, session.ID)
	if err != nil {
		return nil, fmt.Errorf("count messages of session %s: %w", session.ID, err)
	}
	rows, err := s.queries.SessionMessages(ctx, s.pool, db.SessionMessagesParams{SessionID: session.ID, Skip: p.Offset, MaxRows: p.Limit})
	if err != nil {
		return nil, fmt.Errorf("messages of session %s: %w", session.ID, err)
	}
	r := &SessionHistoryResult{
		Session: SessionFacts{
			Key: session.ConversationRef, AgentID: session.Agent, ChannelType: session.ChannelType, MessageCount: total,
			TotalTokens: session.InputTokens + session.OutputTokens, InputTokens: session.InputTokens, OutputTokens: session.OutputTokens,
			ToolCalls: session.ToolCalls, ResetCount: int64(session.Epoch), CreatedAt: session.CreatedAt.UnixMilli(), LastActiveAt: session.UpdatedAt.UnixMilli(),
		},
		Messages: make([]SessionMessage, len(rows)), Total: total, Offset: p.Offset, Limit: p.Limit, HasMore: int64(p.Offset)+int64(len(rows)) < total,
	}
	for i, row := range rows {
		role := "assistant"
		if row.Type == jobs.EventRequest {
			role = "user"
		}
		r.Messages[i] = SessionMessage{Role: role, Content: row.Text, Timestamp: row.Ts.UnixMilli()}
	}
	return r, nil
}

func orEmpty[T any](v *T) T {
	if v == nil {
		var none T
		return none
	}
	return *v
}

// SessionListParams are the parameters of session.list.
type SessionListParams struct {
	TenantID     string   `json:"tenant_id" jsonschema:"required"`
	AgentID      string   `json:"agent_id" jsonschema:"required"`
	Kind         string   `json:"kind" jsonschema:"enum=all,enum=sub-agent,enum=group,enum=dm" jsonschema_description:"Absent means all."`
	SinceMinutes *float64 `json:"since_minutes" jsonschema:"minimum=0,maximum=1e9" jsonschema_description:"Only sessions that changed within so many minutes."`
}

// SessionListResult is the result of session.list.
type SessionListResult struct {
	Sessions []SessionListItem `json:"sessions" jsonschema_description:"The newest first, at most 500."`
	Total    int64             `json:"total"`
}

// SessionListItem is a session of a list. Times are in milliseconds since 1970.
type SessionListItem struct {
	ConversationRef string           `json:"conversationRef"`
	AgentID         string           `json:"agentId"`
	Kind            string           `json:"kind"`
	Endpoint        *ChannelEndpoint `json:"endpoint,omitempty"`
	MessageCount    int64            `json:"messageCount"`
	TotalTokens     int64            `json:"totalTokens"`
	UpdatedAt       int64            `json:"updatedAt"`
	CreatedAt       int64            `json:"createdAt"`
}

func (s *Server) defineSessionList() Method {
	return Define("session.list", ScopeRPC, "Lists the sessions of an agent.", s.sessionList, ReadOnly)
}

// sessionList lists sessions; of another tenant there are none.
func (s *Server) sessionList(ctx context.Context, p *SessionListParams) (*SessionListResult, error) {
	r := &SessionListResult{Sessions: []SessionListItem{}}
	if p.TenantID != callerFrom(ctx).TenantID {
		return r, nil
	}
	kind, since := cmp.Or(p.Kind, "all"), int64(-1)
	if p.SinceMinutes != nil {
		since = int64(*p.SinceMinutes * 60_000)
	}
	var err error
	if r.Total, err = s.queries.SessionCount(ctx, s.pool, db.SessionCountParams{TenantID: p.TenantID, Agent: p.AgentID, Kind: kind, SinceMs: since}); err != nil {
		return nil, fmt.Errorf("count sessions: %w", err)
	}
	rows, err := s.queries.SessionPage(ctx, s.pool, db.SessionPageParams{TenantID: p.TenantID, Agent: p.AgentID, Kind: kind, SinceMs: since, MaxRows: maxSessions})
	if err != nil {
		return nil, fmt.Errorf("list sessions: %w", err)
	}
	for _, row := range rows {
		r.Sessions = append(r.Sessions, SessionListItem{
			ConversationRef: row.ConversationRef, AgentID: row.Agent, Kind: row.Kind, MessageCount: row.Messages,
			TotalTokens: row.InputTokens + row.OutputTokens, UpdatedAt: row.UpdatedAt.UnixMilli(), CreatedAt: row.CreatedAt.UnixMilli(),
		})
	}
	return r, nil
}
