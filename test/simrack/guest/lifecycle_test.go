// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package guest

import (
	"bufio"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// TestNewRejects creates guests under conditions in which New must fail.
func TestNewRejects(t *testing.T) {
	needRoot(t)
	t.Run("nodev", func(t *testing.T) {
		dir := t.TempDir()
		must(t, unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NODEV, ""))
		defer func() { unmount(t, dir) }()
		_, err := New(Options{Root: filepath.Join(dir, "guests"), StateDir: t.TempDir()})
		if err == nil || !strings.Contains(err.Error(), "is on a mount with the option nodev") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("state directory in use", func(t *testing.T) {
		w := newWorld(t)
		_, err := New(Options{Root: t.TempDir(), StateDir: w.state})
		if err == nil || !strings.Contains(err.Error(), "another simulator uses the state directory") {
			t.Errorf("got %v", err)
		}
	})
}

// TestNewWithoutRoot creates guests as an ordinary user. It changes the user of one thread.
func TestNewWithoutRoot(t *testing.T) {
	root, state := t.TempDir(), t.TempDir()
	if os.Geteuid() == 0 {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		setEUID(t, 65534)
		defer setEUID(t, 0)
	}
	_, err := New(Options{Root: root, StateDir: state})
	if err == nil || !strings.Contains(err.Error(), "guests need root") {
		t.Errorf("got %v", err)
	}
}

// setEUID changes the effective user of this thread only; package syscall would change it for all threads.
func setEUID(t *testing.T, uid int) {
	t.Helper()
	const keep = ^uintptr(0)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(uid), keep); errno != 0 {
		t.Fatal(errno)
	}
}

// TestFolders creates guests in a root that already exists and contains another file.
func TestFolders(t *testing.T) {
	needRoot(t)
	root := t.TempDir()
	must(t, os.Mkdir(filepath.Join(root, "node-b"), 0o755))
	g, err := New(Options{Root: root, StateDir: t.TempDir()})
	must(t, err)
	must(t, g.CreateInstance(nodeA, "node-a"))
	must(t, g.CreateInstance(nodeB, "node-b"))
	if err := g.CreateInstance("33333333-3333-4333-8333-333333333333", "node-a"); err == nil {
		t.Error("two guests got the same folder")
	}
	if err := g.CreateInstance("33333333-3333-4333-8333-333333333333", "../node-c"); err == nil {
		t.Error("a guest got a folder outside the root")
	}
	if err := g.DeleteInstance("33333333-3333-4333-8333-333333333333"); err != nil {
		t.Errorf("delete a guest that does not exist: %v", err)
	}
	must(t, g.CreateInstance("33333333-3333-4333-8333-333333333333", "node-c"))
	must(t, os.WriteFile(filepath.Join(root, "node-c/csi.sock"), nil, 0o600))
	must(t, g.Close())
	entries, err := filepath.Glob(filepath.Join(root, "*", "*"))
	must(t, err)
	guests, err := filepath.Glob(filepath.Join(root, "*"))
	must(t, err)
	want := []string{filepath.Join(root, "node-c/csi.sock"), filepath.Join(root, "node-b"), filepath.Join(root, "node-c")}
	if diff := cmp.Diff(want, append(entries, guests...)); diff != "" {
		t.Errorf("what remains of the root (-want +got):\n%s", diff)
	}
}

// TestLeftovers checks the counts while guests, loop devices and mounts come and go.
func TestLeftovers(t *testing.T) {
	w := newWorld(t)
	boot, disk := w.data(0, "node-a-boot", 64), w.data(1, "volume", 64)
	check := func(when string, want simrack.GuestLeftovers) {
		t.Helper()
		got, err := w.Leftovers(map[string]bool{boot.ID: true})
		must(t, err)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	w.on(nodeA, "node-a", boot)
	check("with a disk", simrack.GuestLeftovers{Files: 1})
	w.must(w.Plug(nodeA, disk))
	check("attached", simrack.GuestLeftovers{Files: 1, Loops: 1})
	run(t, "mkfs.ext4", "-q", w.node(nodeA, disk))
	dir := mounted(t, w.node(nodeA, disk), "ext4")
	check("mounted", simrack.GuestLeftovers{Files: 1, Loops: 1, Mounts: 1})
	inside := filepath.Join(w.root, "node-a/publish")
	must(t, os.Mkdir(inside, 0o755))
	must(t, unix.Mount("tmpfs", inside, "tmpfs", 0, ""))
	check("and another mount inside", simrack.GuestLeftovers{Files: 1, Loops: 1, Mounts: 2})
	unmount(t, inside)
	must(t, os.Remove(inside))
	w.must(w.Unplug(nodeA, disk.ID))
	check("unplugged, still mounted", simrack.GuestLeftovers{Files: 1, Loops: 1, Mounts: 1})
	w.must(w.DeleteDisk(disk.ID))
	check("deleted, still mounted", simrack.GuestLeftovers{Loops: 1, Mounts: 1})
	w.must(w.PowerOff(nodeA, true))
	w.must(w.DeleteInstance(nodeA))
	check("without a guest", simrack.GuestLeftovers{Loops: 1, Mounts: 1})
	unmount(t, dir)
	// A mount namespace that another process created meanwhile has a copy of the mount, until that process ends.
	await.Eventually(t, "nothing is left", func() bool {
		got, err := w.Leftovers(map[string]bool{boot.ID: true})
		must(t, err)
		return got == simrack.GuestLeftovers{}
	})
}

// TestCloseNamesTheHolder closes the guests while a disk is in use. The disk is cut off, and the error of Close names
// the mount.
func TestCloseNamesTheHolder(t *testing.T) {
	needRoot(t)
	state := t.TempDir()
	w := &world{t: t, root: t.TempDir(), state: state}
	var err error
	w.Guests, err = New(Options{Root: w.root, StateDir: state, Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	disk := w.data(1, "volume", 64)
	w.on(nodeA, "node-a", disk)
	run(t, "mkfs.ext4", "-q", w.node(nodeA, disk))
	dir := mounted(t, w.node(nodeA, disk), "ext4")
	busy, err := os.Create(filepath.Join(dir, "busy"))
	must(t, err)
	defer busy.Close()

	err = w.Close()
	// A container that is started meanwhile on this machine has a copy of the mount, which the error then names too.
	want := fmt.Sprintf("is still held although disk %s has no guest: it is mounted at %s", disk.ID, dir)
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want it to contain %q", err, want)
	}
	must(t, busy.Close())
	unmount(t, dir)
	noLoops(t, state)
}

// TestParallel powers many guests on and off at the same time, while another goroutine reads the leftovers.
func TestParallel(t *testing.T) {
	w := newWorld(t)
	var all sync.WaitGroup
	for n := range 6 {
		instanceID := fmt.Sprintf("%08d-1111-4111-8111-111111111111", n)
		disks := []simrack.GuestDisk{w.data(0, fmt.Sprint("boot-", n), 8), w.data(1, fmt.Sprint("volume-", n), 8)}
		disks[0].Boot = true
		must(t, w.CreateInstance(instanceID, fmt.Sprint("node-", n)))
		all.Go(func() {
			for range 3 {
				if err := w.PowerOn(instanceID, disks, nil); err != nil {
					t.Error(err)
					return
				}
				if _, err := w.Leftovers(nil); err != nil {
					t.Error(err)
				}
				for slot, want := range []string{"nvme0n1", "nvme1n1"} {
					if got := w.Device(instanceID, disks[slot].ID); got != want {
						t.Errorf("device in slot %d: got %q, want %q", slot, got, want)
					}
				}
				if err := w.PowerOff(instanceID, n%2 == 0); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	noLoops(t, w.state)
}

// killedEnv makes the test binary a simulator that waits to be killed: "<root>:<state>".
const killedEnv = "GUEST_TEST_KILLED"

// TestKilled kills a simulator with guests and a mounted disk. The next simulator with the same state directory removes
// the guests and continues with the disks.
func TestKilled(t *testing.T) {
	needRoot(t)
	if place := os.Getenv(killedEnv); place != "" {
		waitToBeKilled(t, place)
		return
	}
	root, state, mountPoint := filepath.Join(t.TempDir(), "guests"), t.TempDir(), t.TempDir()
	child := exec.Command(os.Args[0], "-test.run", "^TestKilled$")
	child.Env = append(os.Environ(), killedEnv+"="+strings.Join([]string{root, state, mountPoint}, ":"))
	out, err := child.StdoutPipe()
	must(t, err)
	must(t, child.Start())
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "mounted\n" {
		t.Fatalf("the simulator to be killed: %q, %v", line, err)
	}
	must(t, child.Process.Kill())
	if err := child.Wait(); err == nil {
		t.Fatal("the simulator exited with code 0")
	}
	if got := len(loopsBelow(t, state)); got != 2 {
		t.Fatalf("the killed simulator left %d loop devices, want 2", got)
	}
	must(t, os.WriteFile(filepath.Join(state, "stale"+storeSuffix+freshSuffix), nil, 0o600))

	w := openWorld(t, root, state)
	if entries, err := os.ReadDir(root); err != nil || len(entries) > 0 {
		t.Errorf("the killed simulator's guests still exist: %v, %v", entries, err)
	}
	await.Eventually(t, "only the mounted loop device is left", func() bool { return len(loopsBelow(t, state)) == 1 })
	if _, err := os.ReadFile(filepath.Join(mountPoint, "flushed")); err == nil {
		t.Error("the killed simulator's mount still works")
	}
	disk := simrack.GuestDisk{ID: "volume", Name: "volume", Slot: 1, SizeBytes: 64 * mib, BlockSize: 512}
	w.on(nodeB, "node-b", disk)
	w.oneLoopEach()
	alive := mounted(t, w.node(nodeB, disk), "ext4")
	if diff := cmp.Diff(map[string]string{"flushed": "safe"}, contents(t, alive)); diff != "" {
		t.Errorf("content of the disk (-want +got):\n%s", diff)
	}
	unmount(t, mountPoint)
	unmount(t, alive)
	if entries, err := filepath.Glob(filepath.Join(state, "*"+freshSuffix)); err != nil || len(entries) > 0 {
		t.Errorf("copies left: %v, %v", entries, err)
	}
}

func waitToBeKilled(t *testing.T, place string) {
	parts := strings.Split(place, ":")
	g, err := New(Options{Root: parts[0], StateDir: parts[1]})
	must(t, err)
	boot := simrack.GuestDisk{ID: "boot", Name: "boot", SizeBytes: 8 * mib, BlockSize: 512, Boot: true}
	disk := simrack.GuestDisk{ID: "volume", Name: "volume", Slot: 1, SizeBytes: 64 * mib, BlockSize: 512}
	must(t, g.CreateDisk(boot.ID, boot.SizeBytes))
	must(t, g.CreateDisk(disk.ID, disk.SizeBytes))
	must(t, g.CreateInstance(nodeA, "node-a"))
	must(t, g.PowerOn(nodeA, []simrack.GuestDisk{boot, disk}, nil))
	node := filepath.Join(g.Dir(nodeA), "dev", g.Device(nodeA, disk.ID))
	run(t, "mkfs.ext4", "-q", node)
	must(t, unix.Mount(node, parts[2], "ext4", 0, ""))
	writeFile(t, filepath.Join(parts[2], "flushed"), "safe", true)
	writeFile(t, filepath.Join(parts[2], "unflushed"), "lost", false)
	fmt.Println("mounted")
	select {}
}
