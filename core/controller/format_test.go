// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// After a rollback, a volume of a newer version is left alone: nothing is attached, copied or deleted, and the answer
// says what to do. The other volumes can be used.
func TestVolumeOfANewerVersion(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	const description = `{"v":2,"cluster":"rig","h":"hadXYxBumU1IfW7T1FB5VxzyqehYoa/nBPnd+23WuO0=","name":"newer"}`
	newer, node := r.UserDisk(t, coretest.Project, "csi-newer", description).Id, r.Node(t, "node-a")
	creates := map[string]bool{"snapshot": true, "clone": true} // an earlier call may have made what was asked for
	for name, call := range map[string]func() error{
		"publish": func() error { return r.Publish(t, newer, node) },
		"delete":  func() error { return r.Delete(t, newer) },
		"snapshot": func() error {
			_, err := r.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: newer})
			return err
		},
		"clone": func() error {
			_, err := r.CreateVolume(t.Context(), from("c", fromVolume(newer)))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			code := codes.FailedPrecondition
			if creates[name] {
				code = codes.Unavailable
			}
			coretest.WantCode(t, call(), code, `disk "csi-newer" has format 2, not 1`)
		})
	}
	if got := r.Holder(t, newer); got != "" {
		t.Errorf("the disk is on %s", got)
	}
	if disks := r.Volumes(t); len(disks) != 1 {
		t.Errorf("%d disks, want the newer one alone", len(disks))
	}
	volume := r.Create(t, "v")
	r.Must(t, r.Publish(t, volume, node))
	r.Must(t, r.Unpublish(t, volume, node))
	r.Must(t, r.Delete(t, volume))
}
