// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package mount

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/hostexec"
)

// Frozen reports whether the filesystem of the mount is frozen, as by fsfreeze(8). It is false if the kernel does not
// say (before Linux 5.2). The entry is the uppermost mount at its path.
//
// A frozen filesystem stays active, and holds its disk, after its last unmount. Then no path is left for a thaw.
//
// No call just asks for it. But the kernel refuses every change of a frozen filesystem's options with EBUSY, before it
// looks at them. So Frozen sets the read-only flag that the filesystem has. That changes nothing, and does not wait for
// a thaw. It writes unwritten data, as an unmount does. To freeze the filesystem as a test could leave it frozen.
func (e Entry) Frozen() bool {
	// A filesystem that has stopped after an error may take the flag for a real change.
	if e.Block() || slices.Contains(e.options, "emergency_ro") {
		return false
	}
	picked, err := unix.Fspick(unix.AT_FDCWD, e.Path, unix.FSPICK_CLOEXEC|unix.FSPICK_NO_AUTOMOUNT)
	return err == nil && errors.Is(setPickedReadOnly(picked, e.FilesystemReadOnly), unix.EBUSY)
}

// RestoreFrozen mounts the filesystem on a disk at the folder path, read-only, if it is frozen and holds the disk. So
// it can be thawed after its last unmount. prepare is called before the mount appears. RestoreFrozen returns false if
// the disk is held in another way.
func RestoreFrozen(dev device.Device, fsType, path string, prepare func() error) (frozen bool, err error) {
	// Read-only comes first: btrfs lets a mount make a frozen read-only filesystem writable. Of the two, the kernel
	// refuses the one that the active filesystem is not.
	for _, readOnly := range []bool{true, false} {
		tree, err := mountActive(dev, fsType, "", readOnly)
		if err != nil {
			continue
		}
		picked, err := unix.Fspick(int(tree.Fd()), "", unix.FSPICK_CLOEXEC|unix.FSPICK_EMPTY_PATH)
		frozen = err == nil && errors.Is(setPickedReadOnly(picked, readOnly), unix.EBUSY)
		if frozen {
			err = prepare()
		}
		if frozen && err == nil {
			err = unix.MoveMount(int(tree.Fd()), "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH)
		}
		return frozen, errors.Join(err, hostexec.CloseUninherited(tree))
	}
	return false, nil
}

// mountActive mounts the filesystem on a disk, without a path. If it is active, the kernel uses it as it is. seLinux is
// the context with which it is mounted, or "": the kernel refuses another one.
func mountActive(dev device.Device, fsType, seLinux string, readOnly bool) (tree *os.File, err error) {
	made, err := unix.Fsopen(fsType, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsopen %s: %w", fsType, err)
	}
	defer func() { err = errors.Join(err, closePicked(made)) }()
	err = unix.FsconfigSetString(made, "source", dev.Path)
	if err == nil && seLinux != "" {
		err = unix.FsconfigSetString(made, "context", seLinux)
	}
	if err == nil {
		err = unix.FsconfigSetFlag(made, readOnlyFlag(readOnly))
	}
	if err == nil {
		err = unix.FsconfigCreate(made)
	}
	if err != nil {
		return nil, fmt.Errorf("mount %s: %w", dev, err)
	}
	fd, err := unix.Fsmount(made, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY)
	if err != nil {
		return nil, fmt.Errorf("fsmount %s: %w", dev, err)
	}
	return os.NewFile(uintptr(fd), dev.Path), nil
}
