package rpc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"sync"
	"unicode/utf8"

	"github.com/weir-run/weir/api/rpc/scan"
)

// Exchange is one message and its answer.
type Exchange struct {
	server *Server
	calls  []exchangeCall // in the order of the message
	batch  bool
	refuse *Error // answers the message as a whole

	body []byte // read by ServeHTTP; its memory is used again
	out  bytes.Buffer
	enc  *json.Encoder // writes to out
}

// exchangeCall is a member of the message. Its slices are parts of the body.
type exchangeCall struct {
	Call
	id     []byte // as it is written; nil if there is none to echo
	params *Error // why Params cannot be used
	answer bool   // whether an answer is due

	result any
	wait   Wait
	err    *Error
}

// keep is the size above which the memory of an Exchange is not used again.
const keep = 256 << 10

func newExchange() *Exchange {
	x := new(Exchange)
	x.enc = json.NewEncoder(&x.out)
	x.enc.SetEscapeHTML(false)
	return x
}

// Close lets the body and the answer be used again. Waits that Answer did not
// run are told that nobody waits.
func (x *Exchange) Close() {
	for i := range x.calls {
		if x.calls[i].wait != nil {
			x.abandon(context.Background(), &x.calls[i])
		}
	}
	clear(x.calls)
	x.calls = x.calls[:0]
	x.server, x.batch, x.refuse = nil, false, nil
	x.body = x.body[:0]
	if cap(x.body) > keep {
		x.body = nil
	}
	x.out.Reset()
	if x.out.Cap() > keep {
		x.out = bytes.Buffer{}
	}
	exchanges.Put(x)
}

var errTooLarge = errors.New("body too large")

