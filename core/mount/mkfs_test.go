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

// With newer tools, too, a filesystem has the features of Debian 12's defaults, so that Linux 5.10 mounts it. Older
// tools make the same without some features.
func TestFeaturesDoNotDependOnTheTools(t *testing.T) {
	t.Parallel()
	for fsType, want := range map[string]struct {
		at       int
		features string
		// before is what tools before the version since make.
		since, before string
	}{
		"ext3": {at: 0x5c, features: "3c 00 00 00 02 00 00 00 03 00 00 00"},
		"ext4": {at: 0x5c, features: "3c 00 00 00 c2 02 00 00 6b 04 00 00"},
		// Without inobtcount and bigtime.
		"xfs": {212, "00 00 00 0d 00 00 00 0b", "5.15", "00 00 00 05 00 00 00 03"},
		// Without the tree of free space and no-holes.
		"btrfs": {
			0xb4, "03 00 00 00 00 00 00 00 41 03 00 00 00 00 00 00 00 00",
			"5.15", "00 00 00 00 00 00 00 00 41 01 00 00 00 00 00 00 00 00",
		},
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
			if want.since != "" && devicetest.OlderThan(t, "mkfs."+fsType, want.since) {
				want.features = want.before
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
	if options := []string{"-i", "nrext64=1", "-m", "rmapbt=1"}; toolLacks(t, "xfs", options[1]) {
		r.wantTooNew(t, "xfs", options...)
	} else {
		if err := r.format(t, "xfs", options...); err != nil {
			t.Fatal(err)
		}
		super, err := device.Superblock(r.dev, "xfs")
		if err != nil {
			t.Fatal(err)
		}
		if lacks := filesystem.KernelLacks("xfs", super, "5.10.0"); !strings.Contains(lacks, "nrext64") || super[215]&2 == 0 {
			t.Errorf("Linux 5.10 lacks %q, byte 215 is %x", lacks, super[215])
		}
	}
	r = newRig(t)
	devicetest.Run(t, "mkfs.ext4", "-q", "-O", "quota", r.dev.Path)
	target := t.TempDir()
	err := mount.Filesystem(t.Context(), r.dev, target, "ext4", mount.Options{})
	if err == nil { // this kernel has the module
		devicetest.Unmount(t, target)
	} else if !errors.Is(err, mount.ErrKernel) || !strings.Contains(err.Error(), "quota_v2") {
		t.Errorf("%v, want ErrKernel", err)
	}
}

// toolLacks reports whether mkfs of this machine is too old for options.
func toolLacks(t *testing.T, fsType, options string) bool {
	t.Helper()
	return strings.Contains(options, "orphan_file") && devicetest.OlderThan(t, "mkfs."+fsType, "1.47") ||
		strings.Contains(options, "nrext64") && devicetest.OlderThan(t, "mkfs."+fsType, "5.19")
}

// wantTooNew wants that options for which mkfs is too old are refused, and that the disk is still blank.
func (r *rig) wantTooNew(t *testing.T, fsType string, options ...string) {
	t.Helper()
	before := r.digest(t)
	err := r.format(t, fsType, options...)
	if !errors.Is(err, mount.ErrFormat) || !strings.Contains(err.Error(), "leave the option out") {
		t.Errorf("%v, want ErrFormat and advice", err)
	}
	if r.digest(t) != before {
		t.Error("the refused format has changed the disk")
	}
}

// Inodes have room for dates after 2038 with -T small, too, unless the user wants others.
func TestInodesHaveRoomForDates(t *testing.T) {
	t.Parallel()
	for options, want := range map[string]int{"": 256, "-T small": 256, "-I 128": 128, "-T small -I 512": 512} {
		for _, fsType := range []string{"ext3", "ext4"} {
			r := newRig(t)
			if err := r.format(t, fsType, strings.Fields(options)...); err != nil {
				t.Fatal(err)
			}
			super, err := device.Superblock(r.dev, fsType)
			if err != nil {
				t.Fatal(err)
			}
			if got := int(super[0x59])<<8 + int(super[0x58]); got != want { // s_inode_size
				t.Errorf("%s %q: an inode has %d bytes, want %d", fsType, options, got, want)
			}
		}
	}
}

// The metadata of a btrfs is on the disk twice, with the tools of every release.
func TestBtrfsKeepsItsMetadataTwice(t *testing.T) {
	t.Parallel()
	for options, want := range map[string]string{"": "DUP", "-m single": "single"} {
		r := newRig(t)
		if err := r.format(t, "btrfs", strings.Fields(options)...); err != nil {
			t.Fatal(err)
		}
		chunks := devicetest.Run(t, "btrfs", "inspect-internal", "dump-tree", "-t", "chunk", r.dev.Path)
		if dup := strings.Contains(chunks, "METADATA|DUP"); dup != (want == "DUP") {
			t.Errorf("%q: two copies: %t, want %s\n%s", options, dup, want, chunks)
		}
	}
}
