// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"fmt"
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

	"github.com/oxidecomputer/oxide-csi-plugin/core/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// stop stops an instance as its owner would.
func (r *rig) stop(t *testing.T, node string) {
	t.Helper()
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
}

// unused is a volume that a running node has no use for any more, and still has.
func (r *rig) unused(t *testing.T, name, node string) string {
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

// Whoever stops the instance that still has it can be rid of a volume at once.
func TestPlannedDeleteOnStopped(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	volume := r.unused(t, "v", node)
	r.stop(t, node)
	r.Must(t, r.Delete(t, volume))
	if got := r.records(t, "csi-"); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
	r.wantRestarts(t, 0)
}

// Without any restart, volumes move where somebody stops the instances.
func TestPlannedMoveOnStopped(t *testing.T) {
	t.Parallel()
	for _, policy := range []restart.Policy{restart.Plan, restart.Allow} {
		t.Run(string(policy), func(t *testing.T) {
			r := newRestartRig(t, func(o *coretest.Options) { o.Restarts.Policy, o.Restarts.CoolDown = policy, time.Hour })
			from, to := r.Node(t, "node-a"), r.Node(t, "node-b")
			volume := r.unused(t, "v", from)
			r.stop(t, from)
			r.stop(t, to)
			r.published(t, volume, to)
			// The engine may just be planning what has come true meanwhile, and then finds that it is not worth it any more.
			coretest.Eventually(t, "no records are left", func() bool { return len(r.records(t, "csi-")) == 0 })
			r.wantRestarts(t, 0)
		})
	}
}

// A restart that another process has planned, and nobody has begun, is begun by nobody who must not restart.
func TestPlannedByAnother(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*restart.Options, string){
		"plan":         func(o *restart.Options, _ string) { o.Policy = restart.Plan },
		"closed":       func(o *restart.Options, _ string) { o.NextStart = later },
		"self unknown": func(o *restart.Options, _ string) { o.Self = func() (string, bool) { return "", false } },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			first := newRestartRig(t)
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
			coretest.Eventually(
				t,
				"the restart is planned, and handed over",
				func() bool { return len(here.records(t, "csi-restart-")) == 1 },
			)
			here.Crash()
			there := on(func(o *restart.Options) { change(o, node) })
			for range 20 {
				if err := there.Publish(t, volume, node); status.Code(err) != codes.FailedPrecondition {
					t.Fatal(err)
				}
			}
			there.rest(t)
			there.wantRestarts(t, 0)
			if got := there.Holder(t, volume); got != "" {
				t.Errorf("the disk is on %s", got)
			}
		})
	}
}

// A disk that a snapshot is being taken of when its instance is down comes with the same restart.
func TestPlannedSnapshotMeanwhile(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Rack.StateTime = 500 * time.Millisecond })
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	coretest.WantCode(t, r.Publish(t, volume, node), codes.FailedPrecondition)
	coretest.Eventually(
		t,
		"the instance is stopping",
		func() bool { return r.runState(t, node) == oxide.InstanceStateStopping },
	)
	r.Must(t, r.Sim.SetDiskState(t.Context(), volume, "maintenance"))
	r.ClearCalls(t)
	coretest.Eventually(t, "its disks are to be changed", func() bool { return r.Calls(t)["instance_disk_list"] > 1 })
	r.Must(t, r.Sim.SetDiskState(t.Context(), volume, "detached"))
	r.published(t, volume, node)
	if stops, starts := r.restarts(t); stops != 0 || starts != 1 {
		t.Errorf("%d stops and %d starts since it went down, want 0 and 1", stops, starts)
	}
}

// An instance that is stopped takes no more disks than one that runs.
func TestPlannedFullOnStopped(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.MaxDisks = 3 })
	node := r.Node(t, "node-a")
	unused := r.unused(t, "unused", node)
	r.stop(t, node)
	first, second, third := r.Create(t, "first"), r.Create(t, "second"), r.Create(t, "third")
	r.Must(t, r.Publish(t, first, node))
	r.published(t, second, node)
	if got := r.Holder(t, unused); got != "" {
		t.Errorf("the disk that makes room is on %s", got)
	}
	if err := r.Publish(t, third, node); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("one more than there is room for: %v", err)
	}
	r.wantRestarts(t, 0)
}

