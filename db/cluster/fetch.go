//go:build unix

package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

// fetchMajor is the major version to download for new data.
const fetchMajor = 17

var fetchVersions = map[int]embeddedpostgres.PostgresVersion{
	15: embeddedpostgres.V15,
	16: embeddedpostgres.V16,
	17: embeddedpostgres.V17,
	18: embeddedpostgres.V18,
}

// fetch downloads the binaries of a major version, unless the cache has them,
// and returns their folder. It may take as long as 30 MB take.
func fetch(ctx context.Context, config Config, major int) (string, error) {
	cacheDir := config.CacheDir
	if major == 0 {
		major = fetchMajor
	}
	version, ok := fetchVersions[major]
	if !ok {
		return "", fmt.Errorf("there is no Postgres %d to download", major)
	}
	if cacheDir == "" {
		var err error
		if cacheDir, err = defaultCacheDir(); err != nil {
			return "", err
		}
	}
	// Not 0700: the server's user must get in.
	if err := os.MkdirAll(cacheDir, 0o755); err != nil {
		return "", err
	}
	dir := filepath.Join(cacheDir, string(version))
	bin := filepath.Join(dir, "bin")
	if complete(bin) {
		return bin, nil
	}
	// The library knows no context: a download that nobody waits for any more
	// ends by itself.
	result := make(chan error, 1)
	go func() { result <- download(cacheDir, dir, version, config.repository) }()
	select {
	case err := <-result:
		return bin, err
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
}

func defaultCacheDir() (string, error) {
	if os.Geteuid() == 0 {
		return "/var/cache/weir/postgres", nil // root's own is closed to the server's user
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, "weir", "postgres"), nil
}

// complete tells whether a folder has what the cluster needs. A downloaded
// folder gets its name last, so that what has the name is whole.
func complete(bin string) bool {
	for _, program := range []string{"initdb", "postgres"} {
		if info, err := os.Stat(filepath.Join(bin, program)); err != nil || info.Mode()&0o100 == 0 {
			return false
		}
	}
	return true
}

// download fetches and unpacks a version into dir, one process at a time.
func download(cacheDir, dir string, version embeddedpostgres.PostgresVersion, repository string) error {
	lock, err := os.OpenFile(filepath.Join(cacheDir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	if complete(filepath.Join(dir, "bin")) {
		return nil
	}
	work, err := os.MkdirTemp(cacheDir, "unpack-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	if err := os.Chmod(work, 0o755); err != nil {
		return err
	}
	port, err := freePort()
	if err != nil {
		return err
	}
	unpacked := filepath.Join(work, "postgres")
	config := embeddedpostgres.DefaultConfig().
		Version(version).
		CachePath(work).
		BinariesPath(unpacked).
		RuntimePath(filepath.Join(work, "runtime")).
		DataPath(filepath.Join(work, "data")).
		Port(uint32(port)).
		StartTimeout(time.Minute).
		Logger(io.Discard).
		// The library has no call that only fetches. With a locale that does not
		// exist, its initdb fails right after the binaries are in place, for
		// root and for everybody else alike, and no server is started.
		Locale("weir-only-wants-the-binaries")
	if repository != "" {
		config = config.BinaryRepositoryURL(repository)
	}
	server := embeddedpostgres.NewDatabase(config)
	err = server.Start()
	if err == nil {
		err = server.Stop()
	}
	if !complete(filepath.Join(unpacked, "bin")) {
		if err == nil {
			err = errors.New("the archive lacks postgres or initdb")
		}
		return err
	}
	if err := os.Rename(unpacked, dir); err != nil {
		return fmt.Errorf("move downloaded Postgres into place: %w", err)
	}
	return nil
}
