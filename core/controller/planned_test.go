// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	grpcmetadata "google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// newRestartRig returns a controller in attach mode restart with a rack without hot-plug. By default the rack stops the
// instances. Restarts pass in real time, because controller and rack speak HTTP over loopback. The tests therefore wait
// on states, and no timeout ends a restart unless a test sets one.
func newRestartRig(t *testing.T, change ...func(*coretest.Options)) *rig {
	t.Helper()
	return newRig(t, append([]func(*coretest.Options){func(o *coretest.Options) {
		o.Rack.Hotplug = false
		o.Rack.Instances = []string{"node-a", "node-b", "node-c"}
		o.Restarts = &controller.PlannedRestarts{Options: restart.Options{
			Shutdown:    restart.Hard,
			Window:      100 * time.Millisecond,
			MaxDown:     1,
			HaltTimeout: time.Minute,
			Poll:        10 * time.Millisecond,
			Idle:        20 * time.Millisecond,
			Lease:       time.Minute,
		}}
	}}, change...)...)
}

// gated starts another controller for the same rack, without the engine that plans restarts.
// Its requests pass the gate.
func (r *rig) gated(t *testing.T) (*rig, *coretest.Gate) {
	t.Helper()
	other, gate := r.copy(), &coretest.Gate{}
	other.Options.Unplanned = true
	other.StartWith(t, coretest.RackClient(t, other.Rig, func(cfg *rack.Config) {
		cfg.HTTPClient = &http.Client{Transport: gate}
	}))
	return other, gate
}

// published publishes a volume repeatedly, as an orchestrator does, until that succeeds.
func (r *rig) published(t *testing.T, volumeID, nodeID string) {
	t.Helper()
	await.Eventually(t, "the volume is published", func() bool {
		err := r.Publish(t, volumeID, nodeID)
		if err != nil && status.Code(err) != codes.FailedPrecondition {
			t.Fatal(err)
		}
		return err == nil
	})
	if got := r.Holder(t, volumeID); got != nodeID {
		t.Fatalf("the volume is published on %s, and its disk is on %q", nodeID, got)
	}
}

// startGate holds back the start of all restarts until it is opened.
type startGate struct{ open atomic.Bool }

func (g *startGate) set(o *coretest.Options) {
	o.Restarts.NextStart = func(now time.Time) time.Time {
		if g.open.Load() {
			return now
		}
		return inAnHour(now)
	}
}

// publishedTogether requests all volumes before a restart can start, each on the next one of the nodes. Then it opens
// the gate and waits until all volumes are published.
func (r *rig) publishedTogether(t *testing.T, gate *startGate, nodeIDs []string, volumeIDs ...string) {
	t.Helper()
	for i, volumeID := range volumeIDs {
		coretest.WantCode(t, r.Publish(t, volumeID, nodeIDs[i%len(nodeIDs)]), codes.FailedPrecondition)
	}
	gate.open.Store(true)
	for i, volumeID := range volumeIDs {
		r.published(t, volumeID, nodeIDs[i%len(nodeIDs)])
	}
}

// createSome creates volumes.
func (r *rig) createSome(t *testing.T, count int) []string {
	t.Helper()
	var volumes []string
	for i := range count {
		volumes = append(volumes, r.Create(t, fmt.Sprintf("v%d", i)))
	}
	return volumes
}

// restarts returns how often instances were stopped and started.
func (r *rig) restarts(t *testing.T) (stops, starts int) {
	t.Helper()
	calls, err := r.Sim.Calls(t.Context())
	r.Must(t, err)
	return calls.Counts["instance_stop"], calls.Counts["instance_start"]
}

func (r *rig) wantRestarts(t *testing.T, want int) {
	t.Helper()
	if stops, starts := r.restarts(t); stops != want || starts != want {
		t.Errorf("%d stops and %d starts, want %d of each", stops, starts, want)
	}
}

// runState returns the run state of an instance.
func (r *rig) runState(t *testing.T, id string) oxide.InstanceState {
	t.Helper()
	instance, err := r.SDK.InstanceView(t.Context(), oxide.InstanceViewParams{Instance: oxide.NameOrId(id)})
	r.Must(t, err)
	return instance.RunState
}

// records returns the names of the controller's records that begin with the prefix.
func (r *rig) records(t *testing.T, prefix string) []string {
	t.Helper()
	groups, err := r.SDK.AntiAffinityGroupListAllPages(
		t.Context(),
		oxide.AntiAffinityGroupListParams{Project: coretest.Project},
	)
	r.Must(t, err)
	var names []string
	for _, group := range groups {
		if strings.HasPrefix(string(group.Name), prefix) {
			names = append(names, string(group.Name))
		}
	}
	return names
}

// restartsDone waits until no restart is under way.
func (r *rig) restartsDone(t *testing.T) {
	t.Helper()
	await.Eventually(t, "no restart is under way", func() bool { return len(r.records(t, "csi-restart-")) == 0 })
}

