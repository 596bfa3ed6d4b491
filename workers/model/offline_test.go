package model

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestOffline is the table of contract/surface.md §3.
func TestOffline(t *testing.T) {
	t.Parallel()
	call := func(id, tool, args string) []ToolCall {
		return []ToolCall{{ID: id, Tool: tool, Args: json.RawMessage(args)}}
	}
	for name, c := range map[string]struct {
		text      string
		callIndex int
		attempt   int
		history   []Message // after the text
		want      Response  // without Usage and Model
	}{
		"PlainText":                       {text: "hello  world", want: Response{Text: "offline: hello  world"}},
		"UnknownWordIsPlainText":          {text: "!important news", want: Response{Text: "offline: !important news"}},
		"MarkInsideALineIsPlainText":      {text: "do !say nothing", want: Response{Text: "offline: do !say nothing"}},
		"WordThatStartsLikeADirective":    {text: "!sayings of the day", want: Response{Text: "offline: !sayings of the day"}},
		"EmptyText":                       {text: "", want: Response{Text: "offline: "}},
		"Say":                             {text: "!say hello there", want: Response{Text: "hello there"}},
		"LineEndsAsOnWindows":             {text: "!say hello\r\nrest\r\n", want: Response{Text: "hello"}},
		"Tool":                            {text: `!tool orders_get {"id": 7}`, want: Response{Calls: call("call_0_0", "orders_get", `{"id": 7}`)}},
		"ToolWithoutArguments":            {text: "!tool crm::lookup", want: Response{Calls: call("call_0_0", "crm::lookup", "{}")}},
		"SecondCallCarriesOutSecondGroup": {text: "!tool a\n!tool b\n!say c", callIndex: 1, want: Response{Calls: call("call_1_0", "b", "{}")}},
		"ThirdCallCarriesOutThirdGroup":   {text: "!tool a\n!tool b\n!say c", callIndex: 2, want: Response{Text: "c"}},
		"AfterTheLastGroupDone":           {text: "!tool a", callIndex: 1, want: Response{Text: "done"}},
		"AfterTheLastGroupRemainingText":  {text: "before\n!tool a\n\nafter\n", callIndex: 1, want: Response{Text: "before\n\nafter"}},
		"FarBehindTheLastGroup":           {text: "!tool a\nrest", callIndex: 9, want: Response{Text: "rest"}},
		"Tools": {
			text: `!tools a {"x": ";; }"} ;; b ;; c {"y":{"z":"\"}"}}`,
			want: Response{Calls: []ToolCall{
				{ID: "call_0_0", Tool: "a", Args: json.RawMessage(`{"x": ";; }"}`)},
				{ID: "call_0_1", Tool: "b", Args: json.RawMessage(`{}`)},
				{ID: "call_0_2", Tool: "c", Args: json.RawMessage(`{"y":{"z":"\"}"}}`)},
			}},
		},
		"Spawn":        {text: "!spawn find <it>", want: Response{Calls: call("call_0_0", "session_spawn", `{"task":"find <it>"}`)}},
		"SpawnOfAgent": {text: "!spawn @worker !say hi", want: Response{Calls: call("call_0_0", "session_spawn", `{"agent":"worker","task":"!say hi"}`)}},
		"SpawnWait":    {text: "!spawnwait find it\n!result", want: Response{Calls: call("call_0_0", "session_spawn", `{"task":"find it"}`)}},
		"SpawnWaitWaitsForItsChild": {
			text: "!spawnwait find it\n!result", callIndex: 1,
			history: []Message{{Role: RoleTool, Tool: "session_spawn", Text: `{"runId":"run_1","async":true}`}, {Role: RoleTool, Tool: "other", Text: "{}"}},
			want:    Response{Calls: call("call_1_0", "subagent_wait", `{"runIds":["run_1"],"timeoutMs":300000}`)},
		},
		"SpawnWaitWithoutAnIDWaitsForAll": {
			text: "!spawnwait find it", callIndex: 1,
			history: []Message{{Role: RoleTool, Tool: "session_spawn", Text: "denied", IsError: true}},
			want:    Response{Calls: call("call_1_0", "subagent_wait", `{"timeoutMs":300000}`)},
		},
		"SpawnWaitIsTwoCalls": {text: "!spawnwait find it\n!say end", callIndex: 2, want: Response{Text: "end"}},
		"Clarify":             {text: "!clarify which one?", want: Response{Clarify: "which one?"}},
		"Plan":                {text: "!plan look | think|  act |\n!say ok", want: Response{Plan: []string{"look", "think", "act"}, Text: "ok"}},
		"PlanBelongsToTheLineAfterIt": {
			text: "!tool a\n!plan x\n!tool b", want: Response{Calls: call("call_0_0", "a", "{}")},
		},
		"PlanBelongsToTheSecondCall": {
			text: "!tool a\n!plan x\n!tool b", callIndex: 1, want: Response{Plan: []string{"x"}, Calls: call("call_1_0", "b", "{}")},
		},
		"GoingOnIntoTheRemainingText": {text: "!plan x\nhello", want: Response{Plan: []string{"x"}, Text: "hello"}},
		"LoopAtEveryCall":             {text: "!loop again {\"n\":1}\n!say never", callIndex: 7, want: Response{Calls: call("call_7_0", "again", `{"n":1}`)}},
		"LoopWinsOverEarlierLines":    {text: "!say never\n!plan x\n!loop again", want: Response{Plan: []string{"x"}, Calls: call("call_0_0", "again", `{}`)}},
		"JSON":                        {text: `!json {"a": [1,  2]}`, want: Response{Text: `{"a": [1,  2]}`}},
		"Stream":                      {text: "!stream 3 delay=0s", want: Response{Text: "word1 word2 word3"}},
		"StreamOfNothing":             {text: "!stream 0", want: Response{}},
		"Result": {
			text: "!tool a\n!result", callIndex: 1,
			history: []Message{{Role: RoleAssistant, Text: "x"}, {Role: RoleTool, Tool: "a", Text: "first"}, {Role: RoleTool, Tool: "b", Text: "second"}},
			want:    Response{Text: "second"},
		},
		"StatusHasFailedOftenEnough": {text: "!status 429 times=2\n!say ok", attempt: 2, want: Response{Text: "ok"}},
		"StatusNeverFails":           {text: "!status 429 times=0\n!say ok", want: Response{Text: "ok"}},
		"AllStatusesOver":            {text: "!status 429 times=2\n!status 503\n!say ok", attempt: 3, want: Response{Text: "ok"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			req := ask(OfflineModel, c.text)
			req.Messages = append(req.Messages, c.history...)
			req.CallIndex, req.Attempt = c.callIndex, c.attempt
			var got deltas

			resp, err := (&Offline{}).Call(t.Context(), req, got.sink)
			require.NoError(t, err)

			want := c.want
			want.Usage, want.Model, want.Finish = resp.Usage, OfflineModel, FinishStop
			if len(want.Calls) > 0 {
				want.Finish = FinishTools
			}
			require.Equal(t, &want, resp)
			require.Equal(t, resp.Text, got.text(), "the sink hears the whole text")
			require.Equal(t, micros(0), resp.Usage.CostMicros)

			again, err := (&Offline{}).Call(t.Context(), req, nil)
			require.NoError(t, err)
			require.Equal(t, resp, again, "deterministic")
		})
	}
}

