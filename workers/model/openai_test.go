package model

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// chunk is one event of a streamed answer.
func chunk(delta, finish string) string {
	if finish == "" {
		finish = "null"
	} else {
		finish = `"` + finish + `"`
	}
	return `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1764500000,"model":"gpt-4o-2024-08-06","choices":[{"index":0,"delta":` +
		delta + `,"logprobs":null,"finish_reason":` + finish + `}],"usage":null}` + "\n\n"
}

// usageChunk is the event after the last choice.
func usageChunk(usage string) string {
	return `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1764500000,"model":"gpt-4o-2024-08-06","choices":[],"usage":` + usage + "}\n\n"
}

const doneEvent = "data: [DONE]\n\n"

// openAIText is a whole streamed answer.
func openAIText(text, finish string) string {
	content, _ := json.Marshal(text)
	return chunk(`{"role":"assistant","content":""}`, "") + chunk(`{"content":`+string(content)+`}`, "") + chunk(`{}`, finish) +
		usageChunk(`{"prompt_tokens":10,"completion_tokens":2,"total_tokens":12}`) + doneEvent
}

func toolChunk(calls string) string { return chunk(`{"tool_calls":[`+calls+`]}`, "") }

func TestOpenAIAnswers(t *testing.T) {
	t.Parallel()
	call := func(id, tool, args string) ToolCall {
		return ToolCall{ID: id, Tool: tool, Args: json.RawMessage(args)}
	}
	for name, c := range map[string]struct {
		events []string
		want   Response // without Usage; Model empty means the snapshot
	}{
		"Text": {
			events: []string{chunk(`{"role":"assistant","content":"","refusal":null}`, ""), chunk(`{"content":"Hel"}`, ""), chunk(`{"content":"lo ☃"}`, ""), chunk(`{}`, "stop"), usageChunk(`{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}`), doneEvent},
			want:   Response{Text: "Hello ☃", Finish: FinishStop},
		},
		"EventsCutAnywhere": {
			events: strings.SplitAfter(openAIText("Hello", "stop"), "e"),
			want:   Response{Text: "Hello", Finish: FinishStop},
		},
		"CommentsAndCarriageReturns": {
			events: []string{": OPENROUTER PROCESSING\r\n\r\n", strings.ReplaceAll(openAIText("Hello", "stop"), "\n", "\r\n")},
			want:   Response{Text: "Hello", Finish: FinishStop},
		},
		"NullErrorInEachChunk": {
			events: []string{strings.ReplaceAll(openAIText("Hello", "stop"), `"usage"`, `"error":null,"usage"`)},
			want:   Response{Text: "Hello", Finish: FinishStop},
		},
		"NoDone":              {events: []string{strings.TrimSuffix(openAIText("Hello", "stop"), doneEvent)}, want: Response{Text: "Hello", Finish: FinishStop}},
		"Length":              {events: []string{openAIText("Hello", "length")}, want: Response{Text: "Hello", Finish: FinishLength}},
		"ContentFilter":       {events: []string{openAIText("", "content_filter")}, want: Response{Finish: FinishFilter}},
		"OtherServersStop":    {events: []string{openAIText("Hello", "eos")}, want: Response{Text: "Hello", Finish: FinishStop}},
		"OtherChoicesIgnored": {events: []string{strings.ReplaceAll(chunk(`{"content":"no"}`, "stop"), `"index":0`, `"index":1`), openAIText("yes", "stop")}, want: Response{Text: "yes", Finish: FinishStop}},
		"Refusal": {
			events: []string{chunk(`{"role":"assistant","refusal":"I can"}`, ""), chunk(`{"refusal":"not."}`, ""), chunk(`{}`, "stop"), doneEvent},
			want:   Response{Text: "I cannot.", Finish: FinishFilter},
		},
		"ToolCallInFragments": {
			events: []string{
				toolChunk(`{"index":0,"id":"call_a","type":"function","function":{"name":"crm__lookup","arguments":""}}`),
				toolChunk(`{"index":0,"function":{"arguments":"{\"id\""}}`), toolChunk(`{"index":0,"function":{"arguments":":7}"}}`),
				chunk(`{}`, "tool_calls"), doneEvent,
			},
			want: Response{Calls: []ToolCall{call("call_a", "crm::lookup", `{"id":7}`)}, Finish: FinishTools},
		},
		"ParallelCallsAlternate": {
			events: []string{
				chunk(`{"content":"Let me look."}`, ""),
				toolChunk(`{"index":1,"id":"call_b","type":"function","function":{"name":"look","arguments":""}}`),
				toolChunk(`{"index":0,"id":"call_a","type":"function","function":{"name":"look","arguments":""}}`),
				toolChunk(`{"index":0,"function":{"arguments":"{\"n\":"}},{"index":1,"function":{"arguments":"{\"n\":"}}`),
				toolChunk(`{"index":1,"function":{"arguments":"2}"}}`), toolChunk(`{"index":0,"function":{"arguments":"1}"}}`),
				chunk(`{}`, "tool_calls"), doneEvent,
			},
			want: Response{Text: "Let me look.", Calls: []ToolCall{call("call_a", "look", `{"n":1}`), call("call_b", "look", `{"n":2}`)}, Finish: FinishTools},
		},
		"AllCallsOfOneIndex": {
			events: []string{
				toolChunk(`{"index":0,"id":"a","type":"function","function":{"name":"look","arguments":"{}"}}`),
				toolChunk(`{"index":0,"id":"b","type":"function","function":{"name":"look","arguments":"{\"n\":2}"}}`),
				chunk(`{}`, "stop"), doneEvent,
			},
			want: Response{Calls: []ToolCall{call("a", "look", `{}`), call("b", "look", `{"n":2}`)}, Finish: FinishTools},
		},
		"IDAndNameInEachFragment": {
			events: []string{
				toolChunk(`{"index":0,"id":"a","type":"function","function":{"name":"look","arguments":"{\"n\""}}`),
				toolChunk(`{"index":0,"id":"a","type":"function","function":{"name":"look","arguments":":2}"}}`),
				chunk(`{}`, "tool_calls"), doneEvent,
			},
			want: Response{Calls: []ToolCall{call("a", "look", `{"n":2}`)}, Finish: FinishTools},
		},
		"EmptyArguments": {
			events: []string{
				toolChunk(`{"index":0,"id":"a","type":"function","function":{"name":"look","arguments":""}},{"index":1,"id":"b","type":"function","function":{"name":"look","arguments":"null"}},{"index":2,"id":"c","type":"function","function":{"name":"look"}}`),
				chunk(`{}`, "tool_calls"), doneEvent,
			},
			want: Response{Calls: []ToolCall{call("a", "look", `{}`), call("b", "look", `{}`), call("c", "look", `{}`)}, Finish: FinishTools},
		},
		"InvalidArguments": {
			events: []string{toolChunk(`{"index":0,"id":"a","type":"function","function":{"name":"look","arguments":"{\"n\":"}}`), chunk(`{}`, "length"), doneEvent},
			want:   Response{Calls: []ToolCall{call("a", "look", `"{\"n\":"`)}, Finish: FinishLength},
		},
		"CallsWithoutIDs": {
			events: []string{
				toolChunk(`{"index":0,"type":"function","function":{"name":"look","arguments":"{}"}},{"index":1,"type":"function","function":{"name":"nobody_knows","arguments":"{}"}}`),
				chunk(`{}`, "tool_calls"), doneEvent,
			},
			want: Response{Calls: []ToolCall{call("call_4_0", "look", `{}`), call("call_4_1", "nobody_knows", `{}`)}, Finish: FinishTools},
		},
		"CallsOfOneID": {
			events: []string{
				toolChunk(`{"index":0,"id":"x","type":"function","function":{"name":"look","arguments":"{}"}},{"index":1,"id":"x","type":"function","function":{"name":"look","arguments":"{}"}}`),
				chunk(`{}`, "tool_calls"), doneEvent,
			},
			want: Response{Calls: []ToolCall{call("x", "look", `{}`), call("call_4_1", "look", `{}`)}, Finish: FinishTools},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := serve(t, events(c.events...))
			req := ask("gpt-4o", "hi")
			req.Tools = []Tool{{Name: "crm::lookup"}, {Name: "look"}}
			req.CallIndex = 4
			var got deltas

			resp, err := openAIAt(t, server.url).Call(t.Context(), req, got.sink)
			require.NoError(t, err)

			want := c.want
			want.Usage, want.Model = resp.Usage, "gpt-4o-2024-08-06"
			require.Equal(t, &want, resp)
			if want.Finish != FinishFilter {
				require.Equal(t, resp.Text, got.text())
			}
		})
	}
}

