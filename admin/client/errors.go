// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"errors"
	"fmt"
	"io/fs"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
)

// Error is a failure of a command. Its text is one line: the plugin's message and the next step.
type Error struct {
	Code codes.Code
	Text string
	// unreachable says why the plugin's socket could not be reached. It is nil if the plugin has answered.
	unreachable error
	// rackFailed says that the controller answered INTERNAL: the rack failed.
	rackFailed bool
	// mayPass says that the same command can succeed later, whatever the code is.
	mayPass bool
	// fault is the row of the word in the plugin's message. It is nil if the message has none.
	fault *fault.Row
}

func (e *Error) Error() string { return e.Text }

// failed returns an [Error].
func failed(code codes.Code, format string, args ...any) error {
	return &Error{Code: code, Text: fmt.Sprintf(format, args...)}
}

// Exit codes besides 0, which means that the requested state is reached, now or before.
const (
	exitFailed = 1
	exitUsage  = 2
	// exitNotReady means: repeat the command.
	exitNotReady   = 3
	exitNotFound   = 4
	exitBlocked    = 5
	exitFull       = 6
	exitNotAllowed = 7
	// exitUnreachable means that no plugin can be reached: the host is not set up.
	exitUnreachable = 8
)

// exitCodes maps gRPC codes to exit codes. Any other code is 1. The table is permanent, because scripts rely on it.
var exitCodes = map[codes.Code]int{
	codes.InvalidArgument:    exitUsage,
	codes.OutOfRange:         exitUsage,
	codes.Unavailable:        exitNotReady,
	codes.Aborted:            exitNotReady,
	codes.DeadlineExceeded:   exitNotReady,
	codes.NotFound:           exitNotFound,
	codes.FailedPrecondition: exitBlocked,
	codes.AlreadyExists:      exitBlocked,
	codes.ResourceExhausted:  exitFull,
	codes.Unauthenticated:    exitNotAllowed,
	codes.PermissionDenied:   exitNotAllowed,
}

// ExitCode returns the exit code of a command that ended with err.
func ExitCode(err error) int {
	var failure *Error
	switch {
	case !errors.As(err, &failure):
		return exitFailed
	case failure.unreachable != nil:
		return exitUnreachable
	case exitCodes[failure.Code] != 0:
		return exitCodes[failure.Code]
	}
	return exitFailed
}

// IsWorthWaiting reports whether the same command can succeed later: the plugin, the rack or the node is not ready, the
// rack failed, or the plugin has not started yet. A socket that this user may not use will not become usable.
func IsWorthWaiting(err error) bool {
	var failure *Error
	return isUnanswered(err) || ExitCode(err) == exitNotReady || errors.As(err, &failure) && failure.mayPass
}

// isUnanswered reports whether neither the plugin nor the rack behind it has answered, so that nothing is known of the
// volume. ABORTED is an answer: another call works on the volume, and may detach it.
func isUnanswered(err error) bool {
	var failure *Error
	switch {
	case !errors.As(err, &failure):
		return false
	case failure.unreachable != nil:
		return !errors.Is(failure.unreachable, fs.ErrPermission)
	}
	return failure.rackFailed || failure.Code == codes.Unavailable || failure.Code == codes.DeadlineExceeded
}

// worthWaiting returns the same [Error] as one that is worth waiting for.
func worthWaiting(err error) error {
	var failure *Error
	if !errors.As(err, &failure) {
		return err
	}
	waits := *failure
	waits.mayPass = true
	return &waits
}

// isDenied reports whether the plugin answered that the rack denies its calls, which says nothing about the volume.
func isDenied(err error) bool {
	var failure *Error
	return errors.As(err, &failure) && failure.unreachable == nil &&
		(failure.fault == fault.ProjectUnusable || ExitCode(err) == exitNotAllowed)
}

func isNotFound(err error) bool {
	var failure *Error
	return errors.As(err, &failure) && failure.Code == codes.NotFound
}

// nextStep returns the next step after an error. It is empty if the plugin's message contains the next step.
func nextStep(row *fault.Row, method string, code codes.Code) string {
	if row != nil && row.OnHosts != "" {
		return "; " + row.OnHosts
	}
	switch code {
	case codes.Unavailable, codes.Aborted, codes.DeadlineExceeded:
		return "; repeat the command"
	case codes.NotFound:
		return `; list existing objects with "oxide-csi volume list --all" or "oxide-csi snapshot list"`
	case codes.FailedPrecondition:
		switch method {
		case "ControllerPublishVolume":
			return `; "oxide-csi volume show" shows where the volume is attached`
		case "NodeUnstageVolume":
			return `; unmount it first with "oxide-csi volume unmount"`
		}
	}
	return ""
}
