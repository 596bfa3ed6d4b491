// Package agentcfg is the configuration of an agent (contract/surface.md §2):
// typed, with its defaults, checked as a whole.
//
// Decoding is strict. An unknown member is refused by name, and so is a known
// one whose effect is not built yet: nothing is accepted and ignored. The API
// checks what it stores, the workers read what was stored, and both use this
// package, so that a stored configuration always means what its author was told.
package agentcfg
