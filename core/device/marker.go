package device

import (
	"bytes"
	"errors"
	"fmt"
	"os"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"
)

// A marker says on the disk itself that mkfs was begun on it while it was blank. It is on stable storage before mkfs
// starts and taken away before the filesystem is mounted for the first time. So whoever finds one, on whichever node and
// after whatever power cut, knows that all else on the disk is what mkfs left; without it, remains that bear no signature
// yet could not be told from somebody's data, and the volume would be locked for ever.
//
// mkfs knows nothing of markers and may write over one, so there are several. They lie where no filesystem that we make
// puts anything at its default layout.

// markerBytes is the length of a copy: the largest block size of a disk.
const markerBytes = 4 * kib

// markerText is permanent: a marker may have been written by an older version of this plugin.
const markerText = `csi.oxide.computer format marker 1
disk %s
This disk was blank, and a filesystem is being made on it. Where this still stands beside no filesystem, or beside one that
was never mounted, making it was interrupted: NodeStageVolume makes it again and then removes this text.
`

// markerOf is a copy of the marker of the disk with this UUID.
func markerOf(diskID uuid.UUID) []byte {
	marker := make([]byte, markerBytes)
	copy(marker, fmt.Sprintf(markerText, diskID))
	return marker
}

// markerPlaces are the offsets of the copies on a disk of this size. Nineteenths meet neither the groups of ext, which
// are powers of two, nor the few equal parts into which xfs divides a disk.
func markerPlaces(sizeBytes int64) []int64 {
	var places []int64
	for _, part := range []int64{3, 7, 15, 17} {
		places = append(places, sizeBytes/19*part/markerBytes*markerBytes)
	}
	return places
}

// Marked reports whether the disk bears a marker of the disk with this UUID. Another disk's, on one made from its
// snapshot, is none.
func Marked(dev Device, diskID uuid.UUID) (bool, error) {
	var intact []int64
	err := dev.with(func(file *os.File) (err error) {
		intact, err = intactMarkers(file, dev.SizeBytes, diskID)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("%w: %s: look for a format marker: %w", ErrUnreadable, dev, err)
	}
	return len(intact) > 0, nil
}

// Unmark removes the markers of the disk with this UUID: its filesystem is finished, or its bytes are a workload's from now
// on. It writes zeros over copies that stand there byte for byte, and over nothing else; a disk that anything holds is
// [ErrInUse]. No marker is no error.
func Unmark(dev Device, diskID uuid.UUID) error {
	marked, err := Marked(dev, diskID)
	if err != nil || !marked {
		return err
	}
	file, err := dev.Open(unix.O_RDWR | unix.O_EXCL)
	if err != nil {
		return err
	}
	if err := errors.Join(unmark(file, dev.SizeBytes, diskID), file.Close()); err != nil {
		return fmt.Errorf("remove the format marker from %s: %w", dev, err)
	}
	return nil
}

func unmark(file *os.File, sizeBytes int64, diskID uuid.UUID) error {
	intact, err := intactMarkers(file, sizeBytes, diskID)
	if err != nil {
		return err
	}
	for _, offset := range intact {
		if _, err := file.WriteAt(zeros[:markerBytes], offset); err != nil {
			return err
		}
	}
	return file.Sync()
}

// mark puts the markers on stable storage.
func mark(file *os.File, sizeBytes int64, diskID uuid.UUID) error {
	for _, offset := range markerPlaces(sizeBytes) {
		if _, err := file.WriteAt(markerOf(diskID), offset); err != nil {
			return err
		}
	}
	return file.Sync()
}

func intactMarkers(file *os.File, sizeBytes int64, diskID uuid.UUID) (intact []int64, err error) {
	found, want := make([]byte, markerBytes), markerOf(diskID)
	for _, offset := range markerPlaces(sizeBytes) {
		if _, err := file.ReadAt(found, offset); err != nil {
			return nil, err
		}
		if bytes.Equal(found, want) {
			intact = append(intact, offset)
		}
	}
	return intact, nil
}
