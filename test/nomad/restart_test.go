//go:build nomad

package nomad_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/oxidecomputer/oxide-csi-plugin/core/simrack/lab"
)

// TestPlannedRestart is a rack without hot-plug whose instances are machines with processes and mounts of their own, which
// really go down: each runs a Nomad client, and that the plugin's job files with attach_mode = "restart".
func TestPlannedRestart(t *testing.T) {
	c := newBootingCluster(t)
	c.installForRestarts(t)
	operator := c.operator(t)
	c.stays(t, operator, "witness", "")
	witness := c.runs("witness")
	before := c.bootID("node-a")

	// Two volumes for one node cost one restart, and what runs there comes back there.
	for _, volume := range []string{"one", "two"} {
		operator.run(t, "volume", "create", c.filled(t, "volumes/create.volume.hcl", `"data"`, `"`+volume+`"`))
		c.stays(t, operator, volume, volume)
	}
	one, _ := c.runs("one"), c.runs("two")
	if after := c.bootID("node-a"); after == before {
		t.Error("node-a was not restarted")
	}
	if now := c.runs("witness"); now != witness {
		t.Errorf("the allocation %s has become %s", witness, now)
	}
	c.boots(t, map[string]int{"node-a": 1, "node-b": 0})
	c.lines(t, operator, one, one)
}

// newBootingCluster is [newCluster] on a rack whose instances boot.
func newBootingCluster(t *testing.T) *cluster {
	c := &cluster{t: t, nomad: program(t, "nomad"), clients: map[string]*machine{}}
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
	boot, err := lab.WriteBoot(c.dir, programs.Sim, 10*time.Second, fmt.Sprintf(`mount --bind %[1]s/$OXIDE_SIM_INSTANCE %[2]s
export HOME=/root OXIDE_CSI_DEV_ROOT=$OXIDE_SIM_GUEST/dev OXIDE_CSI_SYS_ROOT=$OXIDE_SIM_GUEST/sys OXIDE_CSI_LOG_LEVEL=debug
export OXIDE_CSI_RESTART_POWEROFF=signal:SIGRTMIN+4 OXIDE_CSI_RESTART_WINDOW=3s OXIDE_CSI_RESTART_COOL_DOWN=5s
echo "client { meta { \"oxide.instance_id\" = \"$OXIDE_SIM_INSTANCE_ID\" } }" >%[2]s/meta.hcl
exec %[3]s agent -config=%[2]s/client.hcl -config=%[2]s/meta.hcl`, c.dir, c.host(), c.nomad))
	must(t, err)
	c.sim, err = lab.StartSimWith(programs.Sim, lab.SimOptions{Args: []string{
		"--guest-root=" + filepath.Join(c.dir, "guests"), "--state=" + filepath.Join(c.dir, "rack"), "--guest-boot=" + boot,
		"--instances=" + strings.Join(nodes, ","),
	}})
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			for _, name := range nodes {
				console, _ := os.ReadFile(filepath.Join(c.sim.Instance(name).Guest, "console"))
				t.Logf("console of %s: …%s", name, console[max(0, len(console)-4000):])
				m := &machine{process: &process{t: t, name: name}, cluster: c}
				t.Logf("what the plugins of %s answered:\n%s", name, strings.Join(m.answers(), ""))
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

// startServer starts Nomad's server with ACLs, as its owner, and returns its port for clients.
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

// bootingClient writes the configuration of a client that is told at boot which instance it is.
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

// installForRestarts brings the plugin up with the policies that ship.
func (c *cluster) installForRestarts(t *testing.T) {
	root := c.as(c.management, append(c.values(), "NOMAD_VAR_attach_mode=restart")...)
	for _, policy := range [][2]string{
		{"oxide-csi-node", "node"}, {"oxide-csi-node", "restart-node"}, {"oxide-csi-controller", "restart-controller"},
	} {
		root.run(t, "acl", "policy", "apply", "-namespace=default", "-job="+policy[0], policy[0]+"-"+policy[1], "policies/"+policy[1]+".policy.hcl")
	}
	root.run(t, "var", "put", "-in=hcl", "@"+c.filled(t, "token.nv.hcl", "OXIDE-TOKEN", c.sim.Token))
	root.run(t, "job", "run", "-detach", "binary/controller.nomad.hcl")
	root.run(t, "job", "run", "-detach", "binary/node.nomad.hcl")
	c.healthy(2, 2)
}

// stays runs a job that stays on node-a.
func (c *cluster) stays(t *testing.T, user cli, name, volume string) {
	user.variables = []string{"NOMAD_VAR_name=" + name, "NOMAD_VAR_volume=" + volume}
	user.run(t, "job", "run", "-detach", testdata(t, "stays.nomad.hcl"))
}

// runs waits until a job runs, however long a restart takes, and returns its allocation.
func (c *cluster) runs(job string) string {
	c.t.Helper()
	deadline := time.Now().Add(3 * time.Minute)
	for {
		allocs, _, err := c.admin.Jobs().Allocations(job, true, nil)
		must(c.t, err)
		for _, a := range allocs {
			if a.ClientStatus == api.AllocClientStatusRunning && a.DesiredStatus == api.AllocDesiredStatusRun && c.node("node-a").Status == "ready" {
				return a.ID
			}
		}
		if time.Now().After(deadline) {
			for _, a := range allocs {
				for name, task := range a.TaskStates {
					for _, e := range task.Events {
						c.t.Logf("%s %s %s %s: %s", job, a.ID[:8], a.ClientStatus, name, e.DisplayMessage)
					}
				}
			}
			c.t.Fatalf("job %s does not run: %s", job, failure(allocs))
		}
		<-time.After(250 * time.Millisecond)
	}
}

// bootID is that of the instance's boot.
func (c *cluster) bootID(name string) string {
	text, err := os.ReadFile(filepath.Join(c.sim.Instance(name).Guest, "boot_id"))
	must(c.t, err)
	return string(text)
}

// boots checks how often the instances were started by the plugin, and that it has stopped none: guests go down by themselves.
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
			t.Errorf("the plugin has stopped an instance: %+v", call)
		}
	}
	for name, n := range want {
		if got[name] != n {
			t.Errorf("%s was started %d times, want %d", name, got[name], n)
		}
	}
}
