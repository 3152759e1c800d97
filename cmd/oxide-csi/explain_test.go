// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const (
	podList        = "/api/v1/pods"
	eventList      = "/api/v1/events"
	nodeList       = "/api/v1/nodes"
	csiNodeList    = "/apis/storage.k8s.io/v1/csinodes"
	classList      = "/apis/storage.k8s.io/v1/storageclasses"
	attachmentList = "/apis/storage.k8s.io/v1/volumeattachments"
	snapshotList   = "/apis/snapshot.storage.k8s.io/v1/volumesnapshots"
)

type object = map[string]any

// newCluster makes a cluster whose pod default/db waits on Node worker-1 for the claim default/data, whose volume is
// attached. instanceID is the instance of the Node.
func newCluster(volumeID, instanceID string) *simtest.Cluster {
	c := simtest.NewCluster(canary, podList, eventList, pvcList, pvList, snapshotList)
	c.Put(classList, "", "oxide", object{"provisioner": "csi.oxide.computer"})
	c.Put(pvcList, "default", "data", object{
		"spec": object{"volumeName": "pv-1", "storageClassName": "oxide"}, "status": object{"phase": "Bound"},
	})
	c.Put(pvList, "", "pv-1", object{
		"spec": object{
			"claimRef": object{"namespace": "default", "name": "data"},
			"csi":      object{"driver": "csi.oxide.computer", "volumeHandle": volumeID},
		}, "status": object{"phase": "Bound"},
	})
	c.Put(attachmentList, "", "va-1", attachment(true, ""))
	c.Put(nodeList, "", "worker-1", object{"status": object{"conditions": []object{{"type": "Ready", "status": "True"}}}})
	c.Put(csiNodeList, "", "worker-1", object{"spec": object{"drivers": []object{
		{"name": "csi.oxide.computer", "nodeID": instanceID},
	}}})
	c.Put(podList, "default", "db", podIn("Pending"))
	return c
}

func podIn(phase string) object {
	return object{
		"spec": object{"nodeName": "worker-1", "volumes": []object{
			{"name": "v", "persistentVolumeClaim": object{"claimName": "data"}},
		}}, "status": object{"phase": phase},
	}
}

func attachment(attached bool, failure string) object {
	status := object{"attached": attached}
	if failure != "" {
		status["attachError"] = object{"message": failure, "time": "2026-01-02T03:04:05Z"}
	}
	return object{"spec": object{
		"attacher": "csi.oxide.computer", "nodeName": "worker-1", "source": object{"persistentVolumeName": "pv-1"},
	}, "status": status}
}

// event puts a warning about the pod, as the kubelet does when a call to the node plugin fails.
func event(c *simtest.Cluster, reason, message string) {
	c.Put(eventList, "default", "event-"+reason, object{
		"type": "Warning", "reason": reason, "message": message, "lastTimestamp": "2026-01-02T03:04:05Z",
		"involvedObject": object{"kind": "Pod", "name": "db", "uid": "uid-db"},
	})
}

// explained is the answer of the command.
type explained struct {
	Reason, Verdict, BrokenLink string
	Chain                       []struct{ Link, Object, State string }
}

// explain asks by the claim, the pod, the PersistentVolume and the volume ID. All answers are the same.
func (h *host) explain(t *testing.T, kubeconfig, volumeID string) explained {
	t.Helper()
	var first string
	for _, subject := range []string{"default/data", "pod/default/db", "pv-1", volumeID} {
		got := runPlugin(t, h.rackEnv(t), "explain", subject, kubeconfig, "--json")
		if got.code != 0 || got.stderr != "" {
			t.Fatalf("explain %s: %+v", subject, got)
		}
		if first == "" {
			first = got.stdout
		}
		if got.stdout != first {
			t.Errorf("explain %s answers %s, and not %s", subject, got.stdout, first)
		}
	}
	var answer explained
	must(t, json.Unmarshal([]byte(first), &answer))
	return answer
}

