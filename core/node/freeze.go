// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumerecord"
)

// A backup tool freezes a filesystem (fsfreeze), and may leave it frozen. A frozen filesystem holds its disk also after
// its last unmount, and can only be thawed through a mount. So the service keeps the last mount, and mounts the
// filesystem again if another program has unmounted it.

func frozenAt(id uuid.UUID, path string) error {
	return rpc.FailedPrecondition("volume %s: its filesystem is frozen: thaw it with fsfreeze --unfreeze %s", id, path)
}

// checkNotFrozen returns an error if a volume that is mounted nowhere here has a frozen filesystem. It mounts it at its
// staging path, so that it can be thawed.
func (n *Service) checkNotFrozen(ctx context.Context, held volumerecord.Record, dev device.Device) error {
	content, err := n.contentOf(held.Volume, dev)
	if err != nil || held.Kind != volumerecord.Filesystem || !errors.Is(content.CheckUnused(), device.ErrInUse) {
		return err
	}
	found, err := device.Probe(ctx, content)
	if err != nil || found.Empty() || !filesystem.Supported(found.Type) {
		return err
	}
	frozen, err := mount.RestoreFrozen(content, found.Type, held.StagingPath,
		func() error { return n.prepareRestore(held) })
	switch {
	case frozen && err == nil:
		return frozenAt(held.Volume, held.StagingPath)
	case frozen:
		n.log.Warn("cannot mount a frozen filesystem again", "volume_id", held.Volume.String(), "error", err)
		return rpc.FailedPrecondition(
			"volume %s: its filesystem is frozen, and mounted nowhere: mount %s, and run fsfreeze --unfreeze there", held.Volume,
			content.Path)
	}
	return err
}

// prepareRestore makes the staging path ready for a frozen filesystem. The mount will lack the volume's mount flags,
// and the step tells a stage to replace it.
func (n *Service) prepareRestore(held volumerecord.Record) error {
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	if other, ok := table.At(held.StagingPath); ok {
		return fmt.Errorf("%w: %s has a mount: %s", mount.ErrForeign, held.StagingPath, other)
	}
	if err := n.records.SetStep(held, volumerecord.Leaving); err != nil {
		n.log.Warn("cannot record that an unstage has begun", "volume_id", held.Volume.String(), "error", err)
	}
	return mount.MakeFolder(held.StagingPath)
}

// wasRestored reports whether the mount at a staging path is that of [Service.checkNotFrozen].
func wasRestored(record volumerecord.Record, entry mount.Entry) bool {
	return record.Step == volumerecord.Leaving &&
		(record.ReadOnly || entry.ReadOnly && !entry.FilesystemReadOnly)
}
