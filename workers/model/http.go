package model

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// The limits of one HTTP exchange. None of them bounds the whole of it: a
// stream that keeps delivering may take as long as its turn may.
const (
	defaultConnectTimeout = 10 * time.Second
	// defaultFirstByte also covers a long prompt that is read before the first
	// token; without streaming the whole answer is made before the first byte.
	defaultFirstByte         = 120 * time.Second
	defaultFirstByteNoStream = 10 * time.Minute
	defaultGap               = 120 * time.Second
	// drainGap is how long the end of a finished answer is waited for, so that
	// its connection can be used again.
	drainGap = 50 * time.Millisecond

	maxResponseBytes = 32 << 20
	maxErrorBytes    = 64 << 10
)

// newTransport makes the connection pool that all calls to a provider share.
func newTransport(connectTimeout time.Duration) *http.Transport {
	dialer := &net.Dialer{Timeout: connectTimeout, KeepAlive: 30 * time.Second}
	return &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         dialer.DialContext,
		TLSHandshakeTimeout: connectTimeout,
		ForceAttemptHTTP2:   true,
		MaxIdleConnsPerHost: 64,
		IdleConnTimeout:     90 * time.Second,
		// A decompressor holds back bytes, which a stream cannot have.
		DisableCompression: true,
	}
}

// newHTTPClient makes the client of a provider. It follows no redirect: those
// would take prompts and keys to an address that nobody configured.
func newHTTPClient(transport http.RoundTripper) *http.Client {
	return &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// call is one call to a provider over HTTP: what watches its exchange, and what
// is known of it so far, for the case that it ends early.
type call struct {
	req       *Request
	sink      Sink
	secret    string // masked in every error
	firstByte time.Duration
	gap       time.Duration
	prices    priceTable

	began    bool        // the SDK got as far as sending
	sent     atomic.Bool // the request left, so the provider may be working
	answered bool        // with a success
	body     *watchedBody

	model    string // the one that answers, once it is known
	text     strings.Builder
	streamed int    // bytes of output so far, arguments of tools included
	reported *Usage // the provider's numbers so far
	unpriced bool   // served at rates that the table does not have
}

// write takes a piece of the answer's text and passes it on.
func (c *call) write(text string) {
	if text == "" {
		return
	}
	c.text.WriteString(text)
	c.streamed += len(text)
	if c.sink != nil {
		c.sink(text)
	}
}

// do is a middleware of both SDKs. It ends an exchange that falls silent, and
// turns everything but a success into an *Error before the SDK sees it: the
// SDKs differ there and lose the status of a body that is not JSON.
func (c *call) do(req *http.Request, next func(*http.Request) (*http.Response, error)) (*http.Response, error) {
	c.began = true
	parent := req.Context()
	ctx, cancel := context.WithCancelCause(parent)
	// Connecting has its own limit; until the request is out, this one only
	// guards against a server that does not take it.
	dog := newWatchdog(c.firstByte+defaultConnectTimeout, cancel)
	ended := func(err error) error {
		if ctx.Err() != nil {
			return context.Cause(ctx) // an *Error when the watchdog barked
		}
		return networkError(err)
	}
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteRequest: func(info httptrace.WroteRequestInfo) {
		if info.Err == nil {
			c.sent.Store(true)
			dog.requested(c.firstByte)
		}
	}})
	resp, err := next(req.WithContext(ctx))
	dog.answered()
	if err != nil {
		err = ended(err)
		dog.stop()
		cancel(nil)
		return nil, err
	}
	c.body = &watchedBody{ReadCloser: resp.Body, dog: dog, gap: c.gap, ended: ended, cancel: cancel}
	resp.Body = c.body
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		body, err := io.ReadAll(io.LimitReader(c.body, maxErrorBytes))
		_ = c.body.Close()
		if err != nil && parent.Err() != nil {
			return nil, err
		}
		return nil, statusError(resp.StatusCode, resp.Header, body, time.Now())
	}
	c.answered = true
	return resp, nil
}