func TestOpenAIUsage(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		model string
		usage string
		want  Usage
	}{
		"CachedInsideThePrompt": {
			usage: `{"prompt_tokens":1000,"completion_tokens":50,"total_tokens":1050,"prompt_tokens_details":{"cached_tokens":800,"audio_tokens":0}}`,
			want:  Usage{Input: 200, CacheRead: 800, Output: 50, CostMicros: micros(500 + 1000 + 500)},
		},
		"ReasoningInsideTheCompletion": {
			usage: `{"prompt_tokens":10,"completion_tokens":50,"total_tokens":60,"completion_tokens_details":{"reasoning_tokens":40}}`,
			want:  Usage{Input: 10, Output: 10, Reasoning: 40, CostMicros: micros(525)},
		},
		"BothInside": {
			usage: `{"prompt_tokens":100,"completion_tokens":50,"total_tokens":150,"prompt_tokens_details":{"cached_tokens":60,"cache_write_tokens":30},"completion_tokens_details":{"reasoning_tokens":40}}`,
			want:  Usage{Input: 10, CacheRead: 60, CacheWrite: 30, Output: 10, Reasoning: 40, CostMicros: micros(25 + 75 + 75 + 500)},
		},
		"CachedBeside": {
			usage: `{"prompt_tokens":40,"completion_tokens":50,"total_tokens":150,"prompt_tokens_details":{"cached_tokens":60}}`,
			want:  Usage{Input: 40, CacheRead: 60, Output: 50, CostMicros: micros(100 + 75 + 500)},
		},
		"ReasoningBeside": {
			usage: `{"prompt_tokens":40,"completion_tokens":10,"total_tokens":90,"completion_tokens_details":{"reasoning_tokens":40}}`,
			want:  Usage{Input: 40, Output: 10, Reasoning: 40, CostMicros: micros(600)},
		},
		"NoTotal": {
			usage: `{"prompt_tokens":100,"completion_tokens":50,"prompt_tokens_details":{"cached_tokens":60},"completion_tokens_details":{"reasoning_tokens":40}}`,
			want:  Usage{Input: 40, CacheRead: 60, Output: 10, Reasoning: 40, CostMicros: micros(100 + 75 + 500)},
		},
		"NullDetails": {
			usage: `{"prompt_tokens":100,"completion_tokens":50,"total_tokens":150,"prompt_tokens_details":null,"completion_tokens_details":null}`,
			want:  Usage{Input: 100, Output: 50, CostMicros: micros(750)},
		},
		"ReportedCostWins": {
			usage: `{"prompt_tokens":100,"completion_tokens":50,"total_tokens":150,"cost":0.0012345}`,
			want:  Usage{Input: 100, Output: 50, CostMicros: micros(1235)},
		},
		"ReportedTotalCost": {
			usage: `{"prompt_tokens":100,"completion_tokens":50,"total_tokens":150,"cost":{"total_cost":0.02}}`,
			want:  Usage{Input: 100, Output: 50, CostMicros: micros(20000)},
		},
		"ReportedCostOfAnUnknownModel": {
			model: "acme/large",
			usage: `{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2,"cost":0}`,
			want:  Usage{Input: 1, Output: 1, CostMicros: micros(0)},
		},
		"UnknownModelHasNoCost": {
			model: "acme/large",
			usage: `{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2,"cost":null}`,
			want:  Usage{Input: 1, Output: 1},
		},
		"OtherRatesHaveNoCost": {
			usage: `{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2},"service_tier":"priority"`,
			want:  Usage{Input: 1, Output: 1},
		},
		"NeverArrives": {
			usage: `null`,
			want:  Usage{Input: 1, Output: 2, CostMicros: micros(23), Estimated: true},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			model := c.model
			if model == "" {
				model = "gpt-4o"
			}
			script := chunk(`{"content":"Hello"}`, "") + chunk(`{}`, "stop") + usageChunk(c.usage) + doneEvent
			server := serve(t, events(strings.ReplaceAll(script, "gpt-4o-2024-08-06", model)))

			resp, err := openAIAt(t, server.url).Call(t.Context(), ask(model, "hi"), nil)

			require.NoError(t, err)
			require.Equal(t, c.want, resp.Usage)
		})
	}
}

