// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s && stories

package k8s_test

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestSidecarMemory measures the memory of the sidecars in a cluster with many volumes and claims. The objects are
// those of a cluster, but no volume is attached: an attached volume adds one small object.
func TestSidecarMemory(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: namespaces, mounts, loop devices")
	}
	c := newCluster(t)
	c.install(t, "overlay")
	c.sidecarMemory(t, "after the installation")
	const steps, each = 2, 2500
	for step := range steps {
		c.load(t, step*each, each)
		c.sidecarMemory(t, fmt.Sprintf("with %d volumes and claims", (step+1)*each))
	}
}

// load adds PersistentVolumes of the plugin, each with a claim. Volume and claim do not fit, so they stay apart, and
// the sidecars have nothing to do but to keep them.
func (c *cluster) load(t *testing.T, from, count int) {
	t.Helper()
	const clients = 8 // kubectl limits the requests of one
	var group sync.WaitGroup
	for client := range clients {
		var objects strings.Builder
		for i := from + client; i < from+count; i += clients {
			fmt.Fprintf(&objects, `apiVersion: v1
kind: PersistentVolume
metadata:
  name: pvc-7f1a2c3e-0000-4000-8000-%012[1]d
  annotations:
    pv.kubernetes.io/provisioned-by: csi.oxide.computer
    volume.kubernetes.io/provisioner-deletion-secret-name: ""
    volume.kubernetes.io/provisioner-deletion-secret-namespace: ""
  finalizers: [external-provisioner.volume.kubernetes.io/finalizer, external-attacher/csi-oxide-computer]
spec:
  accessModes: [ReadWriteOnce]
  capacity: {storage: 1Gi}
  storageClassName: many
  persistentVolumeReclaimPolicy: Retain
  csi:
    driver: csi.oxide.computer
    fsType: ext4
    volumeHandle: 7f1a2c3e-0000-4000-8000-%012[1]d
    volumeAttributes:
      diskName: csi-0123456789abcdef0123456789abcdef
      storage.kubernetes.io/csiProvisionerIdentity: 1760000000000-0000-csi.oxide.computer
  nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [{key: topology.csi.oxide.computer/rack, operator: In, values: [default]}]}]}}
---
`, i)
			objects.WriteString(claim{name: fmt.Sprintf("data-service-%d", i), class: "apart"}.String())
		}
		group.Go(func() {
			if _, err := c.feed(objects.String(), "create", "-f", "-"); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	time.Sleep(20 * time.Second) // the sidecars take in the last ones
}
