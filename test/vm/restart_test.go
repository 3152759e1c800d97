// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build vm

package vm

import (
	"crypto/rand"
	"fmt"
	"net/http/httptest"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// haltTime is how long a guest may take to power itself off on a busy machine.
const haltTime = 90 * time.Second

// TestPlannedRestart lets the plugin power its guest off while volumes are in use. Then the instance starts again with
// more disks, as on a rack that attaches disks only to stopped instances. The test itself is the Kubernetes API server
// through which requests and replies go. busybox' init ends the guest.
func TestPlannedRestart(t *testing.T) {
	t.Parallel()
	instance := uuid.NewString()
	api := &simtest.Node{Name: "worker", ProviderID: "oxide://" + instance}
	server := httptest.NewServer(api)
	t.Cleanup(server.Close)
	address := strings.TrimPrefix(server.URL, "http://")
	const kubeconfig = "/run/kubeconfig"
	start := func(attached slots) *plugin {
		m := bootAs(t, instance, address, attached)
		m.mountSystemDisk(t)
		m.sh(t, "cat >%s <<'END'\n%s\nEND", kubeconfig, api.Kubeconfig("http://"+serverInGuest))
		return startPlugin(
			t,
			m,
			"--attach-mode=restart",
			"--restart-poweroff=signal:SIGUSR2",
			"--node-name=worker",
			"--kubeconfig="+kubeconfig,
		)
	}

	system := newSystemDisk(t)
	first, second := slots{0: system}, slots{0: system}
	type used struct {
		*volume
		synced, unsynced string
	}
	var all []*used
	for i, kind := range kinds() {
		u := &used{volume: kind.volume(newVolumeDisk(t, string(kind))), unsynced: rand.Text()}
		first[2*i+1], second[2*i+1] = u.disk, u.disk
		second[2*i+2] = newVolumeDisk(t, fmt.Sprint("new ", i))
		all = append(all, u)
	}

	p := start(first)
	m := p.machine
	m.keepUnsynced(t)
	for _, u := range all {
		p.stageAndPublish(t, u.volume)
		u.synced = p.write(t, u.volume)
		if !u.isBlock() {
			// A database that writes data when it is asked to end, and needs a moment for it.
			m.sh(
				t,
				`sh -c 'trap "sleep 1; echo ended >%[1]s/diary; exit" TERM; cd %[1]s; while :; do sleep 0.1; done' </dev/null >/dev/null 2>&1 &`,
				u.target,
			)
		}
	}
	for _, u := range all {
		m.writeUnsynced(t, u.volume, u.unsynced)
	}
	asked := time.Now()
	restart := orchestrator.NewRestartID(asked)
	api.RequestRestart(restart)
	m.awaitEnd(t)
	t.Logf("the machine was off %s after the restart was requested", time.Since(asked).Round(100*time.Millisecond))
	accepted := api.RestartReply(restart)
	if accepted.State != orchestrator.RestartAccepted || accepted.Boot == "" {
		t.Errorf("the reply is %+v", accepted)
	}
	if console := m.text(
		t,
		m.console,
	); !strings.Contains(console, "down: unmounted") || strings.Contains(console, "stays mounted") ||
		strings.Contains(console, "are killed") {
		t.Error("the guest did not shut down cleanly")
	}

	p = start(second)
	m = p.machine
	m.await(
		t,
		callTime,
		"the plugin to report that it is back",
		func() bool { return api.RestartReply(restart).State == orchestrator.RestartBack },
	)
	if back := api.RestartReply(restart); back.Boot == "" || back.Boot == accepted.Boot {
		t.Errorf("accepted in boot %q, and back in boot %q", accepted.Boot, back.Boot)
	}
	for i, u := range all {
		t.Run(string(kinds()[i]), func(t *testing.T) {
			p.stageAndPublish(t, u.volume)
			p.check(t, u.volume, u.synced)
			if found := m.readUnsynced(t, u.volume); found != u.unsynced {
				t.Errorf("read %[2]q, want the unsynced data %[1]q", u.unsynced, found)
			}
			if !u.isBlock() {
				m.checkFile(t, path.Join(u.target, "diary"), "ended\n")
			}
			p.unpublishAndUnstage(t, u.volume)
			fresh := filesystemVolume(second[2*i+2], "")
			p.stageAndPublish(t, fresh)
			p.check(t, fresh, p.write(t, fresh))
			p.unpublishAndUnstage(t, fresh)
		})
	}
	kernel := m.sh(t, "dmesg")
	for _, said := range replays {
		if strings.Contains(kernel, said) {
			t.Errorf("the kernel logged %q: a filesystem was not unmounted", said)
		}
	}
}

// replays are the messages of ext4 and xfs about a journal replay.
var replays = []string{"recovery complete", "Starting recovery"}

// awaitEnd waits until the machine has ended by itself.
func (m *machine) awaitEnd(t *testing.T) {
	t.Helper()
	select {
	case <-m.ended:
	case <-time.After(haltTime):
		t.Fatalf("the machine still runs after %s", haltTime)
	}
}

// keepUnsynced stops the guest's kernel from writing data back by itself for an hour, so that the data lost in a power
// cut does not depend on the speed of this machine. By default the kernel writes back data that is 30 s old.
func (m *machine) keepUnsynced(t *testing.T) {
	t.Helper()
	m.sh(t, "for limit in writeback expire; do echo 360000 >/proc/sys/vm/dirty_${limit}_centisecs; done")
}

// unsyncedOffset is the offset of unsynced data on a raw block volume. It is not in the synced page.
const unsyncedOffset = mib

// writeUnsynced writes data to a published volume that stays in the guest kernel's cache. A raw block volume stays
// open, as in a workload: when the last process closes it, the kernel writes the data back.
func (m *machine) writeUnsynced(t *testing.T, v *volume, data string) {
	t.Helper()
	if v.isBlock() {
		m.sh(
			t,
			"exec 3<>%s; sleep 1000 >/dev/null 2>&1 & printf %s | dd bs=%d seek=1 conv=notrunc >&3",
			v.target,
			data,
			unsyncedOffset,
		)
	} else {
		m.sh(t, "printf %s >%s/unsynced", data, v.target)
	}
}

// readUnsynced returns the unsynced data that is on the volume, or an empty text.
func (m *machine) readUnsynced(t *testing.T, v *volume) string {
	t.Helper()
	if v.isBlock() {
		return strings.TrimRight(
			m.sh(t, "dd if=%s bs=%d skip=1 count=1 2>/dev/null | head -c 26", v.target, unsyncedOffset),
			"\x00",
		)
	}
	return strings.TrimRight(m.sh(t, "cat %s/unsynced 2>/dev/null || true", v.target), "\x00")
}
