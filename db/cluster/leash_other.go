//go:build unix && !linux

package cluster

import (
	"os/exec"
	"syscall"
)

func startLeashed(cmd *exec.Cmd, lastSignal syscall.Signal) (release func(), err error) {
	return startWatched(cmd, lastSignal)
}
