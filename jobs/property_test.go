package jobs

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/weir-run/weir/db"
)

// TestAnyOrder runs random changes, several at once and through two state
// machines, and checks after each round what must hold whatever happened. At
// the end a healthy fleet finishes the rest: it cannot when a wake-up, a nudge
// or a lane's next turn was lost. -rapid.checks raises the number of sequences
// from 100; -rapid.seed repeats the drawn part of a run.
func TestAnyOrder(t *testing.T) {
	t.Parallel()
	require.NoError(t, flag.Set("rapid.nofailfile", "true"))
	f := setup(t)
	machines := []*fixture{f, f.another()}
	faults := &faults{}
	for _, m := range machines {
		m.runs.committer.afterLoad, m.runs.committer.afterCommit = faults.strike, faults.strike
	}
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(machines)
		faults.every.Store(pickFrom(t, "fault every", []int64{0, 0, 0, 7}))
		w.begin()
		for range 2 + pick(t, "rounds", 6) {
			w.round(t)
		}
		faults.every.Store(0)
		w.drain(t)
	})
}

// pick draws a number below n, all as likely; rapid prefers the small.
func pick(t *rapid.T, label string, n int) int {
	return rapid.Custom(func(t *rapid.T) (i int) {
		for range 10 {
			i *= 2
			if rapid.Bool().Draw(t, "") {
				i++
			}
		}
		return i % n
	}).Draw(t, label)
}

func pickFrom[T any](t *rapid.T, label string, from []T) T { return from[pick(t, label, len(from))] }

// faults break every n-th seam of units: before a unit's writes, or after its
// commit, whose answer is then lost.
type faults struct{ every, seams atomic.Int64 }

var errBroken = &pgconn.PgError{Code: "08006", Message: "connection broken by a test"}

func (f *faults) strike(*unit) error {
	if n := f.every.Load(); n > 0 && f.seams.Add(1)%n == 0 {
		return errBroken
	}
	return nil
}

// world is a tenant of its own, and what a sequence knows of it.
type world struct {
	ctx      context.Context
	machines []*fixture
	tenant   string

	mu        sync.Mutex
	runs      []*known
	byID      map[uuid.UUID]*known
	hands     []*hand
	hosts     []*host
	accepted  map[string]keyed // by idempotency key
	conflicts map[string][]byte
	killed    map[uuid.UUID]bool // roots whose kill was answered
	trace     []string
	broken    []string
	numbers   atomic.Int64 // also the clock of the model
}

// known is a run that was accepted or spawned, and what was answered about it.
type known struct {
	ref        Ref
	root       uuid.UUID
	final      string           // once it was seen
	steps      map[int32]string // outputs of committed steps
	epochs     map[int32]bool   // of its claims
	wakes      [][2]int64       // when they were asked for and when answered
	cancelling bool
	ended      db.RunState // by an answer
}

// hand is a worker's hold of a run. It stays when the run is lost: a zombie's.
type hand struct {
	run  *Run
	k    *known
	host *host
	next int32 // seq of the next step
	over bool  // the run was taken or given away, and that was answered
	seen int64 // when it last had an answer, and with it the run's wake counter
	busy bool  // an attempt does one thing at a time
}

type host struct {
	id   uuid.UUID
	dead bool
}

type keyed struct {
	run    uuid.UUID
	digest string
}

var worlds atomic.Int64

func newWorld(machines []*fixture) *world {
	w := &world{
		ctx: context.Background(), machines: machines, tenant: "t" + strconv.FormatInt(worlds.Add(1), 10),
		byID: map[uuid.UUID]*known{}, accepted: map[string]keyed{}, conflicts: map[string][]byte{}, killed: map[uuid.UUID]bool{},
	}
	for range 3 {
		w.hosts = append(w.hosts, &host{id: machines[0].worker()})
	}
	return w
}

// begin has turns at work, so that there is something to disturb.
func (w *world) begin() {
	var ops []func()
	for i := range 3 {
		m := w.machines[i%len(w.machines)]
		ops = append(ops, func() {
			w.accept(m, i, "", 0, 1, false)
			w.claimJob(m, w.hosts[i], 0)
		})
	}
	_, err := w.machines[0].pool.Exec(w.ctx, `UPDATE queue SET open = true, free = 1000000, looked_at = 'infinity'`)
	w.note(err, nil, "queues are open")
	w.atOnce(false, ops)
	for _, h := range w.hands {
		h.busy = false
	}
}

// failf notes a broken promise: rapid's T is not for goroutines.
func (w *world) failf(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.broken = append(w.broken, fmt.Sprintf(format, args...))
}

// note writes to the trace that a failure shows, and fails on errors other
// than those allowed.
func (w *world) note(err error, allowed []error, format string, args ...any) {
	what := fmt.Sprintf(format, args...)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.trace = append(w.trace, fmt.Sprintf("%s: %v", what, err))
	if err != nil && !slices.ContainsFunc(allowed, func(e error) bool { return errors.Is(err, e) }) {
		w.broken = append(w.broken, fmt.Sprintf("%s answered %v", what, err))
	}
}

