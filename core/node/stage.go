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
	"google.golang.org/grpc/metadata"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumelock"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumerecord"
)

// NodeStageVolume waits for the volume's disk, makes a filesystem if the disk is provably blank, and mounts it at the
// staging path. For a raw block volume it binds the device node. It is safe to repeat. With another filesystem or
// access type it returns ALREADY_EXISTS. CSI spec, NodeStageVolume.
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
	sent, _ := metadata.FromIncomingContext(ctx)
	volume.ownFilesystem = len(sent.Get(rpc.MetadataOwnFilesystem)) > 0
	ctx, release, err := n.lockVolume(ctx, volume.id)
	if err != nil {
		return nil, err
	}
	defer release()
	err = n.stage(ctx, req, volume, parsePassphrases(req.GetSecrets()))
	n.failures.record(volume.id, err)
	if err != nil {
		return nil, err
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

// lockVolume takes the volume's lock. It waits for a check that an earlier call started, and for programs that an
// earlier process of the plugin started for the volume. Such a program is for instance a mount(8) whose mount is not in
// the mount table yet.
func (n *Service) lockVolume(
	ctx context.Context,
	volume uuid.UUID,
) (locked context.Context, release func(), err error) {
	if err := n.repairs.Wait(ctx, volume); err != nil {
		return nil, nil, err
	}
	locked, release, err = volumelock.Acquire(ctx, n.stateDir, volume, rpc.WaitBudget(ctx))
	if err != nil {
		return nil, nil, fmt.Errorf("volume %s: %w: try again", volume, err)
	}
	return locked, release, nil
}

func (n *Service) stage(
	ctx context.Context,
	req *csi.NodeStageVolumeRequest,
	volume nodeVolume,
	secrets passphrases,
) error {
	staging, err := resolve(req.GetStagingTargetPath())
	if err != nil {
		return err
	}
	if err := n.checkUncovered(volume.id, staging, blockStagingPath(staging, volume.id)); err != nil {
		return err
	}
	capability := req.GetVolumeCapability().GetMount()
	start := time.Now()
	dev, err := n.devices.WaitForDisk(ctx, n.expectedDisk(volume), n.deviceTimeout)
	if err != nil {
		return err
	}
	if err := n.disks.CheckResponds(ctx, dev); err != nil {
		return fmt.Errorf("volume %s: %w", volume.id, err)
	}
	n.log.Debug("found the disk", "volume_id", volume.id.String(), "device", dev.String(), "find", time.Since(start))
	if !volume.attached {
		// Without a publish context, only the guest's kernel knows whether the disk is read-only.
		if volume.readOnly, err = dev.ReadOnly(); err != nil {
			return err
		}
	}
	if err := n.checkRecords(volume, dev); err != nil {
		return err
	}
	if volume.ownFilesystem && capability == nil {
		return rpc.FailedPrecondition(
			"volume %s is used as raw block, so nothing on its disk shows that it is this volume's: wait for the controller",
			volume.id,
		)
	}
	discard := slices.Contains(filesystem.SplitMountFlags(capability.GetMountFlags()), "discard")
	if volume, err = n.unlock(ctx, volume, dev, secrets, discard); err != nil {
		return err
	}
	err = n.stageContent(ctx, volume, dev, staging, capability)
	if err != nil && !errors.Is(err, mount.ErrChecking) { // a check goes on after the call, inside the mapping
		n.lock(ctx, volume)
	}
	return err
}

// stageContent stages what is on the disk, or in the mapping of an encrypted one. capability is nil for raw block.
func (n *Service) stageContent(
	ctx context.Context,
	volume nodeVolume,
	dev device.Device,
	staging string,
	capability *csi.VolumeCapability_MountVolume,
) (err error) {
	if volume.mapping != nil {
		release, err := n.hold(volume)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, release()) }()
	}
	if capability == nil {
		return n.stageBlock(ctx, volume, dev, staging)
	}
	return n.stageFilesystem(ctx, volume, dev, staging, capability)
}

