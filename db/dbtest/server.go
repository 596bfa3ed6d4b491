package dbtest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/weir-run/weir/db/cluster"
)

// The shared server belongs to a keeper: a copy of the test binary that came
// first, in a session of its own, which starts Postgres and ends with it. The
// parties meet in a folder whose name follows from the user and the Postgres
// version:
//
//	users     every test binary holds a shared flock on it as long as it lives
//	start     exclusive flock of the one that is starting the keeper
//	url       how to reach the server; written by the keeper when it is ready, and
//	          under its exclusive flock as long as it lives
//	keeper.log, and cluster/ unless the data lies in memory
//
// The keeper tries again and again to get "users" for itself. When it has
// succeeded throughout the grace time, nobody is left, and it keeps the lock,
// stops Postgres and removes the folder. A binary that comes just then sees
// that its lock is on a file that is gone, and begins anew. The kernel frees
// the locks of the killed, Postgres dies with its keeper, and a new keeper
// takes over whatever a killed one has left.

// envURL names a server to use instead of the shared one.
const envURL = "WEIR_TEST_DATABASE_URL"

const (
	// keeperName is the keeper's first argument, by which it knows that it is
	// one. It is no environment variable since children would inherit that.
	keeperName = "weir-dbtest-keeper"
	// protocol is part of the folder's name. It changes with what the parties
	// agree on and with the server's settings.
	protocol = 3
	// grace is how long the server waits for another user: longer than go test
	// takes to compile the next package, as a rule.
	grace = 10 * time.Second
	// keeperPoll is how often the keeper looks.
	keeperPoll = 250 * time.Millisecond
	// startLimit bounds the making and starting of the server on a busy machine.
	startLimit = 2 * time.Minute
)

// keeperSettings make room for many test binaries, each with many small
// databases.
var keeperSettings = map[string]string{
	"max_connections":    "500",
	"shared_buffers":     "256MB",
	"checkpoint_timeout": "1h",
	// The data may lie in memory.
	"max_wal_size": "512MB",
	// Nothing replicates or archives.
	"wal_level":       "minimal",
	"max_wal_senders": "0",
}

