// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount

import (
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
)

// The errors of this package, wrapped with the paths and devices they are about.
var (
	// ErrFormat means that mkfs failed, or did not make the requested filesystem.
	ErrFormat = fault.FormatFailed.New("making the filesystem failed")
	// ErrMount means that the kernel or mount(8) refused a mount.
	ErrMount = fault.MountFailed.New("mounting failed")
	// ErrKernel means that the kernel lacks a feature of the filesystem, and that it refused the mount, or that nothing
	// was formatted.
	ErrKernel = fault.KernelTooOld.New("the kernel cannot mount this filesystem")
	// ErrDamaged means that a filesystem is damaged, and that an operator must decide what to do.
	ErrDamaged = fault.FilesystemUnclean.New("filesystem is damaged")
	// ErrChecking means that a check or a growth of the filesystem has not ended. It goes on without the caller.
	ErrChecking = fault.FilesystemChecked.New("filesystem is being checked or grown")
	// ErrGrow means that a filesystem could not be grown to the size of its disk. It is in order, and has its old size.
	ErrGrow = fault.GrowFailed.New("growing the filesystem failed")
	// ErrBusy means that a mount or a device was still in use at the end of the wait.
	ErrBusy = fault.MountInUse.New("still in use")
	// ErrForeign means that something is at a path which this plugin did not put there. The plugin does not touch it.
	ErrForeign = fault.PathOccupied.New("path holds something that this plugin did not put there")
)
