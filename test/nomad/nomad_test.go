// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build nomad

package nomad_test

import (
	"fmt"
	"io/fs"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/hashicorp/nomad/api"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestNomad is one test, because each part needs the state that the previous part left.
func TestNomad(t *testing.T) {
	c := newCluster(t, impatient)
	c.part("job files", c.jobFiles)
	c.part("install", c.install)
	c.part("a volume's life", c.life)
	c.part("a disk created by an operator", c.existing)
	c.part("a volume registered again", c.again)
	c.part("a volume grows", c.grow)
	c.part("an encrypted volume", c.encrypted)
	c.part("another token", c.rotate)
	c.part("monolith", c.monolith)
	c.part("docker", c.containers)
	c.part("uninstall", c.uninstall)
}

// Nomad goes back only to a version that was healthy for some time. The parts of TestNomad change the jobs faster.
func TestBadUpdate(t *testing.T) {
	t.Parallel() // it waits most of the time
	c := newCluster(t, impatient)
	c.part("install", c.install)
	c.part("an update that fails", c.badUpdate)
}

// part runs a part of the test, and logs its name.
func (c *cluster) part(name string, run func(t *testing.T)) {
	c.t.Helper()
	c.t.Log(name)
	run(c.t)
}

// values are the values of the job files' placeholders.
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
	if c.controllerCount > 0 {
		values = append(values, fmt.Sprintf("NOMAD_VAR_controllers=%d", c.controllerCount))
	}
	return values
}

// jobFiles parses and validates each job file without registering it.
func (c *cluster) jobFiles(t *testing.T) {
	var files []string
	must(t, filepath.WalkDir(deploy, func(path string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(path, ".nomad.hcl") {
			files = append(files, strings.TrimPrefix(path, deploy+"/"))
		}
		return err
	}))
	if len(files) != 6 {
		t.Fatalf("found %d job files: %v", len(files), files)
	}
	c.as(c.management).run(t, "fmt", "-check", "-recursive", ".")
	c.as(c.management).run(t, "namespace", "apply", pluginNamespace) // a job in a namespace that is missing is not valid
	// Without it Nomad warns of memory_max, as docs/how-to/nomad.md says.
	oversubscription := func(allowed bool) {
		c.as(c.management).run(t, "operator", "scheduler", "set-config", fmt.Sprintf("-memory-oversubscription=%t", allowed))
	}
	oversubscription(true)
	defer oversubscription(false)
	for _, driver := range []string{"raw_exec", "docker"} {
		user := c.as(c.management, append(c.values(), "NOMAD_VAR_client=node-a", "NOMAD_VAR_driver="+driver)...)
		for _, file := range files {
			if said := user.run(t, "job", "validate", file); strings.Contains(strings.ToLower(said), "warning") {
				t.Errorf("%s with %s: %s", file, driver, said)
			}
		}
	}
}

// install runs the plugin with a token in Nomad's variables and the policies of deploy/nomad.
func (c *cluster) install(t *testing.T) {
	root := c.installer(c.values()...)
	root.run(t, "namespace", "apply", pluginNamespace)
	root.run(
		t,
		"acl",
		"policy",
		"apply",
		"-namespace="+pluginNamespace,
		"-job=oxide-csi-node",
		"oxide-csi-node",
		"policies/node.policy.hcl",
	)
	c.allowController(t, "oxide-csi-controller")
	c.putToken(t, "oxide-csi-controller", c.sim.Token)
	root.run(t, "job", "run", "controller.nomad.hcl")
	root.run(t, "job", "run", "node.nomad.hcl")
	c.healthy(max(1, c.controllerCount), 2)
	status := root.run(t, "plugin", "status", "oxide")
	if !strings.Contains(status, "csi.oxide.computer") {
		t.Errorf("the plugin's status is %s", status)
	}
	if bytes := c.clients["node-a"].memoryLimit("node"); bytes != 256<<20 {
		t.Errorf("the node plugin's limit is %d bytes of memory, want the memory that the job reserves", bytes)
	}
	// A user who submits a job of that name in that namespace reads the token.
	operator := c.operator(t)
	for _, args := range [][]string{
		{"var", "get", "-namespace=" + pluginNamespace, "nomad/jobs/oxide-csi-controller"},
		{"var", "get", "nomad/jobs/oxide-csi-controller"},
		{"job", "run", "-detach", c.filled(t, "example.nomad.hcl", `job "example" {`, `job "oxide-csi-controller" {
  namespace = "oxide-csi"`)},
	} {
		if stdout, stderr, err := operator.try(args...); err == nil || !strings.Contains(stderr, "Permission denied") {
			t.Errorf("nomad %s: %v: %s%s", strings.Join(args, " "), err, stdout, stderr)
		}
	}
}

