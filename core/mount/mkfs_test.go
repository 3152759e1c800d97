// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
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

// A filesystem has the features of Debian 12's defaults with the tools of every release, so that Linux 5.10 mounts it.
func TestFeaturesDoNotDependOnTheTools(t *testing.T) {
	t.Parallel()
	for fsType, want := range map[string]struct {
		at       int
		features string
	}{
		"ext3":  {0x5c, "3c 00 00 00 02 00 00 00 03 00 00 00"},
		"ext4":  {0x5c, "3c 00 00 00 c2 02 00 00 6b 04 00 00"},
		"xfs":   {212, "00 00 00 0d 00 00 00 0b"},
		"btrfs": {0xb4, "03 00 00 00 00 00 00 00 41 03 00 00 00 00 00 00 00 00"},
	} {
		t.Run(fsType, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			if err := r.format(t, fsType); err != nil {
				t.Fatal(err)
			}
			super, err := device.Superblock(r.dev, fsType)
			if err != nil {
				t.Fatal(err)
			}
			if fsType == "btrfs" {
				super[0xbc] &^= 0x20 // big_metadata: if mkfs does not set it, the kernel does
			}
			length := (len(want.features) + 1) / 3
			if got := fmt.Sprintf("% x", super[want.at:want.at+length]); got != want.features {
				t.Errorf("features %s, want %s", got, want.features)
			}
			if lacks := filesystem.KernelLacks(fsType, super, "5.10.0-35-amd64"); lacks != "" {
				t.Errorf("Linux 5.10 does not mount it: %s", lacks)
			}
		})
	}
}

// A user's option adds a feature. The kernel that lacks one is named when it refuses the mount.
func TestFeatureThatAKernelLacks(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	if err := r.format(t, "xfs", "-i", "nrext64=1", "-m", "rmapbt=1"); err != nil {
		t.Fatal(err)
	}
	super, err := device.Superblock(r.dev, "xfs")
	if err != nil {
		t.Fatal(err)
	}
	if lacks := filesystem.KernelLacks("xfs", super, "5.10.0"); !strings.Contains(lacks, "nrext64") || super[215]&2 == 0 {
		t.Errorf("Linux 5.10 lacks %q, byte 215 is %x", lacks, super[215])
	}
	r = newRig(t)
	devicetest.Run(t, "mkfs.ext4", "-q", "-O", "quota", r.dev.Path)
	target := t.TempDir()
	err = mount.Filesystem(t.Context(), r.dev, target, "ext4", mount.Options{})
	if err == nil { // this kernel has the module
		devicetest.Unmount(t, target)
	} else if !errors.Is(err, mount.ErrKernel) || !strings.Contains(err.Error(), "quota_v2") {
		t.Errorf("%v, want ErrKernel", err)
	}
}