// round draws changes, makes them at once and checks everything. With
// "together" all are queued before the first is taken, so that those of one
// writer share a unit.
func (w *world) round(t *rapid.T) {
	together := rapid.Bool().Draw(t, "together")
	var ops []func()
	for range 2 + pick(t, "ops", 7) {
		m := w.machines[pick(t, "machine", len(w.machines))]
		op := w.draw(t, m)
		if op == nil { // nobody is at work
			h := w.hosts[pick(t, "host", len(w.hosts))]
			op = func() { w.claimJob(m, h, 0) }
		}
		ops = append(ops, op)
	}
	w.note(nil, nil, "--- together %v", together)
	w.atOnce(together, ops)
	for _, h := range w.hands {
		h.busy = false
	}
	w.check(t)
}

func (w *world) atOnce(together bool, ops []func()) {
	var release []func()
	if together {
		for _, m := range w.machines {
			release = append(release, occupy(m.runs.committer))
		}
	}
	var wg sync.WaitGroup
	for _, op := range ops {
		wg.Add(1)
		go func() {
			defer wg.Done()
			op()
		}()
	}
	if together {
		// Some look something up first, or need no committer at all.
		for limit := time.Now().Add(4 * time.Millisecond); time.Now().Before(limit) && w.queued() < len(ops); {
			time.Sleep(100 * time.Microsecond)
		}
		for _, f := range release {
			f()
		}
	}
	wg.Wait()
}

func (w *world) queued() (n int) {
	for _, m := range w.machines {
		for _, ch := range m.runs.committer.writers {
			n += len(ch)
		}
	}
	return n
}

// occupy makes the writers of c wait, so that ops gather, until release.
func occupy(c *committer) (release func()) {
	free := make(chan struct{})
	for _, ch := range c.writers {
		o := &gateOp{in: make(chan struct{}), free: free}
		ch <- &item{op: o, ctx: context.Background(), since: time.Now(), result: make(chan error, 1)}
		<-o.in
	}
	return func() { close(free) }
}

// gateOp keeps its writer until it is freed.
type gateOp struct {
	in, free chan struct{}
	once     sync.Once
}

func (o *gateOp) lane() uuid.UUID { return uuid.Nil }

func (o *gateOp) needs(*needs) {
	o.once.Do(func() { close(o.in) })
	<-o.free
}

func (o *gateOp) apply(*unit) error { return nil }

var drawnOps = strings.Fields(`accept accept accept claim claim claim claim claim claim step step step park park park wake expire
	cancel cancel kill spawn spawn spawn spawn finish finish finish finish release die renudge spare usage timeout promote giveback
	gate gate admit admit admit`)

