// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package device

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// The fields of a copy of a LUKS2 header that this package uses: LUKS2 On-Disk Format Specification, 2.1 and 2.2.
const (
	luksBinaryBytes                = 4 * kib // the text in JSON follows, up to the size of the copy
	luksVersionAt, luksSizeAt      = 6, 8
	luksEpochAt, luksLabelAt       = 16, 24
	luksAlgorithmAt, luksSaltAt    = 72, 104
	luksUUIDAt                     = 168
	luksOffsetAt                   = 256
	luksChecksumAt, luksSaltLength = 448, 64
)

// luksMagic begins the first and the second copy.
var luksMagic = [2]string{"LUKS\xba\xbe", "SKUL\xba\xbe"}

// luksSecondAt are the places of the second copy. Each is also the size of a copy.
var luksSecondAt = []int64{16 * kib, 32 * kib, 64 * kib, 128 * kib, 256 * kib, 512 * kib, mib, 2 * mib, 4 * mib}

// LUKSCopies are the two copies of the LUKS2 header of a disk. A copy without a valid checksum is missing.
type LUKSCopies struct {
	copies [2][]byte
	// looks is what begins like a copy, for a first look: a whole copy, or else a damaged one.
	looks []byte
}

// ReadLUKSCopies reads the two copies from the disk. As cryptsetup does, it finds the second one by the first, or if
// that is damaged at the first place that has a whole one.
func ReadLUKSCopies(dev Device) (c LUKSCopies, err error) {
	places := luksSecondAt
	err = dev.withFile(func(file *os.File) error {
		if c.copies[0], err = c.read(file, 0, 0); err != nil {
			return err
		}
		if c.copies[0] != nil {
			places = []int64{int64(len(c.copies[0]))}
		}
		for _, offset := range places {
			if c.copies[1], err = c.read(file, 1, offset); err != nil || c.copies[1] != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return c, fmt.Errorf("%w: LUKS header of %s: %w", ErrUnreadable, dev, err)
	}
	return c, nil
}

// read returns the copy at offset if it is whole.
func (c *LUKSCopies) read(file *os.File, which int, offset int64) ([]byte, error) {
	head := make([]byte, luksBinaryBytes)
	if _, err := file.ReadAt(head, offset); err != nil {
		return nil, ignoreEnd(err)
	}
	if string(head[:6]) != luksMagic[which] || binary.BigEndian.Uint16(head[luksVersionAt:]) != 2 {
		return nil, nil
	}
	if c.looks == nil {
		c.looks = head
	}
	size := int64(min(binary.BigEndian.Uint64(head[luksSizeAt:]), 4*mib+1))
	if binary.BigEndian.Uint64(head[luksOffsetAt:]) != uint64(offset) || which == 1 && size != offset ||
		size > 4*mib || size < luksSecondAt[0] {
		return nil, nil
	}
	whole := make([]byte, size)
	if _, err := file.ReadAt(whole, offset); err != nil {
		return nil, ignoreEnd(err)
	}
	if string(head[luksAlgorithmAt:luksAlgorithmAt+7]) != "sha256\x00" ||
		!bytes.Equal(luksChecksum(whole), whole[luksChecksumAt:luksChecksumAt+sha256.Size]) {
		return nil, nil
	}
	return whole, nil
}

// ignoreEnd returns nil at the end of a small disk.
func ignoreEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// luksChecksum returns the checksum of a copy, whose own place counts as zero.
func luksChecksum(whole []byte) []byte {
	zeroed := bytes.Clone(whole)
	clear(zeroed[luksChecksumAt : luksChecksumAt+64])
	sum := sha256.Sum256(zeroed)
	return sum[:]
}

// Epoch is the number of the last change of the header, which the newest copy has. It is 0 if both copies are damaged.
func (c LUKSCopies) Epoch() uint64 { return max(luksEpoch(c.copies[0]), luksEpoch(c.copies[1])) }

func luksEpoch(whole []byte) uint64 {
	if whole == nil {
		return 0
	}
	return binary.BigEndian.Uint64(whole[luksEpochAt:])
}

// good is the number of the copy that counts: the newest one. cryptsetup reads the same.
func (c LUKSCopies) good() int {
	if luksEpoch(c.copies[1]) > luksEpoch(c.copies[0]) {
		return 1
	}
	return 0
}

// made returns the copy that should be at the other place than the good one: the same header with another magic, place
// and salt.
func (c LUKSCopies) made(salt []byte) (content []byte, offset int64) {
	good := c.copies[c.good()]
	content = bytes.Clone(good)
	other := 1 - c.good()
	offset = int64(other) * int64(len(good))
	copy(content, luksMagic[other])
	binary.BigEndian.PutUint64(content[luksOffsetAt:], uint64(offset))
	copy(content[luksSaltAt:luksSaltAt+luksSaltLength], salt)
	copy(content[luksChecksumAt:], luksChecksum(content))
	return content, offset
}

// Fault says what is wrong with one of the two copies, or returns "". It returns [ErrUnreadable] if both are damaged,
// and also if they differ and none is newer: then nothing shows which one counts.
func (c LUKSCopies) Fault() (fault string, err error) {
	name := [2]string{"first", "second"}[1-c.good()]
	other := c.copies[1-c.good()]
	switch {
	case c.copies[c.good()] == nil:
		return "", fmt.Errorf("%w: both copies of the LUKS2 header are damaged", ErrUnreadable)
	case other == nil:
		return "the " + name + " copy of the LUKS2 header is damaged", nil
	case luksEpoch(other) != c.Epoch():
		return "the " + name + " copy of the LUKS2 header is older than the other", nil
	}
	if same, _ := c.made(other[luksSaltAt : luksSaltAt+luksSaltLength]); !bytes.Equal(same, other) {
		return "", fmt.Errorf("%w: the two copies of the LUKS2 header differ, and none is newer", ErrUnreadable)
	}
	return "", nil
}

// Mend writes the good copy over the other one, in stable storage, and verifies both. The caller has proved that
// cryptsetup reads the good copy and opens it. If Mend is interrupted, the good copy is as it was.
func (c LUKSCopies) Mend(dev Device) error {
	salt := make([]byte, luksSaltLength)
	if _, err := rand.Read(salt); err != nil {
		return err
	}
	content, offset := c.made(salt)
	file, err := dev.Open(unix.O_RDWR)
	if err != nil {
		return err
	}
	_, err = file.WriteAt(content, offset)
	if err := errors.Join(err, file.Sync(), closeExclusive(file)); err != nil {
		return fmt.Errorf("mend the LUKS2 header of %s: %w", dev, err)
	}
	now, err := ReadLUKSCopies(dev)
	if err != nil {
		return err
	}
	fault, err := now.Fault()
	if err == nil && (fault != "" || now.Epoch() != c.Epoch()) {
		err = fmt.Errorf("%w: the LUKS2 header of %s after it was mended: %s", ErrMismatch, dev, fault)
	}
	return err
}
