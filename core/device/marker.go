// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package device

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"
)

// A marker on the disk says that a program started which must not be interrupted. The marker reaches stable storage
// before the program starts. It is removed after the program ends and before the filesystem is mounted. A node that
// finds a marker therefore knows the disk's state, also on another node and after a power cut:
//
//   - Format marker: the disk was blank, and everything on it comes from mkfs. Without the marker, remains that have no
//     signature yet look like a user's data, and the volume can never be formatted.
//   - Growth marker, on a disk whose ext filesystem is being grown: the filesystem was clean, and every error in it
//     comes from resize2fs. e2fsck may repair such errors without asking.
//   - Check marker, on a disk whose ext filesystem is being checked: its superblock was whole. If its checksum is wrong
//     now, e2fsck was killed between two pieces of the superblock, see [RepairExtChecksum].
//
// mkfs does not know markers and may overwrite some. So the format marker has several copies, at places that supported
// filesystems do not use in their default layout. The others are in the first KiB, which ext leaves to boot loaders.
// They cannot be behind the filesystem: resize2fs writes the superblock in small pieces, so the end of the filesystem
// is unknown meanwhile. To remove a marker, the plugin writes zeros over exact copies only.

const (
	// formatMarkerBytes is the length of a copy: the largest block size of a disk.
	formatMarkerBytes = 4 * kib
	// workMarkerBytes is the length of the space before the superblock of ext.
	workMarkerBytes = kib
)

// The texts are permanent: a marker may have been written by an older version of this plugin.
const (
	formatText = `csi.oxide.computer format marker 1
disk %s
This disk was blank, and a filesystem is being made on it. Where this still stands beside no filesystem, or beside one that
was never mounted, making it was interrupted: NodeStageVolume makes it again and then removes this text.
`
	growthText = `csi.oxide.computer growth marker 1
disk %s
The filesystem behind this is being grown to fill the disk. Where this still stands, growing it was interrupted:
NodeStageVolume has e2fsck put the filesystem in order, grows it again and then removes this text.
`
	checkText = `csi.oxide.computer check marker 1
disk %s
e2fsck is checking the filesystem behind this. Where this still stands, e2fsck was interrupted, and the superblock may
have a wrong checksum: NodeStageVolume corrects the checksum, has e2fsck check everything and then removes this text.
`
)

// Work is what a program does to an unmounted ext filesystem.
type Work string

const (
	// NoWork means that the disk has no marker of work.
	NoWork Work = ""
	// Growing is resize2fs.
	Growing Work = "growing"
	// Checking is e2fsck -p.
	Checking Work = "checking"
)

// ErrOccupied means that the first KiB of a disk, before the filesystem, is not empty.
var ErrOccupied = errors.New("the first KiB, before the filesystem, is not empty")

// marker is the content of a marker, and the places of its copies on the disk. earlier are the places of copies that
// were written while the disk was smaller.
type marker struct {
	offsets, earlier []int64
	content          []byte
}

// newMarker returns the marker of the volume's disk, padded to length, without places.
func newMarker(text string, volumeID uuid.UUID, length int) marker {
	m := marker{content: make([]byte, length)}
	copy(m.content, fmt.Sprintf(text, volumeID))
	return m
}

// formatMarker returns the format marker. The copies lie at multiples of 1/19 of the disk. There, ext (groups of a
// power of two) and xfs (few equal groups) start nothing.
func formatMarker(dev Device, volumeID uuid.UUID) marker {
	m := newMarker(formatText, volumeID, formatMarkerBytes)
	m.offsets = formatMarkerOffsets(dev.SizeBytes)
	for _, size := range dev.sizes()[1:] {
		m.earlier = append(m.earlier, formatMarkerOffsets(size)...)
	}
	return m
}

func formatMarkerOffsets(sizeBytes int64) (offsets []int64) {
	for _, part := range []int64{3, 7, 15, 17} {
		offsets = append(offsets, sizeBytes/19*part/formatMarkerBytes*formatMarkerBytes)
	}
	return offsets
}

var workTexts = map[Work]string{Growing: growthText, Checking: checkText}

func workMarker(work Work, volumeID uuid.UUID) marker {
	m := newMarker(workTexts[work], volumeID, workMarkerBytes)
	m.offsets = []int64{0}
	return m
}