// TestOfflineFailures holds the directives that fail, and the scripts that are
// wrong.
func TestOfflineFailures(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		model   string
		text    string
		attempt int
		want    Error // with a Message that the failure's contains
	}{
		"Status429":           {text: "!status 429\n!say x", want: Error{Status: 429, Reason: ReasonRateLimited, Retryable: true}},
		"StatusWithOptions":   {text: "!status 429 times=3 retry-after=3 key=shared", attempt: 2, want: Error{Status: 429, Reason: ReasonRateLimited, Retryable: true, RetryAfter: 3 * time.Second, RateLimitKey: "shared"}},
		"Status529":           {text: "!status 529", want: Error{Status: 529, Reason: ReasonOverloaded, Retryable: true}},
		"Status503":           {text: "!status 503", want: Error{Status: 503, Reason: ReasonOverloaded, Retryable: true}},
		"Status500":           {text: "!status 500", want: Error{Status: 500, Reason: ReasonServerError, Retryable: true}},
		"Status400":           {text: "!status 400", want: Error{Status: 400, Reason: ReasonBadRequest}},
		"Status401":           {text: "!status 401", want: Error{Status: 401, Reason: ReasonAuth}},
		"SecondStatus":        {text: "!status 429 times=2\n!status 503", attempt: 2, want: Error{Status: 503, Reason: ReasonOverloaded, Retryable: true}},
		"Error":               {text: "!error no such luck", want: Error{Status: 400, Reason: ReasonBadRequest, Message: "no such luck"}},
		"ErrorAfterUsage":     {text: "!usage input=3\n!error x", want: Error{Status: 400, Reason: ReasonBadRequest, Usage: &Usage{Input: 3, CostMicros: micros(0)}}},
		"BadJSON":             {text: "!tool a {bad", want: Error{Status: 400, Reason: ReasonBadRequest, Message: "JSON object"}},
		"JSONThatIsNoObject":  {text: "!tool a [1]", want: Error{Status: 400, Reason: ReasonBadRequest, Message: "JSON object"}},
		"BadJSONInAGroup":     {text: "!tools a {} ;; b {1}", want: Error{Status: 400, Reason: ReasonBadRequest, Message: "JSON object"}},
		"NothingBetweenCalls": {text: "!tools a {} b {}", want: Error{Status: 400, Reason: ReasonBadRequest, Message: ";;"}},
		"TextAfterArguments":  {text: "!tool a {} b", want: Error{Status: 400, Reason: ReasonBadRequest, Message: "after the arguments"}},
		"ToolWithoutName":     {text: "!tool", want: Error{Status: 400, Reason: ReasonBadRequest, Message: "name of a tool"}},
		"BadJSONAnswer":       {text: "!json {", want: Error{Status: 400, Reason: ReasonBadRequest, Message: "JSON"}},
		"SpawnOfNothing":      {text: "!spawn @a", want: Error{Status: 400, Reason: ReasonBadRequest, Message: "task"}},
		"ClarifyNothing":      {text: "!clarify", want: Error{Status: 400, Reason: ReasonBadRequest, Message: "question"}},
		"SleepWithoutUnit":    {text: "!sleep 5", want: Error{Status: 400, Reason: ReasonBadRequest, Message: "duration"}},
		"StatusOfNoFailure":   {text: "!status 200", want: Error{Status: 400, Reason: ReasonBadRequest, Message: "400 to 599"}},
		"UnknownStatusOption": {text: "!status 429 time=2", want: Error{Status: 400, Reason: ReasonBadRequest, Message: `"time=2"`}},
		"UnknownUsage":        {text: "!usage tokens=2", want: Error{Status: 400, Reason: ReasonBadRequest, Message: `"tokens=2"`}},
		"BadUsage":            {text: "!usage input=two", want: Error{Status: 400, Reason: ReasonBadRequest, Message: `"input=two"`}},
		"BadStream":           {text: "!stream many", want: Error{Status: 400, Reason: ReasonBadRequest, Message: "number of words"}},
		"BadStreamOption":     {text: "!stream 3 pause=1s", want: Error{Status: 400, Reason: ReasonBadRequest, Message: `"pause=1s"`}},
		"UnknownModel":        {model: "offline-9", text: "x", want: Error{Status: 404, Reason: ReasonBadRequest, Message: "offline-9"}},
		"ContextTooLarge":     {model: OfflineModelSmall, text: strings.Repeat("x ", 201), want: Error{Status: 400, Reason: ReasonContextExhausted, Message: "201 tokens"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			req := ask(c.model, c.text)
			req.Attempt = c.attempt

			resp, err := (&Offline{}).Call(t.Context(), req, nil)

			require.Nil(t, resp)
			got := requireError(t, err)
			require.Contains(t, got.Message, c.want.Message)
			want := c.want
			want.Message = got.Message
			require.Equal(t, &want, got)
		})
	}
}

