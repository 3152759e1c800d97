// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build vm

package vm

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
)

// TestPowerCutInMkfs cuts the power while mkfs runs. The next stage must make the volume usable without an operator,
// with the plugin's records and without them. It must not touch a disk that a user has written to since.
//
// There are two sorts of volumes. For most of them each write is logged, so that the disk can be reconstructed as
// after a power cut between any two writes of its first stage. The disks of the others stall in the middle of mkfs,
// and then the power is really cut.
func TestPowerCutInMkfs(t *testing.T) {
	t.Parallel()
	const loggedSlots, slotCount = 8, 12
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))

	system := newSystemDisk(t)
	all, attached := map[int]*volume{}, slots{0: system}
	for slot := 1; slot < slotCount; slot++ {
		types := filesystem.Types()
		v := filesystemVolume(newVolumeDisk(t, fmt.Sprint(slot)), types[slot%len(types)])
		if slot <= loggedSlots {
			v.log = filepath.Join(t.TempDir(), "log")
			if err := os.WriteFile(v.log, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		} else {
			v.stallAfter = 100 << 10
		}
		all[slot], attached[slot] = v, v.disk
	}
	empty := system.copy(t)

	m := boot(t, attached)
	m.mountSystemDisk(t)
	p := startPlugin(t, m)
	m.keepUnsynced(t)
	logs := map[int][]write{}
	for slot := 1; slot <= loggedSlots; slot++ {
		succeed(t, p.stage(t, all[slot]))
		logs[slot] = readLog(t, all[slot].log)
	}
	for slot := loggedSlots + 1; slot < slotCount; slot++ {
		p.beginStage(t, all[slot]) // the call never ends
		m.await(t, callTime, "mkfs to run", func() bool {
			return strings.TrimSpace(m.sh(t, "grep -l '^mkfs' /proc/[0-9]*/comm | wc -l")) == fmt.Sprint(slot-loggedSlots)
		})
	}
	// This fsync brings the names of the plugin's records to the system disk, but not the content of their files.
	m.sh(t, "echo >/tmp/other && dd if=/tmp/other of=/var/lib/other conv=fsync")
	m.cutPower(t)
	for slot := loggedSlots + 1; slot < slotCount; slot++ {
		if len(p.entries(t, "responded", all[slot].id)) > 0 {
			t.Fatalf("the volume in slot %d was staged before the power was cut", slot)
		}
	}

	for round, c := range []struct {
		name   string
		system *disk
	}{{"records kept", system}, {"records lost", empty}} {
		attached, found := slots{0: c.system}, map[int]*volume{}
		for slot, v := range all {
			cut, d := moment{name: "stalled"}, v.copy(t)
			d.stallAfter = 0
			if slot <= loggedSlots {
				rank := loggedSlots*round + slot - 1
				cut = cutAt(logs[slot], float64(rank)/(2*loggedSlots))
				if rank%2 == 1 {
					cut = cut.losing(random)
				}
				d = v.at(t, cut)
			}
			t.Logf("%s, slot %d: %s, %s: %s", c.name, slot, v.fsType(), cut.name, d.describe(t))
			attached[slot], found[slot] = d, filesystemVolume(d, v.fsType())
		}
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			testAfterPowerCut(t, attached, found)
		})
	}
}

// Slots of both sorts of volumes whose disks a user has changed since.
var (
	// overwritten disks have data without a signature.
	overwritten = []int{3, 6, 11}
	// handMade disks have a filesystem that a user made by hand, with data.
	handMade = []int{8, 9}
)

// testAfterPowerCut boots with the disks as the power cut left them. The volumes must be usable, unless a user has
// used the disks.
func testAfterPowerCut(t *testing.T, attached slots, found map[int]*volume) {
	for _, slot := range overwritten {
		attached[slot].overwriteAll(t)
	}
	for _, slot := range handMade {
		attached[slot].makeByHand(t)
	}
	m := boot(t, attached)
	m.mountSystemDisk(t)
	p := startPlugin(t, m)
	for _, slot := range slices.Sorted(maps.Keys(found)) {
		v := found[slot]
		switch {
		case slices.Contains(overwritten, slot):
			t.Run(fmt.Sprintf("slot %d overwritten", slot), func(t *testing.T) { p.checkRefused(t, v) })
		case slices.Contains(handMade, slot):
			t.Run(
				fmt.Sprintf("slot %d made by hand", slot),
				func(t *testing.T) { testMadeByHand(t, p, filesystemVolume(v.disk, "ext4")) },
			)
		default:
			t.Run(fmt.Sprintf("slot %d", slot), func(t *testing.T) {
				p.stageAndPublish(t, v)
				p.check(t, v, p.write(t, v))
				p.unpublishAndUnstage(t, v)
				v.checkFilesystem(t)
			})
		}
	}
}

// checkRefused checks that the plugin neither stages the volume nor writes to its disk.
func (p *plugin) checkRefused(t *testing.T, v *volume) {
	t.Helper()
	before := v.sum(t)
	fail(t, p.stage(t, v), codes.FailedPrecondition)
	if after := v.sum(t); after != before {
		t.Error("the disk was written to")
	}
	p.checkGone(t, v)
}

// handMadeData is the content of the file data in a filesystem that a user made by hand.
const handMadeData = "made by hand"

func (d *disk) makeByHand(t *testing.T) {
	t.Helper()
	root := t.TempDir()
	if err := os.WriteFile(filepath.Join(root, "data"), []byte(handMadeData), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := command("mkfs.ext4", "-q", "-F", "-E", "nodiscard", "-d", root, d.file); err != nil {
		t.Fatal(err)
	}
}

// testMadeByHand: a filesystem that a user made by hand on a disk with an interrupted mkfs is used as it is. Then no
// record of the interruption may remain: if the filesystem is damaged later, the plugin must not take it for an
// interrupted mkfs.
func testMadeByHand(t *testing.T, p *plugin, v *volume) {
	p.stageAndPublish(t, v)
	p.check(t, v, handMadeData)
	p.unpublishAndUnstage(t, v)

	v.overwrite(t, 0, make([]byte, mib))
	p.machine.sh(t, "blockdev --flushbufs /dev/%s", p.machine.name(t, p.machine.slotOf(v.disk)))
	p.checkRefused(t, v)
}

func (v *volume) fsType() string { return v.capability.GetMount().GetFsType() }

// copy returns a copy of the disk with its own file.
func (d *disk) copy(t *testing.T) *disk {
	t.Helper()
	c := *d
	c.file = filepath.Join(t.TempDir(), "disk")
	if _, err := command("cp", "--sparse=always", d.file, c.file); err != nil {
		t.Fatal(err)
	}
	return &c
}

// checkFilesystem runs the filesystem's check program.
func (v *volume) checkFilesystem(t *testing.T) {
	t.Helper()
	args := map[string][]string{
		"ext3":  {"e2fsck", "-fn"},
		"ext4":  {"e2fsck", "-fn"},
		"xfs":   {"xfs_repair", "-n"},
		"btrfs": {"btrfs", "check", "--readonly"},
	}[v.fsType()]
	if output, err := command(args[0], append(args[1:], v.file)...); err != nil {
		t.Errorf("%v: %s", err, output)
	}
}
