// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Service is the CSI Controller service: it talks to the rack and never touches a device.
type Service struct {
	csi.UnimplementedControllerServer

	racks    *racks
	cluster  string
	maxDisks int
	grace    *detachGrace
	refusals *refusals
	cursors  *cursors
	capacity *capacities
	sweeper  *sweeper
	// engines plan restarts, in attach mode restart; restartWait is how long an RPC waits for one.
	engines     map[*rack.Client]*restart.Engine
	restartWait time.Duration
	metrics     *metrics.Metrics
	log         *slog.Logger
}

// onRack is the controller at work on one rack.
type onRack struct {
	*Service
	rack *rack.Client
	// engine is nil but in attach mode restart.
	engine *restart.Engine
}

func (c *Service) on(client *rack.Client) onRack { return onRack{c, client, c.engines[client]} }

// Options configure a [Service].
type Options struct {
	// Racks have names of their own in the topology.
	Racks []*rack.Client
	// Cluster tells apart clusters that share a project.
	Cluster string
	// MaxDisks is how many disks an instance takes, its boot disk included.
	MaxDisks int
	// DetachGrace is how old a wish to detach from a running instance must be before it is tried.
	DetachGrace time.Duration
	// TemporaryAge is how old the temporary snapshot of a clone must be before it is taken for left behind; 0 means an hour.
	TemporaryAge time.Duration
	// Restarts is for attach mode restart. Nil means attach mode hot.
	Restarts *PlannedRestarts
	// Metrics gets the number of volumes. Nil means that nobody wants it.
	Metrics *metrics.Metrics
	Log     *slog.Logger
}

// New returns the Controller service.
func New(opts Options) *Service {
	c := &Service{
		racks:    newRacks(opts.Racks),
		cluster:  opts.Cluster,
		maxDisks: opts.MaxDisks,
		grace:    newDetachGrace(opts.DetachGrace),
		refusals: newRefusals(),
		cursors:  newCursors(),
		capacity: newCapacities(),
		metrics:  opts.Metrics,
		log:      opts.Log,
	}
	c.sweeper = newSweeper(c, opts.TemporaryAge)
	if opts.Restarts != nil {
		c.engines, c.restartWait = c.newEngines(*opts.Restarts), opts.Restarts.Wait
	}
	return c
}

// DeleteVolume deletes the disk of a volume, which is what this plugin made and nothing else. An attached disk is left as
// it is: nothing is ever detached in order to delete it. CSI spec, DeleteVolume.
func (c *Service) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if err := validateDeleteVolume(req); err != nil {
		return nil, err
	}
	id, ok := diskname.ParseID(req.GetVolumeId())
	if !ok {
		return &csi.DeleteVolumeResponse{}, nil // no disk has such an ID
	}
	on, disk, err := c.disk(ctx, id)
	if errors.Is(err, rack.ErrNotFound) {
		return &csi.DeleteVolumeResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	if err := on.checkDeletable(ctx, &disk); err != nil {
		return nil, err
	}
	err = on.rack.DeleteDisk(ctx, id)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return &csi.DeleteVolumeResponse{}, on.unconfirmed(ctx)
	case errors.Is(err, rack.ErrRefused):
		// Somebody attached it in between, most likely.
		if now, lookErr := on.rack.Disk(ctx, id); lookErr == nil && now.InstanceID != "" {
			return nil, on.inUse(ctx, now)
		}
		return nil, err
	case err != nil:
		return nil, err
	}
	if on.engine != nil {
		if err := on.engine.ForgetDisk(ctx, id); err != nil {
			on.log.Warn("a record about a deleted disk stays", "disk_id", id, "error", err.Error())
		}
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// checkDeletable refuses to delete what is in use or not ours. It waits for a disk that is changing state.
func (c onRack) checkDeletable(ctx context.Context, disk *rack.Disk) error {
	owner, ours := rack.ParseDescription(disk.Description)
	if !ours || owner.Cluster != c.cluster {
		whose := "was not made by this plugin"
		if ours {
			whose = fmt.Sprintf("belongs to cluster %q, this is cluster %q", owner.Cluster, c.cluster)
		}
		return rpc.FailedPrecondition(
			"disk %q (%s) %s and is not deleted: delete it yourself on rack %q, with \"oxide disk delete --disk %s\", and the volume is gone",
			disk.Name,
			disk.ID,
			whose,
			c.rack.Name(),
			disk.ID,
		)
	}
	if err := c.checkProject(ctx, *disk); err != nil {
		return err
	}
	settled, err := c.settled(ctx, *disk)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return nil // DeleteDisk will find the same
	case err != nil:
		return err
	}
	*disk = settled
	if disk.InstanceID != "" && c.engine != nil {
		if *disk, err = c.detachIfDeferred(ctx, *disk); err != nil {
			return err
		}
	}
	if disk.InstanceID != "" {
		return c.inUse(ctx, *disk)
	}
	return nil
}

// checkProject refuses disks of other projects: an ID is looked up in the whole silo (docs/reference/rack.md §1).
func (c onRack) checkProject(ctx context.Context, disk rack.Disk) error {
	project, err := c.rack.ProjectID(ctx)
	if err != nil {
		return err
	}
	if disk.ProjectID != project {
		return rpc.FailedPrecondition(
			"disk %q (%s) is in another project than %q: this plugin uses disks of its own project only",
			disk.Name,
			disk.ID,
			c.rack.ProjectName(),
		)
	}
	return nil
}

