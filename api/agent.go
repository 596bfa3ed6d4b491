package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel/trace"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/jobs/tracing"
)

// maxText is the size of the longest message in bytes (RC-10).
const maxText = 256 << 10

// The channel types of sessions that clients name themselves.
const (
	channelRPC     = "rpc"     // by a sessionId
	channelAPI     = "api"     // by a sessionKey, or not at all
	channelAgentex = "agentex" // a task
)

// UserID is a client's name for one of its users: 1 to 256 bytes without
// control characters.
type UserID string

// Validate checks the rule of the type.
func (id UserID) Validate() error {
	if SessionID(id).Validate() != nil {
		return invalid("must be 1 to 256 bytes without control characters")
	}
	return nil
}

// AgentRequestParams are the parameters of agent.request.
type AgentRequestParams struct {
	SessionID      SessionID    `json:"sessionId" jsonschema:"required" jsonschema_description:"The client's name for the session; a conversationRef or the id of a task addresses that session."`
	UserID         UserID       `json:"userId" jsonschema_description:"Who speaks; required by agents that remember facts of users."`
	AgentID        string       `json:"agentId" jsonschema_description:"The agent; absent means that of the session, for a new one the agent default."`
	Content        AgentContent `json:"content" jsonschema:"required"`
	IdempotencyKey string       `json:"idempotencyKey" jsonschema_description:"At most 128 bytes. The same key in the same session within 24 hours starts no second turn."`
}

// AgentContent is a message.
type AgentContent struct {
	Text   string       `json:"text" jsonschema:"required" jsonschema_extras:"x-max-bytes=262144"`
	Images []AgentImage `json:"images" jsonschema:"maxItems=8" jsonschema_description:"Not supported yet."`
}

// Validate checks what tags cannot say.
func (c *AgentContent) Validate() error {
	if len(c.Images) > 0 {
		return &InvalidError{Field: "images", Reason: "not_supported", Message: "are not supported yet"}
	}
	return checkText("text", c.Text)
}

func checkText(field, text string) error {
	if strings.TrimFunc(text, unicode.IsSpace) == "" {
		return &InvalidError{Field: field, Reason: "required", Message: "must not be empty"}
	}
	return nil
}

// AgentImage is an image of a message.
type AgentImage struct {
	Type string `json:"type" jsonschema:"required,enum=url,enum=base64"`
	URL  string `json:"url"`
	MIME string `json:"mime" jsonschema:"enum=image/png,enum=image/jpeg,enum=image/webp,enum=image/gif"`
	Data string `json:"data"`
}

// AgentRequestResult is the result of agent.request.
type AgentRequestResult struct {
	Phase     string    `json:"phase" jsonschema:"enum=thinking,enum=queued"`
	Status    string    `json:"status"` // always accepted
	SessionID SessionID `json:"sessionId"`
	TurnID    string    `json:"turnId"`
	RunID     string    `json:"runId"`
	Seq       int64     `json:"seq" jsonschema_description:"The number of the stored agent.request event in its session."`
	Position  int       `json:"position,omitempty" jsonschema_description:"In the session's queue; 1 is next."`
	Duplicate bool      `json:"duplicate,omitempty" jsonschema_description:"The key came before: this is the answer of then."`
}

func (s *Server) defineAgentRequest() Method {
	return Define("agent.request", ScopeRPC, "Accepts a message, and starts or queues a turn of its session.", s.agentRequest, Ours, Describe(
		"The answer is sent once the event, the run and its job are committed; it waits for no worker. "+
			"At most 20 turns wait in a session (`-32010`)."))
}

// agentRequest accepts a turn. Errors: *InvalidError, *jobs.BusyError,
// *jobs.ConflictError, *jobs.SessionAgentError, *jobs.TaskEndedError.
func (s *Server) agentRequest(ctx context.Context, p *AgentRequestParams) (*AgentRequestResult, error) {
	t := turnRequest{agent: p.AgentID, user: string(p.UserID), text: p.Content.Text, key: p.IdempotencyKey}
	if err := s.addressSession(ctx, &t, string(p.SessionID)); err != nil {
		return nil, err
	}
	if t.key != "" {
		t.keyScope = "agent.request:" + string(p.SessionID)
		t.digested = struct{ AgentID, UserID, Text string }{p.AgentID, t.user, t.text}
	}
	a, err := s.accept(ctx, &t)
	if err != nil {
		return nil, err
	}
	return &AgentRequestResult{
		Phase: a.Phase, Status: "accepted", SessionID: p.SessionID, TurnID: turnID(a.RunID), RunID: runID(a.RunID), Seq: a.Seq,
		Position: a.Position, Duplicate: a.Duplicate,
	}, nil
}

