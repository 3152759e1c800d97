// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build nomad

package nomad_test

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
)

const (
	// defaultGrace is the grace period of the job files.
	defaultGrace = time.Minute
	// redeployed is how long a redeployment on the same client may take here, beside other tests. On a machine of its own
	// it is at most 5 s (make bench-nomad), of which Nomad takes some 3 s.
	redeployed = 20 * time.Second
)

// TestDeferredDetach uses the default timings of Nomad and of the job files: how long a volume is away, and what is
// left of it when a controller ends at the wrong moment.
func TestDeferredDetach(t *testing.T) {
	t.Parallel() // it waits most of the time
	c := newCluster(t, "")
	c.install(t)
	operator := c.operator(t)
	operator.run(t, "volume", "create", "volumes/create.volume.hcl")
	first := c.example(t, operator, "data", "node-a")
	c.lines(t, operator, first, first)

	var second, third, fourth, fifth string
	c.part("redeployment on the same client", func(t *testing.T) { second = c.redeploy(t, operator, first) })
	c.lines(t, operator, second, first, second)
	c.part("move to another client", func(t *testing.T) {
		began := time.Now()
		c.stopped(t, operator)
		third = c.example(t, operator, "data", "node-b")
		c.took(t, "move to another client", began, defaultGrace, defaultGrace+time.Minute)
	})
	c.lines(t, operator, third, first, second, third)
	c.part("the controller is killed and moved within the grace period", func(t *testing.T) {
		began := time.Now()
		c.stopped(t, operator)
		from := c.controller(t).NodeName
		c.clients[from].signal(c.clients[from].plugin("controller"), syscall.SIGKILL)
		c.moveController(t, nodes[1-slices.Index(nodes, from)])
		// The new controller counts the grace period from its own start.
		most := time.Since(began) + defaultGrace + time.Minute
		fourth = c.example(t, operator, "data", "node-a")
		c.took(t, "move after the controller's death", began, defaultGrace, most)
	})
	c.lines(t, operator, fourth, first, second, third, fourth)
	c.part("a volume that is released while there is no controller", func(t *testing.T) {
		began := c.releasedWithoutUnpublish(t, operator, "node-b")
		fifth = c.placed("node-b")
		c.took(t, "move after a release without an unpublish", began, defaultGrace, defaultGrace+2*time.Minute)
	})
	c.lines(t, operator, fifth, first, second, third, fourth, fifth)
	c.part("the recipe for a stuck disk", func(t *testing.T) { c.stuck(t, operator) })
}

// A drain by force ends the node plugin at once with the jobs that use volumes. The plugin still unmounts for them, and
// then the disk leaves.
func TestDrainByForce(t *testing.T) {
	t.Parallel() // it waits most of the time
	c := newCluster(t, impatient)
	c.grace = "5s"
	c.install(t)
	operator, root := c.operator(t), c.as(c.management)
	operator.run(t, "volume", "create", "volumes/create.volume.hcl")
	first := c.example(t, operator, "data", "node-a")
	c.lines(t, operator, first, first)
	volume, _, err := c.admin.CSIVolumes().Info("data", nil)
	must(t, err)
	c.moveController(t, "node-b")

	m, id := c.clients["node-a"], c.node("node-a").ID
	unstaged := m.answered("NodeUnstageVolume")
	root.run(t, "node", "drain", "-enable", "-force", "-yes", "-detach", id)
	m.eventually("the volume is unmounted", func() bool { return m.answered("NodeUnstageVolume") > unstaged })
	if at := c.holder(t, volume.ExternalID); at != "node-a" {
		t.Errorf("when it was unmounted, its disk was on %q", at)
	}
	m.eventually("the disk has left", func() bool { return c.holder(t, volume.ExternalID) == "" })
	root.run(t, "node", "eligibility", "-enable", id)
	c.healthy(1, 2)
	second := c.example(t, operator, "data", "node-a")
	c.lines(t, operator, second, first, second)
	c.stop(t, operator, "data")
}

// redeploy changes the job, so that Nomad replaces its allocation. The disk stays attached.
func (c *cluster) redeploy(t *testing.T, operator cli, old string) (alloc string) {
	t.Helper()
	must(t, c.sim.ClearCalls(t.Context()))
	operator.variables = []string{"NOMAD_VAR_volume=data", "NOMAD_VAR_client=node-a"}
	began := time.Now()
	operator.run(t, "job", "run", "-detach", c.filled(t, "example.nomad.hcl", "memory = 32", "memory = 33"))
	c.server.eventually("another allocation runs", func() bool {
		alloc = c.placed("node-a")
		return alloc != old
	})
	c.took(t, "redeployment on the same client", began, 0, redeployed)
	calls, err := c.sim.Calls(t.Context())
	must(t, err)
	if n := calls.Counts["instance_disk_detach"]; n > 0 {
		t.Errorf("%d detaches", n)
	}
	// Nothing detaches the disk at the end of the grace period of the old allocation's unpublish.
	all, open := c.deferred(t)
	t.Logf("after the redeployment the rack has %d records of deferred detaches", all)
	if open > 0 {
		t.Errorf("%d of them would still be carried out", open)
	}
	return alloc
}

// stopped stops the example, and waits until Nomad has released its volume.
func (c *cluster) stopped(t *testing.T, operator cli) {
	t.Helper()
	operator.run(t, "job", "stop", "-detach", "example")
	c.unclaimed("data")
}

