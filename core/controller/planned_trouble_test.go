// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/record"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// stop stops an instance as its owner does.
func (r *rig) stop(t *testing.T, node string) {
	t.Helper()
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
}

// unpublishedOn creates a volume that is unpublished while its disk is still attached to a running node.
func (r *rig) unpublishedOn(t *testing.T, name, node string) string {
	t.Helper()
	volume := r.Create(t, name)
	r.stop(t, node)
	r.Must(t, r.Publish(t, volume, node))
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "running"))
	r.Must(t, r.Unpublish(t, volume, node))
	if got := r.Holder(t, volume); got != node {
		t.Fatalf("the disk is on %q", got)
	}
	return volume
}

// During a rolling update a controller in attach mode hot publishes a volume whose detach another one has deferred.
// The next controller in attach mode restart must not detach it.
func TestPlannedHotPublishKeepsItsDisk(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	hot := r.copy()
	hot.Options.Restarts = nil
	hot.Start(t)
	volume := r.unpublishedOn(t, "v", node)
	hot.Must(t, hot.Publish(t, volume, node))
	if got := r.records(t, "csi-defer-"); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
	// A restart of the instance detaches what was unpublished.
	r.published(t, r.Create(t, "w"), node)
	r.restartsDone(t)
	if got := r.Holder(t, volume); got != node {
		t.Errorf("the published disk is on %q", got)
	}
}

// The same holds for a disk that a controller in attach mode hot has detached and attached again.
func TestPlannedHotAttachKeepsItsDisk(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	hot := r.copy()
	hot.Options.Restarts = nil
	hot.Start(t)
	volume := r.unpublishedOn(t, "v", node)
	r.stop(t, node)
	hot.Must(t, hot.Unpublish(t, volume, node))
	if holder := r.Holder(t, volume); holder != "" {
		t.Fatalf("the disk is still on %q", holder)
	}
	hot.Must(t, hot.Publish(t, volume, node))
	if got := r.records(t, "csi-defer-"); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
	_, err := r.SDK.InstanceStart(t.Context(), oxide.InstanceStartParams{Instance: oxide.NameOrId(node)})
	r.Must(t, err)
	await.Eventually(t, "the instance runs", func() bool { return r.runState(t, node) == oxide.InstanceStateRunning })
	// A restart of the instance detaches what was unpublished.
	r.published(t, r.Create(t, "w"), node)
	r.restartsDone(t)
	if got := r.Holder(t, volume); got != node {
		t.Errorf("the published disk is on %q", got)
	}
}

// An unpublished volume can be deleted at once if the owner stops the instance that still has its disk.
func TestPlannedDeleteOnStopped(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	volume := r.unpublishedOn(t, "v", node)
	r.stop(t, node)
	r.Must(t, r.Delete(t, volume))
	if got := r.records(t, "csi-"); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
	r.wantRestarts(t, 0)
}

// Volumes move between instances that their owner has stopped, without any restart.
func TestPlannedMoveOnStopped(t *testing.T) {
	t.Parallel()
	for name, nextStart := range map[string]func(time.Time) time.Time{"at any time": nil, "not now": inAnHour} {
		t.Run(name, func(t *testing.T) {
			r := newRestartRig(t, func(o *coretest.Options) { o.Restarts.NextStart, o.Restarts.CoolDown = nextStart, time.Hour })
			from, to := r.Node(t, "node-a"), r.Node(t, "node-b")
			volume := r.unpublishedOn(t, "v", from)
			r.stop(t, from)
			r.stop(t, to)
			r.published(t, volume, to)
			// The engine may just be planning a restart for the fulfilled request. It then drops the plan.
			await.Eventually(t, "no records are left", func() bool { return len(r.records(t, "csi-")) == 0 })
			r.wantRestarts(t, 0)
		})
	}
}

// A restart that was planned and handed over is not started by a controller that must not restart anything.
func TestPlannedHandoverRespectsTheReceiver(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*restart.Options, string){
		"hot":          func(o *restart.Options, _ string) { o.MaxDown = 0 },
		"closed":       func(o *restart.Options, _ string) { o.NextStart = inAnHour },
		"self unknown": func(o *restart.Options, _ string) { o.Self = func() (string, bool) { return "", false } },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// A controller that does not know its own instance waits for the lease, which passes in real time.
			first := newRestartRig(t, func(o *coretest.Options) { o.Restarts.Lease = 2 * time.Second })
			node := first.Node(t, "node-a")
			volume := first.Create(t, "v")
			first.Crash()
			on := func(change func(*restart.Options)) *rig {
				restarts := *first.Options.Restarts
				change(&restarts.Options)
				other := first.copy()
				other.Options.Restarts = &restarts
				return other.again(t)
			}
			here := on(func(o *restart.Options) { o.Self = func() (string, bool) { return node, true } })
			if err := here.Publish(t, volume, node); status.Code(err) != codes.FailedPrecondition {
				t.Fatal(err)
			}
			await.Eventually(
				t,
				"the restart is planned and handed over",
				func() bool { return len(here.records(t, "csi-restart-")) == 1 },
			)
			here.Crash()
			there := on(func(o *restart.Options) { change(o, node) })
			for range 20 {
				if err := there.Publish(t, volume, node); status.Code(err) != codes.FailedPrecondition {
					t.Fatal(err)
				}
			}
			there.restartsDone(t)
			there.wantRestarts(t, 0)
			if got := there.Holder(t, volume); got != "" {
				t.Errorf("the disk is on %s", got)
			}
		})
	}
}

