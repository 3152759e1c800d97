// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// ControllerPublishVolume attaches the disk of a volume to an instance: CSI spec, ControllerPublishVolume. Everything that
// could harm either is looked at before anything is changed; after a refusal, the disk and the instance are looked at
// again, and what they show decides the code. The readonly flag is left to the node: a rack stores no such thing, and the
// capability PUBLISH_READONLY is not advertised.
func (c *Service) ControllerPublishVolume(
	ctx context.Context,
	req *csi.ControllerPublishVolumeRequest,
) (*csi.ControllerPublishVolumeResponse, error) {
	if err := validateControllerPublishVolume(req); err != nil {
		return nil, err
	}
	on, disk, err := c.disk(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	instanceID, ok := diskname.ParseID(req.GetNodeId())
	if !ok {
		return nil, rpc.NotFound(
			"node_id %q is no instance ID: the ID of a node is the UUID of its instance",
			req.GetNodeId(),
		)
	}
	if err := on.checkProject(ctx, disk); err != nil {
		return nil, err
	}
	if disk, err = on.settled(ctx, disk); err != nil {
		return nil, err
	}
	if disk.InstanceID == instanceID {
		err = on.checkNoBootDisk(ctx, disk, instanceID)
	}
	switch {
	case err != nil:
	case on.engine != nil:
		disk, err = on.publishPlanned(ctx, disk, instanceID)
	case disk.InstanceID != instanceID:
		disk, err = on.attach(ctx, disk, instanceID)
	}
	if err != nil {
		return nil, err
	}
	c.grace.forget(disk.ID)
	c.refusals.forget(disk.ID)
	return &csi.ControllerPublishVolumeResponse{PublishContext: publishContext(disk)}, nil
}

// publishContext is what the node needs to know, as the rack shows it.
func publishContext(disk rack.Disk) map[string]string {
	description, _ := rack.ParseDescription(disk.Description) // a disk that we did not make has no lineage
	return map[string]string{
		rpc.KeyDiskName:  disk.Name,
		rpc.KeyDiskID:    disk.ID,
		rpc.KeySizeBytes: strconv.FormatInt(disk.SizeBytes, 10),
		rpc.KeyBlockSize: strconv.FormatInt(disk.BlockSize, 10),
		rpc.KeyOrigin:    origin(disk),
		rpc.KeyReadOnly:  strconv.FormatBool(disk.ReadOnly),
		rpc.KeyFSLineage: strings.Join(description.Lineage, ","),
	}
}

// settled waits for a disk to come to rest, as long as the caller can.
func (c onRack) settled(ctx context.Context, disk rack.Disk) (rack.Disk, error) {
	return c.rack.WaitForDisk(ctx, disk, rpc.WaitBudget(ctx))
}

// checkNoBootDisk refuses the boot disk of the instance that holds it. Only an attached disk can be one (docs/reference/rack.md §5).
func (c onRack) checkNoBootDisk(ctx context.Context, disk rack.Disk, instanceID string) error {
	instance, err := c.instance(ctx, instanceID)
	if err != nil {
		return err
	}
	if instance.BootDiskID == disk.ID {
		return rpc.FailedPrecondition(
			"disk %q (%s) is the boot disk of instance %q (%s): it is not published as a volume",
			disk.Name,
			disk.ID,
			instance.Name,
			instance.ID,
		)
	}
	return nil
}

// attach attaches a disk that is at rest and not attached to this instance.
func (c onRack) attach(ctx context.Context, disk rack.Disk, instanceID string) (rack.Disk, error) {
	if err := c.attachable(ctx, disk); err != nil {
		return rack.Disk{}, err
	}
	if err := c.refusals.remembered(opAttach, disk.ID, instanceID); err != nil {
		return rack.Disk{}, err
	}
	if err := c.checkRoom(ctx, disk, instanceID); err != nil {
		return rack.Disk{}, err
	}
	attached, err := c.rack.Attach(ctx, disk.ID, instanceID)
	if err != nil {
		return c.refusedAttach(ctx, disk, instanceID, err)
	}
	// A rack that changes running instances may take its time.
	if attached, err = c.settled(ctx, attached); err != nil {
		return rack.Disk{}, err
	}
	if attached.InstanceID != instanceID {
		return rack.Disk{}, rpc.Unavailable(
			"disk %q (%s) is %s and not on instance %s, although rack %q had accepted to attach it: ask again",
			attached.Name,
			attached.ID,
			attached.State,
			instanceID,
			c.rack.Name(),
		)
	}
	return attached, nil
}

// attachable refuses disks in states from which no attach can succeed. The instance that holds a disk is named by its ID, which
// is what the orchestrator calls the node, and by its name if the rack tells.
func (c onRack) attachable(ctx context.Context, disk rack.Disk) error {
	switch disk.State {
	case rack.Detached:
		return nil
	case rack.Attached:
		name := ""
		if instance, err := c.rack.Instance(ctx, disk.InstanceID); err == nil {
			name = fmt.Sprintf("%q ", instance.Name)
		}
		return rpc.FailedPrecondition(
			"disk %q (%s) is attached to instance %s(%s): unpublish the volume from that node first",
			disk.Name,
			disk.ID,
			name,
			disk.InstanceID,
		)
	case rack.Faulted:
		return rpc.Internal("disk %q (%s) is faulted: have the rack's operator look at it", disk.Name, disk.ID)
	}
	return rpc.FailedPrecondition(
		"disk %q (%s) is in state %q and cannot be attached: finish its import first",
		disk.Name,
		disk.ID,
		disk.State,
	)
}

// checkRoom refuses what the rack would accept and the guest could not use, and counts the disks.
func (c onRack) checkRoom(ctx context.Context, disk rack.Disk, instanceID string) error {
	disks, err := c.instanceDisks(ctx, instanceID)
	if err != nil {
		return err
	}
	if err := checkTwins(disk, disks, instanceID); err != nil {
		return err
	}
	if len(disks) >= c.maxDisks {
		return c.full(instanceID, len(disks))
	}
	return nil
}

// instanceDisks lists the disks of an instance, and says NOT_FOUND only where that is to be believed.
func (c onRack) instanceDisks(ctx context.Context, instanceID string) ([]rack.Disk, error) {
	disks, err := c.rack.InstanceDisks(ctx, instanceID)
	if err != nil {
		return nil, c.nodeError(ctx, instanceID, err)
	}
	return disks, nil
}

// checkTwins refuses a disk of which the guest would not know which one it is (docs/reference/rack.md §9).
func checkTwins(disk rack.Disk, disks []rack.Disk, instanceID string) error {
	for _, other := range disks {
		if other.ID != disk.ID && diskname.Serial(other.Name) == diskname.Serial(disk.Name) {
			return rpc.FailedPrecondition(
				"disk %q (%s) and disk %q (%s) of instance %s have the same first %d bytes in their names: the guest would see one of them only, and nobody knows which; publish the volume on another node",
				disk.Name,
				disk.ID,
				other.Name,
				other.ID,
				instanceID,
				diskname.SerialBytes,
			)
		}
	}
	return nil
}

func (c onRack) full(instanceID string, count int) error {
	return rpc.ResourceExhausted(
		"instance %s has %d disks, its boot disk included, and takes no more: --max-disks is %d; unpublish another volume from that node first",
		instanceID,
		count,
		c.maxDisks,
	)
}

// instance looks up an instance and says NOT_FOUND only where that is to be believed.
func (c onRack) instance(ctx context.Context, id string) (rack.Instance, error) {
	instance, err := c.rack.Instance(ctx, id)
	if err != nil {
		return rack.Instance{}, c.nodeError(ctx, id, err)
	}
	return instance, nil
}

func (c onRack) nodeError(ctx context.Context, instanceID string, err error) error {
	if !errors.Is(err, rack.ErrNotFound) {
		return err
	}
	if unconfirmed := c.unconfirmed(ctx); unconfirmed != nil {
		return unconfirmed
	}
	return rpc.NotFound("node_id %s: rack %q has no such instance: %w", instanceID, c.rack.Name(), err)
}

// refusedAttach finds out why the rack did not attach a disk; it may have done so after all.
func (c onRack) refusedAttach(
	ctx context.Context,
	disk rack.Disk,
	instanceID string,
	refusal error,
) (rack.Disk, error) {
	now, err := c.rack.Disk(ctx, disk.ID)
	if errors.Is(err, rack.ErrNotFound) {
		if unconfirmed := c.unconfirmed(ctx); unconfirmed != nil {
			err = unconfirmed
		}
	}
	if err != nil {
		return rack.Disk{}, fmt.Errorf("%w; %w", err, refusal)
	}
	if now, err = c.settled(ctx, now); err != nil {
		return rack.Disk{}, err
	}
	if now.InstanceID == instanceID {
		return now, nil
	}
	if err := c.attachable(ctx, now); err != nil {
		return rack.Disk{}, err
	}
	if rack.OutcomeUnknown(refusal) || errors.Is(refusal, rack.ErrConflict) {
		return rack.Disk{}, refusal
	}
	instance, err := c.instance(ctx, instanceID)
	if err != nil {
		return rack.Disk{}, err
	}
	switch {
	case instance.ProjectID != disk.ProjectID:
		return rack.Disk{}, c.differentProjects(instance, disk)
	case errors.Is(refusal, rack.ErrFull):
		disks, err := c.rack.InstanceDisks(ctx, instanceID)
		if err != nil {
			return rack.Disk{}, err
		}
		return rack.Disk{}, c.full(instanceID, len(disks))
	case errors.Is(refusal, rack.ErrNotStopped):
		return rack.Disk{}, c.refusals.remember(
			opAttach,
			disk.ID,
			instanceID,
			lasting,
			notStopped("attach", disk, instance, refusal),
		)
	case instance.RunState == rack.Failed:
		return rack.Disk{}, rpc.FailedPrecondition(
			"instance %q (%s) has failed: the rack attaches nothing to it until it was started or stopped: %w",
			instance.Name,
			instance.ID,
			refusal,
		)
	}
	return rack.Disk{}, refusal
}

func (c onRack) differentProjects(instance rack.Instance, disk rack.Disk) error {
	return rpc.FailedPrecondition(
		"instance %q (%s) and disk %q (%s) are in different projects: a volume is for instances of project %q only",
		instance.Name,
		instance.ID,
		disk.Name,
		disk.ID,
		c.rack.ProjectName(),
	)
}

// notStopped tells an operator the ways out of what every rack up to now demands (docs/reference/rack.md §4). Nomad asks again
// for this code only, Kubernetes' attacher for every one.
func notStopped(what string, disk rack.Disk, instance rack.Instance, refusal error) error {
	return rpc.FailedPrecondition(
		"cannot %s disk %q (%s): instance %q (%s) is %s, and this rack attaches and detaches disks only while the instance is stopped: stop the instance until this is done and start it again, use --attach-mode=restart, which plans that, or racks that can hot-plug: %w",
		what,
		disk.Name,
		disk.ID,
		instance.Name,
		instance.ID,
		instance.RunState,
		refusal,
	)
}

// ControllerUnpublishVolume detaches the disk of a volume from an instance: CSI spec, ControllerUnpublishVolume. It is OK,
// and detaches nothing, when the instance does not hold the disk: orchestrators ask late, twice, and for nodes that are no
// more. Without a node ID the disk is detached from whichever instance holds it, as the specification demands.
func (c *Service) ControllerUnpublishVolume(
	ctx context.Context,
	req *csi.ControllerUnpublishVolumeRequest,
) (*csi.ControllerUnpublishVolumeResponse, error) {
	if err := validateControllerUnpublishVolume(req); err != nil {
		return nil, err
	}
	done := &csi.ControllerUnpublishVolumeResponse{}
	diskID, diskOK := diskname.ParseID(req.GetVolumeId())
	nodeID, nodeOK := diskname.ParseID(req.GetNodeId())
	if !diskOK || (!nodeOK && req.GetNodeId() != "") {
		return done, nil // neither a disk nor an instance has such an ID
	}
	// Nomad asks every second, and the rack is not asked that often.
	if err := c.refusals.remembered(opDetach, diskID, nodeID); err != nil {
		return nil, err
	}
	on, disk, err := c.disk(ctx, diskID)
	if errors.Is(err, rack.ErrNotFound) {
		return done, nil
	}
	if err != nil {
		return nil, err
	}
	if disk, err = on.settled(ctx, disk); err != nil {
		if errors.Is(err, rack.ErrNotFound) {
			return done, on.unconfirmed(ctx)
		}
		return nil, err
	}
	if disk.InstanceID == "" || (nodeOK && disk.InstanceID != nodeID) {
		c.grace.forget(disk.ID)
		if on.engine != nil {
			on.engine.CancelAttachRequest(disk.ID, nodeID)
		}
		return done, nil
	}
	project, err := on.rack.ProjectID(ctx)
	if err != nil {
		return nil, err
	}
	if disk.ProjectID != project {
		return done, nil // ControllerPublishVolume never attaches it
	}
	if err := on.detach(ctx, disk); err != nil {
		return nil, err
	}
	c.grace.forget(disk.ID)
	return done, nil
}

// detach detaches a disk from the instance that holds it.
func (c onRack) detach(ctx context.Context, disk rack.Disk) error {
	instanceID := disk.InstanceID
	if err := c.refusals.remembered(opDetach, disk.ID, instanceID); err != nil {
		return err
	}
	if left, err := c.awaitGrace(ctx, disk); left || err != nil {
		return err
	}
	if c.engine != nil {
		_, err := c.unpublishPlanned(ctx, disk)
		return err
	}
	detached, err := c.rack.Detach(ctx, disk.ID, instanceID)
	if err != nil {
		return c.refusedDetach(ctx, disk, err)
	}
	if detached, err = c.settled(ctx, detached); err != nil {
		return err
	}
	if detached.InstanceID == instanceID {
		return rpc.Unavailable(
			"disk %q (%s) is still on instance %s, although rack %q had accepted to detach it: ask again",
			disk.Name,
			disk.ID,
			instanceID,
			c.rack.Name(),
		)
	}
	return nil
}

// awaitGrace refuses to detach from a running instance before the wish is old enough: an orchestrator whose node plugin is
// away for a moment asks for the detach although the filesystem is still mounted. True means that there is nothing to be put off:
// the rack would not detach it, and it stays for the instance's next planned restart.
func (c onRack) awaitGrace(ctx context.Context, disk rack.Disk) (left bool, err error) {
	due := c.grace.due(disk.ID, disk.InstanceID)
	remaining := time.Until(due)
	if remaining <= 0 {
		return false, nil
	}
	instance, err := c.rack.Instance(ctx, disk.InstanceID)
	if errors.Is(err, rack.ErrNotFound) {
		return false, nil // the look at the disk after the detach decides
	}
	if err != nil {
		return false, err
	}
	if instance.RunState != rack.Running {
		return false, nil
	}
	if c.engine != nil {
		if left, err := c.engine.DeferDetach(ctx, disk.ID, disk.InstanceID); left || err != nil {
			return left, err
		}
	}
	refusal := rpc.FailedPrecondition(
		"disk %q (%s) is detached from the running instance %q (%s) at %s at the earliest, as --detach-grace demands: ask again",
		disk.Name,
		disk.ID,
		instance.Name,
		instance.ID,
		due.UTC().Format(time.RFC3339),
	)
	return false, rpc.LoggedAt(slog.LevelInfo, c.refusals.remember(opDetach, disk.ID, disk.InstanceID, remaining, refusal))
}

// refusedDetach finds out why the rack did not detach a disk; it may be gone from the instance after all.
func (c onRack) refusedDetach(ctx context.Context, disk rack.Disk, refusal error) error {
	now, err := c.rack.Disk(ctx, disk.ID)
	if errors.Is(err, rack.ErrNotFound) {
		return c.unconfirmed(ctx)
	}
	if err != nil {
		return fmt.Errorf("%w; %w", err, refusal)
	}
	if now, err = c.settled(ctx, now); err != nil {
		return err
	}
	if now.InstanceID != disk.InstanceID {
		return nil
	}
	if rack.OutcomeUnknown(refusal) {
		return refusal
	}
	instance, err := c.instance(ctx, disk.InstanceID)
	if err != nil {
		return err
	}
	switch {
	case instance.BootDiskID == disk.ID:
		return nil // ControllerPublishVolume refuses it, so it was never published
	case errors.Is(refusal, rack.ErrNotStopped):
		return c.refusals.remember(opDetach, disk.ID, instance.ID, lasting, notStopped("detach", disk, instance, refusal))
	}
	return refusal
}
