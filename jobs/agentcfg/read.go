package agentcfg

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// A reader takes the value of the member called field. The value is never null.
type reader func(field string, raw json.RawMessage) error

// readers are the members that an object can have.
type readers map[string]reader

// member is one name and value of a JSON object.
type member struct {
	name string
	raw  json.RawMessage
}

// members splits an object, in its order.
func members(field string, raw json.RawMessage) ([]member, error) {
	if !utf8.Valid(raw) {
		return nil, &FieldError{field, Invalid, "is not valid UTF-8"}
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return nil, &FieldError{field, Invalid, "must be an object"}
	}
	var found []member
	for dec.More() {
		name, err := dec.Token()
		if err != nil {
			return nil, &FieldError{field, Invalid, "is not valid JSON"}
		}
		m := member{name: name.(string)} // only a string can stand here
		if err := dec.Decode(&m.raw); err != nil {
			return nil, &FieldError{field, Invalid, "is not valid JSON"}
		}
		if slices.ContainsFunc(found, func(other member) bool { return other.name == m.name }) {
			return nil, &FieldError{join(field, m.name), Duplicate, "stands twice"}
		}
		found = append(found, m)
	}
	if _, err := dec.Token(); err != nil || dec.More() {
		return nil, &FieldError{field, Invalid, "is not valid JSON"}
	}
	return found, nil
}

// object reads an object, and refuses members that it does not have. A member
// that is null is as if it were absent.
func object(field string, raw json.RawMessage, has readers) error {
	found, err := members(field, raw)
	if err != nil {
		return err
	}
	for _, m := range found {
		read, known := has[m.name]
		if !known {
			return &FieldError{join(field, m.name), Unknown, "is not a member of an agent's configuration"}
		}
		if isNull(m.raw) {
			continue
		}
		if err := read(join(field, m.name), m.raw); err != nil {
			return err
		}
	}
	return nil
}

func join(field, name string) string {
	if len(name) > 64 || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
		name = fmt.Sprintf("%.64q", name) // an unknown one: keep the message readable
	}
	if field == "" {
		return name
	}
	return field + "." + name
}

func isNull(raw json.RawMessage) bool { return string(raw) == "null" }

// nested reads a member that is an object.
func nested(has readers) reader {
	return func(field string, raw json.RawMessage) error { return object(field, raw, has) }
}

// notBuilt refuses a member whose effect does not exist yet.
func notBuilt(what string) reader {
	return func(field string, _ json.RawMessage) error {
		return &FieldError{field, NotBuilt, "has no effect yet: " + what + " is not built"}
	}
}

// text reads a string that fits; rule says what fits.
func text[T ~string](to *T, rule string, fits func(string) bool) reader {
	return func(field string, raw json.RawMessage) error {
		var s string
		if json.Unmarshal(raw, &s) != nil {
			return &FieldError{field, Invalid, "must be a string"}
		}
		if !fits(s) {
			return &FieldError{field, Invalid, rule}
		}
		*to = T(s)
		return nil
	}
}

// optional reads into what is nil when the member is absent.
func optional(to **string, read func(*string) reader) reader {
	return func(field string, raw json.RawMessage) error {
		var s string
		if err := read(&s)(field, raw); err != nil {
			return err
		}
		*to = &s
		return nil
	}
}

// choice reads one of the built values; those of the contract that are not
// built yet are told from mistakes.
func choice[T ~string](to *T, built []T, later ...T) reader {
	return func(field string, raw json.RawMessage) error {
		var s T
		if json.Unmarshal(raw, &s) != nil {
			return &FieldError{field, Invalid, "must be a string"}
		}
		switch {
		case slices.Contains(built, s):
			*to = s
			return nil
		case slices.Contains(later, s):
			return notBuilt(string(s))(field, raw)
		}
		return &FieldError{field, Invalid, fmt.Sprintf("must be one of %q", built)}
	}
}

// integer reads a whole number from low to high.
func integer[T int | int64](to *T, low, high T) reader {
	return func(field string, raw json.RawMessage) error {
		var n int64
		if json.Unmarshal(raw, &n) != nil || n < int64(low) || n > int64(high) {
			return &FieldError{field, Invalid, fmt.Sprintf("must be a whole number from %d to %d", low, high)}
		}
		*to = T(n)
		return nil
	}
}

// emptyList accepts [] only.
func emptyList(what string) reader {
	return func(field string, raw json.RawMessage) error {
		var list []json.RawMessage
		if json.Unmarshal(raw, &list) != nil {
			return &FieldError{field, Invalid, "must be a list"}
		}
		if len(list) > 0 {
			return notBuilt(what)(field, raw)
		}
		return nil
	}
}

// falseOnly accepts false only.
func falseOnly(what string) reader {
	return func(field string, raw json.RawMessage) error {
		var on bool
		if json.Unmarshal(raw, &on) != nil {
			return &FieldError{field, Invalid, "must be true or false"}
		}
		if on {
			return notBuilt(what)(field, raw)
		}
		return nil
	}
}

// withoutNUL reports whether s can be stored.
func withoutNUL(s string) bool { return strings.IndexByte(s, 0) < 0 }

func provider(to *string) reader {
	return text(to, "must be 1 to 63 of a-z 0-9 _ -, and start with a letter or digit", providerPattern.MatchString)
}

