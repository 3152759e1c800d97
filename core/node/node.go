// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package node

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"path"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/core/device"
	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/luks"
	"github.com/oxidecomputer/oxide-csi-plugin/core/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/core/volumerecord"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
)

// Service is the CSI Node service. Its records of held volumes outlive the process (records.go). It remembers which
// volumes it could not stage only until the process ends (health.go).
type Service struct {
	csi.UnimplementedNodeServer

	provider       metadata.Provider
	rack           string
	maxDisks       int
	reserveDisks   int
	devices        device.Roots
	stateDir       string
	records        volumerecord.Store
	formatter      mount.Formatter
	repairs        *mount.Repairs
	luks           luks.Tool
	blankScanLimit int64
	deviceTimeout  time.Duration
	unstageWait    time.Duration
	log            *slog.Logger

	disks    device.ChildReader
	probes   probes
	failures failures
	// mendedHeaders counts the calls of mendHeader that changed a disk. mended has what it has mended of each volume since
	// that was last unstaged: a condition of its health.
	mendedHeaders atomic.Int64
	mended        sync.Map
}

// Options are the parts and settings of the Node service. All are required, except Rack, ReserveDisks, LUKSMemoryBytes,
// AnswerTimeout and UnstageWait.
type Options struct {
	// Provider identifies the instance.
	Provider metadata.Provider
	// Rack is the rack's name in the topology if the provider does not know it.
	Rack string
	// MaxDisks is the number of disks that an instance can have, including its boot disk.
	MaxDisks int
	// ReserveDisks is the number of disks that are kept free for disks which users attach by hand.
	ReserveDisks int
	// Devices are the folders of the guest's device nodes and sysfs.
	Devices device.Roots
	// StateDir is the folder for records of held volumes and of unfinished formats, and for the locks of volumes.
	StateDir string
	// BlankScanLimit is the size in bytes up to which a disk that was not made blank is read as a whole before it is
	// formatted.
	BlankScanLimit int64
	// LUKSMemoryBytes is the memory of argon2id for new key slots of encrypted disks. 0 means
	// [luks.DefaultMemoryBytes].
	LUKSMemoryBytes int64
	// DeviceTimeout is how long the service waits for a disk to appear in the guest.
	DeviceTimeout time.Duration
	// AnswerTimeout is how long the service waits for a disk to answer a read. Zero means
	// [device.DefaultAnswerTimeout].
	AnswerTimeout time.Duration
	// UnstageWait is how long NodeUnstageVolume waits for programs that still use the volume. 0 means 30 s.
	UnstageWait time.Duration
	Log         *slog.Logger
}

// defaultUnstageWait gives the programs of a workload the time to end.
const defaultUnstageWait = 30 * time.Second

// New returns the Node service.
func New(opts Options) *Service {
	return &Service{
		provider:       opts.Provider,
		rack:           opts.Rack,
		maxDisks:       opts.MaxDisks,
		reserveDisks:   opts.ReserveDisks,
		devices:        opts.Devices,
		stateDir:       opts.StateDir,
		records:        volumerecord.Store{StateDir: opts.StateDir},
		formatter:      mount.Formatter{StateDir: opts.StateDir},
		repairs:        mount.NewRepairs(opts.Log),
		luks:           luks.Tool{Devices: opts.Devices, MemoryBytes: opts.LUKSMemoryBytes},
		blankScanLimit: opts.BlankScanLimit,
		deviceTimeout:  opts.DeviceTimeout,
		unstageWait:    cmp.Or(opts.UnstageWait, defaultUnstageWait),
		log:            opts.Log,
		disks:          device.ChildReader{Timeout: opts.AnswerTimeout},
	}
}

// Finish waits for work that goes on after its call: checks and growths of filesystems. Call it when the server has
// stopped.
func (n *Service) Finish() { n.repairs.Finish() }

