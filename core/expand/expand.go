// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package expand

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// Rack is the part of [rack.Client] that an [Expander] uses.
type Rack interface {
	DiskByID(ctx context.Context, diskID rack.DiskID) (rack.Disk, error)
	Disks(ctx context.Context, from rack.Cursor, wanted int) iter.Seq2[rack.ListItem[rack.Disk], error]
	DiskByName(ctx context.Context, name string) (rack.Disk, error)
	CreateDisk(ctx context.Context, spec rack.DiskSpec) (rack.Disk, error)
	DeleteDisk(ctx context.Context, diskID rack.DiskID) error
	WaitForDisk(ctx context.Context, disk rack.Disk, maxWait time.Duration) (rack.Disk, error)
	Detach(ctx context.Context, diskID rack.DiskID, instanceID string) (rack.Disk, error)
	CreateSnapshot(ctx context.Context, name, description string, diskID rack.DiskID) (rack.Snapshot, error)
	SnapshotByName(ctx context.Context, name string) (rack.Snapshot, error)
	WaitForSnapshot(ctx context.Context, snapshot rack.Snapshot, maxWait time.Duration) (rack.Snapshot, error)
	DeleteSnapshot(ctx context.Context, id string) error
	Storage(ctx context.Context) (quotaBytes, usedBytes uint64, err error)
	ConfirmProject(ctx context.Context) error

	Records(ctx context.Context) ([]record.Record, error)
	RecordNamed(ctx context.Context, name string) (r record.Record, found bool, err error)
	CreateRecord(ctx context.Context, name, text string) (record.Record, error)
	DeleteRecord(ctx context.Context, id string) error
	DeleteRecordNamed(ctx context.Context, name string) error
}

var (
	// ErrAttached says that the disk is attached, so that it cannot be replaced.
	ErrAttached = fault.ExpansionWaits.New("the disk is attached")
	// ErrNoRoom says that the volume is as it was, because quota or space for the larger disk are missing.
	ErrNoRoom = fault.ExpansionNeedsRoom.New("no room for a larger disk")
	// ErrOnlySnapshot says that the old disk is deleted and that the rack has no room for a new one of any size. The
	// data are on the snapshot that the error names.
	ErrOnlySnapshot = fault.OnlySnapshot.New("the volume has only a snapshot")
	// ErrUnderWay says that the volume is being expanded.
	ErrUnderWay = fault.ExpansionUnderWay.New("the volume is being expanded")
	// ErrTakenBack says that the expansion was taken back, by a publish of the volume or by [Expander.Settle].
	ErrTakenBack = fault.ExpansionWaits.New("the expansion was taken back, by a publish or because nobody went on")
	// ErrDeleted says that the volume was deleted meanwhile.
	ErrDeleted = fault.VolumeDeleted.New("the volume was deleted")
	// ErrNameTaken says that a disk of another volume has the name of the volume's disk.
	ErrNameTaken = fault.NameTaken.New("another disk has the name of the volume's disk")
)

// stateWait is how long a step waits for a disk or a snapshot that the rack is still making.
const stateWait = 30 * time.Second

// Expander expands the volumes of one rack. It is safe for concurrent use.
type Expander struct {
	// LookAge is how long a look counts, see [Expander.Look]. Only four seconds are safe, because all controllers of a
	// project must agree. Tests with one controller set less.
	LookAge time.Duration

	rack    Rack
	cluster string
	log     *slog.Logger

	mu sync.Mutex
	// known are the expansions that are not finished, as far as this process knows, by volume.
	known map[string]sighting
	// deleted are volumes whose deletion this process has answered with OK. What a late process leaves of them is
	// deleted.
	deleted map[string]bool
	// said are the texts about groups on the rack that were logged.
	said map[string]bool
}

// New returns an expander. It sends no request.
func New(r Rack, cluster string, log *slog.Logger) *Expander {
	return &Expander{
		LookAge: 4 * time.Second, rack: r, cluster: cluster, log: log,
		known: map[string]sighting{}, deleted: map[string]bool{}, said: map[string]bool{},
	}
}

