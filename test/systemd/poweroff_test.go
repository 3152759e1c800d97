// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build systemd

package systemd_test

import (
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestPlannedRestart lets the node plugin power the machine off, with the rights of its unit and over the machine's
// D-Bus. After the next boot it reports that the machine is back.
func TestPlannedRestart(t *testing.T) {
	api := &simtest.Node{Name: "worker"}
	s := httptest.NewServer(api)
	t.Cleanup(s.Close)
	m := newMachine(t)
	m.install()
	m.run("systemctl", "start", "dbus.socket")
	kubeconfig := filepath.Join(m.dir, "kubeconfig")
	must(t, os.WriteFile(kubeconfig, []byte(api.Kubeconfig(s.URL)), 0o600))
	m.write(
		"/etc/oxide-csi/node.env",
		"OXIDE_CSI_ATTACH_MODE=restart\nOXIDE_CSI_NODE_NAME=worker\nOXIDE_CSI_KUBECONFIG="+kubeconfig+"\n",
		0o640,
	)
	m.run("systemctl", "restart", "oxide-csi-node")
	m.dial("node")
	first := m.bootID()
	// A service that needs a moment to end. It logs its life to a folder that survives the machine.
	diary := filepath.Join(m.dir, "diary")
	m.write("/etc/systemd/system/database.service", fmt.Sprintf(`[Service]
ExecStart=/bin/sh -c 'trap "echo asked >>%[1]s; sleep 1; echo ended >>%[1]s; exit" TERM; echo started >>%[1]s; while :; do sleep 0.1; done'
`, diary), 0o644)
	m.run("systemctl", "daemon-reload")
	m.run("systemctl", "start", "database")

	m.run("systemctl", "start", "systemd-logind")
	m.run(
		"systemd-run",
		"--unit=kubelet",
		"systemd-inhibit",
		"--what=shutdown",
		"--who=kubelet",
		"--why=Kubelet needs time to handle node shutdown",
		"--mode=delay",
		"sleep",
		"1000",
	)
	m.eventually("the lock is held", func() bool {
		locks, err := m.try("systemd-inhibit", "--list")
		return err == nil && strings.Contains(locks, "kubelet")
	})
	refused := orchestrator.NewRestartID(time.Now())
	api.RequestRestart(refused)
	m.eventually("it refuses", func() bool { return api.RestartReply(refused).State == orchestrator.RestartRefused })
	if why := api.RestartReply(refused).Reason; !strings.Contains(why, "the kubelet has graceful node shutdown on") {
		t.Errorf("the plugin refuses because %s", why)
	}
	m.run("systemctl", "stop", "kubelet")

	before, err := os.ReadFile(diary)
	must(t, err)
	if string(before) != "started\n" {
		t.Errorf("before the restart the service's log is %q", before)
	}
	restart := orchestrator.NewRestartID(time.Now())
	api.RequestRestart(restart)
	m.eventually("the machine is down", m.down)
	if answer := api.RestartReply(restart); answer.State != orchestrator.RestartAccepted || answer.Boot != first {
		t.Errorf("the reply is %+v", answer)
	}
	after, err := os.ReadFile(diary)
	must(t, err)
	if string(after) != "started\nasked\nended\n" {
		t.Errorf("the service's log is %q", after)
	}
	m.boot()
	back := orchestrator.RestartReply{State: orchestrator.RestartBack, Boot: m.bootID()}
	m.eventually("the plugin reports that it is back", func() bool { return api.RestartReply(restart) == back })
}
