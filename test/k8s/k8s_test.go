// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s

package k8s_test

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

func TestKubernetes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces, mounts, loop devices")
	}
	c := newCluster(t)
	c.install(t, "overlay")
	for _, show := range []struct {
		name string
		how  func(*testing.T)
	}{
		{"node, limit and topology are registered", c.registration},
		{"doctor asks for the rights", c.rights},
		{"data outlives its pod and moves with the volume", c.life},
		{"the plugin's share of the time", c.share},
		{"one pod at a time", c.onePod},
		{"the claim's events name a mistake", c.mistakes},
		{"explain names what is wrong", c.explains},
		{"xfs and btrfs", c.filesystems},
		{"raw block", c.block},
		{"snapshot, restore to a larger volume, clone", c.snapshots},
		{"a claim grows", c.grown},
		{"a disk created by an operator", c.existing},
		{"no more volumes than the node's limit", c.limit},
		{"the plugin is killed during a volume's life", c.killed},
		{"the rack fails during a delete", c.failingDelete},
		{"another token, and a plugin that hangs", c.rotation},
		{"a power cut", c.powerCut},
		{"the manifests are uninstalled", c.removed},
		{"a wrong token and a wrong project", c.wrongSecret},
		{"from the manifests to the chart", c.chart},
		{"a node joins", c.joins},
		{"a pod waits for the plugin", c.waitsForPlugin},
		{"two racks", c.racks},
		{"an event says that a token expires", c.tokenExpires},
		{"a node is drained and removed", c.drained},
		{"uninstalled", c.uninstalled},
	} {
		if !t.Run(show.name, show.how) {
			return // The next parts would fail for the same reason.
		}
		t.Run("nothing is left", c.nothingLeft)
	}
}

// install follows the instructions in the manifests, and waits until the plugin runs.
func (c *cluster) install(t *testing.T, overlay string) {
	c.applyManifests(t, overlay, c.sim.Token)
	c.rolledOut(t)
}

// applyManifests creates the plugin's objects, with a token of the rack.
func (c *cluster) applyManifests(t *testing.T, overlay, token string) {
	c.createSecret(t, token)
	c.kubectl(t, "apply", "--dry-run=server", "-k", manifests+"/several-racks")
	c.kubectl(t, "apply", "-k", overlay)
	c.logIfFailed(t)
}

// createSecret creates the plugin's namespace and Secret.
func (c *cluster) createSecret(t *testing.T, token string) {
	t.Helper()
	c.kubectl(t, "apply", "-f", manifests+"/base/node-identity.yaml") // it creates the namespace
	c.id = c.get(t, ".metadata.uid", "namespace", "kube-system")
	c.kubectl(
		t,
		"-n",
		namespace,
		"create",
		"secret",
		"generic",
		"oxide-secret",
		"--from-literal=host="+c.sim.Host,
		"--from-literal=project="+c.sim.Project,
		"--from-literal=token="+token,
		"--from-literal=cluster-id="+c.id,
	)
}

// logIfFailed logs what the plugin said if the test fails.
func (c *cluster) logIfFailed(t *testing.T) {
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.try("get", "events", "-A", "--field-selector=type!=Normal", "--sort-by=.lastTimestamp"))
			t.Log(
				c.try(
					"-n",
					namespace,
					"logs",
					"--prefix",
					"--tail=30",
					"--all-containers",
					"--max-log-requests=20",
					"-l",
					"app in (oxide-csi-controller,oxide-csi-node)",
				),
			)
		}
	})
}

func (c *cluster) registration(t *testing.T) {
	for _, n := range []*node{c.a, c.b} {
		c.registered(t, n, "default")
	}
	for _, n := range []*node{c.a, c.b} {
		shown := c.documented(t, "how-to/kubernetes.md", "kubectl get csinodes")
		if !strings.Contains(shown, n.Name+" is "+n.Instance) {
			t.Errorf("the documented check does not show %s: %s", n.Name, shown)
		}
	}
	// With one rack CreateVolume says why it has no room. The scheduler would hide that.
	if found := c.get(t, ".items[*].metadata.name", "-n", namespace, "csistoragecapacities"); found != "" {
		t.Errorf("the free capacity of one rack is published: %s", found)
	}
}

