// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
)

// A mkfs that reports success and makes nothing is not believed. The record of the format stays, so that it can be made
// again.
func TestFormatLooksAtTheDisk(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	const nothing = "-n" // mkfs.ext4 only says what it would do
	if err := r.format(t, "ext4", nothing); !errors.Is(err, mount.ErrFormat) {
		t.Errorf("%v, want ErrFormat", err)
	}
	record, err := os.ReadFile(filepath.Join(r.state, "format", r.volumeID.String()))
	if err != nil || !strings.Contains(string(record), mount.FilesystemUUID(r.volumeID).String()) {
		t.Errorf("the record of the format is %q, %v", record, err)
	}
}
