// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/luks"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
)

// This file finds and closes the mappings of encrypted disks.

// lock closes the mapping that a failed stage has opened.
func (n *Service) lock(ctx context.Context, volume *staging) {
	if !volume.opened {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	if err := n.closeMapping(ctx, *volume.mapping, false); err != nil {
		n.log.Warn("cannot close an encrypted disk after a failed stage: unstage the volume",
			"volume_id", volume.id.String(), "error", err)
	}
}

const (
	// closeTimeout is how long a mapping may be busy: udev looks at each new one for a moment.
	closeTimeout  = 5 * time.Second
	closeInterval = 50 * time.Millisecond
)

// closeMapping closes a mapping. After closeTimeout the error is [luks.ErrBusy] and names the user of the mapping.
func (n *Service) closeMapping(ctx context.Context, m device.Mapping, deferred bool) error {
	for end := time.Now().Add(closeTimeout); ; time.Sleep(closeInterval) {
		err := n.luks.Close(ctx, m, deferred)
		if !errors.Is(err, luks.ErrBusy) {
			return err
		}
		if time.Now().After(end) || ctx.Err() != nil {
			use := mount.DescribeUse(m.Device)
			if holders := n.devices.Holders(m.Disk); len(holders) > 0 {
				use = m.String() + " is a part of " + holders[0]
			}
			return fmt.Errorf("%w: %s", luks.ErrBusy, use)
		}
	}
}

// contentOf returns the volume's open mapping on the disk, or the disk if there is none.
func (n *Service) contentOf(id uuid.UUID, dev device.Device) (device.Device, error) {
	mapping, found, err := n.devices.Mapping(id)
	if err != nil || !found || mapping.Below != dev.Number {
		return dev, err
	}
	return mapping.Device, nil
}

// letGoOfMapping closes the volume's mapping on a disk that is unmounted here, when no program can write to it. If only
// read-only copies of the mount in other namespaces remain, the kernel closes it when the last of them has gone.
func (n *Service) letGoOfMapping(
	ctx context.Context,
	id uuid.UUID,
	dev device.Device,
	block, responds bool,
) (copies []mount.Copy, err error) {
	mapping, found, err := n.devices.Mapping(id)
	if err != nil || !found || mapping.Below != dev.Number {
		return nil, err
	}
	copies, err = mount.WaitFree(ctx, mapping.Device, 0, block, responds)
	if err != nil && !device.HasLeft(err) {
		return nil, err
	}
	return copies, n.closeMapping(ctx, mapping, len(copies) > 0)
}

// closeOrphans closes the volume's mappings that cannot be used: one that a killed cryptsetup left unfinished, and
// those of disks that have left the guest, at the latest when their last users have gone.
func (n *Service) closeOrphans(ctx context.Context, id uuid.UUID) error {
	all, err := n.devices.MappingsOf(id)
	if err != nil {
		return err
	}
	for _, m := range all {
		if m.Below != (device.Number{}) && !m.Unfinished() {
			continue
		}
		n.log.Warn("closing an old mapping of the volume", "volume_id", id.String(), "mapping", m.DMName)
		if err := n.closeMapping(ctx, m, true); err != nil {
			return err
		}
	}
	return nil
}

// holders returns what is built on the volume's disk, except the volume's own mapping, and what is built on that.
func (n *Service) holders(id uuid.UUID, dev device.Device) []string {
	all := slices.DeleteFunc(n.devices.Holders(dev.Disk), func(holder string) bool {
		return strings.Contains(holder, "("+device.MappingPrefix(id))
	})
	if content, err := n.contentOf(id, dev); err == nil && content.Number != dev.Number {
		all = append(all, n.devices.Holders(content.Disk)...)
	}
	return all
}
