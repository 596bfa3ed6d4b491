//go:build unix

package cluster

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// superuser is the role that owns everything in the cluster.
const superuser = "weir"

const (
	// pollEvery is how often Start looks whether the server is ready.
	pollEvery = 5 * time.Millisecond
	// orphanLimit is how long Start waits for a dying predecessor to leave the
	// data directory. A postmaster that was told to quit kills what is left of
	// its children after 5 s (SIGKILL_CHILDREN_AFTER_SECS in postmaster.c).
	orphanLimit = 10 * time.Second
	// quitLimit is how long Stop waits after SIGQUIT before it sends SIGKILL; see
	// orphanLimit.
	quitLimit = 6 * time.Second
	// portAttempts bounds the search for a free port: between our look and the
	// server's bind another process may take it.
	portAttempts = 5
)

// Config says which cluster to run. The zero value with a DataDir is a cluster
// that keeps its data.
type Config struct {
	// DataDir is the folder that keeps everything; it is made if missing. It may
	// be empty for an ephemeral cluster: then it is a new folder in the system's
	// temporary one.
	DataDir string
	// Ephemeral clusters begin empty and leave nothing behind when they stop.
	// After a crash the files stay until the next Start with the same DataDir.
	Ephemeral bool
	// FastUnsafe turns fsync, synchronous commits and full page writes off:
	// several times as fast, and a crash of the machine destroys the data.
	FastUnsafe bool
	// Port for TCP on 127.0.0.1. 0 means the one of the last run if it is free,
	// or else any free one.
	Port int
	// BinDir is the folder of postgres and initdb. Empty means to look for it
	// (see Find).
	BinDir string
	// CacheDir keeps downloaded binaries. Empty means weir/postgres below the
	// user's cache folder, and /var/cache/weir/postgres for root.
	CacheDir string
	// NoFetch forbids the download of binaries when the machine has none.
	NoFetch bool
	// Settings override the server's settings, by name.
	Settings map[string]string
	// Log receives the server's own log as it comes; nil discards it. A Write
	// that blocks will in the end block the server.
	Log io.Writer

	// repository replaces the Maven repository of the download, in tests.
	repository string
}

// InUseError means that another live process owns the data directory.
type InUseError struct {
	DataDir string
	// PID is the owner's. It is 0 when the owner has only just begun, and a
	// Postgres process's when a server that no weir owns works in the directory.
	PID int
	// URL reaches the maintenance database of the owner's server over its
	// socket. Empty until the server is ready.
	URL string
}

func (e *InUseError) Error() string {
	switch {
	case e.PID == 0:
		return fmt.Sprintf("data directory %s is in use: another process is starting Postgres there", e.DataDir)
	case e.URL == "":
		return fmt.Sprintf("data directory %s is in use by process %d; stop it first", e.DataDir, e.PID)
	default:
		return fmt.Sprintf("data directory %s is in use by process %d, whose Postgres is at %s", e.DataDir, e.PID, e.URL)
	}
}

// Cluster is a running Postgres that belongs to this process and ends with it.
type Cluster struct {
	config    Config
	binaries  Binaries
	port      int
	password  string
	socketDir string
	lock      *os.File
	server    *child
	log       *logTail

	stopping sync.Once
	stopped  chan struct{}
	stopErr  error
}

// state is what the lock file says about its holder.
type state struct {
	PID  int    `json:"pid"`
	Port int    `json:"port"`
	URL  string `json:"url,omitempty"`
}

