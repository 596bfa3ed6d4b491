package contract

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"
)

func loaded(t *testing.T) *Contract {
	t.Helper()
	c, err := Load()
	require.NoError(t, err)
	return c
}

func TestMethods(t *testing.T) {
	t.Parallel()
	c := loaded(t)
	var names []string
	reference := 0
	for _, m := range c.Methods {
		names = append(names, m.Name)
		require.Equal(t, m.Namespace, m.Name[:strings.Index(m.Name, ".")])
		require.NotNil(t, m.Params, m.Name)
		require.NotNil(t, m.Result, m.Name)
		for _, scope := range m.Scopes {
			require.Contains(t, []string{"rpc", "admin"}, scope, m.Name)
		}
		require.Equal(t, m.Transport == "capability", len(m.Scopes) == 0, m.Name)
		if !m.Ours {
			reference++
		}
	}
	require.Equal(t, 191, reference)
	slices.Sort(names)
	require.Len(t, slices.Compact(slices.Clone(names)), len(names), "a method twice")
}

func TestNotRegisteredByName(t *testing.T) {
	t.Parallel()
	c := loaded(t)
	require.Nil(t, c.Method("context.inspect"))
	require.Nil(t, c.Method("context.searchByConversation"))
}

func TestPendingIsSortedAndKnown(t *testing.T) {
	t.Parallel()
	c := loaded(t)
	require.True(t, slices.IsSorted(c.Pending))
	require.Len(t, slices.Compact(slices.Clone(c.Pending)), len(c.Pending))
	for _, name := range c.Pending {
		require.NotNil(t, c.Method(name), name)
	}
}

func TestReferencesLeadSomewhere(t *testing.T) {
	t.Parallel()
	c := loaded(t)
	var walk func(where string, s *Schema)
	walk = func(where string, s *Schema) {
		if s == nil {
			return
		}
		require.NotNil(t, c.Resolve(s), "%s: %s", where, s.Ref)
		for name, p := range s.Properties {
			walk(where+"."+name, p)
		}
		for _, name := range s.Required {
			if len(s.Properties) > 0 {
				require.Contains(t, s.Properties, name, where)
			}
		}
		walk(where+"[]", s.Items)
		for _, alternatives := range [][]*Schema{s.OneOf, s.AnyOf} {
			for i, a := range alternatives {
				walk(fmt.Sprintf("%s/%d", where, i), a)
			}
		}
	}
	for _, m := range c.Methods {
		walk(m.Name+" params", m.Params)
		walk(m.Name+" result", m.Result)
		walk(m.Name+" proposed params", m.ProposedParams)
		walk(m.Name+" proposed result", m.ProposedResult)
	}
	for name, s := range c.Definitions {
		walk(name, s)
	}
}

func TestSchemasCompile(t *testing.T) {
	t.Parallel()
	methods, definitions, err := Documents()
	require.NoError(t, err)
	compiler := jsonschema.NewCompiler()
	shared, err := jsonschema.UnmarshalJSON(bytes.NewReader(definitions))
	require.NoError(t, err)
	require.NoError(t, compiler.AddResource("weir:///definitions.json", shared))
	entries, err := jsonschema.UnmarshalJSON(bytes.NewReader(methods))
	require.NoError(t, err)
	for _, entry := range entries.([]any) {
		entry := entry.(map[string]any)
		for _, part := range []string{"params", "result", "proposed_params", "proposed_result"} {
			if entry[part] == nil {
				continue
			}
			url := fmt.Sprintf("weir:///%s.%s", entry["method"], part)
			require.NoError(t, compiler.AddResource(url, entry[part]))
			_, err := compiler.Compile(url)
			require.NoError(t, err, url)
		}
	}
}