// beforeAttach is a rig whose engine stops an instance, to attach the disk of a volume to it.
func beforeAttach(t *testing.T) (r *rig, volume, node string) {
	t.Helper()
	r = newRestartRig(t, func(o *coretest.Options) { o.Rack.StateTime = 500 * time.Millisecond })
	node, volume = r.Node(t, "node-a"), r.Create(t, "v")
	coretest.WantCode(t, r.Publish(t, volume, node), codes.FailedPrecondition)
	await.Eventually(
		t,
		"the instance is stopping",
		func() bool { return r.runState(t, node) == oxide.InstanceStateStopping },
	)
	return r, volume, node
}

// A disk that is busy with a snapshot while its instance is down is attached in the same restart.
func TestPlannedSnapshotDuringRestart(t *testing.T) {
	t.Parallel()
	r, volume, node := beforeAttach(t)
	r.Must(t, r.Sim.SetDiskState(t.Context(), volume, "maintenance"))
	r.ClearCalls(t)
	await.Eventually(t, "the engine changes the disks", func() bool { return r.Calls(t)["instance_disk_list"] > 1 })
	r.Must(t, r.Sim.SetDiskState(t.Context(), volume, "detached"))
	r.published(t, volume, node)
	if stops, starts := r.restarts(t); stops != 0 || starts != 1 {
		t.Errorf("%d stops and %d starts since the stop, want 0 and 1", stops, starts)
	}
}

// A snapshot of the disk is made just while the engine attaches it. The rack refuses that, and a look afterwards shows
// a free disk.
func TestPlannedSnapshotDuringAttach(t *testing.T) {
	t.Parallel()
	r, volume, node := beforeAttach(t)
	_, err := r.Sim.Inject(t.Context(), simtest.Fault{
		Operation: "instance_disk_attach", Kind: simtest.FaultStatus, Status: 400, ErrorCode: "InvalidRequest",
		Message: fmt.Sprintf("cannot attach disk %q: invalid state maintenance", r.Disk(t, volume).Name), Count: new(1),
	})
	r.Must(t, err)
	r.ClearCalls(t)
	await.Eventually(t, "the instance runs again", func() bool {
		_, starts := r.restarts(t)
		return starts > 0
	})
	if got := r.Holder(t, volume); got != node {
		t.Fatalf("the instance was started, and the disk is on %q", got)
	}
	r.published(t, volume, node)
	if stops, starts := r.restarts(t); stops != 0 || starts != 1 {
		t.Errorf("%d stops and %d starts since the stop, want 0 and 1", stops, starts)
	}
}

// A stopped instance can have no more disks than a running one.
func TestPlannedFullOnStopped(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.MaxDisks = 3 })
	node := r.Node(t, "node-a")
	unused := r.unpublishedOn(t, "unused", node)
	r.stop(t, node)
	first, second, third := r.Create(t, "first"), r.Create(t, "second"), r.Create(t, "third")
	r.Must(t, r.Publish(t, first, node))
	r.published(t, second, node)
	if got := r.Holder(t, unused); got != "" {
		t.Errorf("the unpublished disk is still on %s", got)
	}
	if err := r.Publish(t, third, node); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("publish without a free slot: %v", err)
	}
	r.wantRestarts(t, 0)
}

// With --max-disks above the rack's limit, one restart finds out that the disk has no room. The answer then says so,
// and no instance is restarted for that disk again.
func TestPlannedRackAllowsFewerDisks(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.MaxDisks, o.Rack.MaxDisks = 12, 2 })
	node := r.Node(t, "node-a")
	r.published(t, r.Create(t, "first"), node)
	second := r.Create(t, "second")
	var answer error
	await.Eventually(t, "the answer names --max-disks", func() bool {
		if stops, _ := r.restarts(t); stops > 2 {
			t.Fatal("the instance was restarted again for the same disk")
		}
		answer = r.Publish(t, second, node)
		return strings.Contains(fmt.Sprint(answer), "fewer than --max-disks=12")
	})
	coretest.WantCode(t, answer, codes.FailedPrecondition, "fewer than --max-disks=12")
	// The engine plans the restart for this volume after it has looked at the second one again.
	r.published(t, r.Create(t, "elsewhere"), r.Node(t, "node-b"))
	coretest.WantCode(t, r.Publish(t, second, node), codes.FailedPrecondition, "fewer than --max-disks=12")
	r.restartsDone(t)
	r.wantRestarts(t, 3)
}

