// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package restart attaches and detaches disks on racks that do so only while an instance is stopped: it collects what is
// wanted, takes each instance down once, changes all its disks, and brings it up again. docs/explanation/racks-without-hotplug.md tells
// operators what happens when.
//
// # Wishes
//
// [Engine.Publish] attaches a disk where the rack lets it; where it does not, because the instance runs, the wish is noted in
// memory and the answer is an [ErrPlanned]. The orchestrator's repetition finds the disk attached. A wish ends with
// [Engine.Unpublish], or when nobody has repeated it for a while. Wishes need not be durable: whoever wants the volume
// repeats them.
//
// # Records
//
// What must outlive a crash is kept by the rack, in records whose names are unique ([rack.Record]); to create one is the only
// atomic thing that there is.
//
//   - A restart record says that an instance is being restarted, by whom, and for which disks. Its name has a slot, of which
//     there are as many as instances may be down at once, and an epoch. Nothing is asked of a guest or of the rack before the
//     record says "asked". Its holder keeps it fresh; of several for one slot, the one with the highest epoch counts. When a
//     holder has gone silent, another process creates the next epoch, and then only brings the instance back: it never
//     stops one. A holder lists the records before each step, and stops working when it was outbid. One that is told to end, or
//     runs on the very instance, writes that it hands the restart over and does nothing more about it: then nobody waits.
//   - A lazy record says that a volume has been unpublished and its disk is still attached. The disk is detached when its
//     instance is restarted for whatever reason. A volume that returns to the same instance costs no restart.
//
// A process that publishes a volume which was lazy first deletes the lazy record and then looks for a restart record; one that
// restarts an instance first creates the restart record and then looks for lazy ones. So a disk that was published again is
// never detached.
//
// # Time
//
// No two clocks are compared where safety depends on it; the cool-down counts from when the rack says that an instance started,
// and a node plugin refuses what its own clock takes for planned hours ago (core/shutdown). A holder is silent when its record has
// had the same text for the length of the lease, by the clock of whoever watches. A holder does within three quarters of a lease
// after it listed the records what it then decided on; for so long does whoever outbids it wait before it believes what the
// record says.
package restart
