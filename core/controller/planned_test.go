// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	grpcmetadata "google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/restart"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// newRestartRig is a controller in attach mode restart before a rack without hot-plug. Unless changed, the rack stops instances.
func newRestartRig(t *testing.T, change ...func(*coretest.Options)) *rig {
	t.Helper()
	return newRig(t, append([]func(*coretest.Options){func(o *coretest.Options) {
		o.Rack.Hotplug = false
		o.Rack.Instances = []string{"node-a", "node-b", "node-c"}
		o.Restarts = &controller.PlannedRestarts{Options: restart.Options{
			Policy:      restart.Allow,
			Shutdown:    restart.Hard,
			Window:      100 * time.Millisecond,
			MaxDown:     1,
			HaltTimeout: 5 * time.Second,
			Poll:        10 * time.Millisecond,
			Idle:        20 * time.Millisecond,
			Lease:       2 * time.Second,
		}}
	}}, change...)...)
}

// published asks for a volume on a node until it is there, as an orchestrator does.
func (r *rig) published(t *testing.T, volumeID, nodeID string) {
	t.Helper()
	coretest.Eventually(t, "the volume is published", func() bool {
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

// publishedTogether is published for several volumes at once.
func (r *rig) publishedTogether(t *testing.T, nodeID string, volumeIDs ...string) {
	t.Helper()
	var publishing sync.WaitGroup
	for _, volumeID := range volumeIDs {
		publishing.Go(func() { r.published(t, volumeID, nodeID) })
	}
	publishing.Wait()
}

// createSome makes volumes.
func (r *rig) createSome(t *testing.T, count int) []string {
	t.Helper()
	var volumes []string
	for i := range count {
		volumes = append(volumes, r.Create(t, fmt.Sprintf("v%d", i)))
	}
	return volumes
}

// restarts is how often instances were stopped and started.
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

// runState is the state of an instance.
func (r *rig) runState(t *testing.T, id string) oxide.InstanceState {
	t.Helper()
	instance, err := r.SDK.InstanceView(t.Context(), oxide.InstanceViewParams{Instance: oxide.NameOrId(id)})
	r.Must(t, err)
	return instance.RunState
}

// records are the names of the records that the controller keeps.
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

// rest waits until no restart is under way.
func (r *rig) rest(t *testing.T) {
	t.Helper()
	coretest.Eventually(t, "no restart is under way", func() bool { return len(r.records(t, "csi-restart-")) == 0 })
}

// publishedNodes is what ListVolumes says.
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

// A rack that does not attach to an instance that runs detaches nothing from it either: there is nothing to be put off.
func TestPlannedDetachGrace(t *testing.T) {
	t.Parallel()
	grace := func(o *coretest.Options) { o.DetachGrace = time.Hour }
	r := newRestartRig(t, grace)
	node, volume := r.Node(t, "node-a"), r.Create(t, "data")
	r.published(t, volume, node)
	r.rest(t)
	for range 2 { // as Nomad asks
		r.Must(t, r.Unpublish(t, volume, node))
	}
	if got := r.Holder(t, volume); got != node {
		t.Errorf("the disk is on %q: it was to stay", got)
	}
	if got := r.publishedNodes(t, volume); len(got) > 0 {
		t.Errorf("the volume is published on %v", got)
	}
	r.published(t, volume, node)
	r.wantRestarts(t, 1)

	// One that does attach to it would detach, too.
	r = newRestartRig(t, grace, func(o *coretest.Options) { o.Rack.Hotplug = true })
	node, volume = r.Node(t, "node-a"), r.Create(t, "data")
	r.published(t, volume, node)
	coretest.WantCode(t, r.Unpublish(t, volume, node), codes.FailedPrecondition, "--detach-grace")
	r.wantRestarts(t, 0)
}

// All that is wanted of an instance within the window costs one restart.
func TestPlannedTogether(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.MaxDisks = 12 })
	node := r.Node(t, "node-a")
	volumes := r.createSome(t, 8)
	r.publishedTogether(t, node, volumes...)
	r.wantRestarts(t, 1)
	r.rest(t)
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

// A volume that returns to its node costs no restart, however many do so.
func TestPlannedReturn(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.MaxDisks = 12 })
	node := r.Node(t, "node-a")
	volumes := r.createSome(t, 8)
	r.publishedTogether(t, node, volumes...)
	r.rest(t)
	for _, volume := range volumes {
		r.Must(t, r.Unpublish(t, volume, node))
		r.Must(t, r.Unpublish(t, volume, node)) // as Nomad does
		if got := r.publishedNodes(t, volume); len(got) > 0 {
			t.Errorf("an unpublished volume is shown on %v", got)
		}
		if got := r.Holder(t, volume); got != node {
			t.Errorf("the disk was detached from a running instance: %q", got)
		}
	}
	if got := len(r.records(t, "csi-detach-")); got != len(volumes) {
		t.Errorf("%d records of %d volumes that are unpublished and attached", got, len(volumes))
	}
	for _, volume := range volumes {
		r.Must(t, r.Publish(t, volume, node))
	}
	r.wantRestarts(t, 1)
	if got := r.records(t, "csi-"); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
}

