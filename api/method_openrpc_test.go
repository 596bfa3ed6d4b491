package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	validation "github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"
)

// treeNode holds itself and is in params and results.
type treeNode struct {
	Name     string     `json:"name" jsonschema:"required,maxLength=20" jsonschema_description:"What it is called: a|b."`
	Children []treeNode `json:"children,omitempty" jsonschema:"maxItems=9"`
}

type treeParams struct {
	Root  treeNode `json:"root" jsonschema:"required" jsonschema_description:"The whole tree."`
	Limit int      `json:"limit" jsonschema:"minimum=1,maximum=100,default=20"`
	Text  string   `json:"text" jsonschema:"enum=a,enum=b" jsonschema_extras:"x-max-bytes=9"`
}

type treeResult struct {
	Trees []treeNode `json:"trees"`
	Next  *string    `json:"next,omitempty"`
}

func treeRegistry() *Registry {
	return NewRegistry(
		Define("tree.plant", ScopeRPC|ScopeAdmin, "Plants a tree.", func(context.Context, *treeParams) (*treeResult, error) { return nil, nil }, Strict, Describe("It *grows*.")),
		Define("bush.cut", ScopeAdmin, "Cuts a bush.", func(context.Context, *treeNode) (*treeNode, error) { return nil, nil }),
		Define("tree.raw", 0, "Answers anything.", func(context.Context, *struct{}) (*json.RawMessage, error) { return nil, nil }),
	)
}

func TestMethodReference(t *testing.T) {
	t.Parallel()
	want := strings.ReplaceAll(`# Methods

This page is made from the declarations in ~api/~. Members of params that are not marked *required* may be left out.
Numbers are in the unit that their name says; characters are Unicode code points.

## bush

### bush.cut

Cuts a bush.

Scopes: ~admin~.

| Parameter | Type | |
|---|---|---|
| ~name~ | string | *required* · at most 20 characters · What it is called: a\|b. |
| ~children~ | list of object | at most 9 items |
| ~children[].name~ | string | *required* · at most 20 characters · What it is called: a\|b. |
| ~children[].children~ | list of object | at most 9 items · As above. |

| Result | Type | |
|---|---|---|
| ~name~ | string | *required* · at most 20 characters · What it is called: a\|b. |
| ~children~ | list of object | at most 9 items |
| ~children[].name~ | string | *required* · at most 20 characters · What it is called: a\|b. |
| ~children[].children~ | list of object | at most 9 items · As above. |

## rpc

### rpc.discover

Describes the methods of this server as an OpenRPC document.

Scopes: ~rpc~. Reads only. Not in the published reference.

| Result | Type | |
|---|---|---|
| ~(all)~ | any | *required* |

## tree

### tree.plant

Plants a tree.

It *grows*.

Scopes: ~rpc~, ~admin~. Refuses unknown parameters.

| Parameter | Type | |
|---|---|---|
| ~root~ | object | *required* · The whole tree. |
| ~root.name~ | string | *required* · at most 20 characters · What it is called: a\|b. |
| ~root.children~ | list of object | at most 9 items · As above. |
| ~limit~ | integer | default ~20~ · at least 1 · at most 100 |
| ~text~ | ~a~, ~b~ | at most 9 bytes |

| Result | Type | |
|---|---|---|
| ~trees~ | list of object | *required* |
| ~trees[].name~ | string | *required* · at most 20 characters · What it is called: a\|b. |
| ~trees[].children~ | list of object | at most 9 items · As above. |
| ~next~ | string |  |

### tree.raw

Answers anything.

Scopes: none: not for tokens.

| Result | Type | |
|---|---|---|
| ~(all)~ | any | *required* |
`, "~", "`")
	for range 3 {
		var page bytes.Buffer
		require.NoError(t, treeRegistry().WriteReference(&page))
		require.Equal(t, want, page.String())
	}
}

