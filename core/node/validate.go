// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import (
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// This file checks the requests of the Node RPCs, with one function for each RPC. The functions do no I/O and use no
// state. They reject requests that are invalid in every state of the node.

// maxPathBytes is the length of the longest path in Linux: PATH_MAX without its final zero byte. The CSI specification
// exempts paths from its general limit.
const maxPathBytes = 4095

func validateNodeStageVolume(req *csi.NodeStageVolumeRequest) error {
	return rpc.FirstError(
		rpc.CheckVolumeID(req.GetVolumeId()),
		checkPath("staging_target_path", req.GetStagingTargetPath()),
		rpc.CheckMap("secrets", req.GetSecrets()),
		rpc.CheckMap("publish_context", req.GetPublishContext()),
		rpc.CheckMap("volume_context", req.GetVolumeContext()),
		rpc.CheckCapability("volume_capability", req.GetVolumeCapability()),
		rpc.CheckSupported(req.GetVolumeCapability()),
	)
}

func validateNodeUnstageVolume(req *csi.NodeUnstageVolumeRequest) error {
	return rpc.FirstError(
		rpc.CheckVolumeID(req.GetVolumeId()),
		checkPath("staging_target_path", req.GetStagingTargetPath()),
	)
}

// validateNodePublishVolume requires the staging path. The specification makes it optional only for plugins without
// STAGE_UNSTAGE_VOLUME.
func validateNodePublishVolume(req *csi.NodePublishVolumeRequest) error {
	return rpc.FirstError(
		rpc.CheckVolumeID(req.GetVolumeId()),
		checkPath("target_path", req.GetTargetPath()),
		checkPath("staging_target_path", req.GetStagingTargetPath()),
		rpc.CheckMap("secrets", req.GetSecrets()),
		rpc.CheckMap("publish_context", req.GetPublishContext()),
		rpc.CheckMap("volume_context", req.GetVolumeContext()),
		rpc.CheckCapability("volume_capability", req.GetVolumeCapability()),
		rpc.CheckSupported(req.GetVolumeCapability()),
	)
}

func validateNodeUnpublishVolume(req *csi.NodeUnpublishVolumeRequest) error {
	return rpc.FirstError(
		rpc.CheckVolumeID(req.GetVolumeId()),
		checkPath("target_path", req.GetTargetPath()),
	)
}

// validateNodeGetVolumeStats accepts a relative path. No volume can be there, so the RPC returns NOT_FOUND, as for
// every path without a volume.
func validateNodeGetVolumeStats(req *csi.NodeGetVolumeStatsRequest) error {
	return rpc.FirstError(
		rpc.CheckVolumeID(req.GetVolumeId()),
		rpc.CheckRequired("volume_path", req.GetVolumePath()),
		rpc.CheckLength("volume_path", req.GetVolumePath(), maxPathBytes),
		rpc.CheckLength("staging_target_path", req.GetStagingTargetPath(), maxPathBytes),
	)
}

func validateNodeGetVolumeHealth(req *csi.NodeGetVolumeHealthRequest) error {
	return rpc.FirstError(
		rpc.CheckVolumeID(req.GetVolumeId()),
		checkOptionalPath("volume_publish_path", req.GetVolumePublishPath()),
		checkOptionalPath("staging_target_path", req.GetStagingTargetPath()),
	)
}

func validateNodeGetStorageHealth(req *csi.NodeGetStorageHealthRequest) error {
	return rpc.CheckMap("secrets", req.GetSecrets())
}

func checkPath(field, path string) error {
	if err := rpc.FirstError(rpc.CheckRequired(field, path), rpc.CheckLength(field, path, maxPathBytes)); err != nil {
		return err
	}
	if !filepath.IsAbs(path) {
		return rpc.InvalidArgument("%s %q is not an absolute path", field, path)
	}
	if strings.ContainsRune(path, 0) {
		return rpc.InvalidArgument("%s contains a zero byte", field)
	}
	return nil
}

func checkOptionalPath(field, path string) error {
	if path == "" {
		return nil
	}
	return checkPath(field, path)
}
