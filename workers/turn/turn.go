// Package turn decides what a turn does next. Next is a pure function of the
// steps that are stored: no clock, no database, no replayed code. A worker of
// a later version continues a turn that an earlier one began.
package turn

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/workers/model"
)

// ModelOutput is what a model step stores.
type ModelOutput struct {
	Provider string       `json:"provider"`
	Model    string       `json:"model"`
	Text     string       `json:"text,omitempty"`
	Calls    []Call       `json:"calls,omitempty"`
	Clarify  string       `json:"clarify,omitempty"`
	Finish   model.Finish `json:"finish,omitempty"`
	Usage    model.Usage  `json:"usage"`
}

// Call is a tool call a model asked for. Its step's seq is the model step's
// plus one plus its index.
type Call struct {
	// CallID is unique in the installation. It replaces the provider's own id,
	// towards the provider too, so that ids of two calls never meet.
	CallID string          `json:"callId"`
	Tool   string          `json:"tool"`
	Args   json.RawMessage `json:"args"`
}

// ToolOutput is what a tool step stores: data, or the error the model sees.
type ToolOutput struct {
	Data  json.RawMessage `json:"data,omitempty"`
	Error *ToolError      `json:"error,omitempty"`
}

// ToolError is a tool call that brought no data.
type ToolError struct {
	Kind    string `json:"kind"`
	Message string `json:"message"`
	Rule    string `json:"rule,omitempty"` // of kind denied: the policy's
}

// Limits bound a turn.
type Limits struct {
	MaxSteps      int // model calls
	LoopThreshold int // identical tool calls in a row
}

// Action is what a turn does next: CallModel, RunTools or End.
type Action interface{ action() }

// CallModel asks the model, with everything stored so far as context.
type CallModel struct {
	Seq       int32 // of the step
	CallIndex int   // model calls stored before
}

// RunTools carries out the calls of the last model step that have no result.
type RunTools struct {
	Model int32 // seq of the model step
	Group []Call
	Open  []Open
}

// Open is a call without a result.
type Open struct {
	Index int
	Call  Call
	Seq   int32
	// Started says that the call may have left already, in attempt Attempt; a
	// worker died, or the tool asked to try again.
	Started bool
	Attempt int32
	Epoch   int32 // of the attempt that started it
}

// End finishes the turn.
type End struct {
	Output *ModelOutput       // the answer or the question; nil for an error
	Error  *jobs.ErrorContent // nil for an answer
}

func (CallModel) action() {}
func (RunTools) action()  {}
func (End) action()       {}

// Next says what follows the stored steps, which are in order of seq.
func Next(steps []jobs.Step, limits Limits) (Action, error) {
	last, output, models, err := lastModel(steps)
	if err != nil {
		return nil, err
	}
	if output == nil {
		return CallModel{Seq: 0}, nil
	}
	if len(output.Calls) == 0 {
		return End{Output: output}, nil
	}
	looping, err := inLoop(steps, limits.LoopThreshold)
	if err != nil {
		return nil, err
	}
	if looping {
		return End{Error: &jobs.ErrorContent{
			Kind: "loop_detected", Message: fmt.Sprintf("the same tool call was asked for %d times in a row", limits.LoopThreshold),
		}}, nil
	}
	var open []Open
	for i, c := range output.Calls {
		seq := last + 1 + int32(i)
		st := find(steps, seq)
		switch {
		case st == nil:
			open = append(open, Open{Index: i, Call: c, Seq: seq})
		case st.Status == db.StepStatusStarted:
			open = append(open, Open{Index: i, Call: c, Seq: seq, Started: true, Attempt: st.Attempt, Epoch: st.Epoch})
		}
	}
	if len(open) > 0 {
		return RunTools{Model: last, Group: output.Calls, Open: open}, nil
	}
	if models >= limits.MaxSteps {
		return End{Error: &jobs.ErrorContent{
			Kind: "max_iterations", Message: fmt.Sprintf("the turn used its %d model calls without an answer", limits.MaxSteps),
			Partial: output.Text,
		}}, nil
	}
	return CallModel{Seq: last + 1 + int32(len(output.Calls)), CallIndex: models}, nil
}

func find(steps []jobs.Step, seq int32) *jobs.Step {
	i, ok := slices.BinarySearchFunc(steps, seq, func(s jobs.Step, seq int32) int { return int(s.Seq - seq) })
	if !ok {
		return nil
	}
	return &steps[i]
}

func lastModel(steps []jobs.Step) (seq int32, out *ModelOutput, models int, err error) {
	last := -1
	for i := range steps {
		if steps[i].Kind == db.StepKindModel && steps[i].Status == db.StepStatusDone {
			last = i
			models++
		}
	}
	if last < 0 {
		return 0, nil, 0, nil
	}
	out, err = ParseModel(&steps[last])
	return steps[last].Seq, out, models, err
}

// ParseModel reads a model step's output.
func ParseModel(st *jobs.Step) (*ModelOutput, error) {
	out := &ModelOutput{}
	if err := json.Unmarshal(st.Output, out); err != nil {
		return nil, fmt.Errorf("model step %d: %w", st.Seq, err)
	}
	return out, nil
}

// inLoop says whether the turn's latest calls are threshold times the same
// tool with the same arguments.
func inLoop(steps []jobs.Step, threshold int) (bool, error) {
	if threshold <= 0 {
		return false, nil
	}
	var want *Call
	n := 0
	for i := len(steps) - 1; i >= 0; i-- {
		if steps[i].Kind != db.StepKindModel {
			continue
		}
		out, err := ParseModel(&steps[i])
		if err != nil {
			return false, err
		}
		for j := len(out.Calls) - 1; j >= 0; j-- {
			c := &out.Calls[j]
			if want == nil {
				want = c
			}
			if c.Tool != want.Tool || !bytes.Equal(c.Args, want.Args) {
				return false, nil
			}
			if n++; n >= threshold {
				return true, nil
			}
		}
	}
	return false, nil
}
