package model

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/anthropics/anthropic-sdk-go/v2"
	"github.com/anthropics/anthropic-sdk-go/v2/option"
	"github.com/anthropics/anthropic-sdk-go/v2/packages/param"
)

const anthropicBaseURL = "https://api.anthropic.com"

// Anthropic calls models over Anthropic's Messages API, always streaming.
type Anthropic struct {
	messages  anthropic.MessageService
	apiKey    string
	prices    priceTable
	firstByte time.Duration
	gap       time.Duration
}

// NewAnthropic returns a provider with connections of its own. Programs take
// theirs from a Registry.
func NewAnthropic(config Config) (*Anthropic, error) {
	config.Type = ProviderAnthropic
	e, err := newEntry(config.Name, config.ProviderConfig)
	if err != nil {
		return nil, err
	}
	return newAnthropic(config, e), nil
}

// newAnthropic takes a checked config. Like newOpenAI it stays clear of the
// SDK's client and the environment.
func newAnthropic(config Config, e *entry) *Anthropic {
	baseURL := strings.TrimSuffix(strings.TrimSuffix(config.BaseURL, "/"), "/v1") // the SDK adds it
	if baseURL == "" {
		baseURL = anthropicBaseURL
	}
	options := []option.RequestOption{
		option.WithBaseURL(baseURL),
		option.WithHTTPClient(e.client),
		option.WithMaxRetries(0),      // retries belong to the turn worker
		option.WithoutOpenTelemetry(), // so do spans; the SDK's can hold prompts
	}
	if config.APIKey != "" {
		options = append(options, option.WithAPIKey(config.APIKey)) // Authorization since API version 2026-10-21
		if !hostIs(baseURL, "anthropic.com") {
			options = append(options, option.WithHeader("X-Api-Key", config.APIKey)) // what other servers know
		}
	}
	return &Anthropic{
		messages:  anthropic.NewMessageService(options...),
		apiKey:    config.APIKey,
		prices:    e.prices,
		firstByte: or(config.FirstByteTimeout, defaultFirstByte),
		gap:       or(config.GapTimeout, defaultGap),
	}
}

// Call makes one call. See Provider.
func (p *Anthropic) Call(ctx context.Context, req *Request, sink Sink) (*Response, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	c := &call{req: req, sink: sink, secret: p.apiKey, firstByte: p.firstByte, gap: p.gap, prices: p.prices, model: req.Model}
	names := newToolNames(req)
	params, err := anthropicParams(req, names)
	if err != nil {
		return nil, c.fail(ctx, err)
	}
	stream := p.messages.NewStreaming(ctx, params, option.WithMiddleware(c.do))
	defer func() { _ = stream.Close() }()
	answer := anthropicAnswer{call: c}
	for !answer.done && stream.Next() {
		event := stream.Current()
		answer.event(&event)
	}
	switch err := stream.Err(); {
	case answer.done:
		c.body.drain()
	case answer.stop != "": // all has been said
	case err != nil:
		return nil, c.fail(ctx, anthropicError(err))
	default:
		return nil, c.fail(ctx, incomplete())
	}
	return answer.response(names), nil
}

// anthropicError reads the error event that ended a stream. Its HTTP status is
// that of the answer it interrupts, so its type has to say what happened.
func anthropicError(err error) error {
	e, ok := errors.AsType[*anthropic.Error](err)
	if !ok {
		return err
	}
	f := parseFault([]byte(e.RawJSON()))
	return f.error(f.statusOf())
}

// cacheHere ends a prefix that the provider is asked to keep. A request may
// have four such markers; three are used.
func cacheHere() anthropic.CacheControlEphemeralParam {
	return anthropic.NewCacheControlEphemeralParam()
}