// turnRequest is a turn to be accepted for a token.
type turnRequest struct {
	agent, user, text string
	session           uuid.UUID        // an existing session, or
	spec              jobs.SessionSpec // what it is called
	fresh             bool             // spec is new for certain
	task              bool             // the session is a task: its messages are shown

	key, keyScope string
	digested      any // what the key stands for
}

// addressSession finds out which session a sessionId means, without asking the
// database for what can only be the client's own name.
func (s *Server) addressSession(ctx context.Context, t *turnRequest, name string) error {
	tenant := callerFrom(ctx).TenantID
	id, isTask, err := s.findAddressed(ctx, tenant, name)
	if err != nil {
		return err
	}
	if id != uuid.Nil {
		t.session, t.task = id, isTask
		return nil
	}
	sc := scope{tenant: tenant, agent: cmp.Or(t.agent, defaultAgent), channelType: channelRPC, conversationID: name}.JSON()
	t.spec = jobs.SessionSpec{ConversationRef: conversationRef(sc), ExternalID: name, ChannelType: channelRPC, Scope: sc}
	return nil
}

func optional[T any](v T, ok bool) *T {
	if !ok {
		return nil
	}
	return &v
}

// findSession finds the session that a client's sessionId names; uuid.Nil when
// there is none.
func (s *Server) findSession(ctx context.Context, tenant, name string) (uuid.UUID, error) {
	id, _, err := s.findAddressed(ctx, tenant, name)
	if err != nil || id != uuid.Nil {
		return id, err
	}
	found, err := s.runs.FindSession(ctx, tenant, jobs.SessionSpec{ExternalID: name})
	if err != nil || found == nil {
		return uuid.Nil, err
	}
	return found.ID, nil
}

// findAddressed finds the session that a client's sessionId names although it
// is not the client's own name for it: a task's id, or a cv_ reference.
func (s *Server) findAddressed(ctx context.Context, tenant, name string) (id uuid.UUID, isTask bool, err error) {
	if task, ok := parseUUID(name); ok {
		id, err = s.queries.SessionTask(ctx, s.pool, db.SessionTaskParams{ID: task, TenantID: tenant})
		isTask = err == nil
	} else if isRef(name) {
		var row db.Session
		row, err = s.queries.SessionByRef(ctx, s.pool, db.SessionByRefParams{TenantID: tenant, ConversationRef: name})
		id, isTask = row.ID, row.TaskStatus != nil
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return uuid.Nil, false, nil
	} else if err != nil {
		return uuid.Nil, false, fmt.Errorf("find session: %w", err)
	}
	return id, isTask, nil
}

// turnInput is the input of a run, and the content of its agent.request event.
type turnInput struct {
	Text   string `json:"text"`
	UserID string `json:"userId,omitempty"`
}

// accept commits a turn for the caller.
func (s *Server) accept(ctx context.Context, t *turnRequest) (*jobs.Accepted, error) {
	caller := callerFrom(ctx)
	input, err := marshal(turnInput{t.text, t.user})
	if err != nil {
		return nil, err
	}
	p := jobs.AcceptParams{
		TenantID: caller.TenantID, SessionID: t.session, Session: t.spec, Fresh: t.fresh, UserID: t.user, OwnerToken: caller.TokenID, Input: input,
		Terms: func(ctx context.Context, bound string) (jobs.Terms, error) {
			return s.terms(ctx, caller.TenantID, cmp.Or(t.agent, bound, defaultAgent), t.user)
		},
	}
	p.Session.OwnerToken = caller.TokenID
	if t.task {
		p.Message = &jobs.Message{ID: newID(), Content: userMessage(t.text)}
	}
	return s.acceptParams(ctx, p, t.key, t.keyScope, t.digested)
}

