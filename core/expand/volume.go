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
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// Finish finishes what is committed of a volume whose disk is gone ([rack.ErrReplaced]). [ErrDeleted] means that the
// volume was deleted.
func (e *Expander) Finish(ctx context.Context, volumeID string) error {
	_, err := e.finishVolume(ctx, volumeID, uuid.NewString())
	return err
}

// Yield makes sure that a disk, which was just attached or stays attached, is not replaced. The caller has attached the
// disk before it read the records. If an expansion is committed, the disk is detached again, and the error is
// [ErrUnderWay].
func (e *Expander) Yield(ctx context.Context, disk rack.Disk, records []rack.Record) error {
	set := Parse(records)
	if !set.concerns(disk) {
		return nil
	}
	if d, decided := set.decisions[disk.BackingID]; decided {
		late, err := e.isLate(ctx, d)
		if err == nil && late {
			err = e.deleteRecord(ctx, d.RecordID)
		}
		if err != nil {
			return err
		}
		if d.Committed && !late {
			return e.giveWay(ctx, disk)
		}
	}
	i, found := set.intents[disk.ID]
	if !found || i.Disk != disk.BackingID {
		return nil
	}
	switch err := e.takeBack(ctx, i); {
	case errors.Is(err, ErrTakenBack):
		e.log.Info("took an expansion back, because the volume is published", "volume_id", disk.ID)
		return nil
	case errors.Is(err, ErrUnderWay):
		return e.giveWay(ctx, disk)
	default:
		return err
	}
}

// giveWay detaches a disk whose replacement is committed, and finishes the expansion.
func (e *Expander) giveWay(ctx context.Context, disk rack.Disk) error {
	if _, err := e.rack.Detach(ctx, disk.ID, disk.InstanceID); err != nil {
		return fmt.Errorf("volume %s: %w: %w", disk.ID, ErrUnderWay, err)
	}
	if err := e.Finish(ctx, disk.ID); err != nil {
		return fmt.Errorf("volume %s: %w: %w", disk.ID, ErrUnderWay, err)
	}
	return fmt.Errorf("volume %s: %w", disk.ID, ErrUnderWay)
}

// Forget deletes the snapshots and records of a volume that is being deleted. With a disk it is called before the disk is
// deleted, and keeps the record that leads to the disk: see [Expander.ForgetDeleted].
func (e *Expander) Forget(ctx context.Context, volumeID string) error {
	if _, err := e.finishVolume(ctx, volumeID, uuid.NewString()); err != nil {
		return err
	}
	i, found, err := e.intent(ctx, volumeID)
	if err != nil || !found {
		return err
	}
	if err := e.takeBack(ctx, i); !errors.Is(err, ErrTakenBack) {
		return err
	}
	return nil
}

// ForgetDeleted deletes all records and snapshots of a volume that has no disk any more.
func (e *Expander) ForgetDeleted(ctx context.Context, volumeID string) error {
	records, err := e.rack.Records(ctx)
	if err != nil {
		return err
	}
	set := Parse(records)
	for _, disk := range slices.Sorted(maps.Keys(set.decisions)) {
		d := set.decisions[disk]
		if d.Volume != volumeID {
			continue
		}
		if err := e.deleteSnapshot(ctx, d.Attempt); err != nil {
			return err
		}
		if err := e.forgetAttempt(ctx, d, true); err != nil {
			return err
		}
	}
	return nil
}

// SettleAge is how long a process knows an attempt before it takes it over without an RPC. The process that carries the
// attempt out needs less. Taking it over earlier would be safe, and in vain.
const SettleAge = 2 * time.Minute

// Settle takes back the attempts of this cluster that no process carries out any more, and finishes those that are
// committed. It deletes the snapshots of expansions that no record names. snapshots are those of the rack. It returns true
// if it has to be called again after age, because this process has not known an attempt for so long. It is for the start of a controller, and for after an expansion that
// failed.
func (e *Expander) Settle(
	ctx context.Context,
	snapshots []rack.Snapshot,
	age time.Duration,
) (again bool, err error) {
	records, err := e.rack.Records(ctx) // after the snapshots: an attempt's intent is older than its snapshot
	if err != nil {
		return true, err
	}
	set, run := Parse(records), uuid.NewString()
	var failed error
	for _, snapshot := range snapshots {
		attempt, _ := strings.CutPrefix(snapshot.Name, diskname.ForExpansion(""))
		described, _ := rack.ParseDescription(snapshot.Description)
		if snapshot.Expansion() && described.Cluster == e.cluster && !set.names(attempt) {
			failed = errors.Join(failed, e.deleteSnapshot(ctx, attempt))
		}
	}
	for _, disk := range slices.Sorted(maps.Keys(set.decisions)) {
		d := set.decisions[disk]
		if d.Cluster != e.cluster || !unfinished(set, d, snapshots) {
			continue
		}
		if !e.isOld(d.Attempt, age) {
			again = true
			continue
		}
		if err := e.finish(ctx, set, d, run); !errors.Is(err, ErrTakenBack) && !errors.Is(err, ErrDeleted) {
			failed = errors.Join(failed, err)
		}
	}
	for _, volume := range slices.Sorted(maps.Keys(set.intents)) {
		i := set.intents[volume]
		if set.decisions[i.Disk].Attempt == i.Attempt || i.Cluster != e.cluster {
			continue
		}
		if !e.isOld(i.Attempt, age) {
			again = true
			continue
		}
		if err := e.takeBack(ctx, i); errors.Is(err, ErrUnderWay) {
			failed = errors.Join(failed, e.dropIntent(ctx, i))
		} else if !errors.Is(err, ErrTakenBack) {
			failed = errors.Join(failed, err)
		}
	}
	return again || failed != nil, failed
}

// isOld reports whether this process has known an attempt for this time.
func (e *Expander) isOld(attempt string, age time.Duration) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	since, known := e.seen[attempt]
	if !known {
		since = time.Now()
		e.seen[attempt] = since
	}
	return time.Since(since) >= age
}

// unfinished reports whether something is left to do of a decision. The decision about the first disk of a volume stays.
func unfinished(set Set, d rack.Replacement, snapshots []rack.Snapshot) bool {
	if d.Disk != d.Volume || !d.Committed || set.intents[d.Volume].Attempt == d.Attempt {
		return true
	}
	return slices.ContainsFunc(snapshots, func(s rack.Snapshot) bool { return s.Name == diskname.ForExpansion(d.Attempt) })
}