// What was in the way before a restart is not told while it is under way.
func TestPlannedOldNews(t *testing.T) {
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
	coretest.Eventually(t, "the answer says what it waits for", func() bool {
		return strings.Contains(fmt.Sprint(r.Publish(t, volume, node)), "--restart-hours")
	})
	open.Store(true)
	coretest.Eventually(
		t,
		"the instance is stopping",
		func() bool { return r.runState(t, node) == oxide.InstanceStateStopping },
	)
	if err := r.Publish(t, volume, node); err == nil || strings.Contains(err.Error(), "--restart-hours") {
		t.Errorf("while the instance goes down: %v", err)
	}
}

// A volume that is attached for nobody any more can be copied, as any other.
func TestPlannedCopyOfUnused(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	volume := r.unused(t, "v", node)
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

// An instance that is neither running nor stopped is left alone until it is one or the other.
func TestPlannedMigrating(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "migrating"))
	coretest.Eventually(t, "the answer says what it waits for", func() bool {
		err := r.Publish(t, volume, node)
		coretest.WantCode(t, err, codes.FailedPrecondition)
		return strings.Contains(err.Error(), "it is migrating")
	})
	r.wantRestarts(t, 0)
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "running"))
	r.published(t, volume, node)
	r.wantRestarts(t, 1)
}

// A disk that fails while it is waited for keeps neither the others nor the instance.
func TestPlannedFaulted(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Rack.StateTime = 500 * time.Millisecond })
	node := r.Node(t, "node-a")
	bad, good := r.Create(t, "bad"), r.Create(t, "good")
	for _, volume := range []string{bad, good} {
		coretest.WantCode(t, r.Publish(t, volume, node), codes.FailedPrecondition)
	}
	coretest.Eventually(
		t,
		"the instance is stopping",
		func() bool { return r.runState(t, node) == oxide.InstanceStateStopping },
	)
	r.Must(t, r.Sim.SetDiskState(t.Context(), bad, "faulted"))
	r.published(t, good, node)
	r.rest(t)
	coretest.WantCode(t, r.Publish(t, bad, node), codes.Internal)
	r.wantRestarts(t, 1)
}

// An instance that is deleted in the middle of its restart keeps nobody waiting.
func TestPlannedDeleted(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Rack.StateTime = 100 * time.Millisecond })
	node, other := r.Node(t, "node-a"), r.Node(t, "node-b")
	volume := r.Create(t, "v")
	coretest.WantCode(t, r.Publish(t, volume, node), codes.FailedPrecondition)
	coretest.Eventually(t, "the instance can be deleted", func() bool {
		return r.SDK.InstanceDelete(t.Context(), oxide.InstanceDeleteParams{Instance: oxide.NameOrId(node)}) == nil
	})
	r.rest(t)
	coretest.WantCode(t, r.Publish(t, volume, node), codes.NotFound)
	r.published(t, volume, other)
}

