package core

import (
	"context"
	"errors"
	"io/fs"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
)

// recheckTimeout is how long NodePublishVolume looks for a disk that was there when it was staged.
const recheckTimeout = 5 * time.Second

// publication is one NodePublishVolume request, understood.
type publication struct {
	volume          nodeVolume
	dev             device.Device
	staging, target string
	readOnly        bool
	// several says that the access mode lets the volume be published at several paths.
	several bool
}

// NodePublishVolume makes the staged volume appear at the target path: the filesystem as a folder, or the device node as a
// file. It is published read-only if asked, if the access mode is SINGLE_NODE_READER_ONLY, or if the disk takes no
// writes. A repetition succeeds; one with the other read-only flag is ALREADY_EXISTS; a second target is
// FAILED_PRECONDITION unless the access mode is SINGLE_NODE_MULTI_WRITER. CSI spec, NodePublishVolume.
func (n *Node) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	if err := validateNodePublishVolume(req); err != nil {
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
	target, err := resolve(req.GetTargetPath())
	if err != nil {
		return nil, err
	}
	dev, err := n.devices.Find(ctx, volume.want(), recheckTimeout)
	if err != nil {
		return nil, err
	}
	mode := req.GetVolumeCapability().GetAccessMode().GetMode()
	p := publication{
		volume:   volume,
		dev:      dev,
		staging:  staging,
		target:   target,
		readOnly: req.GetReadonly() || volume.readOnly || mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
		several:  mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER,
	}
	if req.GetVolumeCapability().GetBlock() != nil {
		err = n.publishBlock(ctx, p)
	} else {
		err = n.publishFilesystem(ctx, p)
	}
	if err != nil {
		return nil, err
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

func (n *Node) publishFilesystem(ctx context.Context, p publication) error {
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	staged, ok := table.At(p.staging)
	if !ok || staged.Block() || staged.Number != p.dev.Number {
		return failedPrecondition("volume %s is not staged at %s with a filesystem: stage it first", p.volume.id, p.staging)
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

func (n *Node) publishBlock(ctx context.Context, p publication) error {
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	staged, ok := table.At(blockStagingPath(p.staging, p.volume.id))
	if number, known := staged.Device(); !ok || !known || number != p.dev.Number || staged.NodeRemoved() {
		return failedPrecondition("volume %s is not staged at %s as raw block: stage it first", p.volume.id, p.staging)
	}
	published, others, err := n.checkPublished(ctx, table, p, staged)
	if err != nil {
		return err
	}
	// A read-only bind does not keep anybody from writing through a device node: the disk itself has to refuse, for all.
	for _, other := range others {
		if other.ReadOnly != p.readOnly {
			return failedPrecondition("volume %s cannot be published with read-only %t: it is published with read-only %t at %s, and a raw block volume is either for all",
				p.volume.id, p.readOnly, other.ReadOnly, other.Path)
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
func (n *Node) checkPublished(ctx context.Context, table mount.Table, p publication, staged mount.Entry) (published bool, others []mount.Entry, err error) {
	entry, ok := table.At(p.target)
	if ok {
		number, known := entry.Device()
		switch same := known && number == p.dev.Number && !entry.NodeRemoved(); {
		case same && entry.Block() != staged.Block():
			return false, nil, alreadyExists("volume %s is published at %s with the other access type", p.volume.id, p.target)
		case same && entry.ReadOnly != p.readOnly:
			return false, nil, alreadyExists("volume %s is published at %s with read-only %t, not %t: unpublish it first", p.volume.id, p.target, entry.ReadOnly, p.readOnly)
		case same:
			published = true
		default:
			if err := n.clearDead(ctx, table, entry); err != nil {
				return false, nil, err
			}
		}
	}
	for _, other := range publications(table, staged) {
		// A part of the filesystem that shows elsewhere, as a subPath of Kubernetes does, belongs to a publication.
		if other.Path != p.target && (other.Block() || other.Root == staged.Root) {
			others = append(others, other)
		}
	}
	if !published && !p.several && len(others) > 0 {
		return false, nil, failedPrecondition("volume %s is already published at %s, and its access mode allows one target only: unpublish it there first", p.volume.id, others[0].Path)
	}
	return published, others, nil
}

// NodeUnpublishVolume takes the volume away from the target path and removes the folder or file that was made for it. It
// works when the disk has left the guest, and when nothing is there. It never removes anything that holds something, nor
// takes away a mount that is none of this plugin's. CSI spec, NodeUnpublishVolume.
func (n *Node) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
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
	if err := unpublish(ctx, target); err != nil {
		return nil, err
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

func unpublish(ctx context.Context, target string) error {
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	if entry, ok := table.At(target); ok {
		number, known := entry.Device()
		if !known || !isVolume(entry) {
			return failedPrecondition("%s has a mount that is not ours: %s", target, entry)
		}
		if err := mount.Unmount(ctx, target, number); err != nil {
			return err
		}
	}
	return mount.Remove(target)
}
