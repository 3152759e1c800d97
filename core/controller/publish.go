// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// ControllerPublishVolume attaches the disk of a volume to an instance: CSI spec, ControllerPublishVolume. It makes all
// checks before it attaches anything. If the rack refuses the attach, it looks at the disk and the instance again to
// find the reason and the code. It ignores the readonly flag, which the node applies: a rack has no read-only
// attachment.
func (c *Service) ControllerPublishVolume(
	ctx context.Context,
	req *csi.ControllerPublishVolumeRequest,
) (*csi.ControllerPublishVolumeResponse, error) {
	if err := validateControllerPublishVolume(req); err != nil {
		return nil, err
	}
	if response := c.publishRemembered(ctx, req); response != nil {
		return response, nil
	}
	rc, disk, err := c.neededDisk(ctx, req.GetVolumeId())
	if err != nil {
		return nil, c.publishError(err)
	}
	c.forget(disk.VolumeID) // also a publish that fails may attach the disk
	instanceID, ok := diskname.ParseID(req.GetNodeId())
	if !ok {
		return nil, rpc.NotFound(
			"node_id %q is not a UUID: the ID of a node is the UUID of its instance",
			req.GetNodeId(),
		)
	}
	if err := rc.checkProject(ctx, disk); err != nil {
		return nil, err
	}
	if err := rc.checkDiskOwner(ctx, disk); err != nil {
		return nil, err
	}
	if disk, err = rc.waitBriefly(ctx, disk); err != nil {
		return nil, rc.publishError(err)
	}
	if disk.InstanceID == instanceID {
		err = rc.checkNotBootDisk(ctx, disk, instanceID)
	}
	if err == nil {
		disk, err = rc.unpublishMoved(ctx, disk, instanceID)
	}
	switch {
	case err != nil:
	case rc.engine != nil:
		disk, err = rc.publishPlanned(ctx, disk, instanceID)
	case disk.InstanceID == instanceID:
		disk, err = rc.keepAttached(ctx, disk)
	default:
		disk, err = rc.attach(ctx, disk, instanceID)
	}
	if err != nil {
		return nil, rc.publishError(err) // an expansion may have begun meanwhile
	}
	c.refusals.remove(disk.VolumeID, "")
	rc.remember(disk)
	return &csi.ControllerPublishVolumeResponse{PublishContext: publishContext(disk)}, nil
}

// checkNotBootDisk rejects the boot disk of the instance. Only an attached disk can be a boot disk
// (docs/reference/rack.md §5).
func (c rackController) checkNotBootDisk(ctx context.Context, disk rack.Disk, instanceID string) error {
	instance, err := c.instance(ctx, instanceID)
	if err != nil {
		return err
	}
	if instance.BootDiskID == disk.ID {
		return rpc.FailedPrecondition(
			"disk %q (%s) is the boot disk of instance %q (%s) and is not published: use another disk as volume",
			disk.Name,
			disk.ID,
			instance.Name,
			instance.ID,
		)
	}
	return nil
}

// keepAttached publishes a disk that is attached to the instance already. It is for attach mode hot.
func (c rackController) keepAttached(ctx context.Context, disk rack.Disk) (rack.Disk, error) {
	now, err := disk, error(nil)
	if !c.undisturbed(ctx, disk)() {
		now, err = c.confirmPublished(ctx, disk)
	}
	if err == nil && c.detacher.Timed() {
		// A controller in attach mode restart, of the same rolling update, may have detached it and deleted the record.
		if now, err = c.rack.Disk(ctx, disk.VolumeID); err == nil {
			now, err = c.waitBriefly(ctx, now)
		}
	}
	if err != nil || now.InstanceID == disk.InstanceID {
		return now, err
	}
	return c.attach(ctx, now, disk.InstanceID)
}

// attach attaches a disk that is in a stable state and not attached to this instance. It is for attach mode hot.
func (c rackController) attach(ctx context.Context, disk rack.Disk, instanceID string) (rack.Disk, error) {
	if disk.InstanceID != "" {
		freed, err := c.detachElsewhere(ctx, disk)
		if errors.Is(err, rack.ErrNotStopped) {
			err = c.resolveDetach(ctx, disk, err)
		}
		if err != nil {
			return rack.Disk{}, err
		}
		disk = freed
	}
	if err := c.checkAttachable(ctx, disk); err != nil {
		return rack.Disk{}, err
	}
	if err := c.refusals.get(opAttach, disk.VolumeID, instanceID); err != nil {
		return rack.Disk{}, err
	}
	attached, undisturbed, err := c.checkAndAttach(ctx, disk, instanceID)
	if err == nil {
		attached, err = c.awaitAttached(ctx, attached, instanceID)
	}
	if err != nil || undisturbed {
		return attached, err
	}
	if attached, err = c.confirmPublished(ctx, attached); err != nil {
		return rack.Disk{}, err
	}
	return c.awaitAttached(ctx, attached, instanceID)
}

