// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/core/config"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// rig is a simulated rack, a plugin in mode controller, and the bare SDK with the same HTTP client settings as the
// plugin. The rack has hot-plug, so that no instance must be stopped. Without further flags it has one instance,
// node-a.
type rig struct {
	sim    *simtest.Sim
	plugin *simtest.Plugin
	sdk    *oxide.Client
	node   simtest.Instance
}

func (b *bench) newRig(simFlags ...string) (*rig, error) {
	return b.newRigOn(append([]string{"--instances=node-a", "--hotplug"}, simFlags...)...)
}

// newRigOn is newRig with a rack that has only the given flags.
func (b *bench) newRigOn(simFlags ...string) (_ *rig, err error) {
	r, err := b.newRack(simFlags...)
	if err != nil {
		return nil, err
	}
	if r.plugin, err = b.startPlugin("controller", r.sim); err != nil {
		return nil, errors.Join(err, r.stop())
	}
	return r, nil
}

// newRack is newRigOn without a plugin.
func (b *bench) newRack(simFlags ...string) (_ *rig, err error) {
	r := &rig{}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.stop())
		}
	}()
	if r.sim, err = b.startSim(simFlags...); err != nil {
		return nil, err
	}
	r.node = r.sim.Instances[0]
	roots, err := config.ReadCAs(r.sim.CAFile)
	if err != nil {
		return r, err
	}
	r.sdk, err = oxide.NewClient(
		oxide.WithHost(r.sim.Host),
		oxide.WithToken(r.sim.Token),
		oxide.WithHTTPClient(rack.NewHTTPClient(roots)),
	)
	return r, err
}

// startSim starts a rack that serves TLS with HTTP/2, as a rack does.
func (b *bench) startSim(flags ...string) (*simtest.Sim, error) {
	return simtest.StartSim(b.programs.Sim, nil, append(flags, "--tls="+filepath.Join(b.dir, "tls"))...)
}

// at is the same rig with another of its instances.
func (r *rig) at(node simtest.Instance) *rig {
	other := *r
	other.node = node
	return &other
}

// stop ends both processes. The plugin ends first, because it would log that its rack is gone.
func (r *rig) stop() error {
	var errs []error
	if r.plugin != nil {
		errs = append(errs, r.plugin.Stop())
	}
	if r.sim != nil {
		errs = append(errs, r.sim.Stop())
	}
	return errors.Join(errs...)
}

// pluginOptions are the options of a plugin in a new folder, on the first instance of the rack.
func (b *bench) pluginOptions(mode string, sim *simtest.Sim) (simtest.PluginOptions, error) {
	dir, err := os.MkdirTemp(b.dir, "")
	return simtest.PluginOptions{Mode: mode, Dir: dir, Sim: sim, Instance: sim.Instances[0], Args: b.args}, err
}

func (b *bench) startPlugin(mode string, sim *simtest.Sim) (*simtest.Plugin, error) {
	opts, err := b.pluginOptions(mode, sim)
	if err != nil {
		return nil, err
	}
	return simtest.StartPlugin(b.programs.Plugin, opts)
}

const volumeBytes = 1 << 30

func mountCapability() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	}
}

// createVolume creates a blank volume by the plugin and returns its ID.
func (r *rig) createVolume(ctx context.Context, name string) (string, error) {
	return r.createVolumeFrom(ctx, name, nil)
}

// restore creates a volume from a snapshot by the plugin and returns its ID.
func (r *rig) restore(ctx context.Context, name, snapshotID string) (string, error) {
	return r.createVolumeFrom(ctx, name, &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: snapshotID},
	}})
}

// clone creates a copy of a volume by the plugin and returns its ID.
func (r *rig) clone(ctx context.Context, name, volumeID string) (string, error) {
	return r.createVolumeFrom(ctx, name, &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: volumeID},
	}})
}

func (r *rig) createVolumeFrom(ctx context.Context, name string, source *csi.VolumeContentSource) (string, error) {
	resp, err := r.plugin.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name:                name,
		CapacityRange:       &csi.CapacityRange{RequiredBytes: volumeBytes},
		VolumeCapabilities:  []*csi.VolumeCapability{mountCapability()},
		VolumeContentSource: source,
	})
	return resp.GetVolume().GetVolumeId(), err
}

// createSnapshot creates a snapshot of a volume by the plugin and returns its ID.
func (r *rig) createSnapshot(ctx context.Context, name, volumeID string) (string, error) {
	resp, err := r.plugin.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: volumeID})
	return resp.GetSnapshot().GetSnapshotId(), err
}

func (r *rig) deleteSnapshot(ctx context.Context, snapshotID string) error {
	_, err := r.plugin.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: snapshotID})
	return err
}

// anotherCluster is the cluster ID of the disks that the bare SDK creates. It is as long as [simtest.ClusterID].
const anotherCluster = "sdk"

// createDisk creates the same disk by the bare SDK, with a name and a description of the same length as the plugin's.
// It returns the disk's ID.
func (r *rig) createDisk(ctx context.Context, name string) (string, error) {
	return r.createDiskFrom(ctx, anotherCluster, name, blank)
}

// blank is the source of the plugin's disks without a content source.
var blank = oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 4096}}

// createDiskFrom creates a disk as the plugin of a cluster does.
func (r *rig) createDiskFrom(ctx context.Context, cluster, name string, source oxide.DiskSource) (string, error) {
	disk, err := r.sdk.DiskCreate(ctx, oxide.DiskCreateParams{
		Project: oxide.NameOrId(r.sim.Project),
		Body: &oxide.DiskCreate{
			Name:        oxide.Name(diskname.ForVolume(cluster, name)),
			Description: rack.NewDescription(cluster, name, "").Encode(),
			Size:        volumeBytes,
			DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{DiskSource: source}},
		},
	})
	if err != nil {
		return "", fmt.Errorf("create disk: %w", err)
	}
	return disk.Id, nil
}

func (r *rig) deleteDisk(ctx context.Context, id string) error {
	return r.sdk.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(id)})
}

// publish attaches a volume to the instance by the plugin.
func (r *rig) publish(ctx context.Context, volumeID string) (map[string]string, error) {
	resp, err := r.plugin.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
		VolumeId: volumeID, NodeId: r.node.ID, VolumeCapability: mountCapability(),
	})
	return resp.GetPublishContext(), err
}

func (r *rig) unpublish(ctx context.Context, volumeID string) error {
	_, err := r.plugin.ControllerUnpublishVolume(
		ctx,
		&csi.ControllerUnpublishVolumeRequest{VolumeId: volumeID, NodeId: r.node.ID},
	)
	return err
}

// expand makes a volume of volumeBytes twice as large by the plugin.
func (r *rig) expand(ctx context.Context, volumeID string) error {
	_, err := r.plugin.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
		VolumeId: volumeID, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * volumeBytes},
	})
	return err
}

func (r *rig) deleteVolume(ctx context.Context, volumeID string) error {
	_, err := r.plugin.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: volumeID})
	return err
}

// attach attaches a disk to the instance by the bare SDK.
func (r *rig) attach(ctx context.Context, diskID string) error {
	_, err := r.sdk.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
		Instance: oxide.NameOrId(r.node.ID), Body: &oxide.DiskPath{Disk: oxide.NameOrId(diskID)},
	})
	return err
}

func (r *rig) detach(ctx context.Context, diskID string) error {
	_, err := r.sdk.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
		Instance: oxide.NameOrId(r.node.ID), Body: &oxide.DiskPath{Disk: oxide.NameOrId(diskID)},
	})
	return err
}
