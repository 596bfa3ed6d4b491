// Package bus tells other processes, soon after a commit, that something
// happened. A message carries ids only: what happened is read from the rows.
// It may be lost and may come twice; whoever needs it certainly polls slowly.
package bus

import (
	"context"
	"encoding/base64"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-run/weir/db"
)

// Topic says what a message is about.
type Topic byte

// The topics, and what their id names.
const (
	RunEnded   Topic = 'e' // run
	RunControl Topic = 'c' // run: cancel or kill; its worker looks up
	Limits     Topic = 'l' // nothing: a rate limit was set
	Waits      Topic = 'w' // nothing: a wait was stored
	Ready      Topic = 'q' // nothing: a run waits for admission
	Workers    Topic = 'k' // worker: an operator wants something of it
	Agents     Topic = 'a' // nothing: an agent or token changed
)

// Message is one thing that happened.
type Message struct {
	Topic Topic
	ID    uuid.UUID
}

const (
	channel    = "weir"
	spacing    = 2 * time.Millisecond // between two notifying transactions: NOTIFY serialises commits
	perPayload = 300                  // messages of one notification, whose limit is 8000 bytes
	encodedLen = 1 + 22               // topic and id
	redial     = 250 * time.Millisecond
)

// Bus publishes to and listens for all processes on one database.
type Bus struct {
	pool   *pgxpool.Pool
	listen *pgx.ConnConfig
	log    *slog.Logger

	mu     sync.Mutex
	subs   map[Message]map[*Subscription]struct{}
	hands  map[Topic]map[*handler]struct{}
	outbox []Message
	queues map[string]bool
	wakeup chan struct{}
	last   time.Time // when a transaction last notified
	alive  bool
}

// New makes a bus that publishes through pool and listens on a connection of
// its own, made from listen. With nil for listen, where a pooler is in the way,
// it hears what this process says alone, and everybody lives by the slow polls.
// Run makes it work.
func New(pool *pgxpool.Pool, listen *pgx.ConnConfig, log *slog.Logger) *Bus {
	return &Bus{
		pool: pool, listen: listen, log: log,
		subs: map[Message]map[*Subscription]struct{}{}, hands: map[Topic]map[*handler]struct{}{}, queues: map[string]bool{},
		wakeup: make(chan struct{}, 1),
	}
}

// Run publishes and listens until ctx ends.
func (b *Bus) Run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		b.publishLoop(ctx)
	}()
	if b.listen != nil {
		b.listenLoop(ctx)
	}
	wg.Wait()
}

// Subscription receives a signal for each message it was made for; several
// may become one.
type Subscription struct {
	C   <-chan struct{}
	c   chan struct{}
	bus *Bus
	msg Message
}

// Subscribe waits for messages of a topic about id. It also signals when
// messages may have been lost.
func (b *Bus) Subscribe(topic Topic, id uuid.UUID) *Subscription {
	c := make(chan struct{}, 1)
	s := &Subscription{C: c, c: c, bus: b, msg: Message{topic, id}}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.subs[s.msg] == nil {
		b.subs[s.msg] = map[*Subscription]struct{}{}
	}
	b.subs[s.msg][s] = struct{}{}
	return s
}

// Close ends the subscription.
func (s *Subscription) Close() {
	s.bus.mu.Lock()
	defer s.bus.mu.Unlock()
	delete(s.bus.subs[s.msg], s)
	if len(s.bus.subs[s.msg]) == 0 {
		delete(s.bus.subs, s.msg)
	}
}

// Signal wakes the subscriber as a message would.
func (s *Subscription) Signal() {
	select {
	case s.c <- struct{}{}:
	default:
	}
}

// Publish tells everyone, this process at once.
func (b *Bus) Publish(queues []string, messages ...Message) {
	b.mu.Lock()
	for _, m := range messages {
		b.deliver(m)
	}
	b.outbox = append(b.outbox, messages...)
	for _, q := range queues {
		b.queues[q] = true
	}
	b.mu.Unlock()
	select {
	case b.wakeup <- struct{}{}:
	default:
	}
}

type handler struct{ f func(id uuid.UUID) }

// Handle calls f for each message of a topic, with its id, and with uuid.Nil
// when messages may have been lost. f must not block or call the bus. The
// result ends it.
func (b *Bus) Handle(topic Topic, f func(id uuid.UUID)) (stop func()) {
	h := &handler{f}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.hands[topic] == nil {
		b.hands[topic] = map[*handler]struct{}{}
	}
	b.hands[topic][h] = struct{}{}
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.hands[topic], h)
	}
}