// acceptParams commits a turn under a key, if there is one. A repeat is answered
// also when its agent would refuse by now.
func (s *Server) acceptParams(ctx context.Context, p jobs.AcceptParams, key, scope string, digested any) (*jobs.Accepted, error) {
	if key != "" {
		var err error
		if p.Digest, err = digest(digested); err != nil {
			return nil, err
		}
		p.Key, p.KeyScope = key, scope
	}
	a, err := s.runs.Accept(ctx, p)
	if span := trace.SpanFromContext(ctx); err == nil && span.IsRecording() {
		span.SetAttributes(tracing.Tenant.String(p.TenantID), tracing.Run.String(a.RunID.String()),
			tracing.Session.String(a.SessionID.String()), tracing.Agent.String(a.Agent))
	}
	if _, refused := errors.AsType[*InvalidError](err); !refused || key == "" {
		return a, err
	}
	stored, lookErr := s.queries.IdempotencyGet(ctx, s.pool, db.IdempotencyGetParams{TenantID: p.TenantID, Scope: scope, Key: key})
	if lookErr != nil || string(stored.Digest) != string(p.Digest) || len(stored.Result) == 0 {
		return nil, err
	}
	a = &jobs.Accepted{Duplicate: true}
	if jsonErr := json.Unmarshal(stored.Result, a); jsonErr != nil {
		return nil, jsonErr
	}
	return a, nil
}

// terms are those of an agent that may run turns, for a user.
func (s *Server) terms(ctx context.Context, tenant, name, user string) (jobs.Terms, error) {
	a, err := s.activeAgent(ctx, tenant, name)
	if err != nil {
		return jobs.Terms{}, err
	}
	if a.needsUser && user == "" {
		return jobs.Terms{}, &InvalidError{Field: "userId", Reason: "required_by_agent", Message: fmt.Sprintf("is required by agent %q", name)}
	}
	return jobs.Terms{Agent: name, Version: a.version, TurnTimeout: a.turnTimeout, QueueCap: s.config.MaxQueued}, nil
}

// AgentExecuteParams are the parameters of agent.execute.
type AgentExecuteParams struct {
	Message        string           `json:"message" jsonschema:"required" jsonschema_extras:"x-max-bytes=262144"`
	AgentID        string           `json:"agentId" jsonschema_description:"The agent; absent means that of the session, for a new one the agent default."`
	SessionKey     *AgentSessionKey `json:"sessionKey" jsonschema_description:"The conversation; an unseen one is made. Without sessionKey and sessionId each call is a conversation of its own."`
	Scopes         []string         `json:"scopes" jsonschema_description:"Scopes of the token that the call claims. Turns never hold a token's scopes, so they narrow nothing."`
	SessionID      SessionID        `json:"sessionId" jsonschema_description:"As that of agent.request, in place of sessionKey."`
	UserID         UserID           `json:"userId" jsonschema_description:"Who speaks; absent means sessionKey.userId."`
	IdempotencyKey string           `json:"idempotencyKey" jsonschema_description:"At most 128 bytes. The same key within 24 hours waits for the same turn."`
	TimeoutMs      int64            `json:"timeoutMs" jsonschema:"minimum=1,maximum=3600000,default=600000" jsonschema_description:"How long to wait; the turn goes on."`
}

// Validate checks what tags cannot say.
func (p *AgentExecuteParams) Validate() error {
	if p.SessionID != "" && p.SessionKey != nil {
		return &InvalidError{Field: "sessionKey", Reason: "invalid", Message: "must not stand beside sessionId"}
	}
	return checkText("message", p.Message)
}

// AgentSessionKey names a conversation by its parts.
type AgentSessionKey struct {
	TenantID        string `json:"tenantId" jsonschema_description:"The token's own."`
	UserID          UserID `json:"userId"`
	ChannelID       string `json:"channelId"`
	ConversationRef string `json:"conversationRef" jsonschema_description:"Alone, or with userId: an existing conversation."`
}

