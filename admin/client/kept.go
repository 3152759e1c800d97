// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/grpc/metadata"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/core/statefile"
)

// kept is what this host keeps of a volume that it has mounted, in <staging folder>/<volume ID>.json, until the volume
// is detached or deleted. With it a volume is mounted and unmounted while neither a controller nor the rack answers. In
// CSI the orchestrator keeps these values; here the commands are the orchestrator.
type kept struct {
	// Controller is the socket of the controller, because two controllers may each have a volume of this name.
	Controller string `json:"controller"`
	// Volume is the argument VOLUME of the mount: a name or an ID.
	Volume     string     `json:"volume"`
	Attachment Attachment `json:"attachment"`
}

func (c *Client) keptPath(id string) string { return c.stagingPath(id) + ".json" }

// keep writes the file of a volume that is mounted. It removes the files of other volumes that had this name.
func (c *Client) keep(volume string, attachment Attachment) error {
	others, err := c.listKept(volume)
	for _, other := range others {
		if other.Attachment.VolumeID != attachment.VolumeID {
			err = errors.Join(err, c.forget(other.Attachment.VolumeID))
		}
	}
	text, encodeErr := json.Marshal(kept{Controller: c.opts.Controller, Volume: volume, Attachment: attachment})
	if err := errors.Join(err, encodeErr); err != nil {
		return err
	}
	return statefile.Write(c.keptPath(attachment.VolumeID), text)
}

// forget removes the file of a volume that is detached from this node, or deleted.
func (c *Client) forget(id string) error {
	if err := os.Remove(c.keptPath(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// listKept returns what is kept under a name or an ID. It leaves out files that it cannot decode: without them the
// controller is asked.
func (c *Client) listKept(volume string) ([]kept, error) {
	paths, err := filepath.Glob(c.keptPath("*"))
	if err != nil {
		return nil, err
	}
	var found []kept
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // another command has removed it
		}
		if err != nil {
			return nil, err
		}
		var k kept
		if json.Unmarshal(text, &k) != nil || k.Controller != c.opts.Controller {
			continue
		}
		if k.Volume == volume || strings.EqualFold(k.Attachment.VolumeID, volume) {
			found = append(found, k)
		}
	}
	return found, nil
}

// hasKept reports whether this host has mounted the volume before.
func (c *Client) hasKept(volume string) bool {
	found, err := c.listKept(volume)
	return err == nil && len(found) > 0
}

// keptAttachment returns the kept attachment of a volume whose disk is in this guest.
func (c *Client) keptAttachment(ctx context.Context, volume string) (Attachment, bool) {
	found, err := c.listKept(volume)
	if err != nil || len(found) != 1 {
		return Attachment{}, false
	}
	attachment := found[0].Attachment
	// A copy of this host's boot disk has the same files.
	if node, err := c.thisNode(ctx); err != nil || !strings.EqualFold(node, attachment.NodeID) {
		return Attachment{}, false
	}
	// Otherwise the node plugin would wait for the disk, which only a controller can attach.
	disks, err := device.Roots{Sys: c.opts.SysRoot}.Disks()
	serial := diskname.Serial(attachment.PublishContext[rpc.KeyDiskName])
	if err != nil || !slices.ContainsFunc(disks, func(d device.Disk) bool { return d.Serial == serial }) {
		return Attachment{}, false
	}
	return attachment, true
}

// onlyOwnFilesystem makes the node plugin mount only what it made for this disk, because a kept attachment may be out
// of date.
func onlyOwnFilesystem(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, rpc.MetadataOwnFilesystem, "yes")
}
