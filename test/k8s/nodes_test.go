// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s

package k8s_test

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
)

// startupTaint is the taint in values.yaml.
const startupTaint = "csi.oxide.computer/agent-not-ready"

// powerCut ends a node at once, and follows the documentation. The volume must soon be on another node with all synced
// data, and the node must come back.
func (c *cluster) powerCut(t *testing.T) {
	c.apply(t, claim{name: "survives"}.String()+pod{name: "survives", claim: "survives", on: c.b}.String())
	c.running(t, "survives")
	c.sh(t, "survives", "echo here >/data/file; sync")
	must(t, c.sim.PowerCut(t.Context(), c.b.Name))
	c.b.stop(t)
	await.Within(t, waitLimit, "Kubernetes regards the node as lost", func() bool {
		return c.get(t, `.status.conditions[?(@.type=="Ready")].status`, "node", c.b.Name) == "Unknown"
	})
	// So preventPodSchedulingIfMissing does not keep pods away from a node that has been rebooted (drain-nodes.md).
	if got := c.get(t, ".spec.drivers[*].name", "csinode", c.b.Name); got != rpc.PluginName {
		t.Errorf("the CSINode of the lost node has %q", got)
	}
	c.explained(t, "pod/default/survives", "InstanceStopped")
	c.kubectl(t, "taint", "node", c.b.Name, "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute")
	await.Within(
		t,
		waitLimit,
		"the volume is detached from the lost node",
		func() bool { return len(c.attached(t, c.b)) == 0 },
	)
	c.apply(t, pod{name: "again", claim: "survives", on: c.a}.String())
	c.running(t, "again")
	if got := c.sh(t, "again", "/busybox cat /data/file"); got != "here" {
		t.Errorf("after the power cut the file contains %q", got)
	}

	must(t, c.sim.SetRunState(t.Context(), c.b.Name, "running"))
	c.b.start(t)
	c.ready(t, c.b)
	c.kubectl(t, "taint", "node", c.b.Name, "node.kubernetes.io/out-of-service-")
	c.registered(t, c.b, "default")
	c.gone(t, "pod", "again")
	c.apply(t, pod{name: "back", claim: "survives", on: c.b}.String())
	c.running(t, "back")
	c.gone(t, "pod/back", "pvc/survives")
}

// rotation replaces the plugin's token as the documentation says, and revokes the old one. No controller may be
// restarted. Kubelet takes as long to write the token as to restart a plugin that hangs, which is on another node.
func (c *cluster) rotation(t *testing.T) {
	restarted := c.hang(t, c.b)
	pods := func() string {
		of := func(field string) string {
			return c.get(t, ".items[*]."+field, "-n", namespace, "pods", "-l", "app=oxide-csi-controller")
		}
		return of("metadata.uid") + " with restarts " + of("status.containerStatuses[*].restartCount")
	}
	before, old := pods(), c.sim.Token
	token, err := c.sim.NewToken(t.Context(), "limited-collaborator")
	must(t, err)
	c.setSecret(t, "token", token)
	uids, _, _ := strings.Cut(before, " with ")
	for _, uid := range strings.Fields(uids) {
		await.Within(t, waitLimit, "kubelet has written the token", func() bool {
			for _, n := range []*node{c.a, c.b} {
				text, err := os.ReadFile(
					fmt.Sprintf(
						"/proc/%d/root/var/lib/kubelet/pods/%s/volumes/kubernetes.io~secret/token/token",
						n.init.Process.Pid,
						uid,
					),
				)
				if err == nil && string(text) == token {
					return true
				}
			}
			return false
		})
	}
	must(t, c.sim.RevokeToken(t.Context(), old))
	c.sim.Token = token
	c.apply(t, claim{name: "rotated"}.String()+pod{name: "rotated", claim: "rotated", on: c.a}.String())
	c.running(t, "rotated")
	if after := pods(); after != before {
		t.Errorf("the controller pods were %s and are now %s", before, after)
	}
	c.gone(t, "pod/rotated", "pvc/rotated")
	restarted()
}

