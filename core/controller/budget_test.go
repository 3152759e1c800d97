// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller_test

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// scenario is an RPC in a prepared state. The test counts the API calls of call, not those of prepare.
type scenario struct {
	prepare func(t *testing.T, r *rig) (id string)
	call    func(t *testing.T, r *rig, id string)
}

func aVolume(t *testing.T, r *rig) string { return r.Create(t, "v") }

func aSnapshot(t *testing.T, r *rig) string { return r.snapshot(t, "s", r.Create(t, "v")) }

func nothing(*testing.T, *rig) string { return coretest.NoVolumeID }

// faulty adds a fault after prepare.
func faulty(prepare func(*testing.T, *rig) string, operation, kind string, code int) func(*testing.T, *rig) string {
	return func(t *testing.T, r *rig) string {
		id := prepare(t, r)
		r.Inject(t, operation, kind, code)
		return id
	}
}

func published(t *testing.T, r *rig) string {
	id := r.Create(t, "v")
	r.Must(t, r.Publish(t, id, r.Node(t, "node-a")))
	return id
}

// withoutHotplug makes the rack one without hot-plug after prepare.
func withoutHotplug(prepare func(*testing.T, *rig) string) func(*testing.T, *rig) string {
	return func(t *testing.T, r *rig) string {
		id := prepare(t, r)
		r.Must(t, r.Sim.Set(t.Context(), simtest.Settings{Hotplug: new(false)}))
		return id
	}
}

// again starts another process after prepare, which remembers no disk.
func again(prepare func(*testing.T, *rig) string) func(*testing.T, *rig) string {
	return func(t *testing.T, r *rig) string {
		id := prepare(t, r)
		r.Start(t)
		return id
	}
}

// Calls whose answers this test ignores; other tests check them.
var (
	createBlank = func(t *testing.T, r *rig, _ string) { _, _ = r.CreateVolume(t.Context(), coretest.CreateRequest("v")) }
	restore     = func(t *testing.T, r *rig, id string) { _, _ = r.CreateVolume(t.Context(), from("r", fromSnapshot(id))) }
	clone       = func(t *testing.T, r *rig, id string) { _, _ = r.CreateVolume(t.Context(), from("c", fromVolume(id))) }
	deleteIt    = func(t *testing.T, r *rig, id string) { _ = r.Delete(t, id) }
	publishIt   = func(t *testing.T, r *rig, id string) { _ = r.Publish(t, id, nodeOf(t, r)) }
	expandIt    = func(t *testing.T, r *rig, id string) { _, _ = r.expand(t, id, 2*coretest.GiB) }
	unpublishIt = func(t *testing.T, r *rig, id string) { _ = r.Unpublish(t, id, nodeOf(t, r)) }
	validateIt  = func(t *testing.T, r *rig, id string) {
		_, _ = r.ValidateVolumeCapabilities(
			t.Context(),
			&csi.ValidateVolumeCapabilitiesRequest{
				VolumeId:           id,
				VolumeCapabilities: []*csi.VolumeCapability{coretest.MountWriter()},
			},
		)
	}
	getVolume = func(t *testing.T, r *rig, id string) {
		_, _ = r.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
	}
	getHealth = func(t *testing.T, r *rig, id string) {
		_, _ = r.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: id})
	}
	snapshotIt = func(t *testing.T, r *rig, id string) {
		_, _ = r.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: id})
	}
	deleteSnapshot = func(t *testing.T, r *rig, id string) {
		_, _ = r.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})
	}
	getSnapshot = func(t *testing.T, r *rig, id string) {
		_, _ = r.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: id})
	}
	listVolumes = func(t *testing.T, r *rig, _ string) { _, _ = r.ListVolumes(t.Context(), &csi.ListVolumesRequest{}) }
	listHealth  = func(t *testing.T, r *rig, _ string) {
		_, _ = r.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{})
	}
	listSnapshots = func(t *testing.T, r *rig, _ string) { _, _ = r.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{}) }
	getCapacity   = func(t *testing.T, r *rig, _ string) { _, _ = r.GetCapacity(t.Context(), &csi.GetCapacityRequest{}) }
)

// adoptIt adopts a volume of the other cluster.
func adoptIt(t *testing.T, r *rig, id string) { _ = r.adopt(t, id, otherCluster) }

func anotherClustersVolume(t *testing.T, r *rig) string {
	return r.otherController(t, otherCluster).Create(t, "v")
}

func adoptedVolume(t *testing.T, r *rig) string {
	id := anotherClustersVolume(t, r)
	r.Must(t, r.adopt(t, id, otherCluster))
	return id
}

// anotherClustersSnapshot makes a volume of another cluster and a snapshot of it, and deletes the volume.
func anotherClustersSnapshot(t *testing.T, r *rig) string {
	theirs := r.otherController(t, otherCluster)
	id := theirs.Create(t, "v")
	theirs.snapshot(t, "s", id)
	r.Must(t, theirs.Delete(t, id))
	return id
}

// nodeOf returns the ID of node-a without an API call.
func nodeOf(t *testing.T, r *rig) string {
	t.Helper()
	instances, err := r.Sim.ListInstances(t.Context())
	r.Must(t, err)
	i := slices.IndexFunc(instances, func(i simtest.SimInstance) bool { return i.Name == "node-a" })
	return instances[i].ID
}

// worstClone makes a volume whose copy finds the snapshot of an earlier attempt, loses an answer, and cannot delete its
// snapshot at the first attempt.
func worstClone(t *testing.T, r *rig) string {
	id := r.Create(t, "v")
	r.leaveTemporary(t, coretest.Cluster, "c", id)
	r.Inject(t, "disk_create", simtest.FaultLost, 0)
	_, err := r.Sim.Inject(
		t.Context(),
		simtest.Fault{Operation: "snapshot_delete", Kind: simtest.FaultStatus, Status: 503, Skip: 1},
	)
	r.Must(t, err)
	return id
}

