// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package detach

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// List lists the records of this cluster.
func (d *Detacher) List(ctx context.Context) (Set, error) {
	records, err := d.rack.Records(ctx)
	if err != nil {
		return Set{}, err
	}
	return Parse(records, d.opts.Cluster), nil
}

// Defer records that a volume was unpublished from an instance to which its disk is attached. If the request
// may be the repetition of an old one, the deferred detach is untimed: see the package's documentation.
func (d *Detacher) Defer(ctx context.Context, volumeID, instanceID string) error {
	_, err := d.put(ctx, record.Deferral{VolumeID: volumeID, Instance: instanceID}, noRestart, d.untimedIfRepeated)
	return err
}

// DeferVouched is [Detacher.Defer] for a person who has confirmed that the volume is not in use there. So the request
// is no repetition, and the deferred detach is timed.
func (d *Detacher) DeferVouched(ctx context.Context, volumeID, instanceID string) error {
	_, err := d.put(ctx, record.Deferral{VolumeID: volumeID, Instance: instanceID}, noRestart, timed)
	return err
}

// DeferUnlessPublished records that a disk is about to be attached for a volume that is not published: publishing it
// takes the deferred detach back. [ErrRestarting] means that another process has recorded the same for another
// instance, which it is restarting: that process may attach the disk at any moment, and relies on its record.
func (d *Detacher) DeferUnlessPublished(ctx context.Context, volumeID, instanceID string) error {
	_, err := d.put(ctx, record.Deferral{VolumeID: volumeID, Instance: instanceID}, d.opts.Restarting, timed)
	return err
}

// NoteNoDevice records that the guest of an instance may lack the attached disk of a volume, because the rack failed to
// plug it in. run is since when the instance has been running. No detach is deferred by that.
func (d *Detacher) NoteNoDevice(ctx context.Context, volumeID, instanceID string, run time.Time) error {
	wanted := record.Deferral{VolumeID: volumeID, Instance: instanceID, Over: true, NoDevice: run}
	_, err := d.put(ctx, wanted, noRestart, func(old record.Deferral) (record.Deferral, bool) {
		changed := !old.NoDevice.Equal(run)
		old.NoDevice = run
		return old, changed
	})
	return err
}

// untimedIfRepeated makes a deferred detach untimed if the request for it may be the repetition of an old one, and
// reports whether that changed it. Without a grace period each request counts as one that comes after the unmount. A
// record may still be left from a time with a grace period. If there is an orchestrator to ask, [Detacher.Run] asks it
// before an untimed deferred detach gets a time.
func (d *Detacher) untimedIfRepeated(old record.Deferral) (now record.Deferral, changed bool) {
	switch {
	case d.opts.Grace == 0:
		return timed(old)
	case old.Over:
		old.Over, old.Untimed = false, true
		return old, true
	case d.Asks():
		// At the end of the grace period a claim ends the deferred detach. It may have been seen a moment before, and this
		// request may be for it. So near the end a request changes the record, and starts the grace period anew.
		return old, d.Left(old) < releaseTime
	case old.Untimed && d.sinceSeen(old.Stored.ID, old.Stored.Text) >= repetitionTime:
		old.Untimed = false // so long after the volume was published again, this is a new request
		return old, true
	}
	return old, false
}

// timed makes a deferred detach one with a grace period, and reports whether that changed it.
func timed(old record.Deferral) (now record.Deferral, changed bool) {
	changed = old.Over || old.Untimed
	old.Over, old.Untimed = false, false
	return old, changed
}

// noRestart is [Options.Restarting] without planned restarts.
func noRestart([]record.Record) func(string) bool { return func(string) bool { return false } }

