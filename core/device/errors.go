// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device

import (
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
)

// The errors of this package, wrapped with the disk and what was found.
var (
	// ErrNotFound means that no disk has the serial, or no disk has it yet.
	ErrNotFound = fault.DeviceNotFound.New("disk not found in this guest")
	// ErrAmbiguous means that several disks have the serial, or that a disk which the kernel does not show may have it.
	ErrAmbiguous = fault.SerialCollision.New("disk cannot be told from another one")
	// ErrMismatch means that the device differs from what the rack or sysfs says: another size, another device number.
	ErrMismatch = fault.DeviceMismatch.New("device does not match the disk")
	// ErrInUse means that something holds the device: the guest's own system, a mount, another program.
	ErrInUse = fault.DiskInUse.New("device is in use")
	// ErrNotBlank means that a disk was not proved blank: it holds something, or it cannot be read.
	ErrNotBlank = fault.DiskNotBlank.New("refusing to format")
	// ErrUnreadable means that the device's content cannot be determined.
	ErrUnreadable = fault.DeviceUnreadable.New("cannot read the device")
	// ErrNoAnswer means that a disk has not answered a read in time. It may answer later.
	ErrNoAnswer = fault.DiskNotResponding.New("disk does not respond")
)
