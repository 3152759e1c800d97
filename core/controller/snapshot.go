// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// CreateSnapshot makes a snapshot of a volume: CSI spec, CreateSnapshot. The snapshot's name on the rack is derived
// from the requested name. The snapshot is crash-consistent: it holds what the volume would hold after a power cut,
// because the guest is not frozen (docs/reference/rack.md §6).
func (c *Service) CreateSnapshot(
	ctx context.Context,
	req *csi.CreateSnapshotRequest,
) (*csi.CreateSnapshotResponse, error) {
	if err := validateCreateSnapshot(req); err != nil {
		return nil, err
	}
	if err := checkSnapshotParameters(req.GetParameters()); err != nil {
		return nil, err
	}
	candidates, err := c.racks.accessible(req.GetAccessibilityRequirements())
	if err != nil {
		return nil, err
	}
	rc, source, err := c.neededDisk(ctx, req.GetSourceVolumeId())
	if err == nil {
		err = rc.checkSource(ctx, source, candidates)
	}
	if err != nil {
		existing, err := c.existingSnapshotOr(ctx, req, candidates, err)
		return existing, retryableCreate(ctx, err)
	}
	snapshot, err := rc.takeSnapshot(ctx, req.GetName(), source)
	if err != nil {
		return nil, retryableCreate(ctx, err)
	}
	c.racks.cacheLocation(snapshot.ID, rc.rack)
	return &csi.CreateSnapshotResponse{Snapshot: rc.snapshotMessage(snapshot)}, nil
}

// checkSnapshotParameters rejects all parameters except those that Kubernetes' external-snapshotter adds.
func checkSnapshotParameters(parameters map[string]string) error {
	for key := range parameters {
		if !strings.HasPrefix(key, rpc.ParameterPrefixCO) {
			return rpc.InvalidArgument("parameters: %q is not known: remove it, a snapshot has no parameters", key)
		}
	}
	return nil
}

// takeSnapshot makes the snapshot, or returns it if it exists already.
func (c rackController) takeSnapshot(ctx context.Context, name string, disk rack.Disk) (rack.Snapshot, error) {
	want := rack.NewSnapshotDescription(c.cluster, name, nil)
	source, err := c.waitForSource(ctx, disk) // after the wait the volume may have another disk
	var snapshot rack.Snapshot
	if err == nil {
		described, _ := rack.ParseDescription(source.Description) // a disk that this plugin did not make has no lineage
		want.Lineage = rack.Lineage(source.VolumeID, described.Lineage)
		want.LUKS, want.Fixed, want.Volume = described.LUKS, described.Fixed, rack.GrownVolume(source)
		snapshot, err = c.createSnapshot(ctx, diskname.ForSnapshot(c.cluster, name), want.Encode(), source.ID)
	}
	if err == nil {
		return snapshot, nil
	}
	snapshot, found, lookErr := c.findSnapshot(ctx, want, disk.VolumeID)
	switch {
	case lookErr != nil:
		return snapshot, fmt.Errorf("%w; %w", lookErr, singleLine(err))
	case found:
		return c.waitForOwnSnapshot(ctx, snapshot)
	case rack.OutcomeUnknown(err) || errors.Is(err, rack.ErrAlreadyExists) || errors.Is(err, rack.ErrNotFound):
		return snapshot, retryable(ctx, fmt.Errorf("%w; the snapshot does not exist yet: retry", err))
	}
	return snapshot, err
}

// createSnapshot makes a snapshot. While the rack is making another snapshot of the same disk it retries, as long as
// the caller's deadline allows.
func (c rackController) createSnapshot(
	ctx context.Context,
	name, description string,
	diskID rack.DiskID,
) (rack.Snapshot, error) {
	deadline := time.Now().Add(rpc.WaitBudget(ctx))
	for {
		snapshot, err := c.rack.CreateSnapshot(ctx, name, description, diskID)
		if !errors.Is(err, rack.ErrConflict) || time.Now().Add(snapshotRetryInterval).After(deadline) {
			return snapshot, err
		}
		select {
		case <-ctx.Done():
			return snapshot, err
		case <-time.After(snapshotRetryInterval):
		}
	}
}

