// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"errors"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/detach"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// ControllerUnpublishVolume detaches the disk of a volume from an instance: CSI spec, ControllerUnpublishVolume. If the
// disk is not attached to the instance it answers OK and detaches nothing: orchestrators call late, twice, and for
// deleted nodes. With a grace period it answers OK, and the disk is detached later (core/detach). Without a node ID it
// detaches the disk from any instance, as the specification requires.
func (c *Service) ControllerUnpublishVolume(
	ctx context.Context,
	req *csi.ControllerUnpublishVolumeRequest,
) (*csi.ControllerUnpublishVolumeResponse, error) {
	if err := validateControllerUnpublishVolume(req); err != nil {
		return nil, err
	}
	volumeID, volumeOK := diskname.ParseID(req.GetVolumeId())
	nodeID, nodeOK := diskname.ParseID(req.GetNodeId())
	if !volumeOK || (!nodeOK && req.GetNodeId() != "") {
		return &csi.ControllerUnpublishVolumeResponse{}, nil // neither a disk nor an instance has such an ID
	}
	if err := c.unpublish(ctx, volumeID, nodeID); err != nil {
		return nil, err
	}
	c.refusals.remove(volumeID, nodeID)
	return &csi.ControllerUnpublishVolumeResponse{}, nil
}

// unpublish is ControllerUnpublishVolume for valid IDs. Without a node ID it detaches the disk from any instance.
func (c *Service) unpublish(ctx context.Context, volumeID, nodeID string) error {
	// Nomad repeats the call every second. This answer needs no request to the rack.
	if err := c.refusals.get(opDetach, volumeID, nodeID); err != nil {
		return err
	}
	if done, err := c.unpublishRemembered(ctx, volumeID, nodeID); done {
		return err
	}
	rc, disk, err := c.locate(ctx, volumeID)
	if errors.Is(err, rack.ErrNotFound) || err == nil && disk.ID == "" {
		return nil // a volume without a disk is attached nowhere
	}
	if err != nil {
		return err
	}
	onNode := func(disk rack.Disk) bool { return disk.InstanceID != "" && (nodeID == "" || disk.InstanceID == nodeID) }
	if onNode(disk) { // otherwise a change of the disk, such as a snapshot that is being made, holds up nothing
		if disk, err = rc.waitToDetach(ctx, disk); err != nil {
			return err
		}
	}
	if !onNode(disk) {
		if rc.engine != nil {
			rc.engine.CancelAttachRequest(disk.VolumeID, nodeID)
		}
		return nil
	}
	project, err := rc.rack.ProjectID(ctx)
	if err != nil {
		return err
	}
	owner, err := rc.owner(ctx, disk.Description, disk.VolumeID)
	if err != nil {
		return err
	}
	if disk.ProjectID != project || owner != "" && owner != c.cluster {
		return nil // ControllerPublishVolume never attaches it
	}
	return rc.detach(ctx, disk)
}

// waitToDetach waits for a disk, like waitForDisk. If the disk is deleted meanwhile, for instance by an expansion,
// waitToDetach succeeds and returns the disk without an instance: a deleted disk is attached nowhere.
func (c rackController) waitToDetach(ctx context.Context, disk rack.Disk) (rack.Disk, error) {
	now, err := c.waitForDisk(ctx, disk)
	if errors.Is(err, rack.ErrNotFound) || errors.Is(err, rack.ErrReplaced) {
		disk.InstanceID = ""
		return disk, nil
	}
	return now, err
}

// detach detaches a disk from its instance.
func (c rackController) detach(ctx context.Context, disk rack.Disk) error {
	instanceID := disk.InstanceID
	if err := c.refusals.get(opDetach, disk.VolumeID, instanceID); err != nil {
		return err
	}
	if done, err := c.deferDetach(ctx, disk); done || err != nil {
		return err
	}
	if c.engine != nil {
		return c.unpublishPlanned(ctx, disk)
	}
	if c.detacher.Timed() {
		return c.detachRemembered(ctx, disk)
	}
	detached, err := c.rack.Detach(ctx, disk.ID, instanceID)
	return c.detached(ctx, disk, detached, err)
}

// detached makes sure that a disk is detached from its instance, after the rack answered the request with the disk or
// an error.
func (c rackController) detached(ctx context.Context, disk, answer rack.Disk, err error) error {
	if err != nil {
		return c.resolveDetach(ctx, disk, err)
	}
	if answer, err = c.waitToDetach(ctx, answer); err != nil {
		return err
	}
	if answer.InstanceID == disk.InstanceID {
		return c.stillAttachedError(disk)
	}
	c.remember(answer)
	return nil
}

// stillAttachedError is the error for a disk that went back to its instance. Nothing would detach it later.
func (c rackController) stillAttachedError(disk rack.Disk) error {
	return rpc.Unavailable(
		"disk %q (%s) is still attached to instance %s, although rack %q accepted the detach: retry",
		disk.Name,
		disk.ID,
		disk.InstanceID,
		c.rack.Name(),
	)
}

// resolveDetach looks at the disk and the instance after a failed detach. It returns nil if the disk is not attached to
// the instance any more, or will not be soon, and otherwise the error to answer.
func (c rackController) resolveDetach(ctx context.Context, disk rack.Disk, refusal error) error {
	if errors.Is(refusal, detach.ErrDetaching) {
		sayDeferred(ctx, rpc.DeferredForAnother) // the detach is recorded
		return nil
	}
	if seen, ok := errors.AsType[*rack.Refusal](refusal); ok {
		if seen.Instance.BootDiskID == disk.ID {
			return nil // never published: ControllerPublishVolume rejects a boot disk
		}
		return c.refusals.put(
			opDetach, disk.VolumeID, seen.Instance.ID, c.notStoppedError(opDetach, disk, seen.Instance, refusal))
	}
	now, err := c.rack.Disk(ctx, disk.VolumeID)
	if errors.Is(err, rack.ErrNotFound) {
		return c.confirmNotFound(ctx)
	}
	if errors.Is(err, rack.ErrReplaced) {
		return nil // a volume without a disk is attached nowhere
	}
	if err != nil {
		return fmt.Errorf("%w; %v", err, refusal) // the refusal may be a 404 that nothing has confirmed
	}
	if now, err = c.waitToDetach(ctx, now); err != nil {
		return err
	}
	if now.InstanceID != disk.InstanceID {
		return nil
	}
	if rack.OutcomeUnknown(refusal) {
		return refusal
	}
	instance, err := c.instance(ctx, disk.InstanceID)
	switch {
	case err != nil:
		return err
	case instance.BootDiskID == disk.ID:
		return nil
	case errors.Is(refusal, detach.ErrNotDeferred):
		return rpc.Aborted(
			"disk %q (%s) was published again on instance %s meanwhile: retry", disk.Name, disk.ID, instance.ID)
	}
	return refusal
}
