// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package metrics

import (
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/oxidecomputer/oxide-csi-plugin/core/metrics/metricstest"
)

var update = flag.Bool("update", false, "rewrite the table of docs/reference/metrics.md")

const (
	create = "/csi.v1.Controller/CreateVolume"
	remove = "/csi.v1.Controller/DeleteVolume"
)

func testMetrics() *Metrics {
	return New(Process{Driver: "driver", Version: "1.2.3", Mode: "all"})
}

// page returns the page that m serves.
func page(t *testing.T, m *Metrics) string {
	t.Helper()
	w := httptest.NewRecorder()
	m.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if got := w.Header().
		Get("Content-Type"); w.Code != http.StatusOK ||
		!strings.HasPrefix(got, "text/plain; version=0.0.4; charset=utf-8") {
		t.Errorf("status %d, content type %q", w.Code, got)
	}
	return w.Body.String()
}

func wantSamples(t *testing.T, got, want metricstest.Samples) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("samples (-want +got):\n%s", diff)
	}
}

func TestMetricsText(t *testing.T) {
	m := testMetrics()
	m.RPCStarted(create)
	m.RPCStarted(create)
	m.RPCAnswered(create, "OK", "", 250*time.Millisecond)
	m.RPCStarted(create)
	m.RPCAnswered(create, "NotFound", "NotFound", time.Hour)
	m.RPCStarted(remove)
	m.RPCAnswered(remove, "OK", "", 0)
	m.RPCPanicked()
	m.RPCPanicked()
	west := m.RackObserver("west")
	west("disk_create", "201", 3*time.Second)
	west("disk_create", "error", 3*time.Second)
	west("disk_create", "201", 5*time.Second)
	m.SetVolumes("west", Volumes{All: 7, Attached: 3, Encrypted: 4})
	m.SetVolumes("west", Volumes{All: 8, Attached: 2, Encrypted: 1})
	m.SetVolumes("east", Volumes{})
	m.SetTokens("west", 2, time.Unix(9e8, 0), time.Unix(1e9, 0))
	m.SetTokens("east", 1, time.Unix(9e8, 0), time.Unix(1e9, 0))
	m.SetTokens("east", 1, time.Time{}, time.Time{})
	m.RegisterRack("west", func() (int, int) { return 64, 9 }, func() int { return 3 })
	m.RegisterRack("east", func() (int, int) { return 0, 0 }, func() int { return 0 })
	m.RegisterNodeVolumes(func() (NodeVolumes, error) { return NodeVolumes{6, 5, 1, 3, 2, 4}, nil })

	samples := metricstest.Read(t, page(t, m))
	for series := range samples {
		if strings.Contains(series, "_bucket{") {
			delete(samples, series)
		}
	}
	wantSamples(t, samples, metricstest.Samples{
		`csi_plugin_operations_seconds_count{driver_name="driver",grpc_status_code="OK",method_name="` + create + `"}`:       1,
		`csi_plugin_operations_seconds_sum{driver_name="driver",grpc_status_code="OK",method_name="` + create + `"}`:         0.25,
		`csi_plugin_operations_seconds_count{driver_name="driver",grpc_status_code="NotFound",method_name="` + create + `"}`: 1,
		`csi_plugin_operations_seconds_sum{driver_name="driver",grpc_status_code="NotFound",method_name="` + create + `"}`:   3600,
		`csi_plugin_operations_seconds_count{driver_name="driver",grpc_status_code="OK",method_name="` + remove + `"}`:       1,
		`csi_plugin_operations_seconds_sum{driver_name="driver",grpc_status_code="OK",method_name="` + remove + `"}`:         0,
		`csi_plugin_operations_in_flight{driver_name="driver",method_name="` + create + `"}`:                                 1,
		`csi_plugin_operations_in_flight{driver_name="driver",method_name="` + remove + `"}`:                                 0,
		`csi_plugin_panics_total{driver_name="driver"}`:                                                                      2,
		`oxide_csi_errors_total{method_name="` + create + `",word="NotFound"}`:                                               1,
		`oxide_csi_rack_request_duration_seconds_count{code="201",operation="disk_create",rack="west"}`:                      2,
		`oxide_csi_rack_request_duration_seconds_sum{code="201",operation="disk_create",rack="west"}`:                        8,
		`oxide_csi_rack_request_duration_seconds_count{code="error",operation="disk_create",rack="west"}`:                    1,
		`oxide_csi_rack_request_duration_seconds_sum{code="error",operation="disk_create",rack="west"}`:                      3,
		`oxide_csi_rack_tokens{rack="east"}`:                          1,
		`oxide_csi_rack_tokens{rack="west"}`:                          2,
		`oxide_csi_rack_token_created_timestamp_seconds{rack="west"}`: 9e8,
		`oxide_csi_rack_calls_in_flight{rack="west"}`:                 64,
		`oxide_csi_rack_calls_in_flight{rack="east"}`:                 0,
		`oxide_csi_rack_calls_waiting{rack="west"}`:                   9,
		`oxide_csi_rack_calls_waiting{rack="east"}`:                   0,
		`oxide_csi_expansions_unfinished{rack="west"}`:                3,
		`oxide_csi_expansions_unfinished{rack="east"}`:                0,
		`oxide_csi_rack_token_expiry_timestamp_seconds{rack="west"}`:  1e9,
		`oxide_csi_volumes{rack="east"}`:                              0,
		`oxide_csi_volumes{rack="west"}`:                              8,
		`oxide_csi_volumes_attached{rack="east"}`:                     0,
		`oxide_csi_volumes_attached{rack="west"}`:                     2,
		`oxide_csi_volumes_encrypted{rack="east"}`:                    0,
		`oxide_csi_volumes_encrypted{rack="west"}`:                    1,
		`oxide_csi_node_luks_headers_mended_total`:                    4,
		`oxide_csi_node_nvme_functions_not_ready`:                     2,
		`oxide_csi_node_volumes_attached`:                             6,
		`oxide_csi_node_volumes_lingering`:                            1,
		`oxide_csi_node_volumes_mounted`:                              5,
		`oxide_csi_node_volumes_small`:                                3,
		`oxide_csi_build_info{mode="all",version="1.2.3"}`:            1,
	})
}

