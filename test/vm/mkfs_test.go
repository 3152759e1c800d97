//go:build vm

package vm

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
)

// TestPowerCutInMkfs cuts the power while mkfs is at work. The next stage must make the volume usable without an operator,
// with the plugin's records and without; and must keep its hands off once somebody else has used the disk.
//
// There are two sorts of volumes. Of most of them each write is logged, so that the disk can be had as after a power cut
// between any two writes of its first stage. The others' disks stop in the middle of mkfs, and then the power is really
// cut.
func TestPowerCutInMkfs(t *testing.T) {
	t.Parallel()
	const loggedSlots, slotCount = 8, 12
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))

	system := newSystemDisk(t)
	all, attached := map[int]*volume{}, slots{0: system}
	for slot := 1; slot < slotCount; slot++ {
		types := mount.Filesystems()
		v := filesystem(newVolumeDisk(t, fmt.Sprint(slot)), types[slot%len(types)])
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
	logs := map[int][]write{}
	for slot := 1; slot <= loggedSlots; slot++ {
		succeed(t, p.stage(t, all[slot]))
		logs[slot] = readLog(t, all[slot].log)
	}
	for slot := loggedSlots + 1; slot < slotCount; slot++ {
		p.beginStage(t, all[slot]) // which never ends
		m.await(t, callTime, "mkfs to be at work", func() bool {
			return m.written(t)[slot] > 0 && len(p.entries(t, "making a filesystem on a blank disk", all[slot].id)) > 0
		})
	}
	m.cutPower(t)
	for slot := loggedSlots + 1; slot < slotCount; slot++ {
		if len(p.entries(t, "answered", all[slot].id)) > 0 {
			t.Fatalf("the volume in slot %d was staged before the power was cut", slot)
		}
	}

	for round, c := range []struct {
		name   string
		system *disk
	}{{"records kept", system}, {"records lost", empty}} {
		found, foreign, attached := map[int]*volume{}, map[int]*volume{}, slots{0: c.system}
		for slot, v := range all {
			var cut moment
			var d *disk
			if slot > loggedSlots {
				cut.name = "stalled"
				d = v.copy(t)
				d.stallAfter = 0
			} else {
				rank := loggedSlots*round + slot - 1
				cut = cutAt(logs[slot], float64(rank)/(2*loggedSlots))
				if rank%2 == 1 {
					cut = cut.losing(random)
				}
				d = v.at(t, cut)
			}
			t.Logf("%s, slot %d: %s, %s: %s", c.name, slot, v.fsType(), cut.name, d.describe(t))
			attached[slot] = d
			if slot%4 == 1 { // some of both sorts
				d.overwriteAll(t)
				foreign[slot] = filesystem(d, v.fsType())
			} else {
				found[slot] = filesystem(d, v.fsType())
			}
		}
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			testAfterPowerCut(t, attached, found, foreign)
		})
	}
}

// testAfterPowerCut boots with these disks. Those that were found as the power cut left them must be usable, those with
// foreign data must stay as they are.
func testAfterPowerCut(t *testing.T, attached slots, found, foreign map[int]*volume) {
	m := boot(t, attached)
	m.mountSystemDisk(t)
	p := startPlugin(t, m)
	for _, slot := range slices.Sorted(maps.Keys(found)) {
		t.Run(fmt.Sprintf("slot %d", slot), func(t *testing.T) {
			v := found[slot]
			p.stageAndPublish(t, v)
			p.check(t, v, p.write(t, v))
			p.unpublishAndUnstage(t, v)
			v.checkFilesystem(t)
		})
	}
	for _, slot := range slices.Sorted(maps.Keys(foreign)) {
		t.Run(fmt.Sprintf("slot %d with foreign data", slot), func(t *testing.T) {
			v := foreign[slot]
			before := v.sum(t)
			fail(t, p.stage(t, v), codes.FailedPrecondition)
			if after := v.sum(t); after != before {
				t.Error("the disk was written to")
			}
			p.checkGone(t, v)
		})
	}
}

func (v *volume) fsType() string { return v.capability.GetMount().GetFsType() }

// copy is the disk with a file of its own.
func (d *disk) copy(t *testing.T) *disk {
	t.Helper()
	c := *d
	c.file = filepath.Join(t.TempDir(), "disk")
	if _, err := command("cp", "--sparse=always", d.file, c.file); err != nil {
		t.Fatal(err)
	}
	return &c
}

// checkFilesystem has the filesystem's own tool look for damage.
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
