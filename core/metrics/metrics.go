// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package metrics counts what the plugin does, for Prometheus. Each [Metrics] has a registry of its own. The registry
// also holds what client_golang collects about the Go runtime (go_*) and the process (process_*).
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

// Metrics are the metrics of one process. A nil *Metrics measures nothing, which is how they are switched off. All
// methods are safe for concurrent use.
type Metrics struct {
	// Handler answers with all metrics.
	http.Handler
	registry *prometheus.Registry

	operations         *prometheus.HistogramVec
	operationsInFlight *prometheus.GaugeVec
	errors             *prometheus.CounterVec
	panics             prometheus.Counter

	rackRequests                               *prometheus.HistogramVec
	tokens, tokenCreation, tokenExpiry         *prometheus.GaugeVec
	volumes, volumesAttached, volumesEncrypted *prometheus.GaugeVec

	restartVolumesWaiting, restartInstancesWaiting, restartsUnderWay *prometheus.GaugeVec
	restarts                                                         *prometheus.CounterVec
	restartDownSeconds                                               *prometheus.HistogramVec
}

// Process describes the process that the metrics are about.
type Process struct {
	// Driver is the plugin's name, Version that of the build, Mode the services that it serves.
	Driver, Version, Mode string
}

// operationBuckets are those of csi_sidecar_operations_seconds, so that one panel can show both. The smaller buckets
// before them are for RPCs that need no rack or one request. In seconds.
var operationBuckets = []float64{.001, .005, .025, .1, .25, .5, 1, 2.5, 5, 10, 15, 25, 50, 120, 300, 600}

// rackBuckets end at the five minutes that the transport waits for an answer. In seconds.
var rackBuckets = []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300}

// restartBuckets have their centre at four minutes, the longest that a planned restart should take. In seconds.
var restartBuckets = []float64{5, 10, 20, 30, 45, 60, 90, 120, 180, 240, 300, 600, 1800}

// maxScrapes is the number of answers with metrics in progress. Each takes a millisecond of a processor, and anybody
// may ask.
const maxScrapes = 4

// New returns metrics in which nothing has happened yet.
func New(process Process) *Metrics {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m := &Metrics{
		Handler:  promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: maxScrapes}),
		registry: registry,
	}
	register := promauto.With(registry)
	m.addRPCs(register, process.Driver)
	m.addRacks(register)
	m.addRestarts(register)
	register.NewGaugeVec(prometheus.GaugeOpts{
		Name: "oxide_csi_build_info",
		Help: "Always 1; the labels name the version and mode of this process",
	}, []string{"version", "mode"}).WithLabelValues(process.Version, process.Mode).Set(1)
	return m
}

// addRPCs adds the metrics of RPCs. Names and labels are those that kubernetes-csi/csi-lib-utils keeps for plugins
// (metrics/metrics.go, v0.25.0).
func (m *Metrics) addRPCs(register promauto.Factory, driver string) {
	labels := prometheus.Labels{"driver_name": driver}
	m.operations = register.NewHistogramVec(prometheus.HistogramOpts{
		Name:        "csi_plugin_operations_seconds",
		Help:        "Duration of finished RPCs, including the wait for other operations on the same volume",
		ConstLabels: labels,
		Buckets:     operationBuckets,
	}, []string{"method_name", "grpc_status_code"})
	m.operationsInFlight = register.NewGaugeVec(prometheus.GaugeOpts{
		Name:        "csi_plugin_operations_in_flight",
		Help:        "RPCs that have no response yet",
		ConstLabels: labels,
	}, []string{"method_name"})
	m.errors = register.NewCounterVec(prometheus.CounterOpts{
		Name: "oxide_csi_errors_total",
		Help: "RPCs that failed, by the word at the end of the message: docs/reference/errors.md",
	}, []string{"method_name", "word"})
	m.panics = register.NewCounter(prometheus.CounterOpts{
		Name:        "csi_plugin_panics_total",
		Help:        "RPCs that ended in a panic; each panic is a bug in the plugin",
		ConstLabels: labels,
	})
}

// addRacks adds the metrics of racks, and of the volumes on them.
func (m *Metrics) addRacks(register promauto.Factory) {
	m.rackRequests = register.NewHistogramVec(prometheus.HistogramOpts{
		Name: "oxide_csi_rack_request_duration_seconds",
		Help: "Duration of requests to a rack's API until the headers of the response; each attempt counts; " +
			"code is the HTTP status, or error if no response came",
		Buckets: rackBuckets,
	}, []string{"rack", "operation", "code"})
	m.tokens = gauge(register, "oxide_csi_rack_tokens",
		"Valid tokens of the user whose token the controller has; missing if the rack does not tell")
	m.tokenCreation = gauge(register, "oxide_csi_rack_token_created_timestamp_seconds",
		"Unix time at which the user's oldest token was created: with one token, the controller's own")
	m.tokenExpiry = gauge(register, "oxide_csi_rack_token_expiry_timestamp_seconds",
		"Unix time of the first expiry of the user's tokens: with one token, the controller's own; missing if none expires")
	m.volumes = gauge(register, "oxide_csi_volumes",
		"Volumes of this cluster on a rack in the last complete list; missing before the first list")
	m.volumesAttached = gauge(register, "oxide_csi_volumes_attached",
		"Volumes in that list that were attached to an instance")
	m.volumesEncrypted = gauge(register, "oxide_csi_volumes_encrypted", "Volumes in that list that a node encrypts")
}