// snapshotRetryInterval is the interval between attempts while the rack is making another snapshot of the disk.
const snapshotRetryInterval = 500 * time.Millisecond

// findSnapshot looks for a snapshot by the name that is derived from the requested name. It rejects a snapshot of that
// name that has another description or another source.
func (c rackController) findSnapshot(
	ctx context.Context,
	want rack.Description,
	sourceID string,
) (snapshot rack.Snapshot, found bool, err error) {
	snapshot, err = c.rack.SnapshotByName(ctx, diskname.ForSnapshot(c.cluster, want.Name))
	if errors.Is(err, rack.ErrNotFound) {
		return snapshot, false, nil
	}
	if err != nil {
		return snapshot, false, retryable(ctx, err)
	}
	owner, ours := rack.ParseDescription(snapshot.Description)
	switch {
	case !ours || !owner.SameObject(want):
		err = rpc.AlreadyExists(
			"snapshot %q: %q (%s) exists in project %q with another description, %.80q: use another name",
			want.Name,
			snapshot.Name,
			snapshot.ID,
			c.rack.ProjectName(),
			snapshot.Description,
		)
	case snapshot.VolumeID != sourceID:
		err = rpc.AlreadyExists(
			"snapshot %q (%s) exists already, of volume %s and not of %s: use another name",
			want.Name,
			snapshot.ID,
			snapshot.VolumeID,
			sourceID,
		)
	}
	return snapshot, err == nil, err
}

// existingSnapshotOr answers a CreateSnapshot whose source volume cannot be used. An earlier call may have made the
// snapshot. Without one it returns sourceErr.
func (c *Service) existingSnapshotOr(
	ctx context.Context,
	req *csi.CreateSnapshotRequest,
	candidates []*rack.Client,
	sourceErr error,
) (*csi.CreateSnapshotResponse, error) {
	id, isID := diskname.ParseID(req.GetSourceVolumeId())
	if !isID {
		return nil, sourceErr
	}
	want := rack.NewSnapshotDescription(c.cluster, req.GetName(), nil)
	for _, client := range candidates {
		rc := c.forRack(client)
		snapshot, found, err := rc.findSnapshot(ctx, want, id)
		if found {
			snapshot, err = rc.waitForOwnSnapshot(ctx, snapshot)
		}
		if err != nil {
			return nil, err
		}
		if found {
			return &csi.CreateSnapshotResponse{Snapshot: rc.snapshotMessage(snapshot)}, nil
		}
	}
	return nil, sourceErr
}

// waitForReadySnapshot waits until a snapshot is ready, and rejects a snapshot in any other stable state. failed gives
// that error its code.
func (c rackController) waitForReadySnapshot(
	ctx context.Context,
	snapshot rack.Snapshot,
	failed func(format string, args ...any) error,
) (rack.Snapshot, error) {
	snapshot, err := c.rack.WaitForSnapshot(ctx, snapshot, rpc.WaitBudget(ctx))
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return snapshot, rpc.Unavailable(
			"snapshot %q (%s) was deleted meanwhile: %w: retry",
			snapshot.Name,
			snapshot.ID,
			err,
		)
	case err != nil:
		return snapshot, err
	case snapshot.State != rack.SnapshotReady:
		return snapshot, failed(
			"snapshot %q (%s) is in state %q and cannot be used: ask the operator of rack %q",
			snapshot.Name,
			snapshot.ID,
			snapshot.State,
			c.rack.Name(),
		)
	}
	return snapshot, nil
}

