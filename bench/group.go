package main

import (
	"context"
	"sync"
)

// group is the hand-built group commit: a writer takes what waits when it
// becomes free, without a timer, and callers wait for the commit that holds
// their item.
type group[T any] struct {
	in     chan *grouped[T]
	wg     sync.WaitGroup
	commit func(ctx context.Context, items []T) error
}

type grouped[T any] struct {
	item T
	done chan error // buffered
}

const (
	groupWriters = 3
	groupMax     = 512
)

func newGroup[T any](writers int, commit func(ctx context.Context, items []T) error) *group[T] {
	g := &group[T]{in: make(chan *grouped[T], 4096), commit: commit}
	for range writers {
		g.wg.Add(1)
		go g.write()
	}
	return g
}

func (g *group[T]) write() {
	defer g.wg.Done()
	for first := range g.in {
		batch := []*grouped[T]{first}
		items := []T{first.item}
	fill:
		for len(batch) < groupMax {
			select {
			case next, ok := <-g.in:
				if !ok {
					break fill
				}
				batch, items = append(batch, next), append(items, next.item)
			default:
				break fill
			}
		}
		err := g.commit(context.Background(), items)
		for _, b := range batch {
			b.done <- err
		}
	}
}

func (g *group[T]) do(item T) error {
	b := &grouped[T]{item, make(chan error, 1)}
	g.in <- b
	return <-b.done
}
