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

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/oxidecomputer/oxide-csi-plugin/core/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// path is a way that an RPC can take: prepare sets the stage, and only what call asks of the rack is counted.
type path struct {
	prepare func(t *testing.T, r *rig) (id string)
	call    func(t *testing.T, r *rig, id string)
}

func aVolume(t *testing.T, r *rig) string { return r.Create(t, "v") }

func aSnapshot(t *testing.T, r *rig) string { return r.snapshot(t, "s", r.Create(t, "v")) }

func nothing(*testing.T, *rig) string { return coretest.NoVolumeID }

// faulty lets a call fail, once it was prepared.
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

// running makes the rack one that changes stopped instances only.
func running(prepare func(*testing.T, *rig) string) func(*testing.T, *rig) string {
	return func(t *testing.T, r *rig) string {
		id := prepare(t, r)
		r.Must(t, r.Sim.Set(t.Context(), simtest.Settings{Hotplug: new(false)}))
		return id
	}
}

// Calls whose answers do not matter here: other tests look at them.
var (
	createBlank = func(t *testing.T, r *rig, _ string) { _, _ = r.CreateVolume(t.Context(), coretest.CreateRequest("v")) }
	restore     = func(t *testing.T, r *rig, id string) { _, _ = r.CreateVolume(t.Context(), from("r", fromSnapshot(id))) }
	clone       = func(t *testing.T, r *rig, id string) { _, _ = r.CreateVolume(t.Context(), from("c", fromVolume(id))) }
	deleteIt    = func(t *testing.T, r *rig, id string) { _ = r.Delete(t, id) }
	publishIt   = func(t *testing.T, r *rig, id string) { _ = r.Publish(t, id, nodeOf(t, r)) }
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

// nodeOf is node-a's ID, from where asking costs no call of the API.
func nodeOf(t *testing.T, r *rig) string {
	t.Helper()
	instances, err := r.Sim.ListInstances(t.Context())
	r.Must(t, err)
	i := slices.IndexFunc(instances, func(i simtest.SimInstance) bool { return i.Name == "node-a" })
	return instances[i].ID
}

// cloneInTheWay is a volume whose copy meets what an earlier attempt left, loses an answer, and cannot tidy up at once.
func cloneInTheWay(t *testing.T, r *rig) string {
	id := r.Create(t, "v")
	r.left(t, coretest.Cluster, "c", id)
	r.Inject(t, "disk_create", simtest.FaultLost, 0)
	_, err := r.Sim.Inject(
		t.Context(),
		simtest.Fault{Operation: "snapshot_delete", Kind: simtest.FaultStatus, Status: 503, Skip: 1},
	)
	r.Must(t, err)
	return id
}

// budgets are the paths of the page, by the names of its rows: the happy one and the worst one.
var budgets = map[string][2]path{
	"CreateVolume": {
		{nothing, createBlank},
		{faulty(nothing, "disk_create", simtest.FaultLost, 0), createBlank},
	},
	"CreateVolume from a snapshot": {
		{aSnapshot, restore},
		{faulty(aSnapshot, "disk_create", simtest.FaultLost, 0), restore},
	},
	"CreateVolume from a volume": {{aVolume, clone}, {cloneInTheWay, clone}},
	"DeleteVolume": {
		{aVolume, deleteIt},
		{faulty(aVolume, "disk_delete", simtest.FaultStatus, 400), deleteIt},
	},
	"ControllerPublishVolume":    {{aVolume, publishIt}, {running(aVolume), publishIt}},
	"ControllerUnpublishVolume":  {{published, unpublishIt}, {running(published), unpublishIt}},
	"ValidateVolumeCapabilities": {{aVolume, validateIt}, {nothing, validateIt}},
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

// The page says what each RPC asks of a rack, and the rack counts it.
func TestAPICallBudgets(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference/api-calls.md")
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
	for name, paths := range budgets {
		for i, path := range paths {
			t.Run(fmt.Sprint(name, [2]string{" happy", " worst"}[i]), func(t *testing.T) {
				r := newRig(t)
				id := path.prepare(t, r)
				r.ClearCalls(t)
				path.call(t, r, id)
				calls := r.Calls(t)
				var parts []string
				for _, operation := range slices.Sorted(maps.Keys(calls)) {
					parts = append(parts, fmt.Sprint(operation, " ", calls[operation]))
				}
				if got := strings.Join(parts, ", "); got != rows[name][i] {
					t.Errorf("the rack counts %q, the page says %q", got, rows[name][i])
				}
			})
		}
	}
}

// Every RPC of the controller that asks a rack for anything has a row.
func TestEveryRPCHasABudget(t *testing.T) {
	r := newRig(t)
	for _, rpc := range csi.Controller_ServiceDesc.Methods {
		// An empty message is an empty request of every kind.
		err := r.Conn.Invoke(t.Context(), "/csi.v1.Controller/"+rpc.MethodName, &emptypb.Empty{}, &emptypb.Empty{})
		_, has := budgets[rpc.MethodName]
		if status.Code(err) != codes.Unimplemented && rpc.MethodName != "ControllerGetCapabilities" && !has {
			t.Errorf("%s has none", rpc.MethodName)
		}
	}
}