// draw picks a change and what it concerns; nil when there is nothing for it.
func (w *world) draw(t *rapid.T, m *fixture) func() {
	run := func() *known { // the youngest are the liveliest
		n := min(len(w.runs), 10)
		if n == 0 {
			return nil
		}
		return w.runs[len(w.runs)-1-pick(t, "run", n)]
	}
	hold := func() *hand {
		zombie := pick(t, "zombie", 6) == 0
		var free []*hand
		for i := len(w.hands) - 1; i >= 0 && len(free) < 6; i-- {
			if h := w.hands[i]; !h.busy && (zombie || !h.over) {
				free = append(free, h)
			}
		}
		if len(free) == 0 {
			return nil
		}
		h := free[pick(t, "hand", len(free))]
		h.busy = true
		return h
	}
	about := func(f func(*known)) func() {
		if k := run(); k != nil {
			return func() { f(k) }
		}
		return nil
	}
	by := func(f func(*hand)) func() {
		if h := hold(); h != nil {
			return func() { f(h) }
		}
		return nil
	}
	switch op := pickFrom(t, "op", drawnOps); op {
	case "accept":
		session := pick(t, "session", 3)
		key := pickFrom(t, "key", []string{"", "", "a", "b"})
		content := pick(t, "content", 4) / 3 // seldom another
		hasty := pick(t, "hasty", 6) == 0
		room := pickFrom(t, "room", []int{0, 1, 3})
		return func() { w.accept(m, session, key, content, room, hasty) }
	case "claim":
		h := w.hosts[pick(t, "host", len(w.hosts))]
		skip := pick(t, "skip", 3)
		return func() { w.claimJob(m, h, skip) }
	case "spare":
		h := w.hosts[pick(t, "host", len(w.hosts))]
		return about(func(k *known) { w.claim(m, h, k) })
	case "step":
		started := rapid.Bool().Draw(t, "started")
		return by(func(h *hand) { w.step(m, h, started) })
	case "park":
		p := Park{
			Kind: pickFrom(t, "kind", []db.WaitKind{db.WaitKindChildren, db.WaitKindTimer, db.WaitKindRateLimit}),
			For:  pickFrom(t, "for", []time.Duration{0, time.Hour}), Failed: rapid.Bool().Draw(t, "failed"),
		}
		switch p.Kind {
		case db.WaitKindChildren:
			p.For = time.Hour // only the children may end it
		case db.WaitKindRateLimit:
			p.Key, p.Limit = "provider", time.Millisecond
		}
		return by(func(h *hand) { w.advance(m, h, "park", Advance{Park: &p}) })
	case "release":
		after := pickFrom(t, "after", []time.Duration{0, time.Millisecond})
		return by(func(h *hand) { w.advance(m, h, "release", Advance{Release: &Release{After: after}}) })
	case "finish":
		failed := pick(t, "failed", 4) == 0
		return by(func(h *hand) { w.finish(m, h, failed) })
	case "spawn":
		return by(func(h *hand) { w.spawn(m, h) })
	case "usage":
		again := rapid.Bool().Draw(t, "again")
		return by(func(h *hand) { w.usage(m, h, again) })
	case "giveback":
		return by(func(h *hand) {
			w.taken(h.k, func() (bool, error) { return m.runs.GiveBack(w.ctx, h.run.ID, h.host.id) }, "give back")
		})
	case "timeout":
		return about(func(k *known) {
			w.taken(k, func() (bool, error) { return m.runs.TimeOut(w.ctx, k.ref) }, "time out")
		})
	case "wake":
		kind := pickFrom(t, "by", []db.WaitKind{db.WaitKindChildren, db.WaitKindTimer, db.WaitKindRateLimit})
		return about(func(k *known) {
			asked := w.numbers.Add(1)
			_, err := m.runs.Wake(w.ctx, k.ref, kind)
			w.note(err, nil, "wake %s by %s", k.ref.ID, kind)
			w.mu.Lock()
			defer w.mu.Unlock()
			k.wakes = append(k.wakes, [2]int64{asked, w.numbers.Add(1)})
		})
	case "expire":
		return about(func(k *known) {
			_, err := m.runs.Expire(w.ctx, k.ref)
			w.note(err, nil, "expire %s", k.ref.ID)
		})
	case "renudge":
		return about(func(k *known) {
			_, err := m.runs.Renudge(w.ctx, k.ref)
			w.note(err, nil, "renudge %s", k.ref.ID)
		})
	case "promote":
		return about(func(k *known) {
			done, err := m.runs.PromoteLane(w.ctx, k.ref.Session)
			w.note(err, nil, "promote lane %s", k.ref.Session)
			if done {
				w.failf("lane %s needed a repair", k.ref.Session)
			}
		})
	case "cancel":
		return about(func(k *known) { w.cancel(m, k) })
	case "kill":
		if rapid.Bool().Draw(t, "really") {
			return about(func(k *known) { w.kill(m, k.root) })
		}
	case "gate": // somebody waits, or nobody does
		open := rapid.Bool().Draw(t, "open")
		return func() {
			_, err := m.pool.Exec(w.ctx, `UPDATE queue SET open = $1`, open)
			w.note(err, nil, "queues are open: %v", open)
		}
	case "admit":
		return func() { w.note(m.admit(), nil, "admit") }
	case "die":
		i := pick(t, "host", len(w.hosts))
		reapers := w.machines[:1+pick(t, "reapers", len(w.machines))]
		counts, solitary := rapid.Bool().Draw(t, "counts"), pick(t, "solitary", 6) == 0
		h := w.hosts[i]
		w.hosts[i] = &host{id: m.worker()}
		return func() { w.die(h, reapers, counts, solitary) }
	default:
		panic(op)
	}
	return nil
}

func (w *world) accept(m *fixture, session int, key string, content, room int, hasty bool) {
	name := "s" + strconv.Itoa(session)
	p := AcceptParams{
		TenantID: w.tenant, Session: m.session(name), Input: json.RawMessage(`{"text":"hi"}`), Key: key, KeyScope: "accept",
		Terms: func(context.Context, string) (Terms, error) {
			t := Terms{Agent: "default", Version: 1, TurnTimeout: time.Minute, QueueCap: room}
			if hasty {
				t.TurnTimeout = 0
			}
			return t, nil
		},
	}
	if key != "" { // a key always means one session
		p.Session = m.session("s" + strconv.Itoa(int(key[0])%3))
		p.Digest = []byte(strconv.Itoa(content))
	}
	a, err := m.runs.Accept(w.ctx, p)
	var busy *BusyError
	var conflict *ConflictError
	switch {
	case errors.As(err, &busy):
		w.note(nil, nil, "accept in %s, key %q: busy", name, key)
		return
	case errors.As(err, &conflict):
		w.note(nil, nil, "accept in %s, key %q: conflict", name, key)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.conflicts[key] = p.Digest
		return
	case err != nil:
		w.note(err, nil, "accept in %s, key %q", name, key)
		return
	}
	w.note(nil, nil, "accept in %s, key %q: %s at %d, duplicate %v", name, key, a.RunID, a.Position, a.Duplicate)
	w.mu.Lock()
	defer w.mu.Unlock()
	if key != "" {
		if had, ok := w.accepted[key]; ok && had != (keyed{a.RunID, string(p.Digest)}) {
			w.broken = append(w.broken, fmt.Sprintf("key %q stands for %v and %s", key, had, a.RunID))
		}
		w.accepted[key] = keyed{a.RunID, string(p.Digest)}
	}
	if !a.Duplicate {
		w.learn(&known{ref: a.Ref(), root: a.RunID})
	}
}