// readWork returns the work of the marker in the first KiB of a disk and the volume's ID in it, or [NoWork].
func readWork(file *os.File) (head []byte, work Work, volumeID uuid.UUID, err error) {
	head = make([]byte, workMarkerBytes)
	if _, err := file.ReadAt(head, 0); err != nil {
		return nil, NoWork, uuid.UUID{}, err
	}
	_, rest, _ := bytes.Cut(head, []byte("\ndisk "))
	name, _, _ := bytes.Cut(rest, []byte("\n"))
	if volumeID, err := uuid.ParseBytes(name); err == nil {
		for work := range workTexts {
			if bytes.Equal(head, workMarker(work, volumeID).content) {
				return head, work, volumeID, nil
			}
		}
	}
	return head, NoWork, uuid.UUID{}, nil
}

// HasFormatMarker reports whether the disk has this volume's format marker. A disk that was made from another volume's
// snapshot may have the other volume's marker, which does not count.
func HasFormatMarker(dev Device, volumeID uuid.UUID) (bool, error) {
	return formatMarker(dev, volumeID).present(dev)
}

// RemoveFormatMarker removes this volume's format marker, when the filesystem is finished, or when a workload gets the
// disk as raw block. It returns [ErrInUse] if anything holds the disk. A missing marker is no error.
func RemoveFormatMarker(dev Device, volumeID uuid.UUID) error {
	return formatMarker(dev, volumeID).remove(dev)
}

// WriteWorkMarker writes the marker of this work with the volume's ID to the first KiB of the disk. It replaces another
// marker of work. It returns [ErrOccupied] if the first KiB holds anything else, such as a boot loader.
func WriteWorkMarker(dev Device, volumeID uuid.UUID, work Work) error {
	file, err := dev.Open(unix.O_RDWR | unix.O_EXCL)
	if err != nil {
		return err
	}
	head, present, _, err := readWork(file)
	if err == nil && present == NoWork && !bytes.Equal(head, zeros[:workMarkerBytes]) {
		err = ErrOccupied
	}
	if err != nil {
		return errors.Join(err, closeExclusive(file))
	}
	return errors.Join(workMarker(work, volumeID).write(file), closeExclusive(file))
}

// InterruptedWork returns the work on the filesystem of the disk that was interrupted, or [NoWork]. The marker may have
// the ID of another volume, if this disk is a copy: a snapshot taken after the interruption has the marker, and the
// same work is unfinished on the copy.
func InterruptedWork(dev Device) (work Work, err error) {
	err = dev.withFile(func(file *os.File) (err error) {
		_, work, _, err = readWork(file)
		return err
	})
	if err != nil {
		return NoWork, fmt.Errorf("%w: %s: look for a marker: %w", ErrUnreadable, dev, err)
	}
	return work, nil
}

// RemoveWorkMarker removes the marker of any work, when the work is done, or when a workload gets the disk as raw
// block. A missing marker is no error.
func RemoveWorkMarker(dev Device) error {
	var m marker
	err := dev.withFile(func(file *os.File) error {
		_, work, volumeID, err := readWork(file)
		m = workMarker(work, volumeID)
		return err
	})
	if err != nil {
		return fmt.Errorf("%w: %s: look for a marker: %w", ErrUnreadable, dev, err)
	}
	return m.remove(dev)
}

func (m marker) present(dev Device) (bool, error) {
	var intact []int64
	err := dev.withFile(func(file *os.File) (err error) {
		intact, err = m.findCopies(file)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("%w: %s: look for a marker: %w", ErrUnreadable, dev, err)
	}
	return len(intact) > 0, nil
}

func (m marker) remove(dev Device) error {
	present, err := m.present(dev)
	if err != nil || !present {
		return err
	}
	file, err := dev.Open(unix.O_RDWR | unix.O_EXCL)
	if err != nil {
		return err
	}
	if err := errors.Join(m.wipe(file), closeExclusive(file)); err != nil {
		return fmt.Errorf("remove a marker from %s: %w", dev, err)
	}
	return nil
}

func (m marker) wipe(file *os.File) error {
	intact, err := m.findCopies(file)
	if err != nil {
		return err
	}
	for _, offset := range intact {
		if _, err := file.WriteAt(zeros[:len(m.content)], offset); err != nil {
			return err
		}
	}
	return file.Sync()
}

// write writes the marker to stable storage.
func (m marker) write(file *os.File) error {
	for _, offset := range m.offsets {
		if _, err := file.WriteAt(m.content, offset); err != nil {
			return err
		}
	}
	return file.Sync()
}

func (m marker) findCopies(file *os.File) (places []int64, err error) {
	found := make([]byte, len(m.content))
	for _, offset := range slices.Concat(m.offsets, m.earlier) {
		if _, err := file.ReadAt(found, offset); err != nil {
			return nil, err
		}
		if bytes.Equal(found, m.content) {
			places = append(places, offset)
		}
	}
	return places, nil
}
