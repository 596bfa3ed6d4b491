package main

import (
	"bufio"
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dbos-inc/dbos-transact-golang/dbos"
)

const (
	dbosWidth   = 100 // workflows at once
	dbosCallers = 32
	dbosSteps   = 4
	dbosPoll    = 10 * time.Millisecond // its default of 1 s starts 100 workflows a second
)

// runDBOS measures workflows of four steps, queued and called directly.
func (b *bench) runDBOS(ctx context.Context) error {
	for _, c := range []struct{ name, kind string }{{dbosQueue, "queue"}, {dbosDirect, "direct"}} {
		if err := b.dbosOf(ctx, c.name, c.kind); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

func (b *bench) dbosOf(ctx context.Context, name, kind string) error {
	// DBOS keeps its tables in a schema of its own and makes them itself.
	if err := b.pg.template(ctx, "template_empty", "", func(string) error { return nil }); err != nil {
		return err
	}
	d, err := b.pg.clone(ctx, "template_empty")
	if err != nil {
		return err
	}
	defer d.drop()
	p, _, err := b.spawnChild(ctx, "dbos", childConfig{URL: d.url, Kind: kind, Turns: b.size.slowBacklog})
	if err != nil {
		return err
	}
	defer p.kill()
	if _, err := d.pool.Exec(ctx, "VACUUM ANALYZE"); err != nil {
		return err
	}
	m := b.meter(p)
	if err := p.say("go"); err != nil {
		return err
	}
	seconds, err := p.expect(ctx, "done", 2*time.Minute)
	if err != nil {
		return err
	}
	_, own, pg := m.stop()
	span, err := strconv.ParseFloat(seconds, 64)
	if err != nil {
		return err
	}
	b.addTurns(name, float64(b.size.slowBacklog)/span, own, pg, b.size.slowBacklog)
	return nil
}

// dbosRun counts the workflows of a child.
type dbosRun struct {
	begin sync.Once
	began time.Time
	left  atomic.Int64
	done  chan struct{}
}

func (r *dbosRun) workflow(ctx dbos.Context, _ int) (string, error) {
	r.begin.Do(func() { r.began = time.Now() })
	for i := range dbosSteps {
		if _, err := dbos.RunAsStep(ctx, dbosStep, dbos.WithStepName("s"+strconv.Itoa(i))); err != nil {
			return "", err
		}
	}
	if r.left.Add(-1) == 0 {
		close(r.done)
	}
	return "ok", nil
}

func dbosStep(context.Context) (string, error) { return stepPayload, nil }

// dbosChild works a backlog of workflows, or calls them, once it is told to
// go, and says how long that took from the first workflow's start to the last
// one's end.
func dbosChild(ctx context.Context, c childConfig, in *bufio.Reader) error {
	pool, err := openChildPool(ctx, c.URL, 40)
	if err != nil {
		return err
	}
	defer pool.Close()
	d, err := dbos.NewContext(ctx, dbos.Config{AppName: "bench", SystemDBPool: pool, Logger: quiet, ApplicationVersion: "1"})
	if err != nil {
		return err
	}
	r := &dbosRun{done: make(chan struct{})}
	r.left.Store(int64(c.Turns))
	dbos.RegisterWorkflow(d, r.workflow)
	d.ListenQueues(d, "nothing yet")
	if err := dbos.Launch(d); err != nil {
		return err
	}
	queue, err := dbos.RegisterQueue(d, "turns", dbos.WithWorkerConcurrency(dbosWidth), dbos.WithQueueBasePollingInterval(dbosPoll))
	if err != nil {
		return err
	}
	if c.Kind == "queue" {
		err = parallel(8, c.Turns, func(int) error {
			_, err := dbos.RunWorkflow(d, r.workflow, 0, dbos.WithQueue(queue))
			return err
		})
		if err != nil {
			return err
		}
	}
	fmt.Println("ready")
	if _, err := in.ReadString('\n'); err != nil {
		return err
	}
	if c.Kind == "queue" {
		d.ListenQueues(d, queue.GetName())
	} else {
		err = parallel(dbosCallers, c.Turns, func(int) error {
			handle, err := dbos.RunWorkflow(d, r.workflow, 0)
			if err != nil {
				return err
			}
			_, err = handle.GetResult()
			return err
		})
		if err != nil {
			return err
		}
	}
	<-r.done
	fmt.Println("done", time.Since(r.began).Seconds())
	_, err = in.ReadString('\n') // until the bench kills us
	return err
}