// On the node itself the command also shows device, filesystem and mounts. Elsewhere it says where they can be seen.
func TestExplainOnTheNode(t *testing.T) {
	t.Parallel()
	h := newHostWithGuest(t, false)
	id := h.ok(t, "volume", "create", "postgres", "--size=1GiB")
	h.ok(t, "volume", "attach", id)
	guest := h.sim.Instances[0].Guest
	node := append(h.rackEnv(t), "OXIDE_CSI_DEV_ROOT="+guest+"/dev", "OXIDE_CSI_SYS_ROOT="+guest+"/sys")
	links := func(environ []string) string {
		t.Helper()
		got := runPlugin(t, environ, "explain", id, "--json")
		if got.code != 0 || got.stderr != "" {
			t.Fatalf("%+v", got)
		}
		var answer explained
		must(t, json.Unmarshal([]byte(got.stdout), &answer))
		var text strings.Builder
		for _, step := range answer.Chain[2:] { // after disk and instance
			fmt.Fprintf(&text, "%s: %s: %s\n", step.Link, step.Object, step.State)
		}
		return text.String()
	}
	instance, disk := h.sim.Instances[0].ID, filepath.Base(h.device(t, id))
	serial, err := os.ReadFile(filepath.Join(guest, "sys/block", disk, "device/serial"))
	must(t, err)
	device := "device: device " + disk + ", serial " + strings.TrimSpace(string(serial)) + ": ready\n"
	content := "filesystem: content of " + disk + ": "
	expect := func(environ []string, want string) {
		t.Helper()
		if got := links(environ); got != want {
			t.Errorf("got\n%swant\n%s", got, want)
		}
	}
	expect(append(h.rackEnv(t), "OXIDE_CSI_SYS_ROOT="+h.dir), "device: device in the guest of "+instance+
		": not read: run explain on that instance\n")
	expect(node, device+content+"nothing known\nmount: mounts: none\n")
	data := filepath.Join(h.dir, "data")
	h.ok(t, "volume", "mount", id, data, "--fs-type=ext4")
	staged := filepath.Join(h.dir, "staging", id)
	if got := links(node); !strings.HasPrefix(got, device+content+"ext4, mounted\n") ||
		!strings.Contains(got, "mount: mount "+staged) || !strings.Contains(got, "mount: mount "+data+": writable\n") {
		t.Errorf("mounted: %s", got)
	}
	h.ok(t, "volume", "unmount", id, data)
	if got := links(node); !strings.HasPrefix(got, device+content+"ext4, UUID ") {
		t.Errorf("unmounted: %s", got)
	}
	h.ok(t, "volume", "detach", id)
}