// anthropicParams builds the request: tools, system and conversation, each
// ending in a cache marker, and then what changes from call to call.
func anthropicParams(req *Request, names toolNames) (anthropic.MessageNewParams, error) {
	params := anthropic.MessageNewParams{Model: req.Model, MaxTokens: maxOutputTokens(req)}
	extra, err := extraParameters(req, "model", "messages", "system", "tools", "stream")
	if err != nil {
		return params, err
	}
	params.SetExtraFields(extra)
	for i, tool := range req.Tools {
		schema, err := toolSchema(tool)
		if err != nil {
			return params, err
		}
		t := &anthropic.ToolParam{
			Name:        names.their(tool.Name),
			InputSchema: param.Override[anthropic.ToolInputSchemaParam](schema),
		}
		if tool.Description != "" {
			t.Description = anthropic.String(tool.Description)
		}
		if i == len(req.Tools)-1 {
			t.CacheControl = cacheHere()
		}
		params.Tools = append(params.Tools, anthropic.ToolUnionParam{OfTool: t})
	}
	if strings.TrimSpace(req.System) != "" {
		params.System = []anthropic.TextBlockParam{{Text: req.System, CacheControl: cacheHere()}}
	}
	params.Messages, err = anthropicMessages(req, names)
	return params, err
}

// anthropicMessages builds the conversation: it starts and ends with the user,
// roles alternate, results stand before text, and no text is blank, since the
// API refuses anything else.
func anthropicMessages(req *Request, names toolNames) ([]anthropic.MessageParam, error) {
	facts, err := factsText(req)
	if err != nil {
		return nil, err
	}
	var b anthropicBuilder
	var ids callIDs
	for i, m := range req.Messages {
		switch m.Role {
		case RoleUser:
			b.to(false)
			b.addText(m.Text)
		case RoleTool:
			b.to(false)
			b.addResult(ids.result(m.CallID), m)
		case RoleAssistant:
			if len(b.done) == 0 && len(b.results)+len(b.blocks) == 0 {
				b.to(false)
				b.addText("(The conversation so far is left out.)")
			}
			b.to(true)
			b.addText(m.Text)
			for j, toolCall := range m.Calls {
				b.blocks = append(b.blocks, anthropic.NewToolUseBlock(
					ids.call(toolCall.ID, i, j), sentArgs(toolCall.Args), names.their(toolCall.Tool)))
			}
		default:
			return nil, badRequest(fmt.Sprintf("there is no role %q", m.Role))
		}
	}
	b.mark()
	b.to(false)
	b.addText(facts)
	b.addText(nowText(req))
	if len(b.results)+len(b.blocks) == 0 {
		b.addText("Continue.")
	}
	b.flush()
	return b.done, nil
}

// anthropicBuilder merges consecutive messages of one side into one.
type anthropicBuilder struct {
	done      []anthropic.MessageParam
	assistant bool                               // who speaks in results and blocks
	results   []anthropic.ContentBlockParamUnion // of tools, which stand first
	blocks    []anthropic.ContentBlockParamUnion
}

// to makes a side speak next.
func (b *anthropicBuilder) to(assistant bool) {
	if b.assistant != assistant {
		b.flush()
		b.assistant = assistant
	}
}

// flush ends the message that is being built, if there is any.
func (b *anthropicBuilder) flush() {
	blocks := append(b.results, b.blocks...)
	b.results, b.blocks = nil, nil
	switch {
	case len(blocks) == 0:
	case b.assistant:
		b.done = append(b.done, anthropic.NewAssistantMessage(blocks...))
	default:
		b.done = append(b.done, anthropic.NewUserMessage(blocks...))
	}
}

func (b *anthropicBuilder) addText(text string) {
	if strings.TrimSpace(text) != "" {
		b.blocks = append(b.blocks, anthropic.NewTextBlock(text))
	}
}

func (b *anthropicBuilder) addResult(id string, m Message) {
	result := &anthropic.ToolResultBlockParam{ToolUseID: id}
	if m.IsError {
		result.IsError = anthropic.Bool(true)
	}
	if strings.TrimSpace(m.Text) != "" {
		result.Content = []anthropic.ToolResultBlockParamContentUnion{{OfText: &anthropic.TextBlockParam{Text: m.Text}}}
	}
	b.results = append(b.results, anthropic.ContentBlockParamUnion{OfToolResult: result})
}

// mark puts a cache marker on the last block so far.
func (b *anthropicBuilder) mark() {
	blocks := b.blocks
	if len(blocks) == 0 {
		blocks = b.results
	}
	if len(blocks) == 0 {
		return
	}
	switch last := blocks[len(blocks)-1]; {
	case last.OfText != nil:
		last.OfText.CacheControl = cacheHere()
	case last.OfToolResult != nil:
		last.OfToolResult.CacheControl = cacheHere()
	case last.OfToolUse != nil:
		last.OfToolUse.CacheControl = cacheHere()
	}
}

