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
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Mounted is a volume that is mounted on this node.
type Mounted struct {
	VolumeID    string `json:"volumeID"`
	StagingPath string `json:"stagingPath"`
	TargetPath  string `json:"targetPath"`
	// NoController is why no controller answered at the mount. It is empty if one did.
	NoController string `json:"noController,omitempty"`
}

// MountOptions are the options of [Client.Mount].
type MountOptions struct {
	// Target is the target path: absolute, with an existing parent.
	Target     string
	Capability *csi.VolumeCapability
	ReadOnly   bool
	// Context is added to the volume context.
	Context map[string]string
	// Secrets are those of NodeStageVolume. They are never kept.
	Secrets map[string]string
	// Attachment is the result of [Client.Attach]. If it is nil, the client asks the controller.
	Attachment *Attachment
	// Attach says that the volume is attached to this node first.
	Attach bool
	// NeedsControllerUntil is the time until which the volume is not mounted if the controller is not ready.
	NeedsControllerUntil time.Time
}

// stagingMode lets only root reach a filesystem through its staging path.
const stagingMode = 0o700

// Mount stages a volume that is attached to this node, and publishes it at the target. If it fails, it unstages a
// volume that it has staged. If the controller or the rack does not answer, or the rack denies the calls, and this node
// has mounted the volume before and has its disk, it mounts the filesystem that the plugin made there then.
func (c *Client) Mount(ctx context.Context, text string, opts MountOptions) (Mounted, error) {
	if err := checkParent(opts.Target); err != nil {
		return Mounted{TargetPath: opts.Target}, err
	}
	asking := ctx
	if _, here := c.keptAttachment(ctx, text); here {
		var cancel context.CancelFunc
		asking, cancel = context.WithTimeout(ctx, controllerTimeout)
		defer cancel()
	}
	attachment, err := c.attachmentToMount(asking, text, opts)
	if isUnanswered(err) && asking.Err() != nil && ctx.Err() == nil {
		err = failed(codes.DeadlineExceeded, "the controller has not responded within %s", controllerTimeout)
	}
	attachment, noController, err := c.orKept(ctx, text, attachment, err, opts.NeedsControllerUntil)
	if err != nil {
		return Mounted{}, err
	}
	if noController != "" {
		ctx = onlyOwnFilesystem(ctx)
	}
	mounted, err := c.mountAttached(ctx, attachment, opts)
	switch {
	case noController != "" && err != nil:
		// Whatever the node says, the controller may know more once it answers.
		return mounted, failed(codes.Unavailable, "%s; and without the controller: %s", noController, err)
	case noController != "":
		mounted.NoController = noController
	case err == nil && opts.Capability.GetMount() != nil:
		if err := c.keep(text, attachment); err != nil {
			return mounted, fmt.Errorf("the volume is mounted, but cannot be mounted later without a controller: %w", err)
		}
	}
	return mounted, err
}

// orKept returns the attachment of the controller's answer. If there was none, or the rack denied the call, it returns
// the kept attachment of a volume whose disk is in this guest, and why.
func (c *Client) orKept(
	ctx context.Context, text string, answered Attachment, err error, needsController time.Time,
) (Attachment, string, error) {
	denied := isDenied(err)
	if !denied && (!isUnanswered(err) || time.Now().Before(needsController)) {
		return answered, "", err
	}
	if earlier, ok := c.keptAttachment(ctx, text); ok {
		return earlier, err.Error(), nil
	}
	if denied && c.hasKept(text) {
		err = worthWaiting(err) // the disk may not be in the guest yet
	}
	return answered, "", err
}

// controllerTimeout bounds what the controller is asked for a volume whose disk is in this guest, so that nothing has
// to be attached. A rack that accepts connections and does not answer would hold a mount at boot up for many minutes.
const controllerTimeout = 20 * time.Second

// attachmentToMount returns the attachment to this node of the volume with this ID or name.
func (c *Client) attachmentToMount(ctx context.Context, text string, opts MountOptions) (Attachment, error) {
	if opts.Attach {
		return c.Attach(ctx, text, "")
	}
	id, err := c.volumeID(ctx, text)
	if err != nil {
		return Attachment{}, err
	}
	return c.attachment(ctx, id, opts.Attachment)
}

// mountAttached mounts a volume, or leaves it as it was.
func (c *Client) mountAttached(
	ctx context.Context,
	attachment Attachment,
	opts MountOptions,
) (mounted Mounted, err error) {
	id := attachment.VolumeID
	mounted = Mounted{VolumeID: id, StagingPath: c.stagingPath(id), TargetPath: opts.Target}
	if err := os.MkdirAll(c.opts.StagingDir, stagingMode); err != nil {
		return mounted, fmt.Errorf(
			"cannot create the directory for staging paths: %w: run this as root, or choose another one with --staging-dir", err)
	}
	stagedBefore, err := c.isStaged(id)
	if err != nil {
		return mounted, err
	}
	err = c.stageAndPublish(ctx, mounted, attachment, opts)
	if err != nil && !stagedBefore {
		err = c.undoStage(ctx, id, err)
	}
	return mounted, err
}

func (c *Client) stageAndPublish(ctx context.Context, m Mounted, attachment Attachment, opts MountOptions) error {
	volumeContext := map[string]string{}
	maps.Copy(volumeContext, attachment.VolumeContext)
	maps.Copy(volumeContext, opts.Context)
	if _, err := c.node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: m.VolumeID, PublishContext: attachment.PublishContext, StagingTargetPath: m.StagingPath,
		VolumeCapability: opts.Capability, VolumeContext: volumeContext, Secrets: opts.Secrets,
	}); err != nil {
		return err
	}
	_, err := c.node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId:          m.VolumeID,
		PublishContext:    attachment.PublishContext,
		StagingTargetPath: m.StagingPath,
		TargetPath:        m.TargetPath,
		VolumeCapability:  opts.Capability,
		Readonly:          opts.ReadOnly,
		VolumeContext:     volumeContext,
	})
	return err
}

