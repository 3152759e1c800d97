// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount

import "errors"

// The errors of this package, wrapped with the paths and devices they are about.
var (
	// ErrFormat means that mkfs failed, or did not make the requested filesystem.
	ErrFormat = errors.New("making the filesystem failed")
	// ErrMount means that the kernel or mount(8) refused a mount.
	ErrMount = errors.New("mounting failed")
	// ErrDamaged means that a filesystem is damaged, and that an operator must decide what to do.
	ErrDamaged = errors.New("filesystem is damaged")
	// ErrChecking means that a check or a growth of the filesystem has not ended. It goes on without the caller.
	ErrChecking = errors.New("filesystem is being checked or grown")
	// ErrGrow means that a filesystem could not be grown to the size of its disk. It is in order, and has its old size.
	ErrGrow = errors.New("growing the filesystem failed")
	// ErrBusy means that a mount or a device was still in use at the end of the wait.
	ErrBusy = errors.New("still in use")
	// ErrForeign means that something is at a path which this plugin did not put there. The plugin does not touch it.
	ErrForeign = errors.New("path holds something that this plugin did not put there")
)
