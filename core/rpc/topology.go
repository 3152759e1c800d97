package rpc

import "github.com/container-storage-interface/spec/lib/go/csi"

// Topology returns the topology of everything on a rack: of its disks and of its instances.
func Topology(rackName string) *csi.Topology {
	return &csi.Topology{Segments: map[string]string{TopologySegmentRack: rackName}}
}
