package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

const (
	killedAny    = "kills, all"
	killedLeader = "  of the worker that leads the reaping"
	killedOther  = "  of the other worker"

	turnsOfKill  = 4 // that the killed worker had in hand
	stepsOfTurn  = 6 // model calls with a tool call each
	resumeLimit  = 30 * time.Second
	workerLease  = 10 * time.Second // the default: a worker judges others after so long
	leaseAndMore = workerLease + 1500*time.Millisecond
)

var resumeSection = section{
	name: "resume", title: "kill -9 of the busy worker -> commit of the claim of its last turn by the idle one", once: true,
	run: (*bench).runResume,
	goals: []goal{
		atMost(1000, "p99 of the kills, ms", series{killedAny, "p99 ms"}, series{}),
		atMost(0, "completed steps that were made again", series{killedAny, "steps repeated"}, series{}),
		atMost(0, "turns that did not complete", series{killedAny, "turns lost"}, series{}),
	},
}

// kill is one worker's death.
type kill struct {
	leader bool
	took   time.Duration // until the last of its turns was claimed again
}

// runResume runs several fleets of two workers, each on a database of its own,
// since a worker may judge others only after a whole lease.
func (b *bench) runResume(ctx context.Context, _ int) error {
	tools, err := newCountingServer()
	if err != nil {
		return err
	}
	defer tools.close()
	fleets := make([]*fleet, b.size.fleets)
	err = parallel(len(fleets), len(fleets), func(i int) error {
		f, err := b.newFleet(ctx, tools)
		if err != nil {
			return err
		}
		fleets[i] = f
		for k := range b.size.kills {
			if err := f.killOne(ctx, (i+k)%2 == 0); err != nil {
				return fmt.Errorf("fleet %d, kill %d: %w", i+1, k+1, err)
			}
		}
		return f.finish(ctx)
	})
	var kills []kill
	repeated, lost, repeats := 0, 0, 0
	for _, f := range fleets {
		if f != nil {
			kills = append(kills, f.kills...)
			repeated, lost, repeats = repeated+f.repeated, lost+f.lost, repeats+f.repeats
			f.close()
		}
	}
	if err != nil {
		return err
	}
	b.addKills(killedAny, kills)
	b.out.add(killedAny, "steps repeated", float64(repeated))
	b.out.add(killedAny, "turns lost", float64(lost))
	b.addKills(killedLeader, slices.DeleteFunc(slices.Clone(kills), func(k kill) bool { return !k.leader }))
	b.addKills(killedOther, slices.DeleteFunc(slices.Clone(kills), func(k kill) bool { return k.leader }))
	b.out.note("%d unfinished tool calls were sent again, as they must, with the same Idempotency-Key", repeats)
	return nil
}

func (b *bench) addKills(name string, kills []kill) {
	took := make([]time.Duration, len(kills))
	for i, k := range kills {
		took[i] = k.took
	}
	slices.Sort(took)
	b.out.add(name, "kills", float64(len(took)))
	b.out.add(name, "p50 ms", ms(quantile(took, 0.5)))
	b.out.add(name, "p99 ms", ms(quantile(took, 0.99)))
	b.out.add(name, "max ms", ms(quantile(took, 1)))
}

// fleet is two workers and what happened to them.
type fleet struct {
	b        *bench
	tools    *countingServer
	db       *database
	accepter *accepter
	older    *member // it leads: it began first
	younger  *member
	script   string

	kills                   []kill
	turns                   []uuid.UUID
	repeated, repeats, lost int
}

type member struct {
	*process
	id    uuid.UUID
	since time.Time
}

func (b *bench) newFleet(ctx context.Context, tools *countingServer) (_ *fleet, err error) {
	f := &fleet{b: b, tools: tools}
	defer func() {
		if err != nil {
			f.close()
		}
	}()
	if f.db, err = b.weirDatabase(ctx); err != nil {
		return nil, err
	}
	_, err = f.db.pool.Exec(ctx, `UPDATE agent_version SET config = $2 WHERE name = $1`, withTools, agentConfig(tools.url))
	if err != nil {
		return nil, err
	}
	if f.accepter, err = newAccepter(ctx, f.db.url); err != nil {
		return nil, err
	}
	var script strings.Builder
	for i := range stepsOfTurn {
		fmt.Fprintf(&script, "!sleep 200ms\n!tool probe {\"n\":%d}\n", i)
	}
	f.script = script.String() + "done"
	if f.older, err = f.join(ctx); err != nil {
		return nil, err
	}
	f.younger, err = f.join(ctx)
	return f, err
}

func (f *fleet) join(ctx context.Context) (*member, error) {
	p, ready, err := f.b.startWeir(ctx, f.db, "worker")
	if err != nil {
		return nil, err
	}
	return &member{p, ready.WorkerID, time.Now()}, nil
}

func (f *fleet) close() {
	if f.accepter != nil {
		f.accepter.close()
	}
	for _, m := range []*member{f.older, f.younger} {
		if m != nil {
			m.kill()
		}
	}
	if f.db != nil {
		f.db.drop()
	}
}

