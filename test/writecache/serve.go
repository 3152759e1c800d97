// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package writecache

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// fileName is the only file of the filesystem.
const fileName = "disk"

// The requests of linux/fuse.h that a loop device causes. The server answers all others with ENOSYS.
const (
	opLookup      = 1
	opForget      = 2
	opGetattr     = 3
	opOpen        = 14
	opRead        = 15
	opWrite       = 16
	opStatfs      = 17
	opRelease     = 18
	opFsync       = 20
	opInit        = 26
	opInterrupt   = 36
	opDestroy     = 38
	opBatchForget = 42
)

const (
	inHeaderBytes  = 40
	outHeaderBytes = 16
	ioHeaderBytes  = 40 // struct fuse_read_in and fuse_write_in
	attrBytes      = 88
	maxWriteBytes  = 128 << 10
	pageBytes      = 4 << 10
	rootNode       = 1
	fileNode       = 2
)

// disk is the backing file with its cache.
type disk struct {
	backing   *os.File
	sizeBytes int64

	mu sync.Mutex
	// pages are the pages that were written and not flushed, by their number.
	pages map[int64][]byte
	cut   bool
}

// serve answers the kernel's requests from fuse until command ends.
func serve(path string, fuse *os.File, command io.Reader, answers io.Writer) error {
	backing, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	info, err := backing.Stat()
	if err != nil {
		return err
	}
	d := &disk{backing: backing, sizeBytes: info.Size(), pages: map[int64][]byte{}}
	failed := make(chan error, 2)
	go func() { failed <- d.answerKernel(fuse) }()
	go func() { failed <- d.obey(command, answers) }()
	return <-failed // the end of the process ends the filesystem
}

// obey cuts the power when the test says so. It returns at the end of command.
func (d *disk) obey(command io.Reader, answers io.Writer) error {
	lines := bufio.NewScanner(command)
	for lines.Scan() {
		var seed uint64
		if _, err := fmt.Sscanf(lines.Text(), "cut %d", &seed); err != nil {
			return err
		}
		lost, err := d.cutPower(seed)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(answers, "lost %d\n", lost); err != nil {
			return err
		}
	}
	return lines.Err()
}

func (d *disk) answerKernel(fuse *os.File) error {
	buffer := make([]byte, maxWriteBytes+pageBytes)
	for {
		n, err := unix.Read(int(fuse.Fd()), buffer)
		switch {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOENT):
			continue
		case errors.Is(err, unix.ENODEV): // unmounted
			return nil
		case err != nil:
			return err
		}
		request := buffer[:n]
		opcode, unique := binary.LittleEndian.Uint32(request[4:]), request[8:16]
		node, body := binary.LittleEndian.Uint64(request[16:]), request[inHeaderBytes:]
		if opcode == opForget || opcode == opBatchForget || opcode == opInterrupt {
			continue // these have no answer
		}
		content, errno := d.answer(opcode, node, body)
		out := make([]byte, outHeaderBytes, outHeaderBytes+len(content))
		binary.LittleEndian.PutUint32(out, uint32(outHeaderBytes+len(content)))
		binary.LittleEndian.PutUint32(out[4:], uint32(-int32(errno)))
		copy(out[8:], unique)
		if _, err := unix.Write(int(fuse.Fd()), append(out, content...)); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
}

func (d *disk) answer(opcode uint32, node uint64, body []byte) (content []byte, errno unix.Errno) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch opcode {
	case opInit:
		out := make([]byte, 64) // struct fuse_init_out
		binary.LittleEndian.PutUint32(out, 7)
		binary.LittleEndian.PutUint32(out[4:], 31)
		binary.LittleEndian.PutUint32(out[12:], 1<<5) // FUSE_BIG_WRITES
		binary.LittleEndian.PutUint32(out[20:], maxWriteBytes)
		return out, 0
	case opLookup:
		if string(body) != fileName+"\x00" {
			return nil, unix.ENOENT
		}
		out := make([]byte, 40) // struct fuse_entry_out
		binary.LittleEndian.PutUint64(out, fileNode)
		return append(out, d.attributes(fileNode)...), 0
	case opGetattr:
		return append(make([]byte, 16), d.attributes(node)...), 0
	case opOpen:
		return make([]byte, 16), 0
	case opStatfs:
		return make([]byte, 80), 0
	case opRelease, opDestroy:
		return nil, 0
	case opRead, opWrite, opFsync:
		if d.cut {
			return nil, unix.EIO
		}
		return d.io(opcode, body)
	}
	return nil, unix.ENOSYS
}

// attributes returns a struct fuse_attr.
func (d *disk) attributes(node uint64) []byte {
	attr := make([]byte, attrBytes)
	binary.LittleEndian.PutUint64(attr, node)
	mode := uint32(unix.S_IFDIR | 0o700)
	if node == fileNode {
		mode = unix.S_IFREG | 0o600
		binary.LittleEndian.PutUint64(attr[8:], uint64(d.sizeBytes))
		binary.LittleEndian.PutUint64(attr[16:], uint64(d.sizeBytes/512))
	}
	binary.LittleEndian.PutUint32(attr[60:], mode)
	binary.LittleEndian.PutUint32(attr[64:], 1)         // nlink
	binary.LittleEndian.PutUint32(attr[80:], pageBytes) // blksize
	return attr
}

// io reads, writes or flushes.
func (d *disk) io(opcode uint32, body []byte) (content []byte, errno unix.Errno) {
	if opcode == opFsync {
		if err := d.flush(func() bool { return true }); err != nil {
			return nil, unix.EIO
		}
		return nil, 0
	}
	offset := int64(binary.LittleEndian.Uint64(body[8:]))
	length := max(0, min(int64(binary.LittleEndian.Uint32(body[16:])), d.sizeBytes-offset))
	data := make([]byte, length)
	if opcode == opWrite {
		data = body[ioHeaderBytes : ioHeaderBytes+length]
	}
	for done := int64(0); done < length; {
		number, start := (offset+done)/pageBytes, (offset+done)%pageBytes
		page, err := d.page(number)
		if err != nil {
			return nil, unix.EIO
		}
		if opcode == opWrite {
			d.pages[number] = page
			done += int64(copy(page[start:], data[done:]))
		} else {
			done += int64(copy(data[done:], page[start:]))
		}
	}
	if opcode == opRead {
		return data, 0
	}
	return binary.LittleEndian.AppendUint64(nil, uint64(length)), 0 // struct fuse_write_out
}

// page returns a page from the cache, or a copy of it from the backing file.
func (d *disk) page(number int64) ([]byte, error) {
	if page := d.pages[number]; page != nil {
		return page, nil
	}
	page := make([]byte, pageBytes)
	_, err := d.backing.ReadAt(page, number*pageBytes)
	return page, err
}

// flush writes those pages of the cache to the backing file that keep chooses, and empties the cache.
func (d *disk) flush(keep func() bool) error {
	for _, number := range slices.Sorted(maps.Keys(d.pages)) {
		if keep() {
			if _, err := d.backing.WriteAt(d.pages[number], number*pageBytes); err != nil {
				return err
			}
		}
		delete(d.pages, number)
	}
	return nil
}

// cutPower loses what was not flushed, see [Cache.Cut].
func (d *disk) cutPower(seed uint64) (lost int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cut = true
	random := rand.New(rand.NewPCG(seed, 0))
	err = d.flush(func() bool {
		kept := seed != 0 && random.IntN(2) == 0
		if !kept {
			lost++
		}
		return kept
	})
	return lost, err
}