func (w *world) learn(k *known) {
	k.steps, k.epochs = map[int32]string{}, map[int32]bool{}
	w.runs = append(w.runs, k)
	w.byID[k.ref.ID] = k
}

// claimJob does what a worker does with a River job: fetch it, claim its run.
func (w *world) claimJob(m *fixture, h *host, skip int) {
	var id uuid.UUID
	err := m.pool.QueryRow(w.ctx, `
		UPDATE river_job SET state = 'completed', finalized_at = now()
		WHERE id = (SELECT j.id FROM river_job j JOIN run r ON r.id = (j.args ->> 'run_id')::uuid
		            WHERE j.state = 'available' AND r.tenant_id = $1 ORDER BY j.id OFFSET $2 LIMIT 1 FOR UPDATE OF j SKIP LOCKED)
		RETURNING (args ->> 'run_id')::uuid`, w.tenant, skip).Scan(&id)
	if errors.Is(err, pgx.ErrNoRows) {
		return
	} else if err != nil {
		w.note(err, nil, "fetch a job")
		return
	}
	w.mu.Lock()
	k := w.byID[id]
	w.mu.Unlock()
	if k == nil { // accepted in this round, not yet answered to the test
		row, err := m.runs.refOf(w.ctx, w.tenant, id)
		if err != nil {
			w.note(err, nil, "look up %s", id)
			return
		}
		_, err = m.runs.Renudge(w.ctx, row)
		w.note(err, nil, "renudge %s", id)
		return
	}
	w.claim(m, h, k)
}

