// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package blackbox

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestVolumeMovesBetweenNodes moves a volume with data from one node to another, as when its workload is rescheduled.
// Then the volume grows. It uses one controller, a plugin in each of two guests,
// and real filesystems on real block devices.
func TestVolumeMovesBetweenNodes(t *testing.T) {
	needRoot(t)
	t.Parallel()
	dir := shortDir(t)
	sim := startSimWithGuests(t, dir, "--hotplug", "--instances=node-a,node-b")
	controller := startPlugin(t, simtest.PluginOptions{Mode: "controller", Sim: sim})
	nodes := map[string]*simtest.Plugin{}
	for _, instance := range sim.Instances {
		nodes[instance.Name] = startPlugin(t, simtest.PluginOptions{Mode: "node", Sim: sim, Instance: instance})
		info, err := nodes[instance.Name].NodeGetInfo(within(t, time.Minute), &csi.NodeGetInfoRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if info.GetNodeId() != instance.ID {
			t.Fatalf("the plugin on %s says it is on %s, not %s", instance.Name, info.GetNodeId(), instance.ID)
		}
	}
	for name, capability := range map[string]*csi.VolumeCapability{
		"default": mountVolume(""), "ext4": mountVolume("ext4"), "xfs": mountVolume("xfs"), "block": blockVolume(),
	} {
		t.Run(name, func(t *testing.T) {
			c := newClient()
			volume := twice(t, c, controller.CreateVolume, createRequest("life-"+name, capability)).GetVolume()

			// on runs a workload on a node, and then unpublishes the volume from that node.
			on := func(node string, workload func(*mounted)) {
				t.Helper()
				published := twice(t, c, controller.ControllerPublishVolume, publishRequest(volume, sim.Instance(node), capability))
				m := stageAndPublish(
					t,
					c,
					nodes[node],
					filepath.Join(dir, name, node),
					volume,
					capability,
					published.GetPublishContext(),
				)
				m.checkKind(t)
				workload(m)
				m.unpublishAndUnstage(t)
				twice(
					t,
					c,
					controller.ControllerUnpublishVolume,
					&csi.ControllerUnpublishVolumeRequest{VolumeId: volume.GetVolumeId(), NodeId: sim.Instance(node).ID},
				)
			}
			var written string
			on("node-a", func(m *mounted) { written = m.write(t) })
			for _, node := range []string{"node-b", "node-a"} {
				on(node, func(m *mounted) {
					if read := m.checksum(t); read != written {
						t.Errorf("on %s the data has the checksum %s, want %s", node, read, written)
					}
				})
			}

			grow := &csi.ControllerExpandVolumeRequest{
				VolumeId: volume.GetVolumeId(), CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * gib},
				VolumeCapability: capability,
			}
			on("node-a", func(*mounted) {
				_, err := controller.ControllerExpandVolume(within(t, time.Minute), grow)
				if code := status.Code(err); code != codes.FailedPrecondition {
					t.Errorf("a volume in use grows: %v", err)
				}
			})
			twice(t, c, controller.ControllerExpandVolume, grow)
			on("node-b", func(m *mounted) { check(t, "the volume that has grown", m, written, grownBytes(capability)) })

			twice(t, c, controller.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
			checkLeftovers(t, sim, 0)
			if len(c.failed) > 0 {
				t.Errorf("requests failed without a fault: %v", c.failed)
			}
		})
	}
}
