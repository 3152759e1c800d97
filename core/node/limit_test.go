// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node_test

import (
	"fmt"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/device/devicetest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/node"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/static"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// The volume limit of a node is its instance's disk limit, minus the reserve and the attached disks that are not
// volumes.
func TestVolumeLimit(t *testing.T) {
	const boot, byHand, longName = "node-a-boot", "postgres-data", "csi-looks-like-one-of-ours"
	volumes := []string{diskA, diskB}
	for _, tc := range []struct {
		name              string
		maxDisks, reserve int
		disks             []string
		want              int64
	}{
		{"no disks at all", 8, 0, nil, 8},
		{"a boot disk", 8, 0, []string{boot}, 7},
		{"a boot disk, 12 slots", 12, 0, []string{boot}, 11},
		{"a disk attached by hand", 8, 0, []string{boot, byHand}, 6},
		{"disks attached by hand, 12 slots", 12, 0, []string{boot, byHand, "scratch", "swap"}, 8},
		{"volumes", 8, 0, append([]string{boot}, volumes...), 7},
		{"volumes and a disk attached by hand", 12, 0, append([]string{boot, byHand}, volumes...), 10},
		{"a name that begins like a volume's", 8, 0, []string{boot, longName}, 6},
		{"a reserve", 8, 2, []string{boot}, 5},
		{"a reserve and a disk attached by hand", 12, 1, append([]string{boot, byHand}, volumes...), 9},
		{"one slot left", 8, 6, []string{boot}, 1},
		{"no slot left", 8, 0, []string{boot, "a", "b", "c", "d", "e", "f", "g"}, 1},
		{"more disks than the limit", 2, 0, []string{boot, "a", "b", "c"}, 1},
		{"a reserve larger than the rest", 8, 6, []string{boot, "a", "b", "c"}, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			guest := devicetest.NewBare(t)
			node := node.New(node.Options{
				Provider: static.New(static.Options{InstanceID: guestID}), Rack: "default",
				MaxDisks: tc.maxDisks, ReserveDisks: tc.reserve, Devices: guest.Roots(), Log: coretest.DiscardLog(),
			})
			limit := func() int64 {
				t.Helper()
				info, err := node.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
				coretest.Must(t, err)
				return info.GetMaxVolumesPerNode()
			}
			for i, name := range tc.disks {
				guest.Sysfs(
					fmt.Sprintf("nvme%dn1", i),
					devicetest.Serial(name)+"\n",
					device.Number{Major: 259, Minor: uint32(i)},
					coretest.GiB,
				)
			}
			// Disks that are reached over a network have no slot.
			guest.Network("nvme30n1", "over TCP\n", device.Number{Major: 259, Minor: 30}, coretest.GiB)
			guest.Multipath("nvme31n1", "two ways\n", device.Number{Major: 259, Minor: 31}, coretest.GiB, "tcp", "rdma")
			if got := limit(); got != tc.want {
				t.Errorf("%d volumes, want %d", got, tc.want)
			}
			// The next request counts a disk that a user has attached by hand since.
			guest.Sysfs("nvme20n1", "one-more\n", device.Number{Major: 259, Minor: 20}, coretest.GiB)
			if got := limit(); got != max(1, tc.want-1) {
				t.Errorf("with one more disk %d volumes, want %d", got, max(1, tc.want-1))
			}
			// Linux can show each disk as one with several paths (nvme_core.multipath_always_on).
			guest.Multipath("nvme21n1", "another\n", device.Number{Major: 259, Minor: 21}, coretest.GiB, "pcie")
			if got := limit(); got != max(1, tc.want-2) {
				t.Errorf("with two more disks %d volumes, want %d", got, max(1, tc.want-2))
			}
		})
	}
}
