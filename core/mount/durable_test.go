// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
)

// What is not flushed is in the page cache of the loop device, and not yet in its file. The last close of a device
// flushes it too, so these tests keep it open.

func keepOpen(t *testing.T, disk *devicetest.Disk) *os.File {
	t.Helper()
	file, err := os.OpenFile(disk.Loop, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() }) // only this test's data
	return file
}

// durable returns how often text is in the disk's file.
func durable(t *testing.T, disk *devicetest.Disk, text []byte) int {
	t.Helper()
	content, err := os.ReadFile(disk.Backing)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(content, text)
}

// The marker is durable before mkfs starts, and its removal before the filesystem is mounted.
func TestFormatMarkerIsDurable(t *testing.T) {
	t.Parallel()
	dev, disk := newDisk(t, 8<<20)
	keepOpen(t, disk)
	volumeID := uuid.New()
	blank, err := device.ProveBlank(t.Context(), dev, device.BlankOptions{VolumeID: volumeID, Origin: device.OriginBlank})
	if err != nil {
		t.Fatal(err)
	}
	err = blank.Format(func(string) error {
		if n := durable(t, disk, markerLine(volumeID)); n != 4 {
			t.Errorf("when mkfs starts, %d copies of the marker are durable, want 4", n)
		}
		return nil
	})
	if err := errors.Join(err, blank.Close()); err != nil {
		t.Fatal(err)
	}
	if err := device.RemoveFormatMarker(dev, volumeID); err != nil {
		t.Fatal(err)
	}
	if n := durable(t, disk, markerLine(volumeID)); n != 0 {
		t.Errorf("after the removal, %d copies of the marker are durable", n)
	}
}

// What mkfs wrote is durable before the marker is removed, also if mkfs did not flush it.
func TestVerifyFormatFlushes(t *testing.T) {
	t.Parallel()
	dev, disk := newDisk(t, 8<<20)
	data := []byte("written by mkfs")
	if _, err := keepOpen(t, disk).WriteAt(data, 4<<20); err != nil {
		t.Fatal(err)
	}
	if err := verifyFormat(dev, "ext4", uuid.NewString()); !errors.Is(err, ErrFormat) {
		t.Errorf("%v, want ErrFormat: there is no filesystem", err)
	}
	if n := durable(t, disk, data); n != 1 {
		t.Error("the data is not durable")
	}
}
