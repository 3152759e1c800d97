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
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

// lingerTimeout is how long [WaitFree] waits for read-only copies of a mount to end. A container that is just starting
// keeps them for a moment. An agent that has copied the host's mounts keeps them for ever.
const lingerTimeout = 3 * time.Second

// MakeWritable takes back what [WaitFree] and [FilesystemAgain] did: it makes the filesystem at path, and its mount
// there, writable. Its error is [ErrMount].
func MakeWritable(path string) error {
	err := setFilesystemReadOnly(path, false)
	var stat unix.Statfs_t
	if err == nil {
		err = unix.Statfs(path, &stat)
	}
	if err == nil {
		err = unix.Mount("", path, "", unix.MS_REMOUNT|unix.MS_BIND|uintptr(stat.Flags)&keptFlags, "")
	}
	if err != nil {
		return fmt.Errorf("%w: make the filesystem at %s writable: %w", ErrMount, path, err)
	}
	return nil
}

// setFilesystemReadOnly changes the superblock, not the flags of a mount. Before Linux 5.2, a remount changes both.
func setFilesystemReadOnly(path string, readOnly bool) error {
	picked, err := unix.Fspick(unix.AT_FDCWD, path, unix.FSPICK_CLOEXEC|unix.FSPICK_NO_AUTOMOUNT)
	if errors.Is(err, unix.ENOSYS) {
		return remount(path, readOnly)
	}
	if err != nil {
		return fmt.Errorf("fspick %s: %w", path, err)
	}
	return setPickedReadOnly(picked, readOnly)
}

// setPickedReadOnly changes the superblock of an open fspick, and closes it.
func setPickedReadOnly(picked int, readOnly bool) error {
	err := unix.FsconfigSetFlag(picked, readOnlyFlag(readOnly))
	if err == nil {
		err = unix.FsconfigReconfigure(picked)
	}
	return errors.Join(err, closePicked(picked))
}

func readOnlyFlag(readOnly bool) string {
	if readOnly {
		return "ro"
	}
	return "rw"
}

// closePicked closes an fspick or fsopen. It keeps the filesystem mounted, so it is closed while no program starts that
// could have a copy.
func closePicked(picked int) error {
	return hostexec.CloseUninherited(os.NewFile(uintptr(picked), "fspick"))
}

func remount(path string, readOnly bool) error {
	var stat unix.Statfs_t
	if err := unix.Statfs(path, &stat); err != nil {
		return err
	}
	flags := uintptr(stat.Flags)&keptFlags | unix.MS_REMOUNT
	if readOnly {
		flags |= unix.MS_RDONLY
	}
	return unix.Mount("", path, "", flags, "")
}

// FilesystemAgain mounts a filesystem that is still mounted read-only in another mount namespace. The kernel has one
// superblock for both mounts, which keeps its options, and it refuses a writable mount over a read-only superblock. So
// the mount is read-only, until [MakeWritable]. The errors are those of [Filesystem].
func FilesystemAgain(ctx context.Context, dev device.Device, target, fsType string, options Options) error {
	options.Flags = append(slices.Clone(options.Flags), "ro")
	return Filesystem(ctx, dev, target, fsType, options)
}

// WaitFree waits until no program in this guest can write to a disk that is unmounted here:
//
//   - An exclusive open of the disk with this sequence number succeeds. It fails while the filesystem is mounted in any
//     namespace.
//   - Nothing has the disk or one of its partitions open for writing: that does not prevent an exclusive open. The
//     kernel proves it, see [device.Device.IsClosed], if the disk responds, as one that was just unmounted (responds).
//     If something has the disk open, or the kernel proves nothing, WaitFree looks at the open files of the node.
//   - A raw block volume (block) is open nowhere, and no loop device uses it.
//
// It waits as long as [Unmount] does. Then it returns [ErrBusy] with the holder. If only read-only copies of the mount
// remain, it returns them after 3 s without an error. Errors of [device.Device.Open] other than [device.ErrInUse] are
// returned at once; see [device.HasLeft].
func WaitFree(
	ctx context.Context, dev device.Device, sequence uint64, block, responds bool,
) (copies []Copy, err error) {
	start, openers := time.Now(), opener{devices: dev.Numbers(), reading: block}
	err = retryBusy(ctx, func() (bool, error) {
		copies = nil
		closed, err := false, error(nil)
		if responds {
			closed, err = dev.IsClosed(sequence)
			responds = !errors.Is(err, device.ErrNoProof)
		}
		if !responds {
			err = dev.CheckUnusedSince(sequence)
		}
		if closed || err != nil && !errors.Is(err, device.ErrInUse) {
			return closed, err
		}
		if err != nil {
			if copies, err = stopCopies(dev); err != nil {
				return false, err
			}
			if time.Since(start) < lingerTimeout {
				return false, errBusy
			}
		}
		if openers.exists() || responds && len(copies) == 0 && !openers.readers {
			return false, errBusy // what no process shows may write: a loop device, or a file on its way to a process
		}
		if block && loopInUse(dev.Numbers()) != "" {
			return false, errBusy
		}
		return true, nil
	}, func() string { return DescribeUse(dev) })
	return copies, err
}