// killOne kills a worker with all the fleet's turns in hand, while the other
// has none, and replaces it.
func (f *fleet) killOne(ctx context.Context, leader bool) error {
	victim, other := f.younger, f.older
	if leader {
		victim, other = f.older, f.younger
	}
	if err := pause(ctx, time.Until(f.younger.since.Add(leaseAndMore))); err != nil {
		return err
	}
	turns, err := f.occupy(ctx, victim, other)
	if err != nil {
		return err
	}
	if err := pause(ctx, 300*time.Millisecond+rand.N(700*time.Millisecond)); err != nil { // somewhere in its steps
		return err
	}
	at := time.Now()
	victim.kill()
	last, err := f.awaitClaims(ctx, turns, victim)
	if err != nil {
		return err
	}
	f.kills = append(f.kills, kill{leader, last.Sub(at)})
	f.turns = append(f.turns, turns...)
	f.older = other
	f.younger, err = f.join(ctx)
	return err
}

// occupy gives turns to one worker; the other is stopped meanwhile, so that it
// takes none.
func (f *fleet) occupy(ctx context.Context, busy, idle *member) (turns []uuid.UUID, err error) {
	if err := idle.signal(syscall.SIGSTOP); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, idle.signal(syscall.SIGCONT)) }()
	if turns, err = f.accepter.acceptMany(ctx, withTools, f.script, turnsOfKill); err != nil {
		return nil, err
	}
	return turns, until(ctx, 5*time.Millisecond, 5*time.Second, "turns of the worker to be killed", func() (bool, error) {
		var held int
		err := f.db.pool.QueryRow(ctx, `SELECT count(*) FROM run WHERE id = ANY ($1) AND worker_id = $2`, turns, busy.id).Scan(&held)
		return held == len(turns), err
	})
}

// awaitClaims returns when the last of the turns was claimed by another worker.
// The turn's next write comes much later than the next look, so the claim is
// still the row's last.
func (f *fleet) awaitClaims(ctx context.Context, turns []uuid.UUID, victim *member) (last time.Time, err error) {
	claimed := map[uuid.UUID]bool{}
	err = until(ctx, 5*time.Millisecond, resumeLimit, "the claims of a dead worker's turns", func() (bool, error) {
		rows, err := f.db.pool.Query(ctx, `SELECT id, pg_xact_commit_timestamp(xmin) FROM run
			WHERE id = ANY ($1) AND epoch > 1 AND worker_id <> $2`, turns, victim.id)
		if err != nil {
			return false, err
		}
		var id uuid.UUID
		var at time.Time
		_, err = pgx.ForEachRow(rows, []any{&id, &at}, func() error {
			if !claimed[id] {
				claimed[id] = true
				if at.After(last) {
					last = at
				}
			}
			return nil
		})
		return len(claimed) == len(turns), err
	})
	return last, err
}

// finish waits until every turn has ended and compares what the tools saw with
// what is stored.
func (f *fleet) finish(ctx context.Context) error {
	err := until(ctx, 50*time.Millisecond, resumeLimit, "the end of the turns", func() (bool, error) {
		var open int
		err := f.db.pool.QueryRow(ctx, `SELECT count(*) FROM run WHERE finished_at IS NULL`).Scan(&open)
		return open == 0, err
	})
	if err != nil {
		return err
	}
	err = f.db.pool.QueryRow(ctx, `SELECT count(*) FROM run WHERE id = ANY ($1) AND state <> 'completed'`, f.turns).Scan(&f.lost)
	if err != nil {
		return err
	}
	rows, err := f.db.pool.Query(ctx, `SELECT call_id, finished_at FROM step WHERE kind = 'tool' AND status = 'done'`)
	if err != nil {
		return err
	}
	var call string
	var finished time.Time
	_, err = pgx.ForEachRow(rows, []any{&call, &finished}, func() error {
		seen := f.tools.calls(call)
		if len(seen) == 0 {
			return fmt.Errorf("call %s is stored as done and was never made", call)
		}
		f.repeats += len(seen) - 1
		for _, c := range seen {
			if c.at.After(finished) || c.key != seen[0].key {
				f.repeated++
			}
		}
		return nil
	})
	return err
}

// countingServer is an http tool that remembers each call.
type countingServer struct {
	url    string
	server *http.Server

	mu   sync.Mutex
	seen map[string][]toolCall
}

type toolCall struct {
	at  time.Time
	key string
}

func newCountingServer() (*countingServer, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &countingServer{url: "http://" + listener.Addr().String() + "/", seen: map[string][]toolCall{}}
	s.server = &http.Server{Handler: s, ReadHeaderTimeout: time.Minute}
	go func() { _ = s.server.Serve(listener) }() // until close
	return s, nil
}

func (s *countingServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	id := r.Header.Get("X-Weir-Call-Id")
	s.seen[id] = append(s.seen[id], toolCall{time.Now(), r.Header.Get("Idempotency-Key")})
	s.mu.Unlock()
	if pause(r.Context(), 150*time.Millisecond+rand.N(150*time.Millisecond)) != nil {
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `{"ok":true}`) // the caller may be dead
}

func (s *countingServer) calls(id string) []toolCall {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.seen[id])
}

func (s *countingServer) close() { _ = s.server.Close() }
