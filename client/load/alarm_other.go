//go:build !linux

package load

import "time"

// alarm waits for short times, as well as the runtime can.
type alarm struct{}

func newAlarm() (*alarm, error) { return &alarm{}, nil }

func (*alarm) wait(d time.Duration) error {
	time.Sleep(d)
	return nil
}

func (*alarm) close() {}
