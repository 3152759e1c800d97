// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package filesystem

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strconv"
	"strings"
)

// Disk is what a filesystem is made on. Sizes are in bytes.
type Disk struct {
	// BlockSize is the size of a logical block, Size that of the disk.
	BlockSize, Size int64
}

const (
	kib = 1 << 10
	mib = 1 << 20
	// defaultBlock is the block size that mkfs chooses for every filesystem on a disk of 1 GiB or more, in bytes.
	defaultBlock = 4 * kib
)

// CheckFit returns [ErrOption] if mkfs would refuse these options on this disk. The options come from
// [ParseMkfsOptions] for the same type. An empty type means the default. The limits are those of mke2fs 1.47, mkfs.xfs
// 6.1 and mkfs.btrfs 6.2. A limit that depends on more than the options is a little stricter here.
func CheckFit(fsType string, options []string, disk Disk) error {
	fits := map[string]func(choices, Disk) error{"ext4": fitExt, "ext3": fitExt, "xfs": fitXFS, "btrfs": fitBtrfs}
	given, err := values(nameOf(fsType), options)
	if err == nil {
		err = fits[nameOf(fsType)](given, disk)
	}
	if err != nil {
		return fmt.Errorf("mkfs options for %s: %w: %w", nameOf(fsType), ErrOption, err)
	}
	return nil
}

// choices are the values of options and suboptions, by the names that [MkfsPatterns] uses. The features of several -O
// add up, as they do in mkfs.
type choices map[string]string

func values(fsType string, options []string) (choices, error) {
	rules, given := rulesOf(fsType), choices{}
	for i := 0; i < len(options); i++ {
		option := options[i]
		rule := rules[option]
		if rule.value == nil && rule.suboptions == nil {
			given[option] = ""
			continue
		}
		i++
		found := []string{option, options[i]}
		if rule.suboptions != nil {
			found = nil
			for part := range strings.SplitSeq(options[i], ",") {
				name, value, _ := strings.Cut(part, "=")
				found = append(found, option+" "+name, value)
			}
		}
		for pair := range slices.Chunk(found, 2) {
			before, twice := given[pair[0]]
			switch {
			case !twice:
				given[pair[0]] = pair[1]
			case pair[0] == "-O":
				given[pair[0]] = before + "," + pair[1]
			default:
				return nil, fmt.Errorf("%s is given twice", pair[0])
			}
		}
	}
	return given, nil
}

// has reports whether an option is given.
func (c choices) has(option string) bool {
	_, ok := c[option]
	return ok
}

// number returns the value of an option in bytes, or what else if it is not given. Block is the block size of the
// filesystem, the unit of the suffix b. The suffix s means sectors of 512 bytes.
func (c choices) number(option string, otherwise, block int64) int64 {
	text, ok := c[option]
	if !ok {
		return otherwise
	}
	digits := strings.TrimRight(text, "bskmgtKMGT")
	n, _ := strconv.ParseInt(digits, 10, 64) // the pattern has at most 10 digits
	switch strings.ToLower(text[len(digits):]) {
	case "b":
		return n * block
	case "s":
		return n * 512
	case "k":
		return n * kib
	case "m":
		return n * mib
	case "g":
		return n * kib * mib
	case "t":
		return n * mib * mib
	}
	return n
}

// feature reports whether a feature of -O is switched on; otherwise is mkfs' default. The last word counts.
func (c choices) feature(name string, otherwise bool) bool {
	for word := range strings.SplitSeq(c["-O"], ",") {
		if strings.TrimPrefix(word, "^") == name {
			otherwise = word == name
		}
	}
	return otherwise
}

// limit is something that must hold, and what to say if it does not.
type limit struct {
	holds  bool
	advice string
}

// firstBroken returns the advice of the first limit that does not hold.
func firstBroken(limits ...limit) error {
	for _, limit := range limits {
		if !limit.holds {
			return errors.New(limit.advice)
		}
	}
	return nil
}

