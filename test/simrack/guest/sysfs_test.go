// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build linux

package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

func TestPCIAddress(t *testing.T) {
	for slot, want := range map[int]string{
		0: "0000:00:10.0", 1: "0000:00:11.0", 7: "0000:00:17.0", 8: "0000:00:1a.0", 11: "0000:00:1d.0",
	} {
		if got := pciAddress(slot); got != want {
			t.Errorf("slot %d: got %s, want %s", slot, got, want)
		}
	}
}

// snapshot describes every entry below dir except folders: a link as "-> target", a device as "block major:minor mode",
// a file as its mode and content.
func snapshot(t *testing.T, dir string) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		mode := st.Mode & 0o7777
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFLNK:
			target, err := os.Readlink(path)
			found[name] = "-> " + target
			if _, statErr := os.Stat(path); statErr != nil && !strings.HasPrefix(target, "/sys/fs/") {
				return errors.Join(err, statErr) // another dangling link than that of an unmounted filesystem
			}
			return err
		case unix.S_IFBLK:
			found[name] = fmt.Sprintf("block %d:%d %04o", unix.Major(st.Rdev), unix.Minor(st.Rdev), mode)
		case unix.S_IFREG:
			text, err := os.ReadFile(path)
			found[name] = fmt.Sprintf("%04o %q", mode, text)
			return err
		default:
			found[name] = fmt.Sprintf("%o", st.Mode)
		}
		return nil
	})
	must(t, err)
	return found
}

// bootedGuest is the expected folder of TestBoot's guest, with the numbers of its block devices and the host's names
// for them.
func bootedGuest(number, loop map[string]string) map[string]string {
	want := map[string]string{
		"metadata.env": `0644 "OXIDE_INSTANCE_ID=11111111-1111-4111-8111-111111111111\nOXIDE_RACK=default\n"`,
		"dev/nvme0n1":  "block " + number["nvme0n1"] + " 0660",
		"dev/nvme1n1":  "block " + number["nvme1n1"] + " 0660",

		"sys/class/dmi/id/sys_vendor":     `0444 "Oxide\n"`,
		"sys/class/dmi/id/product_name":   `0444 "OxVM\n"`,
		"sys/class/dmi/id/product_serial": `0400 "11111111-1111-4111-8111-111111111111\n"`,
		"sys/class/dmi/id/product_uuid":   `0400 "11111111-1111-4111-8111-111111111111\n"`,
		"sys/class/dmi/id/bios_vendor":    `0444 "Oxide\n"`,

		"sys/fs/ext4/nvme0n1":                   "-> /sys/fs/ext4/" + loop["nvme0n1"],
		"sys/fs/ext4/nvme1n1":                   "-> /sys/fs/ext4/" + loop["nvme1n1"],
		"sys/block/nvme0n1":                     "-> ../devices/pci0000:00/0000:00:10.0/nvme/nvme0/nvme0n1",
		"sys/block/nvme1n1":                     "-> ../devices/pci0000:00/0000:00:11.0/nvme/nvme1/nvme1n1",
		"sys/class/nvme/nvme0":                  "-> ../../devices/pci0000:00/0000:00:10.0/nvme/nvme0",
		"sys/class/nvme/nvme1":                  "-> ../../devices/pci0000:00/0000:00:11.0/nvme/nvme1",
		"sys/class/nvme-subsystem/nvme-subsys0": "-> ../../devices/virtual/nvme-subsystem/nvme-subsys0",
		"sys/class/nvme-subsystem/nvme-subsys1": "-> ../../devices/virtual/nvme-subsystem/nvme-subsys1",
		"sys/dev/block/" + number["nvme0n1"]:    "-> ../../devices/pci0000:00/0000:00:10.0/nvme/nvme0/nvme0n1",
		"sys/dev/block/" + number["nvme1n1"]:    "-> ../../devices/pci0000:00/0000:00:11.0/nvme/nvme1/nvme1n1",
		"sys/bus/pci/devices/0000:00:10.0":      "-> ../../../devices/pci0000:00/0000:00:10.0",
		"sys/bus/pci/devices/0000:00:11.0":      "-> ../../../devices/pci0000:00/0000:00:11.0",

		"sys/devices/virtual/nvme-subsystem/nvme-subsys0/subsysnqn": `0444 "nqn.2014.08.org.nvmexpress:01de01denode-a-boot\n"`,
		"sys/devices/virtual/nvme-subsystem/nvme-subsys1/subsysnqn": `0444 "nqn.2014.08.org.nvmexpress:01de01deabcdefghij-klmnopqrs\n"`,
	}
	type facts struct{ controller, serial, nqn, wwid, sectors, blockSize string }
	for function, f := range map[string]facts{
		"0000:00:10.0": {"nvme0", "node-a-boot", "node-a-boot", "6e6f64652d612d626f6f74", "131072", "512"},
		"0000:00:11.0": {"nvme1", "abcdefghij-klmnopqrs", "abcdefghij-klmnopqrs",
			"6162636465666768696a2d6b6c6d6e6f70717273", "131072", "4096"},
	} {
		pci := "sys/devices/pci0000:00/" + function + "/"
		controller := pci + "nvme/" + f.controller + "/"
		block := controller + f.controller + "n1/"
		for path, text := range map[string]string{
			pci + "class":                      "0x010802",
			pci + "vendor":                     "0x01de",
			pci + "device":                     "0x0000",
			controller + "serial":              f.serial,
			controller + "model":               "",
			controller + "firmware_rev":        "",
			controller + "state":               "live",
			controller + "transport":           "pcie",
			controller + "address":             function,
			controller + "cntlid":              "0",
			controller + "subsysnqn":           "nqn.2014.08.org.nvmexpress:01de01de" + f.nqn,
			block + "dev":                      number[f.controller+"n1"],
			block + "size":                     f.sectors,
			block + "ro":                       "0",
			block + "hidden":                   "0",
			block + "nsid":                     "1",
			block + "wwid":                     "nvme.01de-" + f.wwid + "--00000001",
			block + "queue/logical_block_size": f.blockSize,
		} {
			want[path] = fmt.Sprintf("0444 %q", text+"\n")
		}
		want[pci+"driver"] = "-> ../../../bus/pci/drivers/nvme"
		want[block+"device"] = "-> ../../" + f.controller
	}
	return want
}

