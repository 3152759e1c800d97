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
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/expand"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// volumeRequest is a parsed CreateVolume request.
type volumeRequest struct {
	name        string
	capacity    *csi.CapacityRange
	params      parameters
	description rack.Description
	// snapshotID and cloneOf are the IDs of the source snapshot or the source volume, as the racks write them. At most
	// one is set.
	snapshotID, cloneOf string
}

func (r volumeRequest) blank() bool { return r.snapshotID == "" && r.cloneOf == "" }

// CreateVolume makes a disk: blank, from a snapshot, or as a copy of another disk. CSI spec, CreateVolume. The disk's
// name is derived from the volume's name, so that a repeated call finds the disk. After a failed create it looks for
// the disk before it answers: the rack may have made the disk and its answer was lost, or the rack may report missing
// quota for a name that exists already (docs/reference/rack.md §2).
func (c *Service) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if err := validateCreateVolume(req); err != nil {
		return nil, err
	}
	want, err := c.parseVolumeRequest(req)
	if err != nil {
		return nil, err
	}
	candidates, err := c.racks.accessible(req.GetAccessibilityRequirements())
	if err != nil {
		return nil, err
	}
	c.sweeper.scheduleIfStale()
	if err := c.checkOtherRacks(ctx, want, candidates); err != nil {
		return nil, err
	}
	var rc rackController
	var disk rack.Disk
	switch {
	case want.snapshotID != "":
		rc, disk, err = c.restore(ctx, want, candidates)
	case want.cloneOf != "":
		rc, disk, err = c.clone(ctx, want, candidates)
	default:
		rc, disk, err = c.createBlank(ctx, want, candidates)
	}
	if err != nil {
		return nil, retryableCreate(ctx, err)
	}
	c.racks.cacheLocation(disk.VolumeID, rc.rack)
	rc.remember(disk)
	return &csi.CreateVolumeResponse{Volume: rc.volume(disk, want.params)}, nil
}

func (c *Service) parseVolumeRequest(req *csi.CreateVolumeRequest) (volumeRequest, error) {
	params, err := parseParameters(req.GetParameters(), req.GetVolumeCapabilities())
	if err != nil {
		return volumeRequest{}, err
	}
	want := volumeRequest{
		name:        req.GetName(),
		capacity:    req.GetCapacityRange(),
		params:      params,
		description: rack.NewDescription(c.cluster, req.GetName(), params.pvc),
	}
	want.description.RawBlock = params.rawBlock
	want.description.LUKS = params.luks
	want.description.Fixed = params.fixed
	if source := req.GetVolumeContentSource().GetSnapshot(); source != nil {
		id, ok := diskname.ParseID(source.GetSnapshotId())
		if !ok {
			return volumeRequest{}, rpc.NotFound(
				"volume_content_source: snapshot_id %q is not a UUID: the ID of a snapshot is its UUID on the rack",
				source.GetSnapshotId(),
			)
		}
		want.snapshotID = id
	}
	if source := req.GetVolumeContentSource().GetVolume(); source != nil {
		id, ok := diskname.ParseID(source.GetVolumeId())
		if !ok {
			return volumeRequest{}, rpc.NotFound(
				"volume_content_source: volume_id %q is not a UUID: give the ID that CreateVolume returned",
				source.GetVolumeId(),
			)
		}
		want.cloneOf = id
	}
	switch {
	case params.readOnly && want.snapshotID == "":
		return volumeRequest{}, rpc.InvalidArgument(
			"parameter %s: only a volume made from a snapshot can be read-only: set a snapshot as source",
			rpc.KeyReadOnly,
		)
	case params.diskType == diskTypeLocal && !want.blank():
		return volumeRequest{}, rpc.InvalidArgument(
			"parameter %s: a local disk is always blank: leave out the parameter or the volume_content_source",
			rpc.ParameterDiskType,
		)
	}
	if want.blank() {
		size, err := chooseSize(want.capacity, 0)
		if err != nil {
			return volumeRequest{}, err
		}
		return want, params.checkFits(size)
	}
	return want, nil
}

// createBlank makes the disk on the first candidate with free capacity. With several candidates it first looks for the
// disk on all of them, because an earlier call may have made it. It makes nothing while one of them does not answer.
// With one candidate, the rack itself rejects a second disk of the name.
func (c *Service) createBlank(
	ctx context.Context,
	want volumeRequest,
	candidates []*rack.Client,
) (rackController, rack.Disk, error) {
	size, err := chooseSize(want.capacity, 0)
	if err != nil {
		return rackController{}, rack.Disk{}, err
	}
	if len(candidates) == 1 {
		rc := c.forRack(candidates[0])
		disk, err := rc.createDisk(ctx, want, size, "")
		return rc, disk, err
	}
	if rc, disk, err := c.findExisting(ctx, want, candidates); err != nil || rc.rack != nil {
		return rc, disk, err
	}
	for _, client := range candidates {
		rc := c.forRack(client)
		var disk rack.Disk
		if disk, err = rc.createDisk(ctx, want, size, ""); err == nil {
			return rc, disk, nil
		}
		if !errors.Is(err, rack.ErrCapacity) {
			break
		}
	}
	return rackController{}, rack.Disk{}, err
}

