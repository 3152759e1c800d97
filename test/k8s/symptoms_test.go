// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s && stories

package k8s_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestSymptomRows makes mistakes of docs/how-to/troubleshooting.md and docs/reference/errors.md that nothing
// else makes in a cluster, and waits for the text that the page quotes where the page says that an operator sees it.
func TestSymptomRows(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces, mounts, loop devices")
	}
	c := newCluster(t, spareInstance, otherInstance)
	c.install(t, "overlay")
	for _, row := range []struct {
		quoted string
		make   func(*testing.T, string)
	}{
		{"Waiting for detach", c.twoNodes},
		{"[AttachedElsewhere]", c.heldElsewhere},
		{"never replaces a filesystem [ForeignFilesystem]", c.anotherType},
		{"[DiskNotBlank]", c.notBlank},
		{"belongs to another volume: its UUID is", c.copied},
		{"was not made by this plugin", c.madeByHand},
		{"belongs to cluster", c.anotherCluster},
		{"accessibility_requirements: this plugin serves", c.anotherRack},
		{"[InstanceFull]", c.disksByHand},
		{"has become read-only after an error", c.damaged},
		{"is still attached to node", c.staysAttached},
		{"does not contain driver", c.notOnNode},
		{"did not have enough free storage", c.noCapacity},
		{"FailedPreStopHook", c.notMoved},
		{"violates PodSecurity", c.noPrivilege},
		{"CreateContainerConfigError", c.missingKey},
		{"config: ", c.wrongSetting},
		{"cannot be believed", c.lostRole},
		{"topology value collision", c.anotherRackLabel},
		{"the startup taint is not removed yet", c.mayNotRemoveTaint},
		{"[DeviceNotFound]", c.anotherInstance},
		{"Init:0/1", c.uninitialized},
		// From here on the chart has replaced the manifests.
		{"the cluster ID would change from", c.anotherClusterID},
		{"this node is not known yet", c.uninitializedWithoutInit},
	} {
		t.Run(row.quoted, func(t *testing.T) { row.make(t, row.quoted) })
	}
}

// spareInstance is the instance of a node that a test adds. No node runs on otherInstance.
const spareInstance, otherInstance = "node-c", "node-d"

// twoNodes needs a volume on two nodes at once. Kubernetes 1.36 says it in other words.
func (c *cluster) twoNodes(t *testing.T, quoted string) {
	if c.is136(t) {
		quoted = "Multi-Attach error"
	}
	c.uses(t, "first", c.a)
	c.running(t, "first")
	c.apply(t, pod{name: "second", claim: "first", on: c.b}.String())
	t.Cleanup(func() { c.gone(t, "pod", "second") })
	c.event(t, "second", quoted)
}

// heldElsewhere needs a volume on a node on which somebody has attached it by hand.
func (c *cluster) heldElsewhere(t *testing.T, quoted string) {
	c.attachByHand(t, c.used(t, "held").Id)
	c.uses(t, "held", c.b)
	c.event(t, "held", quoted)
}

// existingDisk makes a volume of a disk by the documented example, with changes of its text.
func (c *cluster) existingDisk(t *testing.T, name, disk string, change ...string) {
	t.Helper()
	text, err := os.ReadFile(manifests + "/examples/existing-disk.yaml")
	must(t, err)
	replacer := strings.NewReplacer(
		append(change, "name: existing", "name: "+name, "volumeName: existing", "volumeName: "+name,
			"DISK-ID", disk, "DISK-NAME", "by-hand")...)
	c.apply(t, replacer.Replace(string(text)))
	t.Cleanup(func() { c.kubectl(t, "delete", "--wait=false", "--ignore-not-found", "pv/"+name) })
}

// anotherType asks for XFS on a disk that has ext4.
func (c *cluster) anotherType(t *testing.T, quoted string) {
	disk := c.used(t, "ext4")
	c.existingDisk(t, "xfs", disk.Id, "fsType: ext4", "fsType: xfs", "DISK-NAME", string(disk.Name))
	c.uses(t, "xfs", c.a)
	c.event(t, "xfs", quoted)
}

