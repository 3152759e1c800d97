package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/simrack/lab"
)

// rig is a simulated rack, a plugin in mode controller, and beside it the bare SDK with an HTTP client as the plugin has
// it. The rack hot-plugs, so that its one instance need not be stopped.
type rig struct {
	sim    *lab.Sim
	plugin *lab.Plugin
	sdk    *oxide.Client
	node   lab.Instance
}

func (b *bench) newRig(simFlags ...string) (_ *rig, err error) {
	r := &rig{}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.stop())
		}
	}()
	if r.sim, err = lab.StartSim(b.programs.Sim, nil, append(simFlags, "--instances=node-a", "--hotplug")...); err != nil {
		return nil, err
	}
	r.node = r.sim.Instance("node-a")
	opts, err := b.pluginOptions("controller", r.sim)
	if err != nil {
		return nil, err
	}
	if r.plugin, err = lab.StartPlugin(b.programs.Plugin, opts); err != nil {
		return nil, err
	}
	r.sdk, err = oxide.NewClient(oxide.WithHost(r.sim.Host), oxide.WithToken(r.sim.Token), oxide.WithHTTPClient(rack.NewHTTPClient(nil)))
	return r, err
}

// stop ends both processes; the plugin first, which would log that its rack is gone.
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

// pluginOptions are those of a plugin with a folder of its own on the first instance of the rack.
func (b *bench) pluginOptions(mode string, sim *lab.Sim) (lab.PluginOptions, error) {
	dir, err := os.MkdirTemp(b.dir, "")
	return lab.PluginOptions{Mode: mode, Dir: dir, Sim: sim, Instance: sim.Instances[0], Args: b.args}, err
}

const volumeBytes = 1 << 30

func mountCapability() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	}
}

// createVolume makes a volume by the plugin and returns its ID.
func (r *rig) createVolume(ctx context.Context, name string) (string, error) {
	resp, err := r.plugin.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name:               name,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: volumeBytes},
		VolumeCapabilities: []*csi.VolumeCapability{mountCapability()},
	})
	return resp.GetVolume().GetVolumeId(), err
}

// createDisk makes the same disk by the bare SDK, with a name and a description as long as the plugin's, and returns its
// ID.
func (r *rig) createDisk(ctx context.Context, name string) (string, error) {
	disk, err := r.sdk.DiskCreate(ctx, oxide.DiskCreateParams{
		Project: oxide.NameOrId(r.sim.Project),
		Body: &oxide.DiskCreate{
			Name:        oxide.Name(rack.DiskName("sdk", name)),
			Description: rack.NewDescription("sdk", name, "").Encode(),
			Size:        volumeBytes,
			DiskBackend: oxide.DiskBackend{Value: &oxide.DiskBackendDistributed{
				DiskSource: oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: 4096}},
			}},
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
	_, err := r.plugin.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: volumeID, NodeId: r.node.ID})
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
