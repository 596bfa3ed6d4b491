package check

import (
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// root is the repository's, from the folder that tests run in.
const root = "../.."

func deploy(parts ...string) string {
	return filepath.Join(append([]string{root, "deploy"}, parts...)...)
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}

var built struct {
	sync.Once
	path string
	err  error
	out  []byte
}

func TestMain(m *testing.M) {
	log.SetOutput(io.Discard) // Helm tells of each symbolic link, each time
	code := m.Run()
	if built.path != "" && os.Getenv("WEIR_BINARY") == "" {
		_ = os.RemoveAll(filepath.Dir(built.path))
	}
	os.Exit(code)
}

// weirBinary is the one that WEIR_BINARY names, or one that is built once.
func weirBinary(t *testing.T) string {
	t.Helper()
	built.Do(func() {
		if built.path = os.Getenv("WEIR_BINARY"); built.path != "" {
			built.path, built.err = filepath.Abs(built.path)
			return
		}
		dir, err := os.MkdirTemp("", "weir-check-")
		if err != nil {
			built.err = err
			return
		}
		built.path = filepath.Join(dir, "weir")
		cmd := exec.Command("go", "build", "-o", built.path, "./cmd/weir")
		cmd.Dir = root
		built.out, built.err = cmd.CombinedOutput()
	})
	require.NoError(t, built.err, string(built.out))
	return built.path
}

var flagLine = regexp.MustCompile(`(?m)^\s+(?:-\w, |    )?--([a-z][a-z0-9-]*)`)

// flagsOf are the flags of a command of the binary, by its own help.
func flagsOf(t *testing.T, command ...string) map[string]bool {
	t.Helper()
	out, err := exec.Command(weirBinary(t), append(command, "--help")...).CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "weir "+strings.Join(command, " "), "there is no such command")
	flags := map[string]bool{}
	for _, m := range flagLine.FindAllStringSubmatch(string(out), -1) {
		flags[m[1]] = true
	}
	require.NotEmpty(t, flags, string(out))
	return flags
}

// commandOf splits the arguments of a container into the command and its flags,
// which are written --name=value or --name.
func commandOf(t *testing.T, args []string) (command []string, flags map[string]string) {
	t.Helper()
	flags = map[string]string{}
	for i, arg := range args {
		name, isFlag := strings.CutPrefix(arg, "--")
		if !isFlag {
			require.Len(t, flags, 0, "argument %d (%s) follows a flag; write --flag=value", i, arg)
			command = append(command, arg)
			continue
		}
		name, value, _ := strings.Cut(name, "=")
		require.NotContains(t, flags, name, "twice")
		flags[name] = value
	}
	require.NotEmpty(t, command)
	return command, flags
}

// runsWeir checks that a process's arguments and WEIR_ variables are ones that
// its command really has, and that no value comes twice. It returns the command
// and its flags.
func runsWeir(t *testing.T, args []string, env map[string]bool) (command []string, flags map[string]string) {
	t.Helper()
	command, flags = commandOf(t, args)
	known := flagsOf(t, command...)
	for name := range flags {
		require.True(t, known[name], "weir %s has no flag --%s", strings.Join(command, " "), name)
	}
	for name := range env {
		setting, ours := strings.CutPrefix(name, "WEIR_")
		if !ours {
			continue
		}
		flag := strings.ReplaceAll(strings.ToLower(setting), "_", "-")
		require.True(t, known[flag], "weir %s does not read %s", strings.Join(command, " "), name)
		require.NotContains(t, flags, flag, "%s is given twice", name)
	}
	require.True(t, env["WEIR_DATABASE_URL"], "weir %s needs a database", strings.Join(command, " "))
	return command, flags
}
