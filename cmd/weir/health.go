package main

import (
	"context"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/scheduler"
	"github.com/weir-run/weir/workers"
)

type readyFlag = atomic.Bool

// metrics is what this process measures, and what the rows say of the fleet.
// No label names a tenant, session or user.
func (p *process) metrics(worker *workers.Worker, sweeper *scheduler.Sweeper) *prometheus.Registry {
	var repairs func() map[string]int64
	if sweeper != nil {
		repairs = sweeper.Repairs
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), jobs.NewMetrics(p.runs, repairs))
	registry.MustRegister(p.collectors(worker)...)
	return registry
}

// health answers what operators ask a process without API: is it alive, can it
// work, what does it measure.
func (p *process) health(ready *readyFlag, worker *workers.Worker, metrics prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { answer(w, "") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), 2*time.Second)
		defer cancel()
		switch {
		case !ready.Load():
			answer(w, "starting or draining")
		case worker != nil && !worker.Alive():
			answer(w, "the worker has no place in the fleet")
		case p.pool.Ping(ctx) != nil:
			answer(w, "the database does not answer")
		default:
			answer(w, "")
		}
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{}))
	return mux
}

func answer(w http.ResponseWriter, problem string) {
	w.Header().Set("Content-Type", "application/json")
	if problem != "" {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = w.Write([]byte(`{"status":"unavailable","reason":"` + problem + `"}` + "\n"))
		return
	}
	_, _ = w.Write([]byte(`{"status":"ok"}` + "\n"))
}

// collectors are the measurements of this process's own work.
func (p *process) collectors(worker *workers.Worker) []prometheus.Collector {
	gauge := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value)
	}
	truth := func(b bool) float64 {
		if b {
			return 1
		}
		return 0
	}
	all := []prometheus.Collector{
		gauge("weir_pool_connections", "Open connections of this process's ordinary pool.", func() float64 { return float64(p.pool.Stat().TotalConns()) }),
		gauge("weir_pool_in_use", "Connections of the ordinary pool in use.", func() float64 { return float64(p.pool.Stat().AcquiredConns()) }),
	}
	if !p.config.polls() {
		all = append(all,
			gauge("weir_bus_connected", "1 while this process hears the notifications of others.", func() float64 { return truth(p.bus.Alive()) }))
	}
	if worker != nil {
		all = append(all,
			gauge("weir_worker_alive", "1 while this process has a place in the fleet.", func() float64 { return truth(worker.Alive()) }),
			gauge("weir_worker_running", "Runs in this worker's hands.", func() float64 { return float64(worker.Running()) }),
			gauge("weir_worker_slots", "Runs this worker takes at once.", func() float64 { return float64(worker.Slots) }),
		)
	}
	return all
}
