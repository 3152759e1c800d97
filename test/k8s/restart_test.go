// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s

package k8s_test

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestPlannedRestart uses a rack without hot-plug. The rack boots the nodes, and they really go down: their processes
// and mounts end. The plugin is installed as the documentation says for such racks.
func TestPlannedRestart(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces, mounts, loop devices")
	}
	c := newBootingCluster(t)
	c.install(t, "overlay-restart")
	for _, show := range []struct {
		name string
		how  func(*testing.T)
	}{
		{"three volumes, one restart", c.restartedOnce},
		{"what runs comes back in place", c.inPlace},
		{"a pod that returns", c.returns},
		{"a volume that moves", c.moves},
		{"pods that must not be evicted", c.undrainable},
		{"pods that are evicted", c.drainedFirst},
		{"graceful node shutdown", c.graceful},
	} {
		began := time.Now()
		if !t.Run(show.name, show.how) {
			return // The next parts would fail for the same reason.
		}
		t.Logf("measured: %s: %.0f s", show.name, time.Since(began).Seconds())
	}
}

// restartBudget is the time from stop to Ready. After 300 s Kubernetes moves the pods to other nodes.
const restartBudget = 240 * time.Second

// newBootingCluster is [newCluster] on a rack without hot-plug that boots the nodes itself.
func newBootingCluster(t *testing.T, also ...string) *cluster {
	c := newControlPlane(t)
	made := func(name, address string) *node {
		n := &node{Name: name, Address: address, Made: c.made, Dir: c.dir, Programs: c.programs}
		n.save(t)
		return n
	}
	c.a, c.b = made("node-a", nodeA), made("node-b", nodeB)
	self, err := os.Executable()
	must(t, err)
	boot, err := simtest.WriteBoot(
		c.dir,
		filepath.Join(c.made, "oxide-sim"),
		10*time.Second,
		fmt.Sprintf(`cd %s/nodes/$OXIDE_SIM_INSTANCE
export %s=$PWD/node.json
exec %s >>console.log 2>&1`, c.dir, asNode, self),
	)
	must(t, err)
	c.sim = c.startRack(t, "rack", rackAddress, "node-a,node-b", append(also, "--guest-boot="+boot)...)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.a.logs(), c.b.logs())
		}
	})
	for _, n := range []*node{c.a, c.b} {
		instance := c.sim.Instance(n.Name)
		n.sim, n.Instance, n.Guest = c.sim, instance.ID, instance.Guest
	}
	c.ready(t, c.a, c.b)
	return c
}

var (
	databases = set{name: "db", pods: 3}
	latecomer = set{name: "late", pods: 2}
)

// restartedOnce starts a set whose volumes are not attached to its node yet. One restart attaches all of them.
func (c *cluster) restartedOnce(t *testing.T) {
	databases.on, latecomer.on = c.a, c.a
	began := time.Now()
	c.apply(t, databases.String())
	await.Within(t, waitLimit, "the claim says what its volume waits for", func() bool {
		shown, err := c.try("describe", "pvc", "data-db-0")
		return err == nil && strings.Contains(shown, "WaitsForRestart")
	})
	// The RPC itself answers only after some 100 s.
	took := time.Since(began)
	t.Logf("measured: the claim says what its volume waits for after %.0f s", took.Seconds())
	if took > 50*time.Second {
		t.Errorf("the claim said what its volume waits for after %s", took)
	}
	c.running(t, databases.names()...)
	c.boots(t, 1, 0)
	if got := c.events(t, c.a, "RestartPlanned"); !strings.Contains(got, "restarting the instance to change its disks") {
		t.Errorf("the node's events are %q", got)
	}
	if got := c.counted(t, `oxide_csi_restarts_total{outcome="restarted",rack="default"}`); got != 1 {
		t.Errorf("the metric is %v", got)
	}
	c.downtime(t, c.a, databases.names())
}

// inPlace starts a second set on the node of the first one. The first set's pods come back in place.
func (c *cluster) inPlace(t *testing.T) {
	c.sh(t, "db-0", "echo synced >/data/synced; sync; echo not >/data/unsynced")
	before := c.incarnations(t, databases)
	c.apply(t, latecomer.String())
	c.running(t, latecomer.names()...)
	c.back(t, before, 1)
	c.boots(t, 2, 0)
	if got := c.sh(t, "db-0", "/busybox cat /data/synced /data/unsynced"); got != "synced\nnot" {
		t.Errorf("the files contain %q", got)
	}
	for _, pod := range databases.names() {
		if got := c.sh(t, pod, "/busybox cat /data/diary"); got != "began\nasked\nbegan" {
			t.Errorf("%s has the diary %q", pod, got)
		}
	}
	c.downtime(t, c.a, append(databases.names(), latecomer.names()...))
}

