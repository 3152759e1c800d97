// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
)

const (
	// busyTimeout is how long an unmount waits for whoever still uses the mount: programs that were told to end need a moment.
	busyTimeout = 30 * time.Second
	// busyInterval is how often it tries.
	busyInterval = 100 * time.Millisecond
	// answerReserve is left of the caller's time for telling it who holds what.
	answerReserve = time.Second
)

// Unmount takes away every mount at path that gives access to device n and returns when the mount table shows none there
// any more, which is success too when nothing was mounted to begin with. It is [ErrForeign] when something else lies over
// them, or is all there is; what lies below them stays.
// While it is in use it tries again for 30 s, or a little less than ctx allows, and then names the holder: [ErrBusy].
func Unmount(ctx context.Context, path string, n device.Number) error {
	unmounted := false
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
		err = unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
		switch {
		case err == nil:
			unmounted = true
			return false, nil // look again: another mount may have been below
		case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
			return false, errBusy // the last two: somebody else was faster, or the kernel lets nobody have this one
		}
		return false, fmt.Errorf("unmount %s: %w", path, err)
	}, func() string { return path + " is in use" + describeHolders(n) })
}

// WaitUnused waits until nothing in this guest holds the device any more, as long as [Unmount] does, and then names the
// holder: [ErrBusy]. A filesystem that was unmounted here may still be mounted in the mount namespace of a container,
// which shows in that the device cannot be had exclusively. Of a raw block volume, programs that have the device open
// count too, so far as the plugin sees the guest's processes. A device that left the guest is held by nobody.
func WaitUnused(ctx context.Context, dev device.Device, block bool) error {
	return retryBusy(ctx, func() (bool, error) {
		table, err := ReadTable()
		if err != nil {
			return false, err
		}
		if len(table.OfDevice(dev.Number)) > 0 {
			return false, errBusy
		}
		switch err := dev.CheckUnused(); {
		case errors.Is(err, device.ErrInUse):
			return false, errBusy
		case errors.Is(err, device.ErrMismatch),
			errors.Is(err, fs.ErrNotExist),
			errors.Is(err, unix.ENXIO),
			errors.Is(err, unix.ENODEV):
			return true, nil // it left the guest
		case err != nil:
			return false, err
		}
		if block && processesUsing(dev.Number) != "" {
			return false, errBusy
		}
		return true, nil
	}, func() string { return dev.String() + " is in use" + describeHolders(dev.Number) })
}

// errBusy asks retryBusy for another try.
var errBusy = errors.New("busy")

// retryBusy calls try until it is done, every time from the start; errBusy makes it wait a moment first.
func retryBusy(ctx context.Context, try func() (done bool, err error), who func() string) error {
	start := time.Now()
	end := start.Add(busyTimeout)
	if deadline, ok := ctx.Deadline(); ok && deadline.Add(-answerReserve).Before(end) {
		end = deadline.Add(-answerReserve)
	}
	ticker := time.NewTicker(busyInterval)
	defer ticker.Stop()
	for {
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
			return fmt.Errorf("%w after %s: %s", ErrBusy, time.Since(start).Round(time.Millisecond), who())
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w after %s: %s: %w", ErrBusy, time.Since(start).Round(time.Millisecond), who(), ctx.Err())
		case <-ticker.C:
		}
	}
}

// describeHolders says who keeps the device in use, as well as can be seen from here: other mounts, and processes.
func describeHolders(n device.Number) string {
	var who []string
	if table, err := ReadTable(); err == nil {
		for _, entry := range table.OfDevice(n) {
			who = append(who, "mount "+entry.Path)
		}
	}
	if processes := processesUsing(n); processes != "" {
		who = append(who, processes)
	}
	if foreign := namespaceUsing(n); foreign != "" {
		who = append(who, foreign)
	}
	if len(who) == 0 {
		return ", by whom cannot be seen from here: look with fuser -vm, or for a container that still mounts it"
	}
	return " by " + strings.Join(who, ", ")
}

// maxNamed bounds how many processes an error names.
const maxNamed = 3

// processesUsing names processes that have a file of the filesystem on the device, or the device itself, open or as their
// folder or program. Their links in /proc are followed without asking the filesystem, which may be dead.
func processesUsing(n device.Number) string {
	var names []string
	forEachProcess(func(folder string) bool {
		links := []string{"cwd", "root", "exe"}
		if fds, err := os.ReadDir(filepath.Join(folder, "fd")); err == nil {
			for _, fd := range fds {
				links = append(links, filepath.Join("fd", fd.Name()))
			}
		}
		if slices.ContainsFunc(links, func(link string) bool { return linkUses(filepath.Join(folder, link), n) }) {
			names = append(names, processName(folder))
		}
		return len(names) < maxNamed
	})
	return strings.Join(names, ", ")
}

func linkUses(link string, n device.Number) bool {
	var stat unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, link, unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &stat); err != nil {
		return false
	}
	if stat.Mode&unix.S_IFMT == unix.S_IFBLK {
		return device.Number{Major: stat.Rdev_major, Minor: stat.Rdev_minor} == n
	}
	return device.Number{Major: stat.Dev_major, Minor: stat.Dev_minor} == n
}

// namespaceUsing names a process whose mount namespace still has the filesystem mounted.
func namespaceUsing(n device.Number) (name string) {
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return ""
	}
	seen := map[string]bool{own: true}
	forEachProcess(func(folder string) bool {
		namespace, err := os.Readlink(filepath.Join(folder, "ns", "mnt"))
		if err != nil || seen[namespace] {
			return true
		}
		seen[namespace] = true
		content, err := os.ReadFile(filepath.Join(folder, "mountinfo"))
		if err == nil && strings.Contains(string(content), " "+n.String()+" ") {
			name = "the mounts of " + processName(folder)
		}
		return name == ""
	})
	return name
}

// forEachProcess calls visit with the /proc folder of each process but our own until it returns false.
func forEachProcess(visit func(folder string) bool) {
	folders, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return
	}
	for _, folder := range folders {
		if folder != fmt.Sprintf("/proc/%d", os.Getpid()) && !visit(folder) {
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
