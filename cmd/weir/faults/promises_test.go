package faults

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// facts is what the queries below have in common: one pass over each table,
// since no index serves questions about everything.
const facts = `
	WITH e AS MATERIALIZED (
	    SELECT run_id, count(*) FILTER (WHERE last) AS lasts, min(type) FILTER (WHERE last) AS last, min(seq) FILTER (WHERE last) AS last_seq,
	           max(seq) FILTER (WHERE type NOT IN ('agent.usage', 'agent.status')) AS other_seq, count(*) FILTER (WHERE type = 'agent.usage') AS usages,
	           min(seq) FILTER (WHERE type = 'agent.status' AND content ->> 'phase' = 'thinking') AS began_seq
	    FROM (SELECT *, type IN ('agent.response', 'agent.clarify', 'agent.error') AS last FROM event) event GROUP BY run_id),
	st AS MATERIALIZED (
	    SELECT run_id, count(*) FILTER (WHERE status = 'done') AS done, count(*) FILTER (WHERE status = 'done' AND kind = 'model') AS models, max(epoch) AS epoch
	    FROM step GROUP BY run_id),
	u AS MATERIALIZED (SELECT run_id, count(*) AS n, count(DISTINCT split_part(call_id, '.', 1)) AS models FROM usage GROUP BY run_id),
	us AS MATERIALIZED (SELECT session_id, sum(input) AS input FROM usage GROUP BY session_id),
	lane AS MATERIALIZED (
	    SELECT session_id, array_agg(id) FILTER (WHERE executes) AS executing, count(*) FILTER (WHERE state = 'queued' AND NOT executes) AS waiting
	    FROM (SELECT session_id, id, state, state IN ('running', 'waiting') OR state = 'queued' AND coalesce(ready_at, admitted_at) IS NOT NULL AS executes
	          FROM run WHERE in_lane AND state < 'completed') r GROUP BY session_id),
	children AS MATERIALIZED (SELECT parent_run_id AS id, count(*) AS open FROM run WHERE state < 'completed' AND parent_run_id IS NOT NULL GROUP BY 1)
	`

const aheadOfSteps = "a run's counts are never ahead of its steps"

