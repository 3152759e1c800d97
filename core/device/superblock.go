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

// format is how this package reads the superblock of a kind of filesystem.
type format struct {
	// at is where the superblock begins, and length how much of it is read.
	at, length int64
	bytes      func(super []byte) (int64, error)
	// neverMounted is for [NeverMounted].
	neverMounted func(file *os.File, super []byte) (bool, error)
}

var (
	ext     = format{1024, 1024, extBytes, extNeverMounted}         // struct ext4_super_block
	xfs     = format{0, 512, xfsBytes, xfsNeverMounted}             // the beginning of struct xfs_dsb
	btrfs   = format{64 * kib, 4096, btrfsBytes, btrfsNeverMounted} // struct btrfs_super_block
	formats = map[string]format{"ext2": ext, "ext3": ext, "ext4": ext, "xfs": xfs, "btrfs": btrfs}
)

func (f format) read(file *os.File) ([]byte, error) {
	super := make([]byte, f.length)
	_, err := file.ReadAt(super, f.at)
	return super, err
}

// withSuper calls use with the superblock of a filesystem of this type. It calls nothing for an unsupported type.
func (d Device) withSuper(fsType string, use func(file *os.File, f format, super []byte) error) error {
	f, supported := formats[fsType]
	if !supported {
		return nil
	}
	err := d.withFile(func(file *os.File) error {
		super, err := f.read(file)
		if err != nil {
			return err
		}
		return use(file, f, super)
	})
	if err != nil {
		return fmt.Errorf("%w: superblock of %s: %w", ErrUnreadable, d, err)
	}
	return nil
}

// NeverMounted reports whether the filesystem that content describes was never mounted writable, or is unfinished. For
// an encrypted disk it reports whether nothing was ever written into it. It returns false if the disk does not show it.
func NeverMounted(dev Device, content Content) (never bool, err error) {
	if content.Type == TypeLUKS {
		_, label, headerErr := dev.LUKSHeader()
		never, err = label == LabelUnformatted, headerErr
		return never && err == nil, err
	}
	err = dev.withSuper(content.Type, func(file *os.File, f format, super []byte) error {
		never, err = f.neverMounted(file, super)
		return err
	})
	return never && err == nil, err
}

// FilesystemBytes returns the size of the filesystem of this type on the disk. It is a little less than the disk's
// size, unless the filesystem was made for a smaller disk. It is 0 for an unsupported type.
func FilesystemBytes(dev Device, fsType string) (sizeBytes int64, err error) {
	err = dev.withSuper(fsType, func(_ *os.File, f format, super []byte) error {
		if sizeBytes, err = f.bytes(super); err == nil && sizeBytes < 0 {
			err = fmt.Errorf("a size of %d bytes", sizeBytes)
		}
		return err
	})
	if err != nil {
		return 0, err
	}
	return sizeBytes, nil
}

// Superblock returns the beginning of the superblock of a supported filesystem.
func Superblock(dev Device, fsType string) (super []byte, err error) {
	err = dev.withSuper(fsType, func(_ *os.File, _ format, found []byte) error {
		super = found
		return nil
	})
	return super, err
}

// extNeverMounted looks at the number of mounts and the time of the last mount in the superblock.
func extNeverMounted(_ *os.File, super []byte) (bool, error) {
	// s_mtime and its upper bits, s_mnt_count
	return binary.LittleEndian.Uint32(super[0x2c:]) == 0 && super[0x275] == 0 &&
		binary.LittleEndian.Uint16(super[0x34:]) == 0, nil
}

func extBytes(super []byte) (int64, error) {
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
	err = dev.withSuper("ext4", func(_ *os.File, _ format, super []byte) error {
		sizeBytes, err := extBytes(super)
		if err == nil {
			moves, err = extGrowthMovesBlocks(super, sizeBytes, dev.SizeBytes)
		}
		return err
	})
	return moves && err == nil, err
}

func extGrowthMovesBlocks(super []byte, oldBytes, newBytes int64) (bool, error) {
	const metaBG, is64Bit = 0x10, 0x80 // in s_feature_incompat
	features := binary.LittleEndian.Uint32(super[0x60:])
	if features&metaBG != 0 {
		return false, nil // the descriptors of new groups are in these groups
	}
	blockBytes := int64(kib) << binary.LittleEndian.Uint32(super[0x18:])                    // as in extBytes
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

// xfsNeverMounted looks at the superblock, which says "in progress" until mkfs is done, and then at the log. mkfs
// writes one record at the log's start and zeros behind it. The first mount writes to the 2 MiB that follow.
func xfsNeverMounted(file *os.File, super []byte) (bool, error) {
	const (
		mkfsBytes    = 256 * kib // no record is longer
		stampedBytes = 2 * mib
	)
	if super[126] != 0 { // sb_inprogress
		return true, nil
	}
	// The log's start is given as a block in a group: sb_blocksize, sb_logstart, sb_agblocks, sb_logblocks,
	// sb_agblklog.
	block, start := int64(binary.BigEndian.Uint32(super[4:])), binary.BigEndian.Uint64(super[48:])
	groupBlocks, logBlocks := int64(binary.BigEndian.Uint32(super[84:])), int64(binary.BigEndian.Uint32(super[96:]))
	groupShift := super[124]
	if start == 0 || groupShift > 31 || logBlocks*block < stampedBytes {
		return false, nil // not a layout that this plugin makes
	}
	offset := (int64(start>>groupShift)*groupBlocks + int64(start&(1<<groupShift-1))) * block
	found, err := findByte(context.Background(), file, []region{{"", offset + mkfsBytes, stampedBytes - mkfsBytes}})
	return found == "", err
}

func xfsBytes(super []byte) (int64, error) {
	// sb_blocksize, sb_dblocks
	return int64(binary.BigEndian.Uint32(super[4:])) * int64(binary.BigEndian.Uint64(super[8:])), nil
}

// btrfsNeverMounted looks at uuid_tree_generation, which the first mount sets when it has checked the tree of UUIDs. A
// short mount may end before that. Then every change shows as a log, or in super_roots, where the superblock keeps the
// trees of its last four generations. mkfs ends with the fifth generation or a later one, and then its tree of files is
// not newer than its tree of chunks. A change by the kernel makes it newer, and a replay of a log leaves it out.
func btrfsNeverMounted(_ *os.File, super []byte) (bool, error) {
	const (
		roots, rootBytes, rootCount = 0xb2b, 168, 4 // super_roots, struct btrfs_root_backup
		onlyMkfs                    = 4             // the last generation that only mkfs makes
	)
	field := func(offset int) uint64 { return binary.LittleEndian.Uint64(super[offset:]) }
	if field(0x233) != 0 || field(0x60) != 0 { // uuid_tree_generation, log_root
		return false, nil
	}
	newest := false
	for at := roots; at < roots+rootCount*rootBytes; at += rootBytes {
		// tree_root and tree_root_gen, chunk_root_gen, fs_root and fs_root_gen
		tree, made, chunks, files, changed := field(at), field(at+8), field(at+24), field(at+48), field(at+56)
		if tree != 0 && (files == 0 || changed > max(chunks, onlyMkfs)) {
			return false, nil
		}
		newest = newest || made == field(0x48) && chunks == field(0xa4) // generation, chunk_root_generation
	}
	return newest, nil
}

func btrfsBytes(super []byte) (int64, error) {
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
