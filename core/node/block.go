// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// This file stages raw block volumes.

func (n *Service) stageBlock(ctx context.Context, volume *staging) error {
	file := blockStagingPath(volume.path, volume.id)
	staged, err := n.isStagedAsBlock(ctx, volume, file)
	if err != nil || staged {
		return err
	}
	own, err := n.checkForeignUser(ctx, volume)
	if err == nil && own != nil {
		err = volume.foreignUser(own.String())
	}
	if err == nil && !volume.readOnly {
		err = n.removeTraces(ctx, volume)
	}
	if err != nil {
		return err
	}
	if err := makeBlockStagingFolder(volume.path, file); err != nil {
		return err
	}
	if err := mount.MakeFile(file); err != nil {
		return err
	}
	if _, err := n.recordStage(volume, volume.readOnly); err != nil {
		return err
	}
	return bindVerified(volume.dev, volume.content().Path, file, false)
}

// isStagedAsBlock reports whether the volume's device node is bound to the file already. It unmounts nodes whose disk
// has left the guest. Any other mount of the disk or at the path is an error.
func (n *Service) isStagedAsBlock(ctx context.Context, volume *staging, file string) (bool, error) {
	table, err := mount.ReadTable()
	if err != nil {
		return false, err
	}
	if entry, ok := table.At(volume.path); ok {
		if entry.Number == volume.dev.Number {
			return false, rpc.AlreadyExists("volume %s is staged at %s with a filesystem, not as raw block: unmount it first",
				volume.id, volume.path)
		}
		return false, rpc.FailedPrecondition("staging path %s has a mount that is not this volume: %s: unmount it first",
			volume.path, entry)
	}
	for entry, ok := table.At(file); ok; entry, ok = table.At(file) {
		if number, ok := entry.Device(); ok && number == volume.dev.Number && !entry.NodeRemoved() {
			_, err := n.recordStaged(volume, volume.readOnly)
			return true, err
		}
		if err := n.unmountOrphan(ctx, table, entry); err != nil {
			return false, err
		}
		if table, err = mount.ReadTable(); err != nil {
			return false, err
		}
	}
	return false, checkNotMounted(volume, table)
}

// makeBlockStagingFolder makes sure that the staging path is a folder which contains nothing, except perhaps the
// volume's file. Otherwise another volume may be staged there.
func makeBlockStagingFolder(staging, file string) error {
	if err := mount.MakeNewFolder(staging); err == nil || !errors.Is(err, fs.ErrExist) {
		return err
	}
	entries, err := os.ReadDir(staging)
	if errors.Is(err, unix.ENOTDIR) {
		return rpc.FailedPrecondition("staging path %s is not a directory: remove it", staging)
	}
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.Name() != filepath.Base(file) {
			return rpc.FailedPrecondition(
				"staging path %s contains %q, which is not this volume's: unstage the other volume, or remove the file", staging,
				entry.Name())
		}
	}
	return nil
}

// bindVerified binds source to target and verifies that the device is mounted there.
func bindVerified(dev device.Device, source, target string, readOnly bool) error {
	if err := mount.Bind(source, target, readOnly); err != nil {
		return err
	}
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	entry, ok := table.At(target)
	if number, known := entry.Device(); ok && known && number == dev.Number && entry.ReadOnly == readOnly {
		return nil
	}
	return rpc.Internal(
		"%s was bound to %s, but the mount table does not show the mount with read-only %t: unmount the volume and read the kernel's log",
		dev,
		target,
		readOnly,
	)
}