// While a restart is under way, errors no longer name the reason that delayed it.
func TestPlannedErrorIsCurrent(t *testing.T) {
	t.Parallel()
	var open atomic.Bool
	r := newRestartRig(t, func(o *coretest.Options) {
		o.Rack.StateTime = 500 * time.Millisecond
		o.Restarts.NextStart = func(now time.Time) time.Time {
			if open.Load() {
				return now
			}
			return now.Add(time.Hour)
		}
	})
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	await.Eventually(t, "the error says what the volume waits for", func() bool {
		return strings.Contains(fmt.Sprint(r.Publish(t, volume, node)), "--restart-hours")
	})
	open.Store(true)
	await.Eventually(
		t,
		"the instance is stopping",
		func() bool { return r.runState(t, node) == oxide.InstanceStateStopping },
	)
	if err := r.Publish(t, volume, node); err == nil || strings.Contains(err.Error(), "--restart-hours") {
		t.Errorf("while the instance is stopping: %v", err)
	}
}

// An unpublished volume that is still attached can be copied like any other.
func TestPlannedCopyOfUnpublished(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	volume := r.unpublishedOn(t, "v", node)
	snapshot, err := r.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{SourceVolumeId: volume, Name: "s"})
	r.Must(t, err)
	request := coretest.CreateRequest("clone")
	request.VolumeContentSource = &csi.VolumeContentSource{
		Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: volume}},
	}
	_, err = r.CreateVolume(t.Context(), request)
	r.Must(t, err)
	_, err = r.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshot.GetSnapshot().GetSnapshotId()})
	r.Must(t, err)
	if got := r.publishedNodes(t, volume); len(got) > 0 {
		t.Errorf("published on %v", got)
	}
	r.wantRestarts(t, 0)
}

// An instance that is neither running nor stopped is left alone until its state changes.
func TestPlannedMigrating(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "migrating"))
	await.Eventually(t, "the error says what the volume waits for", func() bool {
		err := r.Publish(t, volume, node)
		coretest.WantCode(t, err, codes.FailedPrecondition)
		return strings.Contains(err.Error(), "it is migrating")
	})
	r.wantRestarts(t, 0)
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "running"))
	r.published(t, volume, node)
	r.wantRestarts(t, 1)
}

// A disk that fails during a restart delays neither the other disks nor the instance.
func TestPlannedFaulted(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Rack.StateTime = 500 * time.Millisecond })
	node := r.Node(t, "node-a")
	bad, good := r.Create(t, "bad"), r.Create(t, "good")
	for _, volume := range []string{bad, good} {
		coretest.WantCode(t, r.Publish(t, volume, node), codes.FailedPrecondition)
	}
	await.Eventually(
		t,
		"the instance is stopping",
		func() bool { return r.runState(t, node) == oxide.InstanceStateStopping },
	)
	r.Must(t, r.Sim.SetDiskState(t.Context(), bad, "faulted"))
	r.published(t, good, node)
	r.restartsDone(t)
	coretest.WantCode(t, r.Publish(t, bad, node), codes.Internal)
	r.wantRestarts(t, 1)
}

// An instance that is deleted during its restart blocks no other restart.
func TestPlannedInstanceDeleted(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Rack.StateTime = 100 * time.Millisecond })
	node, other := r.Node(t, "node-a"), r.Node(t, "node-b")
	volume := r.Create(t, "v")
	_, err := r.Sim.Inject(t.Context(), simtest.Fault{
		Operation: "instance_start", Kind: simtest.FaultStatus, Status: http.StatusServiceUnavailable,
		Count: new(0),
	})
	r.Must(t, err)
	coretest.WantCode(t, r.Publish(t, volume, node), codes.FailedPrecondition)
	await.Eventually(t, "the instance can be deleted", func() bool {
		return r.SDK.InstanceDelete(t.Context(), oxide.InstanceDeleteParams{Instance: oxide.NameOrId(node)}) == nil
	})
	r.Must(t, r.Sim.ClearFaults(t.Context()))
	r.restartsDone(t)
	coretest.WantCode(t, r.Publish(t, volume, node), codes.NotFound)
	r.published(t, volume, other)
}

// A restart ends, and costs no second one, whichever calls the rack fails.
func TestPlannedFailingRack(t *testing.T) {
	t.Parallel()
	for _, operation := range []string{
		"instance_stop", "instance_start", "instance_view", "instance_disk_list", "instance_disk_attach", "disk_view",
		"anti_affinity_group_list", "anti_affinity_group_create", "anti_affinity_group_update", "anti_affinity_group_delete",
	} {
		for _, kind := range []string{"500", "lost"} {
			t.Run(operation+" "+kind, func(t *testing.T) {
				t.Parallel()
				r := newRestartRig(t)
				node := r.Node(t, "node-a")
				volume, leaving := r.Create(t, "v"), r.unpublishedOn(t, "leaving", node)
				fault := simtest.Fault{Operation: operation, Kind: kind, Count: new(2 * coretest.Attempts)}
				if code, err := strconv.Atoi(kind); err == nil {
					fault.Kind, fault.Status, fault.Message = simtest.FaultStatus, code, "no"
				}
				_, err := r.Sim.Inject(t.Context(), fault)
				r.Must(t, err)
				await.Eventually(t, "the volume is published", func() bool { return r.Publish(t, volume, node) == nil })
				r.restartsDone(t)
				if got := r.Holder(t, leaving); got != "" {
					t.Errorf("the unpublished disk is still on %s", got)
				}
				if got := r.runState(t, node); got != oxide.InstanceStateRunning {
					t.Errorf("the instance is %s", got)
				}
				if got := r.publishedNodes(t, volume); !cmp.Equal(got, []string{node}) {
					t.Errorf("published on %v", got)
				}
			})
		}
	}
}

