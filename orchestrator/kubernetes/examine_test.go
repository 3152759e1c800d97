// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	client "github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const (
	driverList     = "/apis/storage.k8s.io/v1/csidrivers"
	leaseList      = "/apis/coordination.k8s.io/v1/leases"
	nodeList       = "/api/v1/nodes"
	csiNodeList    = "/apis/storage.k8s.io/v1/csinodes"
	classList      = "/apis/storage.k8s.io/v1/storageclasses"
	reviews        = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
	eventList      = "/api/v1/events"
	attachmentList = "/apis/storage.k8s.io/v1/volumeattachments"
)

// wellCluster is a cluster in which all is well.
func wellCluster() *simtest.Cluster {
	c := simtest.NewCluster(
		token, podList, eventList, nodeList, csiNodeList, classList, attachmentList, pvList, leaseList, driverList,
	)
	c.Put(driverList, "", "csi.oxide.computer", object{"spec": object{"attachRequired": true}})
	c.Put(nodeList, "", "worker-1", object{})
	c.Put(csiNodeList, "", "worker-1", registeredAs(idA))
	c.Put(classList, "", "oxide", object{"provisioner": "csi.oxide.computer"})
	c.Put(podList, "oxide-csi", "controller", podWith("registry.example:5000/csi-attacher:v4.13.0@sha256:0"))
	for _, name := range []string{
		"csi-oxide-computer", "external-attacher-leader-csi-oxide-computer", "external-resizer-csi-oxide-computer",
	} {
		c.Put(leaseList, "oxide-csi", name, lease(time.Now()))
	}
	return c
}

func registeredAs(instanceID string) object {
	return object{"spec": object{"drivers": []object{{"name": "csi.oxide.computer", "nodeID": instanceID}}}}
}

// podWith is a pod of the plugin with this csi-attacher.
func podWith(attacher string) object {
	return object{"spec": object{"containers": []object{
		{"name": "oxide-plugin", "image": "oxide-csi:0.1.0"}, {"name": "csi-attacher", "image": attacher},
	}}}
}

func nodeReport(kind, at string) object {
	return object{
		"involvedObject": object{"kind": "Node", "name": "worker-1"}, "type": kind, "reason": "RestartRefused",
		"message": "pods would\nend", "lastTimestamp": at, "reportingComponent": "csi.oxide.computer",
	}
}

func lease(renewed time.Time) object {
	return object{
		"spec": object{
			"renewTime":            renewed.UTC().Format(time.RFC3339Nano),
			"holderIdentity":       "pod-1",
			"leaseDurationSeconds": 15,
		},
	}
}

func attachmentSince(since time.Time, attached bool) object {
	return object{
		"metadata": object{"creationTimestamp": since.UTC().Format(time.RFC3339)},
		"spec": object{
			"attacher": "csi.oxide.computer",
			"nodeName": "worker-1",
			"source":   object{"persistentVolumeName": "pv-1"},
		},
		"status": object{"attached": attached, "attachError": object{"message": "no\nroom"}},
	}
}

