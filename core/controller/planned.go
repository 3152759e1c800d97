// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/detach"
	"github.com/oxidecomputer/oxide-csi-plugin/core/expand"
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
)

// PlannedRestarts configure attach mode restart.
type PlannedRestarts struct {
	restart.Options
	// Wait is how long ControllerPublishVolume waits for a restart. After that it returns FAILED_PRECONDITION.
	Wait time.Duration
	// Claims publishes what a volume waits for. It may be nil.
	Claims orchestrator.ClaimReporter
}

// newEngines returns an engine for each rack.
func (c *Service) newEngines(opts PlannedRestarts) map[*rack.Client]*restart.Engine {
	engines := map[*rack.Client]*restart.Engine{}
	for _, client := range c.racks.all {
		engines[client] = c.newEngine(client, opts.Options)
	}
	return engines
}

func (c *Service) newEngine(client *rack.Client, opts restart.Options) *restart.Engine {
	opts.Cluster, opts.MaxDisks, opts.Log = c.cluster, c.maxDisks, c.log.With("rack", client.Name())
	opts.LockInstance, opts.Detacher = c.lockInstance, c.detachers[client]
	opts.Yield = func(ctx context.Context, disk rack.Disk, records []record.Record) error {
		err := c.forRack(client).yield(ctx, disk, records)
		if errors.Is(err, expand.ErrUnderWay) {
			return fmt.Errorf("%w: %w", err, rack.ErrRefused) // a restart goes on without the disk
		}
		return err
	}
	opts.Observe = func(seen restart.Observation) {
		c.metrics.SetRestarts(client.Name(), seen.DisksWaiting, seen.InFlight)
		for reason, instances := range seen.InstancesWaiting {
			c.metrics.SetRestartsWaiting(client.Name(), string(reason), instances)
		}
		if seen.Ended != "" {
			c.metrics.RestartEnded(client.Name(), seen.Ended, seen.Down)
		}
	}
	return restart.New(client, opts)
}

// PlanRestarts plans and carries out the restarts of one rack's instances until ctx ends, in attach mode restart.
func (c *Service) PlanRestarts(ctx context.Context, client *rack.Client) {
	if engine := c.engines[client]; engine != nil {
		engine.Run(ctx)
	}
}

// RetireRestarts ends the planning of restarts and hands over those under way, so that another controller continues at
// once and does not wait for the lease. It returns when ctx ends at the latest.
func (c *Service) RetireRestarts(ctx context.Context) {
	for _, engine := range c.engines {
		engine.Retire()
	}
	for _, engine := range c.engines {
		select {
		case <-engine.Retired():
		case <-ctx.Done():
		}
	}
}

// CleanUpRestarts removes the traces of attach mode restart on a rack, for a controller in attach mode hot. This
// controller cannot ask a guest whether it is shutting down, so it waits for the options' HaltTimeout instead.
func (c *Service) CleanUpRestarts(ctx context.Context, client *rack.Client, opts restart.Options) {
	opts.Shutdown, opts.MaxDown = restart.Hard, 0
	c.newEngine(client, opts).CleanUp(ctx)
}

// publishPlanned attaches a disk, or plans a restart of its instance. It rejects an orchestrator's mistakes before it
// plans anything.
func (c rackController) publishPlanned(ctx context.Context, disk rack.Disk, instanceID string) (rack.Disk, error) {
	if disk.State != rack.Detached && disk.State != rack.Attached {
		return rack.Disk{}, c.checkAttachable(ctx, disk)
	}
	if disk.InstanceID != "" && disk.InstanceID != instanceID && !c.engine.RefusesHotplug() {
		var err error
		if disk, err = c.detachElsewhere(ctx, disk); err != nil && !errors.Is(err, rack.ErrNotStopped) {
			return rack.Disk{}, err
		}
	}
	until, reported := time.Now().Add(min(c.restartWait, rpc.WaitBudget(ctx))), ""
	if asked(ctx, rpc.MetadataAnswerSoon) {
		until = time.Time{}
	}
	for {
		changed := c.engine.Changed()
		attached, rejected, err := c.checkAndPublish(ctx, disk, instanceID)
		switch {
		case rejected != nil:
			return rack.Disk{}, rejected
		case err == nil:
			return c.awaitAttached(ctx, attached, instanceID)
		case errors.Is(err, restart.ErrElsewhere):
			if disk, err = c.attachableNow(ctx, disk.VolumeID); err != nil {
				return rack.Disk{}, err
			}
			continue // it was detached there since
		case errors.Is(err, expand.ErrUnderWay):
			return rack.Disk{}, err
		case errors.Is(err, restart.ErrFull):
			return rack.Disk{}, c.plannedFullError(ctx, instanceID, err)
		case !errors.Is(err, restart.ErrPlanned):
			return c.publishAttached(ctx, disk, instanceID, err)
		}
		if err := c.checkSameProject(ctx, disk, instanceID); err != nil {
			return rack.Disk{}, err
		}
		left := time.Until(until)
		if left <= 0 {
			return rack.Disk{}, rpc.LoggedAt(slog.LevelInfo, err)
		}
		if text := fault.Message(err); text != reported {
			c.reportWait(ctx, disk, text)
			reported = text
		}
		if c.waitForRestart(ctx, changed, left) {
			until = time.Time{} // another controller continues: the orchestrator has to call that one
		}
		if ctx.Err() != nil {
			return rack.Disk{}, rpc.LoggedAt(slog.LevelInfo, err)
		}
	}
}

