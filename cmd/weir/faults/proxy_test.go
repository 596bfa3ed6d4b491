package faults

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/Shopify/toxiproxy/v2/toxics"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
)

// proxy stands between processes and Postgres.
type proxy struct {
	t *testing.T
	p *toxiproxy.Proxy
	// The gates of what the processes say and of what the server says.
	up, down *gate
}

// proxies is what toxiproxy wants around its proxies.
var proxies = sync.OnceValue(func() *toxiproxy.ApiServer {
	return toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
})

func newProxy(t *testing.T, upstream string) *proxy {
	t.Helper()
	p := &proxy{t: t, p: toxiproxy.NewProxy(proxies(), t.Name(), "127.0.0.1:0", upstream), up: newGate(), down: newGate()}
	require.NoError(t, p.p.Start())
	p.add("up", "gate", "upstream", map[string]any{"id": p.up.id})
	p.add("down", "gate", "downstream", map[string]any{"id": p.down.id})
	t.Cleanup(func() {
		p.heal()
		p.p.Stop()
	})
	return p
}

func (p *proxy) address() string { return p.p.Listen }

func (p *proxy) add(name, kind, stream string, attributes map[string]any) {
	p.t.Helper()
	text, err := json.Marshal(map[string]any{"name": name, "type": kind, "stream": stream, "toxicity": 1, "attributes": attributes})
	require.NoError(p.t, err)
	_, err = p.p.Toxics.AddToxicJson(bytes.NewReader(text))
	require.NoError(p.t, err)
}

// delay makes every answer take that much longer.
func (p *proxy) delay(ms, jitterMS int) {
	p.add("slow", "latency", "downstream", map[string]any{"latency": ms, "jitter": jitterMS})
}

func (p *proxy) undelay() { require.NoError(p.t, p.p.Toxics.RemoveToxic(p.t.Context(), "slow")) }

// drop loses everything from now on; hold keeps it, and it arrives when the
// partition heals. halfOpen loses what the server says only.
func (p *proxy) drop()          { p.up.set(losing); p.down.set(losing) }
func (p *proxy) hold()          { p.up.set(holding); p.down.set(holding) }
func (p *proxy) halfOpen()      { p.down.set(losing) }
func (p *proxy) deafListeners() { p.down.set(losingNews) }

func (p *proxy) heal() { p.up.set(passing); p.down.set(passing) }

// cut breaks all connections; new ones are taken.
func (p *proxy) cut() { p.to(p.p.Upstream) }

// to breaks all connections, and sends new ones to another server.
func (p *proxy) to(upstream string) {
	require.NoError(p.t, p.p.Update(&toxiproxy.Proxy{Listen: p.p.Listen, Upstream: "127.0.0.1:1", Enabled: false}))
	require.NoError(p.t, p.p.Update(&toxiproxy.Proxy{Listen: p.p.Listen, Upstream: upstream, Enabled: true}))
}

// mode is what a gate does with the bytes of one direction.
type mode int

const (
	passing mode = iota
	losing
	holding
	losingNews // of connections that listen: the server's word that they do has passed
)

// gate is a toxic that every connection has from its beginning, so that it may
// know what the connection is for. A connection that has lost bytes never works
// again: it stays silent until somebody closes it, as one whose peer is gone.
type gate struct {
	id string

	mu      sync.Mutex
	mode    mode
	changed chan struct{}
}

var gates struct {
	byID sync.Map
	last atomic.Int64
}

func init() { toxics.Register("gate", new(gateToxic)) }

func newGate() *gate {
	g := &gate{id: strconv.FormatInt(gates.last.Add(1), 10), changed: make(chan struct{})}
	gates.byID.Store(g.id, g)
	return g
}

func (g *gate) set(m mode) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mode = m
	close(g.changed)
	g.changed = make(chan struct{})
}

func (g *gate) get() (mode, <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.mode, g.changed
}

// gateToxic is how toxiproxy knows a gate.
type gateToxic struct {
	ID string `json:"id"`
}

// gateState is what a gate remembers of one connection.
type gateState struct{ listens, broken bool }

func (*gateToxic) NewState() any { return new(gateState) }

// listening is the server's answer to LISTEN: CommandComplete with its tag.
var listening = []byte("C\x00\x00\x00\x0bLISTEN\x00")

func (t *gateToxic) Pipe(stub *toxics.ToxicStub) {
	found, ok := gates.byID.Load(t.ID)
	if !ok {
		panic(fmt.Sprintf("there is no gate %q", t.ID))
	}
	g := found.(*gate)
	state := stub.State.(*gateState)
	for {
		select {
		case <-stub.Interrupt:
			return
		case c := <-stub.Input:
			if c == nil {
				stub.Close()
				return
			}
			m, changed := g.get()
			for m == holding {
				<-changed // a proxy that ends opens its gates before
				m, changed = g.get()
			}
			switch {
			case m == losing, m == losingNews && state.listens:
				state.broken = true
			case bytes.Contains(c.Data, listening):
				state.listens = true
			}
			if !state.broken {
				stub.Output <- c
			}
		}
	}
}

// describe says what a proxy's gates do, for a log.
func (m mode) String() string {
	return strings.Fields("passing losing holding losingNews")[m]
}
