// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Mounted is a volume that is mounted on this node.
type Mounted struct {
	VolumeID    string `json:"volumeID"`
	StagingPath string `json:"stagingPath"`
	TargetPath  string `json:"targetPath"`
}

// MountOptions are the options of [Client.Mount].
type MountOptions struct {
	// Target is the target path: absolute, with an existing parent.
	Target     string
	Capability *csi.VolumeCapability
	ReadOnly   bool
	// Context is added to the volume context.
	Context map[string]string
	// Attachment is the result of [Client.Attach]. If it is nil, the client asks the controller.
	Attachment *Attachment
}

// stagingMode lets only root reach a filesystem through its staging path.
const stagingMode = 0o700

// Mount stages a volume that is attached to this node, and publishes it at the target. It does not attach the volume.
func (c *Client) Mount(ctx context.Context, text string, opts MountOptions) (Mounted, error) {
	id, err := c.volumeID(ctx, text)
	if err != nil {
		return Mounted{}, err
	}
	mounted := Mounted{VolumeID: id, StagingPath: c.stagingPath(id), TargetPath: opts.Target}
	if err := checkParent(opts.Target); err != nil {
		return mounted, err
	}
	attachment, err := c.attachment(ctx, id, opts.Attachment)
	if err != nil {
		return mounted, err
	}
	volumeContext := map[string]string{}
	maps.Copy(volumeContext, attachment.VolumeContext)
	maps.Copy(volumeContext, opts.Context)
	if !c.opts.DryRun {
		if err := os.MkdirAll(c.opts.StagingDir, stagingMode); err != nil {
			return mounted, fmt.Errorf(
				"create the folder for staging paths: %w: run this as root, or choose another folder with --staging-dir",
				err,
			)
		}
	}
	if _, err = c.node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: id, PublishContext: attachment.PublishContext, StagingTargetPath: mounted.StagingPath,
		VolumeCapability: opts.Capability, VolumeContext: volumeContext,
	}); err != nil {
		return mounted, err
	}
	_, err = c.node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId:          id,
		PublishContext:    attachment.PublishContext,
		StagingTargetPath: mounted.StagingPath,
		TargetPath:        opts.Target,
		VolumeCapability:  opts.Capability,
		Readonly:          opts.ReadOnly,
		VolumeContext:     volumeContext,
	})
	return mounted, err
}

// stagingPath returns the staging path of a volume.
func (c *Client) stagingPath(id string) string { return filepath.Join(c.opts.StagingDir, id) }

// checkParent checks the target's parent before the volume is staged. The plugin would check it only afterwards.
func checkParent(target string) error {
	parent := filepath.Dir(target)
	info, err := os.Stat(parent)
	switch {
	case errors.Is(err, fs.ErrNotExist) || err == nil && !info.IsDir():
		return failed(
			codes.FailedPrecondition,
			"%s is not a folder, so nothing can be mounted at %s: create the folder, or choose another target",
			parent,
			target,
		)
	case err != nil:
		return fmt.Errorf("check the target's folder: %w", err)
	}
	return nil
}

// attachment returns the volume's attachment to this node: the given one, or the controller's if none is given. It
// returns an error if the volume is not attached to this node.
func (c *Client) attachment(ctx context.Context, id string, given *Attachment) (Attachment, error) {
	node, err := c.thisNode(ctx)
	if err != nil {
		return Attachment{}, err
	}
	if given != nil {
		if !strings.EqualFold(given.VolumeID, id) || !strings.EqualFold(given.NodeID, node) {
			return Attachment{}, failed(
				codes.FailedPrecondition,
				"the attachment is for volume %s on node %s, not for volume %s on node %s: "+
					"use the output of \"volume attach --json\"",
				given.VolumeID,
				given.NodeID,
				id,
				node,
			)
		}
		return *given, nil
	}
	got, err := c.getVolume(ctx, id)
	if err != nil {
		return Attachment{}, err
	}
	where := "not attached"
	for _, holder := range got.GetStatus().GetPublishedNodeIds() {
		if strings.EqualFold(holder, node) {
			return c.publish(ctx, got.GetVolume(), node)
		}
		where = "attached to node " + holder
	}
	return Attachment{}, failed(
		codes.FailedPrecondition,
		"volume %s is %s, and this is node %s: attach the volume with \"oxide-csi volume attach\"",
		id,
		where,
		node,
	)
}

// Unmount unpublishes a volume from the target and unstages the volume. With keepStaged it does not unstage the volume,
// which other targets use.
func (c *Client) Unmount(ctx context.Context, text, target string, keepStaged bool) (Mounted, error) {
	id, err := c.volumeID(ctx, text)
	if err != nil {
		return Mounted{}, err
	}
	unmounted := Mounted{VolumeID: id, StagingPath: c.stagingPath(id), TargetPath: target}
	_, err = c.node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
	if err != nil || keepStaged {
		return unmounted, err
	}
	return unmounted, c.unstage(ctx, id)
}

// unstage unstages a volume and removes its staging path. In CSI the caller creates this path and removes it.
func (c *Client) unstage(ctx context.Context, id string) error {
	req := &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: c.stagingPath(id)}
	if _, err := c.node.NodeUnstageVolume(ctx, req); err != nil {
		return err
	}
	if c.opts.DryRun {
		return nil
	}
	if err := os.Remove(c.stagingPath(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the volume is unstaged, but its staging path is left: %w", err)
	}
	return nil
}

// checkNotMounted returns an error if the disk is mounted on this node outside of its staging path. It reads the mount
// table itself, because the plugin knows only the given staging path and the mounts that it made since its start.
func (c *Client) checkNotMounted(ctx context.Context, id string) error {
	got, err := c.getVolume(ctx, id)
	if isNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	serial := diskname.Serial(got.GetVolume().GetVolumeContext()[rpc.KeyDiskName])
	disks, err := device.Roots{Sys: c.opts.SysRoot}.Disks()
	if err != nil {
		return err
	}
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	staging := c.stagingPath(id)
	if resolved, err := mount.Resolve(staging); err == nil { // otherwise the path does not exist
		staging = resolved
	}
	for _, disk := range disks {
		if disk.Serial != serial {
			continue
		}
		for _, entry := range table.OfDevice(disk.Number) {
			if entry.Path != staging && filepath.Dir(entry.Path) != staging {
				return failed(
					codes.FailedPrecondition,
					"volume %s is mounted at %s and is not detached: unmount it with \"oxide-csi volume unmount\" "+
						"and the same --staging-dir as at the mount",
					id,
					entry.Path,
				)
			}
		}
	}
	return nil
}
