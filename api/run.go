package api

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/jobs/bus"
)

// Run is one durable piece of work, as callers see it. What does not apply is
// left out.
type Run struct {
	RunID           string `json:"runId"`
	Kind            string `json:"kind" jsonschema:"enum=turn,enum=spawn,enum=graph,enum=graph_node,enum=cron,enum=wake_gate,enum=memory_sweep,enum=delivery"`
	State           string `json:"state" jsonschema:"enum=queued,enum=running,enum=waiting,enum=completed,enum=failed,enum=cancelled,enum=killed,enum=timed_out,enum=orphaned,enum=poisoned"`
	AgentID         string `json:"agentId"`
	SessionID       string `json:"sessionId,omitempty" jsonschema_description:"As its client calls the session, else its conversationRef."`
	ConversationRef string `json:"conversationRef,omitempty"`
	TurnID          string `json:"turnId,omitempty"`
	RootRunID       string `json:"rootRunId"`
	ParentRunID     string `json:"parentRunId,omitempty"`
	Depth           int32  `json:"depth"`
	WorkerID        string `json:"workerId,omitempty"`
	Epoch           int32  `json:"epoch" jsonschema_description:"How often a worker has claimed the run."`
	Losses          int32  `json:"losses" jsonschema_description:"Workers that died at the step that is due."`
	EndReason       string `json:"endReason,omitempty"`
	Error           string `json:"error,omitempty"`
	WaitsFor        string `json:"waitsFor,omitempty"`
	StepsExecuted   int32  `json:"stepsExecuted" jsonschema_description:"Model calls."`
	DeadlineAt      string `json:"deadlineAt,omitempty"`
	CreatedAt       string `json:"createdAt"`
	StartedAt       string `json:"startedAt,omitempty"`
	FinishedAt      string `json:"finishedAt,omitempty"`
}

// runOf makes the wire's run of a row.
func runOf(r *db.RunViewRow) Run {
	out := Run{
		RunID: runID(r.ID), Kind: string(r.Kind), State: string(r.State), AgentID: r.Agent, ConversationRef: r.ConversationRef,
		RootRunID: runID(r.RootRunID), Depth: r.Depth, Epoch: r.Epoch, Losses: r.Losses, EndReason: orEmpty(r.EndReason),
		WaitsFor: string(orEmpty(r.WaitsFor)), StepsExecuted: r.ModelCalls, DeadlineAt: timestampOf(r.DeadlineAt), CreatedAt: timestamp(r.CreatedAt),
		StartedAt: timestampOf(r.StartedAt), FinishedAt: timestampOf(r.FinishedAt),
	}
	switch {
	case r.ExternalID != nil:
		out.SessionID = *r.ExternalID
	case r.IsTask:
		out.SessionID = r.SessionID.String()
	default:
		out.SessionID = r.ConversationRef
	}
	if r.Kind == db.RunKindTurn {
		out.TurnID = turnID(r.ID)
	}
	if r.ParentRunID != nil {
		out.ParentRunID = runID(*r.ParentRunID)
	}
	if r.WorkerID != nil {
		out.WorkerID = r.WorkerID.String()
	}
	var c jobs.ErrorContent
	if len(r.Error) > 0 && json.Unmarshal(r.Error, &c) == nil {
		out.Error = c.Kind + ": " + c.Message
	}
	return out
}

// RunListParams are the parameters of run.list. What is absent does not
// restrict.
type RunListParams struct {
	State     string    `json:"state" jsonschema:"enum=queued,enum=running,enum=waiting,enum=completed,enum=failed,enum=cancelled,enum=killed,enum=timed_out,enum=orphaned,enum=poisoned"`
	Kind      string    `json:"kind" jsonschema:"enum=turn,enum=spawn,enum=graph,enum=graph_node,enum=cron,enum=wake_gate,enum=memory_sweep,enum=delivery"`
	AgentID   string    `json:"agentId"`
	SessionID SessionID `json:"sessionId" jsonschema_description:"As that of agent.request."`
	RootRunID string    `json:"rootRunId" jsonschema_description:"The runs of a tree, its root included." jsonschema:"maxLength=64"`
	Limit     int       `json:"limit" jsonschema:"minimum=1,maximum=100,default=20"`
	Cursor    string    `json:"cursor" jsonschema_description:"nextCursor of the page before." jsonschema:"maxLength=64"`
}

