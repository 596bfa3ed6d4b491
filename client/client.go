// Package client speaks to the JSON-RPC API of weir.
//
// A call that carries an idempotency key, and one that only reads, may be sent
// again: the client does so itself while the API is away, as during a restart,
// until the call's context ends or Config.Patience is over. Other calls are
// sent once, and so is everything before the client has met the API: where
// nothing listens there is nothing to wait for.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// DefaultURL is where `weir dev` listens.
const DefaultURL = "http://127.0.0.1:5003"

const (
	defaultPatience = 30 * time.Second
	retryBase       = 100 * time.Millisecond // doubled up to retryMax, each jittered by half
	retryMax        = 2 * time.Second
	maxAnswer       = 64 << 20
)

// Config says how to reach the API.
type Config struct {
	// URL of the API, without path. Empty means DefaultURL.
	URL string
	// Token is sent as the bearer token. Empty sends none, which `weir dev`
	// accepts from the same machine.
	Token string
	// Patience bounds how long a call that may be repeated is repeated while the
	// API is away. 0 means 30 s, less than 0 means not at all.
	Patience time.Duration
	// HTTP makes the requests; nil means a client of its own without a limit of
	// time, since calls wait for turns.
	HTTP *http.Client
	// OnRetry hears of each failure that is answered by another try; it may be
	// nil.
	OnRetry func(err error)
}

// Client calls the API. It is safe for concurrent use.
type Client struct {
	config Config
	lastID atomic.Int64
	met    atomic.Bool // it has connected to the API before
}

// New makes a client. It does not connect.
func New(c Config) *Client {
	if c.URL == "" {
		c.URL = DefaultURL
	}
	c.URL = strings.TrimRight(c.URL, "/")
	if c.Patience == 0 {
		c.Patience = defaultPatience
	}
	if c.HTTP == nil {
		c.HTTP = &http.Client{}
	}
	return &Client{config: c}
}

// URL is where the API is.
func (c *Client) URL() string { return c.config.URL }

// Token is what the client shows to the API.
func (c *Client) Token() string { return c.config.Token }

// Error codes of the API that callers branch on.
const (
	CodeMethodNotFound = -32601
	CodeInvalidParams  = -32602
	CodeInternal       = -32603
	CodeRateLimited    = -32000
	CodeUnauthorized   = -32001
	CodeConflict       = -32009
	CodeBusy           = -32010
	CodeUnavailable    = -32014
	CodeTurnFailed     = -32015
	CodeStillRunning   = -32016
)

// Error is an answer of the API that refuses a call.
type Error struct {
	Code    int             `json:"code"`
	Message string          `json:"message"`
	Data    json.RawMessage `json:"data,omitempty"`

	Method     string        `json:"-"`
	HTTPStatus int           `json:"-"`
	RetryAfter time.Duration `json:"-"`
}

func (e *Error) Error() string {
	text := e.Message
	var d struct {
		ErrorID string `json:"errorId"`
		Kind    string `json:"kind"`
		Message string `json:"message"`
	}
	_ = json.Unmarshal(e.Data, &d)
	if e.Code == CodeTurnFailed && d.Message != "" {
		text = "the turn failed: " + d.Message
		if d.Kind != "" {
			text += " (" + d.Kind + ")"
		}
	}
	if d.ErrorID != "" {
		text += " (error " + d.ErrorID + "; the server's log says more)"
	}
	return text
}

// Reason is the machine-readable reason of a refused parameter, or "".
func (e *Error) Reason() string {
	var d struct {
		Reason string `json:"reason"`
	}
	_ = json.Unmarshal(e.Data, &d)
	return d.Reason
}

// DecodeData reads the error's data into v.
func (e *Error) DecodeData(v any) error {
	if len(e.Data) == 0 {
		return errors.New("the error has no data")
	}
	return json.Unmarshal(e.Data, v)
}

// UnreachableError means that no answer of the API came.
type UnreachableError struct {
	URL string
	Err error
}

func (e *UnreachableError) Error() string { return fmt.Sprintf("no answer from %s: %v", e.URL, e.Err) }
func (e *UnreachableError) Unwrap() error { return e.Err }

// Option changes one call.
type Option func(*call)

type call struct {
	key        string
	repeatable bool
}

