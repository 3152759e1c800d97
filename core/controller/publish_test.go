// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/core/controller"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

func noHotplug(o *coretest.Options) { o.Rack.Hotplug = false }

func TestPublishAndUnpublish(t *testing.T) {
	r := newRig(t)
	id, node := r.Create(t, "v"), r.Node(t, "node-a")
	req := &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: node, VolumeCapability: coretest.MountWriter()}
	r.ClearCalls(t)
	first, err := r.ControllerPublishVolume(t.Context(), req)
	r.Must(t, err)
	r.WantCalls(
		t,
		map[string]int{"instance_disk_list": 1, "instance_disk_attach": 1, "anti_affinity_group_view": 2},
	)
	coretest.WantSame(t, first, &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{
		"diskName": diskname.ForVolume(coretest.Cluster, "v"), "diskID": id, "sizeBytes": "1073741824", "blockSize": "4096",
		"origin": "blank", "readOnly": "false", "fsLineage": "",
	}})
	if got := r.Holder(t, id); got != node {
		t.Fatalf("the disk is attached to %q, want %q", got, node)
	}

	r.ClearCalls(t)
	second, err := r.ControllerPublishVolume(t.Context(), req)
	r.Must(t, err)
	coretest.WantSame(t, second, first)
	r.WantCalls(t, map[string]int{"disk_view": 1, "instance_view": 1, "anti_affinity_group_view": 2})

	r.ClearCalls(t)
	r.Must(t, r.Unpublish(t, id, node))
	r.WantCalls(t, map[string]int{"instance_disk_detach": 1})
	if got := r.Holder(t, id); got != "" {
		t.Fatalf("the disk is still attached to %q", got)
	}
	r.ClearCalls(t)
	r.Must(t, r.Unpublish(t, id, node))
	r.WantCalls(t, map[string]int{"disk_view": 1})
}

// A slow rack with hot-plug shows the states attaching and detaching for some time.
func TestPublishWaitsForTheRack(t *testing.T) {
	r := newRig(t, func(o *coretest.Options) { o.Rack.HotplugAsync, o.Rack.Latency = true, 100*time.Millisecond })
	id, node := r.Create(t, "v"), r.Node(t, "node-a")
	// state returns the disk's state without latency.
	state := func() oxide.DiskStateState {
		latency := 0
		r.Must(t, r.Sim.Set(t.Context(), simtest.Settings{LatencyMillis: &latency}))
		shown := r.Disk(t, id).State.State()
		latency = 100
		r.Must(t, r.Sim.Set(t.Context(), simtest.Settings{LatencyMillis: &latency}))
		return shown
	}
	r.Must(t, r.Publish(t, id, node))
	if got := state(); got != oxide.DiskStateStateAttached {
		t.Fatalf("published, but the disk is %s", got)
	}
	r.Must(t, r.Unpublish(t, id, node))
	if got := state(); got != oxide.DiskStateStateDetached {
		t.Fatalf("unpublished, but the disk is %s", got)
	}
}

func TestPublishToARunningInstanceWithoutHotplug(t *testing.T) {
	r := newRig(t, noHotplug)
	id, node := r.Create(t, "v"), r.Node(t, "node-a")
	coretest.WantCode(
		t,
		r.Publish(t, id, node),
		codes.FailedPrecondition,
		"running",
		"stop the instance",
		"--attach-mode=restart",
		`"node-a"`,
	)

	// A repeated call gets the cached answer without an attach request to the rack.
	r.ClearCalls(t)
	coretest.WantCode(t, r.Publish(t, id, node), codes.FailedPrecondition, "running")
	if calls := r.Calls(t); calls["instance_disk_attach"] != 0 {
		t.Errorf("the rack got requests: %v", calls)
	}

	other := r.Node(t, "node-b")
	r.Must(t, r.Sim.SetRunState(t.Context(), other, "stopped"))
	r.Must(t, r.Publish(t, id, other))
	r.Must(t, r.Sim.SetRunState(t.Context(), other, "running"))
	coretest.WantCode(t, r.Unpublish(t, id, other), codes.FailedPrecondition, "running", "stop the instance")
	if got := r.Holder(t, id); got != other {
		t.Errorf("the disk is attached to %q", got)
	}
}

func TestPublishNamesTheInstanceOfAnAttachedDisk(t *testing.T) {
	r := newRig(t)
	id, a, b := r.Create(t, "v"), r.Node(t, "node-a"), r.Node(t, "node-b")
	r.Must(t, r.Publish(t, id, a))
	coretest.WantCode(t, r.Publish(t, id, b), codes.FailedPrecondition, a)
	if got := r.Holder(t, id); got != a {
		t.Errorf("the disk is attached to %q", got)
	}
}