// Start starts the cluster, which includes making it the first time, and
// returns when it accepts connections. ctx bounds the start only: Stop ends the
// cluster, or the end of this process does. Errors: *InUseError,
// *NoBinariesError.
func Start(ctx context.Context, config Config) (_ *Cluster, err error) {
	if config.DataDir == "" {
		if !config.Ephemeral {
			return nil, errors.New("cluster that keeps its data needs a DataDir")
		}
		if config.DataDir, err = os.MkdirTemp("", "weir-postgres-"); err != nil {
			return nil, err
		}
	}
	if config.DataDir, err = filepath.Abs(config.DataDir); err != nil {
		return nil, err
	}
	if err := makeDataDir(config.DataDir); err != nil {
		return nil, err
	}
	lock, err := lockDataDir(ctx, config.DataDir)
	if err != nil {
		return nil, err
	}
	c := &Cluster{config: config, lock: lock, log: &logTail{to: config.Log}, stopped: make(chan struct{})}
	defer func() {
		if err != nil {
			_ = c.clean()
		}
	}()
	if err := awaitOrphans(ctx, config.DataDir, orphanLimit); err != nil {
		return nil, err
	}
	if config.Ephemeral {
		if err := os.RemoveAll(c.pgdata()); err != nil {
			return nil, fmt.Errorf("clear ephemeral data: %w", err)
		}
	}
	account, err := serverAccount(c.pgdata())
	if err != nil {
		return nil, err
	}
	major, err := dataMajor(c.pgdata())
	if err != nil {
		return nil, err
	}
	if c.binaries, err = find(ctx, config, major, account); err != nil {
		return nil, err
	}
	if c.socketDir, err = makeSocketDir(config.DataDir, account); err != nil {
		return nil, err
	}
	if major == 0 {
		if err := c.initialize(ctx, account); err != nil {
			return nil, err
		}
	}
	password, err := os.ReadFile(c.passwordFile())
	if err != nil {
		return nil, fmt.Errorf("read the cluster's password: %w", err)
	}
	c.password = strings.TrimSpace(string(password))
	if err := c.launch(ctx, account); err != nil {
		return nil, err
	}
	if err := writeState(lock, state{PID: os.Getpid(), Port: c.port, URL: c.URL("postgres")}); err != nil {
		_ = c.halt(context.Background(), syscall.SIGQUIT)
		return nil, err
	}
	return c, nil
}

func (c *Cluster) pgdata() string       { return filepath.Join(c.config.DataDir, "pgdata") }
func (c *Cluster) passwordFile() string { return filepath.Join(c.config.DataDir, "password") }

// Version is the server's, such as "15.18".
func (c *Cluster) Version() string { return c.binaries.Version }

// DataDir is the absolute path of the folder that keeps everything.
func (c *Cluster) DataDir() string { return c.config.DataDir }

// URL returns how to reach a database over the Unix socket, without a password.
// It serves this process and whoever runs as the same user.
func (c *Cluster) URL(dbname string) string {
	u := url.URL{Scheme: "postgres", User: url.User(superuser), Path: "/" + dbname,
		RawQuery: url.Values{"host": {c.socketDir}, "port": {strconv.Itoa(c.port)}}.Encode()}
	return u.String()
}

// TCPURL returns how to reach a database over TCP on this machine. It contains
// the password.
func (c *Cluster) TCPURL(dbname string) string {
	u := url.URL{Scheme: "postgres", User: url.UserPassword(superuser, c.password), Path: "/" + dbname,
		Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(c.port)), RawQuery: "sslmode=disable"}
	return u.String()
}

