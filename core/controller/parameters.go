// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/core/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
)

// parameters are the parameters of a CreateVolume request, understood.
type parameters struct {
	// blockSize is 0 when none was asked for.
	blockSize int64
	// diskType is empty when none was asked for.
	diskType string
	// readOnly asks for a disk that the rack itself takes no writes to.
	readOnly bool
	// claim is namespace/name of the Kubernetes claim, if the provisioner told.
	claim string
	// forNode goes into the volume context as it is.
	forNode map[string]string
}

// Values of [rpc.ParameterDiskType], and the block size of disks for which none was asked.
const (
	diskTypeDistributed       = "distributed"
	diskTypeLocal             = "local"
	defaultBlockSize    int64 = 4096
)

// parseParameters understands the parameters of a volume that will have one of these capabilities. An unknown one is an
// error, not a typing mistake with consequences found out later.
func parseParameters(given map[string]string, capabilities []*csi.VolumeCapability) (parameters, error) {
	p := parameters{forNode: map[string]string{}}
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
		p.claim = namespace + "/" + name
	}
	return p, nil
}

func (p *parameters) set(key, value string, capabilities []*csi.VolumeCapability) error {
	switch key {
	case rpc.KeyBlockSize:
		switch value {
		case "512", "2048", "4096":
			p.blockSize, _ = strconv.ParseInt(value, 10, 64) // one of three numbers
			return nil
		}
		return rpc.InvalidArgument("parameter %s: %q is not one of 512, 2048, 4096", key, value)
	case rpc.ParameterDiskType:
		if value != diskTypeDistributed && value != diskTypeLocal {
			return rpc.InvalidArgument("parameter %s: %q is not one of %s, %s", key, value, diskTypeDistributed, diskTypeLocal)
		}
		p.diskType = value
		return nil
	case rpc.KeyReadOnly:
		if value != "true" && value != "false" {
			return rpc.InvalidArgument("parameter %s: %q is not one of true, false", key, value)
		}
		p.readOnly = value == "true"
		return nil
	case rpc.KeyMkfsOptions:
		for _, capability := range capabilities {
			if m := capability.GetMount(); m != nil {
				if _, err := filesystem.ParseMkfsOptions(m.GetFsType(), value); err != nil {
					return rpc.InvalidArgument("parameter %s: %w", key, err)
				}
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
		return rpc.InvalidArgument("parameter %q is not known: known are %s", key, strings.Join(knownParameters, ", "))
	}
	p.forNode[key] = value
	return nil
}

var knownParameters = []string{
	rpc.KeyBlockSize,
	rpc.ParameterDiskType,
	rpc.KeyReadOnly,
	rpc.KeyMkfsOptions,
	rpc.KeyRootUID,
	rpc.KeyRootGID,
	rpc.KeyRootMode,
}