func TestOfflineUsage(t *testing.T) {
	t.Parallel()
	context := func(model, text string) *Request {
		return &Request{
			Model:    model,
			System:   "You are kind.",
			Facts:    []Fact{{Key: "name", Value: json.RawMessage(`"Ann Lee"`)}},
			Tools:    []Tool{{Name: "look", Description: "Looks up.", Parameters: json.RawMessage(`{"type": "object"}`)}},
			Messages: []Message{{Role: RoleUser, Text: text}, {Role: RoleAssistant, Calls: []ToolCall{{Tool: "look", Args: json.RawMessage(`{}`)}}}, {Role: RoleTool, Text: "two words"}},
		}
	}

	t.Run("InputIsTheWordsOfTheWholeContext", func(t *testing.T) {
		t.Parallel()
		resp, err := (&Offline{}).Call(t.Context(), context(OfflineModel, "a b\u00a0c"), nil)
		require.NoError(t, err)
		require.Equal(t, Usage{Input: 3 + 3 + 5 + 3 + 2 + 2, Output: 4, CostMicros: micros(0)}, resp.Usage)
	})
	t.Run("PricedModelCosts", func(t *testing.T) {
		t.Parallel()
		resp, err := (&Offline{}).Call(t.Context(), context(OfflineModelPriced, "!say one two"), nil)
		require.NoError(t, err)
		require.Equal(t, Usage{Input: 18, Output: 2, CostMicros: micros(22)}, resp.Usage)
	})
	t.Run("ReportedUsage", func(t *testing.T) {
		t.Parallel()
		resp, err := (&Offline{}).Call(t.Context(), ask(OfflineModelPriced, "!usage input=100 cacheRead=80 cacheWrite=5 output=20 reasoning=3\n!say x"), nil)
		require.NoError(t, err)
		require.Equal(t, Usage{Input: 100, CacheRead: 80, CacheWrite: 5, Output: 20, Reasoning: 3, CostMicros: micros(185 + 46)}, resp.Usage)
		require.EqualValues(t, 208, resp.Usage.Total())
	})
	t.Run("ContextOfExactlyTheWindowFits", func(t *testing.T) {
		t.Parallel()
		_, err := (&Offline{}).Call(t.Context(), ask(OfflineModelSmall, strings.Repeat("x ", 200)), nil)
		require.NoError(t, err)
	})
}

