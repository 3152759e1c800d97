// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

var (
	// ErrPlanned says that a volume waits for the restart of an instance. The orchestrator should repeat its call.
	ErrPlanned = fault.RestartPlanned.New("waits for a planned restart")
	// errRefused is an [ErrPlanned]: the restart was refused.
	errRefused = fault.RestartRefused.Errorf("%w", ErrPlanned)
	// ErrElsewhere says that the disk is attached to another instance and published there.
	ErrElsewhere = fault.AttachedElsewhere.New("attached to another instance")
	// ErrFull says that the instance has no free disk slot, even after all requested changes.
	ErrFull = fault.InstanceFull.New("the instance has no free disk slot")
)

// Publish attaches the disk of a volume to an instance. If that needs a restart, Publish keeps an attach request and
// returns an [ErrPlanned] that says what the volume waits for. Other refusals by the rack are returned unchanged.
func (e *Engine) Publish(ctx context.Context, volumeID, instanceID string) (rack.Disk, error) {
	release, err := e.lockVolume(ctx, volumeID)
	if err != nil {
		return rack.Disk{}, err
	}
	defer release()
	disk, err := e.rack.Disk(ctx, volumeID)
	if err != nil {
		return rack.Disk{}, err
	}
	switch disk.InstanceID {
	case instanceID:
		return e.confirmAttached(ctx, disk, false)
	case "":
		return e.attach(ctx, disk, instanceID)
	}
	records, err := e.readRecords(ctx)
	if err = cmp.Or(err, records.deferred.Check(disk.VolumeID)); err != nil {
		return rack.Disk{}, err
	}
	if !records.detachDeferred(disk.VolumeID, disk.InstanceID) {
		return rack.Disk{}, fmt.Errorf("disk %q (%s) on instance %s: %w", disk.Name, disk.ID, disk.InstanceID, ErrElsewhere)
	}
	disks, err := e.rack.InstanceDisks(ctx, instanceID)
	if err != nil {
		return rack.Disk{}, err
	}
	return rack.Disk{}, e.requestAttach(ctx, disk, instanceID, disks, records)
}

// attach attaches a detached disk, or keeps an attach request for it.
func (e *Engine) attach(ctx context.Context, disk rack.Disk, instanceID string) (rack.Disk, error) {
	disks, err := e.rack.InstanceDisks(ctx, instanceID)
	if err != nil {
		return rack.Disk{}, err
	}
	if len(disks) < e.opts.MaxDisks {
		attached, err := e.rack.Attach(ctx, disk.ID, instanceID)
		switch {
		case err == nil:
			e.detectHotplug(ctx, instanceID)
			// A deferred detach may be left from an earlier attachment to this instance.
			return e.confirmAttached(ctx, attached, true)
		case errors.Is(err, rack.ErrNotStopped):
			e.refusesHot.Store(true)
			e.refusesPlug.Store(true)
		case errors.Is(err, rack.ErrInternal):
			unplugged, lookUp := e.noteUnplugged(ctx, disk.VolumeID, instanceID)
			if unplugged {
				err = e.waitForDevice(disk, instanceID)
			}
			return rack.Disk{}, cmp.Or(lookUp, err)
		case !errors.Is(err, rack.ErrFull):
			return rack.Disk{}, err
		}
		if refused, ok := errors.AsType[*rack.Refusal](err); ok {
			disks = refused.Disks // another controller may have attached one since
		}
	}
	records, err := e.readRecords(ctx)
	if err != nil {
		return rack.Disk{}, err
	}
	return rack.Disk{}, e.requestAttach(ctx, disk, instanceID, disks, records)
}

// waitForDevice is the error for a disk that the rack shows as attached, and that the guest may lack.
func (e *Engine) waitForDevice(disk rack.Disk, instanceID string) error {
	return fmt.Errorf("volume %s: the rack attached it and failed to give it to the guest: %w",
		disk.VolumeID, e.describeWait(e.addRequest(disk, instanceID)))
}

