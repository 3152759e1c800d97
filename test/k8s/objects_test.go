// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

//go:build k8s

package k8s_test

import (
	"cmp"
	"fmt"
)

// Names from the manifests.
const (
	namespace = "oxide-csi"
	class     = "oxide-disk"
)

// claim is a PersistentVolumeClaim. Empty fields have defaults: 1 GiB, a filesystem, the class of the manifests, one
// node.
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

// pod is a Pod that waits, with one volume: a filesystem at /data, used by an ordinary user with a group, or a device
// at /dev/volume, used by root. An empty node means any node.
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

// set is a StatefulSet of pods on one node, each with its own volume. All pods start at once. Each pod writes a diary
// to its volume: when it began, and when it was asked to end.
type set struct {
	name string
	pods int
	on   *node
}

func (s set) String() string {
	return fmt.Sprintf(`apiVersion: apps/v1
kind: StatefulSet
metadata: {name: %[1]s}
spec:
  replicas: %[2]d
  podManagementPolicy: Parallel
  serviceName: %[1]s
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
      nodeSelector: {kubernetes.io/hostname: %[3]s}
      automountServiceAccountToken: false
      securityContext: {runAsUser: 1000, runAsGroup: 1000, fsGroup: 2000}
      containers:
        - name: container
          image: %[4]s
          command: [/busybox, sh, -c, "trap 'echo asked >>/data/diary; exit' TERM; echo began >>/data/diary; while :; do /busybox sleep 1 & wait; done"]
          volumeMounts: [{name: data, mountPath: /data}]
  volumeClaimTemplates:
    - metadata: {name: data}
      spec: {storageClassName: %[5]s, accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
---
`, s.name, s.pods, s.on.Name, busyboxImage, class)
}

// names returns the names of the set's pods.
func (s set) names() (names []string) {
	for i := range s.pods {
		names = append(names, fmt.Sprintf("%s-%d", s.name, i))
	}
	return names
}
