// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device_test

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
)

const gib = 1 << 30

// findGrown returns the disk of a volume whose first disk had 1 GiB.
func findGrown(t *testing.T, g *devicetest.Guest) device.Device {
	t.Helper()
	dev, err := g.Roots().WaitForDisk(t.Context(), device.ExpectedDisk{
		Serial: devicetest.Serial(diskName), SizeBytes: gib, FirstBytes: gib,
	}, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	return dev
}

// grow makes the disk larger, as an expansion does: the guest gets another disk with the same content.
func grow(t *testing.T, g *devicetest.Guest, d *devicetest.Disk, toBytes int64) *devicetest.Disk {
	t.Helper()
	g.Unplug(d)
	if err := os.Truncate(d.Backing, toBytes); err != nil {
		t.Fatal(err)
	}
	return g.Plug(diskName, d.Backing)
}

// The marker of a format that was interrupted before the volume grew is found, and removed.
func TestGrownDiskHasItsFormatMarker(t *testing.T) {
	t.Parallel()
	g := devicetest.New(t)
	d := g.Add(diskName, 2*gib)
	blank, err := device.ProveBlank(t.Context(), findGrown(t, g), blankOrigin)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(blank.Format(func(string) error { return nil }), blank.Close()); err != nil {
		t.Fatal(err)
	}
	grow(t, g, d, 5*gib)
	dev := findGrown(t, g)
	for _, want := range []bool{true, false} {
		if has, err := device.HasFormatMarker(dev, blankOrigin.VolumeID); err != nil || has != want {
			t.Errorf("the disk has a marker: %t, %v, want %t", has, err, want)
		}
		if err := device.RemoveFormatMarker(dev, blankOrigin.VolumeID); err != nil {
			t.Fatal(err)
		}
	}
}

// The copies of a superblock are where they were before the volume grew.
func TestGrownDiskIsNotBlank(t *testing.T) {
	t.Parallel()
	t.Run("xfs", func(t *testing.T) {
		t.Parallel()
		g := devicetest.New(t)
		d := g.Add(diskName, 2*gib)
		devicetest.Run(t, "mkfs.xfs", d.Loop)
		devicetest.Run(t, "dd", "if=/dev/zero", "of="+d.Loop, "bs=1M", "count=1", "conv=fsync")
		grow(t, g, d, 5*gib)
		wantNotBlank(t, findGrown(t, g), blankOrigin)
	})
	// Each byte is at a place that follows from an earlier size alone.
	for name, tc := range map[string]struct {
		offset    int64
		encrypted bool
	}{
		"md 0.90, first size":             {gib - 64*kib, false},
		"zfs, third label, size between":  {2*gib - 512*kib + 16*kib, false},
		"place of a marker, size between": {2 * gib / 19 * 7, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := devicetest.New(t)
			d := grow(t, g, g.Add(diskName, gib), 5*gib)
			options := blankOrigin
			options.Encrypted = tc.encrypted
			poke(t, d, tc.offset, "x")
			wantNotBlank(t, findGrown(t, g), options)
			poke(t, d, tc.offset, "\x00")
			blank, err := device.ProveBlank(t.Context(), findGrown(t, g), options)
			if err = errors.Join(err, blank.Close()); err != nil {
				t.Errorf("zeroed again: %v", err)
			}
		})
	}
	t.Run("encrypted", func(t *testing.T) {
		t.Parallel()
		const dataOffset = 16 << 20
		g := devicetest.New(t)
		d := grow(t, g, g.Add(diskName, 2*gib), 5*gib)
		file, err := os.OpenFile(d.Loop, os.O_WRONLY|os.O_SYNC, 0)
		if err != nil {
			t.Fatal(err)
		}
		// A copy of an xfs superblock inside the encrypted disk of 2 GiB.
		_, err = file.WriteAt([]byte("noise"), dataOffset+(2*gib-dataOffset)/4)
		if err := errors.Join(err, file.Close()); err != nil {
			t.Fatal(err)
		}
		encrypted := blankOrigin
		encrypted.Encrypted = true
		wantNotBlank(t, findGrown(t, g), encrypted)
		if err := device.CheckNeverWritten(t.Context(), findGrown(t, g), dataOffset, blankOrigin); !errors.Is(
			err, device.ErrNotBlank,
		) {
			t.Errorf("CheckNeverWritten: %v", err)
		}
	})
}

func wantNotBlank(t *testing.T, dev device.Device, options device.BlankOptions) {
	t.Helper()
	blank, err := device.ProveBlank(context.Background(), dev, options)
	if !errors.Is(err, device.ErrNotBlank) {
		t.Errorf("ProveBlank: %v", errors.Join(err, blank.Close()))
	}
}
