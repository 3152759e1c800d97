// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package kubernetes_test

import (
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	client "github.com/oxidecomputer/oxide-csi-plugin/metadata/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/kubernetes"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const (
	pvList      = "/api/v1/persistentvolumes"
	pvcList     = "/api/v1/persistentvolumeclaims"
	contentList = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents"
)

// operatorOf serves a cluster and returns an Operator for it.
func operatorOf(t *testing.T, c *simtest.Cluster) *kubernetes.Operator {
	t.Helper()
	server := httptest.NewTLSServer(c)
	t.Cleanup(server.Close)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte(c.Kubeconfig(server)), 0o600); err != nil {
		t.Fatal(err)
	}
	return kubernetes.NewOperator(client.Options{Kubeconfig: kubeconfig})
}

// The inventory has every volume and snapshot of the plugin, over several pages, and claims that have no volume yet.
func TestInventory(t *testing.T) {
	c := simtest.NewCluster(token, pvList, pvcList, contentList)
	const count = 1100
	for i := range count {
		c.Put(pvList, "", fmt.Sprintf("pv-%04d", i), object{"spec": object{
			"claimRef": object{"namespace": "default", "name": "data"},
			"csi":      object{"driver": "csi.oxide.computer", "volumeHandle": idA},
		}})
	}
	c.Put(pvList, "", "other", object{"spec": object{"csi": object{"driver": "other.example", "volumeHandle": idB}}})
	c.Put(pvList, "", "local", object{"spec": object{"local": object{}}})
	c.Put(pvcList, "default", "waits", object{"metadata": object{"uid": "123"}, "spec": object{}})
	c.Put(pvcList, "default", "bound", object{"spec": object{"volumeName": "pv-0001"}})
	c.Put(contentList, "", "ready", object{
		"spec":   object{"driver": "csi.oxide.computer", "volumeSnapshotRef": object{"uid": "u1"}},
		"status": object{"snapshotHandle": idB},
	})
	c.Put(contentList, "", "waits", object{
		"spec": object{"driver": "csi.oxide.computer", "volumeSnapshotRef": object{"uid": "u2"}},
	})
	known, err := operatorOf(t, c).Inventory(t.Context())
	if err != nil || len(known.Volumes) != count+1 || known.SnapshotsUnknown {
		t.Fatalf("%d volumes, %v", len(known.Volumes), err)
	}
	wantVolumes := []orchestrator.KnownObject{
		{CSIName: "pvc-123", Object: "PersistentVolumeClaim default/waits", Claim: "default/waits"},
		{ID: idA, Object: "PersistentVolume pv-0000", Claim: "default/data"},
	}
	if diff := cmp.Diff(wantVolumes, known.Volumes[:2]); diff != "" {
		t.Error(diff)
	}
	wantSnapshots := []orchestrator.KnownObject{
		{ID: idB, Object: "VolumeSnapshotContent ready"}, {CSIName: "snapshot-u2", Object: "VolumeSnapshotContent waits"},
	}
	if diff := cmp.Diff(wantSnapshots, known.Snapshots); diff != "" {
		t.Error(diff)
	}
}

// A list that the account may not read is an error and no short list. A cluster without the CRDs has no snapshots.
func TestInventoryIsComplete(t *testing.T) {
	for _, denied := range []string{pvList, pvcList, contentList} {
		c := simtest.NewCluster(token, pvList, pvcList, contentList)
		c.Deny(denied)
		if known, err := operatorOf(t, c).Inventory(t.Context()); err == nil || !strings.Contains(err.Error(), "403") {
			t.Errorf("%s denied: %+v, %v", denied, known, err)
		}
	}
	if _, err := operatorOf(t, simtest.NewCluster(token, pvList, pvcList)).Inventory(t.Context()); err != nil {
		t.Errorf("without CRDs: %v", err)
	}
	if known, err := operatorOf(t, simtest.NewCluster(token, pvList, contentList)).Inventory(t.Context()); err == nil {
		t.Errorf("no list of claims: %+v", known)
	}
}
