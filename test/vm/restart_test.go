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

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// haltTime is how long a guest may take to power itself off, on a busy machine.
const haltTime = 90 * time.Second

// TestPlannedRestart has the plugin power its guest off while volumes are in use, and the instance start again with more disks,
// as a rack does it that attaches them only to a stopped one. The API server of Kubernetes, by which it is asked and answers, is
// the test's own; the init that ends the guest is busybox'.
func TestPlannedRestart(t *testing.T) {
	t.Parallel()
	const restart = "7-1"
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
			// A database that has something to write when it is asked to end, and needs a moment for it.
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
	api.RequestRestart(restart)
	m.awaitEnd(t)
	t.Logf("the machine is off %s after the restart was asked for", time.Since(asked).Round(100*time.Millisecond))
	accepted := api.RestartReply(restart)
	if accepted.State != metadata.RestartAccepted || accepted.Boot == "" {
		t.Errorf("it has said %+v", accepted)
	}
	if console := m.text(
		t,
		m.console,
	); !strings.Contains(console, "down: unmounted") || strings.Contains(console, "stays mounted") ||
		strings.Contains(console, "are killed") {
		t.Error("the guest did not go down in order")
	}

	p = start(second)
	m = p.machine
	m.await(
		t,
		callTime,
		"the plugin to say that it is back",
		func() bool { return api.RestartReply(restart).State == metadata.RestartBack },
	)
	if back := api.RestartReply(restart); back.Boot == "" || back.Boot == accepted.Boot {
		t.Errorf("it was accepted in boot %q, and is back in boot %q", accepted.Boot, back.Boot)
	}
	for i, u := range all {
		t.Run(string(kinds()[i]), func(t *testing.T) {
			p.stageAndPublish(t, u.volume)
			p.check(t, u.volume, u.synced)
			if found := m.readUnsynced(t, u.volume); found != u.unsynced {
				t.Errorf("written and not synced was %q, read %q", u.unsynced, found)
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
			t.Errorf("the kernel said %q: a filesystem had not been unmounted", said)
		}
	}
}

// replays are ext4's and xfs' words for the journal's replay.
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

// keepUnsynced makes the guest's kernel write nothing back on its own account for an hour, so that what is lost in a power cut does not
// depend on how fast this machine is. By default the kernel writes back what is 30 s old.
func (m *machine) keepUnsynced(t *testing.T) {
	t.Helper()
	m.sh(t, "for limit in writeback expire; do echo 360000 >/proc/sys/vm/dirty_${limit}_centisecs; done")
}

// unsyncedOffset is where on a raw block volume unsynced data is: not in the page that is synced.
const unsyncedOffset = mib

// writeUnsynced writes data to a published volume, which the guest's kernel has then, and the disk has not. A raw block volume
// stays open, as in a workload: when the last one closes it, the kernel writes back what is there.
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

// readUnsynced is what is there of it; empty if nothing is.
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
