package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weir-run/weir/client"
	"github.com/weir-run/weir/client/load"
)

const (
	loadUsers    = 10               // of a closed loop that says nothing
	loadDuration = 10 * time.Second // of a load that says nothing
	loadTenant   = "token"          // what the one tenant of --token is called
	maxLoadSteps = 1000             // of contract/surface.md §2
	// loadLine and loadLineFile are how often progress is told, to people and to
	// a file.
	loadLine     = time.Second
	loadLineFile = 5 * time.Second
)

// loadFlags are what weir load is told, as it was written.
type loadFlags struct {
	concurrency, maxInFlight, sessions, steps int
	rate                                      float64
	ramp, rampOf, arrivals                    string
	tool                                      string
	acceptOnly, split                         bool
	tenants, messages                         []string
	maxErrors                                 int64
	config                                    load.Config
}

func newLoad() *cobra.Command {
	var l loadFlags
	cmd := &cobra.Command{
		Use: "load", Short: "Puts load on an API and measures it", Args: cobra.NoArgs,
		Long: `Sends turns to an agent and measures how long they take and what becomes of them.

A closed loop (--concurrency, the default) has users who wait for each answer
before they send again. An open loop (--rate) sends turns when they are due,
whatever became of those before; its latencies count from then. docs/load.md
says which to use, and what the JSON of -o json means.

Exits 1 when more turns than --max-errors failed. Turns that the API rejected for
now (429, 503, retryable) are counted apart. An interrupt ends the load early; a
second one does not wait for the turns under way.`,
		Example: `  weir load
  weir load --concurrency 50 --turns 10000 --message '!sleep 50ms'
  weir load --rate 500 --duration 1m --warmup 10s --accept-only
  weir load --ramp 0:100,30s:500,1m:500
  weir load --rate 200 --tenant acme=wt_…:9 --tenant other=wt_…:1 -o json`,
	}
	return remoteCommand(cmd, l.define, func(cmd *cobra.Command, r *remote, _ []string) error {
		if err := l.resolve(cmd, r); err != nil {
			return err
		}
		return l.run(cmd, r)
	})
}

