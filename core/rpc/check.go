// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rpc

import (
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
)

// This file has the request checks that both services need.

// Size limits of the CSI specification, "Size Limits", in bytes.
const (
	MaxStringBytes = 128
	MaxNodeIDBytes = 256
	maxMapBytes    = 4 << 10
)

// FirstError returns the first error that is not nil.
func FirstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// CheckRequired rejects an empty field that the specification marks REQUIRED.
func CheckRequired(field, value string) error {
	if value == "" {
		return InvalidArgument("%s is missing", field)
	}
	return nil
}

// CheckLength rejects a field that is longer than maxBytes.
func CheckLength(field, value string, maxBytes int) error {
	if len(value) > maxBytes {
		return InvalidArgument("%s has %d bytes, at most %d are allowed", field, len(value), maxBytes)
	}
	return nil
}

// CheckMap rejects a map if its keys and values together are longer than the specification allows.
func CheckMap(field string, values map[string]string) error {
	total := 0
	for key, value := range values {
		total += len(key) + len(value)
	}
	if total > maxMapBytes {
		return InvalidArgument("%s has %d bytes, at most %d are allowed", field, total, maxMapBytes)
	}
	return nil
}

// CheckVolumeID rejects a volume ID that is missing or too long. It does not check whether the ID is a UUID.
func CheckVolumeID(id string) error {
	return FirstError(CheckRequired("volume_id", id), CheckLength("volume_id", id, MaxStringBytes))
}

// CheckCapability rejects an incomplete capability. [CheckSupported] checks whether this plugin supports the
// capability.
func CheckCapability(field string, capability *csi.VolumeCapability) error {
	if capability == nil {
		return InvalidArgument("%s is missing", field)
	}
	if capability.GetAccessMode() == nil ||
		capability.GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_UNKNOWN {
		return InvalidArgument("%s: access_mode is missing", field)
	}
	if capability.GetAccessType() == nil {
		return InvalidArgument("%s: access_type is missing: block or mount must be set", field)
	}
	flags := 0
	for _, flag := range capability.GetMount().GetMountFlags() {
		flags += len(flag)
	}
	if flags > maxMapBytes {
		return InvalidArgument("%s: mount_flags has %d bytes, at most %d are allowed", field, flags, maxMapBytes)
	}
	return FirstError(
		CheckLength(field+": fs_type", capability.GetMount().GetFsType(), MaxStringBytes),
		CheckLength(field+": volume_mount_group", capability.GetMount().GetVolumeMountGroup(), MaxStringBytes),
	)
}

// CheckSupported rejects a capability that this plugin does not support.
func CheckSupported(capability *csi.VolumeCapability) error {
	switch mode := capability.GetAccessMode().GetMode(); mode {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:
	default:
		return Fault(
			fault.AccessModeUnsupported,
			"access_mode %s is not supported, because a rack attaches a disk to one instance at a time: use a single-node mode",
			mode,
		)
	}
	if capability.GetMount() == nil {
		return nil
	}
	if group := capability.GetMount().GetVolumeMountGroup(); group != "" {
		return InvalidArgument(
			"volume_mount_group is not supported: let the orchestrator set the group, or use the parameters %s and %s",
			KeyRootGID,
			KeyRootMode,
		)
	}
	if fsType := capability.GetMount().GetFsType(); !filesystem.Supported(fsType) {
		return Fault(
			fault.FilesystemUnsupported,
			"fs_type %q is not supported: use one of %s",
			fsType,
			strings.Join(filesystem.Types(), ", "),
		)
	}
	return filesystem.CheckMountFlags(capability.GetMount().GetFsType(), capability.GetMount().GetMountFlags())
}