// Two clusters in one project restart only their own instances and ignore each other's records.
func TestPlannedTwoClusters(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	other := r.copy()
	other.Options.Cluster = strings.Repeat("c", 63)
	other.Start(t)
	node, theirs := r.Node(t, "node-a"), r.Node(t, "node-b")
	volume, unused := other.Create(t, "v"), other.unpublishedOn(t, "unused", theirs)
	own := r.unpublishedOn(t, "own", node)
	other.published(t, volume, theirs)
	other.restartsDone(t)
	if got := r.Holder(t, own); got != node {
		t.Errorf("the other cluster's restart has detached this cluster's disk: it is on %q", got)
	}
	if got := r.Holder(t, unused); got != "" {
		t.Errorf("the unpublished disk is still on %s", got)
	}
	if got := r.records(t, "csi-"); !cmp.Equal(got, []string{record.Deferrals.Named(coretest.Cluster, own)}) {
		t.Errorf("records: %v", got)
	}
	other.wantRestarts(t, 1)
}

// The boot disk is never published or detached.
func TestPlannedBootDisk(t *testing.T) {
	for _, grace := range []time.Duration{0, time.Hour} {
		t.Run(grace.String(), func(t *testing.T) {
			t.Parallel()
			r := newRestartRig(t, func(o *coretest.Options) { o.DetachGrace = grace })
			node := r.Node(t, "node-a")
			instance, err := r.SDK.InstanceView(t.Context(), oxide.InstanceViewParams{Instance: oxide.NameOrId(node)})
			r.Must(t, err)
			boot := instance.BootDiskId
			coretest.WantCode(t, r.Publish(t, boot, node), codes.FailedPrecondition)
			r.Must(t, r.Unpublish(t, boot, node))
			// Otherwise the planner would count with the disk's slot.
			if records := r.records(t, "csi-"); len(records) > 0 {
				t.Errorf("the detach of a boot disk is recorded: %v", records)
			}
			volume := r.Create(t, "v")
			r.published(t, volume, node)
			r.restartsDone(t)
			if got := r.Holder(t, boot); got != node {
				t.Errorf("the boot disk is on %q", got)
			}
		})
	}
}

// A change to attach mode hot during a restart starts the instance again. After it no record is left, so that no later
// restart detaches a volume that was published in attach mode hot.
func TestPlannedThenHot(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Rack.StateTime = 500 * time.Millisecond })
	node, other := r.Node(t, "node-a"), r.Node(t, "node-b")
	unused, volume := r.unpublishedOn(t, "unused", other), r.Create(t, "v")
	coretest.WantCode(t, r.Publish(t, volume, node), codes.FailedPrecondition)
	await.Eventually(
		t,
		"the instance is stopping",
		func() bool { return r.runState(t, node) == oxide.InstanceStateStopping },
	)
	r.Crash()
	hot := r.copy()
	hot.Options.Restarts = nil
	hot.Options.CleanUpRestarts = &restart.Options{
		Lease:       time.Second,
		Poll:        10 * time.Millisecond,
		Idle:        20 * time.Millisecond,
		HaltTimeout: time.Minute,
	}
	hot.Start(t)
	await.Eventually(t, "no records are left", func() bool { return len(r.records(t, "csi-")) == 0 })
	if got := r.runState(t, node); got != oxide.InstanceStateRunning {
		t.Errorf("the instance is %s", got)
	}
	r.Must(t, hot.Publish(t, volume, node))
	r.Must(t, hot.Publish(t, unused, other))
}

// A rack with hot-plug needs no restart, and an answer comes after the change of the disk.
func TestPlannedHotplug(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) {
		o.Rack.Hotplug, o.Rack.HotplugAsync, o.Rack.Latency = true, true, 30*time.Millisecond
	})
	node, other := r.Node(t, "node-a"), r.Node(t, "node-b")
	volume := r.Create(t, "v")
	r.Must(t, r.Publish(t, volume, node))
	if got := r.publishedNodes(t, volume); !cmp.Equal(got, []string{node}) {
		t.Errorf("published on %v", got)
	}
	r.Must(t, r.Unpublish(t, volume, node))
	r.Must(t, r.Sim.Set(t.Context(), simtest.Settings{LatencyMillis: new(int)})) // read the disk without delay
	if got := r.Disk(t, volume).State.State(); got != oxide.DiskStateStateDetached {
		t.Errorf("the disk is %s", got)
	}
	r.Must(t, r.Publish(t, volume, other))
	r.wantRestarts(t, 0)
	if got := r.records(t, "csi-"); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
}

