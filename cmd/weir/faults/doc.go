// Package faults keeps weir's promises under test while things fail: it starts
// the built binary as real processes on a Postgres of its own, kills, stops and
// cuts off what it started, and then asks the rows and a tool that counts
// whether every promise still holds. It has tests only.
//
// A row is a fault with its load; docs/faults.md lists them. A few small rows
// run always, all of them with WEIR_FAULTS=1 (make faults), and the soak with
// WEIR_FAULTS_SOAK=30m (make soak). What a row draws comes from a seed that it
// prints; WEIR_FAULTS_SEED repeats it. The scheduling of processes is not
// drawn, so a seed repeats what was done, not when each process noticed.
package faults
