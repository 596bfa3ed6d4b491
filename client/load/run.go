package load

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weir-run/weir/client"
)

const (
	// forever is the end of a window that only a number of turns ends.
	forever = time.Duration(math.MaxInt64)
	// answerGrace is how much longer than the server the client waits for an
	// agent.execute, so that the server can say that the turn is still running.
	answerGrace = 2 * time.Second
	// endWait is how long one run.get waits for a run's end. No proxy's limit
	// cuts a long turn off.
	endWait = 20 * time.Second
	// usersTick is how often the number of users follows its ramp.
	usersTick = 50 * time.Millisecond
	// connectPause is how long a user of a closed loop waits after it got no
	// connection.
	connectPause = 100 * time.Millisecond
	// alarmWait is how much of a wait is left to an alarm, which cannot be
	// interrupted.
	alarmWait = 3 * time.Millisecond
)

// run is a load under way.
type run struct {
	Config
	stop     <-chan struct{} // closed: send no more
	to       *target
	requests [][]request // of each tenant, of each message
	sequence []atomic.Uint64
	began    time.Time
	warmup   time.Duration
	end      time.Duration // when the last turn is due at the latest
	ramp     Ramp          // of Config, behind the warm-up
	random   *rand.Rand
	recorder *recorder
	inFlight atomic.Int64
	draining atomic.Bool
}

// Run puts a load on an API until its end, or until stop is closed, and then
// waits for the turns under way. The end of ctx cuts those off: what was
// measured until then is returned all the same. An error says what is wrong with
// the Config.
func Run(ctx context.Context, stop <-chan struct{}, c Config) (*Result, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	to, err := newTarget(c.URL)
	if err != nil {
		return nil, err
	}
	r := &run{
		Config: c, stop: stop, to: to, warmup: c.Warmup, end: forever, ramp: c.level().behind(c.Warmup),
		random: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())), sequence: make([]atomic.Uint64, len(c.Tenants)),
	}
	if c.Duration > 0 {
		r.end = c.Warmup + c.Duration
	}
	name := make([]byte, runDigits)
	writeHex(name, rand.Uint64())
	for _, t := range c.Tenants {
		var requests []request
		for _, m := range c.Messages {
			requests = append(requests, turnRequest(to, &c, t.Token, string(name), m))
		}
		r.requests = append(r.requests, requests)
	}
	r.recorder = newRecorder(len(c.Tenants), r.warmup, r.end)
	r.began = time.Now()
	reported := r.report()
	var stopped bool
	if c.open() {
		stopped = r.openLoop(ctx)
	} else {
		stopped = r.closedLoop(ctx)
	}
	reported()
	return r.recorder.result(&c, r.began, stopped || ctx.Err() != nil), nil
}

func (r *run) now() time.Duration { return time.Since(r.began) }

// stopped says whether no more is to be sent.
func (r *run) stopped(ctx context.Context) bool {
	select {
	case <-r.stop:
		return true
	case <-ctx.Done():
		return true
	default:
		return false
	}
}

// sleeper waits. It belongs to one goroutine.
type sleeper struct {
	timer *time.Timer
	alarm *alarm // for the last part of a wait; nil leaves it to the timer
}

// until waits for a time of the run; false when the run stops first.
func (s *sleeper) until(ctx context.Context, r *run, at time.Duration) bool {
	d := at - r.now()
	if d <= 0 {
		return !r.stopped(ctx)
	}
	if s.alarm != nil {
		if d -= alarmWait; d < 0 {
			return s.alarm.wait(d+alarmWait) == nil && !r.stopped(ctx)
		}
	}
	if s.timer == nil {
		s.timer = time.NewTimer(d)
	} else {
		s.timer.Reset(d)
	}
	select {
	case <-s.timer.C:
	case <-r.stop:
		return s.stop()
	case <-ctx.Done():
		return s.stop()
	}
	return s.alarm == nil || s.until(ctx, r, at)
}

func (s *sleeper) stop() bool {
	s.timer.Stop()
	return false
}

// report calls OnProgress until the returned function is called.
func (r *run) report() (end func()) {
	if r.OnProgress == nil {
		return func() {}
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(r.ProgressEvery)
		defer tick.Stop()
		before := time.Duration(0)
		for {
			select {
			case <-tick.C:
			case <-done:
				return
			}
			now := r.now()
			p := r.recorder.progress()
			p.Elapsed, p.Interval, p.InFlight = now-r.warmup, now-before, r.inFlight.Load()
			p.Draining = r.draining.Load()
			before = now
			r.OnProgress(p)
		}
	})
	return func() {
		close(done)
		wg.Wait()
	}
}

