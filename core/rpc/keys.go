// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rpc

// PluginName is the name under which orchestrators know this plugin. It is permanent: orchestrators record it with
// every volume.
const PluginName = "csi.oxide.computer"

// ManifestClusterID is the manifest key under which GetPluginInfo returns the cluster ID of a controller. The commands
// of oxide-csi read it, because the names of disks depend on it; orchestrators do not. The cluster ID is not secret:
// the description of every disk contains it.
const ManifestClusterID = "clusterID"

// Keys of gRPC metadata. With MetadataAskRestarts, and any value, the commands of oxide-csi ask ListVolumes and
// ControllerGetVolume for planned restarts. The controller answers in MetadataRestarts with a JSON array of
// [Restart]. In attach mode hot it answers only if an instance must be stopped.
const (
	MetadataAskRestarts = "oxide-csi-ask-restarts"
	MetadataRestarts    = "oxide-csi-restarts-bin"
)

// Keys of gRPC metadata. With MetadataAskDetails, and any value, the commands of oxide-csi ask ListVolumes,
// ControllerGetVolume, ListSnapshots and GetSnapshot for what CSI has no field for. The controller answers in
// MetadataDetails with a JSON object of [Details] by the ID of the volume or snapshot.
const (
	MetadataAskDetails = "oxide-csi-ask-details"
	MetadataDetails    = "oxide-csi-details-bin"
)

// MetadataAskUnfinished is a key of gRPC metadata. With it, and any value, ListVolumes and ListSnapshots also list what
// the rack is still making, whose creation can still fail: a deletion by name must not take it for missing.
const MetadataAskUnfinished = "oxide-csi-ask-unfinished"

// Keys of gRPC metadata. With MetadataAskNodeNames, and any value, the commands of oxide-csi ask ListVolumes and
// ControllerGetVolume for the names of all instances of the controller's projects. The controller answers in
// MetadataNodeNames with a JSON object of names by instance ID: for a list with its first page only, and for a volume
// also if there is no such volume.
const (
	MetadataAskNodeNames = "oxide-csi-ask-node-names"
	MetadataNodeNames    = "oxide-csi-node-names-bin"
)

// MetadataAnswerSoon is a key of gRPC metadata of ControllerPublishVolume. With it, and any value, the commands of
// oxide-csi ask for the reason why a volume waits for a restart, instead of waiting in the call (--restart-wait).
const MetadataAnswerSoon = "oxide-csi-answer-soon"

// Keys of gRPC metadata of ControllerUnpublishVolume. With MetadataDetachNow, and any value, the command oxide-csi
// volume detach asks for the detach at once, without the grace period. The controller sets MetadataDeferred in its
// answer if the disk is detached later, to one of the values Deferred….
const (
	MetadataDetachNow = "oxide-csi-detach-now"
	MetadataDeferred  = "oxide-csi-deferred"
)

// Values of MetadataDeferred: what the detach waits for.
const (
	DeferredForGrace   = "grace"   // the controller's --detach-grace
	DeferredForRestart = "restart" // the instance's next stop or restart
	DeferredForAnother = "another" // another process or another call, which detaches the disk just now
)

// MetadataOwnFilesystem is a key of gRPC metadata of NodeStageVolume. With it, and any value, the command oxide-csi
// volume mount repeats a stage with the contexts of an earlier one, because no controller answers. What they say may be
// out of date: the disk may have been made again under its name, and the guest cannot tell it from the old one. So the
// node then mounts only a filesystem that it made for the disk of this volume ID. It neither formats nor grows it.
const MetadataOwnFilesystem = "oxide-csi-own-filesystem"

// MetadataOfCluster is a key of gRPC metadata. With it and a cluster ID, the command oxide-csi volume adopt gets from
// ListVolumes and ListSnapshots the volumes and snapshots of that cluster.
const MetadataOfCluster = "oxide-csi-of-cluster"

// KeyAdoptFromCluster is the only mutable parameter of ControllerModifyVolume: the ID of the cluster that owns the
// volume until now. The command oxide-csi volume adopt sends it; orchestrators do not.
const KeyAdoptFromCluster = "adoptFromCluster"

// TopologySegmentRack is the only topology segment: the configured name of a rack. CreateVolume writes it into the
// accessible topology of a volume, NodeGetInfo into that of a node; the orchestrator compares the two.
const TopologySegmentRack = "topology.csi.oxide.computer/rack"

