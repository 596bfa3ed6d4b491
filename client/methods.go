package client

import (
	"context"
	"encoding/json"
	"time"
)

// TokensUsed counts the tokens of a turn.
type TokensUsed struct {
	Input  int64 `json:"input"`
	Output int64 `json:"output"`
	Total  int64 `json:"total"`
}

// ExecuteParams are a message to an agent.
type ExecuteParams struct {
	Message string `json:"message"`
	// AgentID is the agent's name; empty means default.
	AgentID string `json:"agentId,omitempty"`
	// SessionID continues a session, or names a new one. Empty means a new
	// session without a name.
	SessionID string `json:"sessionId,omitempty"`
	UserID    string `json:"userId,omitempty"`
	// IdempotencyKey makes the call repeatable. It is required here.
	IdempotencyKey string `json:"idempotencyKey"`
	// TimeoutMs bounds the wait, not the turn; 0 means ten minutes.
	TimeoutMs int64 `json:"timeoutMs,omitempty"`
}

// ExecuteResult is the answer of a turn.
type ExecuteResult struct {
	Response        string     `json:"response"`
	TokensUsed      TokensUsed `json:"tokensUsed"`
	FinishReason    string     `json:"finishReason"`
	RunID           string     `json:"runId"`
	TurnID          string     `json:"turnId"`
	ConversationRef string     `json:"conversationRef"`
	CostMicros      int64      `json:"costMicros"`
}

// StillRunning is the data of a CodeStillRunning error.
type StillRunning struct {
	RunID           string `json:"runId"`
	ConversationRef string `json:"conversationRef"`
	Phase           string `json:"phase"`
}

// TurnFailed is the data of a CodeTurnFailed error.
type TurnFailed struct {
	Kind            string     `json:"kind"`
	Message         string     `json:"message"`
	Retryable       bool       `json:"retryable"`
	Partial         string     `json:"partial"`
	TokensUsed      TokensUsed `json:"tokensUsed"`
	RunID           string     `json:"runId"`
	ConversationRef string     `json:"conversationRef"`
}

// Execute sends a message and waits for the turn's end.
func (c *Client) Execute(ctx context.Context, p ExecuteParams) (*ExecuteResult, error) {
	return call1[ExecuteResult](ctx, c, "agent.execute", p, Key(p.IdempotencyKey))
}

// Accepted is the answer of agent.request.
type Accepted struct {
	Phase     string `json:"phase"` // thinking, queued
	SessionID string `json:"sessionId"`
	TurnID    string `json:"turnId"`
	RunID     string `json:"runId"`
	Seq       int64  `json:"seq"`
	// Position in the session's queue; 1 is next.
	Position int `json:"position"`
}

// Run is one durable piece of work.
type Run struct {
	RunID           string `json:"runId"`
	Kind            string `json:"kind"`
	State           string `json:"state"`
	AgentID         string `json:"agentId"`
	SessionID       string `json:"sessionId,omitempty"`
	ConversationRef string `json:"conversationRef,omitempty"`
	TurnID          string `json:"turnId,omitempty"`
	RootRunID       string `json:"rootRunId"`
	ParentRunID     string `json:"parentRunId,omitempty"`
	Depth           int    `json:"depth"`
	WorkerID        string `json:"workerId,omitempty"`
	Epoch           int    `json:"epoch"`
	Losses          int    `json:"losses"`
	EndReason       string `json:"endReason,omitempty"`
	Error           string `json:"error,omitempty"`
	WaitsFor        string `json:"waitsFor,omitempty"`
	StepsExecuted   int    `json:"stepsExecuted"`
	DeadlineAt      string `json:"deadlineAt,omitempty"`
	CreatedAt       string `json:"createdAt"`
	StartedAt       string `json:"startedAt,omitempty"`
	FinishedAt      string `json:"finishedAt,omitempty"`
}

// Final says whether the run has ended.
func (r *Run) Final() bool {
	switch r.State {
	case "queued", "running", "waiting":
		return false
	}
	return true
}

// Step is one recorded call of a run.
type Step struct {
	Seq        int    `json:"seq"`
	Kind       string `json:"kind"`
	Status     string `json:"status"`
	Tool       string `json:"tool,omitempty"`
	CallID     string `json:"callId,omitempty"`
	Attempt    int    `json:"attempt"`
	StartedAt  string `json:"startedAt,omitempty"`
	FinishedAt string `json:"finishedAt,omitempty"`
	Error      string `json:"error,omitempty"`
}

// RunDetail is a run with its steps. Version grows with every change.
type RunDetail struct {
	Run
	Version int64  `json:"version"`
	Steps   []Step `json:"steps"`
}

// RunListParams select runs; the zero value selects all.
type RunListParams struct {
	State     string `json:"state,omitempty"`
	Kind      string `json:"kind,omitempty"`
	AgentID   string `json:"agentId,omitempty"`
	SessionID string `json:"sessionId,omitempty"`
	RootRunID string `json:"rootRunId,omitempty"`
	Limit     int    `json:"limit,omitempty"`
	Cursor    string `json:"cursor,omitempty"`
}

// RunList is a page of runs, newest first.
type RunList struct {
	Runs       []Run  `json:"runs"`
	NextCursor string `json:"nextCursor,omitempty"`
}