// EnsureDatabase creates the database unless it exists.
func (c *Cluster) EnsureDatabase(ctx context.Context, dbname string) error {
	conn, err := pgx.Connect(ctx, c.URL("postgres"))
	if err != nil {
		return fmt.Errorf("create database %s: %w", dbname, err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var exists bool
	err = conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", dbname).Scan(&exists)
	if err == nil && !exists {
		_, err = conn.Exec(ctx, "CREATE DATABASE "+pgx.Identifier{dbname}.Sanitize())
	}
	if err != nil {
		return fmt.Errorf("create database %s: %w", dbname, err)
	}
	return nil
}

// Done is closed when the server has ended, by Stop or otherwise. After an end
// that nobody asked for, Stop still has to be called; it says what happened.
func (c *Cluster) Done() <-chan struct{} { return c.server.done }

// Stop ends the server and returns when it is gone: in order, with its clients
// cut off and everything written, or at once when ctx ends first. It may be
// called more than once.
func (c *Cluster) Stop(ctx context.Context) error {
	c.stopping.Do(func() {
		defer close(c.stopped)
		select {
		case <-c.server.done:
			c.stopErr = fmt.Errorf("postgres ended by itself: %w", c.log.explain(cmp.Or(c.server.err, errors.New("exit status 0"))))
		default:
			signal := syscall.SIGINT
			if c.config.Ephemeral {
				signal = syscall.SIGQUIT // nobody will read what a checkpoint would write
			}
			c.stopErr = c.halt(ctx, signal)
		}
		c.stopErr = errors.Join(c.stopErr, c.clean())
	})
	<-c.stopped
	return c.stopErr
}

// halt sends the signal, and stronger ones when the server takes too long.
func (c *Cluster) halt(ctx context.Context, signal syscall.Signal) error {
	if err := c.server.signal(signal); err != nil {
		return err
	}
	if signal != syscall.SIGQUIT {
		select {
		case <-c.server.done:
			return nil
		case <-ctx.Done():
		}
		if err := c.server.signal(syscall.SIGQUIT); err != nil {
			return err
		}
	}
	select {
	case <-c.server.done:
		return nil
	case <-time.After(quitLimit):
	}
	if err := c.server.signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-c.server.done
	return nil
}

// clean removes what must not outlive the server and gives up the lock.
func (c *Cluster) clean() error {
	var errs []error
	if c.socketDir != "" {
		errs = append(errs, os.RemoveAll(c.socketDir))
	}
	if c.config.Ephemeral {
		errs = append(errs, os.RemoveAll(c.pgdata()), os.RemoveAll(c.newPGData()))
		for _, name := range []string{c.passwordFile(), c.lock.Name()} {
			if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
			}
		}
		_ = os.Remove(c.config.DataDir) // stays when it holds other files
	} else if c.server != nil {
		errs = append(errs, writeState(c.lock, state{Port: c.port}))
	}
	// In words, since a process that is being forked right now has a copy of the
	// file until its exec, and with it the lock.
	errs = append(errs, syscall.Flock(int(c.lock.Fd()), syscall.LOCK_UN), c.lock.Close())
	return errors.Join(errs...)
}

func (c *Cluster) newPGData() string { return c.pgdata() + ".new" }

// initialize makes pgdata. It works in a folder of another name, so that a
// pgdata that exists is complete.
func (c *Cluster) initialize(ctx context.Context, account *account) error {
	password := rand.Text()
	if err := os.WriteFile(c.passwordFile(), []byte(password+"\n"), 0o600); err != nil {
		return fmt.Errorf("store the cluster's password: %w", err)
	}
	// initdb reads the password as the server's user, hence from a place that
	// this user can reach.
	pwfile := filepath.Join(c.socketDir, "password")
	if err := os.WriteFile(pwfile, []byte(password+"\n"), 0o600); err != nil {
		return fmt.Errorf("pass the cluster's password to initdb: %w", err)
	}
	defer os.Remove(pwfile)
	if err := account.own(pwfile); err != nil {
		return err
	}

	// C.UTF-8 sorts by code point, on every machine alike, and knows the case of
	// letters beyond ASCII. macOS and old systems lack it; C is as stable.
	var err error
	for _, locale := range []string{"C.UTF-8", "C"} {
		if err = c.initdb(ctx, account, locale, pwfile); err == nil || ctx.Err() != nil {
			break
		}
	}
	if err != nil {
		return err
	}
	if err := os.Rename(c.newPGData(), c.pgdata()); err != nil {
		return fmt.Errorf("move new data into place: %w", err)
	}
	return nil
}

func (c *Cluster) initdb(ctx context.Context, account *account, locale, pwfile string) error {
	if err := os.RemoveAll(c.newPGData()); err != nil {
		return fmt.Errorf("remove a half-made data directory: %w", err)
	}
	if err := os.Mkdir(c.newPGData(), 0o700); err != nil {
		return fmt.Errorf("make data directory: %w", err)
	}
	if err := account.own(c.newPGData()); err != nil {
		return err
	}
	dir, err := account.reach(ctx, c.newPGData())
	if err != nil {
		return err
	}
	defer dir.close()
	args := []string{"-D", dir.path, "-U", superuser, "--pwfile", pwfile, "--auth-local=trust",
		"--auth-host=scram-sha-256", "--encoding=UTF8", "--locale=" + locale}
	if c.config.Ephemeral || c.config.FastUnsafe {
		args = append(args, "--no-sync")
	}
	cmd := account.command(filepath.Join(c.binaries.Dir, "initdb"), args...)
	cmd.ExtraFiles = dir.files
	output := &logTail{}
	cmd.Stdout, cmd.Stderr = output, output
	// Nothing that initdb leaves behind is worth an orderly end.
	initdb, err := startChild(cmd, syscall.SIGKILL)
	if err != nil {
		return fmt.Errorf("start initdb: %w", err)
	}
	select {
	case <-initdb.done:
	case <-ctx.Done():
		_ = initdb.signal(syscall.SIGKILL)
		<-initdb.done
		return fmt.Errorf("initdb: %w", context.Cause(ctx))
	}
	if initdb.err != nil {
		return fmt.Errorf("initdb: %w", output.explain(initdb.err))
	}
	return nil
}

// launch starts the postmaster and waits until it is ready.
func (c *Cluster) launch(ctx context.Context, account *account) error {
	dir, err := account.reach(ctx, c.pgdata())
	if err != nil {
		return err
	}
	defer dir.close()
	ports := []int{c.config.Port}
	if c.config.Port == 0 {
		ports = append([]int{readState(c.lock.Name()).Port}, make([]int, portAttempts)...)
	}
	for i, port := range ports {
		if c.config.Port == 0 && !portFree(port) {
			if port, err = freePort(); err != nil {
				return err
			}
		}
		c.port = port
		err = c.launchOn(ctx, account, dir)
		if err == nil || ctx.Err() != nil || portFree(port) || i == len(ports)-1 {
			return err
		}
	}
	return err
}

func (c *Cluster) launchOn(ctx context.Context, account *account, dir *reachedDir) error {
	args := []string{"-D", dir.path}
	settings := c.settings()
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		args = append(args, "-c", name+"="+settings[name])
	}
	cmd := account.command(filepath.Join(c.binaries.Dir, "postgres"), args...)
	cmd.ExtraFiles = dir.files
	cmd.Stdout, cmd.Stderr = c.log, c.log
	server, err := startChild(cmd, syscall.SIGQUIT)
	if err != nil {
		return fmt.Errorf("start postgres: %w", err)
	}
	c.server = server
	ticker := time.NewTicker(pollEvery)
	defer ticker.Stop()
	for {
		select {
		case <-server.done:
			c.server = nil
			return fmt.Errorf("start postgres: %w", c.log.explain(server.err))
		case <-ctx.Done():
			_ = c.halt(ctx, syscall.SIGQUIT)
			c.server = nil
			return fmt.Errorf("start postgres: %w", context.Cause(ctx))
		case <-ticker.C:
			if c.ready(server.pid) {
				return nil
			}
		}
	}
}

