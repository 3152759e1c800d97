// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package filesystem

import (
	"strings"
	"testing"
)

func TestKernelLacks(t *testing.T) {
	for _, tc := range []struct {
		fsType, release string
		at              int
		bit             byte
		want            string
	}{
		{"ext4", "5.10.0-35-amd64", 0x66, 0x01, "orphan_present needs Linux 5.15, and this node has 5.10"},
		{"ext4", "5.15.1", 0x66, 0x01, ""},
		{"ext3", "7.2.0", 0x65, 0x01, "quota needs the kernel module quota_v2"},
		{"xfs", "5.4", 219, 0x08, "bigtime needs Linux 5.10"},
		{"xfs", "6.1.0-37-cloud-amd64", 219, 0x80, "parent needs Linux 6.10"},
		{"xfs", "6.12.1", 219, 0xeb, ""},
		{"btrfs", "5.10.0", 0xb4, 0x0b, "block-group-tree needs Linux 6.1"},
		{"btrfs", "6.1.0", 0xb4, 0x0b, ""},
		{"btrfs", "5.4.0", 0xc4, 0x02, "a checksum other than crc32c needs Linux 5.5"},
		{"xfs", "an unknown release", 219, 0xff, ""},
		{"btrfs", "5.4.0", 219, 0xff, ""}, // a bit of another filesystem
	} {
		super := make([]byte, 1024)
		super[tc.at] = tc.bit
		if got := KernelLacks(tc.fsType, super, tc.release); !strings.Contains(got, tc.want) || tc.want == "" && got != "" {
			t.Errorf("%s, byte %#x %#x, Linux %s: %q, want %q", tc.fsType, tc.at, tc.bit, tc.release, got, tc.want)
		}
	}
	for _, tc := range []struct{ fsType, options, release, want string }{
		{"xfs", "-i size=512,nrext64=1", "5.10.0", "nrext64 needs Linux 5.19"}, {"xfs", "-i nrext64=0", "5.10.0", ""},
		{"xfs", "-i nrext64=1", "5.19.0", ""}, {"ext4", "-O 64bit,orphan_file", "5.10.0", "orphan_file needs Linux 5.15"},
		{"ext4", "-O ^orphan_file", "5.10.0", ""}, {"btrfs", "--csum xxhash", "5.4.0", "needs Linux 5.5"},
		{"btrfs", "--csum=crc32c", "5.4.0", ""}, {"", "", "5.4.0", ""},
	} {
		args, err := ParseMkfsOptions(tc.fsType, tc.options)
		if err != nil {
			t.Fatal(err)
		}
		got := KernelLacksOption(tc.fsType, args, tc.release)
		if !strings.Contains(got, tc.want) || tc.want == "" && got != "" {
			t.Errorf("%s %s, Linux %s: %q, want %q", tc.fsType, tc.options, tc.release, got, tc.want)
		}
	}
	if got := KernelLacks("xfs", nil, "5.4"); got != "" {
		t.Errorf("no superblock: %q", got)
	}
}

func TestMkfsLacksOption(t *testing.T) {
	const ext, xfs = "mke2fs 1.46.2 (28-Feb-2021)\n\tUsing EXT2FS Library version 1.46.2\n", "mkfs.xfs version 5.10.0\n"
	for _, tc := range []struct{ fsType, options, said, want string }{
		{"ext4", "-O 64bit,orphan_file", ext, "orphan_file needs e2fsprogs 1.47, and this node has 1.46"},
		{"", "-O ^orphan_file", ext, "orphan_file needs e2fsprogs 1.47"}, {"ext4", "-O 64bit -L orphan", ext, ""},
		{"ext4", "-O orphan_file", "mke2fs 1.47.0 (5-Feb-2023)", ""}, {"ext4", "-O orphan_file", "no version", ""},
		{"xfs", "-i size=512,nrext64=0", xfs, "nrext64 needs xfsprogs 5.19, and this node has 5.10"},
		{"xfs", "-i nrext64=1", "mkfs.xfs version 6.1.0", ""}, {"btrfs", "-m single", "mkfs.btrfs, part of btrfs-progs v5.10.1", ""},
	} {
		args, err := ParseMkfsOptions(tc.fsType, tc.options)
		if err != nil {
			t.Fatal(err)
		}
		got := MkfsLacksOption(tc.fsType, args, tc.said)
		if !strings.Contains(got, tc.want) || tc.want == "" && got != "" {
			t.Errorf("%s %s, %s: %q, want %q", tc.fsType, tc.options, tc.said, got, tc.want)
		}
	}
}
