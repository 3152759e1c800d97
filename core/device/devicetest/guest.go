// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package devicetest makes disks for tests: loop devices that a small sysfs in a temporary folder shows as NVMe disks.
// The sysfs has the parts of docs/reference/rack.md §9 that package device reads.
package devicetest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

// Main runs the tests of a package that uses disks. More of them run at a time than there are processors, because they
// wait for the kernel to mount, unmount and flush. The flag -parallel overrides that.
func Main(m *testing.M) {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		if err := flag.Set("test.parallel", "8"); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

// Run runs a program of the host and returns what it wrote to its standard output. The program ends the test when it
// fails. Tests that run at the same time as others must not start programs by themselves: see
// [hostexec.CloseUninherited].
func Run(t testing.TB, name string, args ...string) (stdout string) {
	t.Helper()
	result, err := hostexec.Run(context.Background(), name, args...)
	if err != nil || result.ExitCode != 0 {
		t.Fatalf("%s %v: %v, exit code %d: %s", name, args, err, result.ExitCode, result.Message())
	}
	return result.Stdout
}

// AddPartition makes the first partition of a block device, without a table on it. Not every release of Debian has
// addpart(8).
func AddPartition(t testing.TB, path string, startBytes, sizeBytes int64) {
	t.Helper()
	changePartition(t, path, unix.BLKPG_ADD_PARTITION, startBytes, sizeBytes)
}

// DeletePartition takes it away.
func DeletePartition(t testing.TB, path string) {
	t.Helper()
	changePartition(t, path, unix.BLKPG_DEL_PARTITION, 0, 0)
}

func changePartition(t testing.TB, path string, operation int32, startBytes, sizeBytes int64) {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	// struct blkpg_partition and blkpg_ioctl_arg of Linux, include/uapi/linux/blkpg.h
	partition := struct {
		start, size int64
		number      int32
		_           [2][64]byte // names
	}{start: startBytes, size: sizeBytes, number: 1}
	argument := struct {
		operation, flags, size int32
		partition              unsafe.Pointer
	}{operation, 0, int32(unsafe.Sizeof(partition)), unsafe.Pointer(&partition)}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, file.Fd(), unix.BLKPG, uintptr(unsafe.Pointer(&argument)))
	if err := hostexec.CloseUninherited(file); errno != 0 || err != nil {
		t.Fatalf("change the partitions of %s: %v, %v", path, errno, err)
	}
}

// Unmount unmounts a path. It waits while the mount is busy: a program that starts at the same time has copies of all
// open files until it executes.
func Unmount(t testing.TB, path string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		err := unix.Unmount(path, 0)
		if err == nil {
			return
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			t.Fatalf("unmount %s: %v", path, err)
		}
	}
}

// Guest is a folder with the folders dev and sys of a guest.
type Guest struct {
	t   testing.TB
	Dir string
	// BlockSize is the size of a logical block of the disks that are attached next, in bytes. 0 means 512.
	BlockSize uint32
	next      int
}

// New returns a guest without disks. It skips the test if the user is not root, who can make loop devices.
func New(t testing.TB) *Guest {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loop devices and device nodes")
	}
	return NewBare(t)
}

// NewBare returns a guest that can have entries in sysfs ([Guest.Sysfs]) but no disks. It needs no root.
func NewBare(t testing.TB) *Guest {
	t.Helper()
	g := &Guest{t: t, Dir: t.TempDir()}
	for _, folder := range []string{"dev", "sys/block", "sys/bus/pci/devices", "sys/bus/pci/drivers/nvme"} {
		g.must(os.MkdirAll(filepath.Join(g.Dir, folder), 0o755))
	}
	return g
}

// Roots returns the guest's folders.
func (g *Guest) Roots() device.Roots {
	return device.Roots{Dev: filepath.Join(g.Dir, "dev"), Sys: filepath.Join(g.Dir, "sys")}
}

// Disk is a disk of a guest.
type Disk struct {
	// Kernel is the disk's name in the guest, such as nvme1n1. Backing is the file with the disk's bytes. Loop is the
	// machine's loop device.
	Kernel, Backing, Loop string
	Number                device.Number
}

// Add attaches a new blank disk with the serial of this disk name.
func (g *Guest) Add(diskName string, sizeBytes int64) *Disk {
	g.t.Helper()
	backing := filepath.Join(g.t.TempDir(), "disk")
	file, err := os.Create(backing)
	g.must(err)
	g.must(errors.Join(file.Truncate(sizeBytes), file.Close()))
	return g.Plug(diskName, backing)
}