// controllerPolicy is the name of the policy in docs/how-to/nomad.md.
const controllerPolicy = "oxide-csi-controller"

// allowController lets a job's controller read who uses a volume.
func (c *cluster) allowController(t *testing.T, job string) {
	c.installer(c.values()...).run(t, "acl", "policy", "apply", "-namespace="+pluginNamespace, "-job="+job,
		controllerPolicy, "policies/controller.policy.hcl")
}

// healthy waits until the plugin has this many healthy controllers and nodes.
func (c *cluster) healthy(controllers, nodes int) {
	c.t.Helper()
	c.server.eventually(fmt.Sprintf("%d controllers and %d nodes are healthy", controllers, nodes), func() bool {
		plugin, _, err := c.admin.CSIPlugins().Info("oxide", nil)
		return err == nil && plugin.ControllersHealthy == controllers && plugin.NodesHealthy == nodes
	})
}

// badUpdate runs both jobs with a program that does not exist. Nomad goes back to the version before. Then it takes the
// node plugin off a client, which Nomad does not miss.
func (c *cluster) badUpdate(t *testing.T) {
	bad := c.installer(append(c.values(), "NOMAD_VAR_command=/does/not/exist")...)
	for _, name := range []string{"controller", "node"} {
		bad.run(t, "job", "run", "-detach", name+".nomad.hcl")
		c.server.eventually("job "+name+" has the version before", func() bool {
			job, _, err := c.admin.Jobs().Info("oxide-csi-"+name, &api.QueryOptions{Namespace: pluginNamespace})
			return err == nil && *job.Version > 1 && job.TaskGroups[0].Tasks[0].Config["command"] == programs.Plugin
		})
	}
	c.healthy(max(1, c.controllerCount), 2)

	// Without -detach the command waits for the deployment that failed.
	root := c.installer(c.values()...)
	root.run(t, "job", "run", "-detach", c.filled(t, "node.nomad.hcl", `"${attr.kernel.name}"
    value     = "linux"`, `"${node.unique.name}"
    value     = "node-a"`))
	c.says(t, "node-b: their metadata names a rack", "doctor")
	root.run(t, "job", "run", "-detach", "node.nomad.hcl")
	c.healthy(max(1, c.controllerCount), 2)
}

