// Package core is the CSI plugin itself: the Identity, Controller and Node services on one unix socket. It knows no
// orchestrator; what is particular to one is a metadata provider (package metadata) or a file under deploy/.
//
// # What CSI asks, and what a rack offers
//
// An orchestrator calls, in this order and backwards again: CreateVolume, ControllerPublishVolume, NodeStageVolume,
// NodePublishVolume. A rack has disks and instances.
//
//	CreateVolume              make a disk; its name follows from the volume's, so that a repetition finds it
//	ControllerPublishVolume   attach the disk to an instance; the guest then shows an NVMe device
//	NodeStageVolume           find that device by its serial, prove it blank or know its filesystem, mount it once
//	NodePublishVolume         bind the mount, or the device itself, to where a workload wants it
//
// The volume ID is the disk's UUID and the node ID the instance's. The guest knows a disk by its serial only, which is
// its name cut to 20 bytes: the name therefore travels in the volume context and in the publish context.
//
// Each call may come twice, late, or after its opposite, and either side may have failed in between. So no call believes
// what an earlier one did: it looks at the rack, the device and the mount table, does what is missing, and answers what
// it sees. What cannot be proved is refused; no data is ever risked on a guess.
//
// # Map
//
//   - identity.go, controller.go, node.go: the services
//   - create.go: making a volume, blank or from a snapshot; clone.go: from another volume; sweep.go: what a crash in between leaves
//   - publish.go: attaching and detaching; snapshot.go; list.go: volumes and snapshots by pages; capacity.go; controller_health.go
//   - planned.go: both of these where an instance has to be restarted for it
//   - racks.go: which of several racks has a volume
//   - node_stage.go, node_publish.go: what is mounted where; node_content.go: what is on the disk, and whether mkfs may run
//   - node_volumes.go: which volume is at a path; node_health.go, node_probe.go: how it and its disk are
//   - capabilities.go: what is advertised, and why the rest is not
//   - validate.go: every check on a request; parameters.go, size.go, topology.go: what its fields mean
//   - keys.go: the keys of contexts and parameters, which are permanent
//   - errors.go: from the errors of the layers below to gRPC codes
//   - interceptors.go, locks.go: what every RPC passes through
//   - memory.go: what the controller remembers for a moment; readiness.go: waiting for the node's identity
//   - server.go: the socket
//
// Below it: core/rack talks to the rack, core/device finds and reads block devices, core/mount makes and mounts
// filesystems, core/restart plans restarts of instances and core/shutdown powers a guest off for one, core/config is the
// configuration. test/simrack is a simulated rack for tests and the demo and is linked
// by nothing that ships.
package core
