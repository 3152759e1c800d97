// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
)

// The commands show planned restarts on a rack without hot-plug: of a volume that waits to be attached, of an
// unpublished volume that is still attached, and of a volume that moves to another node.
func TestVolumeCommandsShowPendingRestarts(t *testing.T) {
	t.Parallel()
	later := time.Now().UTC().Add(6 * time.Hour)
	h := &host{dir: shortDir(t), noHotplug: true, args: []string{
		"--attach-mode=restart",
		"--restart-shutdown=hard",
		"--metadata=none",
		"--restart-window=1s",
		"--restart-cool-down=0s",
		"--restart-hours=" + later.Format("Mon 15:04-") + later.Add(time.Hour).Format("15:04"),
	}}
	h.start(t, false, "--instances=node-a,node-b")
	first, second := h.sim.Instance("node-a"), h.sim.Instance("node-b")
	// Restarts are printed in the order of the nodes' IDs, which differs from run to run.
	if first.ID > second.ID {
		first, second = second, first
	}
	a, b := first.ID, second.ID
	h.replacements = []string{h.dir, "DIR", a, "NODE-A", first.Name, "NAME-A", b, "NODE-B", second.Name, "NAME-B"}
	node := func(id string) string { return "--node=" + id }
	// shows waits until volume show prints the text.
	shows := func(volume, text string) {
		t.Helper()
		await.Eventually(
			t,
			"volume show prints "+text,
			func() bool { return strings.Contains(h.run(t, "volume", "show", volume).stdout, text) },
		)
	}
	one := strings.TrimSpace(h.run(t, "volume", "create", "volume-one", "--size=1GiB").stdout)
	other := strings.TrimSpace(h.run(t, "volume", "create", "volume-other", "--size=1GiB").stdout)
	unpublished, waiting := one, other // volumes are listed by name
	for _, v := range []struct{ id, name string }{{unpublished, "UNPUBLISHED"}, {waiting, "WAITING"}} {
		var shown struct{ Name, DiskName string }
		must(t, json.Unmarshal([]byte(h.run(t, "volume", "show", v.id, "--json").stdout), &shown))
		h.replacements = append(h.replacements, v.id, v.name, shown.DiskName, "DISK-"+v.name, shown.Name, "NAME-"+v.name)
	}
	h.ok(t, "volume", "list")
	h.ok(t, "volume", "show", waiting)

	must(t, h.sim.SetRunState(t.Context(), a, "stopped"))
	h.ok(t, "volume", "attach", unpublished, node(a))
	must(t, h.sim.SetRunState(t.Context(), a, "running"))
	h.ok(t, "volume", "detach", unpublished, node(a), "--unmounted")
	h.ok(t, "volume", "show", unpublished)
	h.ok(t, "volume", "show", unpublished, "--json")

	attach := h.run(t, "volume", "attach", waiting, node(a))
	if attach.code != 3 {
		t.Errorf("attach: %+v", attach)
	}
	shows(waiting, "--restart-hours")
	h.ok(t, "volume", "show", waiting)
	h.ok(t, "volume", "show", waiting, "--json")
	h.ok(t, "volume", "list")

	attach = h.run(t, "volume", "attach", unpublished, node(b))
	if attach.code != 3 || !strings.Contains(attach.stderr, a+") has it and restarts first") {
		t.Errorf("attach: %+v", attach)
	}
	shows(unpublished, "must be restarted first")
	h.ok(t, "volume", "show", unpublished)
	h.ok(t, "volume", "list")
	h.compare(t, "testdata/restart.txt")

	// The JSON of each volume contains the restarts of the volume.
	var list []struct {
		VolumeID          string
		WaitsFor, StillOn struct{ NodeID, Reason, Problem string }
	}
	must(t, json.Unmarshal([]byte(h.ok(t, "volume", "list", "--json")), &list))
	got := map[string]string{}
	for _, v := range list {
		got[v.VolumeID] = fmt.Sprintf("%s %s %t, %s %s",
			v.WaitsFor.NodeID, v.WaitsFor.Reason, v.WaitsFor.Problem != "", v.StillOn.NodeID, v.StillOn.Reason)
	}
	want := map[string]string{waiting: a + " hours false,  ", unpublished: b + " other-restart true, " + a + " hours"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("volume list --json (-want +got):\n%s", diff)
	}
	if calls, err := h.sim.Calls(t.Context()); err != nil || calls.Counts["instance_stop"] > 0 {
		t.Errorf("%v: an instance was stopped outside of the hours: %v", err, calls.Counts)
	}
}

