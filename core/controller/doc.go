// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package controller is the CSI Controller service. It talks to racks and never touches a device.
//
//   - controller.go: the service and DeleteVolume
//   - create.go: CreateVolume, blank or from a snapshot; clone.go: from another volume; sweep.go: temporary snapshots that
//     a crash left behind
//   - publish.go: attaching and detaching; planned.go: both, where the instance must be restarted for it
//   - snapshot.go, list.go, capacity.go, health.go: the other RPCs
//   - racks.go: which of several racks has a volume; topology.go: which racks a request allows
//   - validate.go: checks of requests; parameters.go, size.go: what their fields mean
//   - remembered.go: refusals that are answered from memory, and the detach grace
//   - capabilities.go: which RPCs there are, and why the others are missing
package controller
