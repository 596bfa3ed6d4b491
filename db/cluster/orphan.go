//go:build unix

package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// awaitOrphans waits until no Postgres works in the data directory, whose lock
// we hold: a server whose owner was killed is about to end. One that stays was
// started by hand, and is not ours to stop: *InUseError. After that any
// postmaster.pid is stale, whatever process its PID may belong to by now, and is
// removed, since Postgres would refuse to start if that process is alive.
func awaitOrphans(ctx context.Context, dataDir string, patience time.Duration) error {
	pgdata := filepath.Join(dataDir, "pgdata")
	limit := time.After(patience)
	for {
		pid := serverPID(pgdata)
		if pid == 0 {
			break
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for Postgres process %d to leave %s: %w", pid, pgdata, context.Cause(ctx))
		case <-limit:
			return &InUseError{DataDir: dataDir, PID: pid}
		case <-time.After(20 * time.Millisecond):
		}
	}
	if err := os.Remove(filepath.Join(pgdata, "postmaster.pid")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove a stale postmaster.pid: %w", err)
	}
	return nil
}