// Whatever the rack fails to answer to, and how often, a restart comes to its end, and costs no second one.
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
				volume, leaving := r.Create(t, "v"), r.unused(t, "leaving", node)
				fault := simtest.Fault{Operation: operation, Kind: kind, Count: new(2 * coretest.Attempts)}
				if code, err := strconv.Atoi(kind); err == nil {
					fault.Kind, fault.Status, fault.Message = simtest.FaultStatus, code, "no"
				}
				_, err := r.Sim.Inject(t.Context(), fault)
				r.Must(t, err)
				coretest.Eventually(t, "the volume is published", func() bool { return r.Publish(t, volume, node) == nil })
				r.rest(t)
				if got := r.Holder(t, leaving); got != "" {
					t.Errorf("the unused volume is still on %s", got)
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

// Two clusters in one project restart their own instances only, and leave each other's records alone.
func TestPlannedTwoClusters(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	other := r.copy()
	other.Options.Cluster = strings.Repeat("c", 63)
	other.Start(t)
	node, theirs := r.Node(t, "node-a"), r.Node(t, "node-b")
	volume, unused := other.Create(t, "v"), other.unused(t, "unused", theirs)
	own := r.unused(t, "own", node)
	other.published(t, volume, theirs)
	other.rest(t)
	if got := r.Holder(t, own); got != node {
		t.Errorf("the other cluster's restart has detached a disk of ours: it is on %q", got)
	}
	if got := r.Holder(t, unused); got != "" {
		t.Errorf("the unused disk is on %s", got)
	}
	if got := r.records(t, "csi-"); !cmp.Equal(got, []string{"csi-detach-" + own}) {
		t.Errorf("records: %v", got)
	}
	other.wantRestarts(t, 1)
}

// The boot disk stays, whatever is asked.
func TestPlannedBootDisk(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	instance, err := r.SDK.InstanceView(t.Context(), oxide.InstanceViewParams{Instance: oxide.NameOrId(node)})
	r.Must(t, err)
	boot := instance.BootDiskId
	coretest.WantCode(t, r.Publish(t, boot, node), codes.FailedPrecondition)
	r.Must(t, r.Unpublish(t, boot, node))
	volume := r.Create(t, "v")
	r.published(t, volume, node)
	r.rest(t)
	if got := r.Holder(t, boot); got != node {
		t.Errorf("the boot disk is on %q", got)
	}
}

// Whoever goes back to attach mode hot in the middle of a restart gets the instance back, and no later restart takes for unused
// what is published in attach mode hot.
func TestPlannedThenHot(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Rack.StateTime = 500 * time.Millisecond })
	node, other := r.Node(t, "node-a"), r.Node(t, "node-b")
	unused, volume := r.unused(t, "unused", other), r.Create(t, "v")
	coretest.WantCode(t, r.Publish(t, volume, node), codes.FailedPrecondition)
	coretest.Eventually(
		t,
		"the instance is stopping",
		func() bool { return r.runState(t, node) == oxide.InstanceStateStopping },
	)
	r.Crash()
	hot := r.copy()
	hot.Options.Restarts = nil
	hot.Options.EndRestarts = &restart.Options{
		Lease: time.Second,
		Poll:  10 * time.Millisecond,
		Idle:  20 * time.Millisecond,
	}
	hot.Start(t)
	coretest.Eventually(t, "nothing is recorded any more", func() bool { return len(r.records(t, "csi-")) == 0 })
	if got := r.runState(t, node); got != oxide.InstanceStateRunning {
		t.Errorf("the instance is %s", got)
	}
	r.Must(t, hot.Publish(t, volume, node))
	r.Must(t, hot.Publish(t, unused, other))
}

// On a rack that changes running instances nothing is restarted, and what an answer says has come to be.
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
	r.Must(t, r.Sim.Set(t.Context(), simtest.Settings{LatencyMillis: new(int)})) // it is looked at without a delay
	if got := r.Disk(t, volume).State.State(); got != oxide.DiskStateStateDetached {
		t.Errorf("the disk is %s", got)
	}
	r.Must(t, r.Publish(t, volume, other))
	r.wantRestarts(t, 0)
	if got := r.records(t, "csi-"); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
}

// drained is an orchestrator that takes the work off a node first.
type drained struct {
	*guests

	state    sync.Mutex
	left     []string
	undrains int
}

func (d *drained) Drain(context.Context, string, string) ([]string, error) {
	d.state.Lock()
	defer d.state.Unlock()
	return d.left, nil
}

func (d *drained) Undrain(context.Context, string, string) error {
	d.state.Lock()
	defer d.state.Unlock()
	d.undrains++
	return nil
}

func (d *drained) empty() {
	d.state.Lock()
	defer d.state.Unlock()
	d.left = nil
}

