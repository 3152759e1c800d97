// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/core/detach"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// apply changes the disks of a stopped instance. It detaches the disks whose detach was deferred before the restart, or
// all deferred ones if their slots are needed. A disk that a workload may use stays. Then it attaches the requested
// disks. Calls that the rack does not answer are repeated for applyTimeout. If a disk cannot be changed, apply
// continues with the others.
func (e *Engine) apply(ctx context.Context, h *heldRestart) (done bool, err error) {
	id := h.record.Instance
	disks, err := e.instanceDisks(ctx, id)
	switch {
	case errors.Is(err, errDeleted):
		return false, err
	case err != nil:
		return e.stageLasted(timerApply, h, applyTimeout), err
	}
	var failed error
	full := e.slotsNeeded(disks, id) > e.opts.MaxDisks
	wanted := func(disk rack.Disk) bool {
		return e.requestedElsewhere(disk.VolumeID, id) || h.record.FreedVolume() == disk.VolumeID
	}
	leaving := slices.DeleteFunc(slices.Clone(disks), func(disk rack.Disk) bool {
		return !full && !h.deferredAtStart[disk.VolumeID] && !wanted(disk)
	})
	unclaimed, err := e.unclaimed(ctx, leaving, id)
	if err != nil {
		return e.stageLasted(timerApply, h, applyTimeout), err
	}
	for _, disk := range leaving {
		err := e.finishDetach(ctx, disk, id, wanted(disk), unclaimed)
		switch {
		case errors.Is(err, rack.ErrNotStopped):
			e.noteStart(ctx, h)
			return true, nil
		case errors.Is(err, rack.ErrConflict), errors.Is(err, rack.ErrRefused), errors.Is(err, rack.ErrUnknown):
			e.opts.Log.Warn("could not detach an unpublished volume", "volume_id", disk.VolumeID, "node_id", id,
				"error", err.Error())
		case err != nil:
			failed = errors.Join(failed, err)
		}
	}
	started, err := e.attachAllRequested(ctx, id)
	if started {
		e.noteStart(ctx, h)
		return true, nil
	}
	failed = errors.Join(failed, err)
	return failed == nil || e.stageLasted(timerApply, h, applyTimeout), failed
}

// attachAllRequested attaches the requested disks of a stopped instance. It ends early, and returns true, if the
// instance was started meanwhile.
func (e *Engine) attachAllRequested(ctx context.Context, id string) (started bool, failed error) {
	requests := e.requestsFor(id)
	if len(requests) > 0 && e.opts.LockInstance != nil {
		// Before the volumes' locks, as in an RPC, and once: each time it may have to wait for other attaches.
		unlock, err := e.opts.LockInstance(ctx, id)
		if err != nil {
			return false, err
		}
		defer unlock()
	}
	for _, request := range requests {
		tried, err := e.attachRequested(ctx, request.volume, id)
		err = e.confirmNotFound(ctx, err)
		switch {
		case err == nil:
		case errors.Is(err, rack.ErrNotStopped):
			return true, nil
		case errors.Is(err, rack.ErrFull):
			// The next publish refuses it, or requests it again if there is room by then.
			e.opts.Log.Warn("no room for a volume", "volume_id", request.volume, "node_id", id, "error", err.Error())
			e.CancelAttachRequest(request.volume, "")
		case errors.Is(err, rack.ErrRefused), errors.Is(err, rack.ErrNotFound), errors.Is(err, rack.ErrReplaced),
			errors.Is(err, rack.ErrUnknown), errors.Is(err, record.ErrFormat):
			e.opts.Log.Warn("could not attach a volume", "volume_id", request.volume, "node_id", id, "error", err.Error())
			e.recordAttachFailure(request.volume, tried, "not attached while it was stopped: "+err.Error())
		default:
			failed = errors.Join(failed, err)
		}
	}
	return false, failed
}

// noteStart says that the instance was started while its disks were being changed. Its requests wait for the next
// restart, which has to wait for the cool-down of that start.
func (e *Engine) noteStart(ctx context.Context, h *heldRestart) {
	const why = "others started it first"
	e.recordFailure(h.record.Instance, why)
	e.reportProblem(ctx, h, orchestrator.EventRestartRefused, why)
}

// slotsNeeded returns how many slots the attached disks of an instance and its attach requests need. A requested volume
// can be attached already: it was published again during the restart, or apply is repeated.
func (e *Engine) slotsNeeded(disks []rack.Disk, instance string) int {
	volumes := map[string]bool{}
	for _, disk := range disks {
		volumes[disk.VolumeID] = true
	}
	for _, request := range e.requestsFor(instance) {
		volumes[request.volume] = true
	}
	return len(volumes)
}

