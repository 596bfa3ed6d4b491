package jobs

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/db"
)

func TestUnknownOutcome(t *testing.T) {
	t.Parallel()
	f := setup(t)
	a := f.accept("s")
	inUnit, release := make(chan struct{}, 8), make(chan struct{})
	f.runs.committer.afterLoad = func(*unit) error {
		inUnit <- struct{}{}
		<-release
		return nil
	}
	ctx, cancel := context.WithCancelCause(f.ctx)
	answered := make(chan error, 1)
	go func() { answered <- f.runs.committer.do(ctx, &wakeOp{Ref: a.Ref(), by: db.WaitKindTimer}) }()
	<-inUnit
	cancel(context.Canceled) // the lease is lost while the database is away
	select {
	case err := <-answered:
		require.ErrorIs(t, err, ErrUnknownOutcome)
	case <-time.After(20 * time.Second):
		t.Fatal("a caller whose lease is lost must not wait for a database that is away")
	}
	close(release)
	require.Eventually(t, func() bool { // the writer settles it all the same
		row, err := f.runs.queries.RunGet(f.ctx, f.pool, db.RunGetParams{TenantID: "default", ID: a.RunID})
		return err == nil && row.WakeSeq == 1
	}, 20*time.Second, 5*time.Millisecond)
}