// defaultOtherRacksWait bounds the look for a volume on the racks that the request does not allow. Within it, a rack
// that fails is asked again every otherRacksPoll: one error of a rack that is up must not lead to a second disk.
const (
	defaultOtherRacksWait = 2 * time.Second
	otherRacksPoll        = 200 * time.Millisecond
)

// checkOtherRacks rejects a volume that exists on a rack that the request does not allow: CSI spec, CreateVolume,
// ALREADY_EXISTS. The requirement can move when a pod is scheduled again, and a second disk would have no owner. A rack
// that does not answer must not block a create on another, so it is left out after [Options.OtherRacksWait]. Then the
// volume can have a second disk. A repeated create must succeed all the same, so a disk on another rack counts only if
// the allowed racks have none.
func (c *Service) checkOtherRacks(ctx context.Context, want volumeRequest, candidates []*rack.Client) error {
	others := slices.DeleteFunc(slices.Clone(c.racks.all), func(client *rack.Client) bool {
		return slices.Contains(candidates, client)
	})
	if len(others) == 0 {
		return nil
	}
	name := diskname.ForVolume(c.cluster, want.name)
	limited, cancel := context.WithTimeout(ctx, c.otherWait)
	defer cancel()
	lookUp := func(ctx context.Context, client *rack.Client) (rack.Disk, error) {
		return lookUpUntilAnswered(ctx, client, name)
	}
	for client, result := range queryAll(limited, others, lookUp) {
		switch {
		case errors.Is(result.err, rack.ErrNotFound):
		case errors.Is(result.err, record.ErrFormat):
			return retryable(ctx, result.err) // a disk of this name exists there
		case ctx.Err() != nil:
			return ctx.Err() // the caller has given up; the rack may have had no time to answer
		case result.err != nil:
			c.log.Warn("a rack that the request does not allow was not asked for the volume: it does not respond",
				"rack", client.Name(), "name", want.name, "error", result.err.Error())
		default:
			if !want.has(result.value) {
				continue
			}
			if err := c.checkSecondDisk(ctx, want, candidates, result.value, client); err != nil {
				return err
			}
		}
	}
	return nil
}

// has reports whether a disk was made for this volume, and not by hand or by another cluster.
func (r volumeRequest) has(disk rack.Disk) bool {
	owner, _ := rack.ParseDescription(disk.Description)
	return owner.SameObject(r.description)
}

// mayExistOn is the error of a look for the volume's disk on a rack that did not answer.
func (r volumeRequest) mayExistOn(ctx context.Context, client *rack.Client, err error) error {
	return retryable(
		ctx,
		fmt.Errorf("volume %q may exist on rack %q, which does not respond: %w", r.name, client.Name(), err),
	)
}

// checkSecondDisk rejects a volume whose disk is on a rack that the request does not allow, unless an allowed rack has
// one, too. Then it logs the other disk, which nothing uses.
func (c *Service) checkSecondDisk(
	ctx context.Context,
	want volumeRequest,
	candidates []*rack.Client,
	other rack.Disk,
	at *rack.Client,
) error {
	name := diskname.ForVolume(c.cluster, want.name)
	lookUp := func(ctx context.Context, client *rack.Client) (rack.Disk, error) {
		disk, err := client.DiskByName(ctx, name)
		if errors.Is(err, rack.ErrNotFound) {
			if unconfirmed := client.ConfirmProject(ctx); unconfirmed != nil {
				err = unconfirmed
			}
		}
		return disk, err
	}
	for client, result := range queryAll(ctx, candidates, lookUp) {
		switch {
		case result.err == nil && want.has(result.value):
			c.log.Warn("the volume has a second disk on a rack that the request does not allow: delete it if no volume uses it",
				"rack", at.Name(), "disk_id", other.ID, "name", want.name, "volume_id", result.value.VolumeID)
			return nil
		case result.err != nil && !errors.Is(result.err, rack.ErrNotFound):
			return want.mayExistOn(ctx, client, result.err)
		}
	}
	return rpc.AlreadyExists(
		"volume %q exists as disk %s on rack %q, outside of accessibility_requirements: use it there, or use another name",
		want.name,
		other.ID,
		at.Name(),
	)
}

