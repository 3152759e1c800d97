// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// A rack refuses an attach or a detach with a sentence, and sentences are not part of its versioned API. So the states
// of disk and instance give the reason, as they are after the refusal. If they do not explain it, what did is over, and
// the request is repeated once. A second refusal without a reason is a plain [ErrRefused].

// Refusal is an [ErrRefused] that the instance explains. It may be an [ErrNotStopped] or an [ErrFull].
type Refusal struct {
	// Instance is the instance after the refusal. Disks are its disks after the refusal of an attach, and nil after that
	// of a detach.
	Instance Instance
	Disks    []Disk
	err      error
}

// Error returns the text of the reason.
func (r *Refusal) Error() string { return r.err.Error() }

// Unwrap returns the reason, such as [ErrNotStopped].
func (r *Refusal) Unwrap() error { return r.err }

// Attach attaches a disk to an instance, by the disk's own ID on the rack. It succeeds if the disk is attached there
// already. On a rack with hot-plug the answer may say attaching.
func (c *Client) Attach(ctx context.Context, diskID DiskID, instanceID string) (Disk, error) {
	return unlessExplained(func() (Disk, error) {
		disk, err := c.sdk.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
			Instance: oxide.NameOrId(instanceID),
			Body:     &oxide.DiskPath{Disk: oxide.NameOrId(diskID)},
		})
		if err != nil {
			return Disk{}, c.translate(ctx, err, "attach disk %s to instance %s", diskID, instanceID)
		}
		return c.checkDisk(diskFrom(disk), identity{id: string(diskID)}, "attach disk %s to instance %s", diskID, instanceID)
	}, func(refusal error) error { return c.attachRefused(ctx, diskID, instanceID, refusal) })
}

// Detach detaches a disk from an instance, by the disk's own ID on the rack: it never detaches a later disk of the
// volume. It succeeds if the disk is detached already.
func (c *Client) Detach(ctx context.Context, diskID DiskID, instanceID string) (Disk, error) {
	return unlessExplained(func() (Disk, error) {
		disk, err := c.sdk.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
			Instance: oxide.NameOrId(instanceID),
			Body:     &oxide.DiskPath{Disk: oxide.NameOrId(diskID)},
		})
		if err != nil {
			return Disk{}, c.translate(ctx, err, "detach disk %s from instance %s", diskID, instanceID)
		}
		return c.checkDisk(
			diskFrom(disk), identity{id: string(diskID)}, "detach disk %s from instance %s", diskID, instanceID)
	}, func(refusal error) error { return c.detachRefused(ctx, diskID, instanceID, refusal) })
}

// unlessExplained sends a request, and a second time if explain returns nil for its refusal.
func unlessExplained(send func() (Disk, error), explain func(refusal error) error) (Disk, error) {
	disk, err := send()
	if !errors.Is(err, ErrRefused) {
		return disk, err
	}
	if err := explain(err); err != nil {
		return Disk{}, err
	}
	return send()
}

// attachRefused says why an attach was refused, or returns nil if nothing explains it now.
func (c *Client) attachRefused(ctx context.Context, diskID DiskID, instanceID string, refusal error) error {
	disk, err := c.refusedDisk(ctx, diskID, refusal, Detached)
	if disk.State == Attached && disk.InstanceID == instanceID {
		return nil // another process has attached it
	}
	if err != nil {
		return err
	}
	instance, err := c.Instance(ctx, instanceID)
	if err != nil {
		return unexplained(err, refusal)
	}
	disks, err := c.InstanceDisks(ctx, instanceID)
	switch {
	case err != nil:
		return unexplained(err, refusal)
	case instance.ProjectID != disk.ProjectID, errors.Is(refusal, ErrFull):
		return &Refusal{instance, disks, refusal}
	case c.maxDisks > 0 && len(disks) >= c.maxDisks:
		return &Refusal{instance, disks, fmt.Errorf("%w: %w", ErrFull, refusal)}
	case instance.RunState != Stopped:
		return &Refusal{instance, disks, fmt.Errorf("%w: %w", ErrNotStopped, refusal)}
	}
	return nil
}

// detachRefused says why a detach was refused, or returns nil if nothing explains it now.
func (c *Client) detachRefused(ctx context.Context, diskID DiskID, instanceID string, refusal error) error {
	disk, err := c.refusedDisk(ctx, diskID, refusal, Detached, Attached)
	switch {
	case err != nil:
		return err
	case disk.State == Detached:
		return nil
	case disk.InstanceID != instanceID:
		return refusal
	}
	instance, err := c.Instance(ctx, instanceID)
	switch {
	case err != nil:
		return unexplained(err, refusal)
	case instance.BootDiskID == diskID:
		return &Refusal{instance, nil, refusal}
	case instance.RunState != Stopped && instance.RunState != Failed:
		return &Refusal{instance, nil, fmt.Errorf("%w: %w", ErrNotStopped, refusal)}
	}
	return nil
}

// refusedDisk looks at a disk after a refusal. In one of these states, its state is not the reason.
func (c *Client) refusedDisk(ctx context.Context, diskID DiskID, refusal error, possible ...State) (Disk, error) {
	disk, err := c.DiskByID(ctx, diskID)
	switch {
	case err != nil:
		return disk, unexplained(err, refusal)
	case disk.State.Transient():
		return disk, fmt.Errorf("disk %q (%s) is %s: %w: %v", disk.Name, disk.ID, disk.State, ErrBusy, refusal)
	case !slices.Contains(possible, disk.State):
		return disk, refusal
	}
	return disk, nil
}

// unexplained is the error of a look after a refusal.
func unexplained(err, refusal error) error { return fmt.Errorf("%w; %v", err, refusal) }
