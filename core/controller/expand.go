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
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/detach"
	"github.com/oxidecomputer/oxide-csi-plugin/core/expand"
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// ControllerExpandVolume makes a detached volume larger: CSI spec, ControllerExpandVolume. A rack
// cannot change the size of a disk, so the disk is replaced by a larger one, and the volume ID stays (core/expand). The
// node grows the filesystem when it stages the volume.
func (c *Service) ControllerExpandVolume(
	ctx context.Context,
	req *csi.ControllerExpandVolumeRequest,
) (*csi.ControllerExpandVolumeResponse, error) {
	if err := validateControllerExpandVolume(req); err != nil {
		return nil, err
	}
	rc, disk, err := c.neededDisk(ctx, req.GetVolumeId())
	if err != nil {
		return nil, expansionError(err)
	}
	size, err := expandedSize(req.GetCapacityRange(), disk)
	if err != nil {
		return nil, err
	}
	if size > disk.SizeBytes {
		c.forget(disk.VolumeID)
		if disk, err = rc.expand(ctx, disk, size); err != nil {
			return nil, expansionError(err)
		}
		if disk.SizeBytes < size {
			return nil, rpc.OutOfRange(
				"capacity_range: volume %s has %d bytes: the rack had no room for %d bytes: free quota or space, and repeat the call",
				disk.VolumeID,
				disk.SizeBytes,
				size,
			)
		}
		if _, err := expandedSize(req.GetCapacityRange(), disk); err != nil {
			return nil, err // an earlier expansion, which was finished, was to a larger size
		}
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: disk.SizeBytes}, nil
}

// expandedSize returns the size of a volume's disk after the expansion. It rounds as [chooseSize] does for a new disk.
// A larger disk than the rack can make must be rejected before the old one is deleted.
func expandedSize(capacity *csi.CapacityRange, disk rack.Disk) (int64, error) {
	if limit := capacity.GetLimitBytes(); limit != 0 && limit < disk.SizeBytes {
		return 0, rpc.OutOfRange(
			"capacity_range: limit_bytes %d is less than the %d bytes that volume %s has: a volume cannot shrink",
			limit, disk.SizeBytes, disk.VolumeID)
	}
	size, err := chooseSize(capacity, disk.SizeBytes)
	if err == nil && size > disk.SizeBytes && size > maxDistributedBytes {
		return 0, rpc.Fault(fault.SizeUnsupported,
			"capacity_range: a rack's largest disk has %dGiB, less than %dGiB", int64(maxDistributedBytes)>>30, size>>30)
	}
	return size, err
}

// expand replaces the disk of a volume by a larger one.
func (c rackController) expand(ctx context.Context, disk rack.Disk, sizeBytes int64) (rack.Disk, error) {
	reason, err := c.notOwnedReason(ctx, disk.Description, disk.VolumeID)
	switch {
	case err != nil:
		return disk, err
	case reason != "":
		return disk, rpc.FailedPrecondition("disk %q (%s) is not replaced by a larger one: it %s", disk.Name, disk.ID, reason)
	}
	if description, _ := rack.ParseDescription(disk.Description); description.Fixed {
		return disk, rpc.OutOfRange(
			"capacity_range: the volume keeps its size: disk %q (%s) has %s: copy the data to a larger volume",
			disk.Name,
			disk.ID,
			fixedText,
		)
	}
	if err := c.checkProject(ctx, disk); err != nil {
		return disk, err
	}
	if disk, err = c.waitForDisk(ctx, disk); err != nil {
		return disk, err
	}
	if disk.InstanceID != "" && c.engine != nil {
		if disk, err = c.detachIfDeferred(ctx, disk); err != nil {
			return disk, err
		}
	}
	switch {
	case disk.Local, disk.ReadOnly:
		_, err = c.waitForSource(ctx, disk)
		return disk, err
	case disk.InstanceID != "":
		return disk, c.inUseError(ctx, disk)
	case disk.State != rack.Detached:
		return disk, c.checkAttachable(ctx, disk)
	}
	expanded, err := c.expander.Expand(ctx, disk, sizeBytes)
	if err != nil {
		c.sweeper.schedule(expand.SettleAge) // if no call finishes the expansion before
		return disk, err
	}
	c.log.Info(
		"expanded a volume",
		"volume_id",
		disk.VolumeID,
		"from_bytes",
		disk.SizeBytes,
		"to_bytes",
		expanded.SizeBytes,
	)
	return expanded, nil
}

