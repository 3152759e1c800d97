// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"errors"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// remembered are disks of this cluster as a successful RPC of this process left them. No look is needed before an
// unpublish from the instance to which the disk was attached, and before a publish or a deletion of a disk that was
// attached nowhere. ID, project and owner of a disk never change, and the rack itself refuses what the disk's state
// does not allow (docs/reference/rack.md §4 and §5). After a refusal the RPC looks, as it does for any other disk. The
// states in which a rack could accept an attach and drop it are over: a create answers when the disk is complete.
type remembered struct {
	mu    sync.Mutex
	disks map[string]rememberedDisk
}

// rememberedDisk is the disk of a volume, by the volume's ID.
type rememberedDisk struct {
	on   *rack.Client
	disk rack.Disk
}

// maxRemembered bounds the memory: a description has at most 512 bytes.
const maxRemembered = 10_000

// remember remembers a disk of the plugin's project after a successful RPC. A volume that has grown has another disk,
// so it is not remembered.
func (c rackController) remember(disk rack.Disk) {
	if !c.ownsDisk(disk) || disk.Grown() {
		return
	}
	c.remembered.mu.Lock()
	defer c.remembered.mu.Unlock()
	if len(c.remembered.disks) >= maxRemembered {
		clear(c.remembered.disks)
	}
	c.remembered.disks[disk.VolumeID] = rememberedDisk{c.rack, disk}
}

// recall returns the disk of a volume and forgets it, if it was left on this instance, or nowhere if instanceID is
// empty.
func (c *Service) recall(volumeID, instanceID string) (rackController, rack.Disk, bool) {
	c.remembered.mu.Lock()
	defer c.remembered.mu.Unlock()
	r, found := c.remembered.disks[volumeID]
	if !found || r.disk.InstanceID != instanceID {
		return rackController{}, rack.Disk{}, false
	}
	delete(c.remembered.disks, volumeID)
	return c.forRack(r.on), r.disk, true
}

// forget forgets the disk of a volume.
func (c *Service) forget(volumeID string) {
	c.remembered.mu.Lock()
	defer c.remembered.mu.Unlock()
	delete(c.remembered.disks, volumeID)
}

// publishRemembered is ControllerPublishVolume for a remembered disk that is attached nowhere, in attach mode hot. If
// anything is not as it was, it returns nil, and the caller looks at the disk.
func (c *Service) publishRemembered(
	ctx context.Context,
	req *csi.ControllerPublishVolumeRequest,
) *csi.ControllerPublishVolumeResponse {
	volumeID, _ := diskname.ParseID(req.GetVolumeId())
	instanceID, ok := diskname.ParseID(req.GetNodeId())
	rc, disk, known := c.recall(volumeID, "")
	if !ok || !known || rc.defersDetaches() {
		return nil
	}
	attached, undisturbed, err := rc.checkAndAttach(ctx, disk, instanceID)
	if err != nil || !undisturbed || attached.State != rack.Attached || attached.InstanceID != instanceID {
		return nil
	}
	c.refusals.remove(disk.VolumeID, "")
	rc.remember(attached)
	return &csi.ControllerPublishVolumeResponse{PublishContext: publishContext(attached)}
}

// unpublishRemembered is [Service.unpublish] for a remembered disk that is attached to the instance, in attach mode
// hot. It returns false if the caller must look at the disk.
func (c *Service) unpublishRemembered(ctx context.Context, volumeID, nodeID string) (done bool, err error) {
	rc, disk, known := c.recall(volumeID, nodeID)
	if !known || nodeID == "" || rc.defersDetaches() {
		return false, nil
	}
	answer, err := rc.rack.Detach(ctx, disk.ID, nodeID)
	_, explained := errors.AsType[*rack.Refusal](err)
	if !explained && (errors.Is(err, rack.ErrNotFound) || errors.Is(err, rack.ErrRefused)) {
		return false, nil
	}
	return true, rc.detached(ctx, disk, answer, err)
}
