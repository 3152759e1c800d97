// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"fmt"
	"time"
)

const (
	firstPoll = 50 * time.Millisecond
	maxPoll   = time.Second
)

// WaitForDisk waits until a disk has left the transient states (creating, attaching, detaching, maintenance) and
// returns it. It sends no request if disk is not in such a state. After maxWait the error is [ErrBusy] and names the
// state. Nobody knows what an unknown state becomes: then the error is [ErrUnknown].
func (c *Client) WaitForDisk(ctx context.Context, disk Disk, maxWait time.Duration) (Disk, error) {
	deadline := time.Now().Add(maxWait)
	for poll := firstPoll; disk.State.Transient(); poll = min(2*poll, maxPoll) {
		left := time.Until(deadline)
		if left <= 0 {
			return Disk{}, fmt.Errorf("disk %q (%s) is %s: %w", disk.Name, disk.ID, disk.State, ErrBusy)
		}
		if err := sleep(ctx, min(poll, left)); err != nil {
			return Disk{}, fmt.Errorf("disk %q (%s) is %s: %w: %w", disk.Name, disk.ID, disk.State, ErrBusy, err)
		}
		var err error
		if disk, err = c.Disk(ctx, disk.VolumeID); err != nil {
			return Disk{}, err
		}
	}
	return disk, disk.CheckKnown()
}

// WaitForSnapshot waits until a snapshot has left the state creating, as [Client.WaitForDisk] does for a disk.
func (c *Client) WaitForSnapshot(ctx context.Context, snapshot Snapshot, maxWait time.Duration) (Snapshot, error) {
	deadline := time.Now().Add(maxWait)
	for poll := firstPoll; snapshot.State == SnapshotCreating; poll = min(2*poll, maxPoll) {
		left := time.Until(deadline)
		if left <= 0 {
			return snapshot, fmt.Errorf("snapshot %q (%s) is %s: %w", snapshot.Name, snapshot.ID, snapshot.State, ErrBusy)
		}
		if err := sleep(ctx, min(poll, left)); err != nil {
			return snapshot, fmt.Errorf(
				"snapshot %q (%s) is %s: %w: %w",
				snapshot.Name,
				snapshot.ID,
				snapshot.State,
				ErrBusy,
				err,
			)
		}
		now, err := c.Snapshot(ctx, snapshot.ID)
		if err != nil {
			return snapshot, err
		}
		snapshot = now
	}
	return snapshot, nil
}