// The provisioner's own keys are no parameters of the plugin, and classes of other plugins are left out.
func TestStorageClasses(t *testing.T) {
	c := wellCluster()
	c.Put(classList, "", "another", object{"provisioner": "another"})
	c.Put(classList, "", "oxide", object{
		"provisioner": "csi.oxide.computer", "mountOptions": []string{"noatime"},
		"parameters": object{"csi.storage.k8s.io/fstype": "xfs", "diskType": "local"},
	})
	got, err := operatorOf(t, c).StorageClasses(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := []orchestrator.StorageClass{{
		Name: "oxide", FSType: "xfs", MountFlags: []string{"noatime"}, Parameters: map[string]string{"diskType": "local"},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

const cosiLists = "/apis/objectstorage.k8s.io/v1alpha1/"

// bucketOf adds the claim shop/data with its Bucket, which is ready, and an access that is deleted at that time.
func bucketOf(c *simtest.Cluster, ready bool, deleted time.Time, hasClaim bool) {
	c.Put(cosiLists+"buckets", "", "b", object{
		"spec": object{"driverName": "cosi.oxide.computer"}, "status": object{"bucketReady": true},
	})
	c.Put(cosiLists+"bucketclaims", "shop", "data", object{"status": object{"bucketName": "b", "bucketReady": ready}})
	c.Put(cosiLists+"bucketaccesses", "shop", "key", object{
		"metadata": object{"deletionTimestamp": deleted.UTC().Format(time.RFC3339)},
		"spec":     object{"bucketClaimName": "data", "credentialsSecretName": "keys"},
	})
	if deleted.IsZero() {
		c.Remove(cosiLists+"bucketaccesses", "shop", "key")
	}
	if !hasClaim {
		c.Remove(cosiLists+"bucketclaims", "shop", "data")
	}
}

// What COSI leaves for good has a command that heals it.
func TestStuckBucketsHaveACommand(t *testing.T) {
	for name, test := range map[string]struct {
		ready, hasClaim bool
		deleted         time.Time
		next            string
	}{
		"an old status": {false, true, time.Time{},
			`kubectl patch bucketclaim -n shop data --subresource=status --type=merge -p '{"status":{"bucketReady":true}}'`},
		"the Secret is gone": {true, true, time.Now().Add(-time.Hour), "kubectl create secret generic -n shop keys"},
		"the claim is gone": {true, false, time.Now().Add(-time.Hour),
			`kubectl patch bucketaccess -n shop key --type=merge -p '{"metadata":{"finalizers":null}}'`},
	} {
		c := wellCluster()
		bucketOf(c, test.ready, test.deleted, test.hasClaim)
		findings, _ := operatorOf(t, c).Examine(t.Context())
		i := slices.IndexFunc(findings, func(f orchestrator.Finding) bool { return f.Looked == "claims of buckets" })
		if i < 0 || !strings.HasSuffix(findings[i].Next, test.next) {
			t.Errorf("%s: %+v", name, findings)
		}
	}
}

// What the driver says is an event of the Bucket. doctor says it of the claim, which its owner knows.
func TestEventsOfBucketsAreSaidOfClaims(t *testing.T) {
	old := time.Now().Add(-time.Hour).UTC().Format(time.RFC3339)
	for name, test := range map[string]struct {
		claim, next string
	}{
		"a typo in the class": {"creationTimestamp", "correct the BucketClass"},
		"a bucket with objects": {"deletionTimestamp",
			`kubectl patch bucket b --type=merge -p '{"spec":{"parameters":{"deleteContents":"true"}}}'`},
	} {
		c := wellCluster()
		bucketOf(c, true, time.Time{}, true)
		c.Put(cosiLists+"buckets", "", "b", object{"spec": object{"driverName": "cosi.oxide.computer"}})
		c.Put(cosiLists+"bucketclaims", "shop", "data", object{
			"metadata": object{test.claim: old}, "status": object{"bucketName": "b"},
		})
		for i, of := range []string{"another", "b", "b"} {
			c.Put(eventList, "default", fmt.Sprint(i), object{
				"involvedObject": object{"kind": "Bucket", "name": of}, "type": "Warning", "message": fmt.Sprint("reason\n", i),
				"lastTimestamp": time.Now().Add(time.Duration(i) * time.Second).UTC().Format(time.RFC3339),
			})
		}
		findings, _ := operatorOf(t, c).Examine(t.Context())
		i := slices.IndexFunc(findings, func(f orchestrator.Finding) bool { return f.Looked == "claims of buckets" })
		if i < 0 || !strings.Contains(findings[i].Found, "BucketClaim shop/data") ||
			!strings.HasSuffix(findings[i].Found, ": reason 2") || !strings.Contains(findings[i].Next, test.next) {
			t.Errorf("%s: %+v", name, findings)
		}
	}
}

// Each problem of a cluster is one line, and the examination only reads.
func TestExamine(t *testing.T) {
	const warning, failure = orchestrator.StatusWarning, orchestrator.StatusFailure
	old := time.Now().Add(-time.Hour)
	for name, test := range map[string]struct {
		change func(c *simtest.Cluster)
		want   map[string]orchestrator.Status
	}{
		"an old release":      {func(c *simtest.Cluster) { c.Minor = "32+" }, map[string]orchestrator.Status{"release": warning}},
		"all is well":         {func(*simtest.Cluster) {}, map[string]orchestrator.Status{}},
		"no CSIDriver":        {func(c *simtest.Cluster) { c.Remove(driverList, "", "csi.oxide.computer") }, map[string]orchestrator.Status{"CSIDriver": failure}},
		"node without plugin": {func(c *simtest.Cluster) { c.Put(nodeList, "", "worker-2", object{}) }, map[string]orchestrator.Status{"node plugins": warning}},
		"no plugin at all":    {func(c *simtest.Cluster) { c.Remove(csiNodeList, "", "worker-1") }, map[string]orchestrator.Status{"node plugins": failure}},
		"attacher is down": {func(c *simtest.Cluster) {
			c.Put(leaseList, "oxide-csi", "external-attacher-leader-csi-oxide-computer", lease(old))
		}, map[string]orchestrator.Status{"sidecars": failure}},
		"another version of a sidecar": {func(c *simtest.Cluster) {
			c.Put(podList, "oxide-csi", "controller", podWith("registry.example/csi-attacher:v4.11.0"))
		}, map[string]orchestrator.Status{"versions": warning}},
		"a sidecar without a version": {func(c *simtest.Cluster) {
			c.Put(podList, "oxide-csi", "controller", podWith("registry.example:5000/csi-attacher"))
		}, map[string]orchestrator.Status{}},
		"resizer is down": {func(c *simtest.Cluster) {
			c.Put(leaseList, "oxide-csi", "external-resizer-csi-oxide-computer", lease(old))
		}, map[string]orchestrator.Status{"sidecars": warning}},
		"snapshotter is down": {func(c *simtest.Cluster) {
			c.Put(leaseList, "oxide-csi", "external-snapshotter-leader-csi-oxide-computer", lease(old))
		}, map[string]orchestrator.Status{"sidecars": warning}},
		"all CRDs of snapshots": {func(c *simtest.Cluster) {
			for _, name := range []string{"volumesnapshots", "volumesnapshotcontents", "volumesnapshotclasses"} {
				c.Put("/apis/snapshot.storage.k8s.io/v1/"+name, "", "", object{})
			}
		}, map[string]orchestrator.Status{}},
		"one CRD of snapshots is missing": {func(c *simtest.Cluster) {
			c.Put("/apis/snapshot.storage.k8s.io/v1/volumesnapshots", "", "", object{})
			c.Put("/apis/snapshot.storage.k8s.io/v1/volumesnapshotclasses", "", "", object{})
		}, map[string]orchestrator.Status{"snapshots": failure}},
		"attach is stuck":       {func(c *simtest.Cluster) { c.Put(attachmentList, "", "va", attachmentSince(old, false)) }, map[string]orchestrator.Status{"VolumeAttachments": failure}},
		"attach has just begun": {func(c *simtest.Cluster) { c.Put(attachmentList, "", "va", attachmentSince(time.Now(), false)) }, map[string]orchestrator.Status{}},
		"attached":              {func(c *simtest.Cluster) { c.Put(attachmentList, "", "va", attachmentSince(old, true)) }, map[string]orchestrator.Status{}},
		"two Nodes are one": {func(c *simtest.Cluster) {
			c.Put(nodeList, "", "worker-2", object{})
			c.Put(csiNodeList, "", "worker-2", registeredAs(idA))
		}, map[string]orchestrator.Status{"node IDs": failure}},
		"a restart was refused": {func(c *simtest.Cluster) {
			c.Put(eventList, "default", "1", nodeReport("Warning", "2026-01-02T03:04:05Z"))
			c.Put(eventList, "default", "0", nodeReport("Normal", "2026-01-02T03:04:04Z"))
		}, map[string]orchestrator.Status{"reports about Nodes": warning}},
		"a restart was refused, and then went on": {func(c *simtest.Cluster) {
			c.Put(eventList, "default", "0", nodeReport("Warning", "2026-01-02T03:04:05Z"))
			c.Put(eventList, "default", "1", nodeReport("Normal", "2026-01-02T03:04:06Z"))
			other := nodeReport("Warning", "2026-01-02T03:04:07Z")
			other["reportingComponent"] = "kubelet"
			c.Put(eventList, "default", "2", other)
		}, map[string]orchestrator.Status{}},
		"buckets are well":          {func(c *simtest.Cluster) { bucketOf(c, true, time.Now(), true) }, map[string]orchestrator.Status{}},
		"a claim has an old status": {func(c *simtest.Cluster) { bucketOf(c, false, time.Time{}, true) }, map[string]orchestrator.Status{"claims of buckets": warning}},
		"an access hangs":           {func(c *simtest.Cluster) { bucketOf(c, true, old, true) }, map[string]orchestrator.Status{"claims of buckets": warning}},
		"an access has no claim":    {func(c *simtest.Cluster) { bucketOf(c, true, old, false) }, map[string]orchestrator.Status{"claims of buckets": warning}},
		"a right is missing": {func(c *simtest.Cluster) { c.Refuse("patch volumeattachments.storage.k8s.io/status") },
			map[string]orchestrator.Status{"rights of oxide-csi-controller": failure}},
		"no rights to ask for rights": {func(c *simtest.Cluster) { c.Deny(reviews) }, map[string]orchestrator.Status{
			"rights of oxide-csi-controller": warning, "rights of oxide-csi-node": warning,
		}},
		"not allowed": {func(c *simtest.Cluster) { c.Deny(leaseList) }, map[string]orchestrator.Status{"sidecars": warning}},
	} {
		t.Run(name, func(t *testing.T) {
			c := wellCluster()
			test.change(c)
			found, _ := operatorOf(t, c).Examine(t.Context())
			got := map[string]orchestrator.Status{}
			for _, f := range found {
				if f.Status != orchestrator.StatusOK {
					got[f.Looked] = f.Status
				}
				if f.Found == "" || f.Looked == "" || (f.Next == "") != (f.Status == orchestrator.StatusOK) ||
					strings.Contains(f.Found, "\n") {
					t.Errorf("incomplete: %+v", f)
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("-want +got:\n%s\n%+v", diff, found)
			}
			for _, call := range c.Calls() {
				if !strings.HasPrefix(call, "GET ") && call != "POST "+reviews {
					t.Errorf("it sent %s", call)
				}
			}
			if strings.Contains(fmt.Sprint(found), token) {
				t.Error("it shows the token")
			}
		})
	}
}

// An API server that does not respond is no matter of the kubeconfig's rights: the next step is that of the error.
func TestExamineWithoutAnAPIServer(t *testing.T) {
	gone := httptest.NewTLSServer(http.NotFoundHandler())
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte(wellCluster().Kubeconfig(gone)), 0o600); err != nil {
		t.Fatal(err)
	}
	gone.Close()
	findings, _ := kubernetes.NewOperator(client.Options{Kubeconfig: kubeconfig}).Examine(t.Context())
	seen := 0
	for _, f := range findings {
		if f.Status == orchestrator.StatusWarning {
			seen++
			if f.Next != "check that it runs and can be reached from here" || strings.Contains(f.Found, "; ") {
				t.Errorf("%+v", f)
			}
		}
	}
	if seen == 0 {
		t.Errorf("nothing was found: %+v", findings)
	}
}
