package main

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"os"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/weir-run/weir/client"
)

// patience is how long a verb waits for an API that restarts.
const patience = time.Minute

// remote is a client verb's way to the API.
type remote struct {
	out output
	*client.Client
}

// remoteCommand makes a command that speaks to the API. flags adds the
// command's own; do runs with the client made.
func remoteCommand(cmd *cobra.Command, flags func(*cobra.Command), do func(cmd *cobra.Command, r *remote, args []string) error) *cobra.Command {
	s := newSettings(settingsClient)
	r := &remote{}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := s.load(cmd)
		if err != nil {
			return err
		}
		if r.Client, err = newClient(c, cmd.ErrOrStderr()); err != nil {
			return err
		}
		return do(cmd, r, args)
	}
	s.flags(cmd)
	r.out.flag(cmd)
	if flags != nil {
		flags(cmd)
	}
	return cmd
}

func newClient(c *config, stderr io.Writer) (*client.Client, error) {
	u, err := url.Parse(c.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, usagef("--url must be like %s, not %q", client.DefaultURL, c.URL)
	}
	var once sync.Once
	return client.New(client.Config{URL: c.URL, Token: c.Token, Patience: patience, OnRetry: func(err error) {
		once.Do(func() { fmt.Fprintf(stderr, "weir: %v; trying again …\n", err) })
	}}), nil
}

// completeAgents offers the names of agents to the shell; without an API it
// offers nothing.
func completeAgents(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return complete(cmd, (*client.Client).AgentNames)
}

// completeRuns offers the latest runs.
func completeRuns(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return complete(cmd, func(c *client.Client, ctx context.Context) ([]string, error) {
		page, err := c.Runs(ctx, client.RunListParams{Limit: 50})
		if err != nil {
			return nil, err
		}
		var ids []string
		for _, r := range page.Runs {
			ids = append(ids, r.RunID+"\t"+r.State+" "+r.AgentID)
		}
		return ids, nil
	})
}

func complete(cmd *cobra.Command, names func(*client.Client, context.Context) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), completeWithin)
	defer cancel()
	value := func(flag, variable string) string {
		if f := cmd.Flag(flag); f != nil && f.Changed {
			return f.Value.String()
		}
		return os.Getenv(variable)
	}
	c := client.New(client.Config{URL: value("url", "WEIR_URL"), Token: value("token", "WEIR_TOKEN"), Patience: -1})
	list, err := names(c, ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return list, cobra.ShellCompDirectiveNoFileComp
}
