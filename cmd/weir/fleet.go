package main

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/weir-run/weir/client"
	"github.com/weir-run/weir/jobs"
)

func newQueue() *cobra.Command {
	return parent("queue", "Lists, pauses and limits the fleet's queues", newQueueLs(),
		queueCommand("pause", "Starts nothing of a queue until it is resumed", "paused", (*client.Client).PauseQueue),
		queueCommand("resume", "Lets a paused queue go on", "resumed", (*client.Client).ResumeQueue), newQueueLimit())
}

func completeQueues(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return jobs.Queues, cobra.ShellCompDirectiveNoFileComp
}

func newQueueLs() *cobra.Command {
	return remoteCommand(&cobra.Command{Use: "ls", Aliases: []string{"list"}, Short: "Lists the queues", Args: cobra.NoArgs}, nil,
		func(cmd *cobra.Command, r *remote, _ []string) error {
			queues, err := r.Queues(cmd.Context())
			if err != nil {
				return err
			}
			return list(&r.out, cmd, queues, "QUEUE WAITING OLDEST ADMITTED RUNNING SLOTS LIMIT STATE", func(q client.Queue) []any {
				state := "busy"
				switch {
				case q.Paused:
					state = "paused"
				case q.Slots == 0:
					state = "no workers"
				case q.FastPath:
					state = "open"
				}
				oldest := ""
				if q.Waiting > 0 {
					oldest = brief(time.Duration(q.OldestSeconds * float64(time.Second)))
				}
				return []any{q.Queue, outOf(q.Waiting, q.MaxWaiting), oldest, q.Admitted, q.Running, q.Slots, limitText(q.MaxRunning), state}
			})
		})
}

func limitText(n *int) string {
	if n == nil {
		return ""
	}
	return strconv.Itoa(*n)
}

func outOf(n int64, most *int) string {
	if most == nil {
		return strconv.FormatInt(n, 10)
	}
	return fmt.Sprintf("%d/%d", n, *most)
}

