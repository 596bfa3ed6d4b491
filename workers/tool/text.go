package tool

import (
	"bytes"
	"encoding/json"
	"strings"
	"unicode/utf8"
)

const replacement = "\uFFFD"

// marshal is json.Marshal without escaping <, > and &, for what always encodes.
func marshal(v any) json.RawMessage {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic("tool: " + err.Error())
	}
	return bytes.TrimSuffix(buf.Bytes(), []byte("\n"))
}

// cleanText replaces what cannot be stored: invalid UTF-8 and U+0000 (RC-18).
func cleanText(s string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(s, replacement), "\x00", replacement)
}

// cleanJSON does the same for a JSON document, and for lone surrogates. It may
// change b.
func cleanJSON(b []byte) json.RawMessage {
	if !utf8.Valid(b) {
		b = bytes.ToValidUTF8(b, []byte(replacement))
	}
	for i := 0; i < len(b); {
		n := bytes.IndexByte(b[i:], '\\')
		if n < 0 {
			break
		}
		i += n
		if i+6 > len(b) || b[i+1] != 'u' {
			i += 2
			continue
		}
		switch unit := hex4(b[i+2 : i+6]); {
		case unit >= 0xD800 && unit < 0xDC00 && i+12 <= len(b) && b[i+6] == '\\' && b[i+7] == 'u' && hex4(b[i+8:i+12])&^0x3FF == 0xDC00:
			i += 12 // a pair
			continue
		case unit == 0, unit >= 0xD800 && unit < 0xE000:
			copy(b[i+2:], "fffd")
		}
		i += 6
	}
	return b
}

// hex4 reads four hex digits, which are known to be such.
func hex4(b []byte) (n uint32) {
	for _, c := range b {
		n <<= 4
		switch {
		case c <= '9':
			n |= uint32(c - '0')
		default:
			n |= uint32(c|0x20-'a') + 10
		}
	}
	return n
}

// excerpt returns the start of s, at most n bytes of it, with a mark when
// something is missing.
func excerpt(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return cut(s, n-len("…")) + "…"
}

// cut returns at most n bytes of s, without splitting a rune.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}
