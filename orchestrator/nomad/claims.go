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
	// lost says that the claim is gone, and its allocation has not ended.
	lost bool
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
	all, err := o.claims(ctx, nodeID, volumeIDs)
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

// claims lists the claims on volumes, by their external IDs, and then those that allocations on a node have lost. Nomad
// leaves out of its lists what a token may not read, without an error, so the token's rights are looked at, too.
func (o *Operator) claims(ctx context.Context, nodeID string, volumeIDs []string) (all []claim, err error) {
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
	lost, err := read.lost(ctx, nodeID, volumes, volumeIDs)
	return append(all, lost...), err
}

// ending selects the allocations that were stopped, may not have ended, and whose job has CSI volumes.
const ending = `DesiredStatus != "run" and ClientStatus != "complete" and ClientStatus != "failed" and ` +
	`ClientStatus != "lost" and ` + usesVolumes

// lost adds a claim for each volume that an allocation on a node has without claiming it. A person can deregister a
// volume by force as soon as its allocations are stopped, although their tasks go on for their shutdown_delay: Nomad
// v1.11.1, nomad/state/state_store.go, volSafeToForce. If Nomad does not know a volume of the allocation any more, each
// disk may be it, and if Nomad does not know a disk, it may be any of the allocation's volumes. An allocation counts
// also if it is not known for which node it is.
func (r claimReader) lost(
	ctx context.Context, nodeID string, volumes []volumeStub, volumeIDs []string,
) (all []claim, err error) {
	var list []allocationStub
	query := url.Values{"namespace": {"*"}, "filter": {ending}}
	op := reading("list the allocations", controllerPolicyFile)
	exists, err := r.get(ctx, op, "/v1/allocations?"+query.Encode(), &list)
	if err == nil && !exists {
		err = errNoIndex
	}
	list = slices.DeleteFunc(list, func(a allocationStub) bool { return !a.mayHaveVolumes() })
	if err != nil || len(list) == 0 {
		return nil, err
	}
	if err := r.readPlugins(ctx); err != nil {
		return nil, err
	}
	for _, a := range list {
		at, err := r.nodeOfClient(ctx, a.NodeID)
		if err != nil {
			return nil, err
		}
		if at != "" && !strings.EqualFold(at, nodeID) {
			continue
		}
		unclaimed, err := r.unclaimed(ctx, a.ID)
		if err != nil {
			return nil, err
		}
		for _, v := range unclaimed {
			by := a.label() + ", which was stopped and has not ended, and has lost its claim on volume " + v.ID +
				" in namespace " + v.Namespace
			for _, id := range volumeIDs {
				is := func(known volumeStub) bool { return strings.EqualFold(known.ExternalID, id) }
				if is(v) || v.ExternalID == "" || !slices.ContainsFunc(volumes, is) {
					all = append(all, claim{volumeID: id, nodeID: at, by: by, lost: true})
				}
			}
		}
	}
	return all, nil
}

// unclaimed returns the volumes that an allocation uses without claiming them, unless it has ended meanwhile. One that
// is not registered has no external ID.
func (r claimReader) unclaimed(ctx context.Context, id string) (all []volumeStub, err error) {
	var job volumeJob
	op := reading(fmt.Sprintf("read allocation %.8s", id), controllerPolicyFile)
	exists, err := r.get(ctx, op, "/v1/allocation/"+url.PathEscape(id), &job)
	if err != nil || !exists || !job.mayHaveVolumes() {
		return nil, err
	}
	for _, source := range job.sources() {
		stub := volumeStub{ID: source, Namespace: job.Namespace}
		volume, _, err := r.readVolume(ctx, stub, controllerPolicyFile)
		if err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(volume.Allocations, func(a allocationStub) bool { return a.ID == job.ID }) {
			stub.ExternalID = volume.ExternalID
			all = append(all, stub)
		}
	}
	return all, nil
}

// readPlugins reads all plugins of this driver.
func (r claimReader) readPlugins(ctx context.Context) error {
	stubs, err := r.Operator.plugins(ctx)
	for _, stub := range stubs {
		if _, known := r.plugins[stub.ID]; !known && err == nil {
			r.plugins[stub.ID], err = r.plugin(ctx, stub.ID)
		}
	}
	return err
}

// nodeOfClient is nodeOf with the plugins that were read.
func (r claimReader) nodeOfClient(ctx context.Context, clientID string) (nodeID string, err error) {
	for _, plugin := range r.plugins {
		if nodeID, err = r.nodeOf(ctx, plugin, clientID); nodeID != "" || err != nil {
			break
		}
	}
	return nodeID, err
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
		all = append(all, claim{stub.ExternalID, plugin, nodeID, a.label() + ", " + label, false})
	}
	if len(volume.Allocations) < stub.CurrentReaders+stub.CurrentWriters {
		all = append(all, claim{stub.ExternalID, plugin, "", "an allocation that Nomad has deleted, " + label, false})
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