// awaitAttached waits until an attach that the rack accepted is done: a rack with hot-plug may need some time.
func (c rackController) awaitAttached(ctx context.Context, disk rack.Disk, instanceID string) (rack.Disk, error) {
	attached, err := c.waitBriefly(ctx, disk)
	if err != nil {
		return rack.Disk{}, err
	}
	if attached.InstanceID != instanceID {
		return rack.Disk{}, rpc.Unavailable(
			"disk %q (%s) is %s and not attached to instance %s, although rack %q accepted the attach: retry",
			attached.Name,
			attached.ID,
			attached.State,
			instanceID,
			c.rack.Name(),
		)
	}
	return attached, nil
}

// lockInstance keeps all other attaches to an instance away. Another replica can still attach a disk there
// (docs/explanation/controller.md).
func (c *Service) lockInstance(ctx context.Context, instanceID string) (release func(), err error) {
	wait := rpc.WaitBudget(ctx)
	if deadline, ok := ctx.Deadline(); ok {
		wait = max(wait, time.Until(deadline)/2) // a tick of an engine has little time, and its instance is down
	}
	release, ok := c.attaching.lock(ctx, instanceID, wait)
	if ok {
		return release, nil
	}
	return nil, attachingError(ctx, instanceID)
}

// attachingError is the error of a call that has waited for other attaches to an instance.
func attachingError(ctx context.Context, instanceID string) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("wait for another attach to instance %s: %w", instanceID, err)
	}
	return rpc.Aborted("another disk is still being attached to instance %s: retry", instanceID)
}

// checkAndAttach checks the other disks of the instance and attaches the disk: beside other attaches to the instance if
// they leave room for it in any case, and alone otherwise ([attaching]).
func (c rackController) checkAndAttach(
	ctx context.Context, disk rack.Disk, instanceID string,
) (attached rack.Disk, undisturbed bool, err error) {
	leave, ok := c.attaching.join(ctx, instanceID, rpc.WaitBudget(ctx))
	if !ok {
		return rack.Disk{}, false, attachingError(ctx, instanceID)
	}
	defer leave()
	disks, err := c.lookBeside(ctx, disk, instanceID)
	if err != nil {
		return rack.Disk{}, false, err
	}
	if i := slices.IndexFunc(disks, func(on rack.Disk) bool { return on.ID == disk.ID }); i >= 0 {
		return disks[i], false, nil // another process has attached it
	}
	if c.hasRoom(disk, append(c.attaching.reserve(instanceID, disk), disks...)) {
		return c.attachChecked(ctx, disk, instanceID)
	}
	leave()
	release, err := c.lockInstance(ctx, instanceID)
	if err != nil {
		return rack.Disk{}, false, err
	}
	defer release()
	if err := c.checkInstanceDisks(ctx, disk, instanceID); err != nil {
		return rack.Disk{}, false, err
	}
	return c.attachChecked(ctx, disk, instanceID)
}

// hasRoom reports whether an instance with these disks has room for a disk, and none of them has its serial.
func (c rackController) hasRoom(disk rack.Disk, disks []rack.Disk) bool {
	others := map[string]bool{}
	for _, other := range disks {
		others[other.VolumeID] = true
	}
	delete(others, disk.VolumeID)
	return len(others) < c.maxDisks && disk.CheckSerial(disks) == nil
}

// attachChecked attaches a disk for which the instance has room.
func (c rackController) attachChecked(
	ctx context.Context, disk rack.Disk, instanceID string,
) (attached rack.Disk, undisturbed bool, err error) {
	look := c.undisturbed(ctx, disk)
	attached, err = c.rack.Attach(ctx, disk.ID, instanceID)
	undisturbed = look()
	if err != nil {
		attached, err = c.resolveAttach(ctx, disk, instanceID, err)
		return attached, false, err
	}
	return attached, undisturbed, nil
}