// resolve resolves a path of a request. The orchestrator provides its parent folder.
func resolve(path string) (string, error) {
	resolved, err := mount.Resolve(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", rpc.FailedPrecondition(
			"folder %s does not exist, and the orchestrator makes it: check that the plugin sees the same folders (hostPath mounts, stage_publish_base_dir)",
			filepath.Dir(filepath.Clean(path)),
		)
	}
	if err != nil {
		return "", err
	}
	if info, err := os.Stat(filepath.Dir(resolved)); err == nil && !info.IsDir() {
		return "", rpc.FailedPrecondition(
			"%s is not a folder: remove it, so that %s can be made",
			filepath.Dir(resolved),
			path,
		)
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
	// Not only after the mount: the plugin may have ended between mount and growth.
	err = n.repairs.Grow(ctx, volume.content(dev), volume.id, staging, fsType, options)
	if err := n.recordGrowth(volume, err); err != nil {
		return err
	}
	return n.setUpRootFolder(ctx, volume, volume.content(dev), staging)
}

// mountStaging mounts the disk's filesystem, after making one if necessary, and returns the filesystem's type.
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
	own, err := n.checkForeignUser(ctx, volume, dev)
	if err != nil {
		return "", err
	}
	if own != nil {
		// A filesystem from a read-only disk has no journal open. It must not become writable as it is.
		if readOnly, err := dev.ReadOnly(); err != nil || readOnly && !volume.readOnly {
			return "", errors.Join(foreignUser(volume, dev, own.String()), err)
		}
		return n.mountAgain(ctx, volume, dev, staging, wanted, own, options)
	}
	if volume.ownFilesystem {
		if err := checkOwnFilesystem(ctx, volume, volume.content(dev)); err != nil {
			return "", err
		}
	}
	if fsType, err = n.prepareFilesystem(ctx, volume, dev, wanted, options); err != nil {
		return "", err
	}
	if _, err := n.recordStage(volume, dev, staging, volumerecord.Filesystem, options.ReadOnly()); err != nil {
		return "", err
	}
	start := time.Now()
	if err := n.repairs.Mount(ctx, volume.content(dev), volume.id, staging, fsType, options); err != nil {
		return "", err
	}
	n.log.Debug("mounted", "volume_id", volume.id.String(), "fs_type", fsType, "mount", time.Since(start))
	return fsType, nil
}

// prepareFilesystem returns the type of the volume's filesystem, after finishing interrupted work on it, or making it.
func (n *Service) prepareFilesystem(
	ctx context.Context,
	volume nodeVolume,
	dev device.Device,
	wanted string,
	options mount.Options,
) (fsType string, err error) {
	content := volume.content(dev)
	if err := setReadOnly(content, volume.readOnly); err != nil {
		return "", err
	}
	if !volume.unformatted { // otherwise it is noise, or the remains of an interrupted mkfs
		if err := n.repairs.FinishInterrupted(ctx, content, volume.id, options); err != nil {
			return "", err
		}
	}
	if volume.mapping != nil {
		return n.ensureEncryptedFilesystem(ctx, volume, dev, wanted)
	}
	return n.ensureFilesystem(ctx, volume, dev, wanted)
}

// mountAgain mounts the volume's own filesystem, which is still mounted in another mount namespace: read-only, or
// writable after an unstage that was refused. The kernel has one filesystem for all its mounts.
func (n *Service) mountAgain(
	ctx context.Context,
	volume nodeVolume,
	dev device.Device,
	staging, wanted string,
	own *mount.Copy,
	options mount.Options,
) (string, error) {
	fsType := own.FSType
	if wanted != "" && wanted != fsType {
		return "", otherFilesystem(volume, dev, fsType, wanted)
	}
	if !own.FilesystemReadOnly && options.ReadOnly() {
		return "", foreignUser(volume, dev, own.String())
	}
	record, err := n.recordStage(volume, dev, staging, volumerecord.Filesystem, options.ReadOnly())
	if err != nil {
		return "", err
	}
	n.log.Info(
		"mounting a filesystem that other mount namespaces still have mounted",
		"volume_id",
		volume.id.String(),
	)
	if !own.FilesystemReadOnly {
		return fsType, mount.Filesystem(ctx, volume.content(dev), staging, fsType, options)
	}
	if options.ReadOnly() {
		return fsType, mount.FilesystemAgain(ctx, volume.content(dev), staging, fsType, options)
	}
	// If this process ends before the mount is writable, the step tells the next stage to make it so.
	if err := n.records.SetStep(record, volumerecord.Leaving); err != nil {
		return "", err
	}
	if err := mount.FilesystemAgain(ctx, volume.content(dev), staging, fsType, options); err != nil {
		return "", err
	}
	if err := mount.MakeWritable(staging); err != nil {
		return "", err
	}
	return fsType, n.records.SetStep(record, volumerecord.Staged)
}

