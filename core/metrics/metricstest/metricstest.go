// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package metricstest parses pages of metrics as Prometheus does, for tests.
package metricstest

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// Samples maps each series of a page, such as `name{label="value"}`, to its value. Labels are in alphabetical order.
type Samples map[string]float64

// Parse parses a page. A line that Prometheus would reject ends the test.
func Parse(t testing.TB, page string) map[string]*dto.MetricFamily {
	t.Helper()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(page))
	if err != nil {
		t.Fatalf("Prometheus cannot parse the page: %v\n%s", err, page)
	}
	return families
}

// Read returns the samples of a page, without those of the Go runtime and the process. A repeated series is an error.
func Read(t testing.TB, page string) Samples {
	t.Helper()
	samples := Samples{}
	for name, family := range Parse(t, page) {
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") {
			continue
		}
		vector, err := expfmt.ExtractSamples(&expfmt.DecodeOptions{Timestamp: model.Now()}, family)
		if err != nil {
			t.Fatal(err)
		}
		for _, sample := range vector {
			series := strings.ReplaceAll(sample.Metric.String(), `", `, `",`) // as on the page
			if _, twice := samples[series]; twice {
				t.Errorf("two samples of %s", series)
			}
			samples[series] = float64(sample.Value)
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

// Page returns the metrics that a handler serves.
func Page(handler http.Handler) string {
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	return w.Body.String()
}