// publishedNodes returns the published nodes of a volume, after ListVolumes and ControllerGetVolume.
func (r *rig) publishedNodes(t *testing.T, volumeID string) []string {
	t.Helper()
	list, err := r.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	r.Must(t, err)
	one, err := r.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: volumeID})
	r.Must(t, err)
	for _, entry := range list.GetEntries() {
		if entry.GetVolume().GetVolumeId() == volumeID {
			if diff := cmp.Diff(entry.GetStatus().GetPublishedNodeIds(), one.GetStatus().GetPublishedNodeIds()); diff != "" {
				t.Errorf("ListVolumes and ControllerGetVolume differ (-list +get):\n%s", diff)
			}
			return entry.GetStatus().GetPublishedNodeIds()
		}
	}
	t.Fatalf("ListVolumes has no volume %s", volumeID)
	return nil
}

// A detach within the grace period is deferred, as every detach is on a rack without hot-plug. No instance is restarted
// for it where the rack has hot-plug.
func TestPlannedDetachGrace(t *testing.T) {
	t.Parallel()
	grace := func(o *coretest.Options) { o.DetachGrace = time.Hour }
	r := newRestartRig(t, grace)
	node, volume := r.Node(t, "node-a"), r.Create(t, "data")
	r.published(t, volume, node)
	r.restartsDone(t)
	for range 2 { // Nomad unpublishes twice
		r.Must(t, r.Unpublish(t, volume, node))
	}
	if got := r.Holder(t, volume); got != node {
		t.Errorf("the disk is on %q, want %q", got, node)
	}
	if got := r.publishedNodes(t, volume); len(got) > 0 {
		t.Errorf("the volume is published on %v", got)
	}
	r.published(t, volume, node)
	r.wantRestarts(t, 1)

	r = newRestartRig(t, grace, func(o *coretest.Options) { o.Rack.Hotplug = true })
	node, volume = r.Node(t, "node-a"), r.Create(t, "data")
	r.published(t, volume, node)
	r.Must(t, r.Unpublish(t, volume, node))
	if got := r.publishedNodes(t, volume); len(got) > 0 {
		t.Errorf("the volume is published on %v", got)
	}
	coretest.WantCode(t, r.Publish(t, volume, r.Node(t, "node-b")), codes.FailedPrecondition, "(--detach-grace)")
	r.wantRestarts(t, 0)
	if got := r.Holder(t, volume); got != node {
		t.Errorf("the disk is on %q, want %q", got, node)
	}
}

// Volumes that are requested together for one instance cost one restart.
func TestPlannedRequestsTogetherCostOneRestart(t *testing.T) {
	t.Parallel()
	gate := &startGate{}
	r := newRestartRig(t, gate.set, func(o *coretest.Options) { o.MaxDisks = 12 })
	node := r.Node(t, "node-a")
	volumes := r.createSome(t, 8)
	r.publishedTogether(t, gate, []string{node}, volumes...)
	r.wantRestarts(t, 1)
	r.restartsDone(t)
	if got := r.runState(t, node); got != oxide.InstanceStateRunning {
		t.Errorf("the instance is %s", got)
	}
	if got := r.records(t, "csi-"); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
	for _, volume := range volumes {
		if diff := cmp.Diff([]string{node}, r.publishedNodes(t, volume)); diff != "" {
			t.Errorf("published nodes (-want +got):\n%s", diff)
		}
	}
}

// An unpublish soon after a return may be an old one, and the volume in use. A restart for another volume leaves its
// disk attached; one for the same volume on another node does not.
func TestPlannedRestartKeepsAnUntimedDisk(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.DetachGrace = time.Hour })
	node, volume, other := r.Node(t, "node-a"), r.Create(t, "data"), r.Create(t, "other")
	r.returned(t, volume, node)
	r.Must(t, r.Unpublish(t, volume, node))
	r.published(t, other, node)
	r.restartsDone(t)
	if got := r.Holder(t, volume); got != node {
		t.Errorf("the disk is on %q, want %q", got, node)
	}
	r.wantRestarts(t, 2)
	r.published(t, volume, r.Node(t, "node-b"))
}

// Such a disk keeps its slot. The error names it and the command, and Nomad repeats the publish.
func TestPlannedFullInstanceWithAnUntimedDetach(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.DetachGrace, o.MaxDisks = time.Hour, 2 })
	node, volume, other := r.Node(t, "node-a"), r.Create(t, "data"), r.Create(t, "other")
	r.returned(t, volume, node)
	coretest.WantCode(t, r.Publish(t, other, node), codes.ResourceExhausted, "--max-disks is 2")
	r.Must(t, r.Unpublish(t, volume, node))
	coretest.WantCode(t, r.Publish(t, other, node), codes.FailedPrecondition, "oxide-csi volume detach")
}

// The next restart frees the slot of a disk whose deferred detach is timed. A second volume gets no room by that.
func TestPlannedFullInstanceWithAPromisedSlot(t *testing.T) {
	t.Parallel()
	gate := &startGate{}
	r := newRestartRig(t, gate.set, func(o *coretest.Options) { o.DetachGrace, o.MaxDisks = time.Hour, 2 })
	node, leaves := r.Node(t, "node-a"), r.Create(t, "leaves")
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
	r.AttachByHand(t, leaves, node)
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "running"))
	r.Must(t, r.Unpublish(t, leaves, node))
	coretest.WantCode(t, r.Publish(t, r.Create(t, "comes"), node), codes.FailedPrecondition, "")
	coretest.WantCode(t, r.Publish(t, r.Create(t, "too many"), node), codes.ResourceExhausted, "--max-disks is 2")
}