// registered waits until the plugin is registered on a node, and checks what it reported about the node.
func (c *cluster) registered(t *testing.T, n *node, rack string) {
	t.Helper()
	defer func() {
		if t.Failed() {
			t.Log(c.try("get", "csinode", n.Name, "-o", "yaml"))
		}
	}()
	// Kubelet takes out the entry of a plugin that has ended, also while the next one starts.
	await.Within(t, waitLimit, "the plugin is registered on "+n.Name, func() bool {
		for field, want := range map[string]string{
			".name":              rpc.PluginName,
			".nodeID":            n.Instance,
			".topologyKeys[0]":   rpc.TopologySegmentRack,
			".allocatable.count": strconv.Itoa(maxDisks - 1), // without the boot disk
		} {
			if c.get(t, ".spec.drivers[*]"+field, "csinode", n.Name) != want {
				return false
			}
		}
		return true
	})
	if got := c.get(t, ".metadata.labels."+rackLabel, "node", n.Name); got != rack {
		t.Errorf("the rack of %s is %q", n.Name, got)
	}
}

// rackLabel is the plugin's label of a Node, escaped for a JSON path.
var rackLabel = strings.ReplaceAll(rpc.TopologySegmentRack, ".", `\.`)

// capacities waits until the scheduler knows the free capacity of these racks, ordered by name.
func (c *cluster) capacities(t *testing.T, racks ...string) {
	t.Helper()
	ask := func(field string) []string {
		found := strings.Fields(
			c.get(t, ".items[?(@.storageClassName==\""+class+"\")]"+field, "-n", namespace, "csistoragecapacities"),
		)
		slices.Sort(found)
		return found
	}
	await.Within(
		t,
		waitLimit,
		"the scheduler knows the free capacity",
		func() bool { return slices.Equal(ask(".nodeTopology.matchLabels."+rackLabel), racks) },
	)
	for _, free := range ask(".capacity") {
		if free == "" || free == "0" {
			t.Errorf("free capacity is %q", free)
		}
	}
}

func (c *cluster) life(t *testing.T) {
	c.apply(t, claim{name: "data"}.String())
	await.Within(t, waitLimit, "the claim waits for its consumer", func() bool {
		return strings.Contains(
			c.get(t, ".items[*].reason", "events", "--field-selector=involvedObject.name=data"),
			"WaitForFirstConsumer",
		)
	})
	if left := c.left(t); left.Disks != 0 {
		t.Errorf("%d disks before there is a pod", left.Disks)
	}
	c.apply(t, pod{name: "first", claim: "data", on: c.a}.String())
	c.running(t, "first")
	if disks := c.attached(t, c.a); len(disks) != 1 {
		t.Errorf("the attached disks are %v, want one", disks)
	}
	pv := c.get(t, ".spec.volumeName", "pvc", "data")
	if got := c.get(
		t,
		".spec.nodeAffinity.required.nodeSelectorTerms[*].matchExpressions[*]",
		"pv",
		pv,
	); !strings.Contains(got, rpc.TopologySegmentRack) ||
		!strings.Contains(got, "default") {
		t.Errorf("the volume's topology is %s", got)
	}
	if got := c.sh(t, "first", "/busybox stat -c %g:%a /data"); got != "2000:2775" {
		t.Errorf("group and mode of the volume are %s, want those of fsGroup", got)
	}
	sum := c.sh(
		t,
		"first",
		"/busybox dd if=/dev/urandom of=/data/file bs=1M count=16 conv=fsync 2>/dev/null; /busybox sha256sum /data/file",
	)
	c.gone(t, "pod", "first")
	await.Within(t, waitLimit, "the volume is detached", func() bool { return len(c.attached(t, c.a)) == 0 })

	c.apply(t, pod{name: "second", claim: "data", on: c.b}.String())
	c.running(t, "second")
	if got := c.sh(t, "second", "/busybox sha256sum /data/file"); got != sum {
		t.Errorf("the second pod reads %s, the first wrote %s", got, sum)
	}
	c.gone(t, "pod/second", "pvc/data")
}

func (c *cluster) onePod(t *testing.T) {
	c.apply(t, claim{name: "alone", access: "ReadWriteOncePod"}.String()+pod{name: "has", claim: "alone"}.String())
	c.running(t, "has")
	c.apply(t, pod{name: "wants", claim: "alone"}.String())
	c.unschedulable(t, "wants", "ReadWriteOncePod")
	c.gone(t, "pod", "has")
	c.running(t, "wants")
	c.gone(t, "pod/wants", "pvc/alone")
}

