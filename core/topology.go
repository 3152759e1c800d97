package core

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// segments is the topology of everything on a rack: of its disks and of its instances.
func segments(rackName string) *csi.Topology {
	return &csi.Topology{Segments: map[string]string{TopologySegmentRack: rackName}}
}

// checkAccessible refuses a requirement that the rack of this name cannot fulfil: CSI spec, CreateVolume,
// accessibility_requirements. A requirement without topologies is none; Nomad sends such ones.
func checkAccessible(requirement *csi.TopologyRequirement, rackName string) error {
	// The preferred topologies are among the requisite ones, where both are given.
	topologies := requirement.GetRequisite()
	if len(topologies) == 0 {
		topologies = requirement.GetPreferred()
	}
	if len(topologies) == 0 {
		return nil
	}
	own := segments(rackName).GetSegments()
	for _, topology := range topologies {
		if within(topology.GetSegments(), own) {
			return nil
		}
	}
	wanted := make([]string, 0, len(topologies))
	for _, topology := range topologies {
		wanted = append(wanted, segmentsText(topology.GetSegments()))
	}
	return resourceExhausted("accessibility_requirements ask for %s, this plugin makes volumes in %s: check the rack's name here and on the nodes",
		strings.Join(wanted, " or "), segmentsText(own))
}

// within reports whether every wanted segment is one of own. A segment that this plugin knows nothing of cannot be
// promised.
func within(wanted, own map[string]string) bool {
	for key, value := range wanted {
		if have, ok := own[key]; !ok || have != value {
			return false
		}
	}
	return true
}

func segmentsText(segments map[string]string) string {
	parts := make([]string, 0, len(segments))
	for _, key := range slices.Sorted(maps.Keys(segments)) {
		parts = append(parts, fmt.Sprintf("%s=%s", key, segments[key]))
	}
	return "{" + strings.Join(parts, ",") + "}"
}
