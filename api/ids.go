package api

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"strings"
	"time"

	"github.com/google/uuid"
)

const (
	runPrefix  = "run_"
	turnPrefix = "turn_"
	refPrefix  = "cv_"
)

// runID is how a run goes out.
func runID(id uuid.UUID) string { return runPrefix + id.String() }

// turnID is how the turn of a run goes out.
func turnID(id uuid.UUID) string { return turnPrefix + id.String() }

// parseRunID reads an id as it goes out or bare. What is no id names nothing:
// the error is *NotFoundError.
func parseRunID(text string) (uuid.UUID, error) {
	id, ok := parseUUID(strings.TrimPrefix(text, runPrefix))
	if !ok {
		return uuid.Nil, &NotFoundError{"run", text}
	}
	return id, nil
}

// parseUUID reads the usual form of a UUID and no other.
func parseUUID(text string) (uuid.UUID, bool) {
	if len(text) != 36 {
		return uuid.Nil, false
	}
	id, err := uuid.Parse(text)
	return id, err == nil
}

func newID() uuid.UUID { return uuid.Must(uuid.NewV7()) }

// scope is what a conversation is made of; empty parts are absent.
type scope struct {
	tenant, agent, channelType, channelInstanceID, conversationID, threadID, userID string
}

// JSON is the scope as it is stored.
func (s scope) JSON() json.RawMessage {
	parts := make([]*string, 0, 7)
	for _, part := range []string{s.tenant, s.agent, s.channelType, s.channelInstanceID, s.conversationID, s.threadID, s.userID} {
		if part == "" {
			parts = append(parts, nil)
		} else {
			parts = append(parts, &part)
		}
	}
	text, err := marshal(parts)
	if err != nil {
		panic(err) // strings
	}
	return text
}

// conversationRef is the name of the conversation with the scope s, which is
// JSON.
func conversationRef(s json.RawMessage) string {
	sum := sha256.Sum256(s)
	return refPrefix + base64.RawURLEncoding.EncodeToString(sum[:])
}

// isRef reports whether a text has the form of a conversationRef.
func isRef(text string) bool {
	encoded, ok := strings.CutPrefix(text, refPrefix)
	return ok && len(encoded) == base64.RawURLEncoding.EncodedLen(sha256.Size)
}

// timestamp is how times go out: RFC 3339 in UTC with milliseconds.
func timestamp(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000Z") }

// timestampOf is timestamp for times that may be missing.
func timestampOf(t *time.Time) string {
	if t == nil {
		return ""
	}
	return timestamp(*t)
}

// notNil makes an empty list of none: on the wire it is [], not null.
func notNil[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}