// Expand replaces the disk of a volume by one of sizeBytes. The disk is detached, writable, and of this plugin. If an
// expansion of the volume is under way, Expand continues that one, and returns [ErrUnderWay] if it was for a smaller
// size. After an error the volume is as it was, or its expansion is finished later: see the errors of this package.
func (e *Expander) Expand(ctx context.Context, disk rack.Disk, sizeBytes int64) (rack.Disk, error) {
	e.work(disk.VolumeID, 1)
	defer e.work(disk.VolumeID, -1)
	i, begun, err := e.begin(ctx, disk, sizeBytes)
	if err != nil {
		return rack.Disk{}, err
	}
	expanded, err := e.carryOut(ctx, i, begun, disk)
	if err != nil {
		return rack.Disk{}, err
	}
	if i.SizeBytes < sizeBytes {
		return rack.Disk{}, fmt.Errorf(
			"volume %s: an earlier expansion to %d bytes was finished first: %w", disk.VolumeID, i.SizeBytes, ErrUnderWay)
	}
	e.unlearn(disk.VolumeID)
	return expanded, nil
}

// carryOut takes all steps after the first one. begun says that this call created the intent.
func (e *Expander) carryOut(ctx context.Context, i record.Intent, begun bool, disk rack.Disk) (rack.Disk, error) {
	if !begun {
		d, decided, err := e.decisionOf(ctx, i)
		switch {
		case err != nil:
			return rack.Disk{}, err
		case decided:
			return e.forward(ctx, d, true)
		case i.Disk != disk.ID: // it came too late, or the disk was replaced after the caller looked at it
			if err := e.takeBack(ctx, i); !errors.Is(err, ErrTakenBack) {
				return rack.Disk{}, err
			}
			return rack.Disk{}, fmt.Errorf("volume %s: %w", i.Volume, ErrUnderWay)
		}
	}
	// An intent that this call has not created may be younger than this call.
	if err := e.letOthersAct(ctx); err != nil {
		return rack.Disk{}, err
	}
	d, snapshot, err := e.prepare(ctx, i)
	if err != nil {
		return rack.Disk{}, err
	}
	now, found, err := e.intent(ctx, i.DiskName)
	switch {
	case err != nil:
		return rack.Disk{}, err
	case !found || now.Attempt != i.Attempt:
		return e.withoutIntent(ctx, d)
	}
	if err := e.deleteOld(ctx, d); err != nil {
		return rack.Disk{}, err
	}
	expanded, err := e.createNew(ctx, d, snapshot)
	if err != nil {
		return rack.Disk{}, err
	}
	return expanded, e.cleanUp(ctx, now, d, snapshot.ID)
}

// begin creates the intent. If the volume has one already, it returns that one, and false. One of a deleted volume
// whose disks had the same name is taken back.
func (e *Expander) begin(
	ctx context.Context,
	disk rack.Disk,
	sizeBytes int64,
) (i record.Intent, begun bool, err error) {
	i = record.Intent{
		Cluster: e.cluster, Volume: disk.VolumeID, Disk: disk.ID, DiskName: disk.Name, Attempt: uuid.NewString(),
		SizeBytes: sizeBytes,
	}
	for range 3 {
		i, err := record.Intents.Create(ctx, e.rack, i)
		if err == nil {
			return i, true, nil
		}
		if !errors.Is(err, rack.ErrAlreadyExists) {
			return record.Intent{}, false, err
		}
		old, found, err := record.Intents.Get(ctx, e.rack, "", diskname.ForWork(disk.Name))
		if err == nil && found && old.Volume != disk.VolumeID {
			if err = e.takeBack(ctx, old); errors.Is(err, ErrTakenBack) {
				continue
			}
		}
		if err != nil || found {
			return old, false, err
		}
	}
	return record.Intent{}, false, fmt.Errorf("volume %s: %w", disk.VolumeID, ErrUnderWay)
}

