package mask

import (
	"encoding/base64"
	"strings"
)

// A gram is three bytes in a row that a credential cannot do without, each from
// a class of its own: gram[c] says, for each of eight grams, whether c may be
// its third byte (bits 0 to 7), its second (8 to 15) and its first (16 to 23).
// Text that holds none of them is clean, and nearly all text holds none.
const (
	dashGram       uint32 = 1 << iota // the end of sk-, xoxb-, glpat-, …, and ---
	underscoreGram                    // the end of ghp_, github_pat_, …
	nameGram                          // the end of password=, token:, …
	quotedNameGram                    // the end of password":, token =, …
	urlGram                           // ://
	jwtGram                           // eyJ
	cloudGram                         // AKI, ASI, AIz; and @tc, @un of a MySQL DSN
	schemeGram                        // Bea, bas
)

var gram = func() (g [256]uint32) {
	for _, def := range []struct {
		bit                  uint32
		first, second, third string
	}{
		{dashGram, "sxpadrbt-", "kbaprst-", "-"},
		{underscoreGram, "hahwpevs", "pousrhtftmce", "_"},
		{nameGram, "rwseoRWSEO", "destnyDESTNY", ":="},
		{quotedNameGram, "destnyDESTNY\"'`] \t:\\", "\"'`] \t:", ":="},
		{urlGram, ":", "/\\", "/"},
		{jwtGram, "e", "y", "J"},
		{cloudGram, "A@", "KSItu", "Izcn"},
		{schemeGram, "bB", "eEaA", "aAsS"},
	} {
		for shift, chars := range []string{2: def.first, 1: def.second, 0: def.third} {
			for i := range len(chars) {
				g[chars[i]] |= def.bit << (8 * shift)
			}
		}
	}
	return g
}()

// next returns the leftmost credential at or after from, by its looks.
func (t *text) next(from int) (match, bool) {
	s := t.s
	for i := max(from, 2); i < len(s); {
		if i+8 <= len(s) {
			c := s[i-2 : i+8]
			g0, g1, g2, g3, g4 := gram[c[0]], gram[c[1]], gram[c[2]], gram[c[3]], gram[c[4]]
			g5, g6, g7, g8, g9 := gram[c[5]], gram[c[6]], gram[c[7]], gram[c[8]], gram[c[9]]
			if uint8(g0>>16&(g1>>8)&g2|g1>>16&(g2>>8)&g3|g2>>16&(g3>>8)&g4|g3>>16&(g4>>8)&g5|
				g4>>16&(g5>>8)&g6|g5>>16&(g6>>8)&g7|g6>>16&(g7>>8)&g8|g7>>16&(g8>>8)&g9) == 0 {
				i += 8
				continue
			}
		}
		for to := min(i+8, len(s)); i < to; i++ {
			grams := gram[s[i-2]] >> 16 & (gram[s[i-1]] >> 8) & gram[s[i]]
			if uint8(grams) == 0 {
				continue
			}
			if m, found := t.at(i, grams); found && m.start >= from {
				return m, true
			}
		}
	}
	return match{}, false
}

// at returns the credential that the grams whose third byte is at i belong to.
func (t *text) at(i int, grams uint32) (m match, found bool) {
	m.with = hidden
	if grams&(nameGram|quotedNameGram) != 0 {
		m.start, m.end, m.with = t.assignment(i)
	}
	if grams&dashGram != 0 {
		if strings.HasPrefix(t.s[i-2:], beginPEM) {
			m.start, m.end = t.pem(i - 2)
		} else {
			m.start, m.end = t.dashed(i)
		}
	}
	if grams&underscoreGram != 0 {
		m.start, m.end = t.underscored(i)
	}
	if grams&urlGram != 0 {
		m.start, m.end = t.url(i - 2)
	}
	if grams&jwtGram != 0 {
		m.start, m.end = t.jwt(i)
	}
	if grams&cloudGram != 0 {
		if t.s[i-2] == '@' {
			m.start, m.end = t.dsn(i - 2)
		} else {
			m.start, m.end = t.cloudKey(i - 2)
		}
	}
	if grams&schemeGram != 0 {
		m.start, m.end = t.scheme(i - 2)
	}
	return m, m.end > m.start
}

