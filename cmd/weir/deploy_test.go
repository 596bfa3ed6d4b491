package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/weir-run/weir/db/dbtest"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/workers"
)

// What is in deploy/ and docs/ is held here against the binary and the schema.
// deploy/check, a module of its own, checks the rest.

func readAll(t *testing.T, patterns ...string) map[string]string {
	t.Helper()
	files := map[string]string{}
	for _, pattern := range patterns {
		paths, err := filepath.Glob(filepath.FromSlash("../../" + pattern))
		require.NoError(t, err)
		require.NotEmpty(t, paths, pattern)
		for _, path := range paths {
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			files[path] = string(text)
		}
	}
	return files
}

var (
	metricName = regexp.MustCompile(`\b(?:weir|process|go)_[a-z0-9_]*[a-z0-9]\b`)
	// selected finds a metric's name and its label matchers.
	selected   = regexp.MustCompile(`\b((?:weir|process|go)_[a-z0-9_]+)\{([^}]*)\}`)
	labelName  = regexp.MustCompile(`(\w+)\s*(?:=~|!~|!=|=)`)
	sampleLine = regexp.MustCompile(`(?m)^([a-z_:][a-z0-9_:]*)(?:\{(.*)\})? `)
)

// TestDeployMetrics: every metric of the alerts and dashboards is one that the
// binary serves, with the labels that they name.
func TestDeployMetrics(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	all := f.start("serve", "--listen", "127.0.0.1:0")
	r := weir(t, "", "chat", "--url", all.ready.API, "--token", f.token, "hello") // so that all families show
	require.Zero(t, r.code, r.stderr)
	code, text := get(t, all.ready.API+"/metrics")
	require.Equal(t, http.StatusOK, code)
	served := map[string]map[string]bool{} // labels by metric
	for _, sample := range sampleLine.FindAllStringSubmatch(text, -1) {
		if served[sample[1]] == nil {
			served[sample[1]] = map[string]bool{"instance": true, "job": true} // Prometheus adds these
		}
		for _, label := range labelName.FindAllStringSubmatch(sample[2], -1) {
			served[sample[1]][label[1]] = true
		}
	}
	require.Contains(t, served, "weir_http_request_seconds_bucket", text)
	used := map[string]bool{}
	for path, text := range readAll(t, "deploy/prometheus/*.yml", "deploy/grafana/*.json") {
		text = strings.ReplaceAll(text, `\"`, `"`)
		for _, name := range metricName.FindAllString(text, -1) {
			used[name] = true
			if served[name] == nil {
				t.Errorf("%s uses %s, which is not served", path, name)
			}
		}
		for _, m := range selected.FindAllStringSubmatch(text, -1) {
			for _, label := range labelName.FindAllStringSubmatch(m[2], -1) {
				if served[m[1]] != nil && !served[m[1]][label[1]] {
					t.Errorf("%s: %s has no label %s", path, m[1], label[1])
				}
			}
		}
	}
	// The other way round: what is measured and never shown is forgotten.
	for name := range served {
		if strings.HasPrefix(name, "weir_") && !strings.HasSuffix(name, "_sum") && !strings.HasSuffix(name, "_count") {
			require.True(t, used[name], "no alert or dashboard shows %s", name)
		}
	}
}

// fenced are the code blocks of a language in Markdown.
func fenced(text, language string) (blocks []string) {
	for _, m := range regexp.MustCompile("(?ms)^\\s*```"+language+"\n(.*?)^\\s*```").FindAllStringSubmatch(text, -1) {
		blocks = append(blocks, m[1])
	}
	return blocks
}

