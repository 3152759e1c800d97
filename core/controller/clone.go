// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// cleanTime is how long the temporary snapshot of a clone may take to delete once the caller's own time has run out.
const cleanTime = 10 * time.Second

// clone makes the disk as a copy of another one, on that one's rack. A rack copies no disks, so it is made from a temporary
// snapshot, which is gone before anything is answered; one that a crash leaves behind is the sweeper's (sweep.go).
func (c *Service) clone(ctx context.Context, want wanted, candidates []*rack.Client) (onRack, rack.Disk, error) {
	on, source, err := c.disk(ctx, want.cloneOf)
	if err != nil {
		return c.madeFromGone(ctx, want, candidates, err)
	}
	if err := on.checkSource(ctx, "disk", source.Name, source.ID, source.ProjectID, candidates); err != nil {
		return onRack{}, rack.Disk{}, err
	}
	size, err := sizeOf(want.capacity, source.SizeBytes)
	if err != nil {
		return onRack{}, rack.Disk{}, err
	}
	if source, err = on.readySource(ctx, source); err != nil {
		return onRack{}, rack.Disk{}, err
	}
	description, _ := rack.ParseDescription(source.Description) // a disk that we did not make has no lineage
	want.description.Lineage = rack.Lineage(source.ID, description.Lineage)
	want.description.Clone = true
	disk, err := on.copyDisk(ctx, want, size)
	return on, disk, err
}

// readySource waits for a disk that is to be copied to come to rest, and refuses one that a rack makes no snapshots of.
func (c onRack) readySource(ctx context.Context, disk rack.Disk) (rack.Disk, error) {
	disk, err := c.settled(ctx, disk)
	if err != nil {
		return disk, err
	}
	var why string
	switch {
	case disk.Local:
		why = "is a local disk"
	case disk.ReadOnly:
		why = "is read-only: use the snapshot that it was made from"
	case disk.State != rack.Detached && disk.State != rack.Attached:
		why = fmt.Sprintf("is in state %q", disk.State)
	default:
		return disk, nil
	}
	return disk, rpc.FailedPrecondition(
		"rack %q makes no snapshot of disk %q (%s): it %s",
		c.rack.Name(),
		disk.Name,
		disk.ID,
		why,
	)
}

// copyDisk makes the copy, unless it is there already. Whatever comes of it, the temporary snapshot goes first.
func (c onRack) copyDisk(ctx context.Context, want wanted, sizeBytes int64) (disk rack.Disk, err error) {
	disk, err = c.rack.DiskByName(ctx, diskname.ForVolume(c.cluster, want.name))
	switch {
	case err == nil:
		if disk, err = c.accept(ctx, want, disk); err == nil {
			c.dropTemporary(ctx, want)
		}
		return disk, err
	case !errors.Is(err, rack.ErrNotFound):
		return disk, unknownOutcome(ctx, err)
	}
	snapshot, err := c.takeTemporary(ctx, want)
	if err != nil {
		c.dropTemporary(ctx, want)
		if rack.OutcomeUnknown(err) {
			c.sweeper.in(c.sweeper.age) // the rack may still be making it
		}
		return disk, err
	}
	disk, err = c.make(ctx, want, sizeBytes, snapshot.ID)
	if errors.Is(err, rack.ErrNotFound) {
		err = rpc.Unavailable("volume %q: the temporary snapshot %q is gone: ask again: %w", want.name, snapshot.Name, err)
	}
	c.deleteTemporary(ctx, snapshot)
	return disk, err
}

// takeTemporary makes the temporary snapshot. One that an earlier call has left shows the disk as it was then, and is replaced.
func (c onRack) takeTemporary(ctx context.Context, want wanted) (rack.Snapshot, error) {
	name := diskname.ForClone(c.cluster, want.name)
	description := rack.NewTemporaryDescription(c.cluster, want.name, want.description.Lineage).Encode()
	snapshot, err := c.createSnapshot(ctx, name, description, want.cloneOf)
	if errors.Is(err, rack.ErrAlreadyExists) {
		old, lookErr := c.rack.SnapshotByName(ctx, name)
		if lookErr == nil {
			if err := c.checkTemporary(old); err != nil {
				return snapshot, err
			}
			lookErr = c.rack.DeleteSnapshot(ctx, old.ID)
		}
		if lookErr != nil && !errors.Is(lookErr, rack.ErrNotFound) {
			return snapshot, unknownOutcome(ctx, lookErr)
		}
		snapshot, err = c.createSnapshot(ctx, name, description, want.cloneOf)
	}
	switch {
	case err == nil, errors.Is(err, rack.ErrCapacity):
		return snapshot, err
	case errors.Is(err, rack.ErrNotFound):
		return snapshot, rpc.Unavailable(
			"volume %q: its source, disk %s, was there and is gone: ask again: %w",
			want.name,
			want.cloneOf,
			err,
		)
	}
	return snapshot, unknownOutcome(ctx, fmt.Errorf("volume %q: copy disk %s: %w", want.name, want.cloneOf, err))
}

// checkTemporary refuses to touch a snapshot that only has the name of one of ours.
func (c onRack) checkTemporary(snapshot rack.Snapshot) error {
	if owner, ours := rack.ParseDescription(
		snapshot.Description,
	); ours && owner.Cluster == c.cluster &&
		snapshot.Temporary() {
		return nil
	}
	return rpc.AlreadyExists(
		"snapshot %q (%s) in project %q was not made by this plugin and has the name of a temporary one: rename or delete it",
		snapshot.Name,
		snapshot.ID,
		c.rack.ProjectName(),
	)
}

// dropTemporary deletes the temporary snapshot of a volume, if there is one.
func (c onRack) dropTemporary(ctx context.Context, want wanted) {
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTime)
	defer cancel()
	name := diskname.ForClone(c.cluster, want.name)
	snapshot, err := c.rack.SnapshotByName(clean, name)
	switch {
	case errors.Is(err, rack.ErrNotFound):
	case err != nil:
		c.leftTemporary(name, err)
	case c.checkTemporary(snapshot) == nil:
		c.deleteTemporary(ctx, snapshot)
	}
}

// deleteTemporary deletes a temporary snapshot. If it cannot be done now, the sweeper does it later.
func (c onRack) deleteTemporary(ctx context.Context, snapshot rack.Snapshot) {
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTime)
	defer cancel()
	err := c.rack.DeleteSnapshot(clean, snapshot.ID)
	if err != nil && rack.OutcomeUnknown(err) {
		err = c.rack.DeleteSnapshot(clean, snapshot.ID) // once more: most such refusals pass at once
	}
	if err != nil && !errors.Is(err, rack.ErrNotFound) {
		c.leftTemporary(snapshot.Name, err)
	}
}

func (c onRack) leftTemporary(name string, err error) {
	c.log.Warn(
		"a temporary snapshot could not be deleted and will be within an hour or so",
		"name",
		name,
		"rack",
		c.rack.Name(),
		"error",
		err.Error(),
	)
	c.sweeper.in(c.sweeper.age)
}