// checkAttachable rejects a disk in a state in which it cannot be attached. FAILED_PRECONDITION names the instance to
// which the disk is attached by its ID, which is the node ID, and also by name if the rack answers.
func (c rackController) checkAttachable(ctx context.Context, disk rack.Disk) error {
	switch disk.State {
	case rack.Detached:
		return nil
	case rack.Attached:
		name := ""
		if instance, err := c.rack.Instance(ctx, disk.InstanceID); err == nil {
			name = fmt.Sprintf("%q ", instance.Name)
		}
		return rpc.Fault(
			fault.AttachedElsewhere,
			"disk %q (%s) is attached to instance %s(%s): end its use there first",
			disk.Name,
			disk.ID,
			name,
			disk.InstanceID,
		)
	case rack.Faulted:
		return rpc.Fault(fault.DiskFaulted, "disk %q (%s) is faulted: ask the operator of the rack", disk.Name, disk.ID)
	}
	return rpc.FailedPrecondition(
		"disk %q (%s) is in state %q and cannot be attached: finish its import, or ask the operator of the rack",
		disk.Name,
		disk.ID,
		disk.State,
	)
}

// checkInstanceDisks rejects a disk whose serial collides with an attached disk, and an instance without room for a
// disk. A rack checks only the latter.
func (c rackController) checkInstanceDisks(ctx context.Context, disk rack.Disk, instanceID string) error {
	disks, err := c.instanceDisks(ctx, instanceID)
	if err != nil {
		return err
	}
	if err := checkSerial(disk, disks); err != nil {
		return err
	}
	if len(disks) >= c.maxDisks {
		return c.instanceFullError(ctx, instanceID, disks, false)
	}
	return nil
}

// instanceDisks lists the disks of an instance. NOT_FOUND means that the rack confirmed that this token would see the
// instance.
func (c rackController) instanceDisks(ctx context.Context, instanceID string) ([]rack.Disk, error) {
	disks, err := c.rack.InstanceDisks(ctx, instanceID)
	if err != nil {
		return nil, c.instanceError(ctx, instanceID, err)
	}
	return disks, nil
}

// checkSerial rejects a disk that the guest could not tell from a disk of its instance.
func checkSerial(disk rack.Disk, disks []rack.Disk) error {
	if err := disk.CheckSerial(disks); err != nil {
		return rpc.FailedPrecondition("%w: publish the volume on another node", err)
	}
	return nil
}

// fullUntilDetached is what the caller does after the detach that makes room on an instance.
const fullUntilDetached = "then retry: the instance is full"

// instanceFullError is the error for an instance without room for a disk. refused says that the rack refused it;
// otherwise --max-disks is reached. If a disk of the instance waits for its detach, the error names that disk:
// RESOURCE_EXHAUSTED would fail a Nomad allocation, and its text would ask for an unpublish that was done.
func (c rackController) instanceFullError(
	ctx context.Context,
	instanceID string,
	disks []rack.Disk,
	refused bool,
) error {
	if c.detacher.Timed() {
		set, err := c.detacher.List(ctx)
		if err != nil {
			return err
		}
		var waiting error
		for _, disk := range disks {
			deferred, ok := set.Of(disk.VolumeID, instanceID)
			if !ok {
				continue
			}
			waiting = c.waitsForDetachError(disk, deferred, fullUntilDetached)
			if (!deferred.Untimed || c.detacher.Asks()) && c.detacher.Left(deferred) > 0 {
				break // this one makes room by itself
			}
		}
		if waiting != nil {
			return waiting
		}
		now, err := c.rack.InstanceDisks(ctx, instanceID) // a detach may have been carried out since the last look
		if err != nil {
			return err
		}
		if len(now) < len(disks) {
			return rpc.LoggedAt(slog.LevelInfo, rpc.FailedPrecondition(
				"instance %s was full, and a disk has just been detached from it: retry", instanceID))
		}
	}
	if refused && len(disks) < c.maxDisks {
		return rpc.Fault(
			fault.InstanceFull,
			"instance %s has %d disks, and rack %q allows fewer than --max-disks=%d: set it to the rack's limit, %d, for controllers and nodes",
			instanceID,
			len(disks),
			c.rack.Name(),
			c.maxDisks,
			len(disks),
		)
	}
	return rpc.Fault(
		fault.InstanceFull,
		"instance %s has %d disks, its boot disk included, and takes no more, because --max-disks is %d (racks from release 18 on take 12): take another volume from it first",
		instanceID,
		len(disks),
		c.maxDisks,
	)
}

// instance returns an instance. NOT_FOUND means that the rack confirmed that this token would see the instance.
func (c rackController) instance(ctx context.Context, id string) (rack.Instance, error) {
	instance, err := c.rack.Instance(ctx, id)
	if err != nil {
		return rack.Instance{}, c.instanceError(ctx, id, err)
	}
	return instance, nil
}