func TestPublishNotFound(t *testing.T) {
	r := newRig(t)
	id, node := r.Create(t, "v"), r.Node(t, "node-a")
	coretest.WantCode(t, r.Publish(t, uuid.NewString(), node), codes.NotFound)
	coretest.WantCode(t, r.Publish(t, "v", node), codes.NotFound, `"v"`)
	coretest.WantCode(t, r.Publish(t, id, uuid.NewString()), codes.NotFound, "no such instance")
	coretest.WantCode(t, r.Publish(t, id, "node-a"), codes.NotFound, `"node-a"`)
}

func TestPublishRejectsWithoutAChange(t *testing.T) {
	for _, test := range []struct {
		name     string
		prepare  func(*testing.T, *rig) (volumeID string)
		mentions string
	}{
		{"the boot disk", func(t *testing.T, r *rig) string {
			disk, err := r.SDK.DiskView(t.Context(), oxide.DiskViewParams{Disk: "node-a-boot", Project: coretest.Project})
			r.Must(t, err)
			return disk.Id
		}, "boot disk"},
		{"the boot disk of another instance", func(t *testing.T, r *rig) string {
			disk, err := r.SDK.DiskView(t.Context(), oxide.DiskViewParams{Disk: "node-b-boot", Project: coretest.Project})
			r.Must(t, err)
			return disk.Id
		}, "attached to instance"},
		{"a disk of another project", func(t *testing.T, r *rig) string {
			_, err := r.Sim.AddInstance(t.Context(), "stranger", "other", "running")
			r.Must(t, err)
			return r.UserDisk(t, "other", "theirs", "").Id
		}, "another project"},
		{"a serial that collides with an attached disk", func(t *testing.T, r *rig) string {
			there := r.UserDisk(t, coretest.Project, "abcdefghij-abcdefghi-1", "")
			r.AttachByHand(t, there.Id, r.Node(t, "node-a"))
			return r.UserDisk(t, coretest.Project, "abcdefghij-abcdefghi-2", "").Id
		}, "first 20 bytes"},
		{"a faulted disk", func(t *testing.T, r *rig) string {
			id := r.Create(t, "v")
			r.Must(t, r.Sim.SetDiskState(t.Context(), id, "faulted"))
			return id
		}, "faulted"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			id, node := test.prepare(t, r), r.Node(t, "node-a")
			r.Start(t) // it remembers no disk
			before := r.Holder(t, id)
			r.ClearCalls(t)
			want := codes.FailedPrecondition
			if test.mentions == "faulted" {
				want = codes.Internal
			}
			coretest.WantCode(t, r.Publish(t, id, node), want, test.mentions)
			if calls := r.Calls(t); calls["instance_disk_attach"] != 0 || calls["instance_disk_detach"] != 0 {
				t.Errorf("the rack got attach or detach requests: %v", calls)
			}
			r.Must(t, r.Unpublish(t, id, node)) // the volume was never published
			if got := r.Holder(t, id); got != before {
				t.Errorf("the disk moved from %q to %q", before, got)
			}
		})
	}
}

func TestPublishToAFullInstance(t *testing.T) {
	for _, test := range []struct {
		name             string
		ours, racksLimit int
		mentions, logged string
	}{
		{"by --max-disks", 3, 12, "has 3 disks, its boot disk included, and takes no more, because --max-disks is 3", ""},
		{"by the rack's limit", 12, 3, "allows fewer than --max-disks=12: set it to the rack's limit, 3,", "cannot attach more than 3 disks to instance"},
	} {
		t.Run(test.name, func(t *testing.T) {
			log := &simtest.Output{}
			r := newRig(t, func(o *coretest.Options) {
				o.MaxDisks, o.Rack.MaxDisks, o.Log = test.ours, test.racksLimit, log
			})
			node := r.Node(t, "node-a")
			r.Must(t, r.Publish(t, r.Create(t, "1"), node))
			r.Must(t, r.Publish(t, r.Create(t, "2"), node))
			third := r.Create(t, "3")
			coretest.WantCode(t, r.Publish(t, third, node), codes.ResourceExhausted, test.mentions, node)
			if !strings.Contains(log.String(), test.logged) {
				t.Errorf("the log has no %q: %s", test.logged, log)
			}
			if got := r.Holder(t, third); got != "" {
				t.Errorf("the disk is attached to %q", got)
			}
		})
	}
}

