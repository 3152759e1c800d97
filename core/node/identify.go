// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"sync"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// Requests to unstage and unpublish, and for stats and health, contain a volume ID and paths. The kernel's mount table
// knows no volume IDs. This file finds out which volume is mounted at a path. An orchestrator that sends the right
// paths does not need it. It protects other volumes from a request with a wrong path.

// stagedDisk is a disk that this process has staged.
type stagedDisk struct {
	volume uuid.UUID
	// number is the disk's device number at that time. Nothing else identifies a disk that left the guest while
	// mounted.
	number device.Number
}

// stagedDisks remembers the disks that this process has staged, by serial. It ends with the process.
type stagedDisks struct {
	mu       sync.Mutex
	bySerial map[string]stagedDisk
}

// add remembers a staged disk. It forgets disks that have left the guest and are not mounted: other disks get their
// device numbers.
func (s *stagedDisks) add(id uuid.UUID, dev device.Device, disks []device.Disk, table mount.Table) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bySerial == nil {
		s.bySerial = map[string]stagedDisk{}
	}
	for serial, staged := range s.bySerial {
		present := slices.ContainsFunc(disks, func(d device.Disk) bool { return d.Serial == serial })
		if staged.number == dev.Number || !present && len(table.OfDevice(staged.number)) == 0 {
			delete(s.bySerial, serial)
		}
	}
	s.bySerial[dev.Serial] = stagedDisk{volume: id, number: dev.Number}
}

func (s *stagedDisks) has(serial string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.bySerial[serial]
	return ok
}

// volumeOf returns the volume that was staged from a disk. It finds the disk by its serial or, if the disk has left the
// guest and the serial is empty, by its device number.
func (s *stagedDisks) volumeOf(serial string, number device.Number) (id uuid.UUID, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if serial != "" {
		staged, ok := s.bySerial[serial]
		return staged.volume, ok
	}
	for _, staged := range s.bySerial {
		if staged.number == number {
			return staged.volume, true
		}
	}
	return uuid.UUID{}, false
}

// diskOf returns the disk from which a volume was staged.
func (s *stagedDisks) diskOf(id uuid.UUID) (serial string, number device.Number, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for serial, staged := range s.bySerial {
		if staged.volume == id {
			return serial, staged.number, true
		}
	}
	return "", device.Number{}, false
}

// isVolumeDisk reports whether a disk is a volume of this plugin: by its name, or because this process has staged it. A
// user's own disk that was staged before the plugin restarted does not count. Then the node gets too few volumes, not
// too many.
func (n *Service) isVolumeDisk(disk device.Disk) bool {
	return n.staged.has(disk.Serial) || diskname.IsVolumeSerial(disk.Serial)
}

// Volumes counts this guest's disks that are volumes, and how many of them are mounted. It reads /sys and the mount
// table, but no disk.
func (n *Service) Volumes() (attached, mounted int, err error) {
	disks, err := n.devices.Disks()
	if err != nil {
		return 0, 0, err
	}
	table, err := mount.ReadTable()
	if err != nil {
		return 0, 0, err
	}
	for _, disk := range disks {
		if !n.isVolumeDisk(disk) {
			continue
		}
		attached++
		if len(table.OfDevice(disk.Number)) > 0 {
			mounted++
		}
	}
	return attached, mounted, nil
}

// ownership says whether a mount belongs to a volume, as far as the plugin can know.
type ownership int

const (
	unknownVolume ownership = iota
	thisVolume
	anotherVolume
)

