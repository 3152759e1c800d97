// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
)

// ControllerGetVolumeHealth returns the problems of a volume that the rack reports: CSI spec,
// ControllerGetVolumeHealth. A deleted volume is NOT_FOUND.
func (c *Service) ControllerGetVolumeHealth(
	ctx context.Context,
	req *csi.ControllerGetVolumeHealthRequest,
) (*csi.ControllerGetVolumeHealthResponse, error) {
	if err := validateControllerGetVolumeHealth(req); err != nil {
		return nil, err
	}
	_, disk, err := c.shownDisk(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: diskHealth(disk)}, nil
}

// ControllerListVolumeHealth lists the volumes with problems: CSI spec, ControllerListVolumeHealth.
func (c *Service) ControllerListVolumeHealth(
	ctx context.Context,
	req *csi.ControllerListVolumeHealthRequest,
) (*csi.ControllerListVolumeHealthResponse, error) {
	if err := validateControllerListVolumeHealth(req); err != nil {
		return nil, err
	}
	entries, next, err := listPage(
		ctx,
		c,
		c.disksAndReplaced,
		diskProject,
		req,
		func(_ rackController, disk rack.Disk) *csi.VolumeHealth {
			health := diskHealth(disk)
			if len(health.GetHealthStatuses()) == 0 || !isListed(disk, c.ownsDisk(disk), false) {
				return nil
			}
			return health
		},
	)
	if err != nil {
		return nil, err
	}
	return &csi.ControllerListVolumeHealthResponse{Entries: entries, NextToken: next}, nil
}

// diskHealth derives the health of a volume from the state of its disk (docs/reference/rack.md §2). All other known
// states are healthy. A disk without an ID is a volume whose disk is being replaced.
func diskHealth(disk rack.Disk) *csi.VolumeHealth {
	health := &csi.VolumeHealth{VolumeId: disk.VolumeID}
	switch {
	case disk.ID == "":
		health.HealthStatuses = []*csi.VolumeHealth_VolumeHealthEntry{
			{
				Status: csi.VolumeHealthErrorType_INACCESSIBLE,
				Reason: "DiskBeingReplaced",
				Message: "the volume is being expanded, and only the expansion's snapshot has its data, do not delete it: " +
					"if this lasts, free quota and expand the volume again",
			},
		}
	case disk.Unknown != "":
		health.HealthStatuses = []*csi.VolumeHealth_VolumeHealthEntry{
			{
				Status:  csi.VolumeHealthErrorType_INACCESSIBLE,
				Reason:  "DiskUnknown",
				Message: disk.CheckKnown().Error(),
			},
		}
	case disk.State == rack.Faulted:
		health.HealthStatuses = []*csi.VolumeHealth_VolumeHealthEntry{
			{
				Status:  csi.VolumeHealthErrorType_INACCESSIBLE,
				Reason:  "DiskFaulted",
				Message: "disk " + disk.Name + " is faulted and cannot be attached: ask the operator of the rack",
			},
		}
	case disk.State == rack.Maintenance:
		health.HealthStatuses = []*csi.VolumeHealth_VolumeHealthEntry{
			{
				Status:  csi.VolumeHealthErrorType_DEGRADED,
				Reason:  "DiskInMaintenance",
				Message: "disk " + disk.Name + " is in maintenance, for instance for a snapshot, and cannot be attached until that ends",
			},
		}
	}
	return health
}
