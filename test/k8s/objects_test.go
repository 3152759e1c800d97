//go:build k8s

package k8s_test

import (
	"cmp"
	"fmt"
)

// Names that the manifests give.
const (
	namespace = "oxide-csi"
	class     = "oxide-disk"
)

// claim is a PersistentVolumeClaim. What is empty is as usual: 1 GiB with a filesystem, of the manifests' class, for one node.
type claim struct{ name, size, class, access, mode, source string }

func (p claim) String() string {
	source := ""
	if p.source != "" {
		source = "\n  dataSource: " + p.source
	}
	return fmt.Sprintf(`apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: %s}
spec:
  storageClassName: %s
  accessModes: [%s]
  volumeMode: %s
  resources: {requests: {storage: %s}}%s
---
`, p.name, cmp.Or(p.class, class), cmp.Or(p.access, "ReadWriteOnce"), cmp.Or(p.mode, "Filesystem"), cmp.Or(p.size, "1Gi"), source)
}

// pod is a Pod that waits, with one volume: a filesystem at /data, for an ordinary user and a group, or a device at /dev/volume,
// for root. It runs where it may, or on a node.
type pod struct {
	name, claim string
	block       bool
	on          *node
}

func (p pod) String() string {
	user, volume := "{runAsUser: 1000, runAsGroup: 1000, fsGroup: 2000}", "volumeMounts: [{name: volume, mountPath: /data}]"
	if p.block {
		user, volume = "{}", "volumeDevices: [{name: volume, devicePath: /dev/volume}]"
	}
	place := "{}"
	if p.on != nil {
		place = "{kubernetes.io/hostname: " + p.on.Name + "}"
	}
	return fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  nodeSelector: %s
  terminationGracePeriodSeconds: 1
  automountServiceAccountToken: false
  securityContext: %s
  containers:
    - name: container
      image: %s
      command: [/busybox, sleep, "1000000"]
      %s
  volumes: [{name: volume, persistentVolumeClaim: {claimName: %s}}]
---
`, p.name, place, user, busyboxImage, volume, p.claim)
}
