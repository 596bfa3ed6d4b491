package db

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Pipeline queues the statements of a committer's unit of work so that they
// travel in one round trip. Each runs with a fresh snapshot, in the order
// queued; the first error skips the rest.
type Pipeline struct {
	batch pgx.Batch
}

// Len counts the queued statements.
func (p *Pipeline) Len() int { return p.batch.Len() }

// Send runs what is queued on conn and fills the results.
func (p *Pipeline) Send(ctx context.Context, conn *pgx.Conn) error {
	return conn.SendBatch(ctx, &p.batch).Close()
}

// Begin opens the unit's transaction and reads its id and two clocks:
// schedules' and liveness'.
func (p *Pipeline) Begin(xid *string, now, clock *time.Time) {
	p.batch.Queue("BEGIN")
	p.batch.Queue(unitBegin).QueryRow(func(row pgx.Row) error { return row.Scan(xid, now, clock) })
}

// Hot gives the open transaction the settings of OpenHot, for a connection that
// cannot keep them.
func (p *Pipeline) Hot() { p.batch.Queue(hotLocal) }

// BeginUnder opens a transaction that tries to take an advisory lock.
func (p *Pipeline) BeginUnder(lock int64, got *bool) {
	p.batch.Queue("BEGIN")
	p.Hot()
	p.batch.Queue("SELECT pg_try_advisory_xact_lock($1)", lock).QueryRow(func(row pgx.Row) error { return row.Scan(got) })
}

// Notify says payload on channel, in whose name {schema} is the schema of our
// tables. RiverInserts is where River's producers listen.
const (
	Notify       = "SELECT pg_notify(replace($1, '{schema}', current_schema()), $2)"
	RiverInserts = "{schema}.river_insert"
)

// Notify queues the statement of that name. It should be the last one: from here
// to the end of the transaction nobody else's notifying transaction commits.
func (p *Pipeline) Notify(channel, payload string) {
	p.batch.Queue(Notify, channel, payload)
}

// LockTimeout bounds the waits of the open transaction's locks.
func (p *Pipeline) LockTimeout(timeout string) {
	p.batch.Queue("SELECT set_config('lock_timeout', $1, true)", timeout)
}

// Commit ends the transaction. ErrRolledBack is what a failed transaction
// answers to it.
func (p *Pipeline) Commit() {
	p.batch.Queue("COMMIT").Exec(func(tag pgconn.CommandTag) error {
		if tag.String() != "COMMIT" {
			return pgx.ErrTxCommitRollback
		}
		return nil
	})
}

func many[T any](p *Pipeline, into *[]T, sql string, args ...any) {
	p.batch.Queue(sql, args...).Query(func(rows pgx.Rows) (err error) {
		*into, err = pgx.CollectRows(rows, pgx.RowToStructByPos[T])
		return err
	})
}

// UnitIdempotencyClaim queues the query of that name.
func (p *Pipeline) UnitIdempotencyClaim(arg UnitIdempotencyClaimParams, into *[]UnitIdempotencyClaimRow) {
	many(p, into, unitIdempotencyClaim, arg.TenantIds, arg.Scopes, arg.Keys, arg.Digests, arg.RunIds)
}

// UnitIdempotencyHolders queues the query of that name.
func (p *Pipeline) UnitIdempotencyHolders(arg UnitIdempotencyHoldersParams, into *[]UnitIdempotencyHoldersRow) {
	many(p, into, unitIdempotencyHolders, arg.TenantIds, arg.Scopes, arg.Keys)
}

// UnitIdempotencyDrop queues the query of that name.
func (p *Pipeline) UnitIdempotencyDrop(arg UnitIdempotencyDropParams) {
	p.batch.Queue(unitIdempotencyDrop, arg.TenantIds, arg.Scopes, arg.Keys)
}

// UnitSessionInsert queues the query of that name.
func (p *Pipeline) UnitSessionInsert(arg UnitSessionInsertParams, into *[]uuid.UUID) {
	p.batch.Queue(unitSessionInsert, arg.TenantIds, arg.Ids, arg.ConversationRefs, arg.ExternalIds, arg.Names, arg.Kinds,
		arg.ChannelTypes, arg.SessionScopes, arg.Agents, arg.UserIds, arg.OwnerTokens, arg.TaskStatuses, arg.TaskStatusReasons,
		arg.TaskParams, arg.TaskMetadatas, arg.EventSeqs, arg.MessageSeqs, arg.HeadRunIds, arg.Turns).
		Query(func(rows pgx.Rows) (err error) {
			*into, err = pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
			return err
		})
}