// inUseError is the error for expanding an attached disk.
func (c rackController) inUseError(ctx context.Context, disk rack.Disk) error {
	if c.defersDetaches() {
		set, err := c.detacher.List(ctx)
		if deferred, ok := set.Of(disk.VolumeID, disk.InstanceID); err == nil && ok {
			return c.waitsForDetachError(disk, deferred, "then expand it again")
		}
	}
	return rpc.Fault(
		fault.ExpansionWaits,
		"disk %q (%s) is attached to instance %s and is not replaced by a larger one: stop the volume's workload until it has grown",
		disk.Name,
		disk.ID,
		disk.InstanceID,
	)
}

// expansionError gives an error of core/expand the code that ControllerExpandVolume answers. RESOURCE_EXHAUSTED would
// tell Kubernetes' external-resizer that the expansion goes on.
func expansionError(err error) error {
	switch {
	case errors.Is(err, expand.ErrNoRoom):
		return rpc.OutOfRange("capacity_range: the volume keeps its size: %w", err)
	case errors.Is(err, expand.ErrAttached), errors.Is(err, expand.ErrTakenBack):
		return rpc.FailedPrecondition("the volume is in use: %w", err)
	case errors.Is(err, expand.ErrUnderWay):
		return rpc.Aborted("%w: retry", err)
	}
	return err
}

// UnfinishedExpansions returns how many volumes of a rack have an expansion that is not finished, as far as this
// controller knows. It sends no request.
func (c *Service) UnfinishedExpansions(client *rack.Client) int {
	return c.expanders[client].Unfinished()
}

func (c *Service) newExpanders(lookAge time.Duration) map[*rack.Client]*expand.Expander {
	expanders := map[*rack.Client]*expand.Expander{}
	for _, client := range c.racks.all {
		e := expand.New(client, c.cluster, c.log.With("rack", client.Name()))
		e.LookAge = cmp.Or(lookAge, e.LookAge)
		expanders[client] = e
	}
	return expanders
}

// diskOrReplaced looks up the disk of a volume. If the disk is being replaced, the disk has no ID.
func diskOrReplaced(client *rack.Client, ctx context.Context, volumeID string) (rack.Disk, error) {
	disk, err := client.Disk(ctx, volumeID)
	if errors.Is(err, rack.ErrReplaced) {
		return rack.Disk{VolumeID: volumeID}, nil
	}
	return disk, err
}

// disk is [Service.locate] for an RPC that looks at the disk. If the disk is being replaced, the error is
// [rack.ErrReplaced] and names the snapshot with the data.
func (c *Service) disk(ctx context.Context, volumeID string) (rackController, rack.Disk, error) {
	return c.finishedDisk(ctx, volumeID, false)
}

// shownDisk is [Service.disk] for an RPC that only shows the disk: it also returns one that nothing else may be done
// with.
func (c *Service) shownDisk(ctx context.Context, volumeID string) (rackController, rack.Disk, error) {
	rc, disk, err := c.disk(ctx, volumeID)
	if errors.Is(err, rack.ErrUnknown) {
		err = nil
	}
	return rc, disk, err
}

// neededDisk is [Service.disk] for an RPC that no orchestrator sends for a deleted volume. If a controller has deleted
// the old disk and ended, neededDisk makes the new one.
func (c *Service) neededDisk(ctx context.Context, volumeID string) (rackController, rack.Disk, error) {
	return c.finishedDisk(ctx, volumeID, true)
}

