// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package writecache_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/writecache"
)

const mib = 1 << 20

func TestMain(m *testing.M) {
	writecache.Main()
	devicetest.Main(m)
}

// folders are on different filesystems of the host.
func folders(t *testing.T) map[string]string {
	memory, err := os.MkdirTemp("/dev/shm", "writecache")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(memory) })
	return map[string]string{"the default folder": t.TempDir(), "memory": memory}
}

// A cut loses what was not flushed, and nothing else. Afterwards the disk does not respond.
func TestCut(t *testing.T) {
	for name, folder := range folders(t) {
		for _, seed := range []uint64{0, 1} {
			t.Run(name, func(t *testing.T) {
				guest := devicetest.New(t)
				backing := filepath.Join(folder, "disk")
				if err := errors.Join(os.WriteFile(backing, nil, 0o600), os.Truncate(backing, 16*mib)); err != nil {
					t.Fatal(err)
				}
				cache := writecache.New(t, backing)
				loop := guest.Plug("csi-abcdefghijklmnop", cache.Path)
				disk, err := os.OpenFile(loop.Loop, os.O_RDWR, 0)
				if err != nil {
					t.Fatal(err)
				}
				flushed, unflushed := bytes.Repeat([]byte("flushed "), mib/8), bytes.Repeat([]byte("volatile"), mib/8)
				if _, err := disk.WriteAt(flushed, 0); err != nil {
					t.Fatal(err)
				}
				if err := disk.Sync(); err != nil {
					t.Fatal(err)
				}
				// The kernel sends this to the disk, and does not flush the disk.
				if _, err := disk.WriteAt(unflushed, mib); err != nil {
					t.Fatal(err)
				}
				if err := unix.SyncFileRange(int(disk.Fd()), mib, mib, unix.SYNC_FILE_RANGE_WAIT_BEFORE|
					unix.SYNC_FILE_RANGE_WRITE|unix.SYNC_FILE_RANGE_WAIT_AFTER); err != nil {
					t.Fatal(err)
				}
				lost := cache.Cut(seed)
				if seed == 0 && lost != mib/4096 || seed != 0 && (lost == 0 || lost >= mib/4096) {
					t.Errorf("seed %d: %d pages are lost", seed, lost)
				}
				if _, err := disk.WriteAt(unflushed, 2*mib); err == nil && disk.Sync() == nil {
					t.Error("a flush after the cut succeeded")
				}
				if err := disk.Close(); err != nil {
					t.Error(err)
				}
				got, err := os.ReadFile(backing)
				if err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(got[:mib], flushed) {
					t.Error("flushed data is lost")
				}
				if kept := bytes.Count(got[mib:], []byte("volatile")); kept != mib/8-lost*512 {
					t.Errorf("%d of %d words that were not flushed are there", kept, mib/8)
				}
			})
		}
	}
}
