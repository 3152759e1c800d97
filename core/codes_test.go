// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core

import (
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
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