func (c rackController) instanceError(ctx context.Context, instanceID string, err error) error {
	if !errors.Is(err, rack.ErrNotFound) {
		return err
	}
	if unconfirmed := c.confirmNotFound(ctx); unconfirmed != nil {
		return unconfirmed
	}
	return rpc.NotFound("node_id: rack %q has no such instance: %w: check on which rack the node runs", c.rack.Name(), err)
}

// resolveAttach looks at the disk and the instance after a failed attach. It returns the disk if it is attached to the
// instance after all, and otherwise the error to answer.
func (c rackController) resolveAttach(
	ctx context.Context,
	disk rack.Disk,
	instanceID string,
	refusal error,
) (rack.Disk, error) {
	if seen, ok := errors.AsType[*rack.Refusal](refusal); ok && seen.Disks != nil {
		return rack.Disk{}, c.explainRefusal(ctx, disk, seen)
	}
	now, err := c.rack.Disk(ctx, disk.VolumeID)
	if errors.Is(err, rack.ErrNotFound) {
		if unconfirmed := c.confirmNotFound(ctx); unconfirmed != nil {
			err = unconfirmed
		}
	}
	if err != nil {
		// The refusal may be a 404 that nothing has confirmed.
		return rack.Disk{}, fmt.Errorf("%w; %v", err, refusal)
	}
	if now.ID != disk.ID {
		return rack.Disk{}, rpc.LoggedAt(slog.LevelInfo, rpc.FailedPrecondition(
			"volume %s has just been expanded, and has another disk: retry", disk.VolumeID))
	}
	if now, err = c.waitBriefly(ctx, now); err != nil {
		return rack.Disk{}, err
	}
	if now.InstanceID == instanceID {
		return now, nil
	}
	if err := c.checkAttachable(ctx, now); err != nil {
		return rack.Disk{}, err
	}
	if rack.OutcomeUnknown(refusal) || errors.Is(refusal, rack.ErrConflict) || errors.Is(refusal, rack.ErrBusy) {
		return rack.Disk{}, refusal
	}
	instance, err := c.instance(ctx, instanceID) // a 404 may be about the instance
	if err == nil && instance.ProjectID != now.ProjectID {
		err = projectMismatchError(c.rack, instance, now) // the token may have no right in the other project
	}
	return rack.Disk{}, cmp.Or(err, refusal)
}

// explainRefusal returns the error to answer if the instance is the reason why the rack does not attach a disk to it.
func (c rackController) explainRefusal(ctx context.Context, disk rack.Disk, refusal *rack.Refusal) error {
	instance := refusal.Instance
	switch {
	case instance.ProjectID != disk.ProjectID:
		return projectMismatchError(c.rack, instance, disk)
	case errors.Is(refusal, rack.ErrFull):
		c.logRefusal(opAttach, disk.VolumeID, instance.ID, refusal)
		return c.instanceFullError(ctx, instance.ID, refusal.Disks, true)
	case instance.RunState == rack.Failed:
		return rpc.FailedPrecondition(
			"instance %q (%s) has failed, and the rack attaches no disk to a failed instance: %w: start or stop the instance",
			instance.Name,
			instance.ID,
			refusal,
		)
	}
	return c.refusals.put(opAttach, disk.VolumeID, instance.ID, c.notStoppedError(opAttach, disk, instance, refusal))
}

func projectMismatchError(client *rack.Client, instance rack.Instance, disk rack.Disk) error {
	return rpc.FailedPrecondition(
		"instance %q (%s) and disk %q (%s) are in different projects: use an instance of project %q",
		instance.Name,
		instance.ID,
		disk.Name,
		disk.ID,
		client.ProjectName(),
	)
}

// notStoppedError is the error on a rack without hot-plug, with the operator's choices (docs/reference/rack.md §4).
// Nomad retries only FAILED_PRECONDITION; Kubernetes' external-attacher retries every code.
func (c rackController) notStoppedError(op operation, disk rack.Disk, instance rack.Instance, refusal error) error {
	c.logRefusal(op, disk.VolumeID, instance.ID, refusal)
	return rpc.Fault(
		fault.RackHasNoHotplug,
		"cannot %s volume %s: instance %q is %s, and this rack %ses disks only while the instance is stopped: stop the instance or use --attach-mode=restart",
		op,
		disk.VolumeID,
		instance.Name,
		instance.RunState,
		op,
	)
}

// logRefusal logs the rack's own words, which would make the answered error too long.
func (c rackController) logRefusal(op operation, volumeID, instanceID string, refusal error) {
	c.log.Info("the rack rejected the "+string(op), "volume_id", volumeID, "node_id", instanceID,
		"error", refusal.Error(), "rack_request_id", rpc.RackRequestID(refusal))
}
