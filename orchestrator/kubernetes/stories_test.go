// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/admin/diagnose"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const claimList = "/api/v1/persistentvolumeclaims"

// story is something that Kubernetes or a sidecar says, and the verdict of explain.
type story struct {
	// of is the object of the event: pod, claim or volume. The event is a warning, unless Kubernetes makes it Normal.
	of, reason, message, want string
	// change changes the cluster, if an event alone does not tell the story.
	change func(c *simtest.Cluster)
}

// The texts are those of Kubernetes 1.37 and of the sidecars of the manifests. The first group is from public issues of
// other drivers: what people ask about.
var stories = map[string]story{
	"no plugin on the node": {
		"pod", "FailedMount", `MountVolume.MountDevice failed for volume "pv-1" : kubernetes.io/csi: attacher.MountDevice ` +
			"failed to create newCsiDriverClient: driver name csi.oxide.computer not found in the list of registered CSI " +
			"drivers",
		"PluginNotRegistered", nil,
	},
	"the old node is down": {
		"pod", "FailedAttachVolume", `Multi-Attach error for volume "pv-1" Volume is already exclusively attached to one ` +
			"node and can't be attached to another", "AttachedElsewhere", nil,
	},
	"the old pod still runs": {
		"pod", "FailedAttachVolume", `Waiting for detach for volume "pv-1" Volume is already used by pod(s) db-0`,
		"AttachedElsewhere", nil,
	},
	"all nodes are in another zone": {
		"pod", "FailedScheduling", "0/6 nodes are available: 1 node(s) had volume node affinity conflict, " +
			"2 node(s) didn't match Pod's node affinity/selector, 3 Insufficient cpu.", "NoNodeOnItsRack", nil,
	},
	"the attacher does not run": {
		"pod", "FailedAttachVolume", `AttachVolume.Attach failed for volume "pv-1" : timed out waiting for ` +
			"external-attacher of csi.oxide.computer CSI driver to attach volume " + idB, "ControllerNotRunning", nil,
	},
	"the chosen node has no plugin": {
		"claim", "ProvisioningFailed", `failed to provision volume with StorageClass "oxide": error generating ` +
			"accessibility requirements: no topology key found on CSINode worker-1", "PluginNotRegistered", nil,
	},
	"no node has the plugin": {
		"claim", "ProvisioningFailed", `failed to provision volume with StorageClass "oxide": error generating ` +
			"accessibility requirements: no available topology found", "PluginNotRegistered", nil,
	},
	"a restore before the snapshot is ready": {
		"claim", "ProvisioningFailed", `failed to provision volume with StorageClass "oxide": error getting handle for ` +
			"DataSource Type VolumeSnapshot by Name monday: snapshot monday is not Ready", "SnapshotNotReady", nil,
	},
	"a restore with another volumeMode": {
		"claim", "ProvisioningFailed", `failed to provision volume with StorageClass "oxide": error getting handle for ` +
			"DataSource Type VolumeSnapshot by Name monday: requested volume default/data modifies the mode of the source " +
			"volume but does not have permission to do so.", "SourceUnfit", nil,
	},
	"a role of an old release": {
		"pod", "FailedAttachVolume", `AttachVolume.Attach failed for volume "pv-1" : volumeattachments.storage.k8s.io is ` +
			`forbidden: User "system:serviceaccount:oxide-csi:oxide-csi-controller" cannot patch resource`, "RightsMissing", nil,
	},
	"the Secret of the class does not exist": {
		"pod", "FailedMount", `MountVolume.MountDevice failed for volume "pv-1" : fetching NodeStageSecretRef default/key ` +
			"failed: kubernetes.io/csi: failed to find the secret key in the namespace default with error: " +
			`secrets "key" not found`, "PassphraseMissing", nil,
	},
	"the call took too long": {
		"pod", "FailedMount", `MountVolume.SetUp failed for volume "pv-1" : rpc error: code = DeadlineExceeded desc = ` +
			"context deadline exceeded", "PluginNotAnswering", nil,
	},
	"the volume is deleted before it is detached": {
		"volume", "VolumeDelete", "persistentvolume pv-1 is still attached to node worker-1, waiting for detach",
		"AttachedElsewhere", nil,
	},
	"a rolling update of a Deployment": {
		"pod", "FailedScheduling", "0/3 nodes are available: 3 node(s) unavailable due to PersistentVolumeClaim with " +
			"ReadWriteOncePod access mode already in-use by another pod. preemption: 0/3 nodes are available.",
		"UsedByAnotherPod", nil,
	},
	"nobody provisions": {
		"claim", "ExternalProvisioning", "Waiting for a volume to be created either by the external provisioner " +
			"'csi.oxide.computer' or manually by the system administrator.", "ControllerNotRunning", nil,
	},

	"the scheduler: all nodes are full": {
		"pod", "FailedScheduling", "0/2 nodes are available: 2 node(s) exceed max volume count.", "NodesFull", nil,
	},
	"the scheduler: nodes without the driver": {
		"pod", "FailedScheduling", "0/2 nodes are available: 2 csi.oxide.computer CSI driver is not installed on the node.",
		"PluginNotRegistered", nil,
	},
	"the scheduler: no capacity": {
		"pod",
		"FailedScheduling",
		"0/2 nodes are available: 2 node(s) did not have enough free storage.",
		"QuotaExhausted",
		nil,
	},
	"the scheduler: the PersistentVolume is gone": {
		"pod", "FailedScheduling", "0/2 nodes are available: 2 node(s) unavailable due to one or more pvc(s) bound to " +
			"non-existent pv(s).", "ClaimLost", nil,
	},
	"the scheduler: the claim is being deleted": {
		"pod", "FailedScheduling", `0/2 nodes are available: persistentvolumeclaim "data" is being deleted.`,
		"ClaimTerminating", nil,
	},
	"the scheduler: nothing fits a claim without provisioner": {
		"pod", "FailedScheduling", "0/2 nodes are available: 2 node(s) didn't find available persistent volumes to bind.",
		"ClaimNotBound", func(c *simtest.Cluster) {
			c.Put(classList, "", "oxide", object{"provisioner": "kubernetes.io/no-provisioner"})
			c.Put(claimList, "default", "data", object{
				"spec": object{"storageClassName": "oxide"}, "status": object{"phase": "Pending"},
			})
		},
	},
	"the scheduler: no room": {
		"pod", "FailedScheduling", "0/2 nodes are available: 1 Insufficient memory, 1 node(s) had untolerated taint {x: }.",
		"WaitsForOther", nil,
	},
	"kubelet: an image": {
		"pod", "Failed", `Failed to pull image "db:1": not found`, "WaitsForOther", nil,
	},
	"kubelet: a block volume as a filesystem": {
		"pod", "FailedMount", "Unable to attach or mount volumes: volume v has volumeMode Block, but is specified in " +
			"volumeMounts", "VolumeModeDiffers", nil,
	},
	"kubelet: the plugin is restarting": {
		"pod", "FailedMount", `MountVolume.MountDevice failed for volume "pv-1" : rpc error: code = Unavailable desc = ` +
			`connection error: desc = "transport: Error while dialing: dial unix /var/lib/kubelet/plugins/x/csi.sock: connect"`,
		"PluginNotAnswering", nil,
	},
	"kubelet: a volume that is being detached": {
		"pod", "FailedMount", `MountVolume.WaitForAttach failed for volume "pv-1" : volume attachment is being deleted`,
		"DiskBusy", nil,
	},
	"the volumes' controller: no such class": {
		"claim", "ProvisioningFailed", `storageclass.storage.k8s.io "oxid" not found`, "OtherDriver", nil,
	},
	"the volumes' controller: no class": {
		"claim", "FailedBinding", "no persistent volumes available for this claim and no storage class is set",
		"OtherDriver", nil,
	},
	"the volumes' controller: the named volume does not fit": {
		"claim", "VolumeMismatch", `Cannot bind to requested volume "pv-9": requested PV is too small`, "ClaimNotBound", nil,
	},
	"the volumes' controller: the claim is lost": {
		"claim", "ClaimLost", "Bound claim has lost its PersistentVolume. Data on the volume is lost!", "ClaimLost", nil,
	},
	"the provisioner: a selector": {
		"claim",
		"ProvisioningFailed",
		`failed to provision volume with StorageClass "oxide": claim Selector is not supported`,
		"FeatureUnsupported",
		nil,
	},
	"the provisioner: a typo in the class": {
		"claim", "ProvisioningFailed", `failed to provision volume with StorageClass "oxide": failed to strip CSI ` +
			`Parameters of prefixed keys: found unknown parameter key "csi.storage.k8s.io/fstyp"`, "OptionNotAllowed", nil,
	},
	"the resizer: an attributes class": {
		"claim", "VolumeModifyFailed", "get VAC with vac name gold in VACInformer cache failed", "FeatureUnsupported", nil,
	},
	"the plugin's word is stronger than what carries it": {
		"pod",
		"FailedMount",
		`MountVolume.MountDevice failed for volume "pv-1" : rpc error: code = DeadlineExceeded desc = ` +
			"disk x does not respond [DiskNotResponding]",
		"DiskNotResponding",
		nil,
	},
	"a text of nobody": {"pod", "FailedMount", "the moon is full", "Unknown", nil},

	"a claim that does not exist": {"pod", "FailedScheduling", `persistentvolumeclaim "data" not found`, "ClaimMissing",
		func(c *simtest.Cluster) { c.Remove(claimList, "default", "data") }},
	"a pod that is being deleted": {"pod", "FailedMount", "what failed before it ran", "WorkloadTerminating",
		func(c *simtest.Cluster) { deletePod(c, "worker-1") }},
	"a pod that is deleted on a node that is down": {"pod", "NodeNotReady", "Node is not ready", "NodeNotReady",
		func(c *simtest.Cluster) {
			deletePod(c, "worker-1")
			c.Put(nodeList, "", "worker-1", object{})
		}},
	"a pod that cannot end": {"pod", "FailedKillPod", "error killing pod: the runtime hangs", "WorkloadTerminating",
		func(c *simtest.Cluster) { deletePod(c, "worker-1") }},
	"a pod that is deleted before it starts": {"pod", "FailedScheduling", "the moon is full", "WorkloadTerminating",
		func(c *simtest.Cluster) {
			pod := podOfData("")
			pod["metadata"] = deletedAnHourAgo()
			c.Put(podList, "default", "db", pod)
		}},
	"a claim without a pod": {"claim", "WaitForFirstConsumer", "waiting for first consumer to be created before binding",
		"NoConsumer", func(c *simtest.Cluster) {
			c.Remove(podList, "default", "db")
			c.Put(classList, "", "oxide", object{
				"provisioner": "csi.oxide.computer", "volumeBindingMode": "WaitForFirstConsumer",
			})
		}},
	"a volume that is kept": {"volume", "", "", "VolumeReleased", nil},
	"what the scheduler said before it placed the pod": {"pod", "FailedScheduling",
		"0/2 nodes are available: 2 node(s) exceed max volume count.", "NotStartedYet", func(c *simtest.Cluster) {
			c.Put(podList, "default", "db", podOfData("worker-1"))
		}},
	"what the provisioner said before it said something else": {"claim", "ProvisioningFailed",
		"error generating accessibility requirements: no topology key found for node node-b", "FilesystemUnsupported",
		func(c *simtest.Cluster) {
			c.Put(eventList, "default", "later", object{
				"type": "Warning", "reason": "ProvisioningFailed", "lastTimestamp": "2026-01-02T03:04:06Z",
				"message":        `fs_type "zfs" is not supported: use one of ext4 [FilesystemUnsupported]`,
				"involvedObject": object{"kind": "PersistentVolumeClaim", "name": "data", "uid": "uid-data"},
			})
		}},
	"what the scheduler said before it said something else": {"pod", "FailedScheduling",
		"0/2 nodes are available: 2 node(s) exceed max volume count.", "NoNodeOnItsRack", func(c *simtest.Cluster) {
			c.Put(eventList, "default", "later", object{
				"type": "Warning", "reason": "FailedScheduling", "lastTimestamp": nil,
				"message":   "0/2 nodes are available: 2 node(s) didn't match PersistentVolume's node affinity.",
				"eventTime": "2026-01-02T03:04:01.000000Z", "series": object{"lastObservedTime": "2026-01-02T03:04:06.000000Z"},
				"involvedObject": object{"kind": "Pod", "name": "db", "uid": "uid-db"},
			})
		}},
	"what the provisioner said before it made the volume": {"claim", "ProvisioningFailed",
		`storageclass.storage.k8s.io "oxide" not found`, "ExpansionWaits", func(c *simtest.Cluster) {
			c.Put(claimList, "default", "data", object{
				"spec": object{"storageClassName": "oxide", "volumeName": "pv-1"}, "status": object{
					"phase": "Bound", "conditions": []object{{"type": "Resizing", "status": "True"}},
				},
			})
		}},
	"why a volume does not grow": {"claim", "VolumeResizeFailed", "resize volume \"pv-1\" by resizer failed: rpc error: " +
		"code = OutOfRange desc = capacity_range: the volume keeps its size [ExpansionNeedsRoom]", "ExpansionNeedsRoom",
		func(c *simtest.Cluster) {
			c.Put(claimList, "default", "data", object{
				"spec": object{"storageClassName": "oxide", "volumeName": "pv-1"}, "status": object{
					"phase": "Bound", "conditions": []object{{"type": "Resizing", "status": "True"}},
				},
			})
		}},
}

