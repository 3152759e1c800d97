// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"context"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// Snapshot is a snapshot as the plugin describes it.
type Snapshot struct {
	ID             string    `json:"snapshotID"`
	SourceVolumeID string    `json:"sourceVolumeID"`
	SizeBytes      int64     `json:"sizeBytes"`
	Created        time.Time `json:"created"`
	Ready          bool      `json:"ready"`
	Rack           string    `json:"rack,omitempty"`
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

// CreateSnapshot creates a snapshot of a volume, or finds the volume's snapshot of this name.
func (c *Client) CreateSnapshot(ctx context.Context, name, volume string) (Snapshot, error) {
	id, err := c.volumeID(ctx, volume)
	if err != nil {
		return Snapshot{}, err
	}
	if c.opts.DryRun {
		if _, err := c.getVolume(ctx, id); err != nil {
			return Snapshot{}, err
		}
	}
	created, err := c.controller.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: id})
	return toSnapshot(created.GetSnapshot()), err
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
	for {
		page, err := c.controller.ListSnapshots(ctx, req)
		if err != nil {
			return nil, err
		}
		for _, entry := range page.GetEntries() {
			list = append(list, toSnapshot(entry.GetSnapshot()))
		}
		if req.StartingToken = page.GetNextToken(); req.StartingToken == "" {
			return list, nil
		}
	}
}

// ShowSnapshot returns a snapshot.
func (c *Client) ShowSnapshot(ctx context.Context, text string) (Snapshot, error) {
	id, err := parseID("snapshot", text)
	if err != nil {
		return Snapshot{}, err
	}
	got, err := c.controller.GetSnapshot(ctx, &csi.GetSnapshotRequest{SnapshotId: id})
	return toSnapshot(got.GetSnapshot()), err
}

// DeleteSnapshot deletes a snapshot. It succeeds if the snapshot does not exist.
func (c *Client) DeleteSnapshot(ctx context.Context, text string) (id string, err error) {
	if id, err = parseID("snapshot", text); err == nil {
		_, err = c.controller.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: id})
	}
	return id, err
}
