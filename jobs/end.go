package jobs

import (
	"encoding/json"

	"github.com/weir-run/weir/db"
)

// Ending is how a run ends.
type Ending struct {
	State  db.RunState
	Reason string // end_reason: completed, clarify, or a kind of agent.error
	// Result is the run's result, Error its error; at most one is set.
	Result, Error json.RawMessage
	// Last is the turn's last event: agent.response, agent.clarify or
	// agent.error.
	Last Event
	// Message is what an Agentex task shows of the answer; nil for none.
	Message json.RawMessage
	// Phase is the session's phase when no turn follows; "" means idle.
	Phase string
}

// ErrorContent is the content of an agent.error event, and a run's error.
type ErrorContent struct {
	Kind      string         `json:"kind"`
	Message   string         `json:"message"`
	Retryable bool           `json:"retryable"`
	Reason    string         `json:"reason,omitempty"`
	Partial   string         `json:"partial,omitempty"`
	Details   map[string]any `json:"details,omitempty"`
}

// failEnding ends a run with an agent.error.
func failEnding(state db.RunState, c ErrorContent) Ending {
	content, err := json.Marshal(c)
	if err != nil {
		panic(err) // strings and plain values only
	}
	return Ending{State: state, Reason: c.Kind, Error: content, Last: Event{EventError, content}}
}

// canEnd checks, before anything changes, that end has all it needs.
func (u *unit) canEnd(r *runRow, s *sessionRow) error {
	if r.final() {
		return &StateError{r.ID, r.State, "unfinished"}
	}
	if r.ParentRunID != nil {
		if _, err := u.run(*r.ParentRunID); err != nil {
			return err
		}
	}
	if s.isHead(r) && s.Queued > 0 {
		if _, err := u.next(s); err != nil {
			return err
		}
	}
	return nil
}

// behind says that the run waits in its lane behind others.
func (r *runRow) behind() bool {
	return r.State == db.RunStateQueued && r.AdmittedAt == nil && r.ReadyAt == nil
}

func (s *sessionRow) isHead(r *runRow) bool {
	return r.InLane && s.HeadRunID != nil && *s.HeadRunID == r.ID
}

// end is the only way to a final state. It writes the turn's last event, wakes
// the parent, promotes the lane and drops the wait. The caller has the run,
// its session, its parent and the lane's next under lock.
func (u *unit) end(r *runRow, e Ending) error {
	s, err := u.session(r.SessionID)
	if err != nil {
		return err
	}
	if err := u.canEnd(r, s); err != nil {
		return err
	}
	head := s.isHead(r)

	if r.State == db.RunStateWaiting {
		u.waitDrop = append(u.waitDrop, r.ID)
	}
	waited := r.State == db.RunStateQueued && r.InLane && !head
	r.WaitsFor = nil
	r.State, r.WorkerID, r.ReadyAt, r.FinishedAt, r.EndReason = e.State, nil, nil, &u.now, notEmpty(e.Reason)
	r.result, r.fault = e.Result, e.Error
	r.dirty = true
	u.changes.ended = append(u.changes.ended, r.ID)
	u.event(s, r.ID, e.Last)
	if e.Message != nil && s.TaskStatus != nil {
		u.message(s, r.ID, Message{ID: newID(), Content: e.Message, StreamingStatus: "DONE"})
	}
	switch {
	case head && s.Queued > 0:
		u.promote(s)
	case head:
		s.HeadRunID = nil
		phase := e.Phase
		if phase == "" {
			phase = PhaseIdle
		}
		u.event(s, r.ID, statusEvent(phase))
	case waited:
		s.Queued--
		s.dirty = true
	}
	if r.ParentRunID != nil {
		if parent := u.runs[*r.ParentRunID]; !parent.final() {
			parent.OpenChildren--
			u.wake(parent, db.WaitKindChildren)
		}
	}
	return nil
}

// laneTurn is a turn that waits in a lane: loaded, made in this unit, or known
// by its header alone.
type laneTurn struct {
	header db.UnitLaneNextRow
	row    *runRow
}

// next finds the turn that follows the head of s.
func (u *unit) next(s *sessionRow) (laneTurn, error) {
	if l, ok := u.laneNext[s.ID]; ok {
		row := u.runs[l.ID]
		if row != nil && !row.behind() {
			return laneTurn{}, errRequeue // it moved in this very unit
		}
		return laneTurn{l, row}, nil
	}
	var first *runRow
	known := 0
	for _, row := range u.newRuns { // accepted in this very unit, in order
		if row.SessionID == s.ID && row.InLane && row.behind() {
			if first == nil {
				first = row
			}
			known++
		}
	}
	if first == nil || known < int(s.Queued) {
		return laneTurn{}, errRequeue // one that the unit does not know, or that others hold, comes before
	}
	return laneTurn{row: first}, nil
}

// promote makes the next turn of the lane its head.
func (u *unit) promote(s *sessionRow) {
	t, err := u.next(s)
	if err != nil {
		panic(err) // canEnd has asked
	}
	s.Queued--
	s.dirty = true
	id := t.header.ID
	if t.row != nil {
		id = t.row.ID
		u.enqueue(t.row, u.starts(t.row))
	} else if h := t.header; u.gate.admits(h.Queue, h.TenantID, h.Agent) {
		u.admitted = append(u.admitted, id)
		u.nudges = append(u.nudges, nudge{id, h.Kind, h.Queue})
	} else {
		u.ready = append(u.ready, id)
		u.changes.ready = true
	}
	delete(u.laneNext, s.ID) // the snapshot knows one turn
	s.HeadRunID = &id
	u.event(s, id, statusEvent(PhaseThinking))
}

// wake notes that something happened which a run may wait for, and queues it
// again when that was it. The counter grows whatever the state, so that a park
// which has not seen it fails.
func (u *unit) wake(r *runRow, by db.WaitKind) {
	r.WakeSeq++
	r.dirty = true
	if r.State != db.RunStateWaiting || orWait(r.WaitsFor) != by {
		return
	}
	if by == db.WaitKindChildren && r.OpenChildren > 0 {
		return
	}
	u.waitDrop = append(u.waitDrop, r.ID)
	u.enqueue(r, u.starts(r))
}
