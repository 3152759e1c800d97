// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import "github.com/container-storage-interface/spec/lib/go/csi"

// nodeRPCs are the optional RPCs of the Node service. VOLUME_MOUNT_GROUP is missing on purpose: with it, kubelet does
// not apply fsGroup itself and expects the plugin to do so.
var nodeRPCs = []csi.NodeServiceCapability_RPC_Type{
	csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
	csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
	csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
	csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH,
}

func nodeCapabilities() []*csi.NodeServiceCapability {
	list := make([]*csi.NodeServiceCapability, 0, len(nodeRPCs))
	for _, rpc := range nodeRPCs {
		list = append(list, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: rpc}},
		})
	}
	return list
}
