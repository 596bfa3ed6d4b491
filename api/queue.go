package api

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/jobs/bus"
)

// QueueInfo is a queue of the fleet.
type QueueInfo struct {
	Queue         string  `json:"queue"`
	Paused        bool    `json:"paused"`
	PausedAt      *string `json:"pausedAt,omitempty"`
	MaxRunning    *int32  `json:"maxRunning,omitempty" jsonschema_description:"Of the whole fleet; absent: what its slots allow."`
	MaxWaiting    *int32  `json:"maxWaiting,omitempty" jsonschema_description:"Runs that may wait for admission before those that would wait, too, are refused; absent: no limit."`
	Waiting       int64   `json:"waiting" jsonschema_description:"Runs that wait for admission; counted up to 10000."`
	Admitted      int64   `json:"admitted" jsonschema_description:"Runs that any worker may start now; counted up to 10000."`
	Running       int64   `json:"running"`
	Slots         int64   `json:"slots" jsonschema_description:"Of all live workers that serve the queue."`
	OldestSeconds float64 `json:"oldestSeconds" jsonschema_description:"How long the one has waited for admission that has waited longest."`
	FastPath      bool    `json:"fastPath" jsonschema_description:"Nobody waits: what is accepted may start at once."`
}

// QueueListResult is the result of queue.list.
type QueueListResult struct {
	Queues []QueueInfo `json:"queues"`
}

func (s *Server) queueList(ctx context.Context, _ *struct{}) (*QueueListResult, error) {
	rows, err := s.queries.QueueList(ctx, s.pool)
	if err != nil {
		return nil, fmt.Errorf("list queues: %w", err)
	}
	ages, err := s.queries.MetricAdmission(ctx, s.pool, db.MetricAdmissionParams{MaxFlows: 1000, MaxRows: 1})
	if err != nil {
		return nil, fmt.Errorf("list queues: %w", err)
	}
	oldest := map[string]float64{}
	for _, a := range ages {
		oldest[a.Name] = a.OldestSeconds
	}
	r := &QueueListResult{Queues: make([]QueueInfo, len(rows))}
	for i, q := range rows {
		r.Queues[i] = QueueInfo{
			Queue: q.Name, Paused: q.PausedAt != nil, MaxRunning: q.MaxRunning, MaxWaiting: q.MaxWaiting, Waiting: q.Waiting,
			Admitted: q.Admitted, Running: q.Running, Slots: q.Slots, OldestSeconds: oldest[q.Name], FastPath: q.Open,
		}
		if q.PausedAt != nil {
			r.Queues[i].PausedAt = new(timestamp(*q.PausedAt))
		}
	}
	return r, nil
}

// QueueName is the name of a queue.
type QueueName string

// Validate checks that there is such a queue.
func (q QueueName) Validate() error {
	for _, name := range jobs.Queues {
		if name == string(q) {
			return nil
		}
	}
	return invalid("must be one of %s", strings.Join(jobs.Queues, ", "))
}

// QueueParams are the parameters of queue.pause and queue.resume.
type QueueParams struct {
	Queue QueueName `json:"queue" jsonschema:"required"`
}

// QueueResult is the result of queue.pause, queue.resume and queue.limit.
type QueueResult struct {
	Queue     string `json:"queue"`
	TakenBack int64  `json:"takenBack,omitempty" jsonschema_description:"Runs that were admitted and not started, and wait again."`
}

func (s *Server) defineQueuePause() Method {
	return Define("queue.pause", ScopeAdmin, "Starts nothing of a queue until it is resumed.", s.queuePause, Ours, Fleet, Describe(
		"What runs goes on. Requests are accepted and wait; the pause outlives every process."))
}

func (s *Server) queuePause(ctx context.Context, p *QueueParams) (*QueueResult, error) {
	if _, err := s.queries.QueuePause(ctx, s.pool, string(p.Queue)); err != nil {
		return nil, fmt.Errorf("pause queue: %w", err)
	}
	// Who was under way may not have seen the pause, and admits; who claims holds
	// rows that are passed over. Once they have ended nothing of it starts.
	r := &QueueResult{Queue: string(p.Queue)}
	for range 2 {
		if err := s.othersEnded(ctx); err != nil {
			return nil, fmt.Errorf("pause queue: %w", err)
		}
		for n := int64(1); n > 0; r.TakenBack += n {
			var err error
			if n, err = s.queries.QueueTakeBack(ctx, s.pool, string(p.Queue)); err != nil {
				return nil, fmt.Errorf("take back: %w", err)
			}
		}
	}
	if err := s.othersEnded(ctx); err != nil {
		return nil, fmt.Errorf("pause queue: %w", err)
	}
	s.admissionChanged()
	return r, nil
}

