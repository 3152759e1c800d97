// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// controllerPolicyFile is what the controller needs with ACLs on.
const controllerPolicyFile = "deploy/nomad/policies/" + PolicyController + ".policy.hcl"

// claim is a claim on a volume.
type claim struct {
	// volumeID is the external ID of the volume. Several of Nomad's volumes can have the same.
	volumeID string
	plugin   pluginInfo
	// nodeID is the ID of the node plugin on the client with the claim, or empty if it is not known.
	nodeID string
	// by names the claim for people.
	by string
}

// Registered returns the namespaces and IDs of all volumes with this external ID that the token may see.
func (o *Operator) Registered(ctx context.Context, volumeID string) (names []string, err error) {
	volumes, err := o.volumes(ctx, controllerPolicyFile)
	for _, v := range volumes {
		if strings.EqualFold(v.ExternalID, volumeID) {
			names = append(names, v.Namespace+"/"+v.ID)
		}
	}
	return names, err
}

// Claimed returns those of the volumes, by their external IDs, that may be used on the node with that ID. It returns a
// text about one claim on each. A claim counts under each ID that a volume has in Nomad, in each namespace, and also if
// it is not known for which node it is. It returns an error if the answer may lack a claim. With ACLs on it needs the
// policy controller.policy.hcl.
func (o *Operator) Claimed(ctx context.Context, nodeID string, volumeIDs []string) (map[string]string, error) {
	all, err := o.claims(ctx, volumeIDs)
	if err != nil {
		return nil, err
	}
	claimed := map[string]string{}
	for _, c := range all {
		if c.nodeID != "" && !strings.EqualFold(c.nodeID, nodeID) {
			continue
		}
		for _, volumeID := range volumeIDs {
			if strings.EqualFold(c.volumeID, volumeID) {
				claimed[volumeID] = c.by
			}
		}
	}
	return claimed, nil
}

// claims lists the claims on volumes, by their external IDs. Nomad leaves out of its lists what a token may not read,
// without an error, so the token's rights are looked at, too.
func (o *Operator) claims(ctx context.Context, volumeIDs []string) (all []claim, err error) {
	if err := o.seesClaims(ctx); err != nil {
		return nil, err
	}
	volumes, err := o.volumes(ctx, controllerPolicyFile)
	if err != nil {
		return nil, err
	}
	read := claimReader{Operator: o, plugins: map[string]pluginInfo{}}
	for _, stub := range volumes {
		wanted := slices.ContainsFunc(volumeIDs, func(id string) bool { return strings.EqualFold(id, stub.ExternalID) })
		if !wanted || stub.CurrentReaders+stub.CurrentWriters == 0 {
			continue
		}
		of, err := read.of(ctx, stub)
		if err != nil {
			return nil, err
		}
		all = append(all, of...)
	}
	return all, nil
}

// claimReader reads the claims on volumes. plugins are the plugins that were read.
type claimReader struct {
	*Operator
	plugins map[string]pluginInfo
}

// of reads the claims on a volume that has some. Nomad does not list the claims of allocations that it has deleted, but
// it counts them.
func (r claimReader) of(ctx context.Context, stub volumeStub) (all []claim, err error) {
	label := "volume " + stub.ID + " in namespace " + stub.Namespace
	volume, exists, err := r.readVolume(ctx, stub, controllerPolicyFile)
	if err != nil {
		return nil, err
	}
	if !exists {
		return nil, &metadata.Error{
			Kind: metadata.ErrNotReady, What: "Nomad listed " + label + " with a claim, and then said that it does not exist",
			Next: "try again",
		}
	}
	if _, known := r.plugins[volume.PluginID]; !known {
		if r.plugins[volume.PluginID], err = r.plugin(ctx, volume.PluginID); err != nil {
			return nil, err
		}
	}
	plugin := r.plugins[volume.PluginID]
	for _, a := range volume.Allocations {
		nodeID, err := r.nodeOf(ctx, plugin, a.NodeID)
		if err != nil {
			return nil, err
		}
		all = append(all, claim{stub.ExternalID, plugin, nodeID, a.label() + ", " + label})
	}
	if len(volume.Allocations) < stub.CurrentReaders+stub.CurrentWriters {
		all = append(all, claim{stub.ExternalID, plugin, "", "an allocation that Nomad has deleted, " + label})
	}
	return all, nil
}

// nodeOf returns the ID that the node plugin has on a client, or "" if that is not known. Nomad's entry of a lost
// client still names the ID, while the plugin's entry no longer lists the client.
func (o *Operator) nodeOf(ctx context.Context, plugin pluginInfo, clientID string) (string, error) {
	if id := plugin.Nodes[clientID].NodeInfo.ID; id != "" {
		return id, nil
	}
	var client struct{ CSINodePlugins map[string]pluginInstance }
	op := reading(fmt.Sprintf("read client %.8s", clientID), controllerPolicyFile)
	_, err := o.get(ctx, op, "/v1/node/"+url.PathEscape(clientID), &client)
	return client.CSINodePlugins[plugin.ID].NodeInfo.ID, err
}