// The methods below return the piece to hide, or 0, 0 for none. At least two
// bytes stand before the last byte of a gram.

// dashed finds API keys whose prefix ends with the dash at i.
func (t *text) dashed(i int) (start, end int) {
	before := t.s[max(i-5, 0):i]
	switch t.s[i-1] {
	case 'k': // OpenAI sk-… and sk-proj-…, Anthropic sk-ant-…, OpenRouter sk-or-…
		if t.s[i-2] == 's' {
			return t.key(i-2, i+1, word, 12)
		}
	case 'b', 'a', 'p', 'r', 's': // Slack
		if strings.HasSuffix(before[:len(before)-1], "xox") || strings.HasSuffix(before, "xapp") {
			return t.key(i-4, i+1, word, 10)
		}
	case 't': // GitLab
		for _, prefix := range [...]string{"glpat", "gldt", "glrt", "glcbt", "glptt"} {
			if strings.HasSuffix(before, prefix) {
				return t.key(i-len(prefix), i+1, word, 16)
			}
		}
	}
	return 0, 0
}

// underscored finds API keys whose prefix ends with the underscore at i.
func (t *text) underscored(i int) (start, end int) {
	before := t.s[max(i-10, 0):i]
	switch before[len(before)-2:] {
	case "hp", "ho", "hu", "hs", "hr": // GitHub ghp_…
		if len(before) >= 3 && before[len(before)-3] == 'g' {
			return t.key(i-3, i+1, alnum, 16)
		}
	case "at": // GitHub, Shopify
		if before == "github_pat" {
			return t.key(i-len("github_pat"), i+1, word, 16)
		}
		if strings.HasSuffix(before, "shpat") {
			return t.key(i-len("shpat"), i+1, alnum, 16)
		}
	case "hf": // Hugging Face
		return t.key(i-len("hf"), i+1, alnum, 20)
	case "wt": // weir
		return t.key(i-len("wt"), i+1, word, 20)
	case "pm": // npm
		if strings.HasSuffix(before, "npm") {
			return t.key(i-len("npm"), i+1, alnum, 20)
		}
	case "ec": // Standard Webhooks, whose secret is base64
		if strings.HasSuffix(before, "whsec") {
			return t.key(i-len("whsec"), i+1, bearer, 16)
		}
	case "ve", "st": // Stripe
		for _, prefix := range [...]string{"sk_live", "sk_test", "rk_live", "rk_test"} {
			if strings.HasSuffix(before, prefix) {
				return t.key(i-len(prefix), i+1, alnum, 10)
			}
		}
	}
	return 0, 0
}

// key measures a key that has its prefix at start and its secret part at i: a
// run of at least atLeast bytes of a class that looks random.
func (t *text) key(start, i int, of uint8, atLeast int) (int, int) {
	if !wordStart(t.s, start) {
		return 0, 0
	}
	var end int
	if of == word {
		end = t.word(i)
	} else {
		end = run(t.s, i, of)
	}
	if end-i < atLeast || !random(t.s[i:end]) {
		return 0, 0
	}
	return start, end
}

// random reports whether s holds a piece that no word is: 10 letters and digits
// in a row with a digit among them, or 20 letters.
func random(s string) bool {
	s = s[:min(len(s), 256)] // the rest decides nothing, and costs
	length, digits := 0, 0
	for i := range len(s) {
		c := class[s[i]]
		if c&alnum == 0 {
			length, digits = 0, 0
			continue
		}
		length++
		if c&digit != 0 {
			digits++
		}
		if length >= 20 || length >= 10 && digits > 0 {
			return true
		}
	}
	return false
}

