// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package core_test

import (
	"context"
	"regexp"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/core"
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics"
	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics/metricstest"
	"github.com/oxidecomputer/oxide-csi-plugin/core/rpc"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/coretest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// measuredController returns a controller with metrics.
func measuredController(
	t *testing.T,
	gate *coretest.Gate,
) (*coretest.Rig, csi.ControllerClient, csi.NodeClient, *metrics.Metrics) {
	t.Helper()
	m := metrics.New(metrics.Process{Driver: rpc.PluginName, Version: "test", Mode: "controller"})
	r, conn, _ := gatedController(t, gate, func(o *core.ServerOptions) { o.Metrics = m })
	return r, csi.NewControllerClient(conn), csi.NewNodeClient(conn), m
}

var operationCount = regexp.MustCompile(
	`^csi_plugin_operations_seconds_count{driver_name="csi.oxide.computer",grpc_status_code="(\w+)",method_name="/csi.v1.(\w+/\w+)"}$`,
)

// rpcCounts returns the number of RPCs by method and code; a key is, for instance, "Controller/CreateVolume OK".
func rpcCounts(t *testing.T, m *metrics.Metrics) map[string]int {
	t.Helper()
	counts := map[string]int{}
	for series, value := range metricstest.Read(t, metricstest.Page(m)).Matching("csi_plugin_operations_seconds_count") {
		parts := operationCount.FindStringSubmatch(series)
		if parts == nil {
			t.Fatalf("a series %s", series)
		}
		counts[parts[2]+" "+parts[1]] = int(value)
	}
	return counts
}

// Every RPC is counted once, with its code, and is then no longer in flight.
func TestRPCsAreCounted(t *testing.T) {
	gate := &coretest.Gate{}
	r, controller, node, m := measuredController(t, gate)
	if counts := rpcCounts(t, m); len(counts) != 0 {
		t.Errorf("before the first RPC: %v", counts)
	}
	var ids []string
	for _, name := range []string{"a", "b"} {
		volume, err := controller.CreateVolume(t.Context(), coretest.CreateRequest(name))
		coretest.Must(t, err)
		ids = append(ids, volume.GetVolume().GetVolumeId())
	}
	_, err := controller.CreateVolume(t.Context(), &csi.CreateVolumeRequest{})
	coretest.WantCode(t, err, codes.InvalidArgument)
	_, err = node.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	coretest.WantCode(t, err, codes.Unimplemented)
	_, err = controller.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{
		VolumeId:         "00000000-0000-0000-0000-000000000000",
		NodeId:           r.Node(t, "node-a"),
		VolumeCapability: coretest.MountWriter(),
	})
	coretest.WantCode(t, err, codes.NotFound)

	gate.Panic("DELETE", "/v1/disks", "defect")
	_, err = controller.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: ids[0]})
	coretest.WantCode(t, err, codes.Internal)
	for _, id := range ids {
		_, err = controller.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
		coretest.Must(t, err)
	}

	// A cancelled CreateVolume still waits for the rack's answer. It counts with the code of that answer.
	hold := gate.Hold("POST", "/v1/disks")
	ctx, cancel := context.WithCancel(t.Context())
	answered := make(chan error, 1)
	go func() {
		_, err := controller.CreateVolume(ctx, coretest.CreateRequest("c"))
		answered <- err
	}()
	hold.Entered(t)
	const inFlight = `csi_plugin_operations_in_flight{driver_name="csi.oxide.computer",method_name="/csi.v1.Controller/CreateVolume"}`
	if n := metricstest.Read(t, metricstest.Page(m))[inFlight]; n != 1 {
		t.Errorf("%v in flight, want 1", n)
	}
	cancel()
	coretest.WantCode(t, <-answered, codes.Canceled)
	hold.Release()
	await.Eventually(
		t,
		"the cancelled call has ended",
		func() bool { return metricstest.Read(t, metricstest.Page(m))[inFlight] == 0 },
	)

	want := map[string]int{
		"Controller/CreateVolume OK":                  3,
		"Controller/CreateVolume InvalidArgument":     1,
		"Controller/ControllerPublishVolume NotFound": 1,
		"Controller/DeleteVolume Internal":            1,
		"Controller/DeleteVolume OK":                  2,
		"Node/NodeGetInfo Unimplemented":              1,
	}
	if diff := cmp.Diff(want, rpcCounts(t, m)); diff != "" {
		t.Errorf("RPCs (-want +got):\n%s", diff)
	}
	samples := metricstest.Read(t, metricstest.Page(m))
	for series, value := range samples.Matching("csi_plugin_operations_in_flight") {
		if value != 0 {
			t.Errorf("%s: %v with nothing in flight", series, value)
		}
	}
	words := map[string]float64{
		`oxide_csi_errors_total{method_name="/csi.v1.Controller/ControllerPublishVolume",word="NotFound"}`: 1,
	}
	if diff := cmp.Diff(words, map[string]float64(samples.Matching("oxide_csi_errors_total"))); diff != "" {
		t.Errorf("errors with a word (-want +got):\n%s", diff)
	}
	if n := samples[`csi_plugin_panics_total{driver_name="csi.oxide.computer"}`]; n != 1 {
		t.Errorf("%v panics, want 1", n)
	}
}

