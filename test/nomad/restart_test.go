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

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestPlannedRestart uses a rack without hot-plug. Its instances are machines with their own processes and mounts,
// which really go down. Each runs a Nomad client, and the client the plugin's job files with attach_mode = "restart".
//
// A job without volumes comes back as the same allocation. A job with volumes does not: a client that boots knows no
// node plugin, and Nomad 1.11 fails each allocation that claims a volume there before the servers know of a plugin
// again. Nomad replaces the allocation, and as its job is pinned to the client, the new one runs there too
// (docs/how-to/planned-restarts.md).
func TestPlannedRestart(t *testing.T) {
	c := newBootingCluster(t)
	c.installForRestarts(t)
	operator := c.operator(t)
	c.stays(t, operator, "witness", "{}")
	inPlace := map[string][]string{
		"witness":        c.runs("witness", "node-a", 1),
		"oxide-csi-node": c.runs("oxide-csi-node", "node-a", 1),
	}
	for _, volume := range []string{"first[0]", "first[1]", "second[0]"} {
		operator.run(t, "volume", "create", c.filled(t, "volumes/create.volume.hcl", `"data"`, `"`+volume+`"`))
	}

	// writers are the allocations that have written to the volumes first[0] and first[1], without sync.
	var writers [2][]string
	wrote := func(ids []string) {
		for i := range writers {
			writers[i] = append(writers[i], ids[i%len(ids)])
		}
	}
	var first, second, both []string
	c.part("two volumes for one client, and one restart", func(t *testing.T) {
		c.group(t, operator, "first", 2, "node-a")
		first = c.runs("first", "node-a", 2)
		wrote(first)
		for i, alloc := range first {
			c.lines(t, operator, alloc, writers[i]...)
		}
		c.boots(t, map[string]int{"node-a": 1, "node-b": 0})
	})
	c.part("another volume, and a restart while the others are in use", func(t *testing.T) {
		staged := c.machine("node-a").answered("NodeStageVolume")
		c.group(t, operator, "second", 1, "node-a")
		second = c.runs("second", "node-a", 1)
		c.lines(t, operator, second[0], second[0])
		first = c.another("first", "node-a", first)
		wrote(first)
		for i, alloc := range first {
			c.lines(t, operator, alloc, writers[i]...)
		}
		if n := c.machine("node-a").answered("NodeStageVolume") - staged; n != 3 {
			t.Errorf("%d volumes were staged, want all three", n)
		}
		c.boots(t, map[string]int{"node-a": 2, "node-b": 0})
		c.detached(t, 0)
	})
	c.part("both back on the same client, without a restart", func(t *testing.T) {
		operator.run(t, "job", "stop", "-detach", "first")
		// Nomad looks at a waiting job again when an allocation ends, which may be just before it releases the volume.
		c.unclaimed("first[0]")
		c.unclaimed("first[1]")
		c.stays(t, operator, "both", `{a="first[0]",b="first[1]"}`)
		both = c.runs("both", "node-a", 1)
		wrote(both)
		c.lines(t, operator, both[0], slices.Concat(writers[0], writers[1])...)
		c.boots(t, map[string]int{"node-a": 2, "node-b": 0})
		c.detached(t, 0)
	})
	c.part("both to the other client, and a restart of each client", func(t *testing.T) {
		c.controllers(t, 2)
		c.group(t, operator, "second", 1, "node-b")
		moved := c.runs("second", "node-b", 1)
		c.lines(t, operator, moved[0], second[0], moved[0])
		both = c.another("both", "node-a", both)
		wrote(both)
		c.lines(t, operator, both[0], slices.Concat(writers[0], writers[1])...)
		c.boots(t, map[string]int{"node-a": 3, "node-b": 1})
		c.detached(t, 1)
	})
	for job, before := range inPlace {
		if now := c.runs(job, "node-a", 1); !slices.Equal(now, before) {
			t.Errorf("%s was %v and is now %v", job, before, now)
		}
	}
}

// group runs the job of deploy/nomad for volumes that belong together.
func (c *cluster) group(t *testing.T, user cli, name string, volumes int, client string) {
	t.Helper()
	user.run(
		t,
		"job",
		"run",
		"-detach",
		"-var=name="+name,
		fmt.Sprintf("-var=volumes=%d", volumes),
		"-var=client="+client,
		"group.nomad.hcl",
	)
}

// another waits until the allocations of a job that ran on a client run again after a restart, and returns them.
// Usually Nomad replaces them. An allocation whose node plugin is back before the client restores it starts again in
// place.
func (c *cluster) another(job, client string, than []string) (ids []string) {
	c.t.Helper()
	await.Within(c.t, waitLimit, job+" runs again", func() bool {
		ids = c.runs(job, client, len(than))
		return !slices.ContainsFunc(ids, func(id string) bool { return slices.Contains(than, id) && c.starts(id) < 2 })
	})
	return ids
}

// starts counts how often the task of an allocation was started.
func (c *cluster) starts(alloc string) (count int) {
	c.t.Helper()
	info, _, err := c.admin.Allocations().Info(alloc, nil)
	must(c.t, err)
	for _, task := range info.TaskStates {
		for _, event := range task.Events {
			if event.Type == api.TaskStarted {
				count++
			}
		}
	}
	return count
}

