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

	"google.golang.org/grpc"
	grpcmetadata "google.golang.org/grpc/metadata"

	"github.com/oxidecomputer/oxide-csi-plugin/core/detach"
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// detachingPoll is the time between two looks at a disk that another process is detaching.
const detachingPoll = 250 * time.Millisecond

// newDetachers returns a detacher for each rack.
func (c *Service) newDetachers(grace time.Duration) map[*rack.Client]*detach.Detacher {
	detachers := map[*rack.Client]*detach.Detacher{}
	var claimed func(context.Context, string, []string) (map[string]string, error)
	if c.orchestrator != nil {
		claimed = c.claimed
	}
	for _, client := range c.racks.all {
		detachers[client] = detach.New(client, detach.Options{
			Cluster: c.cluster,
			Grace:   grace,
			Claimed: claimed,
			Restarting: func(records []record.Record) func(string) bool {
				return record.Restarting(records, c.cluster)
			},
			Log: c.log.With("rack", client.Name()),
		})
	}
	return detachers
}

// DetachLater carries out the deferred detaches of one rack until ctx ends. Without a grace period it returns at once.
func (c *Service) DetachLater(ctx context.Context, client *rack.Client) {
	c.detachers[client].Run(ctx)
}

// defersDetaches reports whether a disk may be attached although its volume is not published.
func (c rackController) defersDetaches() bool { return c.engine != nil || c.detacher.Timed() }

// deferredDetaches returns the instances of the disks whose detach is deferred, by disk.
func (c rackController) deferredDetaches(ctx context.Context) (map[string]string, error) {
	if !c.defersDetaches() {
		return nil, nil
	}
	set, err := c.detacher.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list the volumes whose detach is deferred: %w", err)
	}
	return set.Instances(), nil
}

// takeBack ends the deferred detach of a volume that is published. It gives way to a process that is detaching the
// disk, after a moment in which a process that has just detached it removes its record. Also without a grace period:
// another controller may have deferred the detach, an earlier one, or one of the same rolling update.
func (c rackController) takeBack(ctx context.Context, disk rack.Disk, records []record.Record) error {
	err := c.detacher.TakeBackListed(ctx, disk.VolumeID, records)
	if errors.Is(err, detach.ErrDetaching) {
		select {
		case <-time.After(detachingPoll):
			err = c.detacher.TakeBack(ctx, disk.VolumeID)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if errors.Is(err, detach.ErrDetaching) {
		return justDetachedError(disk)
	}
	return err
}

// justDetachedError is the error for a disk that another process, or another call, works on.
func justDetachedError(disk rack.Disk) error {
	return rpc.LoggedAt(slog.LevelInfo, rpc.Fault(
		fault.DetachDeferred,
		"disk %q (%s) is just being detached from the instance that had it before: retry", disk.Name, disk.ID))
}

// deferDetach defers the detach of a disk from an instance with a guest. While the node plugin is down for a moment, an
// orchestrator can request the detach although the filesystem is still mounted. It returns false if the disk can be
// detached now. A boot disk needs no detach, because it was never published.
func (c rackController) deferDetach(ctx context.Context, disk rack.Disk) (done bool, err error) {
	if !c.detacher.Timed() {
		return false, nil
	}
	instance, err := c.rack.Instance(ctx, disk.InstanceID)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return false, nil // resolveDetach finds out
	case err != nil:
		return false, err
	case instance.BootDiskID == disk.ID:
		return true, nil
	case requestedNow(ctx) || detach.WithoutGuest(instance):
		return false, nil
	}
	if c.engine != nil {
		err = c.engine.DeferDetach(ctx, disk.VolumeID, disk.InstanceID)
	} else {
		err = c.detacher.Defer(ctx, disk.VolumeID, disk.InstanceID)
	}
	if err != nil {
		return false, err
	}
	c.log.Info("the detach is deferred by --detach-grace", "volume_id", disk.VolumeID, "node_id", disk.InstanceID)
	sayDeferred(ctx, rpc.DeferredForGrace)
	return true, nil
}

// sayDeferred tells the command oxide-csi volume detach that the disk is still attached, and what its detach waits for.
func sayDeferred(ctx context.Context, reason string) {
	_ = grpc.SetHeader(ctx, grpcmetadata.Pairs(rpc.MetadataDeferred, reason)) // some tests have no caller to send it to
}

// detachRemembered detaches a disk now. The detacher remembers it, so that a later unpublish from this instance counts
// as a repetition if the volume is back there.
func (c rackController) detachRemembered(ctx context.Context, disk rack.Disk) error {
	err := c.detacher.DetachNow(ctx, disk.VolumeID, disk.InstanceID, requestedNow(ctx))
	if err != nil {
		return c.resolveDetach(ctx, disk, err)
	}
	return nil
}

// requestedNow reports whether a person wants the disk to be detached at once.
func requestedNow(ctx context.Context) bool {
	sent, _ := grpcmetadata.FromIncomingContext(ctx)
	return len(sent.Get(rpc.MetadataDetachNow)) > 0
}

// detachElsewhere carries out the deferred detach of a disk from another instance, if there is one and its grace period
// ends within [detach.MaxWait]. It does not wait for an instance without a guest. If a workload there may use the
// volume, the disk stays. It returns the disk as it is then, or [rack.ErrNotStopped] if the rack detaches disks only
// from stopped instances.
func (c rackController) detachElsewhere(ctx context.Context, disk rack.Disk) (rack.Disk, error) {
	if !c.detacher.Timed() {
		return disk, nil
	}
	set, err := c.detacher.List(ctx)
	if err = cmp.Or(err, set.Check(disk.VolumeID)); err != nil {
		return disk, err
	}
	deferred, ok := set.Of(disk.VolumeID, disk.InstanceID)
	if !ok {
		return c.rack.Disk(ctx, disk.VolumeID) // it may just have been detached
	}
	left, err := c.timeLeft(ctx, &deferred)
	switch {
	case errors.Is(err, detach.ErrNotDeferred):
		return c.rack.Disk(ctx, disk.VolumeID)
	case staysAttached(err):
		return disk, c.waitsForDetachError(disk, deferred, publishAgain)
	case err != nil:
		return disk, err
	}
	deadline := time.Now().Add(min(detach.MaxWait, rpc.WaitBudget(ctx)))
	if left > time.Until(deadline) {
		return disk, c.waitsForDetachError(disk, deferred, publishAgain)
	}
	for wait := left; ; wait = detachingPoll {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return disk, ctx.Err()
		}
		err := c.detacher.DetachWithin(ctx, time.Until(deadline), deferred)
		switch {
		case err == nil, errors.Is(err, detach.ErrNotDeferred):
			return c.rack.Disk(ctx, disk.VolumeID)
		case staysAttached(err):
			return disk, c.waitsForDetachError(disk, deferred, publishAgain)
		case !errors.Is(err, detach.ErrDetaching):
			return disk, err
		case time.Until(deadline) < detachingPoll:
			return disk, justDetachedError(disk)
		}
	}
}

