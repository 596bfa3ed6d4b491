//go:build unix && !linux

package cluster

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// serverPID returns the PID of a postmaster that works in pgdata, or 0. It
// trusts postmaster.pid if that PID is a postgres. A backend without postmaster
// is found by Postgres itself, which refuses to start beside it.
func serverPID(pgdata string) int {
	text, err := os.ReadFile(filepath.Join(pgdata, "postmaster.pid"))
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(first))
	if err != nil {
		return 0
	}
	command, err := exec.Command("/bin/ps", "-o", "comm=", "-p", strconv.Itoa(pid)).Output()
	if err != nil || filepath.Base(strings.TrimSpace(string(command))) != "postgres" {
		return 0
	}
	return pid
}
