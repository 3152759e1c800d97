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
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"google.golang.org/grpc/metadata"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
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
	err = n.stage(ctx, req, volume)
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

// staging is one volume on its way to its staging path. The steps are: find the disk, claim it, open it if it is
// encrypted, ensure that there is a filesystem, mount it, grow it, and set up its root folder. A raw block volume is
// only found, claimed, opened and bound.
type staging struct {
	nodeVolume
	dev device.Device
	// path is the staging path, without symbolic links.
	path string
	// block says that the volume is used as raw block. Otherwise wanted is the requested filesystem, or empty.
	block   bool
	wanted  string
	options mount.Options
	secrets passphrases
	// mapping is the open mapping of an encrypted disk, and opened says that this request has opened it. unformatted says
	// that nothing was ever written into it, except by an interrupted mkfs.
	mapping             *device.Mapping
	opened, unformatted bool
	// dataOffset is where the data of an encrypted disk begins, in bytes.
	dataOffset int64
}

func (n *Service) stage(ctx context.Context, req *csi.NodeStageVolumeRequest, parsed nodeVolume) error {
	path, err := resolve(req.GetStagingTargetPath())
	if err != nil {
		return err
	}
	if err := n.checkUncovered(parsed.id, path, blockStagingPath(path, parsed.id)); err != nil {
		return err
	}
	capability := req.GetVolumeCapability().GetMount()
	volume := &staging{
		nodeVolume: parsed, path: path, secrets: parsePassphrases(req.GetSecrets()),
		block: capability == nil, wanted: capability.GetFsType(),
	}
	start := time.Now()
	if volume.dev, err = n.devices.WaitForDisk(ctx, n.expectedDisk(parsed), n.deviceTimeout); err != nil {
		return err
	}
	dev := volume.dev
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
	volume.options = volume.mountOptions(capability.GetMountFlags())
	if err := n.checkRecords(volume); err != nil {
		return err
	}
	if volume.ownFilesystem && volume.block {
		return rpc.FailedPrecondition(
			"volume %s is used as raw block, so nothing on its disk shows that it is this volume's: wait for the controller",
			volume.id)
	}
	if err := n.unlock(ctx, volume); err != nil {
		return err
	}
	err = n.stageContent(ctx, volume)
	if err != nil && !errors.Is(err, mount.ErrChecking) { // a check goes on after the call, inside the mapping
		n.lock(ctx, volume)
	}
	return err
}

// stageContent stages what is on the disk, or in the mapping of an encrypted one.
func (n *Service) stageContent(ctx context.Context, volume *staging) (err error) {
	if volume.mapping != nil {
		release, err := n.hold(volume)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, release()) }()
	}
	if volume.block {
		return n.stageBlock(ctx, volume)
	}
	return n.stageFilesystem(ctx, volume)
}

// resolve resolves a path of a request. The orchestrator provides its parent folder.
func resolve(path string) (string, error) {
	resolved, err := mount.Resolve(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", rpc.FailedPrecondition(
			"directory %s does not exist, and the orchestrator makes it: check that the plugin sees the same directories (hostPath mounts, stage_publish_base_dir)",
			filepath.Dir(filepath.Clean(path)),
		)
	}
	if err != nil {
		return "", err
	}
	if info, err := os.Stat(filepath.Dir(resolved)); err == nil && !info.IsDir() {
		return "", rpc.FailedPrecondition("%s is not a directory: remove it, so that %s can be made", filepath.Dir(resolved),
			path)
	}
	return resolved, nil
}

func (n *Service) stageFilesystem(ctx context.Context, volume *staging) error {
	fsType, err := n.stagedFSType(ctx, volume)
	if err != nil {
		return err
	}
	if fsType == "" {
		if fsType, err = n.mountStaging(ctx, volume); err != nil {
			return err
		}
	}
	if volume.options.ReadOnly() {
		return nil
	}
	// Not only after the mount: the plugin may have ended between mount and growth.
	err = n.repairs.Grow(ctx, volume.content(), volume.id, volume.path, fsType, volume.options)
	if err := n.recordGrowth(volume, err); err != nil {
		return err
	}
	return n.setUpRootFolder(ctx, volume)
}

