package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weir-run/weir/db"
)

// The states of a database in which the same worker is measured.
const (
	fleetEmpty    = "nothing else"
	fleetWaiting  = "a million waiting"
	fleetFinished = "a million finished"
	fleetPinned   = "an old snapshot held"
	fleetTenants  = "200 tenants"
	fleetAlone    = "the admitter alone, 200 tenants"
	fleetStarts   = "starts, idle"
	fleetBusy     = "starts, while a million wait in turns_bg"
)

const manyTenants = 200

var fleetSection = section{
	name: "fleet", title: "one worker's turns of one step, by what else the database holds", run: (*bench).runFleet,
	goals: []goal{
		atLeast(0.8, "turns/s with a million waiting", series{fleetWaiting, "turns/s"}, series{fleetEmpty, "turns/s"}),
		atLeast(0.8, "turns/s with a million finished", series{fleetFinished, "turns/s"}, series{fleetEmpty, "turns/s"}),
		atLeast(0.5, "turns/s while vacuum is held up", series{fleetPinned, "turns/s"}, series{fleetEmpty, "turns/s"}),
		atLeast(0.85, "turns/s of 200 tenants, of one", series{fleetTenants, "turns/s"}, series{fleetEmpty, "turns/s"}),
		atLeast(3000, "admissions/s of 200 tenants", series{fleetAlone, "admissions/s"}, series{}),
		atMost(3, "start p99 of turns while turns_bg drains, of idle", series{fleetBusy, "start p99 ms"}, series{fleetStarts, "start p99 ms"}),
	},
}