// The process that takes a restart over frees the disk of an untimed deferred detach, although it has no request for
// the volume. Otherwise the instance would be restarted in vain, again and again.
func TestPlannedHandoverFreesAnUntimedDisk(t *testing.T) {
	t.Parallel()
	r, _ := newRestartPair(t, func(o *coretest.Options) { o.DetachGrace = time.Hour })
	node, volume := r.Node(t, "node-a"), r.Create(t, "data")
	r.returned(t, volume, node)
	r.Must(t, r.Unpublish(t, volume, node))
	if record := r.detachRecord(t, volume); !strings.Contains(record, `"untimed":true`) {
		t.Fatalf("after a late unpublish the record is %s", record)
	}
	moved := func() bool { return r.Publish(t, volume, r.Node(t, "node-b")) == nil }
	for end := time.Now().Add(20 * time.Second); !moved(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			stops, _ := r.restarts(t)
			t.Fatalf("the volume has not moved after %d restarts", stops)
		}
	}
	r.restartsDone(t)
}

// A person who has confirmed that a volume is not mounted does not send a repetition, so the next restart detaches its
// disk.
func TestPlannedDetachByAPerson(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.DetachGrace = time.Hour })
	node, volume, other := r.Node(t, "node-a"), r.Create(t, "data"), r.Create(t, "other")
	r.returned(t, volume, node)
	_, err := r.ControllerUnpublishVolume(
		grpcmetadata.AppendToOutgoingContext(t.Context(), rpc.MetadataDetachNow, "yes"),
		&csi.ControllerUnpublishVolumeRequest{VolumeId: volume, NodeId: node},
	)
	r.Must(t, err)
	r.published(t, other, node)
	r.restartsDone(t)
	if got := r.Holder(t, volume); got != "" {
		t.Errorf("after the restart the disk is still on %q", got)
	}
}

// In attach mode restart, too, a detach at once is remembered. The time of a late unpublish counts from the volume's
// return.
func TestPlannedLateUnpublish(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.DetachGrace, o.Rack.Hotplug = time.Hour, true })
	node, volume := r.Node(t, "node-a"), r.Create(t, "data")
	r.published(t, volume, node)
	r.stop(t, node)
	r.Must(t, r.Unpublish(t, volume, node))
	if got := r.Holder(t, volume); got != "" {
		t.Errorf("the disk is on %q", got)
	}
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "running"))
	detached := r.detachRecord(t, volume)
	r.published(t, volume, node)
	if returned := r.detachRecord(t, volume); returned == detached || !strings.Contains(returned, `"over":true`) {
		t.Errorf("after the return the record is still %s", returned)
	}
	r.Must(t, r.Unpublish(t, volume, node))
	if late := r.detachRecord(t, volume); !strings.Contains(late, `"untimed":true`) {
		t.Errorf("after a late unpublish the record is %s", late)
	}
}

// returned publishes a volume on a node, unpublishes it, and publishes it there again.
func (r *rig) returned(t *testing.T, volume, node string) {
	t.Helper()
	r.published(t, volume, node)
	r.restartsDone(t)
	r.Must(t, r.Unpublish(t, volume, node))
	r.published(t, volume, node)
}

// detachRecord returns the text of a volume's deferred detach.
func (r *rig) detachRecord(t *testing.T, volume string) string {
	t.Helper()
	group, err := r.SDK.AntiAffinityGroupView(t.Context(), oxide.AntiAffinityGroupViewParams{
		AntiAffinityGroup: oxide.NameOrId(record.Deferrals.Named(coretest.Cluster, volume)), Project: coretest.Project,
	})
	r.Must(t, err)
	return group.Description
}

// Volumes that return to their node cost no restart.
func TestPlannedReturnCostsNoRestart(t *testing.T) {
	t.Parallel()
	gate := &startGate{}
	r := newRestartRig(t, gate.set, func(o *coretest.Options) { o.MaxDisks = 12 })
	node := r.Node(t, "node-a")
	volumes := r.createSome(t, 8)
	r.publishedTogether(t, gate, []string{node}, volumes...)
	r.restartsDone(t)
	for _, volume := range volumes {
		r.Must(t, r.Unpublish(t, volume, node))
		r.Must(t, r.Unpublish(t, volume, node)) // Nomad unpublishes twice
		if got := r.publishedNodes(t, volume); len(got) > 0 {
			t.Errorf("an unpublished volume is shown on %v", got)
		}
		if got := r.Holder(t, volume); got != node {
			t.Errorf("the disk was detached from a running instance: %q", got)
		}
	}
	if got := len(r.records(t, "csi-defer-")); got != len(volumes) {
		t.Errorf("%d deferred detaches of %d unpublished volumes", got, len(volumes))
	}
	for _, volume := range volumes {
		r.Must(t, r.Publish(t, volume, node))
	}
	r.wantRestarts(t, 1)
	if got := r.records(t, "csi-"); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
}

