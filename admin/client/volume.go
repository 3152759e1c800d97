// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"context"
	"iter"
	"math"
	"strconv"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/oxidecomputer/oxide-csi-plugin/core/fault"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Volume is a volume as the plugin describes it.
type Volume struct {
	ID string `json:"volumeID"`
	// Name is the name with which the volume was created, in the cluster with the ID Cluster. Cluster is empty for the
	// controller's own cluster. Claim is namespace/name of the volume's claim in Kubernetes. Each is empty if it is not
	// known.
	Name    string `json:"name,omitempty"`
	Cluster string `json:"cluster,omitempty"`
	Claim   string `json:"claim,omitempty"`
	// Created is by the rack's clock. It is zero if it is not known.
	Created   time.Time `json:"created,omitzero"`
	DiskName  string    `json:"diskName,omitempty"`
	SizeBytes int64     `json:"sizeBytes"`
	// BlockSize is in bytes.
	BlockSize int64  `json:"blockSize,omitempty"`
	Rack      string `json:"rack,omitempty"`
	// The source of the volume. At most one is set.
	SourceVolumeID   string `json:"sourceVolumeID,omitempty"`
	SourceSnapshotID string `json:"sourceSnapshotID,omitempty"`
	// NodeID is the node that the volume is attached to. NodeName is the name of its instance.
	NodeID   string `json:"nodeID,omitempty"`
	NodeName string `json:"nodeName,omitempty"`
	// Mounts are the paths at which the volume is mounted on this host; see [Client.SetMounts].
	Mounts []string `json:"mounts,omitempty"`
	// WaitsFor is the restart that the volume waits for. It is nil in attach mode hot.
	//
	// StillOn is the node that still has the disk of an unpublished volume. In attach mode hot it has no restart: the
	// disk is detached after the grace period.
	WaitsFor *PendingAttach `json:"waitsFor,omitempty"`
	StillOn  *Restart       `json:"stillOn,omitempty"`
	// Health lists the volume's problems. It is nil if the plugin was not asked.
	Health []Health `json:"health,omitempty"`

	planned bool // see Planned
}

