package model

import (
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// The reasons of an Error that callers branch on.
const (
	ReasonStalled          = "stalled"           // silent for longer than a limit
	ReasonRateLimited      = "rate_limited"      // 429
	ReasonOverloaded       = "overloaded"        // 503, 529
	ReasonServerError      = "server_error"      // any other 5xx
	ReasonNetwork          = "network"           // no connection, or it broke
	ReasonTimeout          = "timeout"           // 408: the provider gave up
	ReasonConflict         = "conflict"          // 409: the provider asks to try again
	ReasonBadResponse      = "bad_response"      // an answer that makes no sense
	ReasonBadRequest       = "bad_request"       // any other 4xx
	ReasonAuth             = "auth"              // 401, 403
	ReasonQuotaExhausted   = "quota_exhausted"   // out of credit: waiting does not help
	ReasonContextExhausted = "context_exhausted" // the context is larger than the model's window
)

const (
	// statusOverloaded is what Anthropic answers when it has no capacity.
	statusOverloaded = 529
	// maxRetryAfter is the longest wait that is taken from a provider.
	maxRetryAfter = 24 * time.Hour
	// maxErrorText bounds a provider's text in an error.
	maxErrorText = 1000
)

// classify says what an HTTP status means for the call.
func classify(status int) (reason string, retryable bool) {
	switch {
	case status == http.StatusTooManyRequests:
		return ReasonRateLimited, true
	case status == http.StatusServiceUnavailable, status == statusOverloaded:
		return ReasonOverloaded, true
	case status >= 500:
		return ReasonServerError, true
	case status == http.StatusRequestTimeout:
		return ReasonTimeout, true
	case status == http.StatusConflict, status == http.StatusTooEarly:
		return ReasonConflict, true
	case status == http.StatusUnauthorized, status == http.StatusForbidden:
		return ReasonAuth, false
	case status == http.StatusPaymentRequired:
		return ReasonQuotaExhausted, false
	case status >= 400:
		return ReasonBadRequest, false
	}
	return ReasonBadResponse, false // a redirect, which is never followed
}

// statusError is the Error of an answer that is not a success.
func statusError(status int, header http.Header, body []byte, now time.Time) *Error {
	fault := parseFault(body)
	e := fault.error(status)
	e.RetryAfter = retryAfter(header, now)
	return e
}

// fault is what a provider tells about a failure. The fields are empty where it
// does not.
type fault struct {
	kind    string // OpenAI's and Anthropic's error.type
	code    string // OpenAI's error.code or Anthropic's error.details.error_code
	message string
	status  int // some gateways put it in error.code
}

// parseFault reads the error objects that providers send as a body or in the
// middle of a stream: OpenAI's and Anthropic's {"error": {…}}, the same without
// the wrapper (vLLM), and {"error": "…"} (Ollama).
func parseFault(data []byte) fault {
	var body struct {
		Error   json.RawMessage `json:"error"`
		Message string          `json:"message"`
		Detail  json.RawMessage `json:"detail"`
	}
	if !json.Valid(data) {
		text := strings.TrimSpace(string(data))
		if strings.HasPrefix(text, "<") {
			text = "" // a proxy's page
		}
		return fault{message: text}
	}
	_ = json.Unmarshal(data, &body) // a field of an unexpected type leaves the others filled
	object := body.Error
	if isNull(object) {
		object = data
	}
	var text string
	if json.Unmarshal(object, &text) == nil {
		return fault{message: text}
	}
	var detail struct {
		Type    string          `json:"type"`
		Code    json.RawMessage `json:"code"`
		Message string          `json:"message"`
		Details struct {
			ErrorCode string `json:"error_code"`
		} `json:"details"`
	}
	_ = json.Unmarshal(object, &detail)
	f := fault{kind: detail.Type, code: detail.Details.ErrorCode, message: detail.Message}
	if f.message == "" {
		_ = json.Unmarshal(body.Detail, &f.message)
	}
	var status int
	if json.Unmarshal(detail.Code, &status) == nil {
		if status >= 400 && status <= 599 {
			f.status = status
		}
	} else if f.code == "" {
		_ = json.Unmarshal(detail.Code, &f.code)
	}
	return f
}

func isNull(raw json.RawMessage) bool { return len(raw) == 0 || string(raw) == "null" }

// statusOf is the HTTP status that goes with the fault, for one that arrives in
// the middle of an answer whose status was 200; 0 when it names none.
func (f fault) statusOf() int {
	for _, name := range []string{f.kind, f.code} {
		switch name {
		case "overloaded_error", "overloaded":
			return statusOverloaded
		case "rate_limit_error", "rate_limit_exceeded", "rate_limit", "insufficient_quota":
			return http.StatusTooManyRequests
		case "api_error", "server_error", "internal_server_error", "internal_error":
			return http.StatusInternalServerError
		case "timeout_error":
			return http.StatusGatewayTimeout
		case "authentication_error":
			return http.StatusUnauthorized
		case "permission_error":
			return http.StatusForbidden
		case "billing_error":
			return http.StatusPaymentRequired
		case "not_found_error":
			return http.StatusNotFound
		case "request_too_large":
			return http.StatusRequestEntityTooLarge
		case "invalid_request_error", "context_length_exceeded":
			return http.StatusBadRequest
		}
	}
	return f.status
}

// error is the Error for the fault. A status of 0 means that none is known: the
// provider broke off an answer that it had begun.
func (f fault) error(status int) *Error {
	e := &Error{Status: status, Reason: ReasonServerError, Retryable: true, Message: clip(f.message)}
	if status != 0 {
		e.Reason, e.Retryable = classify(status)
	}
	switch {
	case e.Reason == ReasonAuth:
		// Some providers repeat a part of the key.
		e.Message = "the provider refused the credentials"
	case f.contextExhausted():
		e.Reason, e.Retryable = ReasonContextExhausted, false
	case f.quotaExhausted():
		e.Reason, e.Retryable = ReasonQuotaExhausted, false
	}
	if e.Message == "" {
		e.Message = "the provider gave no explanation"
		if text := http.StatusText(status); text != "" {
			e.Message = text
		}
	}
	return e
}

// contextExhausted tells a context that is too large from other bad requests.
// Only OpenAI has a code for it; Anthropic and vLLM say it in words.
func (f fault) contextExhausted() bool {
	return f.code == "context_length_exceeded" ||
		strings.HasPrefix(f.message, "prompt is too long") ||
		strings.Contains(f.message, "maximum context length")
}

// quotaExhausted tells spent credit, which both vendors also answer with 429,
// from too many requests.
func (f fault) quotaExhausted() bool {
	return f.kind == "insufficient_quota" || f.code == "insufficient_quota" ||
		f.code == "contract_spend_limit_reached" || f.code == "enforced_spend_limit_reached"
}

// retryAfter reads how long a provider asks to wait: Retry-After-Ms, or
// Retry-After in seconds or as a date. A date counts from the provider's own
// clock when it sent that, so that a skewed clock does not matter.
func retryAfter(header http.Header, now time.Time) time.Duration {
	if wait, ok := parseWait(header.Get("Retry-After-Ms"), time.Millisecond); ok {
		return wait
	}
	value := header.Get("Retry-After")
	if wait, ok := parseWait(value, time.Second); ok {
		return wait
	}
	if at, err := http.ParseTime(value); err == nil {
		if date, err := http.ParseTime(header.Get("Date")); err == nil {
			now = date
		}
		return max(0, min(at.Sub(now), maxRetryAfter))
	}
	return 0
}

func parseWait(value string, unit time.Duration) (time.Duration, bool) {
	n, err := strconv.ParseFloat(value, 64)
	if err != nil && !errors.Is(err, strconv.ErrRange) || math.IsNaN(n) {
		return 0, false
	}
	return time.Duration(max(0, min(n*float64(unit), float64(maxRetryAfter)))), true
}

// networkError is a connection that was not made or broke. The URL is left out.
func networkError(err error) *Error {
	if e, ok := errors.AsType[*url.Error](err); ok {
		err = e.Err
	}
	return &Error{Reason: ReasonNetwork, Message: clip(err.Error()), Retryable: true}
}

func badResponse(message string) *Error {
	return &Error{Reason: ReasonBadResponse, Message: message, Retryable: true}
}

func badRequest(message string) *Error {
	return &Error{Reason: ReasonBadRequest, Message: message}
}

// clip makes a provider's text fit into an error.
func clip(text string) string {
	if len(text) > maxErrorText {
		text = text[:maxErrorText] + "…"
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}