// Plug attaches a disk with the bytes of the file backing.
func (g *Guest) Plug(diskName, backing string) *Disk {
	g.t.Helper()
	info, err := os.Stat(backing)
	g.must(err)
	number := g.attach(backing)
	d := &Disk{
		Kernel:  fmt.Sprintf("nvme%dn1", g.next),
		Backing: backing,
		Loop:    fmt.Sprintf("/dev/loop%d", number.Minor),
		Number:  number,
	}
	g.Node(d.Kernel, number)
	g.Sysfs(d.Kernel, Serial(diskName)+"\n", number, info.Size())
	g.next++
	return d
}

// Serial returns the serial that a rack gives to a disk of this name.
func Serial(diskName string) string { return diskName[:min(len(diskName), 20)] }

// Node makes a block device node in the guest's dev. It replaces what was there.
func (g *Guest) Node(name string, number device.Number) {
	g.t.Helper()
	path := filepath.Join(g.Dir, "dev", name)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		g.t.Fatal(err)
	}
	g.must(unix.Mknod(path, unix.S_IFBLK|0o660, int(unix.Mkdev(number.Major, number.Minor))))
}

// Unplug removes the disk from the guest's dev and sys. A mount of the disk stays, as in a real guest.
func (g *Guest) Unplug(d *Disk) {
	g.t.Helper()
	for _, path := range []string{"dev/" + d.Kernel, "sys/block/" + d.Kernel} {
		g.must(os.Remove(filepath.Join(g.Dir, path)))
	}
	g.must(os.RemoveAll(filepath.Join(g.Dir, "sys/bus/pci/devices", address(d.Kernel))))
}

// Sysfs adds a disk to sysfs, as a PCI function with its driver. serial is the whole content of the serial file.
func (g *Guest) Sysfs(kernel, serial string, number device.Number, sizeBytes int64) {
	g.t.Helper()
	function := g.Function(address(kernel), "nvme")
	g.disk(filepath.Join(function, "nvme", controllerOf(kernel)), "pcie", kernel, serial, number, sizeBytes)
}

// Network adds a disk to sysfs that is reached over a network.
func (g *Guest) Network(kernel, serial string, number device.Number, sizeBytes int64) {
	g.t.Helper()
	controller := filepath.Join(g.Dir, "sys/devices/virtual/nvme-fabrics/ctl", controllerOf(kernel))
	g.disk(controller, "tcp", kernel, serial, number, sizeBytes)
}

// Multipath adds a disk to sysfs with several paths, which have these transports.
func (g *Guest) Multipath(kernel, serial string, number device.Number, sizeBytes int64, transports ...string) {
	g.t.Helper()
	subsystem := filepath.Join(g.Dir, "sys/devices/virtual/nvme-subsystem", "nvme-subsys-"+kernel)
	g.disk(subsystem, "", kernel, serial, number, sizeBytes)
	for i, transport := range transports {
		controller := filepath.Join(g.Dir, "sys/devices/paths", kernel, fmt.Sprintf("nvme%d", i))
		g.must(os.MkdirAll(controller, 0o755))
		g.Write(filepath.Join(controller, "transport"), transport+"\n")
		g.must(os.Symlink(controller, filepath.Join(subsystem, filepath.Base(controller))))
	}
}

// controllerOf returns the controller of a disk without multipath.
func controllerOf(kernel string) string { return kernel[:len(kernel)-len("n1")] }

// disk adds a disk to sysfs, in the folder of its controller or subsystem.
func (g *Guest) disk(folder, transport, kernel, serial string, number device.Number, sizeBytes int64) {
	g.t.Helper()
	block := filepath.Join(folder, kernel)
	g.must(os.MkdirAll(block, 0o755))
	g.Write(filepath.Join(folder, "serial"), serial)
	if transport != "" {
		g.Write(filepath.Join(folder, "transport"), transport+"\n")
	}
	g.Write(filepath.Join(block, "dev"), number.String()+"\n")
	g.Write(filepath.Join(block, "size"), fmt.Sprintf("%d\n", sizeBytes/512))
	g.Write(filepath.Join(block, "hidden"), "0\n")
	g.must(os.Symlink("../../"+filepath.Base(folder), filepath.Join(block, "device")))
	g.must(os.Symlink(block, filepath.Join(g.Dir, "sys/block", kernel)))
}

