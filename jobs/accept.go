package jobs

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs/tracing"
)

// Terms are what an agent's configuration says about accepting a turn.
type Terms struct {
	Agent       string
	Version     int32
	TurnTimeout time.Duration
	QueueCap    int // turns that may wait in a session
}

// AcceptParams are one turn to be accepted.
type AcceptParams struct {
	TenantID string
	// SessionID addresses an existing session. uuid.Nil means Session, found by
	// its names or made.
	SessionID uuid.UUID
	Session   SessionSpec
	// Fresh says that Session is new for certain, so nothing is looked up.
	Fresh bool
	// Terms gives the agent's terms; bound is the agent of an existing session,
	// "" for a new one.
	Terms      func(ctx context.Context, bound string) (Terms, error)
	UserID     string
	OwnerToken string
	Input      json.RawMessage // the run's input, and the content of its agent.request event
	Message    *Message        // the user's message of an Agentex task
	Queue      string          // "" means QueueTurns

	// Idempotency: a key within a scope, and the digest of what it stands for.
	KeyScope, Key string
	Digest        []byte
}

// Accepted says what became of an accepted turn.
type Accepted struct {
	RunID           uuid.UUID `json:"run_id"`
	SessionID       uuid.UUID `json:"session_id"`
	ConversationRef string    `json:"conversation_ref"`
	Agent           string    `json:"agent"`
	Seq             int64     `json:"seq"`      // of the agent.request event
	Phase           string    `json:"phase"`    // thinking, or queued behind other turns
	Position        int       `json:"position"` // in the queue; 1 is next, 0 is not queued
	Duplicate       bool      `json:"-"`        // a repeat of a stored acceptance
}

// Accept commits a turn: its request event, its run and, unless turns of the
// session wait before it, its job; all or none. Errors: *BusyError,
// *ConflictError, *SessionAgentError, *TaskEndedError, *NotFoundError,
// *UnavailableError, and those of p.Terms.
func (r *Runs) Accept(ctx context.Context, p AcceptParams) (*Accepted, error) {
	if p.SessionID != uuid.Nil {
		var s db.Session
		err := r.repeat(ctx, func() (err error) {
			s, err = r.queries.SessionGet(ctx, r.pool, db.SessionGetParams{TenantID: p.TenantID, ID: p.SessionID})
			return err
		})
		if errors.Is(err, pgx.ErrNoRows) {
			return nil, &NotFoundError{"session", p.SessionID.String()}
		} else if err != nil {
			return nil, err
		}
		out, err := r.acceptIn(ctx, p, &FoundSession{s.ID, s.Agent, s.ConversationRef})
		if refused, ok := errors.AsType[*termsError](err); ok {
			err = refused.error
		}
		return out, err
	}
	// A name not seen before is taken for that of a new session, until its insert
	// or its agent's terms make us look.
	name := nameOf(p.TenantID, p.Session)
	found, looked := r.known.get(name), p.Fresh
	for {
		out, err := r.acceptIn(ctx, p, found)
		if err == nil {
			if found == nil && !p.Fresh {
				r.known.put(name, FoundSession{out.SessionID, out.Agent, out.ConversationRef})
			}
			return out, nil
		}
		_, gone := errors.AsType[*NotFoundError](err)
		stale := errors.Is(err, errSessionExists) || gone && found != nil
		refused, isTerms := errors.AsType[*termsError](err)
		if isTerms {
			err = refused.error
		}
		if !stale && (!isTerms || looked || found != nil) {
			return nil, err
		}
		r.known.forget(name)
		now, lookErr := r.findByNames(ctx, p.TenantID, p.Session)
		if lookErr != nil {
			return nil, lookErr
		}
		if now == nil && !stale {
			return nil, err
		}
		if found, looked = now, true; found != nil {
			r.known.put(name, *found)
		}
	}
}

// termsError says that an agent takes no such turn.
type termsError struct{ error }

// acceptIn commits a turn in a session that exists, or in a new one when found
// is nil. Errors, beside those of Accept: *termsError, errSessionExists.
func (r *Runs) acceptIn(ctx context.Context, p AcceptParams, found *FoundSession) (*Accepted, error) {
	o := &acceptOp{p: p, masker: r.masker, traceparent: tracing.Parent(ctx)}
	var bound string
	if found != nil {
		o.session, bound = found.ID, found.Agent
	}
	terms, err := p.Terms(ctx, bound)
	if err != nil {
		return nil, &termsError{err}
	}
	o.terms = terms
	if bound != "" && terms.Agent != bound {
		return nil, &SessionAgentError{bound}
	}
	o.prepare()
	if err := r.committer.do(ctx, o); err != nil {
		return nil, err
	}
	return &o.out, nil
}

type acceptOp struct {
	p       AcceptParams
	terms   Terms
	masker  Masker
	session uuid.UUID // existing, or minted for create
	create  *newSession
	key     *keyClaim
	run     uuid.UUID
	request Event
	message *Message
	out     Accepted
	// traceparent is the trace that the run goes on with.
	traceparent string
}

// prepare mints the ids, so that a repeated unit repeats the same change.
func (o *acceptOp) prepare() {
	o.run = newID()
	o.request = Event{EventRequest, o.masker.Bytes(o.p.Input)}
	if o.p.Message != nil {
		m := *o.p.Message
		m.Content = o.masker.Bytes(m.Content)
		o.message = &m
	}
	if o.session == uuid.Nil {
		if o.session = o.p.Session.ID; o.session == uuid.Nil {
			o.session = newID()
		}
		o.create = newSessionOf(o.p.TenantID, o.session, o.terms.Agent, o.p.Session)
		o.create.opening = openingOf(o.run)
		if o.message != nil {
			o.create.MessageSeq = 1
		}
	}
	if o.p.Key != "" {
		o.key = &keyClaim{tenant: o.p.TenantID, scope: o.p.KeyScope, key: o.p.Key, digest: o.p.Digest, run: o.run}
	}
}