// othersEnded waits until every transaction that writes and has begun before
// now has ended, but not for one that takes very long.
func (s *Server) othersEnded(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, othersWithin)
	defer cancel()
	mark, err := s.queries.XactNow(ctx, s.pool)
	for err == nil {
		var goingOn bool
		if goingOn, err = s.queries.XactsBefore(ctx, s.pool, mark); err == nil && !goingOn {
			return nil
		}
		select {
		case <-time.After(othersPoll):
		case <-ctx.Done():
			return nil
		}
	}
	if ctx.Err() != nil {
		return nil //nolint:nilerr // it waited as long as it may
	}
	return err
}

const (
	othersWithin = 2 * time.Second
	othersPoll   = 2 * time.Millisecond
)

func (s *Server) defineQueueResume() Method {
	return Define("queue.resume", ScopeAdmin, "Lets a paused queue go on.", s.queueResume, Ours, Fleet)
}

func (s *Server) queueResume(ctx context.Context, p *QueueParams) (*QueueResult, error) {
	if _, err := s.queries.QueueResume(ctx, s.pool, string(p.Queue)); err != nil {
		return nil, fmt.Errorf("resume queue: %w", err)
	}
	s.admissionChanged()
	return &QueueResult{Queue: string(p.Queue)}, nil
}

// QueueLimitParams are the parameters of queue.limit.
type QueueLimitParams struct {
	Queue      QueueName       `json:"queue" jsonschema:"required"`
	MaxRunning json.RawMessage `json:"maxRunning" jsonschema_description:"Runs of the queue at once in the whole fleet, 0 to 1000000; null removes the limit, absent leaves it."`
	MaxWaiting json.RawMessage `json:"maxWaiting" jsonschema_description:"Runs that may wait for admission, 0 to 10000: what is accepted beyond is refused with -32014. null removes the limit, absent leaves it."`
}

func (s *Server) defineQueueLimit() Method {
	return Define("queue.limit", ScopeAdmin, "Sets how many runs of a queue may run, and wait, in the whole fleet.", s.queueLimit, Ours, Fleet, Describe(
		"A lower limit stops nothing that runs. It outlives every process."))
}

func (s *Server) queueLimit(ctx context.Context, p *QueueLimitParams) (*QueueResult, error) {
	arg := db.QueueLimitParams{Name: string(p.Queue)}
	var err error
	if arg.MaxRunning, err = limitOf("maxRunning", p.MaxRunning, 1_000_000); err != nil {
		return nil, err
	}
	if arg.MaxWaiting, err = limitOf("maxWaiting", p.MaxWaiting, 10_000); err != nil {
		return nil, err
	}
	if _, err := s.queries.QueueLimit(ctx, s.pool, arg); err != nil {
		return nil, fmt.Errorf("limit queue: %w", err)
	}
	s.admissionChanged()
	return &QueueResult{Queue: string(p.Queue)}, nil
}

// unchanged is what the queries take for a limit that stays as it is.
const unchanged = -1

// limitOf reads a limit: absent leaves it, null removes it.
func limitOf(field string, raw json.RawMessage, most int32) (*int32, error) {
	switch string(raw) {
	case "":
		return new(int32(unchanged)), nil
	case "null":
		return nil, nil
	}
	n := int32(unchanged)
	if err := json.Unmarshal(raw, &n); err != nil || n < 0 || n > most {
		return nil, &InvalidError{Field: field, Reason: "invalid", Message: fmt.Sprintf("must be a whole number from 0 to %d, or null", most)}
	}
	return &n, nil
}

// admissionChanged has the admitter look at once.
func (s *Server) admissionChanged() { s.runs.Bus().Publish(nil, bus.Message{Topic: bus.Ready}) }

// TenantInfo is a tenant with its share of the fleet.
type TenantInfo struct {
	TenantID   string  `json:"tenantId"`
	Weight     float64 `json:"weight" jsonschema_description:"Its share of the starts while others wait too, relative to theirs."`
	MaxRunning *int32  `json:"maxRunning,omitempty" jsonschema_description:"Its runs at once in the whole fleet; absent: no limit."`
	CreatedAt  string  `json:"createdAt"`
}

// TenantListParams are the parameters of tenant.list.
type TenantListParams struct {
	After string `json:"after" jsonschema:"maxLength=63" jsonschema_description:"The last tenantId of the page before."`
	Limit int32  `json:"limit" jsonschema:"minimum=1,maximum=1000,default=100"`
}

