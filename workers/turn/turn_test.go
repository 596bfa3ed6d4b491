package turn

import (
	"encoding/json"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/workers/model"
)

var limits = Limits{MaxSteps: 3, LoopThreshold: 3}

func modelStep(seq int32, out ModelOutput) jobs.Step {
	b, err := json.Marshal(out)
	if err != nil {
		panic(err)
	}
	return jobs.Step{Seq: seq, Kind: db.StepKindModel, Status: db.StepStatusDone, Output: b}
}

func toolStep(seq int32, status db.StepStatus, out string) jobs.Step {
	return jobs.Step{Seq: seq, Kind: db.StepKindTool, Status: status, Output: json.RawMessage(out), Epoch: 1, Attempt: 1}
}

func calls(args ...string) []Call {
	out := make([]Call, len(args))
	for i, a := range args {
		out[i] = Call{CallID: "call_" + a, Tool: "t", Args: json.RawMessage(`"` + a + `"`)}
	}
	return out
}

func next(t *testing.T, steps []jobs.Step) Action {
	t.Helper()
	s, err := Read(steps)
	require.NoError(t, err)
	return s.Next(limits)
}

func TestNext(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		steps []jobs.Step
		want  Action
	}{
		"ABeginningCallsTheModel": {nil, CallModel{Seq: 0, CallIndex: 0}},
		"AnAnswerEnds": {
			[]jobs.Step{modelStep(0, ModelOutput{Text: "hi"})},
			End{Output: &ModelOutput{Text: "hi"}},
		},
		"CallsWithoutResultsAreMade": {
			[]jobs.Step{modelStep(0, ModelOutput{Calls: calls("a", "b", "c")}), toolStep(1, db.StepStatusDone, `{"data":1}`), toolStep(2, db.StepStatusStarted, ``)},
			RunTools{Model: 0, Group: calls("a", "b", "c"), Open: []Open{
				{Index: 1, Call: calls("b")[0], Seq: 2, Started: true, Attempt: 1, Epoch: 1},
				{Index: 2, Call: calls("c")[0], Seq: 3},
			}},
		},
		"AGroupWithAllResultsGoesOn": {
			[]jobs.Step{modelStep(0, ModelOutput{Calls: calls("a", "b")}), toolStep(1, db.StepStatusDone, `{"data":1}`), toolStep(2, db.StepStatusDone, `{"data":1}`)},
			CallModel{Seq: 3, CallIndex: 1},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, tt.want, next(t, tt.steps))
		})
	}
	t.Run("RC-134TheLimitOfModelCallsEnds", func(t *testing.T) {
		t.Parallel()
		var steps []jobs.Step
		for i, a := range []string{"a", "b", "c"} {
			steps = append(steps, modelStep(int32(2*i), ModelOutput{Calls: calls(a)}), toolStep(int32(2*i+1), db.StepStatusDone, `{"data":1}`))
		}
		got := next(t, steps)
		require.Equal(t, "max_iterations", got.(End).Error.Kind)
	})
	t.Run("RC-135ALoopEndsBeforeItsLastCallIsMade", func(t *testing.T) {
		t.Parallel()
		steps := []jobs.Step{
			modelStep(0, ModelOutput{Calls: calls("a", "a")}), toolStep(1, db.StepStatusDone, `{"data":1}`), toolStep(2, db.StepStatusDone, `{"data":1}`),
			modelStep(3, ModelOutput{Calls: calls("a")}),
		}
		got := next(t, steps)
		require.Equal(t, "loop_detected", got.(End).Error.Kind)
	})
	t.Run("AnotherCallBetweenIsNoLoop", func(t *testing.T) {
		t.Parallel()
		steps := []jobs.Step{
			modelStep(0, ModelOutput{Calls: calls("a", "b")}), toolStep(1, db.StepStatusDone, `{"data":1}`), toolStep(2, db.StepStatusDone, `{"data":1}`),
			modelStep(3, ModelOutput{Calls: calls("a")}),
		}
		got := next(t, steps)
		require.IsType(t, RunTools{}, got)
	})
}

func TestContext(t *testing.T) {
	t.Parallel()
	first, second := uuid.New(), uuid.New()
	entry := func(seq int64, typ db.EventType, run uuid.UUID, content string) Entry {
		return Entry{Seq: seq, Type: typ, RunID: run, Content: json.RawMessage(content)}
	}
	t.Run("FC-21EveryCallOfThePastHasOneResult", func(t *testing.T) {
		t.Parallel()
		got, err := History([]Entry{
			entry(1, jobs.EventRequest, first, `{"text":"q"}`),
			entry(2, jobs.EventToolRequest, first, `{"callId":"b","tool":"t","args":{},"groupId":"g","index":1}`),
			entry(3, jobs.EventToolRequest, first, `{"callId":"a","tool":"t","args":{},"groupId":"g","index":0}`),
			entry(4, jobs.EventToolResponse, first, `{"callId":"a","data":{"ok":true}}`),
			entry(5, jobs.EventToolResponse, first, `{"callId":"a","data":"again"}`),
			entry(6, jobs.EventToolResponse, first, `{"callId":"b","late":true,"data":1}`),
		})
		require.NoError(t, err)
		require.Equal(t, []model.Message{
			{Role: model.RoleUser, Text: "q"},
			{Role: model.RoleAssistant, Calls: []model.ToolCall{{ID: "a", Tool: "t", Args: json.RawMessage(`{}`)}, {ID: "b", Tool: "t", Args: json.RawMessage(`{}`)}}},
			{Role: model.RoleTool, CallID: "a", Tool: "t", Text: `{"ok":true}`},
			{Role: model.RoleTool, CallID: "b", Tool: "t", IsError: true, Text: `{"error":{"kind":"interrupted","message":"the call was interrupted before it had a result"}}`},
		}, got)
	})
	t.Run("TurnsStayTogetherInTheOrderTheyWereAskedFor", func(t *testing.T) {
		t.Parallel()
		got, err := History([]Entry{
			entry(1, jobs.EventRequest, first, `{"text":"one"}`),
			entry(2, jobs.EventRequest, second, `{"text":"two"}`),
			entry(3, jobs.EventResponse, first, `{"text":"answer one"}`),
			entry(4, jobs.EventResponse, second, `{"text":"answer two"}`),
		})
		require.NoError(t, err)
		var texts []string
		for _, m := range got {
			texts = append(texts, m.Text)
		}
		require.Equal(t, []string{"one", "answer one", "two", "answer two"}, texts)
	})
	t.Run("RC-57ResultsOfThisTurnComeInCallOrder", func(t *testing.T) {
		t.Parallel()
		state, err := Read([]jobs.Step{
			modelStep(0, ModelOutput{Text: "let me see", Calls: calls("a", "b")}),
			toolStep(1, db.StepStatusStarted, ``), toolStep(2, db.StepStatusDone, `{"data":"text result"}`),
		})
		require.NoError(t, err)
		got := state.Context(nil, "q")
		require.Len(t, got, 4)
		require.Equal(t, "call_a", got[2].CallID)
		require.True(t, got[2].IsError)
		require.Equal(t, model.Message{Role: model.RoleTool, CallID: "call_b", Tool: "t", Text: "text result"}, got[3])
	})
}
