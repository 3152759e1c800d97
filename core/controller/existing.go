// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"errors"
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/core/expand"
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// findExisting looks for the volume's disk on all candidates. If there is none, the rack of the returned rackController
// is nil.
func (c *Service) findExisting(
	ctx context.Context,
	want volumeRequest,
	candidates []*rack.Client,
) (rackController, rack.Disk, error) {
	var found []rack.Disk
	var at []*rack.Client
	for client, result := range queryAll(ctx, candidates, func(ctx context.Context, client *rack.Client) (rack.Disk, error) {
		return c.forRack(client).existingDisk(ctx, want)
	}) {
		switch {
		case result.err == nil:
			found, at = append(found, result.value), append(at, client)
		case errors.Is(result.err, rack.ErrReplaced):
			return rackController{}, rack.Disk{}, result.err
		case !errors.Is(result.err, rack.ErrNotFound):
			return rackController{}, rack.Disk{}, want.mayExistOn(ctx, client, result.err)
		}
	}
	switch len(found) {
	case 0:
		return rackController{}, rack.Disk{}, nil
	case 1:
		rc := c.forRack(at[0])
		disk, err := rc.checkExisting(ctx, want, found[0])
		return rc, disk, err
	}
	return rackController{}, rack.Disk{}, rpc.AlreadyExists(
		"volume %q: racks %q and %q both have a disk %q: ask who made each, before you delete the unused one",
		want.name,
		at[0].Name(),
		at[1].Name(),
		diskname.ForVolume(c.cluster, want.name),
	)
}

// existingDisk looks up the disk of the requested volume by its name. [rack.ErrReplaced] means that the volume has no
// disk until its expansion is finished. [rack.ErrNotFound] means that there is no such volume.
func (c rackController) existingDisk(ctx context.Context, want volumeRequest) (rack.Disk, error) {
	return c.diskUnlessReplaced(ctx, want, c.look(ctx, want))
}

// look asks whether the requested volume exists and is being expanded.
func (c rackController) look(ctx context.Context, want volumeRequest) *expand.Look {
	return c.expander.Look(ctx, diskname.ForVolume(c.cluster, want.name))
}

// diskUnlessReplaced is [rackController.existingDisk] for a caller that has begun a look. While an expansion replaces
// the disk, another disk may have its name. Such a disk is not the volume's.
func (c rackController) diskUnlessReplaced(
	ctx context.Context, want volumeRequest, look *expand.Look,
) (rack.Disk, error) {
	disk, err := c.rack.DiskByName(ctx, diskname.ForVolume(c.cluster, want.name))
	if err != nil && !errors.Is(err, rack.ErrNotFound) {
		return disk, err
	}
	i, expanding, lookErr := look.UnderWay(ctx)
	switch {
	case lookErr != nil:
		return rack.Disk{}, lookErr
	case !expanding, err == nil && (disk.ID == i.Disk || disk.VolumeID == i.Volume):
		return disk, err
	case err == nil:
		return rack.Disk{}, fmt.Errorf(
			"volume %s is being expanded, and disk %q (%s) took its name: %w: delete that disk if it is unused",
			i.Volume, disk.Name, disk.ID, rack.ErrReplaced)
	}
	return rack.Disk{}, withoutDiskError(i)
}

// withoutDiskError is the error for a create of a volume that exists.
func withoutDiskError(i record.Intent) error {
	return fmt.Errorf(
		"volume %s exists and has no disk now: %w: repeat its expansion (oxide-csi volume expand)",
		i.Volume,
		rack.ErrReplaced,
	)
}

// checkExisting rejects an existing disk with the volume's name if it does not match the request, is faulted, or has
// another ID in the orchestrator. It waits while the disk changes state, and returns the disk in its stable state.
func (c rackController) checkExisting(ctx context.Context, want volumeRequest, disk rack.Disk) (rack.Disk, error) {
	if err := c.checkMatches(disk, want); err != nil {
		return rack.Disk{}, err
	}
	stable, err := c.waitForDisk(ctx, disk)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return rack.Disk{}, rpc.Unavailable("volume %q: its disk existed and was deleted: %w: retry", want.name, err)
	case err != nil:
		return rack.Disk{}, err
	case stable.State == rack.Faulted:
		return rack.Disk{}, rpc.Unavailable("%w", fault.DiskFaulted.Errorf(
			"volume %q: disk %q (%s) is faulted on rack %q: ask the operator of the rack",
			want.name,
			disk.Name,
			disk.ID,
			c.rack.Name(),
		))
	}
	if stable.Grown() { // only the volume itself shows that, because any user of the project may write a description
		_, now, err := c.locate(ctx, stable.VolumeID)
		if err != nil {
			return rack.Disk{}, retryable(ctx, err)
		}
		if now.ID != stable.ID {
			return rack.Disk{}, rpc.AlreadyExists(
				"volume %q: disk %q (%s) says that it is of volume %s, which has another disk: ask who made it, or use another name",
				want.name,
				stable.Name,
				stable.ID,
				stable.VolumeID,
			)
		}
	}
	return stable, c.checkNotRegistered(ctx, want, stable)
}

// checkMatches rejects a disk that has the volume's name and differs from the request.
func (c rackController) checkMatches(disk rack.Disk, want volumeRequest) error {
	mismatch := func(format string, args ...any) error {
		return rpc.Fault(
			fault.VolumeDiffers,
			"volume %q: disk %q (%s) exists in project %q, but %s: use another name",
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
		return mismatch("was not made by this plugin (its description is %.80q)", disk.Description)
	case !owner.SameObject(want.description):
		return mismatch("belongs to volume %q of cluster %q", owner.Name, owner.Cluster)
	case !sizeInRange(disk.CreatedBytes, want.capacity):
		return mismatch("was made with %dGiB, not %s", disk.CreatedBytes/gib, rangeText(want.capacity))
	case want.blank() && want.params.blockSize != 0 && want.params.blockSize != disk.BlockSize:
		return mismatch("has blocks of %d bytes, not %d", disk.BlockSize, want.params.blockSize)
	case want.params.diskType != "" && (want.params.diskType == diskTypeLocal) != disk.Local:
		return mismatch("is not of type %q", want.params.diskType)
	case want.params.readOnly != disk.ReadOnly:
		return mismatch("its read-only flag is %t", disk.ReadOnly)
	case want.params.luks != owner.LUKS:
		return mismatch("%s", encryptionText(owner.LUKS))
	}
	return checkMatchesSource(disk, owner, want, mismatch)
}

// encryptionText says whether a disk is encrypted.
func encryptionText(luks int) string {
	if luks == 0 {
		return "is not encrypted"
	}
	return "is encrypted"
}