func (c onRack) inUse(ctx context.Context, disk rack.Disk) error {
	if lazy, err := c.deferredDetaches(ctx); err == nil && lazy[disk.ID] == disk.InstanceID {
		return rpc.LoggedAt(
			slog.LevelInfo,
			rpc.FailedPrecondition(
				"disk %q (%s) is unpublished, and instance %s still has it: it will be detached with the next planned restart of that instance, or now if you stop the instance yourself; nothing is restarted to delete a volume",
				disk.Name,
				disk.ID,
				disk.InstanceID,
			),
		)
	}
	return rpc.FailedPrecondition(
		"disk %q (%s) is attached to instance %s and is not deleted: unpublish the volume from that node first",
		disk.Name,
		disk.ID,
		disk.InstanceID,
	)
}

// ValidateVolumeCapabilities says whether a volume can be used in the given ways: CSI spec, ValidateVolumeCapabilities.
func (c *Service) ValidateVolumeCapabilities(
	ctx context.Context,
	req *csi.ValidateVolumeCapabilitiesRequest,
) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if err := validateValidateVolumeCapabilities(req); err != nil {
		return nil, err
	}
	on, disk, err := c.disk(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if err := on.unsupported(ctx, req, disk); err != nil {
		var own *rpc.Error
		if !errors.As(err, &own) {
			return nil, err
		}
		return &csi.ValidateVolumeCapabilitiesResponse{Message: own.Error()}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext:      req.GetVolumeContext(),
		VolumeCapabilities: req.GetVolumeCapabilities(),
		Parameters:         req.GetParameters(),
	}}, nil
}

// unsupported says why a volume cannot be used as asked: an error with a code of ours is the answer, another one a failure.
func (c onRack) unsupported(ctx context.Context, req *csi.ValidateVolumeCapabilitiesRequest, disk rack.Disk) error {
	if err := rpc.FirstError(
		supportedCapabilities(req.GetVolumeCapabilities()),
		checkMutableParameters(req.GetMutableParameters()),
	); err != nil {
		return err
	}
	params, err := parseParameters(req.GetParameters(), req.GetVolumeCapabilities())
	if err != nil {
		return err
	}
	if params.readOnly && !disk.ReadOnly {
		return rpc.FailedPrecondition("parameter %s: disk %q (%s) takes writes", rpc.KeyReadOnly, disk.Name, disk.ID)
	}
	facts := map[string]string{
		rpc.KeyDiskName:  disk.Name,
		rpc.KeySizeBytes: strconv.FormatInt(disk.SizeBytes, 10),
		rpc.KeyBlockSize: strconv.FormatInt(disk.BlockSize, 10),
	}
	for key, value := range req.GetVolumeContext() {
		if fact, known := facts[key]; known && fact != value {
			return rpc.FailedPrecondition("volume_context: %s is %q, and the disk's is %q", key, value, fact)
		}
	}
	return c.checkProject(ctx, disk)
}

// ControllerGetCapabilities: CSI spec, ControllerGetCapabilities.
func (c *Service) ControllerGetCapabilities(
	context.Context,
	*csi.ControllerGetCapabilitiesRequest,
) (*csi.ControllerGetCapabilitiesResponse, error) {
	return &csi.ControllerGetCapabilitiesResponse{Capabilities: controllerCapabilities()}, nil
}

// disk returns the disk of a volume and the rack that has it. That there is none is said only after the racks confirmed that this
// token would see it.
func (c *Service) disk(ctx context.Context, volumeID string) (onRack, rack.Disk, error) {
	id, ok := diskname.ParseID(volumeID)
	if !ok {
		return onRack{}, rack.Disk{}, rpc.NotFound(
			"volume_id %q is no disk ID: the ID of a volume is the UUID of its disk",
			volumeID,
		)
	}
	client, disk, err := find(ctx, c.racks, id, (*rack.Client).Disk)
	return c.on(client), disk, err
}

// unconfirmed is UNAVAILABLE when a 404 of this rack cannot be believed: nothing is known about the thing then, and no
// orchestrator may conclude that it is gone.
func (c onRack) unconfirmed(ctx context.Context) error {
	if err := c.rack.ConfirmProject(ctx); err != nil {
		return unknownOutcome(ctx, err)
	}
	return nil
}

// volume is a disk in the words of the specification.
func (c onRack) volume(disk rack.Disk, params parameters) *csi.Volume {
	return &csi.Volume{
		VolumeId:           disk.ID,
		CapacityBytes:      disk.SizeBytes,
		VolumeContext:      volumeContext(disk, params),
		ContentSource:      contentSource(disk),
		AccessibleTopology: c.racks.topology[c.rack],
	}
}

// contentSource is what a volume was made from as the specification has it, nil for a blank one and for one made from an image.
func contentSource(disk rack.Disk) *csi.VolumeContentSource {
	if disk.SnapshotID == "" {
		return nil // a clone was made from a snapshot, too
	}
	description, _ := rack.ParseDescription(disk.Description)
	if description.Clone && len(description.Lineage) > 0 {
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: description.Lineage[0]},
		}}
	}
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: disk.SnapshotID},
	}}
}

// origin is what a disk was made from.
func origin(disk rack.Disk) string {
	switch {
	case disk.SnapshotID != "":
		return rpc.OriginSnapshot
	case disk.ImageID != "":
		return rpc.OriginImage
	}
	return rpc.OriginBlank
}

func volumeContext(disk rack.Disk, params parameters) map[string]string {
	values := map[string]string{
		rpc.KeyDiskName:  disk.Name,
		rpc.KeySizeBytes: strconv.FormatInt(disk.SizeBytes, 10),
		rpc.KeyBlockSize: strconv.FormatInt(disk.BlockSize, 10),
	}
	for key, value := range params.forNode {
		values[key] = value
	}
	return values
}
