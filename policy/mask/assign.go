package mask

import (
	"bytes"
	"strings"
)

// kind says what an assignment's name promises about its value.
type kind uint8

const (
	ordinary      kind = iota
	password           // whatever it is, it is secret
	secret             // the same, but a number is none
	token              // an API key or token: long, and no plain words
	authorization      // a scheme and a token
)

// assignment finds the value of an assignment to a telling name, whose : or =
// is at i: password=…, api_key: …, "secret":"…", Authorization: Bearer ….
func (t *text) assignment(i int) (start, end int, with string) {
	s := t.s
	of, quote, depth := t.name(i)
	if of == ordinary {
		return 0, 0, ""
	}
	k := i + 1
	if k < len(s) {
		switch {
		case s[k] == '=' || s[k] == '~' || s[i] == ':' && s[k] == ':':
			return 0, 0, "" // a comparison, a path; := is seen at its =
		case s[i] == '=' && s[k] == '>':
			k++
		}
	}
	k = blanks(s, k)
	if k < len(s) && s[k] == '[' && s[i] == ':' {
		k++ // a list, or a header as Go prints it
	}
	if k == len(s) {
		return 0, 0, ""
	}
	member := quote == '"' && depth == 0 // of a JSON object, if this is JSON

	opening := k
	for opening < len(s) && s[opening] == '\\' {
		opening++
	}
	n := opening - k
	quoted := opening < len(s) && (s[opening] == '"' || s[opening] == '\'' || s[opening] == '`') && n&(n+1) == 0
	switch {
	case quoted && s[opening] == '"' && n == 0 && !member:
		// Not the opening quote of a value, but the closing one of the string.
		if t.isDocument() || opening+1 == len(s) || strings.IndexByte(",:}] \r\n", s[opening+1]) >= 0 {
			return 0, 0, ""
		}
	case !quoted && quote == '"':
		// The value is a number, true, false, null, an object or a list: only
		// a number can be a password, and a number it must stay.
		end = run(s, k, bearer)
		if number(s[k:end]) {
			if of != password || s[k:end] == "0" {
				return 0, 0, ""
			}
			return k, end, "0"
		}
		if member && t.isDocument() {
			return 0, 0, ""
		}
	}
	if quoted {
		start = opening + 1
		if end = t.closing(opening, n); end < 0 {
			return 0, 0, ""
		}
	} else {
		if placeholderAt(s, k) {
			return 0, 0, ""
		}
		start, end = k, until(s, k, stop)
	}
	if n := strings.Index(s[start:end], beginPEM); n >= 0 {
		end = start + n // the block is found at its own place, to its own end
	}
	if of == authorization {
		start, end = t.authorization(start, end, quoted)
	} else if ordinaryValue(s, start, end, of, quoted, s[i] == ':' || blanks(s, i+1) > i+1) {
		return 0, 0, ""
	}
	return start, end, hidden
}

// name classifies the name before the : or = at i. quote is the quote that
// closes it, 0 for none, behind depth backslashes.
func (t *text) name(i int) (of kind, quote byte, depth int) {
	s, j := t.s, i
	if s[i] == '=' && j > 0 && s[j-1] == ':' {
		j--
	}
	for j > 0 && (s[j-1] == ' ' || s[j-1] == '\t') && i-j < 8 {
		j--
	}
	if j > 0 && s[j-1] == ']' {
		j-- // environ["PASSWORD"] = …
	}
	if j > 0 && (s[j-1] == '"' || s[j-1] == '\'' || s[j-1] == '`') {
		j--
		quote, depth = s[j], backslashes(s, j)
		j -= depth
	}
	if j < 3 || depth&(depth+1) != 0 { // not 0, 1, 3, 7: the name ends with a backslash
		return ordinary, 0, 0
	}
	switch uint32(s[j-3]|0x20)<<16 | uint32(s[j-2]|0x20)<<8 | uint32(s[j-1]|0x20) {
	case 'o'<<16 | 'r'<<8 | 'd', 's'<<16 | 'w'<<8 | 'd', 'p'<<16 | 'w'<<8 | 'd', // password, passwd, pwd
		'a'<<16 | 's'<<8 | 'e', 'a'<<16 | 's'<<8 | 's', // passphrase, dbpass
		'r'<<16 | 'e'<<8 | 't', 'k'<<16 | 'e'<<8 | 'n', 'k'<<16 | 'e'<<8 | 'y', // secret, token, apikey
		'i'<<16 | 'o'<<8 | 'n': // authorization
	default:
		return ordinary, 0, 0
	}
	// The name backwards, in lower case and without separators: api_key, apiKey
	// and API-KEY are one.
	var buf [48]byte
	at := len(buf)
	for j > 0 && at > 0 && (class[s[j-1]]&word != 0 || s[j-1] == '.') {
		if j--; class[s[j]]&alnum != 0 {
			at--
			buf[at] = s[j] | 0x20
		}
	}
	of = classify(buf[at:])
	if of == password && bytes.HasSuffix(buf[at:], []byte("pwd")) {
		if k := blanks(s, i+1); k < len(s) && (s[k] == '/' || s[k] == '~') {
			return ordinary, 0, 0 // the working directory
		}
	}
	return of, quote, depth
}

