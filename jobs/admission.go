package jobs

import (
	"cmp"
	"container/heap"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/riverqueue/river"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs/bus"
)

const (
	// buffer is how much of what the fleet starts River holds beyond the running.
	buffer       = 200 * time.Millisecond
	maxRound     = 4096                   // runs of one round
	maxUnclaimed = 8192                   // counted of what River holds
	busyRound    = 10 * time.Millisecond  // between rounds that admit something
	fullRound    = 80 * time.Millisecond  // at most, between rounds while runs wait and there is no room
	IdleRound    = 200 * time.Millisecond // between looks while nothing waits
	tellEvery    = time.Second            // the queues' rows, when nothing changes
	costlyLook   = 5 * time.Millisecond
	spare        = 20 // how much longer than a costly look the time until the next is
)

// Admitter gives runs that wait for admission a job, in the order of their
// tenants' weighted virtual time, and opens and closes the fast path of those
// who accept. One works at a time: its connection holds the lock of the duty,
// and its transactions end with it.
//
// What runs wait in their own rows and is found by the leaps of one index, so
// a backlog costs nothing but its rows; only what the fleet starts within
// buffer is handed to River. A slot is held by a run that is admitted or runs,
// and by nothing else, so none can leak.
type Admitter struct {
	runs    *Runs
	queries *db.Queries
	metrics *admissionMetrics

	costly   time.Duration // from here on looks are spaced out
	queues   map[string]*admissionQueue
	flows    []flow
	found    pace // the look for flows
	told     time.Time
	counted  time.Time                 // what runs
	running  pace                      // the count of it
	inFlight []db.AdmissionInFlightRow // of this round, if a limit needs it
	next     time.Duration             // of the last round, while runs wait
}

// admissionQueue is what the admitter knows of one queue.
type admissionQueue struct {
	name                   string
	target                 float64 // runs that River should hold
	rate                   float64 // starts a second
	ahead                  float64 // what the fleet starts within buffer, at least one per process
	unclaimed              int64   // at the last look, with what was admitted since
	looked                 time.Time
	running, slots         int64
	started                int64 // since running was counted
	maxRunning, maxWaiting int32
	open, paused           bool
	told                   int32              // free, as the row says it
	virtual                map[string]float64 // time of each tenant that waits
	since                  map[flowKey]time.Time
	whole                  pace // the look at flows from their beginning
}

type flowKey struct{ queue, tenant, agent string }

// flow is what one agent of one tenant has waiting in one queue.
type flow struct {
	flowKey
	weight              float64
	tenantMax, agentMax int32 // negative: no limit
}

// pace spaces a look out by what it costs: vacuum may be held up, and the look
// then passes over what has long been admitted.
type pace struct{ next time.Time }

func (p *pace) due(now time.Time) bool { return !now.Before(p.next) }

func (p *pace) took(began time.Time, costly time.Duration) {
	now := time.Now()
	if d := now.Sub(began); d >= costly {
		p.next = now.Add(spare * d)
	}
}

type admissionMetrics struct {
	admitted *prometheus.CounterVec
	seconds  prometheus.Histogram
}

func newAdmissionMetrics() *admissionMetrics {
	m := &admissionMetrics{
		admitted: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_admitted_total", Help: "Runs that this process's admitter has admitted. Those of the fast path are not among them.",
		}, []string{"queue"}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "weir_admission_round_seconds", Help: "How long the rounds took that admitted something.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 12),
		}),
	}
	for _, queue := range Queues { // a series that comes and goes tells less
		m.admitted.WithLabelValues(queue)
	}
	return m
}

// NewAdmitter makes an admitter that knows nothing yet.
func (r *Runs) NewAdmitter() *Admitter {
	return &Admitter{runs: r, queries: r.queries, metrics: r.admission, costly: costlyLook, queues: map[string]*admissionQueue{}}
}

// Round looks once and admits what may start now. It returns when the next
// round is due: after IdleRound, or when something begins to wait, if nothing
// does now. conn must hold the admitter's lock, and be of db.HotConfig.
func (a *Admitter) Round(ctx context.Context, conn *pgx.Conn) (next time.Duration, err error) {
	return a.round(ctx, conn, a.admit)
}