// The stories of the Kubernetes objects: the command follows the chain through all of them.
func TestExplainFollowsKubernetes(t *testing.T) {
	t.Parallel()
	h := newHost(t, false)
	id, instance := h.ok(t, "volume", "create", "pvc-1", "--size=1GiB"), h.sim.Instances[0].ID
	for name, test := range map[string]struct {
		reason string
		change func(c *simtest.Cluster)
	}{
		"all is well": {"Works", func(c *simtest.Cluster) {
			h.ok(t, "volume", "attach", id)
			c.Put(podList, "default", "db", podIn("Running"))
		}},
		"it runs, and the rack shows no attachment": {"RunsWithoutDisk", func(c *simtest.Cluster) {
			c.Put(podList, "default", "db", podIn("Running"))
		}},
		"the claim is deleted, and its pod still runs": {"ClaimTerminating", func(c *simtest.Cluster) {
			h.ok(t, "volume", "attach", id)
			c.Put(podList, "default", "db", podIn("Running"))
			c.Put(pvcList, "default", "data", object{
				"metadata": object{"deletionTimestamp": "2026-01-02T03:04:05Z", "finalizers": []string{"kubernetes.io/pvc-protection"}},
				"spec":     object{"volumeName": "pv-1"}, "status": object{"phase": "Bound"},
			})
		}},
		"all nodes are full": {"NodesFull", func(c *simtest.Cluster) {
			unplaced := podIn("Pending")
			delete(unplaced["spec"].(object), "nodeName")
			c.Put(podList, "default", "db", unplaced)
			event(c, "FailedScheduling", "0/2 nodes are available: 2 node(s) exceed max volume count.")
		}},
		"nothing was said yet": {"NotStartedYet", func(*simtest.Cluster) {}},
		"an attach that failed before it succeeded": {"NotStartedYet", func(c *simtest.Cluster) {
			event(c, "FailedAttachVolume", "cannot attach disk x [RackHasNoHotplug]")
		}},
		"no hot-plug": {"RackHasNoHotplug", func(c *simtest.Cluster) {
			c.Put(attachmentList, "", "va-1", attachment(false, "rpc error: code = FailedPrecondition desc = cannot attach disk x [RackHasNoHotplug]"))
		}},
		"node gone": {"NodeNotReady", func(c *simtest.Cluster) {
			c.Put(nodeList, "", "worker-1", object{"status": object{"conditions": []object{{"type": "Ready", "status": "Unknown"}}}})
		}},
		"plugin not registered": {"PluginNotRegistered", func(c *simtest.Cluster) {
			c.Put(csiNodeList, "", "worker-1", object{"spec": object{"drivers": []object{{"name": "other.example", "nodeID": "x"}}}})
		}},
		"expansion": {"ExpansionWaits", func(c *simtest.Cluster) {
			c.Put(pvcList, "default", "data", object{"spec": object{"volumeName": "pv-1"}, "status": object{
				"phase": "Bound", "conditions": []object{{"type": "Resizing", "status": "True"}},
			}})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(id, instance)
			test.change(c)
			got := h.explain(t, serveCluster(t, c), id)
			h.ok(t, "volume", "detach", id, "--node="+instance, "--unmounted")
			if got.Reason != test.reason || strings.ContainsAny(got.Verdict, "{}") {
				t.Errorf("%+v", got)
			}
			var links []string
			for _, step := range got.Chain {
				links = append(links, step.Link)
			}
			want := "claim volume attachment disk instance node"
			switch test.reason {
			case "Works", "ClaimTerminating":
				want = "claim volume attachment disk instance device node workload"
			case "PluginNotRegistered":
				want = "claim volume attachment disk node" // nothing says which instance the node is
			}
			if text := strings.Join(links, " "); !strings.HasPrefix(text, want) {
				t.Errorf("the chain is %s", text)
			}
			for _, call := range c.Calls() {
				if !strings.HasPrefix(call, "GET ") {
					t.Errorf("the command sent %s", call)
				}
			}
		})
	}
}

// The stories of a claim that has no volume yet.
func TestExplainAClaimWithoutAVolume(t *testing.T) {
	t.Parallel()
	h := newHost(t, false)
	for name, test := range map[string]struct {
		reason string
		spec   object
	}{
		"another driver's class": {"OtherDriver", object{"storageClassName": "other"}},
		"no such class":          {"OtherDriver", object{"storageClassName": "none"}},
		"no class":               {"OtherDriver", object{}},
		"snapshot not ready": {"SnapshotNotReady", object{
			"storageClassName": "oxide", "dataSource": object{"kind": "VolumeSnapshot", "name": "monday"},
		}},
		"quota": {"QuotaExhausted", object{"storageClassName": "oxide"}},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster("", "")
			c.Put(classList, "", "other", object{"provisioner": "other.example"})
			c.Put(pvcList, "default", "data", object{"spec": test.spec, "status": object{"phase": "Pending"}})
			c.Put(snapshotList, "default", "monday", object{"status": object{"readyToUse": false}})
			if name == "quota" {
				must(t, h.sim.Set(t.Context(), simtest.Settings{QuotaBytes: new(int64(1))}))
				c.Put(eventList, "default", "e", object{
					"type":           "Warning",
					"reason":         "ProvisioningFailed",
					"involvedObject": object{"kind": "PersistentVolumeClaim", "name": "data", "uid": "uid-data"},
					"message":        h.fails(t, 6, "volume", "create", "full", "--size=1GiB"),
				})
			}
			got := runPlugin(t, h.rackEnv(t), "explain", "default/data", serveCluster(t, c))
			first, _, _ := strings.Cut(got.stdout, "\n")
			if got.code != 0 || !strings.HasPrefix(first, test.reason+": ") || !strings.Contains(first, "; next: ") {
				t.Errorf("%+v", got)
			}
		})
	}
}