// In attach mode hot the commands show which node must be stopped, and for which volumes.
func TestVolumeCommandsShowNodesToStop(t *testing.T) {
	t.Parallel()
	h := &host{dir: shortDir(t), noHotplug: true}
	h.start(t, false)
	node := h.sim.Instances[0]
	id := h.ok(t, "volume", "create", "v", "--size=1GiB")
	if before := h.ok(t, "volume", "list"); strings.Contains(before, "restart") {
		t.Errorf("before a request: %s", before)
	}
	h.fails(t, 5, "volume", "attach", id, "--node="+node.ID)
	list, show := h.ok(t, "volume", "list"), h.ok(t, "volume", "show", id)
	if !regexp.MustCompile(`(?m)^node ` + node.Name + ` must be stopped manually \(.*--attach-mode=hot stops nothing; .*\):` +
		`\n  attach v, requested since `).
		MatchString(list) {
		t.Errorf("volume list: %s", list)
	}
	if !strings.Contains(show, "to be attached to node "+node.Name) ||
		!strings.Contains(show, "must be stopped manually (") {
		t.Errorf("volume show: %s", show)
	}
	must(t, h.sim.SetRunState(t.Context(), node.ID, "stopped"))
	if attach := h.run(t, "volume", "attach", id, "--node="+node.ID, "--wait"); attach.code != 0 {
		t.Errorf("after the stop: %+v", attach)
	}
	if after := h.ok(t, "volume", "list"); strings.Contains(after, "restart") {
		t.Errorf("after the attach: %s", after)
	}
}

// A volume moves from a node that nothing else waits for: the command says at once what it waits for.
func TestMoveWaitsForTheOtherNode(t *testing.T) {
	t.Parallel()
	h := &host{dir: shortDir(t), noHotplug: true, args: []string{
		"--attach-mode=restart", "--restart-shutdown=hard", "--metadata=none", "--restart-cool-down=0s",
	}}
	h.start(t, false, "--instances=node-a,node-b")
	h.ok(t, "volume", "create", "v", "--size=1GiB")
	must(t, h.sim.SetRunState(t.Context(), h.sim.Instance("node-a").ID, "stopped"))
	h.ok(t, "volume", "attach", "v", "--node=node-a")
	must(t, h.sim.SetRunState(t.Context(), h.sim.Instance("node-a").ID, "running"))
	h.ok(t, "volume", "detach", "v", "--node=node-a", "--unmounted")
	said := h.fails(t, 3, "volume", "attach", "v", "--node=node-b")
	if want := "node node-a (" + h.sim.Instance("node-a").ID +
		") has it and restarts first: further requests are collected for 10s: "; !strings.Contains(said, want) {
		t.Errorf("attach says %s, want %q", said, want)
	}
}

// The commands show the step and the ID of a restart in progress.
func TestVolumeCommandsShowARestartInProgress(t *testing.T) {
	t.Parallel()
	h := &host{dir: shortDir(t), noHotplug: true, args: []string{
		"--attach-mode=restart",
		"--restart-shutdown=hard",
		"--metadata=none",
		"--restart-window=1s",
		"--restart-cool-down=0s",
	}}
	h.start(t, false, "--state-time=5s") // long enough for a `volume list` on a busy machine
	node := h.sim.Instances[0].ID
	id := h.ok(t, "volume", "create", "v", "--size=1GiB")
	if attach := h.run(t, "volume", "attach", id, "--node="+node); attach.code != 3 {
		t.Errorf("attach: %+v", attach)
	}
	inProgress := regexp.MustCompile(
		`(?m)^node ` + h.sim.Instances[0].Name + ` is being restarted \(stopping\):\n  attach v, requested since `,
	)
	await.Eventually(
		t,
		"volume list shows that the node is being restarted",
		func() bool { return inProgress.MatchString(h.run(t, "volume", "list").stdout) },
	)
	var shown struct {
		WaitsFor struct{ Reason, RestartID string }
	}
	must(t, json.Unmarshal([]byte(h.run(t, "volume", "show", id, "--json").stdout), &shown))
	if shown.WaitsFor.Reason != "under-way" || shown.WaitsFor.RestartID == "" {
		t.Errorf("volume show --json prints %+v", shown)
	}
	await.Eventually(
		t,
		"the volume is attached",
		func() bool { return h.run(t, "volume", "attach", id, "--node="+node).code == 0 },
	)
	if attach := h.ok(t, "volume", "list"); !strings.Contains(attach, "no node needs a restart") {
		t.Errorf("after the restart: %s", attach)
	}
}

// Others start the instance as soon as the plugin has stopped it. Every command that shows the volume says so.
func TestCommandsSayThatOthersStartedTheNode(t *testing.T) {
	t.Parallel()
	h := &host{dir: shortDir(t), noHotplug: true, args: []string{
		"--attach-mode=restart",
		"--restart-shutdown=hard",
		"--metadata=none",
		"--restart-window=1s",
		"--restart-cool-down=5s",
	}}
	h.start(t, false)
	node := h.sim.Instances[0].ID
	id := h.ok(t, "volume", "create", "v", "--size=1GiB")
	must(t, h.sim.Starter(t.Context(), node, time.Millisecond))
	attach := []string{"volume", "attach", id, "--node=" + node}
	h.fails(t, 3, attach...)
	environ := append(h.rackEnv(t), h.environ...)
	for _, command := range [][]string{{"volume", "show", id}, {"volume", "list"}, {"explain", id}, attach} {
		await.Eventually(t, strings.Join(command[:2], " ")+" says it", func() bool {
			got := runPlugin(t, environ, command...)
			met := command[1] == "attach" && got.code == 0 // the instance just when it was stopped
			return met || strings.Contains(got.stdout+got.stderr, "others started it at ")
		})
	}
}
