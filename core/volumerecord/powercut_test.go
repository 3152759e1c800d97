// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package volumerecord_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumerecord"
	"github.com/oxidecomputer/oxide-csi-plugin/test/writecache"
)

func TestMain(m *testing.M) {
	writecache.Main()
	devicetest.Main(m)
}

// A power cut leaves a record that can be read, also if it came just after a change of the step. After the boot the
// record then counts as one of another boot. One that cannot be read would keep the volume here.
func TestRecordOutlivesAPowerCut(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loop devices and mounts")
	}
	for _, mkfs := range [][]string{{"mkfs.ext4", "-q"}, {"mkfs.xfs", "-q"}} {
		t.Run(mkfs[0], func(t *testing.T) {
			t.Parallel()
			guest, backing := devicetest.New(t), filepath.Join(t.TempDir(), "disk")
			must(t, os.WriteFile(backing, nil, 0o600))
			must(t, os.Truncate(backing, 320<<20))
			devicetest.Run(t, mkfs[0], append(mkfs[1:], backing)...)
			cache, target := writecache.New(t, backing), t.TempDir()
			// noauto_da_alloc: many filesystems do not flush a file that replaces another one.
			options := map[string]string{"mkfs.ext4": "noauto_da_alloc", "mkfs.xfs": "defaults"}[mkfs[0]]
			devicetest.Run(t, "mount", "-o", options, guest.Plug("csi-beforethecut", cache.Path).Loop, target)
			store, r := volumerecord.Store{StateDir: filepath.Join(target, "state")}, record()
			must(t, store.Write(r))
			must(t, store.SetStep(r, volumerecord.Leaving))
			// Another program flushes another file, and with it the names in the folder.
			other, err := os.Create(filepath.Join(target, "other"))
			must(t, err)
			must(t, other.Sync())
			must(t, other.Close())
			cache.Cut(0)
			must(t, unix.Unmount(target, unix.MNT_DETACH))

			devicetest.Run(t, "mount", guest.Plug("csi-afterthecut", backing).Loop, target)
			defer devicetest.Unmount(t, target)
			if found, err := store.Read(r.Volume); err != nil || found == nil {
				t.Errorf("%v, %v, want the record", found, err)
			}
		})
	}
}
