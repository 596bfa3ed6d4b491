package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"
)

// load is HTTP load by a client that costs little: requests are made once and
// only their session is written anew, answers are searched rather than parsed.
type load struct {
	addr  string
	token string // bearer; "" for none
	conns int
}

// sessionMark stands in the prepared request where each request's own session
// goes.
const sessionMark = "s-0000000000000000"

const acceptBody = `{"jsonrpc":"2.0","id":1,"method":"agent.request","params":{"sessionId":"` + sessionMark +
	`","content":{"text":"What is the state of order 4711, and when will it arrive?"}}}`

// loadResult is what a load has measured.
type loadResult struct {
	rate     float64 // answers a second
	p50, p99 float64 // ms
}

func (l load) request() (request []byte, mark int) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "POST /rpc HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n", l.addr, len(acceptBody))
	if l.token != "" {
		fmt.Fprintf(&b, "Authorization: Bearer %s\r\n", l.token)
	}
	b.WriteString("\r\n" + acceptBody)
	return b.Bytes(), bytes.Index(b.Bytes(), []byte(sessionMark)) + len("s-")
}

// run sends requests for as long as it is told, one at a time on each
// connection. base makes the sessions of this load different from those of
// others.
func (l load) run(ctx context.Context, base uint64, d time.Duration) (loadResult, error) {
	var wg sync.WaitGroup
	took := make([][]time.Duration, l.conns)
	errs := make([]error, l.conns)
	began := time.Now()
	for i := range l.conns {
		wg.Add(1)
		go func() {
			defer wg.Done()
			took[i], errs[i] = l.connection(ctx, base+uint64(i)<<32, began.Add(d))
		}()
	}
	wg.Wait()
	wall := time.Since(began)
	if err := errors.Join(errs...); err != nil {
		return loadResult{}, err
	}
	all := slices.Concat(took...)
	slices.Sort(all)
	return loadResult{
		rate: float64(len(all)) / wall.Seconds(), p50: ms(quantile(all, 0.5)), p99: ms(quantile(all, 0.99)),
	}, nil
}

func (l load) connection(ctx context.Context, session uint64, end time.Time) ([]time.Duration, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", l.addr)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	request, mark := l.request()
	answer := answerReader{r: bufio.NewReaderSize(conn, 16<<10)}
	var took []time.Duration
	for {
		session++
		writeHex(request[mark:mark+16], session)
		sent := time.Now()
		if sent.After(end) {
			return took, nil
		}
		if _, err := conn.Write(request); err != nil {
			return nil, err
		}
		if err := answer.read(); err != nil {
			return nil, err
		}
		took = append(took, time.Since(sent))
	}
}

func writeHex(dst []byte, v uint64) {
	const digits = "0123456789abcdef"
	for i := len(dst) - 1; i >= 0; i-- {
		dst[i] = digits[v&15]
		v >>= 4
	}
}

// answerReader reads HTTP/1.1 answers with a Content-Length.
type answerReader struct {
	r    *bufio.Reader
	body []byte
}

var (
	okStatus      = []byte("HTTP/1.1 200 ")
	contentLength = []byte("Content-Length: ")
	errorMember   = []byte(`"error"`)
)

// read returns an error unless the answer is a JSON-RPC result.
func (a *answerReader) read() error {
	status, err := a.r.ReadSlice('\n')
	if err != nil {
		return err
	}
	ok := bytes.HasPrefix(status, okStatus)
	failed := string(status)
	length := -1
	for {
		line, err := a.r.ReadSlice('\n')
		if err != nil {
			return err
		}
		if len(line) <= 2 {
			break
		}
		if rest, found := bytes.CutPrefix(line, contentLength); found {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(rest))); err != nil {
				return err
			}
		}
	}
	if length < 0 {
		return fmt.Errorf("answer without Content-Length: %s", failed)
	}
	a.body = slices.Grow(a.body[:0], length)[:length]
	if _, err := io.ReadFull(a.r, a.body); err != nil {
		return err
	}
	if !ok || bytes.Contains(a.body, errorMember) {
		return fmt.Errorf("request was refused: %s %s", bytes.TrimSpace([]byte(failed)), a.body)
	}
	return nil
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
