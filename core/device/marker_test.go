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
	if has, err := device.HasFormatMarker(dev, blankOrigin.VolumeID); err != nil || !has {
		t.Fatalf("the disk has a marker: %t, %v", has, err)
	}
	if err := device.RemoveFormatMarker(dev, blankOrigin.VolumeID); err != nil {
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

// A marker of a newer format is not recognised, because it may mean something else. It stays, and the disk does not
// count as blank.
func TestNewerMarkerIsNotRecognised(t *testing.T) {
	t.Parallel()
	for name, begin := range map[string]func(*device.Blank, device.Device) error{
		"format": func(blank *device.Blank, _ device.Device) error {
			return errors.Join(blank.Format(func(string) error { return nil }), blank.Close())
		},
		"growth": func(blank *device.Blank, dev device.Device) error {
			return errors.Join(blank.Close(), device.WriteWorkMarker(dev, blankOrigin.VolumeID, device.Growing))
		},
		"check": func(blank *device.Blank, dev device.Device) error {
			return errors.Join(blank.Close(), device.WriteWorkMarker(dev, blankOrigin.VolumeID, device.Checking))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := devicetest.New(t)
			d := g.Add(diskName, sizeBytes)
			blank, err := prove(t, g, d, blankOrigin)
			must(t, err)
			dev, err := g.Roots().ByNumber(d.Number)
			must(t, err)
			must(t, begin(blank, dev))
			makeNewer(t, d.Loop, "csi.oxide.computer "+name+" marker 1\n")
			before := devicetest.Digest(t, d.Loop, d.Backing)
			if has, err := device.HasFormatMarker(dev, blankOrigin.VolumeID); err != nil || has {
				t.Errorf("a format marker is recognised: %t, %v", has, err)
			}
			if work, err := device.InterruptedWork(dev); err != nil || work != device.NoWork {
				t.Errorf("a marker of work is recognised: %q, %v", work, err)
			}
			must(t, device.RemoveFormatMarker(dev, blankOrigin.VolumeID))
			must(t, device.RemoveWorkMarker(dev))
			if name != "format" {
				if err := device.WriteWorkMarker(dev, blankOrigin.VolumeID, device.Growing); !errors.Is(err, device.ErrOccupied) {
					t.Errorf("the marker is replaced: %v", err)
				}
			}
			if _, err := prove(t, g, d, blankOrigin); !errors.Is(err, device.ErrNotBlank) {
				t.Errorf("the disk is blank: %v", err)
			}
			if devicetest.Digest(t, d.Loop, d.Backing) != before {
				t.Error("the disk was written to")
			}
		})
	}
}

// makeNewer increases the version in each copy of a marker that begins with this line.
func makeNewer(t *testing.T, disk, line string) {
	t.Helper()
	content, err := os.ReadFile(disk)
	must(t, err)
	file, err := os.OpenFile(disk, os.O_RDWR|unix.O_SYNC, 0)
	must(t, err)
	copies := 0
	for at := 0; ; copies++ {
		next := bytes.Index(content[at:], []byte(line))
		if next < 0 {
			break
		}
		at += next + len(line)
		_, err := file.WriteAt([]byte("2"), int64(at-len("1\n")))
		must(t, err)
	}
	must(t, file.Close())
	if copies == 0 {
		t.Fatalf("the disk has no %q", line)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
