// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// abandon makes the rack answer the next call of an operation late. It starts the RPC that makes the call, and cancels
// the RPC when the call has reached the rack.
func (r *rig) abandon(t *testing.T, operation string, rpc func(context.Context) error) {
	t.Helper()
	// The delay is real time: the rack is behind HTTP. On a busy machine it may be over before the RPC is cancelled. Then
	// the RPC succeeds, and this run shows less.
	fault, err := r.Sim.Inject(
		t.Context(),
		simtest.Fault{Operation: operation, Kind: simtest.FaultDelay, DelayMillis: 400},
	)
	r.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	answered := make(chan error, 1)
	go func() { answered <- rpc(ctx) }()
	await.Eventually(t, "the call reaches the rack", func() bool {
		faults, err := r.Sim.Faults(t.Context())
		r.Must(t, err)
		return slices.ContainsFunc(faults, func(f simtest.Fault) bool { return f.ID == fault.ID && f.Hits == 1 })
	})
	cancel()
	if err := <-answered; err != nil {
		coretest.WantCode(t, err, codes.Canceled)
	}
}

// awaitCalls waits until the rack has answered this number of calls of an operation.
func (r *rig) awaitCalls(t *testing.T, operation string, count int) {
	t.Helper()
	await.Eventually(t, operation+" is answered", func() bool { return r.Calls(t)[operation] >= count })
}

// TestNextRPCWaitsForAnAbandonedCall cancels RPCs whose call the rack then answers late. The next RPC for the volume
// must not overtake that call.
func TestNextRPCWaitsForAnAbandonedCall(t *testing.T) {
	capability := coretest.MountWriter()
	t.Run("publish, then unpublish", func(t *testing.T) {
		r := newRig(t)
		volume, node := r.Create(t, "volume"), r.Node(t, "node-a")
		r.abandon(t, "instance_disk_attach", func(ctx context.Context) error {
			_, err := r.ControllerPublishVolume(
				ctx,
				&csi.ControllerPublishVolumeRequest{VolumeId: volume, NodeId: node, VolumeCapability: capability},
			)
			return err
		})
		r.Must(t, r.Unpublish(t, volume, node))
		r.awaitCalls(t, "instance_disk_attach", 1)
		if holder := r.Holder(t, volume); holder != "" {
			t.Errorf("the volume was unpublished, but its disk is attached to %s", holder)
		}
	})
	t.Run("unpublish, then publish", func(t *testing.T) {
		r := newRig(t)
		volume, node := r.Create(t, "volume"), r.Node(t, "node-a")
		r.Must(t, r.Publish(t, volume, node))
		r.abandon(t, "instance_disk_detach", func(ctx context.Context) error {
			_, err := r.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: volume, NodeId: node})
			return err
		})
		r.Must(t, r.Publish(t, volume, node))
		r.awaitCalls(t, "instance_disk_detach", 1)
		if holder := r.Holder(t, volume); holder != node {
			t.Errorf("the volume was published again, but its disk is attached to %q", holder)
		}
	})
	t.Run("create, then create without capacity", func(t *testing.T) {
		r := newRig(t)
		r.abandon(t, "disk_create", func(ctx context.Context) error {
			_, err := r.CreateVolume(ctx, coretest.CreateRequest("volume"))
			return err
		})
		r.Inject(t, "disk_create", simtest.FaultStatus, 507)
		// RESOURCE_EXHAUSTED would be final, and the disk that appears later would be orphaned.
		r.Create(t, "volume")
		if volumes := r.Volumes(t); len(volumes) != 1 {
			t.Errorf("%d disks, want 1", len(volumes))
		}
	})
}
