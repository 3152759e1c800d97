// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rack/diskname"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
)

// replicaPage lists the replicaRows that are not prevented.
const replicaPage = "../../docs/explanation/controller.md"

// replicaRow is a pair of RPCs on two controllers. The late RPC has made all its checks, and its change waits at the
// rack. Meanwhile the other controller serves RPCs from begin to end. Then the change of the late RPC comes through. A
// controller decides by what it read before its change, so no other order of reads and changes has other results.
type replicaRow struct {
	// before are the RPCs that were served before, at first on a rack without disks.
	before []string
	// late is the late RPC, and meanwhile are the RPCs of the other controller.
	late      string
	meanwhile []string
	// refused is the code of the last of meanwhile, answer the code of late.
	refused, answer codes.Code
	// again is the code of late if it is repeated, which an orchestrator does after some codes.
	again codes.Code
	// then is what the rack has in the end, see [replicaScene.state].
	then string
	// notPrevented marks a result that an orchestrator does not expect. The page says what follows.
	notPrevented bool
	// change changes the options of rack and controllers.
	change func(*coretest.Options)
}

// roomForOne leaves room for one disk beside the boot disk, as the controllers are configured. The rack itself has room
// for more, or not.
func roomForOne(rackLimit int) func(*coretest.Options) {
	return func(o *coretest.Options) { o.MaxDisks, o.Rack.MaxDisks = 2, rackLimit }
}