func (w *world) claim(m *fixture, h *host, k *known) *hand {
	w.mu.Lock()
	stored := len(k.steps)
	w.mu.Unlock()
	run, err := m.runs.Claim(w.ctx, h.id, k.ref.ID)
	w.note(err, []error{ErrNotQueued, ErrWorkerGone}, "claim %s by %s", k.ref.ID, h.id)
	if errors.Is(err, ErrWorkerGone) {
		_, err := m.runs.Renudge(w.ctx, k.ref)
		w.note(err, nil, "renudge %s", k.ref.ID)
		return nil
	}
	if err != nil {
		return nil
	}
	hd := &hand{run: run, k: k, host: h, busy: true, seen: w.numbers.Add(1)}
	done := 0
	for _, st := range run.Steps {
		hd.next = st.Seq
		if st.Status == db.StepStatusDone {
			hd.next++
			done++
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if done < stored {
		w.broken = append(w.broken, fmt.Sprintf("claim of %s sees %d of %d steps", k.ref.ID, done, stored))
	}
	if k.epochs[run.Epoch] {
		w.broken = append(w.broken, fmt.Sprintf("run %s was claimed twice under epoch %d", k.ref.ID, run.Epoch))
	}
	k.epochs[run.Epoch] = true
	w.hands = append(w.hands, hd)
	return hd
}

// advance writes under a hand's epoch, and reports whether it was let.
func (w *world) advance(m *fixture, h *hand, what string, a Advance) error {
	w.mu.Lock()
	over := h.over
	asleep := a.Park != nil && slices.ContainsFunc(h.k.wakes, func(wake [2]int64) bool { return wake[0] > h.seen })
	w.mu.Unlock()
	_, err := m.runs.Advance(w.ctx, h.run, a)
	h.seen = w.numbers.Add(1)
	w.note(err, []error{ErrFenced, ErrLookAgain}, "%s of %s under epoch %d", what, h.run.ID, h.run.Epoch)
	if err == nil && asleep {
		w.failf("park of %s slept over a wake-up", h.run.ID)
	}
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if over {
		w.broken = append(w.broken, fmt.Sprintf("%s of %s under epoch %d came after its end", what, h.run.ID, h.run.Epoch))
	}
	for _, st := range a.Steps {
		if st.Status == db.StepStatusDone {
			w.stored(h, st.Seq, string(st.Output))
		}
	}
	h.over = h.over || a.Park != nil || a.Release != nil || a.End != nil
	return nil
}

func (w *world) stored(h *hand, seq int32, output string) {
	if had, ok := h.k.steps[seq]; ok {
		w.broken = append(w.broken, fmt.Sprintf("step %d of %s was done as %s and as %s", seq, h.run.ID, had, output))
	}
	h.k.steps[seq] = output
	h.next = seq + 1
}

func (w *world) number() string { return strconv.FormatInt(w.numbers.Add(1), 10) }

func (w *world) step(m *fixture, h *hand, started bool) {
	st := Step{Seq: h.next, Kind: db.StepKindModel, Status: db.StepStatusStarted, CallID: "c" + strconv.Itoa(int(h.next)), Name: "offline/offline-1"}
	if started {
		if w.advance(m, h, "started step "+strconv.Itoa(int(h.next)), Advance{Steps: []Step{st}}) != nil {
			return
		}
	}
	st.Status, st.Output = db.StepStatusDone, json.RawMessage(w.number())
	_ = w.advance(m, h, "step "+strconv.Itoa(int(h.next)), Advance{
		Steps: []Step{st}, ModelCalls: 1, Usage: []Usage{{CallID: w.number(), Provider: "offline", Model: "offline-1", Input: 3, Output: 2, Content: json.RawMessage(`{}`)}},
	})
}

func (w *world) usage(m *fixture, h *hand, again bool) {
	id := w.number()
	for range map[bool]int{true: 2, false: 1}[again] {
		err := m.runs.RecordUsage(w.ctx, h.run, Usage{CallID: id, Provider: "offline", Model: "offline-1", Input: 1, Content: json.RawMessage(`{}`)})
		w.note(err, nil, "record usage %s of %s", id, h.run.ID)
	}
}

// finish ends a run as its worker does: one that was cancelled confirms it.
func (w *world) finish(m *fixture, h *hand, failed bool) {
	end := *completed()
	if failed {
		end = FailEnding(ErrorContent{Kind: "provider_error", Message: "no"})
	}
	err := w.advance(m, h, "end as "+string(end.State), Advance{End: &end})
	if errors.Is(err, ErrLookAgain) {
		end = CancelEnding("")
		err = w.advance(m, h, "confirm the cancel", Advance{End: &end})
		if errors.Is(err, ErrLookAgain) {
			w.failf("the cancel of %s cannot be confirmed", h.run.ID)
		}
	}
	if err == nil {
		w.ended(h.k, end.State)
	}
}

func (w *world) ended(k *known, state db.RunState) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if k.ended != "" && k.ended != state {
		w.broken = append(w.broken, fmt.Sprintf("run %s ended as %s and as %s", k.ref.ID, k.ended, state))
	}
	k.ended = state
}

func (w *world) spawn(m *fixture, h *hand) {
	w.mu.Lock()
	dead, over, seq := w.killed[h.k.root], h.over, h.next
	w.mu.Unlock()
	name := "c" + w.number()
	tm, _ := terms(w.ctx, "")
	child, err := m.runs.Spawn(w.ctx, h.run, SpawnParams{
		Terms: tm, Spec: m.session(name), Input: json.RawMessage(`{"text":"sub"}`), Step: Step{Seq: seq, CallID: "s" + name, Name: "session_spawn"},
		MaxDepth: 3, MaxChildren: 3,
	})
	var limit *LimitError
	if errors.As(err, &limit) {
		w.note(nil, nil, "spawn by %s: %v", h.run.ID, limit)
		return
	}
	w.note(err, []error{ErrFenced, ErrLookAgain}, "spawn %s by %s under epoch %d", child, h.run.ID, h.run.Epoch)
	if err != nil {
		return
	}
	h.seen = w.numbers.Add(1)
	row, err := m.runs.refOf(w.ctx, w.tenant, child)
	if err != nil {
		w.note(err, nil, "look up the spawned %s", child)
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if dead || over {
		w.broken = append(w.broken, fmt.Sprintf("spawn of %s by %s came after its end", child, h.run.ID))
	}
	w.stored(h, seq, `{"runId":"run_`+child.String()+`"}`)
	w.learn(&known{ref: row, root: h.k.root})
}

// taken does what takes a run from whoever holds it.
func (w *world) taken(k *known, f func() (bool, error), what string) {
	w.mu.Lock()
	var held []*hand
	for _, h := range w.hands {
		if h.k == k {
			held = append(held, h)
		}
	}
	w.mu.Unlock()
	done, err := f()
	w.note(err, nil, "%s %s: %v", what, k.ref.ID, done)
	if !done || err != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, h := range held {
		h.over = true
	}
}

func (w *world) cancel(m *fixture, k *known) {
	c, err := m.runs.Cancel(w.ctx, w.tenant, k.ref.ID, "")
	w.note(err, nil, "cancel %s: %s", k.ref.ID, c.Status)
	if err != nil {
		return
	}
	switch c.Status {
	case "cancelled", "already_ended":
		w.ended(k, c.State)
	case "cancelling":
		w.mu.Lock()
		k.cancelling = true
		w.mu.Unlock()
	}
}

func (w *world) kill(m *fixture, root uuid.UUID) {
	w.mu.Lock()
	var held []*hand
	for _, h := range w.hands {
		if h.k.root == root {
			held = append(held, h)
		}
	}
	w.mu.Unlock()
	n, err := m.runs.Kill(w.ctx, w.tenant, root)
	w.note(err, nil, "kill %s: %d", root, n)
	if err != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.killed[root] = true
	for _, h := range held {
		h.over = true
	}
}

// die declares a worker dead and has its runs reaped.
func (w *world) die(h *host, reapers []*fixture, counts, solitary bool) {
	_, err := reapers[0].pool.Exec(w.ctx, `
		WITH locked AS (SELECT id FROM worker WHERE id = $1 FOR UPDATE)
		UPDATE worker SET state = 'dead', ended_at = clock_timestamp() FROM locked WHERE worker.id = locked.id`, h.id)
	w.note(err, nil, "worker %s is dead, counts %v, solitary %v", h.id, counts, solitary)
	var wg sync.WaitGroup
	for _, m := range reapers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for {
				rows, err := m.runs.queries.RunHeldByDead(w.ctx, m.pool, db.RunHeldByDeadParams{WorkerID: &h.id, MaxRows: 100})
				if err != nil || len(rows) == 0 {
					w.note(err, nil, "reaped %s", h.id)
					return
				}
				for _, r := range rows {
					done, err := m.runs.Reap(w.ctx, Ref{ID: r.ID, Session: r.SessionID, Parent: r.ParentRunID}, h.id, counts, solitary)
					w.note(err, nil, "reap %s from %s: %v", r.ID, h.id, done)
				}
			}
		}()
	}
	wg.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	h.dead = true
	for _, hd := range w.hands {
		if hd.host == h {
			hd.over = true
		}
	}
}

