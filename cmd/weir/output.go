package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
)

// output is how a command prints: for people, or JSON whose shape is stable.
type output struct{ format string }

const (
	formatTable  = "table"
	formatJSON   = "json"
	formatNDJSON = "ndjson"
)

func (o *output) flag(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&o.format, "output", "o", formatTable, "table, json or ndjson")
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{formatTable, formatJSON, formatNDJSON}, cobra.ShellCompDirectiveNoFileComp))
	cmd.PreRunE = func(*cobra.Command, []string) error {
		switch o.format {
		case formatTable, formatJSON, formatNDJSON:
			return nil
		}
		return usagef("--output must be table, json or ndjson, not %q", o.format)
	}
}

func (o *output) people() bool { return o.format == formatTable }

// one prints a single thing; for people, table does.
func (o *output) one(cmd *cobra.Command, v any, table func()) error {
	if o.people() {
		table()
		return nil
	}
	return writeJSON(cmd.OutOrStdout(), v, o.format == formatJSON)
}

// list prints many things: one JSON array, a line of JSON each, or a table.
func list[T any](o *output, cmd *cobra.Command, items []T, header string, row func(T) []any) error {
	out := cmd.OutOrStdout()
	switch o.format {
	case formatJSON:
		if items == nil {
			items = []T{}
		}
		return writeJSON(out, items, true)
	case formatNDJSON:
		for _, item := range items {
			if err := writeJSON(out, item, false); err != nil {
				return err
			}
		}
		return nil
	}
	t := newTable(out, strings.Fields(header)...)
	for _, item := range items {
		t.row(row(item)...)
	}
	return t.flush()
}

func writeJSON(w io.Writer, v any, indent bool) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	if indent {
		enc.SetIndent("", "  ")
	}
	return enc.Encode(v)
}

type table struct{ w *tabwriter.Writer }

func newTable(w io.Writer, header ...string) *table {
	t := &table{tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)}
	if len(header) > 0 {
		fmt.Fprintln(t.w, strings.Join(header, "\t"))
	}
	return t
}

func (t *table) row(cells ...any) {
	texts := make([]string, len(cells))
	for i, c := range cells {
		if texts[i] = printable(fmt.Sprint(c)); texts[i] == "" {
			texts[i] = "-"
		}
	}
	fmt.Fprintln(t.w, strings.Join(texts, "\t"))
}

func (t *table) flush() error { return t.w.Flush() }

// printable drops what could move the cursor or the columns: cells come from
// the server, which has them from anyone.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return ' '
		}
		return r
	}, s)
}

// text is what a terminal may be sent of an agent's answer: everything but
// control characters, lines and tabs excepted.
func text(s string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && (r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0) {
			return -1
		}
		return r
	}, s)
}

// ago says how long ago an RFC 3339 time was, or "" when there is none.
func ago(stamp string) string {
	t, err := time.Parse(time.RFC3339Nano, stamp)
	if err != nil {
		return ""
	}
	return brief(time.Since(t)) + " ago"
}

// brief is a duration in at most two units.
func brief(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < time.Second:
		return fmt.Sprintf("%dms", d.Milliseconds())
	case d < 10*time.Second:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	default:
		return fmt.Sprintf("%dd", int(d.Hours())/24)
	}
}
