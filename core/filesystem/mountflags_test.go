// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package filesystem

import (
	"cmp"
	"errors"
	flags "flag"
	"fmt"
	"os"
	"regexp/syntax"
	"slices"
	"strings"
	"testing"
)

var update = flags.Bool("update", false, "rewrite the lists in docs/reference/mount-flags.md")

func TestCheckMountFlags(t *testing.T) {
	for _, tc := range []struct {
		fsType string
		flags  []string
	}{
		{"ext4", nil}, {"", []string{""}}, {"ext4", []string{"noatime"}}, {"", []string{"noatime,nodiratime", " discard "}},
		{"ext3", []string{"data=ordered", "commit=60"}}, {"xfs", []string{"ro"}}, {"xfs", []string{"logbsize=256k", "discard"}},
		{"ext4", []string{"errors=remount-ro"}}, {"btrfs", []string{"compress=zstd:3,discard=async", "compress-force"}},
		{"ext4", []string{"data=journal,nodelalloc,dioread_lock"}}, {"ext4", []string{"dioread_nolock", "stripe=7999"}},
		{"xfs", []string{"allocsize=1g"}}, {"xfs", []string{"allocsize=64k"}}, {"btrfs", []string{"max_inline=2048"}},
		{"", []string{"context=system_u:object_r:x:s0"}}, {"xfs", []string{`context="system_u:object_r:x:s0:c1,c2"`, "noatime"}},
	} {
		if err := CheckMountFlags(tc.fsType, tc.flags); err != nil {
			t.Errorf("%s %q: %v", tc.fsType, tc.flags, err)
		}
	}
	for _, tc := range []struct {
		fsType string
		flags  []string
	}{
		// Not a mount of this disk, or another device or file.
		{"", []string{"bind"}}, {"", []string{"noatime,remount"}}, {"ext4", []string{"noatime", "loop"}}, {"", []string{"loop=/dev/loop1"}},
		{"", []string{"offset=4096"}}, {"xfs", []string{"logdev=/dev/x"}}, {"ext4", []string{"journal_path=/dev/x"}}, {"", []string{"rshared"}},
		{"", []string{"X-mount.mkdir"}}, {"", []string{"X-mount.subdir=/etc"}}, {"ext4", []string{"sb=32768"}}, {"", []string{"move"}},
		{"btrfs", []string{"subvol=/"}}, {"btrfs", []string{"device=/dev/x"}}, {"ext4", []string{"usrjquota=/etc/x"}}, {"", []string{"helper=x"}},
		// Recovery, flushes and checksums.
		{"xfs", []string{"norecovery"}}, {"ext4", []string{"noload"}}, {"ext4", []string{"nobarrier"}}, {"ext4", []string{"barrier=0"}},
		{"btrfs", []string{"nobarrier"}}, {"btrfs", []string{"nodatacow"}}, {"btrfs", []string{"rescue=all"}}, {"btrfs", []string{"degraded"}},
		{"ext4", []string{"data=writeback"}}, {"xfs", []string{"nouuid"}},
		// Panic.
		{"ext4", []string{"errors=panic"}}, {"ext4", []string{"errors=continue"}}, {"btrfs", []string{"fatal_errors=panic"}}, {"ext4", []string{"abort"}},
		// The kernel refuses it always, drops it, or takes another value.
		{"ext3", []string{"delalloc"}}, {"ext3", []string{"nodelalloc"}}, {"ext3", []string{"dioread_lock"}}, {"ext3", []string{"dioread_nolock"}},
		{"ext3", []string{"journal_checksum"}}, {"ext4", []string{"data=journal,dioread_nolock"}}, {"", []string{"delalloc", "data=journal"}},
		{"ext4", []string{"prjquota"}}, {"ext4", []string{"inode_readahead_blks=3"}}, {"ext4", []string{"stripe=32769"}}, {"xfs", []string{"allocsize=5g"}},
		{"xfs", []string{"allocsize=100k"}}, {"xfs", []string{"allocsize=2g"}}, {"xfs", []string{"allocsize=2k"}}, {"xfs", []string{"logbsize=48k"}},
		{"xfs", []string{"logbsize=4194304k"}}, {"xfs", []string{"logbsize=0"}}, {"btrfs", []string{"max_inline=5k"}}, {"btrfs", []string{"thread_pool=0"}},
		// Not a flag of this filesystem, or of none.
		{"xfs", []string{"data=ordered"}}, {"ext4", []string{"logbsize=256k"}}, {"", []string{"password=x"}}, {"", []string{`a"b`}},
		{"", []string{"noatimes"}}, {"", []string{"noatime=1"}}, {"", []string{"commit"}}, {"", []string{"context="}}, {"", []string{"context=/dev/x"}},
		{"ntfs", []string{"noatime"}},
	} {
		if err := CheckMountFlags(tc.fsType, tc.flags); !errors.Is(err, ErrOption) {
			t.Errorf("%s %q: %v, want ErrOption", tc.fsType, tc.flags, err)
		}
	}
}