// waitForOwnSnapshot is waitForReadySnapshot for the snapshot that a call makes. After a final error no orchestrator
// would delete it.
func (c rackController) waitForOwnSnapshot(ctx context.Context, snapshot rack.Snapshot) (rack.Snapshot, error) {
	return c.waitForReadySnapshot(ctx, snapshot, rpc.Unavailable)
}

// snapshotMessage describes a snapshot as a CSI snapshot. It is accessible from its rack only.
func (c rackController) snapshotMessage(snapshot rack.Snapshot) *csi.Snapshot {
	return &csi.Snapshot{
		SnapshotId:         snapshot.ID,
		SourceVolumeId:     snapshot.VolumeID,
		SizeBytes:          snapshot.SizeBytes,
		CreationTime:       timestamppb.New(snapshot.Created),
		ReadyToUse:         snapshot.State == rack.SnapshotReady,
		AccessibleTopology: c.racks.topology[c.rack],
	}
}

// DeleteSnapshot deletes a snapshot: CSI spec, DeleteSnapshot. It deletes only snapshots that this plugin made for its
// cluster. Volumes made from the snapshot stay.
func (c *Service) DeleteSnapshot(
	ctx context.Context,
	req *csi.DeleteSnapshotRequest,
) (*csi.DeleteSnapshotResponse, error) {
	if err := validateDeleteSnapshot(req); err != nil {
		return nil, err
	}
	done := &csi.DeleteSnapshotResponse{}
	id, ok := diskname.ParseID(req.GetSnapshotId())
	if !ok {
		return done, nil // no snapshot has such an ID
	}
	rc, snapshot, err := c.snapshot(ctx, id)
	if errors.Is(err, rack.ErrNotFound) {
		return done, nil
	}
	if err != nil {
		return nil, err
	}
	if err := rc.checkSnapshotDeletable(ctx, snapshot); err != nil {
		return nil, err
	}
	err = rc.rack.DeleteSnapshot(ctx, id)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return done, rc.confirmNotFound(ctx)
	case errors.Is(err, rack.ErrRefused):
		return nil, rpc.Aborted("%w: retry", err) // the rack is still making it
	case err != nil:
		return nil, err
	}
	return done, nil
}

func (c rackController) checkSnapshotDeletable(ctx context.Context, snapshot rack.Snapshot) error {
	reason, err := c.notOwnedReason(ctx, snapshot.Description, snapshot.VolumeID)
	if err != nil {
		return err
	}
	if reason != "" {
		return rpc.FailedPrecondition(
			"snapshot %s %s: delete it yourself on rack %q",
			snapshot.ID,
			reason,
			c.rack.Name(),
		)
	}
	if snapshot.Expansion() {
		return rpc.FailedPrecondition(
			"snapshot %q (%s) belongs to the expansion of volume %s and is not deleted: it may be the only copy of the data",
			snapshot.Name, snapshot.ID, snapshot.VolumeID)
	}
	project, err := c.rack.ProjectID(ctx)
	if err != nil {
		return err
	}
	if snapshot.ProjectID != project {
		return rpc.FailedPrecondition(
			"snapshot %q (%s) is in another project than %q: this plugin deletes only snapshots of its own project",
			snapshot.Name,
			snapshot.ID,
			c.rack.ProjectName(),
		)
	}
	return nil
}

// GetSnapshot returns a snapshot, also one that this plugin did not make: CSI spec, GetSnapshot.
func (c *Service) GetSnapshot(ctx context.Context, req *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	if err := validateGetSnapshot(req); err != nil {
		return nil, err
	}
	rc, snapshot, err := c.snapshot(ctx, req.GetSnapshotId())
	if err != nil && !errors.Is(err, rack.ErrUnknown) {
		return nil, err
	}
	details := newDetails(ctx)
	details.addSnapshot(c, snapshot)
	if err := details.send(ctx); err != nil {
		return nil, err
	}
	return &csi.GetSnapshotResponse{Snapshot: rc.snapshotMessage(snapshot)}, nil
}
