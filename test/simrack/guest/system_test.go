// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package guest

import (
	"bufio"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// machines is a world of guests with processes, and a folder on the host for their messages.
type machines struct {
	*world
	notes string
	// ended receives for each ended guest whether it reset itself.
	ended chan bool
}

// newMachines creates guests whose first process is a shell script. In the script, $notes is a folder on the host.
func newMachines(t *testing.T, script string) *machines {
	t.Helper()
	needRoot(t)
	m := &machines{notes: t.TempDir(), ended: make(chan bool, 10)}
	m.world = openWorldWith(t, Options{
		Root: filepath.Join(
			t.TempDir(),
			"guests",
		),
		StateDir: t.TempDir(),
		Boot:     m.script(t, script),
		HaltTime: 100 * time.Millisecond,
	})
	return m
}

// script writes the boot program. In it, "say" sends a message to the test.
func (m *machines) script(t *testing.T, script string) string {
	path := filepath.Join(t.TempDir(), "boot")
	text := fmt.Sprintf(
		"#!/bin/sh\nset -eu\nnotes=%s\nsay() { echo \"$2\" >\"$notes/.new\"; mv \"$notes/.new\" \"$notes/$1\"; }\n%s\n",
		m.notes,
		script,
	)
	must(t, os.WriteFile(path, []byte(text), 0o755))
	return path
}

// awaitMessage waits for a message of the guest, and returns it once.
func (m *machines) awaitMessage(what string) string {
	m.t.Helper()
	path := filepath.Join(m.notes, what)
	await.Eventually(m.t, "the guest says "+what, func() bool { _, err := os.Stat(path); return err == nil })
	text, err := os.ReadFile(path)
	m.must(err)
	m.must(os.Remove(path))
	return strings.TrimSpace(string(text))
}

// boot powers a guest on.
func (m *machines) boot(instanceID string, disks ...simrack.GuestDisk) {
	m.t.Helper()
	m.must(m.PowerOn(instanceID, disks, func(reset bool) { m.ended <- reset }))
}

// end waits until a guest has ended, and returns whether it reset itself.
func (m *machines) end() bool {
	m.t.Helper()
	select {
	case reset := <-m.ended:
		return reset
	case <-time.After(time.Minute):
		m.t.Fatal("not within a minute: the guest ends")
		return false
	}
}

// volume is a disk of 64 MiB with an ext4 filesystem.
func (m *machines) volume() simrack.GuestDisk {
	m.t.Helper()
	disk := m.data(1, "volume", 64)
	run(m.t, "mkfs.ext4", "-q", m.store(disk.ID).path)
	return disk
}

// content is the content of the files on a disk with a filesystem, mounted outside of any guest.
func (m *machines) content(disk simrack.GuestDisk) map[string]string {
	m.t.Helper()
	dir := m.t.TempDir()
	run(m.t, "mount", "-o", "loop", m.store(disk.ID).path, dir)
	found := contents(m.t, dir)
	unmount(m.t, dir)
	return found
}

// running lists the processes with the text in their command line.
func running(t *testing.T, text string) (found []string) {
	t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	must(t, err)
	for _, path := range lines {
		if line, err := os.ReadFile(path); err == nil && strings.Contains(string(line), text) {
			found = append(found, filepath.Base(filepath.Dir(path)))
		}
	}
	return found
}

// mountVolume has a guest mount the disk in slot 1, and write a flushed and an unflushed file.
const mountVolume = `
mkdir -p "$notes/mnt"
mount "$OXIDE_SIM_GUEST/dev/nvme0n1" "$notes/mnt"
echo safe >"$notes/mnt/flushed"
sync -f "$notes/mnt"
echo lost >"$notes/mnt/unflushed"
`

// onlyFlushed checks that a guest whose power is cut leaves the flushed file of mountVolume, and nothing else. The
// kernel may write a dirty page at any time, for example because a process of the machine calls sync. But that does not
// happen in each of several guests.
func onlyFlushed(t *testing.T, left func() map[string]string) {
	t.Helper()
	const guests = 3
	for i := range guests {
		found := left()
		diff := cmp.Diff(map[string]string{"flushed": "safe\n"}, found)
		if diff == "" {
			return
		}
		if found["flushed"] != "safe\n" || i == guests-1 {
			t.Fatalf("what is on the disk (-want +got):\n%s", diff)
		}
	}
}

// forever keeps the first process alive; it ignores requests to halt.
const forever = "say up \"$$\"\nwhile :; do sleep 1000; done"

// TestGuestIsAMachine checks from inside a guest: processes, environment, boot ID, mounts, console.
func TestGuestIsAMachine(t *testing.T) {
	// A shared mount, like the root of a machine with systemd.
	shared := t.TempDir()
	must(t, unix.Mount("tmpfs", shared, "tmpfs", 0, ""))
	defer func() { must(t, unix.Unmount(shared, unix.MNT_DETACH)) }()
	must(t, unix.Mount("", shared, "", unix.MS_SHARED, ""))
	w := newMachines(t, `
shared=`+shared+`
say me "$$ $(cut -d ' ' -f 1 /proc/self/stat | wc -l) $(ls -d /proc/[0-9]* | wc -l)"
say where "$OXIDE_SIM_GUEST $OXIDE_SIM_INSTANCE $OXIDE_SIM_INSTANCE_ID $(cat "$OXIDE_SIM_GUEST/metadata.env" | head -n 1)"
say boot "$(cat /proc/sys/kernel/random/boot_id) $(cat "$OXIDE_SIM_GUEST/boot_id")"
say input "$(wc -c)"
mkdir "$shared/inside"
mount -t tmpfs tmpfs "$shared/inside"
mkdir "$shared/inside/nested"
mount -t tmpfs tmpfs "$shared/inside/nested"
say mounts "$(grep -c "$shared/inside" /proc/self/mountinfo) $(grep "$shared/inside/nested" /proc/self/mountinfo | cut -d ' ' -f 7 | cut -d : -f 1)"
while ! grep -q "$shared/late" /proc/self/mountinfo; do sleep 0.01; done
say late ""
echo on the console
`+forever)
	w.must(w.CreateInstance(nodeA, "node-a"))
	w.boot(nodeA)
	if got := strings.Fields(w.awaitMessage("me")); got[0] != "1" || got[1] != "1" || len(got[2]) > 1 {
		t.Errorf("ID of the first process, and number of processes: %v", got)
	}
	if want := fmt.Sprintf(
		"%s node-a %s OXIDE_INSTANCE_ID=%s",
		w.Dir(nodeA),
		nodeA,
		nodeA,
	); w.awaitMessage(
		"where",
	) != want {
		t.Errorf("the guest does not know %q", want)
	}
	boot := strings.Fields(w.awaitMessage("boot"))
	if host, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err != nil || len(boot) != 2 || boot[0] != boot[1] ||
		boot[0] == strings.TrimSpace(string(host)) {
		t.Errorf("boot IDs of the guest %v and of the host %s, %v", boot, host, err)
	}
	if got := w.awaitMessage("input"); got != "0" {
		t.Errorf("standard input has %s bytes", got)
	}
	if got := w.awaitMessage("mounts"); got != "2 shared" {
		t.Errorf("the mount in the guest: %s", got)
	}
	if isMounted(t, filepath.Join(shared, "inside")) {
		t.Error("a mount of the guest is visible on the host")
	}
	// A later mount of the host appears in the guest.
	late := filepath.Join(shared, "late")
	must(t, os.Mkdir(late, 0o755))
	must(t, unix.Mount("tmpfs", late, "tmpfs", 0, ""))
	w.awaitMessage("late")
	w.awaitMessage("up")
	console, err := os.ReadFile(filepath.Join(w.Dir(nodeA), "console"))
	must(t, err)
	if string(console) != "on the console\n" {
		t.Errorf("the console shows %q", console)
	}
	w.must(w.PowerOff(nodeA, false))
	if w.end() {
		t.Error("a power cut is reported as a reset")
	}
	w.boot(nodeA)
	if next := strings.Fields(w.awaitMessage("boot")); next[0] == boot[0] {
		t.Error("the next boot has the same boot ID")
	}
}

// TestPowerCutEndsEveryProcess cuts the power of a guest with processes of several kinds. No process survives, nor any
// mount that they held. Data in memory does not reach the disk.
func TestPowerCutEndsEveryProcess(t *testing.T) {
	mark := fmt.Sprintf("100%d", os.Getpid())
	for _, orderly := range []bool{false, true} {
		t.Run(fmt.Sprintf("orderly %t", orderly), func(t *testing.T) {
			onlyFlushed(t, func() map[string]string {
				w := newMachines(t, mountVolume+`
trap '' TERM INT HUP
( setsid sleep `+mark+` & )
( cd "$notes/mnt"; setsid sleep `+mark+` & )
setsid unshare --pid --fork --mount-proc --mount sh -c 'trap "" TERM; sleep `+mark+`; :' &
exec 9>"$notes/mnt/open" # held
( exec 8<>"$OXIDE_SIM_GUEST/dev/nvme1n1"; echo lost >&8; exec sleep `+mark+` ) &
while [ "$(pgrep -cf '^sleep `+mark+`')" -lt 4 ]; do sleep 0.01; done
`+forever)
				volume, raw := w.volume(), w.data(2, "raw", 8)
				w.must(w.CreateInstance(nodeA, "node-a"))
				w.boot(nodeA, volume, raw)
				w.awaitMessage("up")
				if got := running(t, mark); len(got) < 4 {
					t.Fatalf("%d processes run", len(got))
				}
				w.must(w.PowerOff(nodeA, orderly))
				// At once, not eventually: the rack shows the instance as stopped next.
				if got := running(t, mark); len(got) > 0 {
					t.Errorf("processes %v outlive the guest", got)
				}
				if got := loopsBelow(t, w.state); len(got) > 0 {
					t.Errorf("%v outlive the guest", got)
				}
				w.end()
				found := w.content(volume)
				if start := w.start(raw); start != "\x00\x00\x00\x00" {
					found["raw disk"] = start
				}
				return found
			})
		})
	}
}

// start is what a disk without a filesystem begins with.
func (m *machines) start(disk simrack.GuestDisk) string {
	m.t.Helper()
	file, err := os.Open(m.store(disk.ID).path)
	must(m.t, err)
	defer file.Close()
	start := make([]byte, len("lost"))
	_, err = file.ReadAt(start, 0)
	must(m.t, err)
	return string(start)
}

// TestGuestPowersItselfOff ends the first process.
func TestGuestPowersItselfOff(t *testing.T) {
	reboot := fmt.Sprintf("exec env %s=%d %s", resetEnv, unix.LINUX_REBOOT_CMD_RESTART, os.Args[0])
	for _, test := range []struct {
		name, script     string
		reset, unmounted bool
	}{
		{"with its disk unmounted", `umount "$notes/mnt"; exit 0`, false, true},
		{"with its disk mounted", `exit 0`, false, false},
		{"with its disk mounted below another root", `
mkdir "$notes/root"
mount --rbind / "$notes/root"
cd "$notes/root"
mount --make-rprivate /
pivot_root . "$notes/root/$notes/root" 2>&1 || pivot_root . mnt
umount -l /mnt 2>/dev/null || umount -l "$notes/root"
[ -s "$notes/mnt/flushed" ] && say below "$(cat "$notes/mnt/flushed")"
exit 0`, false, false},
		{"by failing", `exit 3`, false, false},
		{"by a reset", reboot, true, false},
		{"by the system call reboot", strings.ReplaceAll(reboot, strconv.Itoa(unix.LINUX_REBOOT_CMD_RESTART), strconv.Itoa(unix.LINUX_REBOOT_CMD_POWER_OFF)), false, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			left := func() map[string]string {
				w := newMachines(t, mountVolume+test.script)
				volume := w.volume()
				w.must(w.CreateInstance(nodeA, "node-a"))
				w.boot(nodeA, volume)
				if reset := w.end(); reset != test.reset {
					t.Errorf("reported as a reset: %t", reset)
				}
				if strings.Contains(test.name, "another root") && w.awaitMessage("below") != "safe" {
					t.Error("the guest's new root does not have the disk")
				}
				// The guest is off. The disks stay unchanged until PowerOff is called.
				if got := loopsBelow(t, w.state); len(got) != 1 {
					t.Errorf("%v are there", got)
				}
				w.must(w.PowerOff(nodeA, false))
				if got := loopsBelow(t, w.state); len(got) > 0 {
					t.Errorf("%v outlive the guest", got)
				}
				return w.content(volume)
			}
			if !test.unmounted {
				onlyFlushed(t, left)
				return
			}
			want := map[string]string{"flushed": "safe\n", "unflushed": "lost\n"}
			if diff := cmp.Diff(want, left()); diff != "" {
				t.Errorf("what is on the disk (-want +got):\n%s", diff)
			}
		})
	}
}

