// Package cluster runs a private Postgres for `weir dev` and for the tests: it
// finds the binaries, makes the data directory, starts the server and ends it.
//
// # What lies where
//
//	<DataDir>/weir.lock   flock of the owning process; holds its PID, the port and the URL
//	<DataDir>/password    of the role "weir", for TCP
//	<DataDir>/pgdata/     Postgres's own data directory
//	/tmp/weir-<hash>/     the Unix socket; the hash is over DataDir and the user,
//	                      since a socket's path may not exceed about 100 bytes
//
// The role "weir" is a superuser. Over the socket it needs no password: the
// folder is closed to everybody but the server's user (and root). Over TCP, on
// 127.0.0.1 only, it needs the password.
//
// # Who may own a data directory
//
// The lock decides, and nothing else: an flock ends with its holder however the
// holder dies, and the kernel gives it to one process at a time. Postgres's own
// postmaster.pid cannot decide, since it survives a power cut and its PID may
// since belong to another process; whoever holds our lock and sees no server at
// work in pgdata removes it.
//
// # The server dies with its owner
//
// A private server that outlives its owner would hold memory, a port and the
// data directory for ever, so it must end also when the owner is killed by
// SIGKILL and can do nothing about it. On Linux the kernel sees to that
// (PR_SET_PDEATHSIG, leash_linux.go), elsewhere a small shell that waits for
// the end of a pipe (watch.go).
//
// Either sends SIGQUIT to the postmaster: it ends its children and removes
// pid file and socket, without a checkpoint, within milliseconds; the next
// start recovers from the WAL, as after a crash, and nothing committed is lost.
// SIGKILL would leave the children to notice by themselves, with the data
// directory's shared memory held until the last has, and the files behind.
// SIGINT and SIGTERM would write a checkpoint or wait for clients first, which
// can take minutes nobody asked for.
//
// # As root
//
// Postgres refuses to run as root. Then the server runs as the user "postgres",
// or "nobody" where there is none, and pgdata belongs to that user. A data
// directory below a folder that this user may not enter, such as /root, still
// works on Linux: the server inherits the open directory and reaches it as
// /proc/self/fd/3, which needs no right on the way to it.
package cluster
