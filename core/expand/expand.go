// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package expand

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// Rack is the part of [rack.Client] that an [Expander] uses.
type Rack interface {
	BackingDisk(ctx context.Context, backingID string) (rack.Disk, error)
	DiskByName(ctx context.Context, name string) (rack.Disk, error)
	CreateDisk(ctx context.Context, spec rack.DiskSpec) (rack.Disk, error)
	DeleteBackingDisk(ctx context.Context, backingID string) error
	WaitForDisk(ctx context.Context, disk rack.Disk, maxWait time.Duration) (rack.Disk, error)
	Detach(ctx context.Context, diskID, instanceID string) (rack.Disk, error)
	CreateSnapshot(ctx context.Context, name, description, diskID string) (rack.Snapshot, error)
	SnapshotByName(ctx context.Context, name string) (rack.Snapshot, error)
	WaitForSnapshot(ctx context.Context, snapshot rack.Snapshot, maxWait time.Duration) (rack.Snapshot, error)
	DeleteSnapshot(ctx context.Context, id string) error
	Storage(ctx context.Context) (quotaBytes, usedBytes uint64, err error)
	ConfirmProject(ctx context.Context) error

	Records(ctx context.Context) ([]rack.Record, error)
	RecordNamed(ctx context.Context, name string) (rack.Record, error)
	CreateRecord(ctx context.Context, name, text string) (rack.Record, error)
	UpdateRecord(ctx context.Context, id, text string) error
	DeleteRecord(ctx context.Context, id string) error
}

var (
	// ErrAttached says that the disk is attached, so that it cannot be replaced.
	ErrAttached = errors.New("the disk is attached")
	// ErrNoRoom says that the volume is as it was, because quota or space for the larger disk are missing.
	ErrNoRoom = errors.New("no room for a larger disk")
	// ErrOnlySnapshot says that the old disk is deleted and that the rack has no room for a new one of any size. The data
	// are on the snapshot that the error names.
	ErrOnlySnapshot = errors.New("the volume has no disk, its data are on a snapshot")
	// ErrUnderWay says that the volume is being expanded.
	ErrUnderWay = errors.New("the volume is being expanded")
	// ErrTakenBack says that another process took the expansion back, for a publish of the volume.
	ErrTakenBack = errors.New("the expansion was taken back, because the volume was published")
	// ErrDeleted says that the volume was deleted meanwhile.
	ErrDeleted = errors.New("the volume was deleted")
	// ErrNameTaken says that a disk of another volume has the name of the volume's disk.
	ErrNameTaken = errors.New("another disk has the name of the volume's disk")
)

// stateWait is how long a step waits for a disk or a snapshot that the rack is still making.
const stateWait = 30 * time.Second

// Expander expands the volumes of one rack. It is safe for concurrent use.
type Expander struct {
	rack    Rack
	cluster string
	log     *slog.Logger

	mu sync.Mutex
	// seen is since when this process knows an attempt that is not finished.
	seen map[string]time.Time
}

// New returns an expander. It sends no request.
func New(r Rack, cluster string, log *slog.Logger) *Expander {
	return &Expander{rack: r, cluster: cluster, log: log, seen: map[string]time.Time{}}
}

// Expand replaces the disk of a volume by one of sizeBytes. The disk is detached, writable, and of this plugin. If an
// expansion of the volume is under way, Expand continues that one, and the new disk has the size that was requested first.
// After an error the volume is as it was, or its expansion is finished later: see the errors of this package.
func (e *Expander) Expand(ctx context.Context, disk rack.Disk, sizeBytes int64) (rack.Disk, error) {
	run := uuid.NewString()
	i, err := e.begin(ctx, disk, sizeBytes, run)
	if err != nil {
		return rack.Disk{}, err
	}
	decision, err := e.prepare(ctx, i, run)
	if err != nil {
		return rack.Disk{}, err
	}
	expanded, err := e.forward(ctx, decision, run)
	if errors.Is(err, ErrDeleted) && decision.Committed {
		// The volume was deleted, perhaps before this process committed: no other process expects the decision.
		if err = e.confirmDeleted(ctx, decision, err); errors.Is(err, ErrDeleted) {
			err = errors.Join(e.deleteRecord(ctx, decision.RecordID), err)
		}
	}
	return expanded, err
}

