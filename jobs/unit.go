package jobs

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs/bus"
)

// An op is one change to the state machine. Ops of one unit are judged one
// after another on rows that the unit has locked, so each sees what those
// before it did.
type op interface {
	// lane groups what must keep its order: ops with one lane go through one
	// writer. It is the run's session.
	lane() uuid.UUID
	// needs names the rows the op wants locked or read.
	needs(n *needs)
	// apply judges and changes rows in memory. An error means that it changed
	// nothing. It runs again when its unit has to be repeated.
	apply(u *unit) error
}

// needs collects what a unit must lock and read before it can judge.
type needs struct {
	sessions, runs []uuid.UUID
	ending         []uuid.UUID // sessions in whose lane a turn may end
	create         []*newSession
	keys           []*keyClaim
	usage          []usageKey
	waits          []uuid.UUID // runs whose wait may be over
	gate           bool        // something may be queued
}

type usageKey struct {
	run    uuid.UUID
	callID string
}

// keyClaim is an idempotency key that wants to belong to run.
type keyClaim struct {
	tenant, scope, key string
	digest             []byte
	run                uuid.UUID
}

func (k *keyClaim) id() [3]string { return [3]string{k.tenant, k.scope, k.key} }

// A unit is one transaction of the committer: rows under lock, changed by ops
// in memory, written back set by set.
type unit struct {
	now   time.Time // weir_now()
	clock time.Time // clock_timestamp(), for nudges
	xid   string

	pooled bool      // the connection keeps no settings
	fast   *fastPath // of the process

	runs     map[uuid.UUID]*runRow
	sessions map[uuid.UUID]*sessionRow
	gate     gate
	laneNext map[uuid.UUID]db.UnitLaneNextRow
	keys     map[[3]string]db.UnitIdempotencyHoldersRow
	knownUse map[usageKey]bool
	waitDue  map[uuid.UUID]bool

	created  []uuid.UUID // sessions this transaction made
	claimed  []db.UnitClaimRow
	newRuns  []*runRow
	admitted []uuid.UUID // by promotion, rows not loaded
	ready    []uuid.UUID // likewise, but they wait for admission
	dropKeys []*keyClaim
	nudges   []nudge
	waitDrop []uuid.UUID

	put      puts
	putSteps map[stepKey]int   // where in put.steps
	putEnds  map[stepKey]int   // where in put.ends
	putFacts map[[5]string]int // where in put.facts
	changes  changes
	embedded bool // its transaction told the changes
	warm     bool // its rows were known, not read
}

// puts are the rows a unit inserts.
type puts struct {
	events   db.UnitEventInsertParams
	messages db.UnitMessageInsertParams
	steps    db.UnitStepInsertParams
	ends     db.UnitStepUpdateParams
	usage    db.UnitUsageInsertParams
	facts    db.UnitFactPutParams
	waits    db.UnitWaitPutParams
	limits   db.UnitRateLimitPutParams
	tasks    db.UnitTaskStatusParams
	keys     db.UnitIdempotencyResultParams
	copies   db.UnitStepCopyParams
}

// changes are what other processes learn after the commit.
type changes struct {
	ended   []uuid.UUID // runs that reached a final state
	control []uuid.UUID // runs whose worker must look up: cancel, kill
	limits  bool        // a rate limit was set
	waits   bool        // a wait was stored: the timekeeper may be due earlier
	ready   bool        // a run waits for admission
}

type stepKey struct {
	run uuid.UUID
	seq int32
}

type nudge struct {
	run   uuid.UUID
	kind  db.RunKind
	queue string
}

type runRow struct {
	db.UnitRunLockRow
	dirty         bool
	result, fault []byte // stored by the end; never loaded
	created       bool
	input         []byte // of a created run
	retryOf       uuid.UUID
	traceparent   string // of a created run
}

type sessionRow struct {
	db.UnitSessionLockRow
	dirty                       bool
	opened                      *opening // of a session this unit has inserted: how it stands in its table
	turns, modelCalls, tools    int64    // more than stored
	inputTokens, outputs, costs int64
}

