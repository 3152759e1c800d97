// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s && stories

package k8s_test

import (
	"cmp"
	"fmt"
	"hash/crc32"
	"os"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// saying is a state in which Kubernetes or a sidecar leaves a pod or a claim, what it says then, and the verdict.
type saying struct {
	name, objects string
	// subject is what explain is asked for: "" is the pod of this name, volumeOf the volume of its claim.
	subject string
	// said is a part of an event of the pod or the claim of this name, or of the volume. "" asks for none.
	said, want string
	// then makes the state from the objects.
	then func(*testing.T)
}

const volumeOf = "volume"

// TestKubernetesSays makes for real what the texts of TestStories in orchestrator/kubernetes are written after. So it
// compares those texts with what Kubernetes says, and the verdict of oxide-csi explain with the one there.
func TestKubernetesSays(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces, mounts, loop devices")
	}
	c := newCluster(t)
	c.install(t, "overlay")
	sayings := append(c.sayings(), c.changes()...)
	var all strings.Builder
	for _, s := range sayings {
		all.WriteString(s.objects)
	}
	c.apply(t, all.String())
	for _, s := range sayings {
		t.Run(s.name, func(t *testing.T) {
			object, subject := s.name, cmp.Or(s.subject, "pod/default/"+s.name)
			if subject == volumeOf {
				c.running(t, s.name)
				object = c.get(t, ".spec.volumeName", "pvc", s.name)
				subject = object
			}
			t.Cleanup(func() { // its volume takes a place on a node
				c.kubectl(t, "delete", "--wait=false", "--ignore-not-found", "pod/"+s.name)
			})
			if s.then != nil {
				s.then(t)
			}
			if s.said != "" {
				c.event(t, object, s.said)
			}
			c.explained(t, subject, s.want)
		})
	}
}

// ofClass is a class of this name with more lines, a claim of the class, and a pod with the claim.
func ofClass(name, provisioner, more string) string {
	return fmt.Sprintf(`apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: %s}
provisioner: %s
volumeBindingMode: WaitForFirstConsumer
%s
---
`, name, provisioner, more) + claim{name: name, class: name}.String() + pod{name: name, claim: name}.String()
}

// withPod is a claim and a pod with it.
func withPod(c claim) string { return c.String() + pod{name: c.name, claim: c.name}.String() }

// byHand is a PersistentVolume of 1 GiB, with a disk that no rack has, and a claim of this size that names it.
func byHand(name, rack, size string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: PersistentVolume
metadata: {name: %[1]s}
spec:
  storageClassName: by-hand # or a claim without a class would take it
  persistentVolumeReclaimPolicy: Retain
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteOnce]
  csi: {driver: %[2]s, fsType: ext4, volumeHandle: 00000000-0000-4000-8000-%012[3]x, volumeAttributes: {diskName: %[1]s}}
  nodeAffinity:
    required: {nodeSelectorTerms: [{matchExpressions: [{key: %[4]s, operator: In, values: [%[5]s]}]}]}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: %[1]s}
