package model

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/param"
	"github.com/openai/openai-go/v3/packages/ssestream"
	"github.com/openai/openai-go/v3/shared"
)

const openAIBaseURL = "https://api.openai.com/v1"

// OpenAI calls models over OpenAI's Chat Completions, which many servers and
// gateways speak. Requests go through the vendor's SDK. Its answers are read
// here event by event, since other servers deviate where the SDK does not
// expect it.
type OpenAI struct {
	chat      openai.ChatCompletionService
	apiKey    string
	prices    priceTable
	firstByte time.Duration
	gap       time.Duration
	noStream  bool
	// vendor says that OpenAI itself answers, whose models refuse the older
	// name of the output limit; many other servers know only that.
	vendor bool
}

// NewOpenAI returns a provider with connections of its own. Programs take theirs
// from a Registry.
func NewOpenAI(config Config) (*OpenAI, error) {
	config.Type = ProviderOpenAI
	e, err := newEntry(config.Name, config.ProviderConfig)
	if err != nil {
		return nil, err
	}
	return newOpenAI(config, e), nil
}

// newOpenAI takes a checked config. It does not use the SDK's client, which
// would pick up keys and addresses from the environment and send them to
// whatever BaseURL an agent names.
func newOpenAI(config Config, e *entry) *OpenAI {
	baseURL := config.BaseURL
	if baseURL == "" {
		baseURL = openAIBaseURL
	}
	options := []option.RequestOption{
		option.WithBaseURL(baseURL),
		option.WithHTTPClient(e.client),
		option.WithMaxRetries(0), // retries belong to the turn worker
	}
	if config.APIKey != "" {
		options = append(options, option.WithAPIKey(config.APIKey))
	}
	firstByte := defaultFirstByte
	if config.NoStream {
		firstByte = defaultFirstByteNoStream
	}
	return &OpenAI{
		chat:      openai.NewChatCompletionService(options...),
		apiKey:    config.APIKey,
		prices:    e.prices,
		firstByte: or(config.FirstByteTimeout, firstByte),
		gap:       or(config.GapTimeout, defaultGap),
		noStream:  config.NoStream,
		vendor:    hostIs(baseURL, "openai.com") || hostIs(baseURL, "openai.azure.com"),
	}
}

// Call makes one call. See Provider.
func (p *OpenAI) Call(ctx context.Context, req *Request, sink Sink) (*Response, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	c := &call{req: req, sink: sink, secret: p.apiKey, firstByte: p.firstByte, gap: p.gap, prices: p.prices, model: req.Model}
	names := newToolNames(req)
	params, err := p.params(req, names)
	if err != nil {
		return nil, c.fail(ctx, err)
	}
	var raw *http.Response
	if _, err = p.chat.New(ctx, params, option.WithMiddleware(c.do), option.WithResponseBodyInto(&raw)); err != nil {
		return nil, c.fail(ctx, err)
	}
	defer func() { _ = raw.Body.Close() }()

	answer := openAIAnswer{call: c}
	// A server that cannot stream answers with the whole all the same.
	if mediaType, _, _ := mime.ParseMediaType(raw.Header.Get("Content-Type")); p.noStream || mediaType == "application/json" {
		err = answer.readWhole(raw.Body)
	} else {
		err = answer.readStream(ssestream.NewDecoder(raw))
	}
	if err != nil {
		return nil, c.fail(ctx, err)
	}
	return answer.response(names), nil
}

// params builds the request.
func (p *OpenAI) params(req *Request, names toolNames) (openai.ChatCompletionNewParams, error) {
	params := openai.ChatCompletionNewParams{Model: req.Model}
	extra, err := extraParameters(req, "model", "messages", "tools", "stream", "stream_options", "n")
	if err != nil {
		return params, err
	}
	if !p.noStream {
		extra["stream"] = true
		params.StreamOptions.IncludeUsage = openai.Bool(true)
	}
	params.SetExtraFields(extra)
	switch {
	case extra["max_tokens"] != nil || extra["max_completion_tokens"] != nil:
	case p.vendor:
		params.MaxCompletionTokens = openai.Int(maxOutputTokens(req))
	default:
		params.MaxTokens = openai.Int(maxOutputTokens(req))
	}
	for _, tool := range req.Tools {
		schema, err := toolSchema(tool)
		if err != nil {
			return params, err
		}
		function := shared.FunctionDefinitionParam{Name: names.their(tool.Name), Parameters: schema}
		if tool.Description != "" {
			function.Description = openai.String(tool.Description)
		}
		params.Tools = append(params.Tools, openai.ChatCompletionFunctionTool(function))
	}
	params.Messages, err = openAIMessages(req, names)
	return params, err
}

