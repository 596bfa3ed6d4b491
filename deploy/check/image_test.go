package check

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
}

type image struct {
	text, last   string // the whole file, and its last stage
	base         string // of the last stage
	builder      string // image of the first stage
	user         string
	exposed      []string
	files        []string // that the last stage has
	instructions []string // of the last stage
}

func dockerfile(t *testing.T) image {
	t.Helper()
	text := read(t, deploy("Dockerfile"))
	joined := strings.ReplaceAll(text, "\\\n", " ")
	var i image
	i.text = text
	for line := range strings.Lines(joined) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.Fields(line)
		switch fields[0] {
		case "FROM":
			from := fields[1]
			if strings.HasPrefix(from, "--") {
				from = fields[2]
			}
			if i.builder == "" {
				i.builder = from
			}
			i.base, i.user, i.exposed, i.files, i.instructions = from, "", nil, nil, nil
			continue
		case "USER":
			i.user = fields[1]
		case "EXPOSE":
			i.exposed = fields[1:]
		case "COPY":
			i.files = append(i.files, fields[len(fields)-1])
		}
		i.instructions = append(i.instructions, line)
	}
	return i
}

func TestImage(t *testing.T) {
	i := dockerfile(t)
	require.Equal(t, "scratch", i.base)
	require.Regexp(t, `^[1-9][0-9]*:[1-9][0-9]*$`, i.user, "a number, so that Kubernetes knows that it is not root")
	require.Contains(t, i.text, "CGO_ENABLED=0", "there is no C library")
	require.Contains(t, i.instructions, `ENTRYPOINT ["/weir"]`)
	require.Contains(t, i.files, "/weir")
	require.Contains(t, i.files, "/etc/ssl/certs/ca-certificates.crt", "calls with TLS")
	for _, label := range []string{"title", "description", "source", "licenses", "version", "revision", "documentation"} {
		require.Contains(t, i.text, "org.opencontainers.image."+label+"=")
	}
	for _, instruction := range i.instructions {
		require.False(t, strings.HasPrefix(instruction, "RUN"), "scratch has nothing to run: %s", instruction)
		require.False(t, strings.HasPrefix(instruction, "ADD"), instruction)
	}

	// The compiler is the one that go.mod asks for, so that nothing is fetched.
	requirePinned(t, i.builder)
	want := regexp.MustCompile(`(?m)^go (\S+)$`).FindStringSubmatch(read(t, root+"/go.mod"))[1]
	require.Equal(t, "golang:"+want, i.builder)

	// The chart's user is the image's.
	require.Contains(t, read(t, deploy("helm", "weir", "values.yaml")), "runAsUser: "+strings.Split(i.user, ":")[0])
}

// TestImageContext: what the build copies is not ignored, and what it must not
// read is.
func TestImageContext(t *testing.T) {
	ignore := strings.Split(strings.TrimSpace(read(t, root+"/.dockerignore")), "\n")
	require.Contains(t, ignore, ".git")
	require.Contains(t, ignore, ".weir", "the data of weir dev")
	require.Contains(t, ignore, "!deploy/probe")
	for _, needed := range []string{"go.mod", "go.sum", "cmd", "api", "workers", "jobs", "scheduler", "policy", "db", "client"} {
		require.NotContains(t, ignore, needed)
	}
}