func TestOpenAIRequest(t *testing.T) {
	t.Parallel()
	request := func() *Request {
		return &Request{
			Model:  "local-model",
			System: "You are kind.",
			Facts:  []Fact{{Key: "a", Value: json.RawMessage(`1`)}, {Key: "b", Value: json.RawMessage(`"</facts>"`)}},
			Tools: []Tool{
				{Name: "crm::lookup", Description: "Looks up.", Parameters: json.RawMessage(`{"type":"object","properties":{"id":{"type":"integer"}},"required":["id"]}`)},
				{Name: "ping"},
			},
			Messages: []Message{
				{Role: RoleUser, Text: "hi"},
				{Role: RoleAssistant, Text: "look", Calls: []ToolCall{{ID: "call_0_0", Tool: "crm::lookup", Args: json.RawMessage(`{"id":7}`)}, {ID: "call_0_1", Tool: "ping", Args: json.RawMessage(`"{bad"`)}}},
				{Role: RoleTool, Text: "seven", CallID: "call_0_0", Tool: "crm::lookup"},
				{Role: RoleTool, Text: "failed", CallID: "call_0_1", Tool: "ping", IsError: true},
				{Role: RoleAssistant, Calls: []ToolCall{{ID: "call_0_0", Tool: "ping", Args: json.RawMessage(`{}`)}}},
				{Role: RoleTool, Text: "pong", CallID: "call_0_0", Tool: "ping"},
			},
			Now:        time.Date(2026, 11, 30, 18, 0, 0, 0, time.FixedZone("", 3600)),
			Parameters: map[string]any{"temperature": 0.5, "a.b": map[string]any{"c": 1}},
		}
	}

	t.Run("EverythingInItsPlace", func(t *testing.T) {
		t.Parallel()
		server := serve(t, events(openAIText("ok", "stop")))
		_, err := openAIAt(t, server.url+"/v1").Call(t.Context(), request(), nil)
		require.NoError(t, err)
		require.Equal(t, "/v1/chat/completions", server.requests[0].path)
		require.Equal(t, "Bearer "+testKey, server.requests[0].header.Get("Authorization"))
		require.JSONEq(t, `{
			"model": "local-model", "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 4096,
			"temperature": 0.5, "a.b": {"c": 1},
			"tools": [
				{"type": "function", "function": {"name": "crm__lookup", "description": "Looks up.",
					"parameters": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}}},
				{"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}
			],
			"messages": [
				{"role": "system", "content": "You are kind."},
				{"role": "user", "content": "hi"},
				{"role": "assistant", "content": "look", "tool_calls": [
					{"id": "call_0_0", "type": "function", "function": {"name": "crm__lookup", "arguments": "{\"id\":7}"}},
					{"id": "call_0_1", "type": "function", "function": {"name": "ping", "arguments": "{\"invalid\":\"{bad\"}"}}]},
				{"role": "tool", "tool_call_id": "call_0_0", "content": "seven"},
				{"role": "tool", "tool_call_id": "call_0_1", "content": "failed"},
				{"role": "assistant", "tool_calls": [{"id": "call_4_0", "type": "function", "function": {"name": "ping", "arguments": "{}"}}]},
				{"role": "tool", "tool_call_id": "call_4_0",
					"content": "pong\n\n<facts>{\"a\":1,\"b\":\"\\u003c/facts\\u003e\"}</facts>\n\n<now>Monday, 2026-11-30T17:00:00Z</now>"}
			]}`, string(server.sent(t)))
	})

	// RC-91: two identical requests are the same up to the time.
	t.Run("EqualRequestsShareTheirPrefix", func(t *testing.T) {
		t.Parallel()
		var bodies []string
		for i := range 2 {
			server := serve(t, events(openAIText("ok", "stop")))
			req := request()
			req.Now = req.Now.Add(time.Duration(i) * time.Hour)
			_, err := openAIAt(t, server.url).Call(t.Context(), req, nil)
			require.NoError(t, err)
			before, after, _ := strings.Cut(string(server.sent(t)), "<now>")
			_, after, _ = strings.Cut(after, "</now>")
			bodies = append(bodies, before, after)
		}
		require.Equal(t, bodies[:2], bodies[2:])
	})

	t.Run("NoKeyNoAuthorization", func(t *testing.T) {
		t.Parallel()
		server := serve(t, events(openAIText("ok", "stop")))
		_, err := openAIAt(t, server.url, func(c *Config) { c.APIKey = "" }).Call(t.Context(), ask("m", "x"), nil)
		require.NoError(t, err)
		require.NotContains(t, server.requests[0].header, "Authorization")
	})

	t.Run("OpenAIsOwnModelsKnowTheNewerLimit", func(t *testing.T) {
		t.Parallel()
		for baseURL, want := range map[string]string{"": "max_completion_tokens", "https://eu.api.openai.com/v1": "max_completion_tokens", "https://openai.example/v1": "max_tokens"} {
			p := openAIAt(t, baseURL)
			params, err := p.params(&Request{Model: "m", MaxOutputTokens: 99}, toolNames{})
			require.NoError(t, err)
			body, err := params.MarshalJSON()
			require.NoError(t, err)
			require.EqualValues(t, 99, object(t, body)[want], baseURL)
			params, err = p.params(&Request{Model: "m", Parameters: map[string]any{"max_tokens": 5}}, toolNames{})
			require.NoError(t, err)
			body, err = params.MarshalJSON()
			require.NoError(t, err)
			require.NotContains(t, object(t, body), "max_completion_tokens")
			require.EqualValues(t, 5, object(t, body)["max_tokens"])
		}
	})

	t.Run("EndsWithTheAssistant", func(t *testing.T) {
		t.Parallel()
		server := serve(t, events(openAIText("ok", "stop")))
		req := &Request{Model: "m", Messages: []Message{{Role: RoleAssistant, Text: "hello"}}, Now: time.Unix(0, 0)}
		_, err := openAIAt(t, server.url).Call(t.Context(), req, nil)
		require.NoError(t, err)
		require.Equal(t, []any{
			map[string]any{"role": "assistant", "content": "hello"},
			map[string]any{"role": "user", "content": "<now>Thursday, 1970-01-01T00:00:00Z</now>"},
		}, object(t, server.sent(t))["messages"])
	})

	for name, req := range map[string]*Request{
		"ReservedParameter": {Model: "m", Parameters: map[string]any{"stream": false}},
		"BadSchema":         {Model: "m", Tools: []Tool{{Name: "x", Parameters: json.RawMessage(`[]`)}}},
		"BadFact":           {Model: "m", Facts: []Fact{{Key: "x", Value: json.RawMessage(`{`)}}},
		"UnknownRole":       {Model: "m", Messages: []Message{{Role: "boss"}}},
	} {
		t.Run(name+"IsABadRequest", func(t *testing.T) {
			t.Parallel()
			server := serve(t, events(""))
			_, err := openAIAt(t, server.url).Call(t.Context(), req, nil)
			e := requireError(t, err)
			require.Equal(t, ReasonBadRequest, e.Reason)
			require.False(t, e.Retryable)
			require.Nil(t, e.Usage)
			require.Empty(t, server.requests)
		})
	}
}

