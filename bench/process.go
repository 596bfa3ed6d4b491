package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// childCommand is the first argument of this binary as one of its own
// contestants.
const childCommand = "child"

// childConfig is what a contestant's process is told.
type childConfig struct {
	URL   string // of its database
	Kind  string // which of the role's designs
	Width int    // jobs at once
	Steps int    // of a turn
	Turns int    // in all
	Rows  turnRows
}

var childRoles = map[string]func(context.Context, childConfig, *bufio.Reader) error{
	"accept": acceptChild,
	"limit":  limitChild,
	"start":  startChild,
	"turns":  turnsChild,
	"dbos":   dbosChild,
	"sleep":  sleepChild,
}

func runChild(args []string) error {
	if len(args) != 2 {
		return errors.New("child needs a role and a configuration")
	}
	role, ok := childRoles[args[0]]
	if !ok {
		return fmt.Errorf("there is no role %q", args[0])
	}
	var c childConfig
	if err := json.Unmarshal([]byte(args[1]), &c); err != nil {
		return err
	}
	return role(context.Background(), c, bufio.NewReader(os.Stdin))
}

// process is a process of ours. It dies with us.
type process struct {
	name  string
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan string // of its output; closed when that ends
	done  chan struct{}
	log   string // file of its standard error
}

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

// spawn starts a program whose standard error goes to a log file.
func (b *bench) spawn(name, path string, env []string, args ...string) (*process, error) {
	log, err := os.CreateTemp(b.dir, name+"-*.log")
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p := &process{name: name, cmd: exec.Command(path, args...), lines: make(chan string, 16), done: make(chan struct{}), log: log.Name()}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stderr = log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	started := make(chan error)
	spawner <- func() { started <- p.cmd.Start() }
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			p.lines <- lines.Text()
		}
		close(p.lines)
		_ = p.cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// spawnChild starts this binary as one of its contestants and waits until it
// is ready; what follows the word ready comes back.
func (b *bench) spawnChild(ctx context.Context, role string, c childConfig) (*process, string, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, "", err
	}
	config, err := json.Marshal(c)
	if err != nil {
		return nil, "", err
	}
	name := role
	if c.Kind != "" {
		name += "-" + c.Kind
	}
	p, err := b.spawn(name, self, nil, childCommand, role, string(config))
	if err != nil {
		return nil, "", err
	}
	ready, err := p.expect(ctx, "ready", time.Minute)
	if err != nil {
		p.kill()
		return nil, "", err
	}
	return p, ready, nil
}

// expect waits for a line that begins with word and returns the rest of it.
func (p *process) expect(ctx context.Context, word string, limit time.Duration) (string, error) {
	t := time.NewTimer(limit)
	defer t.Stop()
	for {
		select {
		case line, ok := <-p.lines:
			if !ok {
				return "", fmt.Errorf("%s ended before it said %q: %s", p.name, word, p.lastWords())
			}
			if rest, ok := strings.CutPrefix(line, word); ok {
				return strings.TrimSpace(rest), nil
			}
		case <-t.C:
			return "", fmt.Errorf("%s did not say %q within %s: %s", p.name, word, limit, p.lastWords())
		case <-ctx.Done():
			return "", context.Cause(ctx)
		}
	}
}

func (p *process) say(line string) error {
	_, err := io.WriteString(p.in, line+"\n")
	return err
}

func (p *process) lastWords() string {
	const tail = 2000
	text, _ := os.ReadFile(p.log)
	return strings.TrimSpace(string(text[max(0, len(text)-tail):]))
}

func (p *process) signal(s syscall.Signal) error { return p.cmd.Process.Signal(s) }

// kill ends the process with SIGKILL and waits for its end.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // it may have ended
	for range p.lines {
	}
	<-p.done
}

// rss is the process's resident memory in MB.
func (p *process) rss() (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.SplitSeq(string(text), "\n") {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kB, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
			return kB / 1024, err
		}
	}
	return 0, fmt.Errorf("process %d has no VmRSS", p.cmd.Process.Pid)
}

func (p *process) cpu() float64 { return cpuOf(procStat(p.cmd.Process.Pid)) }

// meter measures the CPU seconds of one contestant's process and of Postgres,
// and nothing else that runs on the machine.
type meter struct {
	p         *process
	pg        *postgres
	began     time.Time
	own, base float64
}

func (b *bench) meter(p *process) *meter {
	return &meter{p: p, pg: b.pg, own: p.cpu(), base: b.pg.cpu(), began: time.Now()}
}

// stop returns the wall time and the CPU seconds since the meter was made.
func (m *meter) stop() (wall time.Duration, own, pg float64) {
	return time.Since(m.began), m.p.cpu() - m.own, m.pg.cpu() - m.base
}

// procStat reads the fields of /proc/PID/stat after the command's name; nil
// when there is no such process.
func procStat(pid int) []string {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return nil
	}
	s := string(text)
	return strings.Fields(s[strings.LastIndex(s, ")")+1:])
}

// The fields of procStat, which proc(5) counts from 3.
const (
	statParent = 1
	statUser   = 11 // then system, and both of children waited for
	statWaited = 14
)

const clockTicks = 100 // a second: USER_HZ, the same on every Linux that Go runs on

// cpuOf sums the CPU seconds of a process and of those of its children that
// have ended.
func cpuOf(stat []string) float64 {
	if len(stat) <= statWaited {
		return 0
	}
	ticks := 0.0
	for _, field := range stat[statUser : statWaited+1] {
		n, _ := strconv.ParseFloat(field, 64)
		ticks += n
	}
	return ticks / clockTicks
}
