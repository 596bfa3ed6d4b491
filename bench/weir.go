package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs"
	"github.com/weir-run/weir/jobs/bus"
)

// buildWeir builds the product as it is released: in its own module, whose
// dependencies the peers of this one do not change.
func buildWeir(ctx context.Context, path string) error {
	root, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/weir-run/weir").Output()
	if err != nil {
		return fmt.Errorf("find the product's module (run this in bench/): %w", err)
	}
	build := exec.CommandContext(ctx, "go", "build", "-o", path, "./cmd/weir")
	build.Dir = strings.TrimSpace(string(root))
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		return fmt.Errorf("build weir: %w", err)
	}
	return nil
}

const (
	weirTemplate = "template_weir"

	tenant    = "default"
	plain     = "default" // the agent that weir migrate creates
	withTools = "bench"
)

// toolServer stands in the agent's configuration until a section that calls
// its http tool says where the server is.
const toolServer = "http://127.0.0.1:1/"

// agentConfig is of an agent with the two fact tools and one http tool.
func agentConfig(toolURL string) string {
	return `{"name":"` + withTools + `","kind":"model","provider":"offline","model":"offline-1","tools":[
		{"type":"builtin","name":"memory_read"},{"type":"builtin","name":"memory_write"},
		{"type":"http","name":"probe","description":"counts","parameters":{},"url":"` + toolURL + `","method":"POST","idempotency":"idempotent"}]}`
}

// weirDatabase is a migrated one with the agent that has tools.
func (b *bench) weirDatabase(ctx context.Context) (*database, error) {
	if err := b.makeWeirTemplate(ctx); err != nil {
		return nil, err
	}
	return b.pg.clone(ctx, weirTemplate)
}

func (b *bench) makeWeirTemplate(ctx context.Context) error {
	return b.pg.template(ctx, weirTemplate, "", func(url string) error {
		if _, err := b.runWeir(ctx, "migrate", "up", "--database-url", url); err != nil {
			return err
		}
		pool, err := openPool(ctx, url, 1)
		if err != nil {
			return err
		}
		defer pool.Close()
		_, err = pool.Exec(ctx, `WITH a AS (
			INSERT INTO agent (tenant_id, name, id, version) VALUES ($1, $2, gen_random_uuid(), 1))
			INSERT INTO agent_version (tenant_id, name, version, config) VALUES ($1, $2, 1, $3)`, tenant, withTools, agentConfig(toolServer))
		return err
	})
}

// backlog is a database in which n turns with this text are accepted and none
// has begun. They wait for admission, or are admitted already, so that River
// holds their jobs.
func (b *bench) backlog(ctx context.Context, name, agent, text string, n int, admitted bool) (*database, error) {
	if err := b.makeWeirTemplate(ctx); err != nil {
		return nil, err
	}
	name = fmt.Sprintf("template_%s_%t", name, admitted)
	err := b.pg.template(ctx, name, weirTemplate, func(url string) error {
		a, err := newAccepter(ctx, url)
		if err != nil {
			return err
		}
		defer a.close()
		if admitted {
			if err := fastPath(ctx, url, true); err != nil {
				return err
			}
		}
		if _, err = a.acceptMany(ctx, agent, text, n); err != nil {
			return err
		}
		return fastPath(ctx, url, false)
	})
	if err != nil {
		return nil, err
	}
	return b.pg.clone(ctx, name)
}

// fastPath opens or closes the queues, as an admitter does.
func fastPath(ctx context.Context, url string, open bool) error {
	pool, err := openPool(ctx, url, 1)
	if err != nil {
		return err
	}
	defer pool.Close()
	_, err = pool.Exec(ctx, `UPDATE queue SET open = $1, free = 1000000, looked_at = CASE WHEN $1 THEN 'infinity' ELSE '-infinity' END::timestamptz`, open)
	return err
}

// runWeir runs a command of weir to its end and returns what it printed.
func (b *bench) runWeir(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, b.weir, args...)
	var complaint strings.Builder
	cmd.Stderr = &complaint
	output, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("weir %s: %w: %s", args[0], err, complaint.String())
	}
	return string(output), nil
}

