// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main_test

import (
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics/metricstest"
	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

var countSeries = regexp.MustCompile(
	`^(?:csi_plugin_operations_seconds_count{driver_name="csi.oxide.computer",grpc_status_code="(\w+)",method_name="/csi\.v1\.(\w+/\w+)"}|` +
		`oxide_csi_rack_request_duration_seconds_count{code="(\w+)",operation="(\w+)",rack="west"})$`,
)

// countsOf returns the counts of a page's histograms, with keys such as "Controller/CreateVolume OK" and "disk_create
// 201".
func countsOf(t *testing.T, samples metricstest.Samples) map[string]int {
	t.Helper()
	counts := map[string]int{}
	for series, value := range samples {
		if !strings.Contains(series, "_seconds_count{") {
			continue
		}
		parts := countSeries.FindStringSubmatch(series)
		if parts == nil {
			t.Errorf("an unexpected series %s", series)
			continue
		}
		counts[parts[2]+parts[4]+" "+parts[1]+parts[3]] = int(value)
	}
	return counts
}

// The metrics count every call of the CSI client and every request to the rack.
func TestMetricsCountEveryCall(t *testing.T) {
	t.Parallel()
	sim, addr, dir := startSim(t, "--hotplug"), freePort(t), shortDir(t)
	node := sim.Instance("node-a")
	must(t, os.Mkdir(dir+"/block", 0o755)) // an instance without disks
	plugin := startPlugin(t, simtest.PluginOptions{
		Mode: "all", Dir: dir, Sim: sim, Instance: node,
		Args: []string{"--http-endpoint=" + addr, "--rack=west", "--sys-root=" + dir},
	})
	page := func() string {
		t.Helper()
		code, body := get(t, "http://"+addr+"/metrics")
		if code != 200 {
			t.Fatalf("/metrics: %d %s", code, body)
		}
		return body
	}
	await.Eventually(
		t,
		"the rack was checked",
		func() bool { return countsOf(t, metricstest.Read(t, page()))["project_view 200"] == 1 },
	)

	ctx := t.Context()
	inject := func(fault simtest.Fault) {
		t.Helper()
		_, err := sim.Inject(ctx, fault)
		must(t, err)
	}
	mustFail := func(operation string, err error) {
		t.Helper()
		if err == nil {
			t.Errorf("%s succeeded", operation)
		}
	}
	volume, err := plugin.CreateVolume(ctx, createRequest("secret-name"))
	must(t, err)
	id := volume.GetVolume().GetVolumeId()
	_, err = plugin.CreateVolume(ctx, createRequest("secret-name"))
	must(t, err)
	_, err = plugin.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: "x"})
	mustFail("a volume without capabilities", err)
	publish := &csi.ControllerPublishVolumeRequest{
		VolumeId:         id,
		NodeId:           node.ID,
		VolumeCapability: createRequest("").GetVolumeCapabilities()[0],
	}
	_, err = plugin.ControllerPublishVolume(ctx, publish)
	must(t, err)
	_, err = plugin.ListVolumes(ctx, &csi.ListVolumesRequest{})
	must(t, err)
	_, err = plugin.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
	mustFail("deleting an attached volume", err)
	_, err = plugin.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node.ID})
	must(t, err)
	inject(
		simtest.Fault{
			Operation: "disk_delete",
			Kind:      simtest.FaultStatus,
			Status:    500,
			ErrorCode: "Internal",
			Message:   "Internal Server Error",
		},
	)
	_, err = plugin.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
	mustFail("deleting while the rack answers 500", err)
	inject(simtest.Fault{Operation: "disk_delete", Kind: simtest.FaultReset})
	_, err = plugin.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
	mustFail("deleting while the rack resets connections", err)
	inject(
		simtest.Fault{
			Operation: "disk_view",
			Kind:      simtest.FaultStatus,
			Status:    503,
			ErrorCode: "ServiceNotAvailable",
			Message:   "Service Unavailable",
		},
	)
	_, err = plugin.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
	must(t, err)
	_, err = plugin.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	must(t, err)
	_, err = plugin.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{})
	mustFail("staging without a volume ID", err)

	text := page()
	samples := metricstest.Read(t, text)
	counts := countsOf(t, samples)
	delete(counts, "Identity/Probe OK") // StartPlugin calls Probe until the plugin is ready
	want := map[string]int{
		"Controller/CreateVolume OK":                 2,
		"Controller/CreateVolume InvalidArgument":    1,
		"Controller/ControllerPublishVolume OK":      1,
		"Controller/ControllerUnpublishVolume OK":    1,
		"Controller/ListVolumes OK":                  1,
		"Controller/DeleteVolume OK":                 1,
		"Controller/DeleteVolume Internal":           1,
		"Controller/DeleteVolume Unavailable":        1,
		"Controller/DeleteVolume FailedPrecondition": 1,
		"Node/NodeGetInfo OK":                        1,
		"Node/NodeStageVolume InvalidArgument":       1,
	}
	calls, err := sim.Calls(ctx)
	must(t, err)
	for _, call := range calls.Log {
		operation, code := call.Operation, strconv.Itoa(call.Status)
		if operation == "" && call.Path == "/v1/ping" {
			operation = "ping" // a rack rejects the API version before it looks up the operation
		}
		if call.Status == 0 {
			code = "error"
		}
		want[operation+" "+code]++
	}
	if want["disk_delete 500"] != 1 || want["disk_delete error"] != 1 || want["disk_view 503"] != 1 ||
		want["disk_create 400"] != 1 {
		t.Errorf("the rack recorded %v, without the injected faults", want)
	}
	if diff := cmp.Diff(want, counts); diff != "" {
		t.Errorf("counts (-want +got):\n%s", diff)
	}
	for series, value := range samples.Matching("csi_plugin_operations_in_flight") {
		if value != 0 {
			t.Errorf("%s is %v", series, value)
		}
	}
	for series, value := range map[string]float64{
		`csi_plugin_panics_total{driver_name="csi.oxide.computer"}`: 0,
		`oxide_csi_build_info{mode="all",version="devel"}`:          1,
		`oxide_csi_volumes{rack="west"}`:                            1, // as at ListVolumes
		`oxide_csi_volumes_attached{rack="west"}`:                   1,
		`oxide_csi_node_volumes_attached`:                           0,
		`oxide_csi_node_volumes_mounted`:                            0,
	} {
		if got, exists := samples[series]; !exists || got != value {
			t.Errorf("%s is %v (%t), want %v", series, got, exists, value)
		}
	}
	for _, hidden := range []string{sim.Token, id, node.ID, "secret-name", sim.Project} {
		if strings.Contains(text, hidden) {
			t.Errorf("the page contains %q", hidden)
		}
	}
}
