// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// changes are the operations that change something on a rack.
var changes = []string{
	"disk_create", "disk_delete", "snapshot_create", "snapshot_delete", "instance_disk_attach", "instance_disk_detach",
	"instance_stop", "instance_start",
}

func (r *rig) show(t *testing.T, id string, fields map[string]any) {
	t.Helper()
	r.Must(t, r.Sim.Show(t.Context(), id, fields))
}

// userGroup makes an anti-affinity group as a user or another cluster does. It returns its ID.
func (r *rig) userGroup(t *testing.T, name, text string) string {
	t.Helper()
	group, err := r.SDK.AntiAffinityGroupCreate(t.Context(), oxide.AntiAffinityGroupCreateParams{
		Project: coretest.Project,
		Body: &oxide.AntiAffinityGroupCreate{
			Name: oxide.Name(name), Description: text, Policy: oxide.AffinityPolicyAllow, FailureDomain: oxide.FailureDomainSled,
		},
	})
	r.Must(t, err)
	return group.Id
}

// A disk in a state, or of a type, that a later release of the rack has hides no other disk. It is shown, and nothing
// is done with it.
func TestDiskInAnUnknownState(t *testing.T) {
	r := newRig(t)
	node, other := r.Node(t, "node-a"), r.Node(t, "node-b")
	for name, unknown := range map[string]struct {
		fields   map[string]any
		mentions string
		attached bool
	}{
		"state":                 {map[string]any{"state": map[string]any{"state": "hibernating"}}, "hibernating", false},
		"state on its instance": {map[string]any{"state": map[string]any{"state": "hibernating", "instance": node}}, "hibernating", true},
		"state without its instance": {
			map[string]any{"state": map[string]any{"state": "hibernating"}}, "hibernating", true,
		},
		"state of another form": {map[string]any{"state": "hibernating"}, "hibernating", false},
		"type":                  {map[string]any{"disk_type": "replicated"}, "replicated", false},
	} {
		t.Run(name, func(t *testing.T) {
			id, neighbour := r.Create(t, "v "+name), r.Create(t, "neighbour of "+name)
			if unknown.attached {
				r.Must(t, r.Publish(t, id, node))
			}
			r.show(t, id, unknown.fields)
			defer r.show(t, id, nil)
			list, err := r.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
			r.Must(t, err)
			var listed []string
			for _, entry := range list.GetEntries() {
				listed = append(listed, entry.GetVolume().GetVolumeId())
			}
			if !slices.Contains(listed, id) || !slices.Contains(listed, neighbour) {
				t.Errorf("the list %v lacks the disk or its neighbour", listed)
			}
			shown, err := r.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
			r.Must(t, err)
			if shown.GetVolume().GetVolumeId() != id {
				t.Errorf("shown as %v", shown)
			}
			health, err := r.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: id})
			r.Must(t, err)
			if entries := health.GetVolumeHealth().
				GetHealthStatuses(); len(entries) != 1 ||
				entries[0].GetReason() != "DiskUnknown" {
				t.Errorf("its health is %v", entries)
			}
			r.ClearCalls(t)
			for call, err := range map[string]error{
				"publish":           r.Publish(t, id, node),
				"publish elsewhere": r.Publish(t, id, other),
				"unpublish":         r.Unpublish(t, id, node),
				"delete":            r.Delete(t, id),
				"expand": second(r.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
					VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * coretest.GiB},
				})),
			} {
				t.Run(call, func(t *testing.T) {
					coretest.WantCode(t, err, codes.FailedPrecondition, unknown.mentions, "upgrade")
				})
			}
			for call, err := range map[string]error{ // after a final code, an orchestrator forgets what exists
				"create again": second(r.CreateVolume(t.Context(), coretest.CreateRequest("v "+name))),
				"clone":        second(r.CreateVolume(t.Context(), from("clone of "+name, fromVolume(id)))),
				"snapshot":     r.takeSnapshot(t.Context(), "snapshot of "+name, id),
			} {
				t.Run(call, func(t *testing.T) { coretest.WantCode(t, err, codes.Unavailable, unknown.mentions, "upgrade") })
			}
			made := r.Calls(t)
			delete(made, "disk_create") // the repeated create, which the rack refuses: its name is taken
			for _, change := range changes {
				if made[change] > 0 {
					t.Errorf("%s was called: %v", change, slices.Collect(maps.Keys(made)))
				}
			}
			r.Must(t, r.Publish(t, neighbour, other))
			r.Must(t, r.Unpublish(t, neighbour, other))
			r.Must(t, r.Delete(t, neighbour))
		})
	}
}

// A disk in an unknown state on an instance stops no other disk of it.
func TestUnknownDiskOnAnInstance(t *testing.T) {
	r := newRig(t)
	node := r.Node(t, "node-a")
	unknown, volume := r.Create(t, "unknown"), r.Create(t, "v")
	r.Must(t, r.Publish(t, unknown, node))
	r.show(t, unknown, map[string]any{"state": map[string]any{"state": "hibernating", "instance": node}})
	r.Must(t, r.Publish(t, volume, node))
	r.Must(t, r.Unpublish(t, volume, node))
}

