package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/weir-run/weir/api"
	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/db/cluster"
	"github.com/weir-run/weir/policy/mask"
)

const (
	devDatabase = "weir"
	devTokenID  = "dev"
	// firstReadyWithin is how long a second dev waits to hear where the first
	// one, which may have begun a moment ago, is.
	firstReadyWithin = 5 * time.Second
	clusterStop      = 15 * time.Second
)

// devProviders are the providers that a first start takes when their key is in
// the environment, and a model of each that is good and cheap.
var devProviders = []struct{ variable, provider, model string }{
	{"ANTHROPIC_API_KEY", "anthropic", "claude-haiku-4-5"},
	{"OPENAI_API_KEY", "openai", "gpt-5-mini"},
}

func newDev() *cobra.Command {
	s := newSettings([]setting{settingListen, settingDataDir, settingEphemeral, settingOffline}, settingsCommon, settingsWork).
		with("tools.http.allowPrivate", true)
	cmd := &cobra.Command{
		Use: "dev", Short: "Runs everything, with a Postgres of its own: begin here", Args: cobra.NoArgs,
		Long: `Runs API, worker and scheduler in one process, with a private Postgres unless
--database-url names one. Data is kept in --data-dir. Requests from this machine
need no token.`,
		Example: "  weir dev\n  weir dev --ephemeral --listen 127.0.0.1:0 --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := s.load(cmd)
			if err != nil {
				return err
			}
			return runDev(cmd, c)
		},
	}
	s.flags(cmd)
	return cmd
}

// dev is a running `weir dev`.
type dev struct {
	config *config
	began  time.Time
	log    *slog.Logger
	masker *mask.Masker

	home     *devHome // nil when nothing is kept
	postgres *cluster.Cluster
	shownURL string // of the database
	first    bool   // the database was empty
	secret   string // of the dev token
	tokenID  string
	took     string // provider that the first start took, with its key's variable
}

func runDev(cmd *cobra.Command, c *config) (err error) {
	soft, hard, stop := withSignals(cmd.Context())
	defer stop()
	d := &dev{config: c, began: time.Now(), masker: newMasker(c.DatabaseURL, c.DatabaseURLDirect), tokenID: devTokenID}
	if c.Log.Level == "info" && !c.JSON && !cmd.Flags().Changed("log-level") && os.Getenv("WEIR_LOG_LEVEL") == "" {
		c.Log.Level = "warn" // people read the block, not the log
	}
	d.log = newLog(cmd.ErrOrStderr(), c, d.masker)
	if !c.JSON {
		defer context.AfterFunc(soft, func() {
			if errors.Is(context.Cause(soft), errStopping) {
				fmt.Fprintln(cmd.ErrOrStderr(), "\nstopping; once more stops at once")
			}
		})()
	}
	if !c.Ephemeral {
		if d.home, err = openDevHome(soft, c.DataDir); err != nil {
			return stopped(err)
		}
		defer d.home.close()
	}
	if c.DatabaseURL == "" {
		if err := d.startPostgres(soft); err != nil {
			return stopped(err)
		}
		defer d.stopPostgres(hard)
	} else {
		d.shownURL = c.DatabaseURL
	}
	if err := d.prepare(soft); err != nil {
		return stopped(err)
	}
	p, err := openProcess(soft, c, d.log, d.masker)
	if err != nil {
		return stopped(err)
	}
	defer p.close()
	if err := d.bootstrap(soft, p); err != nil {
		return stopped(err)
	}
	running, fail := context.WithCancelCause(soft)
	defer fail(nil)
	if d.postgres != nil {
		go func() { // without its database nothing goes on
			select {
			case <-d.postgres.Done():
				fail(errPostgresEnded)
			case <-running.Done():
			}
		}()
	}
	err = p.run(running, hard, duties{api: true, worker: true, reaper: true, scheduler: true}, d.edge(), func(r readiness) error {
		r.Role, r.DatabaseURL, r.Token = "dev", d.shownURL, d.secret
		if d.home != nil {
			if err := d.home.write(devState{PID: os.Getpid(), API: r.API, DatabaseURL: d.shownURL}); err != nil {
				return err
			}
		}
		if c.JSON {
			return r.print(cmd.OutOrStdout())
		}
		return d.greet(soft, cmd.OutOrStdout(), p, r)
	})
	if cause := context.Cause(running); err == nil && errors.Is(cause, errPostgresEnded) {
		return cause // Stop, which is deferred, says in the log what happened
	}
	return err
}

