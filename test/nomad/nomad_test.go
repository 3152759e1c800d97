//go:build nomad

package nomad_test

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/hashicorp/nomad/api"

	"github.com/oxidecomputer/oxide-csi-plugin/core/simrack/lab"
)

func TestNomad(t *testing.T) {
	c := newCluster(t)
	for _, step := range []struct {
		name string
		run  func(t *testing.T)
	}{
		{"job files", c.jobFiles},
		{"install", c.install},
		{"a volume's life", c.life},
		{"monolith", c.monolith},
	} {
		if !t.Run(step.name, step.run) {
			t.FailNow() // what follows needs what came before
		}
	}
}

// values are what has to be filled in.
func (c *cluster) values() []string {
	return []string{
		"NOMAD_VAR_oxide_host=" + c.sim.Host,
		"NOMAD_VAR_oxide_project=" + c.sim.Project,
		"NOMAD_VAR_cluster_id=nomad-test",
		"NOMAD_VAR_image=registry.example.com/oxide-csi:1.0",
		"NOMAD_VAR_command=" + programs.Plugin,
		"NOMAD_VAR_data_dir=" + filepath.Join(c.host(), "data"),
		"NOMAD_VAR_state_dir=" + filepath.Join(c.host(), "state"),
		"NOMAD_VAR_detach_grace=3s", // else each detach takes a minute
	}
}

// jobFiles has each job file parsed and validated; nothing is registered.
func (c *cluster) jobFiles(t *testing.T) {
	var files []string
	must(t, filepath.WalkDir(deploy, func(path string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(path, ".nomad.hcl") {
			files = append(files, strings.TrimPrefix(path, deploy+"/"))
		}
		return err
	}))
	if len(files) != 7 {
		t.Fatalf("found %d job files: %v", len(files), files)
	}
	root := c.as(c.management, c.values()...)
	root.run(t, "fmt", "-check", "-recursive", ".")
	for _, file := range files {
		if said := root.run(t, "job", "validate", file); strings.Contains(strings.ToLower(said), "warning") {
			t.Errorf("%s: %s", file, said)
		}
	}
	// Without its values a controller is refused, rather than sharing a cluster ID with another one.
	for _, file := range []string{"binary/controller.nomad.hcl", "binary/monolith.nomad.hcl"} {
		_, stderr, err := c.as(c.management).try("job", "validate", file)
		if err == nil || !strings.Contains(stderr, "cluster_id") {
			t.Errorf("%s without values: %v: %s", file, err, stderr)
		}
	}
}

// install brings the plugin up, with a token in Nomad's variables and the policies that ship.
func (c *cluster) install(t *testing.T) {
	root := c.as(c.management, c.values()...)
	root.run(t, "acl", "policy", "apply", "-namespace=default", "-job=oxide-csi-node", "oxide-csi-node", "policies/node.policy.hcl")
	root.run(t, "var", "put", "-in=hcl", "@"+c.filled(t, "token.nv.hcl", "OXIDE-TOKEN", c.sim.Token))
	root.run(t, "job", "run", "binary/controller.nomad.hcl")
	root.run(t, "job", "run", "binary/node.nomad.hcl")
	c.healthy(2, 2)
	status := root.run(t, "plugin", "status", "oxide")
	if !strings.Contains(status, "csi.oxide.computer") {
		t.Errorf("the plugin's status is %s", status)
	}
}

// healthy waits until the plugin has so many controllers and nodes that are.
func (c *cluster) healthy(controllers, nodes int) {
	c.t.Helper()
	c.server.eventually(fmt.Sprintf("%d controllers and %d nodes are healthy", controllers, nodes), func() bool {
		plugin, _, err := c.admin.CSIPlugins().Info("oxide", nil)
		return err == nil && plugin.ControllersHealthy == controllers && plugin.NodesHealthy == nodes
	})
}

// operator is somebody who may do no more than policies/operator.policy.hcl says.
func (c *cluster) operator(t *testing.T) cli {
	root := c.as(c.management)
	root.run(t, "acl", "policy", "apply", "volumes", "policies/operator.policy.hcl")
	made, _, err := c.admin.ACLTokens().Create(&api.ACLToken{Name: "operator", Type: "client", Policies: []string{"volumes"}}, nil)
	must(t, err)
	return c.as(made.SecretID)
}