spec: {storageClassName: by-hand, volumeName: %[1]s, accessModes: [ReadWriteOnce], resources: {requests: {storage: %[6]s}}}
---
`, name, rpc.PluginName, crc32.ChecksumIEEE([]byte(name)), rpc.TopologySegmentRack, rack, size)
}

// changed replaces a part of objects. It is there, or the test would say nothing.
func changed(objects, old, new string) string {
	if !strings.Contains(objects, old) {
		panic("no " + old)
	}
	return strings.ReplaceAll(objects, old, new)
}

// held gives the objects of a kind a finalizer that nobody removes.
func held(objects, kind, name string) string {
	return changed(objects, "kind: "+kind+"\nmetadata: {name: "+name+"}",
		"kind: "+kind+"\nmetadata: {name: "+name+", finalizers: [example.com/held]}")
}

// sayings are the states that need objects alone. All objects are made at once, so that the waits pass side by side.
func (c *cluster) sayings() []saying {
	del := func(args ...string) func(*testing.T) {
		return func(t *testing.T) { c.kubectl(t, append([]string{"delete", "--wait=false"}, args...)...) }
	}
	return []saying{
		// What people write into a class or a claim.
		{name: "zfs", objects: ofClass("zfs", rpc.PluginName, "parameters: {csi.storage.k8s.io/fstype: zfs}"),
			said: "zfs", want: "FilesystemUnsupported"},
		{name: "noatme", objects: ofClass("noatme", rpc.PluginName, "mountOptions: [noatme]"),
			said: "noatme", want: "OptionNotAllowed"},
		{name: "large", objects: withPod(claim{name: "large", size: "2Ti"}), said: "size is not supported",
			want: "SizeUnsupported"},
		{name: "many", objects: withPod(claim{name: "many", access: "ReadWriteMany"}), want: "AccessModeUnsupported"},
		{name: "fstyp", objects: ofClass("fstyp", rpc.PluginName, "parameters: {csi.storage.k8s.io/fstyp: xfs}"),
			said: "found unknown parameter key", want: "OptionNotAllowed"},
		{name: "selector", objects: changed(withPod(claim{name: "selector"}), "  volumeMode:",
			"  selector: {matchLabels: {a: b}}\n  volumeMode:"), said: "claim Selector is not supported",
			want: "FeatureUnsupported"},
		{name: "secretless", objects: ofClass("secretless", rpc.PluginName, "parameters: {"+rpc.KeyEncryption+": "+
			rpc.EncryptionLUKS2+", csi.storage.k8s.io/node-stage-secret-name: no-such, "+
			"csi.storage.k8s.io/node-stage-secret-namespace: default}"),
			said: "failed to find the secret no-such", want: "PassphraseMissing"},
		{name: "classless", objects: changed(withPod(claim{name: "classless"}), "  storageClassName: "+class+"\n", ""),
			said: "no persistent volumes available for this claim and no storage class is set", want: "OtherDriver"},
		{name: "misspelt", objects: withPod(claim{name: "misspelt", class: "oxide-dsk"}),
			said: `storageclass.storage.k8s.io "oxide-dsk" not found`, want: "OtherDriver"},
		{name: "static", objects: ofClass("static", "kubernetes.io/no-provisioner", ""),
			said: "didn't find available persistent volumes to bind", want: "ClaimNotBound"},
		{name: "small", objects: byHand("small", "default", "5Gi"), subject: "default/small",
			said: "Cannot bind to requested volume", want: "ClaimNotBound"},
		{name: "unmade", objects: withPod(claim{name: "unmade",
			source: "{apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: unmade}"}) +
			"apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshot\nmetadata: {name: unmade}\n" +
			"spec: {volumeSnapshotClassName: no-such-class, source: {persistentVolumeClaimName: unused}}\n---\n",
			want: "SnapshotNotReady"},

		// What people write into a pod.
		{name: "claimless", objects: pod{name: "claimless", claim: "no-such-claim"}.String(),
			said: `persistentvolumeclaim "no-such-claim" not found`, want: "ClaimMissing"},
		{name: "block", objects: withPod(claim{name: "block", mode: "Block"}), said: "has volumeMode Block",
			want: "VolumeModeDiffers"},
		{name: "hungry", objects: changed(withPod(claim{name: "hungry"}), "      command:",
			"      resources: {requests: {cpu: 1000}}\n      command:"), said: "Insufficient cpu", want: "WaitsForOther"},
		{name: "imageless", objects: changed(withPod(claim{name: "imageless"}), busyboxImage, "example.com/no-such-image:1"),
			said: "no-such-image", want: "WaitsForOther"},
		{name: "second", objects: claim{name: "alone", access: "ReadWriteOncePod"}.String() +
			pod{name: "first", claim: "alone"}.String(), said: "ReadWriteOncePod access mode already in-use",
			want: "UsedByAnotherPod", then: func(t *testing.T) {
				c.running(t, "first")
				c.apply(t, pod{name: "second", claim: "alone"}.String())
				t.Cleanup(func() { del("pod", "first")(t) })
			}},
		{name: "there", objects: claim{name: "shared"}.String() + pod{name: "here", claim: "shared", on: c.a}.String(),
			said: "Volume is already used by pod(s) here", want: "AttachedElsewhere", then: func(t *testing.T) {
				c.running(t, "here")
				c.apply(t, pod{name: "there", claim: "shared", on: c.b}.String())
				t.Cleanup(func() { del("pod", "here")(t) })
			}},
		{name: "gone", objects: byHand("gone", "default", "1Gi") + pod{name: "gone", claim: "gone", on: c.a}.String(),
			want: "DiskGone"},
		{name: "strange", objects: changed(withPod(claim{name: "strange"}), "  nodeSelector:",
			"  schedulingGates: [{name: example.com/gate}]\n  nodeSelector:"), said: "the moon is full", want: "Unknown",
			then: func(t *testing.T) {
				c.apply(t, fmt.Sprintf(`{apiVersion: v1, kind: Event, metadata: {name: strange, namespace: default},
type: Warning, reason: FailedMount, message: the moon is full, lastTimestamp: "2026-01-02T03:04:05Z",
involvedObject: {kind: Pod, namespace: default, name: strange, uid: %s}}`, c.get(t, ".metadata.uid", "pod", "strange")))
			}},

		// What is being deleted.
		{name: "unused", objects: claim{name: "unused"}.String(), subject: "default/unused",
			said: "waiting for first consumer", want: "NoConsumer"},
		{name: "mourned", objects: held(claim{name: "mourned"}.String(), "PersistentVolumeClaim", "mourned"),
			said: "is being deleted", want: "ClaimTerminating", then: func(t *testing.T) {
				del("pvc", "mourned")(t)
				c.apply(t, pod{name: "mourned", claim: "mourned"}.String())
			}},
		{name: "clung", objects: withPod(claim{name: "clung"}), subject: "default/clung", want: "ClaimTerminating",
			then: func(t *testing.T) { c.running(t, "clung"); del("pvc", "clung")(t) }},
		{name: "kept", objects: ofClass("kept", rpc.PluginName, "reclaimPolicy: Retain"), want: "VolumeReleased",
			subject: volumeOf, then: func(t *testing.T) { c.gone(t, "pod/kept", "pvc/kept") }},
		{name: "lost", objects: withPod(claim{name: "lost"}), subject: "default/lost",
			said: "has lost its PersistentVolume", want: "ClaimLost", then: func(t *testing.T) {
				c.running(t, "lost")
				pv := c.get(t, ".spec.volumeName", "pvc", "lost")
				c.gone(t, "pod", "lost")
				c.notAttached(t, pv) // the attacher detaches nothing of a PersistentVolume that is gone
				pv = "pv/" + pv
				del(pv)(t)
				c.kubectl(t, "patch", pv, "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
			}},
		{name: "widow", want: "ClaimLost", said: "bound to non-existent", then: func(t *testing.T) {
			c.apply(t, pod{name: "widow", claim: "lost"}.String())
		}},

		// Snapshots and attributes.
		{name: "unlike", objects: withPod(claim{name: "origin"}), said: "modifies the mode of the source volume",
			want: "SourceUnfit", then: func(t *testing.T) {
				c.running(t, "origin")
				c.apply(t, "apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshot\nmetadata: {name: made}\n"+
					"spec: {volumeSnapshotClassName: oxide-disk, source: {persistentVolumeClaimName: origin}}\n")
				await.Within(t, waitLimit, "the snapshot is ready", func() bool {
					return c.get(t, ".status.readyToUse", "volumesnapshot", "made") == "true"
				})
				c.apply(t, claim{name: "unlike", mode: "Block",
					source: "{apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: made}"}.String()+
					pod{name: "unlike", claim: "unlike", block: true}.String())
				t.Cleanup(func() { del("pod", "origin")(t) })
			}},
	}
}

// changes are the states that need a change of the cluster or the rack, or a whole node.
func (c *cluster) changes() []saying {
	return []saying{
		{name: "full", said: "exceed max volume count", want: "NodesFull", then: c.filled},
		{name: "grows", subject: "default/grows", want: "ExpansionNeedsRoom", then: func(t *testing.T) {
			c.used(t, "grows")
			c.setting(t, simtest.Settings{QuotaBytes: new(int64(1))}, simtest.Settings{QuotaBytes: new(int64(0))})
			c.kubectl(t, "patch", "pvc", "grows", "-p", `{"spec":{"resources":{"requests":{"storage":"3Gi"}}}}`)
		}},
		{name: "unplaced", said: "did not have enough free storage", want: "QuotaExhausted", then: func(t *testing.T) {
			c.noCapacity(t, "did not have enough free storage")
		}},
		{name: "powerless", said: "is forbidden: User", want: "RightsMissing", then: func(t *testing.T) {
			c.used(t, "powerless")
			c.kubectl(t, "patch", "clusterrole", "oxide-csi-controller", "--type=json", "-p",
				`[{"op":"test","path":"/rules/6/resources","value":["volumeattachments"]},`+
					`{"op":"replace","path":"/rules/6/verbs","value":["get","list","watch"]}]`)
			t.Cleanup(func() { c.kubectl(t, "apply", "-k", "overlay") })
			c.uses(t, "powerless", c.a)
		}},
	}
}

// filled lets one pod take all places of a node. That the volumes cannot be attached does not matter to the scheduler.
func (c *cluster) filled(t *testing.T) {
	await.Within(t, waitLimit, "the node has no volumes", func() bool {
		return !strings.Contains(c.get(t, ".items[*].spec.nodeName", "volumeattachments"), c.b.Name)
	})
	objects, filler := "", pod{name: "filler", claim: "filler-0", on: c.b}.String()
	for i := range maxDisks - 1 {
		name := fmt.Sprintf("filler-%d", i)
		objects += byHand(name, "default", "1Gi")
		if i > 0 {
			filler = changed(filler, "claimName: filler-0}}",
				fmt.Sprintf("claimName: filler-0}}, {name: volume-%d, persistentVolumeClaim: {claimName: %s}}", i, name))
		}
	}
	c.apply(t, objects+filler)
	t.Cleanup(func() { c.kubectl(t, "delete", "pod", "filler") })
	await.Within(t, waitLimit, "the filler has its node", func() bool {
		return c.get(t, ".spec.nodeName", "pod", "filler") != ""
	})
	c.uses(t, "full", c.b)
}
