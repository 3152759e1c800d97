// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package luks

import (
	"errors"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

// The kernel kills a cryptsetup for which it has no memory. One that ends by a signal of its own says why.
func TestFailure(t *testing.T) {
	for name, test := range map[string]struct {
		result hostexec.Result
		want   error
	}{
		"success":         {hostexec.Result{}, nil},
		"no memory":       {hostexec.Result{ExitCode: 3, Stderr: "Not enough memory."}, ErrMemory},
		"killed":          {hostexec.Result{ExitCode: -1}, ErrMemory},
		"aborted":         {hostexec.Result{ExitCode: -1, Stderr: "libgcc_s.so.1 must be installed"}, ErrCryptsetup},
		"another failure": {hostexec.Result{ExitCode: 1, Stderr: "Device too small."}, ErrCryptsetup},
	} {
		err := failure("luksFormat", test.result)
		if !errors.Is(err, test.want) || err != nil && test.want == nil {
			t.Errorf("%s: %v, want %v", name, err, test.want)
		}
		if errors.Is(err, ErrCryptsetup) && !strings.Contains(err.Error(), test.result.Stderr) {
			t.Errorf("%s: %v does not repeat what cryptsetup said", name, err)
		}
	}
}