// mountStaging mounts the disk's filesystem, after making one if necessary, and returns the filesystem's type.
func (n *Service) mountStaging(ctx context.Context, volume *staging) (fsType string, err error) {
	if err := mount.MakeFolder(volume.path); err != nil {
		return "", err
	}
	own, err := n.checkForeignUser(ctx, volume)
	if err != nil {
		return "", err
	}
	if own != nil {
		// A filesystem from a read-only disk has no journal open. It must not become writable as it is.
		if readOnly, err := volume.dev.ReadOnly(); err != nil || readOnly && !volume.readOnly {
			return "", errors.Join(volume.foreignUser(own.String()), err)
		}
		return n.mountAgain(ctx, volume, own)
	}
	if volume.ownFilesystem {
		if err := checkOwnFilesystem(ctx, volume); err != nil {
			return "", err
		}
	}
	if fsType, err = n.prepareFilesystem(ctx, volume); err != nil {
		return "", err
	}
	if _, err := n.recordStage(volume, volume.options.ReadOnly()); err != nil {
		return "", err
	}
	start := time.Now()
	if err := n.repairs.Mount(ctx, volume.content(), volume.id, volume.path, fsType, volume.options); err != nil {
		return "", err
	}
	n.log.Debug("mounted", "volume_id", volume.id.String(), "fs_type", fsType, "mount", time.Since(start))
	return fsType, nil
}

// prepareFilesystem returns the type of the volume's filesystem, after finishing interrupted work on it, or making it.
func (n *Service) prepareFilesystem(ctx context.Context, volume *staging) (fsType string, err error) {
	content := volume.content()
	if err := setReadOnly(content, volume.readOnly); err != nil {
		return "", err
	}
	if !volume.unformatted { // otherwise it is noise, or the remains of an interrupted mkfs
		if err := n.repairs.FinishInterrupted(ctx, content, volume.id, volume.options); err != nil {
			return "", err
		}
	}
	if volume.mapping != nil {
		return n.ensureEncryptedFilesystem(ctx, volume)
	}
	return n.ensureFilesystem(ctx, volume)
}

// mountAgain mounts the volume's own filesystem, which is still mounted in another mount namespace: read-only, or
// writable after an unstage that was refused. The kernel has one filesystem for all its mounts.
func (n *Service) mountAgain(ctx context.Context, volume *staging, own *mount.Copy) (string, error) {
	fsType, staging, options := own.FSType, volume.path, volume.options
	if volume.wanted != "" && volume.wanted != fsType {
		return "", volume.otherFilesystem(fsType)
	}
	if !own.FilesystemReadOnly && options.ReadOnly() {
		return "", volume.foreignUser(own.String())
	}
	record, err := n.recordStage(volume, volume.options.ReadOnly())
	if err != nil {
		return "", err
	}
	n.log.Info("mounting a filesystem that other mount namespaces still have mounted", "volume_id", volume.id.String())
	if !own.FilesystemReadOnly {
		return fsType, mount.Filesystem(ctx, volume.content(), staging, fsType, options)
	}
	if options.ReadOnly() {
		return fsType, mount.FilesystemAgain(ctx, volume.content(), staging, fsType, options)
	}
	// If this process ends before the mount is writable, the step tells the next stage to make it so.
	if err := n.records.SetStep(record, volumerecord.Leaving); err != nil {
		return "", err
	}
	if err := mount.FilesystemAgain(ctx, volume.content(), staging, fsType, options); err != nil {
		return "", err
	}
	if err := mount.MakeWritable(staging); err != nil {
		return "", err
	}
	return fsType, n.records.SetStep(record, volumerecord.Staged)
}

// stagedFSType returns the filesystem with which the volume is staged already as requested, or "" if it is not
// staged. It unmounts mounts at the staging path whose disk has left the guest. Any other mount is an error.
func (n *Service) stagedFSType(ctx context.Context, volume *staging) (string, error) {
	for {
		table, err := mount.ReadTable()
		if err != nil {
			return "", err
		}
		if _, ok := table.At(blockStagingPath(volume.path, volume.id)); ok {
			return "", rpc.AlreadyExists("volume %s is staged at %s as raw block, not with a filesystem: unmount it first",
				volume.id, volume.path)
		}
		entry, ok := table.At(volume.path)
		if !ok {
			return "", checkNotMounted(volume, table)
		}
		if !entry.Block() && entry.Number == volume.dev.Number {
			if entry.Frozen() { // what follows may wait for the thaw
				return "", frozenAt(volume.id, entry.Path)
			}
			resumed, err := n.resumeStaged(ctx, volume, entry)
			if err != nil {
				return "", err
			}
			if resumed {
				continue
			}
			return entry.FSType, n.checkStagedAsRequested(volume, entry)
		}
		if err := n.unmountOrphan(ctx, table, entry); err != nil {
			return "", err
		}
	}
}

