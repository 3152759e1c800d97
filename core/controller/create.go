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

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
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
				"volume_content_source: volume_id %q is not a UUID: give the ID that CreateVolume answered",
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
		disk, err := rc.createUnlessReplaced(ctx, want, size, "")
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
	name := diskname.ForVolume(c.cluster, want.name)
	disk, err := c.rack.DiskByName(ctx, name)
	if errors.Is(err, rack.ErrNotFound) {
		return c.expander.ExpandingDisk(ctx, name)
	}
	return disk, err
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
			c.log.Warn("a rack that the request does not allow was not asked for the volume: it does not answer",
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
		fmt.Errorf("volume %q may exist on rack %q, which does not answer: %w", r.name, client.Name(), err),
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

// createUnlessReplaced is [rackController.createDisk] for a caller that has not looked for the volume.
// While the volume's disk is being replaced, its name is free, and a new disk of that name would stop the expansion.
func (c rackController) createUnlessReplaced(
	ctx context.Context,
	want volumeRequest,
	sizeBytes int64,
	snapshotID string,
) (rack.Disk, error) {
	disk, err := c.expander.ExpandingDisk(ctx, diskname.ForVolume(c.cluster, want.name))
	switch {
	case err == nil:
		return c.checkExisting(ctx, want, disk)
	case errors.Is(err, rack.ErrNotFound):
		return c.createDisk(ctx, want, sizeBytes, snapshotID)
	case errors.Is(err, rack.ErrReplaced):
		return rack.Disk{}, err
	}
	return rack.Disk{}, retryable(ctx, err)
}

// createDisk makes the disk on this rack, from the snapshot unless snapshotID is empty. A disk that exists already and
// matches the request is a success.
func (c rackController) createDisk(
	ctx context.Context,
	want volumeRequest,
	sizeBytes int64,
	snapshotID string,
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
	if err == nil {
		return disk, nil
	}
	return c.resolveCreate(ctx, want, err)
}

// resolveCreate looks for the disk after a failed create. It returns the disk if it exists and matches the request, and
// otherwise the error to answer.
func (c rackController) resolveCreate(ctx context.Context, want volumeRequest, createErr error) (rack.Disk, error) {
	// These refusals say that this call made nothing. An earlier one may have made the disk and lost its answer.
	refused := errors.Is(createErr, rack.ErrCapacity) || errors.Is(createErr, rack.ErrRefused) ||
		errors.Is(createErr, rack.ErrSize)
	exists := errors.Is(createErr, rack.ErrAlreadyExists)
	if !refused && !exists && !rack.OutcomeUnknown(createErr) && !errors.Is(createErr, rack.ErrNotFound) {
		return rack.Disk{}, createErr // not a final answer: an access that the token lost, or a conflict
	}
	disk, err := c.rack.DiskByName(ctx, diskname.ForVolume(c.cluster, want.name))
	switch {
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

// checkExisting rejects an existing disk with the volume's name if it does not match the request, is faulted, or has
// another ID in the orchestrator. It waits while the disk changes state, and returns the disk in its stable state.
func (c rackController) checkExisting(ctx context.Context, want volumeRequest, disk rack.Disk) (rack.Disk, error) {
	if err := c.checkMatches(disk, want); err != nil {
		return rack.Disk{}, err
	}
	stable, err := c.waitForDisk(ctx, disk)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return rack.Disk{}, rpc.Unavailable("volume %q: its disk existed and was deleted: retry: %w", want.name, err)
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
	disk, err := rc.createUnlessReplaced(ctx, want, size, snapshot.ID)
	if errors.Is(err, rack.ErrNotFound) {
		err = rpc.Unavailable("volume %q: its snapshot %s was deleted meanwhile: retry: %w", want.name, snapshot.ID, err)
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
