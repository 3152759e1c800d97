// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package guest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// statesOn are the filesystems below the state directory that the tests use. On ext4 a cut makes the backing file
// immutable.
var statesOn = []string{"as it is", "tmpfs"}

func newWorldOn(t *testing.T, stateOn string) *world {
	t.Helper()
	needRoot(t)
	state := t.TempDir()
	if stateOn == "tmpfs" {
		must(t, unix.Mount("tmpfs", state, "tmpfs", 0, ""))
		t.Cleanup(func() { unmount(t, state) })
	}
	return openWorld(t, filepath.Join(t.TempDir(), "guests"), state)
}

// oneLoopEach fails if two loop devices have the same backing file.
func (w *world) oneLoopEach() {
	w.t.Helper()
	bound, err := w.boundLoops()
	w.must(err)
	seen := map[fileID]loop{}
	for _, b := range bound {
		if other, ok := seen[b.file]; ok {
			w.t.Errorf("the store of disk %s is behind %s and %s", b.diskID, other, b.loop)
		}
		seen[b.file] = b.loop
	}
}

// TestCutOfAMountedDisk removes a mounted disk in each way. The mount stays and answers EIO, and the next guest with
// the disk reads exactly what was flushed.
func TestCutOfAMountedDisk(t *testing.T) {
	ways := map[string]func(w *world, disk simrack.GuestDisk) error{
		"unplug":    func(w *world, disk simrack.GuestDisk) error { return w.Unplug(nodeA, disk.ID) },
		"power cut": func(w *world, disk simrack.GuestDisk) error { return w.PowerOff(nodeA, false) },
	}
	for _, stateOn := range statesOn {
		for _, fsType := range []string{"ext4", "xfs"} {
			for way, kill := range ways {
				t.Run(fmt.Sprintf("state %s, %s, %s", stateOn, fsType, way), func(t *testing.T) {
					t.Parallel()
					w := newWorldOn(t, stateOn)
					disk := w.data(1, "volume", 320)
					w.on(nodeA, "node-a", disk)
					w.on(nodeB, "node-b")
					run(t, "mkfs."+fsType, "-q", w.node(nodeA, disk))
					dead := mounted(t, w.node(nodeA, disk), fsType)
					writeFile(t, filepath.Join(dead, "flushed"), "safe", true)
					writeFile(t, filepath.Join(dead, "unflushed"), "lost", false)
					open, err := os.OpenFile(filepath.Join(dead, "flushed"), os.O_RDWR, 0)
					must(t, err)
					defer open.Close()

					w.must(kill(w, disk))

					if !isMounted(t, dead) {
						t.Error("the mount has disappeared from mountinfo")
					}
					_, readErr := open.ReadAt(make([]byte, 4), 0)
					_, writeErr := open.WriteAt([]byte("x"), 0)
					createErr := os.WriteFile(filepath.Join(dead, "new"), nil, 0o600)
					for what, err := range map[string]error{"read": readErr, "write": writeErr, "fsync": open.Sync(), "create": createErr} {
						if !errors.Is(err, unix.EIO) {
							t.Errorf("%s on the filesystem after the cut: got %v, want EIO", what, err)
						}
					}

					w.must(w.Plug(nodeB, disk))
					w.oneLoopEach()
					alive := mounted(t, w.node(nodeB, disk), fsType)
					if diff := cmp.Diff(map[string]string{"flushed": "safe"}, contents(t, alive)); diff != "" {
						t.Errorf("what the next guest reads (-want +got):\n%s", diff)
					}
					writeFile(t, filepath.Join(alive, "next"), "new", true)
					must(t, open.Close())
					unmount(t, dead)
					unmount(t, alive)

					// Unmounting the old mount does not affect the disk's new mount.
					w.must(w.Unplug(nodeB, disk.ID))
					w.must(w.Plug(nodeB, disk))
					alive = mounted(t, w.node(nodeB, disk), fsType)
					if diff := cmp.Diff(map[string]string{"flushed": "safe", "next": "new"}, contents(t, alive)); diff != "" {
						t.Errorf("what the next guest wrote (-want +got):\n%s", diff)
					}
					unmount(t, alive)
				})
			}
		}
	}
}

