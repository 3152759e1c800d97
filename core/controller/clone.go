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

// cleanupTimeout bounds the deletion of a clone's temporary snapshot. The deletion goes on after the caller's context
// ended.
const cleanupTimeout = 10 * time.Second

// clone makes the disk as a copy of another disk, on the same rack. A rack cannot copy a disk, so clone makes a
// temporary snapshot of the source and the new disk from that. It deletes the snapshot before it answers. The sweeper
// deletes a snapshot that a crash left behind (sweep.go).
func (c *Service) clone(
	ctx context.Context,
	want volumeRequest,
	candidates []*rack.Client,
) (rackController, rack.Disk, error) {
	rc, source, size, err := c.sourceDisk(ctx, want, candidates)
	if err != nil {
		return c.existingOr(ctx, want, candidates, err)
	}
	description, _ := rack.ParseDescription(source.Description) // a disk that this plugin did not make has no lineage
	if err := want.takeFixed(description, source.SizeBytes, size); err != nil {
		return c.existingOr(ctx, want, candidates, err)
	}
	want.description.Lineage = rack.Lineage(source.VolumeID, description.Lineage)
	want.description.Clone = true
	disk, err := rc.copyDisk(ctx, want, source, size)
	return rc, disk, err
}

// sourceDisk returns the disk of the requested volume and the size of its copy. It rejects a disk that cannot be the
// source.
func (c *Service) sourceDisk(
	ctx context.Context,
	want volumeRequest,
	candidates []*rack.Client,
) (rc rackController, source rack.Disk, size int64, err error) {
	if rc, source, err = c.neededDisk(ctx, want.cloneOf); err != nil {
		return rc, source, 0, err
	}
	if err := rc.checkSource(ctx, source, candidates); err != nil {
		return rc, source, 0, err
	}
	described, ours := rack.ParseDescription(source.Description)
	err = checkSourceEncryption(want, "volume", source.Name, source.VolumeID, sourceContent{described, ours})
	if err != nil {
		return rc, source, 0, err
	}
	if source, err = rc.waitForSource(ctx, source); err != nil {
		return rc, source, 0, err
	}
	size, err = chooseSize(want.capacity, source.SizeBytes) // after the wait: the source may have grown
	return rc, source, size, err
}

// checkSource rejects a disk as the source of a volume or snapshot: on a rack that is not among the candidates, in
// another project, or of another cluster.
func (c rackController) checkSource(ctx context.Context, source rack.Disk, candidates []*rack.Client) error {
	err := c.checkSourceLocation(ctx, "volume", source.Name, source.VolumeID, source.ProjectID, candidates)
	if err != nil {
		return err
	}
	return c.checkDiskOwner(ctx, source)
}

// waitForSource waits until a source disk is in a stable state, and rejects a disk that the rack cannot make snapshots
// of.
func (c rackController) waitForSource(ctx context.Context, disk rack.Disk) (rack.Disk, error) {
	disk, err := c.waitForDisk(ctx, disk)
	if err != nil {
		return disk, err
	}
	var reason string
	switch {
	case disk.Local:
		reason = "is a local disk"
	case disk.ReadOnly:
		reason = "is read-only: use the snapshot it was made from"
	case disk.State != rack.Detached && disk.State != rack.Attached:
		reason = fmt.Sprintf("is in state %q", disk.State)
	default:
		return disk, nil
	}
	return disk, rpc.FailedPrecondition(
		"rack %q cannot make a snapshot of disk %q (%s): the disk %s",
		c.rack.Name(),
		disk.Name,
		disk.ID,
		reason,
	)
}

// copyDisk makes the copy, unless the copy exists already. It deletes the temporary snapshot in every case.
func (c rackController) copyDisk(
	ctx context.Context,
	want volumeRequest,
	source rack.Disk,
	sizeBytes int64,
) (disk rack.Disk, err error) {
	look := c.look(ctx, want)
	disk, err = c.diskUnlessReplaced(ctx, want, look)
	switch {
	case err == nil:
		if disk, err = c.checkExisting(ctx, want, disk); err == nil {
			c.deleteTemporaryByName(ctx, want)
		}
		return disk, err
	case errors.Is(err, rack.ErrReplaced):
		return disk, err
	case !errors.Is(err, rack.ErrNotFound):
		return disk, retryable(ctx, err)
	}
	snapshot, err := c.createTemporarySnapshot(ctx, want, source)
	if err != nil {
		c.deleteTemporaryByName(ctx, want)
		if rack.OutcomeUnknown(err) {
			c.sweeper.schedule(c.sweeper.age) // the rack may still be making the snapshot
		}
		return disk, err
	}
	disk, err = c.createBeside(ctx, want, sizeBytes, snapshot.ID, look)
	if errors.Is(err, rack.ErrNotFound) {
		err = rpc.Unavailable(
			"volume %q: its temporary snapshot %q was deleted meanwhile: %w: retry",
			want.name,
			snapshot.Name,
			err,
		)
	}
	c.deleteTemporarySnapshot(ctx, snapshot)
	return disk, err
}