// stored says that the session stands in its table as it is in memory.
func (s *sessionRow) stored() bool {
	return !s.dirty || s.opened != nil && s.Queued == 0 && s.modelCalls == 0 && s.turns == 0 &&
		*s.opened == opening{s.EventSeq, s.MessageSeq, orZero(s.HeadRunID), s.opened.Turns}
}

func newUnit() *unit {
	return &unit{
		runs:     map[uuid.UUID]*runRow{},
		sessions: map[uuid.UUID]*sessionRow{},
		putSteps: map[stepKey]int{},
		putEnds:  map[stepKey]int{},
		putFacts: map[[5]string]int{},
	}
}

// run returns a locked run, errRowHeld when another transaction holds it, or
// *NotFoundError when there is none; the last two look alike under SKIP
// LOCKED, so the committer tells them apart by waiting in the end.
func (u *unit) run(id uuid.UUID) (*runRow, error) {
	if r, ok := u.runs[id]; ok {
		return r, nil
	}
	return nil, errRowHeld
}

func (u *unit) session(id uuid.UUID) (*sessionRow, error) {
	if s, ok := u.sessions[id]; ok {
		return s, nil
	}
	return nil, errRowHeld
}

// owned returns a run that this epoch still owns, with its session.
func (u *unit) owned(id uuid.UUID, epoch int32) (*runRow, *sessionRow, error) {
	r, err := u.run(id)
	if err != nil {
		return nil, nil, err
	}
	if r.Epoch != epoch || r.State != db.RunStateRunning {
		return nil, nil, ErrFenced
	}
	s, err := u.session(r.SessionID)
	return r, s, err
}

// begin opens the transaction.
func (u *unit) begin(p *db.Pipeline) {
	p.Begin(&u.xid, &u.now, &u.clock)
	if u.pooled {
		p.Hot()
	}
}

// load opens the transaction on conn, locks and reads. It waits so long for
// each lock; with 0 it passes over rows that others hold.
func (u *unit) load(ctx context.Context, conn *pgx.Conn, n *needs, wait time.Duration) error {
	var (
		p        db.Pipeline
		claimed  []db.UnitIdempotencyClaimRow
		holders  []db.UnitIdempotencyHoldersRow
		created  []uuid.UUID
		sessions []db.UnitSessionLockRow
		runs     []db.UnitRunLockRow
		next     []db.UnitLaneNextRow
		known    []db.UnitUsageKnownRow
		due      []uuid.UUID
		gates    []db.UnitGateRow
	)
	u.begin(&p)
	if wait > 0 {
		p.LockTimeout(wait.String())
	}
	// What can block comes first and in one order for everyone: keys,
	// new sessions. What follows never waits, or holds nothing others wait for.
	if len(n.keys) > 0 {
		slices.SortStableFunc(n.keys, func(a, b *keyClaim) int { // of one key's claims the first counts
			x, y := a.id(), b.id()
			return slices.Compare(x[:], y[:])
		})
		claim, read := keyParams(n.keys)
		p.UnitIdempotencyClaim(claim, &claimed)
		p.UnitIdempotencyHolders(read, &holders)
	}
	if len(n.create) > 0 {
		slices.SortFunc(n.create, func(a, b *newSession) int { return strings.Compare(a.sortKey(), b.sortKey()) })
		p.UnitSessionInsert(sessionParams(n.create), &created)
	}
	if len(n.sessions) > 0 {
		p.UnitSessionLock(distinct(n.sessions), wait > 0, &sessions)
	}
	if len(n.runs) > 0 {
		p.UnitRunLock(distinct(n.runs), wait > 0, &runs)
	}
	if len(n.ending) > 0 {
		p.UnitLaneNext(distinct(n.ending), &next)
	}
	if len(n.usage) > 0 {
		var arg db.UnitUsageKnownParams
		for _, k := range n.usage {
			arg.RunIds, arg.CallIds = append(arg.RunIds, k.run), append(arg.CallIds, k.callID)
		}
		p.UnitUsageKnown(arg, &known)
	}
	if len(n.waits) > 0 {
		p.UnitWaitDue(n.waits, &due)
	}
	if n.gate {
		p.UnitGate(&gates)
	}
	if err := p.Send(ctx, conn); err != nil {
		return err
	}

	u.gate = readGate(gates, u.fast)
	u.hold(sessions, runs)
	u.created = created
	for _, id := range created {
		for _, s := range n.create {
			if s.ID == id {
				u.sessions[id] = s.row()
			}
		}
	}
	u.laneNext = make(map[uuid.UUID]db.UnitLaneNextRow, len(next))
	for _, l := range next {
		u.laneNext[l.SessionID] = l
	}
	u.keys = make(map[[3]string]db.UnitIdempotencyHoldersRow, len(holders))
	for _, h := range holders {
		u.keys[[3]string{h.TenantID, h.Scope, h.Key}] = h
	}
	u.waitDue = make(map[uuid.UUID]bool, len(due))
	for _, id := range due {
		u.waitDue[id] = true
	}
	u.knownUse = make(map[usageKey]bool, len(known))
	for _, k := range known {
		u.knownUse[usageKey{k.RunID, k.CallID}] = true
	}
	return nil
}

