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

// Unstage, unpublish, stats and health are asked with a volume ID and paths, and the kernel's mount table knows no volume
// IDs. What can be known of which volume a mount shows stands in this file. None of it is needed for an orchestrator that
// asks for the right paths; it keeps one that does not from touching another volume.

// stagedDisk is a disk that this process has staged.
type stagedDisk struct {
	volume uuid.UUID
	// number is the disk's device number then. A disk that has left the guest under its mount is known by nothing else.
	number device.Number
}

// stagedDisks remembers, by serial, which volumes' disks this process has staged. It is lost when the process ends.
type stagedDisks struct {
	mu       sync.Mutex
	bySerial map[string]stagedDisk
}

// add remembers a disk that is staged, and forgets those that are neither among the guest's disks nor mounted any more:
// their device numbers are given to others.
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

// volumeOf tells which volume was staged from a disk, by its serial or, when it has left the guest and has none, by its
// device number.
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

// diskOf tells which disk a volume was staged from.
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

// isVolumeDisk tells disks that are volumes of this plugin from others: by their name, or because this process has staged
// them. A user's own disk that was staged before the plugin restarted counts as another, so that rather too few volumes are
// sent to this node than too many.
func (n *Service) isVolumeDisk(disk device.Disk) bool {
	return n.staged.has(disk.Serial) || diskname.IsVolumeSerial(disk.Serial)
}

// Volumes counts the disks of this guest that are volumes, and those of them that are mounted. It reads /sys and the table
// of mounts, and touches no disk.
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

// whose is what is known about whether a mount shows a volume.
type ownership int

const (
	unknownVolume ownership = iota
	thisVolume
	anotherVolume
)

// ownershipOf tells whether a mount shows the volume. Witnesses, in this order:
//
//   - The file to which a raw block volume's node is bound at its staging path has the volume's ID for a name.
//   - What this process has staged.
//   - The filesystem's UUID: the one made for this volume is proof enough; when it is on another disk that is mounted here,
//     this mount is another volume's. Any other UUID proves nothing, since clones carry that of their source and users
//     change it.
func (n *Service) ownershipOf(ctx context.Context, table mount.Table, entry mount.Entry, id uuid.UUID) ownership {
	number, ok := entry.Device()
	if !ok {
		return unknownVolume
	}
	if entry.Block() {
		if ids := blockVolumeIDs(table, entry); len(ids) > 0 {
			return verdict(slices.Contains(ids, id))
		}
	}
	dev, err := n.devices.ByNumber(number)
	if gone := errors.Is(err, device.ErrNotFound) || entry.NodeRemoved(); gone {
		dev = device.Device{}
	} else if err != nil {
		return unknownVolume
	}
	if staged, ok := n.staged.volumeOf(dev.Serial, number); ok {
		return verdict(staged == id)
	}
	if dev.Path == "" {
		return unknownVolume // which may be this volume's disk before it came back under another number
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

// hasVolumeFilesystem reports whether the disk of a mounted filesystem carries the UUID that is made for the volume.
func (n *Service) hasVolumeFilesystem(ctx context.Context, entry mount.Entry, id uuid.UUID) bool {
	dev, err := n.devices.ByNumber(entry.Number)
	return err == nil && n.probes.run(ctx, dev, entry.Path).filesystem == mount.FilesystemUUID(id).String()
}

func verdict(same bool) ownership {
	if same {
		return thisVolume
	}
	return anotherVolume
}

// blockVolumeIDs are the names of the files to which the same device node is bound that are volume IDs, other than the entry's
// own where that is the only one: orchestrators may name targets so too.
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

// filesystems are the mounts of filesystems that can be volumes', one for each disk.
func filesystems(table mount.Table) (entries []mount.Entry) {
	for _, entry := range table {
		known := slices.ContainsFunc(entries, func(other mount.Entry) bool { return other.Number == entry.Number })
		if !known && !entry.Block() && isVolume(entry) {
			entries = append(entries, entry)
		}
	}
	return entries
}

// knownMounts are the mounts of a volume that are surely its own: of the disk from which this process has staged it, and
// of the device node that is bound to a file with its name.
func (n *Service) knownMounts(table mount.Table, id uuid.UUID) (mounts []mount.Entry) {
	if serial, number, ok := n.staged.diskOf(id); ok {
		mounts = table.OfDevice(number)
		if disks, err := n.devices.Disks(); err == nil {
			if i := slices.IndexFunc(
				disks,
				func(d device.Disk) bool { return d.Serial == serial },
			); i >= 0 &&
				disks[i].Number != number {
				mounts = append(mounts, table.OfDevice(disks[i].Number)...) // it came back under another one
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
