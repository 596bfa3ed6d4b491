package cluster

import (
	"os/exec"
	"runtime"
	"syscall"
)

// startLeashed starts cmd and has the kernel signal it when we die. The kernel
// watches the thread that forked, not the process, so the calling goroutine
// keeps its thread until it calls release, after the child's end.
//
// Changing the user clears such a wish, but exec.Cmd expresses it after the
// change, and the exec of a program that is not set-user-ID keeps it;
// TestServerDiesWithOwner proves it for both cases.
func startLeashed(cmd *exec.Cmd, lastSignal syscall.Signal) (release func(), err error) {
	runtime.LockOSThread()
	cmd.SysProcAttr.Pdeathsig = lastSignal
	if err := cmd.Start(); err != nil {
		runtime.UnlockOSThread()
		return nil, err
	}
	return runtime.UnlockOSThread, nil
}