// createTemporarySnapshot makes the temporary snapshot. It replaces a snapshot that an earlier call left behind,
// because that snapshot shows the disk at an earlier time.
func (c rackController) createTemporarySnapshot(
	ctx context.Context,
	want volumeRequest,
	source rack.Disk,
) (rack.Snapshot, error) {
	name := diskname.ForClone(c.cluster, want.name)
	snapshotOf := rack.NewTemporaryDescription(c.cluster, want.name, want.description.Lineage)
	snapshotOf.Volume = rack.GrownVolume(source)
	description := snapshotOf.Encode()
	snapshot, err := c.createSnapshot(ctx, name, description, source.ID)
	if errors.Is(err, rack.ErrAlreadyExists) {
		old, lookErr := c.rack.SnapshotByName(ctx, name)
		if lookErr == nil {
			if err := c.checkTemporarySnapshot(old); err != nil {
				return snapshot, err
			}
			lookErr = c.rack.DeleteSnapshot(ctx, old.ID)
		}
		if lookErr != nil && !errors.Is(lookErr, rack.ErrNotFound) {
			return snapshot, retryable(ctx, lookErr)
		}
		snapshot, err = c.createSnapshot(ctx, name, description, source.ID)
	}
	switch {
	case err == nil, errors.Is(err, rack.ErrCapacity):
		return snapshot, err
	case errors.Is(err, rack.ErrNotFound):
		return snapshot, rpc.Unavailable(
			"volume %q: its source, volume %s, was deleted meanwhile: %w: retry",
			want.name,
			want.cloneOf,
			err,
		)
	}
	return snapshot, retryable(ctx, fmt.Errorf("volume %q: copy volume %s: %w", want.name, want.cloneOf, err))
}

// checkTemporarySnapshot rejects a snapshot that has the name of a temporary snapshot and was not made by this plugin
// for its cluster.
func (c rackController) checkTemporarySnapshot(snapshot rack.Snapshot) error {
	owner, ours := rack.ParseDescription(snapshot.Description)
	if ours && owner.Cluster == c.cluster && snapshot.Temporary() {
		return nil
	}
	return rpc.AlreadyExists(
		"snapshot %q (%s) in project %q has the name of a temporary snapshot and was not made by this plugin: ask its owner to rename it",
		snapshot.Name,
		snapshot.ID,
		c.rack.ProjectName(),
	)
}

// deleteTemporaryByName deletes the temporary snapshot of a volume, if it exists.
func (c rackController) deleteTemporaryByName(ctx context.Context, want volumeRequest) {
	cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	name := diskname.ForClone(c.cluster, want.name)
	snapshot, err := c.rack.SnapshotByName(cleanup, name)
	switch {
	case errors.Is(err, rack.ErrNotFound):
	case err != nil:
		c.warnTemporaryLeft(name, err)
	case c.checkTemporarySnapshot(snapshot) == nil:
		c.deleteTemporarySnapshot(ctx, snapshot)
	}
}

// deleteTemporarySnapshot deletes a temporary snapshot. If that fails, the sweeper deletes the snapshot later.
func (c rackController) deleteTemporarySnapshot(ctx context.Context, snapshot rack.Snapshot) {
	cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	err := c.rack.DeleteSnapshot(cleanup, snapshot.ID)
	if err != nil && rack.OutcomeUnknown(err) {
		err = c.rack.DeleteSnapshot(cleanup, snapshot.ID) // most such errors do not occur twice in a row
	}
	if err != nil && !errors.Is(err, rack.ErrNotFound) {
		c.warnTemporaryLeft(snapshot.Name, err)
	}
}

func (c rackController) warnTemporaryLeft(name string, err error) {
	c.log.Warn(
		"cannot delete a temporary snapshot now, will retry",
		"name",
		name,
		"rack",
		c.rack.Name(),
		"error",
		err.Error(),
	)
	c.sweeper.schedule(c.sweeper.age)
}