// Validate checks what tags cannot say.
func (k *AgentSessionKey) Validate() error {
	if k.ChannelID != "" && SessionID(k.ChannelID).Validate() != nil {
		return &InvalidError{Field: "channelId", Reason: "invalid", Message: "must be 1 to 256 bytes without control characters"}
	}
	if k.ConversationRef != "" && k.ChannelID != "" {
		return &InvalidError{Field: "channelId", Reason: "invalid", Message: "must not stand beside conversationRef"}
	}
	return nil
}

// TokensUsed counts tokens: input with what was cached, output with reasoning.
type TokensUsed struct {
	Input  int64 `json:"input"`
	Output int64 `json:"output"`
	Total  int64 `json:"total"`
}

// AgentExecuteResult is the result of agent.execute.
type AgentExecuteResult struct {
	Response        string     `json:"response"`
	TokensUsed      TokensUsed `json:"tokensUsed"`
	FinishReason    string     `json:"finishReason" jsonschema_description:"stop; length: the answer was cut; clarify: it is a question."`
	RunID           string     `json:"runId"`
	TurnID          string     `json:"turnId"`
	ConversationRef string     `json:"conversationRef"`
	CostMicros      int64      `json:"costMicros" jsonschema_description:"Millionths of the currency unit; 0 also where no price is known."`
}

func (s *Server) defineAgentExecute() Method {
	return DefineWait("agent.execute", ScopeRPC, "Runs a turn and waits for its answer.", s.agentExecute, Describe(
		"Queueing and tools are waited through. A turn that ends in `agent.error` answers `-32015`; a wait that ends before its turn, "+
			"`-32016`: the turn goes on, and the same idempotency key waits again."))
}

// agentExecute accepts a turn; the wait returns its answer. Errors: those of
// agentRequest, *TurnFailedError, *StillRunningError.
func (s *Server) agentExecute(ctx context.Context, p *AgentExecuteParams) (func(context.Context) (*AgentExecuteResult, error), error) {
	caller := callerFrom(ctx)
	for i, name := range p.Scopes {
		if wanted, err := ParseScopes(p.Scopes[i : i+1]); err != nil || !caller.Scopes.Has(wanted) {
			return nil, &InvalidError{Field: fmt.Sprintf("scopes[%d]", i), Reason: "invalid", Message: fmt.Sprintf("must be a scope of the token, not %.20q", name)}
		}
	}
	t := turnRequest{agent: p.AgentID, user: string(p.UserID), text: p.Message, key: p.IdempotencyKey}
	var err error
	switch {
	case p.SessionID != "":
		err = s.addressSession(ctx, &t, string(p.SessionID))
	case p.SessionKey != nil:
		err = s.addressKey(ctx, &t, p.SessionKey)
	default:
		sc := scope{tenant: caller.TenantID, agent: cmp.Or(t.agent, defaultAgent), channelType: channelAPI, conversationID: newID().String(), userID: t.user}.JSON()
		t.spec, t.fresh = jobs.SessionSpec{ConversationRef: conversationRef(sc), ChannelType: channelAPI, Scope: sc, UserID: t.user}, true
	}
	if err != nil {
		return nil, err
	}
	if t.key != "" {
		t.keyScope = "agent.execute"
		t.digested = struct {
			AgentID, SessionID, UserID, Message string
			SessionKey                          *AgentSessionKey
			Scopes                              []string
		}{p.AgentID, string(p.SessionID), string(p.UserID), p.Message, p.SessionKey, p.Scopes}
	}
	a, err := s.accept(ctx, &t)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) (*AgentExecuteResult, error) {
		o, err := s.await(ctx, caller.TenantID, a, time.Duration(p.TimeoutMs)*time.Millisecond)
		if err != nil {
			return nil, err
		}
		return s.executed(ctx, a, o)
	}, nil
}