// broken is what must never be found in the rows, one query for each promise;
// it returns what breaks it. Each holds in every snapshot, whatever is going
// on, unless it is of a fleet at rest.
var broken = []struct {
	promise string
	rest    bool
	sql     string
}{
	{"a session's events are numbered 1..n without gap", false, `
		SELECT s.id::text FROM session s LEFT JOIN (SELECT session_id, count(*) AS n, min(seq) AS lo, max(seq) AS hi FROM event GROUP BY 1) x ON x.session_id = s.id
		WHERE x.n IS DISTINCT FROM s.event_seq OR x.hi <> s.event_seq OR x.lo <> 1`},
	{"a run has one last event once it has ended, which says how, and none before", false, `
		SELECT r.id::text FROM run r LEFT JOIN e ON e.run_id = r.id
		WHERE coalesce(e.lasts, 0) <> CASE WHEN r.state >= 'completed' THEN 1 ELSE 0 END
		   OR e.last = 'agent.error' AND r.state = 'completed' OR e.last <> 'agent.error' AND r.state <> 'completed'`},
	{"nothing of a turn follows its last event but usage and status", false, `SELECT run_id::text FROM e WHERE other_seq > last_seq`},
	{"the usage of a call is stored once, with one event, and counted once", false, `
		SELECT r.id::text FROM run r LEFT JOIN u ON u.run_id = r.id LEFT JOIN e ON e.run_id = r.id WHERE coalesce(u.n, 0) <> coalesce(e.usages, 0)
		UNION ALL SELECT s.id::text FROM session s LEFT JOIN us ON us.session_id = s.id WHERE s.input_tokens <> coalesce(us.input, 0)`},
	{"a model call that is stored has its usage", false, `SELECT st.run_id::text FROM st LEFT JOIN u ON u.run_id = st.run_id WHERE st.models > coalesce(u.models, 0)`},
	{"a session has one executing turn at most, its head", false, `
		SELECT s.id::text FROM session s LEFT JOIN lane l ON l.session_id = s.id
		WHERE coalesce(l.executing, '{}') <> CASE WHEN s.head_run_id IS NULL THEN '{}' ELSE ARRAY[s.head_run_id] END`},
	{"session.queued counts the turns that wait for their lane", false, `
		SELECT s.id::text FROM session s LEFT JOIN lane l ON l.session_id = s.id WHERE s.queued <> coalesce(l.waiting, 0)`},
	{"a lane keeps its order", false, `
		SELECT id::text FROM (
		    SELECT r.id, e.began_seq, max(CASE WHEN e.began_seq IS NOT NULL THEN e.began_seq WHEN r.state < 'completed' THEN 9e18 END)
		           OVER (PARTITION BY r.session_id ORDER BY r.request_seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS earlier
		    FROM run r LEFT JOIN e ON e.run_id = r.id WHERE r.in_lane) x
		WHERE began_seq < earlier`},
	{"a run is admitted or waits for it, never both", false, `SELECT r.id::text FROM run r WHERE r.ready_at IS NOT NULL AND (r.admitted_at IS NOT NULL OR r.worker_id IS NOT NULL)`},
	{"a run waits if and only if it has a wait", false, `
		SELECT coalesce(r.id, w.run_id)::text FROM (SELECT * FROM run WHERE state = 'waiting') r
		FULL JOIN wait w ON w.run_id = r.id WHERE r.waits_for IS DISTINCT FROM w.kind`},
	{"open_children counts the children that have not ended", false, `
		SELECT r.id::text FROM run r LEFT JOIN children c ON c.id = r.id WHERE r.state < 'completed' AND r.open_children <> coalesce(c.open, 0)`},
	{aheadOfSteps, false, `
		SELECT r.id::text FROM run r LEFT JOIN st ON st.run_id = r.id WHERE r.steps > coalesce(st.done, 0) OR r.model_calls > coalesce(st.models, 0)`},
	{"a step is stored under an epoch of its run", false, `SELECT r.id::text FROM run r JOIN st ON st.run_id = r.id WHERE st.epoch > r.epoch`},
	{"a killed tree has ended", false, `SELECT r.id::text FROM run r JOIN run root ON root.id = r.root_run_id WHERE root.killed_at IS NOT NULL AND r.state < 'completed'`},
	{"a sub-agent's run does not outlive the cancel of its parent", true, `
		SELECT r.id::text FROM run r JOIN run parent ON parent.id = r.parent_run_id WHERE parent.state = 'cancelled' AND r.state < 'completed'`},
	{"a key stands for a run that is there", false, `
		SELECT i.key FROM idempotency i LEFT JOIN run r ON r.id = i.run_id WHERE i.run_id IS NOT NULL AND r.id IS NULL`},
	{"no run is left under a worker that is gone", true, `SELECT r.id::text FROM run r LEFT JOIN worker w ON w.id = r.worker_id
		WHERE r.state = 'running' AND (w.id IS NULL OR w.state NOT IN ('live', 'draining'))`},
	{"every dead worker is reaped", true, `SELECT id::text FROM worker WHERE state = 'dead'`},
	{"every run has ended", true, `SELECT id || ' is ' || state FROM run WHERE finished_at IS NULL`},
	{"no session waits for anybody", true, `SELECT id::text FROM session WHERE head_run_id IS NOT NULL OR queued <> 0`},
	// One whose fetch had no answer stays with its worker until that ends.
	{"no job is left to be fetched", true, `SELECT id::text FROM river_job WHERE state NOT IN ('running', 'completed', 'discarded', 'cancelled')`},
}

var brokenSQL = func() (always, atRest string) {
	var parts []string
	for rest := range 2 {
		for i, p := range broken {
			if p.rest == (rest == 1) {
				parts = append(parts, fmt.Sprintf("(SELECT %d AS i, v.what FROM (%s) AS v (what) LIMIT 5)", i, p.sql))
			}
		}
		atRest = facts + strings.Join(parts, " UNION ALL ")
		if always == "" {
			always = atRest
		}
	}
	return always, atRest
}