// cloudKey finds AWS access key ids and Google API keys at i.
func (t *text) cloudKey(i int) (start, end int) {
	if len(t.s)-i < 20 || !wordStart(t.s, i) {
		return 0, 0
	}
	switch t.s[i : i+4] {
	case "AKIA", "ASIA":
		if end = run(t.s, i, upper); end-i == 20 && (end == len(t.s) || class[t.s[end]]&alnum == 0) {
			return i, end
		}
	case "AIza":
		if end = t.word(i); end-i >= 30 {
			return i, end
		}
	}
	return 0, 0
}

// jwt finds a JSON Web Token whose eyJ, base64 of {" , ends at i.
func (t *text) jwt(i int) (start, end int) {
	s, start := t.s, i-2
	if s[start:i] != "ey" || !wordStart(s, start) || start > 0 && (s[start-1] == '-' || s[start-1] == '_') {
		return 0, 0
	}
	end = start
	for range 2 {
		from := end
		if end = run(s, from, word); end-from < 6 || end == len(s) || s[end] != '.' {
			return 0, 0
		}
		end++
	}
	return start, run(s, end, word)
}

// The marks of PEM.
const (
	beginPEM = "-----BEGIN "
	endPEM   = "-----END "
)

// pem finds the block of a private key that begins at i, with its marks.
func (t *text) pem(i int) (start, end int) {
	s := t.s
	label := s[i+len(beginPEM):]
	label = label[:min(len(label), 64)]
	n := strings.Index(label, "-----")
	if n < 0 || !strings.Contains(label[:n], "PRIVATE KEY") {
		return 0, 0
	}
	body := i + len(beginPEM) + n + len("-----")
	// A body is made of base64, headers and line ends, which may be escaped. A
	// block that was cut off has no end mark: then it goes on to the first space.
	space := 0
	for end = body; end < len(s); end++ {
		switch c := s[end]; {
		case c == '-' && strings.HasPrefix(s[end:], endPEM):
			if n := strings.Index(s[end+len(endPEM):min(len(s), end+128)], "-----"); n >= 0 {
				return i, end + len(endPEM) + n + len("-----")
			}
			continue
		case c == '-' && strings.HasPrefix(s[end:], beginPEM):
		case c == '\\':
			k := end
			for k < len(s) && s[k] == '\\' {
				k++
			}
			if k < len(s) && strings.IndexByte("nrtu/", s[k]) >= 0 {
				end = k
				continue
			}
		case c == ' ' && space == 0 && s[end-1] != ':':
			space = end
			continue
		case class[c]&bearer != 0 || strings.IndexByte(" \t\r\n:,", c) >= 0:
			continue
		}
		break
	}
	if space > 0 {
		end = space
	}
	if end-body < 16 {
		return 0, 0 // the mark alone
	}
	return i, end
}

// scheme finds the token after the word Bearer or Basic at i, outside of an
// Authorization header, which is an assignment.
func (t *text) scheme(i int) (start, end int) {
	s := t.s
	if len(s)-i < len("basic ")+8 || !wordStart(s, i) {
		return 0, 0
	}
	switch s[i+1] | 0x20 {
	case 'e':
		if start = after(s, i, "bearer"); start > 0 && !placeholderAt(s, start) {
			end = run(s, start, bearer)
			end -= trailingDots(s[start:end])
			if v := s[start:end]; random(v) || len(v) >= 8 && lettersAndDigits(v) {
				return start, end
			}
		}
	case 'a':
		if start = after(s, i, "basic"); start > 0 {
			end = run(s, start, bearer)
			if userAndPassword(s[start:end]) {
				return start, end
			}
		}
	}
	return 0, 0
}

// after returns where the next word starts when name, in any case, and spaces
// stand at i; else 0.
func after(s string, i int, name string) int {
	k := i + len(name)
	if k >= len(s) || !strings.EqualFold(s[i:k], name) {
		return 0
	}
	if next := blanks(s, k); next > k {
		return next
	}
	return 0
}