// budgets are the two scenarios for each row of docs/explanation/controller.md: the usual case and the worst case.
var budgets = map[string][2]scenario{
	"CreateVolume": {
		{nothing, createBlank},
		{faulty(nothing, "disk_create", simtest.FaultLost, 0), createBlank},
	},
	"CreateVolume from a snapshot": {
		{aSnapshot, restore},
		{faulty(aSnapshot, "disk_create", simtest.FaultLost, 0), restore},
	},
	"CreateVolume from a volume": {{aVolume, clone}, {worstClone, clone}},
	"DeleteVolume": {
		{aVolume, deleteIt},
		{faulty(aVolume, "disk_delete", simtest.FaultStatus, 400), deleteIt},
	},
	"DeleteVolume by another process": {
		{again(aVolume), deleteIt},
		{faulty(again(aVolume), "disk_delete", simtest.FaultStatus, 400), deleteIt},
	},
	"DeleteVolume of an adopted volume": {
		{adoptedVolume, deleteIt},
		{faulty(adoptedVolume, "disk_delete", simtest.FaultStatus, 400), deleteIt},
	},
	"ControllerPublishVolume":   {{aVolume, publishIt}, {withoutHotplug(aVolume), publishIt}},
	"ControllerUnpublishVolume": {{published, unpublishIt}, {withoutHotplug(published), unpublishIt}},
	"ControllerPublishVolume by another process": {
		{again(aVolume), publishIt},
		{withoutHotplug(again(aVolume)), publishIt},
	},
	"ControllerUnpublishVolume by another process": {
		{again(published), unpublishIt},
		{withoutHotplug(again(published)), unpublishIt},
	},
	"ValidateVolumeCapabilities": {{aVolume, validateIt}, {nothing, validateIt}},
	"ControllerModifyVolume":     {{anotherClustersVolume, adoptIt}, {anotherClustersSnapshot, adoptIt}},
	"ControllerExpandVolume":     {{aVolume, expandIt}, {faulty(aVolume, "disk_create", simtest.FaultLost, 0), expandIt}},
	"ListVolumes":                {{aVolume, listVolumes}, {aVolume, listVolumes}},
	"ControllerGetVolume":        {{aVolume, getVolume}, {nothing, getVolume}},
	"GetCapacity":                {{nothing, getCapacity}, {nothing, getCapacity}},
	"CreateSnapshot": {
		{aVolume, snapshotIt},
		{faulty(aVolume, "snapshot_create", simtest.FaultLost, 0), snapshotIt},
	},
	"DeleteSnapshot":             {{aSnapshot, deleteSnapshot}, {nothing, deleteSnapshot}},
	"ListSnapshots":              {{aSnapshot, listSnapshots}, {nothing, listSnapshots}},
	"GetSnapshot":                {{aSnapshot, getSnapshot}, {nothing, getSnapshot}},
	"ControllerGetVolumeHealth":  {{aVolume, getHealth}, {nothing, getHealth}},
	"ControllerListVolumeHealth": {{aVolume, listHealth}, {aVolume, listHealth}},
}

// TestAPICallBudgets compares the API calls that the rack counts with docs/explanation/controller.md.
func TestAPICallBudgets(t *testing.T) {
	page, err := os.ReadFile("../../docs/explanation/controller.md")
	coretest.Must(t, err)
	rows := map[string][2]string{}
	for line := range strings.Lines(string(page)) {
		cells := strings.Split(strings.TrimSpace(line), " | ")
		if name, is := strings.CutPrefix(cells[0], "| `"); is && len(cells) >= 3 {
			name = strings.Replace(name, "`", "", 1)
			rows[name] = [2]string{cells[1], strings.TrimSuffix(cells[2], " |")}
		}
	}
	coretest.WantSame(t, slices.Sorted(maps.Keys(rows)), slices.Sorted(maps.Keys(budgets)))
	for name, scenarios := range budgets {
		for i, scenario := range scenarios {
			t.Run(fmt.Sprint(name, [2]string{" usual", " worst"}[i]), func(t *testing.T) {
				// A look that got too old on a busy machine would be repeated. An expansion waits as long.
				r := newRig(t, func(o *coretest.Options) { o.LookAge = 2 * time.Second })
				id := scenario.prepare(t, r)
				r.ClearCalls(t)
				scenario.call(t, r, id)
				want := rows[name][i]
				if want == "the same" {
					want = rows[name][0]
				}
				if got := listed(r.Calls(t)); got != want {
					t.Errorf("the rack counts %q, the page says %q", got, want)
				}
			})
		}
	}
}

// listed is how the page lists calls: each operation, with its number if there are several.
func listed(calls map[string]int) string {
	var parts []string
	for _, operation := range slices.Sorted(maps.Keys(calls)) {
		if n := calls[operation]; n > 1 {
			operation += fmt.Sprint(" ", n)
		}
		parts = append(parts, operation)
	}
	return strings.Join(parts, ", ")
}

// Every RPC of the controller that sends requests to a rack has a row.
func TestEveryRPCHasABudget(t *testing.T) {
	r := newRig(t)
	for _, rpc := range csi.Controller_ServiceDesc.Methods {
		// An empty message is a valid encoding of every request type.
		err := r.Conn.Invoke(t.Context(), "/csi.v1.Controller/"+rpc.MethodName, &emptypb.Empty{}, &emptypb.Empty{})
		_, has := budgets[rpc.MethodName]
		if status.Code(err) != codes.Unimplemented && rpc.MethodName != "ControllerGetCapabilities" && !has {
			t.Errorf("%s has no row", rpc.MethodName)
		}
	}
}
