// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"encoding/json"

	"google.golang.org/grpc"
	grpcmetadata "google.golang.org/grpc/metadata"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// asked reports whether a request has this key in its metadata, with any value.
func asked(ctx context.Context, key string) bool {
	sent, _ := grpcmetadata.FromIncomingContext(ctx)
	return len(sent.Get(key)) > 0
}

// setHeader adds a value as JSON to the header of the answer.
func setHeader(ctx context.Context, key string, value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return grpc.SetHeader(ctx, grpcmetadata.Pairs(key, string(text)))
}

// detailsOf collects what [rpc.MetadataDetails] holds, by the ID of a volume or snapshot. It is nil if the caller did
// not ask; then nothing is collected. All of it is in the list that the rack has sent already.
//
// It is not in the volume context, because orchestrators keep that, and it must be the same from every RPC.
type detailsOf map[string]rpc.Details

func newDetails(ctx context.Context) detailsOf {
	if !asked(ctx, rpc.MetadataAskDetails) {
		return nil
	}
	return detailsOf{}
}

func (d detailsOf) addVolume(c *Service, disk rack.Disk) {
	if d == nil {
		return
	}
	details := c.describe(diskname.Volume, disk.Description)
	details.Created, details.Holder = disk.VolumeCreated, disk.InstanceID
	d[disk.VolumeID] = details
}

func (d detailsOf) addSnapshot(c *Service, snapshot rack.Snapshot) {
	if d == nil {
		return
	}
	details := c.describe(diskname.Snapshot, snapshot.Description)
	details.Created, details.RackName = snapshot.Created, snapshot.Name
	d[snapshot.ID] = details
}

func (d detailsOf) send(ctx context.Context) error {
	if d == nil {
		return nil
	}
	return setHeader(ctx, rpc.MetadataDetails, d)
}

// describe returns the details that a description has.
func (c *Service) describe(kind diskname.Kind, text string) (details rpc.Details) {
	details.Name, details.Claim = rack.FullNames(kind, text)
	if described, ours := rack.ParseDescription(text); ours && described.Cluster != c.cluster {
		details.Cluster = described.Cluster
	}
	return details
}

// sendNodeNames adds the names of all instances to the header of the answer if the caller asked for them. It lists the
// instances of each rack once.
func (c *Service) sendNodeNames(ctx context.Context) error {
	if !asked(ctx, rpc.MetadataAskNodeNames) {
		return nil
	}
	names := map[string]string{}
	for _, client := range c.racks.all {
		instances, err := client.Instances(ctx)
		if err != nil {
			return retryableIfUnknown(ctx, err)
		}
		for _, instance := range instances {
			names[instance.ID] = instance.Name
		}
	}
	return setHeader(ctx, rpc.MetadataNodeNames, names)
}