// chart lets helm adopt the objects of the manifests while a volume is in use, and adds a second rack.
func (c *cluster) chart(t *testing.T) {
	c.apply(t, claim{name: "stays"}.String()+pod{name: "stays", claim: "stays", on: c.a}.String())
	c.running(t, "stays")
	c.sh(t, "stays", "echo here >/data/file; sync")

	c.west = c.startRack(t, "west", westAddress, "node-c", "--hotplug=async")
	c.kubectl(t, "label", "node", c.a.Name, c.b.Name, "oxide.computer/rack=default")
	must(t, c.sim.NewExpiringToken(t.Context(), c.sim.Token, 72*time.Hour))
	for secret, token := range map[string]string{"oxide-default": c.sim.Token, "oxide-west": c.west.Token} {
		c.kubectl(t, "-n", namespace, "create", "secret", "generic", secret, "--from-literal=token="+token)
	}
	c.kubectl(
		t,
		"-n",
		namespace,
		"delete",
		"deployment/oxide-csi-controller",
		"daemonset/oxide-csi-node",
	) // a merge would keep old parts of them
	c.helm(t, "install", "oxide-csi", "../../deploy/helm/oxide-csi", "--take-ownership", "--values=values.yaml")
	c.rolledOut(t)
	if got := c.get(
		t,
		".spec.template.spec.containers[*].name",
		"-n",
		namespace,
		"daemonset",
		"oxide-csi-node",
	); got != "oxide-plugin" {
		t.Errorf("the containers of the node's pods are %s", got)
	}
	for _, n := range []*node{c.a, c.b} {
		c.registered(t, n, "default")
	}
	if got := c.sh(t, "stays", "/busybox cat /data/file"); got != "here" {
		t.Errorf("the file on the volume in use contains %q", got)
	}
	c.gone(t, "pod/stays", "pvc/stays")
}

// joins checks that a new node keeps its taint until the scheduler knows its attach limit, and that its plugin cannot
// remove taints of other nodes. It also measures the memory of a plugin that has done nothing yet.
func (c *cluster) joins(t *testing.T) {
	n := c.newNode(c.west, "node-c", nodeC)
	n.Rack, n.Taint = "west", startupTaint
	c.c = n
	c.join(t, n)
	await.Within(t, waitLimit, "the startup taint is removed", func() bool {
		return !strings.Contains(c.get(t, ".spec.taints[*].key", "node", n.Name), startupTaint)
	})
	if got := c.get(t, ".spec.drivers[0].allocatable.count", "csinode", n.Name); got != strconv.Itoa(maxDisks-1) {
		t.Errorf("when the taint was gone the limit was %q", got)
	}
	c.registered(t, n, "west")

	for _, tc := range []struct{ name, node, change, want string }{
		{"another node's taints", c.a.Name, `{"spec":{"taints":[]}}`, "may change no other Node than its own"},
		{"a new taint", n.Name, `{"spec":{"taints":[{"key":"a.example.com/b","effect":"NoSchedule"}]}}`, "may only take taints off its Node"},
		{"a label", n.Name, `{"metadata":{"labels":{"a":"b"}}}`, "may only take taints off its Node"},
		{"cordon", n.Name, `{"spec":{"unschedulable":true}}`, "may only take taints off its Node"},
	} {
		_, err := c.try(
			"patch",
			"node",
			tc.node,
			"--type=merge",
			"--patch="+tc.change,
			"--as=system:serviceaccount:"+namespace+":oxide-csi-node",
			"--as-user-extra=authentication.kubernetes.io/node-name="+n.Name,
		)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
	}
	t.Run("memory", func(t *testing.T) {
		// Probes and the watch of the Node go on meanwhile. The highest of many readings counts.
		var anonymous, resident float64
		for range 20 {
			anonymous = max(anonymous, c.memory(t, n, "RssAnon"))
			resident = max(resident, c.memory(t, n, "VmRSS"))
			time.Sleep(2 * time.Second)
		}
		if anonymous > 12 || resident > 32 {
			t.Errorf(
				"the plugin takes up to %.1f MiB of anonymous memory, of 12, and %.1f MiB resident, of 32",
				anonymous,
				resident,
			)
		}
		t.Logf(
			"measured: memory of a node's plugin, which registers by itself and has no volume: up to %.1f MiB anonymous, %.1f MiB resident",
			anonymous,
			resident,
		)
	})
}

