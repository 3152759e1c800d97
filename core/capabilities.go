package core

import "github.com/container-storage-interface/spec/lib/go/csi"

// What this plugin offers. Everything else that CSI v1.13 knows is left out, for these reasons:
//
//   - EXPAND_VOLUME, MODIFY_VOLUME: a rack changes nothing of a disk, neither size nor name (docs/reference/rack.md §2).
//   - PUBLISH_READONLY: a rack stores no such flag of an attachment; read-only is NodePublishVolume's readonly.
//   - VOLUME_MOUNT_GROUP: kubelet would then leave fsGroup to us instead of applying it itself.
//   - GROUP_CONTROLLER_SERVICE, SNAPSHOT_METADATA_SERVICE: a rack has neither.
var (
	pluginServices = []csi.PluginCapability_Service_Type{
		csi.PluginCapability_Service_CONTROLLER_SERVICE,
		csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS,
		csi.PluginCapability_Service_SNAPSHOT_ACCESSIBILITY_CONSTRAINTS,
	}
	controllerRPCs = []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES,
		csi.ControllerServiceCapability_RPC_GET_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.ControllerServiceCapability_RPC_LIST_VOLUME_HEALTH,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
		csi.ControllerServiceCapability_RPC_GET_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	}
	nodeRPCs = []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH,
	}
)

func pluginCapabilities() []*csi.PluginCapability {
	list := make([]*csi.PluginCapability, 0, len(pluginServices))
	for _, service := range pluginServices {
		list = append(list, &csi.PluginCapability{
			Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: service}},
		})
	}
	return list
}

func controllerCapabilities() []*csi.ControllerServiceCapability {
	list := make([]*csi.ControllerServiceCapability, 0, len(controllerRPCs))
	for _, rpc := range controllerRPCs {
		list = append(list, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: rpc}},
		})
	}
	return list
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