// publishAgain is what the caller does after a detach from another node.
const publishAgain = "then repeat this"

// staysAttached reports whether an error says that the claims on a volume keep its disk attached.
func staysAttached(err error) bool {
	return errors.Is(err, detach.ErrClaimed) || errors.Is(err, detach.ErrClaimsUnknown)
}

// timeLeft returns the rest of the grace period of a deferred detach, for a disk that another node needs. The grace
// period of an untimed deferred detach starts now. An instance without a guest needs none.
func (c rackController) timeLeft(ctx context.Context, deferred *record.Deferral) (time.Duration, error) {
	instance, err := c.rack.Instance(ctx, deferred.Instance)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return 0, c.confirmNotFound(ctx)
	case err != nil:
		return 0, err
	case detach.WithoutGuest(instance):
		return 0, nil
	}
	if *deferred, err = c.detacher.StartClock(ctx, *deferred); err != nil {
		return 0, err
	}
	return c.detacher.Left(*deferred), nil
}

// waitsForDetachError is the error for a disk whose detach is deferred. next is what the caller does after the detach.
func (c rackController) waitsForDetachError(disk rack.Disk, deferred record.Deferral, next string) error {
	when, row := "", fault.DetachUntimed
	left, stays := c.detacher.Left(deferred), c.detacher.Stays(deferred)
	switch {
	case errors.Is(stays, detach.ErrClaimed): // the claim may be another team's
		row = fault.ClaimedThere
		when = "a workload there claims it: end that, if it may (the controller's log names it)"
	case stays != nil:
		row = fault.ClaimsUnknown
		when = "it may be in use: remove the reason (the controller's log has it)"
	case !c.detacher.Timed():
		when = "it is detached at the instance's next planned restart or stop"
	case deferred.Untimed && c.detacher.Asks():
		when, row = fmt.Sprintf(
			"the claims on it are asked in %s (--detach-grace)",
			left.Round(time.Second),
		), fault.DetachDeferred
	case deferred.Untimed:
		when = "detach it with \"oxide-csi volume detach\" or stop the instance"
	case left == 0:
		when = "it is detached as soon as the rack allows it, at the latest when you stop the instance"
	default:
		when, row = fmt.Sprintf("it is detached in %s (--detach-grace)", left.Round(time.Second)), fault.DetachDeferred
	}
	return rpc.LoggedAt(slog.LevelInfo, rpc.Fault(
		row,
		"disk %q (%s) was given up by instance %s, which still has it: %s, %s",
		disk.Name,
		disk.ID,
		deferred.Instance,
		when,
		next,
	))
}
