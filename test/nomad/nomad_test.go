// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

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
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestNomad is one story, since each part needs what the one before it has left.
func TestNomad(t *testing.T) {
	c := newCluster(t)
	c.part("job files", c.jobFiles)
	c.part("install", c.install)
	c.part("a volume's life", c.life)
	c.part("a disk made by hand", c.existing)
	c.part("a volume put in again", c.again)
	c.part("another token", c.rotate)
	c.part("monolith", c.monolith)
	c.part("docker", c.containers)
}

// part runs a part of the story, which the test's output then names.
func (c *cluster) part(name string, run func(t *testing.T)) {
	c.t.Helper()
	c.t.Log(name)
	run(c.t)
}

// values are what has to be filled in.
func (c *cluster) values() []string {
	values := []string{
		"NOMAD_VAR_oxide_host=" + c.sim.Host,
		"NOMAD_VAR_oxide_project=" + c.sim.Project,
		"NOMAD_VAR_cluster_id=nomad-test",
		"NOMAD_VAR_image=" + pluginImage,
		"NOMAD_VAR_controller_image=" + controllerImage,
		"NOMAD_VAR_command=" + programs.Plugin,
		"NOMAD_VAR_data_dir=" + filepath.Join(c.host(), "data"),
		"NOMAD_VAR_state_dir=" + filepath.Join(c.host(), "state"),
	}
	if c.grace != "" {
		values = append(values, "NOMAD_VAR_detach_grace="+c.grace)
	}
	return values
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
	if len(files) != 8 {
		t.Fatalf("found %d job files: %v", len(files), files)
	}
	root := c.as(c.management, append(c.values(), "NOMAD_VAR_client=node-a")...)
	root.run(t, "fmt", "-check", "-recursive", ".")
	for _, user := range []cli{root, c.as(c.management, append(root.variables, "NOMAD_VAR_attach_mode=restart")...)} {
		for _, file := range files {
			if said := user.run(t, "job", "validate", file); strings.Contains(strings.ToLower(said), "warning") {
				t.Errorf("%s: %s", file, said)
			}
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
	root.run(
		t,
		"acl",
		"policy",
		"apply",
		"-namespace=default",
		"-job=oxide-csi-node",
		"oxide-csi-node",
		"policies/node.policy.hcl",
	)
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
	made, _, err := c.admin.ACLTokens().
		Create(&api.ACLToken{Name: "operator", Type: "client", Policies: []string{"volumes"}}, nil)
	must(t, err)
	return c.as(made.SecretID)
}

func (c *cluster) life(t *testing.T) {
	operator := c.operator(t)
	operator.run(t, "volume", "create", "volumes/create.volume.hcl")
	first := c.example(t, operator, "data", "node-a")
	c.lines(t, operator, first, first)
	c.part("status", func(t *testing.T) { c.status(t, operator, first) })
	c.part("refused", func(t *testing.T) { c.refused(t, operator) })
	c.running(first)

	c.part("agent killed", func(t *testing.T) {
		m := c.clients["node-a"]
		agent, registered := m.agent(), m.answered("NodeGetInfo")
		m.signal(agent, syscall.SIGKILL)
		m.eventually("another agent knows the plugin", func() bool { return m.answered("NodeGetInfo") > registered })
		c.healthy(2, 2)
		c.running(first)
	})
	c.part("plugins killed", func(t *testing.T) {
		for _, mode := range []string{"node", "controller"} {
			c.killPlugin("node-a", mode)
		}
		c.healthy(2, 2)
		c.running(first)
	})
	c.part("another program at the same path", func(t *testing.T) {
		c.startedAgain(
			c.clients["node-a"],
			"node",
			func() { c.as(c.management).run(t, "job", "restart", "-yes", "oxide-csi-node") },
		)
		c.healthy(2, 2)
		c.running(first)
	})
	c.part("stop while the node plugin is away", func(t *testing.T) {
		// Nomad asks for the detach at once, with the filesystem still mounted. The grace outlasts the plugin's return. (Had the
		// job been purged, its client might forget the allocation, and with it to unmount.)
		m := c.clients["node-a"]
		unstaged := m.answered("NodeUnstageVolume")
		m.signal(m.plugin("node"), syscall.SIGKILL)
		operator.run(t, "job", "stop", "-detach", "example")
		m.eventually("the volume is unstaged", func() bool {
			attached := c.attached(t)
			done := m.answered("NodeUnstageVolume") > unstaged
			if !done && attached == 0 {
				t.Fatal("the disk was detached while it was mounted")
			}
			return done
		})
		c.released(t, "data")
	})
	c.part("upgrade of the controller", func(t *testing.T) {
		// To what differs enough: the exec driver, with the program in the clients' chroot_env, and a short grace from here on.
		c.grace = "1s"
		c.execController(t)
	})

	second := c.example(t, operator, "data", "node-b")
	c.lines(t, operator, second, first, second)
	snapshot := strings.Fields(strings.Split(operator.run(t, "volume", "snapshot", "create", "data", "nightly"), "\n")[1])[0]
	if list := operator.run(t, "volume", "snapshot", "list", "-plugin=oxide"); !strings.Contains(list, snapshot) {
		t.Errorf("snapshot %s is not in %s", snapshot, list)
	}
	third := c.drain(t, second)
	c.lines(t, operator, third, first, second, third)
	fourth := c.lose(t, third)
	c.lines(t, operator, fourth, first, second, third, fourth)
	c.stop(t, operator, "data")

	c.part("restore", func(t *testing.T) {
		operator.run(t, "volume", "create", c.filled(t, "volumes/restore.volume.hcl", "SNAPSHOT-ID", snapshot))
		restored := c.example(t, operator, "restored", "node-a")
		c.lines(t, operator, restored, first, second, restored)
		again := c.withoutController(t, operator, "restored", "node-a")
		c.lines(t, operator, again, first, second, restored, again)
		c.stop(t, operator, "restored")
		operator.run(t, "volume", "snapshot", "delete", "oxide", snapshot)
		operator.run(t, "volume", "delete", "restored")
	})
	operator.run(t, "volume", "delete", "data")
	c.nothingLeft(t)
}

// execController runs the controller by the exec driver.
func (c *cluster) execController(t *testing.T) {
	t.Helper()
	c.as(c.management, append(c.values(), "NOMAD_VAR_driver=exec", "NOMAD_VAR_command=/bin/oxide-csi")...).
		run(t, "job", "run", "binary/controller.nomad.hcl")
	c.healthy(2, 2)
}

// withoutController stops the example while there is no controller: Nomad releases the claim, and nobody detaches the disk. The
// next job finds it attached. It returns that one's allocation.
func (c *cluster) withoutController(t *testing.T, operator cli, volume, client string) string {
	t.Helper()
	c.as(c.management).run(t, "job", "stop", "oxide-csi-controller")
	c.healthy(0, 2)
	operator.run(t, "job", "stop", "-detach", "example")
	c.unclaimed(volume)
	if n := c.attached(t); n != 1 {
		t.Errorf("%d disks are attached, want the one that nobody has detached", n)
	}
	c.execController(t)
	return c.example(t, operator, volume, client)
}

// status is what Nomad tells of a volume that is in use.
func (c *cluster) status(t *testing.T, operator cli, alloc string) {
	info, _, err := c.admin.CSIVolumes().Info("data", nil)
	must(t, err)
	for _, show := range []struct {
		args  []string
		tells []string
	}{
		{[]string{"volume", "status"}, []string{"data", "oxide", "single-node-writer"}},
		{[]string{"volume", "status", "-verbose"}, []string{info.ExternalID, "OK", c.sim.Instance("node-a").ID}},
		{[]string{"volume", "status", "-verbose", "data"}, []string{info.ExternalID, "csi.oxide.computer", "topology.csi.oxide.computer/rack=default", alloc}},
	} {
		said := operator.run(t, show.args...)
		for _, text := range show.tells {
			if !strings.Contains(said, text) {
				t.Errorf("nomad %s does not tell %q:\n%s", strings.Join(show.args, " "), text, said)
			}
		}
	}
}

// refused is what must not work, while the volume is in use, and what whoever tries it is told.
func (c *cluster) refused(t *testing.T, operator cli) {
	const noDisk = "6f1d1e6e-0000-4000-8000-000000000000"
	create := "volumes/create.volume.hcl"
	other := []string{`"data"`, `"other"`}
	for _, test := range []struct {
		name string
		user cli
		args []string
		says string
	}{
		// Nomad asks the plugin before it looks at its own claims.
		{"delete it", operator, []string{"volume", "delete", "data"}, "is attached to instance " + c.sim.Instance("node-a").ID},
		{"make it larger", operator, []string{"volume", "create", c.filled(t, create, "1GiB", "2GiB")}, "expand is not implemented by this controller plugin"},
		{"more than one node", operator, []string{"volume", "create", c.filled(t, create, append(other, "single-node-writer", "multi-node-multi-writer")...)}, "use a single-node mode"},
		{"another rack", operator, []string{"volume", "create", c.filled(t, create, append(other, `= "default"
      }`, `= "nowhere"
      }`)...)}, "this plugin serves topology.csi.oxide.computer/rack=default"},
		{"a disk that is not there", operator, []string{"volume", "register", c.filled(t, "volumes/register.volume.hcl", "DISK-ID", noDisk, "DISK-NAME", "x")}, "could not be found"},
		// Nomad looks for an allocation that the command has not named.
		{"detach it", c.as(c.management), []string{"volume", "detach", "data", c.node("node-a").ID}, "Unknown allocation"},
	} {
		if _, stderr, err := test.user.try(test.args...); err == nil || !strings.Contains(stderr, test.says) {
			t.Errorf("%s: %v: %s", test.name, err, stderr)
		}
	}
	operator.run(t, "volume", "snapshot", "delete", "oxide", noDisk) // there is none, as there should be
}

// killPlugin kills a plugin and waits until Nomad has started it again.
func (c *cluster) killPlugin(client, mode string) {
	c.t.Helper()
	m := c.clients[client]
	c.startedAgain(m, mode, func() { m.signal(m.plugin(mode), syscall.SIGKILL) })
}

// startedAgain waits until a plugin is another process than before something was done.
func (c *cluster) startedAgain(m *machine, mode string, do func()) {
	c.t.Helper()
	before := m.plugin(mode)
	do()
	m.eventually("there is another plugin", func() bool { now := m.plugin(mode); return now != 0 && now != before })
}

// lose has the agent of an allocation's node hang until the servers have given the node up, and returns the allocation that has
// taken its place on the other node. Nomad then takes the disk from a node that still has it mounted: it can ask nobody there.
// When the agent is back it unmounts, and has the disk detached: from where it no longer is.
func (c *cluster) lose(t *testing.T, alloc string) string {
	t.Helper()
	info, _, err := c.admin.Allocations().Info(alloc, nil)
	must(t, err)
	m := c.clients[info.NodeName]
	unstaged := m.answered("NodeUnstageVolume")
	agent := m.agent()
	m.signal(agent, syscall.SIGSTOP)
	moved := c.placed(nodes[1-slices.Index(nodes, info.NodeName)])
	m.signal(agent, syscall.SIGCONT)
	m.eventually("the volume is unstaged where it was", func() bool { return m.answered("NodeUnstageVolume") > unstaged })
	c.healthy(2, 2)
	c.running(moved)
	if n := c.attached(t); n != 1 {
		t.Errorf("%d disks are attached, want the one of allocation %s", n, moved)
	}
	return moved
}

// rotate replaces the rack's token, the old one being worthless before the new one is there.
func (c *cluster) rotate(t *testing.T) {
	token, err := c.sim.NewToken(t.Context(), "limited-collaborator")
	must(t, err)
	must(t, c.sim.RevokeToken(t.Context(), c.sim.Token))
	root, operator := c.as(c.management), c.operator(t)
	if _, stderr, err := operator.try(
		"volume",
		"create",
		"volumes/create.volume.hcl",
	); err == nil ||
		!strings.Contains(stderr, "Unauthenticated") {
		t.Errorf("with a revoked token: %v: %s", err, stderr)
	}
	root.run(t, "var", "put", "-force", "-in=hcl", "@"+c.filled(t, "token.nv.hcl", "OXIDE-TOKEN", token))
	c.sim.Token = token
	eventually(t, "the controllers use the new token", func() bool {
		_, _, err := operator.try("volume", "create", "volumes/create.volume.hcl")
		return err == nil
	})
	operator.run(t, "volume", "delete", "data")
}

// again takes a volume out of Nomad by force, as when it does not let go of a claim, and puts it in again.
func (c *cluster) again(t *testing.T) {
	operator := c.operator(t)
	operator.run(t, "volume", "create", "volumes/create.volume.hcl")
	first := c.example(t, operator, "data", "node-a")
	c.lines(t, operator, first, first)
	c.stop(t, operator, "data")
	volume, _, err := c.admin.CSIVolumes().Info("data", nil)
	must(t, err)
	operator.run(t, "volume", "deregister", "-force", "data")
	operator.run(t, "volume", "register", c.filled(t, "volumes/register.volume.hcl",
		"existing", "data", "DISK-ID", volume.ExternalID, "DISK-NAME", volume.Context["diskName"]))
	second := c.example(t, operator, "data", "node-b")
	c.lines(t, operator, second, first, second)
	c.stop(t, operator, "data")
	operator.run(t, "volume", "delete", "data")
	c.nothingLeft(t)
}

// existing uses a disk that somebody made by hand, and which outlives its volume.
func (c *cluster) existing(t *testing.T) {
	client, err := oxide.NewClient(oxide.WithHost(c.sim.Host), oxide.WithToken(c.sim.Token))
	must(t, err)
	project := oxide.NameOrId(c.sim.Project)
	disk, err := client.DiskCreate(t.Context(), oxide.DiskCreateParams{Project: project, Body: &oxide.DiskCreate{
		Name: "by-hand", Size: 1 << 30,
		DiskBackend: oxide.DiskBackend{Value: oxide.DiskBackendDistributed{
			DiskSource: oxide.DiskSource{Value: oxide.DiskSourceBlank{BlockSize: 4096}},
		}},
	}})
	must(t, err)
	operator := c.operator(t)
	operator.run(
		t,
		"volume",
		"register",
		c.filled(t, "volumes/register.volume.hcl", "DISK-ID", disk.Id, "DISK-NAME", string(disk.Name)),
	)
	alloc := c.example(t, operator, "existing", "node-b")
	c.lines(t, operator, alloc, alloc)
	c.stop(t, operator, "existing")
	if _, stderr, err := operator.try("volume", "delete", "existing"); err == nil {
		t.Errorf("a disk made by hand was deleted: %s", stderr)
	}
	operator.run(t, "volume", "deregister", "existing")
	must(t, client.DiskDelete(t.Context(), oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk.Id)}))
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
			return a.NodeName == client && a.DesiredStatus == api.AllocDesiredStatusRun &&
				a.ClientStatus == api.AllocClientStatusRunning
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
	c.logged(t, user, alloc, want.String())
}

