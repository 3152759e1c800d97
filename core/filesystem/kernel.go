// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package filesystem

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// kernelNeed is what a filesystem with a feature needs of the kernel for a writable mount.
type kernelNeed struct {
	feature, fsTypes string
	// at is the byte of the superblock that has the feature's bit.
	at  int
	bit byte
	// major and minor are the oldest Linux. If they are 0, the kernel needs module.
	major, minor int
	module       string
}

// kernelNeeds are the features that a kernel of Linux 5.4 or later may lack. The superblocks are those of Linux 7.2:
// struct ext4_super_block, xfs_dsb and btrfs_super_block.
var kernelNeeds = []kernelNeed{
	{"orphan_file", "ext3 ext4", 0x5d, 0x10, 5, 15, ""},
	{"orphan_present", "ext3 ext4", 0x66, 0x01, 5, 15, ""},
	{"quota", "ext3 ext4", 0x65, 0x01, 0, 0, "quota_v2"},
	{"project", "ext3 ext4", 0x65, 0x20, 0, 0, "quota_v2"},
	{"inobtcount", "xfs", 215, 0x08, 5, 10, ""},
	{"bigtime", "xfs", 219, 0x08, 5, 10, ""},
	{"nrext64", "xfs", 219, 0x20, 5, 19, ""},
	{"exchange", "xfs", 219, 0x40, 6, 10, ""},
	{"parent", "xfs", 219, 0x80, 6, 10, ""},
	{"metadir", "xfs", 218, 0x01, 6, 13, ""},
	{"a checksum other than crc32c", "btrfs", 0xc4, 0x03, 5, 5, ""},
	{"block-group-tree", "btrfs", 0xb4, 0x08, 6, 1, ""},
}

// KernelLacksOption is [KernelLacks] for a filesystem that mkfs would make with these arguments.
func KernelLacksOption(fsType string, args []string, release string) string {
	words := strings.FieldsFunc(strings.Join(args, " "), func(r rune) bool { return r == ' ' || r == ',' })
	super := make([]byte, 1024)
	for _, need := range kernelNeeds {
		if slices.Contains(words, need.feature) || slices.Contains(words, need.feature+"=1") {
			super[need.at] |= need.bit
		}
	}
	if i := slices.Index(words, "--csum"); i >= 0 && words[i+1] != "crc32c" {
		super[0xc4] = 1
	}
	return KernelLacks(fsType, super, release)
}

// KernelLacks says which feature of a filesystem the kernel with this release, such as "5.10.0-35-amd64", lacks or may
// lack, or returns "". super is the superblock.
func KernelLacks(fsType string, super []byte, release string) string {
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return ""
	}
	for _, need := range kernelNeeds {
		if !strings.Contains(need.fsTypes, fsType) || need.at >= len(super) || super[need.at]&need.bit == 0 {
			continue
		}
		switch {
		case need.module != "":
			return fmt.Sprintf("its feature %s needs the kernel module %s", need.feature, need.module)
		case major < need.major || major == need.major && minor < need.minor:
			return fmt.Sprintf("its feature %s needs Linux %d.%d, and this node has %d.%d",
				need.feature, need.major, need.minor, major, minor)
		}
	}
	return ""
}

// mkfsNeeds are the words of allowed options that an mkfs may not know, with the oldest version that knows them.
var mkfsNeeds = []struct {
	word, fsType, pkg string
	major, minor      int
}{
	{"orphan_file", "ext4", "e2fsprogs", 1, 47},
	{"nrext64", "xfs", "xfsprogs", 5, 19},
}

var versionNumber = regexp.MustCompile(`[0-9]+\.[0-9]+`)

// MkfsLacksOption says which of these arguments mkfs does not know, or returns "". said is what mkfs -V says.
func MkfsLacksOption(fsType string, args []string, said string) string {
	version := versionNumber.FindString(said)
	var major, minor int
	if _, err := fmt.Sscanf(version, "%d.%d", &major, &minor); err != nil {
		return ""
	}
	words := strings.FieldsFunc(strings.Join(args, " "), func(r rune) bool { return strings.ContainsRune(" ,^=", r) })
	for _, need := range mkfsNeeds {
		old := major < need.major || major == need.major && minor < need.minor
		if old && nameOf(fsType) == need.fsType && slices.Contains(words, need.word) {
			return fmt.Sprintf("%s needs %s %d.%d, and this node has %s: leave the option out, or install newer tools",
				need.word, need.pkg, need.major, need.minor, version)
		}
	}
	return ""
}