func (u *unit) hold(sessions []db.UnitSessionLockRow, runs []db.UnitRunLockRow) {
	for i := range sessions {
		u.sessions[sessions[i].ID] = &sessionRow{UnitSessionLockRow: sessions[i]}
	}
	for i := range runs {
		u.runs[runs[i].ID] = &runRow{UnitRunLockRow: runs[i]}
	}
}

// holdMore locks further rows in the open transaction. It never waits, since
// these come out of order; what others hold stays out.
func (u *unit) holdMore(ctx context.Context, conn *pgx.Conn, sessions, runs []uuid.UUID) error {
	var p db.Pipeline
	var s []db.UnitSessionLockRow
	var r []db.UnitRunLockRow
	p.UnitSessionLock(distinct(sessions), false, &s)
	p.UnitRunLock(distinct(runs), false, &r)
	if err := p.Send(ctx, conn); err != nil {
		return err
	}
	u.hold(s, r)
	return nil
}

// flush inserts the jobs, writes what changed and commits. It reports whether
// COMMIT was on its way when it failed, so that its outcome is unknown.
func (u *unit) flush(ctx context.Context, conn *pgx.Conn, queue *river.Client[pgx.Tx], embed func(*unit) []bus.Notification) (uncertain bool, err error) {
	if len(u.nudges) > 0 {
		jobs := make([]river.InsertManyParams, len(u.nudges))
		for i, n := range u.nudges {
			jobs[i] = river.InsertManyParams{Args: nudgeArgs(n.kind, n.run), InsertOpts: &river.InsertOpts{Queue: n.queue, MaxAttempts: 1}}
		}
		if _, err := queue.InsertManyTx(ctx, openTx{conn}, jobs); err != nil {
			return false, fmt.Errorf("insert nudges: %w", err)
		}
	}
	var p db.Pipeline
	u.write(&p)
	for _, n := range embed(u) {
		p.Notify(n.Channel, n.Payload)
	}
	p.Commit()
	if err := p.Send(ctx, conn); err != nil {
		return isConnError(err), err
	}
	return false, nil
}