// took checks and logs how long something took. make bench-nomad names a file, to which the time is appended.
func (c *cluster) took(t *testing.T, what string, began time.Time, least, most time.Duration) {
	t.Helper()
	took := time.Since(began).Round(100 * time.Millisecond)
	t.Logf("measured: %s: %s", what, took)
	if took < least || took > most {
		t.Errorf("%s took %s, want %s to %s", what, took, least, most)
	}
	name := os.Getenv("OXIDE_CSI_MEASURED")
	if name == "" {
		return
	}
	file, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	must(t, err)
	must(t, json.NewEncoder(file).Encode(map[string]any{"Name": what, "Seconds": took.Seconds()}))
	must(t, file.Close())
}

// releasedWithoutUnpublish stops the example while there is no controller. Nomad then asks no controller to detach the
// disk. The example is run again on another client, and the result is the time of that.
func (c *cluster) releasedWithoutUnpublish(t *testing.T, operator cli, client string) (began time.Time) {
	t.Helper()
	root := c.installer(c.values()...)
	root.run(t, "job", "stop", "-detach", "oxide-csi-controller")
	c.healthy(0, 2)
	c.stopped(t, operator)
	c.says(t, "ControllerNotRunning: ", "explain", "data")
	c.says(t, "oxide: 0 of", "doctor")
	root.run(t, "job", "run", "controller.nomad.hcl")
	c.healthy(1, 2)
	operator.variables = []string{"NOMAD_VAR_volume=data", "NOMAD_VAR_client=" + client}
	operator.run(t, "job", "run", "-detach", "example.nomad.hcl")
	return time.Now()
}

// detach detaches a disk by hand, as docs/how-to/troubleshooting-nomad.md says.
func (c *cluster) detach(t *testing.T, volumeID, from string) {
	t.Helper()
	c.installer().run(t, "alloc", "exec", "-job", "oxide-csi-controller", programs.Plugin,
		"volume", "detach", volumeID, "--node="+from, "--unmounted")
}

// waitsInSilence checks that Nomad does not show why an allocation waits for its volume, as
// docs/how-to/troubleshooting-nomad.md says: the allocation is pending, its only event is that the client received it,
// and no status has the plugin's reason.
func (c *cluster) waitsInSilence(t *testing.T, client, reason string) {
	t.Helper()
	var waits *api.Allocation
	c.server.eventually("the example waits on "+client, func() bool {
		allocs, _, err := c.admin.Jobs().Allocations("example", false, nil)
		if err != nil {
			return false
		}
		i := slices.IndexFunc(allocs, func(a *api.AllocationListStub) bool {
			return a.NodeName == client && a.DesiredStatus == api.AllocDesiredStatusRun &&
				a.ClientStatus == api.AllocClientStatusPending
		})
		if i < 0 {
			return false
		}
		waits, _, err = c.admin.Allocations().Info(allocs[i].ID, nil)
		return err == nil
	})
	for task, state := range waits.TaskStates {
		for _, event := range state.Events {
			if event.Type != api.TaskReceived {
				t.Errorf("task %s waits with the event %s: %s", task, event.Type, event.DisplayMessage)
			}
		}
	}
	root := c.as(c.management)
	for _, args := range [][]string{
		{"alloc", "status", "-verbose", waits.ID},
		{"job", "status", "-verbose", "example"},
		{"volume", "status", "-verbose", "data"},
		{"plugin", "status", "-verbose", "oxide"},
	} {
		if said := root.run(t, args...); strings.Contains(said, reason) {
			t.Errorf("nomad %s says why the allocation waits:\n%s", strings.Join(args, " "), said)
		}
	}
	c.healthy(1, 2)
}

// stuck follows docs/how-to/troubleshooting-nomad.md for a volume that was released without an unpublish, with a
// controller that may not read the claims.
func (c *cluster) stuck(t *testing.T, operator cli) {
	t.Helper()
	root := c.installer(c.values()...)
	root.run(t, "acl", "policy", "delete", controllerPolicy)
	defer c.allowController(t, "oxide-csi-controller")
	c.releasedWithoutUnpublish(t, operator, "node-a")
	instance := c.sim.Instance("node-b").ID
	c.server.eventually("the controller's log names the instance that has the disk", func() bool {
		log, _, err := root.try("alloc", "logs", "-namespace="+pluginNamespace, "-stderr", "-job", "oxide-csi-controller")
		return err == nil && strings.Contains(log, "[AttachedElsewhere]") && strings.Contains(log, instance) &&
			strings.Contains(log, "cannot find out whether the volume is used")
	})
	c.waitsInSilence(t, "node-a", "attached to instance")
	c.says(t, "AttachedElsewhere: ", "explain", "data")
	volume, _, err := c.admin.CSIVolumes().Info("data", nil)
	must(t, err)
	// The documented command has the documented path of the program.
	said := root.run(t, "alloc", "exec", "-job", "oxide-csi-controller", programs.Plugin, "volume", "list")
	if !strings.Contains(said, volume.ExternalID) || !strings.Contains(said, "node-b") {
		t.Errorf("volume list: %s", said)
	}
	c.detach(t, volume.ExternalID, "node-b")
	c.placed("node-a")
	c.stopped(t, operator)
	// The controller may not read the claims, so it detaches nothing by itself.
	c.detach(t, volume.ExternalID, "node-a")
	await.Within(t, waitLimit, "the volume can be deleted", func() bool {
		_, _, err := operator.try("volume", "delete", "data")
		return err == nil
	})
	c.nothingLeft(t)
}
