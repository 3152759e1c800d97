// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package device

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// probedPages is the number of pages that [Device.IsClosed] looks at. A process that has the disk open drops the pages
// that it discards, or writes past the page cache. It would have to drop all of these at just that moment.
const probedPages = 8

// ErrNoProof means that the kernel does not show whether a disk is closed: the disk cannot be read, or a policy of this
// host forbids a system call.
var ErrNoProof = errors.New("the kernel does not show whether the disk is closed")

// IsClosed reports whether nothing in this guest has the disk open: no process, no memory mapping, no partition, and
// nothing in the kernel. It takes the same time on each node. A disk that hangs makes it hang too. Its errors are
// [ErrNoProof] and those of [Device.CheckUnusedSince].
//
// No system call counts the openers of a disk. But the last close of a disk drops all of its pages from memory (Linux
// 5.10 to 7.2, kill_bdev). So IsClosed reads pages at random places, closes the disk, and looks whether one of them is
// still there. A pipe refers to the pages meanwhile, so that the kernel does not reclaim them. IsClosed looks twice,
// because a process may discard the whole disk just then.
func (d Device) IsClosed(sequence uint64) (closed bool, err error) {
	d.sequence = cmp.Or(sequence, d.sequence)
	file, err := d.Open(unix.O_RDONLY | unix.O_EXCL)
	if err != nil {
		return false, err
	}
	closed = true
	for range 2 {
		pages, release, err := pinPages(file)
		if err != nil {
			return false, noProof(file, err)
		}
		err = closeExclusive(file)
		if err == nil {
			file, err = d.Open(unix.O_RDONLY | unix.O_EXCL)
		}
		if err != nil {
			release()
			return false, err
		}
		cached, err := anyCached(file, pages)
		release()
		if err != nil {
			return false, noProof(file, err)
		}
		if closed = closed && !cached; !closed {
			break
		}
	}
	return closed, closeExclusive(file)
}

// noProof closes the disk and returns [ErrNoProof] with its reason.
func noProof(file *os.File, reason error) error {
	return errors.Join(fmt.Errorf("%w: %w", ErrNoProof, reason), closeExclusive(file))
}

// pinPages gives some pages of a file to a pipe, which keeps the pages themselves in memory, until release is called.
// It returns their offsets.
func pinPages(file *os.File) (offsets []int64, release func(), err error) {
	size, page := int64(0), int64(os.Getpagesize())
	if size, err = file.Seek(0, io.SeekEnd); err != nil {
		return nil, nil, err
	}
	if size < page {
		return nil, nil, fmt.Errorf("%w: %s has no page", ErrUnreadable, file.Name())
	}
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, err
	}
	release = func() { _ = errors.Join(unix.Close(pipe[0]), unix.Close(pipe[1])) } // only the pages are in it
	for range probedPages {
		offset := rand.Int64N(size/page) * page
		offsets = append(offsets, offset)
		given, err := unix.Splice(int(file.Fd()), &offset, pipe[1], nil, int(page), 0)
		if err == nil && given < page {
			err = fmt.Errorf("%w: %s ends too early", ErrUnreadable, file.Name())
		}
		if err != nil {
			release()
			return nil, nil, err
		}
	}
	return offsets, release, nil
}

// anyCached reports whether one of the pages at these offsets of a file is in memory: mincore(2).
func anyCached(file *os.File, offsets []int64) (cached bool, err error) {
	page := os.Getpagesize()
	memory, err := unix.Mmap(int(file.Fd()), 0, int(slices.Max(offsets))+page, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return false, err
	}
	for _, offset := range offsets {
		var state byte
		_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&memory[offset])), uintptr(page),
			uintptr(unsafe.Pointer(&state)))
		if errno != 0 {
			err = errno
		}
		cached = cached || state&1 != 0
	}
	return cached, errors.Join(err, unix.Munmap(memory))
}