// addressKey finds out which session a sessionKey means.
func (s *Server) addressKey(ctx context.Context, t *turnRequest, k *AgentSessionKey) error {
	tenant := callerFrom(ctx).TenantID
	if k.TenantID != "" && k.TenantID != tenant {
		return &InvalidError{Field: "sessionKey.tenantId", Reason: "unknown", Message: "names no tenant of this token"}
	}
	if t.user == "" {
		t.user = string(k.UserID)
	}
	if k.ConversationRef != "" {
		found, err := s.queries.SessionByRef(ctx, s.pool, db.SessionByRefParams{TenantID: tenant, ConversationRef: k.ConversationRef})
		if errors.Is(err, pgx.ErrNoRows) {
			return &InvalidError{Field: "sessionKey.conversationRef", Reason: "unknown", Message: "names no conversation"}
		} else if err != nil {
			return fmt.Errorf("find session: %w", err)
		}
		t.session, t.task = found.ID, found.TaskStatus != nil
		return nil
	}
	user := cmp.Or(string(k.UserID), t.user)
	sc := scope{tenant: tenant, agent: cmp.Or(t.agent, defaultAgent), channelType: channelAPI, conversationID: k.ChannelID, userID: user}.JSON()
	t.spec = jobs.SessionSpec{ConversationRef: conversationRef(sc), ChannelType: channelAPI, Scope: sc, UserID: user}
	return nil
}

// await waits for the end of a turn, at most for a time and as long as the
// server may wait. Error: *StillRunningError, or ctx's cause.
func (s *Server) await(ctx context.Context, tenant string, a *jobs.Accepted, limit time.Duration) (jobs.Outcome, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.waiting, func() { cancel(errWaitOver) })()
	timer := time.AfterFunc(limit, func() { cancel(errWaitOver) })
	defer timer.Stop()
	o, err := s.runs.Wait(ctx, tenant, a.RunID)
	if err == nil || !errors.Is(err, errWaitOver) && !errors.Is(context.Cause(ctx), errWaitOver) {
		return o, err
	}
	ctx, done := context.WithTimeout(context.WithoutCancel(ctx), cacheLoad)
	defer done()
	still := &StillRunningError{
		RunID: runID(a.RunID), TurnID: turnID(a.RunID), ConversationRef: a.ConversationRef, Phase: jobs.PhaseThinking, PendingCalls: []PendingCall{},
	}
	if row, err := s.queries.RunPhase(ctx, s.pool, a.RunID); err == nil {
		still.Phase = phase(row.State, row.WaitsFor, row.Cancelling, row.Behind)
	}
	return jobs.Outcome{}, still
}

// turnResult is a run's result as workers store it.
type turnResult struct {
	Text         string `json:"text"`
	FinishReason string `json:"finishReason"`
	Usage        struct {
		Input      int64  `json:"input"`
		CacheRead  int64  `json:"cacheRead"`
		CacheWrite int64  `json:"cacheWrite"`
		Output     int64  `json:"output"`
		Reasoning  int64  `json:"reasoning"`
		CostMicros *int64 `json:"costMicros"`
	} `json:"usage"`
}

// executed makes the answer of a turn that has ended.
func (s *Server) executed(ctx context.Context, a *jobs.Accepted, o jobs.Outcome) (*AgentExecuteResult, error) {
	if o.State != db.RunStateCompleted {
		return nil, s.turnFailed(ctx, a, o)
	}
	var r turnResult
	if err := json.Unmarshal(o.Result, &r); err != nil {
		return nil, fmt.Errorf("result of run %s: %w", a.RunID, err)
	}
	used := TokensUsed{Input: r.Usage.Input + r.Usage.CacheRead + r.Usage.CacheWrite, Output: r.Usage.Output + r.Usage.Reasoning}
	used.Total = used.Input + used.Output
	out := &AgentExecuteResult{
		Response: r.Text, TokensUsed: used, FinishReason: cmp.Or(r.FinishReason, "stop"), RunID: runID(a.RunID), TurnID: turnID(a.RunID),
		ConversationRef: a.ConversationRef,
	}
	if r.Usage.CostMicros != nil {
		out.CostMicros = *r.Usage.CostMicros
	}
	return out, nil
}

