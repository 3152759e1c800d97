// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"cmp"
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// AdoptableVolume is a volume of another cluster, or one that was adopted from it.
type AdoptableVolume struct {
	Volume
	// Context is the volume context, with which the volume is registered.
	Context map[string]string `json:"volumeContext,omitempty"`
	// Deleted says that only snapshots of the volume exist.
	Deleted bool `json:"deleted,omitempty"`
	// SnapshotIDs are the snapshots that the other cluster made of the volume.
	SnapshotIDs []string `json:"snapshotIDs,omitempty"`
}

// Owns reports whether a cluster ID is the controller's own.
func (c *Client) Owns(ctx context.Context, cluster string) (bool, error) {
	own, err := c.cluster(ctx)
	return own == cluster, err
}

// Adoptable lists the volumes of a cluster that is gone, sorted by name, the deleted ones last. The list is the same
// after their adoption.
func (c *Client) Adoptable(ctx context.Context, cluster string) ([]AdoptableVolume, error) {
	ctx = metadata.AppendToOutgoingContext(ctx, rpc.MetadataOfCluster, cluster)
	asking, option, decode := ask(ctx, wantDetails)
	volumes := map[string]*AdoptableVolume{}
	for page, err := range c.volumePages(asking, option) {
		if err != nil {
			return nil, err
		}
		answered, err := decode()
		if err != nil {
			return nil, err
		}
		for _, entry := range page.GetEntries() {
			volume := toVolume(entry.GetVolume(), entry.GetStatus().GetPublishedNodeIds())
			volume.setDetails(answered.details)
			volumes[volume.ID] = &AdoptableVolume{Volume: volume, Context: entry.GetVolume().GetVolumeContext()}
		}
	}
	snapshots, err := c.ListSnapshots(ctx, "")
	if err != nil {
		return nil, err
	}
	for _, snapshot := range snapshots {
		id := snapshot.SourceVolumeID
		if volumes[id] == nil {
			volumes[id] = &AdoptableVolume{Volume: Volume{ID: id, Rack: snapshot.Rack}, Deleted: true}
		}
		volumes[id].SnapshotIDs = append(volumes[id].SnapshotIDs, snapshot.ID)
	}
	if len(volumes) == 0 {
		return nil, failed(
			codes.NotFound,
			"cluster %q has no volume that this controller sees: check the ID; the descriptions of the cluster's disks contain it",
			cluster,
		)
	}
	list := make([]AdoptableVolume, 0, len(volumes))
	var names map[string]string
	for id, volume := range volumes {
		if volume.NodeID != "" && names == nil {
			names = c.nodeNames(ctx, id)
		}
		volume.NodeName = names[volume.NodeID]
		list = append(list, *volume)
	}
	slices.SortFunc(list, func(a, b AdoptableVolume) int {
		if a.Deleted != b.Deleted {
			if b.Deleted {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID))
	})
	return list, nil
}

// Adopt adopts volumes from a cluster that is gone, one after the other. It ends at the first error.
func (c *Client) Adopt(ctx context.Context, cluster string, volumes []AdoptableVolume) error {
	for _, volume := range volumes {
		if _, err := c.controller.ControllerModifyVolume(ctx, &csi.ControllerModifyVolumeRequest{
			VolumeId:          volume.ID,
			MutableParameters: map[string]string{rpc.KeyAdoptFromCluster: cluster},
		}); err != nil {
			return err
		}
	}
	return nil
}