// classify takes a name in lower case without separators.
func classify(name []byte) kind {
	ends := func(suffixes ...string) bool {
		for _, suffix := range suffixes {
			if n := len(name) - len(suffix); n >= 0 && string(name[n:]) == suffix {
				return true
			}
		}
		return false
	}
	switch {
	case ends("password", "passwd", "pwd", "passphrase", "dbpass", "userpass", "smtppass", "mysqlpass", "redispass", "adminpass", "rootpass", "mailpass", "pgpass"):
		return password
	case ends("authorization"):
		return authorization
	case ends("apikeysecret", "pullsecret"): // names of secrets
		return ordinary
	case ends("secret"):
		return secret
	case ends("apikey", "accesskey", "secretkey", "privatekey", "accountkey", "authkey", "encryptionkey", "signingkey", "sharedkey", "masterkey"):
		return token
	case ends("pagetoken", "nexttoken", "continuationtoken", "synctoken", "prevtoken", "previoustoken", "resumetoken", "cancellationtoken",
		"maxtoken", "mintoken", "pertoken", "eostoken", "bostoken", "padtoken", "unktoken", "masktoken", "septoken", "clstoken", "stoptoken"):
		return ordinary // a place in a list, or a piece of text
	case ends("token"):
		return token
	}
	return ordinary
}

// closing returns the end of the value whose opening quote stands at open,
// behind n backslashes; -1 when it opens nothing, since no quote like it follows
// on the line.
func (t *text) closing(open, n int) int {
	s, q := t.s, t.s[open]
	for j := open + 1; j < len(s); j++ {
		switch c := s[j]; c {
		case '"', q:
			// JSON inside JSON inside JSON: the quotes of the levels stand
			// behind 0, 1, 3, 7, … backslashes, plus pairs, fours, eights, …
			k := backslashes(s, j)
			if c == q && k%(2*n+2) == n {
				return j - n
			}
			for level := 0; c == '"' && (level < n || q != '"' && level <= n && t.isDocument()); level = 2*level + 1 {
				if k%(2*level+2) == level {
					return j - level // an outer string ends: the value was cut off
				}
			}
		case '\n':
			if q != '"' {
				return -1
			}
			return j
		}
	}
	if q != '"' {
		return -1
	}
	return len(s)
}

// authorization returns the credential of an Authorization header's value. Where
// the scheme is not known, it must look like one.
func (t *text) authorization(start, end int, quoted bool) (int, int) {
	s := t.s
	scheme := start
	for scheme < end && (class[s[scheme]]&alnum != 0 || s[scheme] == '-') {
		scheme++
	}
	credential := blanks(s, scheme)
	switch {
	case credential > scheme && (!quoted || credential < end) && knownScheme(s[start:scheme]):
		if start = credential; !quoted {
			end = until(s, start, stop)
		}
	case end-start <= wordy && !random(s[start:end]) && !lettersAndDigits(s[start:end]):
		return 0, 0
	}
	if placeholder(s[start:end]) || !quoted && placeholderAt(s, start) {
		return 0, 0
	}
	return start, end
}

func knownScheme(s string) bool {
	for _, scheme := range [...]string{"bearer", "basic", "token", "apikey", "digest", "negotiate", "ntlm", "key", "bot", "AWS4-HMAC-SHA256"} {
		if strings.EqualFold(s, scheme) {
			return true
		}
	}
	return false
}

// wordy is the length above which no value is an ordinary one. That also bounds
// what is read again after a value was let pass.
const wordy = 512