// begin creates the intent, or returns the one that exists for the disk.
func (e *Expander) begin(ctx context.Context, disk rack.Disk, sizeBytes int64, run string) (intent, error) {
	i := intent{
		Version: 1, Cluster: e.cluster, Volume: disk.ID, Disk: disk.BackingID, Attempt: uuid.NewString(), SizeBytes: sizeBytes,
	}
	for range 3 {
		record, err := e.rack.CreateRecord(ctx, intentPrefix+disk.ID, rack.RecordText(i))
		if err == nil {
			i.recordID = record.ID
			return i, nil
		}
		if !errors.Is(err, rack.ErrAlreadyExists) {
			return intent{}, err
		}
		old, found, err := e.intent(ctx, disk.ID)
		switch {
		case err != nil:
			return intent{}, err
		case found && old.Disk == disk.BackingID:
			return old, nil
		case found:
			// The intent is about an earlier disk of the volume. Its last steps are missing, or it came too late.
			_, err := e.finishVolume(ctx, disk.ID, run)
			if err == nil {
				err = e.dropIntent(ctx, old)
			}
			if err != nil {
				return intent{}, err
			}
		}
	}
	return intent{}, fmt.Errorf("volume %s: %w", disk.ID, ErrUnderWay)
}

// prepare takes the steps up to the commit, and returns the decision. It takes the attempt back if one of them fails for
// good.
func (e *Expander) prepare(ctx context.Context, i intent, run string) (rack.Replacement, error) {
	disk, err := e.rack.BackingDisk(ctx, i.Disk)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		if err := e.rack.ConfirmProject(ctx); err != nil {
			return rack.Replacement{}, err
		}
		// Another process has committed and deleted the disk, or the volume was deleted.
		return e.decisionOf(ctx, i, ErrDeleted)
	case err != nil:
		return rack.Replacement{}, err
	case disk.State != rack.Detached:
		return rack.Replacement{}, e.giveUp(ctx, i, fmt.Errorf("disk %s is %s: %w", disk.ID, disk.State, ErrAttached))
	}
	snapshot, err := e.snapshot(ctx, i, disk)
	switch {
	case errors.Is(err, rack.ErrCapacity):
		return rack.Replacement{}, e.giveUp(ctx, i, fmt.Errorf("%w: %w", ErrNoRoom, err))
	case errors.Is(err, rack.ErrRefused), errors.Is(err, rack.ErrNotFound):
		return rack.Replacement{}, e.giveUp(ctx, i, err)
	case err != nil:
		return rack.Replacement{}, err
	case snapshot.State != rack.SnapshotReady || snapshot.SizeBytes != disk.SizeBytes || snapshot.DiskID != disk.ID:
		return rack.Replacement{}, e.giveUp(ctx, i, fmt.Errorf(
			"snapshot %q of disk %s is %s, with %d bytes: %w",
			snapshot.Name, disk.ID, snapshot.State, snapshot.SizeBytes, rack.ErrInternal))
	}
	quota, used, err := e.rack.Storage(ctx)
	if err != nil {
		return rack.Replacement{}, err
	}
	if after := used - min(used, uint64(disk.SizeBytes)); uint64(i.SizeBytes) > quota-min(quota, after) {
		return rack.Replacement{}, e.giveUp(ctx, i, fmt.Errorf(
			"disk %s: the quota has to leave room for the larger disk of %d bytes beside a snapshot of %d bytes: %w",
			disk.ID, i.SizeBytes, disk.SizeBytes, ErrNoRoom))
	}
	return e.decide(ctx, i, disk.Name, true, run)
}