// notBlank puts data of no known kind in the place of the filesystem.
func (c *cluster) notBlank(t *testing.T, quoted string) {
	file := c.store(c.used(t, "data"))
	run(t, "wipefs", "--all", "--quiet", file)
	run(t, "dd", "if=/dev/urandom", "of="+file, "bs=4096", "count=4", "seek=1000", "conv=notrunc", "status=none")
	c.uses(t, "data", c.a)
	c.event(t, "data", quoted)
}

// copied copies the content of one volume to another.
func (c *cluster) copied(t *testing.T, quoted string) {
	source, target := c.used(t, "source"), c.used(t, "target")
	run(t, "dd", "if="+c.store(source), "of="+c.store(target), "bs=1M", "conv=notrunc", "status=none")
	c.uses(t, "target", c.a)
	c.event(t, "target", quoted)
}

// blankDisk makes a disk by hand.
func (c *cluster) blankDisk(t *testing.T, name, description string) *oxide.Disk {
	t.Helper()
	disk, err := c.client(t).DiskCreate(t.Context(), oxide.DiskCreateParams{
		Project: oxide.NameOrId(c.sim.Project), Body: &oxide.DiskCreate{
			Name: oxide.Name(name), Description: description, Size: 1 << 30,
			DiskBackend: oxide.DiskBackend{Value: oxide.DiskBackendDistributed{
				DiskSource: oxide.DiskSource{Value: oxide.DiskSourceBlank{BlockSize: 4096}},
			}},
		},
	})
	must(t, err)
	return disk
}

// madeByHand deletes the claim of a disk that was made by hand, with the reclaim policy Delete.
func (c *cluster) madeByHand(t *testing.T, quoted string) {
	c.existingDisk(t, "by-hand", c.blankDisk(t, "by-hand", "").Id, "Policy: Retain", "Policy: Delete")
	await.Within(
		t,
		waitLimit,
		"the claim is bound",
		func() bool { return c.get(t, ".status.phase", "pvc", "by-hand") == "Bound" },
	)
	c.gone(t, "pvc", "by-hand")
	c.event(t, "by-hand", quoted)
}

// anotherCluster uses a disk that another cluster has made.
func (c *cluster) anotherCluster(t *testing.T, quoted string) {
	description := strings.ReplaceAll(c.used(t, "ours").Description, c.id, "another")
	c.existingDisk(t, "theirs", c.blankDisk(t, "csi-theirs", description).Id)
	c.uses(t, "theirs", c.a)
	c.event(t, "theirs", quoted)
}

// anotherRack has a class for a rack that the controller does not serve.
func (c *cluster) anotherRack(t *testing.T, quoted string) {
	c.apply(
		t,
		"apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: nowhere}\nprovisioner: "+rpc.PluginName+
			"\nallowedTopologies: [{matchLabelExpressions: [{key: "+rpc.TopologySegmentRack+", values: [nowhere]}]}]\n---\n"+
			claim{name: "nowhere", class: "nowhere"}.String(),
	)
	t.Cleanup(func() { c.gone(t, "pvc/nowhere", "storageclass/nowhere") })
	c.event(t, "nowhere", quoted)
}

// disksByHand fills all places of a node with disks that the scheduler does not know.
func (c *cluster) disksByHand(t *testing.T, quoted string) {
	for i := range maxDisks - 1 {
		c.attachByHand(t, c.blankDisk(t, fmt.Sprintf("filler-%d", i), "").Id)
	}
	c.uses(t, "overfull", c.a)
	c.event(t, "overfull", quoted)
}

// damaged lets the kernel find an error in a filesystem that a pod uses, and starts a second pod.
func (c *cluster) damaged(t *testing.T, quoted string) {
	c.apply(
		t,
		"apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: careful}\nprovisioner: "+rpc.PluginName+
			"\nmountOptions: [errors=remount-ro]\n---\n"+claim{name: "damaged", class: "careful"}.String(),
	)
	t.Cleanup(func() { c.gone(t, "storageclass", "careful") })
	c.uses(t, "damaged", c.a)
	c.running(t, "damaged")
	pv := c.get(t, ".spec.volumeName", "pvc", "damaged")
	var device unix.Stat_t
	must(t, unix.Stat(c.device(t, c.get(t, ".spec.csi.volumeHandle", "pv", pv)), &device))
	kernelName, err := filepath.EvalSymlinks(
		fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(device.Rdev), unix.Minor(device.Rdev)))
	must(t, err)
	must(t, os.WriteFile("/sys/fs/ext4/"+filepath.Base(kernelName)+"/trigger_fs_error", []byte("tested"), 0))
	c.apply(t, pod{name: "second", claim: "damaged", on: c.a}.String())
	t.Cleanup(func() { c.gone(t, "pod", "second") })
	c.event(t, "second", quoted)
}