// replicaRows are the pairs. In each pair both RPCs are for the same volume, name, snapshot or instance.
var replicaRows = []replicaRow{
	// Create.
	{late: "create", meanwhile: []string{"create"}, then: "volume detached"},
	{late: "create", meanwhile: []string{"create", "publish on a"}, then: "volume on a"},
	{late: "create", meanwhile: []string{"create", "delete"}, then: "volume detached", notPrevented: true},
	{before: []string{"create"}, late: "delete", meanwhile: []string{"create"}, then: "nothing"},
	// Delete.
	{before: []string{"create"}, late: "delete", meanwhile: []string{"delete"}, then: "nothing"},
	{before: []string{"create"}, late: "delete", meanwhile: []string{"delete", "create"}, then: "volume detached"},
	{
		before:    []string{"create"},
		late:      "delete",
		meanwhile: []string{"publish on a"},
		answer:    codes.FailedPrecondition,
		again:     codes.FailedPrecondition,
		then:      "volume on a",
	},
	{before: []string{"create"}, late: "delete", meanwhile: []string{"publish on a", "unpublish from a"}, then: "nothing"},
	{
		before:    []string{"create", "publish on a"},
		late:      "unpublish from a",
		meanwhile: []string{"delete"},
		refused:   codes.FailedPrecondition,
		then:      "volume detached",
	},
	{
		before:    []string{"create", "publish on a"},
		late:      "unpublish from a",
		meanwhile: []string{"unpublish from a", "delete"},
		then:      "nothing",
	},
	{
		before:    []string{"create"},
		late:      "publish on a",
		meanwhile: []string{"delete"},
		answer:    codes.NotFound,
		again:     codes.NotFound,
		then:      "nothing",
	},
	// Publish and unpublish.
	{before: []string{"create"}, late: "publish on a", meanwhile: []string{"publish on a"}, then: "volume on a"},
	{
		before:    []string{"create"},
		late:      "publish on a",
		meanwhile: []string{"publish on b"},
		answer:    codes.FailedPrecondition,
		again:     codes.FailedPrecondition,
		then:      "volume on b",
	},
	{
		before:       []string{"create"},
		late:         "publish on a",
		meanwhile:    []string{"unpublish from a"},
		then:         "volume on a",
		notPrevented: true,
	},
	{
		before:    []string{"create"},
		late:      "publish on a",
		meanwhile: []string{"unpublish from a", "publish on b"},
		answer:    codes.FailedPrecondition,
		again:     codes.FailedPrecondition,
		then:      "volume on b",
	},
	{
		before:    []string{"create", "publish on a"},
		late:      "unpublish from a",
		meanwhile: []string{"unpublish from a"},
		then:      "volume detached",
	},
	{
		before:       []string{"create", "publish on a"},
		late:         "unpublish from a",
		meanwhile:    []string{"publish on a"},
		then:         "volume detached",
		notPrevented: true,
	},
	{
		before:       []string{"create", "publish on a"},
		late:         "unpublish from a",
		meanwhile:    []string{"unpublish from a", "publish on a"},
		then:         "volume detached",
		notPrevented: true,
	},
	{
		before:    []string{"create", "publish on a"},
		late:      "unpublish from a",
		meanwhile: []string{"unpublish from a", "publish on b"},
		then:      "volume on b",
	},
	{
		before:    []string{"create", "publish on a"},
		late:      "unpublish from every node",
		meanwhile: []string{"unpublish from a", "publish on b"},
		then:      "volume on b",
	},
	// Two volumes on one instance.
	{
		before:    []string{"create", "create another"},
		late:      "publish on a",
		meanwhile: []string{"publish another on a"},
		answer:    codes.ResourceExhausted,
		again:     codes.ResourceExhausted,
		then:      "another on a, volume detached",
		change:    roomForOne(2),
	},
	{
		before:       []string{"create", "create another"},
		late:         "publish on a",
		meanwhile:    []string{"publish another on a"},
		then:         "another on a, volume on a",
		notPrevented: true,
		change:       roomForOne(12),
	},
	{
		before:       []string{"create twins by hand"},
		late:         "publish on a",
		meanwhile:    []string{"publish another on a"},
		then:         "another on a, volume on a",
		notPrevented: true,
	},
	// Snapshots.
	{before: []string{"create"}, late: "snapshot", meanwhile: []string{"snapshot"}, then: "volume detached, snapshot"},
	{before: []string{"create"}, late: "snapshot", meanwhile: []string{"publish on a"}, then: "volume on a, snapshot"},
	{before: []string{"create"}, late: "publish on a", meanwhile: []string{"snapshot"}, then: "volume on a, snapshot"},
	{
		before:    []string{"create", "publish on a"},
		late:      "snapshot",
		meanwhile: []string{"unpublish from a"},
		then:      "volume detached, snapshot",
	},
	{
		before:    []string{"create", "publish on a"},
		late:      "unpublish from a",
		meanwhile: []string{"snapshot"},
		then:      "volume detached, snapshot",
	},
	{
		before:    []string{"create"},
		late:      "snapshot",
		meanwhile: []string{"delete"},
		answer:    codes.Unavailable,
		again:     codes.NotFound,
		then:      "nothing",
	},
	{before: []string{"create"}, late: "delete", meanwhile: []string{"snapshot"}, then: "snapshot"},
	{
		before:       []string{"create"},
		late:         "snapshot",
		meanwhile:    []string{"snapshot", "delete the snapshot"},
		then:         "volume detached, snapshot",
		notPrevented: true,
	},
	{
		before:    []string{"create", "snapshot"},
		late:      "delete the snapshot",
		meanwhile: []string{"snapshot"},
		then:      "volume detached",
	},
	{
		before:    []string{"create", "snapshot"},
		late:      "delete the snapshot",
		meanwhile: []string{"delete the snapshot"},
		then:      "volume detached",
	},
	{
		before:    []string{"create", "snapshot"},
		late:      "delete the snapshot",
		meanwhile: []string{"delete the snapshot", "snapshot"},
		then:      "volume detached, snapshot",
	},
	// Restores and clones.
	{
		before:    []string{"create", "snapshot"},
		late:      "restore",
		meanwhile: []string{"restore"},
		then:      "restored detached, volume detached, snapshot",
	},
	{
		before:    []string{"create", "snapshot"},
		late:      "restore",
		meanwhile: []string{"delete the snapshot"},
		answer:    codes.Unavailable,
		again:     codes.NotFound,
		then:      "volume detached",
	},
	{
		before:    []string{"create", "snapshot"},
		late:      "delete the snapshot",
		meanwhile: []string{"restore"},
		then:      "restored detached, volume detached",
	},
	{before: []string{"create"}, late: "clone", meanwhile: []string{"clone"}, then: "clone detached, volume detached"},
	{
		before:    []string{"create"},
		late:      "clone, before its disk",
		meanwhile: []string{"clone"},
		then:      "clone detached, volume detached",
	},
	{
		before:    []string{"create"},
		late:      "clone",
		meanwhile: []string{"delete"},
		answer:    codes.Unavailable,
		again:     codes.NotFound,
		then:      "nothing",
	},
	{before: []string{"create"}, late: "clone, before its disk", meanwhile: []string{"delete"}, then: "clone detached"},
	{before: []string{"create"}, late: "delete", meanwhile: []string{"clone"}, then: "clone detached"},
	{before: []string{"create"}, late: "clone", meanwhile: []string{"publish on a"}, then: "clone detached, volume on a"},
	{before: []string{"create"}, late: "publish on a", meanwhile: []string{"clone"}, then: "clone detached, volume on a"},
	{
		before:    []string{"create", "publish on a"},
		late:      "clone",
		meanwhile: []string{"unpublish from a"},
		then:      "clone detached, volume detached",
	},
	{
		before:    []string{"create"},
		late:      "clone",
		meanwhile: []string{"snapshot"},
		then:      "clone detached, volume detached, snapshot",
	},
}

