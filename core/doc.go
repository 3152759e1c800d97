// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package core serves the Container Storage Interface for the disks of Oxide racks: the Identity, Controller and Node
// services on one unix socket. It calls no orchestrator; what differs between orchestrators is in package orchestrator
// and under deploy/.
//
// # The calls, and what a rack offers for them
//
// An orchestrator makes these calls in this order, and their opposites in the reverse order. A rack has disks and
// instances.
//
//	CreateVolume              makes a disk; its name follows from the volume's name, so that a repeated call finds it
//	ControllerPublishVolume   attaches the disk to an instance; the guest then shows an NVMe device
//	NodeStageVolume           finds that device by its serial, formats it if it is provably blank, mounts it once
//	NodePublishVolume         binds the mount, or the device itself, to the path that a workload uses
//
// The volume ID is the UUID of the volume's first disk, also after an expansion has replaced that disk. The node ID is
// the instance's UUID. The guest knows a disk only by its serial, which is the disk's name cut to 20 bytes. So the name
// travels in the volume context and in the publish context.
//
// # The states of a volume
//
// Three places hold the state of a volume, and no call trusts what an earlier call reported about them: each call
// looks, does what is missing, and answers what it sees.
//
//	                  rack                 guest                    mounts in the guest
//	                  (core/controller)    (core/node, core/device) (core/node, core/mount)
//
//	nothing           no disk              -                        -
//	   │ CreateVolume            ▲ DeleteVolume
//	created           detached             no device                none
//	   │  ↺ ControllerExpandVolume: a larger disk of the same name replaces the disk; NodeStage grows the filesystem
//	   │ ControllerPublish       ▲ ControllerUnpublish
//	attached          attached             NVMe device,             none
//	                                       blank or formatted
//	   │ NodeStage               ▲ NodeUnstage: only when nothing holds the device any more
//	staged            attached             formatted device         one at the staging path
//	   │ NodePublish             ▲ NodeUnpublish
//	published         attached             formatted device         the staging path and each target path
//
// The places can disagree, because a call can come twice, late or after its opposite, and each side can fail between
// two steps. A disk can be attached although its volume is unpublished (on a rack without hot-plug it waits for the
// next planned restart). A device can be gone under a mount (an instance was stopped by force). The mounts are gone
// after a reboot while the rack still shows the disk attached. What cannot be proved is refused: no call formats,
// mounts, detaches or deletes on a guess.
//
// # Map
//
//   - server.go: the services; interceptors.go: what every RPC passes through; core/socket: their socket
//   - identity.go, capabilities.go: the Identity service; readiness.go: waiting for the node's identity
//   - core/fault: the one table of errors, with gRPC code and word; codes.go: an error becomes a gRPC status by it
//   - core/controller: the Controller service; core/node: the Node service; core/rpc: what both need
//   - core/keylock: one operation per volume at a time
//   - core/redact: takes users and passwords of URLs out of logs and errors
//   - core/rack: the rack's client, the only package that imports the SDK; core/rack/diskname: names of disks
//   - core/record: the names and texts of all records that the plugin keeps on a rack
//   - core/detach: detaches disks later than asked
//   - core/expand: makes a volume larger by a new disk
//   - core/restart: plans restarts of instances; core/shutdown: powers the guest off for one
//   - core/device, core/mount: block devices, proving them blank, formatting, mounting; core/filesystem: supported
//     types and mkfs options
//   - core/luks: encrypted disks
//   - core/hostexec, core/volumelock: programs of the host; a lock that they inherit
//   - core/volumerecord, core/statefile: which disks this node may hold; files of the state folder
//   - core/config, core/metrics: settings and metrics
//   - core/buckets: the logic of the COSI driver, a program of its own
//
// The packages of the node are for Linux. On other systems, for which only commands are built, they have nothing but
// their errors: the commands explain them.
//
// Arrows point one way: core/node never imports the rack's client, and core/controller never a device or a mount. A
// test in this package holds that.
package core