// Before the first list the volumes are missing instead of 0. A counter whose first step matters starts at 0.
func TestMetricsAtStart(t *testing.T) {
	m := testMetrics()
	m.RegisterNodeVolumes(func() (NodeVolumes, error) { return NodeVolumes{1, 1, 0, 0, 0, 0}, errors.New("no /sys") })
	wantSamples(t, metricstest.Read(t, page(t, m)), metricstest.Samples{
		`csi_plugin_panics_total{driver_name="driver"}`:    0,
		`oxide_csi_build_info{mode="all",version="1.2.3"}`: 1,
	})
}

// A node's volumes are counted at each scrape. They are missing if they cannot be counted.
func TestNodeVolumesAreCountedAtEachScrape(t *testing.T) {
	m := testMetrics()
	attached, failure := 2, error(nil)
	m.RegisterNodeVolumes(func() (NodeVolumes, error) { return NodeVolumes{attached, 1, 1, 0, 0, 0}, failure })
	for _, test := range []struct {
		attached int
		failure  error
		want     metricstest.Samples
	}{
		{2, nil, metricstest.Samples{"oxide_csi_node_luks_headers_mended_total": 0, "oxide_csi_node_nvme_functions_not_ready": 0, "oxide_csi_node_volumes_attached": 2, "oxide_csi_node_volumes_lingering": 1, "oxide_csi_node_volumes_mounted": 1, "oxide_csi_node_volumes_small": 0}},
		{2, errors.New("no /sys"), metricstest.Samples{}},
		{3, nil, metricstest.Samples{"oxide_csi_node_luks_headers_mended_total": 0, "oxide_csi_node_nvme_functions_not_ready": 0, "oxide_csi_node_volumes_attached": 3, "oxide_csi_node_volumes_lingering": 1, "oxide_csi_node_volumes_mounted": 1, "oxide_csi_node_volumes_small": 0}},
	} {
		attached, failure = test.attached, test.failure
		wantSamples(t, metricstest.Read(t, page(t, m)).Matching("oxide_csi_node_"), test.want)
	}
}

func TestMetricsOff(t *testing.T) {
	var m *Metrics
	m.RPCStarted(create)
	m.RPCAnswered(create, "OK", "", time.Second)
	m.RPCPanicked()
	m.SetVolumes("west", Volumes{All: 1})
	m.SetTokens("west", 1, time.Now(), time.Now())
	m.RegisterNodeVolumes(nil)
	m.RegisterRack("west", nil, nil)
	m.RegisterReady(nil)
	if m.RackObserver("west") != nil {
		t.Error("a rack is observed")
	}
	if allocs := testing.AllocsPerRun(100, func() {
		m.RPCStarted(create)
		m.RPCAnswered(create, "OK", "", time.Second)
	}); allocs != 0 {
		t.Errorf("%v allocations per RPC", allocs)
	}
}

