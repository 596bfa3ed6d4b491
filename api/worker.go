package api

import (
	"context"
	"fmt"
)

// WorkerInfo is a worker process.
type WorkerInfo struct {
	WorkerID    string   `json:"workerId"`
	Hostname    string   `json:"hostname"`
	PID         int32    `json:"pid"`
	State       string   `json:"state" jsonschema_description:"live, draining, dead, reaped or left."`
	Version     string   `json:"version"`
	Slots       int32    `json:"slots"`
	Running     int64    `json:"running" jsonschema_description:"Runs in its hands."`
	Queues      []string `json:"queues"`
	StartedAt   string   `json:"startedAt"`
	HeartbeatAt string   `json:"heartbeatAt"`
	Lock        bool     `json:"lock" jsonschema_description:"Whether it holds its advisory lock: its death will be seen at once."`
	Wanted      string   `json:"wanted,omitempty" jsonschema:"enum=quiet,enum=drain" jsonschema_description:"What an operator wants of it."`
}

// WorkerListResult is the result of worker.list.
type WorkerListResult struct {
	Workers []WorkerInfo `json:"workers" jsonschema_description:"Those at work and those that ended within the last hour, the newest first."`
}

func (s *Server) workerList(ctx context.Context, _ *struct{}) (*WorkerListResult, error) {
	rows, err := s.queries.WorkerStatus(ctx, s.pool)
	if err != nil {
		return nil, fmt.Errorf("list workers: %w", err)
	}
	r := &WorkerListResult{Workers: make([]WorkerInfo, len(rows))}
	for i, w := range rows {
		r.Workers[i] = WorkerInfo{
			WorkerID: w.ID.String(), Hostname: w.Hostname, PID: w.Pid, State: string(w.State), Version: w.Version, Slots: w.Slots,
			Running: w.Running, Queues: notNil(w.Queues), StartedAt: timestamp(w.StartedAt), HeartbeatAt: timestamp(w.HeartbeatAt), Lock: w.Lock,
			Wanted: w.Wanted,
		}
	}
	return r, nil
}
