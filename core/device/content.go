// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
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
// read as well, the places where most things announce themselves are then read, which is [ErrUnreadable] where it fails,
// as is every answer of blkid's that is neither one finding nor none.
func Probe(ctx context.Context, dev Device) (Content, error) {
	content, err := probe(ctx, dev)
	if err != nil || !content.Empty() {
		return content, err
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

// filesystemBytes is where every filesystem that this plugin mounts has put something: ext and xfs in the first 4 KiB, btrfs
// at 64 KiB.
const filesystemBytes = 128 * kib

// HeadIsZero reports whether the disk begins with zeros, so that it holds no filesystem that this plugin mounts. What else
// it holds, only [ProveBlank] can tell.
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
			return Content{}, fmt.Errorf(
				"%w %s: blkid found something it has no name for: %s",
				ErrUnreadable,
				dev,
				result.Message(),
			)
		}
		return content, nil
	case result.ExitCode == blkidNothing && result.Stdout == "" && result.Stderr == "":
		return Content{}, nil
	case result.ExitCode == blkidAmbiguous:
		return Content{}, fmt.Errorf("%w %s: blkid found several things at once: %s", ErrUnreadable, dev, result.Message())
	}
	return Content{}, fmt.Errorf("%w %s: blkid: exit code %d: %s", ErrUnreadable, dev, result.ExitCode, result.Message())
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
