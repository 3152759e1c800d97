// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"maps"

	"github.com/container-storage-interface/spec/lib/go/csi"
	grpcmetadata "google.golang.org/grpc/metadata"

	"github.com/oxidecomputer/oxide-csi-plugin/core/detach"
	"github.com/oxidecomputer/oxide-csi-plugin/core/expand"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// ControllerModifyVolume adopts a volume of another cluster, and with it the volume's snapshots: CSI spec,
// ControllerModifyVolume. The owner is all that can change about a volume. Only the command oxide-csi volume adopt
// calls it. MODIFY_VOLUME is not advertised: no orchestrator may take a volume from a cluster, because that is safe
// only if the cluster is gone. The call is OK and changes nothing if this cluster owns the volume already.
func (c *Service) ControllerModifyVolume(
	ctx context.Context,
	req *csi.ControllerModifyVolumeRequest,
) (*csi.ControllerModifyVolumeResponse, error) {
	if err := validateControllerModifyVolume(req); err != nil {
		return nil, err
	}
	from := req.GetMutableParameters()[rpc.KeyAdoptFromCluster]
	rc, volumeID, described, err := c.findDescription(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if err := rc.adopt(ctx, volumeID, described.Cluster, from); err != nil {
		return nil, err
	}
	return &csi.ControllerModifyVolumeResponse{}, nil
}

// findDescription returns the description that names the owner of a volume: that of its disk or, if the disk was
// deleted, of one of its snapshots. It also returns the volume's ID as the racks write it.
func (c *Service) findDescription(
	ctx context.Context,
	requestedID string,
) (rc rackController, volumeID string, described rack.Description, err error) {
	rc, disk, err := c.neededDisk(ctx, requestedID) // the list for an adoption has the volume, so it was not deleted
	switch {
	case errors.Is(err, rack.ErrNotFound):
		volumeID, _ = diskname.ParseID(requestedID) // neededDisk has parsed it before
		rc, described, err = c.findSnapshotOf(ctx, volumeID, err)
		return rc, volumeID, described, err
	case err != nil:
		return rc, "", described, err
	}
	if err := rc.checkProject(ctx, disk); err != nil {
		return rc, "", described, err
	}
	described, ours := rack.ParseDescription(disk.Description)
	if !ours {
		return rc, "", described, rpc.FailedPrecondition(
			"disk %q (%s) belongs to no cluster, because this plugin did not make it: use it without an adoption",
			disk.Name,
			disk.ID,
		)
	}
	return rc, disk.VolumeID, described, nil
}

// findSnapshotOf returns the description of a snapshot of a deleted volume, or the error notFound.
func (c *Service) findSnapshotOf(
	ctx context.Context,
	volumeID string,
	notFound error,
) (rackController, rack.Description, error) {
	for _, client := range c.racks.all {
		for listed, err := range client.Snapshots(ctx, rack.Cursor{}, 0) {
			if err != nil {
				return rackController{}, rack.Description{}, err
			}
			described, ours := rack.ParseDescription(listed.Value.Description)
			if ours && listed.Value.VolumeID == volumeID && !listed.Value.Internal() && described.Cluster != c.cluster {
				return c.forRack(client), described, nil
			}
		}
	}
	return rackController{}, rack.Description{}, notFound
}

// adopt records that this cluster owns a volume. The parameter described is the cluster that the description of the
// volume's disk names. If two clusters adopt a volume at the same time, the record names one of them, and each use of
// the volume reads it.
func (c rackController) adopt(ctx context.Context, volumeID, described, from string) error {
	old, adopted, err := c.adoption(ctx, volumeID)
	if err != nil {
		return err
	}
	switch owner := cmp.Or(old.Cluster, described); owner {
	case c.cluster:
		return nil
	case from:
	default:
		return rpc.FailedPrecondition(
			"volume %s belongs to cluster %q and not to %q: if that is gone, adopt it from there", volumeID, owner, from)
	}
	// What the previous owner recorded of a detach would stand in the way of one by this cluster.
	if err := detach.EraseOwner(ctx, c.rack, from, volumeID); err != nil {
		return err
	}
	wanted := record.Adoption{Cluster: c.cluster, From: from, VolumeID: volumeID, Stored: old.Stored}
	found := true
	switch {
	case described == c.cluster:
		err = c.rack.DeleteRecord(ctx, old.Stored.ID) // without the record the description counts again
	case adopted:
		_, found, err = record.Adoptions.Replace(ctx, c.rack, wanted)
	default:
		_, err = record.Adoptions.Create(ctx, c.rack, wanted)
	}
	if errors.Is(err, rack.ErrAlreadyExists) {
		_, _, err = record.Adoptions.Get(ctx, c.rack, "", volumeID)
		found = false
	}
	switch {
	case err != nil:
		return err
	case !found:
		return rpc.Aborted("volume %s is being adopted by another cluster or process: retry", volumeID)
	}
	c.log.Info("adopted a volume", "volume_id", volumeID, "from_cluster", from, "rack", c.rack.Name())
	return nil
}

// isAdoptable reports whether the cluster of [rpc.MetadataOfCluster] owns a volume or a snapshot of it, or owned it
// until this cluster adopted it. So the list for an adoption is the same before and after it.
type isAdoptable func(description, volumeID string) bool

// adoptable returns the cluster of [rpc.MetadataOfCluster] and what is adoptable from it. For the request of an
// orchestrator both are empty. Otherwise it reads the adoptions of all racks, once for each page of a list and not once
// for each volume.
func (c *Service) adoptable(ctx context.Context) (of string, adoptable isAdoptable, err error) {
	sent, _ := grpcmetadata.FromIncomingContext(ctx)
	clusters := sent.Get(rpc.MetadataOfCluster)
	if len(clusters) == 0 {
		return "", nil, nil
	}
	owners, from := map[string]string{}, map[string]string{} // by volume ID
	for _, client := range c.racks.all {
		records, err := client.Records(ctx)
		if err != nil {
			return "", nil, err
		}
		maps.Copy(owners, Adoptions(records))
		adoptions, _ := record.Adoptions.In(records, "")
		for _, a := range adoptions {
			from[a.VolumeID] = a.From
		}
	}
	return clusters[0], func(description, volumeID string) bool {
		described, _ := rack.ParseDescription(description)
		owner := owners[volumeID]
		return cmp.Or(owner, described.Cluster) == clusters[0] || owner == c.cluster && from[volumeID] == clusters[0]
	}, nil
}

// listAdoptable is ListVolumes for an adoption from a cluster. It leaves out a disk that the rack failed to delete: the
// volume is deleted, or has another disk. It lists the volumes that the cluster's expansions have left without a disk.
func (c *Service) listAdoptable(
	ctx context.Context,
	req *csi.ListVolumesRequest,
	cluster string,
	adoptable isAdoptable,
) (*csi.ListVolumesResponse, error) {
	details := newDetails(ctx)
	entry := func(rc rackController, disk rack.Disk) *csi.ListVolumesResponse_Entry {
		if disk.HalfDeleted() || !adoptable(disk.Description, disk.VolumeID) {
			return nil
		}
		details.addVolume(c, disk)
		return &csi.ListVolumesResponse_Entry{
			Volume: rc.volume(disk, parameters{}),
			Status: &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: publishedNodes(disk, nil)},
		}
	}
	disks := func(
		client *rack.Client, ctx context.Context, from rack.Cursor, wanted int,
	) iter.Seq2[rack.ListItem[rack.Disk], error] {
		return expand.New(client, cluster, c.log).Disks(ctx, from, wanted)
	}
	entries, next, err := listPage(ctx, c, disks, diskProject, req, entry)
	if err == nil {
		err = details.send(ctx)
	}
	if err != nil {
		return nil, err
	}
	return &csi.ListVolumesResponse{Entries: entries, NextToken: next}, nil
}
