package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
)

// loadConfig loads what a worker is told by a file, the environment and flags.
func loadConfig(t *testing.T, file string, args ...string) (*config, error) {
	t.Helper()
	s := newSettings([]setting{settingListen}, settingsCommon, settingsWork)
	cmd := &cobra.Command{}
	s.flags(cmd)
	if file != "" {
		name := filepath.Join(t.TempDir(), "weir.yaml")
		require.NoError(t, os.WriteFile(name, []byte(file), 0o600))
		args = append(args, "--config", name)
	}
	require.NoError(t, cmd.ParseFlags(args))
	return s.load(cmd)
}

func TestConfig(t *testing.T) { // not parallel: it sets the environment
	t.Setenv("DATABASE_URL", "")

	t.Run("DefaultsAreTheContracts", func(t *testing.T) {
		c, err := loadConfig(t, "")
		require.NoError(t, err)
		require.Equal(t, "127.0.0.1:5003", c.Listen)
		require.Equal(t, 2*time.Second, c.Heartbeat)
		require.Equal(t, 10*time.Second, c.Lease)
		require.Equal(t, 30*time.Second, c.Drain)
		require.Equal(t, 256, c.Slots)
		require.Nil(t, c.Queues, "all, to a worker")
		require.False(t, c.Tools.HTTP.AllowPrivate)
	})
	t.Run("FlagOverVariableOverFile", func(t *testing.T) {
		t.Setenv("WEIR_SLOTS", "3")
		t.Setenv("WEIR_DRAIN", "3s")
		c, err := loadConfig(t, "slots: 2\ndrain: 2s\nlease: 21s\n", "--slots", "4")
		require.NoError(t, err)
		require.Equal(t, 4, c.Slots)
		require.Equal(t, 3*time.Second, c.Drain)
		require.Equal(t, 21*time.Second, c.Lease)
	})
	t.Run("NestedKeysHaveFlagsAndVariables", func(t *testing.T) {
		t.Setenv("WEIR_TOOLS_HTTP_ALLOW_PRIVATE", "true")
		c, err := loadConfig(t, "")
		require.NoError(t, err)
		require.True(t, c.Tools.HTTP.AllowPrivate)
		c, err = loadConfig(t, "", "--tools-http-allow-private=false")
		require.NoError(t, err)
		require.False(t, c.Tools.HTTP.AllowPrivate)
	})
	t.Run("ListsAreSplit", func(t *testing.T) {
		t.Setenv("WEIR_QUEUES", "turns,spawns")
		c, err := loadConfig(t, "")
		require.NoError(t, err)
		require.Equal(t, []string{"turns", "spawns"}, c.Queues)
	})
	t.Run("DatabaseURLIsTheLastResort", func(t *testing.T) {
		t.Setenv("DATABASE_URL", "postgres://fallback/x")
		c, err := loadConfig(t, "")
		require.NoError(t, err)
		require.Equal(t, "postgres://fallback/x", c.DatabaseURL)
		c, err = loadConfig(t, "", "--database-url", "postgres://named/x")
		require.NoError(t, err)
		require.Equal(t, "postgres://named/x", c.DatabaseURL)
		require.Equal(t, "postgres://named/x", c.direct())
	})
	t.Run("ReadsProvidersAndAgents", func(t *testing.T) {
		c, err := loadConfig(t, `
providers:
  local: {type: openai, baseUrl: "http://127.0.0.1:11434/v1", gapTimeout: 5s, prices: {"llama-3.1": {input: 1, output: 2.5}}}
agents:
  - {name: helper, provider: local, model: llama-3.1, limits: {maxSteps: 3}}
`)
		require.NoError(t, err)
		require.Equal(t, 5*time.Second, c.Providers["local"].GapTimeout)
		require.Equal(t, 2.5, c.Providers["local"].model().Prices["llama-3.1"].Output)
		require.Len(t, c.agents, 1)
		require.Equal(t, 3, c.agents[0].Limits.MaxSteps)
	})
	for name, bad := range map[string]struct {
		file, variable, value string
		args                  []string
		says                  string
	}{
		"UnknownKey":       {file: "slot: 3", says: "there is no setting slot"},
		"UnknownNested":    {file: "tools: {http: {allow: true}}", says: "allow"},
		"UnknownProvider":  {file: "providers: {x: {typ: openai}}", says: "typ"},
		"ProviderType":     {file: "providers: {x: {type: magic, baseUrl: 'http://a'}}", says: "type must be"},
		"UnknownOfAgent":   {file: "agents: [{name: a, colour: red}]", says: "agents[0]: colour"},
		"AgentTwice":       {file: "agents: [{name: a}, {name: a}]", says: "twice"},
		"NoYAML":           {file: "slots: [", says: "config file"},
		"VariableOfOther":  {variable: "WEIR_SLOTS", value: "many", says: `WEIR_SLOTS: "many" is not a number`},
		"Duration":         {variable: "WEIR_LEASE", value: "10", says: "WEIR_LEASE"},
		"Queue":            {args: []string{"--queues", "turns,nope"}, says: `no queue "nope"`},
		"LeaseTooShort":    {args: []string{"--lease", "3s"}, says: "three times --heartbeat"},
		"Listen":           {args: []string{"--listen", "5003"}, says: "host:port"},
		"DatabaseURL":      {args: []string{"--database-url", "postgres://h:port/x"}, says: "--database-url"},
		"Pooler":           {args: []string{"--pooler", "session"}, says: "--pooler must be auto, none or transaction"},
		"LogLevel":         {args: []string{"--log-level", "loud"}, says: "--log-level"},
		"MissingFile":      {args: []string{"--config", "/nonexistent.yaml"}, says: "config file /nonexistent.yaml"},
		"NegativeDuration": {args: []string{"--drain", "-1s"}, says: "--drain"},
	} {
		t.Run("Refuses"+name, func(t *testing.T) {
			if bad.variable != "" {
				t.Setenv(bad.variable, bad.value)
			}
			_, err := loadConfig(t, bad.file, bad.args...)
			require.ErrorContains(t, err, bad.says)
			require.Equal(t, exitUsage, exitCode(err))
		})
	}
}

