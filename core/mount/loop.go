// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package mount

import (
	"errors"
	"os"
	"path/filepath"
	"slices"

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
		if loop, backing, err := openLoop(
			"/dev/" + name,
		); err == nil && slices.Contains(devices, backing) &&
			used(name, loop) {
			return name
		}
	}
	return ""
}

// openLoop returns the number of a loop device, and that of the device to which it is bound.
func openLoop(path string) (loop, backing device.Number, err error) {
	file, err := os.Open(path)
	if err != nil {
		return device.Number{}, device.Number{}, err
	}
	info, err := unix.IoctlLoopGetStatus64(int(file.Fd()))
	if err := errors.Join(err, file.Close()); err != nil {
		return device.Number{}, device.Number{}, err
	}
	loop, known := device.NodeNumber(path)
	if !known {
		return device.Number{}, device.Number{}, os.ErrNotExist
	}
	return loop, device.Number{Major: unix.Major(info.Rdevice), Minor: unix.Minor(info.Rdevice)}, nil
}

// used reports whether a mount, a device mapper or a program uses a loop device.
func used(name string, loop device.Number) bool {
	if table, err := ReadTable(); err != nil || len(table.OfDevice(loop)) > 0 || len(CopiesOf(loop)) > 0 {
		return true
	}
	holders, err := os.ReadDir("/sys/block/" + name + "/holders")
	return err != nil || len(holders) > 0 || openersOf([]device.Number{loop}, true) != ""
}