// replicaOp is one kind of RPC.
type replicaOp struct {
	// method and prefix choose the request to the rack that makes the change.
	method, prefix string
	// do sends the RPC, and returns the ID of what it made.
	do func(context.Context, *rig, *replicaScene) (string, error)
}

// replicaOps are the RPCs by their names in the table.
var replicaOps = map[string]replicaOp{
	"create":         {"POST", "/v1/disks", replicaCreate("volume")},
	"create another": {do: replicaCreate("another")},
	"create twins by hand": {do: func(_ context.Context, r *rig, s *replicaScene) (string, error) {
		const serial = "twenty-bytes-of-name"
		s.another = r.UserDisk(s.t, coretest.Project, serial+"-another", "").Id
		return r.UserDisk(s.t, coretest.Project, serial+"-volume", "").Id, nil
	}},
	"delete": {"DELETE", "/v1/disks/", func(ctx context.Context, r *rig, s *replicaScene) (string, error) {
		_, err := r.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: s.volume})
		return "", err
	}},
	"publish on a": {"POST", "/v1/instances/", func(ctx context.Context, r *rig, s *replicaScene) (string, error) {
		return "", replicaPublish(ctx, r, s.volume, s.nodes["a"])
	}},
	"publish on b": {"POST", "/v1/instances/", func(ctx context.Context, r *rig, s *replicaScene) (string, error) {
		return "", replicaPublish(ctx, r, s.volume, s.nodes["b"])
	}},
	"publish another on a": {"POST", "/v1/instances/", func(ctx context.Context, r *rig, s *replicaScene) (string, error) {
		return "", replicaPublish(ctx, r, s.another, s.nodes["a"])
	}},
	"unpublish from a": {"POST", "/v1/instances/", func(ctx context.Context, r *rig, s *replicaScene) (string, error) {
		return "", replicaUnpublish(ctx, r, s.volume, s.nodes["a"])
	}},
	"unpublish from every node": {
		"POST",
		"/v1/instances/",
		func(ctx context.Context, r *rig, s *replicaScene) (string, error) {
			return "", replicaUnpublish(ctx, r, s.volume, "")
		},
	},
	"snapshot": {"POST", "/v1/snapshots", func(ctx context.Context, r *rig, s *replicaScene) (string, error) {
		resp, err := r.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "snapshot", SourceVolumeId: s.volume})
		return resp.GetSnapshot().GetSnapshotId(), err
	}},
	"delete the snapshot": {
		"DELETE",
		"/v1/snapshots/",
		func(ctx context.Context, r *rig, s *replicaScene) (string, error) {
			_, err := r.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: s.snapshot})
			return "", err
		},
	},
	"restore": {"POST", "/v1/disks", func(ctx context.Context, r *rig, s *replicaScene) (string, error) {
		resp, err := r.CreateVolume(ctx, from("restored", fromSnapshot(s.snapshot)))
		return resp.GetVolume().GetVolumeId(), err
	}},
	"clone":                  {"POST", "/v1/snapshots", replicaClone},
	"clone, before its disk": {"POST", "/v1/disks", replicaClone},
}

