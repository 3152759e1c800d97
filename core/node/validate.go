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

// Limits of Linux in bytes. The CSI specification exempts paths from its general limit.
const (
	// maxPathBytes is PATH_MAX without its final zero byte.
	maxPathBytes = 4095
	// maxNameBytes is NAME_MAX: the limit of each name in a path.
	maxNameBytes = 255
)

func validateNodeStageVolume(req *csi.NodeStageVolumeRequest) error {
	return rpc.FirstError(
		rpc.CheckVolumeID(req.GetVolumeId()),
		checkPath("staging_target_path", req.GetStagingTargetPath()),
		rpc.CheckMap("secrets", req.GetSecrets()),
		rpc.CheckMap("publish_context", req.GetPublishContext()),
		rpc.CheckMap("volume_context", req.GetVolumeContext()),
		rpc.CheckCapability("volume_capability", req.GetVolumeCapability()),
		rpc.CheckSupported(req.GetVolumeCapability()),
		checkBlockStaging(req),
	)
}

func validateNodeUnstageVolume(req *csi.NodeUnstageVolumeRequest) error {
	return rpc.FirstError(rpc.CheckVolumeID(req.GetVolumeId()),
		checkPath("staging_target_path", req.GetStagingTargetPath()))
}

// validateNodePublishVolume requires the staging path. The specification makes it optional only for plugins without
// STAGE_UNSTAGE_VOLUME, and asks for FAILED_PRECONDITION if it is missing.
func validateNodePublishVolume(req *csi.NodePublishVolumeRequest) error {
	return rpc.FirstError(
		rpc.CheckVolumeID(req.GetVolumeId()),
		checkPath("target_path", req.GetTargetPath()),
		rpc.CheckMap("secrets", req.GetSecrets()),
		rpc.CheckMap("publish_context", req.GetPublishContext()),
		rpc.CheckMap("volume_context", req.GetVolumeContext()),
		rpc.CheckCapability("volume_capability", req.GetVolumeCapability()),
		rpc.CheckSupported(req.GetVolumeCapability()),
		checkStaged(req.GetStagingTargetPath()),
		checkBlockStaging(req),
		checkSeparate(req.GetStagingTargetPath(), req.GetTargetPath()),
	)
}

func checkStaged(staging string) error {
	if staging == "" {
		return rpc.FailedPrecondition("staging_target_path is not set: stage the volume first, and give its staging path")
	}
	return checkPath("staging_target_path", staging)
}

func validateNodeUnpublishVolume(req *csi.NodeUnpublishVolumeRequest) error {
	return rpc.FirstError(rpc.CheckVolumeID(req.GetVolumeId()), checkPath("target_path", req.GetTargetPath()))
}

// validateNodeGetVolumeStats accepts a relative path. No volume can be there, so the RPC returns NOT_FOUND, as for
// every path without a volume.
func validateNodeGetVolumeStats(req *csi.NodeGetVolumeStatsRequest) error {
	return rpc.FirstError(rpc.CheckVolumeID(req.GetVolumeId()), rpc.CheckRequired("volume_path", req.GetVolumePath()),
		rpc.CheckLength("volume_path", req.GetVolumePath(), maxPathBytes),
		rpc.CheckLength("staging_target_path", req.GetStagingTargetPath(), maxPathBytes))
}

func validateNodeGetVolumeHealth(req *csi.NodeGetVolumeHealthRequest) error {
	return rpc.FirstError(rpc.CheckVolumeID(req.GetVolumeId()),
		checkOptionalPath("volume_publish_path", req.GetVolumePublishPath()),
		checkOptionalPath("staging_target_path", req.GetStagingTargetPath()))
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
	if filepath.Clean(path) == "/" {
		return rpc.InvalidArgument("%s is the root directory, where no volume can be", field)
	}
	for name := range strings.SplitSeq(path, "/") {
		if err := rpc.CheckLength(field+": a name in the path", name, maxNameBytes); err != nil {
			return err
		}
	}
	return nil
}

// checkBlockStaging rejects the staging path of a raw block volume if the file for the device node does not fit below
// it.
func checkBlockStaging(req interface {
	GetVolumeId() string
	GetStagingTargetPath() string
	GetVolumeCapability() *csi.VolumeCapability
}) error {
	if req.GetVolumeCapability().GetBlock() == nil {
		return nil
	}
	return rpc.CheckLength("staging_target_path of a raw block volume", req.GetStagingTargetPath(),
		maxPathBytes-len("/"+req.GetVolumeId()))
}

// checkSeparate rejects a target path and a staging path that are the same, or one inside the other: a mount at one
// would hide the other.
func checkSeparate(staging, target string) error {
	staging, target = filepath.Clean(staging)+"/", filepath.Clean(target)+"/"
	if strings.HasPrefix(target, staging) || strings.HasPrefix(staging, target) {
		return rpc.InvalidArgument(
			"target_path and staging_target_path must be separate directories: one is inside the other",
		)
	}
	return nil
}

func checkOptionalPath(field, path string) error {
	if path == "" {
		return nil
	}
	return checkPath(field, path)
}
