// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// accessible returns the racks that fulfil a requirement, in the order of preference: CSI spec, CreateVolume,
// accessibility_requirements. Every rack fulfils a requirement without topologies, which Nomad sends.
func (r *racks) accessible(requirement *csi.TopologyRequirement) ([]*rack.Client, error) {
	requisite, preferred := requirement.GetRequisite(), requirement.GetPreferred()
	if len(requisite) == 0 && len(preferred) == 0 {
		return r.all, nil
	}
	var matching []*rack.Client
	// If both are given, each preferred topology is also a requisite one. Without a requisite one, the preferred ones are
	// a wish, and any other rack fulfils the requirement, too.
	for _, topology := range slices.Concat(preferred, requisite) {
		for _, client := range r.all {
			if segmentsMatch(topology.GetSegments(), rpc.Topology(client.Name()).GetSegments()) &&
				!slices.Contains(matching, client) {
				matching = append(matching, client)
			}
		}
	}
	if len(requisite) == 0 {
		for _, client := range r.all {
			if !slices.Contains(matching, client) {
				matching = append(matching, client)
			}
		}
	}
	if len(matching) > 0 {
		return matching, nil
	}
	required := make([]string, 0, len(requisite))
	for _, topology := range requisite {
		required = append(required, segmentsText(topology.GetSegments()))
	}
	return nil, rpc.Fault(
		fault.RackUnknown,
		"accessibility_requirements: this plugin serves %s=%s, not %s: check the rack names of controller and nodes",
		rpc.TopologySegmentRack,
		r.names(),
		strings.Join(required, " or "),
	)
}

// segmentsMatch reports whether every required segment is in actual. A segment key that this plugin does not know never
// matches.
func segmentsMatch(required, actual map[string]string) bool {
	for key, value := range required {
		if have, ok := actual[key]; !ok || have != value {
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
