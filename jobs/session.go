package jobs

import (
	"context"
	"encoding/json"
	"errors"
	"sync"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/weir-run/weir/db"
)

// SessionSpec says how a session looks that does not exist yet.
type SessionSpec struct {
	ID              uuid.UUID // minted beforehand, where ConversationRef is made of it; zero mints one
	ConversationRef string
	ExternalID      string // the client's sessionId; "" for none
	Name            string // of an Agentex task; "" for none
	Kind            string // dm, group, sub-agent; "" means dm
	ChannelType     string // rpc, api, agentex
	Scope           json.RawMessage
	UserID          string
	OwnerToken      string
	TaskStatus      string // of an Agentex task; "" for other sessions
	TaskReason      string
	TaskParams      json.RawMessage
	TaskMetadata    json.RawMessage
}

// names are the spec's names one by one, in the order they are looked up.
func (s SessionSpec) names() (names []SessionSpec) {
	if s.Name != "" {
		names = append(names, SessionSpec{Name: s.Name})
	}
	if s.ExternalID != "" {
		names = append(names, SessionSpec{ExternalID: s.ExternalID})
	}
	return append(names, SessionSpec{ConversationRef: s.ConversationRef})
}

// newSession is a session that a unit tries to insert.
type newSession struct {
	ID       uuid.UUID
	TenantID string
	Agent    string
	SessionSpec
	opening
}

// opening is what the op that makes a session expects of it, so that the
// session is inserted as it will stand and needs no update.
type opening struct {
	EventSeq, MessageSeq int64
	HeadRunID            uuid.UUID
	Turns                int64
}

// openingOf is that of a session that begins with a turn: its request, and that
// the agent thinks.
func openingOf(run uuid.UUID) opening { return opening{EventSeq: 2, HeadRunID: run, Turns: 1} }

func newSessionOf(tenant string, id uuid.UUID, agent string, spec SessionSpec) *newSession {
	if spec.Kind == "" {
		spec.Kind = "dm"
	}
	return &newSession{ID: id, TenantID: tenant, Agent: agent, SessionSpec: spec}
}

// row is the session before its first op.
func (s *newSession) row() *sessionRow {
	return &sessionRow{
		UnitSessionLockRow: db.UnitSessionLockRow{
			ID: s.ID, TenantID: s.TenantID, ConversationRef: s.ConversationRef, ExternalID: notEmpty(s.ExternalID), Name: notEmpty(s.Name),
			Agent: s.Agent, UserID: notEmpty(s.UserID), ChannelType: s.ChannelType, TaskStatus: notEmpty(s.TaskStatus),
		},
		opened: &s.opening, turns: -s.Turns,
	}
}

// sortKey orders inserts the same way for everyone.
func (s *newSession) sortKey() string {
	return s.TenantID + "\x00" + s.ExternalID + "\x00" + s.Name + "\x00" + s.ConversationRef
}

// FoundSession is a session looked up by a name of its client.
type FoundSession struct {
	ID              uuid.UUID
	Agent           string
	ConversationRef string
}

// FindSession looks up a session by its name, external id or conversation ref,
// whichever the spec gives first; nil when there is none.
func (r *Runs) FindSession(ctx context.Context, tenant string, s SessionSpec) (*FoundSession, error) {
	var found FoundSession
	var err error
	switch {
	case s.Name != "":
		var row db.SessionOfNameRow
		row, err = r.queries.SessionOfName(ctx, r.pool, db.SessionOfNameParams{TenantID: tenant, Name: s.Name})
		found = FoundSession(row)
	case s.ExternalID != "":
		var row db.SessionOfExternalIDRow
		row, err = r.queries.SessionOfExternalID(ctx, r.pool, db.SessionOfExternalIDParams{TenantID: tenant, ExternalID: s.ExternalID})
		found = FoundSession(row)
	default:
		var row db.Session
		row, err = r.queries.SessionByRef(ctx, r.pool, db.SessionByRefParams{TenantID: tenant, ConversationRef: s.ConversationRef})
		found = FoundSession{row.ID, row.Agent, row.ConversationRef}
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	return &found, nil
}

// findByNames looks a new session's names up, one after another.
func (r *Runs) findByNames(ctx context.Context, tenant string, s SessionSpec) (found *FoundSession, err error) {
	err = r.repeat(ctx, func() error {
		for _, name := range s.names() {
			if found, err = r.FindSession(ctx, tenant, name); err != nil || found != nil {
				return err
			}
		}
		return nil
	})
	return found, err
}

// maxKnownSessions bounds what a process remembers: some 4 MB.
const maxKnownSessions = 16384

// knownSessions remembers which session a client's name means, so that a turn
// of a conversation under way needs no look at the database. A session's id
// and agent never change; one that is gone is found out by the unit, which
// cannot lock it.
type knownSessions struct {
	mu   sync.RWMutex
	byID map[sessionName]FoundSession
}

type sessionName struct{ tenant, name, externalID, ref string }

// nameOf is the first of the names.
func nameOf(tenant string, s SessionSpec) sessionName {
	switch {
	case s.Name != "":
		return sessionName{tenant: tenant, name: s.Name}
	case s.ExternalID != "":
		return sessionName{tenant: tenant, externalID: s.ExternalID}
	default:
		return sessionName{tenant: tenant, ref: s.ConversationRef}
	}
}

func (k *knownSessions) get(n sessionName) *FoundSession {
	k.mu.RLock()
	defer k.mu.RUnlock()
	if s, ok := k.byID[n]; ok {
		return &s
	}
	return nil
}

func (k *knownSessions) put(n sessionName, s FoundSession) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.byID == nil || len(k.byID) >= maxKnownSessions {
		k.byID = map[sessionName]FoundSession{}
	}
	k.byID[n] = s
}

func (k *knownSessions) forget(n sessionName) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.byID, n)
}
