// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build systemd

package systemd_test

import (
	"os"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

// oxideCommand stands in for Oxide's own program of that name. It does what the tutorial needs of it.
const oxideCommand = `#!/bin/sh
set -eu
[ "$1 $3 $5" = "instance --project --instance" ]
case $2 in
stop | start) method=POST path=/$2 ;;
view) method=GET path= ;;
esac
answer=$(curl -sSf -X "$method" -H "Authorization: Bearer $OXIDE_TOKEN" "$OXIDE_HOST/v1/instances/$6$path?project=$4")
echo "$answer" | sed 's/"run_state":"/"run_state": "/'
`

// TestTutorial runs the commands of docs/tutorials/bare-host.md as they stand, on two machines: the admin host, and an
// instance db-1 of a rack without hot-plug. Only make build, which writes to the clone, is left out.
func TestTutorial(t *testing.T) {
	blocks := pages.Of(t, "../../docs/tutorials/bare-host.md")
	if len(blocks) != 7 {
		t.Fatalf("the page has %d blocks", len(blocks))
	}
	db := newHost(t)
	db.startRack("db-1", "--state-time=3s") // so that a page that does not wait for it fails
	admin := newHost(t)
	admin.boot()
	admin.clone()
	admin.write("/root/clone/token", db.sim.Token+"\n", 0o600)
	admin.write("/usr/local/bin/oxide", oxideCommand, 0o755)
	logIn := []string{"OXIDE_HOST=" + db.sim.Host, "OXIDE_TOKEN=" + db.sim.Token}
	project := func(block string) string { return pages.Fill(t, block, "PROJECT", db.sim.Project) }

	admin.shell(pages.Fill(t, blocks[0], "make build\n", ""))
	settings, err := os.ReadFile(admin.in("/etc/oxide-csi/controller.env"))
	must(t, err)
	admin.write("/etc/oxide-csi/controller.env", pages.Fill(t, string(settings),
		"https://silo.sys.example.com", db.sim.Host, "OXIDE_PROJECT=databases", "OXIDE_PROJECT="+db.sim.Project,
	)+"OXIDE_CSI_METADATA=none\n", 0o640)
	admin.shell(blocks[1])
	admin.shell(project(blocks[2]), logIn...)

	db.boot()
	db.clone()
	db.seeGuest()
	see := "OXIDE_CSI_SYS_ROOT=" + db.sim.Instance("db-1").Guest + "/sys"
	db.write("/etc/systemd/system/oxide-volume@.service.d/guest.conf", "[Service]\nEnvironment="+see+"\n", 0o644)
	attachment, err := os.ReadFile(admin.in("/root/clone/data.json"))
	must(t, err)
	db.write("/root/clone/data.json", string(attachment), 0o600)
	db.shell(blocks[3]+blocks[4], see)
	data := &volume{staging: "/srv/data", target: "/srv/data"}
	db.mounted(data, true)
	db.write("/srv/data/file", "kept", 0o600)

	db.shutdown(false)
	db.startInstance()
	db.boot()
	db.eventually("the volume is mounted after a boot", func() bool {
		text, err := os.ReadFile(db.in("/srv/data/file"))
		return err == nil && string(text) == "kept"
	})
	db.shell(blocks[5], see)
	db.mounted(data, false)
	db.run("systemctl", "--no-block", "poweroff")
	db.eventually("systemd has ended", db.down)
	admin.shell(project(blocks[6]), logIn...)
	if list := admin.run("oxide-csi", "volume", "list"); strings.Contains(list, "data") {
		t.Errorf("the volume is still there: %s", list)
	}
}
