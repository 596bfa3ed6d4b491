package api

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/weir-run/weir/api/rpc"
	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
)

// repeated answers calls with an idempotency key. It is the registry's Repeated.
func (s *Server) repeated(ctx context.Context, call *KeyedCall, run func(context.Context) (any, rpc.Wait, error)) (any, rpc.Wait, error) {
	digest, err := digestParams(call.Params)
	if err != nil {
		return nil, nil, err
	}
	result, err := s.once(ctx, callerFrom(ctx).TenantID, call.Method.Name, call.IdempotencyKey, digest, func(ctx context.Context) (any, error) {
		result, wait, err := run(ctx)
		if wait != nil {
			return nil, fmt.Errorf("method %s waits, so it needs a member idempotencyKey of its own", call.Method.Name)
		}
		return result, err
	})
	return result, nil, err
}

// once runs a call under a key, or answers it as it was answered within a day.
// The key, its answer and what run does through inTx are one transaction: a
// refused call stores nothing, and a repeat waits for a call that still runs,
// in this process or another. Error: *jobs.ConflictError when the key came
// with another digest.
func (s *Server) once(ctx context.Context, tenant, scope, key string, digest []byte, run func(context.Context) (any, error)) (any, error) {
	// What runs may need a second connection: these must not take them all.
	select {
	case s.keyed <- struct{}{}:
		defer func() { <-s.keyed }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	var result any
	t := &callTx{}
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		taken, err := s.queries.IdempotencyClaim(ctx, tx, db.IdempotencyClaimParams{TenantID: tenant, Scope: scope, Key: key, Digest: digest})
		if err != nil {
			return err
		}
		if taken == 0 {
			stored, err := s.queries.IdempotencyGet(ctx, tx, db.IdempotencyGetParams{TenantID: tenant, Scope: scope, Key: key})
			if err != nil {
				return err
			}
			if !bytes.Equal(stored.Digest, digest) {
				return &jobs.ConflictError{Key: key}
			}
			result = json.RawMessage(stored.Result)
			return nil
		}
		t.tx = tx
		if result, err = run(context.WithValue(ctx, callTxKey{}, t)); err != nil {
			return err
		}
		stored := result
		if r, ok := result.(secretive); ok {
			stored = r.withoutSecret()
		}
		text, err := marshal(stored)
		if err != nil {
			return err
		}
		return s.queries.IdempotencyStore(ctx, tx, db.IdempotencyStoreParams{TenantID: tenant, Scope: scope, Key: key, Result: text})
	})
	for _, f := range t.after { // also after an error, which may hide a commit
		f()
	}
	if err != nil {
		return nil, err
	}
	return result, nil
}

// secretive is a result that shows a secret once: a repeat gets the rest of it.
type secretive interface{ withoutSecret() any }

// callTx is the transaction of a call with an idempotency key.
type callTx struct {
	tx    pgx.Tx
	after []func()
}

type callTxKey struct{}

func callTxFrom(ctx context.Context) *callTx {
	t, _ := ctx.Value(callTxKey{}).(*callTx)
	return t
}

// inTx runs a change of a handler's in the transaction of its call, if it has
// one, else in one of its own. then runs when it is over, unless the change
// was refused.
func (s *Server) inTx(ctx context.Context, f func(tx pgx.Tx) error, then func()) error {
	if t := callTxFrom(ctx); t != nil {
		if err := f(t.tx); err != nil {
			return err
		}
		t.after = append(t.after, then)
		return nil
	}
	var refused bool
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		err := f(tx)
		refused = err != nil
		return err
	})
	if !refused {
		then()
	}
	return err
}

// reading is where a handler reads what its own call may have changed.
func (s *Server) reading(ctx context.Context) db.DBTX {
	if t := callTxFrom(ctx); t != nil {
		return t.tx
	}
	return s.pool
}

// digestParams is the digest of params in their canonical form, without the key
// itself.
func digestParams(params json.RawMessage) ([]byte, error) {
	decoder := json.NewDecoder(bytes.NewReader(params))
	decoder.UseNumber()
	var members map[string]any
	if err := decoder.Decode(&members); err != nil {
		return nil, errors.New("params that were checked are no object")
	}
	delete(members, "idempotencyKey")
	return digest(members)
}

// digest is that of the JSON of v, whose maps are written in order.
func digest(v any) ([]byte, error) {
	text, err := marshal(v)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(text)
	return sum[:], nil
}

// marshal is json.Marshal without the escapes that HTML needs.
func marshal(v any) ([]byte, error) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(text.Bytes(), []byte("\n")), nil
}
