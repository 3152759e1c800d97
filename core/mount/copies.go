// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package mount

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
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

// opener looks for processes that have one of the devices itself open or in a memory mapping: for writing or, with
// reading, in any way. It follows the links in /proc without a request to the disk.
type opener struct {
	devices []device.Number
	reading bool
	// readers says that the last look has seen a process that only reads.
	readers bool
	// last is the folder in /proc of the process that was found last.
	last string
}

// exists reports whether there is one. It looks at each open file of the node, which takes 3 ms for a thousand, unless
// the process that was found last still has a device open.
func (o *opener) exists() bool {
	if o.last != "" && (o.opens(o.last) || o.maps(o.last)) {
		return true
	}
	o.last, o.readers = "", false
	forEachProcess(func(folder string) bool {
		if o.opens(folder) || o.maps(folder) {
			o.last = folder
		}
		return o.last == ""
	})
	return o.last != ""
}

// opens reports whether a process, given by its folder in /proc, has one of the devices open. The folder shows the
// files of the main thread. If that has ended, the other threads still have them.
func (o *opener) opens(folder string) bool {
	found, files := o.in(filepath.Join(folder, "fd"))
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
		found, _ := o.in(thread)
		return found
	})
}

// shared matches a mapping that can write to its file, now or later: proc(5), /proc/pid/maps.
var shared = regexp.MustCompile(`(?m)^\S+ ...s `)

// mapsFiles reports whether a process shares files through its memory, perhaps after it has closed them.
func mapsFiles(folder string) bool {
	content, err := device.ReadKernelFile(filepath.Join(folder, "maps"))
	return err == nil && shared.Match(content)
}

// maps reports whether a process has one of the devices in its memory.
func (o *opener) maps(folder string) bool {
	if !mapsFiles(folder) {
		return false
	}
	found, _ := o.in(filepath.Join(folder, "map_files"))
	return found
}

// in reports whether a folder of /proc with the files of a process contains one of the devices, and how many files it
// has seen until then. It uses plain system calls: a node has thousands of open files, and os.File takes a quarter
// more time.
func (o *opener) in(folder string) (found bool, seen int) {
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
		if slices.ContainsFunc(files, func(file string) bool { return o.isOpen(dir, file) }) {
			return true, seen
		}
	}
}

// isOpen reports whether a file of a process is one of the devices, opened for writing or, with reading, in any way.
func (o *opener) isOpen(dir int, file string) bool {
	var stat unix.Statx_t
	err := unix.Statx(dir, file, unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &stat)
	if err != nil || stat.Mode&unix.S_IFMT != unix.S_IFBLK ||
		!slices.Contains(o.devices, device.Number{Major: stat.Rdev_major, Minor: stat.Rdev_minor}) {
		return false
	}
	// The mode of the link says how the file was opened: proc(5).
	var link unix.Stat_t
	writes := unix.Fstatat(dir, file, &link, unix.AT_SYMLINK_NOFOLLOW) == nil && link.Mode&0o200 != 0
	o.readers = o.readers || !writes
	return o.reading || writes
}
