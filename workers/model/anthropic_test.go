package model

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// sse is one event of the Messages API, whose name repeats its type.
func sse(data string) string {
	var event struct {
		Type string `json:"type"`
	}
	_ = json.Unmarshal([]byte(data), &event)
	return "event: " + event.Type + "\ndata: " + data + "\n\n"
}

var (
	messageStart = sse(`{"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","model":"claude-haiku-4-5-20251001","content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":25,"cache_creation_input_tokens":10,"cache_read_input_tokens":100,"output_tokens":1,"service_tier":"standard"}}}`)
	messageStop  = sse(`{"type":"message_stop"}`)
	ping         = sse(`{"type":"ping"}`)
)

func blockStart(index, block string) string {
	return sse(`{"type":"content_block_start","index":` + index + `,"content_block":` + block + `}`)
}

func blockDelta(index, delta string) string {
	return sse(`{"type":"content_block_delta","index":` + index + `,"delta":` + delta + `}`)
}

func blockStop(index string) string {
	return sse(`{"type":"content_block_stop","index":` + index + `}`)
}

func textBlock(index, text string) string {
	return blockStart(index, `{"type":"text","text":""}`) + blockDelta(index, `{"type":"text_delta","text":"`+text+`"}`) + blockStop(index)
}

func messageDelta(stop, usage string) string {
	return sse(`{"type":"message_delta","delta":{"stop_reason":"` + stop + `","stop_sequence":null},"usage":` + usage + `}`)
}

// anthropicText is a whole streamed answer.
func anthropicText(text, stop string) string {
	return messageStart + ping + textBlock("0", text) + messageDelta(stop, `{"output_tokens":15}`) + messageStop
}

