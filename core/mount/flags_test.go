// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount_test

import (
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
)

func TestOptionsReadOnly(t *testing.T) {
	for _, tc := range []struct {
		options mount.Options
		want    bool
	}{
		{mount.Options{}, false},
		{mount.Options{ReadOnlyDisk: true}, true},
		{mount.Options{Flags: []string{"noatime,ro"}}, true},
		{mount.Options{Flags: []string{"ro", "rw"}}, false},
		{mount.Options{ReadOnlyDisk: true, Flags: []string{"rw"}}, true},
	} {
		if got := tc.options.ReadOnly(); got != tc.want {
			t.Errorf("%+v: read-only %t, want %t", tc.options, got, tc.want)
		}
	}
}
