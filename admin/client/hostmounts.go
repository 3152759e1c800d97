// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"context"
	"path/filepath"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
)

// hostMounts are the disks of this host and its mount table. The client reads them itself, because the plugin knows
// only the given staging path and the mounts that it made since its start.
type hostMounts struct {
	disks []device.Disk
	table mount.Table
}

func (c *Client) readHostMounts() (m hostMounts, err error) {
	if m.disks, err = (device.Roots{Sys: c.opts.SysRoot}).Disks(); err == nil {
		m.table, err = mount.ReadTable()
	}
	return m, err
}

// targets returns the paths at which a disk is mounted outside of the volume's staging path, which is resolved.
func (m hostMounts) targets(diskName, staging string) (paths []string) {
	for _, disk := range m.disks {
		if disk.Serial != diskname.Serial(diskName) {
			continue
		}
		for _, entry := range m.table.OfDevice(disk.Number) {
			if !isAt(entry, staging) {
				paths = append(paths, entry.Path)
			}
		}
	}
	return paths
}

// resolvedStagingPath returns the staging path of a volume as the mount table has it.
func (c *Client) resolvedStagingPath(id string) string {
	path := c.stagingPath(id)
	if resolved, err := mount.Resolve(path); err == nil { // otherwise the path does not exist
		return resolved
	}
	return path
}

// isAt reports whether a mount is at a staging path, or directly below it, where a raw block volume is staged.
func isAt(entry mount.Entry, staging string) bool {
	return entry.Path == staging || filepath.Dir(entry.Path) == staging
}

// nodeInfoTimeout bounds the wait for a node plugin that is not needed for the result.
const nodeInfoTimeout = 2 * time.Second

// SetMounts sets the paths at which volumes are mounted on this host. It sets none if this host's node plugin does not
// tell soon which node this is: disks of two racks can have the same name. It asks only if there is such a mount,
// because a controller's host need not have a node plugin.
func (c *Client) SetMounts(ctx context.Context, volumes []Volume) error {
	mounts, err := c.readHostMounts()
	if err != nil {
		return err
	}
	node := ""
	for i, v := range volumes {
		paths := mounts.targets(v.DiskName, c.resolvedStagingPath(v.ID))
		if v.NodeID == "" || len(paths) == 0 {
			continue
		}
		if node == "" {
			soon, cancel := context.WithTimeout(ctx, nodeInfoTimeout)
			node, err = c.thisNode(soon)
			if cancel(); err != nil {
				return nil
			}
		}
		if strings.EqualFold(v.NodeID, node) {
			volumes[i].Mounts = paths
		}
	}
	return nil
}