// staysAttached deletes a claim whose volume the rack does not detach.
func (c *cluster) staysAttached(t *testing.T, quoted string) {
	c.uses(t, "stays", c.a)
	c.running(t, "stays")
	pv := c.get(t, ".spec.volumeName", "pvc", "stays")
	c.setting(t, simtest.Settings{Hotplug: new(false), HotplugAsync: new(false)},
		simtest.Settings{Hotplug: new(true), HotplugAsync: new(true)})
	c.gone(t, "pod/stays", "pvc/stays")
	c.event(t, pv, quoted)
	if phase := c.get(t, ".status.phase", "pv", pv); phase != "Released" {
		t.Errorf("the PersistentVolume is %s", phase)
	}
	await.Within(t, waitLimit, "a VolumeAttachment has the reason", func() bool {
		return strings.Contains(
			c.get(t, ".items[*].status.detachError.message", "volumeattachments"), "only while the instance is stopped")
	})
}

// components adds the components capacity and await-detach until the end of the test.
func (c *cluster) components(t *testing.T) {
	t.Helper()
	c.kubectl(t, "apply", "-k", "overlay-components")
	t.Cleanup(func() { c.kubectl(t, "apply", "-k", "overlay"); c.rolledOut(t) })
	c.rolledOut(t)
}

// noCapacity publishes the capacity of a rack whose quota is used up.
func (c *cluster) noCapacity(t *testing.T, quoted string) {
	c.setting(t, simtest.Settings{QuotaBytes: new(int64(1))}, simtest.Settings{QuotaBytes: new(int64(0))})
	c.components(t)
	c.uses(t, "unplaced", c.a)
	c.event(t, "unplaced", quoted)
}

// notMoved ends the plugin on a node that is given up while a pod there has a volume.
func (c *cluster) notMoved(t *testing.T, quoted string) {
	c.components(t)
	c.uses(t, "unmoved", c.b)
	c.running(t, "unmoved")
	plugin := c.get(t, ".items[?(@.spec.nodeName==\""+c.b.Name+"\")].metadata.name",
		"-n", namespace, "pods", "-l", "app=oxide-csi-node")
	c.kubectl(t, "cordon", c.b.Name)
	t.Cleanup(func() { c.kubectl(t, "uncordon", c.b.Name) })
	c.kubectl(t, "-n", namespace, "delete", "--wait=false", "pod", plugin)
	await.Within(t, waitLimit, "the plugin's pod has the event "+quoted, func() bool {
		return strings.Contains(c.get(t, ".items[*].reason", "-n", namespace, "events",
			"--field-selector=involvedObject.name="+plugin), quoted)
	})
}

// notOnNode takes the plugin off a node, where a volume that exists is used, and a new one.
func (c *cluster) notOnNode(t *testing.T, quoted string) {
	c.used(t, "nowhere")
	c.withoutPlugin(t, c.b)
	c.uses(t, "nowhere", c.b)
	c.event(t, "nowhere", quoted)
	c.uses(t, "new", c.b)
	c.event(t, "new", "no topology key found for node")
}

// lostRole gives the plugin a token without a role.
func (c *cluster) lostRole(t *testing.T, quoted string) {
	c.used(t, "powerless")
	token, err := c.sim.NewToken(t.Context(), "none")
	must(t, err)
	c.setSecret(t, "token", token)
	t.Cleanup(func() { c.restored(t, "token", c.sim.Token) })
	c.kubectl(t, "-n", namespace, "delete", "pods", "-l", "app=oxide-csi-controller", "--force", "--grace-period=0")
	c.uses(t, "powerless", c.a)
	c.event(t, "powerless", quoted)
}

