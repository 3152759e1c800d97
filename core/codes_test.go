// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// A missing program can cause several errors. In each case the operator must install it, so the code is the same.
func TestMissingProgramDecidesTheCode(t *testing.T) {
	for _, err := range []error{mount.ErrFormat, mount.ErrMount, device.ErrNotBlank, device.ErrUnreadable} {
		wrapped := fmt.Errorf("%w: %w", err, hostexec.ErrMissing)
		if got := statusOf(t.Context(), wrapped).Code(); got != codes.FailedPrecondition {
			t.Errorf("%v: %s, want %s", wrapped, got, codes.FailedPrecondition)
		}
	}
}

// The message of an RPC's error ends with the word of its row, also if the RPC has decided the code. An error without a
// row has no word.
func TestMessagesEndWithTheWord(t *testing.T) {
	for _, test := range []struct {
		err  error
		code codes.Code
		want string
	}{
		{
			fmt.Errorf("%w /dev/nvme1n1: it holds an ext4", device.ErrNotBlank),
			codes.FailedPrecondition, "refusing to format /dev/nvme1n1: it holds an ext4 [DiskNotBlank]",
		},
		{rpc.Unavailable("disk x: %w", rack.ErrForbidden), codes.Unavailable, "disk x: forbidden [RoleTooLow]"},
		{rpc.Fault(fault.InstanceFull, "instance %s is full", "y"), codes.ResourceExhausted, "instance y is full [InstanceFull]"},
		{fmt.Errorf("%w", metadata.ErrNotReady), codes.Unavailable, metadata.ErrNotReady.Error() + " [IdentityNotReady]"},
		{rpc.InvalidArgument("name is missing"), codes.InvalidArgument, "name is missing"},
		{errors.New("else"), codes.Internal, "else"},
	} {
		if got := statusOf(t.Context(), test.err); got.Code() != test.code || got.Message() != test.want {
			t.Errorf("%v gives %s, %q, want %s, %q", test.err, got.Code(), got.Message(), test.code, test.want)
		}
	}
}

// An escape sequence of a rack does not reach the orchestrator, with whichever code.
func TestErrorsArePrintable(t *testing.T) {
	for _, err := range []error{
		rpc.NotFound("disk \x1b[2J"), fmt.Errorf("\x1b[2J: %w", rack.ErrRefused), errors.New("\x1b[2J"),
	} {
		if text := statusOf(t.Context(), err).Message(); strings.Contains(text, "\x1b") || text == "" {
			t.Errorf("%T gives %q", err, text)
		}
	}
}
