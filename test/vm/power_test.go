// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build vm

package vm

import (
	"crypto/rand"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
)

// TestPowerCut cuts the power of a guest whose volumes are in use. The guest boots again with more disks, and with the
// volumes in other slots. Synced data must be there, and unsynced data must be lost.
func TestPowerCut(t *testing.T) {
	t.Parallel()
	system := newSystemDisk(t)
	first, second := slots{0: system}, slots{0: system}
	type used struct {
		*volume
		data, name   string
		before, then int // slots
	}
	var all []*used
	for i, kind := range kinds() {
		u := &used{volume: kind.volume(newVolumeDisk(t, string(kind))), before: 2*i + 1, then: 2*i + 2}
		first[u.before], second[u.then] = u.disk, u.disk
		second[u.then-1] = newVolumeDisk(t, fmt.Sprint("new ", i))
		all = append(all, u)
	}

	m := boot(t, first)
	m.mountSystemDisk(t)
	p := startPlugin(t, m)
	m.keepUnsynced(t)
	for _, u := range all {
		p.stageAndPublish(t, u.volume)
		u.data, u.name = p.write(t, u.volume), m.name(t, u.before)
		if !u.isBlock() {
			m.sh(t, "sync; for i in $(seq 100); do echo $i >%s/unsynced-$i; done", u.target)
		}
	}
	for _, u := range all {
		m.writeUnsynced(t, u.volume, rand.Text())
	}
	m.cutPower(t)

	m = boot(t, second)
	m.mountSystemDisk(t)
	p = startPlugin(t, m)
	for _, u := range all {
		t.Run(u.capability.GetMount().GetFsType()+u.capability.GetBlock().String(), func(t *testing.T) {
			if now := m.name(t, u.then); now == u.name {
				t.Errorf("the disk is %s again, so the test proves nothing", now)
			}
			m.sh(t, "test -e %s && test -e %s", u.staging, u.target) // left from before the power cut
			p.stageAndPublish(t, u.volume)
			p.check(t, u.volume, u.data)
			if found := m.readUnsynced(t, u.volume); found != "" {
				t.Errorf("%q was not synced and is there, so the test proves nothing", found)
			}
			p.unpublishAndUnstage(t, u.volume)
			fresh := filesystemVolume(second[u.then-1], "")
			p.stageAndPublish(t, fresh)
			p.unpublishAndUnstage(t, fresh)
		})
	}
	kernel := m.sh(t, "dmesg")
	for _, said := range replays {
		if !strings.Contains(kernel, said) {
			t.Errorf("the kernel did not log %q, so no journal was replayed", said)
		}
	}
}

// TestSameSerialCold boots with two disks with the same serial. Which of them the kernel shows is random.
func TestSameSerialCold(t *testing.T) {
	t.Parallel()
	v, twin := filesystemVolume(newVolumeDisk(t, "disk"), "ext4"), filesystemVolume(newVolumeDisk(t, "disk"), "ext4")
	twin.name += "-twin"
	m := boot(t, slots{1: v.disk, 2: twin.disk})
	p := startPlugin(t, m)
	m.await(
		t,
		plugTime,
		"the kernel to reject one",
		func() bool { return strings.Contains(m.sh(t, "dmesg"), "Duplicate cntlid") },
	)
	fail(t, p.stage(t, v), codes.FailedPrecondition)
	fail(t, p.stage(t, twin), codes.FailedPrecondition)
	v.checkBlank(t)
	twin.checkBlank(t)

	shown, refused, stays := 1, 2, v
	if m.name(t, shown) == "" {
		shown, refused, stays = refused, shown, twin
	}
	m.unplug(t, refused)
	p.stageAndPublish(t, stays)
	p.unpublishAndUnstage(t, stays)
	t.Logf("the kernel showed the disk in slot %d", shown)
}
