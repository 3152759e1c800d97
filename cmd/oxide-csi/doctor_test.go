// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// The command finds out what there is to examine. Its exit code says how it is. It changes nothing on the rack.
func TestDoctor(t *testing.T) {
	t.Parallel()
	h := newHost(t, false)
	environ := h.rackEnv(t)
	must(t, h.sim.ClearCalls(t.Context()))
	well := runPlugin(t, environ, "doctor")
	if well.code != 0 || !strings.Contains(well.stdout, "API version") || strings.Contains(well.stdout, "warning") {
		t.Errorf("%+v", well)
	}
	if !strings.Contains(well.stdout, "clock") {
		t.Errorf("the clocks are not compared: %s", well.stdout)
	}
	calls, err := h.sim.Calls(t.Context())
	must(t, err)
	for _, call := range calls.Log {
		if call.Method != "GET" {
			t.Errorf("doctor sent %s %s", call.Method, call.Path)
		}
	}
	cluster := runPlugin(
		t,
		nil,
		"doctor",
		serveCluster(t, newCluster("", "")),
		"--state-dir="+filepath.Join(h.dir, "none"),
	)
	if cluster.code != 2 || !strings.Contains(cluster.stdout, "csi.oxide.computer does not exist") ||
		strings.Contains(cluster.stdout, "NVMe") {
		t.Errorf("%+v", cluster)
	}
	if !strings.Contains(well.stdout, "1GiB of ") {
		t.Errorf("the used space is not shown: %s", well.stdout)
	}
	must(t, h.sim.Set(t.Context(), simtest.Settings{QuotaBytes: new(int64(1))}))
	full := runPlugin(t, environ, "doctor", "--json")
	var findings []orchestrator.Finding
	must(t, json.Unmarshal([]byte(full.stdout), &findings))
	if full.code != 2 || len(findings) < 5 {
		t.Errorf("%+v", full)
	}
	must(t, h.sim.RevokeToken(t.Context(), h.sim.Token))
	if got := runPlugin(t, environ, "doctor"); got.code != 2 || strings.Contains(got.stdout, "Secret") ||
		!strings.Contains(got.stdout, "(HTTP 401): "+fault.TokenRejected.OnHosts) {
		t.Errorf("a rejected token on a plain host: %+v", got)
	}
	if got := runPlugin(t, append(environ, "OXIDE_HOST=http://127.0.0.1:1"), "doctor"); got.code != 2 ||
		strings.Contains(
			got.stdout,
			"oxide-csi doctor",
		) || !strings.Contains(got.stdout, "connection refused: see that the host") {
		t.Errorf("a rack that cannot be reached: %+v", got)
	}
	if got := runPlugin(t, append(environ, "OXIDE_CSI_CLUSTER_ID="), "doctor"); got.code != 2 ||
		!strings.Contains(got.stderr, "--cluster-id: is required with the host of a rack; set") {
		t.Errorf("a rack without a cluster ID: %+v", got)
	}
	none := runPlugin(t, []string{"OXIDE_CSI_STATE_DIR=" + filepath.Join(h.dir, "none")}, "doctor")
	if none.code != 2 || !strings.Contains(none.stderr, "nothing to examine") {
		t.Errorf("%+v", none)
	}
	node := runPlugin(t, []string{"OXIDE_INSTANCE_ID=" + h.sim.Instances[0].ID, "OXIDE_CSI_METADATA=static"}, "doctor")
	if !strings.Contains(node.stdout, "static says "+h.sim.Instances[0].ID) ||
		strings.Contains(node.stdout, "rack default") {
		t.Errorf("%+v", node)
	}
}

// The command asks the controller of this host which instances must be stopped, and why.
func TestDoctorWithoutHotplug(t *testing.T) {
	t.Parallel()
	h := &host{dir: shortDir(t), noHotplug: true}
	h.start(t, false)
	environ := append(h.rackEnv(t), h.environ...)
	if got := runPlugin(t, environ, "doctor"); strings.Contains(got.stdout, "its restart") {
		t.Errorf("before: %+v", got)
	}
	h.ok(t, "volume", "create", "x", "--size=1GiB")
	if got := runPlugin(t, environ, "explain", "x"); !strings.HasPrefix(got.stdout, "Works: ") {
		t.Errorf("before: %+v", got)
	}
	h.fails(t, 5, "volume", "attach", "x", "--node="+h.sim.Instances[0].ID)
	if got := runPlugin(t, environ, "explain", "x"); !strings.HasPrefix(got.stdout, "RackHasNoHotplug: ") ||
		!strings.Contains(got.stdout, fault.RackHasNoHotplug.OnHosts) ||
		!strings.Contains(got.stdout, "node "+h.sim.Instances[0].Name) {
		t.Errorf("explain does not say what show says: %+v", got)
	}
	node := h.sim.Instances[0]
	h.ok(t, "volume", "create", "left", "--size=1GiB")
	must(t, h.sim.SetRunState(t.Context(), node.ID, "stopped"))
	h.ok(t, "volume", "attach", "left", "--node="+node.ID)
	must(t, h.sim.SetRunState(t.Context(), node.ID, "running"))
	h.fails(t, 5, "volume", "detach", "left", "--node="+node.ID, "--unmounted")
	named := "node " + node.Name + " (" + node.ID + ")"
	if got := runPlugin(t, environ, "explain", "left"); !strings.HasPrefix(got.stdout, "RackHasNoHotplug: ") ||
		!strings.Contains(got.stdout, "it waits to be detached from "+named) {
		t.Errorf("explain does not say that the disk is to leave: %+v", got)
	}
	for _, command := range [][]string{{"volume", "delete", "left"}, {"volume", "expand", "left", "--size=2GiB"}} {
		if said := h.fails(t, 5, command...); !strings.Contains(said, "is attached to "+named+" and is not ") {
			t.Errorf("%v does not name the node: %s", command, said)
		}
	}
	if got := runPlugin(
		t,
		environ,
		"doctor",
	); got.code != 1 || !strings.Contains(got.stdout, "must be stopped manually since ") ||
		strings.Contains(got.stdout, "its restart") || !strings.Contains(got.stdout, "instance "+h.sim.Instances[0].Name) {
		t.Errorf("doctor does not say why: %+v", got)
	}
	must(t, h.controller.Stop())
	if got := runPlugin(t, environ, "doctor"); strings.Contains(got.stdout, "its restart") {
		t.Errorf("without a controller: %+v", got)
	}
}