func (u *unit) write(p *db.Pipeline) {
	if len(u.dropKeys) > 0 {
		var d db.UnitIdempotencyDropParams
		for _, k := range u.dropKeys {
			d.TenantIds, d.Scopes, d.Keys = append(d.TenantIds, k.tenant), append(d.Scopes, k.scope), append(d.Keys, k.key)
		}
		p.UnitIdempotencyDrop(d)
	}
	if len(u.put.keys.Keys) > 0 {
		p.UnitIdempotencyResult(u.put.keys)
	}
	if len(u.newRuns) > 0 {
		p.UnitRunInsert(runInsertParams(u.newRuns))
	}
	var full db.UnitRunUpdateParams
	for _, r := range u.runs {
		if r.dirty {
			r.appendTo(&full)
		}
	}
	if len(full.Ids) > 0 {
		p.UnitRunUpdate(full)
	}
	if len(u.admitted) > 0 {
		p.UnitRunAdmit(u.admitted)
	}
	if len(u.ready) > 0 {
		p.UnitRunReady(u.ready)
	}
	var sess db.UnitSessionUpdateParams
	for _, s := range u.sessions {
		if !s.stored() {
			s.appendTo(&sess)
		}
	}
	if len(sess.Ids) > 0 {
		p.UnitSessionUpdate(sess)
	}
	var unused []uuid.UUID
	for _, id := range u.created {
		if !u.sessions[id].dirty {
			unused = append(unused, id)
		}
	}
	if len(unused) > 0 {
		p.UnitSessionDrop(unused)
	}
	if len(u.put.tasks.Ids) > 0 {
		p.UnitTaskStatus(u.put.tasks)
	}
	if len(u.put.ends.RunIds) > 0 {
		p.UnitStepUpdate(u.put.ends)
	}
	if len(u.put.steps.RunIds) > 0 {
		p.UnitStepInsert(u.put.steps)
	}
	if len(u.put.copies.OldIds) > 0 {
		p.UnitStepCopy(u.put.copies)
	}
	if len(u.put.events.Seqs) > 0 {
		p.UnitEventInsert(u.put.events)
	}
	if len(u.put.messages.Seqs) > 0 {
		p.UnitMessageInsert(u.put.messages)
	}
	if len(u.put.usage.RunIds) > 0 {
		p.UnitUsageInsert(u.put.usage)
	}
	if len(u.put.facts.Keys) > 0 {
		p.UnitFactPut(u.put.facts)
	}
	if len(u.put.waits.RunIds) > 0 {
		p.UnitWaitPut(u.put.waits)
	}
	if len(u.waitDrop) > 0 { // after: a run may park and be woken in one unit, never the reverse
		p.UnitWaitDrop(u.waitDrop)
	}
	if len(u.put.limits.Keys) > 0 {
		p.UnitRateLimitPut(u.put.limits)
	}
}

// event appends to a session's log under the next number.
func (u *unit) event(s *sessionRow, run uuid.UUID, e Event) int64 {
	s.EventSeq++
	s.dirty = true
	ev := &u.put.events
	ev.SessionIds, ev.Seqs = append(ev.SessionIds, s.ID), append(ev.Seqs, s.EventSeq)
	ev.TenantIds, ev.Types = append(ev.TenantIds, s.TenantID), append(ev.Types, string(e.Type))
	ev.RunIds, ev.Contents = append(ev.RunIds, run), append(ev.Contents, string(e.Content))
	return s.EventSeq
}

// message appends what the Agentex surface shows of a task.
func (u *unit) message(s *sessionRow, run uuid.UUID, m Message) {
	s.MessageSeq++
	s.dirty = true
	ms := &u.put.messages
	ms.SessionIds, ms.Seqs, ms.Ids = append(ms.SessionIds, s.ID), append(ms.Seqs, s.MessageSeq), append(ms.Ids, m.ID)
	ms.TenantIds, ms.RunIds = append(ms.TenantIds, s.TenantID), append(ms.RunIds, run)
	ms.Contents, ms.StreamingStatuses = append(ms.Contents, string(m.Content)), append(ms.StreamingStatuses, m.StreamingStatus)
}

// progressed notes a completed step: whatever went wrong before it is over.
// The step's own row tells how far the run is; the run's counts follow when it
// is written anyway.
func (r *runRow) progressed() {
	if r.Losses != 0 || r.CallAttempts != 0 {
		r.Losses, r.CallAttempts, r.CallLimited, r.dirty = 0, 0, 0, true
	}
	if r.Queue == QueueSuspect {
		r.Queue, r.dirty = queueOf(r.Kind), true
	}
}

func (r *runRow) final() bool { return isFinal(r.State) }

func isFinal(s db.RunState) bool {
	switch s {
	case db.RunStateQueued, db.RunStateRunning, db.RunStateWaiting:
		return false
	default:
		return true
	}
}

