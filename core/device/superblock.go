// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package device

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
)

// NeverMounted reports whether the filesystem that content describes was never mounted writable, or is unfinished. For
// an encrypted disk it reports whether nothing was ever written into it. It returns false if the disk does not show it.
func NeverMounted(dev Device, content Content) (never bool, err error) {
	err = dev.withFile(func(file *os.File) error {
		switch content.Type {
		case "ext2", "ext3", "ext4":
			never, err = extNeverMounted(file)
		case "xfs":
			never, err = xfsNeverMounted(file)
		case "btrfs":
			never, err = btrfsNeverMounted(file)
		case TypeLUKS:
			_, label, headerErr := dev.LUKSHeader()
			never, err = label == LabelUnformatted, headerErr
		}
		return err
	})
	if err != nil {
		return false, fmt.Errorf("%w: superblock of %s: %w", ErrUnreadable, dev, err)
	}
	return never, nil
}

// FilesystemBytes returns the size of the filesystem of this type on the disk. It is a little less than the disk's
// size, unless the filesystem was made for a smaller disk. It is 0 for an unsupported type.
func FilesystemBytes(dev Device, fsType string) (sizeBytes int64, err error) {
	err = dev.withFile(func(file *os.File) error {
		switch fsType {
		case "ext3", "ext4":
			sizeBytes, err = extBytes(file)
		case "xfs":
			sizeBytes, err = xfsBytes(file)
		case "btrfs":
			sizeBytes, err = btrfsBytes(file)
		}
		return err
	})
	if err == nil && sizeBytes < 0 {
		err = fmt.Errorf("a size of %d bytes", sizeBytes)
	}
	if err != nil {
		return 0, fmt.Errorf("%w: superblock of %s: %w", ErrUnreadable, dev, err)
	}
	return sizeBytes, nil
}