// podOfData is the pod default/db, which waits for the claim default/data.
func podOfData(node string) object {
	return object{
		"spec": object{"nodeName": node, "volumes": []object{
			{"name": "v", "persistentVolumeClaim": object{"claimName": "data"}},
		}}, "status": object{"phase": "Pending"},
	}
}

func deletedAnHourAgo() object {
	return object{"deletionTimestamp": time.Now().Add(-time.Hour).UTC().Format(time.RFC3339)}
}

// deletePod deletes the pod default/db, which runs on a node with its volume.
func deletePod(c *simtest.Cluster, node string) {
	pod := podOfData(node)
	pod["metadata"], pod["status"] = deletedAnHourAgo(), object{"phase": "Running"}
	c.Put(podList, "default", "db", pod)
	c.Put(attachmentList, "", "va", attachmentSince(time.Now(), true))
}

// clusterOf is a cluster in which a pod waits for a volume, in the state in which a story's event comes.
func clusterOf(s story) *simtest.Cluster {
	c := wellCluster()
	c.Put(nodeList, "", "worker-1", object{"status": object{"conditions": []object{{"type": "Ready", "status": "True"}}}})
	node, phase, volume := "worker-1", "Bound", "pv-1"
	switch {
	case s.of == "claim":
		node, phase, volume = "", "Pending", ""
	case s.reason == "FailedScheduling":
		node = ""
	}
	c.Put(podList, "default", "db", podOfData(node))
	if s.of != "volume" {
		c.Put(claimList, "default", "data", object{
			"spec": object{"storageClassName": "oxide", "volumeName": volume}, "status": object{"phase": phase},
		})
	} else {
		phase = "Released"
	}
	c.Put("/api/v1/persistentvolumes", "", "pv-1", object{
		"spec": object{
			"claimRef": object{"namespace": "default", "name": "data"},
			"csi":      object{"driver": "csi.oxide.computer", "volumeHandle": idB},
		}, "status": object{"phase": phase},
	})
	involved := map[string]object{
		"pod": {"kind": "Pod", "name": "db", "uid": "uid-db"}, "volume": {"kind": "PersistentVolume", "name": "pv-1", "uid": "uid-pv-1"},
		"claim": {"kind": "PersistentVolumeClaim", "name": "data", "uid": "uid-data"},
	}[s.of]
	kind := "Warning"
	if slices.Contains(
		[]string{"ExternalProvisioning", "FailedBinding", "WaitForFirstConsumer", "VolumeDelete"},
		s.reason,
	) {
		kind = "Normal"
	}
	if s.reason != "" {
		c.Put(eventList, "default", "e", object{
			"type": kind, "reason": s.reason, "message": s.message, "count": 5, "involvedObject": involved,
			"lastTimestamp": "2026-01-02T03:04:05Z",
		})
	}
	if s.change != nil {
		s.change(c)
	}
	return c
}