// A volume that moves costs a restart of each node. The first restart also detaches the node's other unpublished
// volumes.
func TestPlannedMoveRestartsBothNodes(t *testing.T) {
	t.Parallel()
	gate := &startGate{}
	r := newRestartRig(t, gate.set)
	from, to := r.Node(t, "node-a"), r.Node(t, "node-b")
	moving, other := r.Create(t, "moving"), r.Create(t, "other")
	r.publishedTogether(t, gate, []string{from}, moving, other)
	if err := r.Publish(
		t,
		moving,
		to,
	); status.Code(err) != codes.FailedPrecondition ||
		!strings.Contains(err.Error(), "end its use there first") {
		t.Errorf("a volume that is in use: %v", err)
	}
	r.Must(t, r.Unpublish(t, moving, from))
	r.Must(t, r.Unpublish(t, other, from))
	r.published(t, moving, to)
	r.wantRestarts(t, 3)
	if got := r.Holder(t, other); got != "" {
		t.Errorf("the other unpublished volume is still on %s", got)
	}
	r.restartsDone(t)
	if got := r.records(t, "csi-"); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
}

// Deleting a volume restarts nothing.
func TestPlannedDeleteCostsNoRestart(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	r.published(t, volume, node)
	r.restartsDone(t)
	r.Must(t, r.Unpublish(t, volume, node))
	err := r.Delete(t, volume)
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "next planned restart") {
		t.Errorf("deleting a volume that is still attached: %v", err)
	}
	other := r.Create(t, "other")
	r.published(t, other, node)
	r.Must(t, r.Delete(t, volume))
	r.wantRestarts(t, 2)
	r.restartsDone(t)
	if got := r.records(t, "csi-"); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
}

// A deletion that meets a publish of the same volume neither detaches the disk nor defers its detach again.
func TestPlannedDeleteMeetsAPublish(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	r.published(t, volume, node)
	r.restartsDone(t)
	r.Must(t, r.Unpublish(t, volume, node))
	other, gate := r.gated(t)
	detach := gate.Hold(http.MethodPost, "/v1/instances/"+node+"/disks/detach")
	deleted := make(chan error, 1)
	go func() { deleted <- other.Delete(t, volume) }()
	detach.Entered(t)
	published := r.Publish(t, volume, node) == nil
	detach.Release()
	if err := <-deleted; err == nil {
		t.Error("the volume was deleted")
	}
	if records := r.records(t, "csi-defer"); published && len(records) > 0 {
		t.Errorf("the volume is published, and its disk would be detached: %v", records)
	}
	r.published(t, volume, node)
}

// A disk that another client attached elsewhere, after the publish has looked at it, is not published.
func TestPlannedDiskAttachedElsewhereMeanwhile(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	elsewhere := r.Node(t, "node-c")
	r.Must(t, r.Sim.SetRunState(t.Context(), elsewhere, "stopped"))
	volume := r.Create(t, "v")
	other, gate := r.gated(t)
	first := gate.Hold(http.MethodGet, "/v1/disks/"+volume)
	done := make(chan error, 1)
	go func() { done <- other.Publish(t, volume, r.Node(t, "node-a")) }()
	first.Entered(t)
	second := gate.Hold(http.MethodGet, "/v1/disks/"+volume)
	first.Release()
	second.Entered(t)
	r.AttachByHand(t, volume, elsewhere)
	second.Release()
	coretest.WantCode(t, <-done, codes.FailedPrecondition, "is attached to instance")
}

// On an instance that its owner has stopped, attach and detach work at once, and the instance is not started.
func TestPlannedStoppedInstanceIsNotStarted(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
	volume := r.Create(t, "v")
	r.Must(t, r.Publish(t, volume, node))
	r.Must(t, r.Unpublish(t, volume, node))
	if got := r.Holder(t, volume); got != "" {
		t.Errorf("the disk is still on %s", got)
	}
	r.wantRestarts(t, 0)
}

// A volume that is unpublished from a running instance, and again from the stopped one, leaves no record.
func TestPlannedUnpublishAgainOnStopped(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	r.published(t, volume, node)
	r.restartsDone(t)
	r.Must(t, r.Unpublish(t, volume, node))
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
	r.Must(t, r.Unpublish(t, volume, node))
	if got := r.Holder(t, volume); got != "" {
		t.Errorf("the disk is still on %s", got)
	}
	if got := r.records(t, "csi-"); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
}

// If an instance has no free slot, a deferred detach frees one for a requested volume.
func TestPlannedDeferredDetachMakesRoom(t *testing.T) {
	t.Parallel()
	gate := &startGate{}
	r := newRestartRig(t, gate.set, func(o *coretest.Options) { o.MaxDisks = 3 })
	node := r.Node(t, "node-a")
	volumes := []string{r.Create(t, "v0"), r.Create(t, "v1"), r.Create(t, "v2")}
	r.publishedTogether(t, gate, []string{node}, volumes[:2]...)
	if err := r.Publish(t, volumes[2], node); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("publish without a free slot: %v", err)
	}
	r.Must(t, r.Unpublish(t, volumes[0], node))
	r.published(t, volumes[2], node)
	if got := r.Holder(t, volumes[0]); got != "" {
		t.Errorf("the unpublished disk is still on %s", got)
	}
	r.wantRestarts(t, 2)
}

