// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rpc

import (
	"errors"
	"fmt"
	"log/slog"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
)

// Error is an error with the gRPC code that the RPC answers. It is for errors whose code depends on what the RPC found
// on the rack or the node. Other errors get their code from [fault.Table].
type Error struct {
	code codes.Code
	err  error
}

func (e *Error) Error() string { return e.err.Error() }
func (e *Error) Unwrap() error { return e.err }

// Code returns the gRPC code that the RPC answers.
func (e *Error) Code() codes.Code { return e.code }

func withCode(code codes.Code, format string, args []any) error {
	return &Error{code: code, err: fmt.Errorf(format, args...)}
}

// Fault returns an [Error] with the code and the word of a row of the table of faults.
func Fault(row *fault.Row, format string, args ...any) error {
	return &Error{code: row.Code, err: row.Errorf(format, args...)}
}

// InvalidArgument returns an [Error] with the code INVALID_ARGUMENT.
func InvalidArgument(format string, args ...any) error {
	return withCode(codes.InvalidArgument, format, args)
}

// NotFound returns an [Error] with the code NOT_FOUND.
func NotFound(format string, args ...any) error { return withCode(codes.NotFound, format, args) }

// AlreadyExists returns an [Error] with the code ALREADY_EXISTS.
func AlreadyExists(format string, args ...any) error {
	return withCode(codes.AlreadyExists, format, args)
}

// FailedPrecondition returns an [Error] with the code FAILED_PRECONDITION.
func FailedPrecondition(format string, args ...any) error {
	return withCode(codes.FailedPrecondition, format, args)
}

// ResourceExhausted returns an [Error] with the code RESOURCE_EXHAUSTED.
func ResourceExhausted(format string, args ...any) error {
	return withCode(codes.ResourceExhausted, format, args)
}

// OutOfRange returns an [Error] with the code OUT_OF_RANGE.
func OutOfRange(format string, args ...any) error { return withCode(codes.OutOfRange, format, args) }

// Aborted returns an [Error] with the code ABORTED.
func Aborted(format string, args ...any) error { return withCode(codes.Aborted, format, args) }

// Unavailable returns an [Error] with the code UNAVAILABLE.
func Unavailable(format string, args ...any) error { return withCode(codes.Unavailable, format, args) }

// Internal returns an [Error] with the code INTERNAL.
func Internal(format string, args ...any) error { return withCode(codes.Internal, format, args) }

// rackError is an error that a rack answered.
type rackError struct {
	requestID string
	err       error
}

func (e *rackError) Error() string { return e.err.Error() }
func (e *rackError) Unwrap() error { return e.err }

// WithRackRequestID adds the rack's ID of a request to the error that the rack answered. The ID is for the log only: an
// orchestrator takes each new text for a new event, and the ID is another one at each repetition.
func WithRackRequestID(err error, requestID string) error { return &rackError{requestID, err} }

// RackRequestID returns the ID of [WithRackRequestID], or an empty string.
func RackRequestID(err error) string {
	var answered *rackError
	if errors.As(err, &answered) {
		return answered.requestID
	}
	return ""
}

// loggedError is an expected error, or an error that was logged before.
type loggedError struct {
	level slog.Level
	err   error
}

func (e *loggedError) Error() string { return e.err.Error() }
func (e *loggedError) Unwrap() error { return e.err }

// LoggedAt wraps err so that the failed RPC is logged at this level. Other failed RPCs are logged at level error.
func LoggedAt(level slog.Level, err error) error { return &loggedError{level, err} }

// LogLevel returns the level at which an RPC that failed with err is logged.
func LogLevel(err error) slog.Level {
	var logged *loggedError
	if errors.As(err, &logged) {
		return logged.level
	}
	return slog.LevelError
}
