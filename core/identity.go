// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Identity is the CSI Identity service. It answers without I/O, because orchestrators wait as little as one second.
type Identity struct {
	csi.UnimplementedIdentityServer

	version, clusterID string
	readiness          *Readiness
}

// NewIdentity returns the Identity service. The version is the version of the build. The cluster ID is empty in a
// process without one, such as a node plugin.
func NewIdentity(version, clusterID string, readiness *Readiness) *Identity {
	return &Identity{version: version, clusterID: clusterID, readiness: readiness}
}

// GetPluginInfo returns name and version, and the cluster ID in the manifest: CSI spec, GetPluginInfo.
func (i *Identity) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	info := &csi.GetPluginInfoResponse{Name: rpc.PluginName, VendorVersion: i.version}
	if i.clusterID != "" {
		info.Manifest = map[string]string{rpc.ManifestClusterID: i.clusterID}
	}
	return info, nil
}

// GetPluginCapabilities returns the same list in every mode, as the specification requires for the parts of one plugin:
// CSI spec, GetPluginCapabilities.
func (i *Identity) GetPluginCapabilities(
	context.Context,
	*csi.GetPluginCapabilitiesRequest,
) (*csi.GetPluginCapabilitiesResponse, error) {
	return &csi.GetPluginCapabilitiesResponse{Capabilities: pluginCapabilities()}, nil
}

// Probe answers "not ready" until the identity of the node is known: CSI spec, Probe. It does not depend on the rack,
// because a restart does not help a controller that cannot reach its rack.
func (i *Identity) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	ready, _ := i.readiness.Ready()
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(ready)}, nil
}
