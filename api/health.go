package api

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/gin-gonic/gin"
)

const (
	readyFor   = 250 * time.Millisecond // how long an answer of readyz stands: anybody may ask
	schemaFor  = 10 * time.Second       // how long a schema that was right is taken to be right
	readyLimit = 2 * time.Second        // of a look at the database
)

func (s *Server) serveLivez(c *gin.Context) {
	writeJSON(c, http.StatusOK, struct {
		Status string `json:"status"`
	}{"ok"})
}

// readiness remembers what the database said last.
type readiness struct {
	mu             sync.Mutex
	asked          time.Time
	schemaAsked    time.Time
	answer, schema error
}

type readyCheck struct {
	Healthy bool `json:"healthy"`
}

type readyAnswer struct {
	Status string `json:"status"` // ok, unavailable
	Checks struct {
		Postgres readyCheck `json:"postgres"`
		Schema   readyCheck `json:"schema"`
		Draining bool       `json:"draining"`
	} `json:"checks"`
}

// serveReadyz says whether changes should be sent here: the database answers, its
// schema serves this binary, and the process is not about to end.
func (s *Server) serveReadyz(c *gin.Context) {
	var a readyAnswer
	database, schema := s.checkDatabase(c.Request.Context())
	a.Checks.Postgres.Healthy, a.Checks.Schema.Healthy, a.Checks.Draining = database == nil, schema == nil, s.unready.Load()
	status := http.StatusOK
	a.Status = "ok"
	if database != nil || schema != nil || a.Checks.Draining {
		status, a.Status = http.StatusServiceUnavailable, "unavailable"
		c.Header("Retry-After", "1")
	}
	writeJSON(c, status, a)
}

func (s *Server) checkDatabase(ctx context.Context) (database, schema error) {
	r := &s.ready
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.asked) < readyFor {
		return r.answer, r.schema
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), readyLimit)
	defer cancel()
	r.answer = s.pool.Ping(ctx)
	if r.answer == nil && (r.schema != nil || time.Since(r.schemaAsked) > schemaFor) {
		r.schema = s.config.Schema(ctx)
		r.schemaAsked = time.Now()
	}
	if err := errors.Join(r.answer, r.schema); err != nil {
		s.log.WarnContext(ctx, "not ready", "error", err)
	}
	r.asked = time.Now()
	return r.answer, r.schema
}