// gauge adds a gauge with a value for each rack, and for each value of more labels.
func gauge(register promauto.Factory, name, help string, labels ...string) *prometheus.GaugeVec {
	return register.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, append([]string{"rack"}, labels...))
}

// addRestarts adds the metrics of planned restarts.
func (m *Metrics) addRestarts(register promauto.Factory) {
	m.restartVolumesWaiting = gauge(register, "oxide_csi_restart_volumes_waiting",
		"Volumes that wait for a restart of an instance, in attach mode restart")
	m.restartInstancesWaiting = gauge(register, "oxide_csi_restart_instances_waiting",
		"Instances that need a restart for volumes, by the reason why the restart has not begun", "reason")
	m.restartsUnderWay = gauge(register, "oxide_csi_restarts_in_flight",
		"Planned restarts that this process is performing now")
	m.restarts = register.NewCounterVec(prometheus.CounterOpts{
		Name: "oxide_csi_restarts_total",
		Help: "Planned restarts that this process completed (restarted) or cancelled without a change (refused)",
	}, []string{"rack", "outcome"})
	m.restartDownSeconds = register.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "oxide_csi_restart_down_seconds",
		Help:    "How long instances were stopped for a planned restart",
		Buckets: restartBuckets,
	}, []string{"rack"})
}

// RPCStarted counts an RPC as in flight. method is its full gRPC name.
func (m *Metrics) RPCStarted(method string) {
	if m == nil {
		return
	}
	m.operationsInFlight.WithLabelValues(method).Inc()
}

// RPCAnswered counts a started RPC as answered. code is the name of its gRPC code, word that of its error or "".
func (m *Metrics) RPCAnswered(method, code, word string, took time.Duration) {
	if m == nil {
		return
	}
	m.operationsInFlight.WithLabelValues(method).Dec()
	m.operations.WithLabelValues(method, code).Observe(took.Seconds())
	if word != "" {
		m.errors.WithLabelValues(method, word).Inc()
	}
}

// RPCPanicked counts a panic that was recovered.
func (m *Metrics) RPCPanicked() {
	if m == nil {
		return
	}
	m.panics.Inc()
}

// RackObserver returns the function to call for every request to a rack. It returns nil if metrics are off.
func (m *Metrics) RackObserver(rack string) func(operation, code string, took time.Duration) {
	if m == nil {
		return nil
	}
	return func(operation, code string, took time.Duration) {
		m.rackRequests.WithLabelValues(rack, operation, code).Observe(took.Seconds())
	}
}

// RegisterReady adds whether the plugin is ready. Each scrape calls ready. Call RegisterReady at most once.
func (m *Metrics) RegisterReady(ready func() bool) {
	if m == nil {
		return
	}
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "oxide_csi_ready",
		Help: "1 if /readyz says that this plugin is ready, else 0: it waits for its identity, the kubelet or a rack",
	}, func() float64 {
		if ready() {
			return 1
		}
		return 0
	}))
}

// RegisterRack adds what is read of a rack at each scrape: how many calls are under way and wait, and how many
// expansions are not finished. Call RegisterRack at most once for each rack.
func (m *Metrics) RegisterRack(rack string, calls func() (underWay, waiting int), expansions func() int) {
	if m == nil {
		return
	}
	add := func(name, help string, value func() int) {
		m.registry.MustRegister(prometheus.NewGaugeFunc(
			prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: prometheus.Labels{"rack": rack}},
			func() float64 { return float64(value()) }))
	}
	add("oxide_csi_rack_calls_in_flight", "Requests to a rack's API that have no response yet",
		func() int { underWay, _ := calls(); return underWay })
	add("oxide_csi_rack_calls_waiting", "Requests that wait for the response to another request to the rack",
		func() int { _, waiting := calls(); return waiting })
	add("oxide_csi_expansions_unfinished",
		"Volumes whose expansion has begun and not ended, as far as this controller knows; such a volume may have no disk",
		expansions)
}

// SetTokens sets how many valid tokens the user of the rack's token has, when the first of them was created, and when
// the first of them expires. A zero time means that no such time is known.
func (m *Metrics) SetTokens(rack string, tokens int, created, expiry time.Time) {
	if m == nil {
		return
	}
	m.tokens.WithLabelValues(rack).Set(float64(tokens))
	setTime(m.tokenCreation, rack, created)
	setTime(m.tokenExpiry, rack, expiry)
}

// setTime sets a gauge to a time. A zero time removes the series.
func setTime(gauge *prometheus.GaugeVec, rack string, at time.Time) {
	if at.IsZero() {
		gauge.DeleteLabelValues(rack)
		return
	}
	gauge.WithLabelValues(rack).Set(float64(at.Unix()))
}