// The page includes the Go runtime and the process.
func TestRuntimeAndProcess(t *testing.T) {
	families := metricstest.Parse(t, page(t, testMetrics()))
	for _, name := range []string{"go_goroutines", "go_memstats_heap_alloc_bytes", "process_resident_memory_bytes", "process_open_fds"} {
		if families[name] == nil {
			t.Errorf("the page lacks %s", name)
		}
	}
}

// describedName finds the name of one of the plugin's own metrics in the text of a prometheus.Desc.
var describedName = regexp.MustCompile(`fqName: "((?:csi_plugin|oxide_csi)_\w+)"`)

// everything returns each of the plugin's own metrics with one series, sorted by name.
func everything(t *testing.T) []*dto.MetricFamily {
	t.Helper()
	m := testMetrics()
	m.RPCStarted(create)
	m.RPCAnswered(create, "NotFound", "NotFound", time.Second)
	m.RackObserver("west")("disk_create", "201", time.Second)
	m.SetVolumes("west", Volumes{All: 1, Attached: 1, Encrypted: 1})
	m.SetTokens("west", 1, time.Unix(1e9, 0), time.Unix(1e9, 0))
	m.RegisterRack("west", func() (int, int) { return 1, 0 }, func() int { return 0 })
	m.RegisterReady(func() bool { return true })
	m.SetRestarts("west", 1, 1)
	m.SetRestartsWaiting("west", "window", 1)
	m.RestartEnded("west", "restarted", time.Second)
	m.RegisterNodeVolumes(func() (NodeVolumes, error) { return NodeVolumes{1, 1, 0, 0, 0, 0}, nil })

	families, err := m.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	shown := map[string]*dto.MetricFamily{}
	for _, family := range families {
		shown[family.GetName()] = family
	}
	descs := make(chan *prometheus.Desc, 1000)
	m.registry.Describe(descs)
	close(descs)
	var own []*dto.MetricFamily
	for desc := range descs {
		if name := describedName.FindStringSubmatch(desc.String()); name == nil {
			continue
		} else if family := shown[name[1]]; family == nil {
			t.Errorf("%s has no series in this test", name[1])
		} else {
			own = append(own, family)
		}
	}
	slices.SortFunc(own, func(a, b *dto.MetricFamily) int { return strings.Compare(a.GetName(), b.GetName()) })
	return own
}

// The reference page names only metrics that exist.
func TestReferenceNamesNothingElse(t *testing.T) {
	text, err := os.ReadFile(reference)
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, family := range everything(t) {
		name := family.GetName()
		known[name] = true
		if family.GetType() == dto.MetricType_HISTOGRAM {
			known[name+"_bucket"], known[name+"_count"], known[name+"_sum"] = true, true, true
		}
	}
	named := regexp.MustCompile(`\b(csi_plugin|oxide_csi)_\w+`).FindAllString(string(text), -1)
	if len(named) < 2*len(known)/3 {
		t.Errorf("the page names only %d metrics: the test reads the wrong text", len(named))
	}
	for _, name := range named {
		if !known[name] {
			t.Errorf("the page names %s, which does not exist", name)
		}
	}
}

const (
	reference  = "../../docs/reference/metrics.md"
	tableBegin = "<!-- Made from core/metrics by: go test ./core/metrics -update -->\n"
	tableEnd   = "<!-- End of the generated table. -->\n"
)

// table is the reference of all metrics, sorted by name.
func table(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("| metric | type | labels | meaning |\n|---|---|---|---|\n")
	for _, family := range everything(t) {
		var labels []string
		for _, label := range family.GetMetric()[0].GetLabel() {
			labels = append(labels, "`"+label.GetName()+"`")
		}
		kind := strings.ToLower(family.GetType().String())
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", family.GetName(), kind, strings.Join(labels, ", "), family.GetHelp())
	}
	return b.String()
}

func TestReferenceIsMadeFromTheMetrics(t *testing.T) {
	text, err := os.ReadFile(reference)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begun := strings.Cut(string(text), tableBegin)
	old, after, ended := strings.Cut(rest, tableEnd)
	if !begun || !ended {
		t.Fatalf("%s lacks the two comments around its table", reference)
	}
	made := table(t)
	if *update && old != made {
		if err := os.WriteFile(reference, []byte(before+tableBegin+made+tableEnd+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(made, old); diff != "" {
		t.Errorf("the table differs from the plugin's metrics; run go test ./core/metrics -update\n-plugin +page:\n%s", diff)
	}
}
