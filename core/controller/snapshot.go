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

// CreateSnapshot makes a snapshot of a volume: CSI spec, CreateSnapshot. Like a disk's, its name follows from the one that the
// orchestrator gives. It shows what the volume would hold after a power cut; nothing in the guest is frozen
// (docs/reference/rack.md §6).
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
	on, source, err := c.disk(ctx, req.GetSourceVolumeId())
	if errors.Is(err, rack.ErrNotFound) {
		taken, err := c.snapshotOfGone(ctx, req, candidates, err)
		return taken, unclear(ctx, err)
	}
	if err != nil {
		return nil, unclear(ctx, err)
	}
	if err := on.checkSource(ctx, "disk", source.Name, source.ID, source.ProjectID, candidates); err != nil {
		return nil, unclear(ctx, err)
	}
	snapshot, err := on.takeSnapshot(ctx, req.GetName(), source)
	if err != nil {
		return nil, unclear(ctx, err)
	}
	c.racks.saw(snapshot.ID, on.rack)
	return &csi.CreateSnapshotResponse{Snapshot: on.snapshotMessage(snapshot)}, nil
}

// checkSnapshotParameters: there are none, but for those that Kubernetes' external-snapshotter adds.
func checkSnapshotParameters(parameters map[string]string) error {
	for key := range parameters {
		if !strings.HasPrefix(key, rpc.ParameterPrefixCO) {
			return rpc.InvalidArgument("parameters: %q is not known: a snapshot has no parameters", key)
		}
	}
	return nil
}

// takeSnapshot makes the snapshot, or finds that it is there already.
func (c onRack) takeSnapshot(ctx context.Context, name string, source rack.Disk) (rack.Snapshot, error) {
	description, _ := rack.ParseDescription(source.Description) // a disk that we did not make has no lineage
	want := rack.NewSnapshotDescription(c.cluster, name, rack.Lineage(source.ID, description.Lineage))
	source, err := c.readySource(ctx, source)
	var snapshot rack.Snapshot
	if err == nil {
		snapshot, err = c.createSnapshot(ctx, diskname.ForSnapshot(c.cluster, name), want.Encode(), source.ID)
	}
	if err == nil {
		return snapshot, nil
	}
	snapshot, found, lookErr := c.snapshotTaken(ctx, want, source.ID)
	switch {
	case lookErr != nil:
		return snapshot, fmt.Errorf("%w; %w", lookErr, oneLine(err))
	case found:
		return c.readySnapshot(ctx, snapshot)
	case rack.OutcomeUnknown(err) || errors.Is(err, rack.ErrAlreadyExists) || errors.Is(err, rack.ErrNotFound):
		return snapshot, unknownOutcome(ctx, fmt.Errorf("%w; no such snapshot is there yet: ask again", err))
	}
	return snapshot, err
}

// createSnapshot makes a snapshot, and waits while the rack is busy with another one of the same disk, as long as the caller
// can.
func (c onRack) createSnapshot(ctx context.Context, name, description, diskID string) (rack.Snapshot, error) {
	deadline := time.Now().Add(rpc.WaitBudget(ctx))
	for {
		snapshot, err := c.rack.CreateSnapshot(ctx, name, description, diskID)
		if !errors.Is(err, rack.ErrConflict) || time.Now().Add(conflictPoll).After(deadline) {
			return snapshot, err
		}
		select {
		case <-ctx.Done():
			return snapshot, err
		case <-time.After(conflictPoll):
		}
	}
}

// conflictPoll is how often a snapshot is tried while another one of the disk is being made.
const conflictPoll = 500 * time.Millisecond

// snapshotTaken looks for a snapshot by the name that follows from the orchestrator's. One that is there and is not this one is an
// error.
func (c onRack) snapshotTaken(
	ctx context.Context,
	want rack.Description,
	sourceID string,
) (snapshot rack.Snapshot, found bool, err error) {
	snapshot, err = c.rack.SnapshotByName(ctx, diskname.ForSnapshot(c.cluster, want.Name))
	if errors.Is(err, rack.ErrNotFound) {
		return snapshot, false, nil
	}
	if err != nil {
		return snapshot, false, unknownOutcome(ctx, err)
	}
	owner, ours := rack.ParseDescription(snapshot.Description)
	switch {
	case !ours || !owner.SameObject(want):
		err = rpc.AlreadyExists(
			"snapshot %q: %q (%s) exists in project %q and is not this one (its description is %.80q): rename or delete it",
			want.Name,
			snapshot.Name,
			snapshot.ID,
			c.rack.ProjectName(),
			snapshot.Description,
		)
	case snapshot.DiskID != sourceID:
		err = rpc.AlreadyExists(
			"snapshot %q (%s) exists, but of volume %s, not of %s",
			want.Name,
			snapshot.ID,
			snapshot.DiskID,
			sourceID,
		)
	}
	return snapshot, err == nil, err
}

