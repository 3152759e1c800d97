// Package metrics counts what the plugin does, and shows it in the text format of Prometheus.
//
//   - metrics.go: every metric there is, and how each comes by its value
//   - text.go: series, and their text
//
// The format is written here instead of by github.com/prometheus/client_golang: linking that library makes every process
// 0.9 MiB larger, also one without an HTTP endpoint, because its initialization starts a registry of its own. Of the 17 MiB
// that a plugin may have at rest, a node needs nearly all. TestMetricsText reads the text with Prometheus' own parser.
//
// No label holds anything that grows with what the plugin serves, such as IDs or names of volumes, or that is secret.
package metrics

import (
	"bytes"
	"net/http"
	"sync"
	"time"
)

// Metrics are the metrics of one process. A nil *Metrics measures nothing, which is how they are switched off. All methods
// are safe for concurrent use.
type Metrics struct {
	mu sync.Mutex

	operations, operationsInFlight, panics family
	rackRequests                           family
	volumes, volumesAttached               family
	nodeAttached, nodeMounted              family
	restartsWanted, restartsUnderWay       family
	restartsWaiting                        family
	restarts, restartDown                  family
	build                                  family

	driver string
	node   func() (attached, mounted int, err error)
}

// Process says what the metrics are those of.
type Process struct {
	// Driver is the plugin's name, Version that of the build, Mode the services that it serves.
	Driver, Version, Mode string
}

// operationBuckets are those of csi_sidecar_operations_seconds, so that both can be drawn in one panel, and before them
// some for what takes no rack or a single call of one. In seconds.
var operationBuckets = []float64{.001, .005, .025, .1, .25, .5, 1, 2.5, 5, 10, 15, 25, 50, 120, 300, 600}

// rackBuckets reach to the five minutes that the transport waits for an answer. In seconds.
var rackBuckets = []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300}

// restartBuckets are about the four minutes that a planned restart should take at most. In seconds.
var restartBuckets = []float64{5, 10, 20, 30, 45, 60, 90, 120, 180, 240, 300, 600, 1800}

// New returns metrics in which nothing has happened yet.
func New(process Process) *Metrics {
	m := &Metrics{driver: process.Driver}
	m.describeRPCs()
	m.describeVolumes()
	m.describeRestarts()
	m.build = family{
		name: "oxide_csi_build_info", kind: gauge,
		labels: []string{"version", "mode"},
		help:   "Always 1; the labels tell what runs",
	}
	m.panics.add(0, process.Driver)
	m.build.set(1, process.Version, process.Mode)
	return m
}

// describeRPCs: names and labels are what kubernetes-csi/csi-lib-utils (metrics/metrics.go, v0.25.0) keeps for plugins.
func (m *Metrics) describeRPCs() {
	m.operations = family{
		name: "csi_plugin_operations_seconds", kind: histogram, buckets: operationBuckets,
		labels: []string{"driver_name", "method_name", "grpc_status_code"},
		help:   "Duration of answered RPCs, the wait for other operations on the same volume included",
	}
	m.operationsInFlight = family{
		name: "csi_plugin_operations_in_flight", kind: gauge,
		labels: []string{"driver_name", "method_name"},
		help:   "RPCs that are not answered yet",
	}
	m.panics = family{
		name: "csi_plugin_panics_total", kind: counter,
		labels: []string{"driver_name"},
		help:   "RPCs that ended in a panic, each of them a defect of the plugin",
	}
}

func (m *Metrics) describeVolumes() {
	m.rackRequests = family{
		name: "oxide_csi_rack_request_duration_seconds", kind: histogram, buckets: rackBuckets,
		labels: []string{"rack", "operation", "code"},
		help:   "Duration of requests to a rack's API until the head of the answer, each repetition for itself; the code is the HTTP status, or error where no answer came",
	}
	m.volumes = family{
		name: "oxide_csi_volumes", kind: gauge,
		labels: []string{"rack"},
		help:   "Volumes of this cluster on a rack, as of the last complete list; missing before the first",
	}
	m.volumesAttached = family{
		name: "oxide_csi_volumes_attached", kind: gauge,
		labels: []string{"rack"},
		help:   "Volumes that were attached to an instance in that list",
	}
	m.nodeAttached = family{
		name: "oxide_csi_node_volumes_attached", kind: gauge,
		help: "Disks in this guest that are volumes; missing where there is no node service, or the guest's disks cannot be read",
	}
	m.nodeMounted = family{
		name: "oxide_csi_node_volumes_mounted", kind: gauge,
		help: "Those of them that are staged or published; missing together with the former",
	}
}

