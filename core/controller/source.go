// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"errors"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// sourceContent is what the descriptions on the rack say about the content of a source.
type sourceContent struct {
	rack.Description
	// known is false if no description says anything: a user made the disk.
	known bool
}

// checkSourceEncryption rejects an encrypted source for a volume that is not encrypted, and the reverse: a copy has the
// bytes of its source. If the content is not known, the request counts, and the node refuses what it finds to differ.
func checkSourceEncryption(want volumeRequest, kind, name, id string, source sourceContent) error {
	if !source.known || source.LUKS == want.params.luks {
		return nil
	}
	advice := "remove parameter " + rpc.KeyEncryption
	if source.LUKS != 0 {
		advice = "set parameter " + rpc.KeyEncryption + " to " + rpc.EncryptionLUKS2
	}
	return rpc.InvalidArgument("volume_content_source: %s %q (%s) %s, and a copy cannot differ: %s",
		kind, name, id, encryptionText(source.LUKS), advice)
}

// takeFixed takes over from the source whether the filesystem may never grow. Such a volume is as large as its source.
func (r *volumeRequest) takeFixed(source rack.Description, sourceBytes, sizeBytes int64) error {
	r.description.Fixed = source.Fixed && !r.params.rawBlock
	if r.description.Fixed && sizeBytes > sourceBytes {
		return rpc.OutOfRange(
			"capacity_range: the source has %s: request %d bytes, its size, not %d",
			fixedText,
			sourceBytes,
			sizeBytes,
		)
	}
	return nil
}

// fixedText says why a volume keeps its size.
const fixedText = "a filesystem with bigalloc, which does not grow on every node"

// checkMatchesSource rejects a disk whose source is not the requested one.
func checkMatchesSource(
	disk rack.Disk,
	owner rack.Description,
	want volumeRequest,
	mismatch func(string, ...any) error,
) error {
	actual := "nothing"
	switch {
	case owner.Clone && len(owner.Lineage) > 0:
		actual = "volume " + owner.Lineage[0]
	case origin(disk) != rpc.OriginBlank:
		actual = origin(disk) + " " + disk.SnapshotID + disk.ImageID
	}
	requested := "nothing"
	switch {
	case want.cloneOf != "":
		requested = "volume " + want.cloneOf
	case want.snapshotID != "":
		requested = rpc.OriginSnapshot + " " + want.snapshotID
	}
	if actual != requested {
		return mismatch("was made from %s, not from %s", actual, requested)
	}
	return nil
}

// restore makes the disk from a snapshot, on the rack of the snapshot.
func (c *Service) restore(
	ctx context.Context,
	want volumeRequest,
	candidates []*rack.Client,
) (rackController, rack.Disk, error) {
	rc, snapshot, content, size, err := c.sourceSnapshot(ctx, want, candidates)
	if err != nil {
		return c.existingOr(ctx, want, candidates, err)
	}
	if err := want.takeFixed(content.Description, snapshot.SizeBytes, size); err != nil {
		return c.existingOr(ctx, want, candidates, err)
	}
	want.description.Lineage = content.Lineage
	disk, err := rc.createDisk(ctx, want, size, snapshot.ID)
	if errors.Is(err, rack.ErrNotFound) {
		err = rpc.Unavailable("volume %q: its snapshot %s was deleted meanwhile: %w: retry", want.name, snapshot.ID, err)
	}
	return rc, disk, err
}