// openAIMessages puts what changes into the last message. A message of its own
// there would break the alternation of roles that some servers check.
func openAIMessages(req *Request, names toolNames) ([]openai.ChatCompletionMessageParamUnion, error) {
	facts, err := factsText(req)
	if err != nil {
		return nil, err
	}
	tail := joinParagraphs(facts, nowText(req))
	messages := make([]openai.ChatCompletionMessageParamUnion, 0, len(req.Messages)+2)
	if req.System != "" {
		messages = append(messages, openai.SystemMessage(req.System))
	}
	var ids callIDs
	for i, m := range req.Messages {
		text := m.Text
		if i == len(req.Messages)-1 && m.Role != RoleAssistant {
			text, tail = joinParagraphs(text, tail), ""
		}
		switch m.Role {
		case RoleUser:
			messages = append(messages, openai.UserMessage(text))
		case RoleTool:
			messages = append(messages, openai.ToolMessage(text, ids.result(m.CallID)))
		case RoleAssistant:
			assistant := &openai.ChatCompletionAssistantMessageParam{}
			if text != "" || len(m.Calls) == 0 {
				assistant.Content.OfString = param.NewOpt(text)
			}
			for j, toolCall := range m.Calls {
				assistant.ToolCalls = append(assistant.ToolCalls, openai.ChatCompletionMessageToolCallUnionParam{
					OfFunction: &openai.ChatCompletionMessageFunctionToolCallParam{
						ID: ids.call(toolCall.ID, i, j),
						Function: openai.ChatCompletionMessageFunctionToolCallFunctionParam{
							Name:      names.their(toolCall.Tool),
							Arguments: string(sentArgs(toolCall.Args)),
						},
					},
				})
			}
			messages = append(messages, openai.ChatCompletionMessageParamUnion{OfAssistant: assistant})
		default:
			return nil, badRequest(fmt.Sprintf("there is no role %q", m.Role))
		}
	}
	if tail != "" {
		messages = append(messages, openai.UserMessage(tail))
	}
	return messages, nil
}

func joinParagraphs(a, b string) string {
	if a == "" || b == "" {
		return a + b
	}
	return a + "\n\n" + b
}

// openAIAnswer is an answer that is being read.
type openAIAnswer struct {
	*call
	refusal strings.Builder
	finish  string // the provider's word; "" until it stops
	calls   []*openAICall
	byIndex map[int64]*openAICall // the latest call of each index
}

// openAICall is a tool call of which fragments arrive.
type openAICall struct {
	index    int64
	id, name string
	args     strings.Builder
}

// usageGap is how long the numbers of a finished answer are waited for.
const usageGap = 10 * time.Second

// readStream reads the events of a streamed answer.
func (a *openAIAnswer) readStream(events ssestream.Decoder) error {
	for events.Next() {
		data := bytes.TrimSpace(events.Event().Data)
		if len(data) == 0 {
			continue
		}
		if bytes.Equal(data, []byte("[DONE]")) {
			a.body.drain()
			break
		}
		var chunk openai.ChatCompletionChunk
		if err := json.Unmarshal(data, &chunk); err != nil {
			return err
		}
		if err := brokenOff(chunk.JSON.ExtraFields["error"].Raw(), string(chunk.Object), data); err != nil {
			return err
		}
		a.chunk(&chunk)
	}
	// Once the model has stopped, only the usage can still be missing, and that
	// can be estimated.
	if a.finish != "" {
		return nil
	}
	if err := events.Err(); err != nil {
		return err
	}
	return incomplete()
}

// brokenOff is the error that a provider sent instead of an answer, or nil.
// member is its member "error", which some servers always send, as null.
func brokenOff(member, object string, data []byte) error {
	if isNull(json.RawMessage(member)) && object != "error" {
		return nil
	}
	f := parseFault(data)
	return f.error(f.statusOf())
}

// incomplete is an answer that ended without saying why the model stopped.
func incomplete() error { return badResponse("the answer ended before it was complete") }

func (a *openAIAnswer) chunk(chunk *openai.ChatCompletionChunk) {
	if chunk.Model != "" {
		a.model = chunk.Model
	}
	if chunk.JSON.Usage.Valid() {
		a.usage(&chunk.Usage)
	}
	a.tier(string(chunk.ServiceTier))
	for i := range chunk.Choices {
		choice := &chunk.Choices[i]
		if choice.Index != 0 {
			continue
		}
		a.write(choice.Delta.Content)
		a.refusal.WriteString(choice.Delta.Refusal)
		for j := range choice.Delta.ToolCalls {
			part := &choice.Delta.ToolCalls[j]
			a.toolCall(part.Index, part.ID, part.Function.Name, part.Function.Arguments)
		}
		if choice.FinishReason != "" {
			a.finish = choice.FinishReason
			a.body.gap = min(a.gap, usageGap)
		}
	}
}

