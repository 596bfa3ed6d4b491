package faults

import (
	"context"
	"flag"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// What the environment decides.
const (
	envAll    = "WEIR_FAULTS"        // 1 runs every row
	envSeed   = "WEIR_FAULTS_SEED"   // repeats what a run drew
	envBinary = "WEIR_FAULTS_BINARY" // the weir to test; built when empty
	envSoak   = "WEIR_FAULTS_SOAK"   // how long the soak lasts; empty skips it
	envParked = "WEIR_FAULTS_PARKED" // how many runs are parked at once
)

// raceEnabled says that this test, and so the binary it builds, detects races.
var raceEnabled bool

// all says that every row runs, at its full size.
var all = os.Getenv(envAll) == "1"

// seed is what everything that is drawn comes from. The few rows that always
// run draw the same each time.
var seed = func() uint64 {
	if text := os.Getenv(envSeed); text != "" {
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			panic(fmt.Sprintf("%s: %v", envSeed, err))
		}
		return n
	}
	if all || os.Getenv(envSoak) != "" {
		return uint64(time.Now().UnixNano()) % 1_000_000
	}
	return 1
}()

// TestMain runs rows side by side: they mostly wait, for a lease to lapse or a
// process to start.
func TestMain(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f != nil && f.Value.String() == f.DefValue {
		_ = f.Value.Set("4")
	}
	code := m.Run()
	if err := shared.stop(); err != nil {
		fmt.Fprintln(os.Stderr, "stop Postgres:", err)
		code = 1
	}
	if code == 0 {
		err := goleak.Find(
			goleak.IgnoreAnyFunction("github.com/weir-run/weir/cmd/weir/faults.init.0.func1"),   // starts processes
			goleak.IgnoreAnyFunction("github.com/Shopify/toxiproxy/v2/toxics.(*ToxicStub).Run"), // waits for ever when its link's reader is gone
			goleak.IgnoreAnyFunction("github.com/Shopify/toxiproxy/v2.(*ToxicLink).read"),
		)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	if binary.dir != "" {
		_ = os.RemoveAll(binary.dir)
	}
	os.Exit(code)
}

var binary struct {
	sync.Once
	dir, path string
	err       error
}

// weirBinary builds the command once for all rows.
func weirBinary(t *testing.T) string {
	t.Helper()
	binary.Do(func() {
		if binary.path = os.Getenv(envBinary); binary.path != "" {
			binary.path, binary.err = filepath.Abs(binary.path)
			return
		}
		if binary.dir, binary.err = os.MkdirTemp("", "weir-faults-"); binary.err != nil {
			return
		}
		binary.path = filepath.Join(binary.dir, "weir")
		args := []string{"build", "-o", binary.path}
		if raceEnabled {
			args = append(args, "-race")
		}
		if extra := os.Getenv("WEIR_TEST_BUILDFLAGS"); extra != "" {
			args = append(args, strings.Fields(extra)...)
		}
		if out, err := exec.Command("go", append(args, "github.com/weir-run/weir/cmd/weir")...).CombinedOutput(); err != nil {
			binary.err = fmt.Errorf("build weir: %w\n%s", err, out)
		}
	})
	require.NoError(t, binary.err)
	return binary.path
}

// random draws for one row: what another draws does not change it.
type random struct {
	mu sync.Mutex
	r  *rand.Rand
}

func newRandom(row string) *random {
	h := fnv.New64a()
	_, _ = h.Write([]byte(row))
	return &random{r: rand.New(rand.NewPCG(seed, h.Sum64()))}
}

// n draws a number below limit.
func (r *random) n(limit int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.r.IntN(limit)
}

// between draws a time.
func (r *random) between(least, most time.Duration) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return least + time.Duration(r.r.Int64N(int64(most-least)+1))
}

func drawn[T any](r *random, from []T) T { return from[r.n(len(from))] }

// pause waits; false means that ctx ended first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