// prepare takes the steps up to the commit, and returns the decision and the snapshot. It takes the attempt back if one
// of them fails for good.
func (e *Expander) prepare(
	ctx context.Context, i record.Intent,
) (d record.Replacement, snapshot rack.Snapshot, err error) {
	disk, err := e.oldDisk(ctx, i)
	if err != nil {
		return d, snapshot, err
	}
	description := rack.SuccessorDescription(disk).Encode()
	if described, ours := rack.ParseDescription(description); !ours || described.Volume != disk.VolumeID {
		err = fmt.Errorf(
			"volume %s: its disk has the description %.80q, from which a new disk could not be recognised: %w",
			disk.VolumeID, disk.Description, rack.ErrRefused)
		return d, snapshot, e.giveUp(ctx, i, err)
	}
	snapshot, err = e.snapshot(ctx, i, description)
	switch {
	case errors.Is(err, rack.ErrCapacity):
		return d, snapshot, e.giveUp(ctx, i, fmt.Errorf("%w: %w", ErrNoRoom, err))
	case errors.Is(err, rack.ErrNotFound):
		return d, snapshot, e.giveUp(ctx, i, e.whyGone(ctx, i))
	case errors.Is(err, rack.ErrRefused):
		return d, snapshot, e.giveUp(ctx, i, err)
	case err != nil:
		return d, snapshot, err
	case snapshot.State != rack.SnapshotReady || snapshot.SizeBytes != disk.SizeBytes || snapshot.DiskID != i.Disk:
		return d, snapshot, e.giveUp(ctx, i, fmt.Errorf(
			"snapshot %q of volume %s is %s, with %d bytes: %w",
			snapshot.Name, disk.VolumeID, snapshot.State, snapshot.SizeBytes, rack.ErrInternal))
	}
	quota, used, err := e.rack.Storage(ctx)
	if err != nil {
		return d, snapshot, err
	}
	if after := used - min(used, uint64(disk.SizeBytes)); uint64(i.SizeBytes) > quota-min(quota, after) {
		return d, snapshot, e.giveUp(ctx, i, fmt.Errorf(
			"volume %s: the quota has to leave room for the larger disk of %d bytes beside a snapshot of %d bytes: %w",
			disk.VolumeID, i.SizeBytes, disk.SizeBytes, ErrNoRoom))
	}
	d, err = e.decide(ctx, i, true)
	switch {
	case err != nil:
		return d, snapshot, err
	case d.Attempt != i.Attempt:
		return d, snapshot, e.drop(ctx, i)
	case !d.Committed:
		return d, snapshot, errors.Join(e.clearTakenBack(ctx, i, d), ErrTakenBack)
	}
	return d, snapshot, nil
}

// oldDisk returns the disk that an attempt replaces, in the state in which that is possible. It takes the attempt back
// if the disk will not get into that state by itself.
func (e *Expander) oldDisk(ctx context.Context, i record.Intent) (rack.Disk, error) {
	disk, err := e.rack.DiskByID(ctx, i.Disk)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		// Another process has committed and deleted the disk, or the volume was deleted.
		if err = e.rack.ConfirmProject(ctx); err == nil {
			err = e.giveUp(ctx, i, e.whyGone(ctx, i))
		}
		return disk, err
	case err != nil:
		return disk, err
	case disk.InstanceID != "":
		err = fmt.Errorf("disk %s on instance %s: %w", disk.ID, disk.InstanceID, ErrAttached)
		return disk, e.giveUp(ctx, i, err)
	case disk.State.Transient(): // for instance while a snapshot is made of it
		return disk, fmt.Errorf("disk %s is %s: %w", disk.ID, disk.State, rack.ErrBusy)
	case disk.State != rack.Detached:
		err = fmt.Errorf("disk %s is %s: %w", disk.ID, disk.State, rack.ErrRefused)
		return disk, e.giveUp(ctx, i, err)
	}
	return disk, nil
}

// whyGone says why the disk of an attempt does not exist any more: another process has replaced it, or the volume was
// deleted.
func (e *Expander) whyGone(ctx context.Context, i record.Intent) error {
	disk, err := e.rack.DiskByName(ctx, i.DiskName)
	switch {
	case err == nil && disk.VolumeID == i.Volume:
		return fmt.Errorf("volume %s: its disk was replaced meanwhile: %w", i.Volume, ErrUnderWay)
	case err == nil, errors.Is(err, rack.ErrNotFound):
		return fmt.Errorf("volume %s: %w", i.Volume, ErrDeleted)
	}
	return err
}