func TestPublishToAFailedInstance(t *testing.T) {
	r := newRig(t)
	id, node := r.Create(t, "v"), r.Node(t, "node-a")
	r.Must(t, r.Sim.SetRunState(t.Context(), node, "failed"))
	coretest.WantCode(t, r.Publish(t, id, node), codes.FailedPrecondition, "has failed")
}

func TestPublishToAnInstanceOfAnotherProject(t *testing.T) {
	r := newRig(t)
	stranger, err := r.Sim.AddInstance(t.Context(), "stranger", "other", "running")
	r.Must(t, err)
	coretest.WantCode(t, r.Publish(t, r.Create(t, "v"), stranger.ID), codes.FailedPrecondition, "different projects")
}

// publishAtOnce publishes volumes on a node at the same time, and returns the number of answers by code.
func publishAtOnce(t *testing.T, r *rig, node string, ids ...string) map[codes.Code]int {
	t.Helper()
	results := make(chan error, len(ids))
	for _, id := range ids {
		go func() { results <- r.Publish(t, id, node) }()
	}
	counts := map[codes.Code]int{}
	for range ids {
		counts[status.Code(<-results)]++
	}
	return counts
}

// slowRigs are rigs of both attach modes on a rack with hot-plug, on which concurrent requests overlap.
func slowRigs(t *testing.T, test func(t *testing.T, r *rig)) {
	slow := func(o *coretest.Options) { o.Rack.Hotplug, o.Rack.Latency = true, 20*time.Millisecond }
	t.Run("hot", func(t *testing.T) { t.Parallel(); test(t, newRig(t, slow)) })
	t.Run("restart", func(t *testing.T) { t.Parallel(); test(t, newRestartRig(t, slow)) })
}

// Nine volumes are published at once on a node that has room for seven.
func TestPublishAtOnceKeepsTheLimit(t *testing.T) {
	t.Parallel()
	slowRigs(t, func(t *testing.T, r *rig) {
		var ids []string
		for n := range 9 {
			ids = append(ids, r.Create(t, fmt.Sprint("v", n)))
		}
		want := map[codes.Code]int{codes.OK: 7, codes.ResourceExhausted: 2}
		coretest.WantSame(t, publishAtOnce(t, r, r.Node(t, "node-a"), ids...), want)
	})
}

// Two disks with one NVMe serial are published at once on a node.
func TestPublishAtOnceRejectsATwin(t *testing.T) {
	t.Parallel()
	slowRigs(t, func(t *testing.T, r *rig) {
		const serial = "twenty-bytes-of-name"
		one := r.UserDisk(t, coretest.Project, serial+"-one", "")
		two := r.UserDisk(t, coretest.Project, serial+"-two", "")
		want := map[codes.Code]int{codes.OK: 1, codes.FailedPrecondition: 1}
		coretest.WantSame(t, publishAtOnce(t, r, r.Node(t, "node-a"), one.Id, two.Id), want)
	})
}

// Seven volumes are published at once on one node. Together they take no longer than one.
func TestPublishAtOnceSideBySide(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBubbleRig(t)
		const trip = 50 * time.Millisecond
		var latency time.Duration
		r.before = func(*http.Request) { time.Sleep(latency) }
		r.ControllerClient = r.dial(t, r.startController(t, controller.Options{}))
		var ids []string
		for n := range 7 {
			ids = append(ids, r.Create(t, fmt.Sprint("v", n)))
		}
		_, err := r.client.ProjectID(t.Context()) // as the plugin's start does
		coretest.Must(t, err)
		node := r.Node(t, "node-a")
		latency = trip
		begun := time.Now()
		coretest.WantSame(t, publishAtOnce(t, r.rig, node, ids...), map[codes.Code]int{codes.OK: 7})
		// Two calls after one another: the instance's disks, the attach.
		if took := time.Since(begun); took > 2*trip {
			t.Errorf("seven publishes took %s, with %s for each call of the rack", took, trip)
		}
	})
}

// lateDisks delays the rack's answers about the disks of an instance until late is closed, unless it is nil.
type lateDisks struct {
	http.RoundTripper
	late chan struct{}
}

func (l *lateDisks) RoundTrip(req *http.Request) (*http.Response, error) {
	response, err := l.RoundTripper.RoundTrip(req)
	if l.late != nil && req.Method == http.MethodGet && strings.HasSuffix(req.URL.Path, "/disks") {
		<-l.late
	}
	return response, err
}

