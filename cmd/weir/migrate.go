package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/weir-run/weir/db"
)

func newMigrate() *cobra.Command {
	return parent("migrate", "Brings the database's schema up to date", newMigrateUp(), newMigrateStatus(), newMigrateValidate())
}

// databaseCommand makes a command that needs a database and nothing else.
func databaseCommand(use, short string, out *output, do func(cmd *cobra.Command, url string) error) *cobra.Command {
	s := newSettings([]setting{settingDB, settingDirect})
	cmd := &cobra.Command{
		Use: use, Short: short, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := s.load(cmd)
			if err != nil {
				return err
			}
			if err := c.needDatabase(); err != nil {
				return err
			}
			// Past a pooler the role's time limits can be lifted for a migration.
			return do(cmd, c.direct())
		},
	}
	s.flags(cmd)
	if out != nil {
		out.flag(cmd)
	}
	return cmd
}

func newMigrateUp() *cobra.Command {
	return databaseCommand("up", "Applies what is missing, under a lock; safe to run anywhere, any number of times", nil, func(cmd *cobra.Command, url string) error {
		before, err := db.MigrationStatus(cmd.Context(), url)
		if err != nil {
			return fmt.Errorf("database: %w", err)
		}
		if err := db.Migrate(cmd.Context(), url); err != nil {
			return err
		}
		applied := 0
		for _, m := range before {
			if m.AppliedAt.IsZero() {
				fmt.Fprintln(cmd.OutOrStdout(), "applied", m)
				applied++
			}
		}
		if applied == 0 {
			fmt.Fprintln(cmd.OutOrStdout(), "nothing to do: the schema is up to date")
		}
		return nil
	})
}

func newMigrateStatus() *cobra.Command {
	type migration struct {
		Source    string `json:"source"`
		Version   int64  `json:"version"`
		Name      string `json:"name"`
		State     string `json:"state"` // applied, pending, unknown
		AppliedAt string `json:"appliedAt,omitempty"`
	}
	var out output
	return databaseCommand("status", "Lists the migrations and which of them are applied", &out, func(cmd *cobra.Command, url string) error {
		schema, err := db.Inspect(cmd.Context(), url)
		if err != nil {
			return fmt.Errorf("database: %w", err)
		}
		var all []migration
		for _, s := range schema.Migrations {
			m := migration{Source: s.Source, Version: s.Version, Name: s.Name, State: "applied"}
			switch {
			case s.AppliedAt.IsZero():
				m.State = "pending"
			default:
				m.AppliedAt = s.AppliedAt.UTC().Format(time.RFC3339)
				if !s.Known {
					m.State = "unknown"
				}
			}
			all = append(all, m)
		}
		err = list(&out, cmd, all, "SOURCE VERSION STATE APPLIED NAME", func(m migration) []any {
			return []any{m.Source, m.Version, m.State, m.AppliedAt, m.Name}
		})
		if err == nil {
			fmt.Fprintln(cmd.ErrOrStderr(), schema.Range()) // beside what is piped
		}
		return err
	})
}

func newMigrateValidate() *cobra.Command {
	return databaseCommand("validate", "Fails unless the schema is exactly this binary's, and says whether they work together", nil, func(cmd *cobra.Command, url string) error {
		schema, err := db.Inspect(cmd.Context(), url)
		if err != nil {
			return fmt.Errorf("database: %w", err)
		}
		if err := schema.Usable(); err != nil {
			return err
		}
		if err := schema.Exact(); err != nil {
			return fmt.Errorf("they work together, and differ: %w", err)
		}
		fmt.Fprintf(cmd.OutOrStdout(), "the schema is this binary's: %s\n", schema.Range())
		return nil
	})
}
