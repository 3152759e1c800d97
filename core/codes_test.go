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
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
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