func (b *bench) runFleet(ctx context.Context, _ int) error {
	small := seeding{waiting: b.size.fleetTurns, tenants: 1, queue: "turns"}
	million, finished, many, background := small, small, small, small
	million.waiting = b.size.million
	finished.finished = b.size.million
	many.tenants = manyTenants
	background.waiting, background.queue = b.size.million, "turns_bg"
	for _, c := range []struct {
		name   string
		seeded seeding
		pinned bool
	}{
		{fleetEmpty, small, false}, {fleetWaiting, million, false}, {fleetFinished, finished, false}, {fleetPinned, small, true}, {fleetTenants, many, false},
	} {
		if err := b.fleetTurns(ctx, c.name, c.seeded, c.pinned); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	if err := b.fleetAdmissions(ctx, many); err != nil {
		return fmt.Errorf("%s: %w", fleetAlone, err)
	}
	for _, c := range []struct {
		name   string
		seeded seeding
	}{{fleetStarts, seeding{tenants: 1, queue: "turns_bg"}}, {fleetBusy, background}} {
		if err := b.fleetStarts(ctx, c.name, c.seeded); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

// seeding is what a database holds before a worker starts: rows as accepts and
// workers leave them, written set by set.
type seeding struct {
	waiting, finished int
	tenants           int
	queue             string
}

func (s seeding) template() string {
	return fmt.Sprintf("template_fleet_%d_%d_%d_%s", s.waiting, s.finished, s.tenants, s.queue)
}

const seedSQL = `
WITH made AS MATERIALIZED (
    SELECT gen_random_uuid() AS session, gen_random_uuid() AS run, g, CASE WHEN $2 = 1 THEN 'default' ELSE 't' || g % $2 END AS tenant
    FROM generate_series(1, $1::int) g
), sessions AS (
    INSERT INTO session (tenant_id, id, conversation_ref, external_id, channel_type, scope, agent, owner_token, event_seq, head_run_id, turns)
    SELECT tenant, session, 'cv_' || session, $4 || g, 'rpc', '[]', 'default', 'bench', 2, CASE WHEN $4 LIKE 'w%' THEN run END, 1 FROM made
), events AS (
    INSERT INTO event (session_id, seq, tenant_id, type, run_id, content)
    SELECT session, 1, tenant, 'agent.request'::event_type, run, '{"text":"hello there"}'::json FROM made
    UNION ALL SELECT session, 2, tenant, 'agent.status', run, '{"phase":"thinking"}' FROM made
)
INSERT INTO run (id, tenant_id, kind, queue, root_run_id, agent, agent_version, session_id, request_seq, in_lane, owner_token, input, time_left_ms,
                 ready_at, state, started_at, finished_at, end_reason)
SELECT run, tenant, 'turn', $3, run, 'default', 1, session, 1, true, 'bench', '{"text":"hello there"}', 600000,
       CASE WHEN $4 LIKE 'w%' THEN clock_timestamp() END, CASE WHEN $4 LIKE 'w%' THEN 'queued' ELSE 'completed' END::run_state,
       CASE WHEN $4 LIKE 'f%' THEN now() END, CASE WHEN $4 LIKE 'f%' THEN now() END, CASE WHEN $4 LIKE 'f%' THEN 'completed' END
FROM made`

func (b *bench) fleetDatabase(ctx context.Context, s seeding) (*database, error) {
	if err := b.makeWeirTemplate(ctx); err != nil {
		return nil, err
	}
	err := b.pg.template(ctx, s.template(), weirTemplate, func(url string) error {
		pool, err := openPool(ctx, url, 1)
		if err != nil {
			return err
		}
		defer pool.Close()
		if s.tenants > 1 {
			for _, statement := range []string{
				`INSERT INTO tenant (id) SELECT 't' || g FROM generate_series(0, $1 - 1) g`,
				`INSERT INTO agent (tenant_id, name, id, version) SELECT 't' || g, 'default', gen_random_uuid(), 1 FROM generate_series(0, $1 - 1) g`,
				`INSERT INTO agent_version (tenant_id, name, version, config)
					SELECT 't' || g, 'default', 1, (SELECT config FROM agent_version WHERE tenant_id = 'default' AND name = 'default' LIMIT 1) FROM generate_series(0, $1 - 1) g`,
			} {
				if _, err := pool.Exec(ctx, statement, s.tenants); err != nil {
					return err
				}
			}
		}
		const batch = 100_000
		for _, part := range []struct {
			kind string
			n    int
		}{{"f", s.finished}, {"w", s.waiting}} {
			for done := 0; done < part.n; done += batch {
				if _, err := pool.Exec(ctx, seedSQL, min(batch, part.n-done), s.tenants, s.queue, part.kind+fmt.Sprint(done/batch)); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return b.pg.clone(ctx, s.template())
}

// fleetTurns counts what one worker finishes.
func (b *bench) fleetTurns(ctx context.Context, name string, s seeding, pinned bool) error {
	d, err := b.fleetDatabase(ctx, s)
	if err != nil {
		return err
	}
	defer d.drop()
	if pinned {
		conn, err := pgx.Connect(ctx, d.url)
		if err != nil {
			return err
		}
		defer conn.Close(context.WithoutCancel(ctx))
		if _, err := conn.Exec(ctx, `BEGIN ISOLATION LEVEL REPEATABLE READ`); err != nil {
			return err
		}
		if _, err := conn.Exec(ctx, `SELECT count(*) FROM tenant`); err != nil {
			return err
		}
	}
	var before, after int
	count := func(n *int) error {
		return d.pool.QueryRow(ctx, `SELECT count(*) FROM event WHERE type = 'agent.response'`).Scan(n)
	}
	p, _, err := b.startWeir(ctx, d, "worker", "--slots", fmt.Sprint(turnWidth))
	if err != nil {
		return err
	}
	defer p.kill()
	if err := pause(ctx, time.Second); err != nil {
		return err
	}
	began := time.Now()
	if err := count(&before); err != nil {
		return err
	}
	for time.Since(began) < b.size.fleetFor { // until time, or the backlog, is up
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
		if err := count(&after); err != nil {
			return err
		}
		if after > s.waiting*9/10 {
			break
		}
	}
	wall := time.Since(began)
	if after <= before {
		return fmt.Errorf("nothing was finished: %s", p.lastWords())
	}
	b.out.add(name, "turns/s", float64(after-before)/wall.Seconds())
	return nil
}

// fleetAdmissions measures the rounds of an admitter whose fleet starts at once
// what it is given.
func (b *bench) fleetAdmissions(ctx context.Context, s seeding) error {
	d, err := b.fleetDatabase(ctx, s)
	if err != nil {
		return err
	}
	defer d.drop()
	a, err := newAccepter(ctx, d.url)
	if err != nil {
		return err
	}
	defer a.close()
	config, err := pgx.ParseConfig(d.url)
	if err != nil {
		return err
	}
	conn, err := pgx.ConnectConfig(ctx, db.HotConfig(config))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if err := db.RegisterTypes(ctx, conn); err != nil {
		return err
	}
	if _, err := d.pool.Exec(ctx, `INSERT INTO worker (id, hostname, pid, version, queues, queue_slots, slots, lease_ms)
		VALUES (gen_random_uuid(), 'bench', 1, 'bench', '{turns}', '{1000}', 1000, 3600000)`); err != nil {
		return err
	}
	admitter := a.runs.NewAdmitter()
	admitted, took := 0, time.Duration(0)
	for admitted < s.waiting/2 && took < b.size.fleetFor {
		began := time.Now()
		if _, err := admitter.Round(ctx, conn); err != nil {
			return err
		}
		took += time.Since(began)
		tag, err := d.pool.Exec(ctx, `UPDATE run SET state = 'completed', finished_at = now() WHERE state = 'queued' AND admitted_at IS NOT NULL`)
		if err != nil {
			return err
		}
		admitted += int(tag.RowsAffected())
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
	b.out.add(fleetAlone, "admissions/s", float64(admitted)/took.Seconds())
	return nil
}

// fleetStarts measures how soon an interactive turn starts.
func (b *bench) fleetStarts(ctx context.Context, name string, s seeding) error {
	d, err := b.fleetDatabase(ctx, s)
	if err != nil {
		return err
	}
	defer d.drop()
	p, _, err := b.startWeir(ctx, d, "worker", "--queues", "turns=1000,turns_bg=64,spawns")
	if err != nil {
		return err
	}
	defer p.kill()
	a, err := newAccepter(ctx, d.url)
	if err != nil {
		return err
	}
	defer a.close()
	st := &starter{
		accept: func(ctx context.Context) (string, error) {
			id, err := a.accept(ctx, plain, "!sleep 10m")
			return id.String(), err
		},
		claimed: `SELECT r.id::text, pg_xact_commit_timestamp(e.xmin), pg_xact_commit_timestamp(r.xmin)
			FROM run r JOIN event e ON e.session_id = r.session_id AND e.seq = r.request_seq WHERE r.state = 'running' AND r.queue = 'turns'`,
		db: d,
	}
	if err := pause(ctx, time.Second); err != nil {
		return err
	}
	if _, _, err := st.series(ctx, 10, idleGap); err != nil {
		return err
	}
	commits, _, err := st.series(ctx, b.size.idleStarts, idleGap)
	if err != nil {
		return err
	}
	b.out.add(name, "start p50 ms", ms(quantile(commits, 0.5)))
	b.out.add(name, "start p99 ms", ms(quantile(commits, 0.99)))
	return nil
}
