// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"path"
	"path/filepath"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Service is the CSI Node service. Its state in memory is lost when the process ends, and no decision depends on it: which
// volumes it has staged from which disks (identify.go), and which it could not stage (health.go).
type Service struct {
	csi.UnimplementedNodeServer

	provider       metadata.Provider
	rack           string
	maxDisks       int
	reserveDisks   int
	devices        device.Roots
	stateDir       string
	formatter      mount.Formatter
	blankScanLimit int64
	deviceTimeout  time.Duration
	log            *slog.Logger

	staged   stagedDisks
	probes   probes
	failures failures
}

// Options are what the Node service is made of.
type Options struct {
	// Provider tells which instance this is.
	Provider metadata.Provider
	// Rack is the rack's name in the topology where the provider knows none.
	Rack string
	// MaxDisks is how many disks an instance takes, its boot disk included.
	MaxDisks int
	// ReserveDisks is how many of them are kept for disks that somebody will attach by hand.
	ReserveDisks int
	// Devices is where the guest's /dev and /sys are.
	Devices device.Roots
	// StateDir holds records of formatting under way, and the claims of programs at work.
	StateDir string
	// BlankScanLimit is the size in bytes up to which a disk that was not made blank is read as a whole before it is
	// formatted.
	BlankScanLimit int64
	// DeviceTimeout is how long a disk may take to appear in the guest.
	DeviceTimeout time.Duration
	Log           *slog.Logger
}

// New returns the Node service.
func New(opts Options) *Service {
	return &Service{
		provider:       opts.Provider,
		rack:           opts.Rack,
		maxDisks:       opts.MaxDisks,
		reserveDisks:   opts.ReserveDisks,
		devices:        opts.Devices,
		stateDir:       opts.StateDir,
		formatter:      mount.Formatter{StateDir: opts.StateDir},
		blankScanLimit: opts.BlankScanLimit,
		deviceTimeout:  opts.DeviceTimeout,
		log:            opts.Log,
	}
}

// NodeGetVolumeStats tells how full the volume is: bytes and inodes of a filesystem, the size of a raw block volume. Every
// path at which this volume is not is NOT_FOUND, one whose disk has left the guest included: the kernel would go on
// answering for it from memory. CSI spec, NodeGetVolumeStats.
func (n *Service) NodeGetVolumeStats(
	ctx context.Context,
	req *csi.NodeGetVolumeStatsRequest,
) (*csi.NodeGetVolumeStatsResponse, error) {
	if err := validateNodeGetVolumeStats(req); err != nil {
		return nil, err
	}
	id, err := parseVolumeID(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	table, err := mount.ReadTable()
	if err != nil {
		return nil, err
	}
	entry, err := volumeAt(table, id, req.GetVolumePath())
	if err != nil {
		return nil, err
	}
	if n.ownershipOf(ctx, table, entry, id) == anotherVolume {
		return nil, rpc.NotFound("volume %s is not at %s: another volume is", id, entry.Path)
	}
	number, _ := entry.Device()
	if staging := req.GetStagingTargetPath(); staging != "" {
		staged, err := volumeAt(table, id, staging)
		if err != nil {
			return nil, err
		}
		if at, _ := staged.Device(); at != number {
			return nil, rpc.NotFound(
				"volume %s is staged from device %s, but %s shows device %s: the path belongs to another volume",
				id,
				at,
				entry.Path,
				number,
			)
		}
	}
	dev, err := n.devices.ByNumber(number)
	if errors.Is(err, device.ErrNotFound) || entry.NodeRemoved() {
		return nil, rpc.NotFound(
			"volume %s at %s: its disk (device %s) has left this guest: unpublish and unstage the volume",
			id,
			entry.Path,
			number,
		)
	}
	if err != nil {
		return nil, err
	}
	if entry.Block() {
		return &csi.NodeGetVolumeStatsResponse{
			Usage: []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: dev.SizeBytes}},
		}, nil
	}
	usage, err := mount.Stats(entry.Path)
	if err != nil {
		return nil, err
	}
	all := []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: usage.TotalBytes, Used: usage.UsedBytes, Available: usage.AvailableBytes},
	}
	if usage.TotalInodes > 0 {
		all = append(
			all,
			&csi.VolumeUsage{
				Unit:      csi.VolumeUsage_INODES,
				Total:     usage.TotalInodes,
				Used:      usage.UsedInodes,
				Available: usage.AvailableInodes,
			},
		)
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: all}, nil
}

// volumeAt finds what is staged or published of a volume at a path; NOT_FOUND when nothing of a volume is there.
func volumeAt(table mount.Table, id uuid.UUID, path string) (mount.Entry, error) {
	if !filepath.IsAbs(path) {
		return mount.Entry{}, rpc.NotFound("volume %s is not at %q: volumes have absolute paths", id, path)
	}
	resolved, err := mount.Resolve(path)
	if errors.Is(err, fs.ErrNotExist) {
		return mount.Entry{}, rpc.NotFound("volume %s is not at %s: there is no such path", id, path)
	}
	if err != nil {
		return mount.Entry{}, rpc.NotFound("volume %s is not at %s: %w", id, path, err)
	}
	entry, ok := table.At(resolved)
	if !ok {
		entry, ok = table.At(blockStagingPath(resolved, id))
	}
	if !ok {
		return mount.Entry{}, rpc.NotFound("volume %s is not at %s: nothing is mounted there", id, path)
	}
	if !isVolume(entry) {
		return mount.Entry{}, rpc.NotFound("volume %s is not at %s: a %s is mounted there", id, path, entry)
	}
	return entry, nil
}

// isVolume reports whether a mount can be one of ours: a bound NVMe disk, or a filesystem that we mount, on a whole
// NVMe disk. What a user has mounted elsewhere from a disk of his own looks the same.
func isVolume(entry mount.Entry) bool {
	return entry.Block() || filesystem.Supported(entry.FSType) && device.IsDiskName(path.Base(entry.Source))
}

// blockStagingPath is the file below the staging path to which the device node of a raw block volume is bound.
func blockStagingPath(staging string, id uuid.UUID) string {
	return filepath.Join(staging, id.String())
}

// NodeGetCapabilities: CSI spec, NodeGetCapabilities.
func (n *Service) NodeGetCapabilities(
	context.Context,
	*csi.NodeGetCapabilitiesRequest,
) (*csi.NodeGetCapabilitiesResponse, error) {
	return &csi.NodeGetCapabilitiesResponse{Capabilities: nodeCapabilities()}, nil
}

// NodeGetInfo tells who this node is, on which rack, and how many volumes it takes: as many disks as an instance takes, less
// those that are there and no volumes of this plugin, such as the boot disk, and less those kept in reserve. It is counted
// anew each time, as disks come and go. At least 1 is reported, as 0 would mean that there is no limit. CSI spec, NodeGetInfo.
func (n *Service) NodeGetInfo(ctx context.Context, _ *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	instance, err := n.provider.Instance(ctx)
	if err != nil {
		return nil, err
	}
	disks, err := n.devices.Disks()
	if err != nil {
		return nil, err
	}
	foreign := slices.DeleteFunc(disks, n.isVolumeDisk)
	rackName := instance.Rack
	if rackName == "" {
		rackName = n.rack
	}
	return &csi.NodeGetInfoResponse{
		NodeId:             instance.ID,
		MaxVolumesPerNode:  int64(max(1, n.maxDisks-len(foreign)-n.reserveDisks)),
		AccessibleTopology: rpc.Topology(rackName),
	}, nil
}
