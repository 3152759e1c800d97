// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"google.golang.org/grpc"
	grpcmetadata "google.golang.org/grpc/metadata"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// PlannedRestarts configure attach mode restart.
type PlannedRestarts struct {
	restart.Options
	// Wait is how long ControllerPublishVolume waits for a restart. After that it returns FAILED_PRECONDITION.
	Wait time.Duration
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
	opts.LockInstance = c.lockInstance
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
	opts.Policy, opts.Shutdown = restart.Plan, restart.Hard
	c.newEngine(client, opts).CleanUp(ctx)
}

// publishPlanned attaches a disk, or plans a restart of its instance. It rejects an orchestrator's mistakes before it
// plans anything.
func (c rackController) publishPlanned(ctx context.Context, disk rack.Disk, instanceID string) (rack.Disk, error) {
	if disk.State != rack.Detached && disk.State != rack.Attached {
		return rack.Disk{}, c.checkAttachable(ctx, disk)
	}
	until := time.Now().Add(min(c.restartWait, rpc.WaitBudget(ctx)))
	for {
		changed := c.engine.Changed()
		attached, rejected, err := c.checkAndPublish(ctx, disk, instanceID)
		switch {
		case rejected != nil:
			return rack.Disk{}, rejected
		case err == nil:
			return c.waitForDisk(ctx, attached)
		case errors.Is(err, restart.ErrElsewhere):
			return rack.Disk{}, c.checkAttachable(ctx, disk)
		case errors.Is(err, restart.ErrFull):
			return rack.Disk{}, rpc.ResourceExhausted(
				"%w: --max-disks is %d; unpublish another volume from that node first",
				err,
				c.maxDisks,
			)
		case !errors.Is(err, restart.ErrPlanned):
			if _, err := c.resolveAttach(ctx, disk, instanceID, err); err != nil {
				return rack.Disk{}, err
			}
			// The disk is attached to this instance after all. Only the engine knows whether its detach is deferred: on
			// the rack such a disk looks the same.
			if attached, err = c.engine.Publish(ctx, disk.ID, instanceID); err != nil {
				return rack.Disk{}, err
			}
			return c.waitForDisk(ctx, attached)
		}
		if err := c.checkSameProject(ctx, disk, instanceID); err != nil {
			return rack.Disk{}, err
		}
		left := time.Until(until)
		if left <= 0 {
			return rack.Disk{}, rpc.LoggedAt(slog.LevelInfo, err)
		}
		timer := time.NewTimer(left)
		select {
		case <-changed:
		case <-timer.C:
		case <-c.engine.Retiring(): // another controller continues: the orchestrator has to call that one
			until = time.Time{}
		case <-ctx.Done():
		}
		timer.Stop()
		if ctx.Err() != nil {
			return rack.Disk{}, rpc.LoggedAt(slog.LevelInfo, err)
		}
	}
}

// checkAndPublish checks the serials of the instance's disks, and has the engine attach the disk or plan a restart. An
// error of the checks is rejected.
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
	if disk.State == rack.Detached {
		disks, err := c.instanceDisks(ctx, instanceID)
		if err == nil {
			err = checkSerialCollision(disk, disks, instanceID)
		}
		if err != nil {
			return rack.Disk{}, err, nil
		}
	}
	attached, err = c.engine.Publish(ctx, disk.ID, instanceID)
	return attached, nil, err
}

// checkSameProject rejects a disk that is in another project than the instance, so that no call waits for a restart in
// vain.
func (c rackController) checkSameProject(ctx context.Context, disk rack.Disk, instanceID string) error {
	instance, err := c.instance(ctx, instanceID)
	if err == nil && instance.ProjectID != disk.ProjectID {
		c.engine.CancelAttachRequest(disk.ID, instanceID)
		return projectMismatchError(c.rack, instance, disk)
	}
	return err
}

// unpublishPlanned detaches a disk, or defers its detach to the next restart of its instance. It returns the disk as it
// is afterwards, unless it was deleted.
func (c rackController) unpublishPlanned(ctx context.Context, disk rack.Disk) (rack.Disk, error) {
	now, err := c.engine.Unpublish(ctx, disk.ID, disk.InstanceID)
	if err != nil {
		return disk, c.resolveDetach(ctx, disk, err)
	}
	return c.waitForDisk(ctx, now)
}

// detachIfDeferred carries out a deferred detach, if the instance is stopped. It returns the disk as it is afterwards.
func (c rackController) detachIfDeferred(ctx context.Context, disk rack.Disk) (rack.Disk, error) {
	deferred, err := c.deferredDetaches(ctx)
	if err != nil || deferred[disk.ID] != disk.InstanceID {
		return disk, err
	}
	return c.unpublishPlanned(ctx, disk)
}

// sendRestarts adds the planned restarts to the response's metadata if the caller asked for them. Orchestrators do not
// ask, because the CSI specification has no message for it. Volume health is not used: Kubernetes shows it as the
// condition of the claim, and a waiting volume is healthy. With a volume ID, only the restarts that concern that volume
// are sent.
func (c *Service) sendRestarts(ctx context.Context, volumeID string) error {
	asked, _ := grpcmetadata.FromIncomingContext(ctx)
	if c.engines == nil || len(asked.Get(rpc.MetadataAskRestarts)) == 0 {
		return nil
	}
	all := []restart.Restart{}
	for _, client := range c.racks.all {
		restarts, err := c.engines[client].Report(ctx)
		if err != nil {
			return fmt.Errorf("list planned restarts on rack %q: %w", client.Name(), err)
		}
		all = append(all, restarts...)
	}
	if volumeID != "" {
		all = slices.DeleteFunc(all, func(r restart.Restart) bool { return !r.Concerns(volumeID) })
	}
	text, err := json.Marshal(all)
	if err != nil {
		return err
	}
	return grpc.SetHeader(ctx, grpcmetadata.Pairs(rpc.MetadataRestarts, string(text)))
}

// deferredDetaches returns the instances of the disks whose detach is deferred, by disk. There are none outside of
// attach mode restart.
func (c rackController) deferredDetaches(ctx context.Context) (map[string]string, error) {
	if c.engine == nil {
		return nil, nil
	}
	deferred, err := c.engine.DeferredDetaches(ctx)
	if err != nil {
		return nil, fmt.Errorf("list the volumes whose detach is deferred: %w", err)
	}
	return deferred, nil
}
