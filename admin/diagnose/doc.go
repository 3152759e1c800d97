// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package diagnose is the logic of the commands that look at a rack, a node and an orchestrator for an operator. It
// returns data; the commands print it. It reads each list once, whatever the number of volumes. Only [Cleaner] changes
// anything.
//
//   - doctor.go, rack.go, node.go, restarts.go, classes.go: examinations
//   - explain.go: what is known of one volume; symptoms.go: which faults of core/fault these facts show; said.go: which
//     words of Kubernetes and its sidecars show a fault
//   - guest.go: device, filesystem and mounts of the volume, on its own instance
//   - orphans.go: what a rack has and the orchestrator does not know, and the other way round
package diagnose
