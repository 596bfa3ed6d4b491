package main

import (
	"os/exec"
	"runtime"
	"syscall"
)

// startLeashed starts cmd and has the kernel kill it when we die. The kernel
// watches the thread that forked, so the calling goroutine keeps its thread
// until it calls release.
func startLeashed(cmd *exec.Cmd) (release func(), err error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	runtime.LockOSThread()
	if err := cmd.Start(); err != nil {
		runtime.UnlockOSThread()
		return nil, err
	}
	return runtime.UnlockOSThread, nil
}
