package core

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
)

// metrics count what this process answered.
type metrics struct {
	rpcs   *prometheus.HistogramVec
	panics prometheus.Counter
}

func newMetrics(registry prometheus.Registerer) *metrics {
	m := &metrics{
		rpcs: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "oxide_csi_rpc_duration_seconds",
			Help:    "Duration of CSI RPCs by method and gRPC code.",
			Buckets: []float64{0.001, 0.005, 0.025, 0.1, 0.5, 2, 10, 60, 300},
		}, []string{"method", "code"}),
		panics: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "oxide_csi_panics_total",
			Help: "RPCs that ended in a defect of the plugin.",
		}),
	}
	registry.MustRegister(m.rpcs, m.panics)
	return m
}

func (m *metrics) observe(method string, code codes.Code, took time.Duration) {
	m.rpcs.WithLabelValues(method, code.String()).Observe(took.Seconds())
}