// drain lets a healthy worker finish everything, the parents after their
// children. It ends no wait for children: their ends must.
func (w *world) drain(t *rapid.T) {
	w.note(nil, nil, "--- drain")
	m := w.machines[0]
	var deaths []func()
	for _, h := range w.hosts {
		deaths = append(deaths, func() { w.die(h, w.machines[:1], false, false) })
	}
	w.atOnce(false, deaths)
	healthy := &host{id: m.worker()}
	for {
		rows, err := m.pool.Query(w.ctx, `
			UPDATE river_job j SET state = 'completed', finalized_at = now() FROM run r
			WHERE r.id = (j.args ->> 'run_id')::uuid AND j.state = 'available' AND r.tenant_id = $1 RETURNING r.id`, w.tenant)
		require.NoError(t, err)
		nudged, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
		require.NoError(t, err)
		rows, err = m.pool.Query(w.ctx, `SELECT id FROM run WHERE tenant_id = $1 AND state = 'waiting' AND waits_for <> 'children'`, w.tenant)
		require.NoError(t, err)
		asleep, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
		require.NoError(t, err)
		rows, err = m.pool.Query(w.ctx, `SELECT id FROM run WHERE tenant_id = $1 AND ready_at IS NOT NULL`, w.tenant)
		require.NoError(t, err)
		ready, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
		require.NoError(t, err)
		if len(nudged)+len(asleep)+len(ready) == 0 {
			break
		}
		if len(ready) > 0 {
			require.NoError(t, m.admit())
		}
		var ops []func()
		for _, id := range nudged {
			ops = append(ops, func() {
				h := w.claim(m, healthy, w.byID[id])
				if h == nil {
					return
				}
				parent := slices.ContainsFunc(w.runs, func(k *known) bool { return k.final == "" && orZero(k.ref.Parent) == id })
				for range 2 { // the first may not have seen a wake-up
					if parent && w.advance(m, h, "park", Advance{Park: &Park{Kind: db.WaitKindChildren, For: time.Hour}}) == nil {
						return
					}
				}
				w.finish(m, h, false)
			})
		}
		for _, id := range asleep {
			ops = append(ops, func() {
				for _, kind := range []db.WaitKind{db.WaitKindTimer, db.WaitKindRateLimit} {
					_, err := m.runs.Wake(w.ctx, w.byID[id].ref, kind)
					w.note(err, nil, "wake %s", id)
				}
			})
		}
		w.atOnce(false, ops)
	}
	w.check(t)
	for _, k := range w.runs {
		if k.final == "" {
			w.failf("run %s never ends", k.ref.ID)
		}
	}
	w.verdict(t)
	_, err := m.pool.Exec(w.ctx, `DELETE FROM river_job`)
	require.NoError(t, err)
}

func (w *world) verdict(t *rapid.T) {
	if len(w.broken) > 0 {
		t.Fatalf("%s\n\nwhat happened:\n%s", strings.Join(w.broken, "\n"), strings.Join(w.trace, "\n"))
	}
}