// waitsForPlugin checks that a pod with a volume is placed on no node without the plugin, if the CSIDriver says so. It
// starts as soon as the plugin is there.
func (c *cluster) waitsForPlugin(t *testing.T) {
	set := func(wait bool) {
		c.helm(t, "upgrade", "oxide-csi", "../../deploy/helm/oxide-csi", "--reuse-values",
			fmt.Sprintf("--set=csiDriver.preventPodSchedulingIfMissing=%t", wait))
	}
	set(true)
	t.Cleanup(func() { set(false) })
	// Kubernetes 1.36 drops the field, and has nothing more to show.
	newer := !c.is136(t)
	got := c.get(t, ".spec.preventPodSchedulingIfMissing", "csidriver", rpc.PluginName)
	if newer != (got == "true") {
		t.Fatalf("the CSIDriver's preventPodSchedulingIfMissing is %q", got)
	}
	if !newer {
		return
	}
	t.Run("without the plugin", func(t *testing.T) {
		c.withoutPlugin(t, c.c)
		c.apply(t, claim{name: "waits"}.String()+pod{name: "waits", claim: "waits", on: c.c}.String())
		c.event(t, "waits", "CSI driver is not installed on the node")
		if node := c.get(t, ".spec.nodeName", "pod", "waits"); node != "" {
			t.Errorf("the pod was placed on %s", node)
		}
	})
	c.running(t, "waits")
	c.gone(t, "pod/waits", "pvc/waits")
}

// is136 reports whether this is Kubernetes 1.36.
func (c *cluster) is136(t *testing.T) bool {
	t.Helper()
	return strings.Contains(c.kubectl(t, "get", "--raw", "/version"), `"minor": "36"`)
}

// withoutPlugin takes the plugin off a node until the end of the test.
func (c *cluster) withoutPlugin(t *testing.T, n *node) {
	t.Helper()
	set := func(affinity string) {
		c.kubectl(t, "-n", namespace, "patch", "daemonset", "oxide-csi-node", "-p",
			`{"spec":{"template":{"spec":{"affinity":`+affinity+`}}}}`)
	}
	set(`{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[` +
		`{"key":"kubernetes.io/hostname","operator":"NotIn","values":["` + n.Name + `"]}]}]}}}`)
	t.Cleanup(func() { set("null"); c.rolledOut(t) })
	await.Within(
		t,
		waitLimit,
		"the plugin is gone",
		func() bool { return c.get(t, ".spec.drivers[*].name", "csinode", n.Name) == "" },
	)
}

// memory returns the memory of the plugin on a node in MiB, by a field name of /proc/PID/status. The pod's other
// process is a stand-in for Kubernetes' pause, which takes less than half a megabyte.
func (c *cluster) memory(t *testing.T, n *node, which string) (sum float64) {
	t.Helper()
	for _, status := range c.pluginProcesses(t, n) {
		sum += mebibytes(t, status, which)
	}
	if sum == 0 {
		t.Errorf("the plugin on %s has no %s", n.Name, which)
	}
	return sum
}

// pluginProcesses returns the content of /proc/PID/status for each process of the plugin on a node, by PID.
func (c *cluster) pluginProcesses(t *testing.T, n *node) map[int]string {
	t.Helper()
	uid := c.get(
		t,
		".items[*].metadata.uid",
		"-n",
		namespace,
		"pods",
		"-l",
		"app=oxide-csi-node",
		"--field-selector=spec.nodeName="+n.Name,
	)
	files, err := filepath.Glob("/proc/[0-9]*/cgroup")
	must(t, err)
	found := map[int]string{}
	for _, file := range files {
		groups, err := os.ReadFile(file)
		if err != nil || uid == "" || !strings.Contains(string(groups), "/pod"+uid+"/") {
			continue // The process has ended, or belongs to another pod.
		}
		dir := filepath.Dir(file)
		status, err := os.ReadFile(filepath.Join(dir, "status"))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue
		}
		must(t, err)
		if !strings.HasPrefix(string(status), "Name:\toxide-csi\n") {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(dir))
		must(t, err)
		found[pid] = string(status)
	}
	if len(found) == 0 {
		t.Errorf("no plugin process of pod %q was found", uid)
	}
	return found
}