// explain knows what Kubernetes and its sidecars say, who acts and what is next. It quotes what it does not know.
func TestStories(t *testing.T) {
	for name, s := range stories {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			subject := orchestrator.Subject{Pod: "default/db"}
			switch {
			case s.of == "volume":
				subject = orchestrator.Subject{Name: "pv-1"}
			case s.of == "claim":
				subject = orchestrator.Subject{Claim: "default/data"}
			}
			c := clusterOf(s)
			got, err := diagnose.Explain(t.Context(), subject, operatorOf(t, c), nil, "", nil)
			if err != nil || got.Reason != s.want {
				t.Fatalf("%s, %v, want %s: %s; %+v", got.Reason, err, s.want, got.Verdict, got.Messages)
			}
			if strings.ContainsAny(got.Verdict+got.Next, "{}") || got.Actor == "" || got.Next == "" {
				t.Errorf("incomplete: %+v", got)
			}
			if s.want == "Unknown" && !strings.Contains(got.Verdict, s.message) {
				t.Errorf("the first line does not quote the text: %s", got.Verdict)
			}
			for _, call := range c.Calls() {
				if !strings.HasPrefix(call, "GET ") {
					t.Errorf("the command sent %s", call)
				}
			}
		})
	}
	if len(stories) < 40 {
		t.Errorf("%d stories", len(stories))
	}
}