// A volume that moves costs a restart of either node, and is never on two. What is lazy there too goes at the same time.
func TestPlannedMove(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	from, to := r.Node(t, "node-a"), r.Node(t, "node-b")
	moving, other := r.Create(t, "moving"), r.Create(t, "other")
	r.publishedTogether(t, from, moving, other)
	if err := r.Publish(
		t,
		moving,
		to,
	); status.Code(err) != codes.FailedPrecondition ||
		!strings.Contains(err.Error(), "unpublish the volume") {
		t.Errorf("a volume that is in use: %v", err)
	}
	r.Must(t, r.Unpublish(t, moving, from))
	r.Must(t, r.Unpublish(t, other, from))
	r.published(t, moving, to)
	r.wantRestarts(t, 3)
	if got := r.Holder(t, other); got != "" {
		t.Errorf("the other unpublished volume is still on %s", got)
	}
	r.rest(t)
	if got := r.records(t, "csi-"); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
}

// To delete a volume restarts nothing.
func TestPlannedDelete(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	r.published(t, volume, node)
	r.rest(t)
	r.Must(t, r.Unpublish(t, volume, node))
	err := r.Delete(t, volume)
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "next planned restart") {
		t.Errorf("deleting a volume that is still attached: %v", err)
	}
	other := r.Create(t, "other")
	r.published(t, other, node)
	r.Must(t, r.Delete(t, volume))
	r.wantRestarts(t, 2)
	r.rest(t)
	if got := r.records(t, "csi-"); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
}

// On an instance that somebody else has stopped, attach and detach simply work, and nobody starts it.
func TestPlannedOnStopped(t *testing.T) {
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

// What was unpublished while its instance ran, and is unpublished again once somebody has stopped that, leaves no record.
func TestPlannedAgainOnStopped(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	r.published(t, volume, node)
	r.rest(t)
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

// An instance that is full of what nobody uses any more gets what somebody does.
func TestPlannedRoom(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.MaxDisks = 3 })
	node := r.Node(t, "node-a")
	volumes := []string{r.Create(t, "v0"), r.Create(t, "v1"), r.Create(t, "v2")}
	r.publishedTogether(t, node, volumes[:2]...)
	if err := r.Publish(t, volumes[2], node); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("one more than there is room for: %v", err)
	}
	r.Must(t, r.Unpublish(t, volumes[0], node))
	r.published(t, volumes[2], node)
	if got := r.Holder(t, volumes[0]); got != "" {
		t.Errorf("the disk that made room is on %s", got)
	}
	r.wantRestarts(t, 2)
}

