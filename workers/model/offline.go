package model

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// The models of the offline provider.
const (
	OfflineModel       = "offline-1"
	OfflineModelPriced = "offline-priced" // 1 µUSD per input token, 2 per output token
	OfflineModelVision = "offline-vision"
	OfflineModelSmall  = "offline-small" // a context window of 200 tokens
)

// offlineWindow is the context window of offline-small, in tokens.
const offlineWindow = 200

// maxStreamWords bounds the answer of a !stream directive.
const maxStreamWords = 100_000

// Offline is the built-in model: deterministic, without key or network. It
// answers "offline: " and the text, or does what the lines of the latest user
// message that start with ! say (the directives of contract/surface.md §3). A
// token is a word. The zero value is ready for use.
type Offline struct {
	// GapTimeout ends a !stall; 0 means 120 s.
	GapTimeout time.Duration

	prices priceTable // nil means the built-in ones
}

// Call makes the model call Request.CallIndex of the script in the latest user
// message. See Provider.
func (o *Offline) Call(ctx context.Context, req *Request, sink Sink) (*Response, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	c := offlineCall{req: req, sink: sink, model: req.Model, prices: o.prices}
	if c.prices == nil {
		c.prices = builtinPrices()[ProviderOffline]
	}
	switch c.model {
	case "":
		c.model = OfflineModel
	case OfflineModel, OfflineModelPriced, OfflineModelVision:
	case OfflineModelSmall:
		if n := contextWords(req); n > offlineWindow {
			return nil, &Error{
				Status:  400,
				Reason:  ReasonContextExhausted,
				Message: fmt.Sprintf("the context has %d tokens, the window of %s has %d", n, OfflineModelSmall, offlineWindow),
			}
		}
	default:
		return nil, &Error{Status: 404, Reason: ReasonBadRequest, Message: fmt.Sprintf("there is no model %q", c.model)}
	}

	text := latestUserText(req.Messages)
	if !hasDirective(text) {
		return c.answer("offline: " + text), nil
	}
	script := parseScript(text)
	if len(script.directives) == 0 {
		return c.answer("offline: " + text), nil
	}
	group := req.CallIndex
	if script.loops {
		group = script.loop
	}
	for _, d := range script.directives {
		if d.group != group {
			continue
		}
		resp, err := c.carryOut(ctx, o, d)
		if resp != nil || err != nil {
			return resp, err
		}
	}
	if script.rest == "" {
		return c.answer("done"), nil
	}
	return c.answer(script.rest), nil
}

// directive is one line of a script.
type directive struct {
	group int // the model call that carries it out
	verb  string
	arg   string
}

// script is a parsed user message.
type script struct {
	directives []directive // in their order; those of a group end with its answer
	loops      bool        // every call carries out the group loop
	loop       int
	rest       string // the lines that are plain text
}

// The verbs of a script. One that goes on belongs to the next line that
// answers.
const (
	verbSay       = "!say"
	verbTool      = "!tool"
	verbTools     = "!tools"
	verbSpawn     = "!spawn"
	verbSpawnWait = "!spawnwait"
	verbStall     = "!stall"
	verbStream    = "!stream"
	verbClarify   = "!clarify"
	verbLoop      = "!loop"
	verbJSON      = "!json"
	verbError     = "!error"
	verbResult    = "!result"
	verbContext   = "!context"

	verbSleep  = "!sleep"  // goes on
	verbStatus = "!status" // goes on, in the end
	verbUsage  = "!usage"  // goes on
	verbPlan   = "!plan"   // goes on

	verbWait = "wait" // the second half of !spawnwait; nobody can write it
)

// hasDirective says whether the text can have one, without looking closely.
func hasDirective(text string) bool {
	return strings.HasPrefix(text, "!") || strings.Contains(text, "\n!")
}

func parseScript(text string) script {
	var s script
	var rest strings.Builder
	group := 0
	for line := range strings.SplitSeq(text, "\n") {
		line = strings.TrimSuffix(line, "\r")
		verb, arg, _ := strings.Cut(line, " ")
		d := directive{group: group, verb: verb, arg: strings.TrimSpace(arg)}
		switch verb {
		case verbSleep, verbStatus, verbUsage, verbPlan:
			s.directives = append(s.directives, d)
		case verbSpawnWait:
			s.directives = append(s.directives, d, directive{group: group + 1, verb: verbWait})
			group += 2
		case verbLoop:
			if !s.loops {
				s.loops, s.loop = true, group
			}
			s.directives = append(s.directives, d)
			group++
		case verbSay, verbTool, verbTools, verbSpawn, verbStall, verbStream, verbClarify,
			verbJSON, verbError, verbResult, verbContext:
			s.directives = append(s.directives, d)
			group++
		default:
			rest.WriteString(line)
			rest.WriteByte('\n')
		}
	}
	s.rest = strings.TrimSpace(rest.String())
	return s
}

