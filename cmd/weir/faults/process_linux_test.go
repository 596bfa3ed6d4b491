package faults

import (
	"os/exec"
	"runtime"
	"syscall"
)

// spawner starts all processes: the kernel ends a child with the thread that
// started it, so that thread must last.
var spawner = make(chan func())

func init() {
	go func() {
		runtime.LockOSThread()
		for start := range spawner {
			start()
		}
	}()
}

// startLeashed starts a process that ends with this one, also when this one is
// killed.
func startLeashed(cmd *exec.Cmd, last syscall.Signal) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = last
	started := make(chan error)
	spawner <- func() { started <- cmd.Start() }
	return <-started
}