// A disk that was listed as attached may be detached, and its record deleted, before the records are read.
func TestPlannedRoomMadeDuringPublish(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.MaxDisks = 2 })
	node := r.Node(t, "node-a")
	leaving, coming := r.Create(t, "leaving"), r.Create(t, "coming")
	r.published(t, leaving, node)
	r.restartsDone(t)
	r.Must(t, r.Unpublish(t, leaving, node))
	r.Crash() // from here on the test plays the restart
	other, gate := r.gated(t)
	records := gate.Hold("GET", "/v1/anti-affinity-groups")
	var answer error
	var asking sync.WaitGroup
	asking.Go(func() { answer = other.Publish(t, coming, node) })
	records.Entered(t)
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
	_, err := r.SDK.InstanceDiskDetach(
		t.Context(),
		oxide.InstanceDiskDetachParams{Instance: oxide.NameOrId(node), Body: &oxide.DiskPath{Disk: oxide.NameOrId(leaving)}},
	)
	r.Must(t, err)
	r.Must(
		t,
		r.SDK.AntiAffinityGroupDelete(
			t.Context(),
			oxide.AntiAffinityGroupDeleteParams{
				AntiAffinityGroup: oxide.NameOrId(record.Deferrals.Named(coretest.Cluster, leaving)),
				Project:           coretest.Project,
			},
		),
	)
	records.Release()
	asking.Wait()
	coretest.WantCode(t, answer, codes.FailedPrecondition)
}

// A roll-out over several nodes restarts each node once.
func TestPlannedRollOutRestartsEachNodeOnce(t *testing.T) {
	t.Parallel()
	gate := &startGate{}
	r := newRestartRig(t, gate.set, func(o *coretest.Options) { o.MaxDisks = 12 })
	r.publishedTogether(
		t,
		gate,
		[]string{r.Node(t, "node-a"), r.Node(t, "node-b"), r.Node(t, "node-c")},
		r.createSome(t, 24)...)
	r.wantRestarts(t, 3)
}

// With --restart-wait a publish waits for the restart.
func TestPlannedPublishWaitsForTheRestart(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Restarts.Wait = time.Minute })
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	r.Must(t, r.Publish(t, volume, node))
	r.wantRestarts(t, 1)
	if got := r.publishedNodes(t, volume); !cmp.Equal(got, []string{node}) {
		t.Errorf("published on %v", got)
	}
}

// A command is told what the volume waits for, at once.
func TestPlannedPublishAnswersACommandSoon(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Restarts.NextStart, o.Restarts.Wait = inAnHour, time.Hour })
	id := r.Create(t, "v")
	ctx, cancel := context.WithTimeout(withQuestion(t.Context(), rpc.MetadataAnswerSoon), time.Minute)
	defer cancel()
	_, err := r.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
		VolumeId: id, NodeId: r.Node(t, "node-a"), VolumeCapability: coretest.MountWriter(),
	})
	coretest.WantCode(t, err, codes.FailedPrecondition, "[RestartPlanned]")
}

// A waiting publish ends when a restart by another controller ends.
func TestPlannedPublishWaitsForAnotherController(t *testing.T) {
	t.Parallel()
	here, there := newRestartPair(t, func(o *coretest.Options) { o.Restarts.Wait = time.Minute })
	node := here.Node(t, "node-a")
	volume := there.Create(t, "v")
	began := time.Now()
	here.Must(t, here.Publish(t, volume, node))
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("it took %s", took)
	}
	here.wantRestarts(t, 1)
}

// If a disk must be freed by the controller's own instance, another controller restarts that instance.
func TestPlannedMoveFromOwnInstance(t *testing.T) {
	t.Parallel()
	here, _ := newRestartPair(t)
	a, b := here.Node(t, "node-a"), here.Node(t, "node-b")
	volume := here.Create(t, "v")
	here.published(t, volume, a)
	here.restartsDone(t)
	here.Must(t, here.Unpublish(t, volume, a))
	here.published(t, volume, b)
	here.wantRestarts(t, 3)
}

// newRestartPair returns controllers in attach mode restart that run on node-a and node-b.
func newRestartPair(t *testing.T, change ...func(*coretest.Options)) (onA, onB *rig) {
	t.Helper()
	first := newRestartRig(t, change...)
	first.Crash()
	on := func(name string) *rig {
		instance, restarts := first.Node(t, name), *first.Options.Restarts
		restarts.Self = func() (string, bool) { return instance, true }
		other := first.copy()
		other.Options.Restarts = &restarts
		return other.again(t)
	}
	return on("node-a"), on("node-b")
}

// A controller that is terminated while an instance is down hands the restart over. The next controller continues at
// once and does not wait for the lease.
func TestPlannedRetireHandsOver(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) {
		o.Rack.StateTime, o.Restarts.Lease, o.Restarts.Wait = 300*time.Millisecond, time.Hour, time.Hour
	})
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	answered := make(chan error)
	go func() { answered <- r.Publish(t, volume, node) }()
	await.Eventually(
		t,
		"the instance is stopping",
		func() bool { return r.runState(t, node) == oxide.InstanceStateStopping },
	)
	r.Retire()
	coretest.WantCode(t, <-answered, codes.FailedPrecondition, " restarts: ")
	before := r.Calls(t)["anti_affinity_group_list"]
	time.Sleep(100 * time.Millisecond) // several polls: real time, because nothing must happen
	if after := r.Calls(t)["anti_affinity_group_list"]; after != before {
		t.Errorf("a retired controller still reads the records: %d times, %d before", after, before)
	}
	other := r.again(t)
	await.Eventually(
		t,
		"the instance runs again",
		func() bool { return r.runState(t, node) == oxide.InstanceStateRunning },
	)
	other.published(t, volume, node)
	other.restartsDone(t)
	if stops, starts := other.restarts(t); stops != 0 || starts != 1 {
		t.Errorf("%d stops and %d starts after the handover, want 0 and 1", stops, starts)
	}
}