// unclaimed asks with one question which of the instance's disks no workload may use. It returns a function that
// reports whether a deferred detach may be carried out. If its record has changed since, the answer is no.
func (e *Engine) unclaimed(
	ctx context.Context, disks []rack.Disk, instance string,
) (func(record.Deferral) bool, error) {
	if !e.opts.Detacher.Asks() || len(disks) == 0 {
		return func(record.Deferral) bool { return true }, nil
	}
	records, err := e.readRecords(ctx)
	if err != nil {
		return nil, err
	}
	var asked []record.Deferral
	for _, disk := range disks {
		if deferred, ok := records.deferred.Of(disk.VolumeID, instance); ok {
			asked = append(asked, deferred)
		}
	}
	staying := e.opts.Detacher.Staying(ctx, asked)
	return func(now record.Deferral) bool {
		return staying[now.VolumeID] == nil && slices.ContainsFunc(asked, now.Unchanged)
	}, nil
}

// finishDetach carries out a deferred detach, unless the disk was requested again, or a workload may use it. An untimed
// one is carried out only if another instance wants the disk.
func (e *Engine) finishDetach(
	ctx context.Context, disk rack.Disk, instance string, wanted bool, unclaimed func(record.Deferral) bool,
) error {
	release, err := e.lockVolume(ctx, disk.VolumeID)
	if err != nil {
		return err
	}
	defer release()
	if e.requested(disk.VolumeID, instance) {
		return nil
	}
	records, err := e.readRecords(ctx)
	if err != nil {
		return err
	}
	deferred, ok := records.deferred.Of(disk.VolumeID, instance)
	if !ok || !records.frees(disk.VolumeID, instance) && !wanted || !unclaimed(deferred) {
		return nil
	}
	if err := disk.CheckKnown(); err != nil {
		return err
	}
	detached, err := e.rack.Detach(ctx, disk.ID, instance)
	switch {
	case err != nil:
		return err
	case detached.InstanceID == instance:
		return fmt.Errorf("disk %q (%s) is still attached: %w", disk.Name, disk.ID, rack.ErrBusy)
	}
	return e.opts.Detacher.End(ctx, deferred)
}

// attachRequested attaches the disk of a volume if it is still requested. It also defers the disk's detach until the
// orchestrator publishes the volume again, because the orchestrator may have unpublished it through another process.
// tried is the disk that the volume has, or "" if that is not known.
func (e *Engine) attachRequested(ctx context.Context, volume, instance string) (tried rack.DiskID, err error) {
	release, err := e.lockVolume(ctx, volume)
	if err != nil {
		return "", err
	}
	defer release()
	if !e.requested(volume, instance) {
		return "", nil
	}
	disk, err := e.rack.Disk(ctx, volume)
	if err != nil {
		return "", err
	}
	tried = disk.ID
	if disk.State.Transient() {
		return tried, fmt.Errorf("disk %q (%s) is %s: %w", disk.Name, disk.ID, disk.State, rack.ErrBusy)
	}
	if disk.InstanceID == "" {
		if err := e.checkAttachable(ctx, disk, instance); err != nil {
			return tried, err
		}
		err := e.opts.Detacher.DeferUnlessPublished(ctx, volume, instance)
		if errors.Is(err, detach.ErrRestarting) {
			e.setBlocked(volume, "another controller attaches the disk to another instance, which is being restarted")
			return tried, nil // the request waits for the next restart
		}
		if err != nil {
			return tried, err
		}
		if disk, err = e.attachToStopped(ctx, disk, instance); err != nil {
			return tried, err
		}
	}
	if disk.InstanceID != instance {
		return tried, nil // another restart frees the disk: the request waits for the next restart
	}
	e.setBlocked(volume, attachedNotPublished)
	e.notifyWaiters()
	return tried, nil
}

