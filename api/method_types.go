package api

import "strings"

// SessionID is a client's name for a session: 1 to 256 bytes without control
// characters (RC-5).
type SessionID string

// Validate checks the rule of the type.
func (id SessionID) Validate() error {
	if id == "" || len(id) > 256 || strings.ContainsFunc(string(id), isControl) {
		return invalid("must be 1 to 256 bytes without control characters")
	}
	return nil
}