// settings returns the server's settings: ours, then the caller's, then those
// that the rest of this package relies on.
func (c *Cluster) settings() map[string]string {
	settings := map[string]string{
		"max_connections": "200",
		"shared_buffers":  "128MB",
		"max_wal_size":    "2GB",
		"timezone":        "UTC",
		"log_timezone":    "UTC",
		// Compiling a query costs more than all but the largest of ours take.
		"jit":          "off",
		"cluster_name": "weir",
		// A checkpoint every few minutes is no news on a private server.
		"log_checkpoints": "off",
	}
	if c.config.FastUnsafe {
		maps.Copy(settings, map[string]string{"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"})
	}
	maps.Copy(settings, c.config.Settings)
	maps.Copy(settings, map[string]string{
		"listen_addresses":        "127.0.0.1",
		"port":                    strconv.Itoa(c.port),
		"unix_socket_directories": c.socketDir,
		"unix_socket_permissions": "0700",
		"logging_collector":       "off",
		"log_destination":         "stderr",
	})
	return settings
}

// ready tells whether the postmaster accepts connections. It reads the last
// line of postmaster.pid, as pg_ctl does, rather than connect and be refused.
func (c *Cluster) ready(pid int) bool {
	const pidLine, statusLine = 0, 7 // LOCK_FILE_LINE_* in miscinit.h, which count from 1
	text, err := os.ReadFile(filepath.Join(c.pgdata(), "postmaster.pid"))
	if err != nil {
		return false
	}
	lines := strings.Split(string(text), "\n")
	return len(lines) > statusLine && lines[pidLine] == strconv.Itoa(pid) && strings.TrimSpace(lines[statusLine]) == "ready"
}

// dataMajor returns the major version that made pgdata, or 0 when there is none.
func dataMajor(pgdata string) (int, error) {
	text, err := os.ReadFile(filepath.Join(pgdata, "PG_VERSION"))
	if errors.Is(err, fs.ErrNotExist) {
		if entries, err := os.ReadDir(pgdata); err == nil && len(entries) > 0 {
			return 0, fmt.Errorf("%s is not empty and no Postgres data directory", pgdata)
		}
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	major, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, fmt.Errorf("%s/PG_VERSION: %w", pgdata, err)
	}
	return major, nil
}