func TestOpenAIWhole(t *testing.T) {
	t.Parallel()
	body := `{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m-1","choices":[{"index":0,"finish_reason":"tool_calls","message":
		{"role":"assistant","content":"look","tool_calls":[{"id":"a","type":"function","function":{"name":"crm__lookup","arguments":"{\"id\":7}"}},{"id":"b","type":"function","function":{"name":"ping","arguments":""}}]}}],
		"usage":{"prompt_tokens":10,"completion_tokens":5,"total_tokens":15,"prompt_tokens_details":{"cached_tokens":4}}}`
	want := &Response{
		Text:   "look",
		Calls:  []ToolCall{{ID: "a", Tool: "crm::lookup", Args: json.RawMessage(`{"id":7}`)}, {ID: "b", Tool: "ping", Args: json.RawMessage(`{}`)}},
		Finish: FinishTools, Usage: Usage{Input: 6, CacheRead: 4, Output: 5}, Model: "m-1",
	}
	noStream := func(c *Config) { c.NoStream = true }
	request := func() *Request {
		req := ask("m", "x")
		req.Tools = []Tool{{Name: "crm::lookup"}, {Name: "ping"}}
		return req
	}

	t.Run("WhenConfigured", func(t *testing.T) {
		t.Parallel()
		server := serve(t, status(200, body))
		var got deltas
		resp, err := openAIAt(t, server.url, noStream).Call(t.Context(), request(), got.sink)
		require.NoError(t, err)
		require.Equal(t, want, resp)
		require.Equal(t, []string{"look"}, got.list)
		require.NotContains(t, object(t, server.sent(t)), "stream")
		require.NotContains(t, object(t, server.sent(t)), "stream_options")
	})
	t.Run("WhenTheServerCannotStream", func(t *testing.T) {
		t.Parallel()
		server := serve(t, status(200, body))
		resp, err := openAIAt(t, server.url).Call(t.Context(), request(), nil)
		require.NoError(t, err)
		require.Equal(t, want, resp)
	})
	t.Run("Refusal", func(t *testing.T) {
		t.Parallel()
		server := serve(t, status(200, `{"model":"m-1","choices":[{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":null,"refusal":"No."}}]}`))
		resp, err := openAIAt(t, server.url, noStream).Call(t.Context(), request(), nil)
		require.NoError(t, err)
		require.Equal(t, FinishFilter, resp.Finish)
		require.Equal(t, "No.", resp.Text)
		require.True(t, resp.Usage.Estimated)
	})
	for name, c := range map[string]struct {
		body string
		want Error
	}{
		"Garbage":        {`<html>`, Error{Reason: ReasonBadResponse, Retryable: true}},
		"CutShort":       {body[:100], Error{Reason: ReasonBadResponse, Retryable: true}},
		"NoChoice":       {`{"choices":[]}`, Error{Reason: ReasonBadResponse, Retryable: true}},
		"ErrorWithin200": {`{"error":{"message":"slow down","code":429}}`, Error{Status: 429, Reason: ReasonRateLimited, Retryable: true}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := serve(t, status(200, c.body))
			_, err := openAIAt(t, server.url, noStream).Call(t.Context(), request(), nil)
			e := requireError(t, err)
			require.Equal(t, c.want, Error{Status: e.Status, Reason: e.Reason, Retryable: e.Retryable})
			require.True(t, e.Usage.Estimated)
		})
	}
}

