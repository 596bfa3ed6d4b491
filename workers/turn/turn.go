// Package turn decides what a turn does next. State.Next is a pure function of
// the steps that are stored: no clock, no database, no replayed code. A worker of
// a later version continues a turn that an earlier one began.
package turn

import (
	"bytes"
	"encoding/json"
	"fmt"
	"iter"
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

// State is a turn's stored steps, read once.
type State struct {
	steps []step // in order of seq
}

type step struct {
	jobs.Step
	model *ModelOutput // of a finished model step
	tool  *ToolOutput  // of a finished tool step
}

// Read makes the state of a turn from its stored steps.
func Read(steps []jobs.Step) (*State, error) {
	s := &State{}
	for _, st := range steps {
		if err := s.Put(st, nil, nil); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Put notes a step that was stored just now, or stored again. Its output may
// be given besides, to spare reading it.
func (s *State) Put(st jobs.Step, model *ModelOutput, tool *ToolOutput) error {
	n := step{st, model, tool}
	if st.Status == db.StepStatusDone {
		var err error
		switch {
		case st.Kind == db.StepKindModel && model == nil:
			n.model = &ModelOutput{}
			err = json.Unmarshal(st.Output, n.model)
		case st.Kind != db.StepKindModel && tool == nil:
			n.tool = &ToolOutput{}
			err = json.Unmarshal(st.Output, n.tool)
		}
		if err != nil {
			return fmt.Errorf("step %d: %w", st.Seq, err)
		}
	}
	i, found := slices.BinarySearchFunc(s.steps, st.Seq, func(s step, seq int32) int { return int(s.Seq - seq) })
	if found {
		s.steps[i] = n
	} else {
		s.steps = slices.Insert(s.steps, i, n)
	}
	return nil
}

// Models are the turn's finished model calls, in order.
func (s *State) Models() iter.Seq[*ModelOutput] {
	return func(yield func(*ModelOutput) bool) {
		for i := range s.steps {
			if s.steps[i].model != nil && !yield(s.steps[i].model) {
				return
			}
		}
	}
}

func (s *State) find(seq int32) *step {
	i, ok := slices.BinarySearchFunc(s.steps, seq, func(s step, seq int32) int { return int(s.Seq - seq) })
	if !ok {
		return nil
	}
	return &s.steps[i]
}

// Next says what follows the stored steps.
func (s *State) Next(limits Limits) Action {
	var last *step
	models := 0
	for i := range s.steps {
		if s.steps[i].model != nil {
			last = &s.steps[i]
			models++
		}
	}
	if last == nil {
		return CallModel{Seq: 0}
	}
	output := last.model
	if len(output.Calls) == 0 {
		return End{Output: output}
	}
	if s.loops(limits.LoopThreshold) {
		return End{Error: &jobs.ErrorContent{
			Kind: "loop_detected", Message: fmt.Sprintf("the same tool call was asked for %d times in a row", limits.LoopThreshold),
		}}
	}
	var open []Open
	for i, c := range output.Calls {
		seq := last.Seq + 1 + int32(i)
		st := s.find(seq)
		switch {
		case st == nil:
			open = append(open, Open{Index: i, Call: c, Seq: seq})
		case st.Status == db.StepStatusStarted:
			open = append(open, Open{Index: i, Call: c, Seq: seq, Started: true, Attempt: st.Attempt, Epoch: st.Epoch})
		}
	}
	if len(open) > 0 {
		return RunTools{Model: last.Seq, Group: output.Calls, Open: open}
	}
	if models >= limits.MaxSteps {
		return End{Error: &jobs.ErrorContent{
			Kind: "max_iterations", Message: fmt.Sprintf("the turn used its %d model calls without an answer", limits.MaxSteps),
			Partial: output.Text,
		}}
	}
	return CallModel{Seq: last.Seq + 1 + int32(len(output.Calls)), CallIndex: models}
}

// loops says whether the turn's latest calls are threshold times the same tool
// with the same arguments.
func (s *State) loops(threshold int) bool {
	if threshold <= 0 {
		return false
	}
	var want *Call
	n := 0
	for i := len(s.steps) - 1; i >= 0; i-- {
		if s.steps[i].model == nil {
			continue
		}
		calls := s.steps[i].model.Calls
		for j := len(calls) - 1; j >= 0; j-- {
			c := &calls[j]
			if want == nil {
				want = c
			}
			if c.Tool != want.Tool || !bytes.Equal(c.Args, want.Args) {
				return false
			}
			if n++; n >= threshold {
				return true
			}
		}
	}
	return false
}
