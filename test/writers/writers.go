// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

// Package writers finds what can write to a disk by looking at everything: each open file and each mapping of each
// process, and each mount namespace. The node plugin proves in cheaper ways that there is nothing. Tests compare after
// each unstage.
package writers

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// patience is longer than anything that looks at disks has one open, such as the simulated rack.
const patience = 5 * time.Second

// Check returns an error if a program can still write to the block device at path: through an open or mapped file, or
// through a writable filesystem that is mounted in any mount namespace.
func Check(path string) error {
	var stat unix.Stat_t
	if err := unix.Stat(path, &stat); err != nil {
		return fmt.Errorf("stat %s: %w", path, err)
	}
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		found := writersOf(stat.Rdev)
		if len(found) == 0 {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("after an unstage %s can be written by %s", path, strings.Join(found, ", "))
		}
	}
}

func writersOf(disk uint64) (found []string) {
	disks := []uint64{disk}
	number := fmt.Sprintf("%d:%d", unix.Major(disk), unix.Minor(disk))
	above, _ := filepath.Glob("/sys/dev/block/" + number + "/holders/*/dev") // the pattern is right
	for _, file := range above {
		var major, minor uint32
		if text, err := os.ReadFile(file); err == nil {
			if _, err := fmt.Sscanf(string(text), "%d:%d", &major, &minor); err == nil {
				disks = append(disks, unix.Mkdev(major, minor))
			}
		}
	}
	seen := map[string]bool{}
	processes, _ := filepath.Glob("/proc/[0-9]*")
	for _, process := range processes {
		files, _ := filepath.Glob(process + "/task/*/fd/*")
		mapped, _ := filepath.Glob(process + "/map_files/*")
		files = append(files, mapped...)
		if slices.ContainsFunc(files, func(file string) bool { return writes(file, disks) }) {
			found = append(found, "a file of "+process)
		}
		namespace, err := os.Readlink(process + "/ns/mnt")
		if err != nil || seen[namespace] {
			continue
		}
		seen[namespace] = true
		table, err := os.Open(process + "/mountinfo")
		if err != nil {
			continue // it has ended
		}
		mounts, _ := mountinfo.GetMountsFromReader(table, nil)
		_ = table.Close() // it was read only
		if slices.ContainsFunc(mounts, func(m *mountinfo.Info) bool { return writable(m, disks) }) {
			found = append(found, "a mount of "+process)
		}
	}
	return found
}

// writes reports whether an open file is one of the disks, opened for writing.
func writes(file string, disks []uint64) bool {
	var stat unix.Stat_t
	if unix.Stat(file, &stat) != nil || stat.Mode&unix.S_IFMT != unix.S_IFBLK || !slices.Contains(disks, stat.Rdev) {
		return false
	}
	link, err := os.Lstat(file) // its mode says how the file was opened: proc(5)
	return err == nil && link.Mode()&0o200 != 0
}

// writable reports whether a mount is that of a writable filesystem on one of the disks. A btrfs has a number of its
// own, and is known by the device from which it was mounted.
func writable(m *mountinfo.Info, disks []uint64) bool {
	number := unix.Mkdev(uint32(m.Major), uint32(m.Minor))
	if m.FSType == "btrfs" {
		var stat unix.Stat_t
		if unix.Stat(m.Source, &stat) == nil {
			number = stat.Rdev
		}
	}
	return slices.Contains(disks, number) && !slices.Contains(strings.Split(m.VFSOptions, ","), "ro")
}