func replicaCreate(name string) func(context.Context, *rig, *replicaScene) (string, error) {
	return func(ctx context.Context, r *rig, _ *replicaScene) (string, error) {
		resp, err := r.CreateVolume(ctx, coretest.CreateRequest(name))
		return resp.GetVolume().GetVolumeId(), err
	}
}

func replicaClone(ctx context.Context, r *rig, s *replicaScene) (string, error) {
	resp, err := r.CreateVolume(ctx, from("clone", fromVolume(s.volume)))
	return resp.GetVolume().GetVolumeId(), err
}

func replicaPublish(ctx context.Context, r *rig, volumeID, nodeID string) error {
	_, err := r.ControllerPublishVolume(
		ctx,
		&csi.ControllerPublishVolumeRequest{VolumeId: volumeID, NodeId: nodeID, VolumeCapability: coretest.MountWriter()},
	)
	return err
}

func replicaUnpublish(ctx context.Context, r *rig, volumeID, nodeID string) error {
	_, err := r.ControllerUnpublishVolume(
		ctx,
		&csi.ControllerUnpublishVolumeRequest{VolumeId: volumeID, NodeId: nodeID},
	)
	return err
}

// replicaScene is a rack with two controllers.
type replicaScene struct {
	t *testing.T
	// slow is the controller with the late RPC, whose requests pass the gate.
	slow, other *rig
	gate        *coretest.Gate
	// nodes are the IDs of the instances "a" and "b".
	nodes map[string]string
	// volume, another and snapshot are IDs.
	volume, another, snapshot string
}

func newReplicaScene(t *testing.T, change func(*coretest.Options)) *replicaScene {
	t.Helper()
	if change == nil {
		change = func(*coretest.Options) {}
	}
	s := &replicaScene{t: t, other: newRig(t, change), gate: &coretest.Gate{}}
	s.nodes = map[string]string{"a": s.other.Node(t, "node-a"), "b": s.other.Node(t, "node-b")}
	s.slow = s.other.copy()
	s.slow.StartWith(t, coretest.RackClient(t, s.other.Rig, func(cfg *rack.Config) {
		cfg.HTTPClient = &http.Client{Transport: s.gate}
		cfg.LostAnswerWait = time.Millisecond
	}))
	return s
}

// serve sends an RPC to the controller that is not slow, and keeps the ID of the first volume and the first snapshot.
func (s *replicaScene) serve(name string) error {
	id, err := replicaOps[name].do(s.t.Context(), s.other, s)
	for kind, keep := range map[string]*string{"create": &s.volume, "create twins by hand": &s.volume, "create another": &s.another, "snapshot": &s.snapshot} {
		if name == kind && *keep == "" {
			*keep = id
		}
	}
	return err
}

// state says what the rack has: each disk with its place, and each snapshot, also a temporary one.
func (s *replicaScene) state(t *testing.T) string {
	t.Helper()
	disks, err := s.other.SDK.DiskListAllPages(t.Context(), oxide.DiskListParams{Project: coretest.Project})
	coretest.Must(t, err)
	var found []string
	for _, disk := range disks {
		name := string(disk.Name)
		if strings.HasSuffix(name, "-boot") {
			continue
		}
		for _, volume := range []string{"volume", "another", "restored", "clone"} {
			if name == diskname.ForVolume(coretest.Cluster, volume) || strings.HasSuffix(name, "-"+volume) {
				name = volume
			}
		}
		place := "detached"
		if attached, is := disk.State.AsAttached(); is {
			for node, id := range s.nodes {
				if id == attached.Instance {
					place = "on " + node
				}
			}
		}
		found = append(found, name+" "+place)
	}
	slices.Sort(found)
	snapshots, err := s.other.SDK.SnapshotListAllPages(t.Context(), oxide.SnapshotListParams{Project: coretest.Project})
	coretest.Must(t, err)
	for _, snapshot := range snapshots {
		name := string(snapshot.Name)
		if name == diskname.ForSnapshot(coretest.Cluster, "snapshot") {
			name = "snapshot"
		}
		found = append(found, name)
	}
	if len(found) == 0 {
		return "nothing"
	}
	return strings.Join(found, ", ")
}