// A publish does not take the disk for attached because another publish's look at the instance, which began before the
// disk's last detach, says so.
func TestPublishBesideAnOldLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newBubbleRig(t)
		transport := &lateDisks{}
		r.transport = func(h handlerTransport) http.RoundTripper { transport.RoundTripper = h; return transport }
		r.ControllerClient = r.dial(t, r.startController(t, controller.Options{}))
		old, next, node := r.Create(t, "old"), r.Create(t, "next"), r.Node(t, "node-a")
		r.Must(t, r.Publish(t, old, node))
		before := r.ControllerClient
		r.ControllerClient = r.dial(t, r.startController(t, controller.Options{})) // it remembers no disk
		transport.late = make(chan struct{})
		published := make(chan error, 2)
		go func() { published <- r.Publish(t, next, node) }()
		synctest.Wait() // its look has seen the old volume
		_, err := before.ControllerUnpublishVolume(t.Context(), &csi.ControllerUnpublishVolumeRequest{
			VolumeId: old, NodeId: node,
		})
		r.Must(t, err)
		go func() { published <- r.Publish(t, old, node) }()
		synctest.Wait()
		close(transport.late)
		r.Must(t, errors.Join(<-published, <-published))
		for _, id := range []string{old, next} {
			if got := r.Holder(t, id); got != node {
				t.Errorf("volume %s is published on %s, and its disk is on %q", id, node, got)
			}
		}
	})
}

func TestPublishThroughFaults(t *testing.T) {
	t.Parallel()
	for _, operation := range []string{"disk_view", "instance_disk_list", "instance_disk_attach"} {
		for _, fault := range []struct {
			kind string
			code int
		}{{simtest.FaultLost, 0}, {simtest.FaultReset, 0}, {simtest.FaultStatus, 500}, {simtest.FaultStatus, 503}, {simtest.FaultStatus, 409}} {
			t.Run(fmt.Sprint(operation, fault.kind, fault.code), func(t *testing.T) {
				r := newRig(t)
				id, node := r.Create(t, "v"), r.Node(t, "node-a")
				if operation == "disk_view" {
					r.Start(t) // it remembers no disk
				}
				r.Inject(t, operation, fault.kind, fault.code)
				if err := r.Publish(t, id, node); err == nil && r.Holder(t, id) != node {
					t.Fatal("the call succeeded, but the disk is not attached")
				}
				r.Must(t, r.Publish(t, id, node))
				if got := r.Holder(t, id); got != node {
					t.Errorf("the disk is attached to %q", got)
				}
			})
		}
	}
}

func TestUnpublishThroughFaults(t *testing.T) {
	t.Parallel()
	for _, operation := range []string{"disk_view", "instance_disk_detach"} {
		for _, fault := range []struct {
			kind string
			code int
		}{{simtest.FaultLost, 0}, {simtest.FaultReset, 0}, {simtest.FaultStatus, 500}, {simtest.FaultStatus, 503}, {simtest.FaultStatus, 409}} {
			t.Run(fmt.Sprint(operation, fault.kind, fault.code), func(t *testing.T) {
				r := newRig(t)
				id, node := r.Create(t, "v"), r.Node(t, "node-a")
				r.Must(t, r.Publish(t, id, node))
				if operation == "disk_view" {
					r.Start(t) // it remembers no disk
				}
				r.Inject(t, operation, fault.kind, fault.code)
				if err := r.Unpublish(t, id, node); err == nil && r.Holder(t, id) != "" {
					t.Fatal("the call succeeded, but the disk is still attached")
				}
				r.Must(t, r.Unpublish(t, id, node))
				if got := r.Holder(t, id); got != "" {
					t.Errorf("the disk is attached to %q", got)
				}
			})
		}
	}
}

// Orchestrators call late, twice, and for deleted nodes. A disk that is attached to another instance meanwhile must
// stay attached.
func TestUnpublishForTheWrongNodeDetachesNothing(t *testing.T) {
	r := newRig(t)
	id, a, b := r.Create(t, "v"), r.Node(t, "node-a"), r.Node(t, "node-b")
	r.Must(t, r.Publish(t, id, b))
	for name, node := range map[string]string{"the old node": a, "an unknown node": uuid.NewString(), "no UUID": "node-b"} {
		r.ClearCalls(t)
		r.Must(t, r.Unpublish(t, id, node))
		if got := r.Holder(t, id); got != b {
			t.Fatalf("%s: the disk is attached to %q, want %q", name, got, b)
		}
		if calls := r.Calls(t); calls["instance_disk_detach"] != 0 {
			t.Errorf("%s: calls %v", name, calls)
		}
	}
}

