// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package device

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctlUint64 reads a 64-bit number from the kernel. x/sys/unix has no function for it.
func ioctlUint64(file *os.File, request uint, value *uint64) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, file.Fd(), uintptr(request), uintptr(unsafe.Pointer(value)))
	if errno != 0 {
		return errno
	}
	return nil
}