// watchdog cancels an exchange that is silent for longer than its limit.
type watchdog struct {
	mu      sync.Mutex
	timer   *time.Timer
	limit   time.Duration // what the timer was last set to
	answers bool          // the answer has begun, so the request no longer matters
}

func newWatchdog(limit time.Duration, cancel context.CancelCauseFunc) *watchdog {
	d := &watchdog{limit: limit}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.timer = time.AfterFunc(limit, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		cancel(stalled(d.limit))
	})
	return d
}

// requested starts the wait for the first byte. The transport calls it, perhaps
// when the answer is already there.
func (d *watchdog) requested(limit time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.answers {
		d.limit = limit
		d.timer.Reset(limit)
	}
}

// answered ends the time in which requested counts.
func (d *watchdog) answered() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.answers = true
}

func (d *watchdog) reset(limit time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.limit = limit
	d.timer.Reset(limit)
}

func (d *watchdog) stop() { d.timer.Stop() }

func stalled(limit time.Duration) *Error {
	return &Error{Reason: ReasonStalled, Message: fmt.Sprintf("the provider was silent for %v", limit), Retryable: true}
}

// watchedBody is an answer that must not fall silent. Any byte is a sign of
// life, also those that an SDK skips, such as comments and pings. Only the time
// spent in Read counts.
type watchedBody struct {
	io.ReadCloser
	dog    *watchdog // until the first byte it runs since the request was sent
	gap    time.Duration
	total  int64
	ended  func(error) error // why a read failed
	cancel context.CancelCauseFunc
}

func (b *watchedBody) Read(p []byte) (int, error) {
	if b.total > 0 {
		b.dog.reset(b.gap)
	}
	n, err := b.ReadCloser.Read(p)
	b.total += int64(n)
	if b.total > 0 || err != nil {
		b.dog.stop()
	}
	switch {
	case err == nil && b.total > maxResponseBytes:
		return n, badResponse(fmt.Sprintf("the answer is larger than %d bytes", maxResponseBytes))
	case err == nil, errors.Is(err, io.EOF):
		return n, err
	}
	return n, b.ended(err)
}

// drain reads to the end of an answer that is complete, unless that takes long.
func (b *watchedBody) drain() {
	b.gap = drainGap
	_, _ = io.CopyN(io.Discard, b, 4096)
}

func (b *watchedBody) Close() error {
	b.dog.stop()
	err := b.ReadCloser.Close()
	b.cancel(nil)
	return err
}

// fail turns whatever ended the call into what Provider.Call returns.
func (c *call) fail(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		cause := context.Cause(ctx)
		if !c.sent.Load() && !c.answered {
			return cause
		}
		return &AbortedError{Usage: c.usage(), Cause: cause}
	}
	e, ok := errors.AsType[*Error](err)
	switch {
	case ok:
	case !c.began:
		e = badRequest("the request cannot be made: " + clip(err.Error()))
	default:
		e = badResponse("the answer cannot be read: " + clip(err.Error()))
	}
	if e.Usage == nil && (c.answered || e.Status == 0 && c.sent.Load()) {
		usage := c.usage()
		e.Usage = &usage
	}
	if c.secret != "" {
		e.Message = strings.ReplaceAll(e.Message, c.secret, "***")
	}
	return e
}

// usage is what the unfinished call consumed: the provider's numbers where it
// gave some, and estimates.
func (c *call) usage() Usage {
	u := estimate(c.req, c.streamed)
	if c.reported != nil {
		output := u.Output
		u = *c.reported
		u.Output = max(u.Output, output)
		u.Estimated = true
	}
	c.price(&u)
	return u
}

// complete is what the finished call consumed.
func (c *call) complete() Usage {
	if c.reported == nil {
		return c.usage()
	}
	u := *c.reported
	c.price(&u)
	return u
}

// price fills in the cost that the provider did not report.
func (c *call) price(u *Usage) {
	if u.CostMicros != nil || c.unpriced {
		return
	}
	u.CostMicros = c.prices.cost(c.model, *u)
	if u.CostMicros == nil {
		u.CostMicros = c.prices.cost(c.req.Model, *u)
	}
}
