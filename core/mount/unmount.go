// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package mount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
)

const (
	// busyTimeout is how long an unmount waits for programs that use the mount. Programs need a moment to end.
	busyTimeout = 30 * time.Second
	// busyInterval is the longest time between two attempts. The first ones follow sooner.
	busyInterval = 100 * time.Millisecond
	// answerReserve is kept of the caller's time for the answer that names the holders.
	answerReserve = time.Second
)

// Unmount unmounts every mount at path that gives access to device n. It returns nil when the mount table shows no such
// mount, also if there was none before. It returns [ErrForeign] if another mount covers them, or if path has only other
// mounts. While a mount is in use, Unmount tries again for 30 s, or a little less than ctx allows. Then it returns
// [ErrBusy] with the holder. If something is mounted inside it, Unmount returns [ErrBusy] at once.
func Unmount(ctx context.Context, path string, n device.Number) error {
	unmounted := false
	n = device.DiskBelow(n)
	return retryBusy(ctx, func() (bool, error) {
		table, err := ReadTable()
		if err != nil {
			return false, err
		}
		mounts := table.AllAt(path)
		if len(mounts) == 0 {
			return true, nil
		}
		if number, ok := mounts[0].Device(); !ok || number != n {
			if unmounted && !slices.ContainsFunc(mounts[1:], func(covered Entry) bool { return covered.Number == n }) {
				return true, nil
			}
			return false, fmt.Errorf("%w: %s has a mount of %s, not of device %s", ErrForeign, path, mounts[0], n)
		}
		if err := table.CheckNothingInside(mounts[0]); err != nil {
			return false, fmt.Errorf("unmount %s: %w", path, err)
		}
		err = unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
		switch {
		case err == nil:
			unmounted = true
			return false, nil // read the table again: another mount may be below
		case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
			return false, errBusy // EINVAL, ENOENT: another process unmounted it, or the mount is locked
		}
		return false, fmt.Errorf("unmount %s: %w", path, err)
	}, func() string { return path + " is in use" + describeHolders(n) })
}

// errBusy tells retryBusy to try again.
var errBusy = errors.New("busy")

// retryBusy calls try until it is done or fails. After errBusy it waits for a moment. At the end of the wait it returns
// [ErrBusy] with what describe returns.
func retryBusy(ctx context.Context, try func() (done bool, err error), describe func() string) error {
	start := time.Now()
	end := start.Add(busyTimeout)
	if deadline, ok := ctx.Deadline(); ok && deadline.Add(-answerReserve).Before(end) {
		end = deadline.Add(-answerReserve)
	}
	for interval := time.Millisecond; ; interval = min(2*interval, busyInterval) {
		done, err := try()
		if done {
			return nil
		}
		if err == nil {
			continue
		}
		if !errors.Is(err, errBusy) {
			return err
		}
		if !time.Now().Before(end) {
			return fmt.Errorf("%w after %s: %s", ErrBusy, time.Since(start).Round(time.Second), describe())
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w after %s: %s: %w", ErrBusy, time.Since(start).Round(time.Second), describe(), ctx.Err())
		case <-time.After(interval):
		}
	}
}

// describeHolders names who uses the disk n or its partitions, as far as the plugin can see: processes, loop devices,
// and mounts in other namespaces.
func describeHolders(n device.Number, partitions ...device.Number) string {
	holders := loopsOnFiles(n)
	copies := CopiesOf(n)
	if processes := processesUsing(append(partitions, n), mountIDs(n, copies)); processes != "" {
		holders = append(holders, processes)
	}
	if len(copies) > 0 {
		holders = append(holders, copies[0].String())
	}
	if len(holders) == 0 {
		return " by an unknown holder: run fuser -vm on the node, or look for a container that still mounts it"
	}
	return " by " + strings.Join(holders, ", ")
}

// mountIDs returns the IDs of the mounts of a disk's filesystem, in this mount namespace and in the copies. The files
// of a btrfs show them, and not the number of its disk.
func mountIDs(n device.Number, copies []Copy) (ids []int) {
	if table, err := ReadTable(); err == nil {
		for _, entry := range table.OfDevice(n) {
			if !entry.Block() {
				ids = append(ids, entry.id)
			}
		}
	}
	for _, c := range copies {
		ids = append(ids, c.id)
	}
	return ids
}

// maxNamed is the largest number of processes that an error names.
const maxNamed = 3

// processesUsing names processes that use one of the devices, or a file of its filesystem or of one of the mounts: as
// an open file, a current or root folder, a program, or in memory. It follows their links in /proc without a request
// to the filesystem, which may be dead.
func processesUsing(devices []device.Number, mounts []int) string {
	var names []string
	devices = device.WithMappings(devices)
	forEachProcess(func(folder string) bool {
		links, err := filepath.Glob(filepath.Join(folder, "fd", "*"))
		if err == nil && len(links) == 0 { // as in opens
			links, err = filepath.Glob(filepath.Join(folder, "task", "*", "fd", "*"))
		}
		if mapsFiles(folder) {
			mapped, _ := filepath.Glob(filepath.Join(folder, "map_files", "*")) // the pattern is right
			links = append(links, mapped...)
		}
		for _, link := range []string{"cwd", "root", "exe"} {
			links = append(links, filepath.Join(folder, link))
		}
		uses := func(link string) bool { return linkUses(link, devices, mounts) }
		if err == nil && slices.ContainsFunc(links, uses) {
			names = append(names, processName(folder))
		}
		return len(names) < maxNamed
	})
	return strings.Join(names, ", ")
}

func linkUses(link string, devices []device.Number, mounts []int) bool {
	var stat unix.Statx_t
	mask := unix.STATX_TYPE | unix.STATX_MNT_ID
	if err := unix.Statx(unix.AT_FDCWD, link, unix.AT_STATX_DONT_SYNC, mask, &stat); err != nil {
		return false
	}
	if stat.Mode&unix.S_IFMT == unix.S_IFBLK {
		return slices.Contains(devices, device.Number{Major: stat.Rdev_major, Minor: stat.Rdev_minor})
	}
	return slices.Contains(devices, device.Number{Major: stat.Dev_major, Minor: stat.Dev_minor}) ||
		stat.Mask&unix.STATX_MNT_ID != 0 && slices.Contains(mounts, int(stat.Mnt_id))
}

// forEachProcess calls visit with the /proc folder of every process except this one, until visit returns false.
func forEachProcess(visit func(folder string) bool) {
	folders, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return
	}
	own := fmt.Sprintf("/proc/%d", os.Getpid())
	for _, folder := range folders {
		if folder != own && !visit(folder) {
			return
		}
	}
}

func processName(folder string) string {
	comm, err := os.ReadFile(filepath.Join(folder, "comm"))
	if err != nil {
		return "process " + filepath.Base(folder)
	}
	return fmt.Sprintf("process %s (%s)", filepath.Base(folder), strings.TrimSpace(string(comm)))
}