// TestMountLeftByAGuestIsShutDown lets a guest end with a disk mounted. After PowerOff the filesystem answers EIO, even
// for cached data. So the kernel, which unmounts it later, cannot write to the disk.
func TestMountLeftByAGuestIsShutDown(t *testing.T) {
	w := newMachines(t, mountVolume+`cat "$notes/mnt/flushed"; exit 0`)
	volume := w.volume()
	w.must(w.CreateInstance(nodeA, "node-a"))
	w.boot(nodeA, volume)
	w.end()
	m := w.find(nodeA)
	mounts, release, err := m.system.namespaceMounts()
	w.must(err)
	i := slices.IndexFunc(mounts, func(m mount) bool { return m.Mountpoint == filepath.Join(w.notes, "mnt") })
	if i < 0 {
		t.Fatalf("no mount is left of %d", len(mounts))
	}
	flushed := filepath.Join(mounts[i].path(), "flushed")
	if text, err := os.ReadFile(flushed); err != nil || string(text) != "safe\n" {
		t.Errorf("before the power-off: %q, %v", text, err)
	}
	w.must(w.cut(m, m.devices[volume.ID]))
	if _, err := os.ReadFile(flushed); !errors.Is(err, unix.EIO) {
		t.Errorf("after the power-off: got %v, want EIO", err)
	}
	w.must(release())
	w.must(w.PowerOff(nodeA, false))
}

