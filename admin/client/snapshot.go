// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"context"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Snapshot is a snapshot as the plugin describes it.
type Snapshot struct {
	ID string `json:"snapshotID"`
	// Name is the name with which the snapshot was created, in the cluster with the ID Cluster. Cluster is empty for the
	// controller's own cluster. Name is empty if it is not known.
	Name    string `json:"name,omitempty"`
	Cluster string `json:"cluster,omitempty"`
	// RackName is the snapshot's name on the rack.
	RackName       string `json:"rackName,omitempty"`
	SourceVolumeID string `json:"sourceVolumeID"`
	// SourceVolume is the name of the source volume; see [Client.SetSourceVolumes].
	SourceVolume string    `json:"sourceVolume,omitempty"`
	SizeBytes    int64     `json:"sizeBytes"`
	Created      time.Time `json:"created"`
	Ready        bool      `json:"ready"`
	Rack         string    `json:"rack,omitempty"`
}

func toSnapshot(s *csi.Snapshot) Snapshot {
	return Snapshot{
		ID:             s.GetSnapshotId(),
		SourceVolumeID: s.GetSourceVolumeId(),
		SizeBytes:      s.GetSizeBytes(),
		Created:        s.GetCreationTime().AsTime(),
		Ready:          s.GetReadyToUse(),
		Rack:           rackOf(s.GetAccessibleTopology()),
	}
}

// setDetails sets the fields that a controller's [rpc.Details] have.
func (s *Snapshot) setDetails(details map[string]rpc.Details) {
	d := details[s.ID]
	s.Name, s.Cluster, s.RackName = d.Name, d.Cluster, d.RackName
}

// UsableName returns the name by which the commands find the snapshot, or "" if only its ID does.
func (s Snapshot) UsableName() string { return usableName(s.Name, s.Cluster) }

// CreateSnapshot creates a snapshot of a volume, or finds the volume's snapshot of this name.
func (c *Client) CreateSnapshot(ctx context.Context, name, volume string) (Snapshot, error) {
	id, err := c.volumeID(ctx, volume)
	if err != nil {
		return Snapshot{}, err
	}
	created, err := c.controller.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: id})
	snapshot := toSnapshot(created.GetSnapshot())
	snapshot.Name = name
	return snapshot, err
}

// ListSnapshots lists all snapshots of the project, or those of one volume if it is named.
func (c *Client) ListSnapshots(ctx context.Context, volume string) ([]Snapshot, error) {
	req := &csi.ListSnapshotsRequest{MaxEntries: pageEntries}
	if volume != "" {
		id, err := c.volumeID(ctx, volume)
		if err != nil {
			return nil, err
		}
		req.SourceVolumeId = id
	}
	list := []Snapshot{}
	asking, option, decode := ask(ctx, wantDetails)
	for {
		page, err := c.controller.ListSnapshots(asking, req, option)
		if err != nil {
			return nil, err
		}
		answered, err := decode()
		if err != nil {
			return nil, err
		}
		for _, entry := range page.GetEntries() {
			snapshot := toSnapshot(entry.GetSnapshot())
			snapshot.setDetails(answered.details)
			list = append(list, snapshot)
		}
		if req.StartingToken = page.GetNextToken(); req.StartingToken == "" {
			return list, nil
		}
	}
}

// SetSourceVolumes sets the names of the volumes that snapshots were made of, with one list of volumes. A volume that
// was deleted has none.
func (c *Client) SetSourceVolumes(ctx context.Context, snapshots []Snapshot) error {
	if len(snapshots) == 0 {
		return nil
	}
	volumes, err := c.ListVolumes(ctx, false)
	if err != nil {
		return err
	}
	names := map[string]string{}
	for _, v := range volumes.Volumes {
		names[v.ID] = v.UsableName()
	}
	for i, s := range snapshots {
		snapshots[i].SourceVolume = names[s.SourceVolumeID]
	}
	return nil
}

// ShowSnapshot returns a snapshot.
func (c *Client) ShowSnapshot(ctx context.Context, text string) (Snapshot, error) {
	id, err := c.snapshotID(ctx, text)
	if err != nil {
		return Snapshot{}, err
	}
	asking, option, decode := ask(ctx, wantDetails)
	got, err := c.controller.GetSnapshot(asking, &csi.GetSnapshotRequest{SnapshotId: id}, option)
	if err != nil {
		return Snapshot{}, err
	}
	answered, err := decode()
	snapshot := toSnapshot(got.GetSnapshot())
	snapshot.setDetails(answered.details)
	return snapshot, err
}

// DeleteSnapshot deletes a snapshot. It succeeds if no snapshot has this ID or this name, as a repeated deletion does.
func (c *Client) DeleteSnapshot(ctx context.Context, text string) (Deleted, error) {
	found, err := c.findSnapshots(askUnfinished(ctx), text)
	if err != nil {
		return Deleted{}, err
	}
	if len(found.ids) == 0 {
		return Deleted{Missing: found.missing()}, nil
	}
	id, err := found.id()
	if err != nil {
		return Deleted{}, err
	}
	deleted := Deleted{ID: id}
	if found.cluster == "" {
		_, err := c.controller.GetSnapshot(ctx, &csi.GetSnapshotRequest{SnapshotId: id})
		if isNotFound(err) {
			deleted = Deleted{Missing: found.missing()}
		}
	}
	_, err = c.controller.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: id})
	return deleted, err
}