// If a controller crashes while an instance is down, another controller starts the instance after the lease. The lease
// passes in real time, because both controllers and the rack speak HTTP.
func TestPlannedCrashedRestartIsTakenOver(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) {
		o.Rack.StateTime, o.Restarts.Lease = 300*time.Millisecond, 2*time.Second
	})
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	if err := r.Publish(t, volume, node); status.Code(err) != codes.FailedPrecondition {
		t.Fatal(err)
	}
	await.Eventually(
		t,
		"the instance is stopping",
		func() bool { return r.runState(t, node) != oxide.InstanceStateRunning },
	)
	r.Crash()
	other := r.again(t)
	await.Eventually(
		t,
		"the other controller starts the instance",
		func() bool { return r.runState(t, node) == oxide.InstanceStateRunning },
	)
	other.restartsDone(t)
	other.published(t, volume, node)
	// The record names the disk, so the other controller needs no second restart.
	if stops, _ := r.restarts(t); stops != 0 {
		t.Errorf("%d stops after the crash, want none", stops)
	}
}

// guests plays an orchestrator and the node plugins of guests that shut down on request.
type guests struct {
	r       *rig
	refusal string

	mu      sync.Mutex
	asked   map[string]string // restart ID by instance
	answers map[string]orchestrator.RestartReply
	reports []orchestrator.Report
}

func newGuests() *guests {
	return &guests{asked: map[string]string{}, answers: map[string]orchestrator.RestartReply{}}
}

func (g *guests) Request(ctx context.Context, instance, id string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.asked[instance] == id {
		return nil
	}
	g.asked[instance], g.answers[instance] = id, orchestrator.RestartReply{State: orchestrator.RestartAccepted}
	if g.refusal != "" {
		g.answers[instance] = orchestrator.RestartReply{State: orchestrator.RestartRefused, Reason: g.refusal}
		return nil
	}
	return g.r.Sim.Halt(ctx, instance)
}

func (g *guests) Reply(ctx context.Context, instance, id string) (orchestrator.RestartReply, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.asked[instance] != id {
		return orchestrator.RestartReply{}, nil
	}
	calls, err := g.r.Sim.Calls(ctx)
	if err == nil && calls.Counts["instance_start"] > 0 && g.answers[instance].State == orchestrator.RestartAccepted {
		g.answers[instance] = orchestrator.RestartReply{State: orchestrator.RestartBack}
	}
	return g.answers[instance], err
}

func (g *guests) Withdraw(_ context.Context, instance, id string) (orchestrator.RestartReply, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.asked[instance] != id {
		return orchestrator.RestartReply{}, nil
	}
	said := g.answers[instance]
	if said.State != orchestrator.RestartAccepted {
		delete(g.asked, instance)
	}
	return said, nil
}

func (g *guests) Forget(_ context.Context, instance, id string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.asked[instance] == id {
		delete(g.asked, instance)
	}
	return nil
}

func (g *guests) Report(_ context.Context, _ string, report orchestrator.Report) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.reports = append(g.reports, report)
	return nil
}

// With --restart-shutdown=guest the guest shuts itself down. A stop by the rack would be a power cut.
func TestPlannedGuestShutsItselfDown(t *testing.T) {
	t.Parallel()
	g := newGuests()
	r := newRestartRig(t, func(o *coretest.Options) { o.Restarts.Shutdown, o.Restarts.Requester = restart.Guest, g })
	g.r = r
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	r.published(t, volume, node)
	if stops, starts := r.restarts(t); stops != 0 || starts != 1 {
		t.Errorf("%d stops and %d starts, want 0 and 1", stops, starts)
	}
	r.restartsDone(t)
	if len(g.asked) > 0 {
		t.Errorf("requests are left: %v", g.asked)
	}
}

// If a node refuses its restart, the error names the node's reason, and nothing is stopped.
func TestPlannedRefusalByNode(t *testing.T) {
	t.Parallel()
	g := newGuests()
	g.refusal = "graceful node shutdown is on: turn it off"
	r := newRestartRig(t, func(o *coretest.Options) { o.Restarts.Shutdown, o.Restarts.Requester = restart.Guest, g })
	g.r = r
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	await.Eventually(t, "the error contains the node's reason", func() bool {
		err := r.Publish(t, volume, node)
		return status.Code(err) == codes.FailedPrecondition && strings.Contains(err.Error(), g.refusal)
	})
	r.wantRestarts(t, 0)
	r.restartsDone(t)
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.reports) == 0 || !g.reports[len(g.reports)-1].Event.Problem {
		t.Errorf("no problem of the node is reported: %v", g.reports)
	}
}

