package client

import "context"

// Queue is a queue of the fleet.
type Queue struct {
	Queue         string  `json:"queue"`
	Paused        bool    `json:"paused"`
	PausedAt      string  `json:"pausedAt,omitempty"`
	MaxRunning    *int    `json:"maxRunning"` // nil: no limit
	MaxWaiting    *int    `json:"maxWaiting"` // nil: no limit
	Waiting       int64   `json:"waiting"`    // for admission; counted up to 10000
	Admitted      int64   `json:"admitted"`
	Running       int64   `json:"running"`
	Slots         int64   `json:"slots"`
	OldestSeconds float64 `json:"oldestSeconds"`
	FastPath      bool    `json:"fastPath"`
}

// Queues lists the queues.
func (c *Client) Queues(ctx context.Context) ([]Queue, error) {
	r, err := call1[struct {
		Queues []Queue `json:"queues"`
	}](ctx, c, "queue.list", nil, Reads)
	if err != nil {
		return nil, err
	}
	return r.Queues, nil
}

// QueueChanged is the answer to a change of a queue.
type QueueChanged struct {
	Queue     string `json:"queue"`
	TakenBack int64  `json:"takenBack,omitempty"` // admitted runs that wait again
}

type queueParams struct {
	Queue string `json:"queue"`
}

// PauseQueue starts nothing of a queue until it is resumed.
func (c *Client) PauseQueue(ctx context.Context, queue string) (*QueueChanged, error) {
	return call1[QueueChanged](ctx, c, "queue.pause", queueParams{queue}, Reads)
}

// ResumeQueue lets a paused queue go on.
func (c *Client) ResumeQueue(ctx context.Context, queue string) (*QueueChanged, error) {
	return call1[QueueChanged](ctx, c, "queue.resume", queueParams{queue}, Reads)
}

// LimitQueue sets limits by their names, maxRunning and maxWaiting; nil removes
// one, and one that is not named stays.
func (c *Client) LimitQueue(ctx context.Context, queue string, limits map[string]*int) (*QueueChanged, error) {
	params := map[string]any{"queue": queue}
	for name, n := range limits {
		params[name] = n
	}
	return call1[QueueChanged](ctx, c, "queue.limit", params, Reads)
}

// Tenant is a tenant with its share of the fleet.
type Tenant struct {
	TenantID   string  `json:"tenantId"`
	Weight     float64 `json:"weight"`
	MaxRunning *int    `json:"maxRunning"` // nil: no limit
	CreatedAt  string  `json:"createdAt"`
}

// Tenants lists the tenants that come after one, by name.
func (c *Client) Tenants(ctx context.Context, after string) ([]Tenant, error) {
	r, err := call1[struct {
		Tenants []Tenant `json:"tenants"`
	}](ctx, c, "tenant.list", struct {
		After string `json:"after,omitempty"`
		Limit int    `json:"limit"`
	}{after, 1000}, Reads)
	if err != nil {
		return nil, err
	}
	return r.Tenants, nil
}

// SetTenant sets members by their names, weight and maxRunning; a nil
// maxRunning removes the limit.
func (c *Client) SetTenant(ctx context.Context, tenant string, members map[string]any) (*Tenant, error) {
	params := map[string]any{"tenantId": tenant}
	for name, v := range members {
		params[name] = v
	}
	return call1[Tenant](ctx, c, "tenant.set", params, Reads)
}

// WorkerAsked is what an operator wants of a worker now.
type WorkerAsked struct {
	WorkerID string `json:"workerId"`
	Wanted   string `json:"wanted"` // quiet or drain
}

type workerParams struct {
	WorkerID string `json:"workerId"`
}

// QuietWorker has a worker take no further runs.
func (c *Client) QuietWorker(ctx context.Context, id string) (*WorkerAsked, error) {
	return call1[WorkerAsked](ctx, c, "worker.quiet", workerParams{id}, Reads)
}

// DrainWorker has a worker hand its runs over and leave.
func (c *Client) DrainWorker(ctx context.Context, id string) (*WorkerAsked, error) {
	return call1[WorkerAsked](ctx, c, "worker.drain", workerParams{id}, Reads)
}