// What was listed as attached may have made room before its record was looked for, which is gone then.
func TestPlannedRoomMeanwhile(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.MaxDisks = 2 })
	node := r.Node(t, "node-a")
	leaving, coming := r.Create(t, "leaving"), r.Create(t, "coming")
	r.published(t, leaving, node)
	r.rest(t)
	r.Must(t, r.Unpublish(t, leaving, node))
	r.Crash() // from here on this test does what a restart does
	_, err := r.Sim.Inject(
		t.Context(),
		simtest.Fault{Operation: "anti_affinity_group_list", Kind: simtest.FaultDelay, DelayMillis: 500},
	)
	r.Must(t, err)
	var answer error
	var asking sync.WaitGroup
	asking.Go(func() { answer = r.Publish(t, coming, node) })
	coretest.Eventually(t, "the rack takes its time", func() bool {
		faults, err := r.Sim.Faults(t.Context())
		r.Must(t, err)
		return faults[len(faults)-1].Hits == 1
	})
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
	_, err = r.SDK.InstanceDiskDetach(
		t.Context(),
		oxide.InstanceDiskDetachParams{Instance: oxide.NameOrId(node), Body: &oxide.DiskPath{Disk: oxide.NameOrId(leaving)}},
	)
	r.Must(t, err)
	r.Must(
		t,
		r.SDK.AntiAffinityGroupDelete(
			t.Context(),
			oxide.AntiAffinityGroupDeleteParams{
				AntiAffinityGroup: oxide.NameOrId("csi-detach-" + leaving),
				Project:           coretest.Project,
			},
		),
	)
	asking.Wait()
	coretest.WantCode(t, answer, codes.FailedPrecondition)
}

// A roll-out over several nodes restarts each of them once, one after the other.
func TestPlannedRollOut(t *testing.T) {
	r := newRestartRig(t, func(o *coretest.Options) {
		o.MaxDisks, o.Restarts.Window, o.Restarts.Lease = 12, time.Second, time.Minute
	})
	nodes := []string{r.Node(t, "node-a"), r.Node(t, "node-b"), r.Node(t, "node-c")}
	volumes := r.createSome(t, 24)
	var publishing sync.WaitGroup
	for i, volume := range volumes {
		publishing.Go(func() {
			// Without a pause between their questions, two dozen would leave the controller no time for anything else.
			for deadline := time.Now().Add(time.Minute); ; time.Sleep(200 * time.Millisecond) {
				err := r.Publish(t, volume, nodes[i%3])
				if err == nil {
					return
				}
				if status.Code(err) != codes.FailedPrecondition || time.Now().After(deadline) {
					t.Error(err)
					return
				}
			}
		})
	}
	publishing.Wait()
	for i, volume := range volumes {
		if got := r.Holder(t, volume); got != nodes[i%3] {
			t.Errorf("volume %d is on %q", i, got)
		}
	}
	r.wantRestarts(t, 3)
}

// With attach mode plan nothing is restarted, and a volume is attached once its instance is stopped.
func TestPlannedPolicies(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Restarts.Policy = restart.Plan })
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	coretest.Eventually(t, "the answer says why nothing is restarted", func() bool {
		err := r.Publish(t, volume, node)
		if status.Code(err) != codes.FailedPrecondition {
			t.Fatal(err)
		}
		return strings.Contains(err.Error(), "--attach-mode=plan")
	})
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
	r.published(t, volume, node)
	r.wantRestarts(t, 0)
}