// snapshot makes the snapshot of the attempt, or returns it if it exists.
func (e *Expander) snapshot(ctx context.Context, i intent, disk rack.Disk) (rack.Snapshot, error) {
	name := diskname.ForExpansion(i.Attempt)
	snapshot, err := e.rack.CreateSnapshot(ctx, name, rack.SuccessorDescription(disk).Encode(), disk.ID)
	if err != nil && (errors.Is(err, rack.ErrAlreadyExists) || rack.OutcomeUnknown(err)) {
		found, lookErr := e.rack.SnapshotByName(ctx, name)
		switch {
		case lookErr == nil:
			snapshot, err = found, nil
		case errors.Is(lookErr, rack.ErrNotFound):
			return snapshot, fmt.Errorf("%w: the snapshot does not exist yet: %v", rack.ErrUnavailable, err)
		default:
			return snapshot, lookErr
		}
	}
	if err != nil {
		return snapshot, err
	}
	return e.rack.WaitForSnapshot(ctx, snapshot, stateWait)
}

// decide creates the decision of an attempt. If it is decided the other way, it returns that decision.
func (e *Expander) decide(
	ctx context.Context,
	i intent,
	diskName string,
	commit bool,
	run string,
) (rack.Replacement, error) {
	wanted := rack.Replacement{
		Version: 1, Cluster: i.Cluster, Volume: i.Volume, Disk: i.Disk, DiskName: diskName, Attempt: i.Attempt,
		SizeBytes: i.SizeBytes, Committed: commit, By: run,
	}
	for range 3 {
		record, err := e.rack.CreateRecord(ctx, rack.ReplacementPrefix+i.Disk, rack.RecordText(wanted))
		if err == nil {
			wanted.RecordID = record.ID
			return wanted, nil
		}
		if !errors.Is(err, rack.ErrAlreadyExists) && !rack.OutcomeUnknown(err) {
			return rack.Replacement{}, err
		}
		made, found, lookErr := e.decision(ctx, i.Disk)
		switch {
		case lookErr != nil:
			return rack.Replacement{}, lookErr
		case found && made.Attempt == i.Attempt:
			return made, nil
		case found:
			late, err := e.isLate(ctx, made)
			if err == nil && !late {
				err = fmt.Errorf("volume %s: %w", i.Volume, ErrUnderWay)
			}
			if err == nil {
				err = e.deleteRecord(ctx, made.RecordID)
			}
			if err != nil {
				return rack.Replacement{}, err
			}
		case !errors.Is(err, rack.ErrAlreadyExists):
			return rack.Replacement{}, err // the record may still appear
		}
	}
	return rack.Replacement{}, fmt.Errorf("volume %s: %w", i.Volume, ErrUnderWay)
}

// giveUp takes an attempt back that this process cannot carry out, and returns the reason. If another process has
// committed the attempt, the error says that the expansion is under way.
func (e *Expander) giveUp(ctx context.Context, i intent, reason error) error {
	err := e.takeBack(ctx, i)
	if errors.Is(err, ErrTakenBack) {
		return reason
	}
	if err != nil {
		return fmt.Errorf("%w: %w", err, reason)
	}
	return nil
}

// takeBack takes an attempt back. It returns [ErrTakenBack] if that is done, and [ErrUnderWay] if the attempt is
// committed.
func (e *Expander) takeBack(ctx context.Context, i intent) error {
	decision, err := e.decide(ctx, i, "", false, "")
	if err != nil {
		return err
	}
	if !decision.Committed {
		return errors.Join(e.clearTakenBack(ctx, i, decision), ErrTakenBack)
	}
	late, err := e.isLate(ctx, decision)
	switch {
	case err != nil:
		return err
	case late:
		return errors.Join(e.deleteRecord(ctx, decision.RecordID), ErrTakenBack)
	}
	return fmt.Errorf("volume %s: %w", i.Volume, ErrUnderWay)
}

// clearTakenBack deletes what an attempt made that was taken back: the snapshot, the intent, and the decision last.
func (e *Expander) clearTakenBack(ctx context.Context, i intent, decision rack.Replacement) error {
	if err := e.deleteSnapshot(ctx, i.Attempt); err != nil {
		return err
	}
	if err := e.deleteRecord(ctx, i.recordID); err != nil {
		return err
	}
	return e.deleteRecord(ctx, decision.RecordID)
}

