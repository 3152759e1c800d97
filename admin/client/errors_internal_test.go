// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"testing"

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
		err := answerError(
			t.Context(),
			Call{Method: "Publish"},
			"",
			status.New(codes.FailedPrecondition, message),
		)
		if err.Error() != want {
			t.Errorf("%q gives %q, want %q", message, err, want)
		}
	}
}
