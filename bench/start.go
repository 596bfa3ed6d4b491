package main

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
)

const (
	weirWorker = "weir worker"
	limitStart = "limit: insert, NOTIFY, SKIP LOCKED"
	riverStart = "River Insert, Work, one UPDATE"
)

var startSection = section{
	name: "start", title: "commit of the accept -> commit of the claim in another process, by the server's commit timestamps",
	run: (*bench).runStarts,
	goals: []goal{
		atMost(2.6, "idle p50, of the limit", series{weirWorker, "idle p50 ms"}, series{limitStart, "idle p50 ms"}),
		atMost(1.3, "idle p50, of bare River", series{weirWorker, "idle p50 ms"}, series{riverStart, "idle p50 ms"}),
		atMost(2.5, "idle p99, of the limit", series{weirWorker, "idle p99 ms"}, series{limitStart, "idle p99 ms"}),
		atMost(2, "p99 at 100 arrivals/s, of idle p99", series{weirWorker, "100/s p99 ms"}, series{weirWorker, "idle p99 ms"}),
	},
}

// starter accepts work here, which a process of its own claims.
type starter struct {
	accept func(ctx context.Context) (id string, err error)
	// claimed selects id, commit of the accept and commit of the claim of
	// everything that has been claimed.
	claimed string
	db      *database
	close   func()
}

func (b *bench) runStarts(ctx context.Context, _ int) error {
	for _, contestant := range []struct {
		name string
		open func(context.Context) (*starter, error)
	}{
		{limitStart, func(ctx context.Context) (*starter, error) { return b.handStarter(ctx, "limit") }},
		{weirWorker, b.weirStarter},
		{riverStart, func(ctx context.Context) (*starter, error) { return b.handStarter(ctx, "start") }},
	} {
		if err := b.startsOf(ctx, contestant.name, contestant.open); err != nil {
			return fmt.Errorf("%s: %w", contestant.name, err)
		}
	}
	return nil
}