// detectHotplug clears both refusals if the instance runs, to which the rack has just attached a disk.
func (e *Engine) detectHotplug(ctx context.Context, instanceID string) {
	if !e.refusesHot.Load() {
		return
	}
	if instance, err := e.rack.Instance(ctx, instanceID); err == nil && instance.RunState == rack.Running {
		e.refusesHot.Store(false)
		e.refusesPlug.Store(false)
	}
}

// confirmAttached makes sure that an attached disk stays attached, as a published volume must. It ends a deferred
// detach, or makes one that is over remembered from now on. It checks that neither a restart of the instance nor a
// detach of the disk is under way that may have read it. It reads the disk last, because either may just have ended.
// plugged says that the rack has just attached the disk, so that the guest does not lack it.
func (e *Engine) confirmAttached(ctx context.Context, disk rack.Disk, plugged bool) (rack.Disk, error) {
	records, err := e.readRecords(ctx)
	if err != nil {
		return rack.Disk{}, err
	}
	if err := cmp.Or(records.check(disk.InstanceID), records.deferred.Check(disk.VolumeID)); err != nil {
		return rack.Disk{}, err
	}
	if !plugged {
		unplugged, err := e.stillUnplugged(ctx, disk.VolumeID, disk.InstanceID, records)
		if unplugged || err != nil {
			return rack.Disk{}, cmp.Or(err, e.waitForDevice(disk, disk.InstanceID))
		}
	}
	r, restarting := records.restartOf(disk.InstanceID, "")
	if e.opts.Yield != nil {
		// Before the deferred detach ends: if the disk is being replaced and cannot be detached now, a restart detaches it.
		// Also during a restart, which may have looked at the instance's disks before this one was attached. What keeps the
		// restart up is then told with it.
		err := e.opts.Yield(ctx, disk, records.all)
		told := restarting && (errors.Is(err, rack.ErrNotStopped) || errors.Is(err, record.ErrNoRecord))
		if err != nil && !told {
			return rack.Disk{}, err
		}
	}
	if restarting {
		return rack.Disk{}, e.requestAfterRestart(disk, r)
	}
	if d, recorded := records.deferred.Recorded(disk.VolumeID); recorded {
		if err := e.opts.Detacher.End(ctx, d); err != nil {
			return rack.Disk{}, err
		}
		records, err = e.readRecords(ctx)
		if err = cmp.Or(err, records.check(disk.InstanceID)); err != nil {
			return rack.Disk{}, err
		}
		if r, restarting := records.restartOf(disk.InstanceID, ""); restarting {
			return rack.Disk{}, e.requestAfterRestart(disk, r)
		}
	}
	if records.deferred.Detaching(disk.VolumeID) {
		return rack.Disk{}, fmt.Errorf(
			"the disk of volume %s is being detached from instance %s: %w: repeat the request",
			disk.VolumeID, disk.InstanceID, ErrPlanned)
	}
	now, err := e.rack.Disk(ctx, disk.VolumeID)
	if err != nil {
		return rack.Disk{}, err
	}
	if now.InstanceID != disk.InstanceID {
		return rack.Disk{}, fmt.Errorf(
			"the disk of volume %s was just detached from instance %s: %w: repeat the request",
			disk.VolumeID, disk.InstanceID, ErrPlanned)
	}
	e.CancelAttachRequest(disk.VolumeID, "")
	return now, nil
}

// requestAfterRestart keeps an attach request for an attached disk whose instance is being restarted.
func (e *Engine) requestAfterRestart(disk rack.Disk, r record.Restart) error {
	e.watchEnd(r)
	e.addRequest(disk, disk.InstanceID)
	stage, kind := string(stagePlanned), ErrPlanned
	if status := e.status(disk.InstanceID); status.reason == rpc.ReasonUnderWay {
		stage, kind = status.message(), planned(status)
	}
	return fmt.Errorf(
		"volume %s: instance %s restarts: %s: %w",
		disk.VolumeID,
		disk.InstanceID,
		stage,
		kind,
	)
}

