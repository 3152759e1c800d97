// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import "errors"

// ErrDiskBusy means that a disk is written to without a pause, so that no consistent state can be copied.
var ErrDiskBusy = errors.New("the disk is written to without a pause")

// Guests simulates the machines inside the instances of a [Rack]. It keeps the contents of the disks, and shows the
// disks of a running instance to the instance's guest. Package test/simrack/guest implements it with loop devices. A
// Rack without Guests keeps no contents.
//
// The rack calls it in the order of the events of one disk and one instance, never concurrently for the same instance
// or the same disk. An error is a failure of the simulator itself: the rack answers 500 and records it under guest
// errors. The error never looks like the behaviour of a real rack.
type Guests interface {
	// CreateDisk creates the backing store of a disk: sizeBytes of zeros.
	CreateDisk(diskID string, sizeBytes int64) error
	// RestoreDisk creates the backing store of a disk: the contents of the snapshot, then zeros up to sizeBytes.
	RestoreDisk(diskID string, sizeBytes int64, snapshotID string) error
	// DeleteDisk removes the backing store. The disk is in no guest.
	DeleteDisk(diskID string) error
	// CreateSnapshot copies the contents of the disk at one moment, without the caches of a guest. [ErrDiskBusy] is not a
	// failure of the simulator.
	CreateSnapshot(snapshotID, diskID string) error
	// DeleteSnapshot removes the copy.
	DeleteSnapshot(snapshotID string) error

	// CreateInstance creates the guest's folder and its metadata.env, powered off. Unlike a disk's store, a guest does not
	// outlive the process. A rack that continues with its records creates the guests of all its instances again.
	CreateInstance(instanceID, name string) error
	// DeleteInstance removes the guest's folder. The guest is powered off.
	DeleteInstance(instanceID string) error

	// PowerOn starts the guest with these disks in its slots, as docs/reference/rack.md §9 describes for a boot. It
	// returns when device nodes and sysfs exist. A guest may have processes; they are started last. When they have ended,
	// ended is called once: the guest powered itself off or reset itself, or PowerOff was called. The disks stay as they
	// are until PowerOff is called. The call of ended may block.
	PowerOn(instanceID string, disks []GuestDisk, ended func(reset bool)) error
	// Halt asks the processes of a running guest to power it off in order, as its power button does. It does not wait.
	// False means that the guest has no processes.
	Halt(instanceID string) (asked bool, err error)
	// PowerOff stops the guest. Orderly means that the guest halts by itself: it first syncs and unmounts its filesystems.
	// Otherwise PowerOff is a power cut: nothing is flushed, and mounted filesystems are shut down and answer EIO. When it
	// returns, no process of the guest is left, and no mount that only they held.
	PowerOff(instanceID string, orderly bool) error
	// Plug adds a disk to a running guest.
	Plug(instanceID string, disk GuestDisk) error
	// Unplug removes a disk from a running guest without warning. A filesystem on it answers EIO afterwards, and nothing
	// unflushed reaches the backing store.
	Unplug(instanceID, diskID string) error

	// Dir is the guest's folder, with dev, sys and metadata.env.
	Dir(instanceID string) string
	// Device is the name of the block device in the guest ("nvme1n1"); empty if the guest shows none for the disk.
	Device(instanceID, diskID string) string
	// Leftovers counts what the simulator still holds outside its own memory, except for these boot disks.
	Leftovers(bootDisks map[string]bool) (GuestLeftovers, error)
}

// GuestDisk is a disk of a virtual machine.
type GuestDisk struct {
	ID   string
	Name string
	// Slot is 0 to 11; it determines the PCI address.
	Slot      int
	SizeBytes int64
	BlockSize int
	ReadOnly  bool
	// Boot means that the instance boots from the disk.
	Boot bool
}

// GuestLeftovers counts what the simulator holds outside its own memory.
type GuestLeftovers struct {
	// Loops are loop devices with a disk's store as backing file, including deleted stores.
	Loops int
	// Mounts are mounts of such loop devices, or below a guest's folder, in this mount namespace.
	Mounts int
	// Files are backing stores of disks, and the copies of snapshots.
	Files int
}