func TestUnpublishConverges(t *testing.T) {
	t.Run("no node ID", func(t *testing.T) {
		r := newRig(t)
		id, node := r.Create(t, "v"), r.Node(t, "node-a")
		r.Must(t, r.Publish(t, id, node))
		r.Must(t, r.Unpublish(t, id, ""))
		if got := r.Holder(t, id); got != "" {
			t.Errorf("the disk is attached to %q", got)
		}
	})
	t.Run("deleted instance", func(t *testing.T) {
		r := newRig(t)
		id, node := r.Create(t, "v"), r.Node(t, "node-a")
		r.Must(t, r.Publish(t, id, node))
		r.Must(t, r.Sim.SetRunState(t.Context(), node, "stopped"))
		r.Must(t, r.SDK.InstanceDelete(t.Context(), oxide.InstanceDeleteParams{Instance: oxide.NameOrId(node)}))
		r.Must(t, r.Unpublish(t, id, node))
	})
	for _, state := range []string{"failed", "stopped"} {
		t.Run(state+" instance", func(t *testing.T) {
			r := newRig(t, func(o *coretest.Options) { o.DetachGrace = time.Hour })
			id, node := r.Create(t, "v"), r.Node(t, "node-a")
			r.Must(t, r.Publish(t, id, node))
			r.Must(t, r.Sim.SetRunState(t.Context(), node, state))
			r.Must(t, r.Unpublish(t, id, node))
			// The controller's own loop may have been faster to begin the detach.
			await.Eventually(t, "the disk is detached", func() bool { return r.Holder(t, id) == "" })
		})
	}
	t.Run("deleted disk", func(t *testing.T) {
		r := newRig(t)
		id := r.Create(t, "v")
		r.Must(t, r.Delete(t, id))
		r.Must(t, r.Unpublish(t, id, r.Node(t, "node-a")))
	})
	t.Run("no UUID", func(t *testing.T) {
		r := newRig(t)
		r.ClearCalls(t)
		r.Must(t, r.Unpublish(t, "v", "n"))
		r.WantCalls(t, map[string]int{})
	})
}

// Nomad repeats a rejected detach every second. Only the first call sends requests to the rack, and only its answer is
// logged above debug level.
func TestRejectedDetachIsAnsweredFromTheCache(t *testing.T) {
	log := &simtest.Output{}
	r := newRig(t, func(o *coretest.Options) { o.Log = log })
	id, node := r.Create(t, "v"), r.Node(t, "node-a")
	r.Must(t, r.Publish(t, id, node))
	r.Must(t, r.Sim.Set(t.Context(), simtest.Settings{Hotplug: new(bool)}))
	const mentions = "while the instance is stopped"
	calls := map[string]int{"disk_view": 1, "instance_disk_detach": 1, "instance_view": 1}
	r.ClearCalls(t)
	first := r.Unpublish(t, id, node)
	coretest.WantCode(t, first, codes.FailedPrecondition, mentions)
	r.WantCalls(t, calls)
	r.ClearCalls(t)
	for range 3 {
		again := r.Unpublish(t, id, node)
		coretest.WantCode(t, again, codes.FailedPrecondition)
		if again.Error() != first.Error() {
			t.Errorf("the first answer is %v, a later one %v", first, again)
		}
	}
	r.WantCalls(t, map[string]int{})
	var levels []string
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, "msg=responded method=ControllerUnpublishVolume") {
			_, level, _ := strings.Cut(line, "level=")
			levels = append(levels, strings.Fields(level)[0])
		}
	}
	coretest.WantSame(t, levels, []string{"ERROR", "DEBUG", "DEBUG", "DEBUG"})
	// Another publish removes the cached answer.
	r.Must(t, r.Publish(t, id, node))
	r.ClearCalls(t)
	coretest.WantCode(t, r.Unpublish(t, id, node), codes.FailedPrecondition, mentions)
	r.WantCalls(t, calls)
}

// Twenty identical calls at the same time do the work once.
func TestConcurrentCallsAreOneOperation(t *testing.T) {
	r := newRig(t)
	node := r.Node(t, "node-a")
	answers := make(chan *csi.CreateVolumeResponse)
	const callers = 20
	for range callers {
		go func() {
			resp, err := r.CreateVolume(t.Context(), coretest.CreateRequest("v"))
			if err != nil {
				t.Error(err)
			}
			answers <- resp
		}()
	}
	first := <-answers
	for range callers - 1 {
		coretest.WantSame(t, <-answers, first)
	}
	id := first.GetVolume().GetVolumeId()
	done := make(chan error)
	r.ClearCalls(t)
	for range callers {
		go func() { done <- r.Publish(t, id, node) }()
	}
	for range callers {
		r.Must(t, <-done)
	}
	if calls := r.Calls(t); calls["instance_disk_attach"] != 1 {
		t.Errorf("calls %v", calls)
	}
}
