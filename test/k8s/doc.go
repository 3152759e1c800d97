// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package k8s runs the manifests of deploy/k8s in a real Kubernetes: API server, controller manager, scheduler, a
// kubelet with containerd, and the CSI sidecars of the manifests, all built from source. Only node-driver-registrar is
// replaced by a stand-in, because the Go module proxy does not have it. Racks are simulated, and the nodes are their
// instances.
//
// All processes run in their own network, mount and PID namespaces, and end with them. Each node has namespaces within
// those, and can be stopped and started. The tests need root, have the build tag "k8s", and take minutes to build
// once: make e2e-k8s.
//
//   - machine_test.go: the namespaces, and cleaning up outside of them
//   - images_test.go: the images that the manifests name
//   - cluster_test.go: racks, and Kubernetes
//   - node_test.go: a node
//   - kubectl_test.go: helpers that call kubectl
//   - objects_test.go: objects that users of the plugin write
//   - k8s_test.go, nodes_test.go: the cases on racks with hot-plug
//   - explain_test.go: what oxide-csi explain and doctor say of them
//   - memory_test.go: the memory of the sidecars
//   - platform_test.go: a kubelet with another folder, by hand: make e2e-platform
//   - stories_test.go, sayings_test.go, load_test.go: twenty ways to break a volume, what Kubernetes says of others,
//     and many volumes, by hand: make e2e-stories
//   - restart_test.go: the cases on a rack without hot-plug, which boots its nodes itself
//   - buckets_test.go: buckets, with stand-ins for COSI's controller and sidecar and for kube-proxy: make e2e-buckets
//   - release_test.go: the rendered manifests and both kinds of images of a release: make e2e-release
//   - bus_test.go: the D-Bus services that power off such a node
package k8s