func (f *fleet) broken(ctx context.Context, sql string) (list []string, err error) {
	rows, err := f.pool.Query(ctx, sql)
	if err != nil {
		return nil, err
	}
	var i int
	var what string
	_, err = pgx.ForEachRow(rows, []any{&i, &what}, func() error {
		list = append(list, broken[i].promise+": not so "+what)
		return nil
	})
	return list, err
}

// leave says what a row may break although nothing is wrong.
type leave struct {
	// late allows a call of an idempotent tool after its step is done: a zombie
	// may still send what it had begun.
	late bool
	// repairs allows the sweeper to repair: it must have nothing to do only where
	// nothing fails.
	repairs bool
	// forgets says that the database may have lost what it had answered. Then
	// accepted turns may be gone, the world may have seen calls that no row knows,
	// and who carried a run may have gone on from a step that was lost.
	forgets bool
}

// promises waits until the fleet is at rest and checks everything that weir
// promises: in the rows, and against what callers were answered and what the
// tools were sent. Every row ends with it.
func (f *fleet) promises(may leave) {
	f.t.Helper()
	_, sql := brokenSQL()
	began := time.Now()
	f.exec(`ANALYZE run, session, event, step, usage, wait, worker, idempotency, river_job`)
	var list []string
	for { // nothing is due any more when nothing is found
		ctx, cancel := context.WithTimeout(f.t.Context(), stepLimit)
		var err error
		list, err = f.broken(ctx, sql)
		cancel()
		if may.forgets {
			list = slices.DeleteFunc(list, func(what string) bool { return strings.HasPrefix(what, aheadOfSteps) })
		}
		if err == nil && len(list) == 0 {
			break
		}
		if err != nil {
			list = []string{err.Error()}
		}
		if time.Since(began) > stepLimit {
			f.t.Errorf("%s\n%s", strings.Join(list, "\n"), f.describe())
			break
		}
		pause(f.t.Context(), 200*time.Millisecond)
	}
	f.t.Logf("at rest after %s", time.Since(began).Round(10*time.Millisecond))
	f.checkAnswers(may)
	f.checkTools(may)
	if !may.repairs {
		for _, p := range append(f.living("worker"), f.living("scheduler")...) {
			for _, kind := range []string{"nudge", "orphan", "deadline", "lane", "wait"} {
				if n := f.metric(p, `weir_sweeper_repairs_total{kind="`+kind+`"}`); n != 0 {
					f.t.Errorf("%s repaired %s %v times, and nothing had failed", p.name, kind, n)
				}
			}
		}
	}
}

// checkAnswers compares what callers were told with the rows.
func (f *fleet) checkAnswers(may leave) {
	f.t.Helper()
	type row struct {
		ID, State string
		Text, Key *string
	}
	rows, err := f.pool.Query(f.limited(), `SELECT r.id::text AS id, r.state::text AS state, r.result ->> 'text' AS text, i.key
		FROM run r LEFT JOIN idempotency i ON i.run_id = r.id WHERE r.depth = 0`)
	if err != nil {
		f.t.Error(err)
		return
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[row])
	if err != nil {
		f.t.Error(err)
		return
	}
	f.book.mu.Lock()
	defer f.book.mu.Unlock()
	states := map[string]int{}
	seen := map[string]bool{}
	for _, r := range found {
		if seen[r.ID] {
			f.t.Errorf("run %s has two keys", r.ID)
		}
		seen[r.ID] = true
		states[r.State]++
		s := f.book.runs[r.ID]
		switch {
		case s == nil && (r.Key == nil || !f.book.unanswered[*r.Key]):
			f.t.Errorf("run %s was asked for by nobody", r.ID)
		case s == nil:
		case s.ends == nil && r.State != "completed", s.ends != nil && !slices.Contains(s.ends, r.State):
			f.t.Errorf("run %s is %s, not %v: %.200q", r.ID, r.State, s.ends, s.text)
		case r.State == "completed" && s.answer != "" && (r.Text == nil || *r.Text != s.answer):
			f.t.Errorf("run %s was answered with another's answer: %v, not %s", r.ID, r.Text, s.answer)
		}
	}
	lost := 0
	for id := range f.book.runs {
		if !seen[id] {
			lost++
			if !may.forgets {
				f.t.Errorf("run %s was accepted and is lost", id)
			}
		}
	}
	f.t.Logf("%d turns were accepted, %d lost; they ended as %v; callers repeated %d requests", len(f.book.runs), lost, states, f.errors.Load())
}

