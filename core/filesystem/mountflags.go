// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package filesystem

import (
	"fmt"
	"regexp"
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
	genericFlags = append(bare(
		"defaults", "ro", "rw", "atime", "noatime", "relatime", "norelatime", "strictatime", "nostrictatime",
		"diratime", "nodiratime", "lazytime", "nolazytime", "suid", "nosuid", "dev", "nodev", "exec", "noexec",
		"sync", "async", "dirsync", "iversion", "noiversion", "silent", "loud", "_netdev", "nodiscard"),
		valued("context", "=label", seLinuxLabel),
		valued("fscontext", "=label", seLinuxLabel),
		valued("defcontext", "=label", seLinuxLabel),
		valued("rootcontext", "=label", seLinuxLabel),
	)
	extFlags = append(bare(
		"discard", "acl", "user_xattr", "barrier", "delalloc", "nodelalloc", "auto_da_alloc",
		"block_validity", "noblock_validity", "dioread_lock", "dioread_nolock", "journal_checksum", "init_itable",
		"noinit_itable", "grpid", "bsdgroups", "nogrpid", "sysvgroups", "bsddf", "minixdf", "quota", "noquota",
		"usrquota", "grpquota", "prjquota"),
		valued("commit", "=seconds", `=[0-9]{1,5}`),
		valued("data", "=ordered, =journal", `=(ordered|journal)`),
		valued("errors", "=remount-ro", `=remount-ro`),
		valued("inode_readahead_blks", "=number", `=[0-9]{1,10}`),
		valued("journal_ioprio", "=0 to 7", `=[0-7]`),
		valued("max_batch_time", "=microseconds", `=[0-9]{1,9}`),
		valued("min_batch_time", "=microseconds", `=[0-9]{1,9}`),
		valued("max_dir_size_kb", "=number", `=[0-9]{1,9}`),
		valued("stripe", "=number", `=[0-9]{1,9}`),
	)
	xfsFlags = append(bare(
		"discard", "filestreams", "ikeep", "noikeep", "inode32", "inode64", "largeio", "nolargeio", "noalign", "swalloc",
		"wsync", "grpid", "bsdgroups", "nogrpid", "sysvgroups", "noquota", "quota", "uquota", "usrquota", "uqnoenforce",
		"qnoenforce", "gquota", "grpquota", "gqnoenforce", "pquota", "prjquota", "pqnoenforce"),
		valued("allocsize", "=size", `=[0-9]{1,10}[kKmMgG]?`),
		valued("logbufs", "=2 to 8", `=[2-8]`),
		valued("logbsize", "=size", `=[0-9]{1,6}[kK]?`),
		valued("sunit", "=number", `=[0-9]{1,9}`),
		valued("swidth", "=number", `=[0-9]{1,9}`),
	)
	btrfsFlags = append(bare(
		"acl", "noacl", "autodefrag", "noautodefrag", "barrier", "datacow", "datasum", "flushoncommit",
		"noflushoncommit", "ssd", "nossd", "ssd_spread", "nossd_spread", "treelog", "notreelog",
		"user_subvol_rm_allowed"),
		valued("commit", "=seconds", `=[0-9]{1,5}`),
		valued("compress", "nothing, =no, =lzo, =zlib, =zstd, =zlib:1 to 9, =zstd:1 to 15", compression),
		valued("compress-force", "nothing, =no, =lzo, =zlib, =zstd, =zlib:1 to 9, =zstd:1 to 15", compression),
		valued("discard", "nothing, =sync, =async", `(=sync|=async)?`),
		valued("max_inline", "=size", `=[0-9]{1,6}[kK]?`),
		valued("metadata_ratio", "=number", `=[0-9]{1,4}`),
		valued("space_cache", "=v2", `=v2`),
		valued("thread_pool", "=number", `=[0-9]{1,4}`),
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
	case "ext3", "ext4":
		return [][]mountFlag{genericFlags, extFlags}
	case "xfs":
		return [][]mountFlag{genericFlags, xfsFlags}
	case "btrfs":
		return [][]mountFlag{genericFlags, btrfsFlags}
	case "":
		return [][]mountFlag{genericFlags, extFlags, xfsFlags, btrfsFlags}
	}
	return nil
}

// CheckMountFlags returns [ErrOption] if mount flags contain one that is not on the list for this filesystem type. An
// empty type means that the type is not known yet. Flags may be secret (CSI spec, VolumeCapability.MountVolume), so the
// error names a flag by its number. It also has the text before "=", and a word that is a flag of another type.
func CheckMountFlags(fsType string, flags []string) error {
	for i, option := range SplitMountFlags(flags) {
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