// TestBoot compares a guest's whole folder with the layout in docs/reference/rack.md, byte for byte.
func TestBoot(t *testing.T) {
	w := newWorld(t)
	boot, volume := w.data(0, "node-a-boot", 64), w.data(1, "abcdefghij-klmnopqrstuvw", 64)
	boot.Boot, volume.BlockSize = true, 4096
	w.on(nodeA, "node-a", volume, boot) // in the order of slots, not of arguments

	// The numbers of loop devices vary, so they are filled in.
	number, loop := map[string]string{}, map[string]string{}
	for name := range map[string]bool{"nvme0n1": true, "nvme1n1": true} {
		var st unix.Stat_t
		must(t, unix.Stat(filepath.Join(w.root, "node-a/dev", name), &st))
		number[name] = fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
		folder, err := filepath.EvalSymlinks("/sys/dev/block/" + number[name])
		must(t, err)
		loop[name] = filepath.Base(folder)
	}
	want := bootedGuest(number, loop)
	if diff := cmp.Diff(want, snapshot(t, filepath.Join(w.root, "node-a"))); diff != "" {
		t.Errorf("guest folder (-want +got):\n%s", diff)
	}

	// The device has the properties that the folder shows.
	run(t, "sh", "-c", `test "$(blockdev --getsize64 --getss "$0" | xargs)" = "67108864 4096"`, w.node(nodeA, volume))
	run(t, "sh", "-c", `blkid -p -o export "$0" | grep -qx PTTYPE=dos`, w.node(nodeA, boot))

	// The statistics of a filesystem are visible in the guest while it is mounted.
	mountpoint := t.TempDir()
	run(t, "mkfs.ext4", "-q", w.node(nodeA, volume))
	run(t, "mount", w.node(nodeA, volume), mountpoint)
	errorCount, err := os.ReadFile(filepath.Join(w.root, "node-a/sys/fs/ext4/nvme1n1/errors_count"))
	unmount(t, mountpoint)
	must(t, err)
	if string(errorCount) != "0\n" {
		t.Errorf("errors_count of a new filesystem: %q", errorCount)
	}

	w.must(w.PowerOff(nodeA, false))
	off := map[string]string{"metadata.env": want["metadata.env"]}
	if diff := cmp.Diff(off, snapshot(t, filepath.Join(w.root, "node-a"))); diff != "" {
		t.Errorf("guest folder without power (-want +got):\n%s", diff)
	}
}

