// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build systemd

package systemd_test

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// ledger is a small database: it appends a number to a file for each start, and starts only if it finds all of them on
// a mounted volume.
const ledger = `#!/bin/sh
set -eu
mountpoint -q /srv/ledger || { echo "the volume is not mounted" >&2; exit 1; }
cd /srv/ledger
touch numbers
last=$(wc -l <numbers)
seq "$last" | cmp - numbers
echo $((last + 1)) >>numbers
sync -f numbers
touch /run/ledger-started
exec sleep 1000000
`

// A service that needs a volume starts at each boot, without a person: in order or after a power cut, while the rack is
// away or answers, and with the disks on other slots than before.
func TestReboot(t *testing.T) {
	m := newMachine(t)
	m.install()
	guest := m.sim.Instance("node-a").Guest
	for _, volume := range []string{"other", "ledger"} {
		m.run("oxide-csi", "volume", "create", volume, "--size=1GiB")
		m.run("oxide-csi", "volume", "attach", volume)
	}
	m.write("/etc/oxide-csi/volumes/ledger.env", "TARGET=/srv/ledger\nOXIDE_CSI_SYS_ROOT="+guest+"/sys\n", 0o640)
	m.write("/usr/local/bin/ledger", ledger, 0o755)
	m.write("/etc/systemd/system/ledger.service", `[Unit]
After=oxide-volume@ledger.service
BindsTo=oxide-volume@ledger.service

[Service]
ExecStart=/usr/local/bin/ledger

[Install]
WantedBy=multi-user.target
`, 0o644)
	m.run("systemctl", "enable", "oxide-volume@ledger", "ledger")
	m.run("systemctl", "start", "ledger")
	m.started()
	slots := m.slots()
	rounds := []struct {
		name           string
		powerCut, swap bool
		away           string // the kind of fault of each call
	}{
		{name: "in order"},
		{name: "power cut, other slots, the rack is away", powerCut: true, swap: true, away: simtest.FaultReset},
		{name: "power cut, the rack is silent", powerCut: true, away: simtest.FaultSilent},
		{name: "in order, the rack is away", away: simtest.FaultReset},
		{name: "in order, other slots", swap: true},
		{name: "in order, other slots, the rack is away", swap: true, away: simtest.FaultReset},
		{name: "power cut", powerCut: true},
		{name: "power cut, the rack is away", powerCut: true, away: simtest.FaultReset},
		{name: "power cut, other slots", powerCut: true, swap: true},
		{name: "in order, the rack is silent", away: simtest.FaultSilent},
	}
	if testing.Short() {
		rounds = rounds[1:2] // with everything at once
	}
	for _, round := range rounds {
		t.Log(round.name)
		m.shutdown(round.powerCut)
		if round.swap {
			m.swapDisks()
			if now := m.slots(); slices.Equal(now, slots) {
				t.Fatalf("the disks are on the same slots as before: %v", now)
			} else {
				slots = now
			}
		}
		m.startInstance()
		if round.away != "" {
			_, err := m.sim.Inject(t.Context(), simtest.Fault{Operation: "*", Kind: round.away, Count: new(int)})
			must(t, err)
		}
		m.boot()
		m.started()
		must(t, m.sim.ClearFaults(t.Context()))
	}
	m.run("systemctl", "disable", "--now", "ledger", "oxide-volume@ledger")
	if numbers := m.run("sh", "-c", "test ! -e /srv/ledger && echo unmounted"); strings.TrimSpace(numbers) != "unmounted" {
		t.Errorf("the volume is still there: %s", numbers)
	}
	m.dial("controller")
	m.dial("node")
	for _, volume := range []string{"other", "ledger"} {
		m.run("env", "OXIDE_CSI_SYS_ROOT="+guest+"/sys", "oxide-csi", "volume", "detach", volume)
		m.run("oxide-csi", "volume", "delete", volume)
	}
	m.stop()
}

// started waits until the ledger has found its numbers.
func (m *machine) started() {
	m.t.Helper()
	m.eventually("the ledger has started", func() bool {
		for _, unit := range []string{"ledger", "oxide-volume@ledger"} {
			if m.property(unit, "ActiveState") == "failed" {
				m.t.Fatalf("%s has failed: %s", unit, m.run("systemctl", "status", "--no-pager", unit))
			}
		}
		_, err := os.Stat(m.in("/run/ledger-started"))
		return err == nil
	})
}

// shutdown stops the machine and its instance: in order, or by a power cut.
func (m *machine) shutdown(powerCut bool) {
	m.t.Helper()
	ctx := m.t.Context()
	if powerCut {
		must(m.t, m.sim.PowerCut(ctx, m.instance))
		m.kill()
		return
	}
	m.run("systemctl", "--no-block", "poweroff")
	m.eventually("systemd has ended", m.down)
	must(m.t, m.sim.Halt(ctx, m.instance))
}

// swapDisks detaches the volumes from the stopped instance, and attaches them in the other order.
func (m *machine) swapDisks() {
	m.t.Helper()
	ctx := m.t.Context()
	rack, err := m.sim.Client()
	must(m.t, err)
	instance := oxide.NameOrId(m.sim.Instance(m.instance).ID)
	attached := m.disks()
	for _, disk := range attached {
		_, err := rack.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
			Instance: instance, Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk.ID)},
		})
		must(m.t, err)
	}
	for _, disk := range slices.Backward(attached) {
		_, err := rack.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
			Instance: instance, Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk.ID)},
		})
		must(m.t, err)
	}
}

// disks returns the instance's disks without its boot disk, in the order of their slots.
func (m *machine) disks() []simtest.SimDisk {
	instances, err := m.sim.ListInstances(m.t.Context())
	must(m.t, err)
	return slices.DeleteFunc(instances[0].Disks, func(d simtest.SimDisk) bool { return d.Slot == 0 })
}

// slots returns the disks in the order of their slots.
func (m *machine) slots() (ids []string) {
	for _, disk := range m.disks() {
		ids = append(ids, disk.ID)
	}
	return ids
}

func (m *machine) startInstance() {
	m.t.Helper()
	ctx := m.t.Context()
	rack, err := m.sim.Client()
	must(m.t, err)
	m.eventually("the instance is stopped", func() bool {
		instances, err := m.sim.ListInstances(ctx)
		return err == nil && instances[0].RunState == string(oxide.InstanceStateStopped)
	})
	_, err = rack.InstanceStart(ctx, oxide.InstanceStartParams{Instance: oxide.NameOrId(m.sim.Instance(m.instance).ID)})
	must(m.t, err)
	m.eventually("the instance runs", func() bool {
		instances, err := m.sim.ListInstances(ctx)
		return err == nil && instances[0].RunState == string(oxide.InstanceStateRunning)
	})
}