// The stories of the node: the node plugin refuses to stage a volume, kubelet repeats its answer, and the verdict is
// right.
func TestExplainRepeatsTheNode(t *testing.T) {
	t.Parallel()
	h := newHostWithGuest(t, false)
	for name, test := range map[string]struct {
		reason string
		// arrange changes the disk's device before the volume is mounted. It returns what undoes the change.
		arrange func(t *testing.T, device string) (undo func())
	}{
		"foreign filesystem": {"ForeignFilesystem", func(t *testing.T, device string) func() {
			runHost(t, "mkfs.ext4", "-q", "-U", "6ba7b810-9dad-51d1-80b4-00c04fd430c8", device)
			return func() {}
		}},
		"not blank": {"DiskNotBlank", func(t *testing.T, device string) func() {
			must(t, os.WriteFile(device, []byte(strings.Repeat("data", 1024)), 0o600))
			return func() {}
		}},
		"damaged filesystem": {"FilesystemUnclean", func(t *testing.T, device string) func() {
			runHost(t, "mkfs.ext4", "-q", device)
			// e2fsck -p does not repair a root folder that is gone.
			runHost(t, "debugfs", "-w", "-R", "clri <2>", device)
			runHost(t, "debugfs", "-w", "-R", "set_super_value state 2", device)
			return func() {}
		}},
		"in use": {"DiskInUse", func(t *testing.T, device string) func() {
			runHost(t, "mkfs.ext4", "-q", device)
			folder := filepath.Join(t.TempDir(), "other")
			must(t, os.Mkdir(folder, 0o755))
			runHost(t, "mount", device, folder)
			return func() { must(t, unix.Unmount(folder, 0)) }
		}},
	} {
		t.Run(name, func(t *testing.T) {
			volume := strings.ReplaceAll(name, " ", "-")
			id := h.ok(t, "volume", "create", volume, "--size=1GiB")
			h.ok(t, "volume", "attach", volume)
			undo := test.arrange(t, h.device(t, id))
			failed := h.run(t, "volume", "mount", volume, filepath.Join(h.dir, "target-"+volume))
			undo()
			if failed.code == 0 {
				t.Fatalf("the volume is mounted: %+v", failed)
			}
			c := newCluster(id, h.sim.Instances[0].ID)
			event(c, "FailedMount", "MountVolume.MountDevice failed for volume \"pv-1\": "+failed.stderr)
			if got := h.explain(t, serveCluster(t, c), id); got.Reason != test.reason {
				t.Errorf("%+v, want %s: %s", got, test.reason, failed.stderr)
			}
			h.ok(t, "volume", "detach", volume)
		})
	}
}

// runHost runs a program of the host.
func runHost(t *testing.T, name string, args ...string) (printed string) {
	t.Helper()
	output, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v: %s", name, args, err, output)
	}
	return string(output)
}

// device is the path of an attached disk's device.
func (h *host) device(t *testing.T, diskID string) string {
	t.Helper()
	instances, err := h.sim.ListInstances(t.Context())
	must(t, err)
	for _, disk := range instances[0].Disks {
		if disk.ID == diskID {
			return filepath.Join(h.sim.Instances[0].Guest, "dev", disk.Device)
		}
	}
	t.Fatalf("disk %s is not attached", diskID)
	return ""
}

