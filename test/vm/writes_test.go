// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build vm

package vm

import (
	"bytes"
	crand "crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// write is one entry of a write log.
type write struct {
	offset int64
	data   []byte
	// flush means that all earlier writes must be on stable storage.
	flush bool
}

// readLog maps the log into memory until the end of the test: it has hundreds of MiB, and several tests run at once.
// It is the log of QEMU's driver blklogwrites, which has the format of Linux' dm-log-writes. All numbers are
// little-endian, all units are sectors of 512 bytes. First comes a sector with a magic number. Then each entry has a
// sector, followed by its data.
func readLog(t *testing.T, file string) (log []write) {
	t.Helper()
	const sector, magic = 512, 0x6a736677736872
	const flagFlush, flagFUA, flagDiscard = 1, 2, 4
	content := mapped(t, file)
	if len(content) < sector || binary.LittleEndian.Uint64(content) != magic {
		t.Fatalf("%s is not a write log", file)
	}
	for rest := content[sector:]; len(rest) >= sector; {
		header, flags := rest[:sector], binary.LittleEndian.Uint64(rest[16:])
		offset, length := int64(binary.LittleEndian.Uint64(header))*sector, binary.LittleEndian.Uint64(header[8:])*sector
		rest = rest[sector:]
		if flags&flagDiscard != 0 {
			continue // a discard; QEMU leaves the bytes unchanged
		}
		if uint64(len(rest)) < length {
			break // the power was cut here
		}
		log = append(log, write{offset, rest[:length], flags&(flagFlush|flagFUA) != 0})
		rest = rest[length:]
	}
	return log
}

// mapped maps a file into memory until the end of the test.
func mapped(t *testing.T, path string) []byte {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() == 0 {
		return nil
	}
	content, err := unix.Mmap(int(file.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Munmap(content); err != nil {
			t.Error(err)
		}
	})
	return content
}

// moment is a power cut: the writes that reached the disk before it.
type moment struct {
	name string
	log  []write
}

// cutAt returns the power cut after a share of the log, from 0 to 1. Writes of zeros to a blank disk do not count.
func cutAt(log []write, share float64) moment {
	var counted []int
	for i, w := range log {
		if !isZero(w.data) {
			counted = append(counted, i)
		}
	}
	n := int(share * float64(len(counted)))
	return moment{fmt.Sprintf("cut before write %d of %d", n+1, len(counted)), log[:counted[n]]}
}

// losing returns the same power cut for a disk with a cache: unflushed writes are lost at random.
func (m moment) losing(random *rand.Rand) moment {
	flushed := 0
	for i, w := range m.log {
		if w.flush {
			flushed = i
		}
	}
	kept := slices.Clone(m.log[:flushed])
	for _, w := range m.log[flushed:] {
		if random.IntN(2) == 0 {
			kept = append(kept, w)
		}
	}
	return moment{m.name + ", some of the last ones lost", kept}
}

// at returns a disk, initially blank, as the power cut left it.
func (d *disk) at(t *testing.T, cut moment) *disk {
	t.Helper()
	c := *d
	c.file, c.log = filepath.Join(t.TempDir(), "disk"), ""
	if err := errors.Join(os.WriteFile(c.file, nil, 0o600), os.Truncate(c.file, c.sizeBytes)); err != nil {
		t.Fatal(err)
	}
	for _, w := range cut.log {
		if len(w.data) > 0 {
			c.overwrite(t, w.offset, w.data)
		}
	}
	return &c
}

const page = 4 << 10

func isZero(data []byte) bool {
	for ; len(data) > page; data = data[page:] {
		if !bytes.Equal(data[:page], zeros[:]) {
			return false
		}
	}
	return bytes.Equal(data, zeros[:len(data)])
}

var zeros [page]byte

// pages calls visit for each page of the disk that is not zero. It does not read the holes of the file.
func (d *disk) pages(t *testing.T, visit func(offset int64, data []byte)) {
	t.Helper()
	file, err := os.Open(d.file)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	data := make([]byte, page)
	for offset := int64(0); ; offset += page {
		next, err := file.Seek(offset, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return // only a hole follows
		}
		if err != nil {
			t.Fatal(err)
		}
		offset = next / page * page
		if _, err := file.ReadAt(data, offset); err != nil {
			t.Fatal(err)
		}
		if !isZero(data) {
			visit(offset, data)
		}
	}
}

// onDisk reports whether the disk's file contains the text.
func (d *disk) onDisk(t *testing.T, text string) (found bool) {
	t.Helper()
	var last []byte // the end of the page before
	next := int64(0)
	d.pages(t, func(offset int64, data []byte) {
		if offset != next {
			last = nil
		}
		window := append(last, data...)
		found = found || bytes.Contains(window, []byte(text))
		last, next = bytes.Clone(window[len(window)-len(text)+1:]), offset+page
	})
	return found
}

// describe returns a summary of the disk's content, with blkid's verdict.
func (d *disk) describe(t *testing.T) string {
	t.Helper()
	used := 0
	d.pages(t, func(int64, []byte) { used += page })
	known, err := command("sh", "-c", `blkid -p -s TYPE -o value "$1" || [ $? = 2 ]`, "sh", d.file)
	if err != nil {
		known = err.Error() // several signatures at once
	}
	return fmt.Sprintf("%d KiB are not zero, blkid knows %q", used>>10, strings.TrimSpace(known))
}

// overwriteAll writes data without a signature over the disk: the first page of each MiB, all pages that were not
// zero, and the whole first and last MiB.
func (d *disk) overwriteAll(t *testing.T) {
	t.Helper()
	places := map[int64]bool{}
	d.pages(t, func(offset int64, _ []byte) { places[offset] = true })
	for offset := int64(0); offset < d.sizeBytes; offset += mib {
		places[offset] = true
	}
	for offset := int64(0); offset < mib; offset += page {
		places[offset], places[d.sizeBytes-mib+offset] = true, true
	}
	data := make([]byte, page)
	for offset := range places {
		crand.Read(data)
		d.overwrite(t, offset, data)
	}
}

// sum returns a checksum of the whole disk.
func (d *disk) sum(t *testing.T) string {
	t.Helper()
	hash := sha256.New()
	d.pages(t, func(offset int64, data []byte) {
		fmt.Fprintln(hash, offset)
		hash.Write(data)
	})
	return fmt.Sprintf("%x", hash.Sum(nil))
}
