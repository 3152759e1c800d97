// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package expand

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// forward takes the steps after the decision and returns the new disk. A decision that is not committed, or that came
// after its attempt was taken back, is cleared. It is safe to repeat, for any process.
func (e *Expander) forward(ctx context.Context, d rack.Replacement, run string) (rack.Disk, error) {
	if !d.Committed {
		return rack.Disk{}, e.clear(ctx, d)
	}
	i, found, err := e.intent(ctx, d.Volume)
	if err != nil {
		return rack.Disk{}, err
	}
	if !found || i.Attempt != d.Attempt {
		return e.withoutIntent(ctx, d)
	}
	if err := e.deleteOld(ctx, d, run); err != nil {
		return rack.Disk{}, err
	}
	disk, err := e.createNew(ctx, d)
	if err != nil {
		return rack.Disk{}, err
	}
	return disk, e.cleanUp(ctx, d)
}

// withoutIntent is forward for a decision whose intent is gone. A committed attempt deletes the disk, the snapshot and the
// intent in this order. If the disk or the snapshot still exists, then the decision came after the attempt was taken back.
func (e *Expander) withoutIntent(ctx context.Context, d rack.Replacement) (rack.Disk, error) {
	late, err := e.exists(ctx, d.Disk)
	if err == nil && !late {
		_, err = e.rack.SnapshotByName(ctx, diskname.ForExpansion(d.Attempt))
		late = err == nil
		if errors.Is(err, rack.ErrNotFound) {
			err = nil
		}
	}
	if err == nil && late {
		err = e.deleteSnapshot(ctx, d.Attempt)
	}
	switch {
	case err != nil:
		return rack.Disk{}, err
	case late:
		return rack.Disk{}, errors.Join(
			e.deleteRecord(ctx, d.RecordID), fmt.Errorf("volume %s: %w", d.Volume, ErrTakenBack))
	}
	disk, err := e.existing(ctx, d)
	if err == nil && d.Disk != d.Volume {
		err = e.deleteRecord(ctx, d.RecordID)
	}
	return disk, err
}

// clear deletes what is left of an attempt that was taken back.
func (e *Expander) clear(ctx context.Context, d rack.Replacement) error {
	i, found, err := e.intent(ctx, d.Volume)
	if err != nil {
		return err
	}
	if !found || i.Attempt != d.Attempt {
		return errors.Join(e.deleteRecord(ctx, d.RecordID), ErrTakenBack)
	}
	return errors.Join(e.clearTakenBack(ctx, i, d), ErrTakenBack)
}

// deleteOld deletes the replaced disk.
func (e *Expander) deleteOld(ctx context.Context, d rack.Replacement, run string) error {
	if d.By == run {
		err := e.rack.DeleteBackingDisk(ctx, d.Disk)
		if errors.Is(err, rack.ErrNotFound) {
			return e.deletedBefore(ctx, d, run)
		}
		return e.resolveDelete(ctx, d, err)
	}
	// This process continues what another one began. The disk is mostly gone. Otherwise the record has to say who deletes
	// the disk now: see deletedBefore.
	if exists, err := e.exists(ctx, d.Disk); err != nil || !exists {
		return err
	}
	d.By = run
	err := e.rack.UpdateRecord(ctx, d.RecordID, rack.RecordText(d))
	if errors.Is(err, rack.ErrNotFound) {
		return fmt.Errorf("volume %s: %w", d.Volume, ErrUnderWay)
	}
	if err != nil {
		return err
	}
	return e.resolveDelete(ctx, d, e.rack.DeleteBackingDisk(ctx, d.Disk))
}

// deletedBefore is for the run that committed, if its first request to delete the disk finds no disk. If no other run has
// recorded that it deletes the disk, then the volume was deleted after the commit, and the expansion must not bring it
// back.
func (e *Expander) deletedBefore(ctx context.Context, d rack.Replacement, run string) error {
	if err := e.rack.ConfirmProject(ctx); err != nil {
		return err
	}
	now, found, err := e.decision(ctx, d.Disk)
	if err != nil || !found || now.By != run {
		return err
	}
	// As long as the intent exists, another process may make the disk again. So the intent goes last but one.
	if err := e.deleteSnapshot(ctx, d.Attempt); err != nil {
		return err
	}
	return errors.Join(e.forgetAttempt(ctx, d, true), fmt.Errorf("volume %s: %w", d.Volume, ErrDeleted))
}

// resolveDelete looks at the disk after a failed deletion.
func (e *Expander) resolveDelete(ctx context.Context, d rack.Replacement, failed error) error {
	if failed == nil {
		return nil
	}
	disk, err := e.rack.BackingDisk(ctx, d.Disk)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return e.rack.ConfirmProject(ctx)
	case err != nil:
		return err
	case disk.InstanceID != "":
		return fmt.Errorf("disk %s on instance %s: %w", disk.ID, disk.InstanceID, ErrAttached)
	case disk.State == rack.Faulted:
		// A deletion that failed halfway leaves the disk like this, under another name.
		return e.rack.DeleteBackingDisk(ctx, d.Disk)
	}
	return failed
}

