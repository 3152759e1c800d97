// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rpc

// PluginName is the name under which orchestrators know this plugin. It is permanent: every volume that an orchestrator
// has recorded carries it.
const PluginName = "csi.oxide.computer"

// ManifestClusterID is the key under which GetPluginInfo tells the cluster ID of a controller, which is no secret: the description of
// every disk holds it. The commands of oxide-csi read it, since disks are named after it; orchestrators do not.
const ManifestClusterID = "clusterID"

// Metadata of gRPC in which the commands of oxide-csi ask ListVolumes and ControllerGetVolume for planned restarts, with any
// value, and in which the controller answers, with a JSON array of [restart.Restart]. Without planned restarts there is no answer.
const (
	MetadataAskRestarts = "oxide-csi-ask-restarts"
	MetadataRestarts    = "oxide-csi-restarts-bin"
)

// TopologySegmentRack is the only topology segment: the configured name of a rack. CreateVolume writes it into the
// accessible topology of a volume, NodeGetInfo into that of a node; the orchestrator compares the two.
const TopologySegmentRack = "topology.csi.oxide.computer/rack"

// Keys of the volume context and the publish context. The controller writes both, orchestrators carry them unchanged,
// the node reads them. They are permanent: contexts outlive the plugin that wrote them.
const (
	// KeyDiskName is the disk's whole name; its first 20 bytes are the NVMe serial in the guest. In both contexts. For a
	// disk registered by hand the user may set it in the volume context.
	KeyDiskName = "diskName"
	// KeyDiskID is the disk's UUID, equal to the volume ID. Publish context.
	KeyDiskID = "diskID"
	// KeySizeBytes is the disk's exact size in bytes, decimal. In both contexts.
	KeySizeBytes = "sizeBytes"
	// KeyBlockSize is the disk's logical block size in bytes, decimal. In both contexts.
	KeyBlockSize = "blockSize"
	// KeyOrigin is what the disk was made from: "blank", "snapshot" or "image". Publish context. Only a blank disk is
	// formatted without having been read as a whole.
	KeyOrigin = "origin"
	// KeyReadOnly is "true" when the rack refuses writes to the disk, else "false". Publish context.
	KeyReadOnly = "readOnly"
	// KeyFSLineage lists the disks whose filesystem this disk may carry because it descends from them, as UUIDs
	// separated by commas; empty for a disk made blank. Publish context.
	KeyFSLineage = "fsLineage"
	// KeyVerifyFilesystem is "false" where a filesystem that another volume's identity stands in is to be mounted all the
	// same. Volume context; users set it, for a disk that they have copied by hand.
	KeyVerifyFilesystem = "verifyFilesystem"
	// KeyMkfsOptions, KeyRootUID, KeyRootGID and KeyRootMode are CreateVolume parameters that the node needs when it
	// formats the volume. Volume context, each only when given.
	KeyMkfsOptions = "mkfsOptions"
	KeyRootUID     = "rootUid"
	KeyRootGID     = "rootGid"
	KeyRootMode    = "rootMode"
)

// Parameters of CreateVolume, written by whoever writes a StorageClass or a Nomad volume specification, besides
// [KeyBlockSize], [KeyReadOnly], [KeyMkfsOptions], [KeyRootUID], [KeyRootGID] and [KeyRootMode].
const (
	// ParameterDiskType is "distributed" (default) or "local".
	ParameterDiskType = "diskType"
	// ParameterPrefixCO begins the parameters that Kubernetes' external-provisioner adds by itself
	// (--extra-create-metadata); those of them that are not understood are ignored.
	ParameterPrefixCO = "csi.storage.k8s.io/"
	// ParameterPVCName and ParameterPVCNamespace are noted in the disk's description for people who look at the rack.
	ParameterPVCName      = ParameterPrefixCO + "pvc/name"
	ParameterPVCNamespace = ParameterPrefixCO + "pvc/namespace"
)

// Values of [KeyOrigin].
const (
	OriginBlank    = "blank"
	OriginSnapshot = "snapshot"
	OriginImage    = "image"
)
