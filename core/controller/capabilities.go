// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"
	"errors"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// controllerRPCs are the optional RPCs of the Controller service. Not advertised:
//
//   - MODIFY_VOLUME: ControllerModifyVolume adopts a volume, which no orchestrator may do.
//   - PUBLISH_READONLY: a rack has no read-only attachment. NodePublishVolume applies the readonly flag.
var controllerRPCs = []csi.ControllerServiceCapability_RPC_Type{
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
	csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
	csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
}

// ControllerGetCapabilities lists the optional RPCs that this service has: CSI spec, ControllerGetCapabilities.
func (c *Service) ControllerGetCapabilities(
	context.Context,
	*csi.ControllerGetCapabilitiesRequest,
) (*csi.ControllerGetCapabilitiesResponse, error) {
	list := make([]*csi.ControllerServiceCapability, 0, len(controllerRPCs))
	for _, rpc := range controllerRPCs {
		list = append(list, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: rpc}},
		})
	}
	return &csi.ControllerGetCapabilitiesResponse{Capabilities: list}, nil
}

// ValidateVolumeCapabilities says whether a volume has the given capabilities: CSI spec, ValidateVolumeCapabilities.
func (c *Service) ValidateVolumeCapabilities(
	ctx context.Context,
	req *csi.ValidateVolumeCapabilitiesRequest,
) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if err := validateValidateVolumeCapabilities(req); err != nil {
		return nil, err
	}
	rc, disk, err := c.disk(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if err := rc.checkConfirmable(ctx, req, disk); err != nil {
		// An rpc.Error is a mismatch, and therefore an answer. Any other error is a failed call.
		var mismatch *rpc.Error
		if !errors.As(err, &mismatch) {
			return nil, err
		}
		return &csi.ValidateVolumeCapabilitiesResponse{Message: mismatch.Error()}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext:      req.GetVolumeContext(),
		VolumeCapabilities: req.GetVolumeCapabilities(),
		Parameters:         req.GetParameters(),
	}}, nil
}

// checkConfirmable returns an [rpc.Error] that says why a volume does not have the requested capabilities, parameters
// or volume context.
func (c rackController) checkConfirmable(
	ctx context.Context,
	req *csi.ValidateVolumeCapabilitiesRequest,
	disk rack.Disk,
) error {
	if err := rpc.FirstError(
		checkSupportedCapabilities(req.GetVolumeCapabilities()),
		checkMutableParameters(req.GetMutableParameters()),
	); err != nil {
		return err
	}
	params, err := parseParameters(req.GetParameters(), req.GetVolumeCapabilities())
	if err != nil {
		return err
	}
	if params.readOnly && !disk.ReadOnly {
		return rpc.FailedPrecondition("parameter %s: disk %q (%s) is writable", rpc.KeyReadOnly, disk.Name, disk.ID)
	}
	actual := map[string]string{
		rpc.KeyDiskName:  disk.Name,
		rpc.KeySizeBytes: strconv.FormatInt(disk.CreatedBytes, 10),
		rpc.KeyBlockSize: strconv.FormatInt(disk.BlockSize, 10),
	}
	for key, value := range req.GetVolumeContext() {
		if have, known := actual[key]; known && have != value {
			return rpc.FailedPrecondition("volume_context: %s is %q, but the disk has %q", key, value, have)
		}
	}
	return c.checkProject(ctx, disk)
}