// UnitSessionLock queues the lock of sessions; with wait it waits for others.
func (p *Pipeline) UnitSessionLock(ids []uuid.UUID, wait bool, into *[]UnitSessionLockRow) {
	sql := unitSessionLock
	if wait {
		sql = unitSessionLockWait
	}
	many(p, into, sql, ids)
}

// UnitRunLock queues the lock of runs; with wait it waits for others.
func (p *Pipeline) UnitRunLock(ids []uuid.UUID, wait bool, into *[]UnitRunLockRow) {
	sql := unitRunLock
	if wait {
		sql = unitRunLockWait
	}
	many(p, into, sql, ids)
}

// UnitGuard queues the guards of a unit that knows its rows already: sessions
// and runs with their versions, and calls whose usage is not stored. IsGuard
// tells their failure.
func (p *Pipeline) UnitGuard(sessions UnitSessionGuardParams, runs UnitRunGuardParams, usage UnitUsageGuardParams) {
	p.batch.Queue(unitSessionGuard, sessions.Ids, sessions.Versions)
	p.batch.Queue(unitRunGuard, runs.Ids, runs.Versions)
	if len(usage.RunIds) > 0 {
		p.batch.Queue(unitUsageGuard, usage.RunIds, usage.CallIds)
	}
}

// IsGuard says that a guard has failed.
func IsGuard(err error) bool {
	var e *pgconn.PgError
	return errors.As(err, &e) && e.Code == "22012"
}

// UnitWorkerShare queues the query of that name.
func (p *Pipeline) UnitWorkerShare(ids []uuid.UUID, into *[]UnitWorkerShareRow) {
	many(p, into, unitWorkerShare, ids)
}

// UnitLaneNext queues the query of that name.
func (p *Pipeline) UnitLaneNext(sessions []uuid.UUID, into *[]UnitLaneNextRow) {
	many(p, into, unitLaneNext, sessions)
}

// UnitStepsOf queues the query of that name.
func (p *Pipeline) UnitStepsOf(runs []uuid.UUID, into *[]UnitStepsOfRow) {
	many(p, into, unitStepsOf, runs)
}

// UnitClaim queues the claim of runs; with wait it waits for others.
func (p *Pipeline) UnitClaim(arg UnitClaimParams, wait bool, into *[]UnitClaimRow) {
	sql := unitClaim
	if wait {
		sql = unitClaimWait
	}
	many(p, into, sql, arg.Ids, arg.WorkerIds)
}

// UnitClaimable queues the query of that name.
func (p *Pipeline) UnitClaimable(runs []uuid.UUID, into *[]uuid.UUID) {
	p.batch.Queue(unitClaimable, runs).Query(func(rows pgx.Rows) (err error) {
		*into, err = pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
		return err
	})
}

// UnitRunSession queues the query of that name.
func (p *Pipeline) UnitRunSession(runs []uuid.UUID, into *[]UnitRunSessionRow) {
	many(p, into, unitRunSession, runs)
}

// UnitUsageKnown queues the query of that name.
func (p *Pipeline) UnitUsageKnown(arg UnitUsageKnownParams, into *[]UnitUsageKnownRow) {
	many(p, into, unitUsageKnown, arg.RunIds, arg.CallIds)
}

// UnitRunInsert queues the query of that name.
func (p *Pipeline) UnitRunInsert(a UnitRunInsertParams) {
	p.batch.Queue(unitRunInsert, a.Ids, a.TenantIds, a.Kinds, a.Queues, a.RootRunIds, a.ParentRunIds, a.Depths, a.Agents,
		a.AgentVersions, a.SessionIds, a.RequestSeqs, a.InLanes, a.UserIds, a.OwnerTokens, a.Inputs, a.TimeLeftMs, a.Admitted, a.Ready,
		a.RetryOfs, a.Steps, a.ModelCalls, a.Traceparents)
}

// UnitRunUpdate queues the query of that name.
func (p *Pipeline) UnitRunUpdate(a UnitRunUpdateParams) {
	p.batch.Queue(unitRunUpdate, a.Ids, a.States, a.WorkerIds, a.Epochs, a.Queues, a.WakeSeqs, a.Steps, a.ModelCalls, a.CallAttempts, a.CallLimited,
		a.Losses, a.OpenChildren, a.TimeLeftMs, a.Nudges, a.DeadlineAts, a.AdmittedAts, a.ReadyAts, a.NudgedAts,
		a.CancelRequestedAts, a.KilledAts, a.StartedAts, a.FinishedAts, a.WaitsFor, a.EndReasons, a.Results, a.Errors)
}

// UnitRunAdmit queues the query of that name.
func (p *Pipeline) UnitRunAdmit(ids []uuid.UUID) {
	p.batch.Queue(unitRunAdmit, ids)
}