// makeDataDir makes the folder private, and passable for the server's user when
// that is not ourselves.
func makeDataDir(dataDir string) error {
	mode := fs.FileMode(0o700)
	if os.Geteuid() == 0 {
		mode = 0o711
	}
	if err := os.MkdirAll(dataDir, mode); err != nil {
		return fmt.Errorf("make data directory: %w", err)
	}
	return nil
}

// lockDataDir takes the lock of the data directory or returns *InUseError.
func lockDataDir(ctx context.Context, dataDir string) (*os.File, error) {
	name := filepath.Join(dataDir, "weir.lock")
	for {
		file, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, fmt.Errorf("lock data directory: %w", err)
		}
		err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		switch {
		case errors.Is(err, syscall.EWOULDBLOCK):
			file.Close()
			s := readState(name)
			return nil, &InUseError{DataDir: dataDir, PID: s.PID, URL: s.URL}
		case err != nil:
			file.Close()
			return nil, fmt.Errorf("lock data directory: %w", err)
		}
		// An ephemeral owner removes its lock file when it goes. A lock on the
		// removed file locks nothing.
		ours, err := file.Stat()
		if err != nil {
			file.Close()
			return nil, err
		}
		if there, err := os.Stat(name); err == nil && os.SameFile(ours, there) {
			// Until we are ready, no old URL or PID must be shown.
			if err := writeState(file, state{Port: readState(name).Port}); err != nil {
				file.Close()
				return nil, err
			}
			return file, nil
		}
		file.Close()
		if err := makeDataDir(dataDir); err != nil {
			return nil, err
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
	}
}

// readState returns the zero state for a file that is missing or half written.
func readState(name string) (s state) {
	if text, err := os.ReadFile(name); err == nil {
		if json.Unmarshal(text, &s) != nil {
			return state{}
		}
	}
	return s
}

func writeState(file *os.File, s state) error {
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := file.Truncate(0); err != nil {
		return err
	}
	_, err = file.WriteAt(append(text, '\n'), 0)
	return err
}

// makeSocketDir makes the private folder of the socket. A name that follows
// from the data directory lets a start clear away what a killed predecessor
// left; where somebody else has taken the name, a random one must do.
func makeSocketDir(dataDir string, account *account) (string, error) {
	sum := sha256.Sum256(fmt.Appendf(nil, "%d %s", os.Getuid(), dataDir))
	// Not os.TempDir: that may be long or closed to the server's user.
	dir := filepath.Join("/tmp", "weir-"+hex.EncodeToString(sum[:6]))
	info, err := os.Lstat(dir)
	if err == nil && info.IsDir() && (owner(info) == account.uid() || owner(info) == os.Getuid()) {
		err = os.RemoveAll(dir)
		if err != nil {
			return "", fmt.Errorf("remove an old socket folder: %w", err)
		}
	}
	if err := os.Mkdir(dir, 0o700); errors.Is(err, fs.ErrExist) {
		dir, err = os.MkdirTemp("/tmp", "weir-")
		if err != nil {
			return "", fmt.Errorf("make socket folder: %w", err)
		}
	} else if err != nil {
		return "", fmt.Errorf("make socket folder: %w", err)
	}
	if err := account.own(dir); err != nil {
		_ = os.Remove(dir)
		return "", err
	}
	return dir, nil
}

func owner(info fs.FileInfo) int { return int(info.Sys().(*syscall.Stat_t).Uid) }

func portFree(port int) bool {
	if port == 0 {
		return false
	}
	l, err := net.Listen("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return false
	}
	_ = l.Close()
	return true
}

func freePort() (int, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// logTail passes the log on and remembers its end for error messages.
type logTail struct {
	to   io.Writer
	mu   sync.Mutex
	tail []byte
}

const logTailBytes = 2000

func (l *logTail) Write(p []byte) (int, error) {
	l.mu.Lock()
	l.tail = append(l.tail, p...)
	if extra := len(l.tail) - logTailBytes; extra > 0 {
		l.tail = append(l.tail[:0], l.tail[extra:]...)
	}
	l.mu.Unlock()
	if l.to != nil {
		_, _ = l.to.Write(p) // a broken log must not stop the server
	}
	return len(p), nil
}

func (l *logTail) explain(err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if text := strings.TrimSpace(string(l.tail)); text != "" {
		return fmt.Errorf("%w; its last words:\n%s", err, text)
	}
	return err
}