// A rack accepts a detach, and the disk goes back to its instance. Nothing would detach it later, so the unpublish is
// no success.
func TestDetachThatIsUndone(t *testing.T) {
	t.Parallel()
	hot := func(o *coretest.Options) { o.Rack.Hotplug, o.Rack.HotplugAsync = true, true }
	for mode, r := range map[string]*rig{"hot": newRig(t, hot), "restart": newRestartRig(t, hot)} {
		node, volume := r.Node(t, "node-a"), r.Create(t, "v")
		r.Must(t, r.Publish(t, volume, node))
		other, gate := r.gated(t)
		detach := gate.Hold("POST", "/v1/instances/")
		answer := make(chan error, 1)
		go func() { answer <- other.Unpublish(t, volume, node) }()
		detach.Entered(t)
		look := gate.Hold("GET", "/v1/disks/")
		detach.Release()
		look.Entered(t)
		await.Eventually(t, "the disk is detached", func() bool { return r.Holder(t, volume) == "" })
		r.AttachByHand(t, volume, node)
		look.Release()
		t.Log("attach mode", mode)
		coretest.WantCode(t, <-answer, codes.Unavailable, "accepted the detach")
	}
}

// drainer is an orchestrator that drains a node first.
type drainer struct {
	*guests

	state            sync.Mutex
	left             []string
	drains, undrains int
}

func (d *drainer) Drain(context.Context, string, string) ([]string, error) {
	d.state.Lock()
	defer d.state.Unlock()
	d.drains++
	return d.left, nil
}

func (d *drainer) Undrain(context.Context, string, string) error {
	d.state.Lock()
	defer d.state.Unlock()
	d.undrains++
	return nil
}

func (d *drainer) evictAll() {
	d.state.Lock()
	defer d.state.Unlock()
	d.left = nil
}

// A node that is not drained in time is not stopped, and is made schedulable again. Once it is empty, it is restarted.
func TestPlannedDrain(t *testing.T) {
	t.Parallel()
	d := &drainer{guests: newGuests(), left: []string{"default/web-0 (PodDisruptionBudget web)"}}
	r := newRestartRig(t, func(o *coretest.Options) {
		o.Restarts.Shutdown, o.Restarts.Requester, o.Restarts.Drainer = restart.Drain, d, d
		o.Restarts.HaltTimeout = 300 * time.Millisecond
	})
	d.guests.r = r
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	await.Eventually(t, "the error names the pods that stay", func() bool {
		err := r.Publish(t, volume, node)
		coretest.WantCode(t, err, codes.FailedPrecondition)
		return strings.Contains(err.Error(), "web-0")
	})
	r.wantRestarts(t, 0)
	d.guests.mu.Lock()
	asked := len(d.asked)
	d.guests.mu.Unlock()
	if asked > 0 {
		t.Error("the guest was asked to shut down before the node was empty")
	}
	await.Eventually(t, "the node is schedulable again", func() bool {
		d.state.Lock()
		defer d.state.Unlock()
		return d.undrains > 0
	})
	d.evictAll()
	r.published(t, volume, node)
	r.restartsDone(t)
	if stops, starts := r.restarts(t); stops != 0 || starts != 1 {
		t.Errorf("%d stops and %d starts, want 0 and 1", stops, starts)
	}
}

// A node takes work again when its restart ends, also if the drain was switched off meanwhile.
func TestPlannedDrainIsSwitchedOff(t *testing.T) {
	t.Parallel()
	d := &drainer{guests: newGuests(), left: []string{"default/web-0 (PodDisruptionBudget web)"}}
	r := newRestartRig(t, func(o *coretest.Options) {
		o.Restarts.Shutdown, o.Restarts.Requester, o.Restarts.Drainer = restart.Drain, d, d
		o.Restarts.Lease = time.Second
	})
	d.guests.r = r
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	coretest.WantCode(t, r.Publish(t, volume, node), codes.FailedPrecondition)
	await.Eventually(t, "the node is drained", func() bool {
		d.state.Lock()
		defer d.state.Unlock()
		return d.drains > 0
	})
	r.Crash()
	r.Options.Restarts.Shutdown = restart.Guest
	r.Start(t)
	r.published(t, volume, node)
	r.restartsDone(t)
	d.state.Lock()
	defer d.state.Unlock()
	if d.undrains == 0 {
		t.Error("the node is still drained")
	}
}

// An instance whose attach request ends while it is stopping is started again, and the disk stays detached.
func TestPlannedUnpublishEndsTheRequest(t *testing.T) {
	t.Parallel()
	r, volume, node := beforeAttach(t)
	r.Must(t, r.Unpublish(t, volume, node))
	r.restartsDone(t)
	if got := r.runState(t, node); got != oxide.InstanceStateRunning {
		t.Errorf("the instance is %s", got)
	}
	if got := r.Holder(t, volume); got != "" {
		t.Errorf("the disk is on %s", got)
	}
	r.Must(t, r.Delete(t, volume))
}

// With --restart-wait a publish still answers before the caller's deadline. This needs real time, because the deadline
// is gRPC's.
func TestPlannedWaitEndsBeforeTheDeadline(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Restarts.Wait, o.Restarts.NextStart = time.Minute, inAnHour })
	volume, node := r.Create(t, "v"), r.Node(t, "node-a")
	_, err := r.ControllerPublishVolume(
		coretest.WithTimeout(t, 3*time.Second),
		&csi.ControllerPublishVolumeRequest{VolumeId: volume, NodeId: node, VolumeCapability: coretest.MountWriter()},
	)
	coretest.WantCode(t, err, codes.FailedPrecondition, "--restart-hours")
}

