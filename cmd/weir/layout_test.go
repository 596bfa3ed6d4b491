package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/weir-run/weir/"

// mayImport says which folders of the module each folder may import beside its
// own. Imports point one way; api, workers and scheduler meet in a row and a
// job. Only their tests, which bring a fleet together, may import each other.
var mayImport = map[string][]string{
	"cmd":       {"api", "workers", "scheduler", "jobs", "policy", "db", "client"},
	"api":       {"jobs", "policy", "db"},
	"workers":   {"jobs", "policy", "db"},
	"scheduler": {"jobs", "policy", "db"},
	"jobs":      {"policy", "db"},
	"policy":    {},
	"db":        {},
	"client":    {},
	"deploy":    {},
}

var siblings = []string{"api", "workers", "scheduler"}

func TestLayout(t *testing.T) {
	t.Parallel()
	type listed struct {
		ImportPath                         string
		Imports, TestImports, XTestImports []string
	}
	cmd := exec.Command("go", "list", "-e", "-json=ImportPath,Imports,TestImports,XTestImports", module+"...")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(t, err, stderr.String())
	seen := 0
	for packages := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		err := packages.Decode(&p)
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		seen++
		from := folder(p.ImportPath)
		allowed, known := mayImport[from]
		if !known {
			t.Errorf("%s: mayImport does not know the folder %s", p.ImportPath, from)
			continue
		}
		check := func(imports, allowed []string) {
			for _, path := range imports {
				if to := folder(path); to != "" && to != from && !slices.Contains(allowed, to) {
					t.Errorf("%s imports %s: %s may import %v", p.ImportPath, path, from, allowed)
				}
			}
		}
		check(p.Imports, allowed)
		if slices.Contains(siblings, from) {
			allowed = slices.Concat(allowed, siblings)
		}
		check(slices.Concat(p.TestImports, p.XTestImports), allowed)
	}
	require.Greater(t, seen, len(mayImport), "go list found too few packages")
}

// folder is the first folder of one of our packages, or "" for those of others.
func folder(path string) string {
	inside, ours := strings.CutPrefix(path, module)
	if !ours {
		return ""
	}
	first, _, _ := strings.Cut(inside, "/")
	return first
}