// weirToken makes a token for the API's methods.
func (b *bench) weirToken(ctx context.Context, d *database) (string, error) {
	secret, err := b.runWeir(ctx, "tokens", "create", "--database-url", d.url, "--id", "bench", "--scopes", "rpc")
	return strings.TrimSpace(secret), err
}

// weirReady is the line that a role prints when it can serve.
type weirReady struct {
	Event    string    `json:"event"`
	API      string    `json:"api"`
	WorkerID uuid.UUID `json:"worker_id"`
}

func (r weirReady) addr() string {
	u, err := url.Parse(r.API)
	if err != nil {
		return ""
	}
	return u.Host
}

// startWeir starts a role and waits until it is ready.
func (b *bench) startWeir(ctx context.Context, d *database, role string, args ...string) (*process, weirReady, error) {
	args = append([]string{role, "--database-url", d.url, "--json"}, args...)
	env := []string{"WEIR_TOOLS_HTTP_ALLOW_PRIVATE=true"} // the tools of the bench are on this machine
	p, err := b.spawn("weir-"+role, b.weir, env, args...)
	if err != nil {
		return nil, weirReady{}, err
	}
	line, err := p.expect(ctx, "{", time.Minute)
	var ready weirReady
	if err == nil {
		err = json.Unmarshal([]byte("{"+line), &ready)
	}
	if err == nil && ready.Event != "ready" {
		err = fmt.Errorf("weir %s printed %q", role, line)
	}
	if err != nil {
		p.kill()
		return nil, weirReady{}, err
	}
	return p, ready, nil
}

// accepter accepts turns in this process, as weir api does.
type accepter struct {
	runs *jobs.Runs
	stop func()
}

// unmasked stores everything as it is: nothing here is secret.
type unmasked struct{}

func (unmasked) Bytes(b []byte) []byte { return b }

func newAccepter(ctx context.Context, url string) (*accepter, error) {
	named := func(conns int32) func(*pgxpool.Config) {
		return func(c *pgxpool.Config) {
			c.MaxConns = conns
			c.ConnConfig.RuntimeParams["application_name"] = "weir-bench-accepter"
		}
	}
	pool, err := db.Open(ctx, url, named(4))
	if err != nil {
		return nil, err
	}
	hot, err := db.OpenHot(ctx, url, named(4))
	if err != nil {
		pool.Close()
		return nil, err
	}
	b := bus.New(pool, pool.Config().ConnConfig, quiet)
	runs, err := jobs.New(jobs.Config{Pool: pool, Hot: hot, Bus: b, Masker: unmasked{}, Log: quiet})
	if err != nil {
		hot.Close()
		pool.Close()
		return nil, err
	}
	publishing, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() { defer close(done); b.Run(publishing) }()
	return &accepter{runs: runs, stop: func() {
		runs.Close()
		cancel()
		<-done
		hot.Close()
		pool.Close()
	}}, nil
}

func (a *accepter) close() { a.stop() }

// accept commits a turn in a session of its own.
func (a *accepter) accept(ctx context.Context, agent, text string) (uuid.UUID, error) {
	input, err := json.Marshal(map[string]string{"text": text})
	if err != nil {
		return uuid.Nil, err
	}
	name := uuid.NewString()
	accepted, err := a.runs.Accept(ctx, jobs.AcceptParams{
		TenantID: tenant, Fresh: true, Input: input,
		Session: jobs.SessionSpec{ConversationRef: "cv_" + name, ExternalID: name, ChannelType: "rpc", Scope: json.RawMessage(`[]`)},
		Terms: func(context.Context, string) (jobs.Terms, error) {
			return jobs.Terms{Agent: agent, Version: 1, TurnTimeout: 30 * time.Minute, QueueCap: 20}, nil
		},
	})
	if err != nil {
		return uuid.Nil, err
	}
	return accepted.RunID, nil
}

func (a *accepter) acceptMany(ctx context.Context, agent, text string, n int) ([]uuid.UUID, error) {
	runs := make([]uuid.UUID, n)
	err := parallel(512, n, func(i int) (err error) {
		runs[i], err = a.accept(ctx, agent, text)
		return err
	})
	return runs, err
}
