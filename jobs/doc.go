// Package jobs is the run state machine and the River jobs that nudge it.
//
// # A run is a row, a job is a nudge
//
// A run is the durable record of one piece of agent work. A River job carries
// its id and means "advance this run now"; a spare one finds nothing to claim.
// What waits, waits as a row: a run that is parked holds no worker.
//
//	accept → queued ─claim→ running ─park→ waiting ─wake→ queued …
//	                           └──────── end → completed, failed, …
//
// queued has three forms. Behind others in its session's lane a run has neither
// ready_at nor admitted_at; at the lane's head it waits for admission, with
// ready_at; admitted, it has admitted_at and a job, and only then may be claimed.
//
// # Admission
//
// The backlog lives in our rows. One Admitter, on the process whose connection
// holds the duty's lock, hands River what the fleet starts in some 200 ms: it
// takes from the tenant with the least virtual time, whose time then grows by
// 1/weight, so a tenant with a million runs delays no other. Limits of a
// tenant, an agent and a queue hold together or not at all: a slot is held by a
// run that is admitted or runs, and by nothing else, so it cannot leak; a run
// that loses its worker keeps its slot, one that waits has none.
//
// While nobody waits for room, and for scopes without a limit, a unit admits by
// itself (accept, the lane's next, a wake-up): it reads in its own transaction
// what is open. A fast path whose admitter has not looked for five seconds is
// closed. A pause takes back what was admitted and not claimed: the nudges it
// had find nothing to claim.
//
// # One unit, many runs
//
// Callers hand over ops (accept, claim, advance, cancel, wake, spawn, reap)
// and wait for their own commit. A writer of the committer takes what waits
// and makes one transaction of it: one round trip opens it, locks every row
// the ops need and reads what they judge by; the ops are judged in Go, one
// after another, on those rows; one more inserts the jobs, if any; a last one
// writes what changed and commits. So one commit serves hundreds of runs, and
// a change alone waits for nobody.
//
// Claims have units of their own that take one round trip: whether a run may be
// claimed its row alone tells, with the worker's under lock.
//
// What others must know is told after the commit, by the bus, or in the unit's
// own transaction while the bus is quiet.
//
// What keeps this right:
//
//   - Lock first, decide in a later statement. Under READ COMMITTED each
//     statement of the first round trip has a snapshot of its own, and what
//     decides (the lane's next turn, steps stored, waits due) is read after
//     the locks are held.
//   - SKIP LOCKED. A unit never waits for a row that somebody holds: the op
//     goes into the next unit, and after three misses to a writer that waits
//     for rows, a quarter of a second at a time, while the others go on. After
//     ten seconds its caller is told. What can block comes first and in one
//     order: idempotency keys, new sessions. Claims lock workers, then runs.
//   - Order: worker → keys → session → run (by depth and id) → the rest.
//   - An op that fails changes nothing: it checks all it needs before it
//     changes a row. Ops are repeatable: ids are minted before, and a unit
//     that did not commit is judged again from fresh rows.
//
// # Fences
//
// A claim adds one to run.epoch, and every write of an attempt shows it. Kill,
// reaping and timing out add one more. So a worker that was paused, cut off or
// declared dead can do what it likes: its writes find another epoch, answer
// ErrFenced, and it stops. The one thing it may still store is the usage of
// calls really made, once per call.
//
// # No lost wake-up
//
// Whatever may satisfy a wait locks the run and adds one to run.wake_seq,
// whatever its state. A park shows the count it last saw. If a child ends
// between a worker's look and its park, the counts differ and the park is
// refused with ErrLookAgain.
//
// # One way to end
//
// Only unit.end writes a final state, in one transaction with everything that
// follows from it: the turn's last event, the session's next turn and its job,
// the parent's wake-up, the wait's removal. A state that is final is never
// written again, so a cancel and an answer that race end as one of them. A
// cancel that was requested first wins over an answer that comes later: the
// answer's commit is refused and its worker confirms the cancel.
//
// # When things fail
//
//   - The process dies before COMMIT: nothing of the unit exists. Accepts were
//     not answered. Claims are still queued; steps are made again.
//   - COMMIT's answer is lost: the unit's transaction id decides, asked on
//     another connection. After a server restart the id may have been given
//     away again, so a row that only this unit can have written decides.
//   - A claim's connection breaks: its caller does not know, and passes the
//     nudge on. If the claim had committed, the worker's look, once a second, finds
//     a run the database says it holds and its hands do not, twice, and gives
//     it back.
//   - The worker dies: its lock or its lease shows it. Claims hold a share of
//     the worker's row, so after it is marked dead none slips past, and the
//     reaper takes its runs in chunks: epoch + 1, queued, another job. A
//     reaper that dies half way leaves the rest to the next.
//   - The same step kills its workers: the run becomes a suspect at the second
//     loss and runs alone in a process; only a death there is the third, and it
//     is set aside as poisoned. Neighbours that died with it become suspects
//     at most, and stop being so at their next step.
//   - A job is lost (a zombie's River client fetched it): the sweeper sees an
//     admitted run older than every waiting job of its queue, and nudges again.
//   - Work panics or errs under a live worker: a deferred hand-back parks the
//     run under the same epoch, with a backoff.
package jobs