// returns deletes a pod, waits until Kubernetes regards its volume as detached, and creates the pod again.
func (c *cluster) returns(t *testing.T) {
	pv := c.get(t, ".spec.volumeName", "pvc", "data-db-2")
	c.kubectl(t, "scale", "statefulset/db", "--replicas=2")
	c.detached(t, pv)
	if disks := c.attached(t, c.a); len(disks) != 5 {
		t.Errorf("the rack has attached %v, want all five", disks)
	}
	c.kubectl(t, "scale", "statefulset/db", "--replicas=3")
	await.Within(
		t,
		waitLimit,
		"the pod exists again",
		func() bool { return c.get(t, ".metadata.name", "pod", "db-2") != "" },
	)
	c.running(t, "db-2")
	c.boots(t, 2, 0)
	if got := c.sh(t, "db-2", "/busybox cat /data/diary"); got != "began\nasked\nbegan\nasked\nbegan" {
		t.Errorf("it has the diary %q", got)
	}
}

// moves moves a volume to the other node. From then on that node's kubelet has graceful node shutdown on.
func (c *cluster) moves(t *testing.T) {
	pv := c.get(t, ".spec.volumeName", "pvc", "data-late-0")
	c.gone(t, "statefulset", "late")
	c.detached(t, pv)
	before := c.incarnations(t, databases)
	c.b.ShutdownGrace = true
	c.b.save(t)
	c.apply(t, pod{name: "moved", claim: "data-late-0", on: c.b}.String())
	c.running(t, "moved")
	c.back(t, before, 1)
	c.boots(t, 3, 1)
	if got := c.sh(t, "moved", "/busybox cat /data/diary"); got != "began\nasked" {
		t.Errorf("the moved volume's diary is %q", got)
	}
	c.downtime(t, c.a, databases.names())
	c.downtime(t, c.b, []string{"moved"})
}

// undrainable switches draining on. A PodDisruptionBudget forbids the evictions, so the restart is refused.
func (c *cluster) undrainable(t *testing.T) {
	c.apply(
		t,
		"apiVersion: policy/v1\nkind: PodDisruptionBudget\nmetadata: {name: db}\nspec: {minAvailable: 3, selector: {matchLabels: {app: db}}}\n",
	)
	c.kubectl(t, "apply", "-k", "overlay-drain")
	c.rolledOut(t)
	before := c.incarnations(t, databases)
	c.apply(t, set{name: "more", pods: 1, on: c.a}.String())
	c.refused(
		t,
		c.a,
		"it was not drained within 20s: pod default/db-0 cannot be evicted yet: a PodDisruptionBudget allows no disruption",
	)
	c.uncordoned(t, c.a)
	c.back(t, before, 0)
	c.boots(t, 3, 1)
}

// drainedFirst removes the budget. The pods are evicted, wait for their node, and come back there without another
// restart.
func (c *cluster) drainedFirst(t *testing.T) {
	before := c.incarnations(t, databases)
	c.gone(t, "pdb", "db")
	c.running(t, "more-0")
	for _, pod := range databases.names() {
		await.Within(t, waitLimit, pod+" exists again", func() bool {
			uid := c.get(t, ".metadata.uid", "pod", pod)
			return uid != "" && uid != before[pod].uid
		})
		c.running(t, pod)
		if got := c.sh(t, pod, "/busybox tail -n 2 /data/diary"); got != "asked\nbegan" {
			t.Errorf("%s has the diary %q", pod, got)
		}
	}
	c.boots(t, 4, 1)
}

// readsVerdicts is set among the stories. It takes a minute or two until the attacher has met a refusal.
var readsVerdicts bool

// graceful checks that a node is not restarted if its kubelet would end the pods.
func (c *cluster) graceful(t *testing.T) {
	c.gone(t, "pod", "moved") // no controller would create it again, so it blocks the drain
	before := c.bootID(t, c.b)
	c.apply(t, claim{name: "refused"}.String()+pod{name: "refused", claim: "refused", on: c.b}.String())
	c.refused(t, c.b, "the kubelet has graceful node shutdown on")
	if readsVerdicts {
		c.explained(t, "pod/default/refused", "RestartRefused")
	}
	if c.bootID(t, c.b) != before {
		t.Error("the node was restarted")
	}
	c.boots(t, 4, 1)
	c.uncordoned(t, c.b)
}

// boots checks how often the plugin started the nodes, and that it stopped none: nodes power themselves off.
func (c *cluster) boots(t *testing.T, a, b int) {
	t.Helper()
	calls, err := c.sim.Calls(t.Context())
	must(t, err)
	got := map[string]int{}
	for _, call := range calls.Log {
		switch call.Operation {
		case "instance_start":
			got[strings.Split(strings.TrimPrefix(call.Path, "/v1/instances/"), "/")[0]]++
		case "instance_stop":
			t.Errorf("the plugin stopped an instance: %+v", call)
		}
	}
	if got[c.a.Instance] != a || got[c.b.Instance] != b {
		t.Errorf("node-a was started %d times, node-b %d times, want %d and %d", got[c.a.Instance], got[c.b.Instance], a, b)
	}
}

// incarnation is a pod with this UID on a node, after this many restarts of its container.
type incarnation struct {
	uid, node string
	restarts  int
}

