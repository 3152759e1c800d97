// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// Device is a disk of the guest together with its device node.
type Device struct {
	Disk
	// Path is the device node.
	Path string
}

func (d Device) String() string {
	return fmt.Sprintf("%s (serial %q, device %s)", d.Path, d.Serial, d.Number)
}

// Open opens the device node and verifies on the open file that it is a block device of the disk's number and size. With
// [unix.O_EXCL] among the flags it is [ErrInUse] when anything else holds the device exclusively: a mounted filesystem,
// a volume manager, mkfs.
func (d Device) Open(flags int) (*os.File, error) {
	file, err := os.OpenFile(d.Path, flags, 0)
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil, fmt.Errorf("%w: %s is mounted or held by another program", ErrInUse, d)
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("%w: %w: the plugin must run as root, in a container privileged", ErrUnreadable, err)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrUnreadable, err)
	}
	if err := d.verify(file); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
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
			"%w: %s has device number %s, sysfs says %s: check that the host's /dev is mounted where the plugin runs",
			ErrMismatch,
			d.Path,
			number,
			d.Number,
		)
	}
	size, err := sizeOf(file)
	if err != nil {
		return fmt.Errorf("%w: size of %s: %w", ErrUnreadable, d.Path, err)
	}
	if size != d.SizeBytes {
		return fmt.Errorf("%w: %s has %d bytes when opened, %d in sysfs", ErrMismatch, d, size, d.SizeBytes)
	}
	return nil
}

// Sequence is the kernel's sequence number of the disk behind the open file: unlike the device number it is never used
// again while the guest runs. It is 0 on kernels that do not count (before Linux 5.15).
func Sequence(file *os.File) (uint64, error) {
	var sequence uint64
	err := ioctlUint64(file, unix.BLKGETDISKSEQ, &sequence)
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL) {
		return 0, nil
	}
	return sequence, err
}

// ReadOnly reports whether the kernel refuses writes to the device.
func (d Device) ReadOnly() (readOnly bool, err error) {
	err = d.withFile(func(file *os.File) error {
		value, err := unix.IoctlGetInt(int(file.Fd()), unix.BLKROGET)
		readOnly = value != 0
		return err
	})
	return readOnly, err
}

// SetReadOnly has the kernel refuse writes to the device, or take them again. It concerns the whole disk, whoever has
// it open, and is verified.
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

// CheckUnused reports whether nothing holds the device exclusively; then it can be taken from the guest without losing what
// a filesystem has not written yet. It is [ErrInUse] otherwise.
func (d Device) CheckUnused() error {
	file, err := d.Open(unix.O_RDONLY | unix.O_EXCL)
	if err != nil {
		return err
	}
	return file.Close()
}

func (d Device) withFile(do func(*os.File) error) error {
	file, err := d.Open(unix.O_RDONLY)
	if err != nil {
		return err
	}
	return errors.Join(do(file), file.Close())
}

// NodeNumber returns the device number of the block device node at path; false when there is something else there.
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
