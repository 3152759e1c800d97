// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// parameters are the parsed parameters of a CreateVolume request.
type parameters struct {
	// blockSize is in bytes; 0 if not given.
	blockSize int64
	// diskType is empty if not given.
	diskType string
	// readOnly requests a disk that rejects writes on the rack.
	readOnly bool
	// rawBlock says that one of the capabilities is block. It is not a parameter.
	rawBlock bool
	// luks is the version of LUKS with which the node encrypts the disk, or 0.
	luks int
	// mkfs are the options with which the node makes the filesystem, by its type.
	mkfs map[string][]string
	// fixed says that the filesystem may never grow.
	fixed bool
	// pvc is namespace/name of the Kubernetes PersistentVolumeClaim, if the provisioner passed it.
	pvc string
	// nodeParameters are copied into the volume context, where the node reads them.
	nodeParameters map[string]string
}

// Values of [rpc.ParameterDiskType], and the block size in bytes that is used if none is given.
const (
	diskTypeDistributed       = "distributed"
	diskTypeLocal             = "local"
	defaultBlockSize    int64 = 4096
)

// luks2 is the version of LUKS that [rpc.EncryptionLUKS2] means.
const luks2 = 2

// parseParameters parses the parameters of a volume with these capabilities. It rejects an unknown parameter, so that a
// typing mistake is found when the volume is created.
func parseParameters(given map[string]string, capabilities []*csi.VolumeCapability) (parameters, error) {
	p := parameters{
		nodeParameters: map[string]string{},
		mkfs:           map[string][]string{},
		rawBlock: slices.ContainsFunc(
			capabilities,
			func(capability *csi.VolumeCapability) bool { return capability.GetBlock() != nil },
		),
	}
	for _, key := range slices.Sorted(maps.Keys(given)) {
		if err := p.set(key, given[key], capabilities); err != nil {
			return parameters{}, err
		}
	}
	if p.diskType == diskTypeLocal && p.blockSize != 0 && p.blockSize != defaultBlockSize {
		return parameters{}, rpc.InvalidArgument(
			"parameter %s: a local disk has blocks of %d bytes, not %d",
			rpc.KeyBlockSize,
			defaultBlockSize,
			p.blockSize,
		)
	}
	if namespace, name := given[rpc.ParameterPVCNamespace], given[rpc.ParameterPVCName]; name != "" {
		p.pvc = namespace + "/" + name
	}
	return p, nil
}

// luksHeaderBytes is the least that an encrypted disk loses to its header, and luksBlockSize the size of its blocks
// (core/luks).
const (
	luksHeaderBytes = 16 << 20
	luksBlockSize   = 4096
)

// checkFits rejects options of mkfs that do not fit a blank disk of this size.
func (p parameters) checkFits(sizeBytes int64) error {
	disk := filesystem.Disk{BlockSize: cmp.Or(p.blockSize, defaultBlockSize), Size: sizeBytes}
	if p.luks != 0 {
		disk = filesystem.Disk{BlockSize: luksBlockSize, Size: sizeBytes - luksHeaderBytes}
	}
	for _, fsType := range slices.Sorted(maps.Keys(p.mkfs)) {
		if err := filesystem.CheckFit(fsType, p.mkfs[fsType], disk); err != nil {
			return rpc.InvalidArgument("parameter %s: %w", rpc.KeyMkfsOptions, err)
		}
	}
	return nil
}

// CheckParameters rejects what CreateVolume would refuse for a volume with a filesystem: the parameters, the filesystem
// type or the mount flags.
func CheckParameters(given map[string]string, fsType string, mountFlags []string) error {
	capability := &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{
			Mount: &csi.VolumeCapability_MountVolume{FsType: fsType, MountFlags: mountFlags},
		},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	}
	if err := rpc.CheckSupported(capability); err != nil {
		return err
	}
	_, err := parseParameters(given, []*csi.VolumeCapability{capability})
	return err
}

func (p *parameters) set(key, value string, capabilities []*csi.VolumeCapability) error {
	switch key {
	case rpc.KeyBlockSize:
		p.blockSize, _ = strconv.ParseInt(value, 10, 64) // cannot fail for one of these
		return oneOf(key, value, "512", "2048", "4096")
	case rpc.ParameterDiskType:
		p.diskType = value
		return oneOf(key, value, diskTypeDistributed, diskTypeLocal)
	case rpc.KeyReadOnly:
		p.readOnly = value == "true"
		return oneOf(key, value, "true", "false")
	case rpc.KeyEncryption:
		if value != rpc.EncryptionLUKS2 {
			return rpc.InvalidArgument("parameter %s: %q is not %s", key, value, rpc.EncryptionLUKS2)
		}
		p.luks = luks2
	case rpc.KeyMkfsOptions:
		for _, capability := range capabilities {
			if m := capability.GetMount(); m != nil {
				options, err := filesystem.ParseMkfsOptions(m.GetFsType(), value)
				if err != nil {
					return rpc.InvalidArgument("parameter %s: %w", key, err)
				}
				p.mkfs[m.GetFsType()] = options
				p.fixed = p.fixed || filesystem.KeepsItsSize(options)
			}
		}
	case rpc.KeyRootUID, rpc.KeyRootGID, rpc.KeyRootMode:
		if _, err := rpc.ParseRootFolder(map[string]string{key: value}); err != nil {
			return err
		}
	default:
		if strings.HasPrefix(key, rpc.ParameterPrefixCO) {
			return nil
		}
		return rpc.InvalidArgument("parameter %q is not known: use only %s", key, strings.Join(knownParameters, ", "))
	}
	p.nodeParameters[key] = value
	return nil
}

// oneOf rejects a value that is not one of those that the parameter has.
func oneOf(key, value string, known ...string) error {
	if slices.Contains(known, value) {
		return nil
	}
	return rpc.InvalidArgument("parameter %s: %q is not one of %s", key, value, strings.Join(known, ", "))
}

var knownParameters = []string{
	rpc.KeyBlockSize,
	rpc.ParameterDiskType,
	rpc.KeyReadOnly,
	rpc.KeyEncryption,
	rpc.KeyMkfsOptions,
	rpc.KeyRootUID,
	rpc.KeyRootGID,
	rpc.KeyRootMode,
}
