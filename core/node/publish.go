// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumerecord"
)

// recheckTimeout is how long NodePublishVolume waits for the disk of a staged volume.
const recheckTimeout = 5 * time.Second

// publishRequest is a parsed request of NodePublishVolume.
type publishRequest struct {
	volume nodeVolume
	dev    device.Device
	// content has the volume's clear data: the mapping of an encrypted disk, or the disk.
	content         device.Device
	staging, target string
	readOnly        bool
	// multipleTargets says that the access mode allows several target paths.
	multipleTargets bool
}

// NodePublishVolume binds the staged volume to the target path: the filesystem to a folder, or the device node to a
// file. The bind is read-only if the request says so, if the access mode is SINGLE_NODE_READER_ONLY, or if the disk is
// read-only. It is safe to repeat. With another read-only flag it returns ALREADY_EXISTS. A second target is
// FAILED_PRECONDITION unless the access mode is SINGLE_NODE_MULTI_WRITER. CSI spec, NodePublishVolume.
func (n *Service) NodePublishVolume(
	ctx context.Context,
	req *csi.NodePublishVolumeRequest,
) (*csi.NodePublishVolumeResponse, error) {
	if err := validateNodePublishVolume(req); err != nil {
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
	err = n.publish(ctx, req, volume)
	n.failures.record(volume.id, err)
	if err != nil {
		return nil, err
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

func (n *Service) publish(ctx context.Context, req *csi.NodePublishVolumeRequest, volume nodeVolume) error {
	staging, err := resolve(req.GetStagingTargetPath())
	if err != nil {
		return err
	}
	target, err := resolve(req.GetTargetPath())
	if err != nil {
		return err
	}
	// Again without symbolic links.
	if err := checkSeparate(staging, target); err != nil {
		return err
	}
	dev, err := n.devices.WaitForDisk(ctx, n.expectedDisk(volume), recheckTimeout)
	if err != nil {
		return err
	}
	content, err := n.contentOf(volume.id, dev)
	if err != nil {
		return err
	}
	if volume.encrypted && content.Number == dev.Number {
		return rpc.FailedPrecondition("volume %s is encrypted and not staged: stage it first", volume.id)
	}
	mode := req.GetVolumeCapability().GetAccessMode().GetMode()
	p := publishRequest{
		volume:  volume,
		dev:     dev,
		content: content,
		staging: staging,
		target:  target,
		readOnly: req.GetReadonly() || volume.readOnly ||
			mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
		multipleTargets: mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER,
	}
	if req.GetVolumeCapability().GetBlock() != nil {
		return n.publishBlock(ctx, p)
	}
	return n.publishFilesystem(ctx, p)
}

func (n *Service) publishFilesystem(ctx context.Context, p publishRequest) error {
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	staged, ok := table.At(p.staging)
	if !ok || staged.Block() || staged.Number != p.dev.Number {
		return rpc.FailedPrecondition("volume %s is not staged at %s with a filesystem: stage it first", p.volume.id,
			p.staging)
	}
	if staged.ReadOnly && !p.readOnly && n.stoppedByUnstage(p.volume.id) {
		return rpc.FailedPrecondition("volume %s is being unstaged at %s, and its filesystem is read-only: stage it first",
			p.volume.id, p.staging)
	}
	if err := checkUsable(p.volume.id, staged, p.readOnly); err != nil {
		return err
	}
	// A filesystem that is mounted read-only is published read-only.
	p.readOnly = p.readOnly || staged.ReadOnly
	published, _, err := n.checkPublished(ctx, table, p, staged)
	if err != nil || published {
		return err
	}
	if err := mount.MakeFolder(p.target); err != nil {
		return err
	}
	return bindVerified(p.dev, p.staging, p.target, p.readOnly)
}

func (n *Service) publishBlock(ctx context.Context, p publishRequest) error {
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	staged, ok := table.At(blockStagingPath(p.staging, p.volume.id))
	if number, known := staged.Device(); !ok || !known || number != p.dev.Number || staged.NodeRemoved() {
		return rpc.FailedPrecondition("volume %s is not staged at %s as raw block: stage it first", p.volume.id, p.staging)
	}
	published, others, err := n.checkPublished(ctx, table, p, staged)
	if err != nil {
		return err
	}
	// A read-only bind does not prevent writes through a device node. The disk itself must reject them, for all
	// targets.
	for _, other := range others {
		if other.ReadOnly != p.readOnly {
			return rpc.FailedPrecondition(
				"volume %s cannot be published with read-only %t: it is published with read-only %t at %s, and all targets of a raw block volume must be the same",
				p.volume.id,
				p.readOnly,
				other.ReadOnly,
				other.Path,
			)
		}
	}
	if err := setReadOnly(p.content, p.readOnly); err != nil || published {
		return err
	}
	if err := mount.MakeFile(p.target); err != nil {
		return err
	}
	return bindVerified(p.dev, p.content.Path, p.target, p.readOnly)
}

// checkPublished reports whether the volume is published at the target as requested, and returns its other targets. It
// unmounts a mount at the target whose disk has left the guest. Any other mount at the target is an error.
func (n *Service) checkPublished(
	ctx context.Context,
	table mount.Table,
	p publishRequest,
	staged mount.Entry,
) (published bool, others []mount.Entry, err error) {
	if err := n.checkUncovered(p.volume.id, p.target); err != nil {
		return false, nil, err
	}
	entry, ok := table.At(p.target)
	for ok {
		if published, err = p.isPublished(staged, entry); err != nil {
			return false, nil, err
		}
		if published {
			break
		}
		if err := n.unmountOrphan(ctx, table, entry); err != nil {
			return false, nil, err
		}
		if table, err = mount.ReadTable(); err != nil {
			return false, nil, err
		}
		entry, ok = table.At(p.target)
	}
	for _, other := range otherMounts(table, staged) {
		// A mount of a part of the filesystem, such as a subPath of Kubernetes, is not a target.
		if other.Path != p.target && !(ok && table.SameMount(other, entry)) && (other.Block() || other.Root == staged.Root) {
			others = append(others, other)
		}
	}
	if !published && !p.multipleTargets && len(others) > 0 {
		return false, nil, rpc.FailedPrecondition(
			"volume %s is already mounted at %s, and its access mode allows only one target: unmount it there first",
			p.volume.id, others[0].Path)
	}
	return published, others, nil
}

// isPublished reports whether a mount at the target is the volume's, as requested. If it is the volume's and differs
// from the request, it returns an error.
func (p publishRequest) isPublished(staged, entry mount.Entry) (bool, error) {
	number, known := entry.Device()
	switch same := known && number == p.dev.Number && !entry.NodeRemoved(); {
	case same && !entry.Block() && entry.Root != staged.Root:
		return false, rpc.FailedPrecondition(
			"%s has a mount of the directory %s of volume %s, not of the whole volume: unmount it manually",
			p.target, entry.Root, p.volume.id)
	case same && entry.Block() != staged.Block():
		return false, rpc.AlreadyExists("volume %s is mounted at %s with the other access type: unmount it first",
			p.volume.id, p.target)
	case same && entry.ReadOnly != p.readOnly:
		return false, rpc.AlreadyExists("volume %s is mounted at %s with read-only %t, not %t: unmount it first",
			p.volume.id, p.target, entry.ReadOnly, p.readOnly)
	default:
		return same, nil
	}
}

// NodeUnpublishVolume unmounts the volume from the target path and removes the target's folder or file. It succeeds
// also if the disk has left the guest, and if nothing is at the path. It does not remove a folder or file with content.
// It does not unmount other mounts or, as far as it can know, other volumes. CSI spec, NodeUnpublishVolume.
func (n *Service) NodeUnpublishVolume(
	ctx context.Context,
	req *csi.NodeUnpublishVolumeRequest,
) (*csi.NodeUnpublishVolumeResponse, error) {
	if err := validateNodeUnpublishVolume(req); err != nil {
		return nil, err
	}
	target, err := resolveToLeave(req.GetTargetPath())
	if err != nil {
		return nil, err
	}
	id, invalid := parseVolumeID(req.GetVolumeId())
	if target == "" {
		if invalid == nil {
			err = n.checkUncovered(id, mount.ResolveExisting(req.GetTargetPath()))
		}
		return &csi.NodeUnpublishVolumeResponse{}, err
	}
	if invalid == nil {
		locked, release, err := n.lockVolumeToLeave(ctx, id)
		if err != nil {
			return nil, err
		}
		defer release()
		err = n.unmountVolume(locked, target, id, n.unmountPublished(id))
		if err == nil {
			err = n.checkUncovered(id, target)
		}
		if err != nil {
			return nil, err
		}
	}
	table, err := mount.ReadTable()
	if err != nil {
		return nil, err
	}
	if entry, ok := table.At(target); ok {
		return nil, rpc.Fault(fault.PathOccupied, "%s has a mount that is not this volume's and stays: %s", target, entry)
	}
	// This plugin has never published a volume whose ID is not a UUID. For such an ID, nothing is removed either.
	if invalid != nil {
		return &csi.NodeUnpublishVolumeResponse{}, nil
	}
	if err := mount.Remove(target); err != nil && !errors.Is(err, unix.ENAMETOOLONG) {
		return nil, err
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// unmountPublished returns a function that unmounts one mount at a target. It keeps the last mount of a frozen
// filesystem, which is at a target if another program has unmounted the staging path.
func (n *Service) unmountPublished(id uuid.UUID) unmountFunc {
	return func(ctx context.Context, table mount.Table, entry mount.Entry, number device.Number) error {
		if len(otherMounts(table, entry)) == 0 && !n.diskRemoved(entry) && entry.Frozen() {
			return frozenAt(id, entry.Path)
		}
		return mount.Unmount(ctx, entry.Path, number)
	}
}

// unmountFunc unmounts one mount of a volume.
type unmountFunc func(ctx context.Context, table mount.Table, entry mount.Entry, number device.Number) error

// unmountVolume calls unmountOne for all mounts of the volume at exactly this path, and for no others. If it cannot
// tell which mounts belong to the volume, it changes nothing.
func (n *Service) unmountVolume(ctx context.Context, path string, id uuid.UUID, unmountOne unmountFunc) error {
	for {
		table, err := mount.ReadTable()
		if err != nil {
			return err
		}
		stack := table.AllAt(path)
		if len(stack) == 0 {
			return nil
		}
		own, err := n.ownedMounts(n.records.List(), stack, id)
		if err != nil || !slices.Contains(own, true) {
			return err
		}
		if !own[0] {
			return covered(path, id, stack[0])
		}
		number, ok := stack[0].Device()
		if !ok {
			return rpc.FailedPrecondition("%s has a mount whose device cannot be read: %s: unmount it manually", path, stack[0])
		}
		if err := unmountOne(ctx, table, stack[0], number); err != nil {
			return err
		}
	}
}

func covered(path string, id uuid.UUID, top mount.Entry) error {
	return rpc.FailedPrecondition(
		"%s has a mount of volume %s, and over it a mount that is not the volume's: %s: unmount that first", path, id, top)
}

// checkUncovered returns an error if the volume is mounted at one of the paths, but the path does not lead there,
// because a mount at a folder above covers it. What is done at that path concerns something else than the volume.
func (n *Service) checkUncovered(id uuid.UUID, paths ...string) error {
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	for _, path := range paths {
		mounts, by := table.Covered(path)
		for _, entry := range mounts {
			// The node that is bound to a covered path cannot be read.
			if !isVolume(entry) {
				continue
			}
			if of, _ := n.ownershipOf(n.records.List(), entry, id); entry.Block() || of != anotherVolume {
				return rpc.FailedPrecondition("volume %s is mounted at %s, but a mount at %s covers it: %s: unmount that first", id,
					path, by.Path, by)
			}
		}
	}
	return nil
}

// ownedMounts reports for each of the mounts at a path, the uppermost first, whether it belongs to the volume. Mounts
// that certainly belong to it count, and mounts whose disk has left the guest. Mounts of unknown volumes count if all
// of them are of one disk.
func (n *Service) ownedMounts(records []volumerecord.Record, stack []mount.Entry, id uuid.UUID) ([]bool, error) {
	own := make([]bool, len(stack))
	disks := map[ownership][]device.Number{}
	verdicts, removed := make([]ownership, len(stack)), make([]bool, len(stack))
	for i, entry := range stack {
		if !isVolume(entry) {
			continue
		}
		if i > 0 && entry.Block() {
			own[i] = true // the device of a covered node cannot be read before the node is the uppermost mount
			removed[i] = n.diskRemoved(entry)
			continue
		}
		verdicts[i], removed[i] = n.ownershipOf(records, entry, id)
		own[i] = verdicts[i] != anotherVolume
		if own[i] && !removed[i] {
			disks[verdicts[i]] = append(disks[verdicts[i]], entry.Number)
		}
	}
	if len(disks[thisVolume]) > 0 {
		for i := range stack {
			own[i] = own[i] && (verdicts[i] == thisVolume || removed[i])
		}
	} else if len(slices.Compact(disks[unknownVolume])) > 1 {
		return nil, rpc.FailedPrecondition(
			"%s has mounts of several disks, and it cannot be told which is that of volume %s: %s and others: unmount the others manually",
			stack[0].Path,
			id,
			stack[0],
		)
	}
	return own, nil
}
