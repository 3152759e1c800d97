package core

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
)

// NodeStageVolume finds the volume's disk, makes a filesystem on it if it is provably blank, and mounts it at the staging
// path; of a raw block volume it binds the device node. It waits for the disk to appear in the guest. A repetition finds
// the mount and succeeds; one that asks for another filesystem, or for raw block instead, is ALREADY_EXISTS. CSI spec,
// NodeStageVolume.
func (n *Node) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	if err := validateNodeStageVolume(req); err != nil {
		return nil, err
	}
	volume, err := parseNodeVolume(req.GetVolumeId(), req.GetPublishContext(), req.GetVolumeContext())
	if err != nil {
		return nil, err
	}
	staging, err := resolve(req.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	capability := req.GetVolumeCapability().GetMount()
	if err := mount.CheckFlags(capability.GetMountFlags()); err != nil {
		return nil, err
	}
	start := time.Now()
	dev, err := n.devices.Find(ctx, volume.want(), n.deviceTimeout)
	if err != nil {
		return nil, err
	}
	n.log.Debug("found the disk", "volume_id", volume.id.String(), "device", dev.String(), "find", time.Since(start))
	n.staged.Store(dev.Serial, true)
	if !volume.attached {
		// Nobody told whether the rack takes writes to this disk; the guest's kernel knows.
		if volume.readOnly, err = dev.ReadOnly(); err != nil {
			return nil, err
		}
	}
	if capability == nil {
		err = n.stageBlock(ctx, volume, dev, staging)
	} else {
		err = n.stageFilesystem(ctx, volume, dev, staging, capability)
	}
	if err != nil {
		return nil, err
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

// resolve resolves a path of a request whose parent the orchestrator has to provide.
func resolve(path string) (string, error) {
	resolved, err := mount.Resolve(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", failedPrecondition("the folder %s does not exist, which the orchestrator makes: check that it and the plugin see the same folders (hostPath mounts, stage_publish_base_dir)",
			filepath.Dir(filepath.Clean(path)))
	}
	return resolved, err
}

func (n *Node) stageFilesystem(ctx context.Context, volume nodeVolume, dev device.Device, staging string, capability *csi.VolumeCapability_MountVolume) error {
	options := volume.mountOptions(capability.GetMountFlags())
	fsType, err := n.stagedType(ctx, volume, dev, staging, capability.GetFsType(), options)
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
		n.log.Info("grew the filesystem to its disk", "volume_id", volume.id.String(), "device", dev.String(), "fs_type", fsType)
	}
	if err != nil {
		return err
	}
	return n.setRoot(ctx, volume, dev, staging)
}

