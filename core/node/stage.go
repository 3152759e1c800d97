// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumelock"
)

// NodeStageVolume finds the volume's disk, makes a filesystem on it if it is provably blank, and mounts it at the staging
// path; of a raw block volume it binds the device node. It waits for the disk to appear in the guest. A repetition finds
// the mount and succeeds; one that asks for another filesystem, or for raw block instead, is ALREADY_EXISTS. CSI spec,
// NodeStageVolume.
func (n *Service) NodeStageVolume(
	ctx context.Context,
	req *csi.NodeStageVolumeRequest,
) (*csi.NodeStageVolumeResponse, error) {
	if err := validateNodeStageVolume(req); err != nil {
		return nil, err
	}
	volume, err := parseNodeVolume(req.GetVolumeId(), req.GetPublishContext(), req.GetVolumeContext())
	if err != nil {
		return nil, err
	}
	ctx, release, err := n.lockVolume(ctx, volume.id)
	if err != nil {
		return nil, err
	}
	defer release()
	err = n.stage(ctx, req, volume)
	n.failures.record(volume.id, err)
	if err != nil {
		return nil, err
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

// lockVolume waits for what an earlier run of the plugin may have started for the volume and left at work: a mount, for one,
// that is in nobody's list yet.
func (n *Service) lockVolume(ctx context.Context, volume uuid.UUID) (locked context.Context, release func(), err error) {
	locked, release, err = volumelock.Acquire(ctx, n.stateDir, volume, rpc.WaitBudget(ctx))
	if err != nil {
		return nil, nil, fmt.Errorf("volume %s: %w: ask again", volume, err)
	}
	return locked, release, nil
}

func (n *Service) stage(ctx context.Context, req *csi.NodeStageVolumeRequest, volume nodeVolume) error {
	staging, err := resolve(req.GetStagingTargetPath())
	if err != nil {
		return err
	}
	capability := req.GetVolumeCapability().GetMount()
	if err := mount.CheckFlags(capability.GetMountFlags()); err != nil {
		return err
	}
	start := time.Now()
	dev, err := n.devices.WaitForDisk(ctx, volume.expectedDisk(), n.deviceTimeout)
	if err != nil {
		return err
	}
	n.log.Debug("found the disk", "volume_id", volume.id.String(), "device", dev.String(), "find", time.Since(start))
	if !volume.attached {
		// Nobody told whether the rack takes writes to this disk; the guest's kernel knows.
		if volume.readOnly, err = dev.ReadOnly(); err != nil {
			return err
		}
	}
	if capability == nil {
		err = n.stageBlock(ctx, volume, dev, staging)
	} else {
		err = n.stageFilesystem(ctx, volume, dev, staging, capability)
	}
	if err != nil {
		return err
	}
	return n.recordStaged(volume, dev)
}

// recordStaged notes that the disk is staged.
func (n *Service) recordStaged(volume nodeVolume, dev device.Device) error {
	disks, err := n.devices.Disks()
	if err != nil {
		return err
	}
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	n.staged.add(volume.id, dev, disks, table)
	return nil
}

// resolve resolves a path of a request ownership parent the orchestrator has to provide.
func resolve(path string) (string, error) {
	resolved, err := mount.Resolve(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", rpc.FailedPrecondition(
			"the folder %s does not exist, which the orchestrator makes: check that it and the plugin see the same folders (hostPath mounts, stage_publish_base_dir)",
			filepath.Dir(filepath.Clean(path)),
		)
	}
	if err != nil {
		return "", err
	}
	if info, err := os.Stat(filepath.Dir(resolved)); err == nil && !info.IsDir() {
		return "", rpc.FailedPrecondition("%s is no folder, so that nothing can be at %s", filepath.Dir(resolved), path)
	}
	return resolved, nil
}

func (n *Service) stageFilesystem(
	ctx context.Context,
	volume nodeVolume,
	dev device.Device,
	staging string,
	capability *csi.VolumeCapability_MountVolume,
) error {
	options := volume.mountOptions(capability.GetMountFlags())
	fsType, err := n.stagedFSType(ctx, volume, dev, staging, capability.GetFsType(), options)
	if err != nil {
		return err
	}
	if fsType == "" {
		if fsType, err = n.mountStaging(ctx, volume, dev, staging, capability.GetFsType(), options); err != nil {
			return err
		}
	}
	if options.ReadOnly() {
		return nil
	}
	// Here and not where it is mounted: the plugin may have ended in between.
	grown, err := mount.GrowMounted(ctx, dev, staging, fsType)
	if grown {
		n.log.Info(
			"grew the filesystem to its disk",
			"volume_id",
			volume.id.String(),
			"device",
			dev.String(),
			"fs_type",
			fsType,
		)
	}
	if err != nil {
		return err
	}
	return n.setUpRootFolder(ctx, volume, dev, staging)
}

// mountStaging mounts what is on the disk, or what it makes there, and returns the filesystem's type.
func (n *Service) mountStaging(
	ctx context.Context,
	volume nodeVolume,
	dev device.Device,
	staging, wanted string,
	options mount.Options,
) (fsType string, err error) {
	if err := mount.MakeFolder(staging); err != nil {
		return "", err
	}
	if err := setReadOnly(dev, volume.readOnly); err != nil {
		return "", err
	}
	if fsType, err = n.ensureFilesystem(ctx, volume, dev, wanted); err != nil {
		return "", err
	}
	if !options.ReadOnly() {
		grown, err := mount.GrowUnmounted(ctx, dev, fsType, volume.id)
		if grown {
			n.log.Info(
				"grew the filesystem to its disk",
				"volume_id",
				volume.id.String(),
				"device",
				dev.String(),
				"fs_type",
				fsType,
			)
		}
		if err != nil {
			return "", err
		}
	}
	start := time.Now()
	if err := mount.Filesystem(ctx, dev, staging, fsType, options); err != nil {
		return "", err
	}
	n.log.Debug("mounted", "volume_id", volume.id.String(), "fs_type", fsType, "mount", time.Since(start))
	return fsType, nil
}

// stagedFSType returns the filesystem with which the volume is staged already as it is asked for, empty when it is not
// staged. Mounts left over at the staging path from a disk that has left the guest are taken away; whatever else stands in
// the way is an error.
func (n *Service) stagedFSType(
	ctx context.Context,
	volume nodeVolume,
	dev device.Device,
	staging, fsType string,
	options mount.Options,
) (string, error) {
	for {
		table, err := mount.ReadTable()
		if err != nil {
			return "", err
		}
		if _, ok := table.At(blockStagingPath(staging, volume.id)); ok {
			return "", rpc.AlreadyExists(
				"volume %s is staged at %s as raw block, not with a filesystem: unstage it first",
				volume.id,
				staging,
			)
		}
		entry, ok := table.At(staging)
		if !ok {
			return "", checkNotMounted(volume, dev, table)
		}
		if !entry.Block() && entry.Number == dev.Number {
			return entry.FSType, n.checkStagedAsRequested(volume, dev, entry, fsType, options)
		}
		if err := n.unmountOrphan(ctx, table, entry); err != nil {
			return "", err
		}
	}
}

// checkStagedAsRequested refuses to take the filesystem that is staged for the one that is asked for when they differ in what matters.
// Other mount flags do not: the kernel adds some and does not show others.
func (n *Service) checkStagedAsRequested(
	volume nodeVolume,
	dev device.Device,
	entry mount.Entry,
	fsType string,
	options mount.Options,
) error {
	if owner, ok := n.staged.volumeOf(dev.Serial, dev.Number); ok && owner != volume.id {
		return rpc.FailedPrecondition(
			"volume %s cannot be staged: its disk %s is staged at %s as volume %s: see which of the two has the wrong %s",
			volume.id,
			dev,
			entry.Path,
			owner,
			rpc.KeyDiskName,
		)
	}
	if err := checkUsable(volume, entry, options.ReadOnly()); err != nil {
		return err
	}
	switch {
	case fsType != "" && fsType != entry.FSType:
		return rpc.AlreadyExists("volume %s is staged at %s with %s, not %s", volume.id, entry.Path, entry.FSType, fsType)
	case entry.ReadOnly && !options.ReadOnly():
		return rpc.AlreadyExists("volume %s is staged at %s read-only, not writable: unstage it first", volume.id, entry.Path)
	case !entry.ReadOnly && options.ReadOnly():
		return rpc.AlreadyExists("volume %s is staged at %s writable, not read-only: unstage it first", volume.id, entry.Path)
	case entry.SELinuxContext != options.SELinuxContext():
		return rpc.AlreadyExists(
			"volume %s is staged at %s with another SELinux context: unstage it first",
			volume.id,
			entry.Path,
		)
	}
	if lacks := entry.CountMissing(options.Flags); lacks > 0 {
		// How many, and no more: mount flags may be secret.
		n.log.Info(
			"the volume is staged already, and its mount does not show some of the mount flags that are asked for now: they have no effect until it is staged anew, unless the kernel just does not show them",
			"volume_id",
			volume.id.String(),
			"mount_flags",
			lacks,
		)
	}
	return nil
}

// checkUsable refuses a filesystem that has given up after an error: a workload would take it for a healthy one.
func checkUsable(volume nodeVolume, staged mount.Entry, readOnly bool) error {
	switch {
	case staged.ShutDown:
		return rpc.FailedPrecondition(
			"volume %s is staged at %s, and its filesystem has shut itself down after an error: see the kernel's log, end what uses the volume, and unstage it",
			volume.id,
			staged.Path,
		)
	case staged.TurnedReadOnly && !readOnly:
		return rpc.FailedPrecondition(
			"volume %s is staged at %s, and its filesystem has become read-only after an error: see the kernel's log, end what uses the volume, unstage it, and check the filesystem",
			volume.id,
			staged.Path,
		)
	}
	return nil
}

// unmountOrphan takes away a mount whose disk has left the guest, if nothing else still shows it; any other is not ours to
// touch.
func (n *Service) unmountOrphan(ctx context.Context, table mount.Table, entry mount.Entry) error {
	number, ok := entry.Device()
	if !ok || !isVolume(entry) {
		return rpc.FailedPrecondition("%s has a mount that is not ours: %s", entry.Path, entry)
	}
	if _, err := n.devices.ByNumber(number); err == nil && !entry.NodeRemoved() {
		return rpc.FailedPrecondition(
			"%s has a mount of another disk: %s: unstage or unpublish that volume first",
			entry.Path,
			entry,
		)
	} else if err != nil && !errors.Is(err, device.ErrNotFound) {
		return err
	}
	if others := otherMounts(table, entry); len(others) > 0 {
		return rpc.FailedPrecondition(
			"%s has a mount of a disk that has left this guest, which is still published at %s: unpublish it first",
			entry.Path,
			others[0].Path,
		)
	}
	n.log.Warn("taking away a mount whose disk has left this guest", "path", entry.Path, "device", number.String())
	return mount.Unmount(ctx, entry.Path, number)
}

// otherMounts are the other mounts that give access to what entry gives access to, without those that are the same mount,
// shown twice. The number of a disk whose node was removed may be another disk's by now, so that only nodes removed with
// it count.
func otherMounts(table mount.Table, entry mount.Entry) []mount.Entry {
	number, ok := entry.Device()
	if !ok {
		return nil
	}
	var others []mount.Entry
	for _, other := range table.OfDevice(number) {
		if other.Path != entry.Path && !table.SameMount(other, entry) && (!entry.NodeRemoved() || other.NodeRemoved()) {
			others = append(others, other)
		}
	}
	return others
}

// checkNotMounted refuses a disk that is mounted anywhere.
func checkNotMounted(volume nodeVolume, dev device.Device, table mount.Table) error {
	for _, entry := range table.OfDevice(dev.Number) {
		return rpc.FailedPrecondition(
			"volume %s cannot be staged: its disk %s is already mounted at %s",
			volume.id,
			dev,
			entry.Path,
		)
	}
	return nil
}

// setReadOnly makes the kernel's view of the disk the rack's. A raw block publication may have left the other one.
func setReadOnly(dev device.Device, readOnly bool) error {
	now, err := dev.ReadOnly()
	if err != nil || now == readOnly {
		return err
	}
	return dev.SetReadOnly(readOnly)
}

func (n *Service) stageBlock(ctx context.Context, volume nodeVolume, dev device.Device, staging string) error {
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	if entry, ok := table.At(staging); ok {
		if entry.Number == dev.Number {
			return rpc.AlreadyExists(
				"volume %s is staged at %s with a filesystem, not as raw block: unstage it first",
				volume.id,
				staging,
			)
		}
		return rpc.FailedPrecondition("the staging path %s has a mount that is not ours: %s", staging, entry)
	}
	file := blockStagingPath(staging, volume.id)
	for entry, ok := table.At(file); ok; entry, ok = table.At(file) {
		if number, ok := entry.Device(); ok && number == dev.Number && !entry.NodeRemoved() {
			return nil
		}
		if err := n.unmountOrphan(ctx, table, entry); err != nil {
			return err
		}
		if table, err = mount.ReadTable(); err != nil {
			return err
		}
	}
	if err := checkNotMounted(volume, dev, table); err != nil {
		return err
	}
	// From now on the disk's bytes are the workload's: what an interrupted format left no longer tells us anything.
	if !volume.readOnly {
		if err := n.formatter.RemoveMarkerAndRecord(volume.id, dev); err != nil {
			return err
		}
	}
	if err := makeBlockStagingFolder(staging, file); err != nil {
		return err
	}
	if err := mount.MakeFile(file); err != nil {
		return err
	}
	return bindVerified(dev, dev.Path, file, false)
}

// makeBlockStagingFolder makes sure that the staging path is a folder with nothing in it but perhaps the file's file: another
// volume may be staged there.
func makeBlockStagingFolder(staging, file string) error {
	if err := os.Mkdir(staging, 0o750); err == nil || !errors.Is(err, fs.ErrExist) {
		return err
	}
	entries, err := os.ReadDir(staging)
	if errors.Is(err, unix.ENOTDIR) {
		return rpc.FailedPrecondition("the staging path %s is no folder", staging)
	}
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.Name() != filepath.Base(file) {
			return rpc.FailedPrecondition(
				"the staging path %s holds %q, which is not this volume's: another volume may be staged there",
				staging,
				entry.Name(),
			)
		}
	}
	return nil
}