// violations is what must never be found in the rows of a tenant while
// nothing is going on, one query for each promise.
var violations = []struct{ promise, sql string }{
	{"a session's events are numbered 1..n without gap, and none is without any", `
		SELECT s.id FROM s LEFT JOIN (SELECT session_id, count(*) AS n, min(seq) AS lo, max(seq) AS hi FROM e GROUP BY 1) x ON x.session_id = s.id
		WHERE x.n IS DISTINCT FROM s.event_seq OR x.hi <> s.event_seq OR x.lo <> 1`},
	{"a turn has one last event when it is final, which says how it ended, and none before", `
		SELECT r.id FROM r LEFT JOIN last ON last.run_id = r.id
		WHERE coalesce(last.n, 0) <> CASE WHEN r.state >= 'completed' THEN 1 ELSE 0 END
		   OR last.type = 'agent.error' AND r.state = 'completed' OR last.type <> 'agent.error' AND r.state <> 'completed'`},
	{"nothing of a turn follows its last event but usage and status", `
		SELECT e.run_id FROM e JOIN last USING (run_id) WHERE e.seq > last.seq AND e.type NOT IN ('agent.usage', 'agent.status')`},
	{"a call's usage is stored once, with one event, and counted once", `
		SELECT r.id FROM r WHERE (SELECT count(*) FROM usage u WHERE u.run_id = r.id) <> (SELECT count(*) FROM e WHERE e.run_id = r.id AND e.type = 'agent.usage')
		UNION ALL SELECT s.id FROM s WHERE s.input_tokens <> (SELECT coalesce(sum(u.input), 0) FROM usage u WHERE u.session_id = s.id)`},
	{"a session has one executing turn at most, its head", `
		SELECT s.id FROM s WHERE
			ARRAY(SELECT r.id FROM r WHERE r.session_id = s.id AND r.in_lane AND (r.state IN ('running', 'waiting') OR r.state = 'queued' AND coalesce(r.ready_at, r.admitted_at) IS NOT NULL))
			<> CASE WHEN s.head_run_id IS NULL THEN '{}' ELSE ARRAY[s.head_run_id] END`},
	{"session.queued counts the turns that wait for their lane", `
		SELECT s.id FROM s WHERE s.queued <> (SELECT count(*) FROM r WHERE r.session_id = s.id AND r.in_lane AND r.state = 'queued' AND coalesce(r.ready_at, r.admitted_at) IS NULL)`},
	{"a lane keeps its order", `
		SELECT late.id FROM began early RIGHT JOIN r old ON old.id = early.run_id JOIN r late USING (session_id) JOIN began l ON l.run_id = late.id
		WHERE old.request_seq < late.request_seq AND (early.seq > l.seq OR early.seq IS NULL AND old.state < 'completed')`},
	{"an admitted run has a job that waits for a worker", `
		SELECT r.id FROM r WHERE r.state = 'queued' AND r.admitted_at IS NOT NULL
		AND NOT EXISTS (SELECT FROM river_job j WHERE (j.args ->> 'run_id')::uuid = r.id AND j.state IN ('available', 'running') AND j.queue = r.queue)`},
	{"a run that waits for admission has no job yet, but spare ones", `SELECT r.id FROM r WHERE r.ready_at IS NOT NULL AND (r.admitted_at IS NOT NULL OR r.worker_id IS NOT NULL)`},
	{"nothing has ended later than now", `SELECT r.id FROM r WHERE r.finished_at > clock_timestamp() + interval '1 hour'`},
	{"a run waits if and only if it has a wait", `
		SELECT coalesce(r.id, w.run_id) FROM (SELECT * FROM r WHERE state = 'waiting') r
		FULL JOIN (SELECT * FROM wait WHERE tenant_id = $1) w ON w.run_id = r.id WHERE r.waits_for IS DISTINCT FROM w.kind`},
	{"open_children counts the children that have not ended", `
		SELECT r.id FROM r WHERE r.state < 'completed' AND r.open_children <> (SELECT count(*) FROM r c WHERE c.parent_run_id = r.id AND c.state < 'completed')`},
	{"a run that waits for children has some", `SELECT r.id FROM r WHERE r.waits_for = 'children' AND r.open_children = 0`},
	{"a run's counts may be behind its steps, never ahead", `
		SELECT r.id FROM r WHERE r.steps > (SELECT count(*) FROM step st WHERE st.run_id = r.id AND st.status = 'done')
		OR r.model_calls > (SELECT count(*) FROM step st WHERE st.run_id = r.id AND st.status = 'done' AND st.kind = 'model')`},
	{"a killed tree has ended", `SELECT r.id FROM r JOIN r root ON root.id = r.root_run_id WHERE root.killed_at IS NOT NULL AND r.state < 'completed'`},
	{"a run is held by a worker that is not dead", `SELECT r.id FROM r JOIN worker w ON w.id = r.worker_id WHERE w.state = 'dead'`},
	{"a sub-agent's run does not outlive the cancel of its parent", `
		SELECT r.id FROM r JOIN r parent ON parent.id = r.parent_run_id WHERE parent.state = 'cancelled' AND r.state < 'completed'`},
	{"a key stands for a run that is there", `
		SELECT coalesce(r.id, i.run_id) FROM idempotency i LEFT JOIN r ON r.id = i.run_id AND i.result ->> 'run_id' = r.id::text
		WHERE i.tenant_id = $1 AND r.id IS NULL`},
}

