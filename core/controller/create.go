// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// wanted is the volume that a CreateVolume request asks for.
type wanted struct {
	name        string
	capacity    *csi.CapacityRange
	params      parameters
	description rack.Description
	// snapshotID is the snapshot and cloneOf the volume that it is to be made from, as IDs in the racks' notation; at most one
	// is set.
	snapshotID, cloneOf string
}

func (w wanted) blank() bool { return w.snapshotID == "" && w.cloneOf == "" }

// CreateVolume makes a disk: a blank one, one from a snapshot, or a copy of another disk. The name of the disk follows from the
// volume's, so that a repetition finds it: CSI spec, CreateVolume. What a failed create left behind is looked up before
// anything is answered, since the rack may have made the disk and lost the answer, or may refuse a name that exists for want
// of quota (docs/reference/rack.md §2).
func (c *Service) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if err := validateCreateVolume(req); err != nil {
		return nil, err
	}
	want, err := c.parseWanted(req)
	if err != nil {
		return nil, err
	}
	candidates, err := c.racks.accessible(req.GetAccessibilityRequirements())
	if err != nil {
		return nil, err
	}
	c.sweeper.wake()
	var on onRack
	var disk rack.Disk
	switch {
	case want.snapshotID != "":
		on, disk, err = c.restore(ctx, want, candidates)
	case want.cloneOf != "":
		on, disk, err = c.clone(ctx, want, candidates)
	default:
		on, disk, err = c.createBlank(ctx, want, candidates)
	}
	if err != nil {
		return nil, unclear(ctx, err)
	}
	c.racks.saw(disk.ID, on.rack)
	return &csi.CreateVolumeResponse{Volume: on.volume(disk, want.params)}, nil
}

func (c *Service) parseWanted(req *csi.CreateVolumeRequest) (wanted, error) {
	params, err := parseParameters(req.GetParameters(), req.GetVolumeCapabilities())
	if err != nil {
		return wanted{}, err
	}
	want := wanted{
		name:        req.GetName(),
		capacity:    req.GetCapacityRange(),
		params:      params,
		description: rack.NewDescription(c.cluster, req.GetName(), params.claim),
	}
	if source := req.GetVolumeContentSource().GetSnapshot(); source != nil {
		id, ok := diskname.ParseID(source.GetSnapshotId())
		if !ok {
			return wanted{}, rpc.NotFound(
				"volume_content_source: snapshot_id %q is no snapshot ID: the ID of a snapshot is its UUID on the rack",
				source.GetSnapshotId(),
			)
		}
		want.snapshotID = id
	}
	if source := req.GetVolumeContentSource().GetVolume(); source != nil {
		id, ok := diskname.ParseID(source.GetVolumeId())
		if !ok {
			return wanted{}, rpc.NotFound(
				"volume_content_source: volume_id %q is no disk ID: the ID of a volume is the UUID of its disk",
				source.GetVolumeId(),
			)
		}
		want.cloneOf = id
	}
	switch {
	case params.readOnly && want.snapshotID == "":
		return wanted{}, rpc.InvalidArgument(
			"parameter %s: only a volume made from a snapshot can be read-only",
			rpc.KeyReadOnly,
		)
	case params.diskType == diskTypeLocal && !want.blank():
		return wanted{}, rpc.InvalidArgument(
			"parameter %s: a local disk is made blank only: leave out the parameter or the volume_content_source",
			rpc.ParameterDiskType,
		)
	}
	return want, nil
}

// createBlank makes the disk on the first rack that has room. Where several could have it from an earlier call, all are asked
// first, and nothing is made while one of them does not answer.
func (c *Service) createBlank(ctx context.Context, want wanted, candidates []*rack.Client) (onRack, rack.Disk, error) {
	size, err := sizeOf(want.capacity, 0)
	if err != nil {
		return onRack{}, rack.Disk{}, err
	}
	if len(candidates) > 1 {
		if on, disk, err := c.madeBefore(ctx, want, candidates); err != nil || on.rack != nil {
			return on, disk, err
		}
	}
	for _, client := range candidates {
		on := c.on(client)
		var disk rack.Disk
		if disk, err = on.make(ctx, want, size, ""); err == nil {
			return on, disk, nil
		}
		if !errors.Is(err, rack.ErrCapacity) {
			break
		}
	}
	return onRack{}, rack.Disk{}, err
}

// madeBefore looks for the disk on all these racks. Without one, the rack returned is nil.
func (c *Service) madeBefore(ctx context.Context, want wanted, candidates []*rack.Client) (onRack, rack.Disk, error) {
	name := diskname.ForVolume(c.cluster, want.name)
	var found []rack.Disk
	var at []*rack.Client
	for client, looked := range askAll(ctx, candidates, func(ctx context.Context, client *rack.Client) (rack.Disk, error) {
		return client.DiskByName(ctx, name)
	}) {
		switch {
		case looked.err == nil:
			found, at = append(found, looked.thing), append(at, client)
		case !errors.Is(looked.err, rack.ErrNotFound):
			return onRack{}, rack.Disk{}, unknownOutcome(
				ctx,
				fmt.Errorf("volume %q may be on rack %q already, which does not tell: %w", want.name, client.Name(), looked.err),
			)
		}
	}
	switch len(found) {
	case 0:
		return onRack{}, rack.Disk{}, nil
	case 1:
		on := c.on(at[0])
		disk, err := on.accept(ctx, want, found[0])
		return on, disk, err
	}
	return onRack{}, rack.Disk{}, rpc.AlreadyExists(
		"volume %q: racks %q and %q both have a disk %q: delete the one that is not in use",
		want.name,
		at[0].Name(),
		at[1].Name(),
		name,
	)
}