// has reports whether the rack has a disk or a snapshot with this ID.
func (s *replicaScene) has(t *testing.T, id string) bool {
	t.Helper()
	_, diskErr := s.other.SDK.DiskView(t.Context(), oxide.DiskViewParams{Disk: oxide.NameOrId(id)})
	_, snapshotErr := s.other.SDK.SnapshotView(t.Context(), oxide.SnapshotViewParams{Snapshot: oxide.NameOrId(id)})
	return diskErr == nil || snapshotErr == nil
}

// TestTwoReplicas serves each pair of RPCs by two controllers of one cluster, in both orders of their changes. It
// compares answers and rack with the table, and the pairs that are not prevented with the page.
func TestTwoReplicas(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(replicaPage)
	coretest.Must(t, err)
	listed := 0
	for _, row := range replicaRows {
		t.Run(row.name(), func(t *testing.T) {
			t.Parallel()
			row.test(t)
		})
		if !row.notPrevented {
			continue
		}
		listed++
		if line := row.line(); !strings.Contains(string(page), line) {
			t.Errorf("%s lacks the line:\n%s", replicaPage, line)
		}
	}
	if lines := strings.Count(string(page), "\n| late "); lines != listed {
		t.Errorf("%s has %d lines of pairs, and the test has %d", replicaPage, lines, listed)
	}
}

// test serves the pair, and compares answers and rack with the row.
func (row replicaRow) test(t *testing.T) {
	s := newReplicaScene(t, row.change)
	id, err := s.overtake(t, row)
	coretest.WantCode(t, err, row.answer)
	if state := s.state(t); state != row.then {
		t.Errorf("the rack has: %s; want: %s", state, row.then)
	}
	if id != "" && !s.has(t, id) {
		t.Errorf("the late RPC answered %s, which the rack does not have", id)
	}
	if row.answer != codes.OK {
		_, err := replicaOps[row.late].do(t.Context(), s.other, s)
		coretest.WantCode(t, err, row.again)
		if state := s.state(t); state != row.then {
			t.Errorf("repeated, the rack has: %s; want: %s", state, row.then)
		}
	}
	if row.notPrevented {
		for _, name := range row.meanwhile {
			if sidecar(name) != sidecar(row.late) {
				t.Errorf("%s and %s come from two sidecars, which serve at the same time all along", row.late, name)
			}
		}
	}
}

// overtake serves the pair, and returns the answer to the late RPC.
func (s *replicaScene) overtake(t *testing.T, row replicaRow) (id string, err error) {
	t.Helper()
	for _, name := range row.before {
		coretest.Must(t, s.serve(name))
	}
	op := replicaOps[row.late]
	held := s.gate.Hold(op.method, op.prefix)
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		id, err = op.do(t.Context(), s.slow, s)
	}()
	held.Entered(t)
	for i, name := range row.meanwhile {
		want := codes.OK
		if i == len(row.meanwhile)-1 {
			want = row.refused
		}
		coretest.WantCode(t, s.serve(name), want)
	}
	held.Release()
	<-answered
	return id, err
}

// sidecar is the sidecar of Kubernetes that sends an RPC. Each has a lease of its own.
func sidecar(op string) string {
	switch {
	case strings.Contains(op, "publish"):
		return "attacher"
	case strings.Contains(op, "snapshot"):
		return "snapshotter"
	}
	return "provisioner"
}