// ordinaryValue reports whether the value s[start:end] of a telling name is
// none the less no credential. loose means that the assignment may as well be a
// sentence or a line of code: name: value, or name = value.
func ordinaryValue(s string, start, end int, of kind, quoted, loose bool) bool {
	v := s[start:end]
	if len(v) > wordy {
		return false
	}
	if v == "" || placeholder(v) || literal(v) {
		return true
	}
	if !quoted && loose {
		v = strings.TrimRight(v, ".!?:*")
	}
	if number(v) {
		return of != password && len(v) < 8 || !quoted && loose && len(v) < 4
	}
	path := strings.HasPrefix(v, "/") || strings.HasPrefix(v, "./") || strings.HasPrefix(v, "~/")
	if of == token || of == secret {
		if strings.Contains(v, "://") || path && !random(v) {
			return true
		}
	}
	if call := strings.IndexAny(v, "(["); !quoted && call > 0 && words(v[:call]) {
		return true // code: get_secret(…
	}
	if !words(v) {
		return of == token && len(v) < 6 || v == ""
	}
	if of == token {
		return len(v) < 20 || strings.ContainsAny(v, "._")
	}
	if quoted {
		return false
	}
	last := end == len(s) || strings.IndexByte(" \t<>|'`", s[end]) < 0
	if strings.ContainsAny(v, "._") || plainWord(v) {
		return true // code: config.password
	}
	return loose && !last // "password: must be …"
}

// words reports whether s holds only letters and what joins them.
func words(s string) bool {
	for i := range len(s) {
		if c := class[s[i]]; c&digit != 0 || c&word == 0 && s[i] != '.' {
			return false
		}
	}
	return s != ""
}

// number reports whether s looks like a JSON number.
func number(s string) bool {
	digits := 0
	for i := range len(s) {
		switch c := s[i]; {
		case class[c]&digit != 0:
			digits++
		case strings.IndexByte("+-.eE", c) < 0:
			return false
		}
	}
	return digits > 0
}

func oneOf(s string, list []string) bool {
	for _, word := range list {
		if strings.EqualFold(s, word) {
			return true
		}
	}
	return false
}

var (
	literals   = []string{"true", "false", "null", "nil", "none", "undefined", "string", "redacted", "masked", "hidden", "removed"}
	plainWords = []string{
		"required", "optional", "invalid", "missing", "incorrect", "wrong", "expired", "empty", "changed", "reset", "set", "unset",
		"str", "text", "bytes", "number", "int", "any", "password", "secret", "token", "yes", "no", "ok", "not", "is", "must", "your", "the",
	}
)

func literal(s string) bool   { return oneOf(s, literals) }
func plainWord(s string) bool { return oneOf(s, plainWords) }

// placeholder reports whether s stands for a value instead of being one.
func placeholder(s string) bool {
	if s == "" {
		return false
	}
	for _, pair := range [...][2]string{{"${", "}"}, {"$(", ")"}, {"{", "}"}, {"#{", "}"}, {"<", ">"}, {`\u003c`, `\u003e`}, {"[", "]"}, {"(", ")"}, {"%(", ")s"}} {
		if strings.HasPrefix(s, pair[0]) && strings.HasSuffix(s, pair[1]) && len(s) >= len(pair[0])+len(pair[1]) {
			return true
		}
	}
	switch s[0] {
	case '$', ':', '@':
		return len(s) > 1 && (words(s[1:]) || len(s) <= 3) || s[0] == '$' && constant(s[1:])
	case '%':
		return len(s) <= 3 || s[len(s)-1] == '%' && constant(s[1:len(s)-1])
	}
	return strings.Trim(s, "*xX.•…-_?") == ""
}

// placeholderAt is placeholder for a value without quotes that starts at i. A
// brace that nothing follows is one too: it opens a block of code.
func placeholderAt(s string, i int) bool {
	line := s[i:min(len(s), i+128)]
	for _, pair := range [...][2]string{{"${", "}"}, {"$(", ")"}, {"{", "}"}, {"#{", "}"}, {"<", ">"}, {"%(", ")s"}} {
		if strings.HasPrefix(line, pair[0]) && strings.Contains(line, pair[1]) {
			return true
		}
	}
	return strings.HasPrefix(line, "{") && (len(line) == 1 || class[line[1]]&stop != 0)
}

// constant reports whether s is spelled like an environment variable.
func constant(s string) bool {
	for i := range len(s) {
		if class[s[i]]&upper == 0 && s[i] != '_' {
			return false
		}
	}
	return s != ""
}
