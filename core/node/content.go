// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// ensureFilesystem returns the type of the disk's filesystem. If the disk has none, it makes one. Only this function
// and [Service.ensureEncryptedFilesystem] call mkfs. If it is not certain that the disk is blank, it returns an error.
func (n *Service) ensureFilesystem(ctx context.Context, volume *staging) (fsType string, err error) {
	dev := volume.dev
	zero, err := device.HeadIsZero(ctx, dev)
	if err != nil {
		return "", err
	}
	var content device.Content
	if !zero {
		if content, err = device.Probe(ctx, dev); err != nil {
			return "", err
		}
	}
	interrupted, err := n.formatter.InterruptedFormat(volume.id, mount.FilesystemUUID(volume.id), dev, content)
	if err != nil {
		return "", err
	}
	if content.Empty() || interrupted != nil {
		return n.format(ctx, volume, device.BlankOptions{
			VolumeID: volume.id, Origin: volume.origin, RawBlock: volume.rawBlock, ScanLimit: n.blankScanLimit,
			Interrupted: interrupted,
		})
	}
	return n.checkFilesystem(ctx, volume, content)
}

// checkFilesystem returns the type of the filesystem that was found, or an error if the volume cannot be mounted with
// it.
func (n *Service) checkFilesystem(
	ctx context.Context, volume *staging, content device.Content,
) (fsType string, err error) {
	dev, wanted := volume.content(), volume.wanted
	if content.Type == "" || !filesystem.Supported(content.Type) || content.PartitionTable != "" {
		return "", rpc.Fault(fault.ForeignFilesystem,
			"volume %s: disk %s holds %s, not a supported filesystem: use raw block, or another volume", volume.id, dev, content)
	}
	if wanted != "" && wanted != content.Type {
		return "", volume.otherFilesystem(content.Type)
	}
	if err := n.checkFilesystemUUID(ctx, volume, content); err != nil {
		return "", err
	}
	// From now on the filesystem must not count as the remains of a format, even if it is damaged later. A record may
	// be left from before a crash, and a marker if a user made the filesystem by hand.
	return content.Type, n.formatter.RemoveMarkerAndRecord(volume.id, dev)
}

// otherFilesystem is the error for a disk whose filesystem is not of the wanted type.
func (v *staging) otherFilesystem(found string) error {
	return rpc.Fault(fault.ForeignFilesystem,
		"volume %s: disk %s holds %s, but fs_type is %s: correct fs_type: the plugin never replaces a filesystem", v.id,
		v.content(), found, v.wanted)
}

// checkFilesystemUUID rejects a filesystem that belongs to another volume. The UUID of a filesystem that this plugin
// makes follows from the disk's UUID (version 5), and a disk that was made blank can only have its own. A filesystem
// with any other UUID was made or changed by a user, and is mounted with a warning.
func (n *Service) checkFilesystemUUID(ctx context.Context, volume *staging, content device.Content) error {
	dev := volume.content()
	if content.Type == "btrfs" {
		twin, skipped, err := n.devices.DuplicateBtrfs(ctx, &n.disks, dev, content)
		if err != nil {
			return err
		}
		for _, other := range skipped {
			n.log.Warn("a disk does not respond, so it cannot be read whether it has the same btrfs UUID: staging continues",
				"volume_id", volume.id.String(), "device", other.String())
		}
		if twin != "" {
			return rpc.FailedPrecondition(
				"volume %s: the btrfs on %s is also on %s, and the kernel would mix the two: detach one from this node, or change a UUID (btrfstune -u)",
				volume.id,
				dev,
				twin,
			)
		}
	}
	if volume.acceptsFilesystem(content.UUID) {
		return nil
	}
	found, err := uuid.Parse(content.UUID)
	if err == nil && found.Version() == 5 && volume.origin == rpc.OriginBlank {
		return rpc.Fault(
			fault.ForeignFilesystem,
			"volume %s: the %s on %s belongs to another volume: its UUID is %s: "+
				"use the right disk, or set %s: \"false\" in the volume's context",
			volume.id,
			content.Type,
			dev.Path,
			content.UUID,
			rpc.KeyVerifyFilesystem,
		)
	}
	n.log.Warn("mounting a filesystem that this plugin did not make for this disk", "volume_id", volume.id.String(),
		"device", dev.String(), "fs_type", content.Type, "fs_uuid", content.UUID)
	return nil
}

// checkOwnFilesystem returns an error unless this plugin made the disk's filesystem, for this very disk. A filesystem
// that a snapshot brought is not enough: another disk of the same name may have been made from the same snapshot.
func checkOwnFilesystem(ctx context.Context, volume *staging) error {
	dev := volume.content()
	content, err := device.Probe(ctx, dev)
	if err != nil {
		return err
	}
	if own := mount.FilesystemUUID(volume.id).String(); strings.EqualFold(content.UUID, own) {
		return nil
	}
	return rpc.FailedPrecondition(
		"volume %s: %s holds %s, which does not show that the disk is this volume's: wait for the controller, which knows",
		volume.id, dev, content)
}

// checkMayFormat rejects formatting a disk that the controller did not attach or that is read-only. what names the
// missing content in the error.
func (v *staging) checkMayFormat(what string) error {
	switch {
	case !v.attached || v.sizeBytes == 0:
		return rpc.FailedPrecondition(
			"volume %s: disk %s has no %s, and the publish context, which is required to make one, is missing: publish the volume through the controller",
			v.id,
			v.content(),
			what,
		)
	case v.readOnly:
		return rpc.FailedPrecondition("volume %s: disk %s has no %s, and it is read-only: publish the volume writable once",
			v.id, v.content(), what)
	}
	return nil
}

func (n *Service) format(ctx context.Context, volume *staging, proof device.BlankOptions) (_ string, err error) {
	dev, fsType := volume.content(), cmp.Or(volume.wanted, filesystem.Types()[0])
	if err := volume.checkMayFormat("filesystem"); err != nil {
		return "", err
	}
	options, err := filesystem.ParseMkfsOptions(fsType, volume.mkfsOptions)
	if err != nil {
		return "", err
	}
	start := time.Now()
	blank, err := device.ProveBlank(ctx, dev, proof)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, blank.Close()) }()
	n.log.Info("making a filesystem on a blank disk", "volume_id", volume.id.String(), "device", dev.String(), "fs_type",
		fsType, "interrupted_before", blank.HasRemains(), "scan", time.Since(start))
	took, err := n.formatter.Format(ctx, blank,
		mount.NewFilesystem{VolumeID: volume.id, Type: fsType, MkfsOptions: options})
	if err != nil {
		return "", err
	}
	n.log.Info("made a filesystem", "volume_id", volume.id.String(), "fs_type", fsType, "mkfs", took)
	return fsType, nil
}

// setUpRootFolder sets owner and mode of the root folder from the volume's parameters, if this plugin made the
// filesystem.
func (n *Service) setUpRootFolder(ctx context.Context, volume *staging) error {
	if volume.root.Empty() {
		return nil
	}
	content, err := device.Probe(ctx, volume.content())
	if err != nil || content.UUID != mount.FilesystemUUID(volume.id).String() {
		return err
	}
	return setRootFolder(volume.root, volume.path)
}