// TenantListResult is the result of tenant.list.
type TenantListResult struct {
	Tenants []TenantInfo `json:"tenants" jsonschema_description:"By tenantId."`
}

func (s *Server) tenantList(ctx context.Context, p *TenantListParams) (*TenantListResult, error) {
	rows, err := s.queries.TenantList(ctx, s.pool, db.TenantListParams{After: p.After, MaxRows: p.Limit})
	if err != nil {
		return nil, fmt.Errorf("list tenants: %w", err)
	}
	r := &TenantListResult{Tenants: make([]TenantInfo, len(rows))}
	for i, t := range rows {
		r.Tenants[i] = TenantInfo{t.ID, t.Weight, t.MaxRunning, timestamp(t.CreatedAt)}
	}
	return r, nil
}

// TenantSetParams are the parameters of tenant.set.
type TenantSetParams struct {
	TenantID   string          `json:"tenantId" jsonschema:"required,pattern=^[a-z0-9][a-z0-9_-]{0\\,62}$"`
	Weight     *float64        `json:"weight" jsonschema:"minimum=0.01,maximum=10000" jsonschema_description:"Absent leaves it; a new tenant's is 1."`
	MaxRunning json.RawMessage `json:"maxRunning" jsonschema_description:"0 to 1000000; null removes the limit, absent leaves it."`
}

func (s *Server) defineTenantSet() Method {
	return Define("tenant.set", ScopeAdmin, "Sets a tenant's weight and limit.", s.tenantSet, Ours, Fleet, Describe(
		"It holds from the next admission on, and stops nothing that runs. The tenant must exist: `weir tokens create --tenant` makes it."))
}

func (s *Server) tenantSet(ctx context.Context, p *TenantSetParams) (*TenantInfo, error) {
	arg := db.TenantSetParams{ID: p.TenantID, Weight: unchanged}
	if p.Weight != nil {
		arg.Weight = *p.Weight
	}
	var err error
	if arg.MaxRunning, err = limitOf("maxRunning", p.MaxRunning, 1_000_000); err != nil {
		return nil, err
	}
	rows, err := s.queries.TenantSet(ctx, s.pool, arg)
	if err != nil {
		return nil, fmt.Errorf("set tenant: %w", err)
	}
	if len(rows) == 0 {
		return nil, &NotFoundError{"tenant", p.TenantID}
	}
	s.admissionChanged()
	t := rows[0]
	return &TenantInfo{t.ID, t.Weight, t.MaxRunning, timestamp(t.CreatedAt)}, nil
}

// WorkerParams are the parameters of worker.quiet and worker.drain.
type WorkerParams struct {
	WorkerID string `json:"workerId" jsonschema:"required,maxLength=64"`
}

// WorkerResult is the result of worker.quiet and worker.drain.
type WorkerResult struct {
	WorkerID string `json:"workerId"`
	Wanted   string `json:"wanted" jsonschema:"enum=quiet,enum=drain"`
}

func (s *Server) defineWorkerQuiet() Method {
	return Define("worker.quiet", ScopeAdmin, "Has a worker take no further runs.", s.workerWant("quiet"), Ours, Fleet, Describe(
		"Those in its hands go on to their ends, and the process stays until it is told to stop."))
}

func (s *Server) defineWorkerDrain() Method {
	return Define("worker.drain", ScopeAdmin, "Has a worker hand its runs over and leave.", s.workerWant("drain"), Ours, Fleet, Describe(
		"As SIGTERM does: runs go on elsewhere from their next step boundary. A process that is nothing but a worker then ends with exit code 0."))
}

func (s *Server) workerWant(wanted string) func(context.Context, *WorkerParams) (*WorkerResult, error) {
	return func(ctx context.Context, p *WorkerParams) (*WorkerResult, error) {
		id, err := uuid.Parse(p.WorkerID)
		if err != nil {
			return nil, &NotFoundError{"worker", fmt.Sprintf("%.64s", p.WorkerID)}
		}
		rows, err := s.queries.WorkerWant(ctx, s.pool, db.WorkerWantParams{ID: id, Wanted: wanted})
		if err != nil {
			return nil, fmt.Errorf("ask worker: %w", err)
		}
		if len(rows) == 0 {
			return nil, &NotFoundError{"worker", p.WorkerID}
		}
		s.runs.Bus().Publish(nil, bus.Message{Topic: bus.Workers, ID: id})
		return &WorkerResult{id.String(), rows[0]}, nil
	}
}
