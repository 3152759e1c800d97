// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
)

// ControllerGetVolumeHealth tells what is wrong with a volume so far as its rack knows: CSI spec, ControllerGetVolumeHealth. A
// volume that is gone is NOT_FOUND.
func (c *Service) ControllerGetVolumeHealth(
	ctx context.Context,
	req *csi.ControllerGetVolumeHealthRequest,
) (*csi.ControllerGetVolumeHealthResponse, error) {
	if err := validateControllerGetVolumeHealth(req); err != nil {
		return nil, err
	}
	_, disk, err := c.disk(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: diskHealth(disk)}, nil
}

// ControllerListVolumeHealth lists the volumes with which something is wrong: CSI spec, ControllerListVolumeHealth.
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
		(*rack.Client).Disks,
		diskProject,
		req,
		func(_ onRack, disk rack.Disk) *csi.VolumeHealth {
			health := diskHealth(disk)
			if len(health.GetHealthStatuses()) == 0 || !listed(disk, c.owns(disk)) {
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

// diskHealth reads the state of a disk, docs/reference/rack.md §2. All other states are part of a volume's ordinary life.
func diskHealth(disk rack.Disk) *csi.VolumeHealth {
	health := &csi.VolumeHealth{VolumeId: disk.ID}
	switch disk.State {
	case rack.Faulted:
		health.HealthStatuses = []*csi.VolumeHealth_VolumeHealthEntry{
			{
				Status:  csi.VolumeHealthErrorType_INACCESSIBLE,
				Reason:  "DiskFaulted",
				Message: "the rack says that the disk " + disk.Name + " is faulted: it cannot be attached; have the rack's operator look at it",
			},
		}
	case rack.Maintenance:
		health.HealthStatuses = []*csi.VolumeHealth_VolumeHealthEntry{
			{
				Status:  csi.VolumeHealthErrorType_DEGRADED,
				Reason:  "DiskInMaintenance",
				Message: "the rack is at work on the disk " + disk.Name + ", for a snapshot perhaps: it cannot be attached until that ends",
			},
		}
	}
	return health
}
