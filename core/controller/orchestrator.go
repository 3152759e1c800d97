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

// registered is [orchestrator.Claims.Registered] within [orchestratorTimeout], for a check that only rejects what is
// certain. Without an answer it returns none.
func (c *Service) registered(ctx context.Context, volumeID string) ([]string, error) {
	if c.orchestrator == nil {
		return nil, nil
	}
	asking, cancel := context.WithTimeout(ctx, orchestratorTimeout)
	defer cancel()
	names, err := c.orchestrator.Registered(asking, volumeID)
	if err != nil {
		c.log.Warn("cannot find out whether the orchestrator has the disk under another ID", "volume_id", volumeID,
			"error", err.Error())
		return nil, ctx.Err()
	}
	return names, nil
}

// checkNotRegistered rejects the creation of a volume whose disk exists and is registered with the orchestrator: it
// would get a second ID. The orchestrator does not know that both are one disk, which may be of two teams. The
// orchestrator registers a volume after its creation, so the repetition of a create is not rejected.
func (c *Service) checkNotRegistered(ctx context.Context, want volumeRequest, disk rack.Disk) error {
	names, err := c.registered(ctx, disk.VolumeID)
	if err != nil || len(names) == 0 {
		return err
	}
	c.log.Warn("rejected a second ID of a disk", "volume_id", disk.VolumeID, "name", want.name, "has", names)
	return rpc.AlreadyExists(
		"volume %q: its disk %q (%s) is registered with the orchestrator under another ID or in another namespace: use another name",
		want.name,
		disk.Name,
		disk.ID,
	)
}

// checkOnlyRegistration rejects the deletion of a disk that the orchestrator has under more than one ID.
func (c *Service) checkOnlyRegistration(ctx context.Context, disk rack.Disk) error {
	names, err := c.registered(ctx, disk.VolumeID)
	if err != nil || len(names) < 2 {
		return err
	}
	c.log.Warn("rejected the deletion of a disk with several IDs", "volume_id", disk.VolumeID, "has", names)
	return rpc.FailedPrecondition(
		"disk %q (%s) is registered with the orchestrator under %d IDs, which the controller's log names: deregister the others first",
		disk.Name,
		disk.ID,
		len(names),
	)
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
