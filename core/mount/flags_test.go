// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount_test

import (
	"errors"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
)

func TestCheckFlags(t *testing.T) {
	for _, allowed := range [][]string{
		nil, {"noatime"}, {"noatime,nodiratime", "discard"}, {"data=ordered", "commit=60"}, {"ro"}, {"context=system_u:object_r:x:s0:c1"},
		{"logbsize=256k"}, {"errors=remount-ro"}, {"x-systemd.automount"},
	} {
		if err := mount.CheckFlags(allowed); err != nil {
			t.Errorf("%q: %v", allowed, err)
		}
	}
	for _, refused := range [][]string{
		{"bind"}, {"noatime,remount"}, {"noatime", "loop"}, {"loop=/dev/loop1"}, {"offset=4096"}, {"logdev=/dev/x"}, {"journal_path=/dev/x"},
		{"rshared"}, {"make-private"}, {"X-mount.mkdir"}, {"X-mount.subdir=/etc"}, {"sb=32768"}, {"move"}, {" bind "}, {"a\"b"}, {"norecovery"},
	} {
		if err := mount.CheckFlags(refused); !errors.Is(err, mount.ErrOption) {
			t.Errorf("%q: %v, want ErrOption", refused, err)
		}
	}
}

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