// ownershipOf reports whether a mount belongs to the volume. Evidence, in this order:
//
//   - The name of the file to which a raw block volume's device node is bound at the staging path is the volume's ID.
//   - This process has staged the disk.
//   - The filesystem has the UUID that follows from the volume's ID. If a mount of another disk has this UUID, this
//     mount belongs to another volume. Any other UUID proves nothing: clones have their source's UUID, and users change
//     UUIDs.
func (n *Service) ownershipOf(ctx context.Context, table mount.Table, entry mount.Entry, id uuid.UUID) ownership {
	number, ok := entry.Device()
	if !ok {
		return unknownVolume
	}
	if entry.Block() {
		if ids := blockVolumeIDs(table, entry); len(ids) > 0 {
			return ownershipIf(slices.Contains(ids, id))
		}
	}
	dev, err := n.devices.ByNumber(number)
	if gone := errors.Is(err, device.ErrNotFound) || entry.NodeRemoved(); gone {
		dev = device.Device{}
	} else if err != nil {
		return unknownVolume
	}
	if staged, ok := n.staged.volumeOf(dev.Serial, number); ok {
		return ownershipIf(staged == id)
	}
	if dev.Path == "" {
		return unknownVolume // perhaps this volume's disk, before it came back with another number
	}
	if _, _, elsewhere := n.staged.diskOf(id); elsewhere {
		return anotherVolume
	}
	if entry.Block() {
		return unknownVolume
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	if n.hasVolumeFilesystem(ctx, entry, id) {
		return thisVolume
	}
	for _, other := range filesystems(table) {
		if other.Number != number && n.hasVolumeFilesystem(ctx, other, id) {
			return anotherVolume
		}
	}
	return unknownVolume
}

// hasVolumeFilesystem reports whether a mounted filesystem has the UUID that follows from the volume's ID.
func (n *Service) hasVolumeFilesystem(ctx context.Context, entry mount.Entry, id uuid.UUID) bool {
	dev, err := n.devices.ByNumber(entry.Number)
	return err == nil && n.probes.run(ctx, dev, entry.Path).filesystem == mount.FilesystemUUID(id).String()
}

// ownershipIf returns thisVolume or anotherVolume.
func ownershipIf(this bool) ownership {
	if this {
		return thisVolume
	}
	return anotherVolume
}

// blockVolumeIDs returns the volume IDs among the names of files to which the device node is bound. If the entry's own
// file is the only one, it does not count: an orchestrator may give such a name to a target too.
func blockVolumeIDs(table mount.Table, entry mount.Entry) (ids []uuid.UUID) {
	number, _ := entry.Device()
	alone := true
	for _, other := range table.OfDevice(number) {
		if !other.Block() || other.NodeRemoved() != entry.NodeRemoved() {
			continue
		}
		if id, err := uuid.Parse(filepath.Base(other.Path)); err == nil {
			ids = append(ids, id)
			alone = alone && other.Path == entry.Path
		}
	}
	if alone && len(ids) > 0 {
		return nil
	}
	return ids
}

// filesystems returns the mounts of filesystems that can be volumes, one for each disk.
func filesystems(table mount.Table) (entries []mount.Entry) {
	for _, entry := range table {
		known := slices.ContainsFunc(entries, func(other mount.Entry) bool { return other.Number == entry.Number })
		if !known && !entry.Block() && isVolume(entry) {
			entries = append(entries, entry)
		}
	}
	return entries
}

// knownMounts returns the mounts that certainly belong to a volume: mounts of the disk from which this process has
// staged the volume, and a device node that is bound to a file with the volume's ID.
func (n *Service) knownMounts(table mount.Table, id uuid.UUID) (mounts []mount.Entry) {
	if serial, number, ok := n.staged.diskOf(id); ok {
		mounts = table.OfDevice(number)
		if disks, err := n.devices.Disks(); err == nil {
			if i := slices.IndexFunc(
				disks,
				func(d device.Disk) bool { return d.Serial == serial },
			); i >= 0 &&
				disks[i].Number != number {
				mounts = append(mounts, table.OfDevice(disks[i].Number)...) // the disk came back with another number
			}
		}
	}
	for _, entry := range table {
		if entry.Block() && filepath.Base(entry.Path) == id.String() && !n.diskRemoved(entry) {
			mounts = append(mounts, entry)
		}
	}
	return slices.DeleteFunc(mounts, func(entry mount.Entry) bool { return !isVolume(entry) })
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
