//go:build unix

package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// minMajor is the oldest Postgres that weir is meant for, and the oldest that
// the Postgres project still mends at the time of writing.
const minMajor = 15

// versionFolders are where packages put the binaries of several versions side
// by side: Debian, Red Hat, Alpine, Homebrew (on both kinds of Mac and on
// Linux), Postgres.app.
var versionFolders = []string{
	"/usr/lib/postgresql/*/bin",
	"/usr/pgsql-*/bin",
	"/usr/libexec/postgresql*",
	"/opt/homebrew/opt/postgresql@*/bin",
	"/usr/local/opt/postgresql@*/bin",
	"/home/linuxbrew/.linuxbrew/opt/postgresql@*/bin",
	"/Applications/Postgres.app/Contents/Versions/*/bin",
}

// Binaries is a folder with postgres and initdb that can be run.
type Binaries struct {
	Dir string
	// Version as the server prints it, such as "15.18" or "18beta1".
	Version string
	Major   int
}

// NoBinariesError means that there is no Postgres to run.
type NoBinariesError struct {
	// Want is the major version that the data needs, or 0 for any.
	Want int
	// Rejected says what was found and why it does not serve, and why nothing
	// could be downloaded.
	Rejected []error
}

func (e *NoBinariesError) Error() string {
	what := fmt.Sprintf("no Postgres (%d or newer) found", minMajor)
	if e.Want != 0 {
		what = fmt.Sprintf("no Postgres %d found, which made the data directory", e.Want)
	}
	text := what + ": install it (Debian: apt install postgresql; macOS: brew install postgresql@17) or name its bin folder"
	for _, err := range e.Rejected {
		text += "\n\t" + err.Error()
	}
	return text
}

func (e *NoBinariesError) Unwrap() []error { return e.Rejected }

// Find returns the Postgres that Start would run: config.BinDir if given, or
// else the first that serves among PATH, the usual folders, newest version
// first, and a download. A data directory that exists needs its own major
// version. Error: *NoBinariesError.
func Find(ctx context.Context, config Config) (Binaries, error) {
	major, pgdata := 0, ""
	if config.DataDir != "" && !config.Ephemeral {
		pgdata = filepath.Join(config.DataDir, "pgdata")
		var err error
		if major, err = dataMajor(pgdata); err != nil {
			return Binaries{}, err
		}
	}
	account, err := serverAccount(pgdata)
	if err != nil {
		return Binaries{}, err
	}
	return find(ctx, config, major, account)
}

func find(ctx context.Context, config Config, major int, account *account) (Binaries, error) {
	dirs := []string{config.BinDir}
	if config.BinDir == "" {
		dirs = installedDirs()
	}
	missing := &NoBinariesError{Want: major}
	for _, dir := range dirs {
		b, err := inspect(ctx, dir, account)
		switch {
		case err != nil:
		case major != 0 && b.Major != major:
			err = fmt.Errorf("%s: is version %s", dir, b.Version)
		case b.Major < minMajor:
			err = fmt.Errorf("%s: version %s is too old", dir, b.Version)
		default:
			return b, nil
		}
		missing.Rejected = append(missing.Rejected, err)
	}
	if config.BinDir != "" || config.NoFetch {
		return Binaries{}, missing
	}
	dir, err := fetch(ctx, config, major)
	if err == nil {
		var b Binaries
		if b, err = inspect(ctx, dir, account); err == nil {
			return b, nil
		}
	}
	missing.Rejected = append(missing.Rejected, fmt.Errorf("download: %w", err))
	return Binaries{}, missing
}

// installedDirs lists the candidates in the order of preference.
func installedDirs() []string {
	var dirs []string
	if name, err := exec.LookPath("postgres"); err == nil {
		// A link on PATH may lie alone; its target lies with the others.
		if target, err := filepath.EvalSymlinks(name); err == nil {
			dirs = append(dirs, filepath.Dir(target))
		}
	}
	for _, pattern := range versionFolders {
		found, _ := filepath.Glob(pattern) // the patterns are well formed
		slices.SortFunc(found, func(a, b string) int { return cmp.Compare(folderVersion(b), folderVersion(a)) })
		for _, dir := range found {
			if !slices.Contains(dirs, dir) {
				dirs = append(dirs, dir)
			}
		}
	}
	return dirs
}

var lastNumber = regexp.MustCompile(`(\d+(?:\.\d+)?)\D*$`)

// folderVersion reads the version in a folder's name, 0 if there is none.
func folderVersion(dir string) float64 {
	match := lastNumber.FindStringSubmatch(dir)
	if match == nil {
		return 0
	}
	version, _ := strconv.ParseFloat(match[1], 64)
	return version
}

var versionNumber = regexp.MustCompile(`\d+\S*`)

// inspect runs both programs as the server's user, since either may be missing
// (Debian's client package), broken or closed to that user.
func inspect(ctx context.Context, dir string, account *account) (Binaries, error) {
	b := Binaries{Dir: dir}
	for _, program := range []string{"initdb", "postgres"} {
		if ctx.Err() != nil {
			return Binaries{}, context.Cause(ctx)
		}
		output, err := account.command(filepath.Join(dir, program), "--version").Output()
		if err != nil {
			return Binaries{}, fmt.Errorf("%s: %w", dir, err)
		}
		b.Version = versionNumber.FindString(string(output))
	}
	digits := strings.IndexFunc(b.Version+".", func(r rune) bool { return r < '0' || r > '9' })
	major, err := strconv.Atoi(b.Version[:digits])
	if err != nil {
		return Binaries{}, fmt.Errorf("%s: %w", dir, errors.New("prints no version"))
	}
	b.Major = major
	return b, nil
}
