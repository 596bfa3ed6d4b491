package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
)

// The texts of the turns: the offline model is told what to do. Four steps are
// a model call that asks for two built-in tools, their two results, and the
// model call that answers.
const (
	oneStepText   = "hello"
	fourStepsText = `!tools memory_write {"key":"a","value":1} ;; memory_read {"key":"a"}` + "\nall done"
)

const (
	grouped4     = "hand-grouped, 4 steps"
	grouped1     = "hand-grouped, 1 step"
	contract4    = "hand-grouped, contract's rows"
	contractOwn4 = "  the same in weir's own commits"
	weir4        = "weir worker, 4 steps"
	admitted4    = "  admitted beforehand"
	weir1        = "weir worker, 1 step"
	naive4       = "River as a user writes it, 4 steps"
	naive1       = "River as a user writes it, 1 step"
	dbosQueue    = "DBOS Go, queue polled every 10 ms"
	dbosDirect   = "DBOS Go, no queue, 32 callers"
	weirAlone    = "weir worker, one turn alone"
	pipedAlone   = "hand-piped, one turn alone"

	turnWidth = 1000 // turns at once, of weir and of the grouped ceilings
)

var turnsSection = section{
	name: "turns", title: "durable turns from a backlog, each step committed before the next", run: (*bench).runTurns,
	goals: []goal{
		atLeast(0.4, "4 steps, of hand-grouped", series{weir4, "turns/s"}, series{grouped4, "turns/s"}),
		atLeast(0.7, "4 steps, of hand-grouped with the contract's rows", series{weir4, "turns/s"}, series{contract4, "turns/s"}),
		atLeast(8, "4 steps, of DBOS Go", series{weir4, "turns/s"}, series{dbosQueue, "turns/s"}),
		atLeast(0.85, "4 steps, of the same admitted beforehand", series{weir4, "turns/s"}, series{admitted4, "turns/s"}),
		atMost(0.45, "CPU ms of a turn of 4 steps", series{weir4, "CPU ms/turn"}, series{}),
		atMost(2.7, "CPU of a turn of 4 steps, of hand-grouped", series{weir4, "CPU ms/turn"}, series{grouped4, "CPU ms/turn"}),
		atMost(2, "one turn alone, claim -> completion, of hand-piped", series{weirAlone, "work p50 ms"}, series{pipedAlone, "work p50 ms"}),
		atMost(2, "one turn alone, accept -> completion, of hand-piped", series{weirAlone, "total p50 ms"}, series{pipedAlone, "total p50 ms"}),
	},
}

// backlogKind says how the database shows how far a backlog is.
type backlogKind struct {
	// last says whether the turn accepted last is done. It costs nothing, while
	// left has to pass over the dead entries of an index, so it is asked first.
	last string
	left string // whether anything waits or runs
	done string // how many turns are done
	span string // seconds from the first claim to the last completion
}

var (
	weirBacklog = backlogKind{
		last: `SELECT finished_at IS NOT NULL FROM run ORDER BY id DESC LIMIT 1`,
		left: `SELECT EXISTS (SELECT FROM run WHERE state = 'queued' AND coalesce(ready_at, admitted_at) IS NOT NULL) OR EXISTS (SELECT FROM run WHERE state = 'running')`,
		done: `SELECT count(*) FROM run WHERE state = 'completed'`,
		span: `SELECT extract(epoch FROM max(finished_at) - min(started_at))::float8 FROM run`,
	}
	handBacklog = backlogKind{
		last: `SELECT finalized_at IS NOT NULL FROM river_job ORDER BY id DESC LIMIT 1`,
		left: `SELECT EXISTS (SELECT FROM river_job WHERE state IN ('available', 'running'))`,
		done: `SELECT count(*) / 2 FROM message`,
		span: `SELECT extract(epoch FROM max(finalized_at) - min(attempted_at))::float8 FROM river_job`,
	}
)

