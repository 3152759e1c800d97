// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package mount

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
)

// Copy is a mount of a filesystem in another mount namespace, such as a container's. A container with private mounts
// gets a copy of each mount when it starts, and keeps it when the host unmounts its own.
type Copy struct {
	Entry
	// Process names a process of the namespace.
	Process string
}

func (c Copy) String() string { return "the mounts of " + c.Process }

// CopiesOf returns the mounts of the device's filesystem in other mount namespaces, as far as the plugin sees the
// guest's processes. Bound device nodes do not count: they hold nothing.
func CopiesOf(n device.Number) (copies []Copy) {
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return nil
	}
	n = device.DiskBelow(n)
	var shown [][]byte // the numbers as the kernel's tables show them
	for _, number := range device.WithMappings([]device.Number{n}) {
		shown = append(shown, []byte(" "+number.String()+" "))
	}
	seen := map[string]bool{own: true}
	forEachProcess(func(folder string) bool {
		namespace, err := os.Readlink(filepath.Join(folder, "ns", "mnt"))
		if err != nil || seen[namespace] {
			return true
		}
		content, err := device.ReadKernelFile(filepath.Join(folder, "mountinfo"))
		if err != nil {
			return true // the process has ended; another may be in the same namespace
		}
		seen[namespace] = true
		// A node has many namespaces, and few of them have the mount. The number of a btrfs is not in the table.
		contained := func(number []byte) bool { return bytes.Contains(content, number) }
		if slices.ContainsFunc(shown, contained) || bytes.Contains(content, []byte(" btrfs ")) {
			copies = append(copies, copiesIn(folder, content, n)...)
		}
		return true
	})
	return copies
}

// copiesIn returns the mounts of the device's filesystem in the mount table of a process.
func copiesIn(folder string, table []byte, n device.Number) (copies []Copy) {
	mounts, err := mountinfo.GetMountsFromReader(bytes.NewReader(table), nil)
	if err != nil {
		return nil
	}
	for _, m := range mounts {
		entry := entryOf(m)
		if entry.Number != n || entry.Block() {
			continue
		}
		copies = append(copies, Copy{Entry: entry, Process: processName(folder)})
	}
	return copies
}

// opener looks for processes that have one of the devices itself open for writing or, with reading, in any way. It
// follows the links in /proc without a request to the disk. It sees no process that has closed the file and
// kept a memory mapping of it.
type opener struct {
	devices []device.Number
	reading bool
	// last is the folder in /proc of the process that was found last.
	last string
}

// exists reports whether there is one. It looks at each open file of the node, which takes 3 ms for a thousand, unless
// the process that was found last still has a device open.
func (o *opener) exists() bool {
	if o.last != "" && opens(o.last, o.devices, o.reading) {
		return true
	}
	o.last = ""
	forEachProcess(func(folder string) bool {
		if opens(folder, o.devices, o.reading) {
			o.last = folder
		}
		return o.last == ""
	})
	return o.last != ""
}

// opens reports whether a process, given by its folder in /proc, has one of the devices open. The folder shows the
// files of the main thread. If that has ended, the other threads still have them.
func opens(folder string, devices []device.Number, reading bool) bool {
	found, files := opensIn(filepath.Join(folder, "fd"), devices, reading)
	if found || files > 0 {
		return found
	}
	// The kernel counts the threads as links. Most processes without files are threads of the kernel.
	var task unix.Stat_t
	if err := unix.Stat(filepath.Join(folder, "task"), &task); err == nil && task.Nlink == 3 {
		return false
	}
	threads, err := filepath.Glob(filepath.Join(folder, "task", "*", "fd"))
	return err == nil && slices.ContainsFunc(threads, func(thread string) bool {
		found, _ := opensIn(thread, devices, reading)
		return found
	})
}

// opensIn reports whether a folder of /proc with the files of a thread contains one of the devices, and how many files
// it has seen until then. It uses plain system calls: a node has thousands of open files, and os.File takes a quarter
// more time.
func opensIn(folder string, devices []device.Number, reading bool) (found bool, seen int) {
	dir, err := unix.Open(folder, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, 0 // the process has ended
	}
	defer func() { _ = unix.Close(dir) }() // nothing was written
	buffer := make([]byte, 4096)
	for {
		size, err := unix.ReadDirent(dir, buffer)
		if err != nil || size <= 0 {
			return false, seen
		}
		_, _, files := unix.ParseDirent(buffer[:size], -1, nil)
		seen += len(files)
		if slices.ContainsFunc(files, func(file string) bool { return isOpen(dir, file, devices, reading) }) {
			return true, seen
		}
	}
}

// isOpen reports whether a file of a process is one of the devices, opened for writing or, with reading, in any way.
func isOpen(dir int, file string, devices []device.Number, reading bool) bool {
	var stat unix.Statx_t
	err := unix.Statx(dir, file, unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &stat)
	if err != nil || stat.Mode&unix.S_IFMT != unix.S_IFBLK ||
		!slices.Contains(devices, device.Number{Major: stat.Rdev_major, Minor: stat.Rdev_minor}) {
		return false
	}
	// The mode of the link says how the file was opened: proc(5).
	var link unix.Stat_t
	return reading || unix.Fstatat(dir, file, &link, unix.AT_SYMLINK_NOFOLLOW) == nil && link.Mode&0o200 != 0
}
