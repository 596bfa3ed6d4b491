package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/weir-run/weir/client"
)

// The exit codes of contract/surface.md §1.
const (
	exitOK        = 0
	exitFailed    = 1
	exitUsage     = 2
	exitNotFound  = 3
	exitDenied    = 4
	exitTimeout   = 5
	exitRunFailed = 6
	exitBusy      = 7
)

// usageError is a command line, an environment or a config file that cannot be
// followed.
type usageError struct{ message string }

func (e *usageError) Error() string { return e.message }

func usagef(format string, args ...any) error { return &usageError{fmt.Sprintf(format, args...)} }

// exitError ends the process with a code of its own. err may be nil: then
// everything has been said.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// errTimeout says that what a client command waited for did not come in time.
var errTimeout = errors.New("timed out")

// exitCode is the code of a command that returned err.
func exitCode(err error) int {
	if err == nil {
		return exitOK
	}
	if e, ok := errors.AsType[*exitError](err); ok {
		return e.code
	}
	if _, ok := errors.AsType[*usageError](err); ok {
		return exitUsage
	}
	if e, ok := errors.AsType[*client.Error](err); ok {
		return rpcExitCode(e)
	}
	if errors.Is(err, errTimeout) || errors.Is(err, context.DeadlineExceeded) {
		return exitTimeout
	}
	// cobra has no type for these two.
	if text := err.Error(); strings.HasPrefix(text, "unknown command") || strings.HasPrefix(text, "required flag(s)") {
		return exitUsage
	}
	return exitFailed
}

// rpcExitCode is the code of a call that the API refused.
func rpcExitCode(e *client.Error) int {
	switch {
	case e.Code == client.CodeBusy:
		return exitBusy
	case e.Code == client.CodeTurnFailed:
		return exitRunFailed
	case e.Code == client.CodeStillRunning:
		return exitTimeout
	case e.Code == client.CodeUnauthorized, strings.HasPrefix(e.Message, "Insufficient scope"):
		return exitDenied
	case e.Code == client.CodeInvalidParams && e.Reason() == "not_found":
		return exitNotFound
	case e.Code == client.CodeInvalidParams:
		return exitUsage
	default:
		return exitFailed
	}
}

// errorText is what a person reads of err, with what to do about it.
func errorText(err error) string {
	if err == nil {
		return ""
	}
	text := err.Error()
	if e, ok := errors.AsType[*client.UnreachableError](err); ok {
		text = fmt.Sprintf("%v\n  is it running? Start one with \"weir dev\", or name another with --url or WEIR_URL", e)
	}
	if e, ok := errors.AsType[*client.Error](err); ok {
		switch {
		case e.Code == client.CodeUnauthorized && os.Getenv("WEIR_TOKEN") == "":
			text += "\n  give a token with --token or WEIR_TOKEN; \"weir tokens create\" makes one"
		case e.Code == client.CodeUnauthorized:
			text += "\n  the token of --token or WEIR_TOKEN is not valid there"
		case strings.HasPrefix(e.Message, "Insufficient scope"):
			text += fmt.Sprintf(" (%s)\n  use a token that has it; \"weir tokens create\" makes one", e.Method)
		case e.Code == client.CodeMethodNotFound:
			text = fmt.Sprintf("this server has no method %s; is it of another version?", e.Method)
		}
	}
	return text
}
