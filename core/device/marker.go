// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device

import (
	"bytes"
	"errors"
	"fmt"
	"os"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"
)

// A marker says on the disk itself that a program was begun on it that must not be interrupted. It is on stable storage
// before the program starts and taken away after it has ended, before the filesystem is mounted. So whoever finds one, on
// whichever node and after whatever power cut, knows what the disk went through:
//
//   - The format marker: the disk was blank, and all that is on it is what mkfs left. Without it, remains that bear no
//     signature yet could not be told from somebody's data, and the volume would be locked for ever.
//   - The growth marker, before an ext filesystem that is to fill a larger disk: the filesystem was in order, and whatever is
//     not in order now is what resize2fs left, which e2fsck may mend without asking.
//
// mkfs knows nothing of markers and may write over one, so there are several of the first kind, where no filesystem that we
// make puts anything at its default layout. The second kind stands in the first KiB, which ext leaves to boot loaders: where
// the filesystem ends cannot be told while resize2fs is at work, since it writes the superblock in pieces of some bytes. Who
// removes a marker writes zeros over copies that stand there byte for byte, and over nothing else.

const (
	// formatMarkerBytes is the length of a copy: the largest block size of a disk.
	formatMarkerBytes = 4 * kib
	// growthMarkerBytes is what is before the superblock of ext.
	growthMarkerBytes = kib
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
)

// marker is where the copies of a marker are, and what each is.
type marker struct {
	offsets []int64
	content []byte
}

// newMarker is the marker of the disk with this UUID, of that length, without its places.
func newMarker(text string, diskID uuid.UUID, length int) marker {
	m := marker{content: make([]byte, length)}
	copy(m.content, fmt.Sprintf(text, diskID))
	return m
}

// formatMarker stands at nineteenths of the disk: they meet neither the groups of ext, which are powers of two, nor the few
// equal parts into which xfs divides it.
func formatMarker(dev Device, diskID uuid.UUID) marker {
	m := newMarker(formatText, diskID, formatMarkerBytes)
	for _, part := range []int64{3, 7, 15, 17} {
		m.offsets = append(m.offsets, dev.SizeBytes/19*part/formatMarkerBytes*formatMarkerBytes)
	}
	return m
}

func growthMarker(diskID uuid.UUID) marker {
	m := newMarker(growthText, diskID, growthMarkerBytes)
	m.offsets = []int64{0}
	return m
}

// HasFormatMarker reports whether the disk bears the format marker of the disk with this UUID. Another disk's, on one made from its
// snapshot, is none.
func HasFormatMarker(dev Device, diskID uuid.UUID) (bool, error) {
	return formatMarker(dev, diskID).present(dev)
}

// RemoveFormatMarker removes the format marker of the disk with this UUID: its filesystem is finished, or its bytes are a workload's
// from now on. A disk that anything holds is [ErrInUse]. No marker is no error.
func RemoveFormatMarker(dev Device, diskID uuid.UUID) error {
	return formatMarker(dev, diskID).remove(dev)
}

// WriteGrowthMarker puts the growth marker on the disk with this UUID, before its ext filesystem. Where anything else stands there,
// such as a boot loader, that is an error.
func WriteGrowthMarker(dev Device, diskID uuid.UUID) error {
	file, err := dev.Open(unix.O_RDWR | unix.O_EXCL)
	if err != nil {
		return err
	}
	m, head := growthMarker(diskID), make([]byte, growthMarkerBytes)
	if _, err := file.ReadAt(head, 0); err != nil {
		return errors.Join(err, file.Close())
	}
	if !bytes.Equal(head, m.content) && !bytes.Equal(head, zeros[:growthMarkerBytes]) {
		return errors.Join(
			errors.New("something stands in the first KiB, before the filesystem: grow it by hand with resize2fs"),
			file.Close(),
		)
	}
	return errors.Join(m.write(file), file.Close())
}

// HasGrowthMarker reports whether the growth of the filesystem on the disk was begun and did not end.
func HasGrowthMarker(dev Device, diskID uuid.UUID) (bool, error) {
	return growthMarker(diskID).present(dev)
}

// RemoveGrowthMarker removes the growth marker. No marker is no error.
func RemoveGrowthMarker(dev Device, diskID uuid.UUID) error { return growthMarker(diskID).remove(dev) }

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
	if err := errors.Join(m.wipe(file), file.Close()); err != nil {
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

// write puts the marker on stable storage.
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
	for _, offset := range m.offsets {
		if _, err := file.ReadAt(found, offset); err != nil {
			return nil, err
		}
		if bytes.Equal(found, m.content) {
			places = append(places, offset)
		}
	}
	return places, nil
}