func (b *bench) startsOf(ctx context.Context, name string, open func(context.Context) (*starter, error)) error {
	s, err := open(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	if err := pause(ctx, 300*time.Millisecond); err != nil { // the worker's first polls are over
		return err
	}
	if _, _, err := s.series(ctx, 10, idleGap); err != nil { // connections and plans
		return err
	}
	commits, calls, err := s.series(ctx, b.size.idleStarts, idleGap)
	if err != nil {
		return err
	}
	b.out.add(name, "idle p50 ms", ms(quantile(commits, 0.5)))
	b.out.add(name, "idle p99 ms", ms(quantile(commits, 0.99)))
	b.out.add(name, "idle from call p50 ms", ms(quantile(calls, 0.5)))
	b.out.add(name, "idle from call p99 ms", ms(quantile(calls, 0.99)))
	commits, _, err = s.series(ctx, b.size.steadyStarts, steadyGap)
	if err != nil {
		return err
	}
	b.out.add(name, "100/s p50 ms", ms(quantile(commits, 0.5)))
	b.out.add(name, "100/s p99 ms", ms(quantile(commits, 0.99)))
	return nil
}

// The gaps between arrivals.
func idleGap() time.Duration   { return 20*time.Millisecond + rand.N(20*time.Millisecond) }
func steadyGap() time.Duration { return 5*time.Millisecond + rand.N(10*time.Millisecond) }

// series accepts n pieces of work, a gap after each, and returns how long each
// took to be claimed: from the accept's commit, and from its call. Both are
// sorted.
func (s *starter) series(ctx context.Context, n int, gap func() time.Duration) (fromCommit, fromCall []time.Duration, err error) {
	var mu sync.Mutex
	called := map[string]time.Time{}
	var wg sync.WaitGroup
	var failed error
	for range n {
		wg.Add(1)
		go func() { // so that a slow accept does not hold back the next arrival
			defer wg.Done()
			at := time.Now()
			id, err := s.accept(ctx)
			mu.Lock()
			defer mu.Unlock()
			called[id] = at
			if err != nil {
				failed = err
			}
		}()
		if err := pause(ctx, gap()); err != nil {
			return nil, nil, err
		}
	}
	wg.Wait()
	if failed != nil {
		return nil, nil, fmt.Errorf("accept: %w", failed)
	}
	err = until(ctx, 20*time.Millisecond, 30*time.Second, "claims", func() (bool, error) {
		rows, err := s.db.pool.Query(ctx, s.claimed)
		if err != nil {
			return false, err
		}
		fromCommit, fromCall = nil, nil
		var id string
		var accepted, claimed time.Time
		_, err = pgx.ForEachRow(rows, []any{&id, &accepted, &claimed}, func() error {
			if at, ours := called[id]; ours {
				fromCommit, fromCall = append(fromCommit, claimed.Sub(accepted)), append(fromCall, claimed.Sub(at))
			}
			return nil
		})
		return len(fromCommit) == n, err
	})
	slices.Sort(fromCommit)
	slices.Sort(fromCall)
	return fromCommit, fromCall, err
}

// weirStarter accepts turns whose first model call takes so long that the
// claim is the last write of the run's row.
func (b *bench) weirStarter(ctx context.Context) (*starter, error) {
	d, err := b.weirDatabase(ctx)
	if err != nil {
		return nil, err
	}
	p, _, err := b.startWeir(ctx, d, "worker", "--slots", "1000")
	if err != nil {
		d.drop()
		return nil, err
	}
	a, err := newAccepter(ctx, d.url)
	if err != nil {
		p.kill()
		d.drop()
		return nil, err
	}
	return &starter{
		accept: func(ctx context.Context) (string, error) {
			id, err := a.accept(ctx, plain, "!sleep 10m")
			return id.String(), err
		},
		claimed: `SELECT r.id::text, pg_xact_commit_timestamp(e.xmin), pg_xact_commit_timestamp(r.xmin)
			FROM run r JOIN event e ON e.session_id = r.session_id AND e.seq = r.request_seq WHERE r.state = 'running'`,
		db: d,
		close: func() {
			a.close()
			p.kill()
			d.drop()
		},
	}, nil
}

func (b *bench) handStarter(ctx context.Context, role string) (*starter, error) {
	d, err := b.riverDatabase(ctx)
	if err != nil {
		return nil, err
	}
	p, _, err := b.spawnChild(ctx, role, childConfig{URL: d.url})
	if err != nil {
		d.drop()
		return nil, err
	}
	s := &starter{
		claimed: `SELECT id::text, pg_xact_commit_timestamp(accepted::xid), pg_xact_commit_timestamp(xmin) FROM run WHERE state = 'running'`,
		db:      d,
		close: func() {
			p.kill()
			d.drop()
		},
	}
	if role == "limit" {
		s.accept = func(ctx context.Context) (id string, err error) {
			var batch pgx.Batch
			batch.Queue("BEGIN")
			batch.Queue("INSERT INTO run (payload) VALUES ('{}') RETURNING id::text").QueryRow(func(row pgx.Row) error { return row.Scan(&id) })
			batch.Queue("SELECT pg_notify('accepted', '')")
			batch.Queue("COMMIT")
			return id, d.pool.SendBatch(ctx, &batch).Close()
		}
		return s, nil
	}
	client, err := newInserter(d.pool, shortestCooldown)
	if err != nil {
		s.close()
		return nil, err
	}
	s.accept = func(ctx context.Context) (string, error) {
		id, err := acceptWithRiver(ctx, d.pool, client, "{}")
		return fmt.Sprint(id), err
	}
	return s, nil
}

// limitChild claims what it is notified of, and does nothing else: no queue can
// be faster.
func limitChild(ctx context.Context, c childConfig, _ *bufio.Reader) error {
	listener, err := pgx.Connect(ctx, c.URL)
	if err != nil {
		return err
	}
	defer listener.Close(ctx)
	if _, err := listener.Exec(ctx, "LISTEN accepted"); err != nil {
		return err
	}
	claimer, err := pgx.Connect(ctx, c.URL)
	if err != nil {
		return err
	}
	defer claimer.Close(ctx)
	fmt.Println("ready")
	for {
		if _, err := listener.WaitForNotification(ctx); err != nil {
			return err
		}
		_, err := claimer.Exec(ctx, `UPDATE run SET state = 'running' WHERE id =
			(SELECT id FROM run WHERE state = 'queued' ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)`)
		if err != nil {
			return err
		}
	}
}

// startChild is a River worker whose work is one claim.
func startChild(ctx context.Context, c childConfig, in *bufio.Reader) error {
	pool, err := openChildPool(ctx, c.URL, 8)
	if err != nil {
		return err
	}
	defer pool.Close()
	client, err := newWorker(pool, river.QueueDefault, 100, func(ctx context.Context, job *river.Job[handTurn]) error {
		_, err := pool.Exec(ctx, `UPDATE run SET state = 'running' WHERE id = $1 AND state = 'queued'`, job.Args.Run)
		return err
	})
	if err != nil {
		return err
	}
	if err := client.Start(ctx); err != nil {
		return err
	}
	fmt.Println("ready")
	_, err = in.ReadString('\n') // until the bench kills us
	return err
}