// operator returns a user with only the rights of policies/operator.policy.hcl, and of other policies.
func (c *cluster) operator(t *testing.T, others ...string) cli {
	root := c.as(c.management)
	root.run(t, "acl", "policy", "apply", "volumes", "policies/operator.policy.hcl")
	made, _, err := c.admin.ACLTokens().
		Create(&api.ACLToken{Name: "operator", Type: "client", Policies: append(others, "volumes")}, nil)
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
		m.eventually("the restarted agent knows the plugin", func() bool { return m.answered("NodeGetInfo") > registered })
		c.healthy(1, 2)
		c.running(first)
	})
	c.part("plugins killed", func(t *testing.T) {
		c.killPlugin("node-a", "node")
		c.killPlugin(c.controller(t).NodeName, "controller")
		c.healthy(1, 2)
		c.running(first)
	})
	c.part("another program at the same path", func(t *testing.T) {
		c.startedAgain(
			c.clients["node-a"],
			"node",
			func() { c.installer().run(t, "job", "restart", "-yes", "oxide-csi-node") },
		)
		c.healthy(1, 2)
		c.running(first)
	})
	c.part("stop while the node plugin does not run", func(t *testing.T) {
		// Nomad requests the detach at once, with the filesystem still mounted. The grace period lasts until the
		// plugin has returned. (If the job were purged, the client might forget the allocation, and then it would not
		// unmount.)
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
		// The new controller differs: it uses the exec driver, with the program in the clients' chroot_env, and from
		// here on a short grace period.
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
	c.part("stop soon after a return", func(t *testing.T) {
		// The volume was on this client before it was on the other one. So the unpublish may be an old one, and has no clock
		// until Nomad says that no job uses the volume.
		c.stop(t, operator, "data")
	})

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

// execController runs the controller with the exec driver.
func (c *cluster) execController(t *testing.T) {
	t.Helper()
	c.installer(append(c.values(), "NOMAD_VAR_driver=exec", "NOMAD_VAR_command=/bin/oxide-csi")...).
		run(t, "job", "run", "controller.nomad.hcl")
	c.healthy(1, 2)
}

// withoutController stops the example while there is no controller. Nomad releases the claim, and no plugin detaches
// the disk, so the next job finds it attached. It returns the next job's allocation.
func (c *cluster) withoutController(t *testing.T, operator cli, volume, client string) string {
	t.Helper()
	// Without -detach Nomad follows the job's deployment, and fails if it has just removed it.
	c.installer().run(t, "job", "stop", "-detach", "oxide-csi-controller")
	c.healthy(0, 2)
	operator.run(t, "job", "stop", "-detach", "example")
	c.unclaimed(volume)
	if n := c.attached(t); n != 1 {
		t.Errorf("%d disks are attached, want one, because no plugin has detached it", n)
	}
	c.execController(t)
	return c.example(t, operator, volume, client)
}

// status checks what Nomad shows of a volume that is in use.
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
				t.Errorf("nomad %s does not show %q:\n%s", strings.Join(show.args, " "), text, said)
			}
		}
	}
	c.explained(t, info.ExternalID, alloc)
}

// explained checks what the plugin's own commands show of a volume that is in use, with the rights of
// docs/reference/rights.md. They find the logs of the plugin in its namespace.
func (c *cluster) explained(t *testing.T, id, alloc string) {
	const policy = "explain"
	root := c.as(c.management)
	root.stdin = `
node {
  policy = "read"
}

namespace "` + pluginNamespace + `" {
  capabilities = ["read-job", "read-logs"]
}
`
	root.run(t, "acl", "policy", "apply", policy, "-")
	defer root.run(t, "acl", "policy", "delete", policy)
	user := c.operator(t, policy)
	user.variables = []string{
		"OXIDE_HOST=" + c.sim.Host, "OXIDE_PROJECT=" + c.sim.Project, "OXIDE_TOKEN=" + c.sim.Token,
		"OXIDE_CSI_CLUSTER_ID=nomad-test",
	}
	for _, show := range []struct {
		args  []string
		tells []string
	}{
		{[]string{"explain", "data"}, []string{"Works: ", id, alloc[:8]}},
		{[]string{"support-bundle", filepath.Join(t.TempDir(), "bundle.tar")}, []string{"logs/oxide-csi-controller_"}},
	} {
		said, stderr, err := user.tryProgram(programs.Plugin, show.args...)
		if err != nil {
			t.Fatalf("oxide-csi %s: %v\n%s%s", strings.Join(show.args, " "), err, said, stderr)
		}
		for _, text := range show.tells {
			if !strings.Contains(said, text) {
				t.Errorf("oxide-csi %s does not show %q:\n%s", strings.Join(show.args, " "), text, said)
			}
		}
	}
}

// says waits until a command of the plugin's program prints a text, for an operator with a management token. doctor
// ends with an exit code if something is wrong. The result is all that the command prints.
func (c *cluster) says(t *testing.T, text string, args ...string) (said string) {
	t.Helper()
	return c.saysWith(t, nil, text, programs.Plugin, args...)
}

// says is that of the cluster, run on the machine, which sees the disks and the mounts of its guest.
func (m *machine) says(t *testing.T, text string, args ...string) (said string) {
	t.Helper()
	guest := m.cluster.sim.Instance(m.name).Guest
	roots := []string{"OXIDE_CSI_DEV_ROOT=" + guest + "/dev", "OXIDE_CSI_SYS_ROOT=" + guest + "/sys"}
	return m.cluster.saysWith(t, roots, text, "nsenter", append(append(m.namespaces(), programs.Plugin), args...)...)
}

