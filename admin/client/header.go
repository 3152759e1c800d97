// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"context"
	"slices"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/luks"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// HeaderBackup is a copy of the header of an encrypted volume.
type HeaderBackup struct {
	VolumeID string `json:"volumeID"`
	File     string `json:"file"`
}

// BackUpHeader copies the LUKS2 header of a volume that is attached to this node to a new file. The attachment is the
// given one, or the controller's if given is nil.
func (c *Client) BackUpHeader(ctx context.Context, text, file string, given *Attachment) (HeaderBackup, error) {
	id, err := c.volumeID(ctx, text)
	if err != nil {
		return HeaderBackup{}, err
	}
	attachment, err := c.attachment(ctx, id, given)
	if err != nil {
		return HeaderBackup{}, err
	}
	if attachment.PublishContext[rpc.KeyEncryption] == "" {
		return HeaderBackup{}, failed(codes.FailedPrecondition, "volume %s is not encrypted: it has no header", id)
	}
	roots := device.Roots{Dev: c.opts.DevRoot, Sys: c.opts.SysRoot}
	disks, err := roots.Disks()
	if err != nil {
		return HeaderBackup{}, err
	}
	serial := diskname.Serial(attachment.PublishContext[rpc.KeyDiskName])
	i := slices.IndexFunc(disks, func(d device.Disk) bool { return d.Serial == serial })
	if i < 0 {
		return HeaderBackup{}, failed(codes.Unavailable, "volume %s: its disk is not in this guest yet: try again", id)
	}
	dev, err := roots.ByNumber(disks[i].Number)
	if err != nil {
		return HeaderBackup{}, err
	}
	headerUUID, label, err := dev.LUKSHeader()
	switch {
	case err != nil || headerUUID == "":
		return HeaderBackup{}, failed(codes.FailedPrecondition,
			"volume %s: disk %s has no LUKS2 header: mount the volume once (%v)", id, dev, err)
	case label == device.LabelUnformatted:
		// A restored copy would say that nothing was ever written.
		return HeaderBackup{}, failed(codes.FailedPrecondition,
			"volume %s was never used: mount it once, then copy its header", id)
	}
	if err := luks.BackUpHeader(ctx, dev.Path, file); err != nil {
		return HeaderBackup{}, failed(codes.FailedPrecondition, "volume %s: %v", id, err)
	}
	return HeaderBackup{VolumeID: id, File: file}, nil
}
