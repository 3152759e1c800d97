// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package expand

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// Finish finishes the expansion of a volume whose disk is gone ([rack.ErrReplaced]), and returns the new disk.
// [ErrDeleted] means that the volume was deleted. needed says that the RPC needs the volume. Without that, Finish makes
// no disk, and its error names the snapshot with the data.
func (e *Expander) Finish(ctx context.Context, volumeID string, needed bool) (rack.Disk, error) {
	first, i, err := e.replacementOf(ctx, volumeID)
	if err != nil {
		return rack.Disk{}, err
	}
	if i.Attempt != "" {
		d, decided, err := e.decisionOf(ctx, i)
		if err != nil {
			return rack.Disk{}, err
		}
		if decided && d.Committed {
			return e.forward(ctx, d, needed)
		}
	}
	disk, err := e.existing(ctx, first) // another process may just have finished
	if errors.Is(err, errOld) {
		err = fmt.Errorf("volume %s: %w", volumeID, ErrUnderWay)
	}
	return disk, err
}

// replacementOf returns the decision about the first disk of a volume, and the volume's intent if there is one.
func (e *Expander) replacementOf(
	ctx context.Context, volumeID string,
) (first record.Replacement, i record.Intent, err error) {
	first, found, err := e.decision(ctx, rack.DiskID(volumeID))
	if err == nil && !found {
		err = fmt.Errorf("volume %s: %w", volumeID, ErrDeleted)
	}
	if err != nil {
		return first, i, err
	}
	if i, found, err = e.intent(ctx, first.DiskName); !found || i.Volume != volumeID {
		i = record.Intent{}
	}
	return first, i, err
}

// Yield makes sure that a disk, which was just attached or stays attached, is not replaced. The caller has attached the
// disk before it read the records. If an expansion is committed, the disk is detached again, and the error is
// [ErrUnderWay]. After any other error the disk may still be attached: [rack.ErrNotStopped] says that the rack does not
// detach it while its instance runs.
func (e *Expander) Yield(ctx context.Context, disk rack.Disk, records []record.Record) error {
	set := parseRecords(records)
	if err := set.newer[disk.VolumeID]; err != nil {
		return err
	}
	if d, decided := set.decisions[disk.ID]; decided {
		late, err := e.isLate(ctx, d)
		if err == nil && late {
			err = e.rack.DeleteRecord(ctx, d.Stored.ID)
		}
		if err != nil {
			return err
		}
		if d.Committed && !late {
			return e.giveWay(ctx, disk)
		}
	}
	i, found := set.intents[disk.VolumeID]
	if !found || i.Disk != disk.ID {
		return nil
	}
	switch err := e.takeBack(ctx, i); {
	case errors.Is(err, ErrTakenBack):
		e.log.Info("took an expansion back, because the volume is published", "volume_id", disk.VolumeID)
		e.unlearn(disk.VolumeID)
		return nil
	case errors.Is(err, ErrUnderWay):
		return e.giveWay(ctx, disk)
	default:
		return err
	}
}

// giveWay detaches a disk whose replacement is committed, and finishes the expansion. The disk is detached by its own
// ID: meanwhile another process may have replaced it, and the volume may be published with the new one.
func (e *Expander) giveWay(ctx context.Context, disk rack.Disk) error {
	err := disk.CheckKnown()
	if err == nil {
		_, err = e.rack.Detach(ctx, disk.ID, disk.InstanceID)
	}
	switch {
	case errors.Is(err, rack.ErrNotStopped):
		return err
	case err != nil:
		return fmt.Errorf(
			"volume %s is being expanded, and its disk must be detached first: %w: %v", disk.VolumeID, rack.ErrUnavailable, err)
	}
	if _, err := e.Finish(ctx, disk.VolumeID, true); err != nil {
		return fmt.Errorf("volume %s: %w: %w", disk.VolumeID, ErrUnderWay, err)
	}
	return fmt.Errorf("volume %s: %w", disk.VolumeID, ErrUnderWay)
}

// Owner returns the cluster whose expansion a volume without a disk is in ([rack.ErrReplaced]).
func (e *Expander) Owner(ctx context.Context, volumeID string) (cluster string, err error) {
	first, i, err := e.replacementOf(ctx, volumeID)
	return cmp.Or(i.Cluster, first.Cluster), err
}

// maxDeleted bounds the memory for the deleted volumes.
const maxDeleted = 20_000