// mistakes checks that the claim's events say why a volume cannot be made. If the free capacity were published, the
// scheduler would say that each node has too little storage, and nothing else.
func (c *cluster) mistakes(t *testing.T) {
	setQuota := func(bytes int64) { must(t, c.sim.Set(t.Context(), simtest.Settings{QuotaBytes: &bytes})) }
	defer setQuota(0) // no quota
	for _, mistake := range []struct {
		name, parameters, size string
		quotaBytes             int64
		says                   string
	}{
		{name: "misspelt-parameter", parameters: "{blocksize: \"4096\"}", says: `parameter "blocksize" is not known`},
		{name: "size-over-the-limit", size: "2Ti", says: "size is not supported"},
		{name: "full-quota", quotaBytes: 1, says: "insufficient capacity"},
	} {
		setQuota(mistake.quotaBytes)
		c.apply(t, fmt.Sprintf(
			"apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: %s}\nprovisioner: %s\nvolumeBindingMode: WaitForFirstConsumer\nparameters: %s\n---\n",
			mistake.name,
			rpc.PluginName,
			cmp.Or(mistake.parameters, "{}"),
		)+claim{name: mistake.name, class: mistake.name, size: mistake.size}.String()+
			pod{name: mistake.name, claim: mistake.name}.String())
		await.Within(t, waitLimit, "the claim says: "+mistake.says, func() bool {
			events := c.get(t, ".items[*].message", "events", "--field-selector=involvedObject.name="+mistake.name)
			return strings.Contains(events, mistake.says)
		})
		c.gone(t, "pod/"+mistake.name, "pvc/"+mistake.name, "storageclass/"+mistake.name)
	}
}

func (c *cluster) filesystems(t *testing.T) {
	for _, fs := range []string{"xfs", "btrfs"} {
		c.apply(
			t,
			fmt.Sprintf(
				"apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: %s}\nprovisioner: %s\nvolumeBindingMode: WaitForFirstConsumer\nparameters: {csi.storage.k8s.io/fstype: %[1]s}\n---\n",
				fs,
				rpc.PluginName,
			)+
				claim{
					name:  fs,
					class: fs,
				}.String()+pod{
				name:  fs,
				claim: fs,
			}.String(),
		)
	}
	for _, fs := range []string{"xfs", "btrfs"} {
		c.running(t, fs)
		if got := c.sh(
			t,
			fs,
			"/busybox grep ' /data ' /proc/mounts; echo ok >/data/file",
		); !strings.Contains(
			got,
			" "+fs+" ",
		) {
			t.Errorf("the filesystem is %s", got)
		}
		c.gone(t, "pod/"+fs, "pvc/"+fs, "storageclass/"+fs)
	}
}

func (c *cluster) block(t *testing.T) {
	c.apply(
		t,
		claim{name: "block", mode: "Block"}.String()+pod{name: "writes", claim: "block", block: true, on: c.a}.String(),
	)
	c.running(t, "writes")
	c.sh(t, "writes", "echo written | /busybox dd of=/dev/volume conv=fsync 2>/dev/null")
	if got := c.sh(t, "writes", "/busybox blockdev --getsize64 /dev/volume"); got != strconv.Itoa(1<<30) {
		t.Errorf("the device has %s bytes", got)
	}
	c.gone(t, "pod", "writes")
	c.apply(t, pod{name: "reads", claim: "block", block: true, on: c.b}.String())
	c.running(t, "reads")
	if got := c.sh(t, "reads", "/busybox head -c 7 /dev/volume"); got != "written" {
		t.Errorf("the second pod reads %q", got)
	}
	c.gone(t, "pod/reads", "pvc/block")
}

