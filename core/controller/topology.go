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

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// accessible returns the racks that can fulfil a requirement, those first that are preferred: CSI spec, CreateVolume,
// accessibility_requirements. A requirement without topologies is none, and every rack fulfils it; Nomad sends such ones.
func (r *racks) accessible(requirement *csi.TopologyRequirement) ([]*rack.Client, error) {
	requisite, preferred := requirement.GetRequisite(), requirement.GetPreferred()
	if len(requisite) == 0 && len(preferred) == 0 {
		return r.all, nil
	}
	var fit []*rack.Client
	// The preferred topologies are among the requisite ones, where both are given.
	for _, topology := range slices.Concat(preferred, requisite) {
		for _, client := range r.all {
			if within(topology.GetSegments(), rpc.Topology(client.Name()).GetSegments()) && !slices.Contains(fit, client) {
				fit = append(fit, client)
			}
		}
	}
	if len(fit) > 0 {
		return fit, nil
	}
	if len(requisite) == 0 {
		requisite = preferred
	}
	wanted := make([]string, 0, len(requisite))
	for _, topology := range requisite {
		wanted = append(wanted, segmentsText(topology.GetSegments()))
	}
	return nil, rpc.ResourceExhausted(
		"accessibility_requirements ask for %s, this plugin serves %s=%s: check the racks' names here and on the nodes",
		strings.Join(wanted, " or "),
		rpc.TopologySegmentRack,
		r.names(),
	)
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