// What the command cannot answer is an error that says how to ask.
func TestExplainErrors(t *testing.T) {
	t.Parallel()
	h := newHost(t, false)
	c := newCluster("", "")
	kubeconfig := serveCluster(t, c)
	for _, test := range []struct {
		code int
		args []string
	}{
		{4, []string{"default/none", kubeconfig}}, {4, []string{"pod/default/none", kubeconfig}},
		{2, []string{"a/b/c", kubeconfig}}, {2, []string{"/x", kubeconfig}}, {2, []string{"default/data"}}, {2, nil},
		{4, []string{"00000000-0000-4000-8000-000000000000"}},
	} {
		got := runPlugin(t, h.rackEnv(t), append([]string{"explain"}, test.args...)...)
		if got.code != test.code || got.stdout != "" {
			t.Errorf("%v: %+v", test.args, got)
		}
	}
}

// An allocation waits in Nomad, and its log says that the rack has no hot-plug: the verdict is that of Kubernetes, and
// the next step has no command of Kubernetes.
func TestExplainFollowsNomad(t *testing.T) {
	t.Parallel()
	h := newHost(t, false)
	id, instance := h.ok(t, "volume", "create", "data", "--size=1GiB"), h.sim.Instances[0].ID
	const waits, ours, client = "5a7d9b11-0000-4000-8000-000000000001", "7c7d9b11-0000-4000-8000-000000000003", "c1"
	const refusal = "cannot attach disk x: instance y is running, and this rack attaches disks only while " +
		"the instance is stopped: stop it [RackHasNoHotplug]"
	answers := nomadAnswers{
		"/v1/volumes": []object{{"ID": "data", "Namespace": "shop", "ExternalID": id, "Provider": "csi.oxide.computer"}},
		"/v1/volume/csi/data": object{
			"ID": "data", "Namespace": "shop", "ExternalID": id, "PluginID": "oxide", "ControllersHealthy": 1,
			"Allocations": []object{{"ID": waits, "Name": "db[0]", "NodeID": client, "ClientStatus": "pending"}},
		},
		"/v1/plugin/csi/oxide": object{
			"Controllers": object{client: object{"Healthy": true, "AllocID": ours}},
			"Nodes":       object{client: object{"Healthy": true, "NodeInfo": object{"ID": instance}}},
		},
		"/v1/node/" + client: object{"Name": "client-1", "Status": "ready"},
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch namespace := r.URL.Query().Get("namespace"); {
		case r.URL.Path == "/v1/plugin/csi/oxide" && (namespace == "*" || namespace == "oxide-csi"):
			// Nomad shows the allocations of the namespace that the request names.
			plugin := maps.Clone(answers[r.URL.Path].(object))
			plugin["Allocations"] = []object{{"ID": ours, "NodeID": client, "TaskStates": object{"plugin": object{}}}}
			nomadAnswers{r.URL.Path: plugin}.ServeHTTP(w, r)
		case r.URL.Path == "/v1/client/fs/logs/"+ours:
			const answered = "time=2026-01-02T03:04:05Z msg=responded method=ControllerPublishVolume "
			_, _ = fmt.Fprintf(w, answered+"volume_id=%s error=%q\n", id, refusal)
		default:
			answers.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(server.Close)
	for _, subject := range []string{"shop/data", "data", id} {
		got := runPlugin(t, append(h.rackEnv(t), "NOMAD_ADDR="+server.URL), "explain", subject)
		if first, _, _ := strings.Cut(got.stdout, ":"); got.code != 0 || first != "RackHasNoHotplug" ||
			!strings.Contains(got.stdout, "node client-1") || strings.Contains(got.stdout, "kubectl") {
			t.Errorf("%s: %+v", subject, got)
		}
	}
}