// resumeStaged prepares the record of a volume that is mounted at its staging path: one that has no record gets one. If
// an unstage has made the filesystem read-only and could not unmount it, resumeStaged makes it writable again. It
// unmounts what an unstage has mounted for a thaw. In both cases the caller looks again.
func (n *Service) resumeStaged(ctx context.Context, volume *staging, entry mount.Entry) (changed bool, err error) {
	record, err := n.recordStaged(volume, entry.ReadOnly)
	if err != nil {
		return false, err
	}
	if wasRestored(record, entry) {
		return true, mount.Unmount(ctx, entry.Path, volume.dev.Number)
	}
	if record.Step == volumerecord.Staged || record.ReadOnly || volume.options.ReadOnly() {
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
func (n *Service) checkStagedAsRequested(volume *staging, entry mount.Entry) error {
	if err := checkUsable(volume.id, entry, volume.options.ReadOnly()); err != nil {
		return err
	}
	fsType, options := volume.wanted, volume.options
	switch {
	case fsType != "" && fsType != entry.FSType:
		return rpc.AlreadyExists("volume %s is staged at %s with %s, not %s: unmount it first", volume.id, entry.Path,
			entry.FSType, fsType)
	case entry.ReadOnly && !options.ReadOnly():
		return rpc.AlreadyExists("volume %s is staged at %s read-only, not writable: unmount it first", volume.id, entry.Path)
	case !entry.ReadOnly && options.ReadOnly():
		return rpc.AlreadyExists("volume %s is staged at %s writable, not read-only: unmount it first", volume.id, entry.Path)
	case entry.SELinuxContext != options.SELinuxContext():
		return rpc.AlreadyExists("volume %s is staged at %s with another SELinux context: unmount it first", volume.id,
			entry.Path)
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
func checkUsable(id uuid.UUID, staged mount.Entry, readOnly bool) error {
	switch {
	case staged.ShutDown:
		return rpc.FailedPrecondition(
			"volume %s is staged at %s, but its filesystem has shut itself down after an error: read the kernel's log, end the workload, and unstage the volume",
			id,
			staged.Path,
		)
	case staged.TurnedReadOnly && !readOnly:
		return rpc.FailedPrecondition(
			"volume %s is staged at %s, but its filesystem has become read-only after an error: read the kernel's log, end the workload, unstage the volume, and check the filesystem",
			id,
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
		return rpc.FailedPrecondition("%s has a mount that is not a volume: %s: unmount it manually", entry.Path, entry)
	}
	if _, err := n.devices.ByNumber(number); err == nil && !entry.NodeRemoved() {
		return rpc.FailedPrecondition("%s has a mount of another disk: %s: unmount that volume first", entry.Path, entry)
	} else if err != nil && !errors.Is(err, device.ErrNotFound) {
		return err
	}
	if others := otherMounts(table, entry); len(others) > 0 {
		return rpc.FailedPrecondition(
			"%s has a mount of a disk that has left this guest, and %s has one too: unmount that first", entry.Path,
			others[0].Path)
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
func checkNotMounted(volume *staging, table mount.Table) error {
	for _, entry := range table.OfDevice(volume.dev.Number) {
		return rpc.Fault(fault.DiskInUse,
			"volume %s cannot be staged: its disk %s is already mounted at %s: unmount it there first", volume.id, volume.dev,
			entry.Path)
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

// removeTraces removes what an interrupted format, check or growth left on a disk and in the records. From now on the
// workload owns the disk's bytes, so the traces mean nothing.
func (n *Service) removeTraces(ctx context.Context, volume *staging) error {
	content := volume.content()
	if err := n.formatter.RemoveMarkerAndRecord(volume.id, content); err != nil {
		return err
	}
	if err := device.RemoveWorkMarker(content); err != nil {
		return err
	}
	if !volume.unformatted {
		return nil
	}
	return n.luks.ClearLabel(ctx, volume.dev)
}
