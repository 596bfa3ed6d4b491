package faults

import (
	"path/filepath"
	"testing"
	"time"
)

// rows are the faults, the longest first, since they run side by side. Their
// names cite the list of fault tests (RIVER-n), and the field cases (FC-n) that
// they run.
var rows = []struct {
	name  string
	limit time.Duration
	// always says that the row runs without WEIR_FAULTS=1, at a smaller size.
	always bool
	// alone says that a busy machine would spoil what it measures.
	alone bool
	run   func(t *testing.T)
}{
	{"ParkedRunsHoldNoSlot", 4 * time.Minute, false, true, parkedRuns},
	{"RIVER-05PostgresStopsCrashesAndFreezes", 4 * time.Minute, false, false, postgresFails},
	{"LimitsHoldUnder50Kills", 4 * time.Minute, false, false, limitsHold},
	{"RIVER-08Partition", 3 * time.Minute, true, false, partition},
	{"RIVER-04LeadersDieAndHang", 3 * time.Minute, false, false, leadersFail},
	{"RIVER-06FailoverToAReplica", 3 * time.Minute, false, false, failover},
	{"RIVER-01KillBetweenEffectAndCheckpoint", 2 * time.Minute, true, false, killAtEveryStep},
	{"RIVER-15FC-6PoisonHarmsNoNeighbour", 2 * time.Minute, false, false, poison},
	{"RIVER-03FC-4ZombieWritesNothing", 2 * time.Minute, true, false, zombie},
	{"FC-20LaneKeepsItsOrderWhileWorkersDie", 2 * time.Minute, false, false, laneOrder},
	{"RIVER-02KillAfterWorkReturned", 2 * time.Minute, false, false, killAfterWork},
	{"RIVER-14FC-8CancelRacesEverything", 2 * time.Minute, true, false, cancelRaces},
	{"RIVER-09ListenersAreDeaf", 2 * time.Minute, false, false, deafListeners},
	{"RIVER-07BackendsAreTerminated", 2 * time.Minute, true, false, terminateBackends},
	{"RIVER-13DuplicateDelivery", 2 * time.Minute, true, false, duplicateDelivery},
	{"RIVER-13FetchWithoutAnAnswer", 2 * time.Minute, false, false, lostFetch},
	{"RIVER-19FC-25BacklogDelaysNobodyElse", 2 * time.Minute, false, false, backlog},
	{"RIVER-20LongSnapshot", 2 * time.Minute, false, false, longSnapshot},
	{"RIVER-21LockedJobTable", 2 * time.Minute, false, false, lockedJobs},
	{"RIVER-22ProviderFaults", 2 * time.Minute, false, false, providerFaults},
	{"RIVER-27KillOfATreeThatSpawns", 2 * time.Minute, false, false, killTree},
	{"FC-1AcceptedIsStored", 2 * time.Minute, false, false, acceptedIsStored},
	{"FC-2EveryWorkerDies", 2 * time.Minute, false, false, everyWorkerDies},
	{"FC-9DeploymentHandsOver", 2 * time.Minute, false, false, deployment},
	{"RIVER-11ClockSkew", 2 * time.Minute, false, false, clockSkew},
	{"NoFaultNeedsNoRepair", 2 * time.Minute, false, false, noFault},
}

func TestFaults(t *testing.T) {
	t.Logf("%s=%d repeats what this run draws", envSeed, seed)
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			if !all && !r.always {
				t.Skipf("runs with %s=1 (make faults)", envAll)
			}
			if !r.alone {
				t.Parallel()
			}
			began := time.Now()
			r.run(t)
			took := time.Since(began).Round(100 * time.Millisecond)
			t.Logf("took %s", took)
			if took > r.limit {
				t.Errorf("took %s, more than %s", took, r.limit)
			}
		})
	}
}

// size is one number in a run of every row, and a smaller one in the few that
// always run.
func size(full, small int) int {
	if all {
		return full
	}
	return small
}

// quantile is of times in order.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))].Round(time.Millisecond)
}

// clockSkew would move clocks. Processes of weir decide nothing by theirs, and
// Go asks the kernel, so only the server's clock matters and can be moved, by a
// library that is preloaded.
func clockSkew(t *testing.T) {
	if found, _ := filepath.Glob("/usr/lib/*/faketime/libfaketime.so.1"); len(found) == 0 {
		t.Skip("libfaketime is not installed: no clock of Postgres can be moved")
	}
	t.Skip("not written yet")
}
