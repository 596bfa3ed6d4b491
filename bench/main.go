// Command bench measures weir against hand-built ceilings, raw River and DBOS
// on one private Postgres, interleaved in rounds, and prints for each goal the
// ratio that was reached. README.md says what is measured and how to read it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// bench is one run.
type bench struct {
	pg   *postgres
	weir string // the binary under test
	dir  string // of this run: logs of the processes it started
	size sizes
	out  *report
}

// sizes are how much is measured.
type sizes struct {
	rounds int
	budget time.Duration // after it no other round begins

	acceptFor, acceptWarmUp time.Duration // at each number of connections
	idleStarts              int
	steadyStarts            int // at 100 a second
	backlog                 int // turns drained by weir and the grouped ceilings
	slowBacklog             int // turns drained by raw River and DBOS
	aloneTurns              int
	million                 int           // runs of a backlog that is large
	fleetTurns              int           // runs of one that is not
	fleetFor                time.Duration // how long its turns are counted
	fleets, kills           int           // kills of each fleet
	sleepers                int           // turns that run at once
	settle, idleFor         time.Duration
}

var (
	fullSizes = sizes{
		rounds: 3, budget: 11 * time.Minute, acceptFor: 5 * time.Second, acceptWarmUp: time.Second, idleStarts: 200, steadyStarts: 400, backlog: 50_000,
		slowBacklog: 2_000, aloneTurns: 100, million: 1_000_000, fleetTurns: 60_000, fleetFor: 10 * time.Second, fleets: 6, kills: 17, sleepers: 10_000,
		settle: 3 * time.Second, idleFor: 10 * time.Second,
	}
	quickSizes = sizes{
		rounds: 1, budget: 2 * time.Minute, acceptFor: time.Second, acceptWarmUp: 300 * time.Millisecond, idleStarts: 40, steadyStarts: 100, backlog: 2_000,
		slowBacklog: 300, aloneTurns: 30, million: 20_000, fleetTurns: 10_000, fleetFor: 2 * time.Second, fleets: 5, kills: 1, sleepers: 1_000,
		settle: time.Second, idleFor: 2 * time.Second,
	}
)

// section is one subject. Sections that compare run once a round; those with
// absolute goals alone run once.
type section struct {
	name  string
	title string
	once  bool
	run   func(b *bench, ctx context.Context, round int) error
	goals []goal
}

var sections = []section{acceptSection, startSection, turnsSection, fleetSection, resumeSection, memorySection}

func main() {
	if len(os.Args) > 1 && os.Args[1] == childCommand {
		exit(runChild(os.Args[2:]))
	}
	quick := flag.Bool("quick", false, "tiny sizes: shows that everything runs, proves nothing")
	only := flag.String("only", "", "comma-separated sections: accept, start, turns, fleet, resume, memory (default all)")
	rounds := flag.Int("rounds", 0, "rounds of the sections that compare (default 3, with -quick 1)")
	weir := flag.String("weir", "", "weir binary (default: build ../cmd/weir)")
	dir := flag.String("dir", "", "folder for the database and the logs, on the disk to be measured (default: the system's temporary one)")
	jsonFile := flag.String("json", "", "also write every number to this file")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	size := fullSizes
	if *quick {
		size = quickSizes
	}
	if *rounds > 0 {
		size.rounds = *rounds
	}
	exit(run(ctx, size, *only, *weir, *dir, *jsonFile))
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func run(ctx context.Context, size sizes, only, weir, dir, jsonFile string) (err error) {
	chosen, err := choose(only)
	if err != nil {
		return err
	}
	b := &bench{size: size, weir: weir}
	if b.dir, err = os.MkdirTemp(dir, "weir-bench-"); err != nil {
		return err
	}
	defer func() {
		if err == nil {
			err = os.RemoveAll(b.dir)
		} else {
			fmt.Fprintln(os.Stderr, "bench: logs are kept in", b.dir)
		}
	}()
	if b.weir == "" {
		b.weir = filepath.Join(b.dir, "weir")
		if err := buildWeir(ctx, b.weir); err != nil {
			return err
		}
	}
	if b.pg, err = startPostgres(ctx, b.dir); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.pg.stop()) }()
	b.out = newReport(b.pg.version())

	began := time.Now()
	for round := 1; round <= size.rounds; round++ {
		if time.Since(began) > size.budget {
			fmt.Fprintf(os.Stderr, "bench: time is up after %d rounds\n", round-1)
			break
		}
		for _, s := range chosen {
			if s.once && round > 1 {
				continue
			}
			b.out.begin(s, round)
			fmt.Fprintf(os.Stderr, "round %d of %d: %s\n", round, size.rounds, s.name)
			if err := s.run(b, ctx, round); err != nil {
				return fmt.Errorf("%s, round %d: %w", s.name, round, err)
			}
		}
	}
	b.out.print(os.Stdout, chosen)
	if jsonFile != "" {
		return b.out.writeJSON(jsonFile, chosen)
	}
	return nil
}

func choose(only string) ([]section, error) {
	if only == "" {
		return sections, nil
	}
	var chosen []section
	for name := range strings.SplitSeq(only, ",") {
		i := slices.IndexFunc(sections, func(s section) bool { return s.name == name })
		if i < 0 {
			return nil, fmt.Errorf("there is no section %q", name)
		}
		chosen = append(chosen, sections[i])
	}
	return chosen, nil
}

// pause waits, or returns why ctx ended.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// until asks ready, every interval, until it says yes.
func until(ctx context.Context, every, limit time.Duration, what string, ready func() (bool, error)) error {
	deadline := time.Now().Add(limit)
	for {
		ok, err := ready()
		if err != nil {
			return fmt.Errorf("wait for %s: %w", what, err)
		}
		if ok {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("wait for %s: not within %s", what, limit)
		}
		if err := pause(ctx, every); err != nil {
			return err
		}
	}
}

// parallel calls do for 0 to n-1, so many at once.
func parallel(width, n int, do func(i int) error) error {
	next := make(chan int)
	errs := make([]error, width)
	var wg sync.WaitGroup
	for w := range width {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range next {
				if err := do(i); err != nil {
					errs[w] = err
				}
			}
		}()
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	return errors.Join(errs...)
}
