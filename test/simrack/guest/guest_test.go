// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// nodeA and nodeB are the instances of most tests.
const (
	nodeA = "11111111-1111-4111-8111-111111111111"
	nodeB = "22222222-2222-4222-8222-222222222222"
)

// mib is a small unit for disk sizes; a disk of 64 MiB is large enough for ext4.
const mib = 1 << 20

// world is a set of guests in folders of the test.
type world struct {
	*Guests
	t           *testing.T
	root, state string
}

// newWorld creates guests. When the test ends, nothing of them may be left.
func newWorld(t *testing.T) *world {
	t.Helper()
	needRoot(t)
	return openWorld(t, filepath.Join(t.TempDir(), "guests"), t.TempDir())
}

func openWorld(t *testing.T, root, state string) *world {
	t.Helper()
	return openWorldWith(t, Options{Root: root, StateDir: state})
}

func openWorldWith(t *testing.T, options Options) *world {
	t.Helper()
	root, state := options.Root, options.StateDir
	w := &world{t: t, root: root, state: state}
	options.Log = slog.New(slog.DiscardHandler)
	var err error
	if w.Guests, err = New(options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.close()
		noLoops(t, state)
		if _, err := os.Stat(root); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("guest root %s left behind: %v", root, err)
		}
	})
	return w
}

// close closes the guests, once: at the end of the test, or earlier if the test calls it.
func (w *world) close() {
	w.t.Helper()
	if w.Guests == nil {
		return
	}
	if err := w.Close(); err != nil {
		w.t.Errorf("close: %v", err)
	}
	w.Guests = nil
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loop devices, device nodes and mounts")
	}
}

// loopsBelow lists the loop devices with a backing file below the folder, including deleted files. It reads sysfs,
// independently of the package.
func loopsBelow(t *testing.T, dir string) (found []string) {
	t.Helper()
	paths, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err == nil && strings.HasPrefix(string(text), dir+"/") {
			found = append(found, strings.Split(path, "/")[3]+" "+strings.TrimSpace(string(text)))
		}
	}
	return found
}

// noLoops waits until no loop device has a backing file below the folder. Programs such as udev open every new block
// device for a moment.
func noLoops(t *testing.T, dir string) {
	t.Helper()
	await.Eventually(t, "no loop devices are left below "+dir, func() bool { return len(loopsBelow(t, dir)) == 0 })
}

// data creates a store, and returns a disk with it for a slot.
func (w *world) data(slot int, name string, sizeMiB int64) simrack.GuestDisk {
	w.t.Helper()
	disk := simrack.GuestDisk{
		ID: fmt.Sprintf("%08d-0000-4000-8000-%012x", slot, name), Name: name, Slot: slot,
		SizeBytes: sizeMiB * mib, BlockSize: 512,
	}
	w.must(w.CreateDisk(disk.ID, disk.SizeBytes))
	return disk
}

// on creates a guest and powers it on.
func (w *world) on(instanceID, name string, disks ...simrack.GuestDisk) {
	w.t.Helper()
	w.must(w.CreateInstance(instanceID, name))
	w.must(w.PowerOn(instanceID, disks, nil))
}

// node is the path of the disk's device node in a guest. The test fails if the guest shows none.
func (w *world) node(instanceID string, disk simrack.GuestDisk) string {
	w.t.Helper()
	name := w.Device(instanceID, disk.ID)
	if name == "" {
		w.t.Fatalf("instance %s shows no device for disk %s", instanceID, disk.Name)
	}
	return filepath.Join(w.Dir(instanceID), "dev", name)
}

func (w *world) must(err error) {
	w.t.Helper()
	must(w.t, err)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
}

// unmount unmounts a path. It waits while the mount is busy: a program that starts at the same time has copies of all
// open files until it executes.
func unmount(t *testing.T, path string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		err := unix.Unmount(path, 0)
		if err == nil {
			return
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			t.Fatalf("unmount %s: %v", path, err)
		}
	}
}

// mounted mounts the device at a new folder until the test ends.
func mounted(t *testing.T, node, fsType string) string {
	t.Helper()
	dir := t.TempDir()
	must(t, unix.Mount(node, dir, fsType, 0, mountOptions(fsType)))
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

func mountOptions(fsType string) string {
	if fsType == "xfs" {
		return "nouuid" // the old mount of the disk still has a filesystem with the same UUID
	}
	return ""
}

// isMounted reads mountinfo.
func isMounted(t *testing.T, dir string) bool {
	t.Helper()
	mounts, err := ownMounts()
	must(t, err)
	for _, m := range mounts {
		if m.Mountpoint == dir {
			return true
		}
	}
	return false
}

// writeFile writes a file; with synced it also flushes the file to the disk.
func writeFile(t *testing.T, path, text string, synced bool) {
	t.Helper()
	f, err := os.Create(path)
	must(t, err)
	_, err = f.WriteString(text)
	must(t, err)
	if synced {
		must(t, f.Sync())
	}
	must(t, f.Close())
}

// contents are the contents of the files in a folder, without folders such as lost+found.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	found := map[string]string{}
	for _, entry := range entries {
		if entry.IsDir() {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, entry.Name()))
		must(t, err)
		found[entry.Name()] = string(text)
	}
	return found
}
