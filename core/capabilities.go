// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core

import "github.com/container-storage-interface/spec/lib/go/csi"

// pluginServices are the optional services of this plugin. Not implemented: GROUP_CONTROLLER_SERVICE and
// SNAPSHOT_METADATA_SERVICE, because a rack has no group snapshots and no changed-block lists.
var pluginServices = []csi.PluginCapability_Service_Type{
	csi.PluginCapability_Service_CONTROLLER_SERVICE,
	csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS,
	csi.PluginCapability_Service_SNAPSHOT_ACCESSIBILITY_CONSTRAINTS,
}

func pluginCapabilities() []*csi.PluginCapability {
	list := make([]*csi.PluginCapability, 0, len(pluginServices)+1)
	for _, service := range pluginServices {
		list = append(list, &csi.PluginCapability{
			Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: service}},
		})
	}
	return append(list, &csi.PluginCapability{
		Type: &csi.PluginCapability_VolumeExpansion_{
			VolumeExpansion: &csi.PluginCapability_VolumeExpansion{Type: csi.PluginCapability_VolumeExpansion_OFFLINE},
		},
	})
}
