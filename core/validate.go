package core

import (
	"path/filepath"
	"strings"
	"unicode"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
)

// Every check on a request stands in this file, one function per RPC: no I/O, no state. What a request means is the
// RPC's business; here it is only refused when no state of the world could make it right.

// Size limits of the CSI specification, "Size Limits", in bytes.
const (
	maxStringBytes = 128
	maxMapBytes    = 4 << 10
	maxNodeIDBytes = 256
	// maxPathBytes is what Linux takes (PATH_MAX, its final zero byte left out); paths are exempt from the general limit.
	maxPathBytes = 4095
)

func validateCreateVolume(req *csi.CreateVolumeRequest) error {
	return firstError(
		required("name", req.GetName()),
		limited("name", req.GetName(), maxStringBytes),
		checkCharacters("name", req.GetName()),
		limitedMap("parameters", req.GetParameters()),
		limitedMap("secrets", req.GetSecrets()),
		checkCapabilities("volume_capabilities", req.GetVolumeCapabilities()),
		supportedCapabilities(req.GetVolumeCapabilities()),
		checkCapacityRange(req.GetCapacityRange()),
		checkContentSource(req.GetVolumeContentSource()),
		checkMutableParameters(req.GetMutableParameters()),
		checkTopologyRequirement(req.GetAccessibilityRequirements()),
	)
}

func validateDeleteVolume(req *csi.DeleteVolumeRequest) error {
	return firstError(checkVolumeID(req.GetVolumeId()), limitedMap("secrets", req.GetSecrets()))
}

func validateControllerPublishVolume(req *csi.ControllerPublishVolumeRequest) error {
	return firstError(
		checkVolumeID(req.GetVolumeId()),
		required("node_id", req.GetNodeId()),
		limited("node_id", req.GetNodeId(), maxNodeIDBytes),
		limitedMap("secrets", req.GetSecrets()),
		limitedMap("volume_context", req.GetVolumeContext()),
		checkCapability("volume_capability", req.GetVolumeCapability()),
		supportedCapability(req.GetVolumeCapability()),
	)
}

func validateControllerUnpublishVolume(req *csi.ControllerUnpublishVolumeRequest) error {
	return firstError(
		checkVolumeID(req.GetVolumeId()),
		limited("node_id", req.GetNodeId(), maxNodeIDBytes),
		limitedMap("secrets", req.GetSecrets()),
	)
}

// validateValidateVolumeCapabilities refuses only what is malformed: capabilities that are not supported are an answer.
func validateValidateVolumeCapabilities(req *csi.ValidateVolumeCapabilitiesRequest) error {
	return firstError(
		checkVolumeID(req.GetVolumeId()),
		limitedMap("secrets", req.GetSecrets()),
		limitedMap("volume_context", req.GetVolumeContext()),
		limitedMap("parameters", req.GetParameters()),
		limitedMap("mutable_parameters", req.GetMutableParameters()),
		checkCapabilities("volume_capabilities", req.GetVolumeCapabilities()),
	)
}

func validateCreateSnapshot(req *csi.CreateSnapshotRequest) error {
	return firstError(
		required("name", req.GetName()),
		limited("name", req.GetName(), maxStringBytes),
		checkCharacters("name", req.GetName()),
		required("source_volume_id", req.GetSourceVolumeId()),
		limited("source_volume_id", req.GetSourceVolumeId(), maxStringBytes),
		limitedMap("secrets", req.GetSecrets()),
		limitedMap("parameters", req.GetParameters()),
		checkTopologyRequirement(req.GetAccessibilityRequirements()),
	)
}

func validateDeleteSnapshot(req *csi.DeleteSnapshotRequest) error {
	return firstError(checkSnapshotID(req.GetSnapshotId()), limitedMap("secrets", req.GetSecrets()))
}

func validateGetSnapshot(req *csi.GetSnapshotRequest) error {
	return firstError(checkSnapshotID(req.GetSnapshotId()), limitedMap("secrets", req.GetSecrets()))
}

func validateListSnapshots(req *csi.ListSnapshotsRequest) error {
	return firstError(
		validateList(req),
		limited("source_volume_id", req.GetSourceVolumeId(), maxStringBytes),
		limited("snapshot_id", req.GetSnapshotId(), maxStringBytes),
		limitedMap("secrets", req.GetSecrets()),
	)
}

// validateList checks what the requests for lists have in common. A token of a possible length that is not ours is ABORTED.
func validateList(req listRequest) error {
	if req.GetMaxEntries() < 0 {
		return invalidArgument("max_entries %d is negative", req.GetMaxEntries())
	}
	return limited("starting_token", req.GetStartingToken(), maxStringBytes)
}

