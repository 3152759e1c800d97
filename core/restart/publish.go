// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package restart

import (
	"context"
	"errors"
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
)

var (
	// ErrPlanned says that a volume waits for the restart of an instance. The orchestrator is to ask again.
	ErrPlanned = errors.New("waits for a planned restart")
	// ErrElsewhere says that the disk is attached to another instance, and in use there.
	ErrElsewhere = errors.New("attached to another instance")
	// ErrFull says that the instance will have as many disks as it takes once all that is wished for was done.
	ErrFull = errors.New("the instance takes no more disks")
)

// Publish attaches a disk to an instance. Where that needs a restart, the wish for it is noted and the error is an
// [ErrPlanned] that tells what is waited for; a refusal of the rack for any other reason is returned as it is.
func (e *Engine) Publish(ctx context.Context, diskID, instanceID string) (rack.Disk, error) {
	release, err := e.lockDisk(ctx, diskID)
	if err != nil {
		return rack.Disk{}, err
	}
	defer release()
	disk, err := e.rack.Disk(ctx, diskID)
	if err != nil {
		return rack.Disk{}, err
	}
	switch disk.InstanceID {
	case instanceID:
		return e.confirmAttached(ctx, disk)
	case "":
		return e.attach(ctx, disk, instanceID)
	}
	records, err := e.readRecords(ctx)
	if err != nil {
		return rack.Disk{}, err
	}
	if !records.detachDeferred(disk.ID, disk.InstanceID) {
		return rack.Disk{}, fmt.Errorf("disk %q (%s) on instance %s: %w", disk.Name, disk.ID, disk.InstanceID, ErrElsewhere)
	}
	disks, err := e.rack.InstanceDisks(ctx, instanceID)
	if err != nil {
		return rack.Disk{}, err
	}
	return rack.Disk{}, e.requestAttach(ctx, disk, instanceID, disks, records)
}

// attach attaches a disk that is not attached anywhere, or wishes it were.
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
			// A record may be left of an earlier life on this instance.
			return e.confirmAttached(ctx, attached)
		case errors.Is(err, rack.ErrNotStopped):
			e.hotplugs.Store(false)
		case !errors.Is(err, rack.ErrFull):
			return rack.Disk{}, err
		}
	}
	records, err := e.readRecords(ctx)
	if err != nil {
		return rack.Disk{}, err
	}
	return rack.Disk{}, e.requestAttach(ctx, disk, instanceID, disks, records)
}

// notice finds out whether the rack has attached a disk to an instance that runs.
func (e *Engine) detectHotplug(ctx context.Context, instanceID string) {
	if e.hotplugs.Load() {
		return
	}
	if instance, err := e.rack.Instance(ctx, instanceID); err == nil && instance.RunState == rack.Running {
		e.hotplugs.Store(true)
	}
}

// keep makes sure that an attached disk stays so, which is what a publication is: that it is lazy no more, and that no restart
// of its instance is under way, which might have found it lazy. The last look is at the disk: such a restart may just have
// ended.
func (e *Engine) confirmAttached(ctx context.Context, disk rack.Disk) (rack.Disk, error) {
	records, err := e.readRecords(ctx)
	if err != nil {
		return rack.Disk{}, err
	}
	if r, restarting := records.restartOf(disk.InstanceID, ""); restarting {
		return rack.Disk{}, e.requestAfterRestart(disk, r)
	}
	if l, lazy := records.deferred[disk.ID]; lazy {
		if err := e.deleteRecord(ctx, l.recordID); err != nil {
			return rack.Disk{}, err
		}
		if records, err = e.readRecords(ctx); err != nil {
			return rack.Disk{}, err
		}
		if r, restarting := records.restartOf(disk.InstanceID, ""); restarting {
			return rack.Disk{}, e.requestAfterRestart(disk, r)
		}
	}
	now, err := e.rack.Disk(ctx, disk.ID)
	if err != nil {
		return rack.Disk{}, err
	}
	if now.InstanceID != disk.InstanceID {
		return rack.Disk{}, fmt.Errorf(
			"disk %q (%s) was detached from instance %s just now: ask again: %w",
			disk.Name,
			disk.ID,
			disk.InstanceID,
			ErrPlanned,
		)
	}
	e.removeRequest(disk.ID)
	return now, nil
}

// postpone leaves a disk that is attached for the time after the restart of its instance, and wishes that it stays.
func (e *Engine) requestAfterRestart(disk rack.Disk, r restartRecord) error {
	e.watchEnd(r)
	e.addRequest(disk.ID, disk.InstanceID)
	stage := string(stagePlanned)
	if o := e.status(disk.InstanceID); o.reason == ReasonUnderWay {
		stage = o.message()
	}
	return fmt.Errorf(
		"disk %q (%s): instance %s is being restarted (%s), ask again when it runs: %s: %w",
		disk.Name,
		disk.ID,
		disk.InstanceID,
		r.ID,
		stage,
		ErrPlanned,
	)
}

// wish notes that a disk is to be attached to an instance that has these, and says what it waits for.
func (e *Engine) requestAttach(ctx context.Context, disk rack.Disk, instanceID string, disks []rack.Disk, records recordSet) error {
	if err := e.checkFreeSlot(ctx, disk, instanceID, disks, records); err != nil {
		return err
	}
	wanted := e.addRequest(disk.ID, instanceID)
	if disk.InstanceID != "" {
		e.setHeldBy(disk.ID, disk.InstanceID)
		wanted.heldBy = disk.InstanceID
	}
	return fmt.Errorf("disk %q (%s): %s: %w", disk.Name, disk.ID, e.describeWait(wanted), ErrPlanned)
}

