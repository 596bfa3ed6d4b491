package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/jobs/tracing"
	"github.com/weir-run/weir/policy/mask"
)

// TestLogIsMasked logs credentials in every way there is (RC-150).
func TestLogIsMasked(t *testing.T) {
	t.Parallel()
	const (
		password   = "hunter2-correct-horse"
		configured = "a configured \"secret\" with\tquotes"
	)
	key := "sk-ant-" + "api03-q7Zp2LmX9vTfR4kWn8YbHc3JdSg6AeUo1QiVx5MzNtPwKrEy0B"
	lines := map[string]func(*slog.Logger){
		"an error":             func(l *slog.Logger) { l.Warn("turn", "error", errors.New("401 for "+key)) },
		"a wrapped error":      func(l *slog.Logger) { l.Error("turn", "error", fmt.Errorf("call: %w", errors.New("401 for "+key))) },
		"an error that quotes": func(l *slog.Logger) { l.Warn("turn", "error", errors.New(`body {"password":"`+password+`"}`)) },
		"a header": func(l *slog.Logger) {
			l.Warn("turn", "error", errors.New("Authorization: Bearer "+password+"-0123456789"))
		},
		"a URL":                 func(l *slog.Logger) { l.Warn("turn", "error", errors.New("postgres://u:"+password+"@h/db refused")) },
		"an attribute":          func(l *slog.Logger) { l.Warn("turn", "text", key) },
		"an attribute's name":   func(l *slog.Logger) { l.Warn("turn", "api_key", password) },
		"a logger's attribute":  func(l *slog.Logger) { l.With("text", key).Warn("turn") },
		"a group":               func(l *slog.Logger) { l.WithGroup("g").Warn("turn", slog.Group("h", "text", key)) },
		"a value":               func(l *slog.Logger) { l.Warn("turn", "v", map[string]any{"deep": []string{key}}) },
		"a panic's value":       func(l *slog.Logger) { l.Warn("turn", "panic", any(struct{ Key string }{key})) },
		"the message":           func(l *slog.Logger) { l.Warn("key " + key) },
		"a configured secret":   func(l *slog.Logger) { l.Warn("turn", "error", errors.New("got "+configured)) },
		"the HTTP server's log": func(l *slog.Logger) { slog.NewLogLogger(l.Handler(), slog.LevelWarn).Print("http: " + key) },
		"a PEM block": func(l *slog.Logger) {
			l.Warn("turn", "error", errors.New("-----BEGIN PRIVATE KEY-----\n"+password+"\n-----END PRIVATE KEY-----"))
		},
	}
	for _, format := range []string{"json", "text"} {
		var out bytes.Buffer
		c := &config{}
		c.Log.Format = format
		log := newLog(&out, c, mask.New(configured))
		for name, write := range lines {
			out.Reset()
			write(log)
			line := out.String()
			for _, secret := range []string{key, password, "configured", key[20:]} {
				require.NotContains(t, line, secret, "%s in %s", name, format)
			}
			require.Contains(t, line, "***", "%s in %s", name, format)
			require.Equal(t, 1, strings.Count(line, "\n"), "%s in %s", name, format)
			if format == "json" {
				require.True(t, json.Valid([]byte(line)), line)
			}
		}

		out.Reset()
		const placeholders = `set ${API_KEY}, password=${PASSWORD} and Authorization: Bearer ${TOKEN}`
		log.Warn("turn", "error", errors.New(placeholders))
		require.Contains(t, out.String(), placeholders)

		out.Reset()
		ctx := tracing.WithParent(t.Context(), "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
		log.WarnContext(ctx, "turn")
		require.Contains(t, out.String(), "4bf92f3577b34da6a3ce929d0e0e4736")
		require.Contains(t, out.String(), "00f067aa0ba902b7")
		require.NotContains(t, out.String(), "***")
	}
}