// noPrivilege forbids privileged pods in the plugin's namespace.
func (c *cluster) noPrivilege(t *testing.T, quoted string) {
	label := func(level string) {
		c.kubectl(t, "label", "--overwrite", "namespace", namespace, "pod-security.kubernetes.io/enforce="+level)
	}
	label("baseline")
	t.Cleanup(func() { label("privileged"); c.rolledOut(t) })
	c.kubectl(t, "-n", namespace, "rollout", "restart", "daemonset/oxide-csi-node")
	c.event(t, "oxide-csi-node", quoted)
}

// missingKey removes the cluster ID from the plugin's Secret.
func (c *cluster) missingKey(t *testing.T, quoted string) {
	c.kubectl(t, "-n", namespace, "patch", "secret", "oxide-secret", "--type=merge", "-p", `{"data":{"cluster-id":null}}`)
	t.Cleanup(func() { c.restored(t, "cluster-id", c.id) })
	c.kubectl(t, "-n", namespace, "delete", "pods", "-l", "app=oxide-csi-controller", "--force", "--grace-period=0")
	await.Within(t, waitLimit, "a controller is in "+quoted, func() bool {
		return strings.Contains(
			c.get(t, ".items[*].status.containerStatuses[*].state.waiting.reason", "-n", namespace, "pods",
				"-l", "app=oxide-csi-controller"),
			quoted,
		)
	})
}

// wrongSetting gives the controllers a setting that does not exist.
func (c *cluster) wrongSetting(t *testing.T, quoted string) {
	set := func(setting string) {
		c.kubectl(t, "-n", namespace, "set", "env", "deployment/oxide-csi-controller", "-c=oxide-plugin", setting)
	}
	set("OXIDE_CSI_DETACH_GRACE=soon")
	t.Cleanup(func() { set("OXIDE_CSI_DETACH_GRACE-"); c.rolledOut(t) })
	await.Within(t, waitLimit, "a controller crashes, and its log says "+quoted, func() bool {
		waiting := c.get(t, ".items[*].status.containerStatuses[*].state.waiting.reason", "-n", namespace, "pods",
			"-l", "app=oxide-csi-controller")
		said, _ := c.try("-n", namespace, "logs", "-l", "app=oxide-csi-controller", "-c", "oxide-plugin", "--tail=20")
		return strings.Contains(waiting, "CrashLoopBackOff") && strings.Contains(said, quoted)
	})
}

// anotherRackLabel gives a Node's rack another name.
func (c *cluster) anotherRackLabel(t *testing.T, quoted string) {
	label := func(label string) {
		c.kubectl(t, "label", "--overwrite", "node", c.b.Name, label)
		c.kubectl(
			t,
			"-n",
			namespace,
			"delete",
			"pods",
			"-l",
			"app=oxide-csi-node",
			"--field-selector=spec.nodeName="+c.b.Name,
		)
	}
	label("oxide.computer/rack=renamed")
	t.Cleanup(func() { label("oxide.computer/rack-"); c.rolledOut(t); c.registered(t, c.b, "default") })
	await.Within(t, waitLimit, "kubelet's log says: "+quoted, func() bool {
		said, err := os.ReadFile(c.b.path("kubelet.log"))
		must(t, err)
		return strings.Contains(string(said), quoted)
	})
}

// mayNotRemoveTaint takes the right to change Nodes away from the node plugin.
func (c *cluster) mayNotRemoveTaint(t *testing.T, quoted string) {
	c.components(t)
	c.kubectl(t, "patch", "clusterrole", "oxide-csi-node", "--type=json", "-p",
		`[{"op":"test","path":"/rules/2/verbs","value":["patch"]},{"op":"remove","path":"/rules/2"}]`)
	c.kubectl(t, "taint", "node", c.b.Name, startupTaint+":NoSchedule")
	c.kubectl(t, "-n", namespace, "delete", "pods", "-l", "app=oxide-csi-node", "--field-selector=spec.nodeName="+c.b.Name)
	await.Within(t, waitLimit, "the plugin's log says: "+quoted, func() bool {
		said, _ := c.try("-n", namespace, "logs", "-l", "app=oxide-csi-node", "-c", "oxide-plugin", "--tail=20")
		return strings.Contains(said, quoted)
	})
	c.kubectl(t, "apply", "-k", "overlay-components")
	await.Within(t, waitLimit, "with the right the taint goes", func() bool {
		return !strings.Contains(c.get(t, ".spec.taints[*].key", "node", c.b.Name), startupTaint)
	})
}