// RoundUnder is Round on a connection that keeps no lock: all of it is one
// transaction under the duty's. When another process has that, nothing happens.
// After an error conn may be in the middle of a transaction.
func (a *Admitter) RoundUnder(ctx context.Context, conn *pgx.Conn, lock int64) (next time.Duration, err error) {
	var p db.Pipeline
	free := false
	p.BeginUnder(lock, &free)
	if err := p.Send(ctx, conn); err != nil {
		return 0, err
	}
	var admitted map[*admissionQueue]int
	if next = IdleRound; free {
		next, err = a.round(ctx, conn, func(ctx context.Context, conn *pgx.Conn, picked []choice) error {
			admitted, err = a.give(ctx, conn, picked)
			return err
		})
		if err != nil {
			return 0, err
		}
	}
	if _, err := conn.Exec(ctx, "COMMIT"); err != nil {
		return 0, err
	}
	a.given(admitted)
	return next, nil
}

func (a *Admitter) round(ctx context.Context, conn *pgx.Conn, admit func(context.Context, *pgx.Conn, []choice) error) (next time.Duration, err error) {
	began := time.Now()
	if err := a.look(ctx, conn); err != nil {
		return 0, err
	}
	var picked []choice
	more := false
	for _, q := range a.queues {
		p, m, err := a.pick(ctx, conn, q)
		if err != nil {
			return 0, err
		}
		picked, more = append(picked, p...), more || m
	}
	if len(picked) > 0 {
		if err := admit(ctx, conn, picked); err != nil {
			return 0, err
		}
		a.metrics.seconds.Observe(time.Since(began).Seconds())
	}
	if err := a.tell(ctx, conn); err != nil {
		return 0, err
	}
	switch {
	case more || len(picked) > 0 || a.inFlight != nil: // a limited scope may have a slot any moment
		a.next = busyRound
	case a.waits():
		a.next = min(max(2*a.next, busyRound), fullRound)
	default:
		a.next = 0
		return IdleRound, nil
	}
	return max(a.next, 2*time.Since(began)), nil // it takes a third of a connection's time at most
}

// waits says whether somebody waits who is kept by nothing but the fleet's
// room.
func (a *Admitter) waits() bool {
	return slices.ContainsFunc(a.flows, func(f flow) bool { return a.queues[f.queue] != nil && !a.queues[f.queue].paused })
}

// look reads the queues, the flows that wait, and what the limited scopes hold.
func (a *Admitter) look(ctx context.Context, conn *pgx.Conn) error {
	rows, err := a.queries.AdmissionQueues(ctx, conn, maxUnclaimed)
	if err != nil {
		return err
	}
	now := time.Now()
	limited := false
	for _, r := range rows {
		q := a.queues[r.Name]
		if q == nil {
			q = &admissionQueue{name: r.Name, looked: now, unclaimed: r.Unclaimed, virtual: map[string]float64{}, since: map[flowKey]time.Time{}}
			a.queues[r.Name] = q
		}
		q.paused, q.maxRunning, q.maxWaiting = r.Paused, r.MaxRunning, r.MaxWaiting
		q.open, q.told, q.slots = r.Open, r.Free, r.Slots
		q.adapt(now, r.Unclaimed, r.Workers)
		limited = limited || q.maxRunning >= 0
	}
	if a.found.due(now) {
		flows, err := a.queries.AdmissionFlows(ctx, conn)
		if err != nil {
			return err
		}
		a.found.took(now, a.costly)
		a.flows = a.flows[:0]
		for _, f := range flows {
			a.flows = append(a.flows, flow{flowKey{f.Queue, f.TenantID, f.Agent}, f.Weight, f.TenantMax, f.AgentMax})
		}
	}
	for _, f := range a.flows {
		limited = limited || f.tenantMax >= 0 || f.agentMax >= 0
	}
	a.inFlight = nil
	if limited && len(a.flows) > 0 {
		if a.inFlight, err = a.queries.AdmissionInFlight(ctx, conn); a.inFlight == nil {
			a.inFlight = []db.AdmissionInFlightRow{}
		}
	}
	return err
}

// adapt learns how fast the fleet starts runs, and sets how many River should
// hold. A fleet that has started all it had gets as many as it has free slots,
// or, when that is not known well, twice as many as before.
func (q *admissionQueue) adapt(now time.Time, unclaimed, workers int64) {
	if elapsed := now.Sub(q.looked).Seconds(); elapsed >= busyRound.Seconds()/2 {
		starts := max(0, q.unclaimed-unclaimed)
		q.started += starts
		rate := float64(starts) / elapsed
		weight := math.Min(1, elapsed/0.3) // what is older than some 300 ms counts little
		q.rate += (rate - q.rate) * weight
		q.looked, q.unclaimed = now, unclaimed
	}
	q.ahead = math.Max(q.rate*buffer.Seconds(), float64(workers))
	want := q.ahead
	if unclaimed == 0 {
		want = math.Max(want, math.Max(float64(q.free()), math.Min(2*q.target, float64(q.slots))))
	}
	q.target = want
}

