// Package policy decides. Facts go in, nil or *DeniedError comes out; no
// database, network or clock, so that every node decides alike and a decision
// can be repeated from its audit record.
//
// Decide is the one chokepoint in front of every tool call. Its order is fixed
// (contract/behaviour.md §8) and its default is deny: facts that say nothing
// allow nothing.
package policy
