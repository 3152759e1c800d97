// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build nomad

package nomad_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/nomad/api"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// red is a namespace of another team.
const red = "red"

// TestTwoNamespaces has a disk with a volume in two namespaces, as docs/explanation/nomad.md says. A job uses
// the disk, and a job of the other namespace is placed on the same client. The node refuses that job. Nothing is taken
// from the job that runs.
func TestTwoNamespaces(t *testing.T) {
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

	root.run(t, "namespace", "apply", red)
	inRed := []string{`namespace = "default"`, `namespace = "red"`, `namespace   = "default"`, `namespace   = "red"`}
	c.part("a second ID by volume create", func(t *testing.T) {
		_, stderr, err := root.try("volume", "create", c.filled(t, "volumes/create.volume.hcl", inRed...))
		if err == nil || !strings.Contains(stderr, "under another ID or in another namespace") {
			t.Errorf("%v: %s", err, stderr)
		}
	})
	disk := strings.TrimSpace(operator.run(t, "volume", "status", "-type=csi", "-t", "{{.Context.diskName}}", "data"))
	root.run(t, "volume", "register", c.filled(t, "volumes/register.volume.hcl",
		append(inRed, "existing", "data", "DISK-ID", volume.ExternalID, "DISK-NAME", disk)...))

	c.part("a job of the other namespace is refused", func(t *testing.T) { c.second(t, "node-a") })
	c.part("nothing is taken from the job that runs", func(t *testing.T) {
		c.logs(t, "a workload on the instance has claimed the volume", first[:8])
		await.Within(t, waitLimit, "the request is dropped", func() bool {
			_, open := c.deferred(t)
			return open == 0
		})
		if at := c.holder(t, volume.ExternalID); at != "node-a" {
			t.Fatalf("the disk is attached to %q", at)
		}
		c.running(first)
		must(t, c.writes(first))
	})
	c.part("the volume moves when the job does", func(t *testing.T) {
		c.stopped(t, operator)
		second := c.example(t, operator, "data", "node-b")
		c.lines(t, operator, second, first, "the test", second)
	})
	c.stop(t, operator, "data")
	c.part("a deletion takes nothing from the other namespace", func(t *testing.T) {
		for _, user := range []cli{operator, c.as(c.management, "NOMAD_NAMESPACE="+red)} {
			if _, stderr, err := user.try("volume", "delete", "data"); err == nil || !strings.Contains(stderr, "under 2 IDs") {
				t.Errorf("%v: %s", err, stderr)
			}
		}
		c.as(c.management, "NOMAD_NAMESPACE="+red).run(t, "volume", "deregister", "data")
		operator.run(t, "volume", "delete", "data")
	})
	c.nothingLeft(t)
}

// second runs a job of the namespace red on a client, once. It waits until the node has refused it and Nomad has
// released its claim.
func (c *cluster) second(t *testing.T, client string) {
	t.Helper()
	user := c.as(c.management, "NOMAD_VAR_volume=data", "NOMAD_VAR_client="+client)
	user.run(t, "job", "run", "-detach", c.filled(t, "example.nomad.hcl",
		`job "example" {`, fmt.Sprintf("job \"second\" {\n  namespace = %q", red),
		`group "example" {`, "group \"example\" {\n    reschedule {\n      attempts  = 0\n      unlimited = false\n    }\n"))
	query := &api.QueryOptions{Namespace: red}
	await.Within(t, waitLimit, "the node has refused the second job", func() bool {
		allocs, _, err := c.admin.Jobs().Allocations("second", false, query)
		return err == nil && len(allocs) == 1 && strings.Contains(failure(allocs), "already mounted at")
	})
	await.Within(t, waitLimit, "Nomad has released its claim", func() bool {
		info, _, err := c.admin.CSIVolumes().Info("data", query)
		return err == nil && len(info.ReadAllocs)+len(info.WriteAllocs) == 0
	})
	user.variables = []string{"NOMAD_NAMESPACE=" + red}
	user.run(t, "job", "stop", "-detach", "second")
}