// offlineCall is one call of the offline model.
type offlineCall struct {
	req    *Request
	sink   Sink
	model  string
	prices priceTable

	plan     []string
	reported *Usage // by !usage
	failures int    // the attempts that the !status directives so far have failed
	streamed strings.Builder
}

// carryOut does what a directive says. It returns neither a response nor an
// error when the call goes on.
func (c *offlineCall) carryOut(ctx context.Context, o *Offline, d directive) (*Response, error) {
	switch d.verb {
	case verbSleep:
		delay, err := time.ParseDuration(d.arg)
		if err != nil || delay < 0 {
			return nil, c.bad(d, "needs a duration such as 5s")
		}
		return nil, c.wait(ctx, delay)
	case verbStatus:
		return nil, c.status(d)
	case verbUsage:
		return nil, c.usage(d)
	case verbPlan:
		c.plan = c.plan[:0]
		for step := range strings.SplitSeq(d.arg, "|") {
			if step = strings.TrimSpace(step); step != "" {
				c.plan = append(c.plan, step)
			}
		}
		return nil, nil

	case verbSay:
		return c.answer(d.arg), nil
	case verbJSON:
		if !json.Valid([]byte(d.arg)) {
			return nil, c.bad(d, "needs JSON")
		}
		return c.answer(d.arg), nil
	case verbStream:
		return c.stream(ctx, d)
	case verbResult:
		return c.answer(latestToolText(c.req.Messages, "")), nil
	case verbContext:
		text, err := contextJSON(c.req)
		if err != nil {
			return nil, c.bad(d, err.Error())
		}
		return c.answer(text), nil
	case verbClarify:
		if d.arg == "" {
			return nil, c.bad(d, "needs a question")
		}
		return c.finish(&Response{Clarify: d.arg, Finish: FinishStop}, words(d.arg)), nil

	case verbTool, verbLoop:
		call, rest, err := parseCall(d.arg)
		if err == nil && rest != "" {
			err = fmt.Errorf("has text after the arguments")
		}
		if err != nil {
			return nil, c.bad(d, err.Error())
		}
		return c.ask(call), nil
	case verbTools:
		calls, err := parseCalls(d.arg)
		if err != nil {
			return nil, c.bad(d, err.Error())
		}
		return c.ask(calls...), nil
	case verbSpawn, verbSpawnWait:
		return c.spawn(d)
	case verbWait:
		return c.ask(ToolCall{Tool: "subagent_wait", Args: waitArgs(c.req.Messages)}), nil

	case verbStall:
		gap := or(o.GapTimeout, defaultGap)
		if err := c.wait(ctx, gap); err != nil {
			return nil, err
		}
		e := stalled(gap)
		usage := c.aborted()
		e.Usage = &usage
		return nil, e
	case verbError:
		return nil, &Error{Status: 400, Reason: ReasonBadRequest, Message: d.arg, Usage: c.reported}
	}
	return nil, c.bad(d, "is not understood") // unreachable: parseScript knows the same verbs
}

// bad is the failure of a script that is wrong.
func (c *offlineCall) bad(d directive, problem string) error {
	return &Error{Status: 400, Reason: ReasonBadRequest, Message: d.verb + " " + problem, Usage: c.reported}
}

// status fails the call as a provider would, unless it has done so often enough.
func (c *offlineCall) status(d directive) error {
	code, options, _ := strings.Cut(d.arg, " ")
	status, err := strconv.Atoi(code)
	if err != nil || status < 400 || status > 599 {
		return c.bad(d, "needs a status from 400 to 599")
	}
	e := &Error{Status: status, Message: "as the script says", Usage: c.reported}
	e.Reason, e.Retryable = classify(status)
	times := 1
	for option := range strings.FieldsSeq(options) {
		name, value, _ := strings.Cut(option, "=")
		var ok bool
		switch name {
		case "times":
			times, err = strconv.Atoi(value)
			ok = err == nil && times >= 0
		case "retry-after":
			e.RetryAfter, ok = parseWait(value, time.Second)
		case "key":
			e.RateLimitKey, ok = value, value != ""
		default:
			ok = false
		}
		if !ok {
			return c.bad(d, fmt.Sprintf("does not understand %q", option))
		}
	}
	before := c.failures
	c.failures += times
	if c.req.Attempt >= before && c.req.Attempt-before < times {
		return e
	}
	return nil
}

