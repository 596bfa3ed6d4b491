// Package scan walks JSON text in place: one pass, nothing built and nothing
// copied. The framing of JSON-RPC and the decoder of params share it, so that
// both agree on what a member is.
//
// A Scanner checks the grammar of what it passes over. It does not check UTF-8,
// which is one call for a whole text (utf8.Valid).
package scan

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/bits"
	"strings"
	"unicode/utf8"
)

// MaxDepth is the deepest nesting of objects and arrays that is read: far more
// than any shape of the contract has, far less than a stack can hold.
const MaxDepth = 128

// Errors of a Scanner; Pos says where. After one the Scanner is of no more use.
var (
	ErrSyntax = errors.New("not JSON")
	ErrDepth  = errors.New("nested too deeply")
)

// Kind is the kind of a JSON value, named after its first byte.
type Kind byte

// The kinds. Invalid stands for the end of the text and for bytes that begin
// no value.
const (
	Invalid Kind = 0
	Object  Kind = '{'
	Array   Kind = '['
	String  Kind = '"'
	Number  Kind = '0'
	True    Kind = 't'
	False   Kind = 'f'
	Null    Kind = 'n'
)

// Scanner reads one JSON text from its start to its end. The zero value reads
// the empty text.
type Scanner struct {
	// Repair makes the Scanner overwrite, in the text itself, each escape of
	// U+0000 and of a lone surrogate with that of U+FFFD, which is as long
	// (RC-18).
	Repair bool

	data  []byte
	pos   int
	depth int
}

// New returns a Scanner at the start of data.
func New(data []byte) Scanner {
	return Scanner{data: data}
}

// Pos is the offset of the next byte to read.
func (s *Scanner) Pos() int {
	return s.pos
}

// Kind skips white space and says what comes next, without reading it.
func (s *Scanner) Kind() Kind {
	s.space()
	if s.pos >= len(s.data) {
		return Invalid
	}
	switch c := s.data[s.pos]; c {
	case '{', '[', '"', 't', 'f', 'n':
		return Kind(c)
	case '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9':
		return Number
	default:
		return Invalid
	}
}

// End checks that nothing but white space is left.
func (s *Scanner) End() error {
	s.space()
	if s.pos < len(s.data) {
		return ErrSyntax
	}
	return nil
}

// Open enters the object or array that comes next. Key or Item leaves it.
func (s *Scanner) Open() error {
	if k := s.Kind(); k != Object && k != Array {
		return ErrSyntax
	}
	if s.depth == MaxDepth {
		return ErrDepth
	}
	s.depth++
	s.pos++
	return nil
}

// Key reads the next member's name, as it is written, and stops before its
// value. It returns nil at the end of the object, which it leaves.
func (s *Scanner) Key(first bool) ([]byte, error) {
	more, err := s.next('}', first)
	if err != nil || !more {
		return nil, err
	}
	name, err := s.str()
	if err != nil {
		return nil, err
	}
	s.space()
	if s.pos >= len(s.data) || s.data[s.pos] != ':' {
		return nil, ErrSyntax
	}
	s.pos++
	return name, nil
}

// Item stops before the next item of an array and reports whether there is
// one. It leaves the array at its end.
func (s *Scanner) Item(first bool) (bool, error) {
	return s.next(']', first)
}

// Value reads the next value and returns it as it is written.
func (s *Scanner) Value() ([]byte, error) {
	kind := s.Kind()
	start := s.pos
	var err error
	switch kind {
	case Object:
		err = s.object()
	case Array:
		err = s.array()
	case String:
		return s.str()
	case Number:
		err = s.number()
	case True:
		err = s.literal("true")
	case False:
		err = s.literal("false")
	case Null:
		err = s.literal("null")
	default:
		err = ErrSyntax
	}
	if err != nil {
		return nil, err
	}
	return s.data[start:s.pos], nil
}

