// Package model calls language models. A Provider makes one call and returns
// its finished result; it stores nothing, retries nothing and knows no run.
// Retries, fall-back and budgets belong to the turn worker.
package model

import (
	"context"
	"encoding/json"
	"fmt"
	"time"
)

// Role says who speaks in a Message.
type Role string

// The roles of a conversation. Instructions travel in Request.System.
const (
	RoleUser      Role = "user"
	RoleAssistant Role = "assistant"
	RoleTool      Role = "tool"
)

// Message is one entry of the context sent to a model.
type Message struct {
	Role Role   `json:"role"`
	Text string `json:"text"`
	// Calls are the tool calls an assistant message asked for, in call order.
	Calls []ToolCall `json:"calls,omitempty"`
	// CallID and Tool correlate a tool message with the call it answers.
	CallID string `json:"callId,omitempty"`
	Tool   string `json:"tool,omitempty"`
	// IsError marks a tool result that reports a failure.
	IsError bool `json:"isError,omitempty"`
}

// ToolCall is a model's request to run a tool.
type ToolCall struct {
	// ID correlates call and result towards the provider. It is unique within
	// one model call; a provider that sends none gets a minted one.
	ID string `json:"id"`
	// Tool is weir's own name of the tool, never the provider's spelling.
	Tool string `json:"tool"`
	// Args is the JSON object of arguments; {} when the model sent none.
	// Invalid JSON from a model is kept as a JSON string.
	Args json.RawMessage `json:"args"`
}

// Tool describes a tool to a model.
type Tool struct {
	Name        string          `json:"name"`
	Description string          `json:"description,omitempty"`
	Parameters  json.RawMessage `json:"parameters,omitempty"` // JSON Schema; nil means {"type":"object"}
}

// Fact is one remembered key and value that accompanies a call.
type Fact struct {
	Key   string          `json:"key"`
	Value json.RawMessage `json:"value"`
}

// Request is one model call.
type Request struct {
	Model    string
	System   string // the agent's instructions; stable over the turn
	Facts    []Fact // sorted by key
	Tools    []Tool // sorted by name
	Messages []Message
	// Now is told to the model after everything that is stable, so that two
	// identical requests share their prefix.
	Now             time.Time
	MaxOutputTokens int            // 0 means 4096
	Parameters      map[string]any // passed to the provider as they are

	// CallIndex counts the model calls already stored for this turn.
	CallIndex int
	// Attempt counts the stored failed attempts of this very call.
	Attempt int
	// RateLimitKey is shared by calls that a provider limits together.
	RateLimitKey string
}

// Usage is five token counts that do not overlap, and what they cost.
// Their sum is what a token budget counts.
type Usage struct {
	Input      int64 `json:"input"` // uncached
	CacheRead  int64 `json:"cacheRead"`
	CacheWrite int64 `json:"cacheWrite"`
	Output     int64 `json:"output"` // visible
	Reasoning  int64 `json:"reasoning"`
	// CostMicros is the provider-reported cost, else the price table's, in
	// millionths of a US dollar; nil when neither is known, never 0 for that.
	CostMicros *int64 `json:"costMicros"`
	Estimated  bool   `json:"estimated"` // counted by us: the provider's numbers never arrived
}

// Total is the sum of the five counts.
func (u Usage) Total() int64 {
	return u.Input + u.CacheRead + u.CacheWrite + u.Output + u.Reasoning
}

// Finish says why a model stopped.
type Finish string

// What a model can stop for.
const (
	FinishStop   Finish = "stop"
	FinishLength Finish = "length" // cut at MaxOutputTokens
	FinishTools  Finish = "tools"
	FinishFilter Finish = "filter" // refused by the provider's content filter
)

// Response is a finished model call.
type Response struct {
	Text    string
	Calls   []ToolCall
	Clarify string   // a question back to the user; ends the turn
	Plan    []string // replaces the turn's plan
	Finish  Finish
	Usage   Usage
	Model   string // the model that really answered
}

// Sink takes streamed text. It may be nil and must not block.
type Sink func(textDelta string)

// Provider calls models. Implementations are safe for concurrent use and
// return *Error for everything a provider can do wrong, or the context's cause.
type Provider interface {
	Call(ctx context.Context, req *Request, sink Sink) (*Response, error)
}

// Error is a failed model call.
type Error struct {
	Status     int           // HTTP status, 0 when none arrived
	Reason     string        // stalled, rate_limited, overloaded, bad_request, auth, bad_response, network, …
	Message    string        // for people; credentials are never in it
	Retryable  bool          // the same call may succeed later
	RetryAfter time.Duration // what the provider asked for; 0 when it did not
	// RateLimitKey replaces Request.RateLimitKey when the provider named another.
	RateLimitKey string
	// Usage is what the call consumed before it failed; nil when unknown.
	Usage *Usage
}

func (e *Error) Error() string {
	if e.Status != 0 {
		return fmt.Sprintf("model: %s (HTTP %d): %s", e.Reason, e.Status, e.Message)
	}
	return fmt.Sprintf("model: %s: %s", e.Reason, e.Message)
}

// AbortedError is a call that its own context ended after the request may have
// reached the provider. It wraps the context's cause, so errors.Is sees through
// it, and says what the call consumed, which counts all the same.
type AbortedError struct {
	Usage Usage
	Cause error // context.Cause of the call's context
}

func (e *AbortedError) Error() string { return "model: call aborted: " + e.Cause.Error() }

// Unwrap returns the context's cause.
func (e *AbortedError) Unwrap() error { return e.Cause }
