package tool

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"time"
)

// Config is what an operator decides about the calls of a process.
type Config struct {
	// AllowPrivate lets calls go to private, loopback, link-local and other
	// addresses that are not on the public internet (tools.http.allowPrivate).
	AllowPrivate bool
	// MaxResponseBytes bounds the answer of a tool; 0 means 1 MiB.
	MaxResponseBytes int64
	// Resolver resolves names; nil means the machine's.
	Resolver *net.Resolver
}

// defaultMaxResponse is also what may be kept of a tool.response (RC-64).
const defaultMaxResponse = 1 << 20

// maxRedirects bounds how many redirects a GET follows.
const maxRedirects = 5

// errRedirects ends a chain of redirects.
var errRedirects = fmt.Errorf("stopped after %d redirects", maxRedirects)

// Runner makes the calls of tools that are not local. It is safe for concurrent
// use; its idle connections are shared by all calls of the process.
type Runner struct {
	client *http.Client
	// fresh never uses a connection twice: net/http repeats a GET by itself
	// only when it broke on a used one.
	fresh       *http.Client
	maxResponse int64
}

// New returns a Runner. Close it after the last call.
func New(cfg Config) *Runner {
	forbid := forbidden
	if cfg.AllowPrivate {
		forbid = func(netip.Addr) string { return "" }
	}
	return newRunner(cfg, forbid)
}

func newRunner(cfg Config, forbid func(netip.Addr) string) *Runner {
	dialer := &net.Dialer{Timeout: 10 * time.Second, Resolver: cfg.Resolver, Control: guard(forbid)}
	transport := &http.Transport{
		DialContext:            dialer.DialContext,
		ForceAttemptHTTP2:      true,
		MaxIdleConns:           128,
		MaxIdleConnsPerHost:    16,
		IdleConnTimeout:        60 * time.Second,
		TLSHandshakeTimeout:    10 * time.Second,
		MaxResponseHeaderBytes: 64 << 10,
	}
	fresh := transport.Clone()
	fresh.DisableKeepAlives = true
	r := &Runner{
		client:      &http.Client{Transport: transport, CheckRedirect: checkRedirect},
		fresh:       &http.Client{Transport: fresh, CheckRedirect: checkRedirect},
		maxResponse: cfg.MaxResponseBytes,
	}
	if r.maxResponse <= 0 {
		r.maxResponse = defaultMaxResponse
	}
	return r
}

// Close closes idle connections.
func (r *Runner) Close() {
	r.client.CloseIdleConnections()
	r.fresh.CloseIdleConnections()
}

// Run makes one call of a tool, once, and waits for its end: at most the tool's
// timeout, less when ctx ends. Then its connection is closed at once. The call
// was checked by the tool's catalogue.
func (r *Runner) Run(ctx context.Context, t *Tool, call Call) Result {
	limited, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	var result Result
	var err error
	switch {
	case t.url != "":
		result, err = r.callHTTP(limited, t, call)
	case t.Name == WebFetch:
		result, err = r.fetch(limited, call)
	default:
		return failed(UnknownTool, t.Name+" is carried out where the step is committed")
	}
	if err != nil {
		return Result{Err: explainError(ctx, limited, t, err)}
	}
	return result
}

// explainError says why no answer came: ctx ended, or limited, or err tells.
func explainError(ctx, limited context.Context, t *Tool, err error) *Failure {
	if ctx.Err() != nil {
		return &Failure{Kind: Cancelled, Message: "the call was cancelled"}
	}
	if limited.Err() != nil {
		return &Failure{Kind: Timeout, Message: fmt.Sprintf("no complete answer within %s", t.Timeout)}
	}
	if forbidden, ok := errors.AsType[*forbiddenError](err); ok {
		return &Failure{Kind: Denied, Message: forbidden.Error()}
	}
	if errors.Is(err, errRedirects) {
		return &Failure{Kind: HTTPStatus, Message: errRedirects.Error()}
	}
	if e, ok := errors.AsType[net.Error](err); ok && e.Timeout() {
		return &Failure{Kind: Timeout, Message: "the server could not be reached in time"}
	}
	if e, ok := errors.AsType[*url.Error](err); ok {
		err = e.Err // without the URL, which is the operator's and may hold a key
	}
	return &Failure{Kind: Network, Message: excerpt("the call did not get through: "+cleanText(err.Error()), maxExcerptBytes)}
}

// checkRedirect lets a GET follow a redirect; the address is checked when it is
// dialled. For other methods the redirect is the answer.
func checkRedirect(req *http.Request, via []*http.Request) error {
	switch {
	case via[0].Method != http.MethodGet:
		return http.ErrUseLastResponse
	case len(via) > maxRedirects:
		return errRedirects
	case req.URL.Scheme != "http" && req.URL.Scheme != "https":
		return &forbiddenError{"a redirect to a scheme other than http and https"}
	case req.URL.User != nil:
		return &forbiddenError{"a redirect with a user and a password"}
	}
	return nil
}