// NodeGetVolumeStats returns the used and free bytes and inodes of a filesystem, or the size of a raw block volume. It
// returns NOT_FOUND if the volume is not mounted at the path, or if its disk has left the guest: the kernel would still
// answer from memory. CSI spec, NodeGetVolumeStats.
func (n *Service) NodeGetVolumeStats(
	_ context.Context,
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
	if of, _ := n.ownershipOf(n.records.List(), entry, id); of == anotherVolume {
		return nil, rpc.NotFound("volume %s is not at %s: another volume is there", id, entry.Path)
	}
	number, _ := entry.Device()
	if staging := req.GetStagingTargetPath(); staging != "" {
		staged, err := volumeAt(table, id, staging)
		if err != nil {
			return nil, err
		}
		if at, _ := staged.Device(); at != number {
			return nil, rpc.NotFound(
				"volume %s is staged from device %s, but device %s is mounted at %s: the path belongs to another volume", id, at,
				number, entry.Path)
		}
	}
	dev, err := n.devices.ByNumber(number)
	if errors.Is(err, device.ErrNotFound) || entry.NodeRemoved() {
		return nil, rpc.NotFound("volume %s at %s: its disk (device %s) has left this guest: unmount the volume", id,
			entry.Path, number)
	}
	if err != nil {
		return nil, err
	}
	if entry.Block() {
		if dev, err = n.contentOf(id, dev); err != nil {
			return nil, err
		}
		return &csi.NodeGetVolumeStatsResponse{
			Usage: []*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: dev.SizeBytes}},
		}, nil
	}
	return filesystemStats(entry.Path)
}

// filesystemStats returns the used and free bytes of the filesystem at a path, and its inodes if it counts them.
func filesystemStats(path string) (*csi.NodeGetVolumeStatsResponse, error) {
	usage, err := mount.Stats(path)
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

// volumeAt returns the mount of a staged or published volume at a path. It returns NOT_FOUND if no volume is mounted
// there.
func volumeAt(table mount.Table, id uuid.UUID, path string) (mount.Entry, error) {
	if !filepath.IsAbs(path) {
		return mount.Entry{}, rpc.NotFound("volume %s is not at %q: volumes have absolute paths", id, path)
	}
	resolved, err := mount.Resolve(path)
	if errors.Is(err, fs.ErrNotExist) {
		return mount.Entry{}, rpc.NotFound("volume %s is not at %s: the path does not exist", id, path)
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

// isVolume reports whether a mount can be a volume: a bound device node, or a supported filesystem, of a whole NVMe
// disk or of an encrypted volume's mapping. A user's own mount from a user's own disk looks the same.
func isVolume(entry mount.Entry) bool {
	source := path.Base(entry.Source)
	return entry.Block() ||
		filesystem.Supported(entry.FSType) && (device.IsDiskName(source) || device.IsMappingName(source))
}

// blockStagingPath returns the file below the staging path to which the device node of a raw block volume is bound.
func blockStagingPath(staging string, id uuid.UUID) string {
	return filepath.Join(staging, id.String())
}

// nodeRPCs are the optional RPCs of the Node service. VOLUME_MOUNT_GROUP is missing on purpose: with it, kubelet does
// not apply fsGroup itself and expects the plugin to do so.
var nodeRPCs = []csi.NodeServiceCapability_RPC_Type{
	csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
	csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER, csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
	csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH,
}

// NodeGetCapabilities returns the optional RPCs of this service. CSI spec, NodeGetCapabilities.
func (n *Service) NodeGetCapabilities(
	context.Context, *csi.NodeGetCapabilitiesRequest,
) (*csi.NodeGetCapabilitiesResponse, error) {
	resp := &csi.NodeGetCapabilitiesResponse{}
	for _, rpc := range nodeRPCs {
		resp.Capabilities = append(resp.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: rpc}},
		})
	}
	return resp, nil
}

// NodeGetInfo returns the node's ID, its rack, and its limit of volumes. The limit is the number of disks that an
// instance can have, minus attached disks that are no volumes, such as the boot disk, and minus the reserve. It is
// counted at each call. It is at least 1, because 0 means that there is no limit. CSI spec, NodeGetInfo.
func (n *Service) NodeGetInfo(ctx context.Context, _ *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	instance, err := n.provider.Instance(ctx)
	if err != nil {
		return nil, err
	}
	disks, err := n.devices.Disks()
	if err != nil {
		return nil, err
	}
	records := n.records.List()
	otherDisks := slices.DeleteFunc(disks, func(disk device.Disk) bool { return isVolumeDisk(records, disk) })
	rackName := instance.Rack
	if rackName == "" {
		rackName = n.rack
	}
	return &csi.NodeGetInfoResponse{
		NodeId:             instance.ID,
		MaxVolumesPerNode:  int64(max(1, n.maxDisks-len(otherDisks)-n.reserveDisks)),
		AccessibleTopology: rpc.Topology(rackName),
	}, nil
}
