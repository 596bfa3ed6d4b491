package workers

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-run/weir/db"
)

// limits is this process's copy of the fleet's rate limits: which provider keys
// nobody may call, and until when. It is refreshed when the bus says that one
// was set, and on every look.
type limits struct {
	queries *db.Queries
	pool    *pgxpool.Pool

	mu    sync.RWMutex
	until map[limitKey]time.Time // by this process's monotonic clock
}

type limitKey struct{ tenant, key string }

func newLimits(q *db.Queries, pool *pgxpool.Pool) *limits {
	return &limits{queries: q, pool: pool, until: map[limitKey]time.Time{}}
}

// blocked says for how long key must not be called; 0 or less means it may.
func (l *limits) blocked(tenant, key string) time.Duration {
	l.mu.RLock()
	defer l.mu.RUnlock()
	until, ok := l.until[limitKey{tenant, key}]
	if !ok {
		return 0
	}
	return time.Until(until)
}

// set notes a limit this process just met, before it is stored.
func (l *limits) set(tenant, key string, d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := limitKey{tenant, key}
	if until := time.Now().Add(d); until.After(l.until[k]) {
		l.until[k] = until
	}
}

// refresh reads the fleet's.
func (l *limits) refresh(ctx context.Context) error {
	asked := time.Now()
	rows, err := l.queries.RateLimits(ctx, l.pool)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for k, until := range l.until {
		if until.Before(asked) {
			delete(l.until, k)
		}
	}
	for _, r := range rows {
		l.until[limitKey{r.TenantID, r.Key}] = asked.Add(time.Duration(r.ForMs) * time.Millisecond)
	}
	return nil
}