// toolCall takes a fragment of a tool call. Fragments of parallel calls may
// alternate. A server that gives all calls the same index tells them apart by
// their IDs.
func (a *openAIAnswer) toolCall(index int64, id, name, args string) {
	t := a.byIndex[index]
	if t == nil || (id != "" && t.id != "" && id != t.id && name != "") {
		t = &openAICall{index: index}
		if a.byIndex == nil {
			a.byIndex = map[int64]*openAICall{}
		}
		a.byIndex[index] = t
		a.calls = append(a.calls, t)
	}
	if t.id == "" {
		t.id = id
	}
	if t.name == "" {
		t.name = name
	}
	t.args.WriteString(args)
	a.streamed += len(args)
}

// readWhole reads an answer that is not streamed.
func (a *openAIAnswer) readWhole(body io.Reader) error {
	data, err := io.ReadAll(body)
	if err != nil {
		return err
	}
	var whole openai.ChatCompletion
	if err := json.Unmarshal(data, &whole); err != nil {
		return err
	}
	if err := brokenOff(whole.JSON.ExtraFields["error"].Raw(), string(whole.Object), data); err != nil {
		return err
	}
	if whole.Model != "" {
		a.model = whole.Model
	}
	if whole.JSON.Usage.Valid() {
		a.usage(&whole.Usage)
	}
	a.tier(string(whole.ServiceTier))
	if len(whole.Choices) == 0 || whole.Choices[0].FinishReason == "" {
		return incomplete()
	}
	choice := &whole.Choices[0]
	a.finish = choice.FinishReason
	a.write(choice.Message.Content)
	a.refusal.WriteString(choice.Message.Refusal)
	for i, toolCall := range choice.Message.ToolCalls {
		a.toolCall(int64(i), toolCall.ID, toolCall.Function.Name, toolCall.Function.Arguments)
	}
	return nil
}

// usage normalises the provider's numbers. OpenAI counts cached tokens and
// reasoning inside the prompt and the completion; where the total shows that a
// server counts them beside, nothing is taken off.
func (a *openAIAnswer) usage(u *openai.CompletionUsage) {
	prompt, completion := u.PromptTokens, u.CompletionTokens
	cached, written := u.PromptTokensDetails.CachedTokens, u.PromptTokensDetails.CacheWriteTokens
	reasoning := u.CompletionTokensDetails.ReasoningTokens
	switch u.TotalTokens - prompt - completion {
	case cached + written + reasoning: // both beside, or there are none
	case cached + written:
		completion -= reasoning
	case reasoning:
		prompt -= cached + written
	default:
		prompt -= cached + written
		completion -= reasoning
	}
	a.reported = &Usage{
		Input:      count(prompt),
		CacheRead:  count(cached),
		CacheWrite: count(written),
		Output:     count(completion),
		Reasoning:  count(reasoning),
		CostMicros: reportedCost(u.JSON.ExtraFields["cost"].Raw()),
	}
}

// reportedCost reads the cost that some gateways report, in dollars
// (OpenRouter), or as an object with a total (Perplexity).
func reportedCost(raw string) *int64 {
	if isNull(json.RawMessage(raw)) {
		return nil
	}
	var dollars float64
	if json.Unmarshal([]byte(raw), &dollars) != nil {
		var cost struct {
			Total *float64 `json:"total_cost"`
		}
		if json.Unmarshal([]byte(raw), &cost) != nil || cost.Total == nil {
			return nil
		}
		dollars = *cost.Total
	}
	if dollars < 0 || dollars > 1e6 {
		return nil
	}
	micros := int64(dollars*1e6 + 0.5)
	return &micros
}

// tier notes that the call was served at other rates than the standard ones.
func (a *openAIAnswer) tier(tier string) {
	switch tier {
	case "flex", "priority", "fast", "scale":
		a.unpriced = true
	}
}

// response is the finished answer.
func (a *openAIAnswer) response(names toolNames) *Response {
	r := &Response{Text: a.text.String(), Model: a.model, Finish: FinishStop}
	slices.SortStableFunc(a.calls, func(x, y *openAICall) int { return cmp.Compare(x.index, y.index) })
	for _, t := range a.calls {
		r.Calls = append(r.Calls, ToolCall{ID: t.id, Tool: names.our(t.name), Args: receivedArgs(t.args.String())})
	}
	uniqueCalls(r.Calls, a.req.CallIndex)
	switch a.finish {
	case "length", "max_tokens":
		r.Finish = FinishLength
	case "content_filter":
		r.Finish = FinishFilter
	default: // stop, tool_calls and what other servers call them
		if len(r.Calls) > 0 {
			r.Finish = FinishTools
		}
	}
	if a.refusal.Len() > 0 {
		r.Text, r.Finish = joinParagraphs(r.Text, a.refusal.String()), FinishFilter
	}
	r.Usage = a.complete()
	return r
}