// make makes the disk on this rack, from a snapshot if one is given, or finds that it is there already.
func (c onRack) make(ctx context.Context, want wanted, sizeBytes int64, snapshotID string) (rack.Disk, error) {
	disk, err := c.rack.CreateDisk(ctx, rack.DiskSpec{
		Name:        diskname.ForVolume(c.cluster, want.name),
		Description: want.description.Encode(),
		SizeBytes:   sizeBytes,
		BlockSize:   cmp.Or(want.params.blockSize, defaultBlockSize),
		Local:       want.params.diskType == diskTypeLocal,
		SnapshotID:  snapshotID,
		ReadOnly:    want.params.readOnly,
	})
	if err == nil {
		return disk, nil
	}
	return c.existing(ctx, want, err)
}

// existing settles a create that the rack did not answer with a disk: it returns the disk where it is there after all and
// is what was asked for, and otherwise the error to answer.
func (c onRack) existing(ctx context.Context, want wanted, createErr error) (rack.Disk, error) {
	mayExist := errors.Is(createErr, rack.ErrAlreadyExists) || errors.Is(createErr, rack.ErrCapacity) ||
		rack.OutcomeUnknown(createErr)
	if !mayExist {
		if errors.Is(createErr, rack.ErrSize) {
			return rack.Disk{}, rpc.OutOfRange("capacity_range: %w", createErr)
		}
		return rack.Disk{}, createErr
	}
	disk, err := c.rack.DiskByName(ctx, diskname.ForVolume(c.cluster, want.name))
	switch {
	case errors.Is(err, rack.ErrNotFound) && errors.Is(createErr, rack.ErrCapacity):
		return rack.Disk{}, createErr
	case errors.Is(err, rack.ErrNotFound):
		// The rack may still be at it, or the disk went away in between: only a repetition tells. Any code that a
		// provisioner takes as final would make it forget a disk that appears later.
		return rack.Disk{}, unknownOutcome(ctx, fmt.Errorf("%w; no such disk is there yet: ask again", createErr))
	case err != nil:
		return rack.Disk{}, unknownOutcome(ctx, fmt.Errorf("%w; looking for the disk failed too: %w", createErr, err))
	}
	return c.accept(ctx, want, disk)
}

// accept takes a disk that has the right name for the volume, once it has come to rest, if it is what was asked for.
func (c onRack) accept(ctx context.Context, want wanted, disk rack.Disk) (rack.Disk, error) {
	if err := c.compare(disk, want); err != nil {
		return rack.Disk{}, err
	}
	settled, err := c.settled(ctx, disk)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return rack.Disk{}, rpc.Unavailable("volume %q: its disk was there and is gone again: ask again: %w", want.name, err)
	case err != nil:
		return rack.Disk{}, err
	case settled.State == rack.Faulted:
		return rack.Disk{}, rpc.Unavailable(
			"volume %q: disk %q (%s) is faulted and will not be handed out: delete it on rack %q, or have the rack's operator look at it",
			want.name,
			disk.Name,
			disk.ID,
			c.rack.Name(),
		)
	}
	return settled, nil
}

// unclear keeps a caller asking whose create, or list, ends with what tells nothing, wherever that came from: an earlier call may
// have made the thing, and nobody would know of it.
func unclear(ctx context.Context, err error) error {
	if rack.OutcomeUnknown(err) {
		return unknownOutcome(ctx, err)
	}
	return err
}

// unknownOutcome gives an error of a create whose disk may exist the code on which a caller keeps asking.
func unknownOutcome(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return err // statusOf names the caller's own deadline or cancellation
	}
	return rpc.Unavailable("%w", err)
}

