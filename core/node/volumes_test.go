// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node_test

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
	"github.com/oxidecomputer/oxide-csi-plugin/core/node"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// The boot disk and disks that users attach are not volumes. A user's disk that was staged is a volume.
func TestNodeVolumes(t *testing.T) {
	t.Parallel()
	eachAccess(t, func(r *nodeRig, v *volume, capability *csi.VolumeCapability) {
		want := func(when string, attached, mounted int) {
			t.Helper()
			counts, err := r.service.Volumes()
			coretest.Must(r.t, err)
			if want := (metrics.NodeVolumes{Attached: attached, Mounted: mounted}); counts != want {
				r.t.Errorf("%s: %+v, want %+v", when, counts, want)
			}
		}
		want("attached", 1, 0)
		own := r.newVolume("a-disk-of-the-users")
		want("beside a user's disk", 1, 0)
		coretest.Must(r.t, r.stage(v, capability))
		want("staged", 1, 1)
		coretest.Must(r.t, r.publish(v, "target", capability, false))
		want("published", 1, 1)
		coretest.Must(r.t, r.stage(own, filesystemVolume("ext4", writer)))
		want("the user's disk staged too", 2, 2)
		coretest.Must(r.t, r.unpublish(v, "target"))
		coretest.Must(r.t, r.unstage(v))
		want("unstaged", 2, 1)
		r.unplug(v)
		want("detached", 1, 1)
		coretest.Must(r.t, r.unstage(own))
	})
	broken := node.New(node.Options{Devices: device.Roots{Dev: t.TempDir(), Sys: t.TempDir()}, Log: coretest.DiscardLog()})
	if counts, err := broken.Volumes(); err == nil {
		t.Errorf("a guest without /sys has %+v", counts)
	}
}