// Runs lists runs.
func (c *Client) Runs(ctx context.Context, p RunListParams) (*RunList, error) {
	return call1[RunList](ctx, c, "run.list", p, Reads)
}

// Run reads one run.
func (c *Client) Run(ctx context.Context, id string) (*RunDetail, error) {
	return call1[RunDetail](ctx, c, "run.get", struct {
		RunID string `json:"runId"`
	}{id}, Reads)
}

// AwaitRun reads a run once its version has passed after, or it has ended, or
// the wait is over.
func (c *Client) AwaitRun(ctx context.Context, id string, after int64, wait time.Duration) (*RunDetail, error) {
	return call1[RunDetail](ctx, c, "run.get", struct {
		RunID        string `json:"runId"`
		WaitMs       int64  `json:"waitMs"`
		AfterVersion int64  `json:"afterVersion"`
	}{id, wait.Milliseconds(), after}, Reads)
}

// Cancelled says what a cancel found.
type Cancelled struct {
	RunID  string `json:"runId"`
	Status string `json:"status"` // cancelling, cancelled, already_ended
	State  string `json:"state"`
}

// CancelRun asks a run to end at its next safe point. Repeating it does no
// harm.
func (c *Client) CancelRun(ctx context.Context, id, reason string) (*Cancelled, error) {
	return call1[Cancelled](ctx, c, "run.cancel", struct {
		RunID  string `json:"runId"`
		Reason string `json:"reason,omitempty"`
	}{id, reason}, Reads)
}

// KillRun ends a run's whole tree and returns how many runs that were. It is
// sent once.
func (c *Client) KillRun(ctx context.Context, root string) (int, error) {
	var r struct {
		Killed int `json:"killed"`
	}
	err := c.Call(ctx, "run.kill", struct {
		RootRunID string `json:"rootRunId"`
	}{root}, &r)
	return r.Killed, err
}

// AgentNames lists the agents.
func (c *Client) AgentNames(ctx context.Context) ([]string, error) {
	r, err := call1[struct {
		Agents []string `json:"agents"`
	}](ctx, c, "agents.list", nil, Reads)
	if err != nil {
		return nil, err
	}
	return r.Agents, nil
}

// Agent is an agent with its configuration.
type Agent struct {
	AgentID   string          `json:"agentId"`
	Config    json.RawMessage `json:"config"`
	Suspended bool            `json:"suspended"`
	IsDefault bool            `json:"isDefault"`
}

// Agent reads one agent.
func (c *Client) Agent(ctx context.Context, name string) (*Agent, error) {
	return call1[Agent](ctx, c, "agents.get", struct {
		AgentID string `json:"agentId"`
	}{name}, Reads)
}

// CreatedAgent is the answer of CreateAgent.
type CreatedAgent struct {
	AgentID string          `json:"agentId"`
	Config  json.RawMessage `json:"config"`
	Created bool            `json:"created"`
}

// CreateAgent creates an agent from its configuration, which names it.
func (c *Client) CreateAgent(ctx context.Context, config json.RawMessage, key string) (*CreatedAgent, error) {
	return call1[CreatedAgent](ctx, c, "agents.create", config, Key(key))
}

// Worker is one process of the fleet.
type Worker struct {
	WorkerID    string   `json:"workerId"`
	Hostname    string   `json:"hostname"`
	PID         int      `json:"pid"`
	State       string   `json:"state"`
	Version     string   `json:"version"`
	Slots       int      `json:"slots"`
	Running     int      `json:"running"`
	Queues      []string `json:"queues"`
	StartedAt   string   `json:"startedAt"`
	HeartbeatAt string   `json:"heartbeatAt"`
	Lock        bool     `json:"lock"`
	Wanted      string   `json:"wanted,omitempty"` // by an operator: quiet or drain
}

// Workers lists the fleet.
func (c *Client) Workers(ctx context.Context) ([]Worker, error) {
	r, err := call1[struct {
		Workers []Worker `json:"workers"`
	}](ctx, c, "worker.list", nil, Reads)
	if err != nil {
		return nil, err
	}
	return r.Workers, nil
}

// Ping asks whether the API answers and takes the token.
func (c *Client) Ping(ctx context.Context) (ts time.Time, err error) {
	r, err := call1[struct {
		TS float64 `json:"ts"`
	}](ctx, c, "system.ping", nil, Reads)
	if err != nil {
		return time.Time{}, err
	}
	return time.UnixMilli(int64(r.TS)), nil
}

func call1[R any](ctx context.Context, c *Client, method string, params any, options ...Option) (*R, error) {
	r := new(R)
	if err := c.Call(ctx, method, params, r, options...); err != nil {
		return nil, err
	}
	return r, nil
}

// Released is the answer of ReleaseRun.
type Released struct {
	RunID   string `json:"runId"`   // the new run
	RetryOf string `json:"retryOf"` // the poisoned one
}

// ReleaseRun starts a new run in place of a poisoned one. Repeating it within a
// day starts no second.
func (c *Client) ReleaseRun(ctx context.Context, id string) (*Released, error) {
	return call1[Released](ctx, c, "run.release", struct {
		RunID string `json:"runId"`
	}{id}, Reads)
}
