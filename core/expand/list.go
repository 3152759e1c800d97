// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package expand

import (
	"context"
	"errors"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
)

// Disks lists like [rack.Client.Disks], and lists a volume also between the deletion of its old disk and the creation
// of the new one. Such a volume is a disk without an ID, with the size and the description of the snapshot that has
// its data, at the place of the old disk. A volume is listed once, although the disks change while they are listed. It
// reads the records twice, before and after the first page of disks, and for each committed expansion that is not
// finished it makes two requests more.
//
// A volume can be missing if its expansion begins while a list of more than one page is read. It can be missing, or be
// there twice, if the list is read in parts, each after another cursor, and the disk is replaced between two of them.
func (e *Expander) Disks(
	ctx context.Context, from rack.Cursor, wanted int,
) iter.Seq2[rack.ListItem[rack.Disk], error] {
	return func(yield func(rack.ListItem[rack.Disk], error) bool) {
		l := &lister{
			Expander: e, from: from,
			replaced: map[string]record.Replacement{}, created: map[string]rack.Disk{}, listed: map[string]bool{},
		}
		fail := func(err error) { yield(rack.ListItem[rack.Disk]{}, err) }
		if err := l.readRecords(ctx); err != nil {
			fail(err)
			return
		}
		token, begun := from.PageToken, false
		for item, err := range e.rack.Disks(ctx, from, wanted) {
			if err == nil && !begun {
				err = l.readRecords(ctx)
			}
			if err != nil {
				fail(err)
				return
			}
			if begun = true; !l.listReplaced(ctx, item.ID, token, yield) {
				return
			}
			if item.Value, err = l.believed(ctx, item.Value); err != nil {
				fail(err)
				return
			}
			token = item.PageToken
			if !l.isRepeated(item.Value) && !yield(item, nil) {
				return
			}
		}
		if !begun {
			if err := l.readRecords(ctx); err != nil {
				fail(err)
				return
			}
		}
		l.listReplaced(ctx, "", token, yield)
	}
}

// lister is the state of a list under way.
type lister struct {
	*Expander
	from rack.Cursor
	// replaced are the expansions whose old disk was not reached yet, by that disk's place in the list, which is its ID.
	// created are new disks that were found by their names and not reached yet, by their places.
	replaced map[string]record.Replacement
	created  map[string]rack.Disk
	// records are the records as they were read last.
	records recordSet
	// listed are the volumes that were listed. Any of them may begin to grow while the list is read.
	listed map[string]bool
}

// readRecords notes the committed expansions that are not finished and whose place is in this part of the list. An
// expansion under way while the first page was read is in the records before that or in those after it.
func (l *lister) readRecords(ctx context.Context) error {
	records, err := l.rack.Records(ctx)
	if err != nil {
		return err
	}
	set := parseRecords(records)
	l.records = set
	for disk, d := range set.decisions {
		place := string(disk)
		if d.Cluster == l.cluster && set.underWay(d) && place > l.from.LastID && !l.isDeleted(d.Volume) {
			l.replaced[place] = d
		}
	}
	return nil
}

// believed returns a disk as that of the volume that its description names, if a record says so, or if the volume's
// first disk is gone: the record may have been deleted by hand. Otherwise any user may have written the description.
func (l *lister) believed(ctx context.Context, disk rack.Disk) (rack.Disk, error) {
	first := rack.DiskID(disk.VolumeID)
	known := l.records.decisions[first]
	if !disk.Grown() || disk.HalfDeleted() || known.Committed && known.DiskName == disk.Name ||
		l.records.newer[disk.VolumeID] != nil {
		return disk, nil
	}
	old, err := l.rack.DiskByID(ctx, first)
	switch {
	case errors.Is(err, rack.ErrNotFound), err == nil && old.HalfDeleted():
		return disk, nil
	case err != nil && !errors.Is(err, rack.ErrUnknown) && !errors.Is(err, record.ErrFormat):
		return disk, err
	}
	disk.VolumeID, disk.CreatedBytes = string(disk.ID), disk.SizeBytes
	return disk, nil
}