// RunListResult is the result of run.list.
type RunListResult struct {
	Runs       []Run  `json:"runs" jsonschema_description:"The newest first."`
	NextCursor string `json:"nextCursor,omitempty" jsonschema_description:"There may be more."`
}

func (s *Server) defineRunList() Method {
	return Define("run.list", ScopeAdmin, "Lists the runs of the tenant.", s.runList, Ours, ReadOnly)
}

func (s *Server) runList(ctx context.Context, p *RunListParams) (*RunListResult, error) {
	r := &RunListResult{Runs: []Run{}}
	arg := db.RunListParams{
		TenantID: callerFrom(ctx).TenantID, State: db.RunState(p.State), Kind: db.RunKind(p.Kind), Agent: p.AgentID, MaxRows: p.Limit + 1,
	}
	if p.Cursor != "" {
		raw, err := base64.RawURLEncoding.DecodeString(p.Cursor)
		if err == nil {
			err = arg.Before.UnmarshalBinary(raw)
		}
		if err != nil || arg.Before == uuid.Nil {
			return nil, &InvalidError{Field: "cursor", Reason: "invalid", Message: "is not the nextCursor of a page"}
		}
	}
	if p.RootRunID != "" {
		id, err := parseRunID(p.RootRunID)
		if err != nil {
			return r, nil //nolint:nilerr // a root that cannot exist has no runs
		}
		arg.RootRunID = id
	}
	if p.SessionID != "" {
		id, err := s.findSession(ctx, arg.TenantID, string(p.SessionID))
		if err != nil || id == uuid.Nil {
			return r, err
		}
		arg.SessionID = id
	}
	rows, err := s.queries.RunList(ctx, s.pool, arg)
	if err != nil {
		return nil, fmt.Errorf("list runs: %w", err)
	}
	if len(rows) > p.Limit {
		rows = rows[:p.Limit]
		last := rows[p.Limit-1].ID
		r.NextCursor = base64.RawURLEncoding.EncodeToString(last[:])
	}
	for i := range rows {
		r.Runs = append(r.Runs, runOf(&rows[i]))
	}
	return r, nil
}

// RunGetParams are the parameters of run.get.
type RunGetParams struct {
	RunID        string `json:"runId" jsonschema:"required,maxLength=64"`
	WaitMs       int64  `json:"waitMs" jsonschema:"minimum=0,maximum=60000,default=0" jsonschema_description:"How long to wait for a change."`
	AfterVersion *int64 `json:"afterVersion" jsonschema_description:"The version that is known; absent means the current one."`
}

// RunGetResult is the result of run.get.
type RunGetResult struct {
	Run
	Version int64     `json:"version" jsonschema_description:"Grows with every change of the run."`
	Steps   []RunStep `json:"steps"`
}

// RunStep is one recorded call of a run.
type RunStep struct {
	Seq        int32  `json:"seq"`
	Kind       string `json:"kind"`
	Status     string `json:"status"`
	Tool       string `json:"tool,omitempty"`
	CallID     string `json:"callId,omitempty"`
	Attempt    int32  `json:"attempt"`
	StartedAt  string `json:"startedAt,omitempty"`
	FinishedAt string `json:"finishedAt,omitempty"`
	Error      string `json:"error,omitempty"`
}

func (s *Server) defineRunGet() Method {
	return Define("run.get", ScopeRPC|ScopeAdmin, "Returns a run with its steps, also once it has changed.", s.runGet, Ours, ReadOnly, Describe(
		"With waitMs the answer waits until version passes afterVersion, the run has ended or the time is over. "+
			"With scope `rpc` alone, only runs of trees that the token started are there."))
}

// runPoll is how often a waiting run.get looks at the run: steps are committed
// without a notification.
const runPoll = 250 * time.Millisecond

