// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package detach detaches the disks of unpublished volumes later than the orchestrator asks for it. Nomad sends
// ControllerUnpublishVolume while the filesystem may still be mounted, asks only once, and sends old requests again
// after the volume was published anew. docs/explanation/nomad.md tells operators what happens when.
//
// # Records
//
// A deferred detach is a record on the rack ([record.Deferral]), so any controller can carry it out after the one that
// was asked has ended. There are two kinds of records, each with its cluster and the ID of its volume in its name:
//
//   - The deferred detach names the instance that must lose the disk. It has a state: waiting for the end
//     of the grace period, waiting for an event ("untimed"), or over.
//   - The detaching record ([record.Hold]) says that a process is detaching the disk now, or deletes a deferred detach
//     that is over.
//
// Creating a record is the only atomic operation of a rack. To detach a disk, a process first creates the detaching
// record and then reads the deferred detach again. To publish a volume, a process first ends the deferred detach and
// then looks for a detaching record. So one of the two always sees the other and gives way: a disk that was published
// again is never detached. The same holds for a deferred detach that is over: to delete it, a process creates the
// detaching record and reads it again; to use it again, a process updates it and then looks for a detaching record.
//
// # Late repetitions
//
// A deferred detach that is over stays on the rack for [repetitionTime], and as long again if the volume comes back.
// The same holds for a disk that was detached at once, because the instance had no guest or a person asked for it. If
// the volume is unpublished from that instance meanwhile, this may be an old request again, and it may be in use.
// Such a deferred detach has no time of its own: the disk is detached when another node publishes the volume, when the
// instance is stopped or gone, or when a person asks for it. The record remembers the instances that had the volume
// before, too: it may come back to one of them.
//
// # Claims
//
// A request may also be for another workload than the one that uses the disk. So if there is an orchestrator to ask, it
// is asked which volumes workloads on the instance have claimed, before any deferred detach is carried out, and before
// one without a time gets its time. A disk with a claim stays, and so does each disk without a certain answer. The
// question comes after the record was read. A workload that claims the volume later publishes it before it uses the
// volume, and that changes the record.
//
// # Time
//
// Safety never depends on comparing two clocks. Each process counts the grace period, and the life of a detaching
// record, from when it has first seen the record's present text. A record counts its changes, so an earlier text does
// not come again.
package detach
