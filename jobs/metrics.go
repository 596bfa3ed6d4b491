package jobs

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-run/weir/db"
)

const (
	metricsTTL     = time.Second     // scrapes within it share one look at the database
	metricsTimeout = 3 * time.Second // of that look
	metricsExact   = 10_000          // rows that are counted; beyond, statistics tell how many there are
	metricsFlows   = 1000            // of those that wait, whose ages are read
	metricsPages   = 500             // of table run that are read to count what has ended
)

var (
	runsDesc     = prometheus.NewDesc("weir_runs", "Runs by kind and state. Numbers beyond some thousands are estimates.", []string{"kind", "state"}, nil)
	depthDesc    = prometheus.NewDesc("weir_queue_depth", "Runs that wait for a worker.", []string{"queue"}, nil)
	oldestDesc   = prometheus.NewDesc("weir_queue_oldest_seconds", "How long the run has waited that waits longest for a worker.", []string{"queue"}, nil)
	waitingDesc  = prometheus.NewDesc("weir_admission_waiting", "Runs that wait for admission. Beyond 10,000 it says 10,000.", []string{"queue"}, nil)
	pausedDesc   = prometheus.NewDesc("weir_queue_paused", "Whether an operator has paused the queue.", []string{"queue"}, nil)
	workersDesc  = prometheus.NewDesc("weir_workers", "Worker processes by state.", []string{"state"}, nil)
	databaseDesc = prometheus.NewDesc("weir_database_up", "Whether the database answered this scrape.", nil, nil)
	stepsDesc    = prometheus.NewDesc("weir_steps_total", "Completed steps that this process committed.", nil, nil)
	unitsDesc    = prometheus.NewDesc("weir_committer_units_total", "Transactions of this process's committer.", nil, nil)
	opsDesc      = prometheus.NewDesc("weir_committer_ops_total", "Changes that shared those transactions.", nil, nil)
	missesDesc   = prometheus.NewDesc("weir_committer_misses_total", "Changes put off because another transaction held a row.", nil, nil)
	retriesDesc  = prometheus.NewDesc("weir_committer_retries_total", "Transactions of this process's committer that had to be repeated.", nil, nil)
	repairsDesc  = prometheus.NewDesc("weir_sweeper_repairs_total", "Repairs by this process's sweeper. Without faults there are none.", []string{"kind"}, nil)
)

// Metrics shows what the rows say of the whole fleet, and what this process's
// committer did. No label names a tenant, a session or a user. What it reads
// stays cheap however many runs there are: unfinished runs are counted through
// partial indexes and up to a bound, beyond which the statistics of the last
// vacuum count; ended ones are counted in a sample of the table's pages, which
// is the whole table while that is small.
type Metrics struct {
	runs    *Runs
	repairs func() map[string]int64

	mu    sync.Mutex
	taken time.Time
	last  *depths
}

// NewMetrics makes a collector. repairs counts those of the process's sweeper;
// nil means that it has none.
func NewMetrics(r *Runs, repairs func() map[string]int64) *Metrics {
	return &Metrics{runs: r, repairs: repairs}
}

// Describe is part of prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		runsDesc, depthDesc, oldestDesc, workersDesc, databaseDesc, stepsDesc, unitsDesc, opsDesc, missesDesc, retriesDesc, repairsDesc,
		waitingDesc, pausedDesc,
	} {
		ch <- d
	}
	m.runs.admission.admitted.Describe(ch)
	m.runs.admission.seconds.Describe(ch)
}

// Collect is part of prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	count := func(d *prometheus.Desc, v int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	c := m.runs.committer.metrics
	count(stepsDesc, c.steps.Load())
	count(unitsDesc, c.units.Load())
	count(opsDesc, c.ops.Load())
	count(missesDesc, c.misses.Load())
	count(retriesDesc, c.retries.Load())
	if m.repairs != nil {
		for kind, n := range m.repairs() {
			count(repairsDesc, n, kind)
		}
	}
	m.runs.admission.admitted.Collect(ch)
	m.runs.admission.seconds.Collect(ch)
	d := m.depths()
	if d == nil { // what is old would look like what is
		gauge(databaseDesc, 0)
		return
	}
	gauge(databaseDesc, 1)
	for key, n := range d.runs {
		gauge(runsDesc, n, string(key.kind), string(key.state))
	}
	for queue, n := range d.queued {
		gauge(depthDesc, n, queue)
		gauge(oldestDesc, d.oldest[queue], queue)
	}
	for queue, n := range d.waiting {
		gauge(waitingDesc, n, queue)
		gauge(pausedDesc, d.paused[queue], queue)
	}
	for state, n := range d.workers {
		gauge(workersDesc, n, string(state))
	}
}

// depths is one look at the database.
type depths struct {
	runs    map[kindState]float64
	queued  map[string]float64
	oldest  map[string]float64
	waiting map[string]float64
	paused  map[string]float64
	workers map[db.WorkerState]float64
}

type kindState struct {
	kind  db.RunKind
	state db.RunState
}

// depths returns a look that is young enough, nil when the database does not
// answer.
func (m *Metrics) depths() *depths {
	m.mu.Lock()
	defer m.mu.Unlock()
	if time.Since(m.taken) < metricsTTL {
		return m.last
	}
	ctx, cancel := context.WithTimeout(context.Background(), metricsTimeout)
	defer cancel()
	d, err := m.look(ctx)
	if err != nil {
		m.runs.log.Warn("metrics", "error", err)
		d = nil
	}
	m.taken, m.last = time.Now(), d
	return d
}

