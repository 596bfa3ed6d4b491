// Package contract holds the product's copy of the JSON-RPC contract: what
// methods there are and their shapes. It is changed first; a test in package
// api compares the methods that exist with it.
//
// methods.json has an entry for each method, definitions.json the shapes they
// share, and pending.txt names the methods that are still to come: it only
// ever gets shorter. "ours" marks what the published reference does not have.
package contract

import (
	"bufio"
	"bytes"
	"embed"
	"encoding/json"
	"fmt"
	"strings"
)

//go:embed methods.json definitions.json pending.txt
var files embed.FS

// Contract is the whole of it.
type Contract struct {
	Methods     []*Method // in the order of the reference, ours at the end
	Definitions map[string]*Schema
	// Pending names the methods that do not exist yet, sorted.
	Pending []string
}

// Method is the entry of one method.
type Method struct {
	Name      string   `json:"method"`
	Namespace string   `json:"namespace"` // Name up to the first dot
	Scopes    []string `json:"scopes"`    // "rpc", "admin", both or none
	Transport string   `json:"transport"` // "gateway" or "capability"
	Params    *Schema  `json:"params"`
	Result    *Schema  `json:"result"`
	// ProposedParams and ProposedResult give shapes that the reference leaves
	// open; nil where it does not.
	ProposedParams *Schema `json:"proposed_params"`
	ProposedResult *Schema `json:"proposed_result"`
	Notes          string  `json:"notes"`
	Ours           bool    `json:"ours"`
	ReadOnly       bool    `json:"readOnly"` // scope read may call it if admin may
}

// Schema is the part of JSON Schema that the contract uses.
type Schema struct {
	Ref         string `json:"$ref"` // definitions.json#/Name
	Description string `json:"description"`
	Type        Types  `json:"type"`
	Const       any    `json:"const"`
	Enum        []any  `json:"enum"`
	Default     any    `json:"default"`

	Properties map[string]*Schema `json:"properties"`
	Required   []string           `json:"required"`
	// AdditionalProperties is false, true or a schema; nil if not said.
	AdditionalProperties json.RawMessage `json:"additionalProperties"`
	Items                *Schema         `json:"items"`
	OneOf                []*Schema       `json:"oneOf"`
	AnyOf                []*Schema       `json:"anyOf"`

	Minimum   *float64 `json:"minimum"`
	Maximum   *float64 `json:"maximum"`
	MinLength *float64 `json:"minLength"`
	MaxLength *float64 `json:"maxLength"`
	MinItems  *float64 `json:"minItems"`
	MaxItems  *float64 `json:"maxItems"`
	Pattern   string   `json:"pattern"`

	Open     bool `json:"open"`     // the reference leaves the shape open
	Inferred bool `json:"inferred"` // the reference names the member, not its type
	Ours     bool `json:"ours"`
}

// Types are the values of the keyword type, which is a string or a list.
type Types []string

// UnmarshalJSON reads both forms.
func (t *Types) UnmarshalJSON(data []byte) error {
	var one string
	if json.Unmarshal(data, &one) == nil {
		*t = Types{one}
		return nil
	}
	return json.Unmarshal(data, (*[]string)(t))
}

// Load reads the contract.
func Load() (*Contract, error) {
	c := new(Contract)
	if err := load("methods.json", &c.Methods); err != nil {
		return nil, err
	}
	if err := load("definitions.json", &c.Definitions); err != nil {
		return nil, err
	}
	pending, err := files.ReadFile("pending.txt")
	if err != nil {
		return nil, err
	}
	for lines := bufio.NewScanner(bytes.NewReader(pending)); lines.Scan(); {
		if name := strings.TrimSpace(lines.Text()); name != "" {
			c.Pending = append(c.Pending, name)
		}
	}
	return c, nil
}

func load(name string, v any) error {
	text, err := files.ReadFile(name)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, v); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// Resolve follows the reference of s, if it is one. It returns nil for a
// reference to nothing.
func (c *Contract) Resolve(s *Schema) *Schema {
	if s == nil || s.Ref == "" {
		return s
	}
	return c.Definitions[strings.TrimPrefix(s.Ref, "definitions.json#/")]
}

// Method returns the entry of a method, or nil.
func (c *Contract) Method(name string) *Method {
	for _, m := range c.Methods {
		if m.Name == name {
			return m
		}
	}
	return nil
}

// Documents returns methods.json and definitions.json as they are, for
// compilers of JSON Schema.
func Documents() (methods, definitions []byte, err error) {
	if methods, err = files.ReadFile("methods.json"); err != nil {
		return nil, nil, err
	}
	if definitions, err = files.ReadFile("definitions.json"); err != nil {
		return nil, nil, err
	}
	return methods, definitions, nil
}