// init turns a copy of the test binary into the keeper before any test code
// runs, also in a package without TestMain.
func init() {
	if len(os.Args) == 3 && os.Args[0] == keeperName {
		limit, err := time.ParseDuration(os.Args[2])
		if err == nil {
			err = keep(os.Args[1], limit)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err) // the keeper's log
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// held is the lock of this process on "users". A file that nothing refers to
// would be closed by the garbage collector.
var held *os.File //nolint:unused // it is kept, not read

// theServer finds or starts the server on first use.
var theServer = sync.OnceValues(func() (*server, error) {
	ctx, cancel := context.WithTimeout(context.Background(), startLimit)
	defer cancel()
	if given := os.Getenv(envURL); given != "" {
		return external(ctx, given)
	}
	folder, err := sharedFolder(ctx)
	if err != nil {
		return nil, err
	}
	s, users, err := attach(ctx, folder, grace)
	held = users
	return s, err
})

func external(ctx context.Context, given string) (*server, error) {
	if u, err := url.Parse(given); err != nil || u.Scheme == "" {
		return nil, fmt.Errorf("%s must be a URL, postgres://…", envURL)
	}
	s := &server{adminURL: given}
	if err := s.dropOld(ctx); err != nil {
		return nil, err
	}
	return s, nil
}

// sharedFolder returns where this user's test binaries meet.
func sharedFolder(ctx context.Context) (string, error) {
	binaries, err := cluster.Find(ctx, cluster.Config{NoFetch: true})
	if _, none := errors.AsType[*cluster.NoBinariesError](err); none {
		binaries.Version = "download"
	} else if err != nil {
		return "", err
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%d %s %s", protocol, binaries.Version, binaries.Dir))
	return filepath.Join(os.TempDir(), fmt.Sprintf("weir-test-%d-%s", os.Getuid(), hex.EncodeToString(sum[:4]))), nil
}

// attach joins the users of the folder's server, which it starts if need be.
// The server stays as long as the returned file is open.
func attach(ctx context.Context, folder string, grace time.Duration) (*server, *os.File, error) {
	users, err := joinUsers(ctx, folder)
	if err != nil {
		return nil, nil, err
	}
	s, err := findOrStart(ctx, folder, grace)
	if err != nil {
		users.Close()
		return nil, nil, err
	}
	return s, users, nil
}

// joinUsers returns the file "users" with a shared lock on it.
func joinUsers(ctx context.Context, folder string) (*os.File, error) {
	name := filepath.Join(folder, "users")
	for {
		if err := makePrivate(folder); err != nil {
			return nil, err
		}
		file, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if err == nil {
			if tryLock(file, syscall.LOCK_SH) && isAt(file, name) {
				return file, nil
			}
			file.Close()
		}
		// The keeper has the lock: to look for users, or to clear away.
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the shared test server to end or begin: %w", context.Cause(ctx))
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func isAt(file *os.File, name string) bool {
	ours, err := file.Stat()
	if err != nil {
		return false
	}
	there, err := os.Stat(name)
	return err == nil && os.SameFile(ours, there)
}

// makePrivate makes the folder, in a place where others may have made it first.
func makePrivate(folder string) error {
	// Root's server runs as another user, who must get through.
	mode := fs.FileMode(0o700)
	if os.Geteuid() == 0 {
		mode = 0o711
	}
	err := os.Mkdir(folder, mode)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := os.Lstat(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // removed meanwhile: the caller tries again
	}
	if err != nil {
		return err
	}
	if owner := info.Sys().(*syscall.Stat_t).Uid; !info.IsDir() || int(owner) != os.Geteuid() || info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("%s belongs to somebody else (user %d, mode %s): remove it", folder, owner, info.Mode())
	}
	return nil
}

// findOrStart returns the folder's server. The caller holds the users' lock.
func findOrStart(ctx context.Context, folder string, grace time.Duration) (*server, error) {
	start, err := os.OpenFile(filepath.Join(folder, "start"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	defer start.Close()
	for !tryLock(start, syscall.LOCK_EX) {
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the shared test server: %w", context.Cause(ctx))
		case <-time.After(10 * time.Millisecond):
		}
	}
	if s := readServer(ctx, folder); s != nil {
		return s, nil
	}
	return startKeeper(ctx, folder, grace)
}

// readServer returns nil unless the server that "url" names answers and has a
// keeper.
func readServer(ctx context.Context, folder string) *server {
	file, err := os.Open(filepath.Join(folder, "url"))
	if err != nil {
		return nil
	}
	defer file.Close()
	text, err := io.ReadAll(file)
	if err != nil || tryLock(file, syscall.LOCK_SH) {
		return nil // left by a keeper that was killed; its server may live for a moment yet
	}
	s := &server{adminURL: strings.TrimSpace(string(text))}
	conn, err := pgx.Connect(ctx, s.adminURL)
	if err == nil {
		_ = conn.Close(ctx)
	} else if _, answered := errors.AsType[*pgconn.PgError](err); !answered {
		return nil // it is ending
	}
	return s
}

// startKeeper starts a keeper and waits until its server is ready.
func startKeeper(ctx context.Context, folder string, grace time.Duration) (*server, error) {
	if err := os.Remove(filepath.Join(folder, "url")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	// Never our own output: go test waits until its last holder has closed it.
	log, err := os.Create(filepath.Join(folder, "keeper.log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	keeper := exec.Command(self)
	keeper.Args = []string{keeperName, folder, grace.String()}
	keeper.Dir = "/"
	keeper.Stdout, keeper.Stderr = log, log
	keeper.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C is for the tests
	if err := keeper.Start(); err != nil {
		return nil, fmt.Errorf("start the shared test server's keeper: %w", err)
	}
	var status syscall.WaitStatus
	for {
		if s := readServer(ctx, folder); s != nil {
			_ = keeper.Process.Release()
			return s, nil
		}
		ended, _ := syscall.Wait4(keeper.Process.Pid, &status, syscall.WNOHANG, nil)
		if ended == keeper.Process.Pid {
			text, _ := os.ReadFile(log.Name())
			return nil, fmt.Errorf("the shared test server did not start: %s", strings.TrimSpace(string(text)))
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("start the shared test server: %w", context.Cause(ctx))
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// keep is the keeper's whole life. A signal that asks it to end, such as the
// machine's shutdown, ends it in order.
func keep(folder string, grace time.Duration) error {
	asked, release := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	defer release()
	c, err := startCluster(asked, folder)
	if err != nil {
		return err
	}
	users, err := os.OpenFile(filepath.Join(folder, "users"), os.O_CREATE|os.O_RDWR, 0o600)
	if err == nil {
		defer users.Close()
		var published *os.File
		if published, err = publish(folder, c.URL("postgres")); err == nil {
			defer published.Close()
		}
	}
	if err != nil {
		return errors.Join(err, c.Stop(context.Background()))
	}
	awaitNobody(asked, users, c.Done(), grace)

	err = errors.Join(os.Remove(filepath.Join(folder, "url")), c.Stop(context.Background()))
	if !tryLock(users, syscall.LOCK_EX) {
		return err // Postgres or we were ended early; the users have the folder for a new keeper
	}
	// The folder goes in one step: whoever comes now makes a new one.
	gone := fmt.Sprintf("%s.gone-%d", folder, os.Getpid())
	if renameErr := os.Rename(folder, gone); renameErr != nil {
		return errors.Join(err, renameErr)
	}
	return errors.Join(err, os.RemoveAll(gone))
}

// startCluster waits for an earlier keeper that is still clearing away.
func startCluster(ctx context.Context, folder string) (*cluster.Cluster, error) {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for {
		c, err := cluster.Start(ctx, cluster.Config{
			DataDir:    dataDir(folder),
			Ephemeral:  true,
			FastUnsafe: true,
			Settings:   keeperSettings,
			Log:        os.Stderr,
		})
		if _, inUse := errors.AsType[*cluster.InUseError](err); !inUse {
			return c, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// dataDir returns where the keeper of the folder puts its data: in memory, if
// there is plenty, since each database is some 400 files made and removed again.
// On a busy 2-core machine a database cost 150 ms of CPU in memory and 480 ms on
// ext4, which passes over the inodes of files removed lately one by one
// (recently_deleted in fs/ext4/ialloc.c).
func dataDir(folder string) string {
	const memory, plenty = "/dev/shm", 4 << 30
	var fsStat syscall.Statfs_t
	if err := syscall.Statfs(memory, &fsStat); err == nil && fsStat.Bavail*uint64(fsStat.Bsize) >= plenty {
		return filepath.Join(memory, filepath.Base(folder))
	}
	return filepath.Join(folder, "cluster")
}

// publish writes the URL in one step, and returns the file under our lock.
func publish(folder, url string) (*os.File, error) {
	file, err := os.OpenFile(filepath.Join(folder, "url.draft"), os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if !tryLock(file, syscall.LOCK_EX) {
		err = errors.New("another keeper is at work here")
	}
	if err == nil {
		_, err = file.WriteString(url + "\n")
	}
	if err == nil {
		err = os.Rename(file.Name(), filepath.Join(folder, "url"))
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

// awaitNobody returns with an exclusive lock on users after grace without any
// user, and without one when Postgres has ended or we are asked to end.
func awaitNobody(asked context.Context, users *os.File, ended <-chan struct{}, grace time.Duration) {
	var since time.Time // when we first saw nobody
	for {
		free := tryLock(users, syscall.LOCK_EX)
		switch {
		case !free:
			since = time.Time{}
		case since.IsZero():
			since = time.Now()
		case time.Since(since) >= grace:
			return
		}
		if free {
			_ = syscall.Flock(int(users.Fd()), syscall.LOCK_UN)
		}
		select {
		case <-asked.Done():
			return
		case <-ended:
			return
		case <-time.After(keeperPoll):
		}
	}
}

// tryLock takes the flock if it is free.
func tryLock(file *os.File, how int) bool {
	return syscall.Flock(int(file.Fd()), how|syscall.LOCK_NB) == nil
}