// hang stops the plugin's process on a node, so that it answers nothing any more. The function that it returns waits
// until kubelet has restarted the plugin, within two minutes of the hang.
func (c *cluster) hang(t *testing.T, n *node) (restarted func()) {
	t.Helper()
	const restarts = `.items[*].status.containerStatuses[?(@.name=="oxide-plugin")].restartCount`
	count := func() string {
		on := "--field-selector=spec.nodeName=" + n.Name
		return c.get(t, restarts, "-n", namespace, "pods", "-l", "app=oxide-csi-node", on)
	}
	before, began := count(), time.Now()
	for pid := range c.pluginProcesses(t, n) {
		must(t, syscall.Kill(pid, syscall.SIGSTOP))
	}
	return func() {
		await.Within(
			t,
			waitLimit,
			"kubelet restarts the plugin that hangs on "+n.Name,
			func() bool { return count() != before },
		)
		took := time.Since(began).Round(time.Second)
		t.Logf("measured: a plugin that hangs was restarted after %s", took)
		if took > 2*time.Minute {
			t.Errorf("a plugin that hangs was restarted after %s", took)
		}
		c.rolledOut(t)
	}
}

// racks checks that volumes are created on the rack of their pod, and stay there.
func (c *cluster) racks(t *testing.T) {
	c.capacities(t, "default", "west")
	c.apply(t, claim{name: "west"}.String()+pod{name: "west", claim: "west", on: c.c}.String())
	c.running(t, "west")
	if here, there := c.leftOn(t, c.sim).Disks, c.leftOn(t, c.west).Disks; here != 0 || there != 1 {
		t.Errorf("%d disks on the first rack, %d on the second", here, there)
	}
	c.apply(t, pod{name: "elsewhere", claim: "west", on: c.a}.String())
	c.unschedulable(t, "elsewhere", "didn't match PersistentVolume's node affinity")
	c.apply(
		t,
		"apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshot\nmetadata: {name: west}\nspec: {volumeSnapshotClassName: oxide-disk, source: {persistentVolumeClaimName: west}}\n---\n"+
			claim{
				name:   "restored",
				source: "{apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: west}",
			}.String()+pod{
			name:  "restored",
			claim: "restored",
			on:    c.c,
		}.String(),
	)
	c.running(t, "restored")
	c.gone(t, "pod/elsewhere", "pod/west", "pod/restored", "pvc/west", "pvc/restored", "volumesnapshot/west")
}

// tokenExpires checks that the controller's pods have the event TokenExpires. Their user has had a token that expires
// in three days since the chart was installed. The plugin looks at the expiry after a minute, and then each hour.
func (c *cluster) tokenExpires(t *testing.T) {
	await.Within(t, waitLimit, "an event says that a token expires", func() bool {
		events := c.get(t, `.items[*].involvedObject.kind} {.items[*].message`, "-n", namespace, "events",
			"--field-selector=reason="+orchestrator.EventTokenExpires.Reason)
		return strings.HasPrefix(events, "Pod ") && strings.Contains(events, "expires soon")
	})
}