// A claim grows when its pod is gone. As long as the pod runs, an event of the claim says why it does not grow.
func (c *cluster) grown(t *testing.T) {
	c.apply(t, claim{name: "grown"}.String()+pod{name: "grown", claim: "grown"}.String())
	c.running(t, "grown")
	c.sh(t, "grown", "echo kept >/data/file; sync")
	volume := c.get(t, ".spec.volumeName", "pvc", "grown")
	id := c.get(t, ".spec.csi.volumeHandle", "pv", volume)
	c.kubectl(t, "patch", "pvc", "grown", "-p", `{"spec":{"resources":{"requests":{"storage":"3Gi"}}}}`)
	await.Within(t, waitLimit, "an event says that the volume is in use", func() bool {
		return strings.Contains(
			c.get(t, ".items[*].message", "events", "--field-selector=involvedObject.name=grown,type=Warning"),
			"is not replaced by a larger one")
	})
	c.explained(t, "default/grown", "ExpansionWaits")
	c.gone(t, "pod", "grown")
	await.Within(t, waitLimit, "the claim has grown", func() bool {
		return c.get(t, ".status.capacity.storage", "pvc", "grown") == "3Gi"
	})
	c.apply(t, pod{name: "grown", claim: "grown"}.String())
	c.running(t, "grown")
	if got := c.sh(t, "grown", "/busybox cat /data/file"); got != "kept" {
		t.Errorf("the file has %q", got)
	}
	blocks, err := strconv.Atoi(c.sh(t, "grown", "/busybox df -kP /data | /busybox awk 'NR==2{print $2}'"))
	must(t, err)
	if blocks < 5<<19 {
		t.Errorf("the filesystem has %d KiB", blocks)
	}
	if now := c.get(t, ".spec.csi.volumeHandle", "pv", volume); now != id {
		t.Errorf("the volume ID was %s and is %s", id, now)
	}
	c.gone(t, "pod/grown", "pvc/grown")
}

func (c *cluster) snapshots(t *testing.T) {
	c.apply(t, claim{name: "origin"}.String()+pod{name: "origin", claim: "origin"}.String())
	c.running(t, "origin")
	c.sh(t, "origin", "echo before >/data/file; sync")
	c.apply(
		t,
		"apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshot\nmetadata: {name: snap}\nspec: {volumeSnapshotClassName: oxide-disk, source: {persistentVolumeClaimName: origin}}\n",
	)
	await.Within(
		t,
		waitLimit,
		"the snapshot is ready",
		func() bool { return c.get(t, ".status.readyToUse", "volumesnapshot", "snap") == "true" },
	)
	if got := c.get(t, ".status.restoreSize", "volumesnapshot", "snap"); got != "1Gi" {
		t.Errorf("the snapshot restores to %s", got)
	}
	c.sh(t, "origin", "echo after >/data/file; sync")

	c.apply(
		t,
		claim{
			name:   "restored",
			size:   "2Gi",
			source: "{apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: snap}",
		}.String()+pod{
			name:  "restored",
			claim: "restored",
		}.String()+
			claim{
				name:   "clone",
				source: "{kind: PersistentVolumeClaim, name: origin}",
			}.String()+pod{
			name:  "clone",
			claim: "clone",
		}.String(),
	)
	c.running(t, "restored", "clone")
	for name, want := range map[string]string{"restored": "before", "clone": "after"} {
		if got := c.sh(t, name, "/busybox cat /data/file"); got != want {
			t.Errorf("%s has %q, want %q", name, got, want)
		}
	}
	blocks, err := strconv.Atoi(c.sh(t, "restored", "/busybox df -kP /data | /busybox awk 'NR==2{print $2}'"))
	must(t, err)
	if blocks < 3<<19 {
		t.Errorf("the filesystem of the larger volume has %d KiB", blocks)
	}
	c.gone(t, "pod/origin", "pod/restored", "pod/clone", "pvc/origin", "pvc/restored", "pvc/clone", "volumesnapshot/snap")
}

// existing uses a disk that an operator created. The disk must survive the deletion of its volume.
func (c *cluster) existing(t *testing.T) {
	client, err := oxide.NewClient(oxide.WithHost(c.sim.Host), oxide.WithToken(c.sim.Token))
	must(t, err)
	disk, err := client.DiskCreate(
		t.Context(),
		oxide.DiskCreateParams{Project: oxide.NameOrId(c.sim.Project), Body: &oxide.DiskCreate{
			Name: "by-hand",
			Size: 1 << 30,
			DiskBackend: oxide.DiskBackend{
				Value: oxide.DiskBackendDistributed{DiskSource: oxide.DiskSource{Value: oxide.DiskSourceBlank{BlockSize: 4096}}},
			},
		}},
	)
	must(t, err)
	text, err := os.ReadFile(manifests + "/examples/existing-disk.yaml")
	must(t, err)
	c.apply(
		t,
		strings.NewReplacer("DISK-ID", disk.Id, "DISK-NAME", string(disk.Name)).
			Replace(string(text))+
			"---\n"+pod{
			name:  "existing",
			claim: "existing",
			on:    c.a,
		}.String(),
	)
	c.running(t, "existing")
	c.sh(t, "existing", "echo here >/data/file; sync")
	if got := c.attached(t, c.a); !slices.Equal(got, []string{"by-hand"}) {
		t.Errorf("attached are %v", got)
	}
	c.gone(t, "pod/existing", "pvc/existing", "pv/existing")
	await.Within(t, waitLimit, "the disk is detached", func() bool { return len(c.attached(t, c.a)) == 0 })
	must(
		t,
		client.DiskDelete(t.Context(), oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk.Id)}),
	) // fails if the disk is gone
}