func TestAnthropicAnswers(t *testing.T) {
	t.Parallel()
	call := func(id, tool, args string) ToolCall {
		return ToolCall{ID: id, Tool: tool, Args: json.RawMessage(args)}
	}
	usage := Usage{Input: 25, CacheRead: 100, CacheWrite: 10, Output: 15, CostMicros: micros(25 + 10 + 13 + 75)} // 122.5 rounds up
	for name, c := range map[string]struct {
		events []string
		want   Response // with the usual Usage and Model when they are empty
	}{
		"Text":                 {events: []string{anthropicText("Hello", "end_turn")}, want: Response{Text: "Hello", Finish: FinishStop}},
		"EventsCutAnywhere":    {events: strings.SplitAfter(anthropicText("Hello", "end_turn"), "t"), want: Response{Text: "Hello", Finish: FinishStop}},
		"StopSequence":         {events: []string{anthropicText("Hello", "stop_sequence")}, want: Response{Text: "Hello", Finish: FinishStop}},
		"MaxTokens":            {events: []string{anthropicText("Hello", "max_tokens")}, want: Response{Text: "Hello", Finish: FinishLength}},
		"WindowFull":           {events: []string{anthropicText("Hello", "model_context_window_exceeded")}, want: Response{Text: "Hello", Finish: FinishLength}},
		"PauseTurn":            {events: []string{anthropicText("Hello", "pause_turn")}, want: Response{Text: "Hello", Finish: FinishLength}},
		"Refusal":              {events: []string{anthropicText("I can", "refusal")}, want: Response{Text: "I can", Finish: FinishFilter}},
		"UnknownEventsAndStop": {events: []string{sse(`{"type":"news"}`), blockStart("7", `{"type":"server_tool_use","id":"x","name":"y","input":{}}`), anthropicText("Hello", "whatever")}, want: Response{Text: "Hello", Finish: FinishStop}},
		"ExplainedRefusal": {
			events: []string{messageStart, sse(`{"type":"message_delta","delta":{"stop_reason":"refusal","stop_details":{"type":"refusal","category":"bio","explanation":"Not that."}},"usage":{"output_tokens":15}}`), messageStop},
			want:   Response{Text: "Not that.", Finish: FinishFilter},
		},
		"SeveralTextsAndThinking": {
			events: []string{
				messageStart, blockStart("0", `{"type":"thinking","thinking":"","signature":""}`), blockDelta("0", `{"type":"thinking_delta","thinking":"hm"}`),
				blockDelta("0", `{"type":"signature_delta","signature":"c2ln"}`), blockStop("0"), textBlock("1", "Hello"), textBlock("2", " you"),
				messageDelta("end_turn", `{"input_tokens":25,"cache_creation_input_tokens":10,"cache_read_input_tokens":100,"output_tokens":15,"output_tokens_details":{"thinking_tokens":6}}`), messageStop,
			},
			want: Response{Text: "Hello you", Finish: FinishStop, Usage: Usage{Input: 25, CacheRead: 100, CacheWrite: 10, Output: 9, Reasoning: 6, CostMicros: usage.CostMicros}},
		},
		"UsageCorrectedAtTheEnd": {
			events: []string{messageStart, textBlock("0", "x"), messageDelta("end_turn", `{"input_tokens":20,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":2}`), messageStop},
			want:   Response{Text: "x", Finish: FinishStop, Usage: Usage{Input: 20, Output: 2, CostMicros: micros(30)}},
		},
		"FastHasOtherRates": {
			events: []string{strings.Replace(messageStart, `"service_tier"`, `"speed":"fast","service_tier"`, 1), textBlock("0", "x"), messageDelta("end_turn", `{"output_tokens":15}`), messageStop},
			want:   Response{Text: "x", Finish: FinishStop, Usage: Usage{Input: 25, CacheRead: 100, CacheWrite: 10, Output: 15}},
		},
		"ToolUseInFragments": {
			events: []string{
				messageStart, textBlock("0", "Let me look."), blockStart("1", `{"type":"tool_use","id":"toolu_1","name":"crm__lookup","input":{}}`), ping,
				blockDelta("1", `{"type":"input_json_delta","partial_json":""}`), blockDelta("1", `{"type":"input_json_delta","partial_json":"{\"id\""}`),
				blockDelta("1", `{"type":"input_json_delta","partial_json":": 7}"}`), blockStop("1"), messageDelta("tool_use", `{"output_tokens":15}`), messageStop,
			},
			want: Response{Text: "Let me look.", Calls: []ToolCall{call("toolu_1", "crm::lookup", `{"id": 7}`)}, Finish: FinishTools},
		},
		"ParallelToolUseAlternates": {
			events: []string{
				messageStart, blockStart("0", `{"type":"tool_use","id":"toolu_1","name":"look","input":{}}`), blockStart("1", `{"type":"tool_use","id":"toolu_2","name":"look","input":{}}`),
				blockDelta("1", `{"type":"input_json_delta","partial_json":"{\"n\":"}`), blockDelta("0", `{"type":"input_json_delta","partial_json":"{\"n\":"}`),
				blockDelta("0", `{"type":"input_json_delta","partial_json":"1}"}`), blockDelta("1", `{"type":"input_json_delta","partial_json":"2}"}`),
				blockStop("1"), blockStop("0"), messageDelta("tool_use", `{"output_tokens":15}`), messageStop,
			},
			want: Response{Calls: []ToolCall{call("toolu_1", "look", `{"n":1}`), call("toolu_2", "look", `{"n":2}`)}, Finish: FinishTools},
		},
		"EmptyInput": {
			events: []string{messageStart, blockStart("0", `{"type":"tool_use","id":"toolu_1","name":"look","input":{}}`), blockDelta("0", `{"type":"input_json_delta","partial_json":""}`), blockStop("0"), messageDelta("tool_use", `{"output_tokens":15}`), messageStop},
			want:   Response{Calls: []ToolCall{call("toolu_1", "look", `{}`)}, Finish: FinishTools},
		},
		"InputCutShort": {
			events: []string{messageStart, blockStart("0", `{"type":"tool_use","id":"toolu_1","name":"look","input":{}}`), blockDelta("0", `{"type":"input_json_delta","partial_json":"{\"n\":"}`), blockStop("0"), messageDelta("max_tokens", `{"output_tokens":15}`), messageStop},
			want:   Response{Calls: []ToolCall{call("toolu_1", "look", `"{\"n\":"`)}, Finish: FinishLength},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := serve(t, events(c.events...))
			req := ask("claude-haiku-4-5", "hi")
			req.Tools = []Tool{{Name: "crm::lookup"}, {Name: "look"}}
			var got deltas

			resp, err := anthropicAt(t, server.url).Call(t.Context(), req, got.sink)
			require.NoError(t, err)

			want := c.want
			want.Model = "claude-haiku-4-5-20251001"
			if want.Usage == (Usage{}) {
				want.Usage = usage
			}
			require.Equal(t, &want, resp)
			if want.Finish != FinishFilter {
				require.Equal(t, resp.Text, got.text())
			}
		})
	}
}

