package api

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

const (
	cacheTTL   = 500 * time.Millisecond // how old what is remembered may be, from before it was read
	cacheMax   = 16384                  // entries; all are dropped beyond
	cacheLoad  = 5 * time.Second        // the longest look
	cacheTries = 16                     // looks over connections that break: more than a pool has
)

// cache remembers what load says, for cacheTTL or until it is told to forget.
// Errors are not remembered. Callers that want one key at the same time share
// a look.
type cache[K comparable, V any] struct {
	load func(ctx context.Context, key K) (V, error)

	mu      sync.RWMutex
	known   map[K]remembered[V]
	looking map[K]*look[V]
}

type remembered[V any] struct {
	value V
	until time.Time
}

// look is a load on its way.
type look[V any] struct {
	done  chan struct{}
	value V
	err   error
}

func newCache[K comparable, V any](load func(context.Context, K) (V, error)) *cache[K, V] {
	return &cache[K, V]{load: load, known: map[K]remembered[V]{}, looking: map[K]*look[V]{}}
}

func (c *cache[K, V]) get(ctx context.Context, key K) (V, error) {
	now := time.Now()
	c.mu.RLock()
	r, ok := c.known[key]
	c.mu.RUnlock()
	if ok && now.Before(r.until) {
		return r.value, nil
	}
	c.mu.Lock()
	l, ok := c.looking[key]
	if !ok {
		l = &look[V]{done: make(chan struct{})}
		c.looking[key] = l
	}
	c.mu.Unlock()
	if !ok {
		c.take(ctx, key, l, now)
		return l.value, l.err
	}
	select {
	case <-l.done:
		return l.value, l.err
	case <-ctx.Done():
		var none V
		return none, context.Cause(ctx)
	}
}

// take loads a key for everyone who asked since, so that whoever asked first
// may leave.
func (c *cache[K, V]) take(ctx context.Context, key K, l *look[V], now time.Time) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cacheLoad)
	defer cancel()
	l.err = errLookBroken
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		defer close(l.done)
		if c.looking[key] != l { // forgotten meanwhile: what was read may be of before
			return
		}
		delete(c.looking, key)
		if l.err != nil {
			delete(c.known, key)
			return
		}
		if len(c.known) >= cacheMax {
			clear(c.known)
		}
		c.known[key] = remembered[V]{l.value, now.Add(cacheTTL)}
	}()
	for range cacheTries {
		l.value, l.err = c.load(ctx, key)
		if !connectionBroke(l.err) {
			return
		}
	}
}

// connectionBroke says that a connection was lost that had been there: after a
// restart of the server all of a pool's are, and the next try has another.
func connectionBroke(err error) bool {
	_, cannot := errors.AsType[*pgconn.ConnectError](err)
	return err != nil && !cannot && !errors.Is(err, context.DeadlineExceeded) && unavailable(err)
}

var errLookBroken = errors.New("a look at the database panicked")

// forget drops everything. Whoever asks afterwards gets what was read
// afterwards.
func (c *cache[K, V]) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.known)
	clear(c.looking)
}