// writes appends a line to the file of the example's volume, and reads it back from the disk.
func (c *cluster) writes(alloc string) error {
	_, stderr, err := c.as(c.management).try("alloc", "exec", alloc, "/bin/sh", "-c",
		"echo written by the test >>/data/lines && sync && cat /data/lines >/dev/null")
	if err != nil {
		return fmt.Errorf("%w: %s", err, stderr)
	}
	return nil
}

// TestDisagreements has on a real Nomad what TestNothingWorksWhileTwoDisagree of orchestrator/nomad has against its
// API: the verdicts about an allocation whose disk, claim, client and rack disagree.
func TestDisagreements(t *testing.T) {
	t.Parallel() // it waits most of the time
	c := newCluster(t, impatient)
	c.install(t)
	operator, root := c.operator(t), c.installer(c.values()...)
	operator.run(t, "volume", "create", "volumes/create.volume.hcl")
	alloc := c.example(t, operator, "data", "node-a")
	c.lines(t, operator, alloc, alloc)
	volume, _, err := c.admin.CSIVolumes().Info("data", nil)
	must(t, err)
	c.says(t, "Works: ", "explain", alloc)
	c.part("a host volume of the same name", func(t *testing.T) { c.sameName(t, operator, volume.ExternalID) })

	c.part("a canary waits for the claim of another", func(t *testing.T) {
		operator.variables = []string{"NOMAD_VAR_volume=data", "NOMAD_VAR_client=node-a"}
		operator.run(t, "job", "run", "-detach", c.filled(t, "example.nomad.hcl", `group "example" {`,
			"group \"example\" {\n    update {\n      canary = 1\n    }\n", "memory = 32", "memory = 33"))
		canary := ""
		c.server.eventually("the canary waits", func() bool {
			allocs, _, err := c.admin.Jobs().Allocations("example", false, nil)
			i := slices.IndexFunc(allocs, func(a *api.AllocationListStub) bool {
				return a.ID != alloc && a.ClientStatus == api.AllocClientStatusPending
			})
			if err == nil && i >= 0 {
				canary = allocs[i].ID
			}
			return canary != ""
		})
		c.says(t, "ClaimHeld: ", "explain", canary)
		operator.run(t, "job", "run", "-detach", "example.nomad.hcl")
	})
	c.part("its client has no plugin", func(t *testing.T) {
		root.run(t, "job", "run", "-detach", c.filled(t, "node.nomad.hcl", `"${attr.kernel.name}"
    value     = "linux"`, `"${node.unique.name}"
    value     = "node-b"`))
		c.follow(t, c.says(t, "PluginNotRegistered: ", "explain", alloc))
		root.run(t, "job", "run", "-detach", "node.nomad.hcl")
		c.healthy(1, 2)
	})
	c.part("it has no claim", func(t *testing.T) { alloc = c.withoutClaim(t, operator, alloc) })
	c.part("its mounts are gone", func(t *testing.T) { alloc = c.unmounted(t, operator, alloc) })
	c.part("its disk is detached, and then attached elsewhere", func(t *testing.T) {
		client, err := c.sim.Client()
		must(t, err)
		disk := oxide.NameOrId(volume.ExternalID)
		_, err = client.InstanceDiskDetach(t.Context(), oxide.InstanceDiskDetachParams{
			Instance: oxide.NameOrId(c.sim.Instance("node-a").ID), Body: &oxide.DiskPath{Disk: disk},
		})
		must(t, err)
		c.says(t, "RunsWithoutDisk: ", "explain", alloc)
		c.says(t, "and its disk is detached", "doctor")
		elsewhere := c.sim.Instance("node-b").ID
		_, err = client.InstanceDiskAttach(t.Context(), oxide.InstanceDiskAttachParams{
			Instance: oxide.NameOrId(elsewhere), Body: &oxide.DiskPath{Disk: disk},
		})
		must(t, err)
		c.says(t, "RunsWithoutDisk: ", "explain", alloc)
		c.says(t, "and its disk is attached to "+elsewhere, "doctor")
	})
}

