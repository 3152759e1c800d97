// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack

import "errors"

// ErrDiskBusy says that a disk is written to without a pause, so that no state of it could be copied.
var ErrDiskBusy = errors.New("the disk is written to without a pause")

// Guests is what a [Rack] drives when its instances have machines inside them: it keeps the bytes of the disks and shows
// the disks of a running instance to that instance's guest. The package test/simrack/guest implements it with loop
// devices; a Rack without Guests keeps no bytes at all.
//
// The rack calls it in the order in which things happen to one disk and to one instance, never twice at a time for the
// same instance or the same disk. An error means that the simulator itself is at fault: the rack answers 500 and records
// it under guest errors, it is never turned into behaviour that a real rack would show.
type Guests interface {
	// CreateDisk makes the backing store of a disk: sizeBytes of zeros.
	CreateDisk(diskID string, sizeBytes int64) error
	// RestoreDisk makes the backing store of a disk: what the snapshot holds, and zeros up to sizeBytes.
	RestoreDisk(diskID string, sizeBytes int64, snapshotID string) error
	// DeleteDisk removes the backing store. The disk is on no guest.
	DeleteDisk(diskID string) error
	// CreateSnapshot copies what the disk holds at one moment; of a guest's caches nothing. [ErrDiskBusy] is no fault of
	// the simulator.
	CreateSnapshot(snapshotID, diskID string) error
	// DeleteSnapshot removes the copy.
	DeleteSnapshot(snapshotID string) error

	// CreateInstance makes the guest's folder and its metadata.env, powered off. Unlike a disk's store a guest does not
	// outlive the process: a rack that goes on with its records makes the guests of all its instances anew.
	CreateInstance(instanceID, name string) error
	// DeleteInstance removes the guest's folder. The guest is powered off.
	DeleteInstance(instanceID string) error

	// PowerOn starts the guest with these disks in its slots: what docs/reference/rack.md §9 describes for a boot. It returns when
	// device nodes and sysfs stand. A guest may have processes; these are started last, and ended is called once when they
	// have ended: because the guest powers itself off or resets itself, or because of PowerOff. Disks are as they were
	// until PowerOff is called. The call of ended may take as long as it likes.
	PowerOn(instanceID string, disks []GuestDisk, ended func(reset bool)) error
	// Halt asks the processes of a running guest to power it off in order, as its power button does, and waits for nothing.
	// False says that there are none.
	Halt(instanceID string) (asked bool, err error)
	// PowerOff stops the guest. Orderly means that the guest halts by itself: its filesystems are synced and unmounted
	// first. Otherwise it is a power cut: nothing is flushed, mounted filesystems are shut down and answer EIO. No process
	// of the guest is left when it returns, and nothing that only they held.
	PowerOff(instanceID string, orderly bool) error
	// Plug shows one more disk to a running guest.
	Plug(instanceID string, disk GuestDisk) error
	// Unplug takes a disk from a running guest by surprise: a filesystem on it answers EIO afterwards, and nothing
	// unflushed reaches the backing store.
	Unplug(instanceID, diskID string) error

	// Dir is the guest's folder, which holds dev, sys and metadata.env.
	Dir(instanceID string) string
	// Device is the block device's name in the guest ("nvme1n1"), empty when the guest shows none for this disk.
	Device(instanceID, diskID string) string
	// Leftovers counts what this simulator still holds outside its own memory, without what belongs to these boot disks.
	Leftovers(bootDisks map[string]bool) (GuestLeftovers, error)
}

// GuestDisk is a disk as the virtual machine is told of it.
type GuestDisk struct {
	ID   string
	Name string
	// Slot is 0 to 11; it decides the PCI address.
	Slot      int
	SizeBytes int64
	BlockSize int
	ReadOnly  bool
	// Boot says that the instance boots from it.
	Boot bool
}

// GuestLeftovers is what a simulated rack has outside its own memory.
type GuestLeftovers struct {
	// Loops are loop devices whose backing file is a disk's store, deleted ones included.
	Loops int
	// Mounts are mounts in this mount namespace of such loop devices, or below a guest's folder.
	Mounts int
	// Files are backing stores of disks, and copies that are snapshots.
	Files int
}
