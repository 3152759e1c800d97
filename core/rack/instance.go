// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
)

// Instance is an instance as the rack describes it.
type Instance struct {
	ID        string
	Name      string
	ProjectID string
	// BootDiskID is empty if the instance has no boot disk.
	BootDiskID DiskID
	// RunState is "running", "stopped" or another state of docs/reference/rack.md §5.
	RunState string
	// RunStateSince is when RunState last changed, by the rack's clock.
	RunStateSince time.Time
}

// The run states that this plugin distinguishes (docs/reference/rack.md §5).
const (
	Running = string(oxide.InstanceStateRunning)
	Failed  = string(oxide.InstanceStateFailed)
	Stopped = string(oxide.InstanceStateStopped)
)

// Instance returns an instance by its ID.
func (c *Client) Instance(ctx context.Context, id string) (Instance, error) {
	i, err := c.sdk.InstanceView(ctx, oxide.InstanceViewParams{Instance: oxide.NameOrId(id)})
	if err != nil {
		return Instance{}, c.translate(ctx, err, "look up instance %s", id)
	}
	if err := c.checkAnswer(identity{id: i.Id}, identity{id: id}, "look up instance %s", id); err != nil {
		return Instance{}, err
	}
	return instanceFrom(i), nil
}

func instanceFrom(i *oxide.Instance) Instance {
	return Instance{
		ID:            i.Id,
		Name:          string(i.Name),
		ProjectID:     i.ProjectId,
		BootDiskID:    DiskID(i.BootDiskId),
		RunState:      string(i.RunState),
		RunStateSince: timeOrZero(i.TimeRunStateUpdated),
	}
}

// diskPage is the page size for an instance's disks. It exceeds the attach limit, so one request returns all of them.
const diskPage = 100

// InstanceDisks lists the disks of an instance, including its boot disk.
func (c *Client) InstanceDisks(ctx context.Context, id string) ([]Disk, error) {
	page, err := c.sdk.InstanceDiskList(ctx, oxide.InstanceDiskListParams{
		Instance: oxide.NameOrId(id),
		Limit:    oxide.NewPointer(diskPage),
	})
	if err != nil {
		return nil, c.translate(ctx, err, "list the disks of instance %s", id)
	}
	return c.checkDisks(page.Items, "list the disks of instance %s", id)
}

// StopInstance asks the rack to stop an instance. For the guest this is a power cut. The rack answers before the
// instance has stopped. The call succeeds if the instance is stopped or stopping already (docs/reference/rack.md §5).
func (c *Client) StopInstance(ctx context.Context, id string) error {
	instance, err := c.sdk.InstanceStop(ctx, oxide.InstanceStopParams{Instance: oxide.NameOrId(id)})
	if err != nil {
		return c.translate(ctx, err, "stop instance %s", id)
	}
	return c.checkAnswer(identity{id: instance.Id}, identity{id: id}, "stop instance %s", id)
}

// StartInstance asks the rack to start an instance, and returns it as it is then. It succeeds if the instance is
// starting or running already. [ErrConflict] means that the instance is still stopping or that another client changed
// it. [ErrCapacity] means that no sled has room for it (docs/reference/rack.md §5).
func (c *Client) StartInstance(ctx context.Context, id string) (Instance, error) {
	instance, err := c.sdk.InstanceStart(ctx, oxide.InstanceStartParams{Instance: oxide.NameOrId(id)})
	if err != nil {
		return Instance{}, c.translate(ctx, err, "start instance %s", id)
	}
	return instanceFrom(instance), c.checkAnswer(identity{id: instance.Id}, identity{id: id}, "start instance %s", id)
}
