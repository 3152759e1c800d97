// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package node is the CSI Node service. It uses the kernel of its guest. It has no token, and never contacts a rack.
//
// # The states of a volume on a node
//
// The kernel's mount table is the list of staged and published volumes. Beside it, each volume that this node may hold
// has one small record (package volumerecord), which says what the mount table cannot: which disk it is, also when
// another program has unmounted it. A record does not say what is mounted.
//
//	state       filesystem volume                    raw block volume
//	attached    NVMe device, mounted nowhere         NVMe device, bound nowhere
//	staged      filesystem at the staging path       device node bound to <staging path>/<volume ID>
//	published   the same filesystem at target paths  the same device node bound to target paths
//
//	NodeStage      attached  -> staged      finds the device, makes or checks its filesystem, mounts it, grows it
//	NodePublish    staged    -> published   binds the staging path to a target path
//	NodeUnpublish  published -> staged      unmounts one target path
//	NodeUnstage    staged    -> attached    unmounts, and proves that no program can write to the disk
//
// Stage and publish requests contain the disk's name in their contexts, and the name gives the serial. Unstage,
// unpublish and stats requests contain only paths. The device number of the mount at a path identifies the disk.
// Contexts, mounts and records outlive the plugin.
//
// # Stage and unstage, and what survives a crash
//
// Each arrow is a step. The plugin may be killed, or the guest lose its power, at any of them. What is in brackets
// remains after a kill. After a power cut no mount remains, and a record of an earlier boot counts as none.
//
//	NodeStage                                         NodeUnstage
//
//	   attached  []                                      staged  [record staged, mount]
//	      |  wait for the disk                              |  published or mounted elsewhere, or frozen: refused
//	      |  refuse a foreign user (O_EXCL)                 |  private copies of the mount in other namespaces:
//	      |  format  [marker on the disk]                   |     write the step "leaving"
//	      v                                                 |        [record leaving, mount]
//	   filesystem  []                                       |     make the superblock read-only; a writer: refused
//	      |  write and flush the record                     |        [record leaving, read-only mount]
//	      v                                                 |  unmount; it is in use: refused; if it is read-only,
//	   [record staged]                                      v  a stage makes it writable again
//	      |  mount, or bind the device node              unmounted  [record]
//	      v                                                 |  prove that nothing has the device open, or only readers;
//	   staged  [record staged, mount]                       |  that fails: refused, at the next call too
//	                                                        v
//	                                                     free  [record]
//	                                                        |  remove the record
//	                                                        v
//	                                                     attached  []
//
// The next call starts at the top and finds each step done or not done: NodeUnstage looks up the disk in the record and
// proves again that it is free, NodeStage mounts it again. If only read-only copies of the mount remain in other mount
// namespaces, NodeUnstage succeeds and keeps the record with the step "lingering".
//
// # Map
//
//   - node.go: the service, its optional RPCs, NodeGetInfo, NodeGetVolumeStats
//   - stage.go, block.go: NodeStageVolume; content.go: the filesystem on the disk, and whether mkfs may run
//   - unstage.go: NodeUnstageVolume; records.go: the records of held volumes, and foreign users of a disk
//   - publish.go: NodePublishVolume and NodeUnpublishVolume
//   - freeze.go: frozen filesystems
//   - encrypt.go: opening encrypted disks; mapping.go: closing them
//   - identify.go: which volume is mounted at a path
//   - health.go, probe.go: health of a volume and of its disk
//   - volume.go: what a request says about its volume; validate.go: checks of requests
package node