// Health is a problem of a volume.
type Health struct {
	Status  string `json:"status"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

func toVolume(v *csi.Volume, nodes []string) Volume {
	volume := Volume{
		ID:               v.GetVolumeId(),
		DiskName:         v.GetVolumeContext()[rpc.KeyDiskName],
		SizeBytes:        v.GetCapacityBytes(),
		Rack:             rackOf(v.GetAccessibleTopology()),
		SourceVolumeID:   v.GetContentSource().GetVolume().GetVolumeId(),
		SourceSnapshotID: v.GetContentSource().GetSnapshot().GetSnapshotId(),
	}
	// The block size is 0 if the plugin does not know it.
	volume.BlockSize, _ = strconv.ParseInt(v.GetVolumeContext()[rpc.KeyBlockSize], 10, 64)
	if len(nodes) > 0 {
		volume.NodeID = nodes[0] // a disk is on one instance at a time
	}
	return volume
}

// setDetails sets the fields that a controller's [rpc.Details] have.
func (v *Volume) setDetails(details map[string]rpc.Details) {
	d := details[v.ID]
	v.Name, v.Cluster, v.Claim, v.Created = d.Name, d.Cluster, d.Claim, d.Created
	if d.Holder != "" && v.NodeID == "" {
		v.StillOn = &Restart{NodeID: d.Holder}
	}
}

// setNodeNames sets the names of the nodes that the volume's fields have by ID.
func (v *Volume) setNodeNames(names map[string]string) {
	v.NodeName = names[v.NodeID]
	if v.WaitsFor != nil {
		v.WaitsFor.NodeName = names[v.WaitsFor.NodeID]
		v.WaitsFor.Problem = withNodeNames(v.WaitsFor.Problem, names)
	}
	if v.StillOn != nil {
		v.StillOn.NodeName = names[v.StillOn.NodeID]
	}
}

// UsableName returns the name by which the commands find the volume, or "" if only its ID does.
func (v Volume) UsableName() string { return usableName(v.Name, v.Cluster) }

func rackOf(topologies []*csi.Topology) string {
	if len(topologies) == 0 {
		return ""
	}
	return topologies[0].GetSegments()[rpc.TopologySegmentRack]
}

// MadeByPlugin reports whether the disk's name is one that this plugin gives to its disks.
func (v Volume) MadeByPlugin() bool { return diskname.IsVolumeSerial(v.DiskName) }

// anyCapability is the capability for creating and attaching volumes that need not be raw block. The node gets the
// volume's real capability when it mounts the volume.
var anyCapability = &csi.VolumeCapability{
	AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
	AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
}

// CreateVolumeOptions describes a volume to create.
type CreateVolumeOptions struct {
	Name string
	// SizeBytes is 0 for the size of the source volume or snapshot.
	SizeBytes int64
	// FromVolume and FromSnapshot are an ID or a name each; at most one is set.
	FromVolume, FromSnapshot string
	// Rack is empty for any rack.
	Rack       string
	Parameters map[string]string
	// Block says that the volume will be used as raw block.
	Block bool
}

// capability returns the capability for creating the volume.
func (o CreateVolumeOptions) capability() *csi.VolumeCapability {
	if !o.Block {
		return anyCapability
	}
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
		AccessMode: anyCapability.GetAccessMode(),
	}
}

// CreateVolume creates a volume, or finds the volume of this name with the same properties.
func (c *Client) CreateVolume(ctx context.Context, opts CreateVolumeOptions) (Volume, error) {
	req := &csi.CreateVolumeRequest{
		Name:               opts.Name,
		VolumeCapabilities: []*csi.VolumeCapability{opts.capability()},
		Parameters:         opts.Parameters,
	}
	if opts.SizeBytes > 0 {
		size := wholeGiB(opts.SizeBytes)
		req.CapacityRange = &csi.CapacityRange{RequiredBytes: size, LimitBytes: size}
	}
	if opts.Rack != "" {
		topology := []*csi.Topology{{Segments: map[string]string{rpc.TopologySegmentRack: opts.Rack}}}
		req.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: topology}
	}
	if opts.FromSnapshot != "" {
		id, err := c.snapshotID(ctx, opts.FromSnapshot)
		if err != nil {
			return Volume{}, err
		}
		req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id},
		}}
	}
	if opts.FromVolume != "" {
		id, err := c.volumeID(ctx, opts.FromVolume)
		if err != nil {
			return Volume{}, err
		}
		req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id},
		}}
	}
	created, err := c.controller.CreateVolume(ctx, req)
	if err != nil {
		return Volume{}, err
	}
	volume := toVolume(created.GetVolume(), nil)
	volume.Name = opts.Name
	return volume, nil
}

const gib = 1 << 30

// wholeGiB returns the size of the disk that a rack makes for a size, both in bytes.
func wholeGiB(bytes int64) int64 {
	if bytes > math.MaxInt64-gib {
		return bytes // the plugin rejects it
	}
	return (bytes + gib - 1) / gib * gib
}

// pageEntries keeps an answer far below gRPC's limit for a message.
const pageEntries = 500

// volumePages returns the pages of the plugin's list of volumes. options apply to each page.
func (c *Client) volumePages(
	ctx context.Context,
	options ...grpc.CallOption,
) iter.Seq2[*csi.ListVolumesResponse, error] {
	return func(yield func(*csi.ListVolumesResponse, error) bool) {
		for token, more := "", true; more; more = token != "" {
			page, err := c.controller.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: pageEntries, StartingToken: token},
				options...)
			if !yield(page, err) || err != nil {
				return
			}
			token = page.GetNextToken()
		}
	}
}

// ListVolumes lists the volumes whose disks this plugin created. With all it also lists every other disk that is
// attached to an instance of the project.
func (c *Client) ListVolumes(ctx context.Context, all bool) (VolumeList, error) {
	list := VolumeList{Volumes: []Volume{}}
	asking, option, decode := ask(ctx, wantDetails, wantNames, wantRestarts)
	for page, err := range c.volumePages(asking, option) {
		if err != nil {
			return VolumeList{}, err
		}
		answered, err := decode()
		if err != nil {
			return VolumeList{}, err
		}
		list.NodeNames, list.Restarts = answered.nodeNames, answered.restarts
		for _, entry := range page.GetEntries() {
			volume := toVolume(entry.GetVolume(), entry.GetStatus().GetPublishedNodeIds())
			if all || volume.MadeByPlugin() {
				volume.setDetails(answered.details)
				list.Volumes = append(list.Volumes, volume)
			}
		}
	}
	for _, r := range list.Restarts {
		for i := range r.Attach {
			r.Attach[i].Problem = withNodeNames(r.Attach[i].Problem, list.NodeNames)
		}
	}
	for i := range list.Volumes {
		list.Volumes[i].setRestarts(list.Restarts)
		list.Volumes[i].setNodeNames(list.NodeNames)
	}
	return list, nil
}

// getVolume returns a volume and its status, which contains the node that the volume is attached to.
func (c *Client) getVolume(
	ctx context.Context,
	id string,
	options ...grpc.CallOption,
) (*csi.ControllerGetVolumeResponse, error) {
	return c.controller.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id}, options...)
}

// holder returns the node that has a volume's disk, or "", and whether the volume is published there.
func (c *Client) holder(ctx context.Context, id string) (published bool, node string, err error) {
	asking, option, decode := ask(ctx, wantDetails)
	got, err := c.getVolume(asking, id, option)
	if err != nil {
		return false, "", err
	}
	answered, err := decode()
	return len(got.GetStatus().GetPublishedNodeIds()) > 0, answered.details[got.GetVolume().GetVolumeId()].Holder, err
}

// ShowVolume returns a volume with its attachment and its problems.
func (c *Client) ShowVolume(ctx context.Context, text string) (Volume, error) {
	id, err := c.volumeID(ctx, text)
	if err != nil {
		return Volume{}, err
	}
	asking, option, decode := ask(ctx, wantDetails, wantNames, wantRestarts)
	got, err := c.getVolume(asking, id, option)
	if err != nil {
		return Volume{}, err
	}
	answered, err := decode()
	if err != nil {
		return Volume{}, err
	}
	health, err := c.controller.ControllerGetVolumeHealth(ctx, &csi.ControllerGetVolumeHealthRequest{VolumeId: id})
	if err != nil {
		return Volume{}, err
	}
	volume := toVolume(got.GetVolume(), got.GetStatus().GetPublishedNodeIds())
	volume.setDetails(answered.details)
	volume.setRestarts(answered.restarts)
	volume.setNodeNames(answered.nodeNames)
	for _, problem := range health.GetVolumeHealth().GetHealthStatuses() {
		volume.Health = append(volume.Health,
			Health{Status: problem.GetStatus().String(), Reason: problem.GetReason(), Message: problem.GetMessage()})
	}
	return volume, nil
}

// Deleted is the result of a deletion.
type Deleted struct {
	// ID is empty if no volume or snapshot has the given name or ID. Missing then says so.
	ID      string
	Missing string
}

// DeleteVolume deletes a volume. It succeeds if no volume has this ID or this name, as a repeated deletion does.
func (c *Client) DeleteVolume(ctx context.Context, text string) (Deleted, error) {
	found, err := c.findVolumes(askUnfinished(ctx), text)
	if err != nil {
		return Deleted{}, err
	}
	if len(found.ids) == 0 {
		return Deleted{Missing: found.missing()}, nil
	}
	id, err := found.id()
	if err != nil {
		return Deleted{}, err
	}
	deleted := Deleted{ID: id}
	if found.cluster == "" {
		if _, err := c.getVolume(ctx, id); isNotFound(err) {
			deleted = Deleted{Missing: found.missing()}
		}
	}
	if _, err = c.controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id}); err != nil {
		return Deleted{}, err
	}
	return deleted, c.forget(id)
}

// Expanded is a volume after it was made larger.
type Expanded struct {
	ID        string `json:"volumeID"`
	SizeBytes int64  `json:"sizeBytes"`
	// Larger says that the volume had more than what was asked for, and has not changed.
	Larger bool `json:"-"`
}

// ExpandVolume makes a volume larger that is attached to no node. sizeBytes is its least size afterwards.
func (c *Client) ExpandVolume(ctx context.Context, text string, sizeBytes int64) (Expanded, error) {
	id, err := c.volumeID(ctx, text)
	if err != nil {
		return Expanded{}, err
	}
	expanded, err := c.controller.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
		VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: sizeBytes},
	})
	size := expanded.GetCapacityBytes()
	return Expanded{ID: id, SizeBytes: size, Larger: size > wholeGiB(sizeBytes)}, err
}

// Attachment is a volume attached to a node, with all values that the node needs.
type Attachment struct {
	VolumeID       string            `json:"volumeID"`
	NodeID         string            `json:"nodeID"`
	VolumeContext  map[string]string `json:"volumeContext"`
	PublishContext map[string]string `json:"publishContext"`
}

// Attach attaches a volume to a node with this ID or name, or to this node if none is named.
func (c *Client) Attach(ctx context.Context, text, node string) (Attachment, error) {
	id, err := c.volumeID(ctx, text)
	if err != nil {
		return Attachment{}, err
	}
	ended := []*fault.Row{fault.AttachedElsewhere}
	if node != "" { // no command can wait for a stop of the instance that it runs on
		ended = append(ended, fault.RackHasNoHotplug)
	}
	if node, err = c.nodeID(ctx, id, node); err != nil {
		return Attachment{}, err
	}
	attachment, err := c.publish(metadata.AppendToOutgoingContext(ctx, rpc.MetadataAnswerSoon, "yes"), id, node)
	return attachment, waitsFor(err, ended...)
}

// publish attaches a volume to a node. It reads the volume afterwards: if the volume's disk is being replaced, only the
// attachment makes the disk.
func (c *Client) publish(ctx context.Context, id, node string) (Attachment, error) {
	attachment := Attachment{VolumeID: id, NodeID: node}
	published, err := c.controller.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
		VolumeId: id, NodeId: node, VolumeCapability: anyCapability,
	})
	if err != nil {
		return attachment, err
	}
	got, err := c.getVolume(ctx, id)
	attachment.VolumeContext, attachment.PublishContext = got.GetVolume().GetVolumeContext(), published.GetPublishContext()
	return attachment, err
}