// DescribeUse names who uses a disk or a mapping, as far as the plugin can see.
func DescribeUse(dev device.Device) string {
	if loop := loopInUse(dev.Numbers()); loop != "" {
		return dev.String() + " is in use through " + loop
	}
	if table, err := ReadTable(); err == nil {
		if mounts := table.OfDevice(dev.Number); len(mounts) > 0 {
			return dev.String() + " is mounted at " + mounts[0].Path
		}
	}
	return dev.String() + " is in use" + describeHolders(dev.Number, dev.Numbers()...)
}

// WaitClosed is for a disk whose mapping stays open and holds the disk, so that [WaitFree] cannot prove it free. It
// waits until no program has the disk open for writing, or for a raw block volume (block) at all, and no loop device
// uses it. It waits as long as [Unmount] does. Then it returns [ErrBusy] with the holder.
func WaitClosed(ctx context.Context, dev device.Device, block bool) error {
	openers := opener{devices: dev.Numbers(), reading: block}
	return retryBusy(ctx, func() (bool, error) {
		if openers.exists() || loopInUse(dev.Numbers()) != "" {
			return false, errBusy
		}
		return true, nil
	}, func() string { return DescribeUse(dev) })
}

// WaitIdle waits until nothing in this guest holds the disk: no mount, no exclusive holder, and no program that has it
// open. It waits as long as [Unmount] does, and changes nothing. Then it returns [ErrBusy] with the holder.
func WaitIdle(ctx context.Context, dev device.Device) error {
	openers := opener{devices: dev.Numbers(), reading: true}
	return retryBusy(ctx, func() (bool, error) {
		table, err := ReadTable()
		if err != nil {
			return false, err
		}
		err = dev.CheckUnused()
		if errors.Is(err, device.ErrInUse) || len(table.OfDevice(dev.Number)) > 0 ||
			openers.exists() || loopInUse(dev.Numbers()) != "" {
			return false, errBusy
		}
		return err == nil, err
	}, func() string { return DescribeUse(dev) })
}

// stopCopies makes the filesystem of a disk that is mounted in other namespaces read-only. It returns an error that is
// errBusy unless such mounts are the only reason why the disk is in use: only one filesystem can hold a disk, and
// no program can write to a read-only one.
func stopCopies(dev device.Device) ([]Copy, error) {
	table, err := ReadTable()
	if err != nil {
		return nil, err
	}
	copies := CopiesOf(dev.Number)
	if len(copies) == 0 || len(table.OfDevice(dev.Number)) > 0 {
		return nil, errBusy
	}
	if !copies[0].FilesystemReadOnly && copies[0].stopWrites(dev) != nil {
		return nil, errBusy
	}
	return copies, nil
}

// stopWrites makes the filesystem of the copy, which holds the disk, read-only at all of its mounts in all mount
// namespaces. The kernel refuses while a file is open for writing through any of them. The mounts keep their own flags,
// and the path of none is followed: it may lead to something else in its namespace.
func (c Copy) stopWrites(dev device.Device) error {
	tree, err := mountActive(dev, c.FSType, c.SELinuxContext, false)
	if err != nil {
		return err
	}
	picked, err := unix.Fspick(int(tree.Fd()), "", unix.FSPICK_CLOEXEC|unix.FSPICK_EMPTY_PATH)
	if err == nil {
		err = setPickedReadOnly(picked, true)
	}
	return errors.Join(err, hostexec.CloseUninherited(tree))
}