// If the rack has no room for the instance, the start is retried, and the problem is reported.
func TestPlannedNoRoomOnTheRack(t *testing.T) {
	t.Parallel()
	g := newGuests()
	r := newRestartRig(t, func(o *coretest.Options) { o.Restarts.Shutdown, o.Restarts.Requester = restart.Guest, g })
	g.r = r
	volume, node := r.Create(t, "v"), r.Node(t, "node-a")
	times := 20
	_, err := r.Sim.Inject(t.Context(), simtest.Fault{
		Operation: "instance_start",
		Kind:      simtest.FaultStatus,
		Status:    507,
		ErrorCode: "InsufficientCapacity",
		Count:     &times,
		Message:   "Insufficient capacity: Failed to place instance: Could not find any valid sled on which this instance can be placed",
	})
	r.Must(t, err)
	await.Eventually(t, "the error names the problem", func() bool {
		err := r.Publish(t, volume, node)
		return err != nil && strings.Contains(err.Error(), "Could not find any valid sled")
	})
	r.published(t, volume, node)
	g.mu.Lock()
	defer g.mu.Unlock()
	if !slices.ContainsFunc(g.reports, func(report orchestrator.Report) bool {
		return report.Event == orchestrator.EventRestartNotStarted
	}) {
		t.Errorf("the problem is not reported: %v", g.reports)
	}
}

// One controller restarts instances of several racks. A rack that does not answer does not block the others.
func TestPlannedOnSeveralRacks(t *testing.T) {
	t.Parallel()
	site := func(name string) (*rig, *rack.Client) {
		r := newRestartRig(t, func(o *coretest.Options) { o.RackName, o.Unplanned = name, true })
		client, err := rack.New(
			rack.Config{
				Name:    name,
				Host:    r.Sim.Host,
				Project: coretest.Project,
				Token:   func() (string, error) { return coretest.Token, nil },
			},
		)
		r.Must(t, err)
		return r, client
	}
	east, eastClient := site("east")
	west, westClient := site("west")
	both := east.copy()
	both.Options.Unplanned = false
	both.StartWith(t, eastClient, westClient)
	at := func(site *rig) *rig { // a rig that looks at the rack of a site
		r := both.copy()
		r.Sim, r.SDK = site.Sim, site.SDK
		return r
	}
	first, second := east.Create(t, "east"), west.Create(t, "west")
	at(east).published(t, first, east.Node(t, "node-a"))
	at(west).published(t, second, west.Node(t, "node-a"))
	east.wantRestarts(t, 1)
	west.wantRestarts(t, 1)
	for site, volume := range map[*rig]string{east: first, west: second} {
		if got := at(site).publishedNodes(t, volume); !cmp.Equal(got, []string{site.Node(t, "node-a")}) {
			t.Errorf("published on %v", got)
		}
	}
	at(east).restartsDone(t)
	at(west).restartsDone(t)
	_, err := east.Sim.Inject(
		t.Context(),
		simtest.Fault{Operation: "*", Kind: simtest.FaultStatus, Status: 503, Message: "no", Count: new(1000)},
	)
	east.Must(t, err)
	third := west.Create(t, "third")
	at(west).published(t, third, west.Node(t, "node-b"))
	if _, err := both.ListVolumes(t.Context(), &csi.ListVolumesRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("a list without one of the racks: %v", err)
	}
}

// A rack with the hot-plug of the prototype shows a disk as attached and fails to plug it in. The volume is not
// published before the guest has the disk: one planned restart gives it to the guest. Another controller finds that out
// from the rack.
func TestPlannedDiskWithoutADevice(t *testing.T) {
	t.Parallel()
	for name, restarted := range map[string]bool{"one controller": false, "a restarted controller": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testDiskWithoutADevice(t, restarted)
		})
	}
}

func testDiskWithoutADevice(t *testing.T, restarted bool) {
	t.Helper()
	r := newRestartRig(t, func(o *coretest.Options) {
		o.Rack.AttachFirst, o.Rack.NoUnplug = true, true
		o.Rack.PlugFails = 1
	})
	node, volume := r.Node(t, "node-a"), r.Create(t, "v")
	coretest.WantCode(
		t, r.Publish(t, volume, node), codes.FailedPrecondition, "failed to give it to the guest", "[RestartPlanned]")
	if got := r.Holder(t, volume); got != node {
		t.Fatalf("the disk is on %q", got)
	}
	if restarted {
		r.Crash()
		r = r.again(t)
		coretest.WantCode(
			t, r.Publish(t, volume, node), codes.FailedPrecondition, "failed to give it to the guest", "[RestartPlanned]")
	}
	for end := time.Now().Add(20 * time.Second); r.Publish(t, volume, node) != nil; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("no restart gives the disk to the guest")
		}
	}
	r.restartsDone(t)
	r.wantRestarts(t, 1)
	// A disk that the guest gets costs no restart.
	r.Must(t, r.Publish(t, r.Create(t, "second"), node))
	r.wantRestarts(t, 1)
	// This rack does not unplug: the detach waits for a restart, and none is made for it alone.
	r.Must(t, r.Unpublish(t, volume, node))
	if got := r.Holder(t, volume); got != node {
		t.Errorf("the disk is on %q", got)
	}
	r.wantRestarts(t, 1)
}

