// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package restart attaches and detaches disks on racks that do so only while an instance is stopped. It collects the
// changes wanted for an instance, stops the instance once, changes all its disks, and starts it again.
// docs/explanation/racks-without-hotplug.md tells operators what happens when.
//
// # Attach requests
//
// [Engine.Publish] attaches a disk if the rack allows it. If the rack refuses because the instance runs, the engine
// keeps an attach request in memory and returns [ErrPlanned]. When the orchestrator repeats its call after the restart,
// the disk is attached. A request ends with [Engine.Unpublish], or when it was not repeated for a while. Requests need
// not be durable: an orchestrator that wants the volume repeats its call.
//
// # Records
//
// State that must outlive a crash is kept on the rack, in records with unique names ([record.Restart]). Creating a
// record is the only atomic operation.
//
//   - A restart record says which instance is being restarted, by which process, and for which disks. Its name holds a
//     slot and an epoch. There are as many slots as instances may be down at once. Before the record says "mayStop",
//     nothing is requested from the guest or from the rack. The holder renews the record. Of several records of one
//     restart, the highest epoch wins. When a holder's lease expires, another process creates the next epoch. That
//     process only brings the instance back and never stops one. A holder lists the records before each step, and stops
//     working on a restart that was taken over. A holder that is told to end, or that runs on the instance itself,
//     marks the record as handed over and does nothing more about it. Then no process has to wait for the lease.
//     A restart whose instance still runs gives its slot away when its node plugin cannot be reached, or when its guest
//     does not halt: it is stuck. The record stays, and the instance is started again if its guest halts later. So a
//     lost node does not block the restarts of others. As many restarts as instances may be down can be stuck in that
//     way; further ones keep their slots. So at most twice that number of instances is down.
//   - A deferred detach (core/detach) says that a volume was unpublished and its disk is still attached. The disk is
//     detached with the next restart of its instance, whatever causes that restart. A volume that returns to the same
//     instance needs no restart.
//
// To publish a volume with a deferred detach, a process first ends that record and then looks for a restart record.
// To restart an instance, a process first creates the restart record and then looks for deferred detaches. So a disk
// that was published again is never detached.
//
// # Starts
//
// An instance that was stopped for a restart is started, whatever else fails: its start depends on nothing but the
// rack's answer to it. Each stage of a stopped instance ends after a time, and a look, a list, a renewal or a record
// that fails or vanishes does not keep the instance down. A record that was deleted by hand is created again with the
// next epoch, while no other process can have taken the restart over.
//
// # Time
//
// Safety never depends on comparing two clocks. The cool-down counts from the time at which the rack says the instance
// started. A node plugin rejects a request that is hours old by its own clock, or older than its guest's boot
// (core/shutdown). A lease expires when the text of a record did not change for the length of the lease, by the
// observer's clock. A holder carries out a decision within three quarters of a lease after it listed the records. A
// process that takes a restart over therefore waits that long before it trusts the record.
package restart
