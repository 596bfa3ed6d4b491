package faults

import (
	"bufio"
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	readyLimit = 60 * time.Second
	exitLimit  = 60 * time.Second
	logTail    = 20_000 // bytes of a process's log that a failure shows
)

// process is one of weir.
type process struct {
	t     *testing.T
	name  string // also what its connections call themselves
	cmd   *exec.Cmd
	done  chan struct{}
	log   *tail
	ready struct {
		API, Listen string
		WorkerID    string `json:"worker_id"`
		PID         int
	}
}

// launch starts a process and waits until it is ready.
func launch(t *testing.T, name string, args ...string) *process {
	t.Helper()
	p := &process{t: t, name: name, done: make(chan struct{}), log: &tail{}}
	p.cmd = exec.Command(weirBinary(t), append(args, "--json")...)
	p.cmd.Env, p.cmd.Stderr = cleanEnv(), p.log
	stdout, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, startLeashed(p.cmd, syscall.SIGKILL))
	lines := make(chan string, 1)
	go func() {
		defer close(p.done)
		for s := bufio.NewScanner(stdout); s.Scan(); {
			lines <- s.Text()
		}
		_ = p.cmd.Wait()
	}()
	t.Cleanup(func() {
		p.signal(syscall.SIGCONT)
		p.kill()
		if t.Failed() {
			t.Logf("log of %s, weir %s (process %d):\n%s", name, args[0], p.cmd.Process.Pid, p.log)
		}
	})
	select {
	case line := <-lines:
		require.NoError(t, json.Unmarshal([]byte(line), &p.ready), line)
	case <-p.done:
		t.Fatalf("weir %s ended before it was ready:\n%s", strings.Join(args, " "), p.log)
	case <-time.After(readyLimit):
		t.Fatalf("weir %s was not ready in %s:\n%s", strings.Join(args, " "), readyLimit, p.log)
	}
	return p
}

// cleanEnv is the environment without what would change what weir does.
func cleanEnv() (env []string) {
	for _, entry := range os.Environ() {
		name, _, _ := strings.Cut(entry, "=")
		if strings.HasPrefix(name, "WEIR_") || name == "DATABASE_URL" || strings.HasSuffix(name, "_API_KEY") {
			continue
		}
		env = append(env, entry)
	}
	return env
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) } // it may have ended

// kill ends the process as a crash would, and waits for its end.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// exit waits for the process's end and returns its code.
func (p *process) exit() int {
	p.t.Helper()
	select {
	case <-p.done:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(exitLimit):
		p.t.Fatalf("%s has not ended in %s:\n%s", p.name, exitLimit, p.log)
		return -1
	}
}

// tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	text []byte
}

func (l *tail) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, p...)
	if extra := len(l.text) - logTail; extra > logTail {
		l.text = append(l.text[:0], l.text[extra:]...)
	}
	return len(p), nil
}

func (l *tail) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.text[max(0, len(l.text)-logTail):])
}
