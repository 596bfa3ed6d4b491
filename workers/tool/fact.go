package tool

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/weir-run/weir/policy/mask"
)

// Fact is what a memory_write asks to remember.
type Fact struct {
	Key   string
	Value json.RawMessage // compact; null leaves an empty fact (RC-99)
	Kind  string          // "" for none
}

// maxFactBytes bounds a fact's value, as compact JSON (RC-103).
const maxFactBytes = 16 << 10

// internalPrefix starts the keys that are never shown to a model (RC-93).
const internalPrefix = "__"

var (
	factKeyPattern  = regexp.MustCompile(`^[A-Za-z0-9_.:-]{1,128}$`) // RC-103
	factKindPattern = regexp.MustCompile(`^[A-Za-z0-9_.:-]{1,64}$`)
)

// ParseFactRead returns the key that a memory_read asks for.
func ParseFactRead(args json.RawMessage) (string, *Failure) {
	a, f := members(args, "key")
	if f != nil {
		return "", f
	}
	return factKey(a)
}

// ParseFactWrite returns the fact that a memory_write asks for. A value that
// looks like a credential, or that has the key of one, is secret_refused; then
// the arguments must not be stored as they are, see RedactFactWrite.
func ParseFactWrite(args json.RawMessage) (Fact, *Failure) {
	a, f := members(args, "key", "value", "kind")
	if f != nil {
		return Fact{}, f
	}
	var fact Fact
	if fact.Key, f = factKey(a); f != nil {
		return Fact{}, f
	}
	value, ok := a["value"]
	if !ok {
		return Fact{}, invalid("value is required; null empties a fact")
	}
	if kind, ok := a["kind"]; ok {
		if json.Unmarshal(kind, &fact.Kind) != nil || !factKindPattern.MatchString(fact.Kind) {
			return Fact{}, invalid("kind must be 1 to 64 of A-Z a-z 0-9 _ . : -")
		}
	}
	var buf bytes.Buffer
	if err := json.Compact(&buf, value); err != nil {
		return Fact{}, invalid("value is not valid JSON")
	}
	if fact.Value = cleanJSON(buf.Bytes()); len(fact.Value) > maxFactBytes {
		return Fact{}, &Failure{Kind: TooLarge, Message: fmt.Sprintf("the value is larger than %d bytes of JSON", maxFactBytes)}
	}
	if secretFact(fact) {
		return Fact{}, &Failure{Kind: SecretRefused, Message: "the value looks like a credential; facts must not hold keys, passwords or tokens"}
	}
	return fact, nil
}

// RedactFactWrite returns the arguments of a refused memory_write without their
// value. A value is refused because of its key as well as of its own looks, so
// that masking alone would let it through into events and logs (RC-104).
func RedactFactWrite(args json.RawMessage) json.RawMessage {
	var a struct {
		Key   string `json:"key,omitempty"`
		Value string `json:"value"`
		Kind  string `json:"kind,omitempty"`
	}
	_ = json.Unmarshal(args, &a) // what cannot be read is left out
	if mask.LooksLikeCredential(a.Key) || len(a.Key) > 128 {
		a.Key = "***"
	}
	if !factKindPattern.MatchString(a.Kind) || mask.LooksLikeCredential(a.Kind) {
		a.Kind = ""
	}
	a.Value = "***"
	return marshal(a)
}

// members splits an arguments object that may have the named members only.
func members(args json.RawMessage, names ...string) (map[string]json.RawMessage, *Failure) {
	var a map[string]json.RawMessage
	if json.Unmarshal(args, &a) != nil || a == nil {
		return nil, invalid("the arguments must be a JSON object")
	}
	for name := range a {
		if !slices.Contains(names, name) {
			return nil, invalid(fmt.Sprintf("there is no argument %.64q", name))
		}
	}
	return a, nil
}

func factKey(args map[string]json.RawMessage) (string, *Failure) {
	var key string
	switch raw, ok := args["key"]; {
	case !ok:
		return "", invalid("key is required")
	case json.Unmarshal(raw, &key) != nil || !factKeyPattern.MatchString(key):
		return "", invalid("key must be 1 to 128 of A-Z a-z 0-9 _ . : -")
	case strings.HasPrefix(key, internalPrefix): // RC-94
		return "", &Failure{Kind: Denied, Message: "keys that start with __ are internal"}
	}
	return key, nil
}

// secretFact reports whether a fact holds something like a credential. Key and
// value are looked at as one member of an object, so that {"password":"x"} is
// one, and decoded first, so that escapes hide nothing.
func secretFact(fact Fact) bool {
	var value any
	dec := json.NewDecoder(bytes.NewReader(fact.Value))
	dec.UseNumber()
	if dec.Decode(&value) != nil {
		return true // cannot be: it was compacted
	}
	if mask.LooksLikeCredential(string(marshal(map[string]any{fact.Key: value}))) || mask.LooksLikeCredential(fact.Kind) {
		return true
	}
	var inStrings func(v any) bool
	inStrings = func(v any) bool {
		switch v := v.(type) {
		case string:
			return mask.LooksLikeCredential(v)
		case []any:
			for _, v := range v {
				if inStrings(v) {
					return true
				}
			}
		case map[string]any:
			for key, v := range v {
				if mask.LooksLikeCredential(key) || inStrings(v) {
					return true
				}
			}
		}
		return false
	}
	return inStrings(value)
}