// lateness is how much later than its caller's death a call may be noticed by
// the tool's server: it was under way.
const lateness = time.Second

// checkTools compares what the tools were sent with the steps.
func (f *fleet) checkTools(may leave) {
	f.t.Helper()
	type row struct {
		CallID   string
		Status   string
		Finished *time.Time
		Failed   bool
	}
	rows, err := f.pool.Query(f.limited(), `SELECT call_id, status::text, finished_at AS finished, output -> 'error' IS NOT NULL AS failed FROM step WHERE kind = 'tool'`)
	if err != nil {
		f.t.Error(err)
		return
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[row])
	if err != nil {
		f.t.Error(err)
		return
	}
	steps := map[string]row{}
	for _, r := range found {
		steps[r.CallID] = r
	}
	byCall, places := map[string][]toolCall{}, map[string]string{}
	total := 0
	for _, c := range f.tools.all() {
		total++
		byCall[c.Call] = append(byCall[c.Call], c)
		if first, ok := places[c.At]; ok && first != c.Call && !may.forgets {
			f.t.Errorf("place %s was reached twice, by calls %s and %s: a completed model call was made again", c.At, first, c.Call)
		}
		places[c.At] = c.Call
	}
	repeats := 0
	for id, calls := range byCall {
		repeats += len(calls) - 1
		s, known := steps[id]
		if !known && !may.forgets {
			f.t.Errorf("call %s from %s left before its start was stored", id, calls[0].At)
		}
		for _, c := range calls {
			if c.Key == "" || c.Key != calls[0].Key {
				f.t.Errorf("call %s from %s was made with the keys %q and %q", id, c.At, calls[0].Key, c.Key)
			}
			if known && s.Finished != nil && c.Begun.After(s.Finished.Add(lateness)) && c.Tool == again && !may.late {
				f.t.Errorf("call %s from %s was made %s after its step was done", id, c.At, c.Begun.Sub(*s.Finished))
			}
		}
		if calls[0].Tool == once && len(calls) > 1 {
			f.t.Errorf("call %s from %s may be made once and was made %d times", id, calls[0].At, len(calls))
		}
	}
	for id, s := range steps {
		if s.Status == "done" && !s.Failed && len(byCall[id]) == 0 {
			f.t.Errorf("call %s has a result and was never made", id)
		}
	}
	f.t.Logf("the tools were called %d times, %d of them repeats under the same key", total, repeats)
}

// watch looks at the rows all the time until stop: what is always so must be,
// final runs must stay as they are, and more, if given, must find nothing. A
// database that does not answer has nothing to say.
func (f *fleet) watch(every time.Duration, more ...func(context.Context) (string, error)) (stop func()) {
	ctx, cancel := context.WithCancel(f.t.Context())
	always, _ := brokenSQL()
	finals := map[string]string{}
	looks := 0
	look := func() {
		asking, done := context.WithTimeout(ctx, 10*time.Second)
		defer done()
		list, err := f.broken(asking, always)
		if err != nil {
			return
		}
		looks++
		for _, ask := range more {
			if what, err := ask(asking); err == nil && what != "" {
				list = append(list, what)
			}
		}
		rows, err := f.pool.Query(asking, `SELECT id::text, concat_ws(' ', state, end_reason, finished_at, md5(result::text), md5(error::text)) FROM run WHERE finished_at IS NOT NULL`)
		if err == nil {
			var id, end string
			_, _ = pgx.ForEachRow(rows, []any{&id, &end}, func() error {
				if was, ok := finals[id]; ok && was != end {
					list = append(list, fmt.Sprintf("a final run never changes: not so %s, %s and then %s", id, was, end))
				}
				finals[id] = end
				return nil
			})
		}
		if len(list) > 0 {
			f.t.Errorf("while it ran: %s", strings.Join(list, "\n"))
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for pause(ctx, every) && !f.t.Failed() {
			look()
		}
	})
	return func() {
		cancel()
		wg.Wait()
		f.t.Logf("the rows were looked at %d times meanwhile", looks)
	}
}
