// Package metricstest reads pages of metrics as Prometheus does, for tests.
package metricstest

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// Samples are the values of a page by series, such as `name{label="value"}`, with labels in alphabetical order. A histogram
// has `name_count{…}` and `name_sum{…}`, and `name_bucket{…,le="0.1"}` for each of its buckets.
type Samples map[string]float64

// Parse reads a page. A line that Prometheus would not take ends the test.
func Parse(t testing.TB, page string) map[string]*dto.MetricFamily {
	t.Helper()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(page))
	if err != nil {
		t.Fatalf("a page that Prometheus does not read: %v\n%s", err, page)
	}
	return families
}

// Read reads the samples of a page. Two of the same series are an error.
func Read(t testing.TB, page string) Samples {
	t.Helper()
	samples := Samples{}
	add := func(series string, value float64) {
		if _, twice := samples[series]; twice {
			t.Errorf("two samples of %s", series)
		}
		samples[series] = value
	}
	for name, family := range Parse(t, page) {
		for _, metric := range family.GetMetric() {
			labels := labelText(metric.GetLabel())
			h := metric.GetHistogram()
			switch family.GetType() {
			case dto.MetricType_COUNTER:
				add(name+labels, metric.GetCounter().GetValue())
			case dto.MetricType_GAUGE:
				add(name+labels, metric.GetGauge().GetValue())
			case dto.MetricType_HISTOGRAM:
				add(name+"_count"+labels, float64(h.GetSampleCount()))
				add(name+"_sum"+labels, h.GetSampleSum())
				for _, bucket := range h.GetBucket() {
					le := `le="` + strconv.FormatFloat(bucket.GetUpperBound(), 'g', -1, 64) + `"}`
					add(name+"_bucket"+strings.TrimSuffix(labels, "}")+","+le, float64(bucket.GetCumulativeCount()))
				}
			default:
				t.Errorf("%s is a %s", name, family.GetType())
			}
		}
	}
	return samples
}

// Matching returns the samples whose series begin with a prefix.
func (s Samples) Matching(prefix string) Samples {
	matching := Samples{}
	for series, value := range s {
		if strings.HasPrefix(series, prefix) {
			matching[series] = value
		}
	}
	return matching
}

func labelText(labels []*dto.LabelPair) string {
	if len(labels) == 0 {
		return ""
	}
	texts := make([]string, 0, len(labels))
	for _, label := range labels {
		texts = append(texts, label.GetName()+"="+strconv.Quote(label.GetValue()))
	}
	slices.Sort(texts)
	return "{" + strings.Join(texts, ",") + "}"
}

// Page returns the metrics that a handler serves.
func Page(handler http.Handler) string {
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	return w.Body.String()
}