// failures are the answers that are no success, alike for both vendors.
var failures = map[string]struct {
	answer http.HandlerFunc
	want   Error // with a Message that the failure's contains
}{
	"RateLimited":       {status(429, `{"error":{"message":"slow down","type":"rate_limit_error"}}`, "Retry-After", "2"), Error{Status: 429, Reason: ReasonRateLimited, Retryable: true, RetryAfter: 2 * time.Second, Message: "slow down"}},
	"RateLimitedInMs":   {status(429, `{}`, "Retry-After-Ms", "1500", "Retry-After", "9"), Error{Status: 429, Reason: ReasonRateLimited, Retryable: true, RetryAfter: 1500 * time.Millisecond, Message: "Too Many Requests"}},
	"RateLimitedToDate": {status(429, `{}`, "Date", "Mon, 30 Nov 2026 12:00:00 GMT", "Retry-After", "Mon, 30 Nov 2026 12:00:09 GMT"), Error{Status: 429, Reason: ReasonRateLimited, Retryable: true, RetryAfter: 9 * time.Second}},
	"OutOfCredit":       {status(429, `{"error":{"message":"You exceeded your current quota","type":"insufficient_quota","code":"insufficient_quota"}}`), Error{Status: 429, Reason: ReasonQuotaExhausted, Message: "quota"}},
	"Overloaded":        {status(529, `{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}`), Error{Status: 529, Reason: ReasonOverloaded, Retryable: true, Message: "Overloaded"}},
	"Unavailable":       {status(503, ``, "Retry-After", "1"), Error{Status: 503, Reason: ReasonOverloaded, Retryable: true, RetryAfter: time.Second, Message: "Service Unavailable"}},
	"ServerError":       {status(500, `{"error":{"message":"boom"}}`), Error{Status: 500, Reason: ReasonServerError, Retryable: true, Message: "boom"}},
	"GatewaysPage":      {status(502, `<html><body>Bad Gateway</body></html>`), Error{Status: 502, Reason: ReasonServerError, Retryable: true, Message: "Bad Gateway"}},
	"GatewaysText":      {status(504, "upstream timed out\n"), Error{Status: 504, Reason: ReasonServerError, Retryable: true, Message: "upstream timed out"}},
	"TheirTimeout":      {status(408, ``), Error{Status: 408, Reason: ReasonTimeout, Retryable: true, Message: "Request Timeout"}},
	"BadRequest":        {status(400, `{"error":{"message":"no such parameter","type":"invalid_request_error","code":null}}`), Error{Status: 400, Reason: ReasonBadRequest, Message: "no such parameter"}},
	"ContextTooLarge":   {status(400, `{"error":{"message":"too many","type":"invalid_request_error","code":"context_length_exceeded"}}`), Error{Status: 400, Reason: ReasonContextExhausted, Message: "too many"}},
	"PromptTooLong":     {status(400, `{"type":"error","error":{"type":"invalid_request_error","message":"prompt is too long: 9 tokens > 8 maximum"}}`), Error{Status: 400, Reason: ReasonContextExhausted, Message: "prompt is too long"}},
	"NotFound":          {status(404, `{"error":"model \"x\" not found"}`), Error{Status: 404, Reason: ReasonBadRequest, Message: `model "x" not found`}},
	"Unprocessable":     {status(422, `{"detail":"field required"}`), Error{Status: 422, Reason: ReasonBadRequest, Message: "field required"}},
	"NoMoney":           {status(402, `{"error":{"type":"billing_error","message":"pay"}}`), Error{Status: 402, Reason: ReasonQuotaExhausted, Message: "pay"}},
	"BadKey":            {status(401, `{"error":{"message":"Incorrect API key provided: `+testKey[:9]+`***`+testKey[15:]+`"}}`), Error{Status: 401, Reason: ReasonAuth, Message: "credentials"}},
	"Forbidden":         {status(403, `{"error":{"message":"no access with `+testKey+`"}}`), Error{Status: 403, Reason: ReasonAuth, Message: "credentials"}},
	"EchoesTheKey":      {status(400, `{"error":{"message":"bad key `+testKey+`!"}}`), Error{Status: 400, Reason: ReasonBadRequest, Message: "bad key ***!"}},
	"Redirect":          {status(307, ``, "Location", "http://169.254.169.254/"), Error{Status: 307, Reason: ReasonBadResponse, Message: "Temporary Redirect"}},
}