// lookUpUntilAnswered looks up a disk by its name until the rack says whether it exists. When ctx ends it returns the
// rack's last error.
func lookUpUntilAnswered(ctx context.Context, client *rack.Client, name string) (rack.Disk, error) {
	var failed error
	for {
		disk, err := client.DiskByName(ctx, name)
		switch {
		case err == nil, errors.Is(err, rack.ErrUnknown):
			return disk, nil
		case errors.Is(err, rack.ErrNotFound), errors.Is(err, record.ErrFormat):
			return disk, err
		}
		if ctx.Err() == nil || failed == nil {
			failed = err
		}
		select {
		case <-ctx.Done():
			return rack.Disk{}, failed
		case <-time.After(otherRacksPoll):
		}
	}
}

// createDisk makes the disk on this rack, from the snapshot unless snapshotID is empty. A disk that exists already and
// matches the request is a success.
func (c rackController) createDisk(
	ctx context.Context,
	want volumeRequest,
	sizeBytes int64,
	snapshotID string,
) (rack.Disk, error) {
	return c.createBeside(ctx, want, sizeBytes, snapshotID, c.look(ctx, want))
}

// createBeside is [rackController.createDisk] for a caller that has begun a look. While the volume's disk is being
// replaced, its name is free, and this call may make a disk of that name. It deletes that disk, which no call has
// returned, by its ID. A disk that was found by its name may be in use.
func (c rackController) createBeside(
	ctx context.Context,
	want volumeRequest,
	sizeBytes int64,
	snapshotID string,
	look *expand.Look,
) (rack.Disk, error) {
	disk, err := c.rack.CreateDisk(ctx, rack.DiskSpec{
		Name:        diskname.ForVolume(c.cluster, want.name),
		Description: want.description.Encode(),
		SizeBytes:   sizeBytes,
		BlockSize:   cmp.Or(want.params.blockSize, defaultBlockSize),
		Local:       want.params.diskType == diskTypeLocal,
		SnapshotID:  snapshotID,
		ReadOnly:    want.params.readOnly,
	})
	if err != nil {
		return c.resolveCreate(ctx, want, err, look)
	}
	i, expanding, err := look.UnderWay(ctx)
	switch {
	case errors.Is(err, record.ErrFormat), expanding:
		withdrawing, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
		defer cancel()
		if failed := c.rack.DeleteDisk(withdrawing, disk.ID); failed != nil {
			return rack.Disk{}, retryable(ctx, fmt.Errorf(
				"disk %q (%s) took the name of a volume that is being expanded: %w: delete the disk", disk.Name, disk.ID, failed))
		}
		c.sweeper.schedule(expand.SettleAge) // the volume may be deleted, and the expansion be left
		return rack.Disk{}, cmp.Or(err, withoutDiskError(i))
	case err != nil:
		return rack.Disk{}, retryable(ctx, err)
	}
	return disk, nil
}

// resolveCreate looks for the disk after a failed create. It returns the disk if it exists and matches the request, and
// otherwise the error to answer.
func (c rackController) resolveCreate(
	ctx context.Context, want volumeRequest, createErr error, look *expand.Look,
) (rack.Disk, error) {
	// These refusals say that this call made nothing. An earlier one may have made the disk and lost its answer.
	refused := errors.Is(createErr, rack.ErrCapacity) || errors.Is(createErr, rack.ErrRefused) ||
		errors.Is(createErr, rack.ErrSize)
	exists := errors.Is(createErr, rack.ErrAlreadyExists)
	if !refused && !exists && !rack.OutcomeUnknown(createErr) && !errors.Is(createErr, rack.ErrNotFound) {
		return rack.Disk{}, createErr // not a final answer: an access that the token lost, or a conflict
	}
	disk, err := c.diskUnlessReplaced(ctx, want, look)
	switch {
	case errors.Is(err, rack.ErrReplaced):
		return rack.Disk{}, err
	case errors.Is(err, rack.ErrNotFound) && errors.Is(createErr, rack.ErrSize):
		return rack.Disk{}, rpc.OutOfRange("capacity_range: %w", createErr)
	case errors.Is(err, rack.ErrNotFound) && refused:
		return rack.Disk{}, createErr
	case errors.Is(err, rack.ErrNotFound):
		// The rack may still be making the disk, or the disk was deleted in between. Only a retry can tell.
		return rack.Disk{}, retryable(ctx, fmt.Errorf("%w; the disk does not exist yet: retry", createErr))
	case err != nil:
		return rack.Disk{}, retryable(ctx, fmt.Errorf("%w; then the look-up of the disk failed: %w", createErr, err))
	}
	return c.checkExisting(ctx, want, disk)
}
