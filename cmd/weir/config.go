package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/go-viper/mapstructure/v2"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/posflag"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/weir-run/weir/client"
	"github.com/weir-run/weir/db"
	"github.com/weir-run/weir/jobs/agentcfg"
	"github.com/weir-run/weir/workers"
	"github.com/weir-run/weir/workers/model"
)

// config is everything a role can be told. Each command reads the part it
// knows (see settings); the others keep their zero values.
type config struct {
	Listen            string        `koanf:"listen"`
	DatabaseURL       string        `koanf:"databaseUrl"`
	DatabaseURLDirect string        `koanf:"databaseUrlDirect"`
	Pooler            string        `koanf:"pooler"`
	DataDir           string        `koanf:"dataDir"`
	Ephemeral         bool          `koanf:"ephemeral"`
	Offline           bool          `koanf:"offline"`
	JSON              bool          `koanf:"json"`
	Slots             int           `koanf:"slots"`
	Queues            []string      `koanf:"queues"`
	Heartbeat         time.Duration `koanf:"heartbeat"`
	Lease             time.Duration `koanf:"lease"`
	Drain             time.Duration `koanf:"drain"`
	Notice            time.Duration `koanf:"notice"`
	NoScheduler       bool          `koanf:"noScheduler"`
	Retention         struct {
		Runs time.Duration `koanf:"runs"`
	} `koanf:"retention"`
	Solitary string `koanf:"solitary"`
	Log      struct {
		Level  string `koanf:"level"`
		Format string `koanf:"format"`
	} `koanf:"log"`
	Tools struct {
		HTTP struct {
			AllowPrivate bool `koanf:"allowPrivate"`
		} `koanf:"http"`
	} `koanf:"tools"`
	URL       string                    `koanf:"url"`
	Token     string                    `koanf:"token"`
	Providers map[string]providerConfig `koanf:"providers"`
	Agents    []map[string]any          `koanf:"agents"`

	file        string   // of --config
	sections    []string // its top-level keys
	solitaryRun uuid.UUID
	agents      []*agentcfg.Config // Agents, checked
	queues      []workers.Queue    // Queues, read
}

// providerConfig is an entry of providers: in the config file.
type providerConfig struct {
	Type             string                 `koanf:"type"`
	BaseURL          string                 `koanf:"baseUrl"`
	NoStream         bool                   `koanf:"noStream"`
	ConnectTimeout   time.Duration          `koanf:"connectTimeout"`
	FirstByteTimeout time.Duration          `koanf:"firstByteTimeout"`
	GapTimeout       time.Duration          `koanf:"gapTimeout"`
	Prices           map[string]priceConfig `koanf:"prices"`
}

// priceConfig is in dollars for a million tokens.
type priceConfig struct {
	Input      float64  `koanf:"input"`
	CacheRead  *float64 `koanf:"cacheRead"`
	CacheWrite *float64 `koanf:"cacheWrite"`
	Output     float64  `koanf:"output"`
}

// setting is one key of the configuration that is also a flag and a variable.
type setting struct {
	key   string
	value any // the default: string, bool, int, time.Duration or []string
	usage string
	// hidden settings are for weir itself.
	hidden bool
}