// Keys of the volume context and the publish context. The controller writes both, orchestrators pass them on unchanged,
// and the node reads them. The keys are permanent: orchestrators keep contexts longer than one version of the plugin
// lives.
const (
	// KeyDiskName is the disk's full name. The first 20 bytes are the NVMe serial in the guest. In both contexts. For a
	// disk registered by hand the user may set it in the volume context.
	KeyDiskName = "diskName"
	// KeyDiskID is the volume ID: the UUID of the volume's first disk. Publish context.
	KeyDiskID = "diskID"
	// KeySizeBytes is the disk's size in bytes, decimal. In the volume context it is the size at creation, in the publish
	// context the size now. The node takes both for the least size: a volume can be expanded.
	KeySizeBytes = "sizeBytes"
	// KeyFirstBytes is the size in bytes, decimal, of the volume's first disk, if the volume has grown. Publish context.
	// The node looks for what an interrupted format left at the places of all sizes since.
	KeyFirstBytes = "firstBytes"
	// KeyBlockSize is the disk's logical block size in bytes, decimal. In both contexts.
	KeyBlockSize = "blockSize"
	// KeyOrigin is the source of the disk: "blank", "snapshot" or "image". Publish context. The node formats a disk of
	// another origin than "blank" only after it read the whole disk.
	KeyOrigin = "origin"
	// KeyReadOnly is "true" if the rack rejects writes to the disk, else "false". Publish context. It is also a
	// parameter of CreateVolume.
	KeyReadOnly = "readOnly"
	// KeyFSLineage lists the ancestors of this disk: the disk that it was copied from, that disk's source, and so on. The
	// filesystem of each may be on this disk. UUIDs separated by commas; empty for a blank disk. Publish context.
	KeyFSLineage = "fsLineage"
	// KeyRawBlock is "true" if the volume was created for use as raw block, else it is missing. In both contexts; for a
	// disk registered by hand the user may set it in the volume context. The node formats such a disk only after it read
	// the whole disk, because a workload may have written anywhere on it.
	KeyRawBlock = "rawBlock"
	// KeyEncryption is [EncryptionLUKS2] if the node encrypts the disk, else it is missing. In both contexts, and a
	// parameter of CreateVolume. A blank disk is only encrypted if the publish context has it: then the disk's description
	// says so, too.
	KeyEncryption = "encryption"
	// KeyVerifyFilesystem is "false" to mount a filesystem that carries the identity of another volume. Volume context;
	// users set it for a disk that they copied by hand.
	KeyVerifyFilesystem = "verifyFilesystem"
	// KeyMkfsOptions, KeyRootUID, KeyRootGID and KeyRootMode are parameters of CreateVolume that the node needs to
	// format the volume. Volume context, each only if given.
	KeyMkfsOptions = "mkfsOptions"
	KeyRootUID     = "rootUid"
	KeyRootGID     = "rootGid"
	KeyRootMode    = "rootMode"
)

// Parameters of CreateVolume, from a StorageClass or a Nomad volume specification. Further parameters are
// [KeyBlockSize], [KeyReadOnly], [KeyEncryption], [KeyMkfsOptions], [KeyRootUID], [KeyRootGID] and [KeyRootMode].
const (
	// ParameterDiskType is "distributed" (default) or "local".
	ParameterDiskType = "diskType"
	// ParameterPrefixCO is the prefix of the parameters that Kubernetes' external-provisioner adds
	// (--extra-create-metadata). The controller ignores those that it does not know.
	ParameterPrefixCO = "csi.storage.k8s.io/"
	// ParameterPVCName and ParameterPVCNamespace are written into the disk's description, for people who look at the
	// rack.
	ParameterPVCName      = ParameterPrefixCO + "pvc/name"
	ParameterPVCNamespace = ParameterPrefixCO + "pvc/namespace"
)

// EncryptionLUKS2 is the only value of [KeyEncryption].
const EncryptionLUKS2 = "luks2"

// Keys of the secrets of NodeStageVolume. SecretPreviousPassphrase is for a change: the passphrase that is replaced.
const (
	SecretPassphrase         = "passphrase"
	SecretPreviousPassphrase = "previous-passphrase"
)

// Values of [KeyOrigin].
const (
	OriginBlank    = "blank"
	OriginSnapshot = "snapshot"
	OriginImage    = "image"
)
