// Package check checks what is in deploy/, without a container engine and
// without a cluster: the chart is rendered as Helm does it, and everything that
// runs weir is held against the binary's own flags. It is a module of its own, so
// that Helm and Kubernetes never enter the product's go.mod.
//
// WEIR_BINARY names a built binary; without it the tests build one.
package check