func validateGetCapacity(req *csi.GetCapacityRequest) error {
	for _, capability := range req.GetVolumeCapabilities() {
		if err := checkCapability("volume_capabilities", capability); err != nil {
			return err
		}
	}
	return firstError(
		supportedCapabilities(req.GetVolumeCapabilities()),
		limitedMap("parameters", req.GetParameters()),
		limitedMap("accessible_topology", req.GetAccessibleTopology().GetSegments()),
	)
}

func validateControllerGetVolumeHealth(req *csi.ControllerGetVolumeHealthRequest) error {
	return firstError(checkVolumeID(req.GetVolumeId()), limitedMap("secrets", req.GetSecrets()))
}

func validateControllerListVolumeHealth(req *csi.ControllerListVolumeHealthRequest) error {
	return firstError(validateList(req), limitedMap("secrets", req.GetSecrets()))
}

func validateNodeStageVolume(req *csi.NodeStageVolumeRequest) error {
	return firstError(
		checkVolumeID(req.GetVolumeId()),
		checkPath("staging_target_path", req.GetStagingTargetPath()),
		limitedMap("secrets", req.GetSecrets()),
		limitedMap("publish_context", req.GetPublishContext()),
		limitedMap("volume_context", req.GetVolumeContext()),
		checkCapability("volume_capability", req.GetVolumeCapability()),
		supportedCapability(req.GetVolumeCapability()),
	)
}

func validateNodeUnstageVolume(req *csi.NodeUnstageVolumeRequest) error {
	return firstError(
		checkVolumeID(req.GetVolumeId()),
		checkPath("staging_target_path", req.GetStagingTargetPath()),
	)
}

// validateNodePublishVolume demands the staging path although the specification makes it optional: it is optional for
// plugins without STAGE_UNSTAGE_VOLUME only.
func validateNodePublishVolume(req *csi.NodePublishVolumeRequest) error {
	return firstError(
		checkVolumeID(req.GetVolumeId()),
		checkPath("target_path", req.GetTargetPath()),
		checkPath("staging_target_path", req.GetStagingTargetPath()),
		limitedMap("secrets", req.GetSecrets()),
		limitedMap("publish_context", req.GetPublishContext()),
		limitedMap("volume_context", req.GetVolumeContext()),
		checkCapability("volume_capability", req.GetVolumeCapability()),
		supportedCapability(req.GetVolumeCapability()),
	)
}

func validateNodeUnpublishVolume(req *csi.NodeUnpublishVolumeRequest) error {
	return firstError(
		checkVolumeID(req.GetVolumeId()),
		checkPath("target_path", req.GetTargetPath()),
	)
}

// validateNodeGetVolumeStats lets a relative path pass: no volume can be there, so the RPC answers NOT_FOUND, as it does
// for every path without a volume.
func validateNodeGetVolumeStats(req *csi.NodeGetVolumeStatsRequest) error {
	return firstError(
		checkVolumeID(req.GetVolumeId()),
		required("volume_path", req.GetVolumePath()),
		limited("volume_path", req.GetVolumePath(), maxPathBytes),
		limited("staging_target_path", req.GetStagingTargetPath(), maxPathBytes),
	)
}

func validateNodeGetVolumeHealth(req *csi.NodeGetVolumeHealthRequest) error {
	return firstError(
		checkVolumeID(req.GetVolumeId()),
		checkOptionalPath("volume_publish_path", req.GetVolumePublishPath()),
		checkOptionalPath("staging_target_path", req.GetStagingTargetPath()),
	)
}

