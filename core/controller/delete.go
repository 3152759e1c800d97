// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// DeleteVolume deletes the disk of a volume: CSI spec, DeleteVolume. It deletes only disks that this plugin made for
// its cluster, or that the cluster adopted. It rejects an attached disk and never detaches a disk that is published.
func (c *Service) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if err := validateDeleteVolume(req); err != nil {
		return nil, err
	}
	id, ok := diskname.ParseID(req.GetVolumeId())
	if !ok {
		return &csi.DeleteVolumeResponse{}, nil // no disk has such an ID
	}
	rc, disk, known := c.recall(id, "")
	var err error
	if !known {
		if rc, disk, err = c.locate(ctx, id); err != nil || disk.ID == "" {
			return c.deletedBefore(ctx, id, rc, err)
		}
		if err := rc.checkDeletable(ctx, &disk); err != nil {
			return nil, err
		}
	}
	if err := c.checkOnlyRegistration(ctx, disk); err != nil {
		return nil, err
	}
	replaced := func() bool { return false }
	if known { // the rack may have failed to delete a disk that an expansion replaced, and deletes it now
		replaced = rc.recorded(ctx, record.Replacements.Named("", id))
	}
	err = rc.rack.DeleteDisk(ctx, disk.ID)
	switch {
	case known && (errors.Is(err, rack.ErrNotFound) || errors.Is(err, rack.ErrRefused)), err == nil && replaced():
		return c.DeleteVolume(ctx, req)
	case errors.Is(err, rack.ErrNotFound):
		return c.deletedMeanwhile(ctx, id)
	case errors.Is(err, rack.ErrRefused):
		// The likely reason is an attach after checkDeletable.
		now, lookErr := rc.rack.Disk(ctx, id)
		switch {
		case lookErr == nil && now.InstanceID != "":
			return nil, rc.attachedError(ctx, now)
		case lookErr == nil && now.State.Transient():
			return nil, fmt.Errorf("disk %q (%s) is %s: %w", now.Name, now.ID, now.State, rack.ErrBusy)
		}
		return nil, err
	case err != nil:
		return nil, err
	}
	// The cluster from which the disk was adopted may have left an expansion.
	if err := rc.expander.Deleted(ctx, disk, !rc.ownsDisk(disk)); err != nil {
		return nil, err
	}
	c.sweeper.scheduleIfStale()
	c.refusals.remove(id, "")
	rc.forgetAdoption(ctx, disk)
	if rc.defersDetaches() {
		if err := rc.detacher.Forget(ctx, id); err != nil {
			rc.log.Warn("cannot remove the deferred detach of a deleted disk", "volume_id", id, "error", err.Error())
		}
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// deletedMeanwhile answers a DeleteVolume whose disk was deleted by another process: with the volume, or by an
// expansion, which replaces it.
func (c *Service) deletedMeanwhile(ctx context.Context, volumeID string) (*csi.DeleteVolumeResponse, error) {
	rc, disk, err := c.locate(ctx, volumeID)
	if err == nil && disk.ID != "" {
		return nil, rpc.Aborted("the disk of volume %s has changed meanwhile: retry", volumeID)
	}
	return c.deletedBefore(ctx, volumeID, rc, err)
}

// deletedBefore answers a DeleteVolume for a volume without a disk. The parameters are those that [Service.locate]
// returned. What an expansion has left is deleted: records, and perhaps the snapshot with the data.
func (c *Service) deletedBefore(
	ctx context.Context,
	volumeID string,
	rc rackController,
	err error,
) (*csi.DeleteVolumeResponse, error) {
	switch {
	case err == nil:
		if err = rc.checkExpansionOwner(ctx, volumeID); err == nil {
			err = rc.expander.Deleted(ctx, rack.Disk{VolumeID: volumeID}, true)
		}
		if err == nil {
			rc.forgetAdoption(ctx, rack.Disk{VolumeID: volumeID})
		}
	case errors.Is(err, rack.ErrNotFound):
		err = nil
		for _, client := range c.racks.all {
			err = errors.Join(err, c.expanders[client].Deleted(ctx, rack.Disk{VolumeID: volumeID}, false))
		}
	}
	if err != nil {
		return nil, err
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// checkExpansionOwner rejects a volume without a disk that another cluster expands, unless this cluster has adopted it.
// The snapshot has the only copy of its data. A cluster expands only what it owns.
func (c rackController) checkExpansionOwner(ctx context.Context, volumeID string) error {
	owner, err := c.expander.Owner(ctx, volumeID)
	if err != nil || owner == c.cluster {
		return err
	}
	if a, adopted, err := c.adoption(ctx, volumeID); err != nil || adopted && a.Cluster == c.cluster {
		return err
	}
	return rpc.FailedPrecondition(
		"volume %s is being expanded by cluster %q, this is %q: delete it in that cluster",
		volumeID,
		owner,
		c.cluster,
	)
}

// checkDeletable rejects a disk that is attached or does not belong to this cluster. It waits while the disk changes
// state, and updates *disk.
func (c rackController) checkDeletable(ctx context.Context, disk *rack.Disk) error {
	reason, err := c.notOwnedReason(ctx, disk.Description, disk.VolumeID)
	if err != nil {
		return err
	}
	if reason != "" {
		return rpc.FailedPrecondition(
			"disk %s %s: delete it yourself on rack %q",
			disk.ID,
			reason,
			c.rack.Name(),
		)
	}
	if err := c.checkProject(ctx, *disk); err != nil {
		return err
	}
	stable, err := c.waitForDisk(ctx, *disk)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return nil // DeleteDisk gets the same answer
	case err != nil:
		return err
	}
	*disk = stable
	if disk.InstanceID != "" && c.engine != nil {
		if *disk, err = c.detachIfDeferred(ctx, *disk); err != nil {
			return err
		}
	}
	if disk.InstanceID != "" {
		return c.attachedError(ctx, *disk)
	}
	return nil
}

// checkProject rejects a disk of another project. A rack looks up an ID in the whole silo (docs/reference/rack.md §1).
func (c rackController) checkProject(ctx context.Context, disk rack.Disk) error {
	project, err := c.rack.ProjectID(ctx)
	if err != nil {
		return err
	}
	if disk.ProjectID != project {
		return rpc.FailedPrecondition(
			"disk %q (%s) is in another project than %q: use a disk of the plugin's project",
			disk.Name,
			disk.ID,
			c.rack.ProjectName(),
		)
	}
	return nil
}

// attachedError is the error for deleting an attached disk.
func (c rackController) attachedError(ctx context.Context, disk rack.Disk) error {
	if c.defersDetaches() {
		set, err := c.detacher.List(ctx)
		if deferred, ok := set.Of(disk.VolumeID, disk.InstanceID); err == nil && ok {
			return c.waitsForDetachError(disk, deferred, "then delete it again")
		}
	}
	return rpc.Fault(
		fault.AttachedElsewhere,
		"disk %q (%s) is attached to instance %s and is not deleted: end its use there first",
		disk.Name,
		disk.ID,
		disk.InstanceID,
	)
}
