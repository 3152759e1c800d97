// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// recheckTimeout is how long NodePublishVolume looks for a disk that was there when it was staged.
const recheckTimeout = 5 * time.Second

// publishRequest is one NodePublishVolume request, understood.
type publishRequest struct {
	volume          nodeVolume
	dev             device.Device
	staging, target string
	readOnly        bool
	// multipleTargets says that the access mode lets the volume be published at several paths.
	multipleTargets bool
}

// NodePublishVolume makes the staged volume appear at the target path: the filesystem as a folder, or the device node as a
// file. It is published read-only if asked, if the access mode is SINGLE_NODE_READER_ONLY, or if the disk takes no
// writes. A repetition succeeds; one with the other read-only flag is ALREADY_EXISTS; a second target is
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
	dev, err := n.devices.WaitForDisk(ctx, volume.expectedDisk(), recheckTimeout)
	if err != nil {
		return err
	}
	mode := req.GetVolumeCapability().GetAccessMode().GetMode()
	p := publishRequest{
		volume:          volume,
		dev:             dev,
		staging:         staging,
		target:          target,
		readOnly:        req.GetReadonly() || volume.readOnly || mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
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
		return rpc.FailedPrecondition(
			"volume %s is not staged at %s with a filesystem: stage it first",
			p.volume.id,
			p.staging,
		)
	}
	if err := checkUsable(p.volume, staged, p.readOnly); err != nil {
		return err
	}
	// Of a filesystem that is mounted read-only, every publication is.
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
	// A read-only bind does not keep anybody from writing through a device node: the disk itself has to refuse, for all.
	for _, other := range others {
		if other.ReadOnly != p.readOnly {
			return rpc.FailedPrecondition(
				"volume %s cannot be published with read-only %t: it is published with read-only %t at %s, and a raw block volume is either for all",
				p.volume.id,
				p.readOnly,
				other.ReadOnly,
				other.Path,
			)
		}
	}
	if err := setReadOnly(p.dev, p.readOnly); err != nil || published {
		return err
	}
	if err := mount.MakeFile(p.target); err != nil {
		return err
	}
	return bindVerified(p.dev, p.dev.Path, p.target, p.readOnly)
}

