package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/weir-run/weir/client"
)

const (
	runPage   = 100              // the API's most
	watchWait = 25 * time.Second // of one long poll
)

var (
	runStates = []string{"queued", "running", "waiting", "completed", "failed", "cancelled", "killed", "timed_out", "orphaned", "poisoned"}
	runKinds  = []string{"turn", "spawn", "graph", "graph_node", "cron", "wake_gate", "memory_sweep", "delivery"}
)

func newRuns() *cobra.Command {
	return parent("runs", "Lists, shows, watches and ends runs", newRunsLs(), newRunsGet(), newRunsWatch(), newRunsCancel(), newRunsKill(), newRunsRelease())
}

func newRunsLs() *cobra.Command {
	var p client.RunListParams
	var limit int
	return remoteCommand(&cobra.Command{Use: "ls", Aliases: []string{"list"}, Short: "Lists runs, the newest first", Args: cobra.NoArgs},
		func(cmd *cobra.Command) {
			f := cmd.Flags()
			f.StringVar(&p.State, "state", "", "only runs in this state")
			f.StringVar(&p.Kind, "kind", "", "only runs of this kind")
			f.StringVarP(&p.AgentID, "agent", "a", "", "only runs of this agent")
			f.StringVarP(&p.SessionID, "session", "s", "", "only runs of this session")
			f.StringVar(&p.RootRunID, "root", "", "only runs of this tree")
			f.IntVarP(&limit, "limit", "n", 20, "at most this many")
			_ = cmd.RegisterFlagCompletionFunc("state", cobra.FixedCompletions(runStates, cobra.ShellCompDirectiveNoFileComp))
			_ = cmd.RegisterFlagCompletionFunc("kind", cobra.FixedCompletions(runKinds, cobra.ShellCompDirectiveNoFileComp))
			_ = cmd.RegisterFlagCompletionFunc("agent", completeAgents)
		}, func(cmd *cobra.Command, r *remote, _ []string) error {
			if limit < 1 {
				return usagef("--limit must be at least 1")
			}
			var runs []client.Run
			for len(runs) < limit {
				p.Limit = min(runPage, limit-len(runs))
				page, err := r.Runs(cmd.Context(), p)
				if err != nil {
					return err
				}
				runs = append(runs, page.Runs...)
				if p.Cursor = page.NextCursor; p.Cursor == "" || len(page.Runs) == 0 {
					break
				}
			}
			return list(&r.out, cmd, runs, "RUN KIND STATE AGENT STEPS LOSSES CREATED TOOK WHY", func(run client.Run) []any {
				return []any{run.RunID, run.Kind, run.State, run.AgentID, run.StepsExecuted, run.Losses, ago(run.CreatedAt), took(run), why(run)}
			})
		})
}

// took is how long a run has worked, or did.
func took(r client.Run) string {
	from, err := time.Parse(time.RFC3339Nano, r.StartedAt)
	if err != nil {
		return ""
	}
	to, err := time.Parse(time.RFC3339Nano, r.FinishedAt)
	if err != nil {
		to = time.Now()
	}
	return brief(to.Sub(from))
}

// why is what holds a run up, or what ended it.
func why(r client.Run) string {
	switch {
	case r.State == "completed":
		return ""
	case r.WaitsFor != "":
		return "waits for " + r.WaitsFor
	case r.Error != "":
		return short(r.Error, 60)
	default:
		return r.EndReason
	}
}

func short(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}

