package jobs

import "github.com/weir-run/weir/db"

// gate says what a unit may admit by itself. It is read in the unit's own
// transaction, so a limit or a pause that was set before holds.
type gate struct {
	open, full, tenants map[string]bool
	agents              map[[2]string]bool
	limited             int // tenants, and agents, that were read
}

// maxLimited bounds the limited tenants or agents that a unit reads; with more
// of them everybody goes through the admitter.
const maxLimited = 200

func readGate(rows []db.UnitGateRow) gate {
	g := gate{open: map[string]bool{}, full: map[string]bool{}, tenants: map[string]bool{}, agents: map[[2]string]bool{}}
	for _, r := range rows {
		switch r.What {
		case "open":
			g.open[r.Scope] = true
		case "full":
			g.full[r.Scope] = true
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
// turn: nobody else waits, and no limit has to be kept.
func (g *gate) admits(queue, tenant, agent string) bool {
	return g.open[queue] && g.limited <= maxLimited && !g.tenants[tenant] && !g.agents[[2]string{tenant, agent}]
}

// enqueue puts a run where it will start: admitted at once, or among those
// that wait for admission.
func (u *unit) enqueue(r *runRow) {
	if u.gate.admits(r.Queue, r.TenantID, r.Agent) {
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
}

// admit puts a queued run where a worker finds it: the nudge commits with it.
func (u *unit) admit(r *runRow) {
	r.State, r.WaitsFor, r.ReadyAt = db.RunStateQueued, nil, nil
	r.AdmittedAt, r.NudgedAt = &u.now, &u.clock
	r.dirty = true
	u.nudges = append(u.nudges, nudge{r.ID, r.Kind, r.Queue})
}
