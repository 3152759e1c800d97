// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad

import (
	"context"
	"net/url"
	"slices"
	"strings"
)

// controllerPolicyFile is what the controller needs with ACLs on.
const controllerPolicyFile = "deploy/nomad/policies/" + PolicyController + ".policy.hcl"

// Moved reports two things at once: the volume has claims in Nomad, all of them from the client whose node plugin has
// the node ID toNode, and another client's node plugin has the node ID fromNode. Nomad records a claim before it asks
// to publish the volume: Nomad v1.11.1, nomad/csi_endpoint.go. If it recorded the claim only later, Moved would return
// false. With ACLs on it needs the policy controller.policy.hcl.
func (o *Operator) Moved(ctx context.Context, volumeID, fromNode, toNode string) (bool, error) {
	volumes, err := o.volumes(ctx)
	if err != nil {
		return false, err
	}
	moved := false
	for _, stub := range volumes {
		if !strings.EqualFold(stub.ExternalID, volumeID) {
			continue
		}
		claimed, only, err := o.claimedBy(ctx, stub, fromNode, toNode)
		if err != nil || !only {
			return false, err
		}
		moved = moved || claimed
	}
	return moved, nil
}

// claimedBy reports whether a volume has claims, and whether they are only from the client with the node ID toNode,
// while another client has the node ID fromNode.
func (o *Operator) claimedBy(
	ctx context.Context,
	stub volumeStub,
	fromNode, toNode string,
) (claimed, only bool, err error) {
	volume, exists, err := o.readVolume(ctx, stub, controllerPolicyFile)
	if err != nil || !exists {
		return false, false, err
	}
	plugin, err := o.plugin(ctx, volume.PluginID)
	if err != nil {
		return false, false, err
	}
	elsewhere := slices.ContainsFunc(volume.Allocations, func(a allocationStub) bool {
		return !strings.EqualFold(plugin.Nodes[a.NodeID].NodeInfo.ID, toNode)
	})
	// Nomad does not list the claims of allocations that it has deleted, but it counts them.
	if elsewhere || len(volume.Allocations) < stub.CurrentReaders+stub.CurrentWriters {
		return true, false, nil
	}
	known, err := o.hasNode(ctx, plugin, fromNode)
	return len(volume.Allocations) > 0, known, err
}

// hasNode reports whether a client's node plugin has the ID. Nomad's entry of a lost client still names the ID, while
// the plugin's entry no longer lists the client.
func (o *Operator) hasNode(ctx context.Context, plugin pluginInfo, id string) (bool, error) {
	for _, half := range plugin.Nodes {
		if strings.EqualFold(half.NodeInfo.ID, id) {
			return true, nil
		}
	}
	var clients []struct{ ID string }
	op := reading("read the clients", controllerPolicyFile)
	if _, err := o.get(ctx, op, "/v1/nodes", &clients); err != nil {
		return false, err
	}
	for _, client := range clients {
		if _, registered := plugin.Nodes[client.ID]; registered {
			continue
		}
		var said struct{ CSINodePlugins map[string]pluginInstance }
		if _, err := o.get(ctx, op, "/v1/node/"+url.PathEscape(client.ID), &said); err != nil {
			return false, err
		}
		if strings.EqualFold(said.CSINodePlugins[plugin.ID].NodeInfo.ID, id) {
			return true, nil
		}
	}
	return false, nil
}
