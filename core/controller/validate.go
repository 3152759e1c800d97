// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"unicode"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// This file has the request checks of the Controller RPCs, one function for each RPC. They do no I/O and use no state:
// they reject requests that are wrong in every state of the rack.

func validateCreateVolume(req *csi.CreateVolumeRequest) error {
	return rpc.FirstError(
		rpc.CheckRequired("name", req.GetName()),
		rpc.CheckLength("name", req.GetName(), rpc.MaxStringBytes),
		checkCharacters("name", req.GetName()),
		rpc.CheckMap("parameters", req.GetParameters()),
		rpc.CheckMap("secrets", req.GetSecrets()),
		checkCapabilities("volume_capabilities", req.GetVolumeCapabilities()),
		checkSupportedCapabilities(req.GetVolumeCapabilities()),
		checkCapacityRange(req.GetCapacityRange()),
		checkContentSource(req.GetVolumeContentSource()),
		checkMutableParameters(req.GetMutableParameters()),
		checkTopologyRequirement(req.GetAccessibilityRequirements()),
	)
}

func validateDeleteVolume(req *csi.DeleteVolumeRequest) error {
	return rpc.FirstError(rpc.CheckVolumeID(req.GetVolumeId()), rpc.CheckMap("secrets", req.GetSecrets()))
}

func validateControllerPublishVolume(req *csi.ControllerPublishVolumeRequest) error {
	return rpc.FirstError(
		rpc.CheckVolumeID(req.GetVolumeId()),
		rpc.CheckRequired("node_id", req.GetNodeId()),
		rpc.CheckLength("node_id", req.GetNodeId(), rpc.MaxNodeIDBytes),
		rpc.CheckMap("secrets", req.GetSecrets()),
		rpc.CheckMap("volume_context", req.GetVolumeContext()),
		rpc.CheckCapability("volume_capability", req.GetVolumeCapability()),
		rpc.CheckSupported(req.GetVolumeCapability()),
	)
}

func validateControllerUnpublishVolume(req *csi.ControllerUnpublishVolumeRequest) error {
	return rpc.FirstError(
		rpc.CheckVolumeID(req.GetVolumeId()),
		rpc.CheckLength("node_id", req.GetNodeId(), rpc.MaxNodeIDBytes),
		rpc.CheckMap("secrets", req.GetSecrets()),
	)
}

func validateControllerExpandVolume(req *csi.ControllerExpandVolumeRequest) error {
	if req.GetCapacityRange().GetRequiredBytes() == 0 && req.GetCapacityRange().GetLimitBytes() == 0 {
		return rpc.InvalidArgument("capacity_range is missing")
	}
	return rpc.FirstError(
		rpc.CheckVolumeID(req.GetVolumeId()),
		rpc.CheckMap("secrets", req.GetSecrets()),
		checkCapacityRange(req.GetCapacityRange()),
		checkOptionalCapability(req.GetVolumeCapability()),
	)
}

func checkOptionalCapability(capability *csi.VolumeCapability) error {
	if capability == nil {
		return nil
	}
	return rpc.FirstError(rpc.CheckCapability("volume_capability", capability), rpc.CheckSupported(capability))
}

func validateControllerModifyVolume(req *csi.ControllerModifyVolumeRequest) error {
	for key := range req.GetMutableParameters() {
		if key != rpc.KeyAdoptFromCluster {
			return rpc.InvalidArgument(
				"mutable_parameters: %.80q is not supported: only the owner of a volume can be changed", key)
		}
	}
	return rpc.FirstError(
		rpc.CheckVolumeID(req.GetVolumeId()),
		rpc.CheckMap("secrets", req.GetSecrets()),
		rpc.CheckMap("mutable_parameters", req.GetMutableParameters()),
		rpc.CheckRequired(
			"mutable_parameters: "+rpc.KeyAdoptFromCluster,
			req.GetMutableParameters()[rpc.KeyAdoptFromCluster],
		),
		rpc.CheckLength(
			"mutable_parameters: "+rpc.KeyAdoptFromCluster,
			req.GetMutableParameters()[rpc.KeyAdoptFromCluster],
			rpc.MaxStringBytes,
		),
	)
}

// validateValidateVolumeCapabilities rejects only malformed requests: an unsupported capability is an answer, not an
// error.
func validateValidateVolumeCapabilities(req *csi.ValidateVolumeCapabilitiesRequest) error {
	return rpc.FirstError(
		rpc.CheckVolumeID(req.GetVolumeId()),
		rpc.CheckMap("secrets", req.GetSecrets()),
		rpc.CheckMap("volume_context", req.GetVolumeContext()),
		rpc.CheckMap("parameters", req.GetParameters()),
		rpc.CheckMap("mutable_parameters", req.GetMutableParameters()),
		checkCapabilities("volume_capabilities", req.GetVolumeCapabilities()),
	)
}

func validateCreateSnapshot(req *csi.CreateSnapshotRequest) error {
	return rpc.FirstError(
		rpc.CheckRequired("name", req.GetName()),
		rpc.CheckLength("name", req.GetName(), rpc.MaxStringBytes),
		checkCharacters("name", req.GetName()),
		rpc.CheckRequired("source_volume_id", req.GetSourceVolumeId()),
		rpc.CheckLength("source_volume_id", req.GetSourceVolumeId(), rpc.MaxStringBytes),
		rpc.CheckMap("secrets", req.GetSecrets()),
		rpc.CheckMap("parameters", req.GetParameters()),
		checkTopologyRequirement(req.GetAccessibilityRequirements()),
	)
}