// compare refuses a disk that has the right name and is not what was asked for.
func (c onRack) compare(disk rack.Disk, want wanted) error {
	found := func(format string, args ...any) error {
		return rpc.AlreadyExists(
			"volume %q: disk %q (%s) exists in project %q, but %s",
			want.name,
			disk.Name,
			disk.ID,
			c.rack.ProjectName(),
			fmt.Sprintf(format, args...),
		)
	}
	owner, ours := rack.ParseDescription(disk.Description)
	switch {
	case !ours:
		return found("was not made by this plugin (its description is %.80q): rename or delete it", disk.Description)
	case !owner.SameObject(want.description):
		return found("belongs to volume %q of cluster %q", owner.Name, owner.Cluster)
	case !suits(disk.SizeBytes, want.capacity):
		return found(
			"has %d bytes, which is not in the range from %d to %d",
			disk.SizeBytes,
			want.capacity.GetRequiredBytes(),
			want.capacity.GetLimitBytes(),
		)
	case want.blank() && want.params.blockSize != 0 && want.params.blockSize != disk.BlockSize:
		return found("has blocks of %d bytes, not %d", disk.BlockSize, want.params.blockSize)
	case want.params.diskType != "" && (want.params.diskType == diskTypeLocal) != disk.Local:
		return found("is not of type %q", want.params.diskType)
	case want.params.readOnly != disk.ReadOnly:
		return found("its read-only flag is %t", disk.ReadOnly)
	}
	return compareSource(disk, owner, want, found)
}

// compareSource compares what a disk was made from with what it was to be made from.
func compareSource(disk rack.Disk, owner rack.Description, want wanted, found func(string, ...any) error) error {
	source := "nothing"
	switch {
	case owner.Clone && len(owner.Lineage) > 0:
		source = "volume " + owner.Lineage[0]
	case origin(disk) != rpc.OriginBlank:
		source = origin(disk) + " " + disk.SnapshotID + disk.ImageID
	}
	asked := "nothing"
	switch {
	case want.cloneOf != "":
		asked = "volume " + want.cloneOf
	case want.snapshotID != "":
		asked = rpc.OriginSnapshot + " " + want.snapshotID
	}
	if source != asked {
		return found("was made from %s, not from %s", source, asked)
	}
	return nil
}

// restore makes the disk from a snapshot, on the snapshot's rack.
func (c *Service) restore(ctx context.Context, want wanted, candidates []*rack.Client) (onRack, rack.Disk, error) {
	on, snapshot, err := c.snapshot(ctx, want.snapshotID)
	if err != nil {
		return c.madeFromGone(ctx, want, candidates, err)
	}
	if err := on.checkSource(ctx, "snapshot", snapshot.Name, snapshot.ID, snapshot.ProjectID, candidates); err != nil {
		return onRack{}, rack.Disk{}, err
	}
	if snapshot.Temporary() {
		return onRack{}, rack.Disk{}, rpc.NotFound(
			"volume_content_source: snapshot %q (%s) is a temporary one of this plugin's own",
			snapshot.Name,
			snapshot.ID,
		)
	}
	if snapshot, err = on.readySnapshot(ctx, snapshot); err != nil {
		return onRack{}, rack.Disk{}, err
	}
	size, err := sizeOf(want.capacity, snapshot.SizeBytes)
	if err != nil {
		return onRack{}, rack.Disk{}, err
	}
	if want.params.readOnly && size != snapshot.SizeBytes {
		return onRack{}, rack.Disk{}, rpc.OutOfRange(
			"capacity_range: a read-only volume has exactly the %d bytes of its snapshot, not %d",
			snapshot.SizeBytes,
			size,
		)
	}
	want.description.Lineage = lineageOf(snapshot)
	disk, err := on.make(ctx, want, size, snapshot.ID)
	if errors.Is(err, rack.ErrNotFound) {
		err = rpc.Unavailable("volume %q: its snapshot %s was there and is gone: ask again: %w", want.name, snapshot.ID, err)
	}
	return on, disk, err
}

// lineageOf is the lineage of what is made from a snapshot; of one that was made by hand nothing is known but its disk.
func lineageOf(snapshot rack.Snapshot) []string {
	if description, ours := rack.ParseDescription(snapshot.Description); ours && len(description.Lineage) > 0 {
		return description.Lineage
	}
	return rack.Lineage(snapshot.DiskID, nil)
}

// madeFromGone answers a create whose source cannot be had: the volume may have been made from it before it went.
func (c *Service) madeFromGone(
	ctx context.Context,
	want wanted,
	candidates []*rack.Client,
	sourceErr error,
) (onRack, rack.Disk, error) {
	if !errors.Is(sourceErr, rack.ErrNotFound) {
		return onRack{}, rack.Disk{}, sourceErr
	}
	on, disk, err := c.madeBefore(ctx, want, candidates)
	if err == nil && on.rack == nil {
		err = rpc.NotFound("volume_content_source: %w", sourceErr)
	}
	return on, disk, err
}

// checkSource refuses a source that is on a rack where the volume may not be, or in another project.
func (c onRack) checkSource(ctx context.Context, kind, name, id, projectID string, candidates []*rack.Client) error {
	if !slices.Contains(candidates, c.rack) {
		return rpc.ResourceExhausted(
			"accessibility_requirements do not allow rack %q, where %s %q (%s) is: what is made from it stays on its rack",
			c.rack.Name(),
			kind,
			name,
			id,
		)
	}
	project, err := c.rack.ProjectID(ctx)
	if err != nil {
		return err
	}
	if projectID != project {
		return rpc.FailedPrecondition(
			"%s %q (%s) is in another project than %q: this plugin uses its own project only",
			kind,
			name,
			id,
			c.rack.ProjectName(),
		)
	}
	return nil
}