// checkPublished reports whether the volume is at the target already as it is asked for, and at which other targets it
// is. What a disk left at the target that has left the guest is taken away; whatever else stands in the way is an error.
func (n *Service) checkPublished(
	ctx context.Context,
	table mount.Table,
	p publishRequest,
	staged mount.Entry,
) (published bool, others []mount.Entry, err error) {
	entry, ok := table.At(p.target)
	for ok && !published {
		number, known := entry.Device()
		switch same := known && number == p.dev.Number && !entry.NodeRemoved(); {
		case same && entry.Block() != staged.Block():
			return false, nil, rpc.AlreadyExists(
				"volume %s is published at %s with the other access type",
				p.volume.id,
				p.target,
			)
		case same && entry.ReadOnly != p.readOnly:
			return false, nil, rpc.AlreadyExists(
				"volume %s is published at %s with read-only %t, not %t: unpublish it first",
				p.volume.id,
				p.target,
				entry.ReadOnly,
				p.readOnly,
			)
		case same:
			published = true
			continue
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
		// A part of the filesystem that shows elsewhere, as a subPath of Kubernetes does, belongs to a publication.
		if other.Path != p.target && !(ok && table.SameMount(other, entry)) && (other.Block() || other.Root == staged.Root) {
			others = append(others, other)
		}
	}
	if !published && !p.multipleTargets && len(others) > 0 {
		return false, nil, rpc.FailedPrecondition(
			"volume %s is already published at %s, and its access mode allows one target only: unpublish it there first",
			p.volume.id,
			others[0].Path,
		)
	}
	return published, others, nil
}

// NodeUnpublishVolume takes the volume away from the target path and removes the folder or file that was made for it. It
// works when the disk has left the guest, and when nothing is there. It never removes anything that holds something, nor
// takes away a mount that is none of this plugin's or, so far as can be known, another volume's. CSI spec,
// NodeUnpublishVolume.
func (n *Service) NodeUnpublishVolume(
	ctx context.Context,
	req *csi.NodeUnpublishVolumeRequest,
) (*csi.NodeUnpublishVolumeResponse, error) {
	if err := validateNodeUnpublishVolume(req); err != nil {
		return nil, err
	}
	target, err := mount.Resolve(req.GetTargetPath())
	if errors.Is(err, fs.ErrNotExist) {
		return &csi.NodeUnpublishVolumeResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	// No volume of ours was ever published under an ID that is no UUID; then everything at the target is somebody else's.
	if id, err := parseVolumeID(req.GetVolumeId()); err == nil {
		if err := n.unmountVolume(ctx, target, id, n.unmountPublished); err != nil {
			return nil, err
		}
	}
	table, err := mount.ReadTable()
	if err != nil {
		return nil, err
	}
	if entry, ok := table.At(target); ok {
		return nil, rpc.FailedPrecondition("%s has a mount that is not this volume's and stays: %s", target, entry)
	}
	if err := mount.Remove(target); err != nil {
		return nil, err
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

func (n *Service) unmountPublished(ctx context.Context, _ mount.Table, entry mount.Entry, number device.Number) error {
	return mount.Unmount(ctx, entry.Path, number)
}

// unmountVolume takes away everything that the volume has mounted at exactly this path, with the function given, and nothing
// else. It changes nothing where it cannot tell what is the volume's.
func (n *Service) unmountVolume(
	ctx context.Context,
	path string,
	id uuid.UUID,
	unmountOne func(context.Context, mount.Table, mount.Entry, device.Number) error,
) error {
	for {
		table, err := mount.ReadTable()
		if err != nil {
			return err
		}
		stack := table.AllAt(path)
		own, err := n.ownedMounts(ctx, table, stack, id)
		if err != nil || !slices.Contains(own, true) {
			return err
		}
		if !own[0] {
			return rpc.FailedPrecondition(
				"%s has a mount of volume %s, and over it one that is not the volume's: %s: take that away first",
				path,
				id,
				stack[0],
			)
		}
		number, ok := stack[0].Device()
		if !ok {
			return rpc.FailedPrecondition("%s has a mount that cannot be looked at: %s", path, stack[0])
		}
		if err := unmountOne(ctx, table, stack[0], number); err != nil {
			return err
		}
	}
}

// ownedMounts tells which of the mounts at one path, the uppermost first, are the volume's: those that surely are, those whose
// disk has left the guest, and those of which nothing is known if they are of one disk.
func (n *Service) ownedMounts(ctx context.Context, table mount.Table, stack []mount.Entry, id uuid.UUID) ([]bool, error) {
	own := make([]bool, len(stack))
	disks := map[ownership][]device.Number{}
	verdicts := make([]ownership, len(stack))
	for i, entry := range stack {
		if !isVolume(entry) {
			continue
		}
		if covered := i > 0 && entry.Block(); covered || n.diskRemoved(entry) {
			// A covered node cannot be looked at. What it is shows when it is the uppermost.
			own[i] = covered || n.ownershipOf(ctx, table, entry, id) != anotherVolume
			continue
		}
		verdicts[i] = n.ownershipOf(ctx, table, entry, id)
		if verdicts[i] != anotherVolume {
			own[i] = true
			disks[verdicts[i]] = append(disks[verdicts[i]], entry.Number)
		}
	}
	if len(disks[thisVolume]) > 0 {
		for i := range stack {
			own[i] = own[i] && (verdicts[i] == thisVolume || n.diskRemoved(stack[i]))
		}
	} else if len(slices.Compact(disks[unknownVolume])) > 1 {
		return nil, rpc.FailedPrecondition(
			"%s has mounts of several disks, and which is that of volume %s cannot be told: %s and others: unmount by hand what is not",
			stack[0].Path,
			id,
			stack[0],
		)
	}
	return own, nil
}
