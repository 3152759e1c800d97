// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package device

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
)

// ControllerLive is the state of a working NVMe controller, see [Roots.ControllerState].
const ControllerLive = "live"

// ControllerState returns the kernel's word for the state of a disk's NVMe controller: "live", "connecting",
// "resetting", "deleting" or "dead". It is empty if sysfs does not show the state.
func (r Roots) ControllerState(disk string) string {
	state, err := r.attribute(disk, "device/state")
	if err != nil {
		return ""
	}
	return state
}

// FunctionsNotReady returns the addresses of PCI NVMe functions that are not ready: the kernel rejected them, mostly
// because another disk has the same serial, or their controllers do not start. It waits for functions that are still
// starting, as long as [Roots.WaitForDisk] does and ctx allows.
func (r Roots) FunctionsNotReady(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		addresses, err := r.FunctionsNotReadyNow()
		if err != nil || len(addresses) == 0 {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return addresses, nil
		case <-ticker.C:
		}
	}
}

// Ext4Errors are the errors that the superblock of an ext3 or ext4 filesystem has recorded since the last e2fsck.
type Ext4Errors struct {
	Count int64
	// First and Last are the times of the first and of the last error.
	First, Last time.Time
	// Corruption says that the first or the last error was damage to the filesystem, not a failed read or write.
	Corruption bool
}

// Ext4Errors reads from sysfs the recorded errors of the ext3 or ext4 filesystem that is mounted from a disk. It
// returns no errors if sysfs does not show the filesystem.
func (r Roots) Ext4Errors(disk string) (Ext4Errors, error) {
	number := func(file string) (int64, error) {
		content, err := os.ReadFile(r.sys("fs", "ext4", disk, file))
		if errors.Is(err, fs.ErrNotExist) {
			return 0, nil
		}
		if err != nil {
			return 0, err
		}
		return strconv.ParseInt(strings.TrimSpace(string(content)), 10, 64)
	}
	values := map[string]int64{}
	for _, file := range []string{"errors_count", "first_error_time", "last_error_time", "first_error_errcode", "last_error_errcode"} {
		value, err := number(file)
		if err != nil {
			return Ext4Errors{}, fmt.Errorf("errors of the filesystem on %s: %w", disk, err)
		}
		values[file] = value
	}
	return Ext4Errors{
		Count: values["errors_count"],
		First: time.Unix(values["first_error_time"], 0).UTC(),
		Last:  time.Unix(values["last_error_time"], 0).UTC(),
		Corruption: values["errors_count"] > 0 &&
			(corruption(values["first_error_errcode"]) || corruption(values["last_error_errcode"])),
	}, nil
}

// corruption reports whether an error code of ext4 (EXT4_ERR_* in Linux, fs/ext4/ext4.h) means damage: a wrong checksum
// or an invalid structure. Kernels before Linux 5.8 record no code, and their errors mostly mean damage.
func corruption(code int64) bool {
	const (
		unknown, badChecksum, corrupted = 1, 4, 5
	)
	return code <= unknown || code == badChecksum || code == corrupted
}

// BtrfsCorruption counts the blocks with a wrong checksum or a wrong generation that the mounted btrfs with this UUID
// has read. It returns 0 if the UUID is empty or sysfs does not show the filesystem.
func (r Roots) BtrfsCorruption(filesystem string) (int64, error) {
	if filesystem == "" {
		return 0, nil
	}
	files, err := filepath.Glob(r.sys("fs", "btrfs", filesystem, "devinfo", "*", "error_stats"))
	if err != nil {
		return 0, err
	}
	var count int64
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			return 0, err
		}
		for line := range strings.Lines(string(content)) {
			key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
			if key != "corruption_errs" && key != "generation_errs" {
				continue
			}
			n, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("%s: %w", file, err)
			}
			count += n
		}
	}
	return count, nil
}

// FilesystemUUID reads the UUID in the superblock of the device, in the form of [Content.UUID], without a program. It
// is empty if the device has no supported filesystem.
func (d Device) FilesystemUUID() (text string, err error) {
	err = d.withFile(func(file *os.File) error {
		for _, super := range []struct {
			magic         string
			magicAt, uuid int64
		}{
			{"\x53\xef", 1024 + 0x38, 1024 + 0x68},     // ext3, ext4: s_magic, s_uuid
			{"XFSB", 0, 32},                            // xfs: sb_magicnum, sb_uuid
			{"_BHRfS_M", 64<<10 + 0x40, 64<<10 + 0x20}, // btrfs: magic, fsid
		} {
			magic, id := make([]byte, len(super.magic)), uuid.UUID{}
			if _, err := file.ReadAt(magic, super.magicAt); err != nil {
				return err
			}
			if string(magic) != super.magic {
				continue
			}
			if _, err := file.ReadAt(id[:], super.uuid); err != nil {
				return err
			}
			text = id.String()
			return nil
		}
		return nil
	})
	if err != nil {
		return "", fmt.Errorf("%w: superblock of %s: %w", ErrUnreadable, d, err)
	}
	return text, nil
}
