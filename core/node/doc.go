// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package node is the CSI Node service. It uses the kernel of its guest. It has no token, and never contacts a rack.
//
// # The states of a volume on a node
//
// The kernel's mount table is the list of staged and published volumes. The service keeps no list on which correctness
// depends: a restart would lose it, and a crash could make it wrong.
//
//	state       filesystem volume                    raw block volume
//	attached    NVMe device, mounted nowhere         NVMe device, bound nowhere
//	staged      filesystem at the staging path       device node bound to <staging path>/<volume ID>
//	published   the same filesystem at target paths  the same device node bound to target paths
//
//	NodeStage      attached  -> staged      finds the device, checks or makes its filesystem, mounts it
//	NodePublish    staged    -> published   binds the staging path to a target path
//	NodeUnpublish  published -> staged      unmounts one target path
//	NodeUnstage    staged    -> attached    unmounts, and waits until nothing holds the device
//
// Stage and publish requests contain the disk's name in their contexts, and the name gives the serial. Unstage,
// unpublish and stats requests contain only paths. The device number of the mount at a path identifies the disk.
// Contexts and mounts outlive the plugin.
//
// # Map
//
//   - node.go: the service, NodeGetInfo, NodeGetVolumeStats
//   - stage.go: NodeStageVolume and NodeUnstageVolume; content.go: the filesystem on the disk, and whether mkfs may run
//   - publish.go: NodePublishVolume and NodeUnpublishVolume
//   - identify.go: which volume is mounted at a path
//   - health.go, probe.go: health of a volume and of its disk
//   - volume.go: what a request says about its volume; validate.go: checks of requests
//   - capabilities.go: the optional RPCs, and why others are missing
package node
