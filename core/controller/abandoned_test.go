// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// lateCall lets the rack take its time with the next call of an operation, and makes the RPC that leads to it with a client
// that does not wait so long.
func (r *rig) lateCall(t *testing.T, operation string, rpc func(context.Context) error) {
	t.Helper()
	_, err := r.Sim.Inject(t.Context(), simtest.Fault{Operation: operation, Kind: simtest.FaultDelay, DelayMillis: 400})
	r.Must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	coretest.WantCode(t, rpc(ctx), codes.DeadlineExceeded)
}

// awaitCalls waits until the rack has done so many calls of an operation.
func (r *rig) awaitCalls(t *testing.T, operation string, count int) {
	t.Helper()
	for r.Calls(t)[operation] < count {
		if err := t.Context().Err(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// TestAbandonedCalls gives up RPCs whose call the rack then does late. The next RPC for the volume must not come before it.
func TestAbandonedCalls(t *testing.T) {
	capability := coretest.MountWriter()
	t.Run("publish, then unpublish", func(t *testing.T) {
		r := newRig(t)
		volume, node := r.Create(t, "volume"), r.Node(t, "node-a")
		r.lateCall(t, "instance_disk_attach", func(ctx context.Context) error {
			_, err := r.ControllerPublishVolume(
				ctx,
				&csi.ControllerPublishVolumeRequest{VolumeId: volume, NodeId: node, VolumeCapability: capability},
			)
			return err
		})
		r.Must(t, r.Unpublish(t, volume, node))
		r.awaitCalls(t, "instance_disk_attach", 1)
		if holder := r.Holder(t, volume); holder != "" {
			t.Errorf("the volume was unpublished, and its disk is attached to %s", holder)
		}
	})
	t.Run("unpublish, then publish", func(t *testing.T) {
		r := newRig(t)
		volume, node := r.Create(t, "volume"), r.Node(t, "node-a")
		r.Must(t, r.Publish(t, volume, node))
		r.lateCall(t, "instance_disk_detach", func(ctx context.Context) error {
			_, err := r.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: volume, NodeId: node})
			return err
		})
		r.Must(t, r.Publish(t, volume, node))
		r.awaitCalls(t, "instance_disk_detach", 1)
		if holder := r.Holder(t, volume); holder != node {
			t.Errorf("the volume was published again, and its disk is attached to %q", holder)
		}
	})
	t.Run("create, then create on a rack that is full", func(t *testing.T) {
		r := newRig(t)
		r.lateCall(t, "disk_create", func(ctx context.Context) error {
			_, err := r.CreateVolume(ctx, coretest.CreateRequest("volume"))
			return err
		})
		r.Inject(t, "disk_create", simtest.FaultStatus, 507)
		// RESOURCE_EXHAUSTED would be final: the disk that appears afterwards would be nobody's.
		r.Create(t, "volume")
		if volumes := r.Volumes(t); len(volumes) != 1 {
			t.Errorf("%d disks, want one", len(volumes))
		}
	})
}