func TestOpenAIFailures(t *testing.T) {
	t.Parallel()
	for name, c := range failures {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := serve(t, c.answer)
			resp, err := openAIAt(t, server.url).Call(t.Context(), ask("gpt-4o", "x"), nil)
			require.Nil(t, resp)
			requireFailure(t, c.want, err)
			require.Len(t, server.requests, 1, "no retries")
		})
	}
}

// requireFailure compares all of an *Error but the exact words.
func requireFailure(t *testing.T, want Error, err error) {
	t.Helper()
	got := requireError(t, err)
	require.Contains(t, got.Message, want.Message)
	want.Message = got.Message
	require.Equal(t, &want, got)
}

// TestOpenAIBrokenStreams holds the answers that begin well.
func TestOpenAIBrokenStreams(t *testing.T) {
	t.Parallel()
	begin := chunk(`{"role":"assistant","content":"Hello wo"}`, "")
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		want   Error
	}{
		"ErrorObject":         {events(begin, `data: {"error":{"message":"boom","type":"server_error"}}`+"\n\n"), Error{Status: 500, Reason: ReasonServerError, Retryable: true, Message: "boom"}},
		"ErrorWithAStatus":    {events(begin, `data: {"error":{"message":"slow","code":429},"choices":[]}`+"\n\n"), Error{Status: 429, Reason: ReasonRateLimited, Retryable: true, Message: "slow"}},
		"ErrorText":           {events(begin, `data: {"error":"boom"}`+"\n\n"), Error{Reason: ReasonServerError, Retryable: true, Message: "boom"}},
		"ErrorWithoutWrapper": {events(begin, `data: {"object":"error","message":"too much","type":"BadRequestError","code":400}`+"\n\n"), Error{Status: 400, Reason: ReasonBadRequest, Message: "too much"}},
		"ErrorEchoesTheKey":   {events(begin, `data: {"error":{"message":"key `+testKey+`"}}`+"\n\n"), Error{Reason: ReasonServerError, Retryable: true, Message: "key ***"}},
		"EndsWithoutFinish":   {events(begin), Error{Reason: ReasonBadResponse, Retryable: true, Message: "before it was complete"}},
		"DoneWithoutFinish":   {events(begin, doneEvent), Error{Reason: ReasonBadResponse, Retryable: true, Message: "before it was complete"}},
		"Garbage":             {events(begin, "data: {\"choices\":[{\n\n"), Error{Reason: ReasonBadResponse, Retryable: true, Message: "cannot be read"}},
		"ConnectionLost": {func(w http.ResponseWriter, r *http.Request) {
			events(begin)(w, r)
			panic(http.ErrAbortHandler)
		}, Error{Reason: ReasonNetwork, Retryable: true, Message: "EOF"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := serve(t, c.answer)
			var got deltas
			_, err := openAIAt(t, server.url).Call(t.Context(), ask("gpt-4o", "hi"), got.sink)
			want := c.want
			want.Usage = &Usage{Input: 1, Output: 2, CostMicros: micros(23), Estimated: true}
			requireFailure(t, want, err)
			require.Equal(t, "Hello wo", got.text())
		})
	}

	t.Run("PageInsteadOfAStream", func(t *testing.T) {
		t.Parallel()
		server := serve(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("<html>log in first</html>")) })
		_, err := openAIAt(t, server.url).Call(t.Context(), ask("gpt-4o", "hi"), nil)
		require.Equal(t, ReasonBadResponse, requireError(t, err).Reason)
	})
	t.Run("LineWithoutEnd", func(t *testing.T) {
		t.Parallel()
		server := serve(t, events("data: ", strings.Repeat("x", maxResponseBytes)))
		_, err := openAIAt(t, server.url).Call(t.Context(), ask("gpt-4o", "hi"), nil)
		require.Equal(t, ReasonBadResponse, requireError(t, err).Reason)
	})
	t.Run("UsageLostAfterTheEnd", func(t *testing.T) {
		t.Parallel()
		server := serve(t, func(w http.ResponseWriter, r *http.Request) {
			events(begin, chunk(`{}`, "stop"))(w, r)
			panic(http.ErrAbortHandler)
		})
		resp, err := openAIAt(t, server.url).Call(t.Context(), ask("gpt-4o", "hi"), nil)
		require.NoError(t, err, "the answer is whole")
		require.Equal(t, "Hello wo", resp.Text)
		require.True(t, resp.Usage.Estimated)
	})
}