func TestAnthropicRequest(t *testing.T) {
	t.Parallel()
	sent := func(t *testing.T, req *Request) map[string]any {
		t.Helper()
		server := serve(t, events(anthropicText("ok", "end_turn")))
		_, err := anthropicAt(t, server.url).Call(t.Context(), req, nil)
		require.NoError(t, err)
		return object(t, server.sent(t))
	}
	messages := func(t *testing.T, list ...Message) string {
		t.Helper()
		body, err := json.Marshal(sent(t, &Request{Model: "m", Messages: list})["messages"])
		require.NoError(t, err)
		return string(body)
	}

	t.Run("EverythingInItsPlace", func(t *testing.T) {
		t.Parallel()
		server := serve(t, events(anthropicText("ok", "end_turn")))
		req := &Request{
			Model:  "claude-haiku-4-5",
			System: "You are kind.",
			Facts:  []Fact{{Key: "a", Value: json.RawMessage(`1`)}},
			Tools: []Tool{
				{Name: "crm::lookup", Description: "Looks up.", Parameters: json.RawMessage(`{"type":"object","properties":{"id":{"type":"integer"}},"required":["id"],"additionalProperties":false}`)},
				{Name: "ping"},
			},
			Messages: []Message{
				{Role: RoleUser, Text: "hi"},
				{Role: RoleAssistant, Text: "look", Calls: []ToolCall{{ID: "toolu_1", Tool: "crm::lookup", Args: json.RawMessage(`{"id":7}`)}, {ID: "toolu_2", Tool: "ping", Args: json.RawMessage(`"{bad"`)}}},
				{Role: RoleTool, Text: "seven", CallID: "toolu_1", Tool: "crm::lookup"},
				{Role: RoleTool, Text: "failed", CallID: "toolu_2", Tool: "ping", IsError: true},
			},
			Now:             time.Date(2026, 11, 30, 17, 0, 0, 0, time.UTC),
			MaxOutputTokens: 99,
			Parameters:      map[string]any{"thinking": map[string]any{"type": "adaptive"}},
		}
		_, err := anthropicAt(t, server.url+"/v1/").Call(t.Context(), req, nil)
		require.NoError(t, err)
		require.Equal(t, "/v1/messages", server.requests[0].path)
		require.Equal(t, testKey, server.requests[0].header.Get("X-Api-Key"))
		require.Equal(t, "Bearer "+testKey, server.requests[0].header.Get("Authorization"))
		require.JSONEq(t, `{
			"model": "claude-haiku-4-5", "max_tokens": 99, "stream": true, "thinking": {"type": "adaptive"},
			"tools": [
				{"name": "crm__lookup", "description": "Looks up.",
					"input_schema": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"], "additionalProperties": false}},
				{"name": "ping", "input_schema": {"type": "object", "properties": {}}, "cache_control": {"type": "ephemeral"}}
			],
			"system": [{"type": "text", "text": "You are kind.", "cache_control": {"type": "ephemeral"}}],
			"messages": [
				{"role": "user", "content": [{"type": "text", "text": "hi"}]},
				{"role": "assistant", "content": [
					{"type": "text", "text": "look"},
					{"type": "tool_use", "id": "toolu_1", "name": "crm__lookup", "input": {"id": 7}},
					{"type": "tool_use", "id": "toolu_2", "name": "ping", "input": {"invalid": "{bad"}}]},
				{"role": "user", "content": [
					{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "seven"}]},
					{"type": "tool_result", "tool_use_id": "toolu_2", "is_error": true, "content": [{"type": "text", "text": "failed"}], "cache_control": {"type": "ephemeral"}},
					{"type": "text", "text": "<facts>{\"a\":1}</facts>"},
					{"type": "text", "text": "<now>Monday, 2026-11-30T17:00:00Z</now>"}]}
			]}`, string(server.sent(t)))
	})

	// RC-91, and what makes the markers worth their money: the marked prefix is
	// the same whatever the facts and the time.
	t.Run("MarkedPrefixIsStable", func(t *testing.T) {
		t.Parallel()
		prefix := func(fact string, now time.Time) string {
			server := serve(t, events(anthropicText("ok", "end_turn")))
			req := &Request{Model: "m", System: "s", Tools: []Tool{{Name: "a"}}, Facts: []Fact{{Key: "k", Value: json.RawMessage(fact)}}, Messages: []Message{{Role: RoleUser, Text: "hi"}}, Now: now}
			_, err := anthropicAt(t, server.url).Call(t.Context(), req, nil)
			require.NoError(t, err)
			body := object(t, server.sent(t))
			content := body["messages"].([]any)[0].(map[string]any)["content"].([]any)
			require.Len(t, content, 3)
			stable, err := json.Marshal([]any{body["tools"], body["system"], content[0]})
			require.NoError(t, err)
			require.Equal(t, 3, strings.Count(string(stable), "cache_control"))
			require.Equal(t, 3, strings.Count(string(server.sent(t)), "cache_control"))
			return string(stable)
		}
		require.Equal(t, prefix(`1`, time.Unix(1, 0)), prefix(`2`, time.Unix(2, 0)))
	})

	t.Run("NeighboursOfOneRoleAreMerged", func(t *testing.T) {
		t.Parallel()
		require.JSONEq(t, `[
			{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
			{"role": "assistant", "content": [{"type": "text", "text": "three"}, {"type": "text", "text": "four"}, {"type": "tool_use", "id": "a", "name": "t", "input": {}}]},
			{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "result"}]}, {"type": "text", "text": "meanwhile", "cache_control": {"type": "ephemeral"}}]}
		]`, messages(t,
			Message{Role: RoleUser, Text: "one"}, Message{Role: RoleUser, Text: "two"},
			Message{Role: RoleAssistant, Text: "three"}, Message{Role: RoleAssistant, Text: "four", Calls: []ToolCall{{ID: "a", Tool: "t"}}},
			Message{Role: RoleUser, Text: "meanwhile"}, Message{Role: RoleTool, Text: "result", CallID: "a"}))
	})
	t.Run("StartsWithTheAssistant", func(t *testing.T) {
		t.Parallel()
		require.JSONEq(t, `[
			{"role": "user", "content": [{"type": "text", "text": "(The conversation so far is left out.)"}]},
			{"role": "assistant", "content": [{"type": "text", "text": "hello"}]},
			{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
		]`, messages(t, Message{Role: RoleAssistant, Text: "hello"}, Message{Role: RoleUser, Text: "hi"}))
	})
	t.Run("EndsWithTheAssistant", func(t *testing.T) {
		t.Parallel()
		require.JSONEq(t, `[
			{"role": "user", "content": [{"type": "text", "text": "hi"}]},
			{"role": "assistant", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
			{"role": "user", "content": [{"type": "text", "text": "Continue."}]}
		]`, messages(t, Message{Role: RoleUser, Text: "hi"}, Message{Role: RoleAssistant, Text: "hello"}))
	})
	t.Run("BlankTextsAreLeftOut", func(t *testing.T) {
		t.Parallel()
		require.JSONEq(t, `[
			{"role": "user", "content": [{"type": "text", "text": "hi"}]},
			{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "t", "input": {}}]},
			{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "cache_control": {"type": "ephemeral"}}]}
		]`, messages(t, Message{Role: RoleUser, Text: "hi"}, Message{Role: RoleUser, Text: " \n"},
			Message{Role: RoleAssistant, Text: "", Calls: []ToolCall{{ID: "a", Tool: "t", Args: json.RawMessage(`{}`)}}}, Message{Role: RoleTool, CallID: "a"}))
	})
	t.Run("NothingToSay", func(t *testing.T) {
		t.Parallel()
		require.JSONEq(t, `[{"role": "user", "content": [{"type": "text", "text": "Continue."}]}]`, messages(t))
	})
	t.Run("CallsOfEarlierTurnsKeepTheirOwnIDs", func(t *testing.T) {
		t.Parallel()
		calls := []ToolCall{{ID: "call_0_0", Tool: "t", Args: json.RawMessage(`{}`)}}
		body := messages(t,
			Message{Role: RoleUser, Text: "hi"}, Message{Role: RoleAssistant, Calls: calls}, Message{Role: RoleTool, CallID: "call_0_0", Text: "1"},
			Message{Role: RoleAssistant, Calls: calls}, Message{Role: RoleTool, CallID: "call_0_0", Text: "2"},
			Message{Role: RoleAssistant, Calls: []ToolCall{{ID: "not:valid", Tool: "t"}}}, Message{Role: RoleTool, CallID: "not:valid", Text: "3"})
		for _, id := range []string{"call_0_0", "call_3_0", "call_5_0"} {
			require.Equal(t, 1, strings.Count(body, `"id":"`+id+`"`))
			require.Equal(t, 1, strings.Count(body, `"tool_use_id":"`+id+`"`))
		}
	})
	t.Run("SystemIsReserved", func(t *testing.T) {
		t.Parallel()
		_, err := anthropicAt(t, "http://127.0.0.1:1").Call(t.Context(), &Request{Model: "m", Parameters: map[string]any{"system": "x"}}, nil)
		require.Equal(t, ReasonBadRequest, requireError(t, err).Reason)
	})
}