// TestSameSerial boots with two disks that have the same serial and plugs a third one. Linux rejects all but one.
func TestSameSerial(t *testing.T) {
	w := newWorld(t)
	boot := w.data(0, "node-a-boot", 8)
	first, second := w.data(1, "pvc-0123456789abcdef-first", 8), w.data(2, "pvc-0123456789abcdef-second", 8)
	third, other := w.data(3, "pvc-0123456789abcdef-third", 8), w.data(4, "other", 8)
	w.on(nodeA, "node-a", boot, first, second)
	w.must(w.Plug(nodeA, third))
	w.must(w.Plug(nodeA, other))

	for disk, want := range map[simrack.GuestDisk]string{boot: "nvme0n1", first: "nvme1n1", second: "", third: "", other: "nvme2n1"} {
		if got := w.Device(nodeA, disk.ID); got != want {
			t.Errorf("device of %s: got %q, want %q", disk.Name, got, want)
		}
	}
	refused := func() (addresses []string) {
		functions, err := filepath.Glob(filepath.Join(w.root, "node-a/sys/bus/pci/devices/*"))
		must(t, err)
		for _, function := range functions {
			class, err := os.ReadFile(filepath.Join(function, "class"))
			must(t, err)
			if _, err := os.Lstat(filepath.Join(function, "driver")); err != nil && string(class) == "0x010802\n" {
				addresses = append(addresses, filepath.Base(function))
			}
		}
		return addresses
	}
	if diff := cmp.Diff([]string{"0000:00:12.0", "0000:00:13.0"}, refused()); diff != "" {
		t.Errorf("PCI functions without driver (-want +got):\n%s", diff)
	}
	if got := len(loopsBelow(t, w.state)); got != 3 {
		t.Errorf("got %d loop devices, want 3: one for each visible disk", got)
	}

	// The rejected disk is not probed again before the next boot.
	w.must(w.Unplug(nodeA, first.ID))
	w.must(w.Unplug(nodeA, third.ID))
	if got := w.Device(nodeA, second.ID); got != "" {
		t.Errorf("the rejected disk appeared as %s when the other was unplugged", got)
	}
	if diff := cmp.Diff([]string{"0000:00:12.0"}, refused()); diff != "" {
		t.Errorf("PCI functions without driver after unplugging (-want +got):\n%s", diff)
	}
	w.must(w.PowerOff(nodeA, true))
	w.must(w.PowerOn(nodeA, []simrack.GuestDisk{boot, second}, nil))
	if got := w.Device(nodeA, second.ID); got != "nvme1n1" {
		t.Errorf("after a boot without the other disk: got %q, want nvme1n1", got)
	}
}

// TestNumbers plugs and unplugs disks. A disk takes the lowest free number, but not the number of a block device that
// is still held.
func TestNumbers(t *testing.T) {
	w := newWorld(t)
	boot, a, b, c := w.data(0, "node-a-boot", 8), w.data(1, "a", 8), w.data(2, "b", 8), w.data(3, "c", 8)
	w.on(nodeA, "node-a", boot, a, b)

	w.must(w.Unplug(nodeA, a.ID))
	w.must(w.Plug(nodeA, c))
	if got := w.Device(nodeA, c.ID); got != "nvme1n1" {
		t.Errorf("the lowest free number: got %s, want nvme1n1", got)
	}
	w.must(w.Unplug(nodeA, c.ID))
	w.must(w.Plug(nodeA, a))

	held, err := os.Open(w.node(nodeA, a))
	must(t, err)
	defer held.Close()
	w.must(w.Unplug(nodeA, a.ID))
	w.must(w.Plug(nodeA, a))
	if got := w.Device(nodeA, a.ID); got != "nvme1n2" {
		t.Errorf("a disk that is plugged in again while it is held: got %s, want nvme1n2", got)
	}
	target, err := os.Readlink(filepath.Join(w.root, "node-a/sys/block/nvme1n2"))
	must(t, err)
	if want := "../devices/pci0000:00/0000:00:11.0/nvme/nvme3/nvme1n2"; target != want {
		t.Errorf("its folder: got %s, want %s", target, want)
	}
	w.must(w.Plug(nodeA, c))
	if got := w.Device(nodeA, c.ID); got != "nvme4n1" {
		t.Errorf("another disk meanwhile: got %s, want nvme4n1", got)
	}
	must(t, held.Close())
	w.must(w.Unplug(nodeA, a.ID))
	w.must(w.Plug(nodeA, a))
	if got := w.Device(nodeA, a.ID); got != "nvme1n1" {
		t.Errorf("after the last holder closed it: got %s, want nvme1n1", got)
	}
}

