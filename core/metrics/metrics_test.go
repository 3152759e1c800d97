package metrics

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

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

// page is what m answers.
func page(t *testing.T, m *Metrics) string {
	t.Helper()
	w := httptest.NewRecorder()
	m.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if got := w.Header().Get("Content-Type"); w.Code != http.StatusOK || got != "text/plain; version=0.0.4; charset=utf-8" {
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
	m.RPCAnswered(create, "OK", 250*time.Millisecond)
	m.RPCStarted(create)
	m.RPCAnswered(create, "NotFound", time.Hour)
	m.RPCStarted(remove)
	m.RPCAnswered(remove, "OK", 0)
	m.Panicked()
	m.Panicked()
	west := m.RackObserver("west")
	west("disk_create", "201", 3*time.Second)
	west("disk_create", "error", 3*time.Second)
	west("disk_create", "201", 5*time.Second)
	m.SawVolumes("west", 7, 3)
	m.SawVolumes("west", 8, 2)
	m.SawVolumes("east", 0, 0)
	m.CountNode(func() (int, int, error) { return 6, 5, nil })

	text := page(t, m)
	samples := metricstest.Read(t, text)
	buckets := metricstest.Samples{}
	for series, value := range samples {
		if strings.Contains(series, "_bucket{") {
			buckets[series] = value
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
		`oxide_csi_rack_request_duration_seconds_count{code="201",operation="disk_create",rack="west"}`:                      2,
		`oxide_csi_rack_request_duration_seconds_sum{code="201",operation="disk_create",rack="west"}`:                        8,
		`oxide_csi_rack_request_duration_seconds_count{code="error",operation="disk_create",rack="west"}`:                    1,
		`oxide_csi_rack_request_duration_seconds_sum{code="error",operation="disk_create",rack="west"}`:                      3,
		`oxide_csi_volumes{rack="east"}`:                   0,
		`oxide_csi_volumes{rack="west"}`:                   8,
		`oxide_csi_volumes_attached{rack="east"}`:          0,
		`oxide_csi_volumes_attached{rack="west"}`:          2,
		`oxide_csi_node_volumes_attached`:                  6,
		`oxide_csi_node_volumes_mounted`:                   5,
		`oxide_csi_build_info{mode="all",version="1.2.3"}`: 1,
	})
	// A bound belongs to its own bucket, and what is above all of them to none but the last.
	for _, test := range []struct {
		series string
		bounds []float64
		// from is the first bound whose bucket has the observation.
		from float64
	}{
		{`csi_plugin_operations_seconds_bucket{driver_name="driver",grpc_status_code="OK",method_name="` + create + `",le="%s"}`, operationBuckets, 0.25},
		{`csi_plugin_operations_seconds_bucket{driver_name="driver",grpc_status_code="OK",method_name="` + remove + `",le="%s"}`, operationBuckets, operationBuckets[0]},
		{`csi_plugin_operations_seconds_bucket{driver_name="driver",grpc_status_code="NotFound",method_name="` + create + `",le="%s"}`, operationBuckets, math.Inf(1)},
		{`oxide_csi_rack_request_duration_seconds_bucket{code="error",operation="disk_create",rack="west",le="%s"}`, rackBuckets, 5},
	} {
		for _, bound := range append(append([]float64{}, test.bounds...), math.Inf(1)) {
			series, want := fmt.Sprintf(test.series, number(bound)), 0.0
			if bound >= test.from {
				want = 1
			}
			if got, is := buckets[series]; !is || got != want {
				t.Errorf("%s: %v (%t), want %v", series, got, is, want)
			}
		}
	}
	for name, family := range metricstest.Parse(t, text) {
		if family.GetHelp() == "" || family.Type == nil {
			t.Errorf("%s: help %q, type %v", name, family.GetHelp(), family.Type)
		}
	}
}

// What may stand in a label is decided elsewhere; a page is readable all the same.
func TestLabelsAreEscaped(t *testing.T) {
	version := "a\\b\"c\nd{}=,"
	families := metricstest.Parse(t, page(t, New(Process{Driver: "driver", Version: version, Mode: "all"})))
	labels := families["oxide_csi_build_info"].GetMetric()[0].GetLabel()
	if got := labels[0].GetValue(); got != version {
		t.Errorf("%q, want %q", got, version)
	}
}

// At the start there is no volume to speak of, not none, and a counter whose first step matters stands at its beginning.
func TestNothingHappenedYet(t *testing.T) {
	m := testMetrics()
	m.CountNode(func() (int, int, error) { return 1, 1, errors.New("no /sys") })
	wantSamples(t, metricstest.Read(t, page(t, m)), metricstest.Samples{
		`csi_plugin_panics_total{driver_name="driver"}`:    0,
		`oxide_csi_build_info{mode="all",version="1.2.3"}`: 1,
	})
}

// What a node counts is that of the moment, and missing when it cannot be known.
func TestNodeIsCountedAnew(t *testing.T) {
	m := testMetrics()
	attached, failure := 2, error(nil)
	m.CountNode(func() (int, int, error) { return attached, 1, failure })
	for _, test := range []struct {
		attached int
		failure  error
		want     metricstest.Samples
	}{
		{2, nil, metricstest.Samples{"oxide_csi_node_volumes_attached": 2, "oxide_csi_node_volumes_mounted": 1}},
		{2, errors.New("no /sys"), metricstest.Samples{}},
		{3, nil, metricstest.Samples{"oxide_csi_node_volumes_attached": 3, "oxide_csi_node_volumes_mounted": 1}},
	} {
		attached, failure = test.attached, test.failure
		wantSamples(t, metricstest.Read(t, page(t, m)).Matching("oxide_csi_node_"), test.want)
	}
}

func TestSwitchedOff(t *testing.T) {
	var m *Metrics
	m.RPCStarted(create)
	m.RPCAnswered(create, "OK", time.Second)
	m.Panicked()
	m.SawVolumes("west", 1, 1)
	m.CountNode(nil)
	if m.RackObserver("west") != nil {
		t.Error("a rack is observed")
	}
	if allocs := testing.AllocsPerRun(100, func() {
		m.RPCStarted(create)
		m.RPCAnswered(create, "OK", time.Second)
	}); allocs != 0 {
		t.Errorf("%v allocations per RPC", allocs)
	}
}

// Whatever happens at once is counted, while pages are read.
func TestParallel(t *testing.T) {
	const workers, each = 8, 200
	m := testMetrics()
	observe := m.RackObserver("west")
	m.CountNode(func() (int, int, error) { return 1, 1, nil })
	var all sync.WaitGroup
	for worker := range workers {
		all.Go(func() {
			for i := range each {
				m.RPCStarted(create)
				observe("disk_create", fmt.Sprint(200+worker), time.Millisecond)
				m.SawVolumes("west", i, i)
				m.Panicked()
				m.RPCAnswered(create, "OK", time.Millisecond)
				if i%50 == 0 {
					m.page()
				}
			}
		})
	}
	all.Wait()
	samples := metricstest.Read(t, page(t, m))
	for series, want := range map[string]float64{
		`csi_plugin_operations_seconds_count{driver_name="driver",grpc_status_code="OK",method_name="` + create + `"}`: workers * each,
		`csi_plugin_operations_in_flight{driver_name="driver",method_name="` + create + `"}`:                           0,
		`csi_plugin_panics_total{driver_name="driver"}`:                                                                workers * each,
		`oxide_csi_rack_request_duration_seconds_count{code="200",operation="disk_create",rack="west"}`:                each,
	} {
		if samples[series] != want {
			t.Errorf("%s: %v, want %v", series, samples[series], want)
		}
	}
}

// Whatever the page of the documentation tells operators to look at is there.
func TestReferenceNamesNothingElse(t *testing.T) {
	text, err := os.ReadFile(reference)
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, f := range testMetrics().families() {
		known[f.name] = true
		if f.kind == histogram {
			known[f.name+"_bucket"], known[f.name+"_count"], known[f.name+"_sum"] = true, true, true
		}
	}
	named := regexp.MustCompile(`\b(csi_plugin|oxide_csi)_\w+`).FindAllString(string(text), -1)
	if len(named) < 2*len(known)/3 {
		t.Errorf("the page names %d metrics: this test looks at the wrong thing", len(named))
	}
	for _, name := range named {
		if !known[name] {
			t.Errorf("the page names %s, which there is not", name)
		}
	}
}

const (
	reference  = "../../docs/reference/metrics.md"
	tableBegin = "<!-- Made from core/metrics by: go test ./core/metrics -update -->\n"
	tableEnd   = "<!-- End of what is made. -->\n"
)

// table is the reference of all metrics, in the order of the page.
func table() string {
	var b strings.Builder
	b.WriteString("| metric | type | labels | meaning |\n|---|---|---|---|\n")
	for _, f := range testMetrics().families() {
		var labels []string
		for _, label := range f.labels {
			labels = append(labels, "`"+label+"`")
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", f.name, f.kind, strings.Join(labels, ", "), f.help)
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
	if *update && old != table() {
		if err := os.WriteFile(reference, []byte(before+tableBegin+table()+tableEnd+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(table(), old); diff != "" {
		t.Errorf("the table is not what the plugin shows; run go test ./core/metrics -update\n-plugin +page:\n%s", diff)
	}
}