// put records a deferred detach, or one that is over, and returns it. change updates an existing record of this
// instance and reports whether it changed. A record of another instance is stale and is replaced, unless that instance
// is restarting.
func (d *Detacher) put(
	ctx context.Context,
	wanted record.Deferral,
	restarting func([]record.Record) func(instanceID string) bool,
	change func(old record.Deferral) (record.Deferral, bool),
) (record.Deferral, error) {
	wanted.Cluster = d.opts.Cluster
	for range 3 {
		made, err := record.Deferrals.Create(ctx, d.rack, wanted)
		if err == nil {
			d.sinceSeen(made.Stored.ID, made.Stored.Text)
			d.wakeUp()
			return made, nil
		}
		if !errors.Is(err, rack.ErrAlreadyExists) {
			return record.Deferral{}, err
		}
		if done, err := d.reuse(ctx, &wanted, restarting, change); done || err != nil {
			return wanted, err
		}
	}
	_, _, err := record.Deferrals.Get(ctx, d.rack, d.opts.Cluster, wanted.VolumeID)
	return record.Deferral{}, cmp.Or(err, fmt.Errorf("volume %s: %w", wanted.VolumeID, rack.ErrConflict))
}

// reuse updates the volume's record to wanted. If the record must be recreated, it deletes the record, copies its state
// into wanted, and returns false.
func (d *Detacher) reuse(
	ctx context.Context,
	wanted *record.Deferral,
	restarting func([]record.Record) func(instanceID string) bool,
	change func(old record.Deferral) (record.Deferral, bool),
) (done bool, err error) {
	records, err := d.rack.Records(ctx)
	if err != nil {
		return false, err
	}
	set := Parse(records, d.opts.Cluster)
	old, ok := set.records[wanted.VolumeID]
	if !ok {
		return false, set.Check(wanted.VolumeID) // nil: it was just deleted
	}
	if old.Instance != wanted.Instance && !old.Over && restarting(records)(old.Instance) {
		return false, fmt.Errorf("volume %s, instance %s: %w", wanted.VolumeID, old.Instance, ErrRestarting)
	}
	now, changed := *wanted, true
	if old.Instance == wanted.Instance {
		now, changed = change(old)
	} else if d.opts.Grace > 0 {
		// The record is left from an earlier attachment to another instance.
		now, _ = change(old.ReplacedBy(*wanted))
	}
	*wanted = now
	switch {
	case d.mayVanish(old.Stored.ID), old.Instance != wanted.Instance && !old.Over:
		// This record is not reused: the rack may still delete it, or a process that has just detached the disk from the
		// other instance may mark it as over now.
		return false, d.delete(ctx, old.Stored.ID)
	case !changed:
		if !set.Detaching(wanted.VolumeID) {
			return true, nil
		}
		// A process may have carried it out already, and be about to mark it as over.
		kept, err := d.kept(ctx, old)
		if errors.Is(err, errBeingChanged) {
			return true, nil // that process has probably ended, or detaches the disk
		}
		return kept, err
	}
	updated, err := d.update(ctx, old, &now)
	d.wakeUp()
	if updated {
		*wanted = now
		return d.kept(ctx, now)
	}
	return updated, err
}