// isRepeated reports whether the volume of a disk was listed already, and notes that it is listed now. A half-deleted
// disk is no volume's any more.
func (l *lister) isRepeated(disk rack.Disk) bool {
	if disk.HalfDeleted() {
		return false
	}
	repeated := l.listed[disk.VolumeID]
	l.listed[disk.VolumeID] = true
	return repeated
}

// listReplaced lists the volumes whose place is before the next disk on the rack, or all that are left if next is "".
// It returns false if the list ends.
func (l *lister) listReplaced(
	ctx context.Context, next, token string, yield func(rack.ListItem[rack.Disk], error) bool,
) bool {
	for {
		places := slices.Collect(maps.Keys(l.replaced))
		places = slices.AppendSeq(places, maps.Keys(l.created))
		if len(places) == 0 {
			return true
		}
		place := slices.Min(places)
		if next != "" && place >= next {
			return true
		}
		disk, found, err := l.take(ctx, place)
		if err != nil {
			yield(rack.ListItem[rack.Disk]{}, err)
			return false
		}
		if found && !l.isRepeated(disk) &&
			!yield(rack.ListItem[rack.Disk]{Value: disk, ID: place, PageToken: token}, nil) {
			return false
		}
	}
}

// take returns the disk to list at a place. found is false if there is none.
func (l *lister) take(ctx context.Context, place string) (disk rack.Disk, found bool, err error) {
	if disk, found := l.created[place]; found {
		delete(l.created, place)
		return disk, true, nil
	}
	d := l.replaced[place]
	delete(l.replaced, place)
	if l.listed[d.Volume] {
		return rack.Disk{}, false, nil
	}
	disk, err = l.between(ctx, d)
	itsPlace := string(disk.ID)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return rack.Disk{}, false, l.rack.ConfirmProject(ctx)
	case err != nil:
		return rack.Disk{}, false, err
	case itsPlace > place: // the list may have been read there before the disk was made
		l.created[itsPlace] = disk
		return rack.Disk{}, false, nil
	}
	// A new disk before the beginning of this part was listed with the part before.
	return disk, itsPlace == "" || itsPlace > l.from.LastID, nil
}

// between returns the disk of a volume whose old disk was not listed: the new one, or what its snapshot says.
// [rack.ErrNotFound] means that the volume was deleted. A list also shows what is in an unknown state.
func (l *lister) between(ctx context.Context, d record.Replacement) (rack.Disk, error) {
	disk, err := l.named(ctx, d)
	if !errors.Is(err, rack.ErrNotFound) {
		return disk, err
	}
	snapshot, err := l.rack.SnapshotByName(ctx, diskname.ForExpansion(d.Attempt))
	if errors.Is(err, rack.ErrNotFound) { // the new disk was made in the meantime
		return l.named(ctx, d)
	}
	if err != nil && !errors.Is(err, rack.ErrUnknown) {
		return rack.Disk{}, err
	}
	described, _ := rack.ParseDescription(snapshot.Description) // this plugin wrote it, see prepare
	return rack.Disk{
		VolumeID: d.Volume, Name: d.DiskName, Description: snapshot.Description, ProjectID: snapshot.ProjectID,
		SizeBytes: snapshot.SizeBytes, CreatedBytes: described.CreatedBytes,
		SnapshotID: described.SourceSnapshot, ImageID: described.SourceImage,
		State: rack.Detached, Created: snapshot.Created, VolumeCreated: time.Unix(described.CreatedAt, 0).UTC(),
	}, nil
}

// named returns the volume's disk by its name. [rack.ErrNotFound] also means that another disk took the name.
func (l *lister) named(ctx context.Context, d record.Replacement) (rack.Disk, error) {
	disk, err := l.rack.DiskByName(ctx, d.DiskName)
	if errors.Is(err, rack.ErrUnknown) {
		err = nil
	}
	if err == nil && disk.VolumeID != d.Volume {
		return rack.Disk{}, rack.ErrNotFound
	}
	return disk, err
}
