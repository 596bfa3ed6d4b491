//go:build unix

package cluster

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
)

// startWatched starts cmd together with a shell that signals it when we die:
// the shell reads a pipe whose other end only we hold, and which the kernel
// closes with us. Every system has it, at the price of one more process.
//
// The shell is told the child's PID once there is one. It is ended before the
// child is reaped or right after, so that it never signals a PID that has
// passed to another process.
func startWatched(cmd *exec.Cmd, lastSignal syscall.Signal) (release func(), err error) {
	reader, writer, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	script := `read -r pid || exit 0; read -r bye && exit 0; kill -` + strconv.Itoa(int(lastSignal)) + ` "$pid"`
	watcher := exec.Command("/bin/sh", "-c", script)
	watcher.Stdin = reader
	watcher.Env = []string{"PATH=/usr/bin:/bin"}
	watcher.Dir = "/"
	watcher.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = watcher.Start()
	_ = reader.Close()
	if err != nil {
		_ = writer.Close()
		return nil, fmt.Errorf("start the watching shell: %w", err)
	}
	release = func() {
		_, _ = writer.WriteString("bye\n")
		_ = writer.Close()
		_ = watcher.Wait()
	}
	if err := cmd.Start(); err != nil {
		_ = writer.Close() // no PID was written: the shell ends without a signal
		_ = watcher.Wait()
		return nil, err
	}
	if _, err := fmt.Fprintln(writer, cmd.Process.Pid); err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		release()
		return nil, fmt.Errorf("tell the watching shell: %w", err)
	}
	return release, nil
}