// namespaces are the flags with which nsenter runs a program on the machine.
func (m *machine) namespaces() []string {
	return []string{fmt.Sprintf("--target=%d", m.agent()), "--mount", "--pid"}
}

func (c *cluster) saysWith(t *testing.T, environ []string, text, program string, args ...string) (said string) {
	t.Helper()
	user := c.as(c.management, append(environ, "OXIDE_HOST="+c.sim.Host, "OXIDE_PROJECT="+c.sim.Project,
		"OXIDE_TOKEN="+c.sim.Token, "OXIDE_CSI_CLUSTER_ID=nomad-test")...)
	stderr := ""
	defer func() {
		if t.Failed() {
			t.Logf("oxide-csi %s:\n%s%s", strings.Join(args, " "), said, stderr)
		}
	}()
	await.Within(t, waitLimit, fmt.Sprintf("oxide-csi %s says %q", strings.Join(args, " "), text), func() bool {
		said, stderr, _ = user.tryProgram(program, args...)
		return strings.Contains(said, text)
	})
	return said
}

// follow runs the first of nomad's commands in an answer of explain, which a sign ends.
func (c *cluster) follow(t *testing.T, said string) {
	t.Helper()
	_, step, _ := strings.Cut(said, "; next: ")
	_, step, found := strings.Cut(step, "nomad ")
	if !found {
		t.Fatalf("no command of nomad: %s", said)
	}
	end := strings.IndexAny(step, ";:,\n")
	c.as(c.management).run(t, strings.Fields(step[:end])...)
}

// refused checks the commands that must fail while the volume is in use, and their messages.
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
		// Nomad calls the plugin before it checks its own claims.
		{"delete it", operator, []string{"volume", "delete", "data"}, "is attached to instance " + c.sim.Instance("node-a").ID},
		{"make it larger", operator, []string{"volume", "create", c.filled(t, create, "1GiB", "2GiB")}, "[ExpansionWaits]"},
		{"more than one node", operator, []string{"volume", "create", c.filled(t, create, append(other, "single-node-writer", "multi-node-multi-writer")...)}, "use a single-node mode"},
		{"another rack", operator, []string{"volume", "create", c.filled(t, create, append(other, `= "default"
      }`, `= "nowhere"
      }`)...)}, "this plugin serves topology.csi.oxide.computer/rack=default"},
		{"a disk that is not there", operator, []string{"volume", "register", c.filled(t, "volumes/register.volume.hcl", "DISK-ID", noDisk, "DISK-NAME", "x")}, "could not be found"},
		// Nomad looks for an allocation that the command does not name.
		{"detach it", c.as(c.management), []string{"volume", "detach", "data", c.node("node-a").ID}, "Unknown allocation"},
	} {
		if _, stderr, err := test.user.try(test.args...); err == nil || !strings.Contains(stderr, test.says) {
			t.Errorf("%s: %v: %s", test.name, err, stderr)
		}
	}
	operator.run(t, "volume", "snapshot", "delete", "oxide", noDisk) // it does not exist, and the delete must succeed
}

// killPlugin kills a plugin, and waits until Nomad has started it again.
func (c *cluster) killPlugin(client, mode string) {
	c.t.Helper()
	m := c.clients[client]
	c.startedAgain(m, mode, func() { m.signal(m.plugin(mode), syscall.SIGKILL) })
}

// startedAgain calls do, and waits until the plugin is a new process.
func (c *cluster) startedAgain(m *machine, mode string, do func()) {
	c.t.Helper()
	before := m.plugin(mode)
	do()
	m.eventually("there is another plugin", func() bool { now := m.plugin(mode); return now != 0 && now != before })
}

// controller returns the allocation of the only controller.
func (c *cluster) controller(t *testing.T) *api.AllocationListStub {
	t.Helper()
	var running []*api.AllocationListStub
	// After an agent was killed, Nomad may show for a moment that the allocations of its client do not run.
	await.Within(t, waitLimit, "one controller runs", func() bool {
		allocs, err := c.pluginAllocs("oxide-csi-controller")
		running = slices.DeleteFunc(allocs, func(a *api.AllocationListStub) bool {
			return a.ClientStatus != api.AllocClientStatusRunning
		})
		return err == nil && len(running) == 1
	})
	return running[0]
}

