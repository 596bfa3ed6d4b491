package main

import (
	"fmt"
	"regexp"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/weir-run/weir/db"
)

// The forms of ids, as the tables check them.
var (
	tenantForm = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,62}$`)
	tokenForm  = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)
)

var scopeNames = []string{"rpc", "admin", "read", "*"}

func newTokens() *cobra.Command {
	return parent("tokens", "Makes the first token, without an API", newTokensCreate())
}

func newTokensCreate() *cobra.Command {
	s := newSettings([]setting{settingDB})
	var t newToken
	var out output
	cmd := &cobra.Command{
		Use: "create --id ID --scopes rpc,admin", Short: "Makes a token and prints its secret, once", Args: cobra.NoArgs,
		Long: `Makes a token straight in the database, for the time before any token exists.
A tenant that is new is made with it, and its agent default. Only a hash of the
secret is stored: what is printed cannot be shown again.`,
		Example: "  weir tokens create --database-url postgres://… --id ops --scopes rpc,admin",
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := s.load(cmd)
			if err != nil {
				return err
			}
			if err := c.needDatabase(); err != nil {
				return err
			}
			if !tokenForm.MatchString(t.ID) {
				return usagef("--id must be 1 to 128 of A-Z a-z 0-9 . _ - and begin with a letter or digit, not %q", t.ID)
			}
			if !tenantForm.MatchString(t.Tenant) {
				return usagef("--tenant must be 1 to 63 of a-z 0-9 _ - and begin with a letter or digit, not %q", t.Tenant)
			}
			if len(t.Scopes) == 0 {
				return usagef("--scopes must name at least one of rpc, admin, read, *")
			}
			for _, scope := range t.Scopes {
				if !slices.Contains(scopeNames, scope) {
					return usagef("--scopes: there is no scope %q; there are rpc, admin, read, *", scope)
				}
			}
			slices.Sort(t.Scopes)
			t.Scopes = slices.Compact(t.Scopes)
			t.Secret = db.NewTokenSecret()
			config, err := pgx.ParseConfig(c.DatabaseURL)
			if err != nil {
				return fmt.Errorf("database: %w", err)
			}
			config.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe // it may be a pooler
			conn, err := pgx.ConnectConfig(cmd.Context(), config)
			if err != nil {
				return fmt.Errorf("database: %w", err)
			}
			defer conn.Close(cmd.Context())
			if err := storeToken(cmd.Context(), conn, t); err != nil {
				return err
			}
			v := struct {
				ID     string   `json:"id"`
				Tenant string   `json:"tenant"`
				Scopes []string `json:"scopes"`
				Secret string   `json:"secret"`
			}{t.ID, t.Tenant, t.Scopes, t.Secret}
			return out.one(cmd, v, func() { // alone on stdout, to be piped
				fmt.Fprintf(cmd.ErrOrStderr(), "token %s of tenant %s, scopes %v; the secret is shown this once:\n", t.ID, t.Tenant, t.Scopes)
				fmt.Fprintln(cmd.OutOrStdout(), t.Secret)
			})
		},
	}
	s.flags(cmd)
	out.flag(cmd)
	cmd.Flags().StringVar(&t.ID, "id", "", "name of the token")
	cmd.Flags().StringSliceVar(&t.Scopes, "scopes", nil, "what it may do: rpc, admin, read, *")
	cmd.Flags().StringVar(&t.Tenant, "tenant", defaultTenant, "whose token it is")
	_ = cmd.MarkFlagRequired("id")
	_ = cmd.MarkFlagRequired("scopes")
	_ = cmd.RegisterFlagCompletionFunc("scopes", cobra.FixedCompletions(scopeNames, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}
