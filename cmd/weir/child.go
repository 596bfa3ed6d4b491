package main

import "os/exec"

// child is a process that ends with this one.
type child struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
	err  error         // of Wait, once done is closed
}

// startChild starts cmd and waits for it in a goroutine of its own.
func startChild(cmd *exec.Cmd) (*child, error) {
	c := &child{cmd: cmd, done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		release, err := startLeashed(cmd)
		started <- err
		if err != nil {
			return
		}
		defer release()
		c.err = cmd.Wait()
		close(c.done)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return c, nil
}
