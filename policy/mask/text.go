package mask

import (
	"encoding/json"
	"strings"
	"unsafe"
)

// text is what is being masked, with what was learnt about it on the way.
type text struct {
	s string

	form   form
	wordTo int // where the word that was measured last ends

	// How far the structure of a document was followed, and whether that place
	// is inside a string.
	followed int
	inString bool
}

type form uint8

const (
	unknown form = iota
	prose
	document
)

// isDocument reports whether the text is one JSON document.
func (t *text) isDocument() bool {
	if t.form == unknown {
		t.form = prose
		start := strings.TrimLeft(t.s, " \t\r\n")
		if start != "" && strings.IndexByte(`{["-0123456789`, start[0]) >= 0 && json.Valid(unsafe.Slice(unsafe.StringData(t.s), len(t.s))) {
			t.form = document
		}
	}
	return t.form == document
}

// insideString reports whether byte i of a document stands in a string. Calls
// must not go backwards.
func (t *text) insideString(i int) bool {
	for ; t.followed < i; t.followed++ {
		switch t.s[t.followed] {
		case '"':
			t.inString = !t.inString
		case '\\':
			t.followed++
		}
	}
	return t.inString
}

// backslashes counts those that end right before i.
func backslashes(s string, i int) int {
	n := 0
	for n < i && s[i-1-n] == '\\' {
		n++
	}
	return n
}

// escapeBefore returns the length of the piece of a JSON escape sequence that
// ends right before i and goes on at i; 0 when i does not split one.
func escapeBefore(s string, i int) int {
	if backslashes(s, i)%2 == 1 {
		return 1
	}
	for n := 2; n <= 5 && n <= i && class[s[i-n+1]]&alnum != 0; n++ {
		if s[i-n] == '\\' && s[i-n+1] == 'u' && backslashes(s, i-n)%2 == 0 {
			return n
		}
	}
	return 0
}

// wordStart reports whether a word may start at i: the byte before is no letter
// or digit, or belongs to an escape sequence such as \n or \u0026.
func wordStart(s string, i int) bool {
	if i == 0 || class[s[i-1]]&alnum == 0 {
		return true
	}
	if i >= 2 && s[i-2] == '\\' {
		return strings.IndexByte("nrtbf", s[i-1]) >= 0
	}
	return i >= 6 && s[i-6] == '\\' && s[i-5] == 'u'
}

// word returns the end of the run of letters, digits, _ and - that holds i.
// Words are remembered, so that many prefixes within one cost nothing.
func (t *text) word(i int) int {
	if i >= t.wordTo {
		t.wordTo = run(t.s, i, word)
	}
	return t.wordTo
}

// The classes of bytes.
const (
	alnum  uint8 = 1 << iota // A-Z a-z 0-9
	word                     // alnum _ -
	bearer                   // what a bearer token may hold: word . ~ + / =
	stop                     // ends a value without quotes
	digit
	upper // A-Z 0-9
)

var class = func() (c [256]uint8) {
	set := func(chars string, bits uint8) {
		for i := range len(chars) {
			c[chars[i]] |= bits
		}
	}
	const digits, capitals, letters = "0123456789", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz"
	set(digits, alnum|word|bearer|digit|upper)
	set(capitals, alnum|word|bearer|upper)
	set(letters, alnum|word|bearer)
	set("_-", word|bearer)
	set(".~+/=", bearer)
	set("\"'`\\,;&)]}<>|\x7f", stop)
	for b := range 0x21 {
		c[b] |= stop
	}
	return c
}()

// run returns the end of the run of bytes of one class that starts at i.
func run(s string, i int, of uint8) int {
	for i < len(s) && class[s[i]]&of != 0 {
		i++
	}
	return i
}

// until returns where the next byte of one class stands, at or after i.
func until(s string, i int, of uint8) int {
	for i < len(s) && class[s[i]]&of == 0 {
		i++
	}
	return i
}
