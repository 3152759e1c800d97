package device

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctlUint64 asks the kernel for a 64-bit number; x/sys/unix has no function for these.
func ioctlUint64(file *os.File, request uint, value *uint64) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, file.Fd(), uintptr(request), uintptr(unsafe.Pointer(value)))
	if errno != 0 {
		return errno
	}
	return nil
}
