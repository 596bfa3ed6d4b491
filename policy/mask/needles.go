package mask

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"math/bits"
	"net/url"
	"slices"
	"strings"
)

// shortest is the length below which a secret is not looked for.
const shortest = 6

// needles finds any of many fixed strings by the algorithm of Wu and Manber
// (1994): the last three bytes of a window as long as the shortest string say
// by how much the window can move on without missing one.
type needles struct {
	all   []needle // longest first
	width int      // length of the shortest
	shift []uint8  // by hash of three bytes
	first []int32  // by hash: index into all of the first candidate + 1
	then  []int32  // index of the candidate after this one + 1
	drop  uint     // how far the hash is shifted right
}

type needle struct {
	text string
	// raw marks a string that cannot stand like this inside a JSON string: it
	// holds quotes, backslashes or control characters that would be escaped.
	raw bool
}

// newNeedles returns nil when there is nothing to look for.
func newNeedles(secrets []string) *needles {
	n := &needles{}
	for _, secret := range secrets {
		if secret = strings.TrimSpace(secret); len(secret) >= shortest {
			n.add(secret)
		}
	}
	if len(n.all) == 0 {
		return nil
	}
	slices.SortFunc(n.all, func(a, b needle) int {
		if len(a.text) != len(b.text) {
			return len(b.text) - len(a.text)
		}
		return strings.Compare(a.text, b.text)
	})
	n.all = slices.Compact(n.all)
	n.index()
	return n
}

// add takes in the forms in which a secret can appear.
func (n *needles) add(secret string) {
	escaped := func(s string, html bool) string {
		var buf bytes.Buffer
		enc := json.NewEncoder(&buf)
		enc.SetEscapeHTML(html)
		_ = enc.Encode(s) // a string always encodes
		return strings.TrimSuffix(buf.String(), "\n")[1 : buf.Len()-2]
	}
	raw := strings.ContainsFunc(secret, func(r rune) bool { return r < ' ' || r == '"' || r == '\\' })
	n.all = append(n.all, needle{secret, raw})
	also := func(form string) {
		if form != secret {
			n.all = append(n.all, needle{form, false})
		}
	}
	also(url.QueryEscape(secret))
	also(url.PathEscape(secret))
	plain, html := secret, secret
	for range 4 { // JSON inside JSON inside …, as JavaScript, Go and PHP write it
		plain, html = escaped(plain, false), escaped(html, true)
		also(plain)
		also(html)
		also(strings.ReplaceAll(plain, "/", `\/`))
	}
	// Base64 of a longer text that holds the secret depends on where in a group
	// of three bytes it starts. The characters shared with its neighbours vary.
	for offset := range 3 {
		padded := append(make([]byte, offset, offset+len(secret)), secret...)
		from, to := (offset*8+5)/6, len(padded)*8/6
		n.all = append(n.all,
			needle{base64.RawStdEncoding.EncodeToString(padded)[from:to], false},
			needle{base64.RawURLEncoding.EncodeToString(padded)[from:to], false})
	}
}

func (n *needles) index() {
	n.width = min(len(n.all[len(n.all)-1].text), 200) // a shift has 8 bits
	size := max(4096, 4*len(n.all)*n.width)
	log := uint(bits.Len(uint(size - 1)))
	n.drop = 32 - log
	n.shift = bytes.Repeat([]byte{uint8(n.width - 2)}, 1<<log)
	n.first = make([]int32, 1<<log)
	n.then = make([]int32, len(n.all))
	for i := len(n.all) - 1; i >= 0; i-- { // so that the longest comes first
		s := n.all[i].text
		for end := 3; end <= n.width; end++ {
			h := n.hash(s, end)
			n.shift[h] = min(n.shift[h], uint8(n.width-end))
			if end == n.width {
				n.then[i], n.first[h] = n.first[h], int32(i+1)
			}
		}
	}
}

// hash is of the three bytes that end before end.
func (n *needles) hash(s string, end int) uint32 {
	v := uint32(s[end-3]) | uint32(s[end-2])<<8 | uint32(s[end-1])<<16
	return v * 2654435761 >> n.drop // Knuth's multiplicative hashing
}

// next returns the leftmost secret at or after from, joined with those that
// overlap it.
func (n *needles) next(t *text, from int) (match, bool) {
	m, found := n.find(t, from, len(t.s))
	for at := m.start; found && m.with == hidden; {
		more, overlaps := n.find(t, at+1, m.end)
		if !overlaps || more.with != hidden {
			break
		}
		at, m.end = more.start, max(m.end, more.end)
	}
	return m, found
}

// find returns the leftmost secret that starts at or after from and before to.
func (n *needles) find(t *text, from, to int) (match, bool) {
	s := t.s
	for end := from + n.width; end <= len(s) && end-n.width < to; {
		h := n.hash(s, end)
		if skip := n.shift[h]; skip > 0 {
			end += int(skip)
			continue
		}
		start := end - n.width
		for i := n.first[h]; i > 0; i = n.then[i-1] {
			if p := n.all[i-1]; strings.HasPrefix(s[start:], p.text) {
				if m, ok := t.cut(p, start); ok {
					m.start = max(m.start, from)
					return m, true
				}
			}
		}
		end++
	}
	return match{}, false
}

// cut returns what to replace for p found at start, so that a document stays
// one; false when p only seems to stand there.
func (t *text) cut(p needle, start int) (match, bool) {
	end := start + len(p.text)
	if !t.isDocument() {
		return match{start, end, hidden}, true
	}
	switch {
	case p.raw:
		return match{}, false
	case !t.insideString(start):
		// A number, or several values that together look like a secret.
		number := func(c byte) bool { return class[c]&digit != 0 || strings.IndexByte("+-.eE", c) >= 0 }
		for _, c := range []byte(p.text) {
			if !number(c) {
				return match{}, false
			}
		}
		for start > 0 && number(t.s[start-1]) {
			start--
		}
		for end < len(t.s) && number(t.s[end]) {
			end++
		}
		return match{start, end, "0"}, true
	case p.text[0] == '\\':
		return match{start, end, hidden}, backslashes(t.s, start)%2 == 0
	}
	return match{start - escapeBefore(t.s, start), end, hidden}, true
}