// checkDisks calls [Options.Yield] for all disks of a stopped instance. The publish that attached one of them may have
// ended before it looked at the records, and after the start of the instance the disk could not be detached any more.
// What a guest writes to a disk that is being replaced is lost, so this is repeated until the instance is overdue. Then
// it starts all the same: the publish of such a volume is refused, and no workload uses it. One tick lists the disks,
// and the next one, which has read the records after that, uses them. So a tick needs one call here, and an instance is
// started although the rack is so slow that a tick has no time for two.
func (e *Engine) checkDisks(ctx context.Context, h *heldRestart, records recordSet) error {
	id := h.record.Instance
	if e.opts.Yield != nil && h.attached == nil {
		disks, err := e.instanceDisks(ctx, id)
		if err != nil {
			return err
		}
		h.attached = append([]rack.Disk{}, disks...)
		e.wakeUp()
		return nil
	}
	attached := h.attached
	h.attached = nil
	if err := e.yield(ctx, id, attached, records.all); err != nil {
		if !h.ownersStop && (errors.Is(err, record.ErrNoRecord) || e.stageLasted(timerApply, h, applyTimeout)) {
			e.reportProblem(ctx, h, orchestrator.EventRestartWaitsForDisk, "not started: "+err.Error())
		}
		return err
	}
	if h.ownersStop {
		return e.endRestart(ctx, h)
	}
	e.enterStage(h, stageStarting)
	return nil
}

// yield calls [Options.Yield] for the disks of a stopped instance.
func (e *Engine) yield(
	ctx context.Context,
	instance string,
	disks []rack.Disk,
	records []record.Record,
) (failed error) {
	for _, disk := range disks {
		switch err := e.opts.Yield(ctx, disk, records); {
		case err == nil:
		case errors.Is(err, rack.ErrNotStopped):
			return nil // it was started in the meantime: a deferred detach waits for the next restart
		case errors.Is(err, record.ErrFormat): // the publish of this volume is refused, too
			e.opts.Log.Warn(
				"cannot tell whether a disk is being replaced",
				"volume_id", disk.VolumeID, "node_id", instance, "error", err.Error())
		case errors.Is(err, rack.ErrRefused):
			e.opts.Log.Warn(
				"detached a disk that is being replaced", "volume_id", disk.VolumeID, "node_id", instance, "error", err.Error())
			e.recordAttachFailure(disk.VolumeID, disk.ID, "the disk was being replaced by a larger one")
		default:
			failed = errors.Join(failed, err)
		}
	}
	return failed
}

// attachToStopped attaches a disk to an instance that has a free slot by --max-disks. If the disk was attached to
// another instance in the meantime, it returns the disk as it is now. If the rack allows fewer disks, it returns
// [rack.ErrRefused]: no restart makes room then.
func (e *Engine) attachToStopped(ctx context.Context, disk rack.Disk, instance string) (rack.Disk, error) {
	attached, err := e.rack.Attach(ctx, disk.ID, instance)
	switch {
	case errors.Is(err, rack.ErrFull):
		return attached, e.explainFull(ctx, instance, err)
	case errors.Is(err, rack.ErrRefused) && !errors.Is(err, rack.ErrNotStopped):
		if now, lookUp := e.rack.Disk(ctx, disk.VolumeID); lookUp == nil && now.InstanceID != "" {
			return now, nil
		}
	}
	return attached, err
}

// explainFull returns the error for an instance that the rack calls full although it has a free slot by --max-disks.
func (e *Engine) explainFull(ctx context.Context, instance string, full error) error {
	disks, err := e.rack.InstanceDisks(ctx, instance)
	if err != nil || len(disks) >= e.opts.MaxDisks { // another controller has taken the slot
		return full
	}
	e.opts.Log.Warn("the rack has a smaller limit of disks", "node_id", instance, "disks", len(disks),
		"error", full.Error())
	return fmt.Errorf("the rack %w: it allows fewer than --max-disks=%d: set it to the rack's limit",
		rack.ErrRefused, e.opts.MaxDisks)
}

// requestedElsewhere reports whether the volume is requested on another instance.
func (e *Engine) requestedElsewhere(volume, instance string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	request := e.requests[volume]
	return request != nil && request.instance != instance
}

// requested reports whether the volume is requested on this instance.
func (e *Engine) requested(volume, instance string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	request := e.requests[volume]
	return request != nil && request.instance == instance
}

// checkAttachable rejects a disk if the instance has no free slot, or if the disk's NVMe serial collides with an
// attached disk's (docs/reference/rack.md §9).
func (e *Engine) checkAttachable(ctx context.Context, disk rack.Disk, instance string) error {
	disks, err := e.rack.InstanceDisks(ctx, instance)
	if err != nil {
		return err
	}
	if len(disks) >= e.opts.MaxDisks {
		return fmt.Errorf("instance %s has %d disks already: %w", instance, len(disks), rack.ErrFull)
	}
	return disk.CheckSerial(disks)
}
