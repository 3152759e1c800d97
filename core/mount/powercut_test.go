// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/writecache"
)

// Fsynced files outlive a power cut of a disk with a write cache, also those that are written afterwards beside them.
// What was not flushed is lost as a whole, or in part.
func TestFsyncedFilesOutliveAPowerCut(t *testing.T) {
	t.Parallel()
	for name, mkfs := range map[string][]string{
		"ext4": {"mkfs.ext4", "-q"}, "ext4 without journal": {"mkfs.ext4", "-q", "-O", "^has_journal"},
		"ext3": {"mkfs.ext3", "-q"}, "xfs": {"mkfs.xfs", "-q"}, "btrfs": {"mkfs.btrfs", "-q"},
	} {
		for _, seed := range []uint64{0, 1, 2} {
			t.Run(fmt.Sprintf("%s, seed %d", name, seed), func(t *testing.T) {
				t.Parallel()
				testPowerCut(t, mkfs, seed)
			})
		}
	}
}

func testPowerCut(t *testing.T, mkfs []string, seed uint64) {
	guest := devicetest.New(t)
	backing := filepath.Join(t.TempDir(), "disk")
	if err := errors.Join(os.WriteFile(backing, nil, 0o600), os.Truncate(backing, 320<<20)); err != nil {
		t.Fatal(err)
	}
	devicetest.Run(t, mkfs[0], append(mkfs[1:], backing)...)
	fsType := mkfs[0][len("mkfs."):]
	plug := func(name, path string) device.Device {
		t.Helper()
		dev, err := guest.Roots().ByNumber(guest.Plug(name, path).Number)
		if err != nil {
			t.Fatal(err)
		}
		return dev
	}
	r, volumeID := NewRepairs(slog.New(slog.DiscardHandler)), uuid.New()
	mounted := func(dev device.Device) (target string) {
		t.Helper()
		target = t.TempDir()
		if err := r.Mount(t.Context(), dev, volumeID, target, fsType, Options{}); err != nil {
			t.Fatal(err)
		}
		return target
	}
	cache := writecache.New(t, backing)
	before := plug("csi-beforethecut", cache.Path)
	target := mounted(before)
	writeFsynced(t, target, "old")
	cache.Cut(seed)
	if err := errors.Join(
		Unmount(context.Background(), target, before.Number),
		WaitIdle(t.Context(), before),
	); err != nil {
		t.Fatal(err)
	}

	after := plug("csi-afterthecut", backing)
	target = mounted(after)
	writeFsynced(t, target, "new")
	wantFiles(t, target, "old", "new")
	if err := errors.Join(Unmount(context.Background(), target, after.Number), WaitIdle(t.Context(), after)); err != nil {
		t.Fatal(err)
	}
}

const fsyncedFiles = 20

func fsyncedContent(kind string, i int) []byte {
	return bytes.Repeat(fmt.Appendf(nil, "%s %02d ", kind, i), 4<<10)
}

func writeFsynced(t *testing.T, target, kind string) {
	t.Helper()
	folder, err := os.Open(target)
	if err != nil {
		t.Fatal(err)
	}
	for i := range fsyncedFiles {
		file, err := os.Create(filepath.Join(target, fmt.Sprint(kind, i)))
		if err != nil {
			t.Fatal(err)
		}
		_, err = file.Write(fsyncedContent(kind, i))
		if err := errors.Join(err, file.Sync(), file.Close(), folder.Sync()); err != nil {
			t.Fatal(err)
		}
	}
	// The kernel sends this to the disk some time, or not.
	if err := errors.Join(os.WriteFile(filepath.Join(target, kind), []byte("lost"), 0o600), folder.Close()); err != nil {
		t.Fatal(err)
	}
}

func wantFiles(t *testing.T, target string, kinds ...string) {
	t.Helper()
	lost := 0
	for _, kind := range kinds {
		for i := range fsyncedFiles {
			got, err := os.ReadFile(filepath.Join(target, fmt.Sprint(kind, i)))
			if err != nil || !bytes.Equal(got, fsyncedContent(kind, i)) {
				lost++
			}
		}
	}
	if lost > 0 {
		t.Errorf("%d of %d fsynced files are lost", lost, len(kinds)*fsyncedFiles)
	}
}
