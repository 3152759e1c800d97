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

// mountFlag is a mount flag that the orchestrator may give. docs/reference/mount-flags.md shows this list.
type mountFlag struct {
	key string
	// value describes what follows the key, for people: "=number". It is empty if nothing follows.
	value string
	// pattern matches what follows the key. It is nil if nothing follows.
	pattern *regexp.Regexp
}

// The allow-list of mount flags, from mount(8), ext4(5), xfs(5) and btrfs(5). It has no flag that names another device,
// a file or a part of the filesystem, or that changes what is mounted. It has none that skips recovery, checksums or
// the flushes of the disk. It has none that makes the kernel panic, or go on with a damaged filesystem.
var (
	genericFlags = append(bare("defaults", "ro", "rw", "atime", "noatime", "relatime", "norelatime", "strictatime",
		"nostrictatime", "diratime", "nodiratime", "lazytime", "nolazytime", "suid", "nosuid", "dev", "nodev", "exec",
		"noexec", "sync", "async", "dirsync", "iversion", "noiversion", "silent", "loud", "_netdev", "nodiscard"),
		valued("context", "=label", seLinuxLabel),
		valued("fscontext", "=label", seLinuxLabel),
		valued("defcontext", "=label", seLinuxLabel),
		valued("rootcontext", "=label", seLinuxLabel),
	)
	extFlags = append(bare("discard", "acl", "user_xattr", "barrier", "auto_da_alloc", "block_validity",
		"noblock_validity", "init_itable", "noinit_itable", "grpid", "bsdgroups", "nogrpid", "sysvgroups", "bsddf", "minixdf",
		"quota", "noquota", "usrquota", "grpquota"),
		valued("commit", "=seconds", `=[0-9]{1,5}`),
		valued("data", "=ordered, =journal", `=(ordered|journal)`),
		valued("errors", "=remount-ro", `=remount-ro`),
		valued("inode_readahead_blks", "=0, =1, =2, =4 to =4096", `=(0|1|2|4|8|16|32|64|128|256|512|1024|2048|4096)`),
		valued("journal_ioprio", "=0 to 7", `=[0-7]`),
		valued("max_batch_time", "=microseconds", `=[0-9]{1,9}`),
		valued("min_batch_time", "=microseconds", `=[0-9]{1,9}`),
		valued("max_dir_size_kb", "=number", `=[0-9]{1,9}`),
		// The kernel drops one that is larger than a block group.
		valued("stripe", "=0 to 7999", `=[1-7]?[0-9]{1,3}`),
	)
	// The kernel refuses these for ext3.
	ext4Flags = bare("delalloc", "nodelalloc", "dioread_lock", "dioread_nolock", "journal_checksum")
	xfsFlags  = append(bare("discard", "filestreams", "ikeep", "noikeep", "inode32", "inode64", "largeio", "nolargeio",
		"noalign", "swalloc", "wsync", "grpid", "bsdgroups", "nogrpid", "sysvgroups", "noquota", "quota", "uquota",
		"usrquota", "uqnoenforce", "qnoenforce", "gquota", "grpquota", "gqnoenforce", "pquota", "prjquota", "pqnoenforce"),
		// The kernel takes the lowest bit of another size.
		valued("allocsize", "=4k, =8k, =16k to =1g", `=((4|8|16|32|64|128|256|512)[kKmM]|(1|2)[mM]|1[gG])`),
		valued("logbufs", "=2 to 8", `=[2-8]`),
		valued("logbsize", "=16k, =32k, =64k, =128k, =256k", `=(16|32|64|128|256)[kK]`),
		valued("sunit", "=number", `=[0-9]{1,9}`),
		valued("swidth", "=number", `=[0-9]{1,9}`),
	)
	btrfsFlags = append(bare("acl", "noacl", "autodefrag", "noautodefrag", "barrier", "datacow", "datasum",
		"flushoncommit", "noflushoncommit", "ssd", "nossd", "ssd_spread", "nossd_spread", "treelog", "notreelog",
		"user_subvol_rm_allowed"),
		valued("commit", "=seconds", `=[0-9]{1,5}`),
		valued("compress", "nothing, =no, =lzo, =zlib, =zstd, =zlib:1 to 9, =zstd:1 to 15", compression),
		valued("compress-force", "nothing, =no, =lzo, =zlib, =zstd, =zlib:1 to 9, =zstd:1 to 15", compression),
		valued("discard", "nothing, =sync, =async", `(=sync|=async)?`),
		valued("max_inline", "=0 to 3999, =0k to 4k", `=([1-3]?[0-9]{1,3}|[0-4][kK])`),
		valued("metadata_ratio", "=number", `=[0-9]{1,4}`),
		valued("space_cache", "=v2", `=v2`),
		valued("thread_pool", "=number", `=[1-9][0-9]{0,3}`),
	)
)

