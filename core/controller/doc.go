// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package controller is the CSI Controller service. It calls the racks' APIs and never touches a device.
//
//   - controller.go: the service and its options; capabilities.go: which RPCs there are, and ValidateVolumeCapabilities
//   - create.go: CreateVolume; existing.go: what an earlier call made; source.go: from a snapshot; clone.go: from
//     another volume; sweep.go: temporary snapshots that a crash left behind
//   - delete.go: DeleteVolume; remembered.go: disks of which no look is needed before an act
//   - owner.go: which cluster owns a volume; adopt.go: ControllerModifyVolume, and the lists for it
//   - publish.go: attaching; unpublish.go: detaching; attaching.go: attaches to one instance side by side
//   - planned.go: both, if the instance must be restarted for it
//   - refusals.go: refusals that are answered from a cache; defer.go: detaches that wait for a grace period
//   - orchestrator.go: what only an orchestrator knows: which nodes may use a volume
//   - expand.go: ControllerExpandVolume; snapshot.go, list.go, capacity.go, health.go: the other RPCs
//   - details.go: what answers of CSI have no field for; accesstoken.go: warns before the token expires
//   - racks.go: which of several racks has a volume; topology.go: which racks a request allows
//   - volume.go: a disk as a CSI volume, and the contexts that the node reads
//   - validate.go: checks of requests; parameters.go, size.go: what their fields mean
//   - outcome.go: errors after which the caller must retry
package controller