// anthropicAnswer is an answer that is being read.
type anthropicAnswer struct {
	*call
	done    bool // the provider said so
	stop    anthropic.StopReason
	refusal string
	calls   []*anthropicCall
}

// anthropicCall is a tool call of which fragments arrive.
type anthropicCall struct {
	index    int64
	id, name string
	args     strings.Builder
}

func (a *anthropicAnswer) event(event *anthropic.MessageStreamEventUnion) {
	switch event.Type {
	case "message_start":
		if event.Message.Model != "" {
			a.model = event.Message.Model
		}
		u := &event.Message.Usage
		a.unpriced = u.Speed == anthropic.UsageSpeedFast
		a.reported = &Usage{
			Input:      count(u.InputTokens),
			CacheRead:  count(u.CacheReadInputTokens),
			CacheWrite: count(u.CacheCreationInputTokens),
			Output:     count(u.OutputTokens),
		}
	case "content_block_start":
		switch block := &event.ContentBlock; block.Type {
		case "text":
			a.write(block.Text)
		case "tool_use":
			a.calls = append(a.calls, &anthropicCall{index: event.Index, id: block.ID, name: block.Name})
		}
	case "content_block_delta":
		switch delta := &event.Delta; delta.Type {
		case "text_delta":
			a.write(delta.Text)
		case "input_json_delta":
			a.args(event.Index, delta.PartialJSON)
		case "thinking_delta":
			a.streamed += len(delta.Thinking)
		}
	case "message_delta":
		if event.Delta.StopReason != "" {
			a.stop = event.Delta.StopReason
			a.refusal = event.Delta.StopDetails.Explanation
		}
		a.usage(&event.Usage)
	case "message_stop":
		a.done = true
	}
}

// args takes a fragment of the arguments of the call in the given block.
func (a *anthropicAnswer) args(index int64, fragment string) {
	for _, t := range a.calls {
		if t.index == index {
			t.args.WriteString(fragment)
			a.streamed += len(fragment)
		}
	}
}

// usage takes the numbers at the end, which are totals. Input does not contain
// what was cached; output contains the reasoning.
func (a *anthropicAnswer) usage(u *anthropic.MessageDeltaUsage) {
	if a.reported == nil {
		a.reported = &Usage{}
	}
	set := func(n *int64, given bool, value int64) {
		if given {
			*n = count(value)
		}
	}
	set(&a.reported.Input, u.JSON.InputTokens.Valid(), u.InputTokens)
	set(&a.reported.CacheRead, u.JSON.CacheReadInputTokens.Valid(), u.CacheReadInputTokens)
	set(&a.reported.CacheWrite, u.JSON.CacheCreationInputTokens.Valid(), u.CacheCreationInputTokens)
	if u.JSON.OutputTokens.Valid() {
		reasoning := u.OutputTokensDetails.ThinkingTokens
		a.reported.Reasoning = count(reasoning)
		a.reported.Output = count(u.OutputTokens - reasoning)
	}
}

// response is the finished answer.
func (a *anthropicAnswer) response(names toolNames) *Response {
	r := &Response{Text: a.text.String(), Model: a.model, Finish: FinishStop}
	for _, t := range a.calls {
		r.Calls = append(r.Calls, ToolCall{ID: t.id, Tool: names.our(t.name), Args: receivedArgs(t.args.String())})
	}
	uniqueCalls(r.Calls, a.req.CallIndex)
	switch a.stop {
	case anthropic.StopReasonMaxTokens, anthropic.StopReasonModelContextWindowExceeded,
		anthropic.StopReasonPauseTurn: // of the provider's own tools; the answer is not whole
		r.Finish = FinishLength
	case anthropic.StopReasonRefusal:
		r.Finish = FinishFilter
		if r.Text == "" {
			r.Text = a.refusal
		}
	default: // end_turn, stop_sequence, tool_use
		if len(r.Calls) > 0 {
			r.Finish = FinishTools
		}
	}
	r.Usage = a.complete()
	return r
}