func validateNodeGetStorageHealth(req *csi.NodeGetStorageHealthRequest) error {
	return limitedMap("secrets", req.GetSecrets())
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func required(field, value string) error {
	if value == "" {
		return invalidArgument("%s is missing", field)
	}
	return nil
}

func limited(field, value string, maxBytes int) error {
	if len(value) > maxBytes {
		return invalidArgument("%s has %d bytes, at most %d are allowed", field, len(value), maxBytes)
	}
	return nil
}

// checkCharacters refuses the control characters that the specification bans from names: all but tab, line feed and
// carriage return.
func checkCharacters(field, value string) error {
	for _, c := range value {
		if unicode.IsControl(c) && c != '\t' && c != '\n' && c != '\r' {
			return invalidArgument("%s has the control character %U, which is not allowed", field, c)
		}
	}
	return nil
}

func limitedMap(field string, values map[string]string) error {
	total := 0
	for key, value := range values {
		total += len(key) + len(value)
	}
	if total > maxMapBytes {
		return invalidArgument("%s has %d bytes, at most %d are allowed", field, total, maxMapBytes)
	}
	return nil
}

func checkVolumeID(id string) error {
	return firstError(required("volume_id", id), limited("volume_id", id, maxStringBytes))
}

func checkSnapshotID(id string) error {
	return firstError(required("snapshot_id", id), limited("snapshot_id", id, maxStringBytes))
}

func checkPath(field, path string) error {
	if err := firstError(required(field, path), limited(field, path, maxPathBytes)); err != nil {
		return err
	}
	if !filepath.IsAbs(path) {
		return invalidArgument("%s %q is not an absolute path", field, path)
	}
	if strings.ContainsRune(path, 0) {
		return invalidArgument("%s holds a zero byte", field)
	}
	return nil
}

func checkOptionalPath(field, path string) error {
	if path == "" {
		return nil
	}
	return checkPath(field, path)
}

func checkCapabilities(field string, capabilities []*csi.VolumeCapability) error {
	if len(capabilities) == 0 {
		return invalidArgument("%s is missing", field)
	}
	for _, capability := range capabilities {
		if err := checkCapability(field, capability); err != nil {
			return err
		}
	}
	return nil
}

// checkCapability refuses a capability that says nothing; whether this plugin can do what it says is another question.
func checkCapability(field string, capability *csi.VolumeCapability) error {
	if capability == nil {
		return invalidArgument("%s is missing", field)
	}
	if capability.GetAccessMode() == nil || capability.GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_UNKNOWN {
		return invalidArgument("%s: access_mode is missing", field)
	}
	if capability.GetAccessType() == nil {
		return invalidArgument("%s: access_type is missing: block or mount must be set", field)
	}
	flags := 0
	for _, flag := range capability.GetMount().GetMountFlags() {
		flags += len(flag)
	}
	if flags > maxMapBytes {
		return invalidArgument("%s: mount_flags has %d bytes, at most %d are allowed", field, flags, maxMapBytes)
	}
	return firstError(
		limited(field+": fs_type", capability.GetMount().GetFsType(), maxStringBytes),
		limited(field+": volume_mount_group", capability.GetMount().GetVolumeMountGroup(), maxStringBytes),
	)
}

func supportedCapabilities(capabilities []*csi.VolumeCapability) error {
	for _, capability := range capabilities {
		if err := supportedCapability(capability); err != nil {
			return err
		}
	}
	return nil
}

// supportedCapability says why this plugin cannot do what the capability asks, if it cannot.
func supportedCapability(capability *csi.VolumeCapability) error {
	switch mode := capability.GetAccessMode().GetMode(); mode {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:
	default:
		return invalidArgument("access_mode %s is not supported: a rack attaches a disk to one instance at a time, use a single-node mode", mode)
	}
	if capability.GetMount() == nil {
		return nil
	}
	if group := capability.GetMount().GetVolumeMountGroup(); group != "" {
		return invalidArgument("volume_mount_group is not supported: the orchestrator sets the group itself, or use the parameters %s and %s", KeyRootGID, KeyRootMode)
	}
	if fsType := capability.GetMount().GetFsType(); !filesystem.Supported(fsType) {
		return invalidArgument("fs_type %q is not supported: use one of %s", fsType, strings.Join(filesystem.Types(), ", "))
	}
	return nil
}

// checkCapacityRange refuses ranges that no size is in. Whether a size suits the rack is decided in size.go and by the
// rack itself.
func checkCapacityRange(capacity *csi.CapacityRange) error {
	requiredBytes, limitBytes := capacity.GetRequiredBytes(), capacity.GetLimitBytes()
	switch {
	case requiredBytes < 0:
		return invalidArgument("capacity_range: required_bytes %d is negative", requiredBytes)
	case limitBytes < 0:
		return invalidArgument("capacity_range: limit_bytes %d is negative", limitBytes)
	case limitBytes != 0 && limitBytes < requiredBytes:
		return outOfRange("capacity_range: limit_bytes %d is less than required_bytes %d", limitBytes, requiredBytes)
	}
	return nil
}

func checkContentSource(source *csi.VolumeContentSource) error {
	if source == nil {
		return nil
	}
	switch from := source.GetType().(type) {
	case *csi.VolumeContentSource_Snapshot:
		return firstError(
			required("volume_content_source: snapshot_id", from.Snapshot.GetSnapshotId()),
			limited("volume_content_source: snapshot_id", from.Snapshot.GetSnapshotId(), maxStringBytes),
		)
	case *csi.VolumeContentSource_Volume:
		return firstError(
			required("volume_content_source: volume_id", from.Volume.GetVolumeId()),
			limited("volume_content_source: volume_id", from.Volume.GetVolumeId(), maxStringBytes),
		)
	}
	return invalidArgument("volume_content_source names neither a snapshot nor a volume")
}

func checkMutableParameters(parameters map[string]string) error {
	for key := range parameters {
		return invalidArgument("mutable_parameters: %q is not supported: nothing of a disk can be changed later", key)
	}
	return nil
}

func checkTopologyRequirement(requirement *csi.TopologyRequirement) error {
	for _, topologies := range [][]*csi.Topology{requirement.GetRequisite(), requirement.GetPreferred()} {
		for _, topology := range topologies {
			if err := limitedMap("accessibility_requirements", topology.GetSegments()); err != nil {
				return err
			}
		}
	}
	return nil
}