// TestAppearance reads the guest's sysfs all the time while a disk comes and goes. A reader that finds a disk in block
// can read all of its files, unless the disk has gone meanwhile.
func TestAppearance(t *testing.T) {
	w := newWorld(t)
	boot, volume := w.data(0, "node-a-boot", 8), w.data(1, "volume", 8)
	w.on(nodeA, "node-a", boot)
	link := filepath.Join(w.root, "node-a/sys/block/nvme1n1")

	stop, seen := make(chan struct{}), 0
	var reader sync.WaitGroup
	reader.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			for path, want := range map[string]string{"device/serial": "volume\n", "size": "16384\n", "queue/logical_block_size": "512\n"} {
				got, err := os.ReadFile(filepath.Join(link, path))
				if err == nil && string(got) != want {
					t.Errorf("%s: got %q, want %q", path, got, want)
				}
				if _, gone := os.Lstat(link); err != nil && gone == nil {
					if _, err := os.ReadFile(filepath.Join(link, path)); err != nil {
						if _, gone := os.Lstat(link); gone == nil {
							t.Errorf("%s is visible without %s: %v", link, path, err)
						}
					}
				}
				if err == nil {
					seen++
				}
			}
		}
	})
	for range 20 {
		w.must(w.Plug(nodeA, volume))
		w.must(w.Unplug(nodeA, volume.ID))
	}
	close(stop)
	reader.Wait()
	if seen == 0 {
		t.Error("the reader never saw the disk")
	}
}

// TestBlockSizes creates and mounts filesystems on disks with each block size of the rack, and checks a read-only disk.
func TestBlockSizes(t *testing.T) {
	w := newWorld(t)
	var disks []simrack.GuestDisk
	for slot, size := range []int{512, 2048, 4096} {
		disk := w.data(slot, fmt.Sprint("volume-", size), 64)
		disk.BlockSize = size
		disks = append(disks, disk)
	}
	w.on(nodeA, "node-a", disks...)
	for _, disk := range disks {
		t.Run(fmt.Sprint(disk.BlockSize), func(t *testing.T) {
			run(t, "sh", "-c", `test "$(blockdev --getss "$0")" = `+fmt.Sprint(disk.BlockSize), w.node(nodeA, disk))
			run(t, "mkfs.ext4", "-q", w.node(nodeA, disk))
			writeFile(t, filepath.Join(mounted(t, w.node(nodeA, disk), "ext4"), "file"), "text", true)
		})
	}

	w.must(w.PowerOff(nodeA, true))
	disks[0].ReadOnly = true
	w.must(w.PowerOn(nodeA, disks, nil))
	node := w.node(nodeA, disks[0])
	writable, err := os.OpenFile(node, os.O_WRONLY, 0)
	if err == nil {
		_, err = writable.Write(make([]byte, 512))
		must(t, writable.Close())
	}
	if !errors.Is(err, unix.EPERM) {
		t.Errorf("writing to a read-only disk: got %v, want EPERM", err)
	}
	ro, err := os.ReadFile(filepath.Join(w.root, "node-a/sys/block", filepath.Base(node), "ro"))
	must(t, err)
	if strings.TrimSpace(string(ro)) != "1" {
		t.Errorf("ro of a read-only disk: got %q", ro)
	}
	dir := t.TempDir()
	must(t, unix.Mount(node, dir, "ext4", unix.MS_RDONLY, "noload"))
	if diff := cmp.Diff(map[string]string{"file": "text"}, contents(t, dir)); diff != "" {
		t.Errorf("content (-want +got):\n%s", diff)
	}
	unmount(t, dir)
}

// TestWriteProtectionDoesNotOutliveTheDisk reuses a loop device that an earlier user set read-only (BLKROSET). The
// kernel keeps that setting when a loop device is detached; a node plugin sets it for read-only volumes. A new disk
// must be writable nevertheless.
func TestWriteProtectionDoesNotOutliveTheDisk(t *testing.T) {
	w := newWorld(t)
	disk := w.data(1, "volume", 64)
	w.on(nodeA, "node-a", disk)
	protect, err := os.Open(w.node(nodeA, disk))
	must(t, err)
	must(t, unix.IoctlSetPointerInt(int(protect.Fd()), unix.BLKROSET, 1))
	must(t, protect.Close())
	w.must(w.Unplug(nodeA, disk.ID))
	w.must(w.Plug(nodeA, disk))
	writable, err := os.OpenFile(w.node(nodeA, disk), os.O_WRONLY, 0)
	must(t, err)
	readOnly, err := unix.IoctlGetInt(int(writable.Fd()), unix.BLKROGET)
	must(t, errors.Join(err, writable.Close()))
	if readOnly != 0 {
		t.Error("a new disk is write-protected")
	}
}
