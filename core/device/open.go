// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package device

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

// Device is a disk of the guest with its device node.
type Device struct {
	Disk
	// Path is the path of the device node.
	Path string
	// FirstBytes is the size that the volume's first disk had, if this disk is larger, else 0. See [Device.sizes].
	FirstBytes int64
	// sequence is the kernel's sequence number of the disk that was found, or 0 if it is unknown, see
	// [Device.Sequence].
	sequence uint64
}

// sizes returns the sizes that the disk may have had since it was made, its own first. A volume grows by whole GiB
// (core/expand). What a format leaves is at places that depend on the size at that time.
func (d Device) sizes() []int64 {
	sizes := []int64{d.SizeBytes}
	for size := d.FirstBytes; size > 0 && size < d.SizeBytes; size += gib {
		sizes = append(sizes, size)
	}
	return sizes
}

func (d Device) String() string {
	return fmt.Sprintf("%s (serial %q, device %s)", d.Path, d.Serial, d.Number)
}

// insideAt returns the sizes of a part of the disk that begins at offset, such as the data of an encrypted disk.
func (d Device) insideAt(offset int64) (inside Device) {
	inside.SizeBytes = d.SizeBytes - offset
	inside.FirstBytes = max(0, d.FirstBytes-offset)
	return inside
}

// Open opens the device node. It verifies on the open file that this is a block device with the disk's number and size,
// and that it is the disk that [Roots.WaitForDisk] found: another one may have got the same number since.
// With [unix.O_EXCL] in flags it returns [ErrInUse] if a mounted filesystem, a volume manager or another program holds
// the device exclusively.
func (d Device) Open(flags int) (*os.File, error) {
	file, err := d.open(flags)
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil, fmt.Errorf("%w: %s is mounted or held by another program", ErrInUse, d)
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("%w: %w: run the plugin as root, in a privileged container", ErrUnreadable, err)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrUnreadable, err)
	}
	if err := d.verify(file); err != nil {
		return nil, errors.Join(err, closeExclusive(file))
	}
	return file, nil
}

// open is os.OpenFile without an offer to the poller, which no block device takes.
func (d Device) open(flags int) (*os.File, error) {
	fd, err := ignoringInterrupt(func() (int, error) { return unix.Open(d.Path, flags|unix.O_CLOEXEC, 0) })
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: d.Path, Err: err}
	}
	return os.NewFile(uintptr(fd), d.Path), nil
}

func (d Device) verify(file *os.File) error {
	var stat unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &stat); err != nil {
		return fmt.Errorf("%w: stat %s: %w", ErrUnreadable, d.Path, err)
	}
	if stat.Mode&unix.S_IFMT != unix.S_IFBLK {
		return fmt.Errorf("%w: %s is not a block device", ErrMismatch, d.Path)
	}
	if number := numberOf(stat.Rdev); number != d.Number {
		return fmt.Errorf(
			"%w: %s has device number %s, sysfs says %s: check that the plugin's container mounts the host's /dev", ErrMismatch,
			d.Path, number, d.Number)
	}
	size, err := sizeOf(file)
	if err != nil {
		return fmt.Errorf("%w: size of %s: %w", ErrUnreadable, d.Path, err)
	}
	if size != d.SizeBytes {
		return fmt.Errorf("%w: %s has %d bytes when opened, %d in sysfs", ErrMismatch, d, size, d.SizeBytes)
	}
	sequence, err := sequenceOf(file)
	if err != nil {
		return fmt.Errorf("%w: sequence number of %s: %w", ErrUnreadable, d.Path, err)
	}
	if d.sequence != 0 && sequence != d.sequence {
		return fmt.Errorf(
			"%w: %s: another disk took its place: sequence number %d, now %d", ErrMismatch, d, d.sequence, sequence)
	}
	return nil
}

// sequenceOf returns the sequence number of the disk behind the open file, see [Device.Sequence].
func sequenceOf(file *os.File) (uint64, error) {
	var sequence uint64
	err := ioctlUint64(file, unix.BLKGETDISKSEQ, &sequence)
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL) {
		return 0, nil
	}
	return sequence, err
}

// ReadOnly reports whether the kernel rejects writes to the device.
func (d Device) ReadOnly() (readOnly bool, err error) {
	err = d.withFile(func(file *os.File) error {
		value, err := unix.IoctlGetInt(int(file.Fd()), unix.BLKROGET)
		readOnly = value != 0
		return err
	})
	return readOnly, err
}

// SetReadOnly makes the kernel reject writes to the device node, or accept them again, also by programs that have it
// open. It stops no filesystem that is mounted writable and no device that is built on the disk, such as a mapping: set
// it before these use the disk. A loop device, unlike an NVMe disk, keeps the setting for its next file. SetReadOnly
// verifies the result.
func (d Device) SetReadOnly(readOnly bool) error {
	value := 0
	if readOnly {
		value = 1
	}
	err := d.withFile(func(file *os.File) error {
		return unix.IoctlSetPointerInt(int(file.Fd()), unix.BLKROSET, value)
	})
	if err != nil {
		return fmt.Errorf("set %s read-only to %t: %w", d, readOnly, err)
	}
	if now, err := d.ReadOnly(); err != nil || now != readOnly {
		return errors.Join(fmt.Errorf("%w: %s read-only is %t after it was set to %t", ErrMismatch, d, now, readOnly), err)
	}
	return nil
}

// CheckUnused returns [ErrInUse] if anything holds the device exclusively. If it returns nil, no filesystem has
// unwritten data for the device, and the disk can be detached.
func (d Device) CheckUnused() error {
	file, err := d.Open(unix.O_RDONLY | unix.O_EXCL)
	if err != nil {
		return err
	}
	return closeExclusive(file)
}

// closeExclusive closes a file that was opened with O_EXCL or holds a flock. Afterwards this process no longer holds
// the device, and the next program, such as mkfs or mount, can open it exclusively.
func closeExclusive(file *os.File) error { return hostexec.CloseUninherited(file) }

func (d Device) withFile(do func(*os.File) error) error {
	file, err := d.Open(unix.O_RDONLY)
	if err != nil {
		return err
	}
	return errors.Join(do(file), file.Close())
}

// NodeNumber returns the device number of the block device node at path. It returns false if something else is there.
func NodeNumber(path string) (Number, bool) {
	var stat unix.Stat_t
	if err := unix.Stat(path, &stat); err != nil || stat.Mode&unix.S_IFMT != unix.S_IFBLK {
		return Number{}, false
	}
	return numberOf(stat.Rdev), true
}

func numberOf(dev uint64) Number {
	return Number{unix.Major(dev), unix.Minor(dev)}
}

func sizeOf(file *os.File) (int64, error) {
	var size uint64
	err := ioctlUint64(file, unix.BLKGETSIZE64, &size)
	return int64(size), err
}