// requestAttach keeps an attach request and returns an error that says what it waits for. disks are the instance's
// disks.
func (e *Engine) requestAttach(
	ctx context.Context,
	disk rack.Disk,
	instanceID string,
	disks []rack.Disk,
	records recordSet,
) error {
	err := cmp.Or(records.check(instanceID), records.check(disk.InstanceID), records.deferred.Check(disk.VolumeID))
	if err == nil {
		err = e.checkFreeSlot(ctx, disk, instanceID, disks, records)
	}
	if err != nil {
		return err
	}
	if disk.InstanceID == "" {
		e.setBlocked(disk.VolumeID, "")
	}
	request := e.addRequest(disk, instanceID)
	if disk.InstanceID != "" {
		e.setHeldBy(disk.VolumeID, disk.InstanceID)
		request.heldBy = disk.InstanceID
	}
	return fmt.Errorf("volume %s: %w", disk.VolumeID, e.describeWait(request))
}

// addRequest adds an attach request or notes its repetition. A request whose disk could not be attached begins anew if
// the volume has got another disk since: a restart may attach that one.
func (e *Engine) addRequest(disk rack.Disk, instance string) attachRequest {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.clock.Now()
	request := e.requests[disk.VolumeID]
	if request == nil || request.instance != instance || request.attachFailed && request.failedDisk != disk.ID {
		request = &attachRequest{volume: disk.VolumeID, instance: instance, requestedAt: now}
		e.requests[disk.VolumeID] = request
		e.wakeUp()
	}
	request.repeatedAt, request.fromRestart = now, ""
	return *request
}

// checkFreeSlot returns ErrFull if the instance has no slot for the disk even after all deferred detaches. A restart
// detaches a disk before it deletes the record. So before a refusal, the disks must be listed after the records.
func (e *Engine) checkFreeSlot(
	ctx context.Context,
	disk rack.Disk,
	instanceID string,
	disks []rack.Disk,
	records recordSet,
) error {
	if e.expectedDisks(disk, instanceID, disks, records) < e.opts.MaxDisks {
		return nil
	}
	disks, err := e.rack.InstanceDisks(ctx, instanceID)
	if err != nil {
		return err
	}
	if taken := e.expectedDisks(disk, instanceID, disks, records); taken >= e.opts.MaxDisks {
		return fmt.Errorf("instance %s has or will get %d disks: %w", instanceID, taken, ErrFull)
	}
	return nil
}

// expectedDisks counts the other disks that the instance will have after its next restart.
func (e *Engine) expectedDisks(disk rack.Disk, instanceID string, disks []rack.Disk, records recordSet) int {
	after := map[string]bool{}
	for _, other := range disks {
		if !records.frees(other.VolumeID, instanceID) {
			after[other.VolumeID] = true
		}
	}
	for _, other := range e.requestsFor(instanceID) {
		after[other.volume] = true
	}
	delete(after, disk.VolumeID)
	return len(after)
}