// The number of series does not grow with the number of volumes. No series has the ID of a volume or the token.
func TestMetricsDoNotGrow(t *testing.T) {
	r, controller, _, m := measuredController(t, &coretest.Gate{})
	nodeID := r.Node(t, "node-a")
	life := func(name string) string {
		volume, err := controller.CreateVolume(t.Context(), coretest.CreateRequest(name))
		coretest.Must(t, err)
		id := volume.GetVolume().GetVolumeId()
		_, err = controller.ControllerPublishVolume(
			t.Context(),
			&csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: nodeID, VolumeCapability: coretest.MountWriter()},
		)
		coretest.Must(t, err)
		_, err = controller.ControllerUnpublishVolume(
			t.Context(),
			&csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: nodeID},
		)
		coretest.Must(t, err)
		_, err = controller.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
		coretest.Must(t, err)
		return id
	}
	secrets := []string{nodeID, coretest.Token, "volume-", life("volume-0")}
	before := len(metricstest.Read(t, metricstest.Page(m)))
	for _, name := range []string{"volume-1", "volume-2", "volume-3", "volume-4"} {
		secrets = append(secrets, life(name))
	}
	page := metricstest.Page(m)
	if after := len(metricstest.Read(t, page)); after != before {
		t.Errorf("%d samples after one volume, %d after five", before, after)
	}
	for _, secret := range secrets {
		if strings.Contains(page, secret) {
			t.Errorf("the page contains %q", secret)
		}
	}
}

// A complete list updates the number of volumes, also one of several pages. It counts only volumes of this cluster.
func TestVolumesAreCounted(t *testing.T) {
	r, controller, _, m := measuredController(t, &coretest.Gate{})
	nodeID := r.Node(t, "node-a")
	var ids []string
	for _, name := range []string{"a", "b", "c"} {
		ids = append(ids, r.Create(t, name))
	}
	encrypted := coretest.CreateRequest("encrypted")
	encrypted.Parameters = map[string]string{rpc.KeyEncryption: rpc.EncryptionLUKS2}
	volume, err := controller.CreateVolume(t.Context(), encrypted)
	coretest.Must(t, err)
	ids = append(ids, volume.GetVolume().GetVolumeId())
	coretest.Must(t, r.Publish(t, ids[0], nodeID))
	r.AttachByHand(t, r.UserDisk(t, coretest.Project, "by-hand", "of a user").Id, nodeID)
	list := func(req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
		return controller.ListVolumes(t.Context(), req)
	}
	want := func(when string, counts metricstest.Samples) {
		t.Helper()
		if diff := cmp.Diff(counts, metricstest.Read(t, metricstest.Page(m)).Matching("oxide_csi_volumes")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	counts := func(all, attached, encrypted float64) metricstest.Samples {
		return metricstest.Samples{
			`oxide_csi_volumes{rack="default"}`:           all,
			`oxide_csi_volumes_attached{rack="default"}`:  attached,
			`oxide_csi_volumes_encrypted{rack="default"}`: encrypted,
		}
	}
	want("before the first list", metricstest.Samples{})
	page, err := list(&csi.ListVolumesRequest{MaxEntries: 1})
	coretest.Must(t, err)
	want("after the first page", metricstest.Samples{})
	for range 2 { // a caller may repeat a page
		_, err = list(&csi.ListVolumesRequest{StartingToken: page.GetNextToken()})
		coretest.Must(t, err)
		want("after all pages", counts(4, 1, 1))
	}
	_, err = list(&csi.ListVolumesRequest{})
	coretest.Must(t, err)
	want("after a complete list", counts(4, 1, 1))
	coretest.Must(t, r.Unpublish(t, ids[0], nodeID))
	r.Inject(t, "disk_list", simtest.FaultStatus, 500)
	_, err = list(&csi.ListVolumesRequest{})
	if err == nil {
		t.Error("a list on a rack that fails succeeded")
	}
	want("after a list that failed", counts(4, 1, 1))
	for _, id := range ids {
		coretest.Must(t, r.Delete(t, id))
	}
	_, err = list(&csi.ListVolumesRequest{})
	coretest.Must(t, err)
	want("after the last volume", counts(0, 0, 0))
}