// spare adds a node until the end of the test.
func (c *cluster) spare(t *testing.T, change func(*node)) *node {
	t.Helper()
	n := c.newNode(c.sim, spareInstance, nodeC)
	change(n)
	t.Cleanup(func() {
		n.stop(t)
		c.gone(t, "node", n.Name)
		c.kubectl(t, "delete", "pods", "-A", "--field-selector=spec.nodeName="+n.Name, "--force", "--grace-period=0")
	})
	c.join(t, n)
	return n
}

// anotherInstance adds a node whose provider ID is that of another instance.
func (c *cluster) anotherInstance(t *testing.T, quoted string) {
	n := c.spare(t, func(n *node) { n.Instance = c.sim.Instance(otherInstance).ID })
	c.uses(t, "astray", n)
	c.event(t, "astray", quoted)
	c.gone(t, "pod", "astray")
	await.Within(t, waitLimit, "the disk is detached", func() bool { return len(c.attached(t, n)) == 0 })
}

// notInitialized adds a node that waits for a cloud controller manager, which this cluster does not have.
func (c *cluster) notInitialized(t *testing.T) *node {
	return c.spare(t, func(n *node) {
		n.Instance, n.Taint = "", "node.cloudprovider.kubernetes.io/uninitialized"
	})
}

// uninitialized waits for the pod of the DaemonSet on a node without identity.
func (c *cluster) uninitialized(t *testing.T, quoted string) {
	n := c.notInitialized(t)
	await.Within(t, waitLimit, "kubectl shows "+quoted, func() bool {
		return strings.Contains(
			c.kubectl(t, "-n", namespace, "get", "pods", "--field-selector=spec.nodeName="+n.Name),
			quoted,
		)
	})
	await.Within(t, waitLimit, "the init container says why", func() bool {
		said, _ := c.try("-n", namespace, "logs", "-l", "app=oxide-csi-node", "-c", "metadata", "--tail=20")
		return strings.Contains(said, "check that the Oxide cloud controller manager runs")
	})
}

// fromChart replaces the manifests by the chart, without init containers.
func (c *cluster) fromChart(t *testing.T, values ...string) error {
	t.Helper()
	workloads := []string{"-n", namespace, "deployment/oxide-csi-controller", "daemonset/oxide-csi-node"}
	if !strings.Contains(c.get(t, ".items[*].metadata.labels", workloads...), "Helm") {
		c.gone(t, workloads...) // a merge would keep old parts of them
	}
	return c.tryHelm(append([]string{
		"upgrade", "--install", "oxide-csi", "../../deploy/helm/oxide-csi", "--take-ownership",
		"--set=maxDisks=10,node.identity=auto,node.registration=plugin,snapshots.enabled=true",
	}, values...)...)
}

// anotherClusterID installs the chart, and sets another cluster ID for its upgrade.
func (c *cluster) anotherClusterID(t *testing.T, quoted string) {
	must(t, c.fromChart(t))
	if err := c.fromChart(t, "--set=clusterID=another"); err == nil || !strings.Contains(err.Error(), quoted) {
		t.Errorf("helm says: %v", err)
	}
}

// uninitializedWithoutInit waits for the log of a plugin without an init container, on a node without identity.
func (c *cluster) uninitializedWithoutInit(t *testing.T, quoted string) {
	must(t, c.fromChart(t))
	c.notInitialized(t)
	await.Within(t, waitLimit, "the plugin's log says: "+quoted, func() bool {
		said, _ := c.try("-n", namespace, "logs", "-l", "app=oxide-csi-node", "-c", "oxide-plugin", "--tail=20")
		return strings.Contains(said, quoted)
	})
}
