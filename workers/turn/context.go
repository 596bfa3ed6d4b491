package turn

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/google/uuid"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/workers/model"
)

// Entry is one stored entry of the conversation before a turn.
type Entry struct {
	Seq     int64
	Type    db.EventType
	RunID   uuid.UUID
	Content json.RawMessage
}

// toolEvent is the content of tool.request and tool.response.
type toolEvent struct {
	CallID  string          `json:"callId"`
	Tool    string          `json:"tool"`
	Args    json.RawMessage `json:"args,omitempty"`
	GroupID string          `json:"groupId"`
	Index   int             `json:"index"`
	Data    json.RawMessage `json:"data,omitempty"`
	Error   *ToolError      `json:"error,omitempty"`
	Late    bool            `json:"late,omitempty"`
}

type textContent struct {
	Text string `json:"text"`
}

// InterruptedMessage is the result a model sees of a call that never got one.
const InterruptedMessage = "the call was interrupted before it had a result"

// History turns stored entries into messages. Every tool call in it has
// exactly one result; calls left open by a crash, a cancel or a kill get a
// synthetic one, the stored events are not rewritten (RC-70, FC-21).
func History(entries []Entry) ([]model.Message, error) {
	type group struct{ calls []toolEvent }
	// A turn's entries stay together, in the order the turns were asked for: a
	// request that waited was stored before the answers it follows.
	first := map[uuid.UUID]int64{}
	for _, e := range entries {
		if _, ok := first[e.RunID]; !ok {
			first[e.RunID] = e.Seq
		}
	}
	entries = slices.Clone(entries)
	slices.SortStableFunc(entries, func(a, b Entry) int {
		return cmp.Or(cmp.Compare(first[a.RunID], first[b.RunID]), cmp.Compare(a.Seq, b.Seq))
	})
	results := map[string]toolEvent{}
	for _, e := range entries {
		if e.Type != jobs.EventToolResponse {
			continue
		}
		var t toolEvent
		if err := json.Unmarshal(e.Content, &t); err != nil {
			return nil, fmt.Errorf("event %d: %w", e.Seq, err)
		}
		if _, settled := results[t.CallID]; !settled && !t.Late {
			results[t.CallID] = t
		}
	}
	var out []model.Message
	var open *group
	closeGroup := func() {
		if open == nil {
			return
		}
		slices.SortStableFunc(open.calls, func(a, b toolEvent) int { return cmp.Compare(a.Index, b.Index) })
		calls := make([]model.ToolCall, len(open.calls))
		for i, c := range open.calls {
			calls[i] = model.ToolCall{ID: c.CallID, Tool: c.Tool, Args: c.Args}
		}
		out = append(out, model.Message{Role: model.RoleAssistant, Calls: calls})
		for _, c := range open.calls {
			r, ok := results[c.CallID]
			if !ok {
				r.Error = &ToolError{Kind: "interrupted", Message: InterruptedMessage}
			}
			out = append(out, resultMessage(c.CallID, c.Tool, ToolOutput{Data: r.Data, Error: r.Error}))
		}
		open = nil
	}
	var openID string
	for _, e := range entries {
		if e.Type == jobs.EventToolRequest {
			var t toolEvent
			if err := json.Unmarshal(e.Content, &t); err != nil {
				return nil, fmt.Errorf("event %d: %w", e.Seq, err)
			}
			if open == nil || openID != t.GroupID {
				closeGroup()
				open, openID = &group{}, t.GroupID
			}
			open.calls = append(open.calls, t)
			continue
		}
		if e.Type == jobs.EventToolResponse {
			continue
		}
		closeGroup()
		var c textContent
		if err := json.Unmarshal(e.Content, &c); err != nil {
			return nil, fmt.Errorf("event %d: %w", e.Seq, err)
		}
		role := model.RoleAssistant
		if e.Type == jobs.EventRequest {
			role = model.RoleUser
		}
		out = append(out, model.Message{Role: role, Text: c.Text})
	}
	closeGroup()
	return out, nil
}

// Context adds the turn's own request, calls and results to its history. All
// calls but those of the last group have results; those of the last have them
// too when the model is called.
func (s *State) Context(history []model.Message, request string) []model.Message {
	out := append(history, model.Message{Role: model.RoleUser, Text: request})
	for i := range s.steps {
		m := s.steps[i].model
		if m == nil {
			continue
		}
		var calls []model.ToolCall
		for _, c := range m.Calls {
			calls = append(calls, model.ToolCall{ID: c.CallID, Tool: c.Tool, Args: c.Args})
		}
		out = append(out, model.Message{Role: model.RoleAssistant, Text: m.Text, Calls: calls})
		for j, c := range m.Calls {
			result := ToolOutput{Error: &ToolError{Kind: "interrupted", Message: InterruptedMessage}}
			if st := s.find(s.steps[i].Seq + 1 + int32(j)); st != nil && st.tool != nil {
				result = *st.tool
			}
			out = append(out, resultMessage(c.CallID, c.Tool, result))
		}
	}
	return out
}

func resultMessage(callID, tool string, r ToolOutput) model.Message {
	m := model.Message{Role: model.RoleTool, CallID: callID, Tool: tool}
	switch {
	case r.Error != nil:
		b, err := json.Marshal(map[string]any{"error": r.Error})
		if err != nil {
			panic(err) // two strings
		}
		m.Text, m.IsError = string(b), true
	default:
		m.Text = string(r.Data)
		var text string
		if len(r.Data) > 0 && r.Data[0] == '"' && json.Unmarshal(r.Data, &text) == nil { // a text result is sent as text
			m.Text = text
		}
	}
	return m
}