// Strip reads the object that comes next and returns it without the members
// whose name starts with prefix, which it overwrites with spaces.
func (s *Scanner) Strip(prefix byte) ([]byte, error) {
	s.space()
	start := s.pos
	if err := s.Open(); err != nil {
		return nil, err
	}
	stripped := -1 // where the member to overwrite begins
	for first := true; ; first = false {
		more, err := s.next('}', first)
		if err != nil {
			return nil, err
		}
		if stripped >= 0 {
			end := s.pos
			if !more {
				end-- // the closing brace stays
				s.uncomma(stripped)
			}
			s.blank(stripped, end)
			stripped = -1
		}
		if !more {
			return s.data[start:s.pos], nil
		}
		begin := s.pos
		name, err := s.str()
		if err != nil {
			return nil, err
		}
		if startsWith(name, prefix) {
			stripped = begin
		}
		s.space()
		if s.pos >= len(s.data) || s.data[s.pos] != ':' {
			return nil, ErrSyntax
		}
		s.pos++
		if _, err := s.Value(); err != nil {
			return nil, err
		}
	}
}

// uncomma overwrites the comma that precedes offset, if one does.
func (s *Scanner) uncomma(offset int) {
	for i := offset - 1; i >= 0; i-- {
		switch s.data[i] {
		case ' ', '\t', '\n', '\r':
		case ',':
			s.data[i] = ' '
			return
		default:
			return
		}
	}
}

func (s *Scanner) blank(from, to int) {
	for i := from; i < to; i++ {
		s.data[i] = ' '
	}
}

func startsWith(name []byte, prefix byte) bool {
	switch {
	case len(name) < 3:
		return false
	case name[1] == '\\':
		unquoted := Unquote(name)
		return unquoted != "" && unquoted[0] == prefix
	default:
		return name[1] == prefix
	}
}

// next stops before the next member or item, or leaves at the closing byte.
func (s *Scanner) next(closing byte, first bool) (bool, error) {
	s.space()
	if s.pos >= len(s.data) {
		return false, ErrSyntax
	}
	if s.data[s.pos] == closing {
		s.pos++
		s.depth--
		return false, nil
	}
	if !first {
		if s.data[s.pos] != ',' {
			return false, ErrSyntax
		}
		s.pos++
		s.space()
	}
	if closing == '}' && (s.pos >= len(s.data) || s.data[s.pos] != '"') {
		return false, ErrSyntax
	}
	return true, nil
}

func (s *Scanner) object() error {
	if err := s.Open(); err != nil {
		return err
	}
	for first := true; ; first = false {
		name, err := s.Key(first)
		if err != nil || name == nil {
			return err
		}
		if _, err := s.Value(); err != nil {
			return err
		}
	}
}

func (s *Scanner) array() error {
	if err := s.Open(); err != nil {
		return err
	}
	for first := true; ; first = false {
		more, err := s.Item(first)
		if err != nil || !more {
			return err
		}
		if _, err := s.Value(); err != nil {
			return err
		}
	}
}

func (s *Scanner) space() {
	for s.pos < len(s.data) {
		switch s.data[s.pos] {
		case ' ', '\t', '\n', '\r':
			s.pos++
		default:
			return
		}
	}
}

func (s *Scanner) literal(word string) error {
	if !bytes.HasPrefix(s.data[s.pos:], []byte(word)) {
		return ErrSyntax
	}
	s.pos += len(word)
	return nil
}

// number reads -? (0 | [1-9][0-9]*) (. [0-9]+)? ([eE] [+-]? [0-9]+)?.
func (s *Scanner) number() error {
	if s.data[s.pos] == '-' {
		s.pos++
	}
	if s.at('0') {
		s.pos++
	} else if !s.digits() {
		return ErrSyntax
	}
	if s.at('.') {
		s.pos++
		if !s.digits() {
			return ErrSyntax
		}
	}
	if s.at('e') || s.at('E') {
		s.pos++
		if s.at('+') || s.at('-') {
			s.pos++
		}
		if !s.digits() {
			return ErrSyntax
		}
	}
	return nil
}

func (s *Scanner) at(c byte) bool {
	return s.pos < len(s.data) && s.data[s.pos] == c
}

func (s *Scanner) digits() bool {
	start := s.pos
	for s.pos < len(s.data) && s.data[s.pos]-'0' <= 9 {
		s.pos++
	}
	return s.pos > start
}