// Key sends an idempotency key: the call has its effect once, however often it
// is sent.
func Key(key string) Option {
	return func(c *call) { c.key, c.repeatable = key, true }
}

// Reads says that the call changes nothing.
func Reads(c *call) { c.repeatable = true }

// Call calls a method. result may be nil. Errors: *Error, *UnreachableError,
// and the context's cause.
func (c *Client) Call(ctx context.Context, method string, params, result any, options ...Option) error {
	var o call
	for _, option := range options {
		option(&o)
	}
	body, err := json.Marshal(struct {
		JSONRPC string `json:"jsonrpc"`
		ID      int64  `json:"id"`
		Method  string `json:"method"`
		Params  any    `json:"params,omitempty"`
	}{"2.0", c.lastID.Add(1), method, params})
	if err != nil {
		return fmt.Errorf("params of %s: %w", method, err)
	}
	began := time.Now()
	for wait := retryBase; ; wait = min(2*wait, retryMax) {
		raw, err := c.post(ctx, method, body, o.key)
		if err == nil {
			c.met.Store(true)
			if result == nil {
				return nil
			}
			if err := json.Unmarshal(raw, result); err != nil {
				return fmt.Errorf("answer of %s: %w", method, err)
			}
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		after, again := c.mayRepeat(err)
		if !o.repeatable || !again || time.Since(began) > c.config.Patience {
			return err
		}
		if c.config.OnRetry != nil {
			c.config.OnRetry(err)
		}
		pause := max(after, wait/2+rand.N(wait))
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return context.Cause(ctx)
		}
	}
}

// mayRepeat says whether err is a matter of the moment.
func (c *Client) mayRepeat(err error) (after time.Duration, again bool) {
	var unreachable *UnreachableError
	if errors.As(err, &unreachable) {
		var dial *net.OpError
		if !errors.As(err, &dial) || dial.Op != "dial" {
			c.met.Store(true)
		}
		return 0, c.met.Load()
	}
	c.met.Store(true)
	var e *Error
	if !errors.As(err, &e) {
		return 0, false
	}
	switch e.HTTPStatus {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return e.RetryAfter, true
	}
	return 0, false
}

func (c *Client) post(ctx context.Context, method string, body []byte, key string) (json.RawMessage, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.config.URL+"/rpc", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	c.authorize(req)
	resp, err := c.config.HTTP.Do(req)
	if err != nil {
		return nil, &UnreachableError{c.config.URL, unwrapURL(err)}
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return nil, &UnreachableError{c.config.URL, err}
	}
	var message struct {
		Result json.RawMessage `json:"result"`
		Error  *Error          `json:"error"`
	}
	if err := json.Unmarshal(answer, &message); err != nil || message.Error == nil && message.Result == nil {
		return nil, &Error{
			Code: CodeInternal, Message: fmt.Sprintf("%s answered %s, and it is no JSON-RPC", c.config.URL, resp.Status),
			Method: method, HTTPStatus: resp.StatusCode, RetryAfter: retryAfter(resp),
		}
	}
	if e := message.Error; e != nil {
		e.Method, e.HTTPStatus, e.RetryAfter = method, resp.StatusCode, retryAfter(resp)
		return nil, e
	}
	return message.Result, nil
}

// Get reads a path of the API that is no method, such as /readyz, once.
func (c *Client) Get(ctx context.Context, path string) (status int, body []byte, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.config.URL+path, nil)
	if err != nil {
		return 0, nil, err
	}
	c.authorize(req)
	resp, err := c.config.HTTP.Do(req)
	if err != nil {
		return 0, nil, &UnreachableError{c.config.URL, unwrapURL(err)}
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return 0, nil, &UnreachableError{c.config.URL, err}
	}
	return resp.StatusCode, body, nil
}

func (c *Client) authorize(req *http.Request) {
	if c.config.Token != "" {
		req.Header.Set("Authorization", "Bearer "+c.config.Token)
	}
}

func retryAfter(resp *http.Response) time.Duration {
	seconds, err := strconv.Atoi(resp.Header.Get("Retry-After"))
	if err != nil || seconds < 0 {
		return 0
	}
	return min(time.Duration(seconds)*time.Second, time.Minute)
}

// unwrapURL drops the "Post http://…:" that net/http puts before an error.
func unwrapURL(err error) error {
	if inner := errors.Unwrap(err); inner != nil {
		return inner
	}
	return err
}
