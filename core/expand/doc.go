// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package expand makes volumes larger on a rack that cannot change the size of a disk. The volume is attached nowhere.
// A snapshot of its disk is made, the disk is deleted, a larger disk of the same name is made from the snapshot, and
// the snapshot is deleted. The volume keeps its ID, which is the UUID of its first disk.
//
// # Records
//
// There are two kinds of records on the rack ([record.Record]):
//
//   - The intent says that an expansion is under way. It names the attempt, a UUID. The snapshot's name follows from
//     the attempt. The intent's own name has the hash of the disk's name, which is all that a create knows of a volume.
//   - The decision, csi-grown-<disk ID>, is keyed by the disk that would be replaced. It says of one attempt that it is
//     committed or taken back ([record.Replacement]).
//
// The decision about the volume's first disk has the volume's ID in its name. It stays as long as the volume, because
// it leads from the volume ID to the disk's name: [rack.Client.Disk] reads it if the volume ID answers 404. All other
// records are deleted at the end.
//
// # The steps of an expansion
//
//  1. Create the intent. Names are unique, so there is one attempt at a time. A second process continues the same
//     attempt.
//  2. Wait until no look from before the intent counts any more ([Look]). Who continues an attempt that is not decided
//     waits, too. Then look at the disk. If it is attached, take the attempt back.
//  3. Make the snapshot. It is ready and as large as the disk, or the attempt is taken back.
//  4. Look at the quota. If the new disk does not fit beside the snapshot, take the attempt back.
//  5. Create the decision "committed".
//  6. Read the intent again. If it is gone, the attempt was taken back before step 5: give up.
//  7. Delete the old disk. The rack rejects this while the disk is attached. Without a clear success, stop here.
//  8. Make the new disk. Its description carries the volume's ID. If there is no room, make it at the old size.
//  9. Delete the snapshot, then the intent, then the decision unless it is about the volume's first disk.
//
// # Taking back
//
// Who takes an attempt back first creates the decision "not committed". The create is atomic, so an attempt is either
// committed or taken back, and all processes read the same. Then the snapshot, the intent and the decision are deleted
// in this order. A late process can therefore create the decision "committed" once more. Step 6 finds such a decision:
// the intent of a taken-back attempt is gone before its decision is, and an attempt's UUID is never used again.
//
// # Publishing
//
// A publish asks for the intent beside the attach, and that look counts for less time than an expansion waits between
// its intent and its look at the disk. So one of them sees the other. A publish that finds an attempt without a
// decision takes it back. If the attempt is committed, the publish detaches the disk, finishes the expansion and fails,
// and its repetition attaches the new disk. Nothing was written to the old disk then: a publish that gave way was never
// answered with OK.
//
// # Ended processes
//
// Each step can be repeated by any process. After the commit the steps only go forward. Any controller does so at the
// next RPC that needs the volume's disk ([Expander.Finish]), and without one some time after it has started
// ([Expander.Settle]). Ages play no part in what is safe: what a record names is never deleted by the sweep of old
// snapshots.
//
// # Deleting the volume
//
// DeleteVolume of a volume that never grew reads no record. So an expansion cannot tell why its old disk is gone. Two
// rules follow, because a deleted volume must not come back, and the data of another one must not be lost:
//
//   - If the old disk is gone and this call has not deleted it, the new disk is made only for an RPC that no
//     orchestrator sends for a deleted volume.
//   - Without a disk of the volume, only DeleteVolume deletes the snapshot of a committed attempt. A process remembers
//     the volumes that it has deleted, and deletes what appears of them later.
//
// DeleteVolume asks for the intent only if the disk is not the first one, and reads all records only if there is an
// intent, or if this process knows of an expansion.
//
// # The calls of an expansion
//
// An expansion makes 11 calls. One finds the volume. Five do the work: the snapshot, the deletion of the old disk, the
// new disk, the deletion of the snapshot, and one look at the disk. The others each prevent an order of requests that
// loses data or leaves a volume unusable:
//
//   - Two create and delete the intent. Without it, another process could not continue.
//   - One creates the decision.
//   - One reads the intent again. Without it, a late process would delete a published disk.
//   - One asks for the quota. Without it, a full quota would be found only after the old disk is gone.
//
// # What remains
//
// Each of these gaps needs two controllers, or a user, at the same moment:
//
//   - A controller deletes a volume when another one has committed the volume's first expansion and not deleted the
//     disk yet. The snapshot and two records then stay until the next sweep of the controller that deleted the volume.
//     If that one ends before, they stay for good, as quota. No volume's data are touched, and the volume does not come
//     back. DeleteVolume for the same ID deletes them.
//   - Another controller creates the volume again while it has no disk, and ends before it deletes the disk that it
//     made, or never gets the answer. The expansion then stops with an error that names the other disk, and the
//     snapshot keeps the data.
//   - A user creates the volume again while it has no disk, and the request does not allow the volume's rack. The rack
//     that it allows then makes a second, blank disk, and the expansion goes on.
//   - A controller of an older version publishes the volume and writes to it between the snapshot and the deletion.
//   - A host without an orchestrator mounts a volume at its boot without a controller (volume mount --wait), and the
//     disk there is the old one: a controller ended after the commit, and the disk was attached to this host by hand or
//     by a restart since.
//   - A user attaches the disk by hand and writes to it between the snapshot and the deletion.
package expand