func (b *bench) runTurns(ctx context.Context, _ int) error {
	rows, err := b.drainWeir(ctx, weir4, "four_steps", withTools, fourStepsText, false)
	if err != nil {
		return fmt.Errorf("%s: %w", weir4, err)
	}
	if _, err := b.drainWeir(ctx, admitted4, "four_steps", withTools, fourStepsText, true); err != nil {
		return fmt.Errorf("%s: %w", admitted4, err)
	}
	b.out.note("rows that weir writes for a turn of 4 steps, from claim to end: %s", rows)
	if err := b.drainHand(ctx, grouped4, b.size.backlog, childConfig{Kind: "grouped", Steps: 4, Width: turnWidth}); err != nil {
		return err
	}
	for _, c := range []struct{ name, kind string }{{contract4, "contract"}, {contractOwn4, "contract-own"}} {
		if err := b.drainContract(ctx, c.name, childConfig{Kind: c.kind, Width: turnWidth, Rows: rows}); err != nil {
			return err
		}
	}
	if _, err := b.drainWeir(ctx, weir1, "one_step", plain, oneStepText, false); err != nil {
		return fmt.Errorf("%s: %w", weir1, err)
	}
	if err := b.drainHand(ctx, grouped1, b.size.backlog, childConfig{Kind: "grouped", Steps: 1, Width: turnWidth}); err != nil {
		return err
	}
	for _, c := range []struct {
		name  string
		steps int
	}{{naive4, 4}, {naive1, 1}} {
		if err := b.drainHand(ctx, c.name, b.size.slowBacklog, childConfig{Kind: "naive", Steps: c.steps, Width: 100}); err != nil {
			return err
		}
	}
	if err := b.runDBOS(ctx); err != nil {
		return err
	}
	return b.runAlone(ctx)
}

// drainWeir returns the rows that a turn wrote.
func (b *bench) drainWeir(ctx context.Context, name, template, agent, text string, admitted bool) (turnRows, error) {
	d, err := b.backlog(ctx, template, agent, text, b.size.backlog, admitted)
	if err != nil {
		return turnRows{}, err
	}
	defer d.drop()
	before, err := d.written(ctx)
	if err != nil {
		return turnRows{}, err
	}
	began := time.Now()
	base := b.pg.cpu()
	p, _, err := b.startWeir(ctx, d, "worker", "--slots", fmt.Sprint(turnWidth))
	if err != nil {
		return turnRows{}, err
	}
	defer p.kill()
	m := &meter{p: p, pg: b.pg, began: began, base: base} // its start belongs to it
	if err := b.drained(ctx, name, d, m, b.size.backlog, weirBacklog); err != nil {
		return turnRows{}, err
	}
	p.kill()
	if err := d.alone(ctx); err != nil {
		return turnRows{}, err
	}
	after, err := d.written(ctx)
	return rowsOfTurn(before, after, b.size.backlog), err
}

// drained waits until a backlog is worked off and records it.
func (b *bench) drained(ctx context.Context, name string, d *database, m *meter, turns int, k backlogKind) error {
	err := until(ctx, 50*time.Millisecond, 3*time.Minute, "the end of the backlog", func() (bool, error) {
		var last, left bool
		err := d.pool.QueryRow(ctx, k.last).Scan(&last)
		if err == nil && last {
			err = d.pool.QueryRow(ctx, k.left).Scan(&left)
		}
		return last && !left, err
	})
	_, own, pg := m.stop()
	if err != nil {
		return fmt.Errorf("%w: %s", err, m.p.lastWords())
	}
	var done int
	var span float64
	if err := d.pool.QueryRow(ctx, k.done).Scan(&done); err != nil {
		return err
	}
	if done != turns {
		return fmt.Errorf("%d of %d turns are done: %s", done, turns, m.p.lastWords())
	}
	if err := d.pool.QueryRow(ctx, k.span).Scan(&span); err != nil {
		return err
	}
	b.addTurns(name, float64(turns)/span, own, pg, turns)
	return nil
}