func (s *Server) runGet(ctx context.Context, p *RunGetParams) (*RunGetResult, error) {
	id, err := parseRunID(p.RunID)
	if err != nil {
		return nil, err
	}
	row, err := s.visibleRun(ctx, id, p.RunID)
	if err != nil {
		return nil, err
	}
	if p.WaitMs > 0 {
		after := versionOf(row)
		if p.AfterVersion != nil {
			after = *p.AfterVersion
		}
		if row, err = s.awaitVersion(ctx, row, p.RunID, after, time.Duration(p.WaitMs)*time.Millisecond); err != nil {
			return nil, err
		}
	}
	steps, err := s.queries.RunStepList(ctx, s.pool, id)
	if err != nil {
		return nil, fmt.Errorf("steps of run %s: %w", id, err)
	}
	r := &RunGetResult{Run: runOf(row), Version: versionOf(row), Steps: make([]RunStep, len(steps))}
	for i, st := range steps {
		r.Steps[i] = RunStep{
			Seq: st.Seq, Kind: string(st.Kind), Status: string(st.Status), CallID: st.CallID, Attempt: st.Attempt,
			StartedAt: timestamp(st.StartedAt), FinishedAt: timestampOf(st.FinishedAt), Error: st.Error,
		}
		if st.Kind != db.StepKindModel {
			r.Steps[i].Tool = st.Name
		}
	}
	return r, nil
}

// visibleRun reads a run that the caller may see. Error: *NotFoundError.
func (s *Server) visibleRun(ctx context.Context, id uuid.UUID, as string) (*db.RunViewRow, error) {
	caller := callerFrom(ctx)
	row, err := s.queries.RunView(ctx, s.pool, db.RunViewParams{TenantID: caller.TenantID, ID: id})
	if errors.Is(err, pgx.ErrNoRows) || err == nil && !mayTouch(ctx, row.OwnerToken) {
		return nil, &NotFoundError{"run", as}
	} else if err != nil {
		return nil, fmt.Errorf("run %s: %w", id, err)
	}
	return &row, nil
}

// mayTouch reports whether the caller may see and cancel a run: on the admin
// route every run of its tenant, else those of trees that the token started.
func mayTouch(ctx context.Context, owner *string) bool {
	return onAdminRoute(ctx) || owner != nil && *owner == callerFrom(ctx).TokenID
}