// TestOrderlyHalt halts a guest: all data is written, and nothing stays mounted.
func TestOrderlyHalt(t *testing.T) {
	w := newWorld(t)
	disk := w.data(1, "volume", 64)
	w.on(nodeA, "node-a", disk)
	run(t, "mkfs.ext4", "-q", w.node(nodeA, disk))
	dir := mounted(t, w.node(nodeA, disk), "ext4")
	bind, nested, raw := t.TempDir(), filepath.Join(dir, "nested"), filepath.Join(t.TempDir(), "raw")
	must(t, os.Mkdir(nested, 0o755))
	must(t, unix.Mount(dir, bind, "", unix.MS_BIND, ""))
	must(t, unix.Mount("tmpfs", nested, "tmpfs", 0, ""))
	writeFile(t, raw, "", false)
	must(t, unix.Mount(w.node(nodeA, disk), raw, "", unix.MS_BIND, ""))
	writeFile(t, filepath.Join(dir, "unflushed"), "kept", false)

	w.must(w.PowerOff(nodeA, true))
	for _, mountPoint := range []string{dir, bind, nested, raw} {
		if isMounted(t, mountPoint) {
			t.Errorf("%s is still mounted", mountPoint)
		}
	}
	noLoops(t, w.state)
	w.must(w.PowerOn(nodeA, []simrack.GuestDisk{disk}, nil))
	alive := mounted(t, w.node(nodeA, disk), "ext4")
	if diff := cmp.Diff("kept", contents(t, alive)["unflushed"]); diff != "" {
		t.Errorf("content after the halt (-want +got):\n%s", diff)
	}
}

// TestOrderlyHaltWithABusyMount keeps a file open. All written data is kept, and the mount answers EIO.
func TestOrderlyHaltWithABusyMount(t *testing.T) {
	w := newWorld(t)
	disk := w.data(1, "volume", 64)
	w.on(nodeA, "node-a", disk)
	run(t, "mkfs.ext4", "-q", w.node(nodeA, disk))
	dir := mounted(t, w.node(nodeA, disk), "ext4")
	busy, err := os.Create(filepath.Join(dir, "busy"))
	must(t, err)
	defer busy.Close()
	_, err = busy.WriteString("kept")
	must(t, err)

	w.must(w.PowerOff(nodeA, true))
	if err := busy.Sync(); !errors.Is(err, unix.EIO) {
		t.Errorf("fsync on the filesystem after the halt: got %v, want EIO", err)
	}
	w.must(w.PowerOn(nodeA, []simrack.GuestDisk{disk}, nil))
	if isMounted(t, dir) {
		t.Error("a machine that has just booted has a mount")
	}
	w.oneLoopEach()
	alive := mounted(t, w.node(nodeA, disk), "ext4")
	if diff := cmp.Diff("kept", contents(t, alive)["busy"]); diff != "" {
		t.Errorf("content after the halt (-want +got):\n%s", diff)
	}
	must(t, busy.Close())
}

// TestOrderlyHaltOfAShutDownFilesystem halts a guest whose filesystem was shut down before. That is not an error of the
// simulator.
func TestOrderlyHaltOfAShutDownFilesystem(t *testing.T) {
	w := newWorld(t)
	disk := w.data(1, "volume", 64)
	w.on(nodeA, "node-a", disk)
	run(t, "mkfs.ext4", "-q", w.node(nodeA, disk))
	dir := mounted(t, w.node(nodeA, disk), "ext4")
	mounts, err := ownMounts()
	must(t, err)
	for _, m := range mounts {
		if m.Mountpoint == dir {
			must(t, m.shutDown())
		}
	}
	w.must(w.PowerOff(nodeA, true))
	noLoops(t, w.state)
}

