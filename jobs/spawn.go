package jobs

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/google/uuid"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs/tracing"
)

// SpawnParams are a sub-agent's run to be added to a tree.
type SpawnParams struct {
	Terms Terms
	Spec  SessionSpec // of the child's own session
	Input json.RawMessage
	// Step records the spawn in the parent; it commits with the child.
	Step Step
	// Limits of the tree, checked in the spawning transaction.
	MaxDepth, MaxChildren int
}

// LimitError refuses a spawn that would pass a limit of the tree.
type LimitError struct {
	Limit string
	Max   int
}

func (e *LimitError) Error() string { return fmt.Sprintf("%s is limited to %d", e.Limit, e.Max) }

// Spawn adds a child to a live run, with the step that asked for it: both or
// neither. The repeat of a spawn whose step is stored already makes no second
// child. Errors: ErrFenced, also when the tree is killed; ErrLookAgain when the
// parent is to be cancelled; *LimitError.
func (r *Runs) Spawn(ctx context.Context, parent *Run, p SpawnParams) (uuid.UUID, error) {
	for _, st := range parent.Steps {
		if st.Seq == p.Step.Seq && st.Status == db.StepStatusDone {
			return childOf(st)
		}
	}
	o := &spawnOp{parent: parent.copy(), p: p, child: newID(), session: newID()}
	o.p.Step.Output = json.RawMessage(`{"runId":"run_` + o.child.String() + `"}`)
	o.input = r.masker.Bytes(p.Input)
	o.traceparent = cmp.Or(tracing.Parent(ctx), parent.Traceparent)
	err := r.committer.do(ctx, o)
	if err == nil {
		parent.WakeSeq = o.wakeSeq
		parent.note(p.Step.Seq, db.StepStatusDone)
	}
	return o.child, err
}

// childOf reads the child from the step of its spawn.
func childOf(st Step) (uuid.UUID, error) {
	var output struct {
		RunID string `json:"runId"`
	}
	if err := json.Unmarshal(st.Output, &output); err != nil {
		return uuid.Nil, fmt.Errorf("step %d is no spawn: %w", st.Seq, err)
	}
	return uuid.Parse(strings.TrimPrefix(output.RunID, "run_"))
}

type spawnOp struct {
	parent         *Run
	p              SpawnParams
	input          json.RawMessage
	child, session uuid.UUID
	traceparent    string
	wakeSeq        int32
}

func (o *spawnOp) lane() uuid.UUID { return o.parent.SessionID }

func (o *spawnOp) size() int { return 2 * len(o.input) }

func (o *spawnOp) needs(n *needs) {
	s := newSessionOf(o.parent.TenantID, o.session, o.p.Terms.Agent, o.p.Spec)
	s.opening = openingOf(o.child)
	n.create = append(n.create, s)
	n.gate = true
	n.sessions = append(n.sessions, o.parent.SessionID)
	n.runs = append(n.runs, o.parent.ID, o.parent.RootRunID)
}

func (o *spawnOp) apply(u *unit) error {
	root, err := u.run(o.parent.RootRunID)
	if err != nil {
		return err
	}
	parent, _, err := u.owned(o.parent.ID, o.parent.Epoch)
	if err != nil {
		return err
	}
	if root.KilledAt != nil {
		return ErrFenced
	}
	if parent.CancelRequestedAt != nil {
		return ErrLookAgain // its sub-agents have ended with the cancel
	}
	if int(parent.Depth)+1 > o.p.MaxDepth {
		return &LimitError{"depth", o.p.MaxDepth}
	}
	if int(parent.OpenChildren)+1 > o.p.MaxChildren {
		return &LimitError{"children", o.p.MaxChildren}
	}
	s, err := u.session(o.session)
	if err != nil {
		return errSessionExists
	}
	child := &runRow{created: true, input: o.input, traceparent: o.traceparent}
	child.UnitRunLockRow = db.UnitRunLockRow{
		ID: o.child, TenantID: parent.TenantID, Kind: db.RunKindSpawn, State: db.RunStateQueued, Queue: queueOf(db.RunKindSpawn),
		RootRunID: root.ID, ParentRunID: &parent.ID, Depth: parent.Depth + 1, Agent: o.p.Terms.Agent, AgentVersion: o.p.Terms.Version,
		SessionID: s.ID, InLane: true, UserID: parent.UserID, TimeLeftMs: o.p.Terms.TurnTimeout.Milliseconds(),
	}
	child.RequestSeq = u.event(s, child.ID, Event{EventRequest, o.input})
	s.turns++
	var out Accepted
	u.enlist(s, child, &out, s.HeadRunID == nil && u.starts(child))
	u.newRuns = append(u.newRuns, child)
	parent.OpenChildren++
	parent.Steps, parent.ModelCalls = o.parent.done+1, o.parent.ModelCalls
	parent.progressed()
	parent.dirty = true
	st := o.p.Step
	st.Kind, st.Status = db.StepKindSpawn, db.StepStatusDone
	u.step(parent, &st, o.parent.started[st.Seq])
	o.wakeSeq = parent.WakeSeq
	return nil
}