// An RPC may wait for the restart.
func TestPlannedWait(t *testing.T) {
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

// An RPC that waits hears of the end of a restart that another process carries out.
func TestPlannedWaitForAnother(t *testing.T) {
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

// A controller leaves it to another one, too, to free a disk that its own instance still has.
func TestPlannedMoveFromOwnInstance(t *testing.T) {
	t.Parallel()
	here, _ := newRestartPair(t)
	a, b := here.Node(t, "node-a"), here.Node(t, "node-b")
	volume := here.Create(t, "v")
	here.published(t, volume, a)
	here.rest(t)
	here.Must(t, here.Unpublish(t, volume, a))
	here.published(t, volume, b)
	here.wantRestarts(t, 3)
}

// newRestartPair are controllers in attach mode restart that run on node-a and node-b.
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

// A controller that is told to end while an instance is down does not leave it down for as long as one that dies: the next one goes
// on at once.
func TestPlannedRetire(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) {
		o.Rack.StateTime, o.Restarts.Lease, o.Restarts.Wait = 300*time.Millisecond, time.Hour, time.Hour
	})
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	answered := make(chan error)
	go func() { answered <- r.Publish(t, volume, node) }()
	coretest.Eventually(
		t,
		"the instance is stopping",
		func() bool { return r.runState(t, node) == oxide.InstanceStateStopping },
	)
	r.Retire()
	coretest.WantCode(t, <-answered, codes.FailedPrecondition, "being restarted")
	before := r.Calls(t)["anti_affinity_group_list"]
	time.Sleep(100 * time.Millisecond)
	if after := r.Calls(t)["anti_affinity_group_list"]; after != before {
		t.Errorf("it goes on: %d looks, %d before", after, before)
	}
	other := r.again(t)
	coretest.Eventually(
		t,
		"the instance runs again",
		func() bool { return r.runState(t, node) == oxide.InstanceStateRunning },
	)
	other.published(t, volume, node)
	other.rest(t)
	if stops, starts := other.restarts(t); stops != 0 || starts != 1 {
		t.Errorf("%d stops and %d starts since then, want 0 and 1", stops, starts)
	}
}

// Whoever dies while an instance is down: another controller starts it, as soon as the lease is over.
func TestPlannedCrash(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Rack.StateTime = 300 * time.Millisecond })
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	if err := r.Publish(t, volume, node); status.Code(err) != codes.FailedPrecondition {
		t.Fatal(err)
	}
	coretest.Eventually(
		t,
		"the instance is stopping",
		func() bool { return r.runState(t, node) != oxide.InstanceStateRunning },
	)
	r.Crash()
	other := r.again(t)
	coretest.Eventually(
		t,
		"somebody starts the instance",
		func() bool { return r.runState(t, node) == oxide.InstanceStateRunning },
	)
	other.rest(t)
	other.published(t, volume, node)
	// The record tells the disk to whoever takes over: no second restart.
	if stops, _ := r.restarts(t); stops != 0 {
		t.Errorf("%d stops after the crash, want none", stops)
	}
}

// guests plays the orchestrator and the node plugins of guests that shut down when they are asked to.
type guests struct {
	r       *rig
	refusal string

	mu      sync.Mutex
	asked   map[string]string // restart ID by instance
	answers map[string]metadata.RestartReply
	reports []metadata.RestartReport
}

func newGuests() *guests {
	return &guests{asked: map[string]string{}, answers: map[string]metadata.RestartReply{}}
}

func (g *guests) Request(ctx context.Context, instance, id string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.asked[instance] == id {
		return nil
	}
	g.asked[instance], g.answers[instance] = id, metadata.RestartReply{State: metadata.RestartAccepted}
	if g.refusal != "" {
		g.answers[instance] = metadata.RestartReply{State: metadata.RestartRefused, Reason: g.refusal}
		return nil
	}
	return g.r.Sim.Halt(ctx, instance)
}

func (g *guests) Reply(ctx context.Context, instance, id string) (metadata.RestartReply, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.asked[instance] != id {
		return metadata.RestartReply{}, nil
	}
	calls, err := g.r.Sim.Calls(ctx)
	if err == nil && calls.Counts["instance_start"] > 0 && g.answers[instance].State == metadata.RestartAccepted {
		g.answers[instance] = metadata.RestartReply{State: metadata.RestartBack}
	}
	return g.answers[instance], err
}

