// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package node is the CSI Node service. It talks to the kernel of its guest, holds no token, and never talks to a rack.
//
// # The states of a volume on a node
//
// The kernel's mount table is the only list of what is staged and published: the service keeps none of its own, which a
// restart would lose or a crash falsify.
//
//	state       filesystem volume                    raw block volume
//	attached    NVMe device, mounted nowhere         NVMe device, bound nowhere
//	staged      filesystem at the staging path       device node bound to <staging path>/<volume ID>
//	published   the same filesystem at target paths  the same device node bound to target paths
//
//	NodeStage      attached  -> staged      finds the device, checks or makes its filesystem, mounts it
//	NodePublish    staged    -> published   binds what is staged to a target path
//	NodeUnpublish  published -> staged      unmounts one target path
//	NodeUnstage    staged    -> attached    unmounts, and waits until nothing holds the device
//
// Stage and publish requests bring the disk's serial in their contexts. Unstage, unpublish and stats bring only paths; the
// device number of what is mounted there says which disk it is. Both outlive the plugin.
//
// # Map
//
//   - node.go: the service, NodeGetInfo, NodeGetVolumeStats
//   - stage.go: NodeStageVolume and NodeUnstageVolume; content.go: what is on the disk, and whether mkfs may run
//   - publish.go: NodePublishVolume and NodeUnpublishVolume
//   - identify.go: which volume is mounted at a path
//   - health.go, probe.go: health of a volume and of its disk
//   - context.go: what the contexts of a request say; validate.go: checks of requests
//   - capabilities.go: which RPCs there are, and why the others are missing
package node