func (c *cluster) life(t *testing.T) {
	operator := c.operator(t)
	operator.run(t, "volume", "create", "volumes/create.volume.hcl")
	first := c.example(t, operator, "data", "node-a")
	c.lines(t, operator, first, first)

	t.Run("agent killed", func(t *testing.T) {
		m := c.clients["node-a"]
		agent := m.agent()
		must(t, syscall.Kill(agent, syscall.SIGKILL))
		m.eventually("there is another agent", func() bool { now := m.agent(); return now != 0 && now != agent })
		c.healthy(2, 2)
		c.running(first)
	})
	t.Run("plugins killed", func(t *testing.T) {
		m := c.clients["node-a"]
		for _, mode := range []string{"node", "controller"} {
			plugin := m.plugin(mode)
			must(t, syscall.Kill(plugin, syscall.SIGKILL))
			m.eventually("there is another plugin", func() bool { now := m.plugin(mode); return now != 0 && now != plugin })
		}
		c.healthy(2, 2)
		c.running(first)
	})
	t.Run("delete while in use", func(t *testing.T) {
		// Nomad asks the plugin before it looks at its own claims.
		_, stderr, err := operator.try("volume", "delete", "data")
		if err == nil || !strings.Contains(stderr, "attached") {
			t.Errorf("%v: %s", err, stderr)
		}
		c.running(first)
	})

	c.stop(t, operator, "data")
	second := c.example(t, operator, "data", "node-b")
	c.lines(t, operator, second, first, second)

	snapshot := strings.Fields(strings.Split(operator.run(t, "volume", "snapshot", "create", "data", "nightly"), "\n")[1])[0]
	if list := operator.run(t, "volume", "snapshot", "list", "-plugin=oxide"); !strings.Contains(list, snapshot) {
		t.Errorf("snapshot %s is not in %s", snapshot, list)
	}
	third := c.drain(t, second)
	c.lines(t, operator, third, first, second, third)
	c.stop(t, operator, "data")

	operator.run(t, "volume", "create", c.filled(t, "volumes/restore.volume.hcl", "SNAPSHOT-ID", snapshot))
	restored := c.example(t, operator, "restored", "node-a")
	c.lines(t, operator, restored, first, second, restored)
	c.stop(t, operator, "restored")
	operator.run(t, "volume", "snapshot", "delete", "oxide", snapshot)
	operator.run(t, "volume", "delete", "restored")
	operator.run(t, "volume", "delete", "data")
	c.nothingLeft(t)
}

// example runs the example job on a volume and a client, and returns its allocation once it runs.
func (c *cluster) example(t *testing.T, user cli, volume, client string) string {
	t.Helper()
	user.variables = []string{"NOMAD_VAR_volume=" + volume, "NOMAD_VAR_client=" + client}
	user.run(t, "job", "run", "-detach", "example.nomad.hcl")
	return c.placed(client)
}

// placed waits until the example runs on a client.
func (c *cluster) placed(client string) (alloc string) {
	c.t.Helper()
	var last string
	c.server.eventually("the example runs on "+client, func() bool {
		allocs, _, err := c.admin.Jobs().Allocations("example", false, nil)
		if err != nil {
			return false
		}
		i := slices.IndexFunc(allocs, func(a *api.AllocationListStub) bool {
			return a.NodeName == client && a.DesiredStatus == api.AllocDesiredStatusRun && a.ClientStatus == api.AllocClientStatusRunning
		})
		if i < 0 {
			if failed := failure(allocs); failed != last {
				last = failed
				c.t.Log(failed)
			}
			return false
		}
		alloc = allocs[i].ID
		return true
	})
	return alloc
}

// failure is why an allocation of the job failed, so that one that never comes up can be explained.
func failure(allocs []*api.AllocationListStub) string {
	for _, alloc := range allocs {
		for _, state := range alloc.TaskStates {
			for _, event := range state.Events {
				if event.FailsTask || strings.Contains(event.Type, "Setup Failure") {
					return fmt.Sprintf("allocation %s: %s: %s", alloc.ID, event.Type, event.DisplayMessage)
				}
			}
		}
	}
	return ""
}

// running checks that an allocation still does.
func (c *cluster) running(alloc string) {
	c.t.Helper()
	c.server.eventually("the allocation still runs", func() bool {
		info, _, err := c.admin.Allocations().Info(alloc, nil)
		if err != nil || info.ClientStatus == api.AllocClientStatusUnknown {
			return false
		}
		if info.ClientStatus != api.AllocClientStatusRunning {
			c.t.Fatalf("the allocation is %s", info.ClientStatus)
		}
		return true
	})
}