func TestAnthropicFailures(t *testing.T) {
	t.Parallel()
	for name, c := range failures {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := serve(t, c.answer)
			resp, err := anthropicAt(t, server.url).Call(t.Context(), ask("claude-haiku-4-5", "x"), nil)
			require.Nil(t, resp)
			requireFailure(t, c.want, err)
			require.Len(t, server.requests, 1, "no retries")
		})
	}
}

func TestAnthropicBrokenStreams(t *testing.T) {
	t.Parallel()
	begin := messageStart + textBlock("0", "Hello wo")
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		want   Error
	}{
		"Overloaded":        {events(begin, sse(`{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"},"request_id":"req_1"}`)), Error{Status: 529, Reason: ReasonOverloaded, Retryable: true, Message: "Overloaded"}},
		"RateLimited":       {events(begin, sse(`{"type":"error","error":{"type":"rate_limit_error","message":"slow"}}`)), Error{Status: 429, Reason: ReasonRateLimited, Retryable: true, Message: "slow"}},
		"ApiError":          {events(begin, sse(`{"type":"error","error":{"type":"api_error","message":"boom `+testKey+`"}}`)), Error{Status: 500, Reason: ReasonServerError, Retryable: true, Message: "boom ***"}},
		"Invalid":           {events(begin, sse(`{"type":"error","error":{"type":"invalid_request_error","message":"no"}}`)), Error{Status: 400, Reason: ReasonBadRequest, Message: "no"}},
		"Unexplained":       {events(begin, "event: error\ndata: oops\n\n"), Error{Reason: ReasonServerError, Retryable: true, Message: "oops"}},
		"EndsWithoutFinish": {events(begin), Error{Reason: ReasonBadResponse, Retryable: true, Message: "before it was complete"}},
		"Garbage":           {events(begin, "event: content_block_delta\ndata: {\"type\n\n"), Error{Reason: ReasonBadResponse, Retryable: true, Message: "cannot be read"}},
		"ConnectionLost": {func(w http.ResponseWriter, r *http.Request) {
			events(begin)(w, r)
			panic(http.ErrAbortHandler)
		}, Error{Reason: ReasonNetwork, Retryable: true, Message: "EOF"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := serve(t, c.answer)
			var got deltas
			_, err := anthropicAt(t, server.url).Call(t.Context(), ask("claude-haiku-4-5", "hi"), got.sink)
			want := c.want
			// The input is the provider's number, the output ours.
			want.Usage = &Usage{Input: 25, CacheRead: 100, CacheWrite: 10, Output: 2, CostMicros: micros(58), Estimated: true}
			requireFailure(t, want, err)
			require.Equal(t, "Hello wo", got.text())
		})
	}

	t.Run("LostAfterTheEnd", func(t *testing.T) {
		t.Parallel()
		server := serve(t, events(begin, messageDelta("end_turn", `{"output_tokens":15}`)))
		resp, err := anthropicAt(t, server.url).Call(t.Context(), ask("claude-haiku-4-5", "hi"), nil)
		require.NoError(t, err, "all has been said")
		require.Equal(t, "Hello wo", resp.Text)
		require.False(t, resp.Usage.Estimated)
	})
	t.Run("PageInsteadOfAStream", func(t *testing.T) {
		t.Parallel()
		server := serve(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("<html>log in first</html>")) })
		_, err := anthropicAt(t, server.url).Call(t.Context(), ask("claude-haiku-4-5", "hi"), nil)
		require.Equal(t, ReasonBadResponse, requireError(t, err).Reason)
	})
}

