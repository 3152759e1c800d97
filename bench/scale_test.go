// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestPlot(t *testing.T) {
	line := plotLine{name: "10,000 instances, silence", calls: make([]float64, plotSeconds)}
	for i := range line.calls {
		line.calls[i] = float64(i % 50)
	}
	svg, err := plot([]plotLine{line, line, line, line})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(string(svg), "<svg") || !strings.Contains(string(svg), "10,000 instances, silence") ||
		len(svg) > 40_000 {
		t.Errorf("the plot has %d bytes and begins %.100q", len(svg), svg)
	}
}

// TestResultsOfAllTargets checks that make bench, make scale, make bench-nomad and make bench-buckets keep each other's
// rows.
func TestResultsOfAllTargets(t *testing.T) {
	file := filepath.Join(t.TempDir(), "results.json")
	if err := os.WriteFile(file, []byte("[]"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct{ write, want []string }{
		{[]string{"a", "b"}, []string{"a", "b"}},
		{[]string{fullScalePrefix + "7/x"}, []string{"a", "b", fullScalePrefix + "7/x"}},
		{[]string{"a", "c"}, []string{"a", "c", fullScalePrefix + "7/x"}},
		{[]string{onNomad.prefix + "x"}, []string{"a", "c", fullScalePrefix + "7/x", onNomad.prefix + "x"}},
		{[]string{fullScalePrefix + "7/y"}, []string{"a", "c", fullScalePrefix + "7/y", onNomad.prefix + "x"}},
		{[]string{"b"}, []string{"b", fullScalePrefix + "7/y", onNomad.prefix + "x"}},
		{[]string{bucketsPrefix + "x"}, []string{"b", fullScalePrefix + "7/y", onNomad.prefix + "x", bucketsPrefix + "x"}},
	} {
		var rows []row
		for _, name := range step.write {
			rows = append(rows, row{Name: name})
		}
		if err := write(file, rows, true); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var got []row
		if err := json.Unmarshal(text, &got); err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, r := range got {
			names = append(names, r.Name)
		}
		if diff := cmp.Diff(step.want, names); diff != "" {
			t.Errorf("after writing %v (-want +got):\n%s", step.write, diff)
		}
	}
}

func TestPercentile(t *testing.T) {
	var took []time.Duration
	for i := range 200 {
		took = append(took, time.Duration(200-i)*time.Millisecond)
	}
	for percent, want := range map[float64]float64{50: 100, 99: 198, 100: 200} {
		if got := percentile(took, percent); got != want {
			t.Errorf("p%v is %v, want %v", percent, got, want)
		}
	}
	if got := percentile(took[:1], 50); got != 200 {
		t.Errorf("p50 of one duration is %v, want 200", got)
	}
}

func TestScaleTable(t *testing.T) {
	rows := []row{
		{Name: fullScalePrefix + "1000/list/calls", Value: 4, Unit: "calls"},
		{Name: fullScalePrefix + "70000/list/calls", Value: 1234.4, Unit: "calls"},
		{Name: fullScalePrefix + "70000/list/time", Value: 18.25, Unit: "s"},
	}
	want := "| | | 1,000 volumes | 7,000 volumes | 70,000 volumes |\n|---|---|--:|--:|--:|\n" +
		"| list/calls | calls | 4 |  | 1,234 |\n| list/time | s |  |  | 18.2 |\n"
	if diff := cmp.Diff(want, scaleTable(rows)); diff != "" {
		t.Errorf("the table (-want +got):\n%s", diff)
	}
}

// TestCountsOfOtherCode checks that counts are compared with the written results, and times are not.
func TestCountsOfOtherCode(t *testing.T) {
	file := filepath.Join(t.TempDir(), "results.json")
	if err := os.WriteFile(file, []byte("[]"), 0o600); err != nil {
		t.Fatal(err)
	}
	rows := []row{
		{
			Name:  "calls/a",
			Value: 2,
			Unit:  "calls",
		},
		{Name: "size", Value: 30, Unit: "MB"},
		{Name: "time", Value: 5, Unit: "ms"},
	}
	if err := compareCounts(file, rows); err == nil || !strings.Contains(err.Error(), "calls/a") {
		t.Errorf("%v, want an error for a count without a result", err)
	}
	for range 2 {
		if err := writeCounts(file, rows); err != nil {
			t.Fatal(err)
		}
	}
	if written, err := read(file); err != nil || len(written) != 2 || !strings.HasPrefix(written[0].At, "commit ") {
		t.Errorf("written: %v, %v", written, err)
	}
	for _, tc := range []struct {
		calls, size float64
		differs     bool
	}{{2, 30.5, false}, {3, 30, true}, {1, 30, true}, {2, 31, true}, {2, 29, true}} {
		rows[0].Value, rows[1].Value, rows[2].Value = tc.calls, tc.size, 9
		if err := compareCounts(file, rows); (err != nil) != tc.differs {
			t.Errorf("%v calls, %v MB: %v", tc.calls, tc.size, err)
		}
	}
}
