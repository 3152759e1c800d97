// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumelock"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumerecord"
)

// This file keeps the records of the volumes that this node may hold, see [volumerecord], and compares them with the
// disks of the guest.

// recordStage writes the volume's record before its first mount, and returns it. If the record cannot be written,
// nothing may be mounted: a later unstage could not prove that the disk is free.
func (n *Service) recordStage(volume *staging, readOnly bool) (volumerecord.Record, error) {
	dev, kind := volume.dev, volumerecord.Filesystem
	if volume.block {
		kind = volumerecord.Block
	}
	sequence, err := dev.Sequence()
	if err != nil {
		return volumerecord.Record{}, err
	}
	record := volumerecord.Record{
		Volume: volume.id, Serial: dev.Serial, Sequence: sequence, Number: dev.Number,
		Kind: kind, StagingPath: volume.path, ReadOnly: readOnly, Step: volumerecord.Staged,
	}
	return record, n.records.Write(record)
}

// recordStaged makes sure that a volume which is mounted already has a record of its disk, and returns it. A version of
// this plugin that wrote no records may have staged the volume.
func (n *Service) recordStaged(volume *staging, readOnly bool) (volumerecord.Record, error) {
	record, err := n.records.Read(volume.id)
	if err == nil && record != nil {
		if _, present, err := n.recordedDisk(*record); err != nil || present {
			return *record, err
		}
	}
	return n.recordStage(volume, readOnly)
}

// recordGrowth records whether the filesystem of a staged volume has the size of its disk. One that cannot grow stays
// staged with its old size: otherwise no workload could reach the data any more.
func (n *Service) recordGrowth(volume *staging, grown error) error {
	small := errors.Is(grown, mount.ErrGrow)
	if grown != nil && !small {
		return grown
	}
	if small {
		n.log.Warn("staged a filesystem that is smaller than its disk", "volume_id", volume.id.String(), "because", grown)
	}
	record, err := n.records.Read(volume.id)
	if err != nil || record == nil || record.Small == small {
		return err
	}
	record.Small = small
	return n.records.Write(*record)
}

// recordedDisk returns the disk of a record, or false if the disk has left the guest or was replaced.
func (n *Service) recordedDisk(r volumerecord.Record) (dev device.Device, present bool, err error) {
	dev, err = n.devices.BySerial(r.Serial, r.Number)
	if errors.Is(err, device.ErrNotFound) {
		return device.Device{}, false, nil
	}
	if err != nil {
		return dev, false, err
	}
	present, err = isRecorded(r, dev)
	return dev, present, err
}

// isRecorded reports whether a disk with the serial of a record is the one that was recorded.
func isRecorded(r volumerecord.Record, dev device.Device) (bool, error) {
	if r.Sequence == 0 {
		return dev.Number == r.Number, nil
	}
	sequence, err := dev.Sequence()
	return err == nil && sequence == r.Sequence, err
}

// expectedDisk describes the volume's disk among the guest's disks.
func (n *Service) expectedDisk(v nodeVolume) device.ExpectedDisk {
	want := device.ExpectedDisk{Serial: diskname.Serial(v.diskName), SizeBytes: v.sizeBytes, FirstBytes: v.firstBytes}
	if record, err := n.records.Read(v.id); err == nil && record != nil && record.Serial == want.Serial {
		_, want.Held, _ = n.recordedDisk(*record) // an error counts as a disk that is not held
	}
	return want
}

// checkRecords rejects a stage from another disk than the one that this node holds for the volume, and from a disk that
// it holds for another volume. A record that cannot be read is replaced: the checks of the disk itself decide.
func (n *Service) checkRecords(volume *staging) error {
	for _, record := range n.records.List() {
		if (record.Volume == volume.id) == (record.Serial == volume.dev.Serial) {
			continue
		}
		if _, present, err := n.recordedDisk(record); err != nil {
			return err
		} else if !present {
			continue
		}
		return rpc.FailedPrecondition(
			"volume %s cannot be staged from %s: this node holds it as volume %s: unstage that first, or correct the wrong %s",
			volume.id, volume.dev, record.Volume, rpc.KeyDiskName)
	}
	return nil
}

// exclusiveWait is how long a stage waits for an exclusive holder of the disk. Programs that look at new disks hold
// them for a moment.
const exclusiveWait = time.Second

// checkForeignUser rejects a disk in foreign use: one that is mounted in another mount namespace, or held by
// LVM, md or another program. The volume's own filesystem may hold the disk if copies of its mount have outlived an
// unstage, or one that was refused. Then checkForeignUser returns one of these copies.
func (n *Service) checkForeignUser(ctx context.Context, volume *staging) (own *mount.Copy, err error) {
	dev := volume.dev
	for end := time.Now().Add(exclusiveWait); ; time.Sleep(10 * time.Millisecond) {
		if err := volume.content().CheckUnused(); !errors.Is(err, device.ErrInUse) {
			return nil, err
		}
		if copies := mount.CopiesOf(dev.Number); len(copies) > 0 {
			if n.heldRecord(volume) != nil {
				return &copies[0], nil
			}
			return nil, volume.foreignUser(copies[0].String())
		}
		if holders := n.holders(volume.id, dev); len(holders) > 0 {
			return nil, volume.foreignUser(holders[0])
		}
		if time.Now().After(end) {
			if held := n.heldRecord(volume); held != nil {
				if err := n.checkNotFrozen(ctx, *held, dev); err != nil {
					return nil, err
				}
			}
			return nil, volume.foreignUser("another program")
		}
	}
}

// heldRecord returns the record of the volume if it says that this node holds the disk for it, otherwise nil.
func (n *Service) heldRecord(volume *staging) *volumerecord.Record {
	record, err := n.records.Read(volume.id)
	if err != nil || record == nil {
		return nil
	}
	if recorded, present, err := n.recordedDisk(*record); err != nil || !present || recorded.Number != volume.dev.Number {
		return nil
	}
	return record
}

func (v *staging) foreignUser(holder string) error {
	return rpc.Fault(fault.DiskInUse, "volume %s cannot be staged: its disk %s is held by %s: end that use first", v.id,
		v.dev, holder)
}

// lingers reports whether read-only copies of an unstaged volume's mount remain. If not, it removes the record, unless
// another RPC works on the volume.
func (n *Service) lingers(r volumerecord.Record) bool {
	dev, present, err := n.recordedDisk(r)
	if err == nil && present {
		err = dev.CheckUnusedSince(r.Sequence)
	}
	if err != nil {
		return true
	}
	_, release, err := volumelock.Acquire(context.Background(), n.stateDir, r.Volume, 0)
	if err != nil {
		return false
	}
	defer release()
	if now, err := n.records.Read(r.Volume); err == nil && now != nil && *now == r {
		if err := n.records.Remove(r.Volume); err != nil {
			n.log.Warn("cannot remove the record of a volume whose disk is free", "volume_id", r.Volume.String(), "error", err)
		}
	}
	return false
}

// stoppedByUnstage reports whether the filesystem of a volume may be read-only because an unstage has begun.
func (n *Service) stoppedByUnstage(id uuid.UUID) bool {
	record, err := n.records.Read(id)
	return err == nil && record != nil && record.Step == volumerecord.Leaving && !record.ReadOnly
}
