// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package mount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
)

// loopInUse returns the name of a loop device through which one of the devices is used, or "". A bound loop device
// holds the disk open, but /proc does not show it and O_EXCL still succeeds. An unused loop device is ignored: kubelet
// keeps one for each raw block volume.
func loopInUse(devices []device.Number) string {
	folders, err := filepath.Glob("/sys/block/loop*/loop") // of bound loop devices only
	if err != nil {
		return ""
	}
	for _, folder := range folders {
		name := filepath.Base(filepath.Dir(folder))
		loop, backing, _, err := openLoop("/dev/" + name)
		switch {
		case err != nil:
			if mayBeBoundTo(folder, devices) {
				return name
			}
		case slices.Contains(devices, backing) && used(name, loop):
			return name
		}
	}
	return ""
}

// mayBeBoundTo says what is known of a loop device that cannot be opened, as under a device policy: only the path of
// what it is bound to, perhaps in another mount namespace. folder is its folder in /sys.
func mayBeBoundTo(folder string, devices []device.Number) bool {
	text, err := device.ReadKernelFile(filepath.Join(folder, "backing_file"))
	if err != nil {
		return !errors.Is(err, os.ErrNotExist) // not bound any more
	}
	path := strings.TrimSpace(string(text))
	info, err := os.Stat(path)
	if err == nil && info.Mode().IsRegular() {
		return false
	}
	number, isDevice := device.NodeNumber(path)
	return !isDevice || slices.Contains(devices, number)
}

// loopsOnFiles names the loop devices on files of a disk's filesystem. They keep the filesystem mounted, and no process
// shows them.
func loopsOnFiles(n device.Number) (names []string) {
	filesystems := device.WithMappings([]device.Number{n})
	if table, err := ReadTable(); err == nil {
		for _, entry := range table.OfDevice(n) {
			var stat unix.Statx_t // the files of a btrfs have another number than its disk
			if !entry.Block() && unix.Statx(unix.AT_FDCWD, entry.Path, unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &stat) == nil {
				filesystems = append(filesystems, device.Number{Major: stat.Dev_major, Minor: stat.Dev_minor})
			}
		}
	}
	folders, err := filepath.Glob("/sys/block/loop*/loop") // of bound loop devices only
	if err != nil {
		return nil
	}
	for _, folder := range folders {
		name := filepath.Base(filepath.Dir(folder))
		_, backing, on, err := openLoop("/dev/" + name)
		if err == nil && backing == (device.Number{}) && slices.Contains(filesystems, on) {
			names = append(names, "loop device "+name)
		}
	}
	return names
}

// openLoop returns the number of a loop device, that of the device to which it is bound, or zero for a file, and that
// of the filesystem with the file or the device node.
func openLoop(path string) (loop, backing, filesystem device.Number, err error) {
	file, err := os.Open(path)
	if err != nil {
		return loop, backing, filesystem, err
	}
	info, err := unix.IoctlLoopGetStatus64(int(file.Fd()))
	if err := errors.Join(err, file.Close()); err != nil {
		return loop, backing, filesystem, err
	}
	loop, known := device.NodeNumber(path)
	if !known {
		return loop, backing, filesystem, os.ErrNotExist
	}
	return loop, numberOf(info.Rdevice), numberOf(info.Device), nil
}

func numberOf(number uint64) device.Number {
	return device.Number{Major: unix.Major(number), Minor: unix.Minor(number)}
}

// used reports whether a mount, a device mapper, another loop device or a program uses a loop device or one of its
// partitions.
func used(name string, loop device.Number) bool {
	table, err := ReadTable()
	if err != nil {
		return true
	}
	folders, err := filepath.Glob("/sys/block/" + name + "/" + name + "p*")
	if err != nil {
		return true
	}
	numbers := []device.Number{loop}
	for _, folder := range folders {
		text, err := device.ReadKernelFile(filepath.Join(folder, "dev"))
		if err != nil {
			return true
		}
		var partition device.Number
		if _, err := fmt.Sscanf(string(text), "%d:%d", &partition.Major, &partition.Minor); err != nil {
			return true
		}
		numbers = append(numbers, partition)
	}
	for _, folder := range append(folders, "/sys/block/"+name) {
		if holders, err := os.ReadDir(filepath.Join(folder, "holders")); err != nil || len(holders) > 0 {
			return true
		}
	}
	mounted := func(n device.Number) bool { return len(table.OfDevice(n)) > 0 || len(CopiesOf(n)) > 0 }
	openers := opener{devices: numbers, reading: true}
	return slices.ContainsFunc(numbers, mounted) || openers.exists() || loopInUse(numbers) != ""
}
