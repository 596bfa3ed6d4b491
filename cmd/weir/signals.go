package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"
	"time"
)

var (
	errStopping = errors.New("a signal asked to stop")
	errStopNow  = errors.New("a second signal asked to stop at once")
)

// hardStop bounds what a process still does after the second signal.
const hardStop = 2 * time.Second

// withSignals returns two contexts: soft ends with the first SIGTERM or SIGINT,
// which asks to drain; hard with the second, which asks to stop at once. A
// process that has not ended hardStop later is ended.
func withSignals(ctx context.Context) (soft, hard context.Context, stop func()) {
	hard, cut := context.WithCancelCause(ctx)
	soft, drain := context.WithCancelCause(hard)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, os.Interrupt)
	done := make(chan struct{})
	go func() {
		for n := 0; ; n++ {
			select {
			case <-signals:
			case <-done:
				return
			}
			switch n {
			case 0:
				drain(errStopping)
			case 1:
				cut(errStopNow)
				time.AfterFunc(hardStop, func() { os.Exit(exitFailed) })
			default:
				os.Exit(exitFailed)
			}
		}
	}()
	return soft, hard, func() {
		signal.Stop(signals)
		close(done)
		cut(nil)
	}
}