func queueCommand(verb, short, done string, call func(*client.Client, context.Context, string) (*client.QueueChanged, error)) *cobra.Command {
	return remoteCommand(&cobra.Command{Use: verb + " QUEUE", Short: short, Args: cobra.ExactArgs(1), ValidArgsFunction: completeQueues}, nil,
		func(cmd *cobra.Command, r *remote, args []string) error {
			c, err := call(r.Client, cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return r.out.one(cmd, c, func() { fmt.Fprintf(cmd.OutOrStdout(), "%s is %s\n", c.Queue, done) })
		})
}

func newQueueLimit() *cobra.Command {
	var running, waiting string
	return remoteCommand(&cobra.Command{
		Use: "limit QUEUE", Short: "Sets how many runs of a queue may run, and wait, in the whole fleet", Args: cobra.ExactArgs(1),
		ValidArgsFunction: completeQueues, Example: "  weir queue limit turns --running 500\n  weir queue limit turns --running none --waiting 10000",
	}, func(cmd *cobra.Command) {
		cmd.Flags().StringVar(&running, "running", "", "runs at once, or none for no limit")
		cmd.Flags().StringVar(&waiting, "waiting", "", "runs that may wait before others are refused, or none")
	}, func(cmd *cobra.Command, r *remote, args []string) error {
		limits := map[string]*int{}
		for _, f := range []struct{ name, member, text string }{{"running", "maxRunning", running}, {"waiting", "maxWaiting", waiting}} {
			if f.text == "" {
				continue
			}
			n, err := readLimit(f.name, f.text)
			if err != nil {
				return err
			}
			limits[f.member] = n
		}
		if len(limits) == 0 {
			return usagef("say --running or --waiting")
		}
		c, err := r.LimitQueue(cmd.Context(), args[0], limits)
		if err != nil {
			return err
		}
		return r.out.one(cmd, c, func() { fmt.Fprintf(cmd.OutOrStdout(), "%s is limited\n", c.Queue) })
	})
}

// readLimit reads a number, or none.
func readLimit(flag, text string) (*int, error) {
	if text == "none" {
		return nil, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 {
		return nil, usagef("--%s must be a number or none, not %q", flag, text)
	}
	return &n, nil
}

func newTenant() *cobra.Command {
	return parent("tenant", "Lists tenants and sets their shares of the fleet", newTenantLs(), newTenantSet())
}

func newTenantLs() *cobra.Command {
	return remoteCommand(&cobra.Command{Use: "ls", Aliases: []string{"list"}, Short: "Lists the tenants", Args: cobra.NoArgs}, nil,
		func(cmd *cobra.Command, r *remote, _ []string) error {
			var all []client.Tenant
			for after := ""; ; {
				page, err := r.Tenants(cmd.Context(), after)
				if err != nil {
					return err
				}
				if len(page) == 0 {
					break
				}
				all = append(all, page...)
				after = page[len(page)-1].TenantID
			}
			return list(&r.out, cmd, all, "TENANT WEIGHT LIMIT CREATED", func(t client.Tenant) []any {
				return []any{t.TenantID, t.Weight, limitText(t.MaxRunning), ago(t.CreatedAt)}
			})
		})
}

func newTenantSet() *cobra.Command {
	var weight float64
	var running string
	return remoteCommand(&cobra.Command{
		Use: "set TENANT", Short: "Sets a tenant's weight and limit", Args: cobra.ExactArgs(1), Example: "  weir tenant set acme --weight 2 --running 100",
	}, func(cmd *cobra.Command) {
		cmd.Flags().Float64Var(&weight, "weight", 0, "share of the slots while others want them too, relative to theirs")
		cmd.Flags().StringVar(&running, "running", "", "runs at once, or none for no limit")
	}, func(cmd *cobra.Command, r *remote, args []string) error {
		members := map[string]any{}
		if cmd.Flags().Changed("weight") {
			if math.IsNaN(weight) || math.IsInf(weight, 0) {
				return usagef("--weight must be a number")
			}
			members["weight"] = weight
		}
		if running != "" {
			n, err := readLimit("running", running)
			if err != nil {
				return err
			}
			members["maxRunning"] = n
		}
		if len(members) == 0 {
			return usagef("say --weight or --running")
		}
		t, err := r.SetTenant(cmd.Context(), args[0], members)
		if err != nil {
			return err
		}
		return r.out.one(cmd, t, func() {
			fmt.Fprintf(cmd.OutOrStdout(), "%s: weight %g, limit %s\n", t.TenantID, t.Weight, orNone(limitText(t.MaxRunning)))
		})
	})
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

func newWorkers() *cobra.Command {
	return parent("workers", "Lists worker processes, quiets and drains them", newWorkersLs(),
		workerCommand("quiet", "Has a worker take no further runs", (*client.Client).QuietWorker),
		workerCommand("drain", "Has a worker hand its runs over and leave", (*client.Client).DrainWorker))
}

func newWorkersLs() *cobra.Command {
	return remoteCommand(&cobra.Command{Use: "ls", Aliases: []string{"list"}, Short: "Lists the worker processes", Args: cobra.NoArgs}, nil,
		func(cmd *cobra.Command, r *remote, _ []string) error {
			workers, err := r.Workers(cmd.Context())
			if err != nil {
				return err
			}
			return list(&r.out, cmd, workers, "WORKER HOST PID STATE RUNNING SLOTS VERSION HEARTBEAT STARTED", func(w client.Worker) []any {
				state := w.State
				if w.Wanted != "" && w.State == "live" {
					state = w.Wanted
				}
				return []any{w.WorkerID, w.Hostname, w.PID, state, w.Running, w.Slots, w.Version, ago(w.HeartbeatAt), ago(w.StartedAt)}
			})
		})
}

func workerCommand(verb, short string, call func(*client.Client, context.Context, string) (*client.WorkerAsked, error)) *cobra.Command {
	return remoteCommand(&cobra.Command{Use: verb + " WORKER", Short: short, Args: cobra.ExactArgs(1)}, nil,
		func(cmd *cobra.Command, r *remote, args []string) error {
			w, err := call(r.Client, cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return r.out.one(cmd, w, func() { fmt.Fprintf(cmd.OutOrStdout(), "%s is asked to %s\n", w.WorkerID, w.Wanted) })
		})
}