func TestOfflineContext(t *testing.T) {
	t.Parallel()
	req := &Request{
		System:   "Be <kind>.",
		Facts:    []Fact{{Key: "color", Value: json.RawMessage(`"blue"`)}},
		Tools:    []Tool{{Name: "look"}},
		Messages: []Message{{Role: RoleUser, Text: "hi"}, {Role: RoleAssistant, Text: "ho"}, {Role: RoleUser, Text: "!context"}},
		Now:      time.Unix(1, 0),
	}
	resp, err := (&Offline{}).Call(t.Context(), req, nil)
	require.NoError(t, err)
	require.Equal(t, `{"system":"Be <kind>.","facts":[{"key":"color","value":"blue"}],"tools":[{"name":"look"}],`+
		`"messages":[{"role":"user","text":"hi"},{"role":"assistant","text":"ho"},{"role":"user","text":"!context"}]}`, resp.Text)

	resp, err = (&Offline{}).Call(t.Context(), ask("", "!context"), nil)
	require.NoError(t, err)
	require.Equal(t, `{"system":"","facts":[],"tools":[],"messages":[{"role":"user","text":"!context"}]}`, resp.Text)
}

func TestOfflineTime(t *testing.T) {
	t.Parallel()
	errStop := errors.New("stop")

	t.Run("SleepTakesThatLong", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			resp, err := (&Offline{}).Call(t.Context(), ask("", "!sleep 5s\n!sleep 250ms\n!say x"), nil)
			require.NoError(t, err)
			require.Equal(t, "x", resp.Text)
			require.Equal(t, 5250*time.Millisecond, time.Since(start))
		})
	})
	t.Run("StreamPacesItsWords", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			var at []time.Duration
			var got deltas
			resp, err := (&Offline{}).Call(t.Context(), ask("", "!stream 3 delay=20ms"), func(text string) {
				at = append(at, time.Since(start))
				got.sink(text)
			})
			require.NoError(t, err)
			require.Equal(t, []string{"word1", " word2", " word3"}, got.list)
			require.Equal(t, got.text(), resp.Text)
			require.Equal(t, []time.Duration{20 * time.Millisecond, 40 * time.Millisecond, 60 * time.Millisecond}, at)
		})
	})
	t.Run("StallEndsAtTheGapLimit", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			_, err := (&Offline{}).Call(t.Context(), ask(OfflineModelPriced, "!stall"), nil)
			e := requireError(t, err)
			require.Equal(t, ReasonStalled, e.Reason)
			require.True(t, e.Retryable)
			require.Equal(t, &Usage{Input: 2, CostMicros: micros(2), Estimated: true}, e.Usage)
			require.Equal(t, 120*time.Second, time.Since(start))
		})
	})
	t.Run("StallEndsWhenCancelled", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(time.Second, func() { cancel(errStop) })
			start := time.Now()
			_, err := (&Offline{}).Call(ctx, ask("", "!usage input=7 output=1\n!stall"), nil)
			require.ErrorIs(t, err, errStop)
			var aborted *AbortedError
			require.ErrorAs(t, err, &aborted)
			require.Equal(t, Usage{Input: 7, Output: 1, CostMicros: micros(0)}, aborted.Usage, "RC-123: what was reported counts")
			require.Equal(t, time.Second, time.Since(start))
		})
	})
	t.Run("CancelledStreamIsEstimated", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(50*time.Millisecond, func() { cancel(errStop) })
			_, err := (&Offline{}).Call(ctx, ask("", "!stream 1000 delay=20ms"), nil)
			require.ErrorIs(t, err, errStop)
			var aborted *AbortedError
			require.ErrorAs(t, err, &aborted)
			require.Equal(t, Usage{Input: 6, Output: 3, CostMicros: micros(0), Estimated: true}, aborted.Usage)
		})
	})
	t.Run("NothingHappensAfterCancel", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(errStop)
		_, err := (&Offline{}).Call(ctx, ask("", "x"), nil)
		require.Equal(t, errStop, err)
	})
}

