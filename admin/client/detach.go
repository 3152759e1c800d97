// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"context"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Detachment is a volume that a node does not have any more.
type Detachment struct {
	VolumeID string `json:"volumeID"`
	NodeID   string `json:"nodeID"`
	// UntilRestart says that the disk stays attached until the node's instance stops or restarts.
	UntilRestart bool `json:"untilRestart,omitempty"`
}

// Detach detaches a volume from a node with this ID or name, or from this node if none is named. On this node, also if
// it is named, it unstages the volume first, and fails while the volume is mounted. For another node the caller must
// confirm that the volume is unmounted there. A volume that is attached to a third node is an error, and so is one that
// the controller leaves alone: a boot disk, or another cluster's volume.
func (c *Client) Detach(ctx context.Context, text, node string, unmounted bool) (Detachment, error) {
	id, err := c.volumeID(ctx, text)
	if err != nil {
		return Detachment{}, err
	}
	detached := Detachment{VolumeID: id}
	if detached.NodeID, err = c.nodeID(ctx, id, node); err != nil {
		return detached, err
	}
	here := node == "" || c.isThisNode(ctx, detached.NodeID)
	unmounted = unmounted || here
	if here {
		err = c.leave(ctx, id)
	}
	if err == nil {
		err = c.checkHolder(ctx, detached, unmounted)
	}
	if err != nil {
		return detached, err
	}
	if unmounted {
		ctx = metadata.AppendToOutgoingContext(ctx, rpc.MetadataDetachNow, "yes")
	}
	var answer metadata.MD
	_, err = c.controller.ControllerUnpublishVolume(ctx,
		&csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: detached.NodeID}, grpc.Header(&answer))
	if deferred := answer.Get(rpc.MetadataDeferred); err == nil && len(deferred) > 0 {
		err = detached.deferred(deferred[0])
	}
	if err == nil && !detached.UntilRestart {
		err = c.checkLeft(ctx, detached)
	}
	switch {
	case !here:
		err = waitsFor(err, fault.RackHasNoHotplug)
	case err == nil:
		err = c.forget(id) // not before: a disk that stays attached is mounted without a controller
	}
	return detached, err
}

// deferred notes what a detach that the controller has deferred waits for. Unless it is a restart, that is an error.
func (d *Detachment) deferred(waitsFor string) error {
	switch waitsFor {
	case rpc.DeferredForRestart:
		d.UntilRestart = true
		return nil
	case rpc.DeferredForAnother:
		return failed(codes.Aborted,
			"volume %s is just being detached from node %s by another process or call: repeat the command", d.VolumeID, d.NodeID)
	}
	return failed(codes.FailedPrecondition,
		"node %s gives volume %s up, and its disk stays attached for the controller's --detach-grace, because "+
			"it may still be mounted there: repeat with --unmounted if it is not", d.NodeID, d.VolumeID)
}

// leave unstages a volume on this node, unless it is mounted.
func (c *Client) leave(ctx context.Context, id string) error {
	if err := c.checkNotMounted(ctx, id); err != nil {
		return err
	}
	return c.unstage(ctx, id)
}

// isThisNode reports whether a node is this one, as far as a node plugin of this host tells.
func (c *Client) isThisNode(ctx context.Context, nodeID string) bool {
	soon, cancel := context.WithTimeout(ctx, nodeInfoTimeout)
	defer cancel()
	node, err := c.thisNode(soon)
	return err == nil && strings.EqualFold(node, nodeID)
}

// checkLeft returns an error if a disk is still attached after the controller's OK. For a disk that it never attaches,
// ControllerUnpublishVolume has nothing to do, which is no error in CSI.
func (c *Client) checkLeft(ctx context.Context, detached Detachment) error {
	_, holder, err := c.holder(ctx, detached.VolumeID)
	switch {
	case isNotFound(err):
		return nil
	case err == nil && strings.EqualFold(holder, detached.NodeID):
		return failed(codes.FailedPrecondition,
			"volume %s is still attached to node %s: the controller detaches neither a boot disk nor another cluster's volume, "+
				"which \"oxide-csi volume adopt\" takes over", detached.VolumeID, detached.NodeID)
	}
	return err
}

// checkHolder returns an error if another node than the one from which the volume shall be detached has its disk, also
// after an unpublish, or if that node may still use it.
func (c *Client) checkHolder(ctx context.Context, wanted Detachment, unmounted bool) error {
	published, holder, err := c.holder(ctx, wanted.VolumeID)
	switch {
	case isNotFound(err):
		return nil
	case err != nil:
		return err
	case holder != "" && !strings.EqualFold(holder, wanted.NodeID):
		return failed(codes.FailedPrecondition,
			"volume %s is attached to %s, not to node %s: detach it there, or name that node with --node", wanted.VolumeID,
			c.nodeText(ctx, wanted.VolumeID, holder), wanted.NodeID)
	case published && !unmounted:
		return failed(
			codes.FailedPrecondition,
			"volume %s is attached to node %s and may be mounted there: unmount it on that node, then repeat with --unmounted; "+
				"or detach it on that node without --node",
			wanted.VolumeID,
			wanted.NodeID,
		)
	}
	return nil
}