// A controller leaves its own instance to another controller. It restarts nothing before it knows its own instance.
func TestPlannedOwnInstance(t *testing.T) {
	t.Parallel()
	first := newRestartRig(t, func(o *coretest.Options) {
		o.Restarts.Self = func() (string, bool) { return "", false }
	})
	node := first.Node(t, "node-a")
	volume := first.Create(t, "v")
	await.Eventually(t, "the error says that the own instance is unknown", func() bool {
		err := first.Publish(t, volume, node)
		return err != nil && strings.Contains(err.Error(), "does not know yet")
	})
	first.Crash()
	on := func(instance string) *rig {
		restarts := *first.Options.Restarts
		restarts.Self = func() (string, bool) { return instance, true }
		other := first.copy()
		other.Options.Restarts = &restarts
		return other.again(t)
	}
	here := on(node)
	if err := here.Publish(t, volume, node); status.Code(err) != codes.FailedPrecondition {
		t.Fatal(err)
	}
	await.Eventually(t, "the restart is planned", func() bool { return len(here.records(t, "csi-restart-")) == 1 })
	here.wantRestarts(t, 0)
	there := on(here.Node(t, "node-b"))
	here.published(t, volume, node)
	there.wantRestarts(t, 1)
}

// A volume that is unpublished while its node is down for a restart, and published there again, costs no other restart.
func TestPlannedUnpublishDuringRestart(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Rack.StateTime = 300 * time.Millisecond })
	node := r.Node(t, "node-a")
	first, second := r.Create(t, "first"), r.Create(t, "second")
	r.published(t, first, node)
	r.restartsDone(t)
	_, err := r.Sim.Inject(
		t.Context(),
		simtest.Fault{Operation: "instance_start", Kind: simtest.FaultDelay, DelayMillis: 500},
	)
	r.Must(t, err)
	if err := r.Publish(t, second, node); status.Code(err) != codes.FailedPrecondition {
		t.Fatal(err)
	}
	await.Eventually(
		t,
		"the instance is stopped",
		func() bool { return r.runState(t, node) == oxide.InstanceStateStopped },
	)
	r.Must(t, r.Unpublish(t, first, node))
	r.restartsDone(t)
	r.published(t, first, node)
	r.published(t, second, node)
	r.wantRestarts(t, 2)
}

// The record about a deleted disk is deleted, even if another program deleted the disk.
func TestPlannedSweepOfDeletedDisks(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	volume, kept := r.Create(t, "v"), r.Create(t, "kept")
	r.published(t, volume, node)
	r.published(t, kept, node)
	r.restartsDone(t)
	r.Must(t, r.Unpublish(t, volume, node))
	r.Must(t, r.Unpublish(t, kept, node))
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
	_, err := r.SDK.InstanceDiskDetach(
		t.Context(),
		oxide.InstanceDiskDetachParams{Instance: oxide.NameOrId(node), Body: &oxide.DiskPath{Disk: oxide.NameOrId(volume)}},
	)
	r.Must(t, err)
	r.Must(t, r.SDK.DiskDelete(t.Context(), oxide.DiskDeleteParams{Disk: oxide.NameOrId(volume)}))
	r.Crash()
	other := r.again(t)
	await.Eventually(t, "the record of the deleted disk is deleted", func() bool {
		return cmp.Equal(other.records(t, "csi-"), []string{record.Deferrals.Named(coretest.Cluster, kept)})
	})
}

// The RPCs make the calls to the rack that docs/explanation/controller.md lists.
func TestPlannedAPICalls(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Unplanned = true }) // only the RPCs' own calls are counted
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	page, err := os.ReadFile("../../docs/explanation/controller.md")
	r.Must(t, err)
	says := func(what string, call func() error, want codes.Code) {
		t.Helper()
		r.ClearCalls(t)
		if err := call(); status.Code(err) != want {
			t.Fatalf("%s: %v", what, err)
		}
		calls, err := r.Sim.Calls(t.Context())
		r.Must(t, err)
		if line := fmt.Sprintf("| %s | %s |", what, listed(calls.Counts)); !strings.Contains(string(page), line) {
			t.Errorf("docs/explanation/controller.md lacks the line\n%s", line)
		}
	}
	publish := func() error { return r.Publish(t, volume, node) }
	unpublish := func() error { return r.Unpublish(t, volume, node) }
	says("`ControllerPublishVolume`, a restart is needed", publish, codes.FailedPrecondition)
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
	says("`ControllerPublishVolume`, the instance is stopped", publish, codes.OK)
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "running"))
	says("`ControllerUnpublishVolume`, the instance runs", unpublish, codes.OK)
	says("`ControllerPublishVolume`, on the node that still has the disk", publish, codes.OK)
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
	says("`ControllerUnpublishVolume`, the instance is stopped", unpublish, codes.OK)
	list := func(ctx context.Context) error {
		_, err := r.ListVolumes(ctx, &csi.ListVolumesRequest{})
		return err
	}
	says("`ListVolumes`", func() error { return list(t.Context()) }, codes.OK)
	says("`ListVolumes`, for `oxide-csi volume list`", func() error {
		return list(withQuestion(
			t.Context(), rpc.MetadataAskRestarts, rpc.MetadataAskDetails, rpc.MetadataAskNodeNames))
	}, codes.OK)
	says("`DeleteVolume`", func() error { return r.Delete(t, volume) }, codes.OK)
}