// On a rack that plugs and does not unplug, a volume that moves costs one restart, of the instance that it leaves.
func TestPlannedMoveOnARackThatDoesNotUnplug(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) {
		o.Rack.AttachFirst, o.Rack.NoUnplug = true, true
		o.Restarts.Wait = 0 // the orchestrator is slower than the engine
	})
	from, to, volume := r.Node(t, "node-a"), r.Node(t, "node-b"), r.Create(t, "v")
	r.Must(t, r.Publish(t, volume, from))
	r.Must(t, r.Unpublish(t, volume, from))
	coretest.WantCode(t, r.Publish(t, volume, to), codes.FailedPrecondition, "[RestartPlanned]", from)
	await.Eventually(t, "the disk is free", func() bool { return r.Holder(t, volume) == "" })
	r.restartsDone(t)
	time.Sleep(20 * r.Options.Restarts.Idle) // in which nothing is restarted for it
	r.Must(t, r.Publish(t, volume, to))
	r.wantRestarts(t, 1)
	if got := r.records(t, "csi-"); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
}

// Attach mode hot says what waits on such a rack, and what ends it.
func TestDetachOnARackThatDoesNotUnplug(t *testing.T) {
	t.Parallel()
	r := newRig(t, func(o *coretest.Options) { o.Rack.AttachFirst, o.Rack.NoUnplug = true, true })
	node, volume := r.Node(t, "node-a"), r.Create(t, "v")
	r.Must(t, r.Publish(t, volume, node))
	coretest.WantCode(t, r.Unpublish(t, volume, node), codes.FailedPrecondition, "cannot detach volume "+volume,
		"this rack detaches disks only while the instance is stopped", "[RackHasNoHotplug]")
	coretest.WantCode(t, r.Publish(t, volume, r.Node(t, "node-b")), codes.FailedPrecondition)
	r.stop(t, node)
	await.Eventually(t, "the disk is detached", func() bool { return r.Unpublish(t, volume, node) == nil })
	r.Must(t, r.Publish(t, volume, r.Node(t, "node-b")))
}

// An instance that runs since before the rack could hot-plug needs one restart.
func TestPlannedInstanceOlderThanHotplug(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node, volume := r.Node(t, "node-a"), r.Create(t, "v")
	r.Must(t, r.Sim.Set(t.Context(), simtest.Settings{Hotplug: "attach-first"}))
	coretest.WantCode(t, r.Publish(t, volume, node), codes.FailedPrecondition, "[RestartPlanned]")
	r.published(t, volume, node)
	r.restartsDone(t)
	r.Must(t, r.Publish(t, r.Create(t, "second"), node))
	r.wantRestarts(t, 1)
}

// A start that the rack refuses for the quota shows starting first, and may leave the instance failed. The engine goes
// on until the instance runs.
func TestPlannedStartIsRefusedForTheQuota(t *testing.T) {
	t.Parallel()
	for _, refusal := range []string{"quota", "failed"} {
		t.Run(refusal, func(t *testing.T) {
			t.Parallel()
			r := newRestartRig(t, func(o *coretest.Options) { o.Rack.StartRefusal = refusal })
			node, volume := r.Node(t, "node-a"), r.Create(t, "v")
			coretest.WantCode(t, r.Publish(t, volume, node), codes.FailedPrecondition)
			await.Eventually(t, "the rack refuses a start twice", func() bool {
				_, starts := r.restarts(t)
				return starts >= 2
			})
			r.Must(t, r.Sim.Set(t.Context(), simtest.Settings{StartRefusal: new("")}))
			r.published(t, volume, node)
			r.restartsDone(t)
			if got := r.runState(t, node); got != oxide.InstanceStateRunning {
				t.Errorf("the instance is %s", got)
			}
		})
	}
}

// starterTime is how long others start the instance in TestPlannedBesideAStarter.
var starterTime = flag.Duration("starter", 6*time.Second, "how `long` others start a stopped instance")

// haltingOrchestrator has the node of one instance, whose guest halts as soon as it is asked to.
type haltingOrchestrator struct {
	sim      *simtest.Sim
	instance string
	halts    atomic.Int64

	mu sync.Mutex
	// asked is the ID of the last restart, and run since when the instance ran then.
	asked string
	run   time.Time
}

// runsSince returns since when the instance runs. It is zero if the instance does not run.
func (o *haltingOrchestrator) runsSince(ctx context.Context) (time.Time, error) {
	list, err := o.sim.ListInstances(ctx)
	for _, i := range list {
		if i.ID == o.instance && i.RunState == rack.Running {
			return i.RunStateUpdated, nil
		}
	}
	return time.Time{}, err
}

func (o *haltingOrchestrator) Request(ctx context.Context, _, id string) (err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.asked == id {
		return nil
	}
	if o.run, err = o.runsSince(ctx); err != nil {
		return err
	}
	o.asked = id
	o.halts.Add(1)
	return o.sim.Halt(ctx, o.instance)
}