// logged checks what an allocation has printed.
func (c *cluster) logged(t *testing.T, user cli, alloc, want string) {
	t.Helper()
	got := ""
	eventually(t, "the allocation says "+want, func() bool {
		stdout, _, err := user.try("alloc", "logs", alloc)
		got = stdout
		return err == nil && len(got) >= len(want)
	})
	if got != want {
		t.Errorf("the allocation says %q, want %q", got, want)
	}
}

// stop stops the example and waits until its volume is free.
func (c *cluster) stop(t *testing.T, user cli, volume string) {
	t.Helper()
	user.run(t, "job", "stop", "-detach", "example")
	c.released(t, volume)
}

// released waits until a volume is free: for Nomad, and on the rack.
func (c *cluster) released(t *testing.T, volume string) {
	t.Helper()
	c.unclaimed(volume)
	eventually(t, "the disk is detached", func() bool { return c.attached(t) == 0 })
}

func (c *cluster) unclaimed(volume string) {
	c.t.Helper()
	c.server.eventually("the claims of "+volume+" are released", func() bool {
		info, _, err := c.admin.CSIVolumes().Info(volume, nil)
		return err == nil && len(info.ReadAllocs)+len(info.WriteAllocs) == 0
	})
}

// attached counts the disks, but for boot disks, that instances of the rack have.
func (c *cluster) attached(t *testing.T) (n int) {
	t.Helper()
	list, err := c.sim.ListInstances(t.Context())
	must(t, err)
	for _, instance := range list {
		n += len(
			slices.DeleteFunc(instance.Disks, func(d simtest.SimDisk) bool { return strings.HasSuffix(d.Name, "-boot") }),
		)
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
	root.run(
		t,
		"var",
		"put",
		"-in=hcl",
		"@"+c.filled(t, "token.nv.hcl", "OXIDE-TOKEN", c.sim.Token, "oxide-csi-controller", "oxide-csi"),
	)
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