// UnitRunReady queues the query of that name.
func (p *Pipeline) UnitRunReady(ids []uuid.UUID) {
	p.batch.Queue(unitRunReady, ids)
}

// UnitGate queues the query of that name.
func (p *Pipeline) UnitGate(into *[]UnitGateRow) {
	many(p, into, unitGate)
}

// UnitSessionUpdate queues the query of that name.
func (p *Pipeline) UnitSessionUpdate(a UnitSessionUpdateParams) {
	p.batch.Queue(unitSessionUpdate, a.Ids, a.EventSeqs, a.MessageSeqs, a.HeadRunIds, a.Queued, a.Turns, a.ModelCalls, a.ToolCalls,
		a.InputTokens, a.OutputTokens, a.CostMicros)
}

// UnitTaskStatus queues the query of that name.
func (p *Pipeline) UnitTaskStatus(a UnitTaskStatusParams) {
	p.batch.Queue(unitTaskStatus, a.Ids, a.Statuses, a.Reasons)
}

// UnitEventInsert queues the query of that name.
func (p *Pipeline) UnitEventInsert(a UnitEventInsertParams) {
	p.batch.Queue(unitEventInsert, a.SessionIds, a.Seqs, a.TenantIds, a.Types, a.RunIds, a.Contents)
}

// UnitMessageInsert queues the query of that name.
func (p *Pipeline) UnitMessageInsert(a UnitMessageInsertParams) {
	p.batch.Queue(unitMessageInsert, a.SessionIds, a.Seqs, a.Ids, a.TenantIds, a.RunIds, a.Contents, a.StreamingStatuses)
}

// UnitStepInsert queues the query of that name.
func (p *Pipeline) UnitStepInsert(a UnitStepInsertParams) {
	p.batch.Queue(unitStepInsert, a.RunIds, a.Seqs, a.TenantIds, a.Kinds, a.Statuses, a.CallIds, a.Names, a.Attempts, a.InputDigests,
		a.Outputs, a.Epochs, a.DurationsMs)
}

// UnitStepUpdate queues the query of that name.
func (p *Pipeline) UnitStepUpdate(a UnitStepUpdateParams) {
	p.batch.Queue(unitStepUpdate, a.RunIds, a.Seqs, a.Statuses, a.Attempts, a.Outputs, a.Epochs)
}

// UnitUsageInsert queues the query of that name. Which calls are new is read
// before, by UnitUsageKnown under the run's lock.
func (p *Pipeline) UnitUsageInsert(a UnitUsageInsertParams) {
	p.batch.Queue(unitUsageInsert, a.RunIds, a.CallIds, a.TenantIds, a.SessionIds, a.UserIds, a.Agents, a.Providers, a.Models, a.Inputs,
		a.CacheReads, a.CacheWrites, a.Outputs, a.Reasonings, a.CostsMicros, a.Estimateds)
}

// UnitFactPut queues the query of that name.
func (p *Pipeline) UnitFactPut(a UnitFactPutParams) {
	p.batch.Queue(unitFactPut, a.TenantIds, a.Agents, a.Scopes, a.ScopeIds, a.Keys, a.Values, a.Kinds)
}

// UnitWaitPut queues the query of that name.
func (p *Pipeline) UnitWaitPut(a UnitWaitPutParams) {
	p.batch.Queue(unitWaitPut, a.RunIds, a.TenantIds, a.Kinds, a.Keys, a.ForMs)
}

// UnitWaitDrop queues the query of that name.
func (p *Pipeline) UnitWaitDrop(runs []uuid.UUID) {
	p.batch.Queue(unitWaitDrop, runs)
}

// UnitRateLimitPut queues the query of that name.
func (p *Pipeline) UnitRateLimitPut(a UnitRateLimitPutParams) {
	p.batch.Queue(unitRateLimitPut, a.TenantIds, a.Keys, a.ForMs)
}

// UnitIdempotencyResult queues the query of that name.
func (p *Pipeline) UnitIdempotencyResult(a UnitIdempotencyResultParams) {
	p.batch.Queue(unitIdempotencyResult, a.TenantIds, a.Scopes, a.Keys, a.Results)
}

// UnitSessionDrop queues the query of that name.
func (p *Pipeline) UnitSessionDrop(ids []uuid.UUID) {
	p.batch.Queue(unitSessionDrop, ids)
}

// UnitWaitDue queues the query of that name.
func (p *Pipeline) UnitWaitDue(runs []uuid.UUID, into *[]uuid.UUID) {
	p.batch.Queue(unitWaitDue, runs).Query(func(rows pgx.Rows) (err error) {
		*into, err = pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
		return err
	})
}