// withoutClaim stops the example, whose task goes on for its shutdown_delay, and deregisters the volume by force. Nomad
// calls the allocation pending. Then its task ends, and the next allocation, which is the result, claims the volume.
func (c *cluster) withoutClaim(t *testing.T, operator cli, old string) (next string) {
	operator.variables = []string{"NOMAD_VAR_volume=data", "NOMAD_VAR_client=node-a"}
	operator.run(t, "job", "run", "-detach", c.filled(t, "example.nomad.hcl", `kill_timeout = "1s"`,
		"kill_timeout = \"1s\"\n      shutdown_delay = \"1h\"", "memory = 32", "memory = 34"))
	alloc := ""
	c.server.eventually("the allocation with a delay runs", func() bool {
		alloc = c.placed("node-a")
		return alloc != old
	})
	c.lines(t, operator, alloc, old, alloc)
	operator.run(t, "job", "stop", "-detach", "example")
	c.follow(t, c.says(t, "WorkloadTerminating: ", "explain", alloc))
	must(t, c.writes(alloc))
	c.registerAgain(t, operator)
	c.says(t, "RunsWithoutClaim: ", "explain", alloc)
	c.says(t, "which does not claim it", "doctor")
	must(t, c.writes(alloc))
	c.as(c.management).run(t, "alloc", "signal", "-s=SIGKILL", alloc)
	next = c.example(t, operator, "data", "node-a")
	c.lines(t, operator, next, old, alloc, "the test", "the test", next)
	c.says(t, "Works: ", "explain", next)
	return next
}

// unmounted unmounts the example's volume on its client, and does what explain says. The workload still has its own
// mount. The result is the next allocation.
func (c *cluster) unmounted(t *testing.T, operator cli, alloc string) (next string) {
	m := c.clients["node-a"]
	m.says(t, "writable", "explain", alloc)
	table, err := os.ReadFile(fmt.Sprintf("/proc/%d/mounts", m.agent()))
	must(t, err)
	for line := range strings.Lines(string(table)) {
		if at := strings.Fields(line)[1]; strings.Contains(at, "/client/csi/") {
			_, stderr, err := c.as("").tryProgram("nsenter", append(m.namespaces(), "umount", at)...)
			if err != nil {
				t.Fatalf("umount: %v: %s", err, stderr)
			}
		}
	}
	said := m.says(t, "RunsWithoutMount: ", "explain", alloc)
	m.says(t, "and nothing of its disk is mounted on this node", "doctor")
	must(t, c.writes(alloc))
	c.follow(t, said)
	c.server.eventually("the next allocation runs", func() bool {
		next = c.placed("node-a")
		return next != alloc
	})
	c.printed[next] = c.printed[alloc] // each allocation prints the whole file
	c.lines(t, operator, next, "the test", next)
	m.says(t, "writable", "explain", next)
	return next
}

// sameName makes a host volume with the name of a CSI volume, as docs/how-to/troubleshooting-nomad.md says.
func (c *cluster) sameName(t *testing.T, operator cli, externalID string) {
	file := filepath.Join(c.dir, "host.volume.hcl")
	c.write(file, fmt.Sprintf(`type = "host"
name = "data"
plugin_id = "mkdir"
node_id = %q
capability {
  access_mode = "single-node-writer"
  attachment_mode = "file-system"
}
`, c.node("node-b").ID))
	root := c.as(c.management)
	root.run(t, "volume", "create", file)
	if shown := root.run(t, "volume", "status", "data"); strings.Contains(shown, externalID) ||
		!strings.Contains(shown, "mkdir") {
		t.Errorf("without -type Nomad shows %s", shown)
	}
	if shown := root.run(t, "volume", "status", "-type=csi", "data"); !strings.Contains(shown, externalID) {
		t.Errorf("with -type=csi Nomad shows %s", shown)
	}
	// Without -type the CSI volume is deleted.
	if _, stderr, err := operator.try("volume", "delete", "data"); err == nil ||
		!strings.Contains(stderr, "is attached to instance") {
		t.Errorf("delete: %v: %s", err, stderr)
	}
	hosts, _, err := c.admin.HostVolumes().List(nil, nil)
	must(t, err)
	root.run(t, "volume", "delete", "-type=host", hosts[0].ID)
}