// isLate reports whether a decision is left of an attempt that was taken back. It reads the intent first: a committed
// attempt deletes the disk before it deletes its intent, and an attempt that was taken back deletes its intent before its
// decision. So a missing intent and then an existing disk show that a process committed after the attempt was taken back.
func (e *Expander) isLate(ctx context.Context, decision rack.Replacement) (bool, error) {
	i, found, err := e.intent(ctx, decision.Volume)
	if err != nil || found && i.Attempt == decision.Attempt {
		return false, err
	}
	exists, err := e.exists(ctx, decision.Disk)
	return exists || !decision.Committed, err
}

// exists reports whether a disk exists.
func (e *Expander) exists(ctx context.Context, backingID string) (bool, error) {
	_, err := e.rack.BackingDisk(ctx, backingID)
	if errors.Is(err, rack.ErrNotFound) {
		return false, e.rack.ConfirmProject(ctx)
	}
	return err == nil, err
}

// decisionOf returns the committed decision of an attempt whose disk is gone. Without one it clears the attempt and
// returns the error otherwise.
func (e *Expander) decisionOf(ctx context.Context, i intent, otherwise error) (rack.Replacement, error) {
	decision, found, err := e.decision(ctx, i.Disk)
	switch {
	case err != nil:
		return rack.Replacement{}, err
	case found && decision.Committed && decision.Attempt == i.Attempt:
		return decision, nil
	case found && decision.Committed:
		otherwise = ErrUnderWay // the disk was replaced before the intent was created
	}
	return rack.Replacement{}, errors.Join(e.dropIntent(ctx, i), fmt.Errorf("volume %s: %w", i.Volume, otherwise))
}

// dropIntent deletes the snapshot and the intent of an attempt whose disk is gone, and which did not delete it.
func (e *Expander) dropIntent(ctx context.Context, i intent) error {
	exists, err := e.exists(ctx, i.Disk)
	if err != nil || exists {
		return err
	}
	if d, found, err := e.decision(ctx, i.Disk); err != nil || found && d.Attempt == i.Attempt && d.Committed {
		return err
	}
	if err := e.deleteSnapshot(ctx, i.Attempt); err != nil {
		return err
	}
	return e.deleteRecord(ctx, i.recordID)
}

// intent returns the intent of a volume.
func (e *Expander) intent(ctx context.Context, volumeID string) (intent, bool, error) {
	record, err := e.rack.RecordNamed(ctx, intentPrefix+volumeID)
	if errors.Is(err, rack.ErrNotFound) {
		return intent{}, false, nil
	}
	if err != nil {
		return intent{}, false, err
	}
	i, ok := parseIntent(record)
	if !ok {
		return intent{}, false, fmt.Errorf(
			"anti-affinity group %q is no record of this plugin: delete it: %w", record.Name, rack.ErrConflict)
	}
	return i, true, nil
}

// decision returns the decision about a disk.
func (e *Expander) decision(ctx context.Context, diskID string) (rack.Replacement, bool, error) {
	record, err := e.rack.RecordNamed(ctx, rack.ReplacementPrefix+diskID)
	if errors.Is(err, rack.ErrNotFound) {
		return rack.Replacement{}, false, nil
	}
	if err != nil {
		return rack.Replacement{}, false, err
	}
	d, ok := rack.ParseReplacement(record)
	if !ok {
		return rack.Replacement{}, false, fmt.Errorf(
			"anti-affinity group %q is no record of this plugin: delete it: %w", record.Name, rack.ErrConflict)
	}
	return d, true, nil
}

// deleteRecord deletes a record. It succeeds if the record was deleted before.
func (e *Expander) deleteRecord(ctx context.Context, id string) error {
	err := e.rack.DeleteRecord(ctx, id)
	if errors.Is(err, rack.ErrNotFound) {
		return e.rack.ConfirmProject(ctx)
	}
	return err
}

// deleteSnapshot deletes the snapshot of an attempt, if it exists.
func (e *Expander) deleteSnapshot(ctx context.Context, attempt string) error {
	snapshot, err := e.rack.SnapshotByName(ctx, diskname.ForExpansion(attempt))
	if errors.Is(err, rack.ErrNotFound) {
		return nil
	}
	if err == nil {
		err = e.rack.DeleteSnapshot(ctx, snapshot.ID)
	}
	if errors.Is(err, rack.ErrNotFound) {
		return e.rack.ConfirmProject(ctx)
	}
	return err
}