func (c *cluster) limit(t *testing.T) {
	var objects strings.Builder
	var names, all []string
	for i := range maxDisks {
		name := fmt.Sprintf("many-%d", i)
		objects.WriteString(claim{name: name}.String() + pod{name: name, claim: name, on: c.b}.String())
		names, all = append(names, name), append(all, "pod/"+name, "pvc/"+name)
	}
	c.apply(t, objects.String())
	var waiting, running string
	await.Within(t, waitLimit, "all but one pod run", func() bool {
		waiting, running = "", ""
		count := 0
		for _, name := range names {
			switch c.get(t, ".status.phase", "pod", name) {
			case "Running":
				running, count = name, count+1
			default:
				waiting = name
			}
		}
		return count == maxDisks-1
	})
	c.unschedulable(t, waiting, "max volume count")
	if disks := c.attached(t, c.b); len(disks) != maxDisks-1 {
		t.Errorf("attached are %v", disks)
	}
	c.gone(t, "pod", running)
	c.running(t, waiting)
	for i, object := range all {
		if object == "pod/"+running {
			all = append(all[:i], all[i+1:]...)
			break
		}
	}
	c.gone(t, all...)
}

// killed kills the plugin's pods while a volume is created, attached and mounted, and again while it is deleted.
func (c *cluster) killed(t *testing.T) {
	kill := func(app string) {
		c.kubectl(t, "-n", namespace, "delete", "pod", "-l", "app="+app, "--force", "--grace-period=0")
	}
	c.apply(t, claim{name: "struck"}.String()+pod{name: "struck", claim: "struck"}.String())
	await.Within(t, waitLimit, "the rack has a disk", func() bool { return c.left(t).Disks == 1 })
	kill("oxide-csi-controller")
	kill("oxide-csi-node")
	c.running(t, "struck")
	c.sh(t, "struck", "echo here >/data/file; sync")
	kill("oxide-csi-node")
	if got := c.sh(t, "struck", "/busybox cat /data/file"); got != "here" {
		t.Errorf("without the plugin the pod reads %q", got)
	}
	c.kubectl(t, "delete", "pod/struck", "pvc/struck", "--wait=false")
	kill("oxide-csi-controller")
	c.gone(t, "pvc/struck", "--ignore-not-found")
}

func (c *cluster) failingDelete(t *testing.T) {
	c.apply(t, claim{name: "stays"}.String()+pod{name: "stays", claim: "stays"}.String())
	c.running(t, "stays")
	times := 2
	fault, err := c.sim.Inject(
		t.Context(),
		simtest.Fault{Operation: "disk_delete", Kind: simtest.FaultStatus, Count: &times},
	)
	must(t, err)
	c.gone(t, "pod/stays", "pvc/stays")
	await.Within(
		t,
		waitLimit,
		"the volume is deleted in the end",
		func() bool { return c.get(t, ".items[*].metadata.name", "pv") == "" },
	)
	faults, err := c.sim.Faults(t.Context())
	must(t, err)
	for _, f := range faults {
		if f.ID == fault.ID && f.Hits != times {
			t.Errorf("the rack failed %d times, want %d", f.Hits, times)
		}
	}
}

// nothingLeft waits until Kubernetes has no volume, and checks that nothing is left on the rack and on the node.
func (c *cluster) nothingLeft(t *testing.T) {
	for _, kind := range []string{"pv", "volumeattachments", "volumesnapshotcontents"} {
		await.Within(
			t,
			waitLimit,
			"no "+kind+" are left",
			func() bool { return c.get(t, ".items[*].metadata.name", kind) == "" },
		)
	}
	left := c.left(t)
	if len(left.GuestErrors) > 0 || left.Disks+left.Snapshots+left.Loops+left.Mounts+left.Files > 0 {
		t.Errorf("left on the rack and in the guest: %+v", left)
	}
}

