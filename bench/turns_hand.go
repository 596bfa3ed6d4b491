package main

import (
	"bufio"
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
)

// stepPayload looks like a short model answer.
const stepPayload = `{"kind":"model","tokens_in":812,"tokens_out":144,"text":"The quick brown fox jumps over the lazy dog and then writes a long enough paragraph to look like a short model answer, about two hundred bytes of it in all, give or take."}`

const (
	insertStep    = `INSERT INTO step (run, seq, payload) VALUES ($1, $2, $3)`
	insertMessage = `INSERT INTO message (run, role, body) VALUES ($1, $2, $3)`
	completeJobs  = `UPDATE river_job SET state = 'completed', finalized_at = now() WHERE id = ANY ($1::bigint[]) AND state = 'running'`
)

var messageRoles = []string{"user", "assistant"}

const childConns = 20

// turnsChild works hand-built turns once it is told to go.
func turnsChild(ctx context.Context, c childConfig, in *bufio.Reader) error {
	pool, err := openChildPool(ctx, c.URL, childConns)
	if err != nil {
		return err
	}
	defer pool.Close()
	var client *riverClient
	switch c.Kind {
	case "naive":
		client, err = newWorker(pool, river.QueueDefault, c.Width, naiveTurn(pool, c.Steps))
	case "piped":
		client, err = newWorker(pool, river.QueueDefault, c.Width, pipedTurn(pool, c.Steps))
	case "grouped":
		client, err = newWorker(pool, river.QueueDefault, c.Width, groupedTurn(pool, c.Steps))
	case "contract", "contract-own":
		var hot *pgxpool.Pool
		if hot, err = db.OpenHot(ctx, c.URL, func(c *pgxpool.Config) { c.MaxConns = childConns }); err != nil {
			return err
		}
		defer hot.Close()
		client, err = newWorker(pool, jobs.QueueTurns, c.Width, contractTurn(hot, c.Rows.deal(c.Kind == "contract-own")))
	default:
		err = fmt.Errorf("there is no turn of kind %q", c.Kind)
	}
	if err != nil {
		return err
	}
	fmt.Println("ready")
	if _, err := in.ReadString('\n'); err != nil {
		return err
	}
	if err := client.Start(ctx); err != nil {
		return err
	}
	_, err = in.ReadString('\n') // until the bench kills us
	return err
}

type handWork = func(context.Context, *river.Job[handTurn]) error

// naiveTurn is what a user writes first: each step an INSERT of its own, then
// the messages and the job's completion in one transaction.
func naiveTurn(pool *pgxpool.Pool, steps int) handWork {
	return func(ctx context.Context, job *river.Job[handTurn]) error {
		for seq := range steps {
			if _, err := pool.Exec(ctx, insertStep, job.Args.Run, seq, stepPayload); err != nil {
				return err
			}
		}
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			for _, role := range messageRoles {
				if _, err := tx.Exec(ctx, insertMessage, job.Args.Run, role, stepPayload); err != nil {
					return err
				}
			}
			_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
			return err
		})
	}
}

// pipedTurn takes one round trip for each step; the last one carries the
// messages and the completion too. A turn alone can hardly be faster.
func pipedTurn(pool *pgxpool.Pool, steps int) handWork {
	return func(ctx context.Context, job *river.Job[handTurn]) error {
		for seq := range steps - 1 {
			if _, err := pool.Exec(ctx, insertStep, job.Args.Run, seq, stepPayload); err != nil {
				return err
			}
		}
		var batch pgx.Batch
		batch.Queue(insertStep, job.Args.Run, steps-1, stepPayload)
		for _, role := range messageRoles {
			batch.Queue(insertMessage, job.Args.Run, role, stepPayload)
		}
		batch.Queue(completeJobs, []int64{job.ID})
		return pool.SendBatch(ctx, &batch).Close()
	}
}

type handStep struct {
	run int64
	seq int32
	job int64 // of the last step; 0 for the others
}