// Deleted is for DeleteVolume, after the volume's disk was deleted. It deletes what is left of the volume's expansions.
// Without a disk, with a name, there was none. expanding says that an expansion may be under way, or may have left more
// than the record of a finished one. An expansion in another process may leave something later: that is deleted by
// [Expander.Settle], after an answer with OK only. A volume whose deletion failed may be used again.
func (e *Expander) Deleted(ctx context.Context, disk rack.Disk, expanding bool) (err error) {
	volumeID := disk.VolumeID
	e.mu.Lock()
	_, known := e.known[volumeID]
	e.mu.Unlock()
	expanding = expanding || known
	if !expanding && disk.Name != "" && disk.Grown() {
		look := e.Look(ctx, disk.Name)
		err = e.deleteHalf(ctx, rack.DiskID(volumeID))
		_, found, lookErr := look.UnderWay(ctx)
		if err = cmp.Or(err, lookErr); err == nil && !found {
			err = e.rack.DeleteRecordNamed(ctx, record.Replacements.Named("", volumeID))
		}
		expanding = found
	}
	if expanding && err == nil {
		var records []record.Record
		if records, err = e.rack.Records(ctx); err == nil {
			err = e.forget(ctx, volumeID, parseRecords(records))
		}
	}
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.deleted) >= maxDeleted {
		clear(e.deleted)
	}
	e.deleted[volumeID] = true
	return nil
}

// forget deletes all records and snapshots of a deleted volume. The record that leads from the volume ID to the disk
// goes last, so that a repeated DeleteVolume finds the rest.
func (e *Expander) forget(ctx context.Context, volumeID string, set recordSet) error {
	if err := set.newer[volumeID]; err != nil {
		return err
	}
	decisions := slices.DeleteFunc(slices.Collect(maps.Values(set.decisions)), func(d record.Replacement) bool {
		return d.Volume != volumeID
	})
	slices.SortFunc(decisions, func(a, b record.Replacement) int {
		switch {
		case a.Disk == rack.DiskID(volumeID):
			return 1
		case b.Disk == rack.DiskID(volumeID):
			return -1
		}
		return cmp.Compare(a.Disk, b.Disk)
	})
	i, begun := set.intents[volumeID]
	if begun {
		if err := e.deleteSnapshot(ctx, i.Attempt); err != nil {
			return err
		}
	}
	for _, d := range decisions {
		if err := e.deleteSnapshot(ctx, d.Attempt); err != nil {
			return err
		}
		if err := e.deleteMadeMeanwhile(ctx, d); err != nil {
			return err
		}
		if err := e.deleteHalf(ctx, d.Disk); err != nil {
			return err
		}
	}
	if begun {
		if err := e.rack.DeleteRecord(ctx, i.Stored.ID); err != nil {
			return err
		}
	}
	for _, d := range decisions {
		if err := e.rack.DeleteRecord(ctx, d.Stored.ID); err != nil {
			return err
		}
	}
	e.unlearn(volumeID)
	return nil
}

// deleteMadeMeanwhile deletes a disk that another process made of the snapshot before the snapshot was deleted.
func (e *Expander) deleteMadeMeanwhile(ctx context.Context, d record.Replacement) error {
	if !d.Committed {
		return nil
	}
	disk, err := e.rack.DiskByName(ctx, d.DiskName)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return nil
	case err != nil:
		return err
	case disk.VolumeID != d.Volume:
		return nil
	}
	return e.confirmGone(ctx, e.rack.DeleteDisk(ctx, disk.ID))
}

// deleteHalf deletes the old disk of a volume if the rack first answered that the disk is gone, and then failed to
// delete it.
func (e *Expander) deleteHalf(ctx context.Context, diskID rack.DiskID) error {
	disk, err := e.rack.DiskByID(ctx, diskID)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return nil
	case err != nil:
		return err
	case !disk.HalfDeleted():
		return nil
	}
	return e.confirmGone(ctx, e.rack.DeleteDisk(ctx, diskID))
}

// deleteHalves deletes such disks of all volumes of this cluster that have grown. adoptions are the clusters that have
// adopted a volume, by volume. A decision names the cluster that made it, which may not own the volume any more.
func (e *Expander) deleteHalves(ctx context.Context, set recordSet, adoptions map[string]string) (failed error) {
	committed := func(d record.Replacement) bool { return d.Committed }
	if !slices.ContainsFunc(slices.Collect(maps.Values(set.decisions)), committed) {
		return nil
	}
	for listed, err := range e.rack.Disks(ctx, rack.Cursor{}, 0) {
		if err != nil {
			return errors.Join(failed, err)
		}
		disk := listed.Value
		if !disk.HalfDeleted() || !set.decisions[rack.DiskID(disk.VolumeID)].Committed {
			continue
		}
		described, _ := rack.ParseDescription(disk.Description)
		if cmp.Or(adoptions[disk.VolumeID], described.Cluster) == e.cluster {
			failed = errors.Join(failed, e.deleteHalf(ctx, disk.ID))
		}
	}
	return failed
}

// SettleAge is how long a process sees no sign that another one carries out an expansion, before it takes it over
// without an RPC. Between two calls an orchestrator pauses for less. An earlier takeover would be safe but useless.
const SettleAge = 2 * time.Minute