func (b *bench) addTurns(name string, rate, own, pg float64, turns int) {
	n := float64(turns)
	b.out.add(name, "turns/s", rate)
	b.out.add(name, "CPU ms/turn", (own+pg)/n*1e3)
	b.out.add(name, "of it own", own/n*1e3)
	b.out.add(name, "of it pg", pg/n*1e3)
}

// drainHand measures a design of the bench's own on River.
func (b *bench) drainHand(ctx context.Context, name string, turns int, c childConfig) error {
	d, err := b.handBacklog(ctx, turns)
	if err != nil {
		return err
	}
	return b.drainChild(ctx, name, d, turns, c, handBacklog)
}

// drainContract measures hand-written work on weir's own tables.
func (b *bench) drainContract(ctx context.Context, name string, c childConfig) error {
	d, err := b.backlog(ctx, "four_steps", withTools, fourStepsText, b.size.backlog, true)
	if err != nil {
		return err
	}
	return b.drainChild(ctx, name, d, b.size.backlog, c, weirBacklog)
}

func (b *bench) drainChild(ctx context.Context, name string, d *database, turns int, c childConfig, k backlogKind) error {
	defer d.drop()
	c.URL = d.url
	p, _, err := b.spawnChild(ctx, "turns", c)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	defer p.kill()
	m := b.meter(p)
	if err := p.say("go"); err != nil {
		return err
	}
	if err := b.drained(ctx, name, d, m, turns, k); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// handBacklog is a database with n jobs of hand-built turns.
func (b *bench) handBacklog(ctx context.Context, n int) (*database, error) {
	if err := b.makeRiverTemplate(ctx); err != nil {
		return nil, err
	}
	name := fmt.Sprintf("template_jobs_%d", n)
	err := b.pg.template(ctx, name, riverTemplate, func(url string) error {
		pool, err := openPool(ctx, url, 2)
		if err != nil {
			return err
		}
		defer pool.Close()
		return insertJobs(ctx, pool, n)
	})
	if err != nil {
		return nil, err
	}
	return b.pg.clone(ctx, name)
}

func insertJobs(ctx context.Context, pool *pgxpool.Pool, n int) error {
	client, err := newInserter(pool, defaultCooldown)
	if err != nil {
		return err
	}
	jobs := make([]river.InsertManyParams, n)
	for i := range jobs {
		jobs[i] = river.InsertManyParams{Args: handTurn{Run: int64(i)}}
	}
	for chunk := range slices.Chunk(jobs, 10_000) {
		if _, err := client.InsertManyFast(ctx, chunk); err != nil {
			return err
		}
	}
	return nil
}

// turnRows is how many rows of each kind a turn writes.
type turnRows struct {
	RunUpdates, SessionUpdates, Steps, Events, Usage, Facts int
}

func (r turnRows) String() string {
	return fmt.Sprintf("%d updates of run, %d of session, %d steps, %d events, %d usage, %d facts",
		r.RunUpdates, r.SessionUpdates, r.Steps, r.Events, r.Usage, r.Facts)
}

// tableWrites counts what was written to a table.
type tableWrites struct{ inserts, updates int64 }

func (d *database) written(ctx context.Context) (map[string]tableWrites, error) {
	rows, err := d.pool.Query(ctx, `SELECT relname, n_tup_ins, n_tup_upd FROM pg_stat_user_tables`)
	if err != nil {
		return nil, err
	}
	tables := map[string]tableWrites{}
	var name string
	var w tableWrites
	_, err = pgx.ForEachRow(rows, []any{&name, &w.inserts, &w.updates}, func() error {
		tables[name] = w
		return nil
	})
	return tables, err
}

func rowsOfTurn(before, after map[string]tableWrites, turns int) turnRows {
	each := func(n int64) int { return int(math.Round(float64(n) / float64(turns))) }
	inserts := func(table string) int { return each(after[table].inserts - before[table].inserts) }
	updates := func(table string) int { return each(after[table].updates - before[table].updates) }
	return turnRows{
		RunUpdates: updates("run"), SessionUpdates: updates("session"), Steps: inserts("step"), Events: inserts("event"),
		Usage: inserts("usage"), Facts: inserts("fact"),
	}
}

// runAlone measures single turns on an otherwise idle system: from the start of
// the first writing transaction, and from the accept's commit, to the commit
// of the last.
func (b *bench) runAlone(ctx context.Context) error {
	weir, err := b.weirDatabase(ctx)
	if err != nil {
		return err
	}
	defer weir.drop()
	p, _, err := b.startWeir(ctx, weir, "worker")
	if err != nil {
		return err
	}
	defer p.kill()
	a, err := newAccepter(ctx, weir.url)
	if err != nil {
		return err
	}
	defer a.close()
	err = b.aloneOf(ctx, weirAlone, weir, func(ctx context.Context) error {
		_, err := a.accept(ctx, withTools, fourStepsText)
		return err
	}, `SELECT pg_xact_commit_timestamp(e.xmin), r.started_at, pg_xact_commit_timestamp(r.xmin)
		FROM run r JOIN event e ON e.session_id = r.session_id AND e.seq = r.request_seq WHERE r.state = 'completed' ORDER BY r.started_at`)
	if err != nil {
		return err
	}
	p.kill()

	hand, err := b.riverDatabase(ctx)
	if err != nil {
		return err
	}
	defer hand.drop()
	piped, _, err := b.spawnChild(ctx, "turns", childConfig{URL: hand.url, Kind: "piped", Steps: 4, Width: 10})
	if err != nil {
		return err
	}
	defer piped.kill()
	if err := piped.say("go"); err != nil {
		return err
	}
	client, err := newInserter(hand.pool, shortestCooldown)
	if err != nil {
		return err
	}
	return b.aloneOf(ctx, pipedAlone, hand, func(ctx context.Context) error {
		_, err := acceptWithRiver(ctx, hand.pool, client, "{}")
		return err
	}, `SELECT pg_xact_commit_timestamp(r.accepted::xid), first.at, pg_xact_commit_timestamp(last.xmin)
		FROM run r JOIN step first ON first.run = r.id AND first.seq = 0 JOIN step last ON last.run = r.id AND last.seq = 3 ORDER BY first.at`)
}

// aloneOf accepts one turn after another; times selects of each that is done
// the accept's commit, the beginning of the work, and its last commit.
func (b *bench) aloneOf(ctx context.Context, name string, d *database, accept func(context.Context) error, times string) error {
	const warmUp = 10
	turns := warmUp + b.size.aloneTurns
	if err := pause(ctx, 300*time.Millisecond); err != nil { // the worker's first polls are over
		return err
	}
	for range turns {
		if err := accept(ctx); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := pause(ctx, idleGap()); err != nil {
			return err
		}
	}
	var work, total []time.Duration
	err := until(ctx, 20*time.Millisecond, 10*time.Second, strings.TrimSpace(name), func() (bool, error) {
		rows, err := d.pool.Query(ctx, times)
		if err != nil {
			return false, err
		}
		work, total = nil, nil
		var accepted, began, ended time.Time
		_, err = pgx.ForEachRow(rows, []any{&accepted, &began, &ended}, func() error {
			work, total = append(work, ended.Sub(began)), append(total, ended.Sub(accepted))
			return nil
		})
		return len(work) == turns, err
	})
	if err != nil {
		return err
	}
	work, total = work[warmUp:], total[warmUp:]
	slices.Sort(work)
	slices.Sort(total)
	b.out.add(name, "work p50 ms", ms(quantile(work, 0.5)))
	b.out.add(name, "total p50 ms", ms(quantile(total, 0.5)))
	b.out.add(name, "total p99 ms", ms(quantile(total, 0.99)))
	return nil
}