// groupedTurn shares the commits of all turns that run: many turns can hardly
// be faster on River.
func groupedTurn(pool *pgxpool.Pool, steps int) handWork {
	stepGroup := newGroup(groupWriters, func(ctx context.Context, items []handStep) error {
		runs, seqs, bodies := make([]int64, len(items)), make([]int32, len(items)), make([]string, len(items))
		for i, it := range items {
			runs[i], seqs[i], bodies[i] = it.run, it.seq, stepPayload
		}
		_, err := pool.Exec(ctx, `INSERT INTO step (run, seq, payload) SELECT * FROM unnest($1::bigint[], $2::int[], $3::jsonb[])`, runs, seqs, bodies)
		return err
	})
	lastGroup := newGroup(groupWriters, func(ctx context.Context, items []handStep) error {
		runs, seqs, ids, bodies := make([]int64, len(items)), make([]int32, len(items)), make([]int64, len(items)), make([]string, len(items))
		for i, it := range items {
			runs[i], seqs[i], ids[i], bodies[i] = it.run, it.seq, it.job, stepPayload
		}
		var batch pgx.Batch
		batch.Queue(`INSERT INTO step (run, seq, payload) SELECT * FROM unnest($1::bigint[], $2::int[], $3::jsonb[])`, runs, seqs, bodies)
		batch.Queue(`INSERT INTO message (run, role, body) SELECT run, role, body
			FROM unnest($1::bigint[], $2::text[]) u (run, body), unnest($3::text[]) role`, runs, bodies, messageRoles)
		batch.Queue(completeJobs, ids)
		return pool.SendBatch(ctx, &batch).Close()
	})
	return func(_ context.Context, job *river.Job[handTurn]) error {
		for seq := range int32(steps - 1) {
			if err := stepGroup.do(handStep{run: job.Args.Run, seq: seq}); err != nil {
				return err
			}
		}
		return lastGroup.do(handStep{run: job.Args.Run, seq: int32(steps - 1), job: job.ID})
	}
}

// share is what one commit of a contract turn writes.
type share struct {
	steps, events, usage, facts int
	run, session                bool // whether it updates them
	last                        bool
}

// deal spreads the rows of a turn over its commits: one for each step, or, as
// weir itself does it, all but the last step together. The claim takes one of
// the run's updates, the last commit one of the run's and one of the session's.
func (r turnRows) deal(own bool) []share {
	commits := r.Steps
	if own {
		commits = 2
	}
	shares := make([]share, commits)
	last := commits - 1
	for i := range shares {
		shares[i] = share{
			steps: 1, events: part(r.Events, commits, i), usage: part(r.Usage, commits, i),
			run: i < last && part(r.RunUpdates-2, last, i) > 0, session: i < last && part(r.SessionUpdates-1, last, i) > 0,
		}
	}
	if own {
		shares[0].steps = r.Steps - 1
	}
	shares[0].facts = r.Facts
	shares[last].run, shares[last].session, shares[last].last = true, true, true
	return shares
}

// part is the i-th of n dealt out evenly.
func part(n, parts, i int) int { return n*(i+1)/parts - n*i/parts }

type contractClaim struct{ run, session uuid.UUID } // session is filled by the commit

type contractWrite struct {
	run, session uuid.UUID
	share        share
	step, event  int32 // numbers of the first
	job          int64
}

const eventsOfAccept = 2 // agent.request and agent.status

// contractTurn writes the rows that weir writes, into weir's tables, by hand:
// no fence, no look at what else happens to the run, nothing that could
// recover.
func contractTurn(pool *pgxpool.Pool, shares []share) func(context.Context, *river.Job[jobs.Turn]) error {
	worker := uuid.New()
	claims := newGroup(groupWriters, func(ctx context.Context, items []*contractClaim) error { return claimByHand(ctx, pool, worker, items) })
	writes := newGroup(groupWriters, func(ctx context.Context, items []contractWrite) error { return writeByHand(ctx, pool, items) })
	return func(_ context.Context, job *river.Job[jobs.Turn]) error {
		c := &contractClaim{run: job.Args.RunID}
		if err := claims.do(c); err != nil {
			return err
		}
		w := contractWrite{run: c.run, session: c.session, event: eventsOfAccept + 1, job: job.ID}
		for _, s := range shares {
			w.share = s
			if err := writes.do(w); err != nil {
				return err
			}
			w.step += int32(s.steps)
			w.event += int32(s.events)
		}
		return nil
	}
}

func claimByHand(ctx context.Context, pool *pgxpool.Pool, worker uuid.UUID, items []*contractClaim) error {
	ids := make([]uuid.UUID, len(items))
	byRun := make(map[uuid.UUID]*contractClaim, len(items))
	for i, it := range items {
		ids[i], byRun[it.run] = it.run, it
	}
	rows, err := pool.Query(ctx, `UPDATE run SET state = 'running', worker_id = $2, epoch = epoch + 1, started_at = now()
		FROM unnest($1::uuid[]) u (id) WHERE run.id = u.id RETURNING run.id, run.session_id`, ids, worker)
	if err != nil {
		return err
	}
	var run, session uuid.UUID
	_, err = pgx.ForEachRow(rows, []any{&run, &session}, func() error {
		byRun[run].session = session
		return nil
	})
	return err
}

