package main

import (
	"io"
	"log/slog"
	"os"

	"golang.org/x/term"

	"github.com/weir-run/weir/jobs/tracing"
	"github.com/weir-run/weir/policy/mask"
)

func logLevel(name string) (slog.Level, error) {
	var level slog.Level
	if name == "" {
		return level, nil
	}
	if err := level.UnmarshalText([]byte(name)); err != nil {
		return 0, usagef("--log-level must be debug, info, warn or error, not %q", name)
	}
	return level, nil
}

// newLog writes to w, with secrets hidden. The level was checked.
func newLog(w io.Writer, c *config, masker *mask.Masker) *slog.Logger {
	level, _ := logLevel(c.Log.Level)
	options := &slog.HandlerOptions{Level: level}
	masked := maskedWriter{w, masker}
	if c.Log.Format == "text" || c.Log.Format != "json" && isTerminal(w) {
		return slog.New(tracing.LogHandler(slog.NewTextHandler(masked, options)))
	}
	return slog.New(tracing.LogHandler(slog.NewJSONHandler(masked, options)))
}

// maskedWriter hides secrets in what a handler writes, a record at a time.
type maskedWriter struct {
	w      io.Writer
	masker *mask.Masker
}

func (m maskedWriter) Write(p []byte) (int, error) {
	if _, err := m.w.Write(m.masker.Bytes(p)); err != nil {
		return 0, err
	}
	return len(p), nil
}

func isTerminal(w any) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
