package model

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// maxToolName is the longest tool name that OpenAI and Anthropic accept.
const maxToolName = 64

// toolNames translates between weir's tool names and a provider's spelling. It
// is made for one model call and depends only on the names in it, so that the
// same tools are always spelled the same. The zero value knows no tool.
type toolNames struct {
	theirs map[string]string // by our name
	ours   map[string]string // by the provider's spelling
}

// newToolNames spells the tools of the request and of the calls in its history,
// which may name tools that the agent no longer has.
func newToolNames(req *Request) toolNames {
	var names []string
	seen := map[string]bool{}
	add := func(name string) {
		if !seen[name] {
			seen[name] = true
			names = append(names, name)
		}
	}
	for _, tool := range req.Tools {
		add(tool.Name)
	}
	for _, message := range req.Messages {
		for _, call := range message.Calls {
			add(call.Tool)
		}
	}
	if len(names) == 0 {
		return toolNames{}
	}

	// A name that needs no change always keeps its spelling; of several others
	// that would be spelled alike, none does, whatever their order.
	wanted := make(map[string]int, len(names))
	for _, name := range names {
		wanted[spell(name)]++
	}
	n := toolNames{theirs: make(map[string]string, len(names)), ours: make(map[string]string, len(names))}
	for _, name := range names {
		spelling := spell(name)
		if len(spelling) > maxToolName || (wanted[spelling] > 1 && spelling != name) {
			spelling = spellHashed(name, spelling)
		}
		n.theirs[name] = spelling
		n.ours[spelling] = name
	}
	return n
}

// their returns the provider's spelling of one of our names.
func (n toolNames) their(name string) string {
	if spelling, ok := n.theirs[name]; ok {
		return spelling
	}
	return name
}

// our returns our name for what the provider called. A name that was never sent
// is returned unchanged: the caller answers it as an unknown tool.
func (n toolNames) our(spelling string) string {
	if name, ok := n.ours[spelling]; ok {
		return name
	}
	return spelling
}

// spell replaces every character that a provider refuses by an underscore.
func spell(name string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '_', r == '-':
			return r
		}
		return '_'
	}, name)
}

// spellHashed makes a spelling unique: its first 55 characters, an underscore
// and 8 hexadecimal digits of the SHA-256 of our name; 64 characters at most.
func spellHashed(name, spelling string) string {
	sum := sha256.Sum256([]byte(name))
	return spelling[:min(len(spelling), maxToolName-9)] + "_" + hex.EncodeToString(sum[:4])
}
