// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rpc

import "github.com/container-storage-interface/spec/lib/go/csi"

// Topology returns the topology of the disks and instances of a rack.
func Topology(rackName string) *csi.Topology {
	return &csi.Topology{Segments: map[string]string{TopologySegmentRack: rackName}}
}
