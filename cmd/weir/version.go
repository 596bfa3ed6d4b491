package main

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"github.com/weir-run/weir/db"
)

// version is set by the linker in a release: -ldflags "-X main.version=v1.2.3".
var version string

// buildVersion is the release, or else what the Go tool knows of the source.
func buildVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return cmp.Or(version, "dev")
	}
	var revision, modified string
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			revision = s.Value[:min(12, len(s.Value))]
		case "vcs.modified":
			if s.Value == "true" {
				modified = "+changes"
			}
		}
	}
	built := strings.Trim(info.Main.Version, "()")
	if built == "devel" {
		built = ""
	}
	if revision != "" && built == "" {
		built = revision + modified
	}
	return cmp.Or(version, built, "dev")
}

func newVersion() *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use: "version", Short: "Prints which weir this is", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := struct {
				Version string `json:"version"`
				Schema  string `json:"schema"`
				Newest  int64  `json:"schemaVersion"`
				Needs   int64  `json:"schemaNeeded"`
				Go      string `json:"go"`
				OS      string `json:"os"`
				Arch    string `json:"arch"`
			}{buildVersion(), db.SchemaHash(), db.Newest(), db.Needs(), runtime.Version(), runtime.GOOS, runtime.GOARCH}
			return out.one(cmd, v, func() {
				fmt.Fprintf(cmd.OutOrStdout(), "weir %s (schema %d %s, works from schema %d; %s, %s/%s)\n", v.Version, v.Newest, v.Schema, v.Needs, v.Go, v.OS, v.Arch)
			})
		},
	}
	out.flag(cmd)
	return cmd
}