// drained checks that the plugin stays on a node that is being removed until its volumes are detached, and leaves at
// once otherwise.
func (c *cluster) drained(t *testing.T) {
	c.apply(t, claim{name: "leaves"}.String()+pod{name: "leaves", claim: "leaves", on: c.b}.String())
	c.running(t, "leaves")
	plugin := func() string {
		return c.get(
			t,
			".items[*].metadata.name",
			"-n",
			namespace,
			"pods",
			"-l",
			"app=oxide-csi-node",
			"--field-selector=spec.nodeName="+c.b.Name,
		)
	}
	c.kubectl(t, "-n", namespace, "delete", "pod", plugin(), "--timeout=60s") // shorter than the plugin's own wait
	c.rolledOut(t)

	c.kubectl(t, "cordon", c.b.Name)
	last := plugin()
	c.kubectl(t, "-n", namespace, "delete", "pod", last, "--wait=false")
	if _, err := c.try("-n", namespace, "wait", "--for=delete", "pod/"+last, "--timeout=10s"); err == nil {
		t.Fatal("the plugin is gone, and the volume still attached")
	}
	c.kubectl(
		t,
		"drain",
		c.b.Name,
		"--ignore-daemonsets",
		"--delete-emptydir-data",
		"--force",
		"--timeout="+waitLimit.String(),
	)
	await.Within(t, waitLimit, "the volume is detached", func() bool { return len(c.attached(t, c.b)) == 0 })
	if _, err := c.try("-n", namespace, "wait", "--for=delete", "pod/"+last, "--timeout=60s"); err != nil {
		t.Errorf("no volume is attached, and the plugin still exists: %v", err)
	}
	if got := c.get(t, ".items[?(@.reason==\"FailedPreStopHook\")].message", "-n", namespace, "events"); got != "" {
		t.Errorf("the hook failed: %s", got)
	}
	c.kubectl(t, "uncordon", c.b.Name)
	c.rolledOut(t)
	c.gone(t, "pvc", "leaves")
}

// uninstalled follows the documentation, and checks that nothing of the plugin is left.
func (c *cluster) uninstalled(t *testing.T) {
	c.apply(t, claim{name: "bound"}.String()+pod{name: "bound", claim: "bound", on: c.a}.String())
	c.running(t, "bound")
	for _, kind := range []string{"pv", "volumeattachments"} {
		if shown := c.documented(t, "how-to/uninstall.md", "kubectl get "+kind); !strings.Contains(shown, rpc.PluginName) {
			t.Errorf("the documented check before an uninstall does not show the %s of a volume in use: %q", kind, shown)
		}
	}
	c.gone(t, "pod/bound", "pvc/bound")
	for _, kind := range []string{"pv", "volumeattachments", "volumesnapshotcontents"} {
		await.Within(t, waitLimit, "no "+kind+" are shown", func() bool {
			return c.documented(t, "how-to/uninstall.md", "kubectl get "+kind+" ") == ""
		})
	}
	c.sidecarMemory(t, "after these tests")
	c.helm(t, "uninstall", "oxide-csi")
	c.noPlugin(t, c.a, c.b, c.c)
}

// removed uninstalls the manifests, whose nodes have the registrar, as the documentation says.
func (c *cluster) removed(t *testing.T) {
	c.kubectl(t, "delete", "-k", "overlay", "--ignore-not-found", "--timeout="+waitLimit.String())
	c.noPlugin(t, c.a, c.b)
}

// wrongSecret installs the manifests with a token that the rack does not accept, and then with a project that does not
// exist. Events of the controller's pods say so in the plugin's own words, and so do those of a claim that is made
// meanwhile. At last it corrects the Secret, and the claim gets its volume.
func (c *cluster) wrongSecret(t *testing.T) {
	c.applyManifests(t, "overlay", "oxide-token-wrong")
	says := func(text string) {
		t.Helper()
		await.Within(t, waitLimit, "an event says: "+text, func() bool {
			events := c.get(t, ".items[*].message", "-n", namespace, "events", "--field-selector=reason=Unhealthy")
			return strings.Contains(events, "Readiness probe failed: ") && strings.Contains(events, text)
		})
	}
	restart := func() { // kubelet takes up to 90 s to write a changed Secret
		c.kubectl(t, "-n", namespace, "rollout", "restart", "deployment/oxide-csi-controller")
	}
	says("give a token of this silo")
	claimSays := func(name string, reason error) {
		t.Helper()
		c.apply(t, claim{name: name}.String()+pod{name: name, claim: name}.String())
		await.Within(t, waitLimit, "the claim says: "+reason.Error(), func() bool {
			events := c.get(t, ".items[*].message", "events",
				"--field-selector=involvedObject.name="+name+",reason=ProvisioningFailed")
			return strings.Contains(events, reason.Error())
		})
	}
	claimSays("no-token", rack.ErrUnauthenticated)
	// The scheduler hides nothing, because the free capacity of one rack is not published.
	events := c.get(t, ".items[*].message", "events", "--field-selector=involvedObject.name=no-token")
	if strings.Contains(events, "did not have enough free storage") {
		t.Errorf("with a wrong token the pod says that there is no storage: %s", events)
	}
	c.setSecret(t, "token", c.sim.Token)
	c.setSecret(t, "project", "no-such-project")
	// In a rollout a controller that began with the right project would go on, and make the volume.
	c.kubectl(t, "-n", namespace, "delete", "pods", "-l", "app=oxide-csi-controller", "--force", "--grace-period=0")
	says(rack.ErrProject.Error())
	claimSays("no-project", rack.ErrProject)
	c.setSecret(t, "project", c.sim.Project)
	restart()
	c.rolledOut(t)
	c.running(t, "no-token", "no-project")
	c.gone(t, "pod/no-token", "pvc/no-token", "pod/no-project", "pvc/no-project")
}