// deliver tells this process; the caller holds the lock.
func (b *Bus) deliver(m Message) {
	for s := range b.subs[m] {
		s.Signal()
	}
	for h := range b.hands[m.Topic] {
		h.f(m.ID)
	}
}

func (b *Bus) publishLoop(ctx context.Context) {
	for {
		select {
		case <-b.wakeup:
		case <-ctx.Done():
			// What is committed is told before we go.
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			b.flush(last)
			cancel()
			return
		}
		b.flush(ctx)
		select {
		case <-time.After(spacing):
		case <-ctx.Done():
		}
	}
}

// flush sends what waits, in one transaction. What fails is lost: the sweeper
// and the waiters' polls repair it.
func (b *Bus) flush(ctx context.Context) {
	b.mu.Lock()
	out, queues := b.outbox, b.queues
	b.outbox, b.queues = nil, map[string]bool{}
	b.last = time.Now()
	b.mu.Unlock()
	if len(out) == 0 && len(queues) == 0 {
		return
	}
	var batch pgx.Batch
	for _, n := range notifications(slices.Collect(maps.Keys(queues)), out) {
		batch.Queue(db.Notify, n.Channel, n.Payload)
	}
	if err := b.pool.SendBatch(ctx, &batch).Close(); err != nil && ctx.Err() == nil {
		b.log.Warn("notify", "error", err)
	}
}

// Notification is what one db.Notify says.
type Notification struct{ Channel, Payload string }

// Embed returns what to notify inside a transaction that is about to commit, if
// the bus has been quiet: it spares the news a transaction of its own. Once it
// has committed, Deliver tells those who wait in this process. ok is false
// while there is much to tell: then Publish after the commit, which gathers
// it, since NOTIFY serialises the commits of the whole database.
func (b *Bus) Embed(queues []string, messages []Message) (embedded []Notification, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	if len(b.outbox) > 0 || len(b.queues) > 0 || now.Sub(b.last) < spacing {
		return nil, false
	}
	b.last = now
	return notifications(queues, messages), true
}

// Deliver tells this process's own subscribers.
func (b *Bus) Deliver(messages []Message) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, m := range messages {
		b.deliver(m)
	}
}

func notifications(queues []string, messages []Message) (out []Notification) {
	for _, q := range queues {
		out = append(out, Notification{db.RiverInserts, `{"queue":"` + q + `"}`})
	}
	seen := make(map[Message]bool, len(messages))
	payload := make([]byte, 0, min(perPayload, len(messages))*encodedLen)
	send := func() {
		if len(payload) > 0 {
			out = append(out, Notification{channel, string(payload)})
			payload = payload[:0]
		}
	}
	for _, m := range messages {
		if seen[m] {
			continue
		}
		seen[m] = true
		payload = append(payload, byte(m.Topic))
		payload = base64.RawURLEncoding.AppendEncode(payload, m.ID[:])
		if len(payload) >= perPayload*encodedLen {
			send()
		}
	}
	send()
	return out
}

func (b *Bus) listenLoop(ctx context.Context) {
	for ctx.Err() == nil {
		err := b.listenOnce(ctx)
		if ctx.Err() != nil {
			return
		}
		b.setAlive(false)
		b.log.Warn("listen", "error", err)
		select {
		case <-time.After(redial):
		case <-ctx.Done():
		}
	}
}

func (b *Bus) listenOnce(ctx context.Context) error {
	conn, err := pgx.ConnectConfig(ctx, b.listen)
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(closing)
	}()
	if _, err := conn.Exec(ctx, "LISTEN "+channel); err != nil {
		return err
	}
	b.setAlive(true)
	b.signalAll() // whatever was said while nobody listened
	for {
		n, err := conn.WaitForNotification(ctx)
		if err != nil {
			return err
		}
		b.dispatch(n.Payload)
	}
}

func (b *Bus) dispatch(payload string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for ; len(payload) >= encodedLen; payload = payload[encodedLen:] {
		m := Message{Topic: Topic(payload[0])}
		if n, err := base64.RawURLEncoding.Decode(m.ID[:], []byte(payload[1:encodedLen])); err != nil || n != len(m.ID) {
			b.log.Warn("notification is not ours", "payload", payload)
			return
		}
		b.deliver(m)
	}
}

func (b *Bus) signalAll() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, subs := range b.subs {
		for s := range subs {
			s.Signal()
		}
	}
	for _, hands := range b.hands {
		for h := range hands {
			h.f(uuid.Nil)
		}
	}
}

func (b *Bus) setAlive(v bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.alive = v
}

// Alive says whether the listener is connected.
func (b *Bus) Alive() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.alive
}