// newBootingCluster is [newCluster] on a rack whose instances boot.
func newBootingCluster(t *testing.T) *cluster {
	c := &cluster{t: t, nomad: program(t, "nomad"), clients: map[string]*machine{}, printed: map[string]string{}}
	if os.Geteuid() != 0 {
		t.Skip("needs root: guests with processes and disks of their own, in which Nomad clients run tasks")
	}
	var err error
	c.dir, err = os.MkdirTemp("", "n")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(c.dir)) })
	rpc := c.startServer()
	c.chroot()
	must(t, os.MkdirAll(c.host(), 0o755))
	for n, name := range nodes {
		c.bootingClient(n, name, rpc)
	}
	boot, err := simtest.WriteBoot(
		c.dir,
		programs.Sim,
		10*time.Second,
		fmt.Sprintf(`mount --bind %[1]s/$OXIDE_SIM_INSTANCE %[2]s
export HOME=/root OXIDE_CSI_DEV_ROOT=$OXIDE_SIM_GUEST/dev OXIDE_CSI_SYS_ROOT=$OXIDE_SIM_GUEST/sys OXIDE_CSI_LOG_LEVEL=debug
export OXIDE_CSI_RESTART_POWEROFF=signal:SIGRTMIN+4 OXIDE_CSI_RESTART_WINDOW=3s OXIDE_CSI_RESTART_COOL_DOWN=5s
echo "client { meta { \"oxide.instance_id\" = \"$OXIDE_SIM_INSTANCE_ID\" } }" >%[2]s/meta.hcl
exec %[3]s agent -config=%[2]s/client.hcl -config=%[2]s/meta.hcl`, c.dir, c.host(), c.nomad),
	)
	must(t, err)
	c.sim, err = simtest.StartSimWith(programs.Sim, simtest.SimOptions{Args: []string{
		"--guest-root=" + filepath.Join(c.dir, "guests"), "--state=" + filepath.Join(c.dir, "rack"), "--guest-boot=" + boot,
		"--instances=" + strings.Join(nodes, ","),
	}})
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			for _, name := range nodes {
				console, _ := os.ReadFile(filepath.Join(c.sim.Instance(name).Guest, "console"))
				t.Logf("console of %s: …%s", name, console[max(0, len(console)-4000):])
				t.Logf("what the plugins of %s answered:\n%s", name, strings.Join(c.machine(name).answers(), ""))
			}
		}
		must(t, c.sim.Stop())
	})
	c.server.eventually("the clients are ready", func() bool {
		for _, name := range nodes {
			if node := c.node(name); node == nil || node.Status != "ready" {
				return false
			}
		}
		return true
	})
	return c
}

// startServer starts Nomad's server with ACLs, and returns its port for clients.
func (c *cluster) startServer() (rpc int) {
	http, serf := freePort(c.t), freePort(c.t)
	rpc = freePort(c.t)
	c.address = fmt.Sprintf("http://127.0.0.1:%d", http)
	config := filepath.Join(c.dir, "server.hcl")
	c.write(config, `
server {
  enabled           = true
  bootstrap_expect  = 1
  heartbeat_grace   = "2s"
  min_heartbeat_ttl = "2s"
  # by default every 5 minutes
  csi_volume_claim_gc_interval  = "3s"
  csi_volume_claim_gc_threshold = "3s"
}
`+c.common("server", filepath.Join(c.dir, "server"), http, rpc, serf))
	c.server = start(c.t, "server", []string{"PATH=" + os.Getenv("PATH")}, c.nomad, "agent", "-config="+config)
	c.connect("")
	c.server.eventually("ACLs can be had", func() bool {
		made, _, err := c.admin.ACLTokens().Bootstrap(nil)
		if err == nil {
			c.management = made.SecretID
		}
		return err == nil
	})
	c.connect(c.management)
	return rpc
}

// bootingClient writes the configuration of a client that learns its instance ID at boot.
func (c *cluster) bootingClient(n int, name string, rpc int) {
	folder := filepath.Join(c.dir, name)
	must(c.t, os.MkdirAll(filepath.Join(folder, "data"), 0o755))
	c.write(filepath.Join(folder, "client.hcl"), fmt.Sprintf(`
client {
  enabled           = true
  servers           = ["127.0.0.1:%d"]
  network_interface = "lo"
  cgroup_parent     = %q
  min_dynamic_port  = %d
  max_dynamic_port  = %d

  # As in client: the test reads the output of allocations that have ended.
  gc_disk_usage_threshold  = 100
  gc_inode_usage_threshold = 100

  options = {
    "fingerprint.denylist" = "env_aws,env_gce,env_azure,env_digitalocean"
  }

  chroot_env = {
    %q = "/"
  }

  meta {
    "oxide.rack" = "default"
  }
}

plugin "raw_exec" {
  config {
    enabled = true
  }
}
`, rpc, c.cgroup(name), 20000+5000*n, 24999+5000*n, filepath.Join(c.dir, "chroot"))+
		c.common(name, filepath.Join(c.host(), "data"), freePort(c.t), freePort(c.t), freePort(c.t)))
	c.t.Cleanup(func() { c.removeCgroups(name) })
}