// awaitVersion waits until a run's version passes one that is known.
func (s *Server) awaitVersion(ctx context.Context, row *db.RunViewRow, as string, after int64, limit time.Duration) (*db.RunViewRow, error) {
	sub := s.runs.Bus().Subscribe(bus.RunEnded, row.ID)
	defer sub.Close()
	over := time.NewTimer(limit)
	defer over.Stop()
	poll := time.NewTicker(runPoll)
	defer poll.Stop()
	for {
		var err error
		if row, err = s.visibleRun(ctx, row.ID, as); err != nil {
			return nil, err
		}
		if row.FinishedAt != nil || versionOf(row) > after {
			return row, nil
		}
		select {
		case <-sub.C:
		case <-poll.C:
		case <-over.C:
			return row, nil
		case <-s.waiting.Done():
			return row, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// versionOf grows with every change of a run that a caller can see: claims,
// wake-ups and completed steps are counted, and between two of them a run moves
// from running to waiting, to queued, to its end, never back.
func versionOf(r *db.RunViewRow) int64 {
	place := map[db.RunState]int64{db.RunStateRunning: 1, db.RunStateWaiting: 2, db.RunStateQueued: 3}[r.State]
	if r.FinishedAt != nil {
		place = 4
	}
	return (int64(r.Epoch)+int64(r.WakeSeq)+int64(r.Steps))*8 + place
}

// RunCancelParams are the parameters of run.cancel.
type RunCancelParams struct {
	RunID  string `json:"runId" jsonschema:"required,maxLength=64"`
	Reason string `json:"reason" jsonschema_extras:"x-max-bytes=1024" jsonschema_description:"Why, for people."`
}

// RunCancelResult is the result of run.cancel.
type RunCancelResult struct {
	RunID  string `json:"runId"`
	Status string `json:"status" jsonschema:"enum=cancelling,enum=cancelled,enum=already_ended"`
	State  string `json:"state" jsonschema:"enum=queued,enum=running,enum=waiting,enum=completed,enum=failed,enum=cancelled,enum=killed,enum=timed_out,enum=orphaned,enum=poisoned"`
}

func (s *Server) defineRunCancel() Method {
	return Define("run.cancel", ScopeRPC|ScopeAdmin, "Asks a run to end at its next safe point.", s.runCancel, Ours, Describe(
		"A queued or waiting run ends at once, and so do its sub-agents. Repeating it changes nothing. "+
			"With scope `rpc` alone, only runs of trees that the token started are there."))
}

func (s *Server) runCancel(ctx context.Context, p *RunCancelParams) (*RunCancelResult, error) {
	id, err := parseRunID(p.RunID)
	if err != nil {
		return nil, err
	}
	tenant := callerFrom(ctx).TenantID
	if !onAdminRoute(ctx) {
		owner, err := s.queries.RunOwner(ctx, s.reading(ctx), db.RunOwnerParams{TenantID: tenant, ID: id})
		if errors.Is(err, pgx.ErrNoRows) || err == nil && !mayTouch(ctx, owner) {
			return nil, &NotFoundError{"run", p.RunID}
		} else if err != nil {
			return nil, fmt.Errorf("run %s: %w", id, err)
		}
	}
	c, err := s.runs.Cancel(ctx, tenant, id, p.Reason)
	if err != nil {
		return nil, asWritten(err, p.RunID)
	}
	return &RunCancelResult{RunID: runID(id), Status: c.Status, State: string(c.State)}, nil
}

// asWritten makes a missing run the one that the caller has named.
func asWritten(err error, id string) error {
	if e, ok := errors.AsType[*jobs.NotFoundError](err); ok && e.Kind == "run" {
		return &NotFoundError{"run", id}
	}
	return err
}

// RunReleaseParams are the parameters of run.release.
type RunReleaseParams struct {
	RunID string `json:"runId" jsonschema:"required,maxLength=64"`
}

// RunReleaseResult is the result of run.release.
type RunReleaseResult struct {
	RunID   string `json:"runId" jsonschema_description:"The new run."`
	RetryOf string `json:"retryOf"`
}

func (s *Server) defineRunRelease() Method {
	return Define("run.release", ScopeAdmin, "Starts a new run in place of a poisoned one.", s.runRelease, Ours, Describe(
		"Its completed steps are copied and not made again; a call that had started and did not end is. "+
			"A second release of a run within 24 hours answers with the first."))
}

// runRelease retries a poisoned run. Errors: *NotFoundError, *jobs.StateError,
// *InvalidError of the agent.
func (s *Server) runRelease(ctx context.Context, p *RunReleaseParams) (*RunReleaseResult, error) {
	id, err := parseRunID(p.RunID)
	if err != nil {
		return nil, err
	}
	tenant := callerFrom(ctx).TenantID
	row, err := s.queries.RunGet(ctx, s.reading(ctx), db.RunGetParams{TenantID: tenant, ID: id})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, &NotFoundError{"run", p.RunID}
	} else if err != nil {
		return nil, fmt.Errorf("run %s: %w", id, err)
	}
	if row.State != db.RunStatePoisoned {
		return nil, &jobs.StateError{ID: id, State: row.State, Want: string(db.RunStatePoisoned)}
	}
	terms, err := s.terms(ctx, tenant, row.Agent, cmp.Or(orEmpty(row.UserID), "-")) // it was asked for its user when it was accepted
	if err != nil {
		return nil, err
	}
	a, err := s.runs.Retry(ctx, jobs.RetryParams{TenantID: tenant, RunID: id, Terms: terms})
	if err != nil {
		return nil, asWritten(err, p.RunID)
	}
	return &RunReleaseResult{RunID: runID(a.RunID), RetryOf: runID(id)}, nil
}

// RunKillParams are the parameters of run.kill.
type RunKillParams struct {
	RootRunID string `json:"rootRunId" jsonschema:"required,maxLength=64"`
}

// RunKillResult is the result of run.kill.
type RunKillResult struct {
	Killed int `json:"killed" jsonschema_description:"Runs that it ended; 0 if all had ended."`
}

func (s *Server) defineRunKill() Method {
	return Define("run.kill", ScopeAdmin, "Ends every run of a tree at once.", s.runKill, Describe(
		"Running and queued ones too, at any depth. Nothing is spawned in the tree afterwards, and what its workers still bring is refused."))
}

func (s *Server) runKill(ctx context.Context, p *RunKillParams) (*RunKillResult, error) {
	id, err := parseRunID(p.RootRunID)
	if err != nil {
		return nil, err
	}
	n, err := s.runs.Kill(ctx, callerFrom(ctx).TenantID, id)
	if _, ok := errors.AsType[*jobs.StateError](err); ok {
		return nil, &InvalidError{Field: "rootRunId", Reason: "not_a_root", Message: "names a run that is part of a tree"}
	}
	if err != nil {
		return nil, asWritten(err, p.RootRunID)
	}
	return &RunKillResult{Killed: n}, nil
}
