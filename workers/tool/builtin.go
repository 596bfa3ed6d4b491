package tool

import (
	"encoding/json"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/weir-run/weir/jobs/agentcfg"
	"github.com/weir-run/weir/policy"
)

// The names of the built-in tools.
const (
	MemoryRead  = "memory_read"
	MemoryWrite = "memory_write"
	WebFetch    = "web_fetch"
)

// Spec is what a built-in tool declares.
type Spec struct {
	Description string          // for the model
	Parameters  json.RawMessage // JSON Schema of the arguments
	Capability  policy.Capability
	Idempotency agentcfg.Idempotency
	// Local: carried out in the transaction that commits the step, so that it
	// happens exactly once; see ParseFactRead and ParseFactWrite.
	Local bool
}

// builtinTimeout bounds one call of a builtin that is not local.
const builtinTimeout = 30 * time.Second

// Builtins are the built-in tools by name. It is not changed.
var Builtins = map[string]Spec{
	MemoryRead: {
		Description: "Reads one remembered fact by its key. Returns {found, value}; a missing key is found: false.",
		Parameters: json.RawMessage(`{"type":"object","properties":{` +
			`"key":{"type":"string","description":"The fact's key: 1 to 128 of A-Z a-z 0-9 _ . : -"}},` +
			`"required":["key"],"additionalProperties":false}`),
		Idempotency: agentcfg.Idempotent,
		Local:       true,
	},
	MemoryWrite: {
		Description: "Remembers a fact: a small JSON value under a key, replacing what was there. Facts are shown to you at every step. " +
			"Never store passwords, keys or tokens: such a write is refused. Writing null empties the fact.",
		Parameters: json.RawMessage(`{"type":"object","properties":{` +
			`"key":{"type":"string","description":"The fact's key: 1 to 128 of A-Z a-z 0-9 _ . : -, not starting with __"},` +
			`"value":{"description":"Any JSON value, up to 16 KiB"},` +
			`"kind":{"type":"string","description":"What sort of fact it is, such as preference; optional"}},` +
			`"required":["key","value"],"additionalProperties":false}`),
		Idempotency: agentcfg.Idempotent,
		Local:       true,
	},
	WebFetch: {
		Description: "Fetches a web page or other text by HTTP GET and returns {url, status, contentType, text, truncated}. " +
			"HTML is reduced to its text.",
		Parameters: json.RawMessage(`{"type":"object","properties":{` +
			`"url":{"type":"string","maxLength":8192,"description":"An absolute http or https URL"},` +
			`"maxBytes":{"type":"integer","minimum":1,"maximum":1048576,"description":"How much text to return at most; default 65536"}},` +
			`"required":["url"],"additionalProperties":false}`),
		Capability:  policy.Web,
		Idempotency: agentcfg.Idempotent,
	},
}

var builtinSchemas = func() map[string]*jsonschema.Schema {
	compiled := make(map[string]*jsonschema.Schema, len(Builtins))
	for name, spec := range Builtins {
		schema, err := agentcfg.Compile(spec.Parameters)
		if err != nil {
			panic("tool: schema of " + name + ": " + err.Error())
		}
		compiled[name] = schema
	}
	return compiled
}()
