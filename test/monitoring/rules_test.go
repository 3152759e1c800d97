// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

// Package monitoring tests what deploy/monitoring has for Prometheus and Grafana: against the table of metrics and the
// page of symptoms here, and with the build tag "monitoring" in a real Prometheus, make test-monitoring.
package monitoring

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

var update = flag.Bool("update", false, "write deploy/monitoring/prometheusrule.yaml")

const root = "../.."

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, name))
	must(t, err)
	return string(text)
}

// alert is an alerting rule.
type alert struct {
	Alert, Expr string
	Labels      map[string]string
	Annotations map[string]string
}

func alerts(t *testing.T) []alert {
	t.Helper()
	var file struct{ Groups []struct{ Rules []alert } }
	must(t, yaml.Unmarshal([]byte(read(t, "deploy/monitoring/rules.yaml")), &file))
	if len(file.Groups) != 1 || len(file.Groups[0].Rules) < 20 {
		t.Fatalf("rules.yaml was not understood: %d groups", len(file.Groups))
	}
	return file.Groups[0].Rules
}

// metric is a metric in the table of docs/reference/metrics.md, with its labels.
type metric struct {
	histogram bool
	labels    []string
}

var tableRow = regexp.MustCompile("(?m)^\\| `(\\w+)` \\| (\\w+) \\| ([^|]*) \\|")

// table returns the metrics in the table of docs/reference/metrics.md, which a test of core/metrics makes.
func table(t *testing.T) map[string]metric {
	t.Helper()
	metrics := map[string]metric{}
	for _, row := range tableRow.FindAllStringSubmatch(read(t, "docs/reference/metrics.md"), -1) {
		metrics[row[1]] = metric{row[2] == "histogram", regexp.MustCompile(`\w+`).FindAllString(row[3], -1)}
	}
	if len(metrics) < 20 {
		t.Fatalf("only %d metrics were found in the table", len(metrics))
	}
	return metrics
}

var (
	selector = regexp.MustCompile(`\b((?:csi|oxide|up|process|go)_?\w*)\b\s*(?:\{([^}]*)\})?`)
	matcher  = regexp.MustCompile(`(\w+)\s*(?:=~|!~|!=|=)`)
	grouping = regexp.MustCompile(`\b(?:by|on)\s*\(([^)]*)\)`)
	text     = regexp.MustCompile(`"[^"]*"`)
)

// targetLabels are those that Prometheus adds to each series.
var targetLabels = []string{"job", "instance"}

// checkQuery checks that a query has only metrics and labels of the table, and up.
func checkQuery(t *testing.T, what, query string) {
	t.Helper()
	known, named := table(t), 0
	labels := slices.Concat(targetLabels, []string{"le"})
	for _, m := range selector.FindAllStringSubmatch(text.ReplaceAllString(query, `""`), -1) {
		name := m[1]
		base := regexp.MustCompile(`_(bucket|count|sum)$`).ReplaceAllString(name, "")
		found, exists := known[name]
		switch {
		case name == "up":
		case exists && !found.histogram:
		case base != name && known[base].histogram:
			found = known[base]
		default:
			t.Errorf("%s: %s is not in the table of metrics:\n%s", what, name, query)
		}
		named++
		labels = append(labels, found.labels...)
		for _, label := range matcher.FindAllStringSubmatch(m[2], -1) {
			if !slices.Contains(slices.Concat(targetLabels, found.labels), label[1]) {
				t.Errorf("%s: %s has no label %s:\n%s", what, name, label[1], query)
			}
		}
	}
	if named == 0 {
		t.Errorf("%s: no metric was found in %s", what, query)
	}
	for _, group := range grouping.FindAllStringSubmatch(query, -1) {
		for _, label := range regexp.MustCompile(`\w+`).FindAllString(group[1], -1) {
			if !slices.Contains(labels, label) {
				t.Errorf("%s: no metric has the label %s:\n%s", what, label, query)
			}
		}
	}
}