// TestDocsCommands: what the documents tell people to type exists.
func TestDocsCommands(t *testing.T) {
	t.Parallel()
	files := readAll(t, "docs/runbooks/*.md", "docs/deploying.md", "docs/operating.md", "README.md", "deploy/helm/weir/templates/NOTES.txt")
	methods := readAll(t, "docs/methods.md")["../../docs/methods.md"]
	command := regexp.MustCompile(`(?m)(?:^\s*(?:[A-Z_]+=\S+ )*|-- |exec \S+ )/?(?:bin/)?weir((?: (?:'[^']*'|"[^"]*"|[^\s|#<>;&]+))*)`)
	word := regexp.MustCompile(`'[^']*'|"[^"]*"|\S+`)
	called := regexp.MustCompile(`"method": ?"([a-z.]+)"`)
	inline := regexp.MustCompile("`weir ((?:[a-z]+ ?)+)[^`]*`")
	seen := 0
	check := func(path string, args []string) {
		for i := range args {
			args[i] = strings.Trim(args[i], `'"`)
		}
		cmd, rest, err := newRoot().Find(args)
		if err == nil {
			err = cmd.ParseFlags(rest)
		}
		if err == nil && cmd.HasSubCommands() && cmd.HasParent() {
			err = fmt.Errorf("%s is no whole command", cmd.CommandPath())
		}
		if err == nil {
			err = cmd.ValidateArgs(cmd.Flags().Args())
		}
		if err != nil {
			t.Errorf("%s: weir %s: %v", path, strings.Join(args, " "), err)
		}
		seen++
	}
	for path, text := range files {
		blocks := fenced(text, "sh")
		if strings.HasSuffix(path, "NOTES.txt") {
			text = regexp.MustCompile(`\{\{.*?\}\}`).ReplaceAllString(text, "x")
			blocks = []string{strings.Join(regexp.MustCompile(`(?m)^  .*$`).FindAllString(text, -1), "\n")}
		}
		for _, block := range blocks {
			block = strings.ReplaceAll(block, "\\\n", " ")
			for _, m := range command.FindAllStringSubmatch(block, -1) {
				check(path, word.FindAllString(m[1], -1))
			}
			for _, m := range called.FindAllStringSubmatch(block, -1) {
				require.Contains(t, methods, "\n### "+m[1]+"\n", "%s: there is no method %s", path, m[1])
			}
		}
		for _, m := range inline.FindAllStringSubmatch(text, -1) { // only that the command is there
			cmd, rest, err := newRoot().Find(strings.Fields(m[1]))
			if err != nil || (cmd.HasSubCommands() && len(rest) > 0) {
				t.Errorf("%s: there is no command %q", path, m[0])
			}
		}
	}
	require.Greater(t, seen, 20, "found too few commands")
}

// TestDocsSQL: Postgres understands every statement of the documents.
func TestDocsSQL(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	conn, err := pgx.Connect(limited(t), f.url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	comment := regexp.MustCompile(`(?m)--.*$`)
	seen := 0
	for path, text := range readAll(t, "docs/runbooks/*.md", "docs/deploying.md") {
		for _, block := range fenced(text, "sql") {
			for statement := range strings.SplitSeq(comment.ReplaceAllString(block, ""), ";") {
				if statement = strings.TrimSpace(statement); statement == "" || !strings.HasPrefix(statement, "SELECT") {
					continue
				}
				seen++
				_, err := conn.Exec(limited(t), "EXPLAIN "+statement)
				require.NoError(t, err, "%s: %s", path, statement)
			}
		}
	}
	require.Greater(t, seen, 10, "found too few statements")
}

// TestDeployNumbers: numbers of the code that deploy/ and docs/ repeat.
func TestDeployNumbers(t *testing.T) {
	t.Parallel()
	files := readAll(t, "deploy/prometheus/alerts.yml", "docs/deploying.md", "deploy/helm/weir/values.schema.json")
	require.Contains(t, files["../../deploy/prometheus/alerts.yml"], fmt.Sprintf("weir_pool_in_use >= %d\n", poolConns))
	const sessions = 5 // listener, lock, reaper, admission, sweeper
	for _, row := range []string{
		fmt.Sprintf("| api | %d | %d |", poolConns, hotConns+1),
		fmt.Sprintf("| worker | %d | %d |", poolConns, hotConns+workConns+sessions),
	} {
		require.Contains(t, files["../../docs/deploying.md"], row)
	}

	var schema struct {
		Definitions struct {
			Queues struct{ Items struct{ Enum []string } }
		}
	}
	require.NoError(t, json.Unmarshal([]byte(files["../../deploy/helm/weir/values.schema.json"]), &schema))
	var served []string
	for _, queue := range jobs.Queues {
		if _, err := workers.ParseQueue(queue); err == nil {
			served = append(served, queue)
		}
	}
	require.ElementsMatch(t, served, schema.Definitions.Queues.Items.Enum)
}

// TestPoolerIsAskedNothing: PgBouncer refuses parameters of a connection that it
// does not know, so a pool that may go through it sets none.
func TestPoolerIsAskedNothing(t *testing.T) {
	t.Parallel()
	url := dbtest.URL(t)
	open := func(pooler, direct string) *process {
		p, err := openProcess(limited(t), &config{DatabaseURL: url, DatabaseURLDirect: direct, Pooler: pooler}, slog.New(slog.DiscardHandler), newMasker())
		require.NoError(t, err)
		t.Cleanup(p.close)
		return p
	}
	mode := func(p *process) (mode string) {
		require.NoError(t, p.pool.QueryRow(limited(t), `SELECT current_setting('plan_cache_mode')`).Scan(&mode))
		return mode
	}
	require.Equal(t, "auto", mode(open(poolerTransaction, url+"&application_name=direct")))
	require.Equal(t, "force_custom_plan", mode(open(poolerAuto, "")), "without a pooler")
}
