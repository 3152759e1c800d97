// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// A disk stays attached to a running instance until the grace period after the first unpublish is over.
func TestDetachGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const grace = time.Minute
		r := newBubbleRig(t)
		service := r.startController(t, controller.Options{DetachGrace: grace})
		created, err := service.CreateVolume(t.Context(), coretest.CreateRequest("v"))
		coretest.Must(t, err)
		id, node := created.GetVolume().GetVolumeId(), r.Node(t, "node-a")
		publish := func() {
			t.Helper()
			_, err := service.ControllerPublishVolume(
				t.Context(),
				&csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: node, VolumeCapability: coretest.MountWriter()},
			)
			coretest.Must(t, err)
		}
		unpublish := func() error {
			_, err := service.ControllerUnpublishVolume(
				t.Context(),
				&csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node},
			)
			return err
		}
		wantRejected := func() {
			t.Helper()
			err := unpublish()
			var coded *rpc.Error
			if !errors.As(err, &coded) || coded.Code() != codes.FailedPrecondition ||
				!strings.Contains(err.Error(), "--detach-grace") {
				t.Errorf("unpublish: %v, want FAILED_PRECONDITION because of --detach-grace", err)
			}
			if got := r.Holder(t, id); got != node {
				t.Errorf("the disk is attached to %q", got)
			}
		}
		publish()
		for range 60 { // as often as Nomad repeats the call
			wantRejected()
			time.Sleep(time.Second)
		}
		coretest.Must(t, unpublish())
		if got := r.Holder(t, id); got != "" {
			t.Errorf("the disk is attached to %q", got)
		}
		// After another publish the grace period starts again.
		publish()
		wantRejected()
		// It also starts again if the unpublish was not repeated for a long time.
		time.Sleep(time.Hour)
		wantRejected()
	})
}