// TestTwoReplicasOtherPairs serves the pairs that have no row: what both RPCs answer and leave must be the same as one
// after the other.
func TestTwoReplicasOtherPairs(t *testing.T) {
	t.Parallel()
	kinds := []string{
		"create",
		"delete",
		"publish on a",
		"unpublish from a",
		"snapshot",
		"delete the snapshot",
		"restore",
		"clone",
	}
	for _, late := range kinds {
		for _, meanwhile := range kinds {
			if slices.ContainsFunc(replicaRows, func(row replicaRow) bool {
				return row.late == late && slices.Contains(row.meanwhile, meanwhile)
			}) {
				continue
			}
			row := replicaRow{before: []string{"create", "snapshot"}, late: late, meanwhile: []string{meanwhile}}
			if strings.HasPrefix(late, "unpublish") || strings.HasPrefix(meanwhile, "unpublish") {
				row.before = append(row.before, "publish on a")
			}
			t.Run(row.name(), func(t *testing.T) {
				t.Parallel()
				inOrder := newReplicaScene(t, nil)
				for _, name := range slices.Concat(row.before, []string{late, meanwhile}) {
					coretest.Must(t, inOrder.serve(name))
				}
				row.then = inOrder.state(t)
				row.test(t)
			})
		}
	}
}

// Once its caller has gone, an RPC makes no change any more.
func TestRPCWithoutCallerChangesNothing(t *testing.T) {
	t.Parallel()
	for late, before := range map[string][]string{
		"delete":              {"create"},
		"publish on a":        {"create"},
		"unpublish from a":    {"create", "publish on a"},
		"snapshot":            {"create"},
		"delete the snapshot": {"create", "snapshot"},
		"restore":             {"create", "snapshot"},
		"clone":               {"create"},
	} {
		t.Run(late, func(t *testing.T) {
			t.Parallel()
			s := newReplicaScene(t, nil)
			for _, name := range before {
				coretest.Must(t, s.serve(name))
			}
			want := s.state(t)
			held := s.gate.Hold("GET", "/v1/")
			ctx, cancel := context.WithCancel(t.Context())
			answered := make(chan error, 1)
			go func() {
				_, err := replicaOps[late].do(ctx, s.slow, s)
				answered <- err
			}()
			held.Entered(t)
			cancel()
			coretest.WantCode(t, <-answered, codes.Canceled)
			held.Abandoned(t)
			held.Release()
			s.slow.Server.Stop() // waits for the RPC
			if state := s.state(t); state != want {
				t.Errorf("the rack has: %s; want: %s", state, want)
			}
		})
	}
}

func (row replicaRow) name() string {
	name := fmt.Sprintf("%s while %s", row.late, strings.Join(row.meanwhile, " and "))
	if row.change != nil {
		o := coretest.Options{}
		row.change(&o)
		name += fmt.Sprintf(" with --max-disks=%d on a rack that takes %d", o.MaxDisks, o.Rack.MaxDisks)
	}
	return name
}

// line is the beginning of the row in the table of the page.
func (row replicaRow) line() string {
	return fmt.Sprintf("\n| late %s | %s | %s | ", row.late, strings.Join(row.meanwhile, ", "), row.then)
}

// A late create on one rack makes a second disk if the other controller made the volume on another rack meanwhile. A
// create that allows one of the racks is answered as before. One that allows both says so and names them.
func TestTwoReplicasWithAMovedRequirement(t *testing.T) {
	t.Parallel()
	m := newMultiRig(t)
	gate := &coretest.Gate{}
	slow := &rig{&coretest.Rig{Options: m.Options}}
	var clients []*rack.Client
	for _, name := range rackNames {
		clients = append(clients, coretest.RackClient(t, m.racks[name].Rig, func(cfg *rack.Config) {
			cfg.Name = name
			cfg.HTTPClient = &http.Client{Transport: gate}
		}))
	}
	slow.StartWith(t, clients...)
	create := func(r *rig, racks ...string) error {
		req := coretest.CreateRequest("v")
		req.AccessibilityRequirements = coretest.RequireRacks(racks...)
		_, err := r.CreateVolume(t.Context(), req)
		return err
	}
	held := gate.Hold("POST", "/v1/disks")
	late := make(chan error, 1)
	go func() { late <- create(slow, "east") }()
	held.Entered(t)
	coretest.Must(t, create(m.rig, "west"))
	held.Release()
	coretest.Must(t, <-late)
	coretest.WantSame(t, m.racksWith(t, "v"), []string{"east", "west"})
	coretest.Must(t, create(m.rig, "west"))
	coretest.WantCode(t, create(m.rig, "east", "west"), codes.AlreadyExists, "east", "west", "ask who made each")
}