// resetEnv makes the test binary call reboot(2) with the value of the variable.
const resetEnv = "GUEST_TEST_REBOOT"

func TestMain(m *testing.M) {
	if text := os.Getenv(resetEnv); text != "" {
		command, err := strconv.Atoi(text)
		if err == nil && os.Getpid() == 1 { // the first process of a guest, not of the host
			err = unix.Reboot(command)
		}
		fmt.Fprintln(os.Stderr, "not reset:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// TestHalt asks guests to power themselves off.
func TestHalt(t *testing.T) {
	t.Run("a guest that halts", func(t *testing.T) {
		w := newMachines(t, mountVolume+`
trap 'umount "$notes/mnt"; exit 0' 38
say up ""
while :; do sleep 1000 & wait || :; done`)
		volume := w.volume()
		w.must(w.CreateInstance(nodeA, "node-a"))
		w.boot(nodeA, volume)
		w.awaitMessage("up")
		if asked, err := w.Halt(nodeA); !asked || err != nil {
			t.Fatalf("asked %t, %v", asked, err)
		}
		if w.end() {
			t.Error("a halt is reported as a reset")
		}
		w.must(w.PowerOff(nodeA, false))
		if diff := cmp.Diff(map[string]string{"flushed": "safe\n", "unflushed": "lost\n"}, w.content(volume)); diff != "" {
			t.Errorf("what is on the disk (-want +got):\n%s", diff)
		}
	})
	t.Run("a guest that ignores the request", func(t *testing.T) {
		w := newMachines(t, `trap 'say asked ""' 38; say up ""; while :; do sleep 1000 & wait || :; done`)
		w.must(w.CreateInstance(nodeA, "node-a"))
		w.boot(nodeA)
		w.awaitMessage("up")
		asked, err := w.Halt(nodeA)
		if !asked || err != nil {
			t.Fatalf("asked %t, %v", asked, err)
		}
		w.awaitMessage("asked")
		select {
		case <-w.ended:
			t.Error("the guest has ended")
		default:
		}
		w.must(w.PowerOff(nodeA, true))
		w.end()
	})
	t.Run("a guest that has already ended", func(t *testing.T) {
		w := newMachines(t, "exit 0")
		w.must(w.CreateInstance(nodeA, "node-a"))
		w.boot(nodeA)
		w.end()
		if asked, err := w.Halt(nodeA); !asked || err != nil {
			t.Errorf("asked %t, %v", asked, err)
		}
	})
	t.Run("a guest without processes", func(t *testing.T) {
		w := newWorld(t)
		w.on(nodeA, "node-a")
		if asked, err := w.Halt(nodeA); asked || err != nil {
			t.Errorf("asked %t, %v", asked, err)
		}
	})
}

// TestHotplugIntoAGuest plugs a disk into a running guest, and unplugs it while the guest has it mounted.
func TestHotplugIntoAGuest(t *testing.T) {
	onlyFlushed(t, func() map[string]string {
		w := newMachines(t, `
say up ""
while [ ! -b "$OXIDE_SIM_GUEST/dev/nvme0n1" ]; do sleep 0.01; done
`+mountVolume+`
say mounted ""
while cat "$notes/mnt/flushed" >/dev/null 2>&1; do sleep 0.01; done
say gone ""
`+forever)
		volume := w.volume()
		w.must(w.CreateInstance(nodeA, "node-a"))
		w.boot(nodeA)
		w.awaitMessage("up")
		w.must(w.Plug(nodeA, volume))
		w.awaitMessage("mounted")
		w.must(w.Unplug(nodeA, volume.ID))
		w.awaitMessage("gone")
		w.must(w.PowerOff(nodeA, false))
		await.Eventually(t, "the disk is free", func() bool { return len(loopsBelow(t, w.state)) == 0 })
		return w.content(volume)
	})
}

// TestBootReleasesDisksOfOtherGuests boots a guest while the host has a disk of another guest mounted. The new mount
// namespace must not hold that disk.
func TestBootReleasesDisksOfOtherGuests(t *testing.T) {
	w, other := newMachines(t, `say others "$(grep -c "$OTHER" /proc/self/mountinfo)"; `+forever), newWorld(t)
	disk := other.data(1, "volume", 64)
	other.on(nodeB, "node-b", disk)
	run(t, "mkfs.ext4", "-q", other.node(nodeB, disk))
	dir := mounted(t, other.node(nodeB, disk), "ext4")
	t.Setenv("OTHER", dir)
	w.must(w.CreateInstance(nodeA, "node-a"))
	w.boot(nodeA)
	if got := w.awaitMessage("others"); got != "0" {
		t.Errorf("the guest has %s disks of another guest mounted", got)
	}
	w.awaitMessage("up")
	unmount(t, dir)
	other.must(other.Unplug(nodeB, disk.ID))
	if left := loopsBelow(t, other.state); len(left) > 0 {
		t.Errorf("%v are held", left)
	}
}

// TestNewRejectsABootProgram gives New programs that cannot be executed.
func TestNewRejectsABootProgram(t *testing.T) {
	needRoot(t)
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, nil, 0o644))
	for _, path := range []string{file, t.TempDir(), file + "-missing"} {
		g, err := New(Options{Root: t.TempDir(), StateDir: t.TempDir(), Boot: path})
		if err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: got %v", path, err)
		}
		if err == nil {
			must(t, g.Close())
		}
	}
}