// moveController has the controller run on a client. While there is none, Nomad releases claims without a detach.
func (c *cluster) moveController(t *testing.T, client string) {
	t.Helper()
	alloc := c.controller(t)
	if alloc.NodeName == client {
		return
	}
	_, err := c.admin.Nodes().ToggleEligibility(alloc.NodeID, false, nil)
	must(t, err)
	c.installer().run(t, "alloc", "stop", "-detach", alloc.ID)
	await.Within(t, waitLimit, "the controller runs on "+client, func() bool {
		allocs, err := c.pluginAllocs("oxide-csi-controller")
		return err == nil && slices.ContainsFunc(allocs, func(a *api.AllocationListStub) bool {
			return a.NodeName == client && a.ClientStatus == api.AllocClientStatusRunning
		})
	})
	_, err = c.admin.Nodes().ToggleEligibility(alloc.NodeID, true, nil)
	must(t, err)
	c.healthy(1, 2)
}

// lose suspends the agent of an allocation's node until the servers regard the node as lost. It returns the allocation
// that replaces it on the other node. Nomad detaches the disk from a node that still has it mounted, because it cannot
// reach that node. When the agent continues, it unmounts the disk and requests a detach from a node that no longer
// holds it.
func (c *cluster) lose(t *testing.T, alloc string) string {
	t.Helper()
	info, _, err := c.admin.Allocations().Info(alloc, nil)
	must(t, err)
	m, other := c.clients[info.NodeName], nodes[1-slices.Index(nodes, info.NodeName)]
	c.moveController(t, other)
	unstaged := m.answered("NodeUnstageVolume")
	agent := m.agent()
	m.signal(agent, syscall.SIGSTOP)
	c.says(t, "ClaimNotReleased: ", "explain", "data")
	moved := c.placed(other)
	m.signal(agent, syscall.SIGCONT)
	m.eventually("the volume is unstaged where it was", func() bool { return m.answered("NodeUnstageVolume") > unstaged })
	c.healthy(1, 2)
	c.running(moved)
	if n := c.attached(t); n != 1 {
		t.Errorf("%d disks are attached, want the one of allocation %s", n, moved)
	}
	return moved
}

// grow makes a volume larger while no job uses it, as docs/how-to/grow-volumes.md says.
func (c *cluster) grow(t *testing.T) {
	operator := c.operator(t)
	operator.run(t, "volume", "create", "volumes/create.volume.hcl")
	before, _, err := c.admin.CSIVolumes().Info("data", nil)
	must(t, err)
	first := c.example(t, operator, "data", "node-a")
	c.lines(t, operator, first, first)
	larger := c.filled(t, "volumes/create.volume.hcl", "1GiB", "2GiB")
	if _, stderr, err := operator.try("volume", "create", larger); err == nil ||
		!strings.Contains(stderr, "[ExpansionWaits]") {
		t.Errorf("a volume in use: %v: %s", err, stderr)
	}
	c.stop(t, operator, "data")
	for range 2 { // once more changes nothing
		operator.run(t, "volume", "create", larger)
		after, _, err := c.admin.CSIVolumes().Info("data", nil)
		must(t, err)
		if after.ExternalID != before.ExternalID || after.Capacity != 2<<30 {
			t.Errorf("volume %s is now %s and has %d bytes", before.ExternalID, after.ExternalID, after.Capacity)
		}
	}
	second := c.example(t, operator, "data", "node-b")
	c.lines(t, operator, second, first, second)
	if bytes := c.clients["node-b"].stagedBytes(); bytes < 3<<29 {
		t.Errorf("the filesystem has %d bytes", bytes)
	}
	c.stop(t, operator, "data")
	operator.run(t, "volume", "delete", "data")
	c.nothingLeft(t)
}