// read reads the body of r, and never more than one byte beyond limit.
func (x *Exchange) read(r *http.Request, limit int64) error {
	if r.ContentLength > limit {
		return errTooLarge
	}
	// The length is a claim: memory for more than a little comes with the data.
	if want := int(min(r.ContentLength, 64<<10)) + 1; cap(x.body) < want {
		x.body = make([]byte, 0, max(want, 4<<10))
	}
	for {
		if len(x.body) == cap(x.body) {
			x.body = append(x.body, 0)[:len(x.body)]
		}
		n, err := r.Body.Read(x.body[len(x.body):cap(x.body)])
		x.body = x.body[:len(x.body)+n]
		if int64(len(x.body)) > limit {
			return errTooLarge
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (x *Exchange) accept(ctx context.Context, body []byte, key string) {
	if x.refuse = x.parse(body); x.refuse != nil {
		return
	}
	if !x.batch {
		x.calls[0].IdempotencyKey = key
	}
	for i := range x.calls {
		c := &x.calls[i]
		if c.err != nil {
			continue
		}
		var err error
		if c.result, c.wait, err = x.dispatch(ctx, c); err != nil {
			c.err = x.server.toError(ctx, c.Method, err)
		}
	}
}

// dispatch runs a call up to its Wait. What is wrong with its params is said
// only to who may call the method.
func (x *Exchange) dispatch(ctx context.Context, c *exchangeCall) (result any, wait Wait, err error) {
	defer recovered(&err)
	handler, err := x.server.Dispatcher.Lookup(ctx, c.Method)
	if err != nil {
		return nil, nil, err
	}
	if c.params != nil {
		return nil, nil, c.params
	}
	return handler.Accept(ctx, &c.Call)
}

// Waits reports whether Answer may take long.
func (x *Exchange) Waits() bool {
	for i := range x.calls {
		if x.calls[i].wait != nil && x.calls[i].answer {
			return true
		}
	}
	return false
}

// Answer waits for the results and returns the answer, which lives until
// Close. It is empty if none is due: the message held notifications only.
func (x *Exchange) Answer(ctx context.Context) []byte {
	x.waitAll(ctx)
	x.out.Reset()
	switch {
	case x.refuse != nil:
		x.appendError(nil, x.refuse)
	case !x.batch:
		if c := &x.calls[0]; c.answer {
			x.append(ctx, c)
		}
	default:
		for i := range x.calls {
			c := &x.calls[i]
			if !c.answer {
				continue
			}
			if x.out.Len() == 0 {
				x.out.WriteByte('[')
			} else {
				x.out.WriteByte(',')
			}
			x.append(ctx, c)
		}
		if x.out.Len() > 0 {
			x.out.WriteByte(']')
		}
	}
	return x.out.Bytes()
}

// failure is the error that decides the HTTP status, or nil.
func (x *Exchange) failure() *Error {
	switch {
	case x.refuse != nil:
		return x.refuse
	case x.batch:
		return nil
	default:
		return x.calls[0].err
	}
}

// waitAll runs the Waits, together if there are several.
func (x *Exchange) waitAll(ctx context.Context) {
	var last *exchangeCall
	waits := 0
	for i := range x.calls {
		c := &x.calls[i]
		switch {
		case c.wait == nil:
		case !c.answer:
			x.abandon(ctx, c)
		default:
			last = c
			waits++
		}
	}
	switch waits {
	case 0:
	case 1:
		x.wait(ctx, last)
	default:
		x.waitTogether(ctx)
	}
}

func (x *Exchange) waitTogether(ctx context.Context) {
	var group sync.WaitGroup
	for i := range x.calls {
		if c := &x.calls[i]; c.wait != nil {
			group.Go(func() { x.wait(ctx, c) })
		}
	}
	group.Wait()
}

func (x *Exchange) wait(ctx context.Context, c *exchangeCall) {
	wait := c.wait
	c.wait = nil
	var err error
	func() {
		defer recovered(&err)
		c.result, err = wait(ctx)
	}()
	if err != nil {
		c.result, c.err = nil, x.server.toError(ctx, c.Method, err)
	}
}

// abandon runs a Wait that nobody waits for.
func (x *Exchange) abandon(ctx context.Context, c *exchangeCall) {
	ctx, cancel := context.WithCancel(ctx)
	cancel()
	x.wait(ctx, c)
}

// append writes the response to a call.
func (x *Exchange) append(ctx context.Context, c *exchangeCall) {
	if c.err != nil {
		x.appendError(c.id, c.err)
		return
	}
	start := x.out.Len()
	x.appendID(c.id)
	x.out.WriteString(`,"result":`)
	if err := x.encode(c.result); err != nil {
		x.out.Truncate(start)
		c.err = x.server.toError(ctx, c.Method, err)
		x.appendError(c.id, c.err)
		return
	}
	x.out.WriteByte('}')
}

func (x *Exchange) appendError(id []byte, e *Error) {
	x.appendID(id)
	x.out.WriteString(`,"error":`)
	start := x.out.Len()
	if err := x.encode(e); err != nil { // Data is of no use
		x.out.Truncate(start)
		_ = x.encode(&Error{Code: e.Code, Message: e.Message}) // a number and a text: it cannot fail
	}
	x.out.WriteByte('}')
}

func (x *Exchange) appendID(id []byte) {
	x.out.WriteString(`{"jsonrpc":"2.0","id":`)
	if id == nil {
		x.out.WriteString("null")
	} else {
		x.out.Write(id)
	}
}

// encode writes v, without the newline of the encoder.
func (x *Exchange) encode(v any) (err error) {
	defer recovered(&err)
	if v == nil {
		x.out.WriteString("null")
		return nil
	}
	if err := x.enc.Encode(v); err != nil {
		return err
	}
	x.out.Truncate(x.out.Len() - 1)
	return nil
}

// parse finds the calls of a message. Its error answers the message as a
// whole; then nothing of it is run.
func (x *Exchange) parse(body []byte) *Error {
	if !utf8.Valid(body) {
		return &Error{Code: ParseError, Message: "Parse error: invalid UTF-8"}
	}
	s := scan.New(body)
	switch s.Kind() {
	case scan.Object:
		x.calls = append(x.calls, exchangeCall{})
		if err := x.calls[0].parse(&s); err != nil {
			return syntaxError(&s, err)
		}
	case scan.Array:
		x.batch = true
		if err := s.Open(); err != nil {
			return syntaxError(&s, err)
		}
		for first := true; ; first = false {
			more, err := s.Item(first)
			if err != nil {
				return syntaxError(&s, err)
			}
			if !more {
				break
			}
			if len(x.calls) == x.server.maxBatch() {
				return &Error{Code: InvalidRequest, Message: "Batch too large"}
			}
			x.calls = append(x.calls, exchangeCall{})
			if err := x.calls[len(x.calls)-1].parse(&s); err != nil {
				return syntaxError(&s, err)
			}
		}
		if len(x.calls) == 0 {
			return &Error{Code: InvalidRequest, Message: "Empty batch"}
		}
	default:
		if _, err := s.Value(); err != nil {
			return syntaxError(&s, err)
		}
		if err := s.End(); err != nil {
			return syntaxError(&s, err)
		}
		return &Error{Code: InvalidRequest, Message: "Invalid request: not an object"}
	}
	if err := s.End(); err != nil {
		return syntaxError(&s, err)
	}
	return nil
}

func syntaxError(s *scan.Scanner, err error) *Error {
	return &Error{Code: ParseError, Message: "Parse error: " + err.Error(), Data: struct {
		Offset int `json:"offset"`
	}{s.Pos()}}
}

// The members of a request, as bits.
const (
	memberVersion = 1 << iota
	memberMethod
	memberID
	memberParams
)

// parse reads a member of the message. It returns the errors of s; what else
// is wrong with the member goes to c.err.
func (c *exchangeCall) parse(s *scan.Scanner) error {
	c.answer = true
	if s.Kind() != scan.Object {
		c.err = &Error{Code: InvalidRequest, Message: "Invalid request: not an object"}
		_, err := s.Value()
		return err
	}
	if err := s.Open(); err != nil {
		return err
	}
	var seen, twice, wrong uint8 // bits of members
	for first := true; ; first = false {
		name, err := s.Key(first)
		if err != nil {
			return err
		}
		if name == nil {
			break
		}
		bit := member(name)
		twice |= seen & bit
		seen |= bit
		kind := s.Kind()
		if bit == memberParams {
			s.Repair = true
		}
		var value []byte
		if bit == memberParams && kind == scan.Object {
			value, err = s.Strip('_')
		} else {
			value, err = s.Value()
		}
		s.Repair = false
		if err != nil {
			return err
		}
		switch bit {
		case memberVersion:
			if kind != scan.String || string(value) != `"2.0"` && scan.Unquote(value) != "2.0" {
				wrong |= bit
			}
		case memberMethod:
			if kind != scan.String {
				wrong |= bit
				break
			}
			c.Method = scan.Unquote(value)
		case memberID:
			if kind != scan.String && kind != scan.Number {
				wrong |= bit
				break
			}
			c.id = value
		case memberParams:
			c.Params = value
			if kind != scan.Object {
				c.params = &Error{Code: InvalidParams, Message: "params must be an object", Data: paramsData}
			}
		}
	}
	if (wrong|twice)&memberID != 0 {
		c.id = nil
	}
	switch {
	case twice != 0:
		c.err = &Error{Code: InvalidRequest, Message: "Invalid request: a member is named twice"}
	case wrong&memberID != 0:
		c.err = &Error{Code: InvalidRequest, Message: "Invalid request: id must be a string or a number"}
	case seen&memberVersion == 0 || wrong&memberVersion != 0:
		c.err = &Error{Code: InvalidRequest, Message: `Invalid request: jsonrpc must be "2.0"`}
	case seen&memberMethod == 0 || wrong&memberMethod != 0:
		c.err = &Error{Code: InvalidRequest, Message: "Invalid request: method must be a string"}
	default:
		c.answer = seen&memberID != 0
		c.Notification = !c.answer
	}
	if c.Params == nil {
		c.Params = noParams
	}
	return nil
}

var (
	noParams   = json.RawMessage("{}")
	paramsData = map[string]string{"field": "params", "reason": "invalid"}
)

// member returns the bit of a request's member, 0 for any other name.
func member(name []byte) uint8 {
	switch string(name) {
	case `"jsonrpc"`:
		return memberVersion
	case `"method"`:
		return memberMethod
	case `"id"`:
		return memberID
	case `"params"`:
		return memberParams
	}
	if bytes.IndexByte(name, '\\') >= 0 {
		switch scan.Unquote(name) {
		case "jsonrpc":
			return memberVersion
		case "method":
			return memberMethod
		case "id":
			return memberID
		case "params":
			return memberParams
		}
	}
	return 0
}