// Superblock returns the beginning of the superblock of a supported filesystem.
func Superblock(dev Device, fsType string) (super []byte, err error) {
	err = dev.withFile(func(file *os.File) error {
		switch fsType {
		case "ext3", "ext4":
			super, err = extSuper(file)
		case "xfs":
			super, err = xfsSuper(file)
		case "btrfs":
			super, err = btrfsSuper(file)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%w: superblock of %s: %w", ErrUnreadable, dev, err)
	}
	return super, nil
}

// extSuper reads struct ext4_super_block.
func extSuper(file *os.File) ([]byte, error) {
	super := make([]byte, 1024)
	_, err := file.ReadAt(super, 1024)
	return super, err
}

// extNeverMounted looks at the number of mounts and the time of the last mount in the superblock.
func extNeverMounted(file *os.File) (bool, error) {
	super, err := extSuper(file)
	if err != nil {
		return false, err
	}
	// s_mtime and its upper bits, s_mnt_count
	return binary.LittleEndian.Uint32(super[0x2c:]) == 0 && super[0x275] == 0 &&
		binary.LittleEndian.Uint16(super[0x34:]) == 0, nil
}

func extBytes(file *os.File) (int64, error) {
	super, err := extSuper(file)
	if err != nil {
		return 0, err
	}
	// s_blocks_count_lo, s_log_block_size; s_blocks_count_hi counts if s_feature_incompat has INCOMPAT_64BIT.
	blocks, shift := uint64(binary.LittleEndian.Uint32(super[4:])), binary.LittleEndian.Uint32(super[0x18:])
	if binary.LittleEndian.Uint32(super[0x60:])&0x80 != 0 {
		blocks |= uint64(binary.LittleEndian.Uint32(super[0x150:])) << 32
	}
	if shift > 6 {
		return 0, fmt.Errorf("a block size of 2^%d bytes", 10+uint64(shift))
	}
	return int64(blocks << (10 + shift)), nil
}

// ExtGrowthMovesBlocks reports whether resize2fs moves blocks of files or tables before an unmounted ext3 or ext4 fills
// its disk. It does if the descriptors of all groups then need more blocks than the filesystem has and reserves for
// them.
func ExtGrowthMovesBlocks(dev Device) (moves bool, err error) {
	err = dev.withFile(func(file *os.File) error {
		super, err := extSuper(file)
		if err != nil {
			return err
		}
		sizeBytes, err := extBytes(file)
		if err != nil {
			return err
		}
		moves, err = extGrowthMovesBlocks(super, sizeBytes, dev.SizeBytes)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("%w: superblock of %s: %w", ErrUnreadable, dev, err)
	}
	return moves, nil
}

func extGrowthMovesBlocks(super []byte, oldBytes, newBytes int64) (bool, error) {
	const metaBG, is64Bit = 0x10, 0x80 // in s_feature_incompat
	features := binary.LittleEndian.Uint32(super[0x60:])
	if features&metaBG != 0 {
		return false, nil // the descriptors of new groups are in these groups
	}
	blockBytes := int64(
		kib,
	) << binary.LittleEndian.Uint32(
		super[0x18:],
	) // s_log_block_size, see extBytes
	groupBytes := blockBytes * int64(binary.LittleEndian.Uint32(super[0x20:]))              // s_blocks_per_group
	descriptorBytes, reserved := int64(32), int64(binary.LittleEndian.Uint16(super[0xce:])) // s_reserved_gdt_blocks
	if features&is64Bit != 0 {
		descriptorBytes = int64(binary.LittleEndian.Uint16(super[0xfe:])) // s_desc_size
	}
	if groupBytes == 0 || descriptorBytes == 0 {
		return false, errors.New("no size of a group or of its descriptor")
	}
	descriptorBlocks := func(sizeBytes int64) int64 {
		groups := (sizeBytes + groupBytes - 1) / groupBytes
		return (groups*descriptorBytes + blockBytes - 1) / blockBytes
	}
	return descriptorBlocks(newBytes) > descriptorBlocks(oldBytes)+reserved, nil
}

// xfsSuper reads the beginning of struct xfs_dsb.
func xfsSuper(file *os.File) ([]byte, error) {
	super := make([]byte, 512)
	_, err := file.ReadAt(super, 0)
	return super, err
}

// xfsNeverMounted looks at the superblock, which says "in progress" until mkfs is done, and then at the log. mkfs
// writes one record at the log's start and zeros behind it. The first mount writes to the 2 MiB that follow.
func xfsNeverMounted(file *os.File) (bool, error) {
	const (
		mkfsBytes    = 256 * kib // no record is longer
		stampedBytes = 2 * mib
	)
	super, err := xfsSuper(file)
	if err != nil {
		return false, err
	}
	if super[126] != 0 { // sb_inprogress
		return true, nil
	}
	// The log's start is given as a block in a group: sb_blocksize, sb_logstart, sb_agblocks, sb_logblocks,
	// sb_agblklog.
	block, start := int64(binary.BigEndian.Uint32(super[4:])), binary.BigEndian.Uint64(super[48:])
	groupBlocks, logBlocks, groupShift := int64(
		binary.BigEndian.Uint32(super[84:]),
	), int64(
		binary.BigEndian.Uint32(super[96:]),
	), super[124]
	if start == 0 || groupShift > 31 || logBlocks*block < stampedBytes {
		return false, nil // not a layout that this plugin makes
	}
	offset := (int64(start>>groupShift)*groupBlocks + int64(start&(1<<groupShift-1))) * block
	found, err := findByte(context.Background(), file, []region{{"", offset + mkfsBytes, stampedBytes - mkfsBytes}})
	return found == "", err
}

func xfsBytes(file *os.File) (int64, error) {
	super, err := xfsSuper(file)
	if err != nil {
		return 0, err
	}
	// sb_blocksize, sb_dblocks
	return int64(binary.BigEndian.Uint32(super[4:])) * int64(binary.BigEndian.Uint64(super[8:])), nil
}

// btrfsSuper reads the part of struct btrfs_super_block that this package uses.
func btrfsSuper(file *os.File) ([]byte, error) {
	super := make([]byte, 1024)
	_, err := file.ReadAt(super, 64*kib)
	return super, err
}

// btrfsNeverMounted looks at uuid_tree_generation, which the first mount sets when it has checked the tree of UUIDs. A
// short mount may end before that. Then every change shows as a log, or as a generation newer than the one in which
// mkfs made the chunks, its last step.
func btrfsNeverMounted(file *os.File) (bool, error) {
	super, err := btrfsSuper(file)
	if err != nil {
		return false, err
	}
	field := func(offset int) uint64 { return binary.LittleEndian.Uint64(super[offset:]) }
	// uuid_tree_generation, log_root; generation, chunk_root_generation
	return field(0x233) == 0 && field(0x60) == 0 && field(0x48) == field(0xa4), nil
}

func btrfsBytes(file *os.File) (int64, error) {
	super, err := btrfsSuper(file)
	if err != nil {
		return 0, err
	}
	if disks := binary.LittleEndian.Uint64(super[0x88:]); disks != 1 { // num_devices
		return 0, fmt.Errorf("a btrfs on %d disks", disks)
	}
	return int64(binary.LittleEndian.Uint64(super[0xc9+8:])), nil // dev_item.total_bytes
}

// DuplicateBtrfs returns the name of another disk or partition of this guest with the same btrfs UUID, or "". The
// kernel identifies a btrfs only by its UUID and would mix the two.
//
// It does not wait for other disks longer than the reader allows. It returns the disks that do not answer as skipped. A
// twin on such a disk is harmless: if it is mounted, sysfs shows its UUID. If it is not mounted, the kernel cannot read
// it, and therefore cannot mix it with this disk.
func (r Roots) DuplicateBtrfs(
	ctx context.Context,
	reader *ChildReader,
	dev Device,
	content Content,
) (name string, skipped []Device, err error) {
	// sysfs shows a mounted btrfs even after its disk has left the guest.
	if _, err := os.Stat(r.sys("fs", "btrfs", content.UUID)); !errors.Is(err, fs.ErrNotExist) {
		return "the mounted btrfs " + content.UUID, nil, err
	}
	disks, err := r.allDisks()
	if err != nil {
		return "", nil, err
	}
	for _, other := range disks {
		if other.Number == dev.Number {
			continue
		}
		parts := map[string]Number{other.Name: other.Number}
		maps.Copy(parts, other.Partitions)
		for _, name := range slices.Sorted(maps.Keys(parts)) {
			part := Device{Disk: Disk{Name: name, Serial: other.Serial, Number: parts[name]}, Path: r.dev(name)}
			id, err := reader.btrfsUUID(ctx, part)
			if errors.Is(err, ErrNoAnswer) && ctx.Err() == nil {
				skipped = append(skipped, part)
				break // the partitions are on the same disk
			}
			if err != nil {
				return "", skipped, err
			}
			if id == content.UUID {
				return name, skipped, nil
			}
		}
	}
	return "", skipped, nil
}

// btrfsUUID returns the UUID of the btrfs on a device in blkid's form. It is empty if there is no btrfs, or if it
// cannot be read: the kernel cannot read it then either.
func (r *ChildReader) btrfsUUID(ctx context.Context, dev Device) (string, error) {
	super, err := r.readBlock(ctx, dev, 64*kib/blockBytes)
	if errors.Is(err, ErrUnreadable) {
		return "", nil
	}
	if err != nil || len(super) < 0x48 || super[0x40:0x48] != "_BHRfS_M" {
		return "", err
	}
	id := super[0x20:0x30] // fsid
	return strings.ToLower(fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])), nil
}