func TestMethodDiscover(t *testing.T) {
	t.Parallel()
	f := setupMethods(t)
	f.Registry = treeRegistry()
	f.server.Dispatcher = f.Registry
	text := f.call(t, ScopeRPC, "rpc.discover", `{}`)
	require.Equal(t, text, f.call(t, ScopeRPC, "rpc.discover", `{}`), "the same each time")

	var document struct {
		OpenRPC string
		Info    struct{ Title, Version string }
		Methods []struct {
			Name, Summary, Description, ParamStructure string
			Params                                     []struct {
				Name     string
				Required bool
				Schema   json.RawMessage
			}
			Result struct {
				Name   string
				Schema json.RawMessage
			}
			Scopes   []string `json:"x-scopes"`
			Strict   bool     `json:"x-strict"`
			ReadOnly bool     `json:"x-readOnly"`
			Ours     bool     `json:"x-ours"`
		}
		Components struct{ Schemas map[string]json.RawMessage }
	}
	require.NoError(t, json.Unmarshal([]byte(text), &document))
	require.Equal(t, "1.3.2", document.OpenRPC)
	require.Equal(t, "weir", document.Info.Title)
	require.NotEmpty(t, document.Info.Version)
	require.Len(t, document.Methods, 4)

	plant := document.Methods[0]
	require.Equal(t, "tree.plant", plant.Name)
	require.Equal(t, "by-name", plant.ParamStructure)
	require.Equal(t, "It *grows*.", plant.Description)
	require.Equal(t, []string{"rpc", "admin"}, plant.Scopes)
	require.True(t, plant.Strict)
	require.Equal(t, "root", plant.Params[0].Name)
	require.True(t, plant.Params[0].Required)
	require.JSONEq(t, `{"$ref":"#/components/schemas/treeNodeInputStrict","description":"The whole tree."}`, string(plant.Params[0].Schema))
	require.JSONEq(t, `{"type":"integer","minimum":1,"maximum":100,"default":20}`, string(plant.Params[1].Schema))
	require.JSONEq(t, `{"type":"string","enum":["a","b"],"x-max-bytes":9}`, string(plant.Params[2].Schema))
	require.JSONEq(t, `{"type":"object","properties":{"trees":{"type":"array","items":{"$ref":"#/components/schemas/treeNode"}},"next":{"type":"string"}},"required":["trees"]}`, string(plant.Result.Schema))
	require.JSONEq(t, `true`, string(document.Methods[2].Result.Schema))
	require.Empty(t, document.Methods[2].Scopes)
	discover := document.Methods[3]
	require.Equal(t, "rpc.discover", discover.Name)
	require.True(t, discover.Ours && discover.ReadOnly)

	// Every schema is one, and every reference leads somewhere.
	var all any
	require.NoError(t, json.Unmarshal([]byte(text), &all))
	compiler := validation.NewCompiler()
	parsed, err := validation.UnmarshalJSON(strings.NewReader(text))
	require.NoError(t, err)
	require.NoError(t, compiler.AddResource("weir:///openrpc", parsed))
	for i, m := range document.Methods {
		for j := range m.Params {
			_, err := compiler.Compile(fmt.Sprintf("weir:///openrpc#/methods/%d/params/%d/schema", i, j))
			require.NoError(t, err)
		}
		_, err := compiler.Compile(fmt.Sprintf("weir:///openrpc#/methods/%d/result/schema", i))
		require.NoError(t, err)
	}
	require.Len(t, document.Components.Schemas, 3)
}

func TestMethodDiscoverOfTypesThatShareAName(t *testing.T) {
	t.Parallel()
	one := func() Method {
		type item struct {
			A string `json:"a"`
		}
		type result struct {
			Item item `json:"item"`
		}
		return Define("one", ScopeRPC, "", func(context.Context, *struct{}) (*result, error) { return nil, nil })
	}
	two := func() Method {
		type item struct {
			B string `json:"b"`
		}
		type result struct {
			Item item `json:"item"`
		}
		return Define("two", ScopeRPC, "", func(context.Context, *struct{}) (*result, error) { return nil, nil })
	}
	_, err := NewRegistry(one(), two()).document()
	require.ErrorContains(t, err, "share the name item")
}