// bindVerified binds source to target and makes sure that the device shows there.
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
		"%s was bound to %s, but the mount table does not show it as asked (read-only %t): unpublish the volume and look at the kernel's log",
		dev,
		target,
		readOnly,
	)
}

// NodeUnstageVolume unmounts the volume from the staging path, and succeeds only when nothing in this guest holds its disk
// any more: the next thing to happen may be that the disk is taken away. It works when the disk is gone already. While
// the volume is published anywhere, or known to be staged elsewhere, it is FAILED_PRECONDITION and changes nothing. What
// is another volume's at the staging path, so far as can be known, is left alone. CSI spec, NodeUnstageVolume.
func (n *Service) NodeUnstageVolume(
	ctx context.Context,
	req *csi.NodeUnstageVolumeRequest,
) (*csi.NodeUnstageVolumeResponse, error) {
	if err := validateNodeUnstageVolume(req); err != nil {
		return nil, err
	}
	id, err := parseVolumeID(req.GetVolumeId())
	if err != nil {
		return &csi.NodeUnstageVolumeResponse{}, nil // no volume of ours was ever staged under this ID
	}
	ctx, release, err := n.lockVolume(ctx, id)
	if err != nil {
		return nil, err
	}
	defer release()
	staging, err := mount.Resolve(req.GetStagingTargetPath())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err == nil {
		if err := n.unstage(ctx, staging, id); err != nil {
			return nil, err
		}
	}
	table, err := mount.ReadTable()
	if err != nil {
		return nil, err
	}
	// A mount whose disk has left the guest holds nothing that could be taken away.
	if mounts := slices.DeleteFunc(n.knownMounts(table, id), n.diskRemoved); len(mounts) > 0 {
		return nil, rpc.FailedPrecondition(
			"volume %s is still mounted at %s, and not from the staging path %s: unpublish or unstage it there",
			id,
			mounts[0].Path,
			req.GetStagingTargetPath(),
		)
	}
	n.failures.record(id, nil)
	return &csi.NodeUnstageVolumeResponse{}, nil
}

// unstage takes away what is staged of the volume at this path. The path itself first: of a dead filesystem, nothing below it
// can be looked at.
func (n *Service) unstage(ctx context.Context, staging string, id uuid.UUID) error {
	file := blockStagingPath(staging, id)
	for _, path := range []string{staging, file} {
		if err := n.unmountVolume(ctx, path, id, n.unmountStaged); err != nil {
			return err
		}
	}
	return mount.Remove(file)
}

// unmountStaged unmounts what is not published anywhere, and waits until nothing holds the disk.
func (n *Service) unmountStaged(ctx context.Context, table mount.Table, entry mount.Entry, number device.Number) error {
	if others := otherMounts(table, entry); len(others) > 0 {
		return rpc.FailedPrecondition(
			"the volume staged at %s is still published at %s: unpublish it first",
			entry.Path,
			others[0].Path,
		)
	}
	dev, err := n.devices.ByNumber(number)
	gone := errors.Is(err, device.ErrNotFound) || entry.NodeRemoved()
	if err != nil && !gone {
		return err
	}
	if err := mount.Unmount(ctx, entry.Path, number); err != nil || gone {
		return err
	}
	return mount.WaitUnused(ctx, dev, entry.Block())
}
