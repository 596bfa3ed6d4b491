package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/invopop/jsonschema"
)

// The OpenRPC document, as far as we fill it: https://spec.open-rpc.org/1.3.2.
type (
	openDocument struct {
		OpenRPC    string         `json:"openrpc"`
		Info       openInfo       `json:"info"`
		Methods    []openMethod   `json:"methods"`
		Components openComponents `json:"components"`
	}
	openInfo struct {
		Title   string `json:"title"`
		Version string `json:"version"`
	}
	openMethod struct {
		Name           string           `json:"name"`
		Summary        string           `json:"summary,omitempty"`
		Description    string           `json:"description,omitempty"`
		ParamStructure string           `json:"paramStructure"`
		Params         []openDescriptor `json:"params"`
		Result         openDescriptor   `json:"result"`
		Scopes         []string         `json:"x-scopes"`
		ReadOnly       bool             `json:"x-readOnly,omitempty"`
		Strict         bool             `json:"x-strict,omitempty"`
		Ours           bool             `json:"x-ours,omitempty"`
		Fleet          bool             `json:"x-operators-only,omitempty"`
	}
	openDescriptor struct {
		Name        string             `json:"name"`
		Description string             `json:"description,omitempty"`
		Required    bool               `json:"required,omitempty"`
		Schema      *jsonschema.Schema `json:"schema"`
	}
	openComponents struct {
		Schemas map[string]*jsonschema.Schema `json:"schemas"`
	}
)

// schemaSet makes the schemas of many types that share their components.
type schemaSet struct {
	components map[string]*jsonschema.Schema
	texts      map[string][]byte       // of components, to compare them
	types      map[string]reflect.Type // of components
	results    map[string]bool         // names of components of results
}

func newSchemaSet() *schemaSet {
	return &schemaSet{
		components: map[string]*jsonschema.Schema{},
		texts:      map[string][]byte{},
		types:      map[string]reflect.Type{},
		results:    map[string]bool{},
	}
}

// componentPath is where the document has the schemas that others refer to.
const componentPath = "#/components/schemas/"

// of returns the schema of a type; structs inside it become components. The
// same struct requires other members in params than in results, so where it
// serves as both, the one of params is called NameInput. Therefore results
// come first.
func (c *schemaSet) of(t reflect.Type, params, strict bool) (*jsonschema.Schema, error) {
	types := map[string]reflect.Type{}
	namer := func(t reflect.Type) string {
		name := typeName(t)
		if name != "" && params && c.results[name] {
			name += "Input"
		}
		if name != "" && strict {
			name += "Strict"
		}
		types[name] = t
		return name
	}
	r := reflector(params, strict)
	r.Namer = namer
	s := r.ReflectFromType(t)
	definitions := s.Definitions
	s.Version, s.Definitions = "", nil
	for _, definition := range definitions {
		relocate(definition)
	}
	if name, ok := strings.CutPrefix(s.Ref, "#/$defs/"); ok {
		s = definitions[name]
		text, err := json.Marshal(definitions)
		if err != nil {
			return nil, fmt.Errorf("schema of %s: %w", t, err)
		}
		if !bytes.Contains(text, []byte(`"`+componentPath+name+`"`)) {
			delete(definitions, name) // nothing refers to the type itself
		}
	} else {
		relocate(s)
	}
	for name, definition := range definitions {
		text, err := json.Marshal(definition)
		if err != nil {
			return nil, fmt.Errorf("schema of %s: %w", t, err)
		}
		if other, ok := c.texts[name]; ok && !bytes.Equal(text, other) {
			return nil, fmt.Errorf("schema of %s: %s and %s share the name %s", t, types[name], c.types[name], name)
		}
		c.components[name], c.texts[name], c.types[name] = definition, text, types[name]
		if !params {
			c.results[name] = true
		}
	}
	return s, nil
}

// resolve follows references and looks behind null.
func (c *schemaSet) resolve(s *jsonschema.Schema) *jsonschema.Schema {
	if len(s.OneOf) == 2 && s.OneOf[1].Type == "null" {
		return c.resolve(s.OneOf[0])
	}
	if name, ok := strings.CutPrefix(s.Ref, componentPath); ok {
		return c.components[name]
	}
	return s
}

// relocate makes references lead to the components, and gives x-max-bytes,
// which a tag could only say as text, its type.
func relocate(s *jsonschema.Schema) {
	if s == nil {
		return
	}
	if name, ok := strings.CutPrefix(s.Ref, "#/$defs/"); ok {
		s.Ref = componentPath + name
	}
	if size, ok := s.Extras["x-max-bytes"].(string); ok {
		s.Extras["x-max-bytes"] = json.Number(size)
	}
	if s.Properties != nil {
		for p := s.Properties.Oldest(); p != nil; p = p.Next() {
			relocate(p.Value)
		}
	}
	for _, pattern := range s.PatternProperties {
		relocate(pattern)
	}
	relocate(s.Items)
	relocate(s.AdditionalProperties)
	for _, alternatives := range [][]*jsonschema.Schema{s.OneOf, s.AnyOf, s.AllOf} {
		for _, alternative := range alternatives {
			relocate(alternative)
		}
	}
}

// describe returns the params of a method, by name, and its result.
func (c *schemaSet) describe(m *Method) (params []openDescriptor, result *jsonschema.Schema, err error) {
	if result, err = c.of(m.result, false, false); err != nil {
		return nil, nil, err
	}
	s, err := c.of(m.params, true, m.Strict)
	if err != nil {
		return nil, nil, err
	}
	params = []openDescriptor{}
	if s.Properties == nil {
		return params, result, nil
	}
	for p := s.Properties.Oldest(); p != nil; p = p.Next() {
		params = append(params, openDescriptor{
			Name:        p.Key,
			Description: p.Value.Description,
			Required:    slices.Contains(s.Required, p.Key),
			Schema:      p.Value,
		})
	}
	return params, result, nil
}

// document makes the OpenRPC document of the registry.
func (r *Registry) document() (json.RawMessage, error) {
	d := openDocument{OpenRPC: "1.3.2", Info: openInfo{Title: "weir", Version: buildVersion()}, Methods: []openMethod{}}
	shared := newSchemaSet()
	for _, m := range r.methods {
		if _, err := shared.of(m.result, false, false); err != nil { // all results before any params
			return nil, err
		}
	}
	for _, m := range r.methods {
		params, result, err := shared.describe(m)
		if err != nil {
			return nil, err
		}
		d.Methods = append(d.Methods, openMethod{
			Name:           m.Name,
			Summary:        m.Summary,
			Description:    m.Description,
			ParamStructure: "by-name",
			Params:         params,
			Result:         openDescriptor{Name: "result", Schema: result},
			Scopes:         m.Scopes.Names(),
			ReadOnly:       m.ReadOnly,
			Strict:         m.Strict,
			Ours:           m.Ours,
			Fleet:          m.Fleet,
		})
	}
	d.Components.Schemas = shared.components
	return json.Marshal(d)
}

// buildVersion is that of the running binary, as far as it knows.
func buildVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}