// The settings, by the words that commands use for them.
var (
	settingListen = setting{key: "listen", value: "127.0.0.1:5003", usage: "address of the API; port 0 takes a free one"}
	settingHealth = setting{key: "listen", value: "", usage: "address of /livez, /readyz and /metrics; off when empty"}
	settingJSON   = setting{key: "json", value: false, usage: "print one line of JSON on stdout when ready"}
	settingDB     = setting{key: "databaseUrl", value: "", usage: "Postgres to use, postgres://…; DATABASE_URL is read too"}
	settingDirect = setting{key: "databaseUrlDirect", value: "",
		usage: "Postgres past the pooler that --database-url names, for locks, LISTEN and commits"}
	settingPooler = setting{key: "pooler", value: poolerAuto,
		usage: "what --database-url goes through: none, transaction (a pooler in that mode), or auto to find out"}
	settingSlots     = setting{key: "slots", value: 256, usage: "runs at once, of each queue"}
	settingQueues    = setting{key: "queues", value: []string(nil), usage: "queues to work, as name or name=slots (default: all)"}
	settingHeartbeat = setting{key: "heartbeat", value: 2 * time.Second, usage: "how often a worker shows that it lives"}
	settingLease     = setting{key: "lease", value: 10 * time.Second, usage: "how long a worker without heartbeat keeps its runs"}
	settingDrain     = setting{key: "drain", value: 30 * time.Second, usage: "how long a stopping process lets calls finish"}
	settingNotice    = setting{key: "notice", value: time.Second,
		usage: "how long a stopping API still takes requests after /readyz says no, so that load balancers notice"}
	settingPrivate   = setting{key: "tools.http.allowPrivate", value: false, usage: "let http tools and web_fetch call private addresses"}
	settingLogLevel  = setting{key: "log.level", value: "info", usage: "debug, info, warn or error"}
	settingLogFormat = setting{key: "log.format", value: "auto", usage: "text, json, or auto: text on a terminal"}
	settingKeepRuns  = setting{key: "retention.runs", value: 30 * 24 * time.Hour, usage: "how long finished runs and their steps are kept; 0 is for ever"}
	settingNoSched   = setting{key: "noScheduler", value: false, usage: "leave time and repairs to other processes; dead workers are still reaped"}
	settingSolitary  = setting{key: "solitary", value: "", usage: "carry this one suspected run, then exit", hidden: true}
	settingDataDir   = setting{key: "dataDir", value: ".weir", usage: "folder that keeps everything"}
	settingEphemeral = setting{key: "ephemeral", value: false, usage: "begin empty and keep nothing"}
	settingURL       = setting{key: "url", value: client.DefaultURL, usage: "where the API is"}
	settingToken     = setting{key: "token", value: "", usage: "bearer token; weir dev needs none from its own machine"}
	settingOffline   = setting{key: "offline", value: false, usage: "use the built-in model whatever keys the environment has"}
)

var (
	settingsCommon = []setting{settingDB, settingDirect, settingPooler, settingJSON, settingDrain, settingLogLevel, settingLogFormat}
	settingsClient = []setting{settingURL, settingToken}
	settingsWork   = []setting{settingSlots, settingQueues, settingHeartbeat, settingLease, settingPrivate, settingKeepRuns}
)

// settings are what one command can be told.
type settings struct {
	list []setting
	file string
}

func newSettings(lists ...[]setting) *settings {
	return &settings{list: slices.Concat(lists...)}
}

// with replaces the default of a setting.
func (s *settings) with(key string, value any) *settings {
	s.list = slices.Clone(s.list)
	for i := range s.list {
		if s.list[i].key == key {
			s.list[i].value = value
		}
	}
	return s
}

// flags gives cmd a flag for each setting, and --config.
func (s *settings) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	for _, o := range s.list {
		name := flagName(o.key)
		switch v := o.value.(type) {
		case string:
			f.String(name, v, o.usage)
		case bool:
			f.Bool(name, v, o.usage)
		case int:
			f.Int(name, v, o.usage)
		case time.Duration:
			f.Duration(name, v, o.usage)
		case []string:
			f.StringSlice(name, v, o.usage)
		default:
			panic(fmt.Sprintf("setting %s: default of type %T", o.key, v))
		}
		if o.hidden {
			_ = f.MarkHidden(name)
		}
	}
	f.StringVar(&s.file, "config", "", "YAML file with these settings, providers: and agents:")
	_ = cmd.MarkFlagFilename("config", "yaml", "yml")
	if f.Lookup("data-dir") != nil {
		_ = cmd.MarkFlagDirname("data-dir")
	}
}