func newRunsGet() *cobra.Command {
	return remoteCommand(&cobra.Command{
		Use: "get RUN", Short: "Shows a run and its steps", Args: cobra.ExactArgs(1), ValidArgsFunction: completeRuns,
	}, nil, func(cmd *cobra.Command, r *remote, args []string) error {
		run, err := r.Run(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		return r.out.one(cmd, run, func() { printRun(cmd.OutOrStdout(), run) })
	})
}

func printRun(w io.Writer, r *client.RunDetail) {
	t := newTable(w)
	line := func(name, value string) {
		if value != "" {
			t.row(name, value)
		}
	}
	line("run", r.RunID)
	line("kind", r.Kind)
	line("state", r.State)
	line("agent", r.AgentID)
	line("session", r.SessionID)
	line("conversation", r.ConversationRef)
	if r.RootRunID != r.RunID {
		line("root", r.RootRunID)
		line("parent", r.ParentRunID)
	}
	line("worker", r.WorkerID)
	line("attempts", fmt.Sprint(r.Epoch))
	if r.Losses > 0 {
		line("losses", fmt.Sprintf("%d workers died at this step", r.Losses))
	}
	line("waits for", r.WaitsFor)
	line("end", r.EndReason)
	line("error", r.Error)
	line("created", r.CreatedAt)
	line("started", r.StartedAt)
	line("finished", r.FinishedAt)
	line("took", took(r.Run))
	line("deadline", r.DeadlineAt)
	_ = t.flush()
	if len(r.Steps) == 0 {
		return
	}
	fmt.Fprintln(w)
	t = newTable(w, "STEP", "KIND", "NAME", "STATUS", "ATTEMPT", "TOOK", "ERROR")
	for _, s := range r.Steps {
		t.row(s.Seq, s.Kind, s.Tool, s.Status, s.Attempt, stepTook(s), short(s.Error, 60))
	}
	_ = t.flush()
}

// stepTook is how long a step took. A model call's start is not stored before
// its end, and then nothing is known.
func stepTook(s client.Step) string {
	if s.StartedAt == s.FinishedAt {
		return ""
	}
	return took(client.Run{StartedAt: s.StartedAt, FinishedAt: s.FinishedAt})
}

func newRunsWatch() *cobra.Command {
	var timeout time.Duration
	return remoteCommand(&cobra.Command{
		Use: "watch RUN", Short: "Shows a run as it goes on, until it ends", Args: cobra.ExactArgs(1), ValidArgsFunction: completeRuns,
		Long: `Shows each change of a run until it ends. Exits 0 when it completed, 6 when it
ended otherwise, 5 after --timeout.`,
	}, func(cmd *cobra.Command) {
		cmd.Flags().DurationVar(&timeout, "timeout", 0, "how long to watch (default: until the end)")
	}, func(cmd *cobra.Command, r *remote, args []string) error {
		ctx := cmd.Context()
		if timeout > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeoutCause(ctx, timeout, fmt.Errorf("%w: the run has not ended after %s", errTimeout, timeout))
			defer cancel()
		}
		return watch(ctx, cmd, r, args[0])
	})
}

func watch(ctx context.Context, cmd *cobra.Command, r *remote, id string) error {
	w := watcher{w: cmd.OutOrStdout()}
	run, err := r.Run(ctx, id)
	for {
		if err != nil {
			return err
		}
		switch {
		case r.out.people():
			w.show(run)
		case r.out.format == formatNDJSON || run.Final():
			if err := writeJSON(cmd.OutOrStdout(), run, r.out.format == formatJSON); err != nil {
				return err
			}
		}
		if run.Final() {
			return endOf(run)
		}
		after := run.Version
		for run.Version == after && !run.Final() && err == nil {
			run, err = r.AwaitRun(ctx, id, after, watchWait)
			if err != nil {
				break
			}
		}
	}
}

// endOf is the exit of a command that watched a run to its end.
func endOf(run *client.RunDetail) error {
	if run.State == "completed" {
		return nil
	}
	text := "the run is " + run.State
	if run.EndReason != "" && run.EndReason != run.State {
		text += ": " + run.EndReason
	}
	if run.Error != "" {
		text += ": " + run.Error
	}
	return &exitError{exitRunFailed, errors.New(text)}
}

// watcher prints what changed between two looks at a run.
type watcher struct {
	w        io.Writer
	state    string
	worker   string
	waitsFor string
	steps    map[int]client.Step
}