// room is how many runs may be admitted now.
func (a *Admitter) room(q *admissionQueue) int {
	if q.paused {
		return 0
	}
	room := int(math.Ceil(q.target)) - int(q.unclaimed)
	if q.maxRunning >= 0 {
		held := 0
		for _, r := range a.inFlight {
			if r.Queue == q.name {
				held += int(r.N)
			}
		}
		room = min(room, int(q.maxRunning)-held)
	}
	return max(0, min(room, maxRound))
}

// choice is a run that may start.
type choice struct {
	id    uuid.UUID
	queue *admissionQueue
}

// share is a tenant's part in a round.
type share struct {
	tenant  string
	weight  float64
	virtual float64
	heads   []head // the longest waiting first
}

type head struct {
	id    uuid.UUID
	ready time.Time
	flow  *flow
}

// pick chooses by weighted virtual time whom the queue's room is for. more says
// that there is room left, and that a flow may have more than was looked at.
func (a *Admitter) pick(ctx context.Context, conn *pgx.Conn, q *admissionQueue) (picked []choice, more bool, err error) {
	flows := a.flowsOf(q)
	if len(flows) == 0 {
		clear(q.virtual)
		clear(q.since)
		return nil, false, nil
	}
	room := a.room(q)
	if room == 0 {
		return nil, false, nil
	}
	flows, weights := q.nextUp(flows, room)
	limits := a.limits(flows)
	arg := db.AdmissionHeadsParams{Queue: q.name}
	var asked []*flow
	now := time.Now()
	whole := q.whole.due(now)
	for _, f := range flows {
		free := limits.free(f)
		if free == 0 {
			continue
		}
		most := min(room, free, int(math.Ceil(float64(room)*f.weight/weights))+1)
		since := q.since[f.flowKey]
		if whole {
			since = time.Time{}
		}
		arg.Numbers, arg.Tenants = append(arg.Numbers, int32(len(asked))), append(arg.Tenants, f.tenant)
		arg.Agents, arg.Since, arg.Most = append(arg.Agents, f.agent), append(arg.Since, since), append(arg.Most, int32(most))
		asked = append(asked, f)
	}
	if len(asked) == 0 {
		return nil, false, nil
	}
	rows, err := a.queries.AdmissionHeads(ctx, conn, arg)
	if err != nil {
		return nil, false, err
	}
	if whole {
		q.whole.took(now, a.costly)
	}
	shares := map[string]*share{}
	got := make([]int, len(asked))
	for _, r := range rows {
		f := asked[r.Flow]
		got[r.Flow]++
		s := shares[f.tenant]
		if s == nil {
			s = &share{tenant: f.tenant, weight: f.weight}
			shares[f.tenant] = s
		}
		s.heads = append(s.heads, head{r.ID, *r.ReadyAt, f})
	}
	return a.draw(q, shares, limits, room), slices.ContainsFunc(rows, func(r db.AdmissionHeadsRow) bool { return got[r.Flow] == int(arg.Most[r.Flow]) }), nil
}

func (a *Admitter) flowsOf(q *admissionQueue) (flows []*flow) {
	for i := range a.flows {
		if f := &a.flows[i]; f.queue == q.name {
			flows = append(flows, f)
		}
	}
	return flows
}

// nextUp brings the tenants' times up to date and returns the flows of those
// whose turn may come within the room, with the sum of the tenants' weights.
func (q *admissionQueue) nextUp(flows []*flow, room int) (next []*flow, weights float64) {
	waiting := map[string]float64{} // weights of the tenants
	least := math.Inf(1)
	for _, f := range flows {
		waiting[f.tenant] = f.weight
		if v, ok := q.virtual[f.tenant]; ok {
			least = math.Min(least, v)
		}
	}
	if math.IsInf(least, 1) {
		least = 0
	}
	for t, v := range q.virtual { // what somebody has had too much, he has had also when he comes back
		if _, ok := waiting[t]; !ok && v <= least {
			delete(q.virtual, t)
		}
	}
	tenants := make([]string, 0, len(waiting))
	for t := range waiting {
		tenants = append(tenants, t)
		q.virtual[t] = math.Max(q.virtual[t], least) // who comes earns nothing by having been away
	}
	if len(tenants) > room {
		slices.SortFunc(tenants, func(x, y string) int {
			return cmp.Or(cmp.Compare(q.virtual[x], q.virtual[y]), cmp.Compare(x, y))
		})
		tenants = tenants[:room]
	}
	chosen := make(map[string]bool, len(tenants))
	for _, t := range tenants {
		chosen[t] = true
		weights += waiting[t]
	}
	for _, f := range flows {
		if chosen[f.tenant] {
			next = append(next, f)
		}
	}
	return next, weights
}