func (m *Metrics) look(ctx context.Context) (*depths, error) {
	q := m.runs.queries
	d := newDepths()
	err := pgx.BeginTxFunc(ctx, m.runs.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		// The first rows of a partial index, whatever the planner believes of the
		// others: it would rather sort all of them.
		_, err := tx.Exec(ctx, `SELECT set_config(s, 'off', true) FROM unnest('{enable_seqscan,enable_bitmapscan,enable_sort,jit}'::text[]) s`)
		if err != nil {
			return err
		}
		sizes, err := q.MetricSizes(ctx, tx)
		if err != nil {
			return err
		}
		running, err := q.MetricRunning(ctx, tx)
		if err != nil {
			return err
		}
		for _, r := range running {
			d.runs[kindState{r.Kind, db.RunStateRunning}] += float64(r.N)
		}
		queued, err := q.MetricQueued(ctx, tx, db.MetricQueuedParams{Queues: Queues, MaxRows: metricsExact})
		if err != nil {
			return err
		}
		d.addQueued(queued, sizes.Admitted)
		lane, err := q.MetricInLane(ctx, tx, metricsExact)
		if err != nil {
			return err
		}
		inLane := float64(lane.N)
		if lane.Sessions >= metricsExact {
			inLane = max(inLane, float64(sizes.InLane))
		}
		d.runs[kindState{db.RunKindTurn, db.RunStateQueued}] += inLane
		waiting, err := q.MetricWaiting(ctx, tx, metricsExact)
		if err != nil {
			return err
		}
		counted := int64(0)
		for _, r := range waiting {
			counted += r.N
		}
		factor := beyond(counted, metricsExact, sizes.Waiting)
		for _, r := range waiting {
			d.runs[kindState{r.Kind, db.RunStateWaiting}] += float64(r.N) * factor
		}
		share := min(1, float64(metricsPages)/max(float64(sizes.RunPages), 1))
		final, err := q.MetricFinal(ctx, tx, float32(100*share))
		if err != nil {
			return err
		}
		for _, r := range final {
			d.runs[kindState{r.Kind, r.State}] += float64(r.N) / share
		}
		admission, err := q.MetricAdmission(ctx, tx, db.MetricAdmissionParams{MaxFlows: metricsFlows, MaxRows: metricsExact})
		if err != nil {
			return err
		}
		d.addAdmission(admission)
		workers, err := q.MetricWorkers(ctx, tx)
		if err != nil {
			return err
		}
		for _, w := range workers {
			d.workers[w.State] = float64(w.N)
		}
		return nil
	})
	return d, err
}

// addQueued counts what waits for a worker. What is in full queues is taken to
// be shared evenly by them.
func (d *depths) addQueued(rows []db.MetricQueuedRow, estimate int64) {
	counted := map[string]int64{}
	for _, r := range rows {
		counted[r.Queue] += r.N
	}
	full := int64(0)
	for _, n := range counted {
		if n >= metricsExact {
			full++
		} else {
			estimate -= n
		}
	}
	for _, r := range rows {
		n := float64(r.N)
		if counted[r.Queue] >= metricsExact {
			n *= beyond(counted[r.Queue], metricsExact, estimate/full)
		}
		d.runs[kindState{r.Kind, db.RunStateQueued}] += n
		d.queued[r.Queue] += n
		d.oldest[r.Queue] = max(d.oldest[r.Queue], r.OldestSeconds)
	}
}

// addAdmission adds what waits for admission. A queue's runs are of one kind.
func (d *depths) addAdmission(rows []db.MetricAdmissionRow) {
	for _, r := range rows {
		d.waiting[r.Name] = float64(r.Waiting)
		if r.Paused {
			d.paused[r.Name] = 1
		}
		d.runs[kindState{kindOf(r.Name), db.RunStateQueued}] += float64(r.Waiting)
		d.queued[r.Name] += float64(r.Waiting)
		d.oldest[r.Name] = max(d.oldest[r.Name], r.OldestSeconds)
	}
}

// beyond is by how much counted rows stand for more, once the bound is reached.
func beyond(counted, bound, estimate int64) float64 {
	if counted < bound || estimate <= counted {
		return 1
	}
	return float64(estimate) / float64(counted)
}

// newDepths has a zero for everything there may be, so that no series comes
// and goes.
func newDepths() *depths {
	d := &depths{
		runs: map[kindState]float64{}, queued: map[string]float64{}, oldest: map[string]float64{}, waiting: map[string]float64{},
		paused: map[string]float64{}, workers: map[db.WorkerState]float64{},
	}
	for _, kind := range []db.RunKind{
		db.RunKindTurn, db.RunKindSpawn, db.RunKindGraph, db.RunKindGraphNode, db.RunKindCron, db.RunKindWakeGate, db.RunKindMemorySweep, db.RunKindDelivery,
	} {
		for _, state := range []db.RunState{
			db.RunStateQueued, db.RunStateRunning, db.RunStateWaiting, db.RunStateCompleted, db.RunStateFailed, db.RunStateCancelled,
			db.RunStateKilled, db.RunStateTimedOut, db.RunStateOrphaned, db.RunStatePoisoned,
		} {
			d.runs[kindState{kind, state}] = 0
		}
	}
	for _, queue := range Queues {
		d.queued[queue], d.oldest[queue], d.waiting[queue], d.paused[queue] = 0, 0, 0, 0
	}
	for _, state := range []db.WorkerState{db.WorkerStateLive, db.WorkerStateDraining, db.WorkerStateDead} {
		d.workers[state] = 0
	}
	return d
}

// finishedSteps counts the steps that a unit has completed.
func (u *unit) finishedSteps() (n int64) {
	for _, status := range u.put.steps.Statuses {
		if status == string(db.StepStatusDone) {
			n++
		}
	}
	return n
}
