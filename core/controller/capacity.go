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
	// capacityTTL is how long the answer of a rack is reused. Kubernetes' external-provisioner calls GetCapacity for
	// each storage class and topology segment, without a pause.
	capacityTTL = 10 * time.Second
	// maxDistributedBytes is the largest distributed disk (docs/reference/rack.md §2).
	maxDistributedBytes = 1023 * gib
)

// GetCapacity returns how much the quota of the silo still allows, summed over all racks in the topology: CSI spec,
// GetCapacity. A rack does not show its physical capacity. For a topology without a rack of this plugin the capacity
// is 0. If a rack does not answer, it returns an error, and Kubernetes' external-provisioner keeps what it published
// before.
//
// Parameters are not checked, and there is no maximum size. An error or a maximum here makes Kubernetes' scheduler
// report "not enough storage", and CreateVolume, whose error has the real reason, is never called.
func (c *Service) GetCapacity(ctx context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	if err := validateGetCapacity(req); err != nil {
		return nil, err
	}
	var available, most int64
	for _, client := range c.racks.inTopology(req.GetAccessibleTopology()) {
		free, err := c.freeCapacity.freeBytes(ctx, client)
		if err != nil {
			return nil, err
		}
		available += min(free, math.MaxInt64-available)
		most = max(most, free)
	}
	response := &csi.GetCapacityResponse{AvailableCapacity: available}
	if most >= gib {
		response.MinimumVolumeSize = wrapperspb.Int64(gib)
	}
	return response, nil
}

// inTopology returns the racks in a topology, or all racks for an empty topology.
func (r *racks) inTopology(topology *csi.Topology) []*rack.Client {
	var matching []*rack.Client
	for _, client := range r.all {
		if segmentsMatch(topology.GetSegments(), rpc.Topology(client.Name()).GetSegments()) {
			matching = append(matching, client)
		}
	}
	return matching
}

// capacityCache keeps each rack's free capacity for [capacityTTL].
type capacityCache struct {
	mu      sync.Mutex
	entries map[*rack.Client]cachedCapacity
}

type cachedCapacity struct {
	freeBytes int64
	queried   time.Time
}

func newCapacityCache() *capacityCache {
	return &capacityCache{entries: map[*rack.Client]cachedCapacity{}}
}

// freeBytes is how many bytes the quota of a rack's silo still allows. It is 0 if the quota was lowered below the used
// bytes.
func (c *capacityCache) freeBytes(ctx context.Context, client *rack.Client) (int64, error) {
	c.mu.Lock()
	cached, ok := c.entries[client]
	c.mu.Unlock()
	if ok && time.Since(cached.queried) < capacityTTL {
		return cached.freeBytes, nil
	}
	queried := time.Now()
	quotaBytes, usedBytes, err := client.Storage(ctx)
	if err != nil {
		return 0, err
	}
	freeBytes := int64(min(quotaBytes-min(usedBytes, quotaBytes), math.MaxInt64))
	c.mu.Lock()
	defer c.mu.Unlock()
	c.entries[client] = cachedCapacity{freeBytes: freeBytes, queried: queried}
	return freeBytes, nil
}
