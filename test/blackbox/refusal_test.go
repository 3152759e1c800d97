// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package blackbox

import (
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// TestRunningInstance uses a rack without hot-plug, which attaches and detaches disks only while the instance is
// stopped. The plugin refuses with advice for the operator and changes nothing. It succeeds as soon as the instance is
// stopped.
func TestRunningInstance(t *testing.T) {
	t.Parallel()
	sim := startSim(t, "--instances=node-a")
	plugin := startPlugin(t, simtest.PluginOptions{Mode: "controller", Sim: sim})
	ctx := within(t, 2*time.Minute)
	capability, node := mountVolume(""), sim.Instance("node-a")
	c := newClient()
	volume := twice(t, c, plugin.CreateVolume, createRequest("refused", capability)).GetVolume()
	publish := publishRequest(volume, node, capability)
	unpublish := &csi.ControllerUnpublishVolumeRequest{VolumeId: volume.GetVolumeId(), NodeId: node.ID}

	_, err := plugin.ControllerPublishVolume(ctx, publish)
	checkRefusal(t, err)
	if disks := attachedDisks(t, sim, node); len(disks) != 0 {
		t.Errorf("the instance has the disks %v after a refused publish", disks)
	}
	// Unpublishing a volume that is not attached succeeds in any run state.
	send(t, c, plugin.ControllerUnpublishVolume, unpublish)

	halt(t, sim, node)
	untilOK(t, func() error { _, err := plugin.ControllerPublishVolume(ctx, publish); return err })
	twice(t, c, plugin.ControllerPublishVolume, publish)
	if disks := attachedDisks(t, sim, node); len(disks) != 1 || disks[0] != volume.GetVolumeId() {
		t.Fatalf(
			"the stopped instance has the disks %v after a publish, want the one of volume %s",
			disks,
			volume.GetVolumeId(),
		)
	}

	if err := sim.SetRunState(ctx, node.ID, "running"); err != nil {
		t.Fatal(err)
	}
	// Publishing an attached disk again succeeds, also while the instance runs.
	twice(t, c, plugin.ControllerPublishVolume, publish)
	_, err = plugin.ControllerUnpublishVolume(ctx, unpublish)
	checkRefusal(t, err)
	if disks := attachedDisks(t, sim, node); len(disks) != 1 {
		t.Errorf("the instance has the disks %v after a refused unpublish", disks)
	}
	_, err = plugin.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
	if code := status.Code(err); code != codes.FailedPrecondition {
		t.Errorf("DeleteVolume of an attached disk: %v", err)
	}

	halt(t, sim, node)
	untilOK(t, func() error { _, err := plugin.ControllerUnpublishVolume(ctx, unpublish); return err })
	twice(t, c, plugin.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
	checkLeftovers(t, sim, 0)
	if len(c.failed) > 0 {
		t.Errorf("requests failed that the rack had no reason to refuse: %v", c.failed)
	}
}

// checkRefusal checks the code, and that the message names the instance, its state and both remedies.
func checkRefusal(t *testing.T, err error) {
	t.Helper()
	if code := status.Code(err); code != codes.FailedPrecondition {
		t.Fatalf("got %v, want FAILED_PRECONDITION", err)
	}
	message := status.Convert(err).Message()
	for _, want := range []string{"stop the instance", "--attach-mode=restart", `"node-a"`, "running"} {
		if !strings.Contains(message, want) {
			t.Errorf("the refusal does not say %q: %s", want, message)
		}
	}
	if strings.Contains(message, "\n") {
		t.Errorf("the refusal has several lines: %q", message)
	}
}

// attachedDisks returns the IDs of an instance's disks without its boot disk.
func attachedDisks(t *testing.T, sim *simtest.Sim, instance simtest.Instance) (ids []string) {
	t.Helper()
	list, err := sim.ListInstances(within(t, time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range list {
		for _, disk := range i.Disks {
			if i.ID == instance.ID && disk.Name != instance.Name+"-boot" {
				ids = append(ids, disk.ID)
			}
		}
	}
	return ids
}

// halt powers an instance off from inside the guest, and waits until the rack reports it as stopped.
func halt(t *testing.T, sim *simtest.Sim, instance simtest.Instance) {
	t.Helper()
	ctx := within(t, time.Minute)
	if err := sim.Halt(ctx, instance.ID); err != nil {
		t.Fatal(err)
	}
	await.Eventually(t, "the instance is stopped", func() bool {
		list, err := sim.ListInstances(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range list {
			if i.ID == instance.ID {
				return i.RunState == "stopped"
			}
		}
		return false
	})
}

// untilOK repeats try until it succeeds. The plugin caches a refusal for some seconds, so only FAILED_PRECONDITION may
// repeat.
func untilOK(t *testing.T, try func() error) {
	t.Helper()
	await.Eventually(t, "the plugin asks the rack again", func() bool {
		err := try()
		if err != nil && status.Code(err) != codes.FailedPrecondition {
			t.Fatal(err)
		}
		return err == nil
	})
}
