// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package expand

import (
	"context"
	"errors"
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// forward takes the steps after a decision that another call made, and returns the new disk. A decision that is not
// committed, or that came after its attempt was taken back, is cleared. It is safe to repeat, for any process.
//
// needed says that an RPC needs the volume, so that the volume was not deleted. Only then is the new disk made if the
// old one is gone already.
func (e *Expander) forward(ctx context.Context, d record.Replacement, needed bool) (rack.Disk, error) {
	i, found, err := e.intent(ctx, d.DiskName)
	switch {
	case err != nil:
		return rack.Disk{}, err
	case !d.Committed && (!found || i.Attempt != d.Attempt):
		return rack.Disk{}, errors.Join(e.rack.DeleteRecord(ctx, d.Stored.ID), ErrTakenBack)
	case !d.Committed:
		return rack.Disk{}, errors.Join(e.clearTakenBack(ctx, i, d), ErrTakenBack)
	case !found || i.Attempt != d.Attempt:
		return e.withoutIntent(ctx, d)
	}
	old, err := e.rack.DiskByID(ctx, d.Disk)
	gone := errors.Is(err, rack.ErrNotFound)
	switch {
	case gone:
		err = e.rack.ConfirmProject(ctx)
	case err == nil && old.InstanceID != "":
		err = fmt.Errorf("disk %s on instance %s: %w", old.ID, old.InstanceID, ErrAttached)
	case err == nil:
		err = e.deleteOld(ctx, d)
	}
	if err != nil {
		return rack.Disk{}, err
	}
	snapshot, err := e.rack.SnapshotByName(ctx, diskname.ForExpansion(d.Attempt))
	if err != nil && !errors.Is(err, rack.ErrNotFound) {
		return rack.Disk{}, err
	}
	var disk rack.Disk
	switch {
	case err != nil:
		disk, err = e.existing(ctx, d)
	case gone && !needed:
		if disk, err = e.existing(ctx, d); errors.Is(err, ErrDeleted) {
			err = fmt.Errorf(
				"volume %s: %w, and snapshot %q has the data, do not delete it: publish or expand the volume, and its disk is made",
				d.Volume, rack.ErrReplaced, snapshot.Name)
		}
	default:
		disk, err = e.createNew(ctx, d, snapshot)
	}
	if err != nil {
		return rack.Disk{}, err
	}
	e.unlearn(d.Volume)
	return disk, e.cleanUp(ctx, i, d, snapshot.ID)
}

// withoutIntent is forward for a decision whose intent is gone. A committed attempt deletes its intent after it has
// made the new disk. So if the old disk still has its name, then the decision came after the attempt was taken back.
// The decision is deleted, also if the volume was deleted, unless it is about the volume's first disk.
func (e *Expander) withoutIntent(ctx context.Context, d record.Replacement) (rack.Disk, error) {
	disk, err := e.existing(ctx, d)
	switch {
	case errors.Is(err, errOld):
		if err := e.deleteSnapshot(ctx, d.Attempt); err != nil {
			return rack.Disk{}, err
		}
		return rack.Disk{}, errors.Join(
			e.rack.DeleteRecord(ctx, d.Stored.ID), fmt.Errorf("volume %s: %w", d.Volume, ErrTakenBack))
	case (err == nil || errors.Is(err, ErrDeleted)) && d.Disk != rack.DiskID(d.Volume):
		err = errors.Join(err, e.rack.DeleteRecord(ctx, d.Stored.ID))
	}
	return disk, err
}

// deleteOld deletes the replaced disk. Any answer but success is an error, and this call does not make the new disk
// then: DeleteVolume may have deleted the old one, and a deleted volume must not come back. The snapshot stays, because
// a proxy may have repeated the request.
func (e *Expander) deleteOld(ctx context.Context, d record.Replacement) error {
	failed := e.rack.DeleteDisk(ctx, d.Disk)
	if failed == nil {
		return nil
	}
	disk, err := e.rack.DiskByID(ctx, d.Disk)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		if err := e.rack.ConfirmProject(ctx); err != nil {
			return err
		}
		return fmt.Errorf("volume %s: its old disk was just deleted: %w", d.Volume, ErrUnderWay)
	case err != nil:
		return err
	case disk.InstanceID != "":
		return fmt.Errorf("disk %s on instance %s: %w", disk.ID, disk.InstanceID, ErrAttached)
	}
	return fmt.Errorf("volume %s: its old disk cannot be deleted: %w: %v", d.Volume, ErrUnderWay, failed)
}