// encrypted checks that the passphrase in a volume's secrets reaches the node. Without a device mapper the node
// encrypts the disk and cannot open it. The rest is in TestEncrypted, in a guest with a device mapper.
func (c *cluster) encrypted(t *testing.T) {
	const volume = "postgres"
	complete := strings.Join(pages.Of(t, "../../docs/how-to/encrypt-volumes.md"), "")
	_, passphrase, _ := strings.Cut(complete, `passphrase = "`)
	passphrase, _, _ = strings.Cut(passphrase, `"`)
	operator := c.operator(t)
	for _, try := range []struct{ passphrase, says string }{
		{"", "[PassphraseMissing]"},
		{passphrase, "load the kernel modules dm_mod and dm_crypt on the node"},
	} {
		file := filepath.Join(t.TempDir(), "volume.hcl")
		c.write(file, strings.ReplaceAll(complete, passphrase, try.passphrase))
		operator.run(t, "volume", "create", file)
		c.cannotStart(t, operator, volume, "node-a", try.says)
		c.stop(t, operator, volume)
		info, _, err := c.admin.CSIVolumes().Info(volume, nil)
		must(t, err)
		if _, err := c.opens(info.ExternalID, "another passphrase"); err == nil {
			t.Error("another passphrase opens the disk")
		}
		if output, err := c.opens(info.ExternalID, passphrase); (err == nil) != (try.passphrase != "") {
			t.Errorf("created with passphrase %q: %v: %s", try.passphrase, err, output)
		}
		operator.run(t, "volume", "delete", volume)
	}
	c.nothingLeft(t)
}

// opens tries a passphrase on a detached disk.
func (c *cluster) opens(disk, passphrase string) (output []byte, err error) {
	path := filepath.Join(c.dir, "rack", "disks", disk+".disk")
	cmd := exec.Command("cryptsetup", "open", "--test-passphrase", "--key-file=-", path)
	cmd.Stdin = strings.NewReader(passphrase)
	return cmd.CombinedOutput()
}

// cannotStart runs the example, and waits until Nomad shows why it does not start.
func (c *cluster) cannotStart(t *testing.T, user cli, volume, client, says string) {
	t.Helper()
	user.variables = []string{"NOMAD_VAR_volume=" + volume, "NOMAD_VAR_client=" + client}
	user.run(t, "job", "run", "-detach", "example.nomad.hcl")
	await.Within(t, waitLimit, "the allocation says "+says, func() bool {
		allocs, _, err := c.admin.Jobs().Allocations("example", false, nil)
		return err == nil && slices.ContainsFunc(allocs, func(a *api.AllocationListStub) bool {
			return strings.Contains(failure([]*api.AllocationListStub{a}), says)
		})
	})
}

// rotate replaces the rack's token. The old token is revoked before the new one is in place.
func (c *cluster) rotate(t *testing.T) {
	token, err := c.sim.NewToken(t.Context(), "limited-collaborator")
	must(t, err)
	must(t, c.sim.RevokeToken(t.Context(), c.sim.Token))
	operator := c.operator(t)
	if _, stderr, err := operator.try(
		"volume",
		"create",
		"volumes/create.volume.hcl",
	); err == nil ||
		!strings.Contains(stderr, "[TokenRejected]") {
		t.Errorf("with a revoked token: %v: %s", err, stderr)
	}
	// A controller that starts with a wrong token is healthy for Nomad. Its check "ready" says what is wrong.
	c.killPlugin(c.controller(t).NodeName, "controller")
	await.Within(t, waitLimit, "the check of the controller says that the token is wrong", func() bool {
		said, _, err := c.installer().try("alloc", "checks", c.controller(t).ID)
		return err == nil && strings.Contains(said, "give a token of this silo")
	})
	c.healthy(1, 2)
	c.putToken(t, "oxide-csi-controller", token)
	c.sim.Token = token
	await.Within(t, waitLimit, "the controllers use the new token", func() bool {
		_, _, err := operator.try("volume", "create", "volumes/create.volume.hcl")
		return err == nil
	})
	operator.run(t, "volume", "delete", "data")
}

