// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build systemd

package systemd_test

import (
	"os"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

// TestPages runs the commands for plain hosts of docs/how-to as they stand, on a host with both services whose rack has
// hot-plug. It leaves out make build, which writes to the clone.
func TestPages(t *testing.T) {
	page := func(name string, blocks int) []string {
		found := pages.Of(t, "../../docs/"+name+".md")
		if len(found) != blocks {
			t.Fatalf("%s.md has %d blocks for this test, want %d", name, len(found), blocks)
		}
		return found
	}
	m := newMachine(t)
	see := "OXIDE_CSI_SYS_ROOT=" + m.sim.Instance("node-a").Guest + "/sys"
	run := func(block string) string { t.Helper(); return m.shell(block, see) }
	m.write("/etc/systemd/system/oxide-volume@.service.d/guest.conf", "[Service]\nEnvironment="+see+"\n", 0o644)

	host := page("how-to/bare-host", 4)
	run(pages.Fill(t, host[0], "make build\n", ""))
	m.seeGuest()
	settings, err := os.ReadFile(m.in("/etc/oxide-csi/controller.env"))
	must(t, err)
	m.write("/etc/oxide-csi/controller.env", pages.Fill(t, string(settings),
		"https://silo.sys.example.com", m.sim.Host, "OXIDE_PROJECT=databases", "OXIDE_PROJECT="+m.sim.Project), 0o640)
	m.write("/root/clone/token", m.sim.Token+"\n", 0o600)
	run(host[1])
	if list := run(host[2]); !strings.Contains(list, "/srv/data") {
		t.Errorf("the list does not show where the volume is mounted: %s", list)
	}

	run("oxide-csi volume create data --size=1GiB")
	run(host[3])
	m.mounted(&volume{staging: "/srv/data", target: "/srv/data"}, true)
	run("systemctl disable --now oxide-volume@data; oxide-csi volume detach data")
	run(page("how-to/backup-and-restore", 1)[0])
	run("oxide-csi volume delete data")

	run("oxide-csi volume create postgres --size=20GiB; oxide-csi volume attach postgres")
	run(page("how-to/grow-volumes", 1)[0])
	run(page("how-to/snapshots-and-clones", 1)[0])
	run("oxide-csi volume detach postgres")
	for _, volume := range []string{"postgres", "postgres-test", "postgres-copy"} {
		run("oxide-csi volume delete " + volume)
	}

	disk := m.diskByHand("legacy")
	run(pages.Fill(t, page("how-to/existing-disk", 1)[0], "6f3a1c9e-2b7d-4e58-9a41-0d5c8e7f1a23", disk))
	m.mounted(&volume{staging: "/srv/legacy", target: "/srv/legacy"}, true)
	run("oxide-csi volume unmount " + disk + " /srv/legacy; oxide-csi volume detach " + disk)
	m.deleteDisk(disk)

	run(page("how-to/rotate-token", 1)[0])
	run(page("how-to/upgrade", 1)[0])
	m.stop()
	run(page("how-to/uninstall", 1)[0])
	if left := run("ls /usr/local/bin /etc/systemd/system /usr/lib/*.d"); strings.Contains(left, "oxide-csi.conf") ||
		strings.Contains(left, "oxide-csi\n") || strings.Contains(left, "oxide-csi-node.service\n") {
		t.Errorf("left after the uninstall: %s", left)
	}
}

// diskByHand makes an empty disk that is none of the plugin's.
func (m *machine) diskByHand(name string) (id string) {
	m.t.Helper()
	client, err := m.sim.Client()
	must(m.t, err)
	disk, err := client.DiskCreate(m.t.Context(), oxide.DiskCreateParams{
		Project: oxide.NameOrId(m.sim.Project), Body: &oxide.DiskCreate{
			Name: oxide.Name(name), Size: 1 << 30,
			DiskBackend: oxide.DiskBackend{Value: oxide.DiskBackendDistributed{
				DiskSource: oxide.DiskSource{Value: oxide.DiskSourceBlank{BlockSize: 4096}},
			}},
		}})
	must(m.t, err)
	return disk.Id
}

func (m *machine) deleteDisk(id string) {
	m.t.Helper()
	client, err := m.sim.Client()
	must(m.t, err)
	must(m.t, client.DiskDelete(m.t.Context(), oxide.DiskDeleteParams{Disk: oxide.NameOrId(id)}))
}
