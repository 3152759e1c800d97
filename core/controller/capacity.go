// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"math"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

const (
	// capacityAge is how old a rack's word on its storage may be. Kubernetes' provisioner asks for each storage class and
	// topology segment, one right after the other.
	capacityAge = 10 * time.Second
	// maxDistributedBytes is the largest distributed disk (docs/reference/rack.md §2).
	maxDistributedBytes = 1023 * gib
)

// GetCapacity tells how much the silo's quota still allows, over all racks in the topology: CSI spec, GetCapacity. The space on
// a rack is nobody's to see. For a rack that is not served here it is 0. The largest volume is the largest that one rack could
// hold.
func (c *Service) GetCapacity(ctx context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	if err := validateGetCapacity(req); err != nil {
		return nil, err
	}
	params, err := parseParameters(req.GetParameters(), req.GetVolumeCapabilities())
	if err != nil {
		return nil, err
	}
	var available, largest int64
	for _, client := range c.racks.within(req.GetAccessibleTopology()) {
		free, err := c.capacity.of(ctx, client)
		if err != nil {
			return nil, err
		}
		available += min(free, math.MaxInt64-available)
		largest = max(largest, largestDisk(free, params))
	}
	response := &csi.GetCapacityResponse{AvailableCapacity: available, MaximumVolumeSize: wrapperspb.Int64(largest)}
	if largest > 0 {
		response.MinimumVolumeSize = wrapperspb.Int64(gib)
	}
	return response, nil
}

// within returns the racks in a topology; all where none is asked for.
func (r *racks) within(topology *csi.Topology) []*rack.Client {
	var in []*rack.Client
	for _, client := range r.all {
		if within(topology.GetSegments(), rpc.Topology(client.Name()).GetSegments()) {
			in = append(in, client)
		}
	}
	return in
}

func largestDisk(freeBytes int64, params parameters) int64 {
	whole := freeBytes / gib * gib
	if params.diskType == diskTypeLocal {
		return whole
	}
	return min(whole, maxDistributedBytes)
}

// capacities remembers for a moment what racks have said.
type capacities struct {
	mu    sync.Mutex
	known map[*rack.Client]capacity
}

type capacity struct {
	freeBytes int64
	asked     time.Time
}

func newCapacities() *capacities { return &capacities{known: map[*rack.Client]capacity{}} }

// of is what the quota of a rack's silo still allows in bytes, never less than 0: a quota can be lowered below what is taken.
func (c *capacities) of(ctx context.Context, client *rack.Client) (int64, error) {
	c.mu.Lock()
	known, ok := c.known[client]
	c.mu.Unlock()
	if ok && time.Since(known.asked) < capacityAge {
		return known.freeBytes, nil
	}
	asked := time.Now()
	quotaBytes, usedBytes, err := client.Storage(ctx)
	if err != nil {
		return 0, err
	}
	freeBytes := int64(min(quotaBytes-min(usedBytes, quotaBytes), math.MaxInt64))
	c.mu.Lock()
	defer c.mu.Unlock()
	c.known[client] = capacity{freeBytes: freeBytes, asked: asked}
	return freeBytes, nil
}