func (l *loadFlags) define(cmd *cobra.Command) {
	f := cmd.Flags()
	f.IntVarP(&l.concurrency, "concurrency", "c", loadUsers, "users of a closed loop")
	f.Float64VarP(&l.rate, "rate", "r", 0, "turns per second of an open loop")
	f.StringVar(&l.arrivals, "arrivals", string(load.Poisson), "how those of --rate are spaced: poisson or even")
	f.IntVar(&l.maxInFlight, "max-in-flight", load.DefaultMaxInFlight, "turns under way at once in an open loop; others are not sent")
	f.StringVar(&l.ramp, "ramp", "", "levels over time, such as 0:100,30s:500; straight in between")
	f.StringVar(&l.rampOf, "ramp-of", "rate", "what --ramp changes: rate or concurrency")
	f.DurationVarP(&l.config.Duration, "duration", "d", 0, "how long to send turns (default: to the end of --ramp, or 10s)")
	f.Int64VarP(&l.config.Turns, "turns", "n", 0, "how many turns to send (default: as many as --duration has)")
	f.DurationVar(&l.config.Warmup, "warmup", 0, "how long to send turns before any is measured")
	f.DurationVar(&l.config.Timeout, "timeout", load.DefaultTimeout, "how long to wait for a turn")
	f.BoolVar(&l.acceptOnly, "accept-only", false, "send agent.request, and do not wait for the turn's end")
	f.BoolVar(&l.split, "split", false, "send agent.request, then wait with run.get: measures accepting, queueing and running")
	f.StringVarP(&l.config.Agent, "agent", "a", "", "agent to talk to (default: default)")
	f.StringVar(&l.config.User, "user", "", "user to speak for")
	f.StringArrayVarP(&l.messages, "message", "m", []string{"hello"}, "message; several are sent in turn")
	f.IntVar(&l.sessions, "sessions", 0, "sessions of each tenant, which take turns; 0: a new one for each turn")
	f.IntVar(&l.steps, "steps", 0, "model calls of a turn of an offline agent; all but the last call --tool")
	f.StringVar(&l.tool, "tool", "noop", "tool that --steps calls; one that the agent lacks costs a step all the same")
	f.StringArrayVar(&l.tenants, "tenant", nil, "NAME=TOKEN[:WEIGHT], in place of --token; WEIGHT is its share of the turns")
	f.Int64Var(&l.maxErrors, "max-errors", 0, "how many turns may fail")
	fixed := func(flag string, values ...string) {
		_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
	fixed("arrivals", string(load.Poisson), string(load.Even))
	fixed("ramp-of", "rate", "concurrency")
	_ = cmd.RegisterFlagCompletionFunc("agent", completeAgents)
}

// resolve makes the config of the flags. Its errors are usage errors.
func (l *loadFlags) resolve(cmd *cobra.Command, r *remote) error {
	for _, group := range [][]string{{"concurrency", "rate", "ramp"}, {"accept-only", "split"}, {"token", "tenant"}} {
		if err := oneOf(cmd, group); err != nil {
			return err
		}
	}
	c := &l.config
	c.URL, c.Spacing, c.MaxInFlight, c.Sessions, c.Mode = r.URL(), load.Spacing(l.arrivals), l.maxInFlight, l.sessions, load.Execute
	switch {
	case l.acceptOnly:
		c.Mode = load.Accept
	case l.split:
		c.Mode = load.Split
	}
	if err := l.level(cmd.Flags().Changed("rate")); err != nil {
		return err
	}
	if c.Duration == 0 && c.Turns == 0 {
		if c.Duration = loadDuration; l.ramp != "" {
			c.Duration = max(c.Rate.Last(), c.Users.Last())
		}
		if c.Duration == 0 {
			return usagef("--ramp ends when it begins: give it a second point, or --duration")
		}
	}
	if l.maxInFlight < 1 {
		return usagef("--max-in-flight must be at least 1")
	}
	if c.Timeout < time.Millisecond {
		return usagef("--timeout must be at least 1ms")
	}
	if l.maxErrors < 0 {
		return usagef("--max-errors must not be negative")
	}
	if l.steps < 0 || l.steps > maxLoadSteps {
		return usagef("--steps must be 0 to %d", maxLoadSteps)
	}
	for _, m := range l.messages {
		c.Messages = append(c.Messages, loadScript(l.steps, l.tool)+m)
	}
	c.Tenants = []load.Tenant{{Name: loadTenant, Token: r.Token(), Weight: 1}}
	if len(l.tenants) > 0 {
		c.Tenants = nil
	}
	for _, text := range l.tenants {
		t, err := parseTenant(text)
		if err != nil {
			return err
		}
		c.Tenants = append(c.Tenants, t)
	}
	if err := c.Check(); err != nil {
		return usagef("%v; see %s --help", err, cmd.CommandPath())
	}
	return nil
}

// oneOf refuses more than one of the flags.
func oneOf(cmd *cobra.Command, flags []string) error {
	var given []string
	for _, name := range flags {
		if cmd.Flags().Changed(name) {
			given = append(given, "--"+name)
		}
	}
	if len(given) > 1 {
		return usagef("give only one of %s", strings.Join(given, " and "))
	}
	return nil
}

// level is the rate or the users.
func (l *loadFlags) level(open bool) error {
	c := &l.config
	if l.rampOf != "rate" && l.rampOf != "concurrency" {
		return usagef("--ramp-of must be rate or concurrency, not %q", l.rampOf)
	}
	switch {
	case l.ramp != "":
		ramp, err := load.ParseRamp(l.ramp)
		if err != nil {
			return usagef("--ramp: %v", err)
		}
		if c.Rate = ramp; l.rampOf == "concurrency" {
			c.Rate, c.Users = nil, ramp
		}
	case open:
		c.Rate = load.Constant(l.rate)
	default:
		c.Users = load.Constant(float64(l.concurrency))
	}
	return nil
}

// parseTenant reads NAME=TOKEN[:WEIGHT]. Tokens have no colon.
func parseTenant(text string) (load.Tenant, error) {
	name, token, ok := strings.Cut(text, "=")
	token, weight, weighted := strings.Cut(token, ":")
	t := load.Tenant{Name: name, Token: token, Weight: 1}
	if !ok || name == "" || token == "" { // the token is not repeated: it is a secret
		return t, usagef("--tenant must be NAME=TOKEN or NAME=TOKEN:WEIGHT")
	}
	if weighted {
		var err error
		if t.Weight, err = strconv.ParseFloat(weight, 64); err != nil || !(t.Weight > 0) {
			return t, usagef("--tenant %s: %q is no weight above 0", name, weight)
		}
	}
	return t, nil
}

// loadScript are the lines of the offline model that make a turn of so many
// model calls, before the message that the last one answers. No two calls are
// equal: that would be a loop.
func loadScript(steps int, tool string) string {
	var b strings.Builder
	for i := 1; i < steps; i++ {
		fmt.Fprintf(&b, "!tool %s {\"n\":%d}\n", tool, i)
	}
	return b.String()
}

func (l *loadFlags) run(cmd *cobra.Command, r *remote) error {
	soft, hard, release := withSignals(cmd.Context())
	defer release()
	// Whoever cannot be served at all learns it from one error, not from ten
	// thousand.
	for _, t := range l.config.Tenants {
		if err := pingAs(hard, l.config.URL, t.Token); err != nil {
			if len(l.tenants) > 0 {
				return fmt.Errorf("tenant %s: %w", t.Name, err)
			}
			return err
		}
	}
	stderr := cmd.ErrOrStderr()
	l.config.ProgressEvery = loadLineFile
	if isTerminal(stderr) {
		l.config.ProgressEvery = loadLine
	}
	l.config.OnProgress = func(p load.Progress) { printProgress(stderr, p) }
	said := context.AfterFunc(soft, func() {
		fmt.Fprintln(stderr, "weir: no more is sent; waiting for the turns under way. Interrupt again to leave them")
	})
	defer said()
	result, err := load.Run(hard, soft.Done(), l.config)
	if err != nil {
		return err
	}
	said()
	if err := r.out.one(cmd, result, func() { printLoad(cmd.OutOrStdout(), result) }); err != nil {
		return err
	}
	if hard.Err() != nil {
		return context.Cause(hard)
	}
	if n := result.Total.Failed; n > l.maxErrors {
		return &exitError{exitFailed, fmt.Errorf("%d turns failed; --max-errors allows %d", n, l.maxErrors)}
	}
	return nil
}

// pingAs asks whether the API answers and takes a token.
func pingAs(ctx context.Context, url, token string) error {
	_, err := client.New(client.Config{URL: url, Token: token, Patience: -1}).Ping(ctx)
	return err
}
