package tool

import (
	"encoding/json"
	"time"
)

// Call is one tool call of a model.
type Call struct {
	RunID  string
	CallID string // unique in the installation
	Tool   string
	Args   json.RawMessage // the arguments object, as the model sent it
	// IdempotencyKey is the same for every attempt of this call, over retries,
	// resumes and workers.
	IdempotencyKey string
	Traceparent    string // W3C trace context; "" for none
	Attempt        int    // how often this call was made before
}

// Result is what a call came to: Output or Err, never both.
type Result struct {
	Output json.RawMessage // valid JSON and UTF-8, without U+0000; null is a result
	Err    *Failure
}

// Failure is an error result. The model sees Kind and Message.
type Failure struct {
	Kind    Kind   `json:"kind"`
	Message string `json:"message"`
	Rule    string `json:"rule,omitempty"` // of kind denied, the policy rule that decided; "" when no rule did
	// Retryable says that the same call may succeed later, by what the other
	// side answered. Whether it may be made again is for the tool's idempotency
	// to say.
	Retryable  bool          `json:"-"`
	RetryAfter time.Duration `json:"-"` // what the other side asked for; 0 when it did not
}

// Kind says what went wrong, for programs and models.
type Kind string

// The kinds of failures.
const (
	Denied           Kind = "denied"            // by policy, an address guard, or a reserved key
	InvalidArguments Kind = "invalid_arguments" // they fail the tool's schema
	UnknownTool      Kind = "unknown_tool"      // the agent does not have it
	TooManyCalls     Kind = "too_many_calls"    // beyond the limit of its group
	Timeout          Kind = "timeout"           // no complete answer in the tool's time
	HTTPStatus       Kind = "http_status"       // an answer that is no result
	Network          Kind = "network"           // no answer
	TooLarge         Kind = "too_large"         // more than may be kept
	NotText          Kind = "not_text"          // an answer that a model cannot read
	Interrupted      Kind = "interrupted"       // its end is unknown, and it may not be made again
	Cancelled        Kind = "cancelled"         // the turn went away
	SecretRefused    Kind = "secret_refused"    // a fact that looks like a credential
)

func failed(kind Kind, message string) Result {
	return Result{Err: &Failure{Kind: kind, Message: message}}
}
