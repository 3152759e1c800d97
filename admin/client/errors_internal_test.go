// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
)

// A command tells the next step of the fault on a plain host, else that of the code, and its text ends with the word.
func TestNextStepOfAFault(t *testing.T) {
	for message, want := range map[string]string{
		"x [TokenRejected]": "x; " + fault.TokenRejected.OnHosts + " [TokenRejected]",
		"x [DiskFaulted]":   "x [DiskFaulted]",
		"x":                 "x",
	} {
		err := answerError(t.Context(), "Publish", "", status.New(codes.FailedPrecondition, message))
		if err.Error() != want {
			t.Errorf("%q gives %q, want %q", message, err, want)
		}
	}
}

// A plugin that notices the end of --timeout before the command does ends the stream, which gRPC calls canceled.
func TestTimeoutThatThePluginNotices(t *testing.T) {
	over, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	later, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	for _, code := range []codes.Code{codes.Canceled, codes.DeadlineExceeded, codes.Aborted} {
		var late, early *Error
		errors.As(answerError(over, "CreateVolume", "", status.New(code, "stream ended")), &late)
		errors.As(answerError(later, "CreateVolume", "", status.New(code, "stream ended")), &early)
		if timeout := strings.Contains(late.Text, "--timeout"); timeout != (code != codes.Aborted) {
			t.Errorf("%s after the deadline: %v", code, late)
		}
		if early.Code != code || strings.Contains(early.Text, "--timeout") {
			t.Errorf("%s before the deadline: %v", code, early)
		}
	}
}
