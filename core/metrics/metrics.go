// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package metrics counts what the plugin does, for Prometheus. Each [Metrics] has a registry of its own. The registry also
// holds what client_golang collects about the Go runtime (go_*) and the process (process_*).
//
// No label holds a value that grows with the number of volumes, such as an ID or a name, and no label holds a secret.
package metrics

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Metrics are the metrics of one process. A nil *Metrics measures nothing, which is how they are switched off. All methods
// are safe for concurrent use.
type Metrics struct {
	// Handler answers with all metrics.
	http.Handler
	registry *prometheus.Registry

	operations         *prometheus.HistogramVec
	operationsInFlight *prometheus.GaugeVec
	panics             prometheus.Counter

	rackRequests             *prometheus.HistogramVec
	volumes, volumesAttached *prometheus.GaugeVec

	restartsWanted, restartsWaiting, restartsUnderWay *prometheus.GaugeVec
	restarts                                          *prometheus.CounterVec
	restartDown                                       *prometheus.HistogramVec
}

// Process describes the process that the metrics are about.
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
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	m := &Metrics{Handler: promhttp.HandlerFor(registry, promhttp.HandlerOpts{}), registry: registry}
	register := promauto.With(registry)
	m.addRPCs(register, process.Driver)
	m.addRacks(register)
	m.addRestarts(register)
	register.NewGaugeVec(prometheus.GaugeOpts{
		Name: "oxide_csi_build_info",
		Help: "Always 1; the labels tell what runs",
	}, []string{"version", "mode"}).WithLabelValues(process.Version, process.Mode).Set(1)
	return m
}

// addRPCs adds the metrics of RPCs. Names and labels are those that kubernetes-csi/csi-lib-utils keeps for plugins
// (metrics/metrics.go, v0.25.0).
func (m *Metrics) addRPCs(register promauto.Factory, driver string) {
	labels := prometheus.Labels{"driver_name": driver}
	m.operations = register.NewHistogramVec(prometheus.HistogramOpts{
		Name:        "csi_plugin_operations_seconds",
		Help:        "Duration of answered RPCs, the wait for other operations on the same volume included",
		ConstLabels: labels,
		Buckets:     operationBuckets,
	}, []string{"method_name", "grpc_status_code"})
	m.operationsInFlight = register.NewGaugeVec(prometheus.GaugeOpts{
		Name:        "csi_plugin_operations_in_flight",
		Help:        "RPCs that are not answered yet",
		ConstLabels: labels,
	}, []string{"method_name"})
	m.panics = register.NewCounter(prometheus.CounterOpts{
		Name:        "csi_plugin_panics_total",
		Help:        "RPCs that ended in a panic, each of them a defect of the plugin",
		ConstLabels: labels,
	})
}

// addRacks adds the metrics of racks, and of the volumes on them.
func (m *Metrics) addRacks(register promauto.Factory) {
	m.rackRequests = register.NewHistogramVec(prometheus.HistogramOpts{
		Name: "oxide_csi_rack_request_duration_seconds",
		Help: "Duration of requests to a rack's API until the head of the answer, each repetition for itself; " +
			"the code is the HTTP status, or error where no answer came",
		Buckets: rackBuckets,
	}, []string{"rack", "operation", "code"})
	m.volumes = register.NewGaugeVec(prometheus.GaugeOpts{
		Name: "oxide_csi_volumes",
		Help: "Volumes of this cluster on a rack, as of the last complete list; missing before the first",
	}, []string{"rack"})
	m.volumesAttached = register.NewGaugeVec(prometheus.GaugeOpts{
		Name: "oxide_csi_volumes_attached",
		Help: "Volumes that were attached to an instance in that list",
	}, []string{"rack"})
}

// addRestarts adds the metrics of planned restarts.
func (m *Metrics) addRestarts(register promauto.Factory) {
	m.restartsWanted = register.NewGaugeVec(prometheus.GaugeOpts{
		Name: "oxide_csi_restart_volumes_waiting",
		Help: "Volumes that wait for a restart of an instance, in attach mode restart",
	}, []string{"rack"})
	m.restartsWaiting = register.NewGaugeVec(prometheus.GaugeOpts{
		Name: "oxide_csi_restart_instances_waiting",
		Help: "Instances that would have to be restarted for volumes, or are going to be, by why this has not begun",
	}, []string{"rack", "reason"})
	m.restartsUnderWay = register.NewGaugeVec(prometheus.GaugeOpts{
		Name: "oxide_csi_restarts_in_flight",
		Help: "Restarts of instances that this process is carrying out",
	}, []string{"rack"})
	m.restarts = register.NewCounterVec(prometheus.CounterOpts{
		Name: "oxide_csi_restarts_total",
		Help: "Planned restarts that this process has carried out (restarted), or given up with nothing changed (refused)",
	}, []string{"rack", "outcome"})
	m.restartDown = register.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "oxide_csi_restart_down_seconds",
		Help:    "How long instances were stopped for a planned restart",
		Buckets: restartBuckets,
	}, []string{"rack"})
}