// blanks returns the end of the spaces and tabs at i.
func blanks(s string, i int) int {
	for i < len(s) && (s[i] == ' ' || s[i] == '\t') {
		i++
	}
	return i
}

// trailingDots counts the dots of a sentence that end s.
func trailingDots(s string) int { return len(s) - len(strings.TrimRight(s, ".")) }

// lettersAndDigits reports whether s is made of both, and of nothing else.
func lettersAndDigits(s string) bool {
	letters, digits := 0, 0
	for i := range len(s) {
		switch c := class[s[i]]; {
		case c&digit != 0:
			digits++
		case c&alnum != 0:
			letters++
		default:
			return false
		}
	}
	return letters > 0 && digits > 0
}

// userAndPassword reports whether s is the base64 of a text like user:password.
func userAndPassword(s string) bool {
	s = strings.TrimRight(s, "=")
	if len(s) < 4 {
		return false
	}
	var src, dst [256]byte
	n := copy(src[:], s) // the start is enough
	if n == len(src) {
		n -= n % 4
	}
	encoding := base64.RawStdEncoding
	if strings.ContainsAny(s, "-_") {
		encoding = base64.RawURLEncoding
	}
	n, err := encoding.Decode(dst[:], src[:n])
	if err != nil {
		return false
	}
	colon := false
	for _, c := range dst[:n] {
		if c < ' ' || c == 0x7f {
			return false
		}
		colon = colon || c == ':'
	}
	return colon
}

// dsn finds the password of a MySQL data source name, user:password@tcp(host),
// whose @ is at i.
func (t *text) dsn(i int) (start, end int) {
	s := t.s
	rest := s[i+1:]
	if !strings.HasPrefix(rest, "tcp(") && !strings.HasPrefix(rest, "unix(") {
		return 0, 0
	}
	start = i
	for start > 0 && i-start < 256 && s[start-1] > ' ' && strings.IndexByte("\"'`\\", s[start-1]) < 0 {
		start--
	}
	colon := strings.IndexByte(s[start:i], ':')
	if colon < 0 || placeholder(s[start+colon+1:i]) {
		return 0, 0
	}
	return start + colon + 1, i
}

// url finds the password of a URL whose :// is at i, or the token that stands
// for user and password.
func (t *text) url(i int) (start, end int) {
	s := t.s
	from := i + 1
	for range 2 { // a slash may be escaped in JSON
		if from < len(s) && s[from] == '\\' {
			from++
		}
		if from >= len(s) || s[from] != '/' {
			return 0, 0
		}
		from++
	}
	at, slash, late := 0, 0, 0 // late is an @ behind a slash
scan:
	for j := from; j < min(len(s), from+512); j++ {
		switch c := s[j]; {
		case c == '@' && slash == 0:
			at = j
		case c == '@' && late == 0:
			late = j
		case c == '/' || c == '?' || c == '#':
			if slash == 0 {
				slash = j
			}
		case c == '\\':
			if j+1 == len(s) || s[j+1] != '/' && s[j+1] != 'u' {
				break scan
			}
		case c <= ' ' || c == '"' || c == '\'' || c == '`' || c == '<' || c == '>':
			break scan
		}
	}
	if at == 0 && late > 0 { // a password that holds a slash, unless it is a port
		colon := strings.IndexByte(s[from:slash], ':')
		if colon < 0 || s[from] == '[' || run(s, from+colon+1, digit) == slash {
			return 0, 0
		}
		at = late
	}
	if at == 0 {
		return 0, 0
	}
	start = from
	if colon := strings.IndexByte(s[from:at], ':'); colon >= 0 {
		start += colon + 1
	} else if at-from < 20 || !random(s[from:at]) {
		return 0, 0
	}
	if start == at || placeholder(s[start:at]) {
		return 0, 0
	}
	return start, at
}