// plannedFullError is the error for an instance that has no room for a disk, even after a restart. A restart for
// another volume leaves a disk attached whose deferred detach is untimed. Then the error names that disk: see
// [rackController.instanceFullError].
func (c rackController) plannedFullError(ctx context.Context, instanceID string, full error) error {
	if c.detacher.Timed() {
		set, err := c.detacher.List(ctx)
		if err != nil {
			return err
		}
		disks, err := c.instanceDisks(ctx, instanceID)
		if err != nil {
			return err
		}
		for _, disk := range disks {
			if deferred, ok := set.Of(disk.VolumeID, instanceID); ok && deferred.Untimed {
				return c.waitsForDetachError(disk, deferred, fullUntilDetached)
			}
		}
	}
	return rpc.ResourceExhausted(
		"%w: --max-disks is %d (racks from release 18 on take 12): take another volume from it first", full, c.maxDisks)
}

// publishAttached publishes a disk that is attached to the instance although the rack refused the attach. If the disk
// is not attached there, it returns the error to answer. Only the engine knows whether the disk's detach is deferred:
// on the rack such a disk looks the same.
func (c rackController) publishAttached(
	ctx context.Context,
	disk rack.Disk,
	instanceID string,
	refusal error,
) (rack.Disk, error) {
	if _, err := c.resolveAttach(ctx, disk, instanceID, refusal); err != nil {
		return rack.Disk{}, err
	}
	attached, err := c.engine.Publish(ctx, disk.VolumeID, instanceID)
	if err != nil {
		return rack.Disk{}, err
	}
	return c.awaitAttached(ctx, attached, instanceID)
}