// createNew makes the new disk, or returns it if it exists. The disk is in a stable state.
func (e *Expander) createNew(ctx context.Context, d rack.Replacement) (rack.Disk, error) {
	snapshot, err := e.rack.SnapshotByName(ctx, diskname.ForExpansion(d.Attempt))
	if errors.Is(err, rack.ErrNotFound) {
		return e.existing(ctx, d)
	}
	if err != nil {
		return rack.Disk{}, err
	}
	spec := rack.DiskSpec{
		Name: d.DiskName, Description: snapshot.Description, SizeBytes: d.SizeBytes, SnapshotID: snapshot.ID,
	}
	disk, err := e.rack.CreateDisk(ctx, spec)
	noRoom := errors.Is(err, rack.ErrCapacity) || errors.Is(err, rack.ErrSize)
	if noRoom {
		// The rack checks the quota before the name, so the disk may exist.
		if disk, err := e.existing(ctx, d); !errors.Is(err, ErrDeleted) {
			return disk, err
		}
		spec.SizeBytes = snapshot.SizeBytes
		disk, err = e.rack.CreateDisk(ctx, spec)
	}
	switch {
	case err == nil:
		return disk, nil
	case errors.Is(err, rack.ErrCapacity):
		return rack.Disk{}, fmt.Errorf(
			"volume %s: rack has no room for its disk: the data are on snapshot %q (%s), do not delete it: "+
				"free quota or space, then repeat the call: %w",
			d.Volume, snapshot.Name, snapshot.ID, ErrOnlySnapshot)
	case errors.Is(err, rack.ErrAlreadyExists), rack.OutcomeUnknown(err):
		disk, lookErr := e.existing(ctx, d)
		if errors.Is(lookErr, ErrDeleted) {
			lookErr = fmt.Errorf("volume %s: %w: %w", d.Volume, ErrUnderWay, err)
		}
		return disk, lookErr
	case errors.Is(err, rack.ErrNotFound):
		return rack.Disk{}, fmt.Errorf("volume %s: %w: %v", d.Volume, ErrUnderWay, err) // another process is further
	}
	return rack.Disk{}, err
}

// existing returns the new disk. [ErrDeleted] means that there is none.
func (e *Expander) existing(ctx context.Context, d rack.Replacement) (rack.Disk, error) {
	disk, err := e.rack.DiskByName(ctx, d.DiskName)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return rack.Disk{}, fmt.Errorf("volume %s: %w", d.Volume, ErrDeleted)
	case err != nil:
		return rack.Disk{}, err
	case disk.ID != d.Volume:
		return rack.Disk{}, fmt.Errorf(
			"volume %s: disk %q (%s) took its name: delete that disk if it is unused: %w", d.Volume, disk.Name, disk.ID, ErrNameTaken)
	}
	if disk, err = e.rack.WaitForDisk(ctx, disk, stateWait); err != nil {
		return rack.Disk{}, err
	}
	if disk.State == rack.Faulted {
		return rack.Disk{}, fmt.Errorf("disk %q of volume %s is faulted: %w", disk.Name, d.Volume, rack.ErrInternal)
	}
	return disk, nil
}

// cleanUp deletes the snapshot and the records of a finished expansion.
func (e *Expander) cleanUp(ctx context.Context, d rack.Replacement) error {
	if err := e.deleteSnapshot(ctx, d.Attempt); err != nil {
		return err
	}
	return e.forgetAttempt(ctx, d, d.Disk != d.Volume)
}

// forgetAttempt deletes the intent of an attempt, and its decision if all is true.
func (e *Expander) forgetAttempt(ctx context.Context, d rack.Replacement, all bool) error {
	i, found, err := e.intent(ctx, d.Volume)
	if err != nil {
		return err
	}
	if found && i.Attempt == d.Attempt {
		if err := e.deleteRecord(ctx, i.recordID); err != nil {
			return err
		}
	}
	if all {
		return e.deleteRecord(ctx, d.RecordID)
	}
	return nil
}

// finishVolume finishes the expansions of a volume that are committed, and clears those that were taken back. It returns
// the number of the volume's decisions that it found. [ErrDeleted] means that the volume has neither a disk nor a snapshot.
func (e *Expander) finishVolume(ctx context.Context, volumeID, run string) (found int, err error) {
	records, err := e.rack.Records(ctx)
	if err != nil {
		return 0, err
	}
	set := Parse(records)
	for _, disk := range slices.Sorted(maps.Keys(set.decisions)) {
		d := set.decisions[disk]
		if d.Volume != volumeID {
			continue
		}
		found++
		if err := e.finish(ctx, set, d, run); err != nil && !errors.Is(err, ErrTakenBack) {
			return found, err
		}
	}
	return found, nil
}

// finish finishes one expansion. The decision about the first disk of a volume whose later disk is being replaced is left
// alone: the volume's disk is gone then, and yet the volume is not deleted.
func (e *Expander) finish(ctx context.Context, set Set, d rack.Replacement, run string) error {
	if d.Committed && set.othersOf(d) {
		return nil
	}
	_, err := e.forward(ctx, d, run)
	switch {
	case !d.Committed || !errors.Is(err, ErrDeleted):
		return err
	case d.Disk != d.Volume: // neither the disk nor the snapshot is left, so this expansion is over
		return e.deleteRecord(ctx, d.RecordID)
	}
	return e.confirmDeleted(ctx, d, err)
}

// confirmDeleted returns nil if the volume has a disk after all, and [ErrUnderWay] if a later disk of the volume is being
// replaced. Otherwise it returns the error deleted.
func (e *Expander) confirmDeleted(ctx context.Context, d rack.Replacement, deleted error) error {
	records, err := e.rack.Records(ctx)
	if err != nil {
		return err
	}
	if Parse(records).othersOf(d) {
		return fmt.Errorf("volume %s: %w", d.Volume, ErrUnderWay)
	}
	if _, err := e.existing(ctx, d); !errors.Is(err, ErrDeleted) {
		return err
	}
	return deleted
}