const (
	// seLinuxLabel matches a label with and without quotes. One with a comma needs them.
	seLinuxLabel = `=([A-Za-z0-9_.:-]+|"[A-Za-z0-9_.:,-]+")`
	compression  = `(=no|=lzo|=zlib(:[1-9])?|=zstd(:[1-9]|:1[0-5])?)?`
)

func bare(keys ...string) (flags []mountFlag) {
	for _, key := range keys {
		flags = append(flags, mountFlag{key: key})
	}
	return flags
}

func valued(key, value, pattern string) mountFlag { return mountFlag{key, value, whole(pattern)} }

// flagsOf returns the allow-list for a filesystem type. An empty type means that the type is not known yet: then every
// flag that some type allows is allowed.
func flagsOf(fsType string) [][]mountFlag {
	switch fsType {
	case "ext3":
		return [][]mountFlag{genericFlags, extFlags}
	case "ext4":
		return [][]mountFlag{genericFlags, extFlags, ext4Flags}
	case "xfs":
		return [][]mountFlag{genericFlags, xfsFlags}
	case "btrfs":
		return [][]mountFlag{genericFlags, btrfsFlags}
	case "":
		return [][]mountFlag{genericFlags, extFlags, ext4Flags, xfsFlags, btrfsFlags}
	}
	return nil
}

// CheckMountFlags returns [ErrOption] if mount flags contain one that is not on the list for this filesystem type. An
// empty type means that the type is not known yet. Flags may be secret (CSI spec, VolumeCapability.MountVolume), so the
// error names a flag by its number. It also has the text before "=", and a word that is a flag of another type.
func CheckMountFlags(fsType string, flags []string) error {
	options := SplitMountFlags(flags)
	for i, option := range options {
		// With data=journal, the kernel drops one of these in silence and refuses the other.
		conflict := (option == "dioread_nolock" || option == "delalloc") && slices.Contains(options, "data=journal")
		if conflict {
			return fmt.Errorf("mount flags: %w: flag %d %q: not with data=journal: remove one of them", ErrOption, i+1, option)
		}
		if allowed(fsType, option) {
			continue
		}
		name := fmt.Sprintf("flag %d", i+1)
		if key, _, hasValue := strings.Cut(option, "="); hasValue || allowed("", option) {
			const longest = 32
			name += fmt.Sprintf(" %.*q", longest, key)
		}
		return fmt.Errorf("mount flags: %w: %s: docs/reference/mount-flags.md has the list", ErrOption, name)
	}
	return nil
}

func allowed(fsType, option string) bool {
	for _, list := range flagsOf(fsType) {
		for _, flag := range list {
			rest, found := strings.CutPrefix(option, flag.key)
			if found && (flag.pattern == nil && rest == "" || flag.pattern != nil && flag.pattern.MatchString(rest)) {
				return true
			}
		}
	}
	return false
}

// SplitMountFlags splits mount flags into single ones, without blanks around them. A comma separates two flags, except
// between double quotes (SELinux labels).
func SplitMountFlags(flags []string) (options []string) {
	for _, flag := range flags {
		quoted := false
		for option := range strings.FieldsFuncSeq(flag, func(r rune) bool {
			if r == '"' {
				quoted = !quoted
			}
			return r == ',' && !quoted
		}) {
			if option = strings.TrimSpace(option); option != "" {
				options = append(options, option)
			}
		}
	}
	return options
}