// waitForRestart waits until something has changed, but not longer than maxWait. It reports whether this controller
// hands its restarts over.
func (c rackController) waitForRestart(
	ctx context.Context,
	changed <-chan struct{},
	maxWait time.Duration,
) (retiring bool) {
	timer := time.NewTimer(maxWait)
	defer timer.Stop()
	select {
	case <-c.engine.Retiring():
		return true
	case <-changed:
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

// reportTimeout bounds a report. The volume waits anyway.
const reportTimeout = 5 * time.Second

// reportWait publishes what a volume waits for, as an event of its claim. The RPC itself says so only when it stops
// waiting, and until then Kubernetes shows nothing. A failure is only logged.
func (c rackController) reportWait(ctx context.Context, disk rack.Disk, why string) {
	volume, claim := rack.FullNames(diskname.Volume, disk.Description)
	if c.claims == nil || claim == "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	report := orchestrator.Report{Event: orchestrator.EventWaitsForRestart, Message: why}
	if err := c.claims.ReportClaim(ctx, volume, claim, report); err != nil {
		c.log.Warn("could not deliver a report about a claim", "volume_id", disk.VolumeID, "claim", claim,
			"error", err.Error())
	}
}

// attachableNow reads a disk again. It returns an error if the disk cannot be attached.
func (c rackController) attachableNow(ctx context.Context, id string) (rack.Disk, error) {
	disk, err := c.rack.Disk(ctx, id)
	if err != nil {
		return rack.Disk{}, err
	}
	return disk, c.checkAttachable(ctx, disk)
}

// checkAndPublish checks the serials of the instance's disks, and has the engine attach the disk or plan a restart. If
// a check fails, it returns that error as rejected and plans no restart.
func (c rackController) checkAndPublish(
	ctx context.Context,
	disk rack.Disk,
	instanceID string,
) (attached rack.Disk, rejected, err error) {
	release, err := c.lockInstance(ctx, instanceID)
	if err != nil {
		return rack.Disk{}, err, nil
	}
	defer release()
	if disk.InstanceID != instanceID { // also if it is attached elsewhere: it may be detached there meanwhile
		disks, err := c.instanceDisks(ctx, instanceID)
		if err == nil {
			err = checkSerial(disk, disks)
		}
		if err != nil {
			return rack.Disk{}, err, nil
		}
	}
	attached, err = c.engine.Publish(ctx, disk.VolumeID, instanceID)
	return attached, nil, err
}

// checkSameProject rejects a disk that is in another project than the instance, so that no call waits for a restart in
// vain.
func (c rackController) checkSameProject(ctx context.Context, disk rack.Disk, instanceID string) error {
	instance, err := c.instance(ctx, instanceID)
	if err == nil && instance.ProjectID != disk.ProjectID {
		c.engine.CancelAttachRequest(disk.VolumeID, instanceID)
		return projectMismatchError(c.rack, instance, disk)
	}
	return err
}

// unpublishPlanned detaches a disk, or defers its detach to the next restart of its instance.
func (c rackController) unpublishPlanned(ctx context.Context, disk rack.Disk) error {
	now, deferred, err := c.engine.Unpublish(ctx, disk.VolumeID, disk.InstanceID, requestedNow(ctx))
	if err != nil {
		return c.resolveDetach(ctx, disk, err)
	}
	now, err = c.waitToDetach(ctx, now)
	switch {
	case err != nil || now.InstanceID != disk.InstanceID:
		return err
	case !deferred:
		return c.stillAttachedError(disk)
	}
	sayDeferred(ctx, rpc.DeferredForRestart)
	return nil
}

// detachIfDeferred carries out a deferred detach that has no grace period, if the instance is stopped. It returns the
// disk as it is afterwards. If the volume was published again meanwhile, the detacher sees that.
func (c rackController) detachIfDeferred(ctx context.Context, disk rack.Disk) (rack.Disk, error) {
	if c.detacher.Timed() {
		return disk, nil // DetachLater does it
	}
	deferred, err := c.deferredDetaches(ctx)
	if err != nil || deferred[disk.VolumeID] != disk.InstanceID {
		return disk, err
	}
	c.engine.CancelAttachRequest(disk.VolumeID, disk.InstanceID)
	err = c.detacher.Detach(ctx, disk.VolumeID, disk.InstanceID)
	switch {
	case errors.Is(err, rack.ErrNotStopped),
		errors.Is(err, detach.ErrNotDeferred),
		errors.Is(err, detach.ErrDetaching),
		staysAttached(err),
		err == nil:
		return c.rack.Disk(ctx, disk.VolumeID)
	}
	return disk, c.resolveDetach(ctx, disk, err)
}

// sendRestarts adds the planned restarts to the response's metadata if the caller asked for them. Orchestrators do not
// ask, because the CSI specification has no message for it. Volume health is not used: Kubernetes shows it as the
// condition of the claim, and a waiting volume is healthy. With a volume ID, only the restarts that concern that volume
// are sent.
func (c *Service) sendRestarts(ctx context.Context, volumeID string) error {
	if !asked(ctx, rpc.MetadataAskRestarts) {
		return nil
	}
	all := []rpc.Restart{}
	if c.engines == nil {
		all = c.refusals.report()
	}
	for _, client := range c.racks.all {
		if c.engines[client] == nil {
			continue
		}
		restarts, err := c.engines[client].Report(ctx)
		if err != nil {
			return fmt.Errorf("list planned restarts on rack %q: %w", client.Name(), err)
		}
		all = append(all, restarts...)
	}
	if volumeID != "" {
		all = slices.DeleteFunc(all, func(r rpc.Restart) bool { return !r.Concerns(volumeID) })
	}
	if c.engines == nil && len(all) == 0 {
		return nil // a rack with hot-plug needs no restarts
	}
	return setHeader(ctx, rpc.MetadataRestarts, all)
}