var errPostgresEnded = errors.New("the private Postgres ended")

// startPostgres starts the private Postgres and points the configuration at it.
func (d *dev) startPostgres(ctx context.Context) error {
	config := cluster.Config{Ephemeral: d.config.Ephemeral, FastUnsafe: d.config.Ephemeral, NoFetch: d.config.Offline}
	if d.home != nil {
		config.DataDir = filepath.Join(d.home.dir, "postgres")
	}
	if d.log.Enabled(ctx, slog.LevelDebug) {
		config.Log = os.Stderr
	}
	pg, err := cluster.Start(ctx, config)
	if used, ok := errors.AsType[*cluster.InUseError](err); ok {
		return &exitError{exitBusy, used}
	}
	if err != nil {
		return err
	}
	d.postgres = pg
	if err := pg.EnsureDatabase(ctx, devDatabase); err != nil {
		return err
	}
	d.config.DatabaseURL, d.config.DatabaseURLDirect = pg.URL(devDatabase), ""
	d.shownURL = pg.TCPURL(devDatabase)
	return nil
}

func (d *dev) stopPostgres(hard context.Context) {
	ctx, cancel := context.WithTimeout(hard, clusterStop)
	defer cancel()
	if err := d.postgres.Stop(ctx); err != nil {
		d.log.Error("postgres", "error", err)
	}
}

// prepare brings the schema up to date and notes whether there was none.
func (d *dev) prepare(ctx context.Context) error {
	before, err := db.MigrationStatus(ctx, d.config.direct())
	if err != nil {
		return fmt.Errorf("database: %w", err)
	}
	d.first = true
	pending := 0
	for _, m := range before {
		if m.AppliedAt.IsZero() {
			pending++
		} else {
			d.first = false
		}
	}
	if pending == 0 {
		return nil
	}
	return db.Migrate(ctx, d.config.direct())
}

// bootstrap stores the dev token, chooses the first model and makes the agents
// of the config file.
func (d *dev) bootstrap(ctx context.Context, p *process) (err error) {
	if d.secret, err = d.home.token(); err != nil {
		return err
	}
	if d.home != nil && d.postgres == nil {
		// Others may use this database from folders of their own.
		d.tokenID = devTokenID + "-" + shortHash(d.home.dir)
	}
	err = storeToken(ctx, p.pool, newToken{Tenant: defaultTenant, ID: d.tokenID, Secret: d.secret, Scopes: []string{"*"}, Replace: true})
	if err != nil {
		return err
	}
	if d.first && !d.config.Offline {
		for _, known := range devProviders {
			if os.Getenv(known.variable) == "" {
				continue
			}
			if err := takeProvider(ctx, p.pool, known.provider, known.model); err != nil {
				return err
			}
			d.took = known.variable
			d.log.Info("agent default takes a provider from the environment", "variable", known.variable, "provider", known.provider, "model", known.model)
			break
		}
	}
	return seedAgents(ctx, p.pool, d.config.agents, d.log)
}

// edge is the API's part that only dev has: who comes from this machine without
// credentials is the dev token.
func (d *dev) edge() api.Config {
	return api.Config{TrustLoopback: &api.Caller{TenantID: defaultTenant, TokenID: d.tokenID, Scopes: api.ScopeAll}}
}

// greet tells people what runs, where, and what to try.
func (d *dev) greet(ctx context.Context, w io.Writer, p *process, r readiness) error {
	provider, model, err := defaultModel(ctx, p.pool)
	if err != nil {
		return err
	}
	var text strings.Builder
	line := func(name, value, note string) {
		fmt.Fprintf(&text, "  %-9s %s", name, value)
		if note != "" {
			fmt.Fprintf(&text, "   (%s)", note)
		}
		text.WriteByte('\n')
	}
	fmt.Fprintf(&text, "weir dev is ready, after %s\n\n", brief(time.Since(d.began)))
	line("API", r.API, "no token needed from this machine")
	switch {
	case d.postgres == nil:
		line("database", redacted(d.shownURL), "yours")
	case d.config.Ephemeral:
		line("database", d.shownURL, "private Postgres "+d.postgres.Version()+"; nothing is kept")
	default:
		line("database", d.shownURL, "private Postgres "+d.postgres.Version())
	}
	if d.home != nil {
		kept := "kept between runs; remove the folder to begin anew"
		if d.postgres == nil {
			kept = "the dev token"
		}
		line("data", d.home.dir, kept)
		line("token", d.home.tokenFile(), "scope *, for other machines and tools")
	} else {
		line("token", d.secret, "scope *")
	}
	switch {
	case d.took != "":
		line("model", provider+"/"+model, "taken because "+d.took+" is set; --offline at a first start forbids it")
	case provider == "offline":
		line("model", provider+"/"+model, "built in: no key, no network")
	default:
		line("model", provider+"/"+model, "")
	}
	at := ""
	if r.API != "http://127.0.0.1:5003" {
		at = " --url " + r.API
	}
	fmt.Fprintf(&text, "\nTry next, in another terminal:\n  weir chat%s \"hello\"\n  weir runs ls%s\n  weir demo crash\n\nCtrl-C drains and stops.\n", at, at)
	_, err = io.WriteString(w, text.String())
	return err
}