// setSecret changes a key of the plugin's Secret.
func (c *cluster) setSecret(t *testing.T, key, value string) {
	t.Helper()
	c.kubectl(t, "-n", namespace, "patch", "secret", "oxide-secret", "--type=merge",
		"-p", `{"data":{"`+key+`":"`+base64.StdEncoding.EncodeToString([]byte(value))+`"}}`)
}

// noPlugin waits until nothing of the plugin is left in Kubernetes and on nodes.
func (c *cluster) noPlugin(t *testing.T, nodes ...*node) {
	t.Helper()
	for _, n := range nodes {
		await.Within(
			t,
			waitLimit,
			n.Name+" has no plugin",
			func() bool { return c.get(t, ".spec.drivers[*].name", "csinode", n.Name) == "" },
		)
		registry := fmt.Sprintf("/proc/%d/root/var/lib/kubelet/plugins_registry", n.init.Process.Pid)
		await.Within(t, waitLimit, n.Name+" has no registration socket", func() bool {
			sockets, err := os.ReadDir(registry)
			must(t, err)
			return len(sockets) == 0
		})
	}
	if shown := c.documented(t, "how-to/kubernetes.md", "kubectl get csinodes"); shown != "" {
		t.Errorf("the documented check shows nodes without the plugin: %s", shown)
	}
	c.noObjects(t)
}

// noObjects waits until none of the plugin's objects is left.
func (c *cluster) noObjects(t *testing.T) {
	t.Helper()
	kinds := "deployments,daemonsets,pods,serviceaccounts,roles,rolebindings,configmaps,poddisruptionbudgets,services,csistoragecapacities"
	await.Within(t, waitLimit, "the plugin's objects are gone", func() bool {
		names := strings.Fields(c.get(t, ".items[*].metadata.name", "-n", namespace, kinds))
		names = slices.DeleteFunc(names, func(name string) bool { return name == "default" || name == "kube-root-ca.crt" })
		return len(names) == 0
	})
	wide := "clusterroles,clusterrolebindings,csidrivers,storageclasses,volumesnapshotclasses,validatingadmissionpolicies,validatingadmissionpolicybindings"
	if got := c.get(t, ".items[*].metadata.name", wide, "-l", "app.kubernetes.io/name=oxide-csi-driver"); got != "" {
		t.Errorf("left in the cluster: %s", got)
	}
}

// rolledOut waits until the plugin runs on all nodes.
func (c *cluster) rolledOut(t *testing.T) {
	t.Helper()
	for _, workload := range []string{"daemonset/oxide-csi-node", "deployment/oxide-csi-controller"} {
		if _, err := c.try("-n", namespace, "rollout", "status", workload, "--timeout="+waitLimit.String()); err != nil {
			t.Fatalf("%v\n%s", err, c.kubectl(t, "-n", namespace, "describe", "pods"))
		}
	}
}

// helm runs helm as the administrator.
func (c *cluster) helm(t *testing.T, args ...string) {
	t.Helper()
	must(t, c.tryHelm(args...))
}

// tryHelm runs helm as the administrator. An error has what helm said.
func (c *cluster) tryHelm(args ...string) error {
	cmd := exec.Command(
		filepath.Join(c.programs, "helm"),
		append(args, "--namespace="+namespace, "--kubeconfig="+c.path("admin.kubeconfig"))...)
	cmd.Env = append(os.Environ(), "HOME="+c.dir)
	_, err := output(cmd)
	return err
}
