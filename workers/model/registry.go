package model

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"
)

// The names of the built-in providers. The last two are also the types that a
// configured provider can have.
const (
	ProviderOffline   = "offline"
	ProviderOpenAI    = "openai"
	ProviderAnthropic = "anthropic"
)

// ProviderConfig is an operator's entry for one provider. The zero value of a
// member means its default.
type ProviderConfig struct {
	// Type is the protocol: openai (Chat Completions) or anthropic (Messages).
	// The built-in names need none, and none but their own.
	Type string
	// BaseURL is where the provider is; the vendor's own for a built-in name.
	BaseURL string
	// NoStream asks for whole answers, for servers that cannot stream. Type
	// openai only.
	NoStream bool

	ConnectTimeout   time.Duration // 10 s
	FirstByteTimeout time.Duration // from the request to the first byte of its answer: 120 s, with NoStream 10 min
	GapTimeout       time.Duration // between two bytes of an answer: 120 s

	// Prices are what models cost here, by name; they win over the built-in
	// table.
	Prices map[string]Price
	// Transport replaces the connection pool, and with it ConnectTimeout.
	Transport http.RoundTripper
}

// Config is everything that one Provider needs to call its models.
type Config struct {
	ProviderConfig
	// Name is the provider's, which selects its built-in prices.
	Name   string
	APIKey string // "" sends none
}

// Registry knows the providers of a process. It is safe for concurrent use.
type Registry struct {
	entries map[string]*entry

	mu        sync.Mutex
	providers map[providerKey]Provider
}

// entry is a provider by name: what all its base URLs and keys share.
type entry struct {
	config ProviderConfig
	prices priceTable
	client *http.Client
}

type providerKey struct {
	name, baseURL string
	key           [sha256.Size]byte
}

// maxProviders bounds the cache. A Provider is cheap to make again: it has no
// connections of its own.
const maxProviders = 1024

// NewRegistry makes the registry of the built-in providers and the configured
// ones. An entry under a built-in name changes that provider.
func NewRegistry(configs map[string]ProviderConfig) (*Registry, error) {
	r := &Registry{entries: map[string]*entry{}, providers: map[providerKey]Provider{}}
	for _, name := range []string{ProviderOffline, ProviderOpenAI, ProviderAnthropic} {
		config := configs[name]
		if config.Type == "" {
			config.Type = name
		}
		if config.Type != name {
			return nil, fmt.Errorf("provider %s: its type is %s", name, name)
		}
		e, err := newEntry(name, config)
		if err != nil {
			return nil, err
		}
		r.entries[name] = e
	}
	for name, config := range configs {
		if _, ok := r.entries[name]; ok {
			continue
		}
		if config.Type != ProviderOpenAI && config.Type != ProviderAnthropic {
			return nil, fmt.Errorf("provider %s: type must be %s or %s", name, ProviderOpenAI, ProviderAnthropic)
		}
		if config.BaseURL == "" {
			return nil, fmt.Errorf("provider %s: baseUrl is missing", name)
		}
		e, err := newEntry(name, config)
		if err != nil {
			return nil, err
		}
		r.entries[name] = e
	}
	return r, nil
}

// newEntry checks a provider's configuration and makes what its users share.
func newEntry(name string, config ProviderConfig) (*entry, error) {
	if config.BaseURL != "" {
		if err := checkBaseURL(config.BaseURL); err != nil {
			return nil, fmt.Errorf("provider %s: %w", name, err)
		}
	}
	if config.NoStream && config.Type != ProviderOpenAI {
		return nil, fmt.Errorf("provider %s: noStream is for type %s only", name, ProviderOpenAI)
	}
	prices, err := pricesOf(name, config.Prices)
	if err != nil {
		return nil, fmt.Errorf("provider %s: %w", name, err)
	}
	if config.Transport == nil {
		config.Transport = newTransport(or(config.ConnectTimeout, defaultConnectTimeout))
	}
	return &entry{config: config, prices: prices, client: newHTTPClient(config.Transport)}, nil
}

// pricesOf returns the built-in prices of a provider with the configured ones
// over them.
func pricesOf(name string, configured map[string]Price) (priceTable, error) {
	builtin := builtinPrices()[name]
	if len(configured) == 0 {
		return builtin, nil
	}
	table, err := newPriceTable(configured)
	if err != nil {
		return nil, err
	}
	for model, price := range builtin {
		if _, ok := table[model]; !ok {
			table[model] = price
		}
	}
	return table, nil
}

// checkBaseURL refuses what is no address, and what would carry a credential
// where it is logged.
func checkBaseURL(baseURL string) error {
	u, err := url.Parse(baseURL)
	switch {
	case err != nil:
		return fmt.Errorf("baseUrl is not a URL")
	case u.Scheme != "http" && u.Scheme != "https", u.Host == "":
		return fmt.Errorf("baseUrl must be http or https with a host")
	case u.User != nil, u.RawQuery != "", u.Fragment != "":
		return fmt.Errorf("baseUrl must have no user, query or fragment")
	}
	return nil
}

// hostIs says whether the address is in the domain.
func hostIs(baseURL, domain string) bool {
	u, err := url.Parse(baseURL)
	return err == nil && (u.Hostname() == domain || strings.HasSuffix(u.Hostname(), "."+domain))
}

// Provider returns the provider of that name. baseURL replaces the configured
// one unless it is empty; apiKey may be empty. Equal arguments share a
// Provider, and all providers of a name share its connections.
func (r *Registry) Provider(name, baseURL, apiKey string) (Provider, error) {
	e, ok := r.entries[name]
	if !ok {
		return nil, fmt.Errorf("model: there is no provider %q", name)
	}
	apiKey = strings.TrimSpace(apiKey) // a secret often ends in a line feed
	key := providerKey{name: name, baseURL: baseURL, key: sha256.Sum256([]byte(apiKey))}
	r.mu.Lock()
	defer r.mu.Unlock()
	if p, ok := r.providers[key]; ok {
		return p, nil
	}
	config := Config{ProviderConfig: e.config, Name: name, APIKey: apiKey}
	if baseURL != "" {
		if err := checkBaseURL(baseURL); err != nil {
			return nil, fmt.Errorf("provider %s: %w", name, err)
		}
		config.BaseURL = baseURL
	}
	var p Provider
	switch config.Type {
	case ProviderOffline:
		p = &Offline{GapTimeout: config.GapTimeout, prices: e.prices}
	case ProviderOpenAI:
		p = newOpenAI(config, e)
	case ProviderAnthropic:
		p = newAnthropic(config, e)
	}
	if len(r.providers) >= maxProviders {
		clear(r.providers)
	}
	r.providers[key] = p
	return p, nil
}

// Cost returns what the usage costs at a provider's model in millionths of a
// dollar, or nil when its price is not known.
func (r *Registry) Cost(provider, model string, u Usage) *int64 {
	e, ok := r.entries[provider]
	if !ok {
		return nil
	}
	return e.prices.cost(model, u)
}

// Close closes the connections that no call uses. The registry stays usable.
func (r *Registry) Close() {
	for _, e := range r.entries {
		e.client.CloseIdleConnections()
	}
}

// or returns d, or the default when d is not set.
func or(d, otherwise time.Duration) time.Duration {
	if d > 0 {
		return d
	}
	return otherwise
}