// str reads the string that begins at pos, quotes included.
func (s *Scanner) str() ([]byte, error) {
	start := s.pos
	s.pos++
	for {
		s.pos = plain(s.data, s.pos)
		if s.pos >= len(s.data) {
			return nil, ErrSyntax
		}
		switch s.data[s.pos] {
		case '"':
			s.pos++
			return s.data[start:s.pos], nil
		case '\\':
			if err := s.escape(); err != nil {
				return nil, err
			}
		default:
			return nil, ErrSyntax // a control character
		}
	}
}

// plain returns the offset of the first byte from i on that is a quote, a
// backslash or a control character. It looks at eight bytes at a time: texts
// and images are long.
func plain(data []byte, i int) int {
	const (
		ones  = 0x0101010101010101
		highs = 0x8080808080808080
	)
	for ; i+8 <= len(data); i += 8 {
		x := binary.LittleEndian.Uint64(data[i:])
		quote, slash := x^('"'*ones), x^('\\'*ones)
		// The lowest bit set is exact; a borrow only disturbs those above it.
		found := ((x-' '*ones) & ^x | (quote-ones) & ^quote | (slash-ones) & ^slash) & highs
		if found != 0 {
			return i + bits.TrailingZeros64(found)/8
		}
	}
	for ; i < len(data); i++ {
		if c := data[i]; c == '"' || c == '\\' || c < ' ' {
			break
		}
	}
	return i
}

// escape reads the escape that begins at pos, and with a high surrogate the
// low one after it.
func (s *Scanner) escape() error {
	if s.pos+1 >= len(s.data) {
		return ErrSyntax
	}
	switch s.data[s.pos+1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		s.pos += 2
		return nil
	case 'u':
	default:
		return ErrSyntax
	}
	r, ok := hex4(s.data, s.pos)
	if !ok {
		return ErrSyntax
	}
	switch {
	case isHigh(r):
		if low, ok := hex4(s.data, s.pos+6); ok && isLow(low) {
			s.pos += 12
			return nil
		}
		s.replace()
	case isLow(r), r == 0:
		s.replace()
	}
	s.pos += 6
	return nil
}

func (s *Scanner) replace() {
	if s.Repair {
		copy(s.data[s.pos:], `\ufffd`)
	}
}

func isHigh(r rune) bool { return r >= 0xd800 && r < 0xdc00 }
func isLow(r rune) bool  { return r >= 0xdc00 && r < 0xe000 }

// hex4 reads the \uXXXX at offset i.
func hex4(data []byte, i int) (rune, bool) {
	if i+6 > len(data) || data[i] != '\\' || data[i+1] != 'u' {
		return 0, false
	}
	var r rune
	for _, c := range data[i+2 : i+6] {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c >= 'a' && c <= 'f':
			c -= 'a' - 10
		case c >= 'A' && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}

// Unquote returns the text of a string as Key and Value return it. A lone
// surrogate becomes U+FFFD.
func Unquote(raw []byte) string {
	raw = raw[1 : len(raw)-1]
	slash := bytes.IndexByte(raw, '\\')
	if slash < 0 {
		return string(raw)
	}
	var b strings.Builder
	b.Grow(len(raw))
	for slash >= 0 {
		b.Write(raw[:slash])
		raw = raw[slash:]
		switch c := raw[1]; c {
		case 'u':
			r, size := unescape(raw)
			b.WriteRune(r)
			raw = raw[size:]
		case 'b':
			b.WriteByte('\b')
			raw = raw[2:]
		case 'f':
			b.WriteByte('\f')
			raw = raw[2:]
		case 'n':
			b.WriteByte('\n')
			raw = raw[2:]
		case 'r':
			b.WriteByte('\r')
			raw = raw[2:]
		case 't':
			b.WriteByte('\t')
			raw = raw[2:]
		default:
			b.WriteByte(c)
			raw = raw[2:]
		}
		slash = bytes.IndexByte(raw, '\\')
	}
	b.Write(raw)
	return b.String()
}

// unescape returns the character of the \uXXXX that raw begins with, or of the
// pair of them, and its size in raw.
func unescape(raw []byte) (rune, int) {
	r, _ := hex4(raw, 0)
	switch {
	case isHigh(r):
		if low, ok := hex4(raw, 6); ok && isLow(low) {
			return (r-0xd800)<<10 | (low - 0xdc00) + 0x10000, 12
		}
		return utf8.RuneError, 6
	case isLow(r):
		return utf8.RuneError, 6
	default:
		return r, 6
	}
}
