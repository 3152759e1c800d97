// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
)

// Error is a failure of a command. Its text is one line: the plugin's message, the next step and the word.
type Error struct {
	Code codes.Code
	Text string
	// next is the part of the text that has the next step. It may be empty.
	next string
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

// Exit codes of the commands that call a plugin. They are permanent, because scripts rely on them.
const (
	exitDone        = 0
	exitFailed      = 1
	exitUsage       = 2
	exitNotReady    = 3
	exitNotFound    = 4
	exitBlocked     = 5
	exitFull        = 6
	exitNotAllowed  = 7
	exitUnreachable = 8
	// ExitInterrupted is 128 and the number of SIGINT, as of a shell.
	ExitInterrupted = 130
)

// ExitMeaning is a row of the table of exit codes.
type ExitMeaning struct {
	Code  int
	Means string
}

// ExitMeanings are all exit codes, for the help and for docs/reference/cli.md.
var ExitMeanings = []ExitMeaning{
	{exitDone, "done, now or before"},
	{exitFailed, "any other failure"},
	{exitUsage, "the command line or one of its values is wrong, and nothing was changed"},
	{exitNotReady, "not yet: this ends by itself. Repeat the command, or use --wait"},
	{exitNotFound, "the volume, snapshot or node does not exist"},
	{exitBlocked, "something stands in the way, and somebody must act: see the message"},
	{exitFull, "the quota, the rack or the instance is full"},
	{exitNotAllowed, "the plugin's token is not accepted, or does not allow it"},
	{exitUnreachable, "no plugin listens at the socket, or this user may not use it"},
	{ExitInterrupted, "interrupted, by Ctrl-C or a signal: the plugin may still carry the call out"},
}

// exitCodes maps gRPC codes to exit codes. Any other code is 1.
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

// exitOfRow has the exit codes of the faults for which neither the actor nor the gRPC code decides.
var exitOfRow = map[*fault.Row]int{
	fault.ExpansionNeedsRoom: exitFull,     // its code is for a resizer
	fault.RackFailed:         exitNotReady, // as a rack that does not answer
	fault.RackUnknown:        exitUsage,    // its code is for a provisioner
}

// ExitCode returns the exit code of a command that ended with err.
func ExitCode(err error) int {
	var failure *Error
	switch {
	case !errors.As(err, &failure):
		return exitFailed
	case failure.unreachable != nil:
		return exitUnreachable
	case failure.fault != nil && failure.Code != codes.DeadlineExceeded && failure.Code != codes.Canceled:
		return ExitOfRow(failure.fault)
	}
	return cmp.Or(exitCodes[failure.Code], exitFailed)
}

// ExitOfRow returns the exit code of a command that meets a fault. The gRPC code of the answer does not decide: it is
// what suits an orchestrator. For example, a create with a wrong token answers UNAVAILABLE.
func ExitOfRow(row *fault.Row) int {
	if row.Actor == fault.Nobody && row.Code != codes.NotFound {
		return exitNotReady
	}
	return cmp.Or(exitOfRow[row], exitCodes[row.Code], exitFailed)
}

// endedByOthers are the faults that end while a command waits, because somebody else acts: on another node, or in
// another shell.
var endedByOthers = []*fault.Row{
	fault.RestartRefused, fault.ClaimsUnknown, fault.ClaimedThere, fault.DetachUntimed, fault.ExpansionWaits,
	fault.MountInUse, fault.MappingInUse, fault.DiskInUse,
}

// IsWorthWaiting reports whether the same command can succeed later: the plugin, the rack or the node is not ready, the
// rack failed, the plugin has not started yet, or somebody else may end what is in the way. A socket that this user may
// not use will not become usable.
func IsWorthWaiting(err error) bool {
	var failure *Error
	return isUnanswered(err) || ExitCode(err) == exitNotReady ||
		errors.As(err, &failure) && (failure.mayPass || slices.Contains(endedByOthers, failure.fault))
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
	if failure.fault != nil && ExitCode(err) != exitNotReady {
		return false
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

// WaitsFor returns the text of an error without the next step, for a command that takes that step.
func WaitsFor(err error) string {
	var failure *Error
	if errors.As(err, &failure) {
		return strings.Replace(err.Error(), failure.next, "", 1)
	}
	return err.Error()
}

// waitsFor returns an error that is worth waiting for, if it is one of the faults.
func waitsFor(err error, faults ...*fault.Row) error {
	if slices.ContainsFunc(faults, func(row *fault.Row) bool { return isFault(err, row) }) {
		return worthWaiting(err)
	}
	return err
}

func isFault(err error, row *fault.Row) bool {
	var failure *Error
	return errors.As(err, &failure) && failure.fault == row
}

func isNotFound(err error) bool {
	var failure *Error
	return errors.As(err, &failure) && failure.Code == codes.NotFound
}

// nextStep returns the next step after an error. It is empty if the plugin's message contains the next step.
func nextStep(row *fault.Row, code codes.Code) string {
	switch {
	case row != nil && row.OnHosts != "":
		return "; " + row.OnHosts
	case row != nil && ExitOfRow(row) == exitNotReady:
		return "; repeat the command"
	case row != nil:
		return ""
	}
	switch code {
	case codes.Unavailable, codes.Aborted, codes.DeadlineExceeded:
		return "; repeat the command"
	case codes.NotFound:
		return "; " + fault.NotFound.OnHosts
	}
	return ""
}