func fitExt(c choices, disk Disk) error {
	standard, ratio := int64(defaultBlock), int64(16*kib)
	switch c["-T"] {
	case "small":
		standard, ratio = max(kib, disk.BlockSize), 4*kib
	case "news":
		ratio = 4 * kib
	}
	block := c.number("-b", standard, 0)
	inode := c.number("-I", 256, 0)
	bigalloc := c.feature("bigalloc", false)
	cluster := c.number("-C", 16*block, 0)
	inodes := c.number("-N", disk.Size/c.number("-i", ratio, 0), 0)
	journal := c.number("-J size", 0, 0) * mib
	group := c.number("-g", 8*block, 0)
	return firstBroken(append(
		extFeatures(c),
		tooSmallBlock("-b", block, disk),
		limit{inode <= block, fmt.Sprintf("-I %d: an inode is at most one block, here %d bytes", inode, block)},
		limit{
			inode > 128 || !c.feature("inline_data", false),
			"-I 128: with -O inline_data, inodes need at least 256 bytes",
		},
		limit{c.number("-i", ratio, 0) <= 64*mib, "-i: use 1024 to 67108864"},
		limit{
			inodes <= disk.Size/2/inode,
			fmt.Sprintf("-N, -i, -I: %d inodes of %d bytes need more than half of the disk", inodes, inode),
		},
		limit{
			!bigalloc || !c.has("-N") && !c.has("-i") || inodes <= disk.Size/cluster,
			fmt.Sprintf("-N, -i: with -O bigalloc at most one inode for each cluster of %d bytes", cluster),
		},
		limit{bigalloc || !c.has("-C"), "-C: only with -O bigalloc"},
		limit{
			block <= cluster && cluster <= 16*mib,
			fmt.Sprintf("-C %d: use a size from %d, the size of a block, to 16m", cluster, block),
		},
		limit{
			group%8 == 0 && kib <= group && group <= 8*block,
			fmt.Sprintf("-g %d: use a multiple of 8 from 1024 to %d, eight times the size of a block", group, 8*block),
		},
		limit{
			journal == 0 || kib*block <= journal && journal <= min(10_240_000*block, disk.Size/5*2),
			fmt.Sprintf("-J size: use MiB for at least 1024 blocks of %d bytes, at most two fifths of the disk", block),
		},
		limit{
			!c.has("-G") || c.feature("flex_bg", true) && bits.OnesCount64(uint64(c.number("-G", 1, 0))) == 1,
			"-G: use a power of 2, and not with -O ^flex_bg",
		},
		limit{
			!c.has("-E resize") || c.number("-E resize", 0, 0) > disk.Size,
			fmt.Sprintf("-E resize: use more than the size of the disk, %d bytes", disk.Size),
		},
	)...)
}

// extFeatures are the features of ext that exclude each other.
func extFeatures(c choices) []limit {
	return []limit{
		{
			!c.feature("meta_bg", false) || !c.feature("resize_inode", true) && !c.has("-E resize"),
			"-O meta_bg: only with -O ^resize_inode and without -E resize",
		},
		{
			c.feature("sparse_super", true) || !c.feature("resize_inode", true),
			"-O ^sparse_super: only with -O ^resize_inode",
		},
		{
			// Without flex_bg, resize2fs 1.47 leaves a block of the filesystem's own marked as free.
			!c.feature("sparse_super2", false) || c.feature("flex_bg", true),
			"-O sparse_super2: not with -O ^flex_bg, because such a filesystem cannot grow safely",
		},
		{
			!c.feature("metadata_csum_seed", false) || c.feature("metadata_csum", true),
			"-O metadata_csum_seed: not with -O ^metadata_csum",
		},
	}
}

// tooSmallBlock is the limit of every filesystem: its block is not smaller than the disk's.
func tooSmallBlock(option string, block int64, disk Disk) limit {
	return limit{block >= disk.BlockSize, fmt.Sprintf(
		"%s %d: the disk has blocks of %d bytes: use at least that, or a smaller blockSize (an encrypted disk has 4096)",
		option, block, disk.BlockSize)}
}

func fitXFS(c choices, disk Disk) error {
	block := c.number("-b size", defaultBlock, 0)
	sector := c.number("-s size", disk.BlockSize, 0)
	inode, most := c.number("-i size", 512, 0), min(block/2, 2*kib)
	group := c.number("-d agsize", disk.Size/c.number("-d agcount", 4, 0), block)
	log := c.number("-l size", 64*mib, block)
	return firstBroken(
		tooSmallBlock("-b size", block, disk),
		tooSmallBlock("-s size", sector, disk),
		limit{sector <= block, fmt.Sprintf("-s size=%d: a sector is at most one block, here %d bytes", sector, block)},
		limit{512 <= inode && inode <= most, fmt.Sprintf("-i size: use inodes from 512 to %d bytes, half a block", most)},
		limit{!c.has("-d agcount") || !c.has("-d agsize"), "-d: give agcount or agsize"},
		limit{
			72*mib <= group || !c.has("-d agcount") && !c.has("-d agsize"),
			"-d agcount, agsize: use at least 72 MiB for each allocation group, because one holds the log",
		},
		limit{!c.has("-d agsize") || group%block == 0, fmt.Sprintf("-d agsize: use whole blocks of %d bytes", block)},
		limit{group < disk.Size, "-d agcount, agsize: use at least two allocation groups"},
		limit{
			!c.has("-l size") || 64*mib <= log && log <= min(group/4*3, 2000*mib, mib*block/4*3),
			fmt.Sprintf("-l size: use 64m to three quarters of an allocation group, here %d bytes", group/4*3),
		},
		limit{
			c.number("-n size", 64*kib, block) >= block,
			fmt.Sprintf("-n size: use at least a block, here %d bytes", block),
		},
		limit{c["-m finobt"] != "0" || c["-m inobtcount"] != "1", "-m inobtcount=1: not with finobt=0"},
	)
}

func fitBtrfs(c choices, _ Disk) error {
	if !c.has("-M") && !c.feature("mixed-bg", false) {
		return nil
	}
	node := int64(16 * kib)
	if c.has("-M") {
		node = 4 * kib
	}
	return firstBroken(limit{c.number("-n", node, 0) == 4*kib, "-M, -O mixed-bg: use -n 4096"},
		limit{cmp.Or(c["-m"], "single") == cmp.Or(c["-d"], "single"), "-M, -O mixed-bg: use the same profile for -m and -d"})
}
