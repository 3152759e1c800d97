// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package k8s runs the manifests of deploy/k8s in a real Kubernetes: API server, controller manager, scheduler, a kubelet with
// containerd, and the CSI sidecars that the manifests name, all built from their own sources. Only node-driver-registrar is a
// stand-in, since the Go module proxy does not have it. Racks are simulated; the nodes are their instances.
//
// Everything happens in network, mount and PID namespaces of its own, and ends with them; each node has its own within those, and
// can be stopped and started. It needs root, has the build tag "k8s", and takes minutes to build once: make e2e-k8s.
//
//   - machine_test.go: the namespaces, and what must be undone outside of them
//   - images_test.go: the images that the manifests name
//   - cluster_test.go: racks, and Kubernetes
//   - node_test.go: a node
//   - kubectl_test.go: how the tests talk to it
//   - objects_test.go: what users of the plugin write
//   - k8s_test.go, nodes_test.go: what is shown on racks with hot-plug
//   - restart_test.go: what is shown on one without, which boots its nodes itself
//   - bus_test.go: what such a node is powered off by
package k8s