// stagedFSType returns the filesystem with which the volume is staged already as requested, or "" if it is not
// staged. It unmounts mounts at the staging path whose disk has left the guest. Any other mount is an error.
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
			if entry.Frozen() { // what follows may wait for the thaw
				return "", frozenAt(volume.id, entry.Path)
			}
			resumed, err := n.resumeStaged(ctx, volume, dev, entry, options)
			if err != nil {
				return "", err
			}
			if resumed {
				continue
			}
			return entry.FSType, n.checkStagedAsRequested(volume, entry, fsType, options)
		}
		if err := n.unmountOrphan(ctx, table, entry); err != nil {
			return "", err
		}
	}
}

// resumeStaged prepares the record of a volume that is mounted at its staging path: one that has no record gets one. If
// an unstage has made the filesystem read-only and could not unmount it, resumeStaged makes it writable again. It
// unmounts what an unstage has mounted for a thaw. In both cases the caller looks again.
func (n *Service) resumeStaged(
	ctx context.Context,
	volume nodeVolume,
	dev device.Device,
	entry mount.Entry,
	options mount.Options,
) (changed bool, err error) {
	record, err := n.recordStaged(volume, dev, entry.Path, volumerecord.Filesystem, entry.ReadOnly)
	if err != nil {
		return false, err
	}
	if wasRestored(record, entry) {
		return true, mount.Unmount(ctx, entry.Path, dev.Number)
	}
	if record.Step == volumerecord.Staged || record.ReadOnly || options.ReadOnly() {
		return false, nil
	}
	if entry.ReadOnly {
		if err := mount.MakeWritable(entry.Path); err != nil {
			return false, err
		}
	}
	return true, n.records.SetStep(record, volumerecord.Staged)
}

// checkStagedAsRequested returns an error if the staged filesystem differs from the request. Different mount flags are
// no error, because the kernel adds some and does not show others.
func (n *Service) checkStagedAsRequested(
	volume nodeVolume,
	entry mount.Entry,
	fsType string,
	options mount.Options,
) error {
	if err := checkUsable(volume, entry, options.ReadOnly()); err != nil {
		return err
	}
	switch {
	case fsType != "" && fsType != entry.FSType:
		return rpc.AlreadyExists(
			"volume %s is staged at %s with %s, not %s: unstage it first",
			volume.id,
			entry.Path,
			entry.FSType,
			fsType,
		)
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
		// Only their number, because mount flags may be secret.
		n.log.Info(
			"the staged volume's mount does not show some of the mount flags of this request: if they are new, they have no effect until the volume is unstaged and staged again",
			"volume_id",
			volume.id.String(),
			"mount_flags",
			lacks,
		)
	}
	return nil
}

// checkUsable returns an error if the filesystem has stopped after an error. A workload would take it for a healthy
// one.
func checkUsable(volume nodeVolume, staged mount.Entry, readOnly bool) error {
	switch {
	case staged.ShutDown:
		return rpc.FailedPrecondition(
			"volume %s is staged at %s, but its filesystem has shut itself down after an error: read the kernel's log, end the workload, and unstage the volume",
			volume.id,
			staged.Path,
		)
	case staged.TurnedReadOnly && !readOnly:
		return rpc.FailedPrecondition(
			"volume %s is staged at %s, but its filesystem has become read-only after an error: read the kernel's log, end the workload, unstage the volume, and check the filesystem",
			volume.id,
			staged.Path,
		)
	}
	return nil
}

