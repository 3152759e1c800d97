// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"errors"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// orchestratorTimeout is how long the orchestrator may take to answer. Nomad sends one RPC at a time for all volumes of
// a cluster. It is shorter than [detach.MaxWait], so that an RPC can answer that the orchestrator does not.
const orchestratorTimeout = 4 * time.Second

// claimed is [orchestrator.Claims.Claimed] within [orchestratorTimeout].
func (c *Service) claimed(ctx context.Context, nodeID string, volumeIDs []string) (map[string]string, error) {
	asking, cancel := context.WithTimeout(ctx, orchestratorTimeout)
	defer cancel()
	return c.orchestrator.Claimed(asking, nodeID, volumeIDs)
}

// checkNotClaimed rejects the creation of a volume whose disk exists and is claimed: the orchestrator has the disk under
// another ID. It does not know that both are one disk. So it would let a second workload use the disk, and unpublish
// it for one workload while the other uses it. Without an answer nothing is rejected: this may be the repetition of the
// call that made the disk.
func (c *Service) checkNotClaimed(ctx context.Context, want volumeRequest, disk rack.Disk) error {
	if c.orchestrator == nil {
		return nil
	}
	claimed, err := c.claimed(ctx, "", []string{disk.VolumeID})
	if err != nil {
		c.log.Warn("cannot find out whether the disk of a repeated create is in use under another ID",
			"volume_id", disk.VolumeID, "name", want.name, "error", err.Error())
		return ctx.Err()
	}
	by, is := claimed[disk.VolumeID]
	if !is {
		return nil
	}
	c.log.Warn("a volume is created whose disk is in use under another ID", "volume_id", disk.VolumeID,
		"name", want.name, "claim", by)
	return rpc.AlreadyExists(
		"volume %q: its disk %q (%s) is in use under another ID or in another namespace: use another name",
		want.name, disk.Name, disk.ID)
}

// unpublishMoved makes up for an unpublish that the orchestrator left out. The disk is attached to another instance,
// where the orchestrator lets no workload use the volume any more. unpublishMoved does what the unpublish would have
// done, so a grace period begins now. It returns the disk as it is then.
func (c rackController) unpublishMoved(ctx context.Context, disk rack.Disk, instanceID string) (rack.Disk, error) {
	if c.orchestrator == nil || disk.InstanceID == "" || disk.InstanceID == instanceID {
		return disk, nil
	}
	set, err := c.detacher.List(ctx)
	if err != nil {
		return disk, err
	}
	if _, unpublished := set.Of(disk.VolumeID, disk.InstanceID); unpublished {
		return disk, nil
	}
	asking, cancel := context.WithTimeout(ctx, orchestratorTimeout)
	defer cancel()
	moved, err := c.orchestrator.Moved(asking, disk.VolumeID, disk.InstanceID, instanceID)
	if err != nil {
		c.log.Warn("cannot find out whether the volume is used on another node", "volume_id", disk.VolumeID,
			"node_id", disk.InstanceID, "error", err.Error())
		return disk, ctx.Err()
	}
	if !moved {
		return disk, nil
	}
	holder, err := c.rack.Instance(ctx, disk.InstanceID)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return c.rack.Disk(ctx, disk.VolumeID) // it was just deleted
	case err != nil:
		return disk, err
	case holder.BootDiskID == disk.ID:
		return disk, nil // never published
	}
	c.log.Info("the orchestrator moved the volume without an unpublish, which is made up for", "volume_id", disk.VolumeID,
		"node_id", disk.InstanceID)
	if err := c.detach(ctx, disk); err != nil {
		return disk, err
	}
	return c.rack.Disk(ctx, disk.VolumeID)
}
