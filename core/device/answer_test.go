// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package device_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/iohang"
)

// children counts the dd processes of this machine that read the device node.
func children(t *testing.T, node string) (count int) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if line, err := os.ReadFile(file); err == nil && strings.HasPrefix(string(line), "dd\x00if="+node+"\x00") {
			count++
		}
	}
	return count
}

// While a disk hangs, the first question takes its bound, the following ones are answered at once, and only one child
// waits. Other disks answer. The disk is asked again when it has come back.
func TestCheckRespondsOfAHungDisk(t *testing.T) {
	t.Parallel()
	g := devicetest.New(t)
	disk, free := g.Add("csi-hung", 1<<20), g.Add("csi-free", 1<<20)
	hung, err := g.Roots().ByNumber(disk.Number)
	if err != nil {
		t.Fatal(err)
	}
	other, err := g.Roots().ByNumber(free.Number)
	if err != nil {
		t.Fatal(err)
	}
	// Real time, because programs read the disk. On a busy machine dd needs a while until it reads, and before that it
	// can be killed.
	reader := &device.ChildReader{Timeout: 3 * time.Second}
	release := iohang.Start(t, os.Getpid(), disk.Number.Major, disk.Number.Minor)
	for i := range 5 {
		err := reader.CheckResponds(t.Context(), hung)
		if !errors.Is(err, device.ErrNoAnswer) || !strings.Contains(err.Error(), hung.String()) || len(err.Error()) > 250 {
			t.Errorf("%v, want ErrNoAnswer with the disk in 250 characters", err)
		} else if i == 4 && !strings.Contains(err.Error(), "an earlier read still waits") {
			t.Errorf("%v: a repetition was not answered at once", err)
		}
	}
	if count := children(t, hung.Path); count != 1 {
		t.Errorf("%d children wait for the disk, want 1", count)
	}
	if hanging := reader.Hanging(); len(hanging) != 1 || hanging[0].Path != hung.Path {
		t.Errorf("hanging: %v", hanging)
	}
	if err := (&device.ChildReader{}).CheckResponds(t.Context(), other); err != nil {
		t.Errorf("the other disk: %v", err)
	}
	release()
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		err := (reader).CheckResponds(t.Context(), hung)
		if err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("after the disk came back: %v", err)
		}
	}
	if hanging := reader.Hanging(); hanging != nil {
		t.Errorf("hanging after the disk came back: %v", hanging)
	}
}

// The search for another btrfs with the same UUID finds it on a disk that answers,
// and does not wait for one that hangs.
func TestDuplicateBtrfsWithAHungDisk(t *testing.T) {
	t.Parallel()
	g := devicetest.New(t)
	disks := map[string]*devicetest.Disk{}
	id := uuid.NewString()
	for i, name := range []string{"csi-a-hung", "csi-b-alone", "csi-c-twin", "csi-d-twin"} {
		disks[name] = g.Add(name, 128<<20)
		fsid := uuid.NewString()
		if i == 2 {
			fsid = id
		}
		if i < 3 {
			devicetest.Run(t, "mkfs.btrfs", "-q", "-U", fsid, disks[name].Loop)
		}
	}
	devicetest.Run(
		t,
		"dd",
		"if="+disks["csi-c-twin"].Backing,
		"of="+disks["csi-d-twin"].Loop,
		"bs=1M",
		"count=128",
		"status=none",
	)
	at := func(name string) device.Device {
		t.Helper()
		dev, err := g.Roots().ByNumber(disks[name].Number)
		if err != nil {
			t.Fatal(err)
		}
		return dev
	}
	hung := disks["csi-a-hung"].Number
	iohang.Start(t, os.Getpid(), hung.Major, hung.Minor)
	reader := &device.ChildReader{Timeout: 5 * time.Second} // a disk that answers needs less on a busy machine, too
	for _, test := range []struct{ dev, uuid, twin string }{
		{"csi-b-alone", uuid.NewString(), ""},
		{"csi-c-twin", id, at("csi-d-twin").Name},
		{"csi-d-twin", id, at("csi-c-twin").Name},
	} {
		twin, skipped, err := g.Roots().
			DuplicateBtrfs(t.Context(), reader, at(test.dev), device.Content{Type: "btrfs", UUID: test.uuid})
		if err != nil || twin != test.twin {
			t.Errorf("%s: twin %q, %v; want %q", test.dev, twin, err, test.twin)
		}
		if len(skipped) != 1 || skipped[0].Path != at("csi-a-hung").Path {
			t.Errorf("%s: skipped %v, want the disk that hangs", test.dev, skipped)
		}
	}
}