func (o *acceptOp) lane() uuid.UUID { return o.session }

func (o *acceptOp) size() int { return 2 * len(o.request.Content) }

func (o *acceptOp) needs(n *needs) {
	n.gate = true
	if o.key != nil {
		n.keys = append(n.keys, o.key)
	}
	if o.create != nil {
		n.create = append(n.create, o.create)
	} else {
		n.sessions = append(n.sessions, o.session)
	}
}

func (o *acceptOp) apply(u *unit) (err error) {
	if o.key != nil {
		holder := u.keys[o.key.id()]
		if orZero(holder.RunID) != o.run {
			if len(holder.Result) == 0 { // another op of this unit claims it, and may yet be refused
				return errRequeue
			}
			if !bytes.Equal(holder.Digest, o.key.digest) {
				return &ConflictError{o.key.key}
			}
			o.out = Accepted{}
			if err := json.Unmarshal(holder.Result, &o.out); err != nil {
				return err
			}
			o.out.Duplicate = true
			return nil
		}
		defer func() {
			if err != nil {
				u.dropKeys = append(u.dropKeys, o.key) // what is refused is not stored
			}
		}()
	}
	queue := o.p.Queue
	if queue == "" {
		queue = QueueTurns
	}
	s, ok := u.sessions[o.session]
	switch {
	case !ok && o.create != nil:
		return errSessionExists
	case !ok:
		return errRowHeld
	case s.TaskStatus != nil && *s.TaskStatus != "RUNNING" && *s.TaskStatus != "INTERRUPTED":
		return &TaskEndedError{s.ID, *s.TaskStatus}
	case s.HeadRunID != nil && int(s.Queued) >= o.terms.QueueCap:
		return &BusyError{int(s.Queued)}
	}
	starts := s.HeadRunID == nil && u.gate.admits(queue, s.TenantID, o.terms.Agent)
	if s.HeadRunID == nil && !starts && !u.gate.mayWait(queue) {
		return &FullError{queue}
	}

	run := &runRow{created: true, input: o.request.Content, traceparent: o.traceparent}
	run.UnitRunLockRow = db.UnitRunLockRow{
		ID: o.run, TenantID: s.TenantID, Kind: db.RunKindTurn, State: db.RunStateQueued, Queue: queue, RootRunID: o.run,
		Agent: o.terms.Agent, AgentVersion: o.terms.Version, SessionID: s.ID, InLane: true, UserID: notEmpty(o.p.UserID),
		OwnerToken: notEmpty(o.p.OwnerToken), TimeLeftMs: o.terms.TurnTimeout.Milliseconds(),
	}
	run.RequestSeq = u.event(s, run.ID, o.request)
	if o.message != nil {
		u.message(s, run.ID, *o.message)
		if s.TaskStatus != nil && *s.TaskStatus == "INTERRUPTED" {
			u.taskStatus(s, "RUNNING", "Task resumed on next turn")
		}
	}
	s.turns++
	o.out = Accepted{RunID: run.ID, SessionID: s.ID, ConversationRef: s.ConversationRef, Agent: o.terms.Agent, Seq: run.RequestSeq}
	u.enlist(s, run, &o.out, starts)
	u.newRuns = append(u.newRuns, run)
	if o.key != nil {
		stored, err := json.Marshal(o.out)
		if err != nil {
			return err
		}
		k := &u.put.keys
		k.TenantIds, k.Scopes = append(k.TenantIds, o.key.tenant), append(k.Scopes, o.key.scope)
		k.Keys, k.Results = append(k.Keys, o.key.key), append(k.Results, string(stored))
	}
	return nil
}

// enlist puts a new run into its session's lane: in the queue behind others, or
// at its head, where it starts or waits for admission.
func (u *unit) enlist(s *sessionRow, run *runRow, out *Accepted, starts bool) {
	s.dirty = true
	if s.HeadRunID == nil {
		s.HeadRunID = &run.ID
		out.Phase = PhaseThinking
		u.event(s, run.ID, statusEvent(PhaseThinking))
		u.enqueue(run, starts)
		return
	}
	s.Queued++
	out.Phase, out.Position = PhaseQueued, int(s.Queued)
}

func (u *unit) taskStatus(s *sessionRow, status, reason string) {
	s.TaskStatus = &status
	t := &u.put.tasks
	t.Ids, t.Statuses, t.Reasons = append(t.Ids, s.ID), append(t.Statuses, status), append(t.Reasons, reason)
}

// The phases of a session (RC-143).
const (
	PhaseIdle       = "idle"
	PhaseQueued     = "queued"
	PhaseThinking   = "thinking"
	PhaseToolWait   = "tool_wait"
	PhaseApproval   = "approval"
	PhaseClarify    = "clarify"
	PhaseCancelling = "cancelling"
)

var statusContents = func() map[string]json.RawMessage {
	m := map[string]json.RawMessage{}
	for _, p := range []string{PhaseIdle, PhaseQueued, PhaseThinking, PhaseToolWait, PhaseApproval, PhaseClarify, PhaseCancelling} {
		m[p] = json.RawMessage(`{"phase":"` + p + `"}`)
	}
	return m
}()

func statusEvent(phase string) Event { return Event{EventStatus, statusContents[phase]} }

func notEmpty(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// Ref locates the accepted run.
func (a *Accepted) Ref() Ref { return Ref{ID: a.RunID, Session: a.SessionID} }