func writeByHand(ctx context.Context, pool *pgxpool.Pool, items []contractWrite) error {
	var (
		stepRuns, eventRuns, usageRuns, factRuns, progress, ended []uuid.UUID
		eventSessions, usageSessions, sessions                    []uuid.UUID
		stepSeqs, eventSeqs, usageCalls, progressSteps            []int32
		lastEvents                                                []int64
		idle                                                      []int32 // 1 where the session has no turn any more
		outputs, contents                                         []string
		ids                                                       []int64
	)
	for _, it := range items {
		for i := range int32(it.share.steps) {
			stepRuns, stepSeqs, outputs = append(stepRuns, it.run), append(stepSeqs, it.step+i), append(outputs, stepPayload)
		}
		for i := range int32(it.share.events) {
			eventRuns, eventSessions = append(eventRuns, it.run), append(eventSessions, it.session)
			eventSeqs, contents = append(eventSeqs, it.event+i), append(contents, stepPayload)
		}
		for i := range int32(it.share.usage) {
			usageRuns, usageSessions, usageCalls = append(usageRuns, it.run), append(usageSessions, it.session), append(usageCalls, it.step+i)
		}
		for range it.share.facts {
			factRuns = append(factRuns, it.session)
		}
		if it.share.session {
			sessions, lastEvents = append(sessions, it.session), append(lastEvents, int64(it.event)+int64(it.share.events)-1)
			idle = append(idle, 0)
			if it.share.last {
				idle[len(idle)-1] = 1
			}
		}
		switch {
		case it.share.last:
			ended, ids = append(ended, it.run), append(ids, it.job)
		case it.share.run:
			progress, progressSteps = append(progress, it.run), append(progressSteps, it.step+int32(it.share.steps))
		}
	}
	var batch pgx.Batch
	batch.Queue(`INSERT INTO step (run_id, seq, tenant_id, kind, status, call_id, name, output, epoch, finished_at)
		SELECT run, seq, 'default', 'model', 'done', 'm' || seq, 'offline/offline-1', output::json, 1, clock_timestamp()
		FROM unnest($1::uuid[], $2::int[], $3::text[]) u (run, seq, output)`, stepRuns, stepSeqs, outputs)
	batch.Queue(`INSERT INTO event (session_id, seq, tenant_id, type, run_id, content)
		SELECT session, seq, 'default', 'agent.usage', run, content::json
		FROM unnest($1::uuid[], $2::int[], $3::uuid[], $4::text[]) u (session, seq, run, content)`, eventSessions, eventSeqs, eventRuns, contents)
	if len(usageRuns) > 0 {
		batch.Queue(`INSERT INTO usage (run_id, call_id, tenant_id, session_id, agent, provider, model, input, cache_read, cache_write, output, reasoning, cost_micros, estimated)
			SELECT run, 'm' || call, 'default', session, 'bench', 'offline', 'offline-1', 10, 0, 0, 10, 0, 0, false
			FROM unnest($1::uuid[], $2::int[], $3::uuid[]) u (run, call, session)`, usageRuns, usageCalls, usageSessions)
	}
	if len(factRuns) > 0 {
		batch.Queue(`INSERT INTO fact (tenant_id, agent, scope, scope_id, key, value)
			SELECT 'default', 'bench', 'session', session::text, 'a', '1' FROM unnest($1::uuid[]) session`, factRuns)
	}
	if len(sessions) > 0 {
		batch.Queue(`UPDATE session SET event_seq = u.seq, updated_at = now(), head_run_id = CASE WHEN u.idle = 1 THEN NULL ELSE head_run_id END
			FROM unnest($1::uuid[], $2::bigint[], $3::int[]) u (id, seq, idle) WHERE session.id = u.id`, sessions, lastEvents, idle)
	}
	if len(progress) > 0 {
		batch.Queue(`UPDATE run SET steps = u.steps FROM unnest($1::uuid[], $2::int[]) u (id, steps) WHERE run.id = u.id`, progress, progressSteps)
	}
	if len(ended) > 0 {
		batch.Queue(`UPDATE run SET state = 'completed', worker_id = NULL, finished_at = now(), end_reason = 'completed', result = $2::json
			FROM unnest($1::uuid[]) u (id) WHERE run.id = u.id`, ended, stepPayload)
		batch.Queue(completeJobs, ids)
	}
	return pool.SendBatch(ctx, &batch).Close()
}