// draw takes runs from the tenant with the least virtual time until the room
// is used up.
func (a *Admitter) draw(q *admissionQueue, shares map[string]*share, limits *limitsLeft, room int) (picked []choice) {
	var order byVirtualTime
	for t, s := range shares {
		s.virtual = q.virtual[t]
		slices.SortFunc(s.heads, func(x, y head) int { return x.ready.Compare(y.ready) })
		order = append(order, s)
	}
	heap.Init(&order)
	for room > 0 && len(order) > 0 {
		s := order[0]
		h := s.heads[0]
		s.heads = s.heads[1:]
		if limits.take(h.flow) {
			picked = append(picked, choice{h.id, q})
			room--
			s.virtual += 1 / s.weight
			if h.ready.After(q.since[h.flow.flowKey]) {
				q.since[h.flow.flowKey] = h.ready
			}
		}
		if len(s.heads) == 0 {
			heap.Pop(&order)
		} else {
			heap.Fix(&order, 0)
		}
	}
	for t, s := range shares {
		q.virtual[t] = s.virtual
	}
	return picked
}

// byVirtualTime orders tenants; equals by name, so that a draw can be repeated.
type byVirtualTime []*share

func (o byVirtualTime) Len() int { return len(o) }
func (o byVirtualTime) Less(i, j int) bool {
	return o[i].virtual < o[j].virtual || o[i].virtual == o[j].virtual && o[i].tenant < o[j].tenant
}
func (o byVirtualTime) Swap(i, j int) { o[i], o[j] = o[j], o[i] }
func (o *byVirtualTime) Push(x any)   { *o = append(*o, x.(*share)) }
func (o *byVirtualTime) Pop() any {
	old := *o
	last := old[len(old)-1]
	*o = old[:len(old)-1]
	return last
}

// limitsLeft are the slots that limited tenants and agents have left, all of
// them or none for one run.
type limitsLeft struct {
	tenants map[string]int
	agents  map[[2]string]int
}

func (a *Admitter) limits(flows []*flow) *limitsLeft {
	l := &limitsLeft{map[string]int{}, map[[2]string]int{}}
	for _, f := range flows {
		if f.tenantMax >= 0 {
			l.tenants[f.tenant] = int(f.tenantMax)
		}
		if f.agentMax >= 0 {
			l.agents[[2]string{f.tenant, f.agent}] = int(f.agentMax)
		}
	}
	for _, r := range a.inFlight {
		if n, ok := l.tenants[r.TenantID]; ok {
			l.tenants[r.TenantID] = n - int(r.N)
		}
		if key := [2]string{r.TenantID, r.Agent}; l.hasAgent(key) {
			l.agents[key] -= int(r.N)
		}
	}
	return l
}

func (l *limitsLeft) hasAgent(key [2]string) bool { _, ok := l.agents[key]; return ok }

// free is how many runs of the flow may start.
func (l *limitsLeft) free(f *flow) int {
	n := math.MaxInt32
	if left, ok := l.tenants[f.tenant]; ok {
		n = min(n, left)
	}
	if left, ok := l.agents[[2]string{f.tenant, f.agent}]; ok {
		n = min(n, left)
	}
	return max(n, 0)
}

func (l *limitsLeft) take(f *flow) bool {
	if l.free(f) == 0 {
		return false
	}
	if _, ok := l.tenants[f.tenant]; ok {
		l.tenants[f.tenant]--
	}
	if key := [2]string{f.tenant, f.agent}; l.hasAgent(key) {
		l.agents[key]--
	}
	return true
}

// admit commits what was picked with its jobs. What somebody holds, or has
// ended meanwhile, stays out.
func (a *Admitter) admit(ctx context.Context, conn *pgx.Conn, picked []choice) (err error) {
	if _, err := conn.Exec(ctx, "BEGIN"); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_, rollbackErr := conn.Exec(context.WithoutCancel(ctx), "ROLLBACK")
			err = errors.Join(err, rollbackErr)
		}
	}()
	counts, err := a.give(ctx, conn, picked)
	if err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, "COMMIT"); err != nil {
		return err
	}
	a.given(counts)
	return nil
}