// incarnations returns the incarnations of a set's pods.
func (c *cluster) incarnations(t *testing.T, s set) map[string]incarnation {
	t.Helper()
	found := map[string]incarnation{}
	for _, pod := range s.names() {
		fields := strings.Fields(
			c.get(t, ".metadata.uid} {.spec.nodeName} {.status.containerStatuses[0].restartCount", "pod", pod),
		)
		if len(fields) != 3 {
			t.Fatalf("pod %s is %q", pod, fields)
		}
		restarts, err := strconv.Atoi(fields[2])
		must(t, err)
		found[pod] = incarnation{uid: fields[0], node: fields[1], restarts: restarts}
	}
	return found
}

// back waits until the pods are ready after this many more restarts, and checks that they are the same pods on the
// same nodes.
func (c *cluster) back(t *testing.T, before map[string]incarnation, restarts int) {
	t.Helper()
	for pod, want := range before {
		want.restarts += restarts
		await.Within(t, waitLimit, pod+" is back", func() bool {
			return c.get(
				t,
				`.status.containerStatuses[0].restartCount} {.status.conditions[?(@.type=="Ready")].status`,
				"pod",
				pod,
			) == fmt.Sprint(
				want.restarts,
				" True",
			)
		})
		if now := c.incarnations(t, set{name: strings.TrimRight(pod, "-0123456789"), pods: len(before)})[pod]; now != want {
			t.Errorf("%s was %+v and is %+v", pod, before[pod], now)
		}
	}
}

// detached waits until Kubernetes regards a volume as detached.
func (c *cluster) detached(t *testing.T, pv string) {
	t.Helper()
	await.Within(t, waitLimit, "the volume is detached", func() bool {
		return c.get(t, `.items[?(@.spec.source.persistentVolumeName=="`+pv+`")].metadata.name`, "volumeattachments") == ""
	})
}

// events returns the messages of a node's events.
func (c *cluster) events(t *testing.T, n *node, reason string) string {
	t.Helper()
	return c.get(
		t,
		".items[*].message",
		"events",
		"--field-selector=involvedObject.kind=Node,involvedObject.name="+n.Name+",reason="+reason,
	)
}

// refused waits until a node's events say why it is not restarted.
func (c *cluster) refused(t *testing.T, n *node, why string) {
	t.Helper()
	await.Within(
		t,
		waitLimit,
		"the node's events say: "+why,
		func() bool { return strings.Contains(c.events(t, n, "RestartRefused"), why) },
	)
}

// uncordoned waits until a node is schedulable again.
func (c *cluster) uncordoned(t *testing.T, n *node) {
	t.Helper()
	await.Within(
		t,
		waitLimit,
		n.Name+" is no longer cordoned",
		func() bool { return c.get(t, ".spec.unschedulable", "node", n.Name) == "" },
	)
}

// bootID returns the boot ID of a node.
func (c *cluster) bootID(t *testing.T, n *node) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(n.Guest, "boot_id"))
	must(t, err)
	return string(text)
}

// downtime measures from the time a node began to go down until the last of these pods was ready again.
func (c *cluster) downtime(t *testing.T, n *node, pods []string) {
	t.Helper()
	console, err := os.ReadFile(filepath.Join(n.Guest, "console"))
	must(t, err)
	downs := regexp.MustCompile(`time=(\S+) level=INFO msg="going down"`).FindAllSubmatch(console, -1)
	if len(downs) == 0 {
		t.Fatalf("the console of %s is %s", n.Name, console)
	}
	down, err := time.Parse(time.RFC3339, string(downs[len(downs)-1][1]))
	must(t, err)
	var ready time.Time
	for _, pod := range pods {
		at, err := time.Parse(time.RFC3339, c.get(t, `.status.conditions[?(@.type=="Ready")].lastTransitionTime`, "pod", pod))
		must(t, err)
		if at.After(ready) {
			ready = at
		}
	}
	took := ready.Sub(down)
	t.Logf(
		"measured: from the stop of %s until all of its %d pods with volumes were ready: %.0f s",
		n.Name,
		len(pods),
		took.Seconds(),
	)
	if took <= 0 || took > restartBudget {
		t.Errorf("it took %s, more than %s or nothing", took, restartBudget)
	}
}

// counted returns the sum of a metric over the controllers.
func (c *cluster) counted(t *testing.T, series string) (sum float64) {
	t.Helper()
	for _, address := range strings.Fields(c.get(t, ".items[*].status.podIP", "pods", "-n", namespace, "-l", "app=oxide-csi-controller")) {
		resp, err := http.Get("http://" + address + ":9808/metrics")
		must(t, err)
		text, err := io.ReadAll(resp.Body)
		must(t, err)
		must(t, resp.Body.Close())
		for line := range strings.Lines(string(text)) {
			if strings.HasPrefix(line, series) {
				value, err := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndexByte(strings.TrimSpace(line), ' '):]), 64)
				must(t, err)
				sum += value
			}
		}
	}
	return sum
}