// share measures how long a volume takes from claim and pod to a running container, and the plugin's part of it: all
// its RPCs together, including the rack's answers. The result is printed and not checked, because other processes use
// the machine too.
func (c *cluster) share(t *testing.T) {
	const methods = "/csi.v1.(Controller/CreateVolume|Controller/ControllerPublishVolume|Node/.*)\""
	for i := range 3 {
		name := fmt.Sprintf("timed-%d", i)
		before := c.metrics(t)
		began := time.Now()
		c.apply(t, claim{name: name}.String()+pod{name: name, claim: name, on: c.a}.String())
		c.running(t, name)
		took := time.Since(began)
		var own, rack float64
		var parts []string
		for series, seconds := range c.metrics(t) {
			spent := seconds - before[series]
			switch {
			case spent == 0:
			case strings.HasPrefix(series, "oxide_csi_rack_request_duration_seconds_sum"):
				rack += spent
			case regexp.MustCompile(methods).MatchString(series):
				own += spent
				parts = append(
					parts,
					fmt.Sprintf("%s %.0f ms", regexp.MustCompile(`/(\w+)"`).FindStringSubmatch(series)[1], 1000*spent),
				)
			}
		}
		slices.Sort(parts)
		t.Logf(
			"measured: from claim and pod to a container with 1 GiB of ext4: %.1f s, the plugin's own share %.0f ms (all requests to the rack meanwhile, of 5 ms each and more: %.0f ms): %s",
			took.Seconds(),
			1000*own,
			1000*rack,
			strings.Join(parts, ", "),
		)
		c.gone(t, "pod/"+name, "pvc/"+name)
	}
}

// metrics returns the sums of seconds that the plugin's pods have measured, by pod and series.
func (c *cluster) metrics(t *testing.T) map[string]float64 {
	t.Helper()
	found := map[string]float64{}
	for _, address := range strings.Fields(c.get(t, ".items[*].status.podIP", "pods", "-n", namespace)) {
		resp, err := http.Get("http://" + address + ":9808/metrics")
		must(t, err)
		text, err := io.ReadAll(resp.Body)
		must(t, errors.Join(err, resp.Body.Close()))
		for line := range strings.Lines(string(text)) {
			if series, value, _ := strings.Cut(strings.TrimSpace(line), "} "); strings.Contains(series, "_seconds_sum{") {
				seconds, err := strconv.ParseFloat(value, 64)
				must(t, err)
				found[series+"} of "+address] = seconds
			}
		}
	}
	if len(found) == 0 {
		t.Error("the plugin has no metrics")
	}
	return found
}

// left returns what the racks hold.
func (c *cluster) left(t *testing.T) simtest.Leftovers {
	t.Helper()
	left := c.leftOn(t, c.sim)
	if c.west != nil {
		also := c.leftOn(t, c.west)
		left.Disks, left.Snapshots, left.Loops = left.Disks+also.Disks, left.Snapshots+also.Snapshots, left.Loops+also.Loops
		left.Mounts, left.Files, left.GuestErrors = left.Mounts+also.Mounts, left.Files+also.Files, append(
			left.GuestErrors,
			also.GuestErrors...)
	}
	return left
}

// leftOn returns what one rack holds.
func (c *cluster) leftOn(t *testing.T, sim *simtest.Sim) simtest.Leftovers {
	t.Helper()
	left, err := sim.Leftovers(t.Context())
	must(t, err)
	return left
}

// attached returns the names of the disks of a node's instance, without its boot disk.
func (c *cluster) attached(t *testing.T, n *node) (names []string) {
	t.Helper()
	instances, err := n.sim.ListInstances(t.Context())
	must(t, err)
	for _, instance := range instances {
		for _, disk := range instance.Disks {
			if instance.ID == n.Instance && disk.Slot != 0 {
				names = append(names, disk.Name)
			}
		}
	}
	return names
}

// unschedulable waits until the scheduler says why a pod must wait.
func (c *cluster) unschedulable(t *testing.T, pod, why string) {
	t.Helper()
	await.Within(t, waitLimit, pod+" waits: "+why, func() bool {
		return strings.Contains(c.get(t, ".status.conditions[*].message", "pod", pod), why)
	})
}