// again deregisters a volume by force, because Nomad does not release its claim, and registers it again.
func (c *cluster) again(t *testing.T) {
	operator := c.operator(t)
	operator.run(t, "volume", "create", "volumes/create.volume.hcl")
	first := c.example(t, operator, "data", "node-a")
	c.lines(t, operator, first, first)
	c.keepsClaim(t, operator)
	c.registerAgain(t, operator)
	must(t, c.sim.ClearFaults(t.Context()))
	second := c.example(t, operator, "data", "node-b")
	c.lines(t, operator, second, first, second)
	c.stop(t, operator, "data")
	operator.run(t, "volume", "delete", "data")
	c.nothingLeft(t)
}

// registerAgain deregisters a volume with a claim and registers it again, as docs/how-to/troubleshooting-nomad.md says.
// Then it has no claim.
func (c *cluster) registerAgain(t *testing.T, operator cli) {
	t.Helper()
	volume, _, err := c.admin.CSIVolumes().Info("data", nil)
	must(t, err)
	if _, stderr, err := operator.try("volume", "deregister", "data"); err == nil {
		t.Fatalf("the volume has no claim: %s", stderr)
	}
	disk := strings.TrimSpace(operator.run(t, "volume", "status", "-type=csi", "-t", "{{.Context.diskName}}", "data"))
	operator.run(t, "volume", "deregister", "-force", "data")
	operator.run(t, "volume", "register", c.filled(t, "volumes/register.volume.hcl",
		"existing", "data", "DISK-ID", volume.ExternalID, "DISK-NAME", disk))
}

// keepsClaim stops the example while the rack refuses the record of each deferred detach. So the unpublish fails, and
// Nomad keeps the claim of an allocation that has ended.
func (c *cluster) keepsClaim(t *testing.T, operator cli) {
	t.Helper()
	_, err := c.sim.Inject(t.Context(), simtest.Fault{
		Operation: "anti_affinity_group_create", Kind: simtest.FaultStatus, Status: 400, Count: new(int),
	})
	must(t, err)
	operator.run(t, "job", "stop", "-detach", "example")
	await.Within(t, waitLimit, "an unpublish has failed", func() bool {
		faults, err := c.sim.Faults(t.Context())
		return err == nil && len(faults) == 1 && faults[0].Hits > 0
	})
}

// existing uses a disk that an operator created. The disk must survive the deletion of its volume.
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
		t.Errorf("the operator's disk was deleted: %s", stderr)
	}
	operator.run(t, "volume", "deregister", "existing")
	must(t, client.DiskDelete(t.Context(), oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk.Id)}))
	c.nothingLeft(t)
}

// example runs the example job on a volume and a client. It returns the running allocation.
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

// failure explains why an allocation of the job failed.
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

// running checks that an allocation still runs.
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

// lines checks what an allocation found in its file: entries of these writers in this order. An allocation that started
// again in place has printed what it found before, too.
func (c *cluster) lines(t *testing.T, user cli, alloc string, writers ...string) {
	t.Helper()
	var want strings.Builder
	want.WriteString(c.printed[alloc])
	for _, writer := range writers {
		fmt.Fprintf(&want, "written by %s\n", writer)
	}
	c.logged(t, user, alloc, want.String())
	c.printed[alloc] = want.String()
}

// logged checks the output of an allocation.
func (c *cluster) logged(t *testing.T, user cli, alloc, want string) {
	t.Helper()
	got := ""
	await.Within(t, waitLimit, "the output is "+want, func() bool {
		stdout, _, err := user.try("alloc", "logs", alloc)
		got = stdout
		return err == nil && len(got) >= len(want)
	})
	if got != want {
		t.Errorf("the output is %q, want %q", got, want)
	}
}

// stop stops the example, and waits until its volume is free.
func (c *cluster) stop(t *testing.T, user cli, volume string) {
	t.Helper()
	user.run(t, "job", "stop", "-detach", "example")
	c.released(t, volume)
}

// released waits until a volume has no claim in Nomad, and is detached on the rack.
func (c *cluster) released(t *testing.T, volume string) {
	t.Helper()
	c.unclaimed(volume)
	await.Within(t, waitLimit, "the disk is detached", func() bool { return c.attached(t) == 0 })
}

func (c *cluster) unclaimed(volume string) {
	c.t.Helper()
	c.server.eventually("the claims of "+volume+" are released", func() bool {
		info, _, err := c.admin.CSIVolumes().Info(volume, nil)
		return err == nil && len(info.ReadAllocs)+len(info.WriteAllocs) == 0
	})
}