// flagName is a key as a flag: tools.http.allowPrivate is tools-http-allow-private.
func flagName(key string) string {
	var b strings.Builder
	for _, r := range key {
		switch {
		case r == '.':
			b.WriteByte('-')
		case unicode.IsUpper(r):
			b.WriteByte('-')
			b.WriteRune(unicode.ToLower(r))
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}

// envName is a key as a variable: tools.http.allowPrivate is
// WEIR_TOOLS_HTTP_ALLOW_PRIVATE.
func envName(key string) string {
	return "WEIR_" + strings.ToUpper(strings.ReplaceAll(flagName(key), "-", "_"))
}

// load reads the file, the environment and the flags of cmd, each over the one
// before, and checks what comes out. Its errors are usage errors.
func (s *settings) load(cmd *cobra.Command) (*config, error) {
	k := koanf.New(".")
	file := cmp.Or(s.file, os.Getenv("WEIR_CONFIG"))
	var sections []string
	if file != "" {
		if err := k.Load(fileProvider(file), yaml.Parser()); err != nil {
			return nil, usagef("config file %s: %v", file, err)
		}
		if err := knownKeys(k.Raw()); err != nil {
			return nil, usagef("config file %s: %v", file, err)
		}
		sections = slices.Sorted(maps.Keys(k.Raw()))
	}
	env, err := s.environment()
	if err != nil {
		return nil, err
	}
	if err := k.Load(mapProvider(env), nil); err != nil {
		return nil, usagef("environment: %v", err)
	}
	keys := make(map[string]string, len(s.list))
	for _, o := range s.list {
		keys[flagName(o.key)] = o.key
	}
	flags := posflag.ProviderWithFlag(cmd.Flags(), ".", k, func(f *pflag.Flag) (string, any) {
		key, ok := keys[f.Name]
		if !ok {
			return "", nil
		}
		return key, posflag.FlagVal(cmd.Flags(), f)
	})
	if err := k.Load(flags, nil); err != nil {
		return nil, usagef("flags: %v", err)
	}
	c := &config{file: file, sections: sections}
	if err := decode(k.Raw(), c); err != nil {
		return nil, usagef("configuration: %v", err)
	}
	c.DatabaseURL = cmp.Or(c.DatabaseURL, os.Getenv("DATABASE_URL"))
	if len(c.Queues) == 0 {
		c.Queues = nil // all of them
	}
	if err := c.check(); err != nil {
		return nil, err
	}
	return c, nil
}

// environment is what the WEIR_ variables say, nested like the file.
func (s *settings) environment() (map[string]any, error) {
	env := map[string]any{}
	for _, o := range s.list {
		text, ok := os.LookupEnv(envName(o.key))
		if !ok || text == "" {
			continue
		}
		into := env
		path := strings.Split(o.key, ".")
		for _, part := range path[:len(path)-1] {
			if into[part] == nil {
				into[part] = map[string]any{}
			}
			into = into[part].(map[string]any)
		}
		var value any = text
		if _, ok := o.value.([]string); ok {
			value = strings.Split(text, ",")
		}
		if _, ok := o.value.(string); !ok {
			var c config // a value of the wrong type is named by its variable
			if err := decode(nest(path, value), &c); err != nil {
				return nil, usagef("%s: %q is not %s", envName(o.key), text, kindText(o.value))
			}
		}
		into[path[len(path)-1]] = value
	}
	return env, nil
}

// kindText says what a setting with such a default takes.
func kindText(value any) string {
	switch value.(type) {
	case bool:
		return "true or false"
	case int:
		return "a number"
	case time.Duration:
		return "a duration such as 10s"
	default:
		return "a list"
	}
}

func nest(path []string, value any) map[string]any {
	for i := len(path) - 1; i > 0; i-- {
		value = map[string]any{path[i]: value}
	}
	return map[string]any{path[0]: value}
}

// decode fills c and refuses members it does not have, by name.
func decode(raw map[string]any, c *config) error {
	var seen mapstructure.Metadata
	d, err := mapstructure.NewDecoder(&mapstructure.DecoderConfig{
		Result: c, TagName: "koanf", Metadata: &seen, WeaklyTypedInput: true,
		MatchName:  func(key, field string) bool { return key == field },
		DecodeHook: mapstructure.ComposeDecodeHookFunc(mapstructure.StringToTimeDurationHookFunc(), mapstructure.StringToSliceHookFunc(",")),
	})
	if err != nil {
		return err
	}
	if err := d.Decode(raw); err != nil {
		return err
	}
	if len(seen.Unused) > 0 {
		slices.Sort(seen.Unused)
		return fmt.Errorf("there is no setting %s", strings.Join(seen.Unused, ", "))
	}
	return nil
}

// knownKeys refuses what no command knows. What only other commands know is
// allowed: one file may serve a whole fleet.
func knownKeys(raw map[string]any) error {
	return decode(raw, &config{})
}

// fileProvider reads the config file.
type fileProvider string

func (p fileProvider) ReadBytes() ([]byte, error)    { return os.ReadFile(string(p)) }
func (p fileProvider) Read() (map[string]any, error) { return nil, errors.ErrUnsupported }

// mapProvider is a configuration at hand.
type mapProvider map[string]any

func (p mapProvider) ReadBytes() ([]byte, error)    { return nil, errors.ErrUnsupported }
func (p mapProvider) Read() (map[string]any, error) { return p, nil }

// check judges the values that are set, whatever the command.
func (c *config) check() error {
	for _, url := range []struct{ key, value string }{{"databaseUrl", c.DatabaseURL}, {"databaseUrlDirect", c.DatabaseURLDirect}} {
		if url.value == "" {
			continue
		}
		if _, err := pgxpool.ParseConfig(url.value); err != nil {
			return usagef("--%s: %v", flagName(url.key), err) // pgx leaves the password out
		}
	}
	if c.Listen != "" {
		if _, _, err := net.SplitHostPort(c.Listen); err != nil {
			return usagef("--listen: %q is no address; write host:port", c.Listen)
		}
	}
	for _, q := range c.Queues {
		queue, err := workers.ParseQueue(q)
		if err != nil {
			return usagef("--queues: %v", err)
		}
		if slices.ContainsFunc(c.queues, func(q workers.Queue) bool { return q.Name == queue.Name }) {
			return usagef("--queues: %s is there twice", queue.Name)
		}
		c.queues = append(c.queues, queue)
	}
	for _, d := range []struct {
		key   string
		value time.Duration
	}{{"heartbeat", c.Heartbeat}, {"lease", c.Lease}, {"drain", c.Drain}, {"notice", c.Notice}, {"retention.runs", c.Retention.Runs}} {
		if d.value < 0 {
			return usagef("--%s must not be negative", flagName(d.key))
		}
	}
	if keep := c.Retention.Runs; keep > 0 && keep < 24*time.Hour {
		return usagef("--retention-runs must be 0 or at least 24h: idempotency keys answer as long")
	}
	// A worker gives up at three quarters of its lease, so at least two
	// heartbeats must fit.
	if c.Lease != 0 && c.Lease < 3*c.Heartbeat {
		return usagef("--lease must be at least three times --heartbeat, or one late heartbeat loses all runs")
	}
	if c.Slots < 0 || c.Slots > 10_000 {
		return usagef("--slots must be 1 to 10000")
	}
	if p := c.Pooler; p != "" && p != poolerAuto && p != poolerNone && p != poolerTransaction {
		return usagef("--pooler must be auto, none or transaction, not %q", p)
	}
	if c.Solitary != "" {
		id, err := uuid.Parse(c.Solitary)
		if err != nil {
			return usagef("--solitary: %q is no run id", c.Solitary)
		}
		c.solitaryRun = id
	}
	if _, err := logLevel(c.Log.Level); err != nil {
		return err
	}
	if f := c.Log.Format; f != "" && f != "auto" && f != "text" && f != "json" {
		return usagef("--log-format must be auto, text or json, not %q", f)
	}
	if _, err := c.models(); err != nil {
		return usagef("providers: %v", err)
	}
	seen := map[string]bool{}
	for i, a := range c.Agents {
		raw, err := json.Marshal(a)
		if err != nil {
			return usagef("agents[%d]: %v", i, err)
		}
		parsed, err := agentcfg.Parse(raw)
		if err != nil {
			return usagef("agents[%d]: %v", i, err)
		}
		if seen[parsed.Name] {
			return usagef("agents[%d]: %s is there twice", i, parsed.Name)
		}
		seen[parsed.Name] = true
		c.agents = append(c.agents, parsed)
	}
	return nil
}

// needDatabase is for the commands that make none themselves.
func (c *config) needDatabase() error {
	if c.DatabaseURL == "" {
		return usagef("give --database-url (or WEIR_DATABASE_URL); \"weir dev\" needs none")
	}
	return nil
}

// direct is how to reach Postgres past a pooler.
func (c *config) direct() string { return cmp.Or(c.DatabaseURLDirect, c.DatabaseURL) }

// The words of --pooler. A process that was told auto has found out before it
// asks.
const (
	poolerAuto        = "auto"
	poolerNone        = "none"
	poolerTransaction = "transaction"
)

// pooled says whether the ordinary connections go through a pooler.
func (c *config) pooled() bool { return c.Pooler == poolerTransaction }

// polls says whether nothing goes past it: no locks that outlive a transaction,
// no LISTEN.
func (c *config) polls() bool { return c.pooled() && c.DatabaseURLDirect == "" }

// findPooler finds out what was left to it. A direct URL that is none is not
// used.
func (c *config) findPooler(ctx context.Context, log *slog.Logger) error {
	if c.Pooler == poolerNone || c.Pooler == poolerTransaction {
		return nil
	}
	direct := c.DatabaseURLDirect
	if direct == c.DatabaseURL {
		direct = ""
	}
	pooled, err := db.Pooled(ctx, c.DatabaseURL)
	if err != nil {
		return err
	}
	if pooled && direct != "" {
		through, err := db.Pooled(ctx, direct)
		if err != nil {
			return err
		}
		if through {
			log.Warn("the direct database url goes through a pooler too, and is not used")
			direct = ""
		}
	}
	c.DatabaseURLDirect, c.Pooler = direct, poolerNone
	if pooled {
		c.Pooler = poolerTransaction
	}
	return nil
}

// connections says in words how the process reaches Postgres.
func (c *config) connections() string {
	switch {
	case c.polls():
		return "through a pooler: polls"
	case c.pooled():
		return "through a pooler, with sessions past it"
	default:
		return "direct"
	}
}

// models makes the registry of model providers.
func (c *config) models() (*model.Registry, error) {
	configs := make(map[string]model.ProviderConfig, len(c.Providers))
	for name, p := range c.Providers {
		configs[name] = p.model()
	}
	return model.NewRegistry(configs)
}

func (p providerConfig) model() model.ProviderConfig {
	prices := make(map[string]model.Price, len(p.Prices))
	for name, price := range p.Prices {
		prices[name] = model.Price{Rates: model.Rates{
			Input: price.Input, CacheRead: price.CacheRead, CacheWrite: price.CacheWrite, Output: price.Output,
		}}
	}
	return model.ProviderConfig{
		Type: p.Type, BaseURL: p.BaseURL, NoStream: p.NoStream, ConnectTimeout: p.ConnectTimeout,
		FirstByteTimeout: p.FirstByteTimeout, GapTimeout: p.GapTimeout, Prices: prices,
	}
}
