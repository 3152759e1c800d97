// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package mount_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
)

// foreign mounts a small filesystem that is not a volume.
func foreign(t *testing.T, path string, flags uintptr) {
	t.Helper()
	if err := unix.Mount("foreign", path, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			t.Error(err)
		}
	})
	if err := unix.Mount("", path, "", flags, ""); flags != 0 && err != nil {
		t.Fatal(err)
	}
}

func table(t *testing.T) mount.Table {
	t.Helper()
	table, err := mount.ReadTable()
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func mounts(t *testing.T, path string) (types []string) {
	t.Helper()
	for _, entry := range table(t).AllAt(path) {
		types = append(types, entry.FSType)
	}
	return types
}

func TestAllAtAndUnmount(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	target := r.mounted(t, "ext4", mount.Options{})
	foreign(t, target, 0)
	if err := mount.Filesystem(t.Context(), r.dev, target, "ext4", mount.Options{}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"ext4", "tmpfs", "ext4"}, mounts(t, target)); diff != "" {
		t.Errorf("the uppermost first (-want +got):\n%s", diff)
	}
	if entry, ok := at(t, target); !ok || entry.FSType != "ext4" {
		t.Errorf("uppermost is %v, %t", entry, ok)
	}
	// Unmount stops at the foreign mount. The mount below it stays.
	if err := mount.Unmount(t.Context(), target, r.dev.Number); !errors.Is(err, mount.ErrForeign) {
		t.Errorf("%v, want ErrForeign", err)
	}
	if diff := cmp.Diff([]string{"tmpfs", "ext4"}, mounts(t, target)); diff != "" {
		t.Errorf("after unmounting (-want +got):\n%s", diff)
	}
	devicetest.Unmount(t, target)
	r.unmount(t, target)
	if got := mounts(t, target); got != nil {
		t.Errorf("still mounted: %v", got)
	}
}

func TestUnmountLeavesWhatIsBelow(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	elsewhere := r.mounted(t, "ext4", mount.Options{})
	target := t.TempDir()
	foreign(t, target, 0)
	for range 2 {
		if err := mount.Bind(elsewhere, target, false); err != nil {
			t.Fatal(err)
		}
	}
	r.unmount(t, target)
	if diff := cmp.Diff([]string{"tmpfs"}, mounts(t, target)); diff != "" {
		t.Errorf("mounted (-want +got):\n%s", diff)
	}
	r.unmount(t, elsewhere)
}

// A folder that is mounted at two places with shared propagation, such as kubelet's folder on a larger disk.
func TestSameMount(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	staged := r.mounted(t, "ext4", mount.Options{})
	for name, tc := range map[string]struct {
		flags uintptr
		want  bool
	}{
		"shared":  {unix.MS_SHARED, true},
		"private": {unix.MS_PRIVATE, false},
	} {
		t.Run(name, func(t *testing.T) {
			one, two := t.TempDir(), t.TempDir()
			foreign(t, one, tc.flags)
			if err := unix.Mount(one, two, "", unix.MS_BIND, ""); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := unix.Unmount(two, unix.MNT_DETACH); err != nil {
					t.Error(err)
				}
			})
			for _, folder := range []string{"a", "b"} {
				if err := os.Mkdir(filepath.Join(one, folder), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := mount.Bind(staged, filepath.Join(one, folder), false); err != nil {
					t.Fatal(err)
				}
			}
			// Without propagation, the second mount was made by hand.
			if !tc.want {
				if err := mount.Bind(staged, filepath.Join(two, "a"), false); err != nil {
					t.Fatal(err)
				}
			}
			table := table(t)
			a, okA := table.At(filepath.Join(one, "a"))
			mirror, okMirror := table.At(filepath.Join(two, "a"))
			b, okB := table.At(filepath.Join(one, "b"))
			if !okA || !okB || !okMirror {
				t.Fatalf("mounted: %t, %t, %t", okA, okB, okMirror)
			}
			if got := table.SameMount(a, mirror); got != tc.want {
				t.Errorf("the same folder, shown twice: %t, want %t", got, tc.want)
			}
			if !table.SameMount(a, a) || table.SameMount(a, b) {
				t.Error("a mount is itself, and no other one beside it")
			}
		})
	}
}

func TestTurnedReadOnly(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	target := r.mounted(t, "ext4", mount.Options{Flags: []string{"errors=remount-ro"}})
	if entry, _ := at(t, target); entry.ReadOnly || entry.TurnedReadOnly || entry.ShutDown {
		t.Errorf("a healthy mount: %+v", entry)
	}
	trigger := filepath.Join("/sys/fs/ext4", filepath.Base(r.disk.Loop), "trigger_fs_error")
	if err := os.WriteFile(trigger, []byte("test"), 0); err != nil {
		t.Fatal(err)
	}
	if entry, _ := at(t, target); !entry.ReadOnly || !entry.TurnedReadOnly {
		t.Errorf("after an error: %+v", entry)
	}
	r.unmountAndWait(t, target)
	if err := mount.Filesystem(t.Context(), r.dev, target, "ext4", mount.Options{Flags: []string{"ro"}}); err != nil {
		t.Fatal(err)
	}
	if entry, _ := at(t, target); !entry.ReadOnly || entry.TurnedReadOnly {
		t.Errorf("mounted read-only: %+v", entry)
	}
}

func TestShutDown(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	target := r.mounted(t, "ext4", mount.Options{})
	devicetest.Run(t, "xfs_io", "-x", "-c", "shutdown", target)
	// Only since Linux 6.15 does ext4 tell.
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	tells := false
	for line := range strings.Lines(string(mounts)) {
		tells = tells || strings.Contains(line, " "+target+" ") && strings.Contains(line, ",shutdown")
	}
	if entry, _ := at(t, target); entry.ShutDown != tells {
		t.Errorf("the kernel says %t: %+v", tells, entry)
	}
}

func TestLacks(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	target := r.mounted(t, "ext4", mount.Options{Flags: []string{"noatime,stripe=97", "commit=7"}})
	entry, _ := at(t, target)
	for _, tc := range []struct {
		name  string
		flags []string
		want  int
	}{
		{"the same", []string{"noatime,stripe=97", "commit=7"}, 0},
		{"none", nil, 0},
		{"defaults", []string{"defaults", "rw"}, 0},
		{"others", []string{"nodiratime,noatime", "commit=8", "secret"}, 3},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := entry.CountMissing(tc.flags); got != tc.want {
				t.Errorf("%d, want %d; %+v", got, tc.want, entry)
			}
		})
	}
}