// Function adds a PCI function of the class of NVMe controllers to sysfs. An empty driver means that it has none.
func (g *Guest) Function(address, driver string) (folder string) {
	g.t.Helper()
	folder = filepath.Join(g.Dir, "sys/bus/pci/devices", address)
	g.must(os.MkdirAll(folder, 0o755))
	g.Write(filepath.Join(folder, "class"), "0x010802\n")
	if driver != "" {
		g.must(os.Symlink("../../../../bus/pci/drivers/"+driver, filepath.Join(folder, "driver")))
	}
	return folder
}

func address(kernel string) string { return "0000:00:" + kernel }

// Write replaces the content of a file.
func (g *Guest) Write(path, content string) {
	g.t.Helper()
	g.must(os.WriteFile(path, []byte(content), 0o644))
}

// Digest returns a hash of the bytes of a disk. node is its device node, and backing is its file. Digest does not read
// holes of the file and takes them for zeros, so it is fast for large sparse disks.
func Digest(t testing.TB, node, backing string) string {
	t.Helper()
	digest, err := digestOf(node, backing)
	if err != nil {
		t.Fatal(err)
	}
	return digest
}

func digestOf(node, backing string) (digest string, err error) {
	// Flush the device's cache to the file first.
	device, err := os.Open(node)
	if err != nil {
		return "", err
	}
	if err := errors.Join(device.Sync(), device.Close()); err != nil {
		return "", err
	}
	file, err := os.Open(backing)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	sum, block := sha256.New(), make([]byte, 4096)
	for offset := int64(0); ; {
		data, err := unix.Seek(int(file.Fd()), offset, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return fmt.Sprintf("%x", sum.Sum(nil)), nil
		}
		if err != nil {
			return "", err
		}
		offset = data / int64(len(block)) * int64(len(block))
		n, err := file.ReadAt(block, offset)
		if err != nil && !errors.Is(err, io.EOF) {
			return "", err
		}
		if !bytes.Equal(block[:n], make([]byte, n)) {
			fmt.Fprintf(sum, "%d ", offset)
			sum.Write(block[:n])
		}
		offset += int64(len(block))
	}
}

// attach makes a loop device for the file backing. The loop device ends with the test.
func (g *Guest) attach(backing string) device.Number {
	g.t.Helper()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	g.must(err)
	defer func() { g.must(control.Close()) }()
	// Other processes make loop devices too, see package guest.
	g.must(unix.Flock(int(control.Fd()), unix.LOCK_EX))
	file, err := os.OpenFile(backing, os.O_RDWR, 0)
	g.must(err)
	defer func() { g.must(file.Close()) }()
	for range 100 {
		minor, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		g.must(err)
		loop, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", minor), os.O_RDWR, 0)
		g.must(err)
		config := unix.LoopConfig{Fd: uint32(file.Fd()), Size: g.BlockSize}
		// mkfs.btrfs takes loop devices with the same file name for one device.
		copy(
			config.Info.File_name[:len(config.Info.File_name)-1],
			backing[max(0, len(backing)-len(config.Info.File_name)+1):],
		)
		err = unix.IoctlLoopConfigure(int(loop.Fd()), &config)
		if errors.Is(err, unix.EBUSY) {
			g.must(loop.Close()) // another process was faster
			continue
		}
		g.must(err)
		g.t.Cleanup(func() { g.detach(loop.Name()) })
		// A disk that this process has open is never closed: device.IsClosed.
		g.must(errors.Join(unix.IoctlSetPointerInt(int(loop.Fd()), unix.BLKROSET, 0), loop.Close()))
		return device.Number{Major: 7, Minor: uint32(minor)}
	}
	g.t.Fatal("no free loop device after 100 tries")
	return device.Number{}
}

// detach frees the loop device and makes it writable: unlike an NVMe disk, a loop device keeps the read-only flag for
// its next user.
func (g *Guest) detach(path string) {
	loop, err := os.Open(path)
	g.must(err)
	fd := int(loop.Fd())
	if err := errors.Join(
		unix.IoctlSetPointerInt(fd, unix.BLKROSET, 0),
		unix.IoctlSetInt(fd, unix.LOOP_CLR_FD, 0),
		loop.Close(),
	); err != nil {
		g.t.Errorf("detach %s: %v", loop.Name(), err)
	}
}

func (g *Guest) must(err error) {
	g.t.Helper()
	if err != nil {
		g.t.Fatal(err)
	}
}