// installForRestarts runs the plugin with the policies of deploy/nomad.
func (c *cluster) installForRestarts(t *testing.T) {
	root := c.installer(append(c.values(), "NOMAD_VAR_attach_mode=restart")...)
	root.run(t, "namespace", "apply", pluginNamespace)
	for _, policy := range [][2]string{
		{"oxide-csi-node", "node"}, {"oxide-csi-node", "restart-node"},
		{"oxide-csi-controller", "controller"}, {"oxide-csi-controller", "restart-controller"},
	} {
		root.run(
			t,
			"acl",
			"policy",
			"apply",
			"-namespace="+pluginNamespace,
			"-job="+policy[0],
			policy[0]+"-"+policy[1],
			"policies/"+policy[1]+".policy.hcl",
		)
	}
	c.putToken(t, "oxide-csi-controller", c.sim.Token)
	root.run(t, "job", "run", "-detach", "node.nomad.hcl")
	// Nomad calls any controller. If one controller has a request that the other does not know when a client goes
	// down, that costs one more restart, and the counts of this test would vary. So there is only one controller until
	// a part needs two.
	c.healthy(0, 2)
	a := c.node("node-a").ID
	_, err := c.admin.Nodes().ToggleEligibility(a, false, nil)
	must(t, err)
	c.controllers(t, 1)
	_, err = c.admin.Nodes().ToggleEligibility(a, true, nil)
	must(t, err)
}

// controllers runs this many controllers.
func (c *cluster) controllers(t *testing.T, n int) {
	t.Helper()
	root := c.installer(
		append(c.values(), "NOMAD_VAR_attach_mode=restart", fmt.Sprintf("NOMAD_VAR_controllers=%d", n))...)
	root.run(t, "job", "run", "-detach", "controller.nomad.hcl")
	c.healthy(n, 2)
}

// stays runs a job that stays on node-a.
func (c *cluster) stays(t *testing.T, user cli, name, volumes string) {
	t.Helper()
	user.run(t, "job", "run", "-detach", "-var=name="+name, "-var=volumes="+volumes, testdata(t, "stays.nomad.hcl"))
}

// runs waits until this many allocations of a job run on a client, also through a restart, and returns them by their
// names.
func (c *cluster) runs(job, client string, n int) (ids []string) {
	c.t.Helper()
	deadline := time.Now().Add(4 * time.Minute)
	for {
		allocs, _, err := c.admin.Jobs().Allocations(job, true, &api.QueryOptions{Namespace: namespaceOf(job)})
		must(c.t, err)
		slices.SortFunc(allocs, func(a, b *api.AllocationListStub) int { return strings.Compare(a.Name, b.Name) })
		ids = nil
		for _, a := range allocs {
			if a.ClientStatus == api.AllocClientStatusRunning && a.DesiredStatus == api.AllocDesiredStatusRun &&
				a.NodeName == client {
				ids = append(ids, a.ID)
			}
		}
		if len(ids) == n && c.node(client).Status == api.NodeStatusReady {
			return ids
		}
		if time.Now().After(deadline) {
			for _, a := range allocs {
				for name, task := range a.TaskStates {
					for _, e := range task.Events {
						c.t.Logf("%s %s %s %s: %s", job, a.ID[:8], a.ClientStatus, name, e.DisplayMessage)
					}
				}
			}
			c.t.Fatalf("job %s does not run on %s: %s", job, client, failure(allocs))
		}
		<-time.After(250 * time.Millisecond)
	}
}

// machine returns a view of a booting instance for its plugins' logs. The rack owns its processes.
func (c *cluster) machine(name string) *machine {
	return &machine{process: &process{t: c.t, name: name}, cluster: c}
}

// boots checks how often the plugin started the instances, and that it stopped none: guests power themselves off.
func (c *cluster) boots(t *testing.T, want map[string]int) {
	t.Helper()
	calls, err := c.sim.Calls(t.Context())
	must(t, err)
	got := map[string]int{}
	for _, call := range calls.Log {
		for _, name := range nodes {
			if call.Operation == "instance_start" && strings.Contains(call.Path, c.sim.Instance(name).ID) {
				got[name]++
			}
		}
		if call.Operation == "instance_stop" {
			t.Errorf("the plugin stopped an instance: %+v", call)
		}
	}
	for name, n := range want {
		if got[name] != n {
			t.Errorf("%s was started %d times, want %d", name, got[name], n)
		}
	}
}

// detached checks how often a disk was detached from an instance.
func (c *cluster) detached(t *testing.T, want int) {
	t.Helper()
	calls, err := c.sim.Calls(t.Context())
	must(t, err)
	got := 0
	for _, call := range calls.Log { // a rack without hot-plug refuses some
		if call.Operation == "instance_disk_detach" && call.Status < 300 {
			got++
		}
	}
	if got != want {
		t.Errorf("%d disks were detached, want %d", got, want)
	}
}