// A node that cannot be drained in time is not taken down, and is used again; once it can be, it is.
func TestPlannedDrain(t *testing.T) {
	t.Parallel()
	d := &drained{guests: newGuests(), left: []string{"default/web-0 (PodDisruptionBudget web)"}}
	r := newRestartRig(t, func(o *coretest.Options) {
		o.Restarts.Shutdown, o.Restarts.Requester, o.Restarts.HaltTimeout = restart.Drain, d, 300*time.Millisecond
	})
	d.guests.r = r
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	coretest.Eventually(t, "the answer says what stays", func() bool {
		err := r.Publish(t, volume, node)
		coretest.WantCode(t, err, codes.FailedPrecondition)
		return strings.Contains(err.Error(), "web-0")
	})
	r.wantRestarts(t, 0)
	d.guests.mu.Lock()
	asked := len(d.asked)
	d.guests.mu.Unlock()
	if asked > 0 {
		t.Error("the guest was asked to go down with work on it")
	}
	coretest.Eventually(t, "the node is used again", func() bool {
		d.state.Lock()
		defer d.state.Unlock()
		return d.undrains > 0
	})
	d.empty()
	r.published(t, volume, node)
	r.rest(t)
	if stops, starts := r.restarts(t); stops != 0 || starts != 1 {
		t.Errorf("%d stops and %d starts, want 0 and 1", stops, starts)
	}
}

// A wish that ends while its instance goes down does not keep that down, and the disk stays where it is.
func TestPlannedGivenUp(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Rack.StateTime = 500 * time.Millisecond })
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	coretest.WantCode(t, r.Publish(t, volume, node), codes.FailedPrecondition)
	coretest.Eventually(
		t,
		"the instance is stopping",
		func() bool { return r.runState(t, node) == oxide.InstanceStateStopping },
	)
	r.Must(t, r.Unpublish(t, volume, node))
	r.rest(t)
	if got := r.runState(t, node); got != oxide.InstanceStateRunning {
		t.Errorf("the instance is %s", got)
	}
	if got := r.Holder(t, volume); got != "" {
		t.Errorf("the disk is on %s", got)
	}
	r.Must(t, r.Delete(t, volume))
}

// An RPC that may wait for a restart answers within the caller's time all the same.
func TestPlannedWaitNotTooLong(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Restarts.Wait, o.Restarts.Policy = time.Minute, restart.Plan })
	volume, node := r.Create(t, "v"), r.Node(t, "node-a")
	_, err := r.ControllerPublishVolume(
		coretest.WithTimeout(t, 3*time.Second),
		&csi.ControllerPublishVolumeRequest{VolumeId: volume, NodeId: node, VolumeCapability: coretest.MountWriter()},
	)
	coretest.WantCode(t, err, codes.FailedPrecondition, "--attach-mode=plan")
}

// A rack that has no room for the instance any more is asked until it has, and somebody is told.
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
	coretest.Eventually(t, "whoever asks is told", func() bool {
		err := r.Publish(t, volume, node)
		return err != nil && strings.Contains(err.Error(), "Could not find any valid sled")
	})
	r.published(t, volume, node)
	g.mu.Lock()
	defer g.mu.Unlock()
	if !slices.ContainsFunc(g.reports, func(report metadata.RestartReport) bool {
		return report.Problem && report.Reason == "RestartNotStarted"
	}) {
		t.Errorf("nobody who watches the node is told: %v", g.reports)
	}
}

// One controller restarts instances of several racks, and one rack that does not answer keeps nothing of the other's.
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
	at := func(site *rig) *rig { // what the test looks at
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
	at(east).rest(t)
	at(west).rest(t)
	_, err := east.Sim.Inject(
		t.Context(),
		simtest.Fault{Operation: "*", Kind: simtest.FaultStatus, Status: 503, Message: "no", Count: new(1000)},
	)
	east.Must(t, err)
	third := west.Create(t, "third")
	at(west).published(t, third, west.Node(t, "node-b"))
	if _, err := both.ListVolumes(t.Context(), &csi.ListVolumesRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("a list without a rack: %v", err)
	}
}
