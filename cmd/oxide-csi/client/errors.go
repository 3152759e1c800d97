// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
)

// Error is a failure of a command. Its text is one line: the plugin's message and the next step.
type Error struct {
	Code codes.Code
	Text string
}

func (e *Error) Error() string { return e.Text }

func failed(code codes.Code, format string, args ...any) error {
	return &Error{Code: code, Text: fmt.Sprintf(format, args...)}
}

// Exit codes besides 0, which means that the requested state is reached, now or before.
const (
	exitFailed     = 1
	exitWrong      = 2
	exitNotNow     = 3
	exitNotFound   = 4
	exitInTheWay   = 5
	exitNoRoom     = 6
	exitNotAllowed = 7
)

// exits maps gRPC codes to exit codes. Any other code is 1. The table is permanent, because scripts rely on it.
var exits = map[codes.Code]int{
	codes.InvalidArgument:    exitWrong,
	codes.OutOfRange:         exitWrong,
	codes.Unavailable:        exitNotNow,
	codes.Aborted:            exitNotNow,
	codes.DeadlineExceeded:   exitNotNow,
	codes.NotFound:           exitNotFound,
	codes.FailedPrecondition: exitInTheWay,
	codes.AlreadyExists:      exitInTheWay,
	codes.ResourceExhausted:  exitNoRoom,
	codes.Unauthenticated:    exitNotAllowed,
	codes.PermissionDenied:   exitNotAllowed,
}

// ExitCode is the exit code of a command that ended with this error.
func ExitCode(err error) int {
	var own *Error
	if errors.As(err, &own) && exits[own.Code] != 0 {
		return exits[own.Code]
	}
	return exitFailed
}

func isNotFound(err error) bool {
	var own *Error
	return errors.As(err, &own) && own.Code == codes.NotFound
}

// nextStep is the next step after an error, as a command. It is empty if the plugin's message contains the next step.
func nextStep(call Call, code codes.Code) string {
	switch code {
	case codes.Unavailable, codes.Aborted, codes.DeadlineExceeded:
		return "; the command may be repeated at any time"
	case codes.NotFound:
		return `; "oxide-csi volume list --all" and "oxide-csi snapshot list" show what there is`
	case codes.FailedPrecondition:
		switch call.Method {
		case "DeleteVolume", "ControllerPublishVolume":
			return fmt.Sprintf(`; "oxide-csi volume show %s" tells where the volume is`, call.VolumeID)
		case "NodeUnstageVolume":
			return fmt.Sprintf(`; "oxide-csi volume unmount %s TARGET" takes it from there`, call.VolumeID)
		}
	}
	return ""
}