// turnFailed makes the error of a turn that ended in agent.error.
func (s *Server) turnFailed(ctx context.Context, a *jobs.Accepted, o jobs.Outcome) error {
	var c jobs.ErrorContent
	if err := json.Unmarshal(o.Error, &c); err != nil {
		return fmt.Errorf("error of run %s: %w", a.RunID, err)
	}
	used, err := s.queries.RunUsage(ctx, s.pool, a.RunID)
	if err != nil {
		return fmt.Errorf("usage of run %s: %w", a.RunID, err)
	}
	return &TurnFailedError{
		Kind: c.Kind, Message: c.Message, Reason: c.Reason, Retryable: c.Retryable, Partial: c.Partial,
		TokensUsed: TokensUsed{used.Input, used.Output, used.Input + used.Output},
		RunID:      runID(a.RunID), TurnID: turnID(a.RunID), ConversationRef: a.ConversationRef,
	}
}

// phase says what a run does, in the words of RC-143.
func phase(state db.RunState, waits *db.WaitKind, cancelling, behind bool) string {
	switch {
	case cancelling && state == db.RunStateRunning:
		return jobs.PhaseCancelling
	case behind:
		return jobs.PhaseQueued
	case waits != nil && *waits == db.WaitKindTool:
		return jobs.PhaseToolWait
	case waits != nil && *waits == db.WaitKindApproval:
		return jobs.PhaseApproval
	default: // also while it waits for a provider, or for sub-agents
		return jobs.PhaseThinking
	}
}

// AgentStatusParams are the parameters of agent.status.
type AgentStatusParams struct {
	SessionID SessionID `json:"sessionId" jsonschema:"required" jsonschema_description:"As that of agent.request."`
}

// PendingCall is a tool call without a result.
type PendingCall struct {
	CallID   string `json:"callId"`
	Tool     string `json:"tool"`
	Deadline string `json:"deadline"`
}

// BudgetState is a budget in its current period.
type BudgetState struct {
	Name     string  `json:"name"`
	Unit     string  `json:"unit"`
	Period   string  `json:"period" jsonschema:"enum=session,enum=daily,enum=weekly,enum=monthly,enum=lifetime"`
	Limit    int64   `json:"limit"`
	Used     int64   `json:"used"`
	ResetsAt *string `json:"resetsAt" jsonschema:"nullable"`
}

// AgentStatusResult is the result of agent.status.
type AgentStatusResult struct {
	SessionID    SessionID     `json:"sessionId"`
	Known        bool          `json:"known" jsonschema_description:"Whether the session was ever used."`
	Phase        string        `json:"phase" jsonschema:"enum=idle,enum=queued,enum=thinking,enum=tool_wait,enum=approval,enum=clarify,enum=cancelling"`
	TurnID       string        `json:"turnId,omitempty" jsonschema_description:"Of the executing turn."`
	RunID        string        `json:"runId,omitempty"`
	Queued       int           `json:"queued" jsonschema_description:"Turns that wait behind it."`
	Seq          int64         `json:"seq" jsonschema_description:"The number of the session's last event."`
	PendingCalls []PendingCall `json:"pendingCalls"`
	Budgets      []BudgetState `json:"budgets"`
}

func (s *Server) defineAgentStatus() Method {
	return Define("agent.status", ScopeRPC, "Says what a session is doing. It makes no session.", s.agentStatus, Ours, ReadOnly)
}

func (s *Server) agentStatus(ctx context.Context, p *AgentStatusParams) (*AgentStatusResult, error) {
	r := &AgentStatusResult{SessionID: p.SessionID, Phase: jobs.PhaseIdle, PendingCalls: []PendingCall{}, Budgets: []BudgetState{}}
	name := string(p.SessionID)
	tenant := callerFrom(ctx).TenantID
	id, err := s.findSession(ctx, tenant, name)
	if err != nil || id == uuid.Nil {
		return r, err
	}
	row, err := s.queries.SessionStatus(ctx, s.pool, db.SessionStatusParams{TenantID: tenant, ID: id})
	if errors.Is(err, pgx.ErrNoRows) {
		return r, nil
	} else if err != nil {
		return nil, fmt.Errorf("session status: %w", err)
	}
	r.Known, r.Queued, r.Seq, r.Phase = true, int(row.Queued), row.EventSeq, row.LastPhase
	if row.HeadRunID != nil && row.State != nil {
		r.TurnID, r.RunID = turnID(*row.HeadRunID), runID(*row.HeadRunID)
		r.Phase = phase(*row.State, row.WaitsFor, row.Cancelling, false)
	}
	return r, nil
}