var violationsSQL = func() string {
	var b strings.Builder
	b.WriteString(`
		WITH r AS MATERIALIZED (SELECT * FROM run WHERE tenant_id = $1), s AS MATERIALIZED (SELECT * FROM session WHERE tenant_id = $1),
		     e AS MATERIALIZED (SELECT e.* FROM event e JOIN s ON s.id = e.session_id),
		     last AS (SELECT run_id, count(*) AS n, min(seq) AS seq, min(type) AS type FROM e
		              WHERE type IN ('agent.response', 'agent.clarify', 'agent.error') GROUP BY 1),
		     began AS (SELECT run_id, min(seq) AS seq FROM e WHERE type = 'agent.status' AND content ->> 'phase' = 'thinking' GROUP BY 1)`)
	for i, v := range violations {
		if i > 0 {
			b.WriteString(" UNION ALL ")
		}
		fmt.Fprintf(&b, "SELECT %d AS i, v.id FROM (%s) AS v (id)", i, v.sql)
	}
	return b.String()
}()

// check compares the rows with what must hold and with what was answered.
func (w *world) check(t *rapid.T) {
	var b pgx.Batch
	ask := func(sql string, scans []any, row func(), done func()) {
		b.Queue(sql, w.tenant).Query(func(rows pgx.Rows) error {
			_, err := pgx.ForEachRow(rows, scans, func() error { row(); return nil })
			done()
			return err
		})
	}
	var i int
	var id uuid.UUID
	ask(violationsSQL, []any{&i, &id}, func() { w.failf("%s: not so %s", violations[i].promise, id) }, func() {})
	w.askRuns(ask)
	w.askSteps(ask)
	w.askKeys(ask)
	require.NoError(t, w.machines[0].pool.SendBatch(w.ctx, &b).Close())
	w.verdict(t)
}

type ask func(sql string, scans []any, row, done func())

func (w *world) askRuns(ask ask) {
	var id uuid.UUID
	var state db.RunState
	var final string
	n := 0
	ask(`SELECT id, state, concat_ws(' ', end_reason, finished_at, result, error, steps, started_at) FROM run WHERE tenant_id = $1`, []any{&id, &state, &final}, func() {
		n++
		k := w.byID[id]
		switch {
		case k == nil:
			w.failf("run %s was answered to nobody", id)
			return
		case !isFinal(state):
			if k.final != "" || k.ended != "" || w.killed[k.root] {
				w.failf("run %s is %s after it ended: %s %s", id, state, k.final, k.ended)
			}
			return
		case k.ended != "" && k.ended != state:
			w.failf("run %s ended as %s, answered was %s", id, state, k.ended)
		case k.cancelling && state == db.RunStateCompleted:
			w.failf("run %s completed after its cancel", id)
		case k.final != "" && k.final != string(state)+final:
			w.failf("final run %s changed: %s, then %s", id, k.final, string(state)+final)
		}
		k.final = string(state) + final
	}, func() {
		if n != len(w.runs) {
			w.failf("%d runs of %d accepted ones", n, len(w.runs))
		}
	})
}

func (w *world) askSteps(ask ask) {
	var id uuid.UUID
	var seq, epoch int32
	var output string
	n := 0
	ask(`SELECT run_id, seq, epoch, output::text FROM step WHERE tenant_id = $1 AND status = 'done'`, []any{&id, &seq, &epoch, &output}, func() {
		n++
		if k := w.byID[id]; k == nil || k.steps[seq] != output || !k.epochs[epoch] {
			w.failf("step %d of %s under epoch %d is %s, not as answered", seq, id, epoch, output)
		}
	}, func() {
		for _, k := range w.runs {
			n -= len(k.steps)
		}
		if n != 0 {
			w.failf("%d steps more than were answered", n)
		}
	})
}

func (w *world) askKeys(ask ask) {
	var key string
	var id uuid.UUID
	n := 0
	ask(`SELECT key, run_id FROM idempotency WHERE tenant_id = $1`, []any{&key, &id}, func() {
		n++
		if w.accepted[key].run != id {
			w.failf("key %q is stored for %s, answered was %s", key, id, w.accepted[key].run)
		}
	}, func() {
		if n != len(w.accepted) {
			w.failf("%d keys are stored, %d were accepted", n, len(w.accepted))
		}
		for key, digest := range w.conflicts {
			if had, ok := w.accepted[key]; !ok || had.digest == string(digest) {
				w.failf("key %q conflicted with nothing", key)
			}
		}
		clear(w.conflicts)
	})
}
