package load

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"time"
)

const (
	// staleAfter is how long a connection may have been idle to be used again.
	// Balancers in between may close those that are idle for longer, in the very
	// moment in which a request is under way.
	staleAfter  = 15 * time.Second
	dialTimeout = 10 * time.Second
	readBuffer  = 8 << 10
	maxAnswer   = 64 << 20
)

// target is where requests go.
type target struct {
	host string // as the Host header has it
	addr string // host:port
	path string
	tls  *tls.Config // nil: http
}

func newTarget(text string) (*target, error) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
		return nil, fmt.Errorf("%q is no URL of an API", text)
	}
	t := &target{host: u.Host, addr: u.Host, path: u.EscapedPath() + "/rpc"}
	port := "80"
	if u.Scheme == "https" {
		port = "443"
		t.tls = &tls.Config{ServerName: u.Hostname()}
	}
	if u.Port() == "" {
		t.addr = net.JoinHostPort(u.Hostname(), port)
	}
	return t, nil
}

// connectError means that there was no connection to send on.
type connectError struct{ error }

func (e *connectError) Unwrap() error { return e.error }

// conn is a connection that is used for one request after the other, and made
// anew when it is lost.
type conn struct {
	to     *target
	c      net.Conn
	r      *bufio.Reader
	used   time.Time
	detach func() bool
	body   []byte // of the latest answer
}

// dial connects. The end of ctx cuts the connection, also later.
func (c *conn) dial(ctx context.Context, deadline time.Time) error {
	d := net.Dialer{Timeout: dialTimeout, Deadline: deadline}
	var err error
	if c.to.tls == nil {
		c.c, err = d.DialContext(ctx, "tcp", c.to.addr)
	} else {
		c.c, err = (&tls.Dialer{NetDialer: &d, Config: c.to.tls}).DialContext(ctx, "tcp", c.to.addr)
	}
	if err != nil {
		c.c = nil
		return &connectError{err}
	}
	if c.r == nil {
		c.r = bufio.NewReaderSize(nil, readBuffer)
	}
	c.r.Reset(c.c)
	opened := c.c
	c.detach = context.AfterFunc(ctx, func() { _ = opened.Close() })
	return nil
}

func (c *conn) close() {
	if c.c != nil {
		c.detach()
		_ = c.c.Close()
		c.c = nil
	}
}

// do sends a request and reads its answer into body. Any error loses the
// connection. All calls have the same ctx.
func (c *conn) do(ctx context.Context, request []byte, deadline time.Time) (status int, err error) {
	if c.c != nil && time.Since(c.used) > staleAfter {
		c.close()
	}
	if c.c == nil {
		if err := c.dial(ctx, deadline); err != nil {
			return 0, err
		}
	}
	status, keep, err := c.exchange(request, deadline)
	if err != nil || !keep {
		c.close()
	}
	c.used = time.Now()
	return status, err
}

func (c *conn) exchange(request []byte, deadline time.Time) (status int, keep bool, err error) {
	if err := c.c.SetDeadline(deadline); err != nil {
		return 0, false, err
	}
	if _, err := c.c.Write(request); err != nil {
		return 0, false, err
	}
	resp, err := http.ReadResponse(c.r, nil)
	for err == nil && resp.StatusCode < 200 {
		resp, err = http.ReadResponse(c.r, nil) // 1xx only announce
	}
	if err != nil {
		return 0, false, err
	}
	defer resp.Body.Close()
	c.body = c.body[:0]
	for {
		if len(c.body) == cap(c.body) {
			c.body = slices.Grow(c.body, 1024)
		}
		n, err := resp.Body.Read(c.body[len(c.body):cap(c.body)])
		c.body = c.body[:len(c.body)+n]
		if errors.Is(err, io.EOF) {
			return resp.StatusCode, !resp.Close, nil
		}
		if err != nil {
			return 0, false, err
		}
		if len(c.body) > maxAnswer {
			return 0, false, fmt.Errorf("an answer of more than %d bytes", maxAnswer)
		}
	}
}
