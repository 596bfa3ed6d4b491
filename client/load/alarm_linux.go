package load

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// alarm waits for short times. The runtime's timers end up to a millisecond
// late when a process is idle, since they wait in whole milliseconds; a timer of
// the kernel is precise, and waits in the runtime's poller like a connection.
type alarm struct {
	fd   int
	file *os.File
}

func newAlarm() (*alarm, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("timerfd_create", err)
	}
	return &alarm{fd, os.NewFile(uintptr(fd), "timerfd")}, nil
}

func (a *alarm) wait(d time.Duration) error {
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(max(1, d.Nanoseconds()))} // 0 would be never
	if err := unix.TimerfdSettime(a.fd, 0, &spec, nil); err != nil {
		return os.NewSyscallError("timerfd_settime", err)
	}
	var expirations [8]byte
	_, err := a.file.Read(expirations[:])
	return err
}

func (a *alarm) close() { _ = a.file.Close() }
