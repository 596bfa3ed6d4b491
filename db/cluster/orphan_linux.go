package cluster

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// serverPID returns the PID of a Postgres process that works in pgdata, or 0.
// Every such process has it as its working directory, also a backend whose
// postmaster is gone.
func serverPID(pgdata string) int {
	dir, err := os.Stat(pgdata)
	if err != nil {
		return 0
	}
	names, err := filepath.Glob("/proc/[0-9]*/cwd")
	if err != nil {
		return 0
	}
	for _, name := range names {
		cwd, err := os.Stat(name)
		if err != nil || !os.SameFile(cwd, dir) {
			continue // ended meanwhile, another user's, or elsewhere
		}
		process := filepath.Dir(name)
		if command, err := os.ReadFile(filepath.Join(process, "comm")); err != nil || strings.TrimSpace(string(command)) != "postgres" {
			continue // somebody's shell
		}
		pid, _ := strconv.Atoi(filepath.Base(process))
		return pid
	}
	return 0
}