// unmountOrphan unmounts a mount whose disk has left the guest, if the disk is mounted nowhere else. It returns an
// error for every other mount.
func (n *Service) unmountOrphan(ctx context.Context, table mount.Table, entry mount.Entry) error {
	number, ok := entry.Device()
	if !ok || !isVolume(entry) {
		return rpc.FailedPrecondition("%s has a mount that is not a volume: %s: unmount it by hand", entry.Path, entry)
	}
	if _, err := n.devices.ByNumber(number); err == nil && !entry.NodeRemoved() {
		return rpc.FailedPrecondition(
			"%s has a mount of another disk: %s: unmount that volume first",
			entry.Path,
			entry,
		)
	} else if err != nil && !errors.Is(err, device.ErrNotFound) {
		return err
	}
	if others := otherMounts(table, entry); len(others) > 0 {
		return rpc.FailedPrecondition(
			"%s has a mount of a disk that has left this guest, and %s has one too: unmount that first",
			entry.Path,
			others[0].Path,
		)
	}
	n.log.Warn("unmounting a mount whose disk has left this guest", "path", entry.Path, "device", number.String())
	return mount.Unmount(ctx, entry.Path, number)
}

// otherMounts returns the other mounts of the device of entry, but not other views of the same mount. If entry is a
// node whose disk has left the guest, another disk may have its number now. Then only removed nodes count.
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

// checkNotMounted returns an error if the disk is mounted anywhere.
func checkNotMounted(volume nodeVolume, dev device.Device, table mount.Table) error {
	for _, entry := range table.OfDevice(dev.Number) {
		return rpc.Fault(
			fault.DiskInUse,
			"volume %s cannot be staged: its disk %s is already mounted at %s: unmount it there first",
			volume.id,
			dev,
			entry.Path,
		)
	}
	return nil
}

// setReadOnly sets whether the kernel rejects writes to the disk. An earlier raw block publication may have left
// another value.
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
		return rpc.FailedPrecondition(
			"staging path %s has a mount that is not this volume: %s: unmount it first",
			staging,
			entry,
		)
	}
	file := blockStagingPath(staging, volume.id)
	for entry, ok := table.At(file); ok; entry, ok = table.At(file) {
		if number, ok := entry.Device(); ok && number == dev.Number && !entry.NodeRemoved() {
			_, err := n.recordStaged(volume, dev, staging, volumerecord.Block, volume.readOnly)
			return err
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
	if own, err := n.checkForeignUser(ctx, volume, dev); err != nil {
		return err
	} else if own != nil {
		return foreignUser(volume, dev, own.String())
	}
	content := volume.content(dev)
	if !volume.readOnly {
		if err := n.removeTraces(ctx, volume, dev, content); err != nil {
			return err
		}
	}
	if err := makeBlockStagingFolder(staging, file); err != nil {
		return err
	}
	if err := mount.MakeFile(file); err != nil {
		return err
	}
	if _, err := n.recordStage(volume, dev, staging, volumerecord.Block, volume.readOnly); err != nil {
		return err
	}
	return bindVerified(dev, content.Path, file, false)
}

// removeTraces removes what an interrupted format, check or growth left on a disk and in the records. From now on the
// workload owns the disk's bytes, so the traces mean nothing.
func (n *Service) removeTraces(ctx context.Context, volume nodeVolume, dev, content device.Device) error {
	if err := n.formatter.RemoveMarkerAndRecord(volume.id, content); err != nil {
		return err
	}
	if err := device.RemoveWorkMarker(content); err != nil {
		return err
	}
	if !volume.unformatted {
		return nil
	}
	return n.luks.ClearLabel(ctx, dev)
}

// makeBlockStagingFolder makes sure that the staging path is a folder which contains nothing, except perhaps the
// volume's file. Otherwise another volume may be staged there.
func makeBlockStagingFolder(staging, file string) error {
	if err := mount.MakeNewFolder(staging); err == nil || !errors.Is(err, fs.ErrExist) {
		return err
	}
	entries, err := os.ReadDir(staging)
	if errors.Is(err, unix.ENOTDIR) {
		return rpc.FailedPrecondition("staging path %s is not a folder: remove it", staging)
	}
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.Name() != filepath.Base(file) {
			return rpc.FailedPrecondition(
				"staging path %s contains %q, which is not this volume's: unstage the other volume, or remove the file",
				staging,
				entry.Name(),
			)
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
