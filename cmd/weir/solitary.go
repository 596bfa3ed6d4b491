package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/weir-run/weir/workers"
)

// killWithin is how long a child has beyond its drain time to end by itself.
const killWithin = 5 * time.Second

// startSolitary has one suspect carried by a child process and returns when
// that has ended. The child is asked to hand the run over when soft ends, and
// killed when ctx or hard does; it dies with this process in any case.
func startSolitary(ctx, soft, hard context.Context, c *config, run uuid.UUID) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(exe, "worker", "--solitary", run.String())
	cmd.Env = append(os.Environ(), c.childEnv()...)
	cmd.Stderr = os.Stderr
	// The child sees the end of this pipe when we die, where no kernel tells it.
	leash, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	defer leash.Close()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a Ctrl-C is ours to pass on
	child, err := startChild(cmd)
	if err != nil {
		return fmt.Errorf("start a process for suspect %s: %w", run, err)
	}
	var overdue <-chan time.Time
	asked := soft.Done()
	for {
		select {
		case <-child.done:
			return child.err
		case <-asked:
			asked = nil
			_ = cmd.Process.Signal(syscall.SIGTERM)
			t := time.NewTimer(c.Drain + killWithin)
			defer t.Stop()
			overdue = t.C
			continue
		case <-overdue:
		case <-hard.Done():
		case <-ctx.Done():
		}
		_ = cmd.Process.Kill()
		<-child.done
		return errors.Join(context.Cause(ctx), child.err)
	}
}

// childEnv hands the configuration to a child, out of sight of others on the
// machine.
func (c *config) childEnv() []string {
	env := map[string]string{
		"databaseUrl": c.DatabaseURL, "databaseUrlDirect": c.DatabaseURLDirect, "pooler": c.Pooler,
		"heartbeat": c.Heartbeat.String(), "lease": c.Lease.String(), "drain": c.Drain.String(),
		"tools.http.allowPrivate": fmt.Sprint(c.Tools.HTTP.AllowPrivate),
		"log.level":               c.Log.Level, "log.format": c.Log.Format,
		"listen": "", "config": c.file,
	}
	var list []string
	for key, value := range env {
		list = append(list, envName(key)+"="+value)
	}
	return list
}

// runSolitary is the child's side.
func runSolitary(cmd *cobra.Command, c *config) error {
	if err := c.needDatabase(); err != nil {
		return err
	}
	soft, hard, stop := withSignals(cmd.Context())
	defer stop()
	go func() {
		_, _ = io.Copy(io.Discard, cmd.InOrStdin())
		os.Exit(exitFailed) // the parent is gone, and with it whoever would look after us
	}()
	masker := newMasker(c.DatabaseURL, c.DatabaseURLDirect)
	log := newLog(cmd.ErrOrStderr(), c, masker)
	p, err := openProcess(soft, c, log, masker)
	if err != nil {
		return stopped(err)
	}
	defer p.close()
	models, err := c.models()
	if err != nil {
		return err
	}
	defer models.Close()
	pool, err := p.workPool(soft)
	if err != nil {
		return err
	}
	defer pool.Close()
	worker := workers.New(workers.Config{
		Pool: pool, Direct: p.direct, Runs: p.runs, Models: models, Log: log, Traces: p.traces.provider(), Version: buildVersion(), Slots: 1,
		Heartbeat: c.Heartbeat, Lease: c.Lease, Drain: c.Drain, Secret: secretOf, AllowPrivate: c.Tools.HTTP.AllowPrivate,
	})
	return worker.RunSolitary(soft, hard, c.solitaryRun)
}
