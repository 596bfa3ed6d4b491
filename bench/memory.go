package main

import (
	"bufio"
	"context"
	"fmt"
	"time"

	"github.com/riverqueue/river"
)

const riverSleeper = "raw River worker"

var memorySection = section{
	name: "memory", title: "what a worker's process takes: idle, and for each turn that runs", once: true, run: (*bench).runMemory,
	goals: []goal{
		atMost(45, "idle RSS, MB", series{weirWorker, "idle MB"}, series{}),
		atMost(2, "idle CPU, % of a core", series{weirWorker, "idle CPU %"}, series{}),
		atMost(40, "kB for each running turn", series{weirWorker, "kB/turn"}, series{}),
	},
}

func (b *bench) runMemory(ctx context.Context, _ int) error {
	if err := b.weirMemory(ctx); err != nil {
		return fmt.Errorf("%s: %w", weirWorker, err)
	}
	if err := b.riverMemory(ctx); err != nil {
		return fmt.Errorf("%s: %w", riverSleeper, err)
	}
	return nil
}

func (b *bench) weirMemory(ctx context.Context) error {
	d, err := b.weirDatabase(ctx)
	if err != nil {
		return err
	}
	defer d.drop()
	p, _, err := b.startWeir(ctx, d, "worker", "--slots", fmt.Sprint(b.size.sleepers))
	if err != nil {
		return err
	}
	defer p.kill()
	a, err := newAccepter(ctx, d.url)
	if err != nil {
		return err
	}
	defer a.close()
	return b.memoryOf(ctx, weirWorker, p, func() error {
		if _, err := a.acceptMany(ctx, plain, "!sleep 10m", b.size.sleepers); err != nil {
			return err
		}
		return awaitCount(ctx, d, b.size.sleepers, `SELECT count(*) FROM run WHERE state = 'running'`)
	})
}

func (b *bench) riverMemory(ctx context.Context) error {
	d, err := b.riverDatabase(ctx)
	if err != nil {
		return err
	}
	defer d.drop()
	p, _, err := b.spawnChild(ctx, "sleep", childConfig{URL: d.url, Width: b.size.sleepers})
	if err != nil {
		return err
	}
	defer p.kill()
	return b.memoryOf(ctx, riverSleeper, p, func() error {
		if err := insertJobs(ctx, d.pool, b.size.sleepers); err != nil {
			return err
		}
		return awaitCount(ctx, d, b.size.sleepers, `SELECT count(*) FROM river_job WHERE state = 'running'`)
	})
}

// memoryOf measures a worker before and after load gives it all the work it
// has room for.
func (b *bench) memoryOf(ctx context.Context, name string, p *process, load func() error) error {
	settle := b.size.settle
	if err := pause(ctx, settle); err != nil {
		return err
	}
	m := b.meter(p)
	if err := pause(ctx, b.size.idleFor); err != nil {
		return err
	}
	wall, own, pg := m.stop()
	idle, err := p.rss()
	if err != nil {
		return err
	}
	if err := load(); err != nil {
		return fmt.Errorf("%w: %s", err, p.lastWords())
	}
	if err := pause(ctx, settle); err != nil {
		return err
	}
	loaded, err := p.rss()
	if err != nil {
		return err
	}
	b.out.add(name, "idle MB", idle)
	b.out.add(name, "idle CPU %", own/wall.Seconds()*100)
	b.out.add(name, "idle pg CPU %", pg/wall.Seconds()*100)
	b.out.add(name, "turns", float64(b.size.sleepers))
	b.out.add(name, "loaded MB", loaded)
	b.out.add(name, "kB/turn", (loaded-idle)*1024/float64(b.size.sleepers))
	return nil
}

func awaitCount(ctx context.Context, d *database, n int, count string) error {
	return until(ctx, 50*time.Millisecond, time.Minute, fmt.Sprintf("%d to run", n), func() (bool, error) {
		var running int
		err := d.pool.QueryRow(ctx, count).Scan(&running)
		return running >= n, err
	})
}

// sleepChild is a River worker whose jobs take long.
func sleepChild(ctx context.Context, c childConfig, in *bufio.Reader) error {
	pool, err := openChildPool(ctx, c.URL, 16)
	if err != nil {
		return err
	}
	defer pool.Close()
	client, err := newWorker(pool, river.QueueDefault, c.Width, func(ctx context.Context, _ *river.Job[handTurn]) error {
		return pause(ctx, 10*time.Minute)
	})
	if err != nil {
		return err
	}
	if err := client.Start(ctx); err != nil {
		return err
	}
	fmt.Println("ready")
	_, err = in.ReadString('\n') // until the bench kills us
	return err
}
