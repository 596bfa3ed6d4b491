package api

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/invopop/jsonschema"
)

// WriteReference writes the reference page of the methods, in Markdown:
// docs/methods.md. The same registry always makes the same page.
func (r *Registry) WriteReference(w io.Writer) error {
	p := referencePage{shared: newSchemaSet()}
	p.line("# Methods")
	p.line("")
	p.line("This page is made from the declarations in `api/`. Members of params that are not marked *required* may be left out.")
	p.line("Numbers are in the unit that their name says; characters are Unicode code points.")
	methods := slices.SortedStableFunc(slices.Values(r.methods), func(a, b *Method) int {
		return cmp.Compare(a.namespace(), b.namespace()) // as declared within one
	})
	for _, m := range methods { // all results before any params
		if _, err := p.shared.of(m.result, false, false); err != nil {
			return err
		}
	}
	namespace := ""
	for _, m := range methods {
		if m.namespace() != namespace {
			namespace = m.namespace()
			p.line("")
			p.line("## %s", namespace)
		}
		if err := p.method(m); err != nil {
			return err
		}
	}
	_, err := io.WriteString(w, p.text.String())
	return err
}

// namespace is the name up to the first dot.
func (m *Method) namespace() string {
	namespace, _, _ := strings.Cut(m.Name, ".")
	return namespace
}

type referencePage struct {
	text   strings.Builder
	shared *schemaSet
}

func (p *referencePage) line(format string, args ...any) {
	fmt.Fprintf(&p.text, format+"\n", args...)
}

func (p *referencePage) method(m *Method) error {
	params, result, err := p.shared.describe(m)
	if err != nil {
		return fmt.Errorf("method %s: %w", m.Name, err)
	}
	p.line("")
	p.line("### %s", m.Name)
	p.line("")
	p.line("%s", m.Summary)
	if m.Description != "" {
		p.line("")
		p.line("%s", m.Description)
	}
	p.line("")
	p.line("%s", m.facts())
	if len(params) > 0 {
		p.table("Parameter")
		for _, param := range params {
			p.rows(param.Name, param.Schema, param.Required, nil)
		}
	}
	p.table("Result")
	if result = p.shared.resolve(result); result.Properties == nil {
		p.rows("(all)", result, true, nil)
		return nil
	}
	p.members("", result, nil)
	return nil
}

// facts are the marks of a method.
func (m *Method) facts() string {
	scopes := "none: not for tokens"
	if m.Scopes != 0 {
		scopes = "`" + strings.Join(m.Scopes.Names(), "`, `") + "`"
	}
	facts := []string{"Scopes: " + scopes + "."}
	if m.ReadOnly {
		facts = append(facts, "Reads only.")
	}
	if m.Strict {
		facts = append(facts, "Refuses unknown parameters.")
	}
	if m.Fleet {
		facts = append(facts, "For tokens of tenant `default` only.")
	}
	if m.Ours {
		facts = append(facts, "Not in the published reference.")
	}
	return strings.Join(facts, " ")
}

func (p *referencePage) table(title string) {
	p.line("")
	p.line("| %s | Type | |", title)
	p.line("|---|---|---|")
}

// rows writes a value and what is inside it. The types in within are being
// written: one that holds itself is not written again.
func (p *referencePage) rows(path string, s *jsonschema.Schema, required bool, within []string) {
	about := s.Description
	value := p.shared.resolve(s)
	if about == "" {
		about = value.Description
	}
	var remarks []string
	if required {
		remarks = append(remarks, "*required*")
	}
	remarks = append(remarks, bounds(value)...)
	if about != "" {
		remarks = append(remarks, about)
	}
	inner := s // what has members: the value or, of a list, its items
	if value.Type == "array" {
		inner = value.Items
		path += "[]"
	}
	again := inner.Ref != "" && slices.Contains(within, inner.Ref)
	if again {
		remarks = append(remarks, "As above.")
	}
	p.line("| `%s` | %s | %s |", strings.TrimSuffix(path, "[]"), p.typeOf(value), strings.ReplaceAll(strings.Join(remarks, " · "), "|", `\|`))
	if again {
		return
	}
	p.members(path+".", p.shared.resolve(inner), append(slices.Clone(within), inner.Ref))
}

func (p *referencePage) members(prefix string, s *jsonschema.Schema, within []string) {
	if s.Properties == nil {
		return
	}
	for m := s.Properties.Oldest(); m != nil; m = m.Next() {
		p.rows(prefix+m.Key, m.Value, slices.Contains(s.Required, m.Key), within)
	}
}

// typeOf names the type of a value.
func (p *referencePage) typeOf(s *jsonschema.Schema) string {
	switch {
	case len(s.Enum) > 0:
		var values []string
		for _, v := range s.Enum {
			values = append(values, fmt.Sprintf("`%v`", v))
		}
		return strings.Join(values, ", ")
	case s.Type == "array":
		return "list of " + p.typeOf(p.shared.resolve(s.Items))
	case s.Type == "":
		return "any"
	case s.Format != "":
		return s.Type + " (" + s.Format + ")"
	default:
		return s.Type
	}
}

// bounds says what is allowed, in the order of the keywords.
func bounds(s *jsonschema.Schema) []string {
	var texts []string
	say := func(format string, args ...any) { texts = append(texts, fmt.Sprintf(format, args...)) }
	if s.Default != nil {
		say("default `%v`", s.Default)
	}
	if s.Minimum != "" {
		say("at least %s", s.Minimum)
	}
	if s.ExclusiveMinimum != "" {
		say("above %s", s.ExclusiveMinimum)
	}
	if s.Maximum != "" {
		say("at most %s", s.Maximum)
	}
	if s.ExclusiveMaximum != "" {
		say("below %s", s.ExclusiveMaximum)
	}
	for _, length := range []struct {
		text  string
		limit *uint64
	}{
		{"at least %d characters", s.MinLength},
		{"at most %d characters", s.MaxLength},
		{"at least %d items", s.MinItems},
		{"at most %d items", s.MaxItems},
	} {
		if length.limit != nil {
			say(length.text, *length.limit)
		}
	}
	if size, ok := s.Extras["x-max-bytes"]; ok {
		say("at most %v bytes", size)
	}
	if s.Pattern != "" {
		say("`%s`", s.Pattern)
	}
	return texts
}
