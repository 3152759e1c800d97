// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"maps"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// volume describes a disk as a CSI volume.
func (c rackController) volume(disk rack.Disk, params parameters) *csi.Volume {
	return &csi.Volume{
		VolumeId:           disk.VolumeID,
		CapacityBytes:      disk.SizeBytes,
		VolumeContext:      volumeContext(disk, params),
		ContentSource:      contentSource(disk),
		AccessibleTopology: c.racks.topology[c.rack],
	}
}

// rawBlock reports whether the disk was made for use as raw block.
func rawBlock(disk rack.Disk) bool {
	description, _ := rack.ParseDescription(disk.Description) // of a disk that this plugin did not make, it is unknown
	return description.RawBlock
}

// volumeContext is the volume context that the orchestrator keeps with the volume and passes to the node.
func volumeContext(disk rack.Disk, params parameters) map[string]string {
	values := map[string]string{
		rpc.KeyDiskName:  disk.Name,
		rpc.KeySizeBytes: strconv.FormatInt(disk.CreatedBytes, 10), // what the orchestrator has stored never changes
	}
	if disk.ID != "" { // a list does not know the block size while the disk is being replaced
		values[rpc.KeyBlockSize] = strconv.FormatInt(disk.BlockSize, 10)
	}
	if params.rawBlock || rawBlock(disk) {
		values[rpc.KeyRawBlock] = "true"
	}
	if description, _ := rack.ParseDescription(disk.Description); description.LUKS == luks2 {
		values[rpc.KeyEncryption] = rpc.EncryptionLUKS2
	}
	maps.Copy(values, params.nodeParameters)
	return values
}

// publishContext is what the node needs to know of the disk, as the rack shows it.
func publishContext(disk rack.Disk) map[string]string {
	description, _ := rack.ParseDescription(disk.Description) // a disk that this plugin did not make has no lineage
	values := map[string]string{
		rpc.KeyDiskName:  disk.Name,
		rpc.KeyDiskID:    disk.VolumeID,
		rpc.KeySizeBytes: strconv.FormatInt(disk.SizeBytes, 10),
		rpc.KeyBlockSize: strconv.FormatInt(disk.BlockSize, 10),
		rpc.KeyOrigin:    origin(disk),
		rpc.KeyReadOnly:  strconv.FormatBool(disk.ReadOnly),
		rpc.KeyFSLineage: strings.Join(description.Lineage, ","),
	}
	if disk.CreatedBytes != disk.SizeBytes {
		values[rpc.KeyFirstBytes] = strconv.FormatInt(disk.CreatedBytes, 10)
	}
	if description.RawBlock {
		values[rpc.KeyRawBlock] = "true"
	}
	if description.LUKS == luks2 {
		values[rpc.KeyEncryption] = rpc.EncryptionLUKS2
	}
	return values
}

// contentSource is the CSI source of a volume. It is nil for a blank disk and for a disk made from an image.
func contentSource(disk rack.Disk) *csi.VolumeContentSource {
	if disk.SnapshotID == "" {
		return nil // a clone has the ID of its temporary snapshot here
	}
	description, _ := rack.ParseDescription(disk.Description)
	if description.Clone && len(description.Lineage) > 0 {
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: description.Lineage[0]},
		}}
	}
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: disk.SnapshotID},
	}}
}

// origin is the value of [rpc.KeyOrigin] for a disk.
func origin(disk rack.Disk) string {
	switch {
	case disk.SnapshotID != "":
		return rpc.OriginSnapshot
	case disk.ImageID != "":
		return rpc.OriginImage
	}
	return rpc.OriginBlank
}
