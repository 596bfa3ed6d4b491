//go:build unix

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"runtime"
	"strconv"
	"syscall"
	"time"
)

// account is the user that the server runs as when we are root. A nil account
// is ourselves.
type account struct {
	name    string
	userID  uint32
	groupID uint32
}

// serverAccount returns nil unless we are root. Data that exists stays with its
// owner: after `weir dev`, `sudo weir dev` must not leave files behind that the
// user cannot read.
func serverAccount(pgdata string) (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	if info, err := os.Stat(pgdata); err == nil {
		if stat := info.Sys().(*syscall.Stat_t); stat.Uid != 0 {
			return &account{name: strconv.Itoa(int(stat.Uid)), userID: stat.Uid, groupID: stat.Gid}, nil
		}
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err := errors.Join(err1, err2); err != nil {
			return nil, fmt.Errorf("user %s: %w", name, err)
		}
		return &account{name: name, userID: uint32(uid), groupID: uint32(gid)}, nil
	}
	return nil, errors.New("postgres does not run as root, and there is no user postgres or nobody to run it as")
}

func (a *account) uid() int {
	if a == nil {
		return os.Getuid()
	}
	return int(a.userID)
}

// own gives a file to the account.
func (a *account) own(name string) error {
	if a == nil {
		return nil
	}
	if err := os.Chown(name, int(a.userID), int(a.groupID)); err != nil {
		return fmt.Errorf("give %s to user %s: %w", name, a.name, err)
	}
	return nil
}

// command prepares a program of Postgres to run as the account. Its environment
// is fixed: PGPORT, PGDATA, LC_MESSAGES and their like are meant for other
// servers than ours. It gets a session of its own, or else Ctrl-C in a terminal
// would stop the server before its clients.
func (a *account) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Env = []string{"LC_ALL=C", "TZ=UTC", "PATH=/usr/local/bin:/usr/bin:/bin"}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if a != nil {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: a.userID, Gid: a.groupID}
	}
	// A backend that outlives a killed postmaster keeps the log's pipe open.
	cmd.WaitDelay = time.Second
	return cmd
}

// reachedDir is a directory as the server's user can name it.
type reachedDir struct {
	path  string
	files []*os.File // for exec.Cmd.ExtraFiles
}

func (d *reachedDir) close() {
	for _, f := range d.files {
		_ = f.Close()
	}
}

// reach returns a path by which the account can use its directory, although it
// may not be able to enter the folders above.
func (a *account) reach(ctx context.Context, dir string) (*reachedDir, error) {
	if a == nil {
		return &reachedDir{path: dir}, nil
	}
	cmd := a.command("/bin/sh", "-c", `cd "$1"`, "sh", dir)
	err := cmd.Run()
	if err == nil {
		return &reachedDir{path: dir}, nil
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if _, isExit := errors.AsType[*exec.ExitError](err); !isExit {
		return nil, fmt.Errorf("run as user %s: %w", a.name, err)
	}
	if runtime.GOOS != "linux" {
		return nil, fmt.Errorf("postgres runs as user %s, who may not enter the folders above %s: "+
			"choose a data directory elsewhere, such as /var/lib/weir", a.name, dir)
	}
	file, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	return &reachedDir{path: "/proc/self/fd/3", files: []*os.File{file}}, nil
}

// child is a process that ends when ours does.
type child struct {
	pid  int
	cmd  *exec.Cmd
	done chan struct{} // closed once it has been reaped
	err  error         // valid once done is closed
}

// startChild starts cmd, tied to us: if this process ends without more ado, the
// child gets lastSignal.
func startChild(cmd *exec.Cmd, lastSignal syscall.Signal) (*child, error) {
	c := &child{cmd: cmd, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		release, err := startLeashed(cmd, lastSignal)
		if err != nil {
			started <- err
			return
		}
		c.pid = cmd.Process.Pid
		started <- nil
		c.err = cmd.Wait()
		release()
		close(c.done)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return c, nil
}

// signal does nothing to a child that has ended.
func (c *child) signal(s syscall.Signal) error {
	if err := c.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal process %d: %w", c.pid, err)
	}
	return nil
}
