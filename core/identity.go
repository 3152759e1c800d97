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

// Identity is the CSI Identity service. It answers without asking anybody: orchestrators give it as little as a second.
type Identity struct {
	csi.UnimplementedIdentityServer

	version, clusterID string
	readiness          *Readiness
}

// NewIdentity returns the Identity service. The version is the build's; the cluster ID is empty where the process has none,
// as node plugins do.
func NewIdentity(version, clusterID string, readiness *Readiness) *Identity {
	return &Identity{version: version, clusterID: clusterID, readiness: readiness}
}

// GetPluginInfo tells name and version, and the cluster ID in the manifest: CSI spec, GetPluginInfo.
func (i *Identity) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	info := &csi.GetPluginInfoResponse{Name: rpc.PluginName, VendorVersion: i.version}
	if i.clusterID != "" {
		info.Manifest = map[string]string{rpc.ManifestClusterID: i.clusterID}
	}
	return info, nil
}

// GetPluginCapabilities is the same in every mode, as the specification demands of one plugin's parts: CSI spec,
// GetPluginCapabilities.
func (i *Identity) GetPluginCapabilities(
	context.Context,
	*csi.GetPluginCapabilitiesRequest,
) (*csi.GetPluginCapabilitiesResponse, error) {
	return &csi.GetPluginCapabilitiesResponse{Capabilities: pluginCapabilities()}, nil
}

// Probe answers "not ready" while a node does not know who it is. It does not depend on the rack: a controller that
// cannot reach its rack is not mended by being restarted. CSI spec, Probe.
func (i *Identity) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	ready, _ := i.readiness.Ready()
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(ready)}, nil
}