func TestNames(t *testing.T) {
	t.Parallel()
	for key, want := range map[string][2]string{
		"databaseUrl":             {"database-url", "WEIR_DATABASE_URL"},
		"tools.http.allowPrivate": {"tools-http-allow-private", "WEIR_TOOLS_HTTP_ALLOW_PRIVATE"},
		"slots":                   {"slots", "WEIR_SLOTS"},
	} {
		require.Equal(t, want, [2]string{flagName(key), envName(key)})
	}
}

func TestRedacted(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]string{
		"postgres://u:secret@h/x":              "postgres://u:xxxxx@h/x",
		"postgres://h/x?password=secret&a=b":   "postgres://h/x?a=b&password=xxxxx",
		"host=h password=secret":               "postgres://…",
		"postgres://weir@/weir?host=%2Ftmp%2F": "postgres://weir@/weir?host=%2Ftmp%2F",
	} {
		require.Equal(t, want, redacted(url))
	}
}

func TestSecretOf(t *testing.T) { // not parallel: it sets the environment
	t.Setenv("WEIR_TOKEN", "x")
	t.Setenv("DATABASE_URL", "x")
	t.Setenv("PGPASSWORD", "x")
	t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "x")
	t.Setenv("OPENAI_API_KEY", "sk-x")
	for _, ours := range []string{"WEIR_TOKEN", "DATABASE_URL", "PGPASSWORD", "OTEL_EXPORTER_OTLP_HEADERS", ""} {
		_, ok := secretOf(ours)
		require.False(t, ok, ours)
	}
	value, ok := secretOf("OPENAI_API_KEY")
	require.True(t, ok)
	require.Equal(t, "sk-x", value)
}