func TestOpenAIUnreachable(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := listener.Addr().String()
	require.NoError(t, listener.Close())

	_, err = openAIAt(t, "http://"+address).Call(t.Context(), ask("gpt-4o", "x"), nil)

	e := requireError(t, err)
	require.Equal(t, ReasonNetwork, e.Reason)
	require.True(t, e.Retryable)
	require.Nil(t, e.Usage, "nothing was sent")
}

// TestOpenAISilence is FC-17 (a) and what is near it, against a real server.
func TestOpenAISilence(t *testing.T) {
	t.Parallel()
	errStop := errors.New("stop")
	three := chunk(`{"content":"a"}`, "") + chunk(`{"content":" b"}`, "") + chunk(`{"content":" c"}`, "")

	t.Run("SilentStreamStalls", func(t *testing.T) {
		t.Parallel()
		closed := make(chan struct{})
		server := serve(t, eventsThenSilence(closed, three))
		var got deltas
		_, err := openAIAt(t, server.url, gap(30*time.Millisecond)).Call(t.Context(), ask("gpt-4o", "hi"), got.sink)
		requireFailure(t, Error{Reason: ReasonStalled, Retryable: true, Message: "30ms", Usage: &Usage{Input: 1, Output: 2, CostMicros: micros(23), Estimated: true}}, err)
		require.Equal(t, "a b c", got.text())
		<-closed
	})
	t.Run("NoFirstByteStalls", func(t *testing.T) {
		t.Parallel()
		closed := make(chan struct{})
		server := serve(t, eventsThenSilence(closed, "")) // only the headers
		_, err := openAIAt(t, server.url, firstByte(30*time.Millisecond)).Call(t.Context(), ask("gpt-4o", "hi"), nil)
		requireFailure(t, Error{Reason: ReasonStalled, Retryable: true, Usage: &Usage{Input: 1, CostMicros: micros(3), Estimated: true}}, err)
		<-closed
	})
	t.Run("NoAnswerAtAllStalls", func(t *testing.T) {
		t.Parallel()
		closed := make(chan struct{})
		server := serve(t, func(_ http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			close(closed)
		})
		_, err := openAIAt(t, server.url, firstByte(30*time.Millisecond)).Call(t.Context(), ask("gpt-4o", "hi"), nil)
		require.Equal(t, ReasonStalled, requireError(t, err).Reason)
		<-closed
	})
	t.Run("CancelClosesTheConnection", func(t *testing.T) {
		t.Parallel()
		closed := make(chan struct{})
		server := serve(t, eventsThenSilence(closed, three))
		ctx, cancel := context.WithCancelCause(t.Context())
		heard := 0
		_, err := openAIAt(t, server.url).Call(ctx, ask("gpt-4o", "hi"), func(string) {
			if heard++; heard == 3 {
				cancel(errStop)
			}
		})
		require.ErrorIs(t, err, errStop)
		var aborted *AbortedError
		require.ErrorAs(t, err, &aborted)
		require.Equal(t, Usage{Input: 1, Output: 2, CostMicros: micros(23), Estimated: true}, aborted.Usage)
		<-closed
	})
	t.Run("CancelBeforeTheAnswer", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancelCause(t.Context())
		closed := make(chan struct{})
		server := serve(t, func(_ http.ResponseWriter, r *http.Request) {
			cancel(errStop)
			<-r.Context().Done()
			close(closed)
		})
		_, err := openAIAt(t, server.url).Call(ctx, ask("gpt-4o", "hi"), nil)
		require.ErrorIs(t, err, errStop)
		<-closed
	})
	t.Run("NothingIsSentAfterCancel", func(t *testing.T) {
		t.Parallel()
		server := serve(t, events(""))
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(errStop)
		_, err := openAIAt(t, server.url).Call(ctx, ask("gpt-4o", "hi"), nil)
		require.Equal(t, errStop, err)
		require.Empty(t, server.requests)
	})
}