// attached counts the disks of the rack's instances, without boot disks.
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

// drain drains the node of an allocation, and returns the allocation that replaces it on the other node.
func (c *cluster) drain(t *testing.T, alloc string) string {
	t.Helper()
	root := c.as(c.management)
	info, _, err := c.admin.Allocations().Info(alloc, nil)
	must(t, err)
	other := nodes[1-slices.Index(nodes, info.NodeName)]
	c.moveController(t, other)
	// The job was pinned to its node. Without that constraint it may move.
	job := c.as(c.management, "NOMAD_VAR_volume=data", "NOMAD_VAR_client="+strings.Join(nodes, "|"))
	job.run(t, "node", "eligibility", "-disable", info.NodeID)
	job.run(t, "job", "run", "-detach", "example.nomad.hcl")
	root.run(t, "node", "drain", "-enable", "-yes", "-detach", info.NodeID)
	moved := c.placed(other)
	c.server.eventually("the node is drained, its plugin last", func() bool {
		node, _, err := c.admin.Nodes().Info(info.NodeID, nil)
		return err == nil && node.DrainStrategy == nil
	})
	root.run(t, "node", "eligibility", "-enable", info.NodeID)
	c.healthy(1, 2)
	return moved
}

// nothingLeft checks that no volume is left in Nomad, on the rack or in the kernel.
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

// monolith replaces controller and nodes by one job.
func (c *cluster) monolith(t *testing.T) {
	root := c.installer(c.values()...)
	root.run(t, "job", "stop", "-purge", "oxide-csi-node")
	root.run(t, "job", "stop", "-purge", "oxide-csi-controller")
	c.server.eventually("the plugin is gone", func() bool {
		plugins, _, err := c.admin.CSIPlugins().List(nil)
		return err == nil && len(plugins) == 0
	})
	root.run(
		t,
		"acl",
		"policy",
		"apply",
		"-namespace="+pluginNamespace,
		"-job=oxide-csi",
		"oxide-csi",
		"policies/node.policy.hcl",
	)
	c.allowController(t, "oxide-csi")
	c.putToken(t, "oxide-csi", c.sim.Token)
	// Where the scheduler allows memory oversubscription, the job has no limit.
	root.run(t, "operator", "scheduler", "set-config", "-memory-oversubscription=true")
	root.run(t, "job", "run", "monolith.nomad.hcl")
	c.healthy(1, 1)
	operator := c.operator(t)
	operator.run(t, "volume", "create", "volumes/create.volume.hcl")
	allocs, err := c.pluginAllocs("oxide-csi")
	must(t, err)
	if bytes := c.clients[allocs[0].NodeName].memoryLimit("all"); bytes < 1<<60 {
		t.Errorf("the plugin's limit is %d bytes of memory, want none", bytes)
	}
	alloc := c.example(t, operator, "data", allocs[0].NodeName)
	c.lines(t, operator, alloc, alloc)
	c.stop(t, operator, "data")
	operator.run(t, "volume", "delete", "data")
	c.nothingLeft(t)
	root.run(t, "job", "stop", "-purge", "oxide-csi")
	root.run(t, "operator", "scheduler", "set-config", "-memory-oversubscription=false")
}

// uninstall removes the plugin as docs/how-to/uninstall.md does. No volume is left.
func (c *cluster) uninstall(t *testing.T) {
	root := c.as(c.management)
	root.run(t, "job", "stop", "-purge", "-namespace="+pluginNamespace, "oxide-csi-node")
	root.run(t, "job", "stop", "-purge", "-namespace="+pluginNamespace, "oxide-csi-controller")
	for _, job := range []string{"oxide-csi-controller", "oxide-csi"} {
		root.run(t, "var", "purge", "-namespace="+pluginNamespace, "nomad/jobs/"+job)
	}
	for _, policy := range []string{"oxide-csi-node", controllerPolicy, "oxide-csi", "volumes"} {
		root.run(t, "acl", "policy", "delete", policy)
	}
	root.run(t, "namespace", "delete", pluginNamespace)
}