func TestAnthropicSilence(t *testing.T) {
	t.Parallel()
	begin := messageStart + textBlock("0", "Hello wo")

	t.Run("SilentStreamStalls", func(t *testing.T) {
		t.Parallel()
		closed := make(chan struct{})
		server := serve(t, eventsThenSilence(closed, begin))
		_, err := anthropicAt(t, server.url, gap(30*time.Millisecond)).Call(t.Context(), ask("claude-haiku-4-5", "hi"), nil)
		requireFailure(t, Error{
			Reason: ReasonStalled, Retryable: true,
			Usage: &Usage{Input: 25, CacheRead: 100, CacheWrite: 10, Output: 2, CostMicros: micros(58), Estimated: true},
		}, err)
		<-closed
	})
	t.Run("CancelClosesTheConnection", func(t *testing.T) {
		t.Parallel()
		errStop := errors.New("stop")
		closed := make(chan struct{})
		server := serve(t, eventsThenSilence(closed, begin))
		ctx, cancel := context.WithCancelCause(t.Context())
		_, err := anthropicAt(t, server.url).Call(ctx, ask("claude-haiku-4-5", "hi"), func(string) { cancel(errStop) })
		require.ErrorIs(t, err, errStop)
		var aborted *AbortedError
		require.ErrorAs(t, err, &aborted)
		require.Equal(t, Usage{Input: 25, CacheRead: 100, CacheWrite: 10, Output: 2, CostMicros: micros(58), Estimated: true}, aborted.Usage)
		<-closed
	})
	t.Run("PingsAreLife", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			transport := servePipes(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				events(messageStart)(w, r)
				for range 10 {
					time.Sleep(119 * time.Second) // of the bubble's time
					flush(w, ping)
				}
				flush(w, textBlock("0", "end"), messageDelta("end_turn", `{"output_tokens":1}`), messageStop)
			}))
			p := anthropicAt(t, "http://provider.test", func(c *Config) { c.Transport = transport })
			resp, err := p.Call(t.Context(), ask("claude-haiku-4-5", "hi"), nil)
			require.NoError(t, err)
			require.Equal(t, "end", resp.Text)
		})
	})
}