// TestGuestsDieWithAKilledSimulator kills a simulator. The next simulator finds the disks free.
func TestGuestsDieWithAKilledSimulator(t *testing.T) {
	needRoot(t)
	if place := os.Getenv(killedEnv); place != "" {
		parts := strings.Split(place, ":")
		g, err := New(Options{Root: parts[0], StateDir: parts[1], Boot: parts[2], Log: slog.New(slog.DiscardHandler)})
		must(t, err)
		must(t, g.CreateInstance(nodeA, "node-a"))
		disk := simrack.GuestDisk{ID: "volume", Name: "volume", SizeBytes: 64 * mib, BlockSize: 512}
		must(t, g.PowerOn(nodeA, []simrack.GuestDisk{disk}, func(bool) {}))
		fmt.Println("on")
		select {}
	}
	mark := fmt.Sprintf("100%d", os.Getpid())
	root, state := filepath.Join(t.TempDir(), "guests"), t.TempDir()
	m := &machines{world: &world{t: t}, notes: t.TempDir()}
	boot := m.script(t, mountVolume+"setsid sleep "+mark+" &\n"+forever)
	must(t, store{filepath.Join(state, "volume"+storeSuffix)}.create(64*mib))
	run(t, "mkfs.ext4", "-q", filepath.Join(state, "volume"+storeSuffix))

	child := exec.Command(os.Args[0], "-test.run", "^TestGuestsDieWithAKilledSimulator$")
	child.Env = append(os.Environ(), killedEnv+"="+strings.Join([]string{root, state, boot}, ":"))
	out, err := child.StdoutPipe()
	must(t, err)
	must(t, child.Start())
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "on\n" {
		t.Fatalf("the simulator to be killed: %q, %v", line, err)
	}
	m.awaitMessage("up")
	await.Eventually(t, "the guest runs", func() bool { return len(running(t, mark)) > 0 })
	must(t, child.Process.Kill())
	if err := child.Wait(); err == nil {
		t.Fatal("the simulator exited with code 0")
	}
	await.Eventually(
		t,
		"the guest is dead",
		func() bool { return len(running(t, mark)) == 0 && len(running(t, boot)) == 0 },
	)

	w := openWorld(t, root, state)
	if entries, err := os.ReadDir(root); err != nil || len(entries) > 0 {
		t.Errorf("the killed simulator's guests still exist: %v, %v", entries, err)
	}
	await.Eventually(t, "the disks are free", func() bool { return len(loopsBelow(t, state)) == 0 })
	m.world = w
	if got := m.content(simrack.GuestDisk{ID: "volume"}); got["flushed"] != "safe\n" {
		t.Errorf("on the disk: %v", got)
	}
}

// TestNoThreadStaysInAGuest reads the mounts of a guest's namespace, and then checks all threads. A thread that stayed
// in the namespace would run other goroutines there.
func TestNoThreadStaysInAGuest(t *testing.T) {
	w := newMachines(t, forever)
	w.must(w.CreateInstance(nodeA, "node-a"))
	w.boot(nodeA)
	w.awaitMessage("up")
	own, err := os.Readlink("/proc/self/ns/mnt")
	must(t, err)
	_, release, err := w.find(nodeA).system.namespaceMounts()
	must(t, err)
	must(t, release())
	threads, err := filepath.Glob("/proc/self/task/*/ns/mnt")
	must(t, err)
	for _, thread := range threads {
		if other, err := os.Readlink(thread); err == nil && other != own {
			await.Eventually(t, regexp.MustCompile(`task/\d+`).FindString(thread)+" ends", func() bool {
				_, err := os.Readlink(thread)
				return err != nil
			})
		}
	}
}