// kept reports whether a record that was used again still says that of this instance. A process that has
// found it over deletes it, and one that has just detached the disk marks it as over, without looking at it again. Both
// have the volume's detaching record, so the end of that one is awaited. If this takes long, the error says so,
// although the record is probably kept.
func (d *Detacher) kept(ctx context.Context, used record.Deferral) (bool, error) {
	for range keptLooks {
		set, err := d.List(ctx)
		if err != nil {
			return false, err
		}
		if !set.Detaching(used.VolumeID) {
			now := set.records[used.VolumeID]
			return now.Stored.ID == used.Stored.ID && now.Instance == used.Instance && now.Over == used.Over, nil
		}
		select {
		case <-time.After(keptPause):
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
	return false, fmt.Errorf("volume %s: %w: %w", used.VolumeID, errBeingChanged, rack.ErrUnavailable)
}

// expire deletes a record that is over, unless it was used again since it was listed. Another process may be using it
// again now: it looks for the detaching record afterwards.
func (d *Detacher) expire(ctx context.Context, listed record.Deferral) error {
	return d.holdListed(ctx, listed, func(ctx context.Context) error {
		if err := d.delete(ctx, listed.Stored.ID); err != nil {
			return fmt.Errorf("%w: %w", errUnanswered, err)
		}
		return nil
	})
}

// TakeBack ends the deferred detach of a volume that is published. After it no process detaches the volume's disk.
// [ErrDetaching] means that one is doing so now. The caller must look at the disk afterwards: a process may just have
// detached it. If the deferred detach is over already, it is remembered for [repetitionTime] from now on.
func (d *Detacher) TakeBack(ctx context.Context, volumeID string) error {
	records, err := d.rack.Records(ctx)
	if err != nil {
		return err
	}
	return d.TakeBackListed(ctx, volumeID, records)
}

// TakeBackListed is [Detacher.TakeBack] for a caller that has just read the rack's records. Without a grace period it
// deletes the record, but not before no process detaches the disk: a later publish must see that, too.
func (d *Detacher) TakeBackListed(ctx context.Context, volumeID string, records []record.Record) (err error) {
	set := Parse(records, d.opts.Cluster)
	if err := set.Check(volumeID); err != nil {
		return err
	}
	deferred, ok := set.records[volumeID]
	if ok {
		if err := d.markOver(ctx, deferred); err != nil {
			return err
		}
		if set, err = d.List(ctx); err != nil {
			return err
		}
	}
	if set.Detaching(volumeID) {
		if d.opts.Grace == 0 { // [Detacher.Run] does not do it
			err = d.Tidy(ctx, set)
		}
		return errors.Join(fmt.Errorf("volume %s: %w", volumeID, ErrDetaching), err)
	}
	if ok && d.opts.Grace == 0 {
		return d.delete(ctx, deferred.Stored.ID)
	}
	return nil
}

// End ends a deferred detach.
func (d *Detacher) End(ctx context.Context, deferred record.Deferral) error {
	if d.opts.Grace == 0 {
		return d.delete(ctx, deferred.Stored.ID)
	}
	return d.markOver(ctx, deferred)
}

func (d *Detacher) markOver(ctx context.Context, deferred record.Deferral) error {
	over := deferred
	over.Over, over.Untimed, over.NoDevice = true, false, time.Time{}
	_, err := d.update(ctx, deferred, &over)
	return err
}

// StartClock starts the grace period of an untimed deferred detach, and returns the deferred detach as it is then. It
// asks for the claims first, and returns [ErrClaimed] or [ErrClaimsUnknown] if the deferred detach stays untimed.
func (d *Detacher) StartClock(ctx context.Context, deferred record.Deferral) (record.Deferral, error) {
	if !deferred.Untimed {
		return deferred, nil
	}
	if reason := d.Staying(ctx, []record.Deferral{deferred})[deferred.VolumeID]; reason != nil {
		return deferred, reason
	}
	return d.startClock(ctx, deferred)
}

func (d *Detacher) startClock(ctx context.Context, deferred record.Deferral) (record.Deferral, error) {
	timed := deferred
	timed.Untimed = false
	updated, err := d.update(ctx, deferred, &timed)
	if err == nil && !updated {
		err = fmt.Errorf("volume %s: %w", deferred.VolumeID, ErrNotDeferred)
	}
	return timed, err
}

// Forget deletes the record of a volume, which was deleted or belongs to another cluster now.
func (d *Detacher) Forget(ctx context.Context, volumeID string) error {
	old, found, err := record.Deferrals.Get(ctx, d.rack, d.opts.Cluster, volumeID)
	if err != nil || !found {
		return err
	}
	return d.delete(ctx, old.Stored.ID)
}

// Delete deletes the record of a volume in a set.
func (d *Detacher) Delete(ctx context.Context, set Set, volumeID string) error {
	return d.delete(ctx, set.records[volumeID].Stored.ID)
}