// isStaged reports whether anything is mounted at the volume's staging path.
func (c *Client) isStaged(id string) (bool, error) {
	table, err := mount.ReadTable()
	staging := c.resolvedStagingPath(id)
	return slices.ContainsFunc(table, func(entry mount.Entry) bool { return isAt(entry, staging) }), err
}

// undoTimeout bounds the unstage after a failed mount, which may have failed because --timeout was up.
const undoTimeout = 30 * time.Second

// NotUndoneError means that a failed mount could not unstage what it may have staged.
type NotUndoneError struct{ failure, cause error }

func (e *NotUndoneError) Error() string { return e.failure.Error() + "; " + e.Reason() }
func (e *NotUndoneError) Unwrap() error { return e.failure }

// Reason says why the volume may stay staged.
func (e *NotUndoneError) Reason() string { return "the volume may stay staged: " + e.cause.Error() }

// undoStage unstages a volume that a failed mount has staged. After an interruption the node may still work on the
// call: the unstage waits for its end. The plugin refuses it if another command has published the volume at another
// target.
func (c *Client) undoStage(ctx context.Context, id string, failure error) error {
	staged, err := c.isStaged(id)
	if staged || errors.Is(ctx.Err(), context.Canceled) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		err = c.unstage(ctx, id)
	}
	if err != nil {
		return &NotUndoneError{failure, err}
	}
	return failure
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
			"%s is not a directory, so nothing can be mounted at %s: create the directory, or choose another target",
			parent,
			target,
		)
	case err != nil:
		return fmt.Errorf("cannot read the target's directory: %w", err)
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
	where, next := "not attached", "attach the volume with \"oxide-csi volume attach\""
	for _, holder := range got.GetStatus().GetPublishedNodeIds() {
		if strings.EqualFold(holder, node) {
			return c.publish(ctx, id, node)
		}
		where, next = "attached to "+c.nodeText(ctx, id, holder), "unmount and detach it there first"
	}
	return Attachment{}, failed(codes.FailedPrecondition,
		"volume %s is %s, and this is node %s: %s", id, where, node, next)
}

// Unmount unpublishes a volume from the target and unstages the volume. With keepStaged it does not unstage the volume,
// which other targets use.
func (c *Client) Unmount(ctx context.Context, text, target string, keepStaged bool) (Mounted, error) {
	id, err := c.mountedVolumeID(ctx, text)
	if err != nil {
		return Mounted{}, err
	}
	unmounted := Mounted{VolumeID: id, StagingPath: c.stagingPath(id), TargetPath: target}
	_, err = c.node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
	if isFault(err, fault.PathOccupied) {
		err = c.notMountedAt(text, target)
	}
	if err != nil || keepStaged {
		return unmounted, err
	}
	return unmounted, c.unstage(ctx, id)
}

// notMountedAt is the error for a target that has something else than the volume. Its content is never advised to be
// removed: the caller may have named another path or another volume than was meant.
func (c *Client) notMountedAt(volume, target string) error {
	where := "check the path and the volume"
	found, _ := c.listKept(volume) // without them the message says less
	mounts, err := c.readHostMounts()
	if err == nil && len(found) == 1 {
		kept := found[0].Attachment
		paths := mounts.targets(kept.PublishContext[rpc.KeyDiskName], c.resolvedStagingPath(kept.VolumeID))
		if len(paths) > 0 {
			where = "it is mounted at " + strings.Join(paths, ", ")
		}
	}
	return failed(codes.FailedPrecondition,
		"volume %s is not mounted at %s, and nothing was changed there: %s", volume, target, where)
}

// mountedVolumeID returns the ID of a volume from its ID or its name. It asks the controller only for a name under
// which this node has mounted nothing: at a shutdown the rack may be out of reach.
func (c *Client) mountedVolumeID(ctx context.Context, text string) (string, error) {
	if found, err := c.listKept(text); err == nil && len(found) == 1 {
		return found[0].Attachment.VolumeID, nil
	}
	return c.volumeID(ctx, text)
}

// unstage unstages a volume and removes its staging path, which the plugin made. In CSI the caller removes it.
func (c *Client) unstage(ctx context.Context, id string) error {
	req := &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: c.stagingPath(id)}
	if _, err := c.node.NodeUnstageVolume(ctx, req); err != nil {
		return err
	}
	if err := mount.Remove(c.stagingPath(id)); err != nil {
		return fmt.Errorf("the volume is unstaged, but its staging path is left: %w", err)
	}
	return nil
}

// checkNotMounted returns an error if the disk is mounted on this node outside of its staging path.
func (c *Client) checkNotMounted(ctx context.Context, id string) error {
	got, err := c.getVolume(ctx, id)
	if isNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	mounts, err := c.readHostMounts()
	if err != nil {
		return err
	}
	for _, target := range mounts.targets(got.GetVolume().GetVolumeContext()[rpc.KeyDiskName], c.resolvedStagingPath(id)) {
		return worthWaiting(failed(
			codes.FailedPrecondition,
			"volume %s is mounted at %s and is not detached: unmount it with \"oxide-csi volume unmount\" "+
				"and the same --staging-dir as at the mount",
			id,
			target,
		))
	}
	return nil
}
