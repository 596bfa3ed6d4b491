// Command weir is the one binary: the roles of a fleet, and the verbs of its
// clients. This package reads the environment, wires the others and stops; what
// it starts is decided in roles.go and dev.go.
package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
)

func main() {
	os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run carries out one command line and returns its exit code.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	code := exitCode(err)
	if text := errorText(err); text != "" {
		fmt.Fprintln(stderr, "weir: "+newMasker().String(text)) // an error may quote what it was told
	}
	return code
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "weir",
		Short: "Runs AI agents as durable work on Postgres",
		Long: `weir runs AI agents as durable work on Postgres: a request is committed before
it is answered, and any worker can die at any moment while another goes on from
the last committed step.

Begin with "weir dev" in one terminal and "weir chat" in another.

Every flag is also a WEIR_ variable (--database-url is WEIR_DATABASE_URL) and a
key of the file that --config names (databaseUrl). Traces go where the variables of
OpenTelemetry say, as OTEL_EXPORTER_OTLP_ENDPOINT does.

Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 denied, 5 timeout,
6 the run failed, 7 busy.`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return &usageError{fmt.Sprintf("%v; see %s --help", err, cmd.CommandPath())}
	})
	root.AddGroup(
		&cobra.Group{ID: "run", Title: "Run weir:"},
		&cobra.Group{ID: "use", Title: "Use it (over HTTP):"},
		&cobra.Group{ID: "care", Title: "Look after it:"},
	)
	add := func(group string, commands ...*cobra.Command) {
		for _, c := range commands {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("run", newDev(), newServe(), newAPI(), newWorker(), newScheduler())
	add("use", newChat(), newAgents(), newRuns())
	add("care", newQueue(), newTenant(), newWorkers(), newLoad(), newMigrate(), newTokens(), newDoctor(), newDemo(), newVersion())
	root.SetHelpCommandGroupID("care")
	root.SetCompletionCommandGroupID("care")
	strictArgs(root)
	return root
}

// strictArgs makes wrong arguments a usage error: of commands that have
// sub-commands an unknown word, of others what their Args say.
func strictArgs(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return &usageError{fmt.Sprintf("%v; see %s --help", err, cmd.CommandPath())}
			}
			return nil
		}
	}
	for _, c := range cmd.Commands() {
		strictArgs(c)
	}
}

// parent makes a command that only has sub-commands.
func parent(use, short string, commands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use: use, Short: short, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return &usageError{fmt.Sprintf("say which one; see %s --help", cmd.CommandPath())}
		},
	}
	cmd.AddCommand(commands...)
	return cmd
}
