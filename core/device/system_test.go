// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device

import (
	"errors"
	"testing"

	"github.com/moby/sys/mountinfo"
)

func TestCheckNotSystem(t *testing.T) {
	dev := Device{Path: "/dev/nvme0n1", Disk: Disk{
		Name: "nvme0n1", Number: Number{259, 0}, Partitions: map[string]Number{"nvme0n1p1": {259, 1}},
	}}
	for _, tc := range []struct {
		name  string
		mount mountinfo.Info
		want  error
		// held is what is wanted if this node holds the disk already.
		held error
	}{
		{"the whole disk carries /", mountinfo.Info{Major: 259, Minor: 0, Mountpoint: "/"}, ErrInUse, nil},
		{"the whole disk carries /boot", mountinfo.Info{Major: 259, Minor: 0, Mountpoint: "/boot"}, ErrInUse, nil},
		{"the whole disk carries /srv", mountinfo.Info{Major: 259, Minor: 0, Mountpoint: "/srv"}, ErrInUse, nil},
		{"a partition is mounted", mountinfo.Info{Major: 259, Minor: 1, Mountpoint: "/boot/efi"}, ErrInUse, ErrInUse},
		{"a folder of a partition is mounted in this container", mountinfo.Info{Major: 259, Minor: 1, Root: "/var/lib/kubelet", Mountpoint: "/var/lib/kubelet"}, ErrInUse, ErrInUse},
		{"the whole disk is a staged volume", mountinfo.Info{Major: 259, Minor: 0, Mountpoint: "/var/lib/kubelet/staging"}, nil, nil},
		{"another disk carries /", mountinfo.Info{Major: 254, Minor: 0, Mountpoint: "/"}, nil, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := checkNotSystem(dev, false, []*mountinfo.Info{&tc.mount}); !errors.Is(err, tc.want) {
				t.Errorf("%v, want %v", err, tc.want)
			}
			if err := checkNotSystem(dev, true, []*mountinfo.Info{&tc.mount}); !errors.Is(err, tc.held) {
				t.Errorf("held: %v, want %v", err, tc.held)
			}
		})
	}
}

// For every size of a disk, all ranges of the scanner are within the disk, and the head and the tail are complete.
func TestSignaturesLieOnTheDisk(t *testing.T) {
	for _, sizeBytes := range []int64{512, 4096, mib - 512, mib, 3*mib + 512, 320 * mib, gib, 10 * gib, 300 * gib, 1023 * gib} {
		places := append(headAndTail(sizeBytes), signatures(sizeBytes)...)
		for _, r := range places {
			if r.offset < 0 || r.length <= 0 || r.offset+r.length > sizeBytes {
				t.Errorf("disk of %d bytes: %q is at %d, %d bytes long", sizeBytes, r.format, r.offset, r.length)
			}
		}
		if places[0].offset != 0 || places[1].offset+places[1].length != sizeBytes {
			t.Errorf(
				"disk of %d bytes: head at %d, tail ends at %d",
				sizeBytes,
				places[0].offset,
				places[1].offset+places[1].length,
			)
		}
	}
}

// The scanner reads every copy of the superblock that mkfs.ext4 makes on a disk of 10 GiB. The blocks are those that
// mkfs.ext4 prints as "Superblock backups stored on blocks".
func TestSignaturesHaveAllCopiesOfExt(t *testing.T) {
	places := map[int64]bool{}
	for _, r := range signatures(10 * gib) {
		places[r.offset] = true
	}
	for _, block := range []int64{32768, 98304, 163840, 229376, 294912, 819200, 884736, 1605632} {
		if !places[block*4*kib] {
			t.Errorf("the copy in block %d is not read", block)
		}
	}
}