func (o *haltingOrchestrator) Reply(ctx context.Context, _, id string) (orchestrator.RestartReply, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.asked != id {
		return orchestrator.RestartReply{}, nil
	}
	run, err := o.runsSince(ctx)
	if !run.IsZero() && !run.Equal(o.run) {
		return orchestrator.RestartReply{State: orchestrator.RestartBack}, nil
	}
	return orchestrator.RestartReply{State: orchestrator.RestartAccepted}, err
}

func (o *haltingOrchestrator) Withdraw(ctx context.Context, instance, id string) (orchestrator.RestartReply, error) {
	return o.Reply(ctx, instance, id)
}

func (*haltingOrchestrator) Forget(context.Context, string, string) error { return nil }

func (*haltingOrchestrator) Report(context.Context, string, orchestrator.Report) error { return nil }

func (*haltingOrchestrator) Drain(context.Context, string, string) ([]string, error) { return nil, nil }

func (*haltingOrchestrator) Undrain(context.Context, string, string) error { return nil }

// Others start the instance as soon as it is stopped, faster than the engine looks. It is stopped once in a cool-down,
// no reason blames the rack, and the volume is attached after they have left.
func TestPlannedBesideAStarter(t *testing.T) {
	for _, shutdown := range []restart.Shutdown{restart.Hard, restart.Guest, restart.Drain} {
		t.Run(string(shutdown), func(t *testing.T) {
			t.Parallel()
			coolDown, guests := max(3*time.Second, *starterTime/5), &haltingOrchestrator{}
			r := newRestartRig(t, func(o *coretest.Options) {
				o.Restarts.CoolDown, o.Restarts.Poll = coolDown, 300*time.Millisecond
				o.Restarts.Shutdown, o.Restarts.Requester, o.Restarts.Drainer = shutdown, guests, guests
			})
			node, volume := r.Node(t, "node-a"), r.Create(t, "v")
			guests.sim, guests.instance = r.Sim, node
			r.Must(t, r.Sim.Starter(t.Context(), node, time.Millisecond))
			coretest.WantCode(t, r.Publish(t, volume, node), codes.FailedPrecondition)
			began, met := time.Now(), 0
			for ; time.Since(began) < *starterTime; time.Sleep(100 * time.Millisecond) {
				if r.Publish(t, volume, node) == nil { // it just met the stopped instance
					met++
					volume = r.Create(t, fmt.Sprint("v", met))
				}
				for _, one := range r.reported(t, volume) {
					if strings.Contains(one.Message, "operator") || strings.Contains(one.Message, "did not stop") {
						t.Fatalf("untrue: %+v", one)
					}
				}
			}
			r.Must(t, r.Sim.Starter(t.Context(), node, 0))
			left, published := time.Now(), false
			for ; !published && time.Since(left) < 2*coolDown+10*time.Second; time.Sleep(100 * time.Millisecond) {
				published = r.Publish(t, volume, node) == nil
			}
			hard, starts := r.restarts(t)
			stops := hard + int(guests.halts.Load())
			t.Logf("%d stops and %d starts in %s, %d volumes met one, the last was published %s after the others had left",
				stops, starts, left.Sub(began), met, time.Since(left))
			if stops > 1+int(time.Since(began)/coolDown) {
				t.Errorf("%d stops in %s with a cool-down of %s", stops, time.Since(began), coolDown)
			}
			if !published || r.Holder(t, volume) != node {
				t.Errorf("published: %t, the disk is on %q", published, r.Holder(t, volume))
			}
		})
	}
}

// Many publishes on an instance are repeated at once, and always some of them wait to look at its disks. They do not
// keep the engine, which has little time with this lease, from attaching the disks and starting the instance.
func TestPlannedBesideManyPublishes(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) {
		o.Restarts.Lease, o.Restarts.Wait = 12*time.Second, 0
		o.MaxDisks = 12
	})
	node, volumes := r.Node(t, "node-a"), r.createSome(t, 8)
	r.Must(t, r.Sim.Set(t.Context(), simtest.Settings{LatencyMillis: new(20)}))
	const limit = 55 * time.Second // after a minute the engine starts the instance without the disks
	began := time.Now()
	var publishing sync.WaitGroup
	for _, volume := range volumes {
		publishing.Go(func() {
			published := false
			for !published && time.Since(began) < limit {
				published = r.Publish(t, volume, node) == nil
			}
		})
	}
	publishing.Wait()
	if took := time.Since(began); took >= limit {
		t.Errorf("not published within %s", took)
	}
	r.restartsDone(t)
}

// The space of a deleted disk may return after the answer: a create right after it is refused once, and is repeated.
func TestCreateBeforeTheSpaceReturns(t *testing.T) {
	r := newRig(t, func(o *coretest.Options) {
		o.Rack.SpaceBytes, o.Rack.SpaceReturnsMS = coretest.GiB*3, 200 // two boot disks
	})
	r.Must(t, r.Delete(t, r.Create(t, "first")))
	_, err := r.CreateVolume(t.Context(), coretest.CreateRequest("second"))
	coretest.WantCode(t, err, codes.ResourceExhausted)
	await.Eventually(t, "the space returns", func() bool {
		_, err := r.CreateVolume(t.Context(), coretest.CreateRequest("second"))
		return err == nil
	})
}