// TestSlowStreams is FC-17 (b) with the limits of production, in the time of a
// synctest bubble.
func TestSlowStreams(t *testing.T) {
	t.Parallel()
	call := func(t *testing.T, handler http.HandlerFunc, change ...func(*Config)) (*Response, error) {
		transport := servePipes(t, handler)
		change = append(change, func(c *Config) { c.Transport = transport })
		return openAIAt(t, "http://provider.test/v1", change...).Call(t.Context(), ask("gpt-4o", "hi"), nil)
	}
	every := func(pause time.Duration, times int, part string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			events()(w, r)
			for range times {
				time.Sleep(pause) // of the bubble's time
				flush(w, part)
			}
			flush(w, openAIText("end", "stop"))
		}
	}

	t.Run("TokenEvery20sFor15Min", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			resp, err := call(t, every(20*time.Second, 45, chunk(`{"content":"x"}`, "")))
			require.NoError(t, err)
			require.Equal(t, strings.Repeat("x", 45)+"end", resp.Text)
			require.Equal(t, 15*time.Minute, time.Since(start))
		})
	})
	t.Run("CommentsAreLife", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			resp, err := call(t, every(119*time.Second, 10, ": keep-alive\n\n"))
			require.NoError(t, err)
			require.Equal(t, "end", resp.Text)
		})
	})
	t.Run("SilenceOf120sIsNot", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			_, err := call(t, func(w http.ResponseWriter, r *http.Request) {
				events(chunk(`{"content":"x"}`, ""))(w, r)
				<-r.Context().Done()
			})
			require.Equal(t, ReasonStalled, requireError(t, err).Reason)
			require.Equal(t, 120*time.Second, time.Since(start))
		})
	})
	t.Run("FirstByteHasItsOwnLimit", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			resp, err := call(t, every(100*time.Second, 1, ":\n\n"), gap(time.Second))
			require.NoError(t, err)
			require.Equal(t, "end", resp.Text)
		})
	})
	t.Run("WholeAnswersMayTakeLonger", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			resp, err := call(t, func(w http.ResponseWriter, r *http.Request) {
				time.Sleep(9 * time.Minute) // of the bubble's time
				status(200, `{"choices":[{"finish_reason":"stop","message":{"content":"late"}}]}`)(w, r)
			}, func(c *Config) { c.NoStream = true })
			require.NoError(t, err)
			require.Equal(t, "late", resp.Text)
		})
	})
	t.Run("UsageIsNotWaitedForLong", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			resp, err := call(t, func(w http.ResponseWriter, r *http.Request) {
				events(chunk(`{"content":"x"}`, "stop"))(w, r)
				<-r.Context().Done()
			})
			require.NoError(t, err)
			require.Equal(t, "x", resp.Text)
			require.True(t, resp.Usage.Estimated)
			require.Equal(t, usageGap, time.Since(start))
		})
	})
	t.Run("ConnectHasItsOwnLimit", func(t *testing.T) {
		t.Parallel()
		listener, err := net.Listen("tcp", "127.0.0.1:0") // and nobody speaks TLS there
		require.NoError(t, err)
		t.Cleanup(func() { _ = listener.Close() })
		transport := newTransport(30 * time.Millisecond)
		t.Cleanup(transport.CloseIdleConnections)
		p := openAIAt(t, "https://"+listener.Addr().String(), func(c *Config) { c.Transport = transport })
		_, err = p.Call(t.Context(), ask("gpt-4o", "hi"), nil)
		require.Equal(t, ReasonNetwork, requireError(t, err).Reason)
	})
}

// TestEnvironmentIsNotRead proves that an agent's address never receives a key
// that somebody left in the environment.
func TestEnvironmentIsNotRead(t *testing.T) {
	for _, name := range []string{"OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "OPENAI_ORG_ID"} {
		t.Setenv(name, "leaked")
	}
	t.Setenv("OPENAI_CUSTOM_HEADERS", "X-Key: leaked")
	t.Setenv("ANTHROPIC_CUSTOM_HEADERS", "X-Key: leaked")
	t.Setenv("OPENAI_BASE_URL", "http://192.0.2.1")
	t.Setenv("ANTHROPIC_BASE_URL", "http://192.0.2.1")
	server := serve(t, events(""))
	keyless := func(c *Config) { c.APIKey = "" }
	for _, p := range []Provider{openAIAt(t, server.url, keyless), anthropicAt(t, server.url, keyless)} {
		_, err := p.Call(t.Context(), ask("m", "x"), nil)
		require.Equal(t, ReasonBadResponse, requireError(t, err).Reason)
	}
	require.Len(t, server.requests, 2)
	for _, r := range server.requests {
		require.NotContains(t, fmt.Sprint(r.header), "leaked")
	}
}