func (w *watcher) show(r *client.RunDetail) {
	if w.steps == nil {
		w.steps = map[int]client.Step{}
	}
	say := func(format string, args ...any) {
		fmt.Fprintf(w.w, "%s  %s\n", time.Now().Format("15:04:05.000"), printable(fmt.Sprintf(format, args...)))
	}
	for _, s := range r.Steps {
		before, known := w.steps[s.Seq]
		w.steps[s.Seq] = s
		if known && before == s {
			continue
		}
		name := s.Kind
		if s.Tool != "" {
			name += " " + s.Tool
		}
		text := fmt.Sprintf("step %d  %-20s %s", s.Seq, name, s.Status)
		if s.Attempt > 1 {
			text += fmt.Sprintf(", attempt %d", s.Attempt)
		}
		if t := stepTook(s); s.Status == "done" && t != "" {
			text += " after " + t
		}
		if s.Error != "" {
			text += ": " + short(s.Error, 80)
		}
		say("%s", text)
	}
	if r.State != w.state || r.WorkerID != w.worker || r.WaitsFor != w.waitsFor {
		text := r.State
		switch {
		case r.State == "running":
			text += fmt.Sprintf(" on worker %s, attempt %d", r.WorkerID, r.Epoch)
		case r.WaitsFor != "":
			text += " for " + r.WaitsFor
		case r.Final():
			text += fmt.Sprintf(" after %s, %d model calls", took(r.Run), r.StepsExecuted)
		}
		if r.Losses > 0 {
			text += fmt.Sprintf("; %d workers died at this step", r.Losses)
		}
		say("%s", text)
	}
	w.state, w.worker, w.waitsFor = r.State, r.WorkerID, r.WaitsFor
}

func newRunsCancel() *cobra.Command {
	var reason string
	return remoteCommand(&cobra.Command{
		Use: "cancel RUN", Short: "Asks a run to end at its next safe point", Args: cobra.ExactArgs(1), ValidArgsFunction: completeRuns,
	}, func(cmd *cobra.Command) {
		cmd.Flags().StringVar(&reason, "reason", "", "why, for those who read the run later")
	}, func(cmd *cobra.Command, r *remote, args []string) error {
		c, err := r.CancelRun(cmd.Context(), args[0], reason)
		if err != nil {
			return err
		}
		return r.out.one(cmd, c, func() {
			switch c.Status {
			case "already_ended":
				fmt.Fprintf(cmd.OutOrStdout(), "%s had ended already: %s\n", c.RunID, c.State)
			case "cancelled":
				fmt.Fprintf(cmd.OutOrStdout(), "%s is cancelled\n", c.RunID)
			default:
				fmt.Fprintf(cmd.OutOrStdout(), "%s ends at its next safe point\n", c.RunID)
			}
		})
	})
}

func newRunsRelease() *cobra.Command {
	return remoteCommand(&cobra.Command{
		Use: "release RUN", Short: "Starts a new run in place of a poisoned one", Args: cobra.ExactArgs(1), ValidArgsFunction: completeRuns,
	}, nil, func(cmd *cobra.Command, r *remote, args []string) error {
		released, err := r.ReleaseRun(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		return r.out.one(cmd, released, func() { fmt.Fprintf(cmd.OutOrStdout(), "%s goes on as %s\n", released.RetryOf, released.RunID) })
	})
}

func newRunsKill() *cobra.Command {
	return remoteCommand(&cobra.Command{
		Use: "kill ROOT-RUN", Short: "Ends a whole tree of runs at once", Args: cobra.ExactArgs(1), ValidArgsFunction: completeRuns,
	}, nil, func(cmd *cobra.Command, r *remote, args []string) error {
		n, err := r.KillRun(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		v := struct {
			RootRunID string `json:"rootRunId"`
			Killed    int    `json:"killed"`
		}{args[0], n}
		return r.out.one(cmd, v, func() { fmt.Fprintf(cmd.OutOrStdout(), "killed %d runs\n", n) })
	})
}