// lines checks what an allocation found in its file: that these have written, in this order.
func (c *cluster) lines(t *testing.T, user cli, alloc string, writers ...string) {
	t.Helper()
	var want strings.Builder
	for _, writer := range writers {
		fmt.Fprintf(&want, "written by %s\n", writer)
	}
	got := ""
	eventually(t, "the allocation says "+want.String(), func() bool {
		stdout, _, err := user.try("alloc", "logs", alloc)
		got = stdout
		return err == nil && len(got) >= want.Len()
	})
	if got != want.String() {
		t.Errorf("the file holds %q, want %q", got, want.String())
	}
}

// stop stops the example and waits until its volume is free: for Nomad, and on the rack.
func (c *cluster) stop(t *testing.T, user cli, volume string) {
	t.Helper()
	user.run(t, "job", "stop", "-purge", "example")
	c.server.eventually("the claims of "+volume+" are released", func() bool {
		info, _, err := c.admin.CSIVolumes().Info(volume, nil)
		return err == nil && len(info.ReadAllocs)+len(info.WriteAllocs) == 0
	})
	eventually(t, "the disk is detached", func() bool { return c.attached(t) == 0 })
}

// attached counts the disks, but for boot disks, that instances of the rack have.
func (c *cluster) attached(t *testing.T) (n int) {
	t.Helper()
	list, err := c.sim.ListInstances(t.Context())
	must(t, err)
	for _, instance := range list {
		n += len(slices.DeleteFunc(instance.Disks, func(d lab.SimDisk) bool { return strings.HasSuffix(d.Name, "-boot") }))
	}
	return n
}

// drain takes the work off the node of an allocation, and returns the one that has taken its place on the other node.
func (c *cluster) drain(t *testing.T, alloc string) string {
	t.Helper()
	root := c.as(c.management)
	info, _, err := c.admin.Allocations().Info(alloc, nil)
	must(t, err)
	// It was pinned to its node; now it may go anywhere, which by itself would move it already.
	job := c.as(c.management, "NOMAD_VAR_volume=data", "NOMAD_VAR_client="+strings.Join(nodes, "|"))
	job.run(t, "node", "eligibility", "-disable", info.NodeID)
	job.run(t, "job", "run", "-detach", "example.nomad.hcl")
	root.run(t, "node", "drain", "-enable", "-yes", "-detach", info.NodeID)
	other := nodes[1-slices.Index(nodes, info.NodeName)]
	moved := c.placed(other)
	c.server.eventually("the node is drained, its plugin last", func() bool {
		node, _, err := c.admin.Nodes().Info(info.NodeID, nil)
		return err == nil && node.DrainStrategy == nil
	})
	root.run(t, "node", "eligibility", "-enable", info.NodeID)
	c.healthy(2, 2)
	return moved
}

// nothingLeft checks that volumes are neither known to Nomad nor on the rack, nor in the kernel.
func (c *cluster) nothingLeft(t *testing.T) {
	t.Helper()
	volumes, _, err := c.admin.CSIVolumes().List(nil)
	must(t, err)
	if len(volumes) > 0 {
		t.Errorf("Nomad still has volumes: %+v", volumes)
	}
	left, err := c.sim.Leftovers(t.Context())
	must(t, err)
	if left.Disks+left.Snapshots+left.Loops+left.Mounts > len(nodes) || len(left.GuestErrors) > 0 {
		t.Errorf("left on the rack: %+v", left)
	}
}

// monolith takes the place of controller and nodes.
func (c *cluster) monolith(t *testing.T) {
	root := c.as(c.management, c.values()...)
	root.run(t, "job", "stop", "-purge", "oxide-csi-node")
	root.run(t, "job", "stop", "-purge", "oxide-csi-controller")
	c.server.eventually("the plugin is gone", func() bool {
		plugins, _, err := c.admin.CSIPlugins().List(nil)
		return err == nil && len(plugins) == 0
	})
	root.run(t, "acl", "policy", "apply", "-namespace=default", "-job=oxide-csi", "oxide-csi", "policies/node.policy.hcl")
	root.run(t, "var", "put", "-in=hcl", "@"+c.filled(t, "token.nv.hcl", "OXIDE-TOKEN", c.sim.Token, "oxide-csi-controller", "oxide-csi"))
	root.run(t, "job", "run", "binary/monolith.nomad.hcl")
	c.healthy(1, 1)
	operator := c.operator(t)
	operator.run(t, "volume", "create", "volumes/create.volume.hcl")
	allocs, _, err := c.admin.Jobs().Allocations("oxide-csi", false, nil)
	must(t, err)
	alloc := c.example(t, operator, "data", allocs[0].NodeName)
	c.lines(t, operator, alloc, alloc)
	c.stop(t, operator, "data")
	operator.run(t, "volume", "delete", "data")
	c.nothingLeft(t)
	root.run(t, "job", "stop", "-purge", "oxide-csi")
}