// mountStaging mounts what is on the disk, or what it makes there, and returns the filesystem's type.
func (n *Node) mountStaging(ctx context.Context, volume nodeVolume, dev device.Device, staging, wanted string, options mount.Options) (fsType string, err error) {
	if err := mount.MakeFolder(staging); err != nil {
		return "", err
	}
	if err := setReadOnly(dev, volume.readOnly); err != nil {
		return "", err
	}
	if fsType, err = n.filesystem(ctx, volume, dev, wanted); err != nil {
		return "", err
	}
	if !options.ReadOnly() {
		grown, err := mount.GrowUnmounted(ctx, dev, fsType)
		if grown {
			n.log.Info("grew the filesystem to its disk", "volume_id", volume.id.String(), "device", dev.String(), "fs_type", fsType)
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

// stagedType returns the filesystem with which the volume is staged already as it is asked for, empty when it is not
// staged. A mount left over at the staging path from a disk that has left the guest is taken away; whatever else stands in
// the way is an error.
func (n *Node) stagedType(ctx context.Context, volume nodeVolume, dev device.Device, staging, fsType string, options mount.Options) (string, error) {
	table, err := mount.ReadTable()
	if err != nil {
		return "", err
	}
	if _, ok := table.At(blockStagingPath(staging, volume.id)); ok {
		return "", alreadyExists("volume %s is staged at %s as raw block, not with a filesystem: unstage it first", volume.id, staging)
	}
	entry, ok := table.At(staging)
	if ok && !entry.Block() && entry.Number == dev.Number {
		switch {
		case fsType != "" && fsType != entry.FSType:
			return "", alreadyExists("volume %s is staged at %s with %s, not %s", volume.id, staging, entry.FSType, fsType)
		case entry.ReadOnly && !options.ReadOnly():
			return "", alreadyExists("volume %s is staged at %s read-only, or its filesystem became so after an error (see dmesg): unstage it first", volume.id, staging)
		case !entry.ReadOnly && options.ReadOnly():
			return "", alreadyExists("volume %s is staged at %s writable, not read-only", volume.id, staging)
		case entry.SELinuxContext != options.SELinuxContext():
			return "", alreadyExists("volume %s is staged at %s with another SELinux context", volume.id, staging)
		}
		return entry.FSType, nil
	}
	if ok {
		if err := n.clearDead(ctx, table, entry); err != nil {
			return "", err
		}
	}
	return "", checkUnused(volume, dev, table)
}

// clearDead takes away a mount whose disk has left the guest, if nothing else still shows it; any other is not ours to
// touch.
func (n *Node) clearDead(ctx context.Context, table mount.Table, entry mount.Entry) error {
	number, ok := entry.Device()
	if !ok || !isVolume(entry) {
		return failedPrecondition("%s has a mount that is not ours: %s", entry.Path, entry)
	}
	if _, err := n.devices.ByNumber(number); err == nil && !entry.NodeRemoved() {
		return failedPrecondition("%s has a mount of another disk: %s: unstage or unpublish that volume first", entry.Path, entry)
	} else if err != nil && !errors.Is(err, device.ErrNotFound) {
		return err
	}
	if others := publications(table, entry); len(others) > 0 {
		return failedPrecondition("%s has a mount of a disk that has left this guest, which is still published at %s: unpublish it first", entry.Path, others[0].Path)
	}
	n.log.Warn("taking away a mount whose disk has left this guest", "path", entry.Path, "device", number.String())
	return mount.Unmount(ctx, entry.Path, number)
}

// publications are the other mounts that give access to what entry gives access to. The number of a disk whose node was
// removed may be another disk's by now, so that only nodes removed with it count.
func publications(table mount.Table, entry mount.Entry) []mount.Entry {
	number, ok := entry.Device()
	if !ok {
		return nil
	}
	var others []mount.Entry
	for _, other := range table.Of(number) {
		if other.Path != entry.Path && (!entry.NodeRemoved() || other.NodeRemoved()) {
			others = append(others, other)
		}
	}
	return others
}

// checkUnused refuses a disk that is mounted anywhere.
func checkUnused(volume nodeVolume, dev device.Device, table mount.Table) error {
	for _, entry := range table.Of(dev.Number) {
		return failedPrecondition("volume %s cannot be staged: its disk %s is already mounted at %s", volume.id, dev, entry.Path)
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

func (n *Node) stageBlock(ctx context.Context, volume nodeVolume, dev device.Device, staging string) error {
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	if entry, ok := table.At(staging); ok {
		if entry.Number == dev.Number {
			return alreadyExists("volume %s is staged at %s with a filesystem, not as raw block: unstage it first", volume.id, staging)
		}
		return failedPrecondition("the staging path %s has a mount that is not ours: %s", staging, entry)
	}
	pin := blockStagingPath(staging, volume.id)
	if entry, ok := table.At(pin); ok {
		if number, ok := entry.Device(); ok && number == dev.Number && !entry.NodeRemoved() {
			return nil
		}
		if err := n.clearDead(ctx, table, entry); err != nil {
			return err
		}
		if table, err = mount.ReadTable(); err != nil {
			return err
		}
	}
	if err := checkUnused(volume, dev, table); err != nil {
		return err
	}
	// From now on the disk's bytes are the workload's: what an interrupted format left no longer tells us anything.
	if !volume.readOnly {
		if err := n.formatter.Clear(volume.id, dev); err != nil {
			return err
		}
	}
	if err := os.Mkdir(staging, 0o750); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := mount.MakeFile(pin); err != nil {
		return err
	}
	return bindVerified(dev, dev.Path, pin, false)
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
	return internal("%s was bound to %s, but the mount table does not show it as asked (read-only %t): unpublish the volume and look at the kernel's log", dev, target, readOnly)
}

// NodeUnstageVolume unmounts the volume from the staging path, and succeeds only when nothing in this guest holds its disk
// any more: the next thing to happen may be that the disk is taken away. It works when the disk is gone already. While
// the volume is published anywhere it is FAILED_PRECONDITION and changes nothing. CSI spec, NodeUnstageVolume.
func (n *Node) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	if err := validateNodeUnstageVolume(req); err != nil {
		return nil, err
	}
	staging, err := mount.Resolve(req.GetStagingTargetPath())
	if errors.Is(err, fs.ErrNotExist) {
		return &csi.NodeUnstageVolumeResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	id, err := parseVolumeID(req.GetVolumeId())
	if err != nil {
		return &csi.NodeUnstageVolumeResponse{}, nil // no volume of ours was ever staged under this ID
	}
	// The staging path itself first: of a dead filesystem, nothing below it can be looked at.
	if err := n.unstage(ctx, staging); err != nil {
		return nil, err
	}
	pin := blockStagingPath(staging, id)
	if err := n.unstage(ctx, pin); err != nil {
		return nil, err
	}
	if err := mount.Remove(pin); err != nil {
		return nil, err
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}

// unstage takes away what is staged at exactly this path. What is not ours there was not staged by us.
func (n *Node) unstage(ctx context.Context, path string) error {
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	entry, ok := table.At(path)
	if !ok || !isVolume(entry) {
		return nil
	}
	number, ok := entry.Device()
	if !ok {
		return internal("%s has a mount that cannot be looked at: %s", path, entry)
	}
	if others := publications(table, entry); len(others) > 0 {
		return failedPrecondition("the volume staged at %s is still published at %s: unpublish it first", path, others[0].Path)
	}
	dev, err := n.devices.ByNumber(number)
	gone := errors.Is(err, device.ErrNotFound) || entry.NodeRemoved()
	if err != nil && !gone {
		return err
	}
	if err := mount.Unmount(ctx, path, number); err != nil || gone {
		return err
	}
	return mount.Release(ctx, dev, entry.Block())
}