func modelName(to *string) reader {
	return text(to, "must be 1 to 256 bytes without control characters", func(s string) bool {
		return s != "" && len(s) <= 256 && !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f })
	})
}

func secretName(to *string) reader {
	return text(to, "must be the name of a secret or of an environment variable, never its value", secretPattern.MatchString)
}

func instructions(to *string) reader {
	return func(field string, raw json.RawMessage) error {
		err := text(to, "must not hold U+0000", withoutNUL)(field, raw)
		if err == nil && len(*to) > maxInstructionsBytes {
			return &FieldError{field, TooLarge, fmt.Sprintf("is larger than %d bytes", maxInstructionsBytes)}
		}
		return err
	}
}

// httpURL reads where to send requests. Credentials do not belong there: they
// would be stored, and shown to whoever may read the configuration.
func httpURL(to *string) reader {
	return text(to, "must be an absolute http or https URL without user, password and fragment", func(s string) bool {
		u, err := url.Parse(s)
		return err == nil && len(s) <= maxURLBytes && (u.Scheme == "http" || u.Scheme == "https") &&
			u.Hostname() != "" && u.User == nil && u.Fragment == "" && !strings.Contains(s, "#") && validPort(u)
	})
}

// validPort reports whether u has no port, or one from 1 to 65535.
func validPort(u *url.URL) bool {
	if u.Port() == "" {
		return !strings.HasSuffix(u.Host, ":")
	}
	n, err := strconv.ParseUint(u.Port(), 10, 16)
	return err == nil && n > 0
}

// parameters reads any object. Whole numbers stay whole.
func parameters(to *map[string]any) reader {
	return func(field string, raw json.RawMessage) error {
		if _, err := members(field, raw); err != nil {
			return err
		}
		dec := json.NewDecoder(bytes.NewReader(raw))
		dec.UseNumber()
		var m map[string]any
		if err := dec.Decode(&m); err != nil {
			return &FieldError{field, Invalid, "must be an object"}
		}
		v, err := plain(m)
		if err != nil {
			return &FieldError{field, Invalid, err.Error()}
		}
		*to = v.(map[string]any)
		return nil
	}
}

// plain turns the json.Numbers in v into int64 or float64.
func plain(v any) (any, error) {
	var err error
	switch v := v.(type) {
	case map[string]any:
		for key := range v {
			if !withoutNUL(key) {
				return nil, errors.New("must not hold U+0000")
			}
			if v[key], err = plain(v[key]); err != nil {
				return nil, err
			}
		}
	case []any:
		for i := range v {
			if v[i], err = plain(v[i]); err != nil {
				return nil, err
			}
		}
	case string:
		if !withoutNUL(v) {
			return nil, errors.New("must not hold U+0000")
		}
	case json.Number:
		if n, err := v.Int64(); err == nil {
			return n, nil
		}
		f, err := v.Float64()
		if err != nil {
			return nil, errors.New("holds a number that is too large")
		}
		return f, nil
	}
	return v, nil
}

// schema reads the JSON Schema of an arguments object and compiles it. It loads
// nothing from outside.
func schema(to *json.RawMessage, compiled **jsonschema.Schema) reader {
	return func(field string, raw json.RawMessage) error {
		invalid := func(message string) error { return &FieldError{field, Invalid, message} }
		top, err := members(field, raw)
		if err != nil {
			return err
		}
		if escapedNUL.Match(raw) {
			return invalid("must not hold U+0000")
		}
		for _, m := range top {
			if m.name == "type" && !allowsObject(m.raw) {
				return invalid(`must describe an object: its type is not "object"`)
			}
		}
		var buf bytes.Buffer
		if err := json.Compact(&buf, raw); err != nil {
			return invalid("is not valid JSON")
		}
		*compiled, err = Compile(buf.Bytes())
		if err != nil {
			return invalid(fmt.Sprintf("is not a valid JSON Schema: %.500s", strings.Join(strings.Fields(err.Error()), " ")))
		}
		*to = buf.Bytes()
		return nil
	}
}

// escapedNUL finds \u0000, but not an escaped backslash followed by u0000.
var escapedNUL = regexp.MustCompile(`(^|[^\\])(\\\\)*\\u0000`)

// allowsObject reports whether a schema's type is "object", or a list with it.
// Other mistakes in it are the compiler's to find.
func allowsObject(raw json.RawMessage) bool {
	var one string
	if json.Unmarshal(raw, &one) == nil {
		return one == "object"
	}
	var list []string
	return json.Unmarshal(raw, &list) != nil || slices.Contains(list, "object")
}

// Compile compiles a JSON Schema, draft 2020-12 unless it names another. A
// reference to anything outside of it is an error.
func Compile(raw []byte) (*jsonschema.Schema, error) {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	const here = "weir:///parameters"
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	c.UseLoader(nothing{})
	if err := c.AddResource(here, doc); err != nil {
		return nil, err
	}
	return c.Compile(here)
}

// nothing loads no schemas: neither files of the machine nor URLs.
type nothing struct{}

func (nothing) Load(url string) (any, error) {
	return nil, fmt.Errorf("references outside of the schema are not followed: %.200s", url)
}