// TestClaimsThatStay has disks and claims that are left over: of a job that ends and comes back again and again, and of
// a snapshot of Nomad's state.
func TestClaimsThatStay(t *testing.T) {
	t.Parallel() // it waits most of the time
	c := newCluster(t, impatient)
	c.grace = "10s"
	c.install(t)
	operator := c.operator(t)
	operator.run(t, "volume", "create", "volumes/create.volume.hcl")
	c.part("a volume was deregistered below a task that goes on", func(t *testing.T) { c.deregistered(t, operator) })
	operator.run(t, "volume", "create", "volumes/create.volume.hcl")
	// A rack that is only preferred, and that nobody serves, keeps nothing from being made.
	operator.run(t, "volume", "create", c.filled(t, "volumes/create.volume.hcl", `"data"`, `"sweep"`,
		"required {", "preferred {", `/rack" = "default"`, `/rack" = "elsewhere"`))
	c.part("a periodic job keeps the last slot", func(t *testing.T) { c.periodic(t, operator) })
	c.part("a snapshot brings a claim back", func(t *testing.T) { c.claimFromSnapshot(t, operator) })
	operator.run(t, "volume", "delete", "sweep")
	operator.run(t, "volume", "delete", "data")
	c.nothingLeft(t)
}

// periodic runs a periodic job twice on an instance with room for one volume. The second request to detach its disk
// may be an old one, so it has no time. A job with another volume still gets the slot.
func (c *cluster) periodic(t *testing.T, operator cli) {
	must(t, c.sim.Set(t.Context(), simtest.Settings{MaxDisks: new(2)}))
	sweep, _, err := c.admin.CSIVolumes().Info("sweep", nil)
	must(t, err)
	operator.variables = []string{"NOMAD_VAR_volume=sweep", "NOMAD_VAR_client=node-a"}
	operator.run(
		t,
		"job",
		"run",
		c.filled(t, "example.nomad.hcl", `job "example" {`, "job \"sweep\" {\n  type = \"batch\"\n"+
			"  periodic {\n    crons = [\"0 0 1 1 *\"]\n  }\n", " && exec sleep 1000000", ""),
	)
	var runs []string
	for n := range 2 {
		operator.run(t, "job", "periodic", "force", "sweep")
		c.server.eventually("the periodic job has run", func() bool {
			allocs, _, err := c.admin.Allocations().List(&api.QueryOptions{
				Filter: `JobID contains "sweep/periodic-" and ClientStatus == "complete"`,
			})
			for _, a := range allocs {
				if !slices.Contains(runs, a.ID) {
					runs = append(runs, a.ID)
				}
			}
			return err == nil && len(runs) > n
		})
		c.unclaimed("sweep")
	}
	c.lines(t, operator, runs[1], runs...)
	if all, open := c.deferred(t); all != 1 || open > 0 {
		t.Errorf("%d records of detaches, %d of them with a time", all, open)
	}
	if at := c.holder(t, sweep.ExternalID); at != "node-a" {
		t.Errorf("the disk of the periodic job is attached to %q", at)
	}
	began := time.Now()
	operator.variables = []string{"NOMAD_VAR_volume=data", "NOMAD_VAR_client=node-a"}
	operator.run(t, "job", "run", "-detach", "example.nomad.hcl")
	c.says(t, "DetachDeferred: ", "explain", "data")
	alloc := c.placed("node-a")
	c.lines(t, operator, alloc, alloc)
	t.Logf("measured: the slot of a periodic job's volume is free after %s", since(began))
	if at := c.holder(t, sweep.ExternalID); at != "" {
		t.Errorf("the disk of the periodic job is attached to %q", at)
	}
}