// snapshot makes the snapshot of the attempt, or returns it if it exists.
func (e *Expander) snapshot(ctx context.Context, i record.Intent, description string) (rack.Snapshot, error) {
	name := diskname.ForExpansion(i.Attempt)
	snapshot, err := e.rack.CreateSnapshot(ctx, name, description, i.Disk)
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

// decide creates the decision of an attempt. If the disk is decided already, it returns that decision, which may be
// about another attempt.
func (e *Expander) decide(ctx context.Context, i record.Intent, commit bool) (record.Replacement, error) {
	wanted := record.Replacement{
		Cluster: i.Cluster, Volume: i.Volume, Disk: i.Disk, DiskName: i.DiskName, Attempt: i.Attempt,
		SizeBytes: i.SizeBytes, Committed: commit,
	}
	for range 3 {
		made, err := record.Replacements.Create(ctx, e.rack, wanted)
		if err == nil {
			return made, nil
		}
		if !errors.Is(err, rack.ErrAlreadyExists) && !rack.OutcomeUnknown(err) {
			return record.Replacement{}, err
		}
		made, found, lookErr := record.Replacements.Get(ctx, e.rack, "", string(i.Disk))
		switch {
		case lookErr != nil:
			return record.Replacement{}, lookErr
		case found && made.Attempt == i.Attempt:
			return made, nil
		case found:
			late, err := e.isLate(ctx, made)
			if err != nil || !late {
				return made, err
			}
			if err := e.rack.DeleteRecord(ctx, made.Stored.ID); err != nil {
				return record.Replacement{}, err
			}
		case !errors.Is(err, rack.ErrAlreadyExists):
			return record.Replacement{}, err // the record may still appear
		}
	}
	return record.Replacement{}, fmt.Errorf("volume %s: %w", i.Volume, ErrUnderWay)
}

// giveUp takes an attempt back that this process cannot carry out, and returns the reason. If another process has
// committed the attempt, the error says that the expansion is under way.
func (e *Expander) giveUp(ctx context.Context, i record.Intent, reason error) error {
	err := e.takeBack(ctx, i)
	switch {
	case errors.Is(err, ErrTakenBack):
		e.unlearn(i.Volume)
		return reason
	case errors.Is(err, ErrUnderWay):
		return err
	}
	// The attempt is undecided, and another process may still commit it: the reason must not count.
	return fmt.Errorf("%w; it was to be taken back: %s", err, reason)
}

// takeBack takes an attempt back. It returns [ErrTakenBack] if that is done, and [ErrUnderWay] if the attempt is
// committed, or if another attempt has replaced the disk.
func (e *Expander) takeBack(ctx context.Context, i record.Intent) error {
	d, err := e.decide(ctx, i, false)
	switch {
	case err != nil:
		return err
	case d.Attempt != i.Attempt:
		return e.drop(ctx, i)
	case !d.Committed:
		return errors.Join(e.clearTakenBack(ctx, i, d), ErrTakenBack)
	}
	late, err := e.isLate(ctx, d)
	switch {
	case err != nil:
		return err
	case late:
		return errors.Join(e.rack.DeleteRecord(ctx, d.Stored.ID), ErrTakenBack)
	}
	return fmt.Errorf("volume %s: %w", i.Volume, ErrUnderWay)
}

// drop deletes the snapshot and intent of an attempt that lost to another one, which has replaced the disk.
func (e *Expander) drop(ctx context.Context, i record.Intent) error {
	if err := e.deleteSnapshot(ctx, i.Attempt); err != nil {
		return err
	}
	if err := e.rack.DeleteRecord(ctx, i.Stored.ID); err != nil {
		return err
	}
	return fmt.Errorf("volume %s: %w", i.Volume, ErrUnderWay)
}

// clearTakenBack deletes what an attempt made that was taken back: the snapshot, the intent, and the decision last.
func (e *Expander) clearTakenBack(ctx context.Context, i record.Intent, d record.Replacement) error {
	if err := e.deleteSnapshot(ctx, i.Attempt); err != nil {
		return err
	}
	if err := e.rack.DeleteRecord(ctx, i.Stored.ID); err != nil {
		return err
	}
	return e.rack.DeleteRecord(ctx, d.Stored.ID)
}

// isLate reports whether a decision is left of an attempt that was taken back. It reads the intent first: a committed
// attempt deletes the disk before it deletes its intent, and an attempt that was taken back deletes its intent before
// its decision. So a missing intent and then an existing disk show that a process committed after the attempt was taken
// back.
func (e *Expander) isLate(ctx context.Context, d record.Replacement) (bool, error) {
	i, found, err := e.intent(ctx, d.DiskName)
	if err != nil || found && i.Attempt == d.Attempt {
		return false, err
	}
	if !d.Committed {
		return true, nil
	}
	disk, err := e.rack.DiskByID(ctx, d.Disk)
	if errors.Is(err, rack.ErrNotFound) {
		return false, e.rack.ConfirmProject(ctx)
	}
	return err == nil && !disk.HalfDeleted(), err
}
