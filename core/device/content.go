package device

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/tool"
)

// Content is what blkid found on a device: at most one filesystem, or one of the many other things it knows. The zero
// value means that it found nothing, which does not mean that there is nothing: see [ProveBlank].
type Content struct {
	// Type is blkid's name of what is there: "ext4", "xfs", "LVM2_member", "crypto_LUKS". Empty for a mere partition table.
	Type string
	// UUID is the filesystem's own, as blkid prints it; empty where there is none.
	UUID string
	// PartitionTable is the kind of partition table: "gpt", "dos".
	PartitionTable string
}

// Empty reports whether blkid found nothing.
func (c Content) Empty() bool { return c == Content{} }

func (c Content) String() string {
	var parts []string
	if c.Type != "" {
		parts = append(parts, c.Type)
	}
	if c.PartitionTable != "" {
		parts = append(parts, "a partition table ("+c.PartitionTable+")")
	}
	if c.UUID != "" {
		parts = append(parts, "UUID "+c.UUID)
	}
	if len(parts) == 0 {
		return "nothing known"
	}
	return strings.Join(parts, ", ")
}

// Exit codes of blkid -p.
const (
	blkidFound     = 0
	blkidNothing   = 2 // a device it cannot read too
	blkidAmbiguous = 8
)

// Probe asks blkid, bypassing its cache, what the device holds. Because blkid answers "nothing" for a device that it cannot
// read as well, the places where most things announce themselves are read first, which is [ErrUnreadable] where it
// fails, as is every answer of blkid's that is neither one finding nor none.
func Probe(ctx context.Context, dev Device) (Content, error) {
	file, err := dev.Open(unix.O_RDONLY)
	if err != nil {
		return Content{}, err
	}
	_, err = findByte(ctx, file, headAndTail(dev.SizeBytes))
	if err := errors.Join(err, file.Close()); err != nil {
		return Content{}, fmt.Errorf("%w %s: %w", ErrUnreadable, dev, err)
	}
	return probe(ctx, dev)
}

func probe(ctx context.Context, dev Device) (Content, error) {
	result, err := tool.Run(ctx, "blkid", "-p", "-o", "export", dev.Path)
	if err != nil {
		return Content{}, err
	}
	switch {
	case result.ExitCode == blkidFound:
		content := parseExport(result.Stdout)
		if content.Empty() {
			return Content{}, fmt.Errorf("%w %s: blkid found something it has no name for: %s", ErrUnreadable, dev, result.Said())
		}
		return content, nil
	case result.ExitCode == blkidNothing && result.Stdout == "" && result.Stderr == "":
		return Content{}, nil
	case result.ExitCode == blkidAmbiguous:
		return Content{}, fmt.Errorf("%w %s: blkid found several things at once: %s", ErrUnreadable, dev, result.Said())
	}
	return Content{}, fmt.Errorf("%w %s: blkid: exit code %d: %s", ErrUnreadable, dev, result.ExitCode, result.Said())
}

func parseExport(text string) Content {
	var content Content
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch key {
		case "TYPE":
			content.Type = value
		case "UUID":
			content.UUID = value
		case "PTTYPE":
			content.PartitionTable = value
		}
	}
	return content
}

// NeverMounted reports whether the filesystem that content describes is as mkfs leaves it before its first writable mount,
// or half made. Where that cannot be told it counts as mounted.
func NeverMounted(dev Device, content Content) (never bool, err error) {
	err = dev.with(func(file *os.File) error {
		switch content.Type {
		case "ext2", "ext3", "ext4":
			never, err = extNeverMounted(file)
		case "xfs":
			never, err = xfsNeverMounted(file)
		case "btrfs":
			never, err = btrfsNeverMounted(file)
		}
		return err
	})
	if err != nil {
		return false, fmt.Errorf("%w: superblock of %s: %w", ErrUnreadable, dev, err)
	}
	return never, nil
}

// extNeverMounted reads struct ext4_super_block at 1024: mounts are counted, and the last one's time is noted.
func extNeverMounted(file *os.File) (bool, error) {
	super := make([]byte, 1024)
	if _, err := file.ReadAt(super, 1024); err != nil {
		return false, err
	}
	// s_mtime and its upper bits, s_mnt_count
	return binary.LittleEndian.Uint32(super[0x2c:]) == 0 && super[0x275] == 0 && binary.LittleEndian.Uint16(super[0x34:]) == 0, nil
}

// xfsNeverMounted reads struct xfs_dsb at 0. It is marked as in progress until mkfs is done. Of a finished one the log
// tells: mkfs writes one record at its start and zeros behind it, and the first mount stamps the 2 MiB that follow.
func xfsNeverMounted(file *os.File) (bool, error) {
	const (
		mkfsBytes    = 256 * kib // no record is longer
		stampedBytes = 2 * mib
	)
	super := make([]byte, 512)
	if _, err := file.ReadAt(super, 0); err != nil {
		return false, err
	}
	if super[126] != 0 { // sb_inprogress
		return true, nil
	}
	// The log's start is given as a block in a group: sb_blocksize, sb_logstart, sb_agblocks, sb_logblocks, sb_agblklog.
	block, start := int64(binary.BigEndian.Uint32(super[4:])), binary.BigEndian.Uint64(super[48:])
	groupBlocks, logBlocks, groupShift := int64(binary.BigEndian.Uint32(super[84:])), int64(binary.BigEndian.Uint32(super[96:])), super[124]
	if start == 0 || groupShift > 31 || logBlocks*block < stampedBytes {
		return false, nil // another layout than we make
	}
	offset := (int64(start>>groupShift)*groupBlocks + int64(start&(1<<groupShift-1))) * block
	found, err := findByte(context.Background(), file, []region{{"", offset + mkfsBytes, stampedBytes - mkfsBytes}})
	return found == "", err
}

// btrfsNeverMounted reads struct btrfs_super_block at 64 KiB: the first mount makes the tree of UUIDs.
func btrfsNeverMounted(file *os.File) (bool, error) {
	generation := make([]byte, 8)
	if _, err := file.ReadAt(generation, 64*kib+0x233); err != nil { // uuid_tree_generation
		return false, err
	}
	return binary.LittleEndian.Uint64(generation) == 0, nil
}