// TestCutOfARawDisk removes a disk while its block device is open. Flushed data is kept. Data in the page cache is lost
// if the state directory is on ext4. No further write succeeds.
func TestCutOfARawDisk(t *testing.T) {
	for _, stateOn := range statesOn {
		t.Run("state "+stateOn, func(t *testing.T) {
			w := newWorldOn(t, stateOn)
			disk := w.data(1, "volume", 8)
			w.on(nodeA, "node-a", disk)
			w.on(nodeB, "node-b")
			raw, err := os.OpenFile(w.node(nodeA, disk), os.O_RDWR, 0)
			must(t, err)
			defer raw.Close()
			_, err = raw.WriteAt([]byte("flushed"), 0)
			must(t, err)
			must(t, raw.Sync())
			_, err = raw.WriteAt([]byte("cached"), mib)
			must(t, err)

			w.must(w.Unplug(nodeA, disk.ID))
			w.must(w.Plug(nodeB, disk))
			w.oneLoopEach()
			if _, err := raw.WriteAt([]byte("too late"), 0); err == nil {
				err = raw.Sync()
				if err == nil {
					t.Error("a write to a removed disk was flushed")
				}
			}
			if n, err := raw.ReadAt(make([]byte, 1), 0); n != 0 || !errors.Is(err, io.EOF) {
				t.Errorf("read from a removed disk: got %d bytes, %v, want end of file", n, err)
			}
			must(t, raw.Close())

			next, err := os.Open(w.node(nodeB, disk))
			must(t, err)
			defer next.Close()
			got := make([]byte, 7)
			_, err = next.ReadAt(got, 0)
			must(t, err)
			if string(got) != "flushed" {
				t.Errorf("flushed data: got %q", got)
			}
			_, err = next.ReadAt(got, mib)
			must(t, err)
			var stat unix.Statfs_t
			must(t, unix.Statfs(w.state, &stat))
			if stat.Type == unix.EXT4_SUPER_MAGIC && string(got) != "\x00\x00\x00\x00\x00\x00\x00" {
				t.Errorf("cached data reached the disk: %q", got)
			}
		})
	}
}

// TestAcknowledgedWrites writes increasing numbers to a disk until the disk is removed. The next guest reads the last
// acknowledged number or a later one: the cut is atomic.
func TestAcknowledgedWrites(t *testing.T) {
	for _, stateOn := range statesOn {
		for _, kind := range []string{"file", "raw"} {
			t.Run(fmt.Sprintf("state %s, %s", stateOn, kind), func(t *testing.T) {
				t.Parallel()
				w := newWorldOn(t, stateOn)
				disk := w.data(1, "volume", 64)
				w.on(nodeA, "node-a", disk)
				w.on(nodeB, "node-b")
				if kind == "file" {
					run(t, "mkfs.ext4", "-q", w.node(nodeA, disk))
				}
				from, to := nodeA, nodeB
				for range 10 {
					w.countUntilGone(kind, from, disk, func() {
						w.must(w.Unplug(from, disk.ID))
						w.must(w.Plug(to, disk))
					}, to)
					from, to = to, from
				}
			})
		}
	}
}

// countUntilGone writes numbers to the disk until takeAway has moved the disk to the next guest, and compares there.
func (w *world) countUntilGone(kind, from string, disk simrack.GuestDisk, takeAway func(), to string) {
	t := w.t
	t.Helper()
	place := func(instanceID string) (path string, done func()) {
		path, done = w.node(instanceID, disk), func() {}
		if kind == "file" {
			dir, err := os.MkdirTemp(t.TempDir(), "")
			must(t, err)
			must(t, unix.Mount(path, dir, "ext4", 0, ""))
			path, done = filepath.Join(dir, "count"), func() { unmount(t, dir) }
		}
		return path, done
	}
	path, done := place(from)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	must(t, err)
	var acknowledged atomic.Uint64
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		block := make([]byte, 4096)
		for n := uint64(1); ; n++ {
			// The first and the last block must agree. A difference shows a copy that was made during a write.
			binary.LittleEndian.PutUint64(block, n)
			for _, at := range []int64{0, 2 * mib} {
				if _, err := f.WriteAt(block, at); err != nil {
					return
				}
				if err := unix.Fdatasync(int(f.Fd())); err != nil {
					return
				}
			}
			// A flush that ends after the cut acknowledges nothing: package guest's comment says why.
			if end, err := f.Seek(0, io.SeekEnd); err != nil || end == 0 {
				return
			}
			acknowledged.Store(n)
		}
	}()
	start := acknowledged.Load()
	await.Eventually(t, "the writer writes", func() bool { return acknowledged.Load() > start+3 })
	takeAway()
	<-stopped
	must(t, f.Close())
	done()

	path, done = place(to)
	defer done()
	next, err := os.Open(path)
	must(t, err)
	defer next.Close()
	for _, at := range []int64{0, 2 * mib} {
		got := make([]byte, 8)
		_, err := next.ReadAt(got, at)
		must(t, err)
		if n := binary.LittleEndian.Uint64(got); n < acknowledged.Load() {
			t.Errorf("at %d: the next guest reads %d, but %d was acknowledged", at, n, acknowledged.Load())
		}
	}
	// The next round starts from zero.
	zero, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	for _, at := range []int64{0, 2 * mib} {
		_, err = zero.WriteAt(make([]byte, 8), at)
		must(t, err)
	}
	must(t, zero.Sync())
	must(t, zero.Close())
}

