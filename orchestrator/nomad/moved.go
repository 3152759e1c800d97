// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad

import (
	"context"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Moved reports two things at once: the volume has claims in Nomad, all of them from the client whose node plugin has
// the node ID toNode, and another client's node plugin has the node ID fromNode. Nomad records a claim before it asks
// to publish the volume: Nomad v1.11.1, nomad/csi_endpoint.go. If it recorded the claim only later, Moved would return
// false. With ACLs on it needs the policy controller.policy.hcl.
func (o *Operator) Moved(ctx context.Context, volumeID, fromNode, toNode string) (bool, error) {
	all, err := o.claims(ctx, fromNode, []string{volumeID})
	if err != nil || len(all) == 0 {
		return false, err
	}
	for _, c := range all {
		switch {
		case strings.EqualFold(c.nodeID, toNode):
		case c.lost:
			return false, metadata.NotReady(c.by, nil, "wait until it has ended")
		default:
			return false, nil
		}
	}
	return o.hasNode(ctx, all[0].plugin, fromNode)
}

// hasNode reports whether a client's node plugin has the ID.
func (o *Operator) hasNode(ctx context.Context, plugin pluginInfo, id string) (bool, error) {
	for _, half := range plugin.Nodes {
		if strings.EqualFold(half.NodeInfo.ID, id) {
			return true, nil
		}
	}
	var clients []struct{ ID string }
	if _, err := o.get(ctx, reading("read the clients", controllerPolicyFile), "/v1/nodes", &clients); err != nil {
		return false, err
	}
	for _, client := range clients {
		if _, registered := plugin.Nodes[client.ID]; registered {
			continue
		}
		if nodeID, err := o.nodeOf(ctx, plugin, client.ID); err != nil || strings.EqualFold(nodeID, id) {
			return err == nil, err
		}
	}
	return false, nil
}