func (m *Metrics) describeRestarts() {
	m.restartsWanted = family{
		name: "oxide_csi_restart_volumes_waiting", kind: gauge,
		labels: []string{"rack"},
		help:   "Volumes that wait for a restart of an instance, in attach mode restart",
	}
	m.restartsWaiting = family{
		name: "oxide_csi_restart_instances_waiting", kind: gauge,
		labels: []string{"rack", "reason"},
		help:   "Instances that would have to be restarted for volumes, or are going to be, by why this has not begun",
	}
	m.restartsUnderWay = family{
		name: "oxide_csi_restarts_in_flight", kind: gauge,
		labels: []string{"rack"},
		help:   "Restarts of instances that this process is carrying out",
	}
	m.restarts = family{
		name: "oxide_csi_restarts_total", kind: counter,
		labels: []string{"rack", "outcome"},
		help:   "Planned restarts that this process has carried out (restarted), or given up with nothing changed (refused)",
	}
	m.restartDown = family{
		name: "oxide_csi_restart_down_seconds", kind: histogram, buckets: restartBuckets,
		labels: []string{"rack"},
		help:   "How long instances were stopped for a planned restart",
	}
}

// families are all metrics, in the order in which they are shown.
func (m *Metrics) families() []*family {
	return []*family{
		&m.operations, &m.operationsInFlight, &m.panics,
		&m.rackRequests,
		&m.volumes, &m.volumesAttached,
		&m.nodeAttached, &m.nodeMounted,
		&m.restartsWanted, &m.restartsWaiting, &m.restartsUnderWay, &m.restarts, &m.restartDown,
		&m.build,
	}
}

// RPCStarted counts an RPC as in flight. The method is gRPC's full name of it.
func (m *Metrics) RPCStarted(method string) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.operationsInFlight.add(1, m.driver, method)
}

// RPCAnswered counts an RPC that was started as answered with the gRPC code of this name.
func (m *Metrics) RPCAnswered(method, code string, took time.Duration) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.operationsInFlight.add(-1, m.driver, method)
	m.operations.observe(took, m.driver, method, code)
}

// Panicked counts a panic that was recovered.
func (m *Metrics) Panicked() {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.panics.add(1, m.driver)
}

// RackObserver returns what is to be told of every request to a rack; nil where nothing is measured.
func (m *Metrics) RackObserver(rack string) func(operation, code string, took time.Duration) {
	if m == nil {
		return nil
	}
	return func(operation, code string, took time.Duration) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.rackRequests.observe(took, rack, operation, code)
	}
}

// SawVolumes sets how many volumes of this cluster a complete list of the rack's disks had, and how many of them were
// attached.
func (m *Metrics) SawVolumes(rack string, volumes, attached int) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.volumes.set(float64(volumes), rack)
	m.volumesAttached.set(float64(attached), rack)
}

// SawRestarts sets how many volumes of a rack wait for a restart, and how many restarts are under way.
func (m *Metrics) SawRestarts(rack string, waiting, underWay int) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.restartsWanted.set(float64(waiting), rack)
	m.restartsUnderWay.set(float64(underWay), rack)
}

// SawWaiting sets how many instances of a rack would have to be restarted, and for this reason are not yet.
func (m *Metrics) SawWaiting(rack, reason string, instances int) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.restartsWaiting.set(float64(instances), rack, reason)
}

// RestartEnded counts a restart, and how long the instance was stopped for it; 0 if it was not.
func (m *Metrics) RestartEnded(rack, outcome string, down time.Duration) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.restarts.add(1, rack, outcome)
	if down > 0 {
		m.restartDown.observe(down, rack)
	}
}

// CountNode makes every page show what count finds then. It is called once, before anything is served.
func (m *Metrics) CountNode(count func() (attached, mounted int, err error)) {
	if m != nil {
		m.node = count
	}
}

// ServeHTTP answers with all metrics.
func (m *Metrics) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	page := m.page()
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	// What fails here is the reader's connection, and so is nobody's to hear of.
	_, _ = w.Write(page)
}

// page is made as a whole before any of it is sent, so that no RPC waits for a slow reader.
func (m *Metrics) page() []byte {
	attached, mounted, nodeKnown := m.countNode()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.nodeAttached.forget()
	m.nodeMounted.forget()
	if nodeKnown {
		m.nodeAttached.set(float64(attached))
		m.nodeMounted.set(float64(mounted))
	}
	var page bytes.Buffer
	for _, f := range m.families() {
		f.write(&page)
	}
	return page.Bytes()
}

func (m *Metrics) countNode() (attached, mounted int, known bool) {
	if m.node == nil {
		return 0, 0, false
	}
	attached, mounted, err := m.node()
	return attached, mounted, err == nil
}