// FuzzOffline feeds scripts to the offline model: whatever they say, a call
// ends, with a valid result or an *Error, and ends the same way again.
func FuzzOffline(f *testing.F) {
	for _, text := range []string{
		"hello", "!say x\nrest", "!tool a {\"b\":\"}\"}", "!tools a {} ;; b {\"c\":[1,{}]} ;;", "!tools ;;", "!spawn @a b",
		"!spawnwait x\n!result", "!sleep 1h\n!status 429 times=2 retry-after=1e9 key=k\n!usage input=1\n!plan a|b\n!say x",
		"!stall", "!stream 10 delay=1ms", "!loop x {}", "!json {}", "!error", "!context", "!clarify ?\r\n", "!!", "! say", "!tool \x00{}",
	} {
		f.Add(text, 0, 0)
		f.Add(text, 1, 1)
	}
	f.Fuzz(func(t *testing.T, text string, callIndex, attempt int) {
		synctest.Test(t, func(t *testing.T) {
			req := ask("", text)
			req.CallIndex, req.Attempt = callIndex, attempt
			resp, err := (&Offline{}).Call(t.Context(), req, func(string) {})
			if err != nil {
				require.Nil(t, resp)
				requireError(t, err)
			} else {
				require.NotNil(t, resp.Usage.CostMicros)
				require.GreaterOrEqual(t, resp.Usage.Total(), int64(0))
				for _, call := range resp.Calls {
					require.True(t, json.Valid(call.Args))
					require.NotEmpty(t, call.Tool)
				}
			}
			again, againErr := (&Offline{}).Call(t.Context(), req, nil)
			require.Equal(t, resp, again)
			require.Equal(t, err, againErr)
		})
	})
}

func BenchmarkOffline(b *testing.B) {
	for name, text := range map[string]string{
		"Plain": "What is the weather like in Berlin today?",
		"Tool":  "!tool orders_get {\"id\":7}\n!say done",
	} {
		b.Run(name, func(b *testing.B) {
			req := ask(OfflineModel, text)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := (&Offline{}).Call(b.Context(), req, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