// usage sets what the call will report.
func (c *offlineCall) usage(d directive) error {
	u := &Usage{}
	for option := range strings.FieldsSeq(d.arg) {
		name, value, _ := strings.Cut(option, "=")
		n, err := strconv.ParseInt(value, 10, 64)
		switch name {
		case "input":
			u.Input = count(n)
		case "cacheRead":
			u.CacheRead = count(n)
		case "cacheWrite":
			u.CacheWrite = count(n)
		case "output":
			u.Output = count(n)
		case "reasoning":
			u.Reasoning = count(n)
		default:
			err = strconv.ErrSyntax
		}
		if err != nil {
			return c.bad(d, fmt.Sprintf("does not understand %q", option))
		}
	}
	c.price(u)
	c.reported = u
	return nil
}

// stream answers n words one by one.
func (c *offlineCall) stream(ctx context.Context, d directive) (*Response, error) {
	number, option, _ := strings.Cut(d.arg, " ")
	n, err := strconv.Atoi(number)
	if err != nil || n < 0 || n > maxStreamWords {
		return nil, c.bad(d, fmt.Sprintf("needs a number of words up to %d", maxStreamWords))
	}
	var delay time.Duration
	if option = strings.TrimSpace(option); option != "" {
		value, ok := strings.CutPrefix(option, "delay=")
		delay, err = time.ParseDuration(value)
		if !ok || err != nil || delay < 0 {
			return nil, c.bad(d, fmt.Sprintf("does not understand %q", option))
		}
	}
	for i := 1; i <= n; i++ {
		if err := c.wait(ctx, delay); err != nil {
			return nil, err
		}
		word := "word" + strconv.Itoa(i)
		if i > 1 {
			word = " " + word
		}
		c.streamed.WriteString(word)
		if c.sink != nil {
			c.sink(word)
		}
	}
	return c.finish(&Response{Text: c.streamed.String(), Finish: FinishStop}, int64(n)), nil
}

// spawn asks for a sub-agent: [@agent] TASK.
func (c *offlineCall) spawn(d directive) (*Response, error) {
	var args struct {
		Agent string `json:"agent,omitempty"`
		Task  string `json:"task"`
	}
	args.Task = d.arg
	if after, ok := strings.CutPrefix(d.arg, "@"); ok {
		agent, task, _ := strings.Cut(after, " ")
		args.Agent, args.Task = agent, strings.TrimSpace(task)
	}
	if args.Task == "" {
		return nil, c.bad(d, "needs a task")
	}
	raw, err := marshal(args)
	if err != nil {
		return nil, c.bad(d, err.Error())
	}
	return c.ask(ToolCall{Tool: "session_spawn", Args: raw}), nil
}

// waitArgs are the arguments that wait for the child which the turn spawned
// last, or for all children when its ID is not to be found.
func waitArgs(messages []Message) json.RawMessage {
	var spawned struct {
		RunID string `json:"runId"`
	}
	if json.Unmarshal([]byte(latestToolText(messages, "session_spawn")), &spawned) != nil || spawned.RunID == "" {
		return json.RawMessage(`{"timeoutMs":300000}`)
	}
	id, _ := json.Marshal(spawned.RunID) // of a string, which cannot fail
	return json.RawMessage(`{"runIds":[` + string(id) + `],"timeoutMs":300000}`)
}

// answer ends the call with a final text.
func (c *offlineCall) answer(text string) *Response {
	if c.sink != nil && text != "" {
		c.sink(text)
	}
	return c.finish(&Response{Text: text, Finish: FinishStop}, words(text))
}

// ask ends the call with tool calls.
func (c *offlineCall) ask(calls ...ToolCall) *Response {
	var output int64
	for i := range calls {
		calls[i].ID = mintCallID(c.req.CallIndex, i)
		output += words(calls[i].Tool) + words(calls[i].Args)
	}
	return c.finish(&Response{Calls: calls, Finish: FinishTools}, output)
}

func (c *offlineCall) finish(r *Response, output int64) *Response {
	r.Plan = c.plan
	r.Model = c.model
	if c.reported != nil {
		r.Usage = *c.reported
		return r
	}
	r.Usage = Usage{Input: contextWords(c.req), Output: output}
	c.price(&r.Usage)
	return r
}

func (c *offlineCall) price(u *Usage) {
	u.CostMicros = c.prices.cost(c.model, *u)
}

// wait lets time pass. An error is the end of the call.
func (c *offlineCall) wait(ctx context.Context, d time.Duration) error {
	if d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	if ctx.Err() != nil {
		return &AbortedError{Usage: c.aborted(), Cause: context.Cause(ctx)}
	}
	return nil
}

