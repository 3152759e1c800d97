// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package device

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

// Content is what blkid found on a device: at most one filesystem or other known format. The zero value means that
// blkid found nothing. That does not mean that the device is blank: see [ProveBlank].
type Content struct {
	// Type is blkid's name of the format: "ext4", "xfs", "LVM2_member", "crypto_LUKS". It is empty for a partition
	// table.
	Type string
	// UUID is the filesystem's UUID as blkid prints it, or empty.
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
	blkidNothing   = 2 // also for a device that blkid cannot read
	blkidAmbiguous = 8
)

// Probe asks blkid what the device holds, without blkid's cache. blkid answers "nothing" also for a device that it
// cannot read, and from util-linux 2.41 on for several formats and for a superblock with a wrong checksum. Probe then
// asks wipefs, and reads the first and last MiB itself. It returns [ErrUnreadable] if that fails, or if there are
// several formats. Both copies of a LUKS2 header count, whatever blkid says.
func Probe(ctx context.Context, dev Device) (Content, error) {
	content, err := probe(ctx, dev)
	if err == nil && content.Empty() {
		content, err = probeSilent(ctx, dev)
	}
	if err != nil {
		return content, err
	}
	if content.Empty() || content.Type == TypeLUKS {
		headerUUID, _, err := dev.LUKSHeader()
		if headerUUID != "" {
			content.Type, content.UUID = TypeLUKS, headerUUID
		}
		if err != nil || !content.Empty() {
			return content, err
		}
	}
	if !content.Empty() {
		return content, nil
	}
	err = dev.withFile(func(file *os.File) error {
		_, err := findByte(ctx, file, headAndTail(dev.SizeBytes))
		return err
	})
	if err != nil {
		return Content{}, fmt.Errorf("%w %s: %w", ErrUnreadable, dev, err)
	}
	return Content{}, nil
}

// filesystemBytes is the length of the beginning of a disk in which every supported filesystem has its superblock: ext
// and xfs in the first 4 KiB, btrfs at 64 KiB.
const filesystemBytes = 128 * kib

// HeadIsZero reports whether the disk begins with zeros and therefore holds no supported filesystem. Only [ProveBlank]
// can tell whether the disk holds anything else.
func HeadIsZero(ctx context.Context, dev Device) (zero bool, err error) {
	err = dev.withFile(func(file *os.File) error {
		found, err := findByte(ctx, file, []region{{"", 0, min(filesystemBytes, dev.SizeBytes)}})
		zero = found == ""
		return err
	})
	if err != nil {
		return false, fmt.Errorf("%w %s: %w", ErrUnreadable, dev, err)
	}
	return zero, nil
}

func probe(ctx context.Context, dev Device) (Content, error) {
	result, err := hostexec.Run(ctx, "blkid", "-p", "-o", "export", dev.Path)
	if err != nil {
		return Content{}, err
	}
	switch {
	case result.ExitCode == blkidFound:
		content := parseBlkidExport(result.Stdout)
		if content.Empty() {
			return Content{}, fmt.Errorf("%w %s: blkid found a format without a name: %s", ErrUnreadable, dev, result.Message())
		}
		return content, nil
	case result.ExitCode == blkidNothing && result.Stdout == "" && result.Stderr == "":
		return Content{}, nil
	case result.ExitCode == blkidAmbiguous:
		return Content{}, fmt.Errorf("%w %s: blkid found several formats: %s", ErrUnreadable, dev, result.Message())
	}
	return Content{}, fmt.Errorf("%w %s: blkid: exit code %d: %s", ErrUnreadable, dev, result.ExitCode, result.Message())
}

// probeSilent asks wipefs what is on a device for which blkid has no word. wipefs lists all signatures.
func probeSilent(ctx context.Context, dev Device) (content Content, err error) {
	result, err := hostexec.Run(ctx, "wipefs",
		"--no-act", "--parsable", "--noheadings", "--output=TYPE,UUID,USAGE", dev.Path)
	if err != nil {
		return content, err
	}
	if result.ExitCode != 0 {
		return content, fmt.Errorf("%w %s: wipefs: exit code %d: %s", ErrUnreadable, dev, result.ExitCode, result.Message())
	}
	for line := range strings.Lines(result.Stdout) {
		kind, rest, _ := strings.Cut(strings.TrimSpace(line), ",")
		id, usage, _ := strings.Cut(rest, ",")
		if usage == "partition-table" {
			content.PartitionTable = kind
			continue
		}
		if content.Type != "" && (content.Type != kind || content.UUID != id) {
			return Content{}, fmt.Errorf("%w %s: several formats: %s, %s", ErrUnreadable, dev, content.Type, kind)
		}
		content.Type, content.UUID = kind, id
	}
	return content, nil
}

func parseBlkidExport(text string) Content {
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