// The error helps to find the flag. It has no value and no unknown word, which may be secret, and stays short.
func TestCheckMountFlagsKeepsSecrets(t *testing.T) {
	long := strings.Repeat("x", 4000)
	for _, tc := range []struct {
		fsType       string
		flags        []string
		names, hides string
	}{
		{"", []string{"noatime", "password=s3cr3t"}, `flag 2 "password"`, "s3cr3t"},
		{"ext4", []string{"ro,wsync"}, `flag 2 "wsync"`, "s3cr3t"},
		{"", []string{"s3cr3t"}, "flag 1:", "s3cr3t"},
		{"", []string{long}, "flag 1:", long},
		{"", []string{long + "=1"}, "flag 1 ", long},
	} {
		err := CheckMountFlags(tc.fsType, tc.flags)
		if err == nil || !strings.Contains(err.Error(), tc.names) || strings.Contains(err.Error(), tc.hides) ||
			len(err.Error()) > 250 {
			t.Errorf("%.100q: %.300v", tc.flags, err)
		}
	}
}

// No value on the list can name a device or a file.
func TestMountFlagsNameNothing(t *testing.T) {
	for _, list := range flagsOf("") {
		for _, flag := range list {
			if flag.pattern == nil {
				continue
			}
			parsed, err := syntax.Parse(flag.pattern.String(), syntax.Perl)
			if err != nil {
				t.Fatal(err)
			}
			if slices.Contains(classes(parsed), '/') {
				t.Errorf("%s: the value %s may name a file", flag.key, flag.pattern)
			}
		}
	}
}

// The reference page shows the list. With -update this test rewrites it.
func TestMountFlagsAreDocumented(t *testing.T) {
	const page, begin, end = "../../docs/reference/mount-flags.md", "<!-- begin: made by go test ./core/filesystem -update -->\n", "<!-- end -->\n"
	var want strings.Builder
	for _, part := range []struct {
		title string
		flags []mountFlag
	}{
		{"Every filesystem", genericFlags}, {"ext4 and ext3", extFlags}, {"ext4 only", ext4Flags}, {"xfs", xfsFlags}, {"btrfs", btrfsFlags},
	} {
		sorted := slices.SortedFunc(slices.Values(part.flags), func(a, b mountFlag) int { return cmp.Compare(a.key, b.key) })
		var alone, with []string
		for _, flag := range sorted {
			if flag.value == "" {
				alone = append(alone, "`"+flag.key+"`")
			} else {
				with = append(with, fmt.Sprintf("- `%s`: %s\n", flag.key, flag.value))
			}
		}
		fmt.Fprintf(&want, "\n## %s\n\n%s\n", part.title, strings.Join(alone, " "))
		if with != nil {
			fmt.Fprintf(&want, "\nWith a value:\n\n%s", strings.Join(with, ""))
		}
	}
	want.WriteString("\n")
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, found := strings.Cut(string(text), begin)
	got, tail, ended := strings.Cut(rest, end)
	if !found || !ended {
		t.Fatalf("%s has no list", page)
	}
	if *update {
		if err := os.WriteFile(page, []byte(head+begin+want.String()+end+tail), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if got != want.String() {
		t.Errorf("%s differs from the code: run go test ./core/filesystem -update", page)
	}
}
