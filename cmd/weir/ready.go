package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
)

// readiness is the line of --json: its members and their order are what scripts
// read (contract/surface.md §1).
type readiness struct {
	Event       string `json:"event"`
	Role        string `json:"role"`
	PID         int    `json:"pid"`
	API         string `json:"api,omitempty"`
	Console     string `json:"console,omitempty"`
	DatabaseURL string `json:"database_url,omitempty"`
	WorkerID    string `json:"worker_id,omitempty"`
	Listen      string `json:"listen,omitempty"` // of a role without API: where its health is told
	Token       string `json:"token,omitempty"`
}

// print writes the line. It must be one write, so that nothing gets between.
func (r readiness) print(w io.Writer) error {
	r.Event, r.PID = "ready", os.Getpid()
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%s\n", line)
	return err
}