func (g *guests) Withdraw(_ context.Context, instance, id string) (metadata.RestartReply, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.asked[instance] != id {
		return metadata.RestartReply{}, nil
	}
	said := g.answers[instance]
	if said.State != metadata.RestartAccepted {
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

func (g *guests) Report(_ context.Context, _ string, report metadata.RestartReport) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.reports = append(g.reports, report)
	return nil
}

// The rack's own stop is a power cut, which a guest that shuts itself down is spared.
func TestPlannedGuest(t *testing.T) {
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
	r.rest(t)
	if len(g.asked) > 0 {
		t.Errorf("questions are left: %v", g.asked)
	}
}

// What a node refuses is told to whoever wants the volume, and nothing is stopped.
func TestPlannedRefused(t *testing.T) {
	t.Parallel()
	g := newGuests()
	g.refusal = "graceful node shutdown is on: turn it off"
	r := newRestartRig(t, func(o *coretest.Options) { o.Restarts.Shutdown, o.Restarts.Requester = restart.Guest, g })
	g.r = r
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	coretest.Eventually(t, "the answer says what the node says", func() bool {
		err := r.Publish(t, volume, node)
		return status.Code(err) == codes.FailedPrecondition && strings.Contains(err.Error(), g.refusal)
	})
	r.wantRestarts(t, 0)
	r.rest(t)
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.reports) == 0 || !g.reports[len(g.reports)-1].Problem {
		t.Errorf("nobody who watches the node is told: %v", g.reports)
	}
}

// A controller leaves its own instance to another one, and restarts nothing before it knows which one that is.
func TestPlannedOwnInstance(t *testing.T) {
	t.Parallel()
	first := newRestartRig(t, func(o *coretest.Options) {
		o.Restarts.Self = func() (string, bool) { return "", false }
	})
	node := first.Node(t, "node-a")
	volume := first.Create(t, "v")
	coretest.Eventually(t, "nothing is restarted before it is known where the controller runs", func() bool {
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
	coretest.Eventually(t, "the restart is planned", func() bool { return len(here.records(t, "csi-restart-")) == 1 })
	here.wantRestarts(t, 0)
	there := on(here.Node(t, "node-b"))
	here.published(t, volume, node)
	there.wantRestarts(t, 1)
}

// What an orchestrator unpublishes because the node is down for a restart, and brings back afterwards, costs no other one.
func TestPlannedUnpublishedMeanwhile(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Rack.StateTime = 300 * time.Millisecond })
	node := r.Node(t, "node-a")
	first, second := r.Create(t, "first"), r.Create(t, "second")
	r.published(t, first, node)
	r.rest(t)
	if err := r.Publish(t, second, node); status.Code(err) != codes.FailedPrecondition {
		t.Fatal(err)
	}
	coretest.Eventually(
		t,
		"the instance is stopped",
		func() bool { return r.runState(t, node) == oxide.InstanceStateStopped },
	)
	r.Must(t, r.Unpublish(t, first, node))
	r.rest(t)
	r.published(t, first, node)
	r.published(t, second, node)
	r.wantRestarts(t, 2)
}

// A record about a disk that is gone is cleared away, whoever has deleted it.
func TestPlannedSweep(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	volume, kept := r.Create(t, "v"), r.Create(t, "kept")
	r.published(t, volume, node)
	r.published(t, kept, node)
	r.rest(t)
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
	coretest.Eventually(t, "the record of the deleted disk is gone", func() bool {
		return cmp.Equal(other.records(t, "csi-"), []string{"csi-detach-" + kept})
	})
}

// What the RPCs ask of the rack is what docs/reference/api-calls.md says.
func TestPlannedAPICalls(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Unplanned = true }) // only the RPCs' own calls are counted
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	page, err := os.ReadFile("../../docs/reference/api-calls.md")
	r.Must(t, err)
	says := func(what string, call func() error, want codes.Code) {
		t.Helper()
		r.ClearCalls(t)
		if err := call(); status.Code(err) != want {
			t.Fatalf("%s: %v", what, err)
		}
		calls, err := r.Sim.Calls(t.Context())
		r.Must(t, err)
		var counts []string
		for _, operation := range slices.Sorted(maps.Keys(calls.Counts)) {
			counts = append(counts, fmt.Sprintf("%s %d", operation, calls.Counts[operation]))
		}
		if line := fmt.Sprintf("| %s | %s |", what, strings.Join(counts, ", ")); !strings.Contains(string(page), line) {
			t.Errorf("docs/reference/api-calls.md lacks the line\n%s", line)
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
		return list(grpcmetadata.AppendToOutgoingContext(t.Context(), rpc.MetadataAskRestarts, "yes"))
	}, codes.OK)
	says("`DeleteVolume`", func() error { return r.Delete(t, volume) }, codes.OK)
}