// sourceSnapshot returns the requested snapshot, what is known of its content, and the size of the volume made from it.
// It rejects a snapshot that cannot be the source.
func (c *Service) sourceSnapshot(
	ctx context.Context,
	want volumeRequest,
	candidates []*rack.Client,
) (rc rackController, snapshot rack.Snapshot, content sourceContent, size int64, err error) {
	if rc, snapshot, err = c.snapshot(ctx, want.snapshotID); err != nil {
		return rc, snapshot, content, 0, err
	}
	if err = rc.checkSourceSnapshot(ctx, snapshot, candidates); err != nil {
		return rc, snapshot, content, 0, err
	}
	if content, err = rc.snapshotContent(ctx, want, snapshot); err != nil {
		return rc, snapshot, content, 0, err
	}
	if err = checkSourceEncryption(want, "snapshot", snapshot.Name, snapshot.ID, content); err != nil {
		return rc, snapshot, content, 0, err
	}
	if snapshot, err = rc.waitForReadySnapshot(ctx, snapshot, rpc.FailedPrecondition); err != nil {
		return rc, snapshot, content, 0, err
	}
	size, err = chooseSize(want.capacity, snapshot.SizeBytes)
	if err == nil && want.params.readOnly && size != snapshot.SizeBytes {
		err = rpc.OutOfRange(
			"capacity_range: a read-only volume has the size of its snapshot, %d bytes, not %d",
			snapshot.SizeBytes,
			size,
		)
	}
	return rc, snapshot, content, size, err
}

// checkSourceSnapshot rejects a snapshot as the source of a volume by what does not change.
func (c rackController) checkSourceSnapshot(
	ctx context.Context,
	snapshot rack.Snapshot,
	candidates []*rack.Client,
) error {
	err := c.checkSourceLocation(ctx, "snapshot", snapshot.Name, snapshot.ID, snapshot.ProjectID, candidates)
	if err != nil {
		return err
	}
	if err := c.checkSnapshotOwner(ctx, snapshot); err != nil {
		return err
	}
	if snapshot.Internal() {
		return rpc.NotFound(
			"volume_content_source: snapshot %q (%s) is an internal snapshot of this plugin: use another snapshot",
			snapshot.Name,
			snapshot.ID,
		)
	}
	return nil
}

// snapshotContent returns what is known of the content of a snapshot, with the lineage of a volume made from it. If a
// user made the snapshot, the description of its disk counts, as long as the disk exists. If a user made the disk,
// nothing says whether it is encrypted: the description of this plugin's snapshot does not know it either.
func (c rackController) snapshotContent(
	ctx context.Context,
	want volumeRequest,
	snapshot rack.Snapshot,
) (sourceContent, error) {
	description, ours := rack.ParseDescription(snapshot.Description)
	content := sourceContent{Description: description, known: ours}
	if len(content.Lineage) == 0 {
		content.Lineage = rack.Lineage(snapshot.VolumeID, nil)
	}
	if ours && (content.LUKS != 0 || want.params.luks == 0) {
		return content, nil
	}
	disk, err := c.rack.DiskByID(ctx, snapshot.DiskID)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return content, c.confirmNotFound(ctx)
	case err != nil && !errors.Is(err, rack.ErrUnknown):
		return content, err
	}
	described, known := rack.ParseDescription(disk.Description)
	content.known = known
	if !ours {
		content.Description = described
		content.Lineage = rack.Lineage(disk.VolumeID, described.Lineage)
	}
	return content, nil
}

// existingOr answers a create whose source cannot be used, with sourceErr if the volume does not exist. An earlier call
// may have made it while the source could be used: then a final error would leave its disk to nobody.
func (c *Service) existingOr(
	ctx context.Context,
	want volumeRequest,
	candidates []*rack.Client,
	sourceErr error,
) (rackController, rack.Disk, error) {
	if errors.Is(sourceErr, rack.ErrNotFound) {
		sourceErr = rpc.NotFound("volume_content_source: %w", sourceErr)
	}
	rc, disk, err := c.findExisting(ctx, want, candidates)
	if err == nil && rc.rack == nil {
		err = sourceErr
	}
	return rc, disk, err
}

// checkSourceLocation rejects a source on a rack that is not among the candidates, or in another project.
func (c rackController) checkSourceLocation(
	ctx context.Context,
	kind, name, id, projectID string,
	candidates []*rack.Client,
) error {
	if !slices.Contains(candidates, c.rack) {
		return rpc.ResourceExhausted(
			"accessibility_requirements do not allow rack %q, where %s %q (%s) is: a volume or snapshot is on the rack of its source",
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
			"%s %q (%s) is in another project than %q: this plugin uses only its own project",
			kind,
			name,
			id,
			c.rack.ProjectName(),
		)
	}
	return nil
}