// Unpublish ends the attach request for a volume and detaches its disk. If the instance runs, Unpublish records a
// deferred detach instead, which the next restart carries out. It also defers the detach while the instance is being
// restarted: an orchestrator that believes the node is lost may bring its workloads back there. Unpublish returns the
// disk as the rack shows it afterwards, and whether the detach is deferred. On a rack with hot-plug the state of the
// disk may be detaching. A boot disk was never published, and is returned without its instance. vouched says that a
// person asks, who has confirmed that the volume is not in use there.
func (e *Engine) Unpublish(
	ctx context.Context, volumeID, instanceID string, vouched bool,
) (now rack.Disk, deferred bool, err error) {
	release, err := e.lockVolume(ctx, volumeID)
	if err != nil {
		return rack.Disk{}, false, err
	}
	defer release()
	e.CancelAttachRequest(volumeID, instanceID)
	disk, err := e.diskIfAny(ctx, volumeID)
	if err != nil || disk.InstanceID != instanceID {
		return disk, false, err
	}
	records, err := e.readRecords(ctx)
	if err != nil {
		return rack.Disk{}, false, err
	}
	if err := records.deferred.Check(volumeID); err != nil {
		return rack.Disk{}, false, err
	}
	if _, restarting := records.restartOf(instanceID, ""); !restarting && records.check(instanceID) == nil {
		detached, err := e.detachNow(ctx, disk, instanceID, vouched, records)
		if !errors.Is(err, rack.ErrNotStopped) {
			return detached, false, err
		}
		e.refusesHot.Store(true)
	}
	instance, err := e.rack.Instance(ctx, instanceID)
	switch {
	case err != nil:
		return disk, false, err
	case instance.BootDiskID == disk.ID:
		disk.InstanceID = ""
		return disk, false, nil
	case vouched:
		return disk, true, e.opts.Detacher.DeferVouched(ctx, volumeID, instanceID)
	}
	return disk, true, e.opts.Detacher.Defer(ctx, volumeID, instanceID)
}

// detachNow detaches a disk. Where deferred detaches are timed, this is remembered.
func (e *Engine) detachNow(
	ctx context.Context, disk rack.Disk, instanceID string, vouched bool, records recordSet,
) (rack.Disk, error) {
	if e.opts.Detacher.Timed() {
		if err := e.opts.Detacher.DetachNow(ctx, disk.VolumeID, instanceID, vouched); err != nil {
			return rack.Disk{}, err
		}
		return e.diskIfAny(ctx, disk.VolumeID)
	}
	detached, err := e.rack.Detach(ctx, disk.ID, instanceID)
	old, deferred := records.deferred.Active(disk.VolumeID)
	if deferred && err == nil && detached.InstanceID != instanceID {
		// The volume was also unpublished while the instance ran.
		return detached, e.opts.Detacher.End(ctx, old)
	}
	return detached, err
}

// DeferDetach is [Engine.Unpublish] for a volume that may still be mounted on a running instance: it never detaches.
func (e *Engine) DeferDetach(ctx context.Context, volumeID, instanceID string) error {
	release, err := e.lockVolume(ctx, volumeID)
	if err != nil {
		return err
	}
	defer release()
	e.CancelAttachRequest(volumeID, instanceID)
	disk, err := e.diskIfAny(ctx, volumeID)
	if err == nil && disk.InstanceID == instanceID {
		err = e.opts.Detacher.Defer(ctx, volumeID, instanceID)
	}
	return err
}

// diskIfAny returns the disk of a volume. If the disk is being replaced, it returns a disk that is attached nowhere.
func (e *Engine) diskIfAny(ctx context.Context, volume string) (rack.Disk, error) {
	disk, err := e.rack.Disk(ctx, volume)
	if errors.Is(err, rack.ErrReplaced) {
		return rack.Disk{VolumeID: volume}, nil
	}
	return disk, err
}

// RefusesHotplug reports whether the rack's last answer to an attach or detach on a running instance was a refusal.
func (e *Engine) RefusesHotplug() bool { return e.refusesHot.Load() }

// CancelAttachRequest ends the attach request for a volume on an instance, or on any instance if instanceID is "".
func (e *Engine) CancelAttachRequest(volumeID, instanceID string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if request := e.requests[volumeID]; request != nil && (instanceID == "" || request.instance == instanceID) {
		delete(e.requests, volumeID)
	}
}

// Changed returns a channel that is closed when the next disk is attached or the next restart ends. Call it before
// [Engine.Publish], so that no change is missed.
func (e *Engine) Changed() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.changed
}
