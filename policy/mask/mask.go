package mask

import (
	"strings"
	"unsafe"
)

// hidden replaces what is masked. It is a placeholder itself, so that masking
// twice changes nothing, and needs no escaping in JSON, URLs or shells.
const hidden = "***"

// Masker hides credentials. It is immutable, and safe for concurrent use; nil
// and the zero value know the patterns and no configured secrets.
type Masker struct{ secrets *needles }

// New returns a Masker that also hides the values of secrets wherever they
// appear. White space around a secret does not belong to it. A secret shorter
// than 6 bytes is left out: it would hide ordinary text everywhere.
func New(secrets ...string) *Masker { return &Masker{secrets: newNeedles(secrets)} }

// Bytes returns b with credentials replaced, or b itself when there are none.
// b is never changed. JSON stays JSON.
func (m *Masker) Bytes(b []byte) []byte {
	// The view of b as a string does not outlive this call.
	if s, changed := m.hide(unsafe.String(unsafe.SliceData(b), len(b))); changed {
		return []byte(s)
	}
	return b
}

// String is Bytes for strings.
func (m *Masker) String(s string) string {
	s, _ = m.hide(s)
	return s
}

// Contains reports whether String would hide anything of s.
func (m *Masker) Contains(s string) bool {
	if m != nil && m.secrets != nil {
		t := text{s: s}
		if _, found := m.secrets.next(&t, 0); found {
			return true
		}
	}
	return LooksLikeCredential(s)
}

// LooksLikeCredential reports whether s, a text or a JSON document, holds
// something that looks like a key, a password or a token (RC-104).
func LooksLikeCredential(s string) bool {
	t := text{s: s}
	_, found := t.next(0)
	return found
}

// hide runs both passes. Without a change it returns s itself.
func (m *Masker) hide(s string) (string, bool) {
	changed := false
	if m != nil && m.secrets != nil {
		t := text{s: s}
		s, changed = t.replace(m.secrets)
	}
	t := text{s: s}
	s, changedToo := t.replace(nil)
	return s, changed || changedToo
}

// match is a piece of a text that must not be written.
type match struct {
	start, end int
	with       string // hidden, or "0" for a number of a JSON document
}

// replace hides what secrets finds; nil stands for the patterns.
func (t *text) replace(secrets *needles) (string, bool) {
	next := func(from int) (match, bool) {
		if secrets != nil {
			return secrets.next(t, from)
		}
		return t.next(from)
	}
	m, found := next(0)
	if !found {
		return t.s, false
	}
	var out strings.Builder
	out.Grow(len(t.s) + len(hidden))
	from := 0
	for ; found; m, found = next(from) {
		out.WriteString(t.s[from:m.start])
		out.WriteString(m.with)
		from = m.end
	}
	out.WriteString(t.s[from:])
	return out.String(), true
}
