// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package device

import (
	"encoding/binary"
	"fmt"
	"os"
)

// region is a part of a disk, and the name of the format that uses it.
type region struct {
	format         string
	offset, length int64
}

const (
	kib = 1 << 10
	mib = 1 << 20
	gib = 1 << 30
)

// formatRegions returns the places where a known format keeps its superblock or a copy of it, for each size that the
// disk may have had.
func formatRegions(dev Device) (all []region) {
	seen := map[region]bool{}
	for _, size := range dev.sizes() {
		for _, r := range append(headAndTail(size), signatures(size)...) {
			if !seen[r] {
				seen[r] = true
				all = append(all, r)
			}
		}
	}
	return all
}

// headAndTail returns the first and the last MiB. Nearly every format has its signature there:
//
//   - at the beginning: boot sectors, GPT, ext, xfs, f2fs, swap, LVM, LUKS with its copy at 512 KiB, bcache, bluestore;
//     btrfs, reiserfs and gfs2 at 64 KiB, jfs at 32 KiB, ocfs2 below 8 KiB;
//   - at the end: the copy of a GPT, md 0.90 and 1.0, DRBD and most firmware RAIDs;
//   - at both: ZFS.
func headAndTail(sizeBytes int64) []region {
	length := min(mib, sizeBytes)
	return []region{{"first MiB", 0, length}, {"last MiB", sizeBytes - length, length}}
}

// signatures returns the places between head and tail where a known format keeps its superblock or a copy of it, on a
// disk of this size. A copy alone is a sign of data too: only the beginning of the data may have been wiped.
func signatures(sizeBytes int64) []region {
	const (
		page     = 4 * kib
		quarter  = 64 * kib // around the start of an allocation group, which mkfs.xfs rounds to blocks and stripes
		xfsParts = 4        // allocation groups of a small disk; each begins with a copy of the superblock
	)
	all := []region{
		{"copy of a LUKS2 header, or VMFS", 1 * mib, page},
		{"copy of a LUKS2 header, or VMFS", 2 * mib, page},
		{"copy of a LUKS2 header", 4 * mib, page},
		{"copy of an ext superblock, 1 KiB blocks", 8*mib + kib, kib},
		{"VMFS", 16 * mib, page},
		{"copy of an ext superblock, 2 KiB blocks", 32*mib + 2*kib, 2 * kib},
		{"copy of a btrfs superblock", 64 * mib, 2 * page},
		{"VMFS", 1*gib + 2*mib, page},
		{"copy of a btrfs superblock", 256 * gib, 2 * page},
		{"Promise RAID", sizeBytes - 3087*512, 512},
	}
	for part := int64(1); part < xfsParts; part++ {
		start := sizeBytes / xfsParts * part / page * page
		all = append(all, region{"copy of an xfs superblock", start - quarter/2, quarter})
	}
	// ext with blocks of 4 KiB, without larger clusters, has groups of 128 MiB. It keeps copies in group 1 and in the
	// groups that are powers of 3, 5 and 7.
	for _, base := range []int64{3, 5, 7} {
		for group := int64(1); group*128*mib < sizeBytes; group *= base {
			all = append(all, region{"copy of an ext superblock, 4 KiB blocks", group * 128 * mib, page})
		}
	}
	within := all[:0]
	for _, r := range all {
		if r.offset >= 0 && r.offset+r.length <= sizeBytes {
			within = append(within, r)
		}
	}
	return within
}

// findSignature returns the name and place of the first superblock in the regions, or of a copy of one, or "". blkid
// and wipefs look only at the first superblock of a filesystem.
func findSignature(file *os.File, regions []region) (known string, err error) {
	buffer := make([]byte, chunkBytes)
	for _, r := range regions {
		for offset := r.offset; offset < r.offset+r.length; offset += chunkBytes {
			chunk := buffer[:min(chunkBytes, r.offset+r.length-offset)]
			if _, err := file.ReadAt(chunk, offset); err != nil {
				return "", err
			}
			for at := 0; at+512 <= len(chunk); at += 512 {
				if name := signature(chunk[at:]); name != "" {
					return fmt.Sprintf("%s at byte %d", name, offset+int64(at)), nil
				}
			}
		}
	}
	return "", nil
}

// signature returns the name of the superblock that begins here, or "".
func signature(content []byte) string {
	at := func(offset int, magic string) bool {
		return len(content) >= offset+len(magic) && string(content[offset:offset+len(magic)]) == magic
	}
	switch {
	case at(0, "XFSB"):
		return "a superblock of xfs"
	case at(0x40, "_BHRfS_M"):
		return "a superblock of btrfs"
	case at(0, luksMagic[0]), at(0, luksMagic[1]):
		return "a LUKS header"
	case at(0, "EFI PART"):
		return "a GPT"
	// s_magic, s_log_block_size, s_rev_level
	case at(0x38, "\x53\xef") && len(content) >= 1024 && binary.LittleEndian.Uint32(content[0x18:]) <= 6 &&
		binary.LittleEndian.Uint32(content[0x4c:]) <= 1:
		return "a superblock of ext"
	}
	return ""
}