// What is unpublished is not shown as published while its disk is detached, or attached for a wish: the rack cannot be asked
// for its disks and for the records of a restart at once.
func TestPlannedShownMeanwhile(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	leaving, coming := r.Create(t, "leaving"), r.Create(t, "coming")
	r.published(t, leaving, node)
	r.rest(t)
	r.Must(t, r.Unpublish(t, leaving, node))
	r.Crash() // from here on this test does what a restart does
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))

	// meanwhile does something while a call of the rack takes its time, and says where the volume is shown after that.
	meanwhile := func(operation string, do func(), shown func() []string) []string {
		_, err := r.Sim.Inject(t.Context(), simtest.Fault{Operation: operation, Kind: simtest.FaultDelay, DelayMillis: 500})
		r.Must(t, err)
		var nodes []string
		var asking sync.WaitGroup
		asking.Go(func() { nodes = shown() })
		coretest.Eventually(t, "the rack takes its time", func() bool {
			faults, err := r.Sim.Faults(t.Context())
			r.Must(t, err)
			return faults[len(faults)-1].Hits == 1
		})
		do()
		asking.Wait()
		return nodes
	}
	shown := meanwhile("anti_affinity_group_list", func() {
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
					AntiAffinityGroup: oxide.NameOrId("csi-detach-" + leaving),
					Project:           coretest.Project,
				},
			),
		)
	}, func() []string {
		one, err := r.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: leaving})
		r.Must(t, err)
		return one.GetStatus().GetPublishedNodeIds()
	})
	if len(shown) > 0 {
		t.Errorf("ControllerGetVolume shows a volume on %v that was being detached", shown)
	}
	shown = meanwhile("disk_list", func() {
		_, err := r.SDK.AntiAffinityGroupCreate(
			t.Context(),
			oxide.AntiAffinityGroupCreateParams{Project: coretest.Project, Body: &oxide.AntiAffinityGroupCreate{
				Name: oxide.Name(
					"csi-detach-" + coming,
				),
				Description:   fmt.Sprintf(`{"v":1,"cluster":%q,"disk":%q,"instance":%q}`, coretest.Cluster, coming, node),
				Policy:        oxide.AffinityPolicyAllow,
				FailureDomain: oxide.FailureDomainSled,
			}},
		)
		r.Must(t, err)
		r.AttachByHand(t, coming, node)
	}, func() []string {
		list, err := r.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		r.Must(t, err)
		for _, entry := range list.GetEntries() {
			if entry.GetVolume().GetVolumeId() == coming {
				return entry.GetStatus().GetPublishedNodeIds()
			}
		}
		return nil
	})
	if len(shown) > 0 {
		t.Errorf("ListVolumes shows a volume on %v that was being attached for a wish", shown)
	}
}

// An attached disk is not published before it is certain that no restart detaches it.
func TestPlannedUncertain(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t)
	node := r.Node(t, "node-a")
	volume := r.Create(t, "v")
	r.published(t, volume, node)
	r.rest(t)
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
		t.Error("a volume is published although nobody knows whether a restart detaches it")
	}
	r.Must(t, r.Sim.ClearFaults(t.Context()))
	r.Must(t, r.Publish(t, volume, node))
	if got := r.records(t, "csi-"); len(got) > 0 {
		t.Errorf("records are left: %v", got)
	}
}

// Two volumes that change places wait for each other's node.
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

// A volume that is wished for while its new node is being restarted for another one, and still on its old node, is waited for.
func TestPlannedLate(t *testing.T) {
	t.Parallel()
	r := newRestartRig(t, func(o *coretest.Options) { o.Rack.StateTime = 300 * time.Millisecond })
	from, to := r.Node(t, "node-a"), r.Node(t, "node-b")
	moving, other := r.Create(t, "moving"), r.Create(t, "other")
	r.published(t, moving, from)
	r.rest(t)
	r.Must(t, r.Unpublish(t, moving, from))
	if err := r.Publish(t, other, to); status.Code(err) != codes.FailedPrecondition {
		t.Fatal(err)
	}
	coretest.Eventually(
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