// drain says that all is sent.
func (r *run) drain(stopped bool) {
	if stopped {
		r.recorder.cut(r.now())
	}
	r.draining.Store(true)
}

// openLoop sends turns when they are due, and says whether it was stopped.
func (r *run) openLoop(ctx context.Context) (stopped bool) {
	var chance *rand.Rand
	if r.Spacing == Poisson {
		chance = r.random
	}
	due := arrivals{ramp: r.ramp, spacing: r.Spacing, random: r.random}
	pick := newPicker(r.Tenants, chance)
	places := places{run: r}
	var sleep sleeper
	if a, err := newAlarm(); err == nil { // without, turns are up to a millisecond late
		defer a.close()
		sleep.alarm = a
	}
	for n, counted := uint64(0), int64(0); ; n++ {
		at, ever := due.next()
		if !ever || at >= r.end {
			if r.end != forever {
				stopped = !sleep.until(ctx, r, r.end)
			}
			break
		}
		if at >= r.warmup {
			if counted++; r.Turns > 0 && counted > r.Turns {
				r.recorder.limited()
				break
			}
		}
		if stopped = !sleep.until(ctx, r, at); stopped {
			break
		}
		if t := (turn{due: at, tenant: pick.next(), n: n}); !places.give(ctx, t) {
			r.recorder.unsent(t)
		}
	}
	r.drain(stopped)
	places.close()
	return stopped
}

// places are the goroutines that carry the turns of an open loop. The one that
// was used last is used first, so that a low rate uses few connections.
type places struct {
	*run
	mu     sync.Mutex
	idle   []chan turn
	made   int
	closed bool
	wg     sync.WaitGroup
}

// give has a turn sent; false when all places are taken.
func (p *places) give(ctx context.Context, t turn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.idle); n > 0 {
		p.idle[n-1] <- t // it has room for one, and waits
		p.idle = p.idle[:n-1]
		return true
	}
	if p.made == p.MaxInFlight {
		return false
	}
	p.made++
	next := make(chan turn, 1)
	next <- t
	p.wg.Go(func() {
		s := p.newSender()
		defer s.conn.close()
		for t := range next {
			s.turn(ctx, t)
			if !p.free(next) {
				return
			}
		}
	})
	return true
}

func (p *places) free(next chan turn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.idle = append(p.idle, next)
	return true
}

// close waits for the turns under way.
func (p *places) close() {
	p.mu.Lock()
	p.closed = true
	for _, next := range p.idle {
		close(next)
	}
	p.mu.Unlock()
	p.wg.Wait()
}

// closedLoop keeps as many users busy as there should be, and says whether it
// was stopped.
func (r *run) closedLoop(ctx context.Context) (stopped bool) {
	u := users{run: r, pick: newPicker(r.Tenants, nil), enough: make(chan struct{})}
	tick := time.NewTicker(usersTick)
	defer tick.Stop()
	over := make(<-chan time.Time)
	if r.end != forever {
		t := time.NewTimer(r.end)
		defer t.Stop()
		over = t.C
	}
	for going := true; going; {
		u.set(ctx, int(math.Round(r.ramp.Level(r.now()))))
		select {
		case <-tick.C:
		case <-over:
			going = false
		case <-u.enough:
			going = false
			r.recorder.limited()
		case <-r.stop:
			going, stopped = false, true
		case <-ctx.Done():
			going, stopped = false, true
		}
	}
	r.drain(stopped)
	u.set(ctx, 0)
	u.wg.Wait()
	return stopped
}

// users are those of a closed loop.
type users struct {
	*run
	wg     sync.WaitGroup
	enough chan struct{} // closed: all turns are sent

	mu      sync.Mutex
	wanted  int
	busy    []bool
	pick    *picker
	n       uint64
	counted int64
}

// set makes users begin, or lets those above n end after their turn.
func (u *users) set(ctx context.Context, n int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.wanted = n
	u.busy = slices.Grow(u.busy, max(0, n-len(u.busy)))
	for len(u.busy) < n {
		u.busy = append(u.busy, false)
	}
	for i := range n {
		if !u.busy[i] {
			u.busy[i] = true
			u.wg.Go(func() { u.user(ctx, i) })
		}
	}
}