// An unpublished volume is never shown as published, neither while its disk is detached nor while it is attached for a
// request. The disks and the records cannot be read in one call.
func TestPlannedUnpublishedIsNeverShown(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	leaving, coming := r.Create(t, "leaving"), r.Create(t, "coming")
	r.published(t, leaving, node)
	r.restartsDone(t)
	r.Must(t, r.Unpublish(t, leaving, node))
	r.Crash() // from here on the test plays the restart
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))

	// meanwhile carries out do while a request of a controller waits, and returns where the volume is shown after that.
	other, gate := r.gated(t)
	meanwhile := func(path string, do func(), shown func() []string) []string {
		held := gate.Hold("GET", path)
		var nodes []string
		var asking sync.WaitGroup
		asking.Go(func() { nodes = shown() })
		held.Entered(t)
		do()
		held.Release()
		asking.Wait()
		return nodes
	}
	shown := meanwhile("/v1/anti-affinity-groups", func() {
		_, err := r.SDK.InstanceDiskDetach(
			t.Context(),
			oxide.InstanceDiskDetachParams{Instance: oxide.NameOrId(node), Body: &oxide.DiskPath{Disk: oxide.NameOrId(leaving)}},
		)
		r.Must(t, err)
		r.Must(
			t,
			r.SDK.AntiAffinityGroupDelete(
				t.Context(),
				oxide.AntiAffinityGroupDeleteParams{
					AntiAffinityGroup: oxide.NameOrId(record.Deferrals.Named(coretest.Cluster, leaving)),
					Project:           coretest.Project,
				},
			),
		)
	}, func() []string {
		one, err := other.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: leaving})
		r.Must(t, err)
		return one.GetStatus().GetPublishedNodeIds()
	})
	if len(shown) > 0 {
		t.Errorf("ControllerGetVolume shows a volume on %v whose disk was being detached", shown)
	}
	shown = meanwhile("/v1/disks", func() {
		_, err := r.SDK.AntiAffinityGroupCreate(
			t.Context(),
			oxide.AntiAffinityGroupCreateParams{Project: coretest.Project, Body: &oxide.AntiAffinityGroupCreate{
				Name: oxide.Name(
					record.Deferrals.Named(coretest.Cluster, coming),
				),
				Description:   fmt.Sprintf(`{"v":1,"cluster":%q,"disk":%q,"instance":%q}`, coretest.Cluster, coming, node),
				Policy:        oxide.AffinityPolicyAllow,
				FailureDomain: oxide.FailureDomainSled,
			}},
		)
		r.Must(t, err)
		r.AttachByHand(t, coming, node)
	}, func() []string {
		list, err := other.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		r.Must(t, err)
		for _, entry := range list.GetEntries() {
			if entry.GetVolume().GetVolumeId() == coming {
				return entry.GetStatus().GetPublishedNodeIds()
			}
		}
		return nil
	})
	if len(shown) > 0 {
		t.Errorf("ListVolumes shows a volume on %v whose disk was being attached", shown)
	}
}

// An attached disk is published only if the records show that no restart detaches it.
func TestPlannedPublishNeedsTheRecords(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	r.published(t, volume, node)
	r.restartsDone(t)
	r.Must(t, r.Unpublish(t, volume, node))
	r.Crash()
	_, err := r.Sim.Inject(
		t.Context(),
		simtest.Fault{
			Operation: "anti_affinity_group_list",
			Kind:      simtest.FaultStatus,
			Status:    500,
			ErrorCode: "Internal",
			Message:   "Internal Server Error",
			Count:     new(int),
		},
	)
	r.Must(t, err)
	if err := r.Publish(t, volume, node); err == nil {
		t.Error("a volume was published without the records")
	}
	r.Must(t, r.Sim.ClearFaults(t.Context()))
	r.Must(t, r.Publish(t, volume, node))
	if got := r.records(t, "csi-"); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
}

// Two volumes that swap their nodes wait for each other's node.
func TestPlannedSwap(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	a, b := r.Node(t, "node-a"), r.Node(t, "node-b")
	one, other := r.Create(t, "one"), r.Create(t, "other")
	r.published(t, one, a)
	r.published(t, other, b)
	r.Must(t, r.Unpublish(t, one, a))
	r.Must(t, r.Unpublish(t, other, b))
	var publishing sync.WaitGroup
	publishing.Go(func() { r.published(t, one, b) })
	publishing.Go(func() { r.published(t, other, a) })
	publishing.Wait()
}

// A volume is still on its old node when it is requested on a node that is being restarted. It is published later.
func TestPlannedRequestDuringRestart(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Rack.StateTime = 300 * time.Millisecond })
	from, to := r.Node(t, "node-a"), r.Node(t, "node-b")
	moving, other := r.Create(t, "moving"), r.Create(t, "other")
	r.published(t, moving, from)
	r.restartsDone(t)
	r.Must(t, r.Unpublish(t, moving, from))
	if err := r.Publish(t, other, to); status.Code(err) != codes.FailedPrecondition {
		t.Fatal(err)
	}
	await.Eventually(
		t,
		"the new node is stopping",
		func() bool { return r.runState(t, to) == oxide.InstanceStateStopping },
	)
	if err := r.Publish(t, moving, to); status.Code(err) != codes.FailedPrecondition {
		t.Fatal(err)
	}
	r.published(t, moving, to)
	r.published(t, other, to)
}
