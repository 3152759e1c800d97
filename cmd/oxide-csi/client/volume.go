// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package client

import (
	"context"
	"fmt"
	"iter"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// Volume is a volume as the plugin describes it.
type Volume struct {
	ID        string `json:"volumeID"`
	DiskName  string `json:"diskName,omitempty"`
	SizeBytes int64  `json:"sizeBytes"`
	// BlockSize is in bytes.
	BlockSize int64  `json:"blockSize,omitempty"`
	Rack      string `json:"rack,omitempty"`
	// The source of the volume. At most one is set.
	SourceVolumeID   string `json:"sourceVolumeID,omitempty"`
	SourceSnapshotID string `json:"sourceSnapshotID,omitempty"`
	// NodeID is the node that the volume is attached to.
	NodeID string `json:"nodeID,omitempty"`
	// WaitsFor is the restart that the volume waits for. StillOn is the restart that removes the disk from a node after the
	// volume was detached. Both are nil in attach mode hot.
	WaitsFor *Waits   `json:"waitsFor,omitempty"`
	StillOn  *Restart `json:"stillOn,omitempty"`
	// Health lists the volume's problems. It is nil if the plugin was not asked.
	Health []Health `json:"health,omitempty"`

	planned bool
}

// Health is a problem of a volume.
type Health struct {
	Status  string `json:"status"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

func volumeOf(v *csi.Volume, nodes []string) Volume {
	volume := Volume{
		ID:               v.GetVolumeId(),
		DiskName:         v.GetVolumeContext()[rpc.KeyDiskName],
		SizeBytes:        v.GetCapacityBytes(),
		Rack:             rackOf(v.GetAccessibleTopology()),
		SourceVolumeID:   v.GetContentSource().GetVolume().GetVolumeId(),
		SourceSnapshotID: v.GetContentSource().GetSnapshot().GetSnapshotId(),
	}
	volume.BlockSize, _ = strconv.ParseInt(
		v.GetVolumeContext()[rpc.KeyBlockSize],
		10,
		64,
	) // 0 if the plugin gives none
	if len(nodes) > 0 {
		volume.NodeID = nodes[0] // a disk is on one instance at a time
	}
	return volume
}

func rackOf(topologies []*csi.Topology) string {
	if len(topologies) == 0 {
		return ""
	}
	return topologies[0].GetSegments()[rpc.TopologySegmentRack]
}

// MadeByPlugin reports whether the disk's name is one that this plugin gives to its disks.
func (v Volume) MadeByPlugin() bool { return diskname.IsVolumeSerial(v.DiskName) }

// anyUse is the capability for creating and attaching volumes. The rack stores no capability; the node gets the real one
// at the mount.
var anyUse = &csi.VolumeCapability{
	AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
	AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
}

// NewVolume is a volume to create.
type NewVolume struct {
	Name string
	// SizeBytes is 0 for the size of the source.
	SizeBytes int64
	// FromVolume is an ID or a name, FromSnapshot an ID; at most one is set.
	FromVolume, FromSnapshot string
	// Rack is empty for any rack.
	Rack       string
	Parameters map[string]string
}

// CreateVolume creates a volume, or finds the volume of this name with the same properties.
func (c *Client) CreateVolume(ctx context.Context, want NewVolume) (Volume, error) {
	req := &csi.CreateVolumeRequest{
		Name:               want.Name,
		VolumeCapabilities: []*csi.VolumeCapability{anyUse},
		Parameters:         want.Parameters,
	}
	if want.SizeBytes > 0 {
		req.CapacityRange = &csi.CapacityRange{RequiredBytes: want.SizeBytes}
	}
	if want.Rack != "" {
		on := []*csi.Topology{{Segments: map[string]string{rpc.TopologySegmentRack: want.Rack}}}
		req.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: on}
	}
	if want.FromSnapshot != "" {
		id, err := parseID("snapshot", want.FromSnapshot)
		if err != nil {
			return Volume{}, err
		}
		req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id},
		}}
	}
	if want.FromVolume != "" {
		id, err := c.volumeID(ctx, want.FromVolume)
		if err != nil {
			return Volume{}, err
		}
		req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id},
		}}
	}
	if c.opts.DryRun {
		if err := c.checkCreate(ctx, req); err != nil {
			return Volume{}, err
		}
	}
	created, err := c.controller.CreateVolume(ctx, req)
	if err != nil {
		return Volume{}, err
	}
	return volumeOf(created.GetVolume(), nil), nil
}

// checkCreate checks what can be checked without creating the volume: its parameters, the free space, and that its source
// exists.
func (c *Client) checkCreate(ctx context.Context, req *csi.CreateVolumeRequest) error {
	ask := &csi.GetCapacityRequest{VolumeCapabilities: req.GetVolumeCapabilities(), Parameters: req.GetParameters()}
	if on := req.GetAccessibilityRequirements().GetRequisite(); len(on) > 0 {
		ask.AccessibleTopology = on[0]
	}
	capacity, err := c.controller.GetCapacity(ctx, ask)
	if err != nil {
		return err
	}
	if largest := capacity.GetMaximumVolumeSize().GetValue(); req.GetCapacityRange().GetRequiredBytes() > largest {
		return failed(
			codes.ResourceExhausted,
			"GetCapacity: the largest volume that can be made now has %d bytes, and %d are asked for: ask for less, delete something, or have the quota raised",
			largest,
			req.GetCapacityRange().GetRequiredBytes(),
		)
	}
	if id := req.GetVolumeContentSource().GetSnapshot().GetSnapshotId(); id != "" {
		_, err = c.ShowSnapshot(ctx, id)
	}
	if id := req.GetVolumeContentSource().GetVolume().GetVolumeId(); id != "" {
		_, err = c.getVolume(ctx, id)
	}
	return err
}

// pageEntries keeps an answer far below gRPC's limit for a message.
const pageEntries = 500

// volumes returns all volumes that the plugin lists. options apply to each page.
func (c *Client) volumes(ctx context.Context, options ...grpc.CallOption) iter.Seq2[Volume, error] {
	return func(yield func(Volume, error) bool) {
		for token, more := "", true; more; more = token != "" {
			page, err := c.controller.ListVolumes(
				ctx,
				&csi.ListVolumesRequest{MaxEntries: pageEntries, StartingToken: token},
				options...)
			if err != nil {
				yield(Volume{}, err)
				return
			}
			for _, entry := range page.GetEntries() {
				if !yield(volumeOf(entry.GetVolume(), entry.GetStatus().GetPublishedNodeIds()), nil) {
					return
				}
			}
			token = page.GetNextToken()
		}
	}
}

// ListVolumes lists the volumes whose disks this plugin created. With all it also lists every other disk that is attached
// to an instance of the project.
func (c *Client) ListVolumes(ctx context.Context, all bool) (VolumeList, error) {
	list := VolumeList{Volumes: []Volume{}}
	asking, header, told := askRestarts(ctx)
	for volume, err := range c.volumes(asking, header) {
		if err != nil {
			return VolumeList{}, err
		}
		if all || volume.MadeByPlugin() {
			list.Volumes = append(list.Volumes, volume)
		}
	}
	var err error
	if list.Restarts, err = told(); err != nil {
		return VolumeList{}, err
	}
	for i := range list.Volumes {
		list.Volumes[i].concerned(list.Restarts)
	}
	return list, nil
}

// volumeID returns the ID of a volume from its ID or its name.
func (c *Client) volumeID(ctx context.Context, text string) (string, error) {
	if id, ok := diskname.ParseID(text); ok {
		return id, nil
	}
	cluster, err := c.cluster(ctx)
	if err != nil {
		return "", fmt.Errorf("%q is no volume ID, and to know it as a name: %w", text, err)
	}
	disk := diskname.ForVolume(cluster, text)
	var found []string
	for volume, err := range c.volumes(ctx) {
		if err != nil {
			return "", err
		}
		if volume.DiskName == disk {
			found = append(found, volume.ID)
		}
	}
	switch len(found) {
	case 0:
		return "", failed(
			codes.NotFound,
			"no volume was made as %q for cluster %q: check the name, or use the volume's ID",
			text,
			cluster,
		)
	case 1:
		return found[0], nil
	}
	return "", failed(
		codes.FailedPrecondition,
		"several racks have a volume %q of cluster %q: use the ID of one: %s",
		text,
		cluster,
		strings.Join(found, ", "),
	)
}

// cluster is the controller's cluster ID. It is part of the names of disks.
func (c *Client) cluster(ctx context.Context) (string, error) {
	info, err := c.identity.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil {
		return "", err
	}
	cluster := info.GetManifest()[rpc.ManifestClusterID]
	if cluster == "" {
		return "", failed(
			codes.Unimplemented,
			"the plugin at %s has no cluster ID, as a controller does: name the socket of one with --controller-endpoint, or use the volume's ID",
			c.opts.Controller,
		)
	}
	return cluster, nil
}

func (c *Client) getVolume(
	ctx context.Context,
	id string,
	options ...grpc.CallOption,
) (*csi.ControllerGetVolumeResponse, error) {
	return c.controller.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id}, options...)
}

// ShowVolume returns a volume with its attachment and its problems.
func (c *Client) ShowVolume(ctx context.Context, text string) (Volume, error) {
	id, err := c.volumeID(ctx, text)
	if err != nil {
		return Volume{}, err
	}
	asking, header, told := askRestarts(ctx)
	got, err := c.getVolume(asking, id, header)
	if err != nil {
		return Volume{}, err
	}
	restarts, err := told()
	if err != nil {
		return Volume{}, err
	}
	health, err := c.controller.ControllerGetVolumeHealth(ctx, &csi.ControllerGetVolumeHealthRequest{VolumeId: id})
	if err != nil {
		return Volume{}, err
	}
	volume := volumeOf(got.GetVolume(), got.GetStatus().GetPublishedNodeIds())
	volume.concerned(restarts)
	for _, wrong := range health.GetVolumeHealth().GetHealthStatuses() {
		volume.Health = append(
			volume.Health,
			Health{Status: wrong.GetStatus().String(), Reason: wrong.GetReason(), Message: wrong.GetMessage()},
		)
	}
	return volume, nil
}

// DeleteVolume deletes a volume. It succeeds if no volume has this ID. It fails if no volume has this name, because the
// name may be wrong.
func (c *Client) DeleteVolume(ctx context.Context, text string) (id string, err error) {
	if id, err = c.volumeID(ctx, text); err != nil {
		return "", err
	}
	if c.opts.DryRun {
		got, err := c.getVolume(ctx, id)
		if err != nil && !isNotFound(err) {
			return "", err
		}
		for _, node := range got.GetStatus().GetPublishedNodeIds() {
			return "", failed(
				codes.FailedPrecondition,
				"volume %s is attached to node %s and is not deleted: detach it first",
				id,
				node,
			)
		}
	}
	_, err = c.controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
	return id, err
}

// Attachment is a volume attached to a node, with all values that the node needs.
type Attachment struct {
	VolumeID       string            `json:"volumeID"`
	NodeID         string            `json:"nodeID"`
	VolumeContext  map[string]string `json:"volumeContext"`
	PublishContext map[string]string `json:"publishContext"`
}

// Attach attaches a volume to a node, or to this node if none is named.
func (c *Client) Attach(ctx context.Context, text, node string) (Attachment, error) {
	id, err := c.volumeID(ctx, text)
	if err != nil {
		return Attachment{}, err
	}
	if node, err = c.nodeOr(ctx, node); err != nil {
		return Attachment{}, err
	}
	got, err := c.getVolume(ctx, id)
	if err != nil {
		return Attachment{}, err
	}
	return c.publish(ctx, got.GetVolume(), node)
}

func (c *Client) publish(ctx context.Context, volume *csi.Volume, node string) (Attachment, error) {
	published, err := c.controller.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
		VolumeId: volume.GetVolumeId(), NodeId: node, VolumeCapability: anyUse, VolumeContext: volume.GetVolumeContext(),
	})
	return Attachment{
		VolumeID:       volume.GetVolumeId(),
		NodeID:         node,
		VolumeContext:  volume.GetVolumeContext(),
		PublishContext: published.GetPublishContext(),
	}, err
}

// Detach detaches a volume from a node, or from this node if none is named. On this node it unstages the volume first, and
// fails while the volume is mounted. For another node the caller must confirm that the volume is unmounted there.
func (c *Client) Detach(ctx context.Context, text, node string, unmounted bool) (Attachment, error) {
	id, err := c.volumeID(ctx, text)
	if err != nil {
		return Attachment{}, err
	}
	from := Attachment{VolumeID: id}
	if from.NodeID, err = c.nodeOr(ctx, node); err != nil {
		return from, err
	}
	switch {
	case node == "":
		if err = c.checkNotMounted(ctx, id); err == nil {
			err = c.unstage(ctx, id)
		}
	case !unmounted:
		err = c.checkNotAttached(ctx, id, node)
	}
	if err != nil {
		return from, err
	}
	_, err = c.controller.ControllerUnpublishVolume(
		ctx,
		&csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: from.NodeID},
	)
	return from, err
}

// checkNotAttached returns an error if a node may be using the disk.
func (c *Client) checkNotAttached(ctx context.Context, id, node string) error {
	got, err := c.getVolume(ctx, id)
	if isNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, holder := range got.GetStatus().GetPublishedNodeIds() {
		if strings.EqualFold(holder, node) {
			return failed(
				codes.FailedPrecondition,
				"volume %s is attached to node %s, and whether it is mounted there cannot be seen from here: unmount it there, and say so with --unmounted, or detach it there without --node",
				id,
				node,
			)
		}
	}
	return nil
}