// A snapshot in an unknown state hides no other one. It is shown, and nothing is done with it.
func TestSnapshotInAnUnknownState(t *testing.T) {
	r := newRig(t)
	volume := r.Create(t, "v")
	unknown, other := r.snapshot(t, "unknown", volume), r.snapshot(t, "other", volume)
	r.show(t, unknown, map[string]any{"state": "thawing"})
	list, err := r.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
	r.Must(t, err)
	ready := map[string]bool{}
	for _, entry := range list.GetEntries() {
		ready[entry.GetSnapshot().GetSnapshotId()] = entry.GetSnapshot().GetReadyToUse()
	}
	if len(ready) != 2 || ready[unknown] || !ready[other] {
		t.Errorf("listed %v", ready)
	}
	one, err := r.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{SnapshotId: unknown})
	r.Must(t, err)
	if len(one.GetEntries()) != 1 || one.GetEntries()[0].GetSnapshot().GetReadyToUse() {
		t.Errorf("listed %v", one)
	}
	r.ClearCalls(t)
	_, err = r.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: unknown})
	coretest.WantCode(t, err, codes.FailedPrecondition, "thawing", "upgrade")
	_, err = r.CreateVolume(t.Context(), from("restored", fromSnapshot(unknown)))
	coretest.WantCode(t, err, codes.Unavailable, "thawing", "upgrade")
	coretest.WantCode(t, r.takeSnapshot(t.Context(), "unknown", volume), codes.Unavailable, "thawing")
	if made := r.Calls(t); made["snapshot_delete"]+made["disk_create"] > 0 {
		t.Errorf("calls %v", made)
	}
	_, err = r.CreateVolume(t.Context(), from("restored", fromSnapshot(other)))
	r.Must(t, err)
}

// A snapshot that CreateSnapshot made and that has failed is no final answer: nobody would delete it.
func TestRepeatedSnapshotThatHasFailed(t *testing.T) {
	r := newRig(t)
	volume := r.Create(t, "v")
	r.show(t, r.snapshot(t, "s", volume), map[string]any{"state": "faulted"})
	coretest.WantCode(t, r.takeSnapshot(t.Context(), "s", volume), codes.Unavailable, "faulted")
}

// Unknown values elsewhere change nothing.
func TestUnknownInstanceAndGroup(t *testing.T) {
	r := newRig(t)
	node, volume := r.Node(t, "node-a"), r.Create(t, "v")
	r.show(t, node, map[string]any{"run_state": "hibernating", "auto_restart_policy": "sometimes"})
	r.show(t, r.userGroup(t, "other-group", "text"), map[string]any{"policy": "perhaps", "failure_domain": "row"})
	r.Must(t, r.Publish(t, volume, node))
	_, err := r.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	r.Must(t, err)
	r.Must(t, r.Unpublish(t, volume, node))
	r.Must(t, r.Delete(t, volume))
}

// A restart goes on although the instance has a disk in an unknown state. It leaves that disk where it is, also one
// whose detach was deferred before. No restart is planned for a volume whose disk is in such a state.
func TestPlannedRestartWithAnUnknownDisk(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	deferred, requested := r.unpublishedOn(t, "deferred", node), r.Create(t, "requested")
	r.show(t, deferred, map[string]any{"state": map[string]any{"state": "hibernating", "instance": node}})
	r.show(t, requested, map[string]any{"state": map[string]any{"state": "hibernating"}})
	r.ClearCalls(t)
	coretest.WantCode(t, r.Publish(t, requested, node), codes.FailedPrecondition, "hibernating", "upgrade")
	r.published(t, r.Create(t, "v"), node)
	r.restartsDone(t)
	if got := r.runState(t, node); got != oxide.InstanceStateRunning {
		t.Errorf("the instance is %s", got)
	}
	r.wantRestarts(t, 1)
	if detaches := r.Calls(t)["instance_disk_detach"]; detaches > 0 {
		t.Errorf("%d detaches", detaches)
	}
	r.show(t, deferred, nil)
	r.show(t, requested, nil)
	if got := r.Holder(t, deferred); got != node {
		t.Errorf("the disk of the deferred detach is on %q", got)
	}
	if got := r.Holder(t, requested); got != "" {
		t.Errorf("the requested disk is on %q", got)
	}
}

// An instance in an unknown run state is not restarted.
func TestPlannedRestartOfAnUnknownInstance(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node, other := r.Node(t, "node-a"), r.Node(t, "node-b")
	volume := r.Create(t, "v")
	r.show(t, node, map[string]any{"run_state": "hibernating"})
	coretest.WantCode(t, r.Publish(t, volume, node), codes.FailedPrecondition, "planned restart")
	r.published(t, r.Create(t, "elsewhere"), other)
	r.restartsDone(t)
	r.wantRestarts(t, 1)
	await.Eventually(t, "the answer says which state keeps the instance from its restart", func() bool {
		err := r.Publish(t, volume, node)
		coretest.WantCode(t, err, codes.FailedPrecondition)
		return strings.Contains(err.Error(), "hibernating")
	})
	r.show(t, node, nil)
	r.published(t, volume, node)
}