var epoch0 = time.Unix(0, 0).UTC() // stands for NULL in timestamp arrays

func orEpoch(t *time.Time) time.Time {
	if t == nil {
		return epoch0
	}
	return *t
}

func orZero(id *uuid.UUID) uuid.UUID {
	if id == nil {
		return uuid.Nil
	}
	return *id
}

func orWait(k *db.WaitKind) db.WaitKind {
	if k == nil {
		return ""
	}
	return *k
}

func orEmpty(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

func (r *runRow) appendTo(p *db.UnitRunUpdateParams) {
	p.Ids = append(p.Ids, r.ID)
	p.States = append(p.States, string(r.State))
	p.WorkerIds = append(p.WorkerIds, orZero(r.WorkerID))
	p.Epochs = append(p.Epochs, r.Epoch)
	p.Queues = append(p.Queues, r.Queue)
	p.WakeSeqs = append(p.WakeSeqs, r.WakeSeq)
	p.Steps = append(p.Steps, r.Steps)
	p.ModelCalls = append(p.ModelCalls, r.ModelCalls)
	p.CallAttempts = append(p.CallAttempts, r.CallAttempts)
	p.CallLimited = append(p.CallLimited, r.CallLimited)
	p.Losses = append(p.Losses, r.Losses)
	p.OpenChildren = append(p.OpenChildren, r.OpenChildren)
	p.TimeLeftMs = append(p.TimeLeftMs, r.TimeLeftMs)
	p.Nudges = append(p.Nudges, r.Nudges)
	p.DeadlineAts = append(p.DeadlineAts, orEpoch(r.DeadlineAt))
	p.ReadyAts = append(p.ReadyAts, orEpoch(r.ReadyAt))
	p.AdmittedAts = append(p.AdmittedAts, orEpoch(r.AdmittedAt))
	p.NudgedAts = append(p.NudgedAts, orEpoch(r.NudgedAt))
	p.CancelRequestedAts = append(p.CancelRequestedAts, orEpoch(r.CancelRequestedAt))
	p.KilledAts = append(p.KilledAts, orEpoch(r.KilledAt))
	p.StartedAts = append(p.StartedAts, orEpoch(r.StartedAt))
	p.FinishedAts = append(p.FinishedAts, orEpoch(r.FinishedAt))
	p.WaitsFor = append(p.WaitsFor, string(orWait(r.WaitsFor)))
	p.EndReasons = append(p.EndReasons, orEmpty(r.EndReason))
	p.Results = append(p.Results, string(r.result))
	p.Errors = append(p.Errors, string(r.fault))
}

func (s *sessionRow) appendTo(p *db.UnitSessionUpdateParams) {
	p.Ids = append(p.Ids, s.ID)
	p.EventSeqs = append(p.EventSeqs, s.EventSeq)
	p.MessageSeqs = append(p.MessageSeqs, s.MessageSeq)
	p.HeadRunIds = append(p.HeadRunIds, orZero(s.HeadRunID))
	p.Queued = append(p.Queued, s.Queued)
	p.Turns = append(p.Turns, s.turns)
	p.ModelCalls = append(p.ModelCalls, s.modelCalls)
	p.ToolCalls = append(p.ToolCalls, s.tools)
	p.InputTokens = append(p.InputTokens, s.inputTokens)
	p.OutputTokens = append(p.OutputTokens, s.outputs)
	p.CostMicros = append(p.CostMicros, s.costs)
}

func runInsertParams(runs []*runRow) (p db.UnitRunInsertParams) {
	for _, r := range runs {
		p.Ids = append(p.Ids, r.ID)
		p.TenantIds = append(p.TenantIds, r.TenantID)
		p.Kinds = append(p.Kinds, string(r.Kind))
		p.Queues = append(p.Queues, r.Queue)
		p.RootRunIds = append(p.RootRunIds, r.RootRunID)
		p.ParentRunIds = append(p.ParentRunIds, orZero(r.ParentRunID))
		p.Depths = append(p.Depths, r.Depth)
		p.Agents = append(p.Agents, r.Agent)
		p.AgentVersions = append(p.AgentVersions, r.AgentVersion)
		p.SessionIds = append(p.SessionIds, r.SessionID)
		p.RequestSeqs = append(p.RequestSeqs, r.RequestSeq)
		p.InLanes = append(p.InLanes, r.InLane)
		p.UserIds = append(p.UserIds, orEmpty(r.UserID))
		p.OwnerTokens = append(p.OwnerTokens, orEmpty(r.OwnerToken))
		p.Inputs = append(p.Inputs, string(r.input))
		p.TimeLeftMs = append(p.TimeLeftMs, r.TimeLeftMs)
		p.Admitted = append(p.Admitted, r.AdmittedAt != nil)
		p.Ready = append(p.Ready, r.ReadyAt != nil)
		p.RetryOfs = append(p.RetryOfs, r.retryOf)
		p.Steps = append(p.Steps, r.Steps)
		p.ModelCalls = append(p.ModelCalls, r.ModelCalls)
		if r.traceparent != "" { // it ends with the last run that has one: mostly there is none
			p.Traceparents = append(p.Traceparents, make([]string, len(p.Ids)-1-len(p.Traceparents))...)
			p.Traceparents = append(p.Traceparents, r.traceparent)
		}
	}
	return p
}

func keyParams(keys []*keyClaim) (c db.UnitIdempotencyClaimParams, h db.UnitIdempotencyHoldersParams) {
	seen := map[[3]string]bool{}
	for _, k := range keys {
		if seen[k.id()] { // one statement may not touch a row twice
			continue
		}
		seen[k.id()] = true
		c.TenantIds, c.Scopes, c.Keys = append(c.TenantIds, k.tenant), append(c.Scopes, k.scope), append(c.Keys, k.key)
		c.Digests, c.RunIds = append(c.Digests, k.digest), append(c.RunIds, k.run)
	}
	return c, db.UnitIdempotencyHoldersParams{TenantIds: c.TenantIds, Scopes: c.Scopes, Keys: c.Keys}
}

func sessionParams(create []*newSession) (p db.UnitSessionInsertParams) {
	for _, s := range create {
		p.TenantIds = append(p.TenantIds, s.TenantID)
		p.Ids = append(p.Ids, s.ID)
		p.ConversationRefs = append(p.ConversationRefs, s.ConversationRef)
		p.ExternalIds = append(p.ExternalIds, s.ExternalID)
		p.Names = append(p.Names, s.Name)
		p.Kinds = append(p.Kinds, s.Kind)
		p.ChannelTypes = append(p.ChannelTypes, s.ChannelType)
		p.SessionScopes = append(p.SessionScopes, string(s.Scope))
		p.Agents = append(p.Agents, s.Agent)
		p.UserIds = append(p.UserIds, s.UserID)
		p.OwnerTokens = append(p.OwnerTokens, s.OwnerToken)
		p.TaskStatuses = append(p.TaskStatuses, s.TaskStatus)
		p.TaskStatusReasons = append(p.TaskStatusReasons, s.TaskReason)
		p.TaskParams = append(p.TaskParams, string(s.TaskParams))
		p.TaskMetadatas = append(p.TaskMetadatas, string(s.TaskMetadata))
		p.EventSeqs = append(p.EventSeqs, s.EventSeq)
		p.MessageSeqs = append(p.MessageSeqs, s.MessageSeq)
		p.HeadRunIds = append(p.HeadRunIds, s.HeadRunID)
		p.Turns = append(p.Turns, s.Turns)
	}
	return p
}

func distinct(ids []uuid.UUID) []uuid.UUID {
	ids = slices.Clone(ids)
	slices.SortFunc(ids, func(a, b uuid.UUID) int { return bytes.Compare(a[:], b[:]) })
	return slices.Compact(ids)
}

// Event is what a session's log receives.
type Event struct {
	Type    db.EventType
	Content json.RawMessage
}

// Message is one entry of an Agentex task's message list.
type Message struct {
	ID              uuid.UUID
	Content         json.RawMessage
	StreamingStatus string // IN_PROGRESS, DONE or none
}