// Volumes counts the volumes of this cluster on a rack, and those of them that are attached and encrypted.
type Volumes struct{ All, Attached, Encrypted int }

// SetVolumes sets what the last complete list of the rack's disks had.
func (m *Metrics) SetVolumes(rack string, counts Volumes) {
	if m == nil {
		return
	}
	m.volumes.WithLabelValues(rack).Set(float64(counts.All))
	m.volumesAttached.WithLabelValues(rack).Set(float64(counts.Attached))
	m.volumesEncrypted.WithLabelValues(rack).Set(float64(counts.Encrypted))
}

// SetRestarts sets how many volumes of a rack wait for a restart, and how many restarts are under way.
func (m *Metrics) SetRestarts(rack string, waiting, underWay int) {
	if m == nil {
		return
	}
	m.restartVolumesWaiting.WithLabelValues(rack).Set(float64(waiting))
	m.restartsUnderWay.WithLabelValues(rack).Set(float64(underWay))
}

// SetRestartsWaiting sets how many instances of a rack need a restart that has not begun for this reason.
func (m *Metrics) SetRestartsWaiting(rack, reason string, instances int) {
	if m == nil {
		return
	}
	m.restartInstancesWaiting.WithLabelValues(rack, reason).Set(float64(instances))
}

// RestartEnded counts a restart. down is how long the instance was stopped, 0 if it was not stopped.
func (m *Metrics) RestartEnded(rack, outcome string, down time.Duration) {
	if m == nil {
		return
	}
	m.restarts.WithLabelValues(rack, outcome).Inc()
	if down > 0 {
		m.restartDownSeconds.WithLabelValues(rack).Observe(down.Seconds())
	}
}

// NodeVolumes counts the volumes of a node: those among its disks, those that are staged or published, and those that
// are unstaged and still mounted in a container, and those whose filesystem could not be grown to its disk.
// FunctionsNotReady are NVMe functions that show no disk. HeadersMended counts the LUKS2 headers of which one copy was
// damaged, since the start of this process.
type NodeVolumes struct{ Attached, Mounted, Lingering, Small, FunctionsNotReady, HeadersMended int }

// RegisterNodeVolumes adds the counts of this node's volumes. Each scrape calls count. Call RegisterNodeVolumes at
// most once.
func (m *Metrics) RegisterNodeVolumes(count func() (NodeVolumes, error)) {
	if m != nil {
		m.registry.MustRegister(nodeVolumes(count))
	}
}

// nodeCounts are the metrics of a node's volumes.
var nodeCounts = []struct {
	name, help string
	kind       prometheus.ValueType
	of         func(NodeVolumes) int
}{
	{
		"oxide_csi_node_volumes_attached",
		"Volumes among the disks of this guest; missing, as all metrics of nodes, without the node service, or if disks " +
			"cannot be read",
		prometheus.GaugeValue,
		func(n NodeVolumes) int { return n.Attached },
	},
	{
		"oxide_csi_node_volumes_mounted", "Volumes of this guest that are staged or published",
		prometheus.GaugeValue, func(n NodeVolumes) int { return n.Mounted },
	},
	{
		"oxide_csi_node_volumes_lingering", "Unstaged volumes that are still mounted read-only in a container",
		prometheus.GaugeValue, func(n NodeVolumes) int { return n.Lingering },
	},
	{
		"oxide_csi_node_volumes_small",
		"Staged volumes whose filesystem could not be grown to the size of its disk",
		prometheus.GaugeValue,
		func(n NodeVolumes) int { return n.Small },
	},
	{
		"oxide_csi_node_luks_headers_mended_total",
		"LUKS2 headers that were mended from their other copy since the start",
		prometheus.CounterValue,
		func(n NodeVolumes) int { return n.HeadersMended },
	},
	{
		"oxide_csi_node_nvme_functions_not_ready", "NVMe functions of this guest that show no disk: the kernel refused " +
			"them, mostly because another disk has the same serial, or they are still starting",
		prometheus.GaugeValue, func(n NodeVolumes) int { return n.FunctionsNotReady },
	},
}

// nodeVolumes is a collector that counts the volumes of this node at each scrape.
type nodeVolumes func() (NodeVolumes, error)

// Describe implements [prometheus.Collector].
func (n nodeVolumes) Describe(descs chan<- *prometheus.Desc) {
	for _, count := range nodeCounts {
		descs <- prometheus.NewDesc(count.name, count.help, nil, nil)
	}
}

// Collect implements [prometheus.Collector]. If the volumes cannot be counted, the metrics are missing.
func (n nodeVolumes) Collect(metrics chan<- prometheus.Metric) {
	counts, err := n()
	if err != nil {
		return
	}
	for _, count := range nodeCounts {
		desc := prometheus.NewDesc(count.name, count.help, nil, nil)
		metrics <- prometheus.MustNewConstMetric(desc, count.kind, float64(count.of(counts)))
	}
}