func (c *Service) finishedDisk(ctx context.Context, volumeID string, needed bool) (rackController, rack.Disk, error) {
	rc, disk, err := c.locate(ctx, volumeID)
	if err == nil && disk.ID == "" {
		if disk, err = rc.expander.Finish(ctx, disk.VolumeID, needed); errors.Is(err, expand.ErrDeleted) {
			err = fmt.Errorf("%w: %w", rack.ErrNotFound, err)
		}
	}
	return rc, disk, err
}

// undisturbed asks whether nothing stands against a disk that is published: no expansion is under way, and no detach is
// recorded. The question is asked beside the attach, and the function that undisturbed returns is called as soon as
// that was answered. For as long as a process may detach the disk because of a deferred detach, that has a record.
func (c rackController) undisturbed(ctx context.Context, disk rack.Disk) func() bool {
	expansion := c.expander.Look(ctx, disk.Name)
	recorded := c.recorded(ctx, record.Deferrals.Named(c.cluster, disk.VolumeID))
	return func() bool {
		_, expanding, err := expansion.UnderWay(ctx)
		return !recorded() && !expanding && err == nil
	}
}

// recorded asks beside another request whether a record exists. Without an answer it may.
func (c rackController) recorded(ctx context.Context, name string) func() bool {
	recorded := make(chan bool, 1)
	go func() {
		defer func() {
			if reason := recover(); reason != nil {
				rpc.LogPanic(c.log, slog.String("task", "look"), reason)
				recorded <- true
			}
		}()
		_, found, err := c.rack.RecordNamed(ctx, name)
		recorded <- found || err != nil
	}()
	return func() bool { return <-recorded }
}

// confirmPublished makes sure that an attached disk stays attached and is not replaced, as a published volume must. It
// is called after the disk was attached, and reads the records once: a deferred detach is taken back, and so is an
// expansion. It looks at the disk last if a deferred detach may just have been carried out: a process with a grace
// period keeps the record for a while. It is for attach mode hot.
func (c rackController) confirmPublished(ctx context.Context, disk rack.Disk) (rack.Disk, error) {
	records, err := c.rack.Records(ctx)
	if err != nil {
		return disk, err
	}
	// First the expansion: if its disk cannot be detached now, the deferred detach stays.
	if err := c.yield(ctx, disk, records); err != nil {
		return disk, err
	}
	if err := c.takeBack(ctx, disk, records); err != nil {
		return disk, err
	}
	set := detach.Parse(records, c.cluster)
	if _, recorded := set.Recorded(disk.VolumeID); !recorded && !set.Detaching(disk.VolumeID) {
		return disk, nil
	}
	now, err := c.rack.Disk(ctx, disk.VolumeID)
	if err != nil {
		return disk, err
	}
	return c.waitBriefly(ctx, now)
}

// yield gives way to an expansion that is committed, or takes it back. See [expand.Expander.Yield].
func (c rackController) yield(ctx context.Context, disk rack.Disk, records []record.Record) error {
	err := c.expander.Yield(ctx, disk, records)
	if errors.Is(err, rack.ErrNotStopped) {
		return rpc.FailedPrecondition(
			"volume %s is being expanded, and its old disk is on the running instance %s: restart the instance, and the disk is detached: %w",
			disk.VolumeID,
			disk.InstanceID,
			err,
		)
	}
	return err
}

// publishError gives errors of a passing state the code that ControllerPublishVolume answers: those of core/expand, and
// with a grace period a disk whose state is changing. Nomad repeats the call only after FAILED_PRECONDITION.
func (c *Service) publishError(err error) error {
	if errors.Is(err, expand.ErrUnderWay) || errors.Is(err, rack.ErrReplaced) || c.timed && errors.Is(err, rack.ErrBusy) {
		return rpc.LoggedAt(slog.LevelInfo, rpc.FailedPrecondition("%w: retry", err))
	}
	return err
}
