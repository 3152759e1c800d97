// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device_test

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
)

// Removing the marker overwrites its own copies only. A filesystem may have data at the place of another copy.
func TestRemoveFormatMarkerSparesData(t *testing.T) {
	t.Parallel()
	g := devicetest.New(t)
	d := g.Add(diskName, sizeBytes)
	blank, err := prove(t, g, d, blankOrigin)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(blank.Format(func(string) error { return nil }), blank.Close()); err != nil {
		t.Fatal(err)
	}
	const copyBytes = 4 * kib
	file, err := os.OpenFile(d.Loop, os.O_RDWR|unix.O_SYNC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() }) // only this test's data
	places := make([]int64, 0, 4)
	for _, part := range []int64{3, 7, 15, 17} {
		places = append(places, sizeBytes/19*part/copyBytes*copyBytes)
	}
	data := bytes.Repeat([]byte("data"), int(copyBytes/4))
	if _, err := file.WriteAt(data, places[1]); err != nil {
		t.Fatal(err)
	}
	dev, err := g.Roots().ByNumber(d.Number)
	if err != nil {
		t.Fatal(err)
	}
	if has, err := device.HasFormatMarker(dev, blankOrigin.DiskID); err != nil || !has {
		t.Fatalf("the disk has a marker: %t, %v", has, err)
	}
	if err := device.RemoveFormatMarker(dev, blankOrigin.DiskID); err != nil {
		t.Fatal(err)
	}
	for i, place := range places {
		want := make([]byte, copyBytes)
		if i == 1 {
			want = data
		}
		found := make([]byte, copyBytes)
		if _, err := file.ReadAt(found, place); err != nil || !bytes.Equal(found, want) {
			t.Errorf("at %d: %v, %.20q, want %.20q", place, err, found, want)
		}
	}
}
