// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package device

import (
	"errors"
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

// ReadKernelFile reads a file of /proc or /sys in four system calls. os.ReadFile needs ten, because it offers each file
// to the poller first.
func ReadKernelFile(path string) ([]byte, error) {
	return readKernelFile(path, false)
}

// readAttribute reads a file of sysfs: one page at most, so that one read returns it whole.
func readAttribute(path string) ([]byte, error) { return readKernelFile(path, true) }

func readKernelFile(path string, once bool) ([]byte, error) {
	fd, err := ignoringInterrupt(func() (int, error) { return unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0) })
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer func() { _ = unix.Close(fd) }() // nothing was written
	content := make([]byte, 0, 8192)
	for {
		if len(content) == cap(content) {
			content = append(content, make([]byte, len(content))...)[:len(content)]
		}
		free := content[len(content):cap(content)]
		read, err := ignoringInterrupt(func() (int, error) { return unix.Read(fd, free) })
		if err != nil {
			return nil, &os.PathError{Op: "read", Path: path, Err: err}
		}
		content = content[:len(content)+read]
		if read == 0 || once {
			return content, nil
		}
	}
}

// ignoringInterrupt makes a system call again that a signal has interrupted, as package os does.
func ignoringInterrupt(call func() (int, error)) (int, error) {
	for {
		if result, err := call(); !errors.Is(err, unix.EINTR) {
			return result, err
		}
	}
}
