package main

import (
	"context"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	busyRuns    = 32        // in hand: from here on speed is worth memory
	busyPercent = 400       // Go's GOGC while busy: a third of a busy worker's time went into collecting
	idlePercent = 200       // otherwise: some 4 MB for a quicker start of a burst
	plentyHeap  = 128 << 20 // of live objects: from here on memory is worth more again
)

// paceGC lets a busy worker collect less often and an idle one stay small.
// GOGC in the environment has the last word.
func paceGC(ctx context.Context, running func() int) {
	if os.Getenv("GOGC") != "" {
		return
	}
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	percent := idlePercent
	debug.SetGCPercent(percent)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		metrics.Read(live)
		want := idlePercent
		if running() >= busyRuns && live[0].Value.Uint64() < plentyHeap {
			want = busyPercent
		}
		if want != percent {
			debug.SetGCPercent(want)
			percent = want
		}
	}
}