func validateDeleteSnapshot(req *csi.DeleteSnapshotRequest) error {
	return rpc.FirstError(checkSnapshotID(req.GetSnapshotId()), rpc.CheckMap("secrets", req.GetSecrets()))
}

func validateGetSnapshot(req *csi.GetSnapshotRequest) error {
	return rpc.FirstError(checkSnapshotID(req.GetSnapshotId()), rpc.CheckMap("secrets", req.GetSecrets()))
}

func validateListSnapshots(req *csi.ListSnapshotsRequest) error {
	return rpc.FirstError(
		validateList(req),
		rpc.CheckLength("source_volume_id", req.GetSourceVolumeId(), rpc.MaxStringBytes),
		rpc.CheckLength("snapshot_id", req.GetSnapshotId(), rpc.MaxStringBytes),
		rpc.CheckMap("secrets", req.GetSecrets()),
	)
}

// validateList checks the fields that all list requests have. It checks only the length of starting_token:
// parseStartingToken rejects an unrecognised token with ABORTED.
func validateList(req listRequest) error {
	if req.GetMaxEntries() < 0 {
		return rpc.InvalidArgument("max_entries %d is negative", req.GetMaxEntries())
	}
	return rpc.CheckLength("starting_token", req.GetStartingToken(), rpc.MaxStringBytes)
}

func validateGetCapacity(req *csi.GetCapacityRequest) error {
	for _, capability := range req.GetVolumeCapabilities() {
		if err := rpc.CheckCapability("volume_capabilities", capability); err != nil {
			return err
		}
	}
	return rpc.FirstError(
		checkSupportedCapabilities(req.GetVolumeCapabilities()),
		rpc.CheckMap("parameters", req.GetParameters()),
		rpc.CheckMap("accessible_topology", req.GetAccessibleTopology().GetSegments()),
	)
}

func validateControllerGetVolumeHealth(req *csi.ControllerGetVolumeHealthRequest) error {
	return rpc.FirstError(rpc.CheckVolumeID(req.GetVolumeId()), rpc.CheckMap("secrets", req.GetSecrets()))
}

func validateControllerListVolumeHealth(req *csi.ControllerListVolumeHealthRequest) error {
	return rpc.FirstError(validateList(req), rpc.CheckMap("secrets", req.GetSecrets()))
}

func checkSnapshotID(id string) error {
	return rpc.FirstError(rpc.CheckRequired("snapshot_id", id), rpc.CheckLength("snapshot_id", id, rpc.MaxStringBytes))
}

// checkCharacters rejects the control characters that the specification bans from names: all except tab, line feed and
// carriage return.
func checkCharacters(field, value string) error {
	for _, c := range value {
		if unicode.IsControl(c) && c != '\t' && c != '\n' && c != '\r' {
			return rpc.InvalidArgument("%s contains the control character %U, which is not allowed", field, c)
		}
	}
	return nil
}

func checkCapabilities(field string, capabilities []*csi.VolumeCapability) error {
	if len(capabilities) == 0 {
		return rpc.InvalidArgument("%s is missing", field)
	}
	for _, capability := range capabilities {
		if err := rpc.CheckCapability(field, capability); err != nil {
			return err
		}
	}
	return nil
}

func checkSupportedCapabilities(capabilities []*csi.VolumeCapability) error {
	for _, capability := range capabilities {
		if err := rpc.CheckSupported(capability); err != nil {
			return err
		}
	}
	return nil
}

// checkCapacityRange rejects a range that contains no size. Whether the rack can make such a disk is decided in size.go
// and by the rack.
func checkCapacityRange(capacity *csi.CapacityRange) error {
	requiredBytes, limitBytes := capacity.GetRequiredBytes(), capacity.GetLimitBytes()
	switch {
	case requiredBytes < 0:
		return rpc.InvalidArgument("capacity_range: required_bytes %d is negative", requiredBytes)
	case limitBytes < 0:
		return rpc.InvalidArgument("capacity_range: limit_bytes %d is negative", limitBytes)
	case limitBytes != 0 && limitBytes < requiredBytes:
		return rpc.OutOfRange("capacity_range: limit_bytes %d is less than required_bytes %d", limitBytes, requiredBytes)
	}
	return nil
}

func checkContentSource(source *csi.VolumeContentSource) error {
	if source == nil {
		return nil
	}
	switch from := source.GetType().(type) {
	case *csi.VolumeContentSource_Snapshot:
		return rpc.FirstError(
			rpc.CheckRequired("volume_content_source: snapshot_id", from.Snapshot.GetSnapshotId()),
			rpc.CheckLength("volume_content_source: snapshot_id", from.Snapshot.GetSnapshotId(), rpc.MaxStringBytes),
		)
	case *csi.VolumeContentSource_Volume:
		return rpc.FirstError(
			rpc.CheckRequired("volume_content_source: volume_id", from.Volume.GetVolumeId()),
			rpc.CheckLength("volume_content_source: volume_id", from.Volume.GetVolumeId(), rpc.MaxStringBytes),
		)
	}
	return rpc.InvalidArgument("volume_content_source names neither a snapshot nor a volume")
}

func checkMutableParameters(parameters map[string]string) error {
	for key := range parameters {
		return rpc.InvalidArgument(
			"mutable_parameters: %q is not supported: a disk cannot be changed after its creation",
			key,
		)
	}
	return nil
}

func checkTopologyRequirement(requirement *csi.TopologyRequirement) error {
	for _, topologies := range [][]*csi.Topology{requirement.GetRequisite(), requirement.GetPreferred()} {
		for _, topology := range topologies {
			if err := rpc.CheckMap("accessibility_requirements", topology.GetSegments()); err != nil {
				return err
			}
		}
	}
	return nil
}