// aborted is what a call that is cut short has consumed.
func (c *offlineCall) aborted() Usage {
	if c.reported != nil {
		return *c.reported
	}
	u := EstimateUsage(c.req, c.streamed.String())
	c.price(&u)
	return u
}

// latestUserText is the text of the message that scripts the turn.
func latestUserText(messages []Message) string {
	for i := len(messages) - 1; i >= 0; i-- {
		if messages[i].Role == RoleUser {
			return messages[i].Text
		}
	}
	return ""
}

// latestToolText is the latest result, of the named tool unless that is empty.
func latestToolText(messages []Message, tool string) string {
	for i := len(messages) - 1; i >= 0; i-- {
		if m := &messages[i]; m.Role == RoleTool && (tool == "" || m.Tool == tool) {
			return m.Text
		}
	}
	return ""
}

// parseCalls reads NAME {json} ;; NAME {json} …
func parseCalls(text string) ([]ToolCall, error) {
	var calls []ToolCall
	for {
		call, rest, err := parseCall(text)
		if err != nil {
			return nil, err
		}
		calls = append(calls, call)
		if rest == "" {
			return calls, nil
		}
		var ok bool
		if text, ok = strings.CutPrefix(rest, ";;"); !ok {
			return nil, fmt.Errorf("needs ;; between calls")
		}
	}
}

// parseCall reads NAME, or NAME {json}, from the start of a text and returns
// what follows.
func parseCall(text string) (ToolCall, string, error) {
	text = strings.TrimSpace(text)
	end := strings.IndexFunc(text, func(r rune) bool { return unicode.IsSpace(r) || r == '{' || r == ';' })
	if end < 0 {
		end = len(text)
	}
	call := ToolCall{Tool: text[:end], Args: json.RawMessage("{}")}
	if call.Tool == "" {
		return call, "", fmt.Errorf("needs the name of a tool")
	}
	rest := strings.TrimSpace(text[end:])
	if rest == "" || strings.HasPrefix(rest, ";;") {
		return call, rest, nil
	}
	size := objectSize(rest)
	if !json.Valid([]byte(rest[:size])) {
		return call, "", fmt.Errorf("needs a JSON object after %s", call.Tool)
	}
	call.Args = json.RawMessage(rest[:size])
	return call, strings.TrimSpace(rest[size:]), nil
}

// objectSize is the length of the braces, and all between them, that a text
// starts with, or 0.
func objectSize(text string) int {
	if !strings.HasPrefix(text, "{") {
		return 0
	}
	depth, quoted := 0, false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{':
			depth++
		case c == '}':
			if depth--; depth == 0 {
				return i + 1
			}
		}
	}
	return 0
}

// contextJSON shows what the model was sent.
func contextJSON(req *Request) (string, error) {
	type message struct {
		Role Role   `json:"role"`
		Text string `json:"text"`
	}
	sent := struct {
		System   string    `json:"system"`
		Facts    []Fact    `json:"facts"`
		Tools    []Tool    `json:"tools"`
		Messages []message `json:"messages"`
	}{System: req.System, Facts: req.Facts, Tools: req.Tools, Messages: make([]message, 0, len(req.Messages))}
	if sent.Facts == nil {
		sent.Facts = []Fact{}
	}
	if sent.Tools == nil {
		sent.Tools = []Tool{}
	}
	for _, m := range req.Messages {
		sent.Messages = append(sent.Messages, message{m.Role, m.Text})
	}
	text, err := marshal(sent)
	return string(text), err
}

// marshal is json.Marshal that leaves <, > and & readable.
func marshal(v any) (json.RawMessage, error) {
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// contextWords counts the words of everything that was sent.
func contextWords(req *Request) int64 {
	n := words(req.System)
	for i := range req.Facts {
		n += words(req.Facts[i].Key) + words(req.Facts[i].Value)
	}
	for i := range req.Tools {
		n += words(req.Tools[i].Name) + words(req.Tools[i].Description) + words(req.Tools[i].Parameters)
	}
	for i := range req.Messages {
		m := &req.Messages[i]
		n += words(m.Text)
		for j := range m.Calls {
			n += words(m.Calls[j].Tool) + words(m.Calls[j].Args)
		}
	}
	return n
}

// words counts what white space separates.
func words[T string | json.RawMessage](text T) int64 {
	n, inside := int64(0), false
	for _, r := range string(text) {
		if unicode.IsSpace(r) {
			inside = false
		} else if !inside {
			inside = true
			n++
		}
	}
	return n
}