// snapshotOfGone answers a call for a snapshot whose volume is gone: it may have been made before.
func (c *Service) snapshotOfGone(
	ctx context.Context,
	req *csi.CreateSnapshotRequest,
	candidates []*rack.Client,
	gone error,
) (*csi.CreateSnapshotResponse, error) {
	id, _ := diskname.ParseID(req.GetSourceVolumeId()) // a volume was looked for under it
	want := rack.NewSnapshotDescription(c.cluster, req.GetName(), nil)
	for _, client := range candidates {
		on := c.on(client)
		snapshot, found, err := on.snapshotTaken(ctx, want, id)
		if found {
			snapshot, err = on.readySnapshot(ctx, snapshot)
		}
		if err != nil {
			return nil, err
		}
		if found {
			return &csi.CreateSnapshotResponse{Snapshot: on.snapshotMessage(snapshot)}, nil
		}
	}
	return nil, gone
}

// readySnapshot waits until a snapshot is ready. One that is not will not be handed out.
func (c onRack) readySnapshot(ctx context.Context, snapshot rack.Snapshot) (rack.Snapshot, error) {
	snapshot, err := c.rack.WaitForSnapshot(ctx, snapshot, rpc.WaitBudget(ctx))
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return snapshot, rpc.Unavailable(
			"snapshot %q (%s) was being made and is gone: ask again: %w",
			snapshot.Name,
			snapshot.ID,
			err,
		)
	case err != nil:
		return snapshot, err
	case snapshot.State != rack.SnapshotReady:
		return snapshot, rpc.FailedPrecondition(
			"snapshot %q (%s) is in state %q and cannot be used: delete it on rack %q, or have the rack's operator look at it",
			snapshot.Name,
			snapshot.ID,
			snapshot.State,
			c.rack.Name(),
		)
	}
	return snapshot, nil
}

// snapshotMessage is a snapshot in the words of the specification. It is usable where its rack is.
func (c onRack) snapshotMessage(snapshot rack.Snapshot) *csi.Snapshot {
	return &csi.Snapshot{
		SnapshotId:         snapshot.ID,
		SourceVolumeId:     snapshot.DiskID,
		SizeBytes:          snapshot.SizeBytes,
		CreationTime:       timestamppb.New(snapshot.Created),
		ReadyToUse:         snapshot.State == rack.SnapshotReady,
		AccessibleTopology: c.racks.topology[c.rack],
	}
}

// snapshot returns a snapshot and the rack that has it. That there is none is said only after the racks confirmed that this
// token would see it.
func (c *Service) snapshot(ctx context.Context, snapshotID string) (onRack, rack.Snapshot, error) {
	id, ok := diskname.ParseID(snapshotID)
	if !ok {
		return onRack{}, rack.Snapshot{}, rpc.NotFound(
			"snapshot_id %q is no snapshot ID: the ID of a snapshot is its UUID on the rack",
			snapshotID,
		)
	}
	client, snapshot, err := find(ctx, c.racks, id, (*rack.Client).Snapshot)
	return c.on(client), snapshot, err
}

// DeleteSnapshot deletes a snapshot that this plugin made and nothing else; volumes made from it stay. CSI spec,
// DeleteSnapshot.
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
	on, snapshot, err := c.snapshot(ctx, id)
	if errors.Is(err, rack.ErrNotFound) {
		return done, nil
	}
	if err != nil {
		return nil, err
	}
	if err := on.checkSnapshotDeletable(ctx, snapshot); err != nil {
		return nil, err
	}
	err = on.rack.DeleteSnapshot(ctx, id)
	switch {
	case errors.Is(err, rack.ErrNotFound):
		return done, on.unconfirmed(ctx)
	case errors.Is(err, rack.ErrRefused):
		return nil, rpc.Aborted("%w: ask again", err) // it is still being made
	case err != nil:
		return nil, err
	}
	return done, nil
}

func (c onRack) checkSnapshotDeletable(ctx context.Context, snapshot rack.Snapshot) error {
	owner, ours := rack.ParseDescription(snapshot.Description)
	whose := ""
	switch {
	case !ours:
		whose = "was not made by this plugin"
	case owner.Cluster != c.cluster:
		whose = fmt.Sprintf("belongs to cluster %q, this is cluster %q", owner.Cluster, c.cluster)
	}
	if whose != "" {
		return rpc.FailedPrecondition(
			"snapshot %q (%s) %s and is not deleted: delete it yourself on rack %q, with \"oxide snapshot delete --snapshot %s\"",
			snapshot.Name,
			snapshot.ID,
			whose,
			c.rack.Name(),
			snapshot.ID,
		)
	}
	project, err := c.rack.ProjectID(ctx)
	if err != nil {
		return err
	}
	if snapshot.ProjectID != project {
		return rpc.FailedPrecondition(
			"snapshot %q (%s) is in another project than %q: this plugin deletes snapshots of its own project only",
			snapshot.Name,
			snapshot.ID,
			c.rack.ProjectName(),
		)
	}
	return nil
}

// GetSnapshot tells what there is to know of a snapshot, whoever made it: CSI spec, GetSnapshot.
func (c *Service) GetSnapshot(ctx context.Context, req *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	if err := validateGetSnapshot(req); err != nil {
		return nil, err
	}
	on, snapshot, err := c.snapshot(ctx, req.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	return &csi.GetSnapshotResponse{Snapshot: on.snapshotMessage(snapshot)}, nil
}