// deregistered stops the example, whose task goes on for its shutdown_delay, and registers the volume again. The claim
// is gone then. A job on the other client gets the disk only when that task has ended.
func (c *cluster) deregistered(t *testing.T, operator cli) {
	operator.variables = []string{"NOMAD_VAR_volume=data", "NOMAD_VAR_client=node-a"}
	operator.run(t, "job", "run", "-detach", c.filled(t, "example.nomad.hcl", `kill_timeout = "1s"`,
		"kill_timeout = \"1s\"\n      shutdown_delay = \"1h\""))
	delays := c.placed("node-a")
	c.lines(t, operator, delays, delays)
	operator.run(t, "job", "stop", "-detach", "example")
	volume, _, err := c.admin.CSIVolumes().Info("data", nil)
	must(t, err)
	c.registerAgain(t, operator)

	operator.variables = []string{"NOMAD_VAR_volume=data", "NOMAD_VAR_client=node-b"}
	operator.run(t, "job", "run", "-detach", "example.nomad.hcl")
	c.logs(t, delays[:8], "has lost its claim on volume data")
	c.says(t, "AttachedElsewhere: ", "explain", "data")
	time.Sleep(25 * time.Second) // two grace periods
	if at := c.holder(t, volume.ExternalID); at != "node-a" {
		t.Fatalf("below a task that goes on, the disk went to %q", at)
	}
	must(t, c.writes(delays))
	c.as(c.management).run(t, "alloc", "signal", "-s=SIGKILL", delays)
	next := c.placed("node-b")
	c.lines(t, operator, next, delays, "the test", next)
	c.stop(t, operator, "data")
	operator.run(t, "volume", "delete", "data")
}

// claimFromSnapshot restores a snapshot of Nomad's state in which the example has its claim, although it has ended
// since. The next allocation waits until the volume is registered again.
func (c *cluster) claimFromSnapshot(t *testing.T, operator cli) {
	old, root := c.placed("node-a"), c.as(c.management)
	file := filepath.Join(c.dir, "state.snap")
	root.run(t, "operator", "snapshot", "save", file)
	c.stop(t, operator, "data")
	root.run(t, "operator", "snapshot", "restore", file)
	c.says(t, "RunsWithoutDisk: ", "explain", "data")
	c.says(t, "and its disk is detached", "doctor")
	operator.variables = []string{"NOMAD_VAR_volume=data", "NOMAD_VAR_client=node-a"}
	operator.run(t, "job", "run", "-detach", c.filled(t, "example.nomad.hcl", "memory = 32", "memory = 33"))
	waits := ""
	c.server.eventually("the next allocation waits", func() bool {
		allocs, _, err := c.admin.Jobs().Allocations("example", false, nil)
		i := slices.IndexFunc(allocs, func(a *api.AllocationListStub) bool {
			return a.ID != old && a.ClientStatus == api.AllocClientStatusPending
		})
		if err == nil && i >= 0 {
			waits = allocs[i].ID
		}
		return waits != ""
	})
	c.says(t, "ClaimHeld: ", "explain", waits)
	c.registerAgain(t, operator)
	next := c.placed("node-a")
	c.lines(t, operator, next, old, next)

	// For Nomad the old allocation still runs, and it has lost its claim. So the disk stays, until a person detaches it.
	volume, _, err := c.admin.CSIVolumes().Info("data", nil)
	must(t, err)
	c.stopped(t, operator)
	c.logs(t, old[:8], "has lost its claim on volume data")
	if at := c.holder(t, volume.ExternalID); at != "node-a" {
		t.Errorf("the disk is on %q", at)
	}
	c.detach(t, volume.ExternalID, "node-a")
	c.released(t, "data")
}

// logs waits until the controller's log has these texts.
func (c *cluster) logs(t *testing.T, texts ...string) {
	t.Helper()
	await.Within(t, waitLimit, fmt.Sprintf("the controller's log has %q", texts), func() bool {
		log, _, err := c.installer().try("alloc", "logs", "-stderr", "-job", "oxide-csi-controller")
		return err == nil && !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(log, text) })
	})
}