// TestForeignLoop binds a store to a loop device from outside: powering on with the disk fails.
func TestForeignLoop(t *testing.T) {
	w := newWorld(t)
	disk := w.data(1, "volume", 8)
	w.must(w.CreateInstance(nodeA, "node-a"))
	foreign, err := w.bind(w.store(disk.ID), 512, false)
	must(t, err)
	if err := w.PowerOn(nodeA, []simrack.GuestDisk{disk}, nil); err == nil {
		t.Error("a store was bound to a second loop device")
	}
	w.oneLoopEach()
	if got := len(loopsBelow(t, w.state)); got != 1 {
		t.Errorf("got %d loop devices, want the foreign one", got)
	}
	file, _, err := w.store(disk.ID).stat()
	must(t, err)
	bound := boundLoop{loop: foreign, diskID: disk.ID, file: file}
	w.must(errors.Join(w.removeCapacity(bound), w.unbind(bound)))
	w.must(w.PowerOn(nodeA, []simrack.GuestDisk{disk}, nil))
}

// TestOtherNamespace mounts the disk in another mount namespace, as a container does.
func TestOtherNamespace(t *testing.T) {
	w := newWorld(t)
	disk := w.data(1, "volume", 64)
	w.on(nodeA, "node-a", disk)
	run(t, "mkfs.ext4", "-q", w.node(nodeA, disk))
	dir := t.TempDir()
	container := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-c", `
		mount "$0" "$1" && echo text >"$1/file" && sync "$1/file" && echo mounted && read go
		cat "$1/file" 2>&1 >/dev/null | grep -o 'Input/output error' || echo alive`, w.node(nodeA, disk), dir)
	in, err := container.StdinPipe()
	must(t, err)
	out, err := container.StdoutPipe()
	must(t, err)
	must(t, container.Start())
	line := make([]byte, 8)
	_, err = io.ReadFull(out, line)
	must(t, err)
	if isMounted(t, dir) {
		t.Fatal("the mount is in this namespace too")
	}

	w.must(w.Unplug(nodeA, disk.ID))
	must(t, in.Close())
	rest, err := io.ReadAll(out)
	must(t, err)
	if string(rest) != "Input/output error\n" {
		t.Errorf("reading in the other namespace: got %q", rest)
	}
	if err := container.Wait(); err != nil {
		t.Error(err)
	}
}

// TestCoveredMount mounts another filesystem over the disk's mount. That filesystem must not be shut down, and the disk
// is cut off nevertheless.
func TestCoveredMount(t *testing.T) {
	w := newWorld(t)
	disk, innocent := w.data(1, "volume", 64), w.data(2, "innocent", 64)
	w.on(nodeA, "node-a", disk, innocent)
	run(t, "mkfs.ext4", "-q", w.node(nodeA, disk))
	run(t, "mkfs.ext4", "-q", w.node(nodeA, innocent))
	dir := mounted(t, w.node(nodeA, disk), "ext4")
	hidden, err := os.Create(filepath.Join(dir, "hidden"))
	must(t, err)
	defer hidden.Close()
	must(t, unix.Mount(w.node(nodeA, innocent), dir, "ext4", 0, ""))

	w.must(w.Unplug(nodeA, disk.ID))
	writeFile(t, filepath.Join(dir, "file"), "text", true)
	_, writeErr := hidden.WriteString("text")
	if err := errors.Join(writeErr, hidden.Sync()); !errors.Is(err, unix.EIO) {
		t.Errorf("writing to the covered filesystem: got %v, want EIO", err)
	}
	must(t, hidden.Close())
	unmount(t, dir)
}