// createNew makes the new disk of the snapshot, or returns it if it exists.
func (e *Expander) createNew(ctx context.Context, d record.Replacement, snapshot rack.Snapshot) (rack.Disk, error) {
	spec := rack.DiskSpec{
		Name: d.DiskName, Description: snapshot.Description, SizeBytes: d.SizeBytes, SnapshotID: snapshot.ID,
	}
	disk, err := e.rack.CreateDisk(ctx, spec)
	if errors.Is(err, rack.ErrCapacity) || errors.Is(err, rack.ErrSize) {
		// The rack checks the quota before the name, so the disk may exist.
		if disk, err := e.existing(ctx, d); !errors.Is(err, ErrDeleted) {
			return disk, err
		}
		// A create of a volume may have made a disk of this name, and have deleted it again: then there is room now.
		if disk, err = e.rack.CreateDisk(ctx, spec); errors.Is(err, rack.ErrCapacity) || errors.Is(err, rack.ErrSize) {
			spec.SizeBytes = snapshot.SizeBytes
			disk, err = e.rack.CreateDisk(ctx, spec)
		}
	}
	switch {
	case err == nil:
		return disk, nil
	case errors.Is(err, rack.ErrCapacity):
		return rack.Disk{}, fmt.Errorf(
			"volume %s: the rack has no room for its disk: %w, %q, which has the data: "+
				"do not delete it, free quota or space, and repeat the call",
			d.Volume, ErrOnlySnapshot, snapshot.Name)
	case errors.Is(err, rack.ErrNotFound): // the snapshot is gone: another process is further
		return e.existing(ctx, d)
	case errors.Is(err, rack.ErrAlreadyExists), rack.OutcomeUnknown(err):
		disk, lookErr := e.existing(ctx, d)
		if errors.Is(lookErr, ErrDeleted) {
			lookErr = fmt.Errorf("volume %s: %w: %w", d.Volume, ErrUnderWay, err)
		}
		return disk, lookErr
	}
	return rack.Disk{}, err
}

// errOld says that the old disk still has its name.
var errOld = errors.New("the old disk still exists")

// existing returns the new disk, in a stable state. [ErrDeleted] means that there is none.
func (e *Expander) existing(ctx context.Context, d record.Replacement) (rack.Disk, error) {
	disk, err := e.rack.DiskByName(ctx, d.DiskName)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return rack.Disk{}, fmt.Errorf("volume %s: %w", d.Volume, ErrDeleted)
	case err != nil:
		return rack.Disk{}, err
	case disk.VolumeID != d.Volume:
		return rack.Disk{}, fmt.Errorf(
			"volume %s: disk %q (%s) took its name: %w: delete that disk if it is unused",
			d.Volume,
			disk.Name,
			disk.ID,
			ErrNameTaken,
		)
	case disk.ID == d.Disk:
		return rack.Disk{}, fmt.Errorf("volume %s: %w", d.Volume, errOld)
	}
	if disk, err = e.rack.WaitForDisk(ctx, disk, stateWait); err != nil {
		return rack.Disk{}, err
	}
	if disk.State == rack.Faulted {
		// It is not made again from the snapshot: the volume may have been published meanwhile.
		return rack.Disk{}, fault.DiskFaulted.Errorf(
			"disk %q (%s) of volume %s is faulted: %w: restore snapshot %q, taken before the expansion, or ask the rack's operator",
			disk.Name,
			disk.ID,
			d.Volume,
			rack.ErrInternal,
			diskname.ForExpansion(d.Attempt),
		)
	}
	return disk, nil
}

// cleanUp deletes the snapshot and the records of a finished expansion. snapshotID may be empty.
func (e *Expander) cleanUp(ctx context.Context, i record.Intent, d record.Replacement, snapshotID string) error {
	if snapshotID != "" {
		if err := e.confirmGone(ctx, e.rack.DeleteSnapshot(ctx, snapshotID)); err != nil {
			return err
		}
	}
	if err := e.rack.DeleteRecord(ctx, i.Stored.ID); err != nil {
		return err
	}
	if d.Disk == rack.DiskID(d.Volume) {
		return nil // this record leads from the volume ID to the disk
	}
	return e.rack.DeleteRecord(ctx, d.Stored.ID)
}

// deleteSnapshot deletes the snapshot of an attempt, if it exists.
func (e *Expander) deleteSnapshot(ctx context.Context, attempt string) error {
	snapshot, err := e.rack.SnapshotByName(ctx, diskname.ForExpansion(attempt))
	if errors.Is(err, rack.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	return e.confirmGone(ctx, e.rack.DeleteSnapshot(ctx, snapshot.ID))
}

// confirmGone turns the error of a deletion that found nothing into nil, if the rack's 404 can be trusted.
func (e *Expander) confirmGone(ctx context.Context, err error) error {
	if errors.Is(err, rack.ErrNotFound) {
		return e.rack.ConfirmProject(ctx)
	}
	return err
}
