package jobs

import (
	"sync"

	"github.com/weir-run/weir/db"
)

// gate says what a unit may admit by itself. It is read in the unit's own
// transaction, so a limit or a pause that was set before holds.
type gate struct {
	open    map[string]budget
	room    map[string]int32 // runs that may still wait, of queues where that is limited
	tenants map[string]bool
	agents  map[[2]string]bool
	limited int // tenants, or agents, that were read
	fast    *fastPath
}

// budget is how many runs of an open queue a process may admit until the
// admitter looks again, which version tells.
type budget struct {
	free    int32
	version float64
}

// maxLimited bounds the limited tenants or agents that a unit reads; with more
// of them everybody goes through the admitter.
const maxLimited = 200

func readGate(rows []db.UnitGateRow, fast *fastPath) gate {
	g := gate{open: map[string]budget{}, room: map[string]int32{}, tenants: map[string]bool{}, agents: map[[2]string]bool{}, fast: fast}
	for _, r := range rows {
		switch r.What {
		case "open":
			g.open[r.Scope] = budget{r.N, r.Version}
		case "wait":
			g.room[r.Scope] = r.N
		case "tenant":
			g.tenants[r.Scope] = true
		case "agent":
			g.agents[[2]string{r.Scope, r.Name}] = true
		}
	}
	g.limited = max(len(g.tenants), len(g.agents))
	return g
}

// admits says whether a run of this agent may start without waiting for its
// turn: nobody else waits, there is room, and no limit has to be kept. It uses
// the room up.
func (g *gate) admits(queue, tenant, agent string) bool {
	b, open := g.open[queue]
	if !open || g.limited > maxLimited || g.tenants[tenant] || g.agents[[2]string{tenant, agent}] {
		return false
	}
	return g.fast.take(queue, b)
}

// mayWait says whether another run may wait for admission to the queue.
func (g *gate) mayWait(queue string) bool {
	n, limited := g.room[queue]
	return !limited || n > 0
}

// fastPath counts what this process has admitted by itself since the admitter
// last looked. Without it a burst between two looks would be admitted whole.
type fastPath struct {
	mu   sync.Mutex
	used map[string]budget // free counts what was used
}

func (f *fastPath) take(queue string, b budget) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.used == nil {
		f.used = map[string]budget{}
	}
	u := f.used[queue]
	if u.version != b.version {
		u = budget{0, b.version}
	}
	if u.free >= b.free {
		return false
	}
	u.free++
	f.used[queue] = u
	return true
}

// enqueue puts a run where it will start: admitted at once, or among those
// that wait for admission.
func (u *unit) enqueue(r *runRow, starts bool) {
	if starts {
		u.admit(r)
		return
	}
	r.State, r.WaitsFor, r.AdmittedAt, r.NudgedAt = db.RunStateQueued, nil, nil, nil
	r.ReadyAt = &u.clock
	if r.StartedAt != nil { // it has waited before: it comes before those that have not begun
		r.ReadyAt = r.StartedAt
	}
	r.dirty = true
	u.changes.ready = true
	if n, limited := u.gate.room[r.Queue]; limited {
		u.gate.room[r.Queue] = n - 1
	}
}

// starts says whether a run may start at once.
func (u *unit) starts(r *runRow) bool { return u.gate.admits(r.Queue, r.TenantID, r.Agent) }

// admit puts a queued run where a worker finds it: the nudge commits with it.
func (u *unit) admit(r *runRow) {
	r.State, r.WaitsFor, r.ReadyAt = db.RunStateQueued, nil, nil
	r.AdmittedAt, r.NudgedAt = &u.now, &u.clock
	r.dirty = true
	u.nudges = append(u.nudges, nudge{r.ID, r.Kind, r.Queue})
}