func (u *users) user(ctx context.Context, i int) {
	s := u.newSender()
	defer s.conn.close()
	var sleep sleeper
	for {
		t, ok := u.next(ctx, i)
		if !ok {
			return
		}
		if o := s.turn(ctx, t); o.code == "connect" && !sleep.until(ctx, u.run, u.now()+connectPause) {
			u.leave(i)
			return
		}
	}
}

func (u *users) leave(i int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.busy[i] = false
}

// next is the next turn of user i; false when it has none.
func (u *users) next(ctx context.Context, i int) (turn, bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	now := u.now()
	if i >= u.wanted || now >= u.end || u.stopped(ctx) {
		u.busy[i] = false
		return turn{}, false
	}
	if now >= u.warmup && u.Turns > 0 {
		if u.counted == u.Turns {
			return turn{}, false // and stays busy: no other takes its place
		}
		if u.counted++; u.counted == u.Turns {
			close(u.enough)
		}
	}
	t := turn{due: now, tenant: u.pick.next(), n: u.n}
	u.n++
	return t, true
}

// sender sends one turn after the other on a connection of its own.
type sender struct {
	*run
	conn     conn
	requests [][][]byte // of its own: the session is written into them
	get      []byte
}

func (r *run) newSender() *sender {
	s := &sender{run: r, conn: conn{to: r.to}, requests: make([][][]byte, len(r.Tenants))}
	for i := range s.requests {
		s.requests[i] = make([][]byte, len(r.Messages))
	}
	return s
}

// turn sends a turn and records what becomes of it.
func (s *sender) turn(ctx context.Context, t turn) outcome {
	s.inFlight.Add(1)
	s.recorder.began()
	sent := s.now()
	o := outcome{}
	s.send(ctx, t, sent, &o)
	now := s.now()
	switch o.verdict {
	case verdictRejected:
		o.measured(phaseRejected, now-t.due)
	case verdictFailed:
		if ctx.Err() != nil {
			o.verdict = verdictAbandoned
		}
	}
	s.recorder.record(t, sent, now, &o)
	s.inFlight.Add(-1)
	return o
}

func (s *sender) send(ctx context.Context, t turn, sent time.Duration, o *outcome) {
	deadline := s.began.Add(sent + s.Timeout)
	wait := deadline
	if s.Mode == Execute {
		wait = deadline.Add(answerGrace)
	}
	status, err := s.conn.do(ctx, s.request(t), wait)
	if err != nil {
		o.lost(err)
		return
	}
	var accepted *client.Accepted
	var into any
	if s.Mode == Split {
		accepted = new(client.Accepted)
		into = accepted
	}
	if !o.read(status, s.conn.body, into) {
		return
	}
	switch s.Mode {
	case Execute:
		o.measured(phaseTotal, s.now()-t.due)
	case Accept:
		o.measured(phaseAccept, s.now()-t.due)
	case Split:
		o.measured(phaseAccept, s.now()-t.due)
		s.await(ctx, t, accepted.RunID, deadline, o)
	}
}

// await waits for the end of a run.
func (s *sender) await(ctx context.Context, t turn, id string, deadline time.Time, o *outcome) {
	for {
		left := time.Until(deadline)
		if left < time.Millisecond {
			o.verdict, o.code, o.message = verdictFailed, "timeout", "the run has not ended in time"
			return
		}
		s.get = runRequest(s.get[:0], s.to, s.Tenants[t.tenant].Token, id, min(endWait, left).Milliseconds())
		status, err := s.conn.do(ctx, s.get, deadline.Add(answerGrace))
		if err != nil {
			o.lost(err)
			return
		}
		var r client.RunDetail
		if !o.read(status, s.conn.body, &r) {
			return
		}
		if r.Final() {
			o.measured(phaseTotal, s.now()-t.due)
			o.ended(&r)
			return
		}
	}
}

// request is that of a turn, good until the next one.
func (s *sender) request(t turn) []byte {
	message := int(t.n % uint64(len(s.Messages)))
	template := &s.run.requests[t.tenant][message]
	if template.mark == 0 {
		return template.text
	}
	text := s.requests[t.tenant][message]
	if text == nil {
		text = slices.Clone(template.text)
		s.requests[t.tenant][message] = text
	}
	session := s.sequence[t.tenant].Add(1) - 1
	if s.Sessions > 0 {
		session %= uint64(s.Sessions)
	}
	writeHex(text[template.mark:template.mark+sessionDigits], session)
	return text
}