// give is admit within a transaction; given follows its commit.
func (a *Admitter) give(ctx context.Context, conn *pgx.Conn, picked []choice) (counts map[*admissionQueue]int, err error) {
	ids := make([]uuid.UUID, len(picked))
	for i, p := range picked {
		ids[i] = p.id
	}
	if _, err := a.queries.AdmissionXact(ctx, conn); err != nil {
		return nil, err
	}
	rows, err := a.queries.AdmissionAdmit(ctx, conn, ids)
	if err != nil {
		return nil, fmt.Errorf("admit: %w", err)
	}
	kinds := make(map[uuid.UUID]db.RunKind, len(rows))
	for _, r := range rows {
		kinds[r.ID] = r.Kind
	}
	var jobs []river.InsertManyParams
	counts = map[*admissionQueue]int{}
	for _, p := range picked { // in the order they were drawn: River keeps it
		kind, ok := kinds[p.id]
		if !ok {
			continue
		}
		counts[p.queue]++
		jobs = append(jobs, river.InsertManyParams{Args: nudgeArgs(kind, p.id), InsertOpts: &river.InsertOpts{Queue: p.queue.name, MaxAttempts: 1}})
	}
	if len(jobs) > 0 {
		if _, err := a.runs.insert.InsertManyTx(ctx, openTx{conn}, jobs); err != nil {
			return nil, fmt.Errorf("insert nudges: %w", err)
		}
	}
	for q, n := range counts {
		q.unclaimed += int64(n)
	}
	return counts, nil
}

// given tells of what was admitted.
func (a *Admitter) given(counts map[*admissionQueue]int) {
	var names []string
	for q, n := range counts {
		a.metrics.admitted.WithLabelValues(q.name).Add(float64(n))
		names = append(names, q.name)
	}
	if len(names) > 0 {
		a.runs.bus.Publish(names)
	}
}

// tell opens or closes the fast path and says how much may take it, and writes
// the queues' rows now and then also when nothing changes: a fast path whose
// admitter is gone closes by itself.
func (a *Admitter) tell(ctx context.Context, conn *pgx.Conn) error {
	now := time.Now()
	started := false
	for _, q := range a.queues {
		started = started || q.started > 0
	}
	if (started || now.Sub(a.counted) >= tellEvery) && a.running.due(now) {
		rows, err := a.queries.AdmissionRunning(ctx, conn)
		if err != nil {
			return fmt.Errorf("count: %w", err)
		}
		a.running.took(now, a.costly)
		a.counted = now
		for _, q := range a.queues {
			q.running, q.started = 0, 0
		}
		for _, r := range rows {
			if q := a.queues[r.Queue]; q != nil {
				q.running = r.N
			}
		}
	}
	var arg db.AdmissionGateParams
	changed := now.Sub(a.told) >= tellEvery
	for _, q := range a.queues {
		open, free := a.mayOpen(q), q.mayStart()
		changed = changed || open != q.open || open && free != q.told
		arg.Names, arg.Opens, arg.Frees = append(arg.Names, q.name), append(arg.Opens, open), append(arg.Frees, free)
	}
	if !changed {
		return nil
	}
	a.told = now
	return a.queries.AdmissionGate(ctx, conn, arg)
}

// free is how many slots nobody has, as far as is known since the last count.
func (q *admissionQueue) free() int64 { return q.slots - q.running - q.started }

// mayStart is how many runs the fast path may admit until the next look: what
// starts at once, and the buffer.
func (q *admissionQueue) mayStart() int32 {
	return int32(min(max(q.free()+int64(math.Ceil(q.ahead))-q.unclaimed, 0), math.MaxInt32))
}

// mayOpen says whether accepts and lanes may admit at once: nobody waits for
// room, and there is some.
func (a *Admitter) mayOpen(q *admissionQueue) bool {
	if q.paused || q.maxRunning >= 0 {
		return false
	}
	flows := a.flowsOf(q)
	limits := a.limits(flows)
	for _, f := range flows {
		if f.tenantMax < 0 && f.agentMax < 0 || limits.free(f) > 0 {
			return false
		}
	}
	return q.mayStart() > 0
}

// Ready tells when runs wait for admission that did not before.
func (r *Runs) Ready(f func()) (stop func()) {
	return r.bus.Handle(bus.Ready, func(uuid.UUID) { f() })
}
