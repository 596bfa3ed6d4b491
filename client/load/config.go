package load

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/weir-run/weir/client"
)

// Mode says what is sent for a turn.
type Mode string

// The modes.
const (
	// Execute sends agent.execute, which is answered at the turn's end.
	Execute Mode = "execute"
	// Split sends agent.request, and then run.get until the run's end: it costs
	// the server more, and tells accepting, waiting and running apart.
	Split Mode = "split"
	// Accept sends agent.request and leaves the turn to itself.
	Accept Mode = "accept"
)

// What a Config that says nothing means.
const (
	DefaultTimeout     = time.Minute
	DefaultMaxInFlight = 1000
)

// The limits of a Config.
const (
	MaxUsers   = 10_000
	maxMessage = 256 << 10 // of one message, in bytes (RC-10)
)

// Tenant is one whose turns are sent.
type Tenant struct {
	// Name is what the result calls it. The server goes by the token.
	Name string
	// Token is its bearer token; empty sends none.
	Token string
	// Weight is its share of the turns, relative to the others' weights.
	Weight float64
}

// Config is a load.
type Config struct {
	// URL of the API, without path. Empty means client.DefaultURL.
	URL string
	// Tenants share the turns: in an even or closed load they take turns, in a
	// Poisson one each turn's is drawn.
	Tenants []Tenant
	// Mode is Execute if empty.
	Mode Mode
	// Agent and User go with each turn; empty leaves them out.
	Agent, User string
	// Messages are sent one after the other, and then again from the first.
	Messages []string
	// Sessions is how many sessions each tenant has, which take turns; 0 means a
	// new one for each turn.
	Sessions int

	// Rate is that of an open loop, in turns per second.
	Rate Ramp
	// Spacing of the open loop is Poisson if empty.
	Spacing Spacing
	// MaxInFlight bounds the turns under way in the open loop; 0 means
	// DefaultMaxInFlight.
	MaxInFlight int
	// Users is how many users the closed loop has. Either Rate or Users is set.
	Users Ramp

	// Warmup comes before the ramp begins. Its turns are sent and forgotten.
	Warmup time.Duration
	// Duration is how long turns are sent after the warm-up; 0 means until Turns.
	Duration time.Duration
	// Turns is how many turns are due after the warm-up; 0 means until Duration.
	Turns int64
	// Timeout bounds each turn; 0 means DefaultTimeout.
	Timeout time.Duration

	// OnProgress is told, every ProgressEvery, what has happened since; it may be
	// nil.
	OnProgress    func(Progress)
	ProgressEvery time.Duration
}

// open says whether the load is an open loop.
func (c *Config) open() bool { return c.Rate != nil }

// level is the ramp of either loop.
func (c *Config) level() Ramp {
	if c.open() {
		return c.Rate
	}
	return c.Users
}

// Check fills in what was left out, and refuses what cannot be done.
func (c *Config) Check() error {
	if c.URL == "" {
		c.URL = client.DefaultURL
	}
	if c.Mode == "" {
		c.Mode = Execute
	}
	if c.Spacing == "" {
		c.Spacing = Poisson
	}
	if c.Timeout == 0 {
		c.Timeout = DefaultTimeout
	}
	if c.MaxInFlight == 0 {
		c.MaxInFlight = DefaultMaxInFlight
	}
	if c.ProgressEvery == 0 {
		c.ProgressEvery = time.Second
	}
	switch {
	case (c.Rate == nil) == (c.Users == nil):
		return errors.New("a load has either a rate or users")
	case c.level().Peak() <= 0:
		return errors.New("the load is nothing at all times")
	case c.Users.Peak() > MaxUsers:
		return fmt.Errorf("there may be at most %d users at once", MaxUsers)
	case c.Rate.Peak() > MaxLevel:
		return fmt.Errorf("the rate may be at most %d per second", MaxLevel)
	case c.MaxInFlight < 0 || c.MaxInFlight > MaxUsers:
		return fmt.Errorf("the turns under way must be 1 to %d", MaxUsers)
	case c.Duration < 0 || c.Turns < 0 || c.Warmup < 0 || c.Sessions < 0 || c.Timeout < time.Millisecond:
		return errors.New("times and numbers must not be negative, and turns need time")
	case c.Timeout > time.Hour:
		return errors.New("a turn is waited for one hour at most")
	case c.Duration == 0 && c.Turns == 0:
		return errors.New("the load has no end: give it a duration or a number of turns")
	case c.Spacing != Poisson && c.Spacing != Even:
		return fmt.Errorf("there is no spacing %q", c.Spacing)
	case c.Mode != Execute && c.Mode != Split && c.Mode != Accept:
		return fmt.Errorf("there is no mode %q", c.Mode)
	case len(c.Tenants) == 0:
		return errors.New("there is no tenant")
	case len(c.Messages) == 0:
		return errors.New("there is no message")
	}
	names := map[string]bool{}
	for _, t := range c.Tenants {
		if !(t.Weight > 0 && t.Weight <= MaxLevel) {
			return fmt.Errorf("the weight of tenant %s must be above 0", t.Name)
		}
		if names[t.Name] {
			return fmt.Errorf("tenant %s is there twice", t.Name)
		}
		names[t.Name] = true
		if strings.ContainsFunc(t.Token, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return fmt.Errorf("the token of tenant %s has a character that no token has", t.Name)
		}
	}
	for _, m := range c.Messages {
		if m == "" || len(m) > maxMessage {
			return fmt.Errorf("a message must have 1 to %d bytes", maxMessage)
		}
	}
	return nil
}