// devHome is the data folder of a dev, held by one process at a time.
type devHome struct {
	dir  string
	lock *os.File
}

// devState is what the lock file says about its holder.
type devState struct {
	PID         int    `json:"pid"`
	API         string `json:"api,omitempty"` // empty until it serves
	DatabaseURL string `json:"database_url,omitempty"`
}

// openDevHome makes and locks the folder. When another dev has it the error is
// an *exitError that names that one's URL.
func openDevHome(ctx context.Context, dir string) (*devHome, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	mode := fs.FileMode(0o700)
	if os.Geteuid() == 0 {
		mode = 0o711 // Postgres runs as another user and passes through
	}
	if err := os.MkdirAll(dir, mode); err != nil {
		return nil, fmt.Errorf("make the data folder: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "dev.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the data folder: %w", err)
	}
	h := &devHome{dir: dir, lock: lock}
	err = syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		defer lock.Close()
		return nil, &exitError{exitBusy, h.inUse(ctx)}
	}
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("lock the data folder: %w", err)
	}
	return h, h.write(devState{PID: os.Getpid()})
}

// inUse says who has the folder, and where that one's API is.
func (h *devHome) inUse(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, firstReadyWithin)
	defer cancel()
	var s devState
	for {
		if text, err := os.ReadFile(h.lock.Name()); err == nil && json.Unmarshal(text, &s) == nil && s.API != "" {
			return fmt.Errorf("another weir dev (process %d) has %s; its API is at %s", s.PID, h.dir, s.API)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("another weir dev (process %d) has %s and is not ready yet", s.PID, h.dir)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (h *devHome) write(s devState) error {
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := h.lock.Truncate(0); err != nil {
		return fmt.Errorf("write %s: %w", h.lock.Name(), err)
	}
	if _, err = h.lock.WriteAt(append(text, '\n'), 0); err != nil {
		return fmt.Errorf("write %s: %w", h.lock.Name(), err)
	}
	return nil
}

func (h *devHome) close() {
	_ = h.lock.Truncate(0)
	_ = h.lock.Close()
}

func (h *devHome) tokenFile() string { return filepath.Join(h.dir, "dev-token") }

// token is the dev token's secret, which restarts keep. Without a home it is a
// new one.
func (h *devHome) token() (string, error) {
	if h == nil {
		return db.NewTokenSecret(), nil
	}
	text, err := os.ReadFile(h.tokenFile())
	if secret := strings.TrimSpace(string(text)); err == nil && secret != "" {
		return secret, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read the dev token: %w", err)
	}
	secret := db.NewTokenSecret()
	// A crash must not leave half a secret behind.
	temporary := h.tokenFile() + ".new"
	if err := os.WriteFile(temporary, []byte(secret+"\n"), 0o600); err != nil {
		return "", fmt.Errorf("keep the dev token: %w", err)
	}
	if err := os.Rename(temporary, h.tokenFile()); err != nil {
		return "", fmt.Errorf("keep the dev token: %w", err)
	}
	return secret, nil
}

// runningDev is the dev that has a folder, if one does.
func runningDev(dir string) (devState, bool) {
	var s devState
	text, err := os.ReadFile(filepath.Join(dir, "dev.lock"))
	if err != nil || json.Unmarshal(text, &s) != nil || s.API == "" || syscall.Kill(s.PID, 0) != nil {
		return devState{}, false
	}
	return s, true
}

func shortHash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:4])
}