// want notes a wish, or that it was repeated.
func (e *Engine) addRequest(disk, instance string) attachRequest {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.clock.Now()
	w := e.requests[disk]
	if w == nil || w.instance != instance {
		w = &attachRequest{disk: disk, instance: instance, requestedAt: now}
		e.requests[disk] = w
		e.wakeUp()
	}
	w.repeatedAt, w.fromRestart = now, ""
	return *w
}

// checkRoom refuses what the instance has no room for even after all that is lazy was detached. A restart detaches a disk and then
// erases its record: before a refusal, the disks have to be listed after the records.
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
		return fmt.Errorf("instance %s has or is to get %d disks: %w", instanceID, taken, ErrFull)
	}
	return nil
}

// taken is how many other disks the instance is to have.
func (e *Engine) expectedDisks(disk rack.Disk, instanceID string, disks []rack.Disk, records recordSet) int {
	after := map[string]bool{}
	for _, other := range disks {
		if !records.detachDeferred(other.ID, instanceID) {
			after[other.ID] = true
		}
	}
	for _, other := range e.requestsFor(instanceID) {
		after[other.disk] = true
	}
	delete(after, disk.ID)
	return len(after)
}

// Unpublish ends the wish for a disk, and detaches it. From an instance that runs it is not detached: a record says that
// nobody uses it there any more, and the next restart of the instance takes it away. Nor is it while the instance is being
// restarted: an orchestrator that takes the node for lost may bring its work back there. It returns the disk as the rack shows it
// then, which may be detaching on a rack that changes running instances.
func (e *Engine) Unpublish(ctx context.Context, diskID, instanceID string) (rack.Disk, error) {
	release, err := e.lockDisk(ctx, diskID)
	if err != nil {
		return rack.Disk{}, err
	}
	defer release()
	e.CancelAttachRequest(diskID, instanceID)
	disk, err := e.rack.Disk(ctx, diskID)
	if err != nil || disk.InstanceID != instanceID {
		return disk, err
	}
	records, err := e.readRecords(ctx)
	if err != nil {
		return rack.Disk{}, err
	}
	if _, restarting := records.restartOf(instanceID, ""); !restarting {
		detached, err := e.rack.Detach(ctx, diskID, instanceID)
		old, lazy := records.deferred[diskID]
		switch {
		case errors.Is(err, rack.ErrNotStopped):
		case err == nil && lazy: // it was unpublished before, while the instance ran
			return detached, e.deleteRecord(ctx, old.recordID)
		default:
			return detached, err
		}
	}
	return disk, e.deferDetach(ctx, diskID, instanceID)
}

// Leave is [Engine.Unpublish] for a disk that may still be mounted on an instance that runs, and so is not detached from it. False
// means that nothing was done: the rack was last seen to attach to such an instance, and would detach once asked later.
func (e *Engine) DeferDetach(ctx context.Context, diskID, instanceID string) (left bool, err error) {
	if e.hotplugs.Load() {
		return false, nil
	}
	release, err := e.lockDisk(ctx, diskID)
	if err != nil {
		return false, err
	}
	defer release()
	e.CancelAttachRequest(diskID, instanceID)
	disk, err := e.rack.Disk(ctx, diskID)
	if err == nil && disk.InstanceID == instanceID {
		err = e.deferDetach(ctx, diskID, instanceID)
	}
	return err == nil, err
}

// Unwish ends the wish for a disk on an instance, or on any if none is named.
func (e *Engine) CancelAttachRequest(diskID, instanceID string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if w := e.requests[diskID]; w != nil && (instanceID == "" || w.instance == instanceID) {
		delete(e.requests, diskID)
	}
}

// release records that nobody uses an attached disk any more.
func (e *Engine) deferDetach(ctx context.Context, diskID, instanceID string) error {
	mine := deferredDetach{Version: 1, Cluster: e.opts.Cluster, Disk: diskID, Instance: instanceID}
	for range 2 {
		_, err := e.rack.CreateRecord(ctx, detachName(diskID), encode(mine))
		if !errors.Is(err, rack.ErrAlreadyExists) {
			return err
		}
		records, err := e.readRecords(ctx)
		if err != nil || records.detachDeferred(diskID, instanceID) {
			return err
		}
		if old, ok := records.deferred[diskID]; ok {
			// It is about an earlier time on another instance.
			if err := e.deleteRecord(ctx, old.recordID); err != nil {
				return err
			}
		}
	}
	return fmt.Errorf(
		"the anti-affinity group %q is not of this cluster: delete it if no other cluster uses disk %s: %w",
		detachName(diskID),
		diskID,
		rack.ErrConflict,
	)
}

// Forget clears away what is recorded about a disk that was deleted.
func (e *Engine) ForgetDisk(ctx context.Context, diskID string) error {
	records, err := e.readRecords(ctx)
	if err != nil {
		return err
	}
	if l, ok := records.deferred[diskID]; ok {
		return e.deleteRecord(ctx, l.recordID)
	}
	return nil
}

// Lazy are the instances that hold disks for nobody any more, by disk.
func (e *Engine) DeferredDetaches(ctx context.Context) (map[string]string, error) {
	records, err := e.readRecords(ctx)
	if err != nil {
		return nil, err
	}
	lazy := make(map[string]string, len(records.deferred))
	for disk, l := range records.deferred {
		lazy[disk] = l.Instance
	}
	return lazy, nil
}

// Changed returns what is closed when the next disk has been attached or the next restart is over. It is asked for before
// [Engine.Publish], whose answer it may make obsolete.
func (e *Engine) Changed() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.changed
}