// Every alert asks for metrics that exist, has a short summary, and leads to a heading of the pages of errors.
func TestAlerts(t *testing.T) {
	const pages = "https://github.com/oxidecomputer/oxide-csi-plugin/blob/main/"
	anchors := map[string]bool{}
	for _, page := range []string{"docs/how-to/troubleshooting.md", "docs/reference/errors.md"} {
		for _, heading := range regexp.MustCompile(`(?m)^##? (.*)$`).FindAllStringSubmatch(read(t, page), -1) {
			anchors[page+"#"+strings.ReplaceAll(strings.ToLower(heading[1]), " ", "-")] = true
		}
	}
	seen := map[string]bool{}
	for _, a := range alerts(t) {
		if !strings.HasPrefix(a.Alert, "OxideCSI") || seen[a.Alert] {
			t.Errorf("an alert is named %q", a.Alert)
		}
		seen[a.Alert] = true
		checkQuery(t, a.Alert, a.Expr)
		if !slices.Contains([]string{"info", "warning", "critical"}, a.Labels["severity"]) {
			t.Errorf("%s has the severity %q", a.Alert, a.Labels["severity"])
		}
		if n := len(a.Annotations["summary"]); n == 0 || n > 120 || a.Annotations["description"] == "" {
			t.Errorf("%s has a summary of %d bytes and the description %q", a.Alert, n, a.Annotations["description"])
		}
		anchor, ok := strings.CutPrefix(a.Annotations["runbook_url"], pages)
		if !ok || !anchors[anchor] {
			t.Errorf("%s leads to %q, which is no heading", a.Alert, a.Annotations["runbook_url"])
		}
	}
}

// promtool's unit tests have each alert: it waits, fires, and is resolved at the end.
func TestEveryAlertIsTested(t *testing.T) {
	file, err := os.ReadFile("testdata/rules_test.yaml")
	must(t, err)
	var cases struct {
		Tests []struct {
			Name  string
			Exprs []struct {
				Samples []struct{ Labels string } `yaml:"exp_samples"`
			} `yaml:"promql_expr_test"`
		}
	}
	must(t, yaml.Unmarshal(file, &cases))
	tested := map[string]bool{}
	for _, c := range cases.Tests {
		last := len(c.Exprs) - 1
		for i, expr := range c.Exprs {
			for _, sample := range expr.Samples {
				if i == 0 || i == last || len(c.Exprs[0].Samples)+len(c.Exprs[last].Samples) > 0 {
					t.Errorf("%q does not show how %s waits and resolves", c.Name, sample.Labels)
				}
				tested[sample.Labels] = true
			}
		}
	}
	for _, a := range alerts(t) {
		if !tested[`{alertname="`+a.Alert+`"}`] {
			t.Errorf("promtool's tests do not show that %s fires", a.Alert)
		}
	}
}

// TestPrometheusRule makes the object for the Prometheus operator from rules.yaml.
func TestPrometheusRule(t *testing.T) {
	const name = "deploy/monitoring/prometheusrule.yaml"
	const head = `# Made from rules.yaml by: go test ./test/monitoring -run TestPrometheusRule -update
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: oxide-csi
  namespace: oxide-csi
  labels:
    app.kubernetes.io/name: oxide-csi-driver
spec:
`
	_, groups, found := strings.Cut(read(t, "deploy/monitoring/rules.yaml"), "\ngroups:\n")
	if !found {
		t.Fatal("rules.yaml has no groups")
	}
	want := head + regexp.MustCompile(`(?m)^(.)`).ReplaceAllString("groups:\n"+groups, "  $1")
	if *update {
		must(t, os.WriteFile(filepath.Join(root, name), []byte(want), 0o644))
		return
	}
	if diff := cmp.Diff(want, read(t, name)); diff != "" {
		t.Errorf("%s is not made from rules.yaml, run this test with -update (-want +got):\n%s", name, diff)
	}
}