// Settle takes back the attempts of this cluster that no process carries out any more, and finishes those that are
// committed. It never makes the disk of a volume whose disk is gone: the volume may be deleted. It deletes what is left
// of deleted volumes, snapshots of expansions that no record names, and old disks that the rack failed to delete.
// snapshots are the expansions' snapshots on the rack. It returns true if it must be called again after age, because
// this process learned of an attempt less than age ago. adoptions finds in the records the cluster that has adopted
// each volume. Call Settle when a controller starts, and after an expansion that failed.
func (e *Expander) Settle(
	ctx context.Context,
	snapshots []rack.Snapshot,
	age time.Duration,
	adoptions func(records []record.Record) map[string]string,
) (again bool, err error) {
	records, err := e.rack.Records(ctx) // after the snapshots: an attempt's intent is older than its snapshot
	if err != nil {
		return true, err
	}
	for _, err := range record.Unread(records, e.cluster) {
		e.sayOnce(err.Error())
	}
	set := parseRecords(records)
	var failed error
	hasSnapshot, creating := map[string]bool{}, map[string]bool{}
	for _, snapshot := range snapshots {
		attempt, _ := strings.CutPrefix(snapshot.Name, diskname.ForExpansion(""))
		hasSnapshot[attempt], creating[attempt] = true, snapshot.State == rack.SnapshotCreating
		described, _ := rack.ParseDescription(snapshot.Description)
		if snapshot.Expansion() && described.Cluster == e.cluster && !set.attempts[attempt] &&
			set.newer[snapshot.VolumeID] == nil {
			failed = errors.Join(failed, e.deleteSnapshot(ctx, attempt))
		}
	}
	unfinished := set.unfinished(e.cluster, hasSnapshot)
	e.keepKnown(unfinished, age)
	for _, volume := range set.volumes() {
		attempt := set.intents[volume].Attempt
		now := step{attempt, creating[attempt]}
		switch {
		case e.isDeleted(volume):
			failed = errors.Join(failed, e.forget(ctx, volume, set))
		case !unfinished[volume]:
		case !e.isOld(volume, now, age) || now.snapshotting:
			again = true
		default:
			failed = errors.Join(failed, e.settle(ctx, volume, set))
		}
	}
	failed = errors.Join(failed, e.deleteHalves(ctx, set, adoptions(records)))
	return again || failed != nil, failed
}

// sayOnce logs that a group is ignored.
func (e *Expander) sayOnce(why string) {
	e.mu.Lock()
	said := e.said[why]
	e.said[why] = true
	e.mu.Unlock()
	if !said {
		e.log.Warn("a record on the rack is not read", "error", why)
	}
}

// settle finishes what the records say of a volume, or takes it back.
func (e *Expander) settle(ctx context.Context, volume string, set recordSet) (failed error) {
	i, begun := set.intents[volume]
	if begun && set.decisions[i.Disk].Attempt != i.Attempt {
		if err := e.takeBack(ctx, i); !errors.Is(err, ErrTakenBack) && !errors.Is(err, ErrUnderWay) {
			failed = err
		}
	}
	for _, disk := range slices.Sorted(maps.Keys(set.decisions)) {
		d := set.decisions[disk]
		if d.Volume != volume {
			continue
		}
		_, err := e.forward(ctx, d, false)
		switch {
		case err == nil, errors.Is(err, ErrTakenBack), errors.Is(err, ErrDeleted):
		case errors.Is(err, rack.ErrReplaced):
			e.log.Warn("a volume has no disk", "volume_id", volume, "error", err.Error())
		default:
			failed = errors.Join(failed, err)
		}
	}
	return failed
}

// Unfinished returns how many volumes have an expansion that is not finished, as far as this process knows. It sends no
// request.
func (e *Expander) Unfinished() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.known)
}

func (e *Expander) unlearn(volumeID string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.known, volumeID)
}

func (e *Expander) isDeleted(volumeID string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.deleted[volumeID]
}

// step is how far an attempt has come: whether the rack is still making its snapshot.
type step struct {
	attempt      string
	snapshotting bool
}

// sighting is what this process knows of an expansion that is not finished.
type sighting struct {
	// step is the step that was seen last, and since is when it was seen first, or when the last call of this process
	// ended that carried it out.
	step  step
	since time.Time
	// calls are such calls under way.
	calls int
}

// work notes that a call of this process begins (1) or ends (-1) to carry out an expansion of the volume.
func (e *Expander) work(volumeID string, calls int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if seen, known := e.known[volumeID]; known || calls > 0 {
		e.known[volumeID] = sighting{seen.step, time.Now(), max(0, seen.calls+calls)}
	}
}

// isOld reports whether this process has seen an expansion of the volume at this step for this time, and does not carry
// it out itself.
func (e *Expander) isOld(volumeID string, now step, age time.Duration) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	seen, known := e.known[volumeID]
	if !known || seen.step != now {
		seen = sighting{now, time.Now(), seen.calls}
		e.known[volumeID] = seen
	}
	return seen.calls == 0 && time.Since(seen.since) >= age
}

// keepKnown drops the volumes without an unfinished expansion. It keeps those that this process learned of in the last
// age, because their records may be newer than the list.
func (e *Expander) keepKnown(unfinished map[string]bool, age time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	maps.DeleteFunc(e.known, func(volume string, seen sighting) bool {
		return !unfinished[volume] && seen.calls == 0 && time.Since(seen.since) > age
	})
}