// RPCStarted counts an RPC as in flight. The method is gRPC's full name of it.
func (m *Metrics) RPCStarted(method string) {
	if m == nil {
		return
	}
	m.operationsInFlight.WithLabelValues(method).Inc()
}

// RPCAnswered counts an RPC that was started as answered with the gRPC code of this name.
func (m *Metrics) RPCAnswered(method, code string, took time.Duration) {
	if m == nil {
		return
	}
	m.operationsInFlight.WithLabelValues(method).Dec()
	m.operations.WithLabelValues(method, code).Observe(took.Seconds())
}

// Panicked counts a panic that was recovered.
func (m *Metrics) Panicked() {
	if m == nil {
		return
	}
	m.panics.Inc()
}

// RackObserver returns the function that every request to a rack is reported to; nil where nothing is measured.
func (m *Metrics) RackObserver(rack string) func(operation, code string, took time.Duration) {
	if m == nil {
		return nil
	}
	return func(operation, code string, took time.Duration) {
		m.rackRequests.WithLabelValues(rack, operation, code).Observe(took.Seconds())
	}
}

// SawVolumes sets how many volumes of this cluster a complete list of the rack's disks had, and how many of them were
// attached.
func (m *Metrics) SawVolumes(rack string, volumes, attached int) {
	if m == nil {
		return
	}
	m.volumes.WithLabelValues(rack).Set(float64(volumes))
	m.volumesAttached.WithLabelValues(rack).Set(float64(attached))
}

// SawRestarts sets how many volumes of a rack wait for a restart, and how many restarts are under way.
func (m *Metrics) SawRestarts(rack string, waiting, underWay int) {
	if m == nil {
		return
	}
	m.restartsWanted.WithLabelValues(rack).Set(float64(waiting))
	m.restartsUnderWay.WithLabelValues(rack).Set(float64(underWay))
}

// SawWaiting sets how many instances of a rack would have to be restarted, and for this reason are not yet.
func (m *Metrics) SawWaiting(rack, reason string, instances int) {
	if m == nil {
		return
	}
	m.restartsWaiting.WithLabelValues(rack, reason).Set(float64(instances))
}

// RestartEnded counts a restart, and how long the instance was stopped for it; 0 if it was not.
func (m *Metrics) RestartEnded(rack, outcome string, down time.Duration) {
	if m == nil {
		return
	}
	m.restarts.WithLabelValues(rack, outcome).Inc()
	if down > 0 {
		m.restartDown.WithLabelValues(rack).Observe(down.Seconds())
	}
}

// CountNode makes every page show what count returns at that moment. Call it at most once.
func (m *Metrics) CountNode(count func() (attached, mounted int, err error)) {
	if m != nil {
		m.registry.MustRegister(nodeVolumes(count))
	}
}

var (
	nodeAttached = prometheus.NewDesc("oxide_csi_node_volumes_attached",
		"Disks in this guest that are volumes; missing where there is no node service, or the guest's disks cannot be read",
		nil, nil)
	nodeMounted = prometheus.NewDesc("oxide_csi_node_volumes_mounted",
		"Those of them that are staged or published; missing together with the former",
		nil, nil)
)

// nodeVolumes counts the volumes of this node whenever they are asked for.
type nodeVolumes func() (attached, mounted int, err error)

// Describe implements [prometheus.Collector].
func (n nodeVolumes) Describe(descs chan<- *prometheus.Desc) {
	descs <- nodeAttached
	descs <- nodeMounted
}

// Collect implements [prometheus.Collector]. The metrics are missing where the volumes cannot be counted.
func (n nodeVolumes) Collect(metrics chan<- prometheus.Metric) {
	attached, mounted, err := n()
	if err != nil {
		return
	}
	metrics <- prometheus.MustNewConstMetric(nodeAttached, prometheus.GaugeValue, float64(attached))
	metrics <- prometheus.MustNewConstMetric(nodeMounted, prometheus.GaugeValue, float64(mounted))
}
