// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import (
	"errors"
	"slices"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumerecord"
)

// Requests to unstage and unpublish, and for stats and health, contain a volume ID and paths. The kernel's mount table
// knows no volume IDs. This file finds out from the records of stages which volume is mounted at a path. An
// orchestrator that sends the right paths does not need it. It protects other volumes from a request with a wrong path.

// isVolumeDisk reports whether a disk is a volume of this plugin: by its name, or because this node has a record of it.
func isVolumeDisk(records []volumerecord.Record, disk device.Disk) bool {
	return diskname.IsVolumeSerial(disk.Serial) ||
		slices.ContainsFunc(records, func(r volumerecord.Record) bool { return r.Serial == disk.Serial })
}

// Volumes counts this guest's disks that are volumes, those of them that are mounted, and the NVMe functions that are
// not ready. It also counts the unstaged volumes that have read-only copies of their mount in other mount namespaces.
// It reads /sys, the records and the mount table. It opens only the disks of unstaged volumes, and forgets those that
// are free now.
func (n *Service) Volumes() (counts metrics.NodeVolumes, err error) {
	disks, err := n.devices.Disks()
	if err != nil {
		return counts, err
	}
	table, err := mount.ReadTable()
	if err != nil {
		return counts, err
	}
	notReady, err := n.devices.FunctionsNotReadyNow()
	if err != nil {
		return counts, err
	}
	counts.FunctionsNotReady = len(notReady)
	counts.HeadersMended = int(n.mendedHeaders.Load())
	records := n.records.List()
	for _, disk := range disks {
		if !isVolumeDisk(records, disk) {
			continue
		}
		counts.Attached++
		if len(table.OfDevice(disk.Number)) > 0 {
			counts.Mounted++
		}
	}
	for _, record := range records {
		if record.Small && record.Step != volumerecord.Lingering {
			counts.Small++
		}
		if record.Step == volumerecord.Lingering && n.lingers(record) {
			counts.Lingering++
		}
	}
	return counts, nil
}

// ownership says whether a mount belongs to a volume, as far as the plugin can know.
type ownership int

const (
	unknownVolume ownership = iota
	thisVolume
	anotherVolume
)

// ownershipOf reports whether a mount belongs to the volume: whether its disk is the one in the volume's record. A disk
// in the record of another volume belongs to that. A disk in no record does not belong to this volume if this volume's
// record names another disk of this guest. It also reports whether the disk has left the guest.
func (n *Service) ownershipOf(
	records []volumerecord.Record, entry mount.Entry, id uuid.UUID,
) (of ownership, gone bool) {
	number, ok := entry.Device()
	if !ok {
		return unknownVolume, false
	}
	dev, err := n.devices.ByNumber(number)
	gone = errors.Is(err, device.ErrNotFound) || entry.NodeRemoved()
	if err != nil && !gone {
		return unknownVolume, false
	}
	// A record may be old: the disk of a deleted volume had the same name, and so the same serial, or the same number.
	// So a serial alone says nothing about another volume, and this volume's own record comes first.
	ownedBy := func(r volumerecord.Record) bool {
		if gone { // the number alone identifies a disk that left the guest while mounted; another disk may have it now
			return r.Number == number && r.Serial != dev.Serial
		}
		recorded := r.Serial == dev.Serial
		if recorded {
			recorded, err = isRecorded(r, dev)
		}
		return recorded && err == nil
	}
	own := slices.IndexFunc(records, func(r volumerecord.Record) bool { return r.Volume == id })
	switch {
	case own >= 0 && ownedBy(records[own]):
		return thisVolume, gone
	case slices.ContainsFunc(records, ownedBy):
		return anotherVolume, gone
	case gone:
		return unknownVolume, true // perhaps this volume's disk, before it came back with another number
	case own < 0:
		return unknownVolume, false
	case records[own].Serial == dev.Serial:
		return thisVolume, false
	}
	if _, err := n.devices.BySerial(records[own].Serial, records[own].Number); err != nil {
		return unknownVolume, false
	}
	return anotherVolume, false
}

// diskRemoved reports whether the disk of a mount has left the guest.
func (n *Service) diskRemoved(entry mount.Entry) bool {
	number, ok := entry.Device()
	if !ok {
		return false
	}
	_, err := n.devices.ByNumber(number)
	return errors.Is(err, device.ErrNotFound) || entry.NodeRemoved()
}
