// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package repo

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
)

// The memory of idle plugins stands once in the pages, and is that of bench/results.json.
func TestFigures(t *testing.T) {
	text, err := os.ReadFile("../../bench/results.json")
	if err != nil {
		t.Fatal(err)
	}
	var results []struct {
		Name  string
		Value float64
	}
	if err := json.Unmarshal(text, &results); err != nil {
		t.Fatal(err)
	}
	measured := map[string]float64{}
	for _, r := range results {
		measured[r.Name] = r.Value
	}
	want := fmt.Sprintf("An idle node plugin has %.1f MiB of anonymous memory (limit 12 MiB), an idle controller %.1f MiB",
		measured["memory/node/anonymous"], measured["memory/controller/anonymous"])
	page, err := os.ReadFile("../../docs/development/evidence.md")
	if err != nil {
		t.Fatal(err)
	}
	if flat := strings.Join(strings.Fields(string(page)), " "); strings.Count(flat, want) != 1 {
		t.Errorf("docs/development/evidence.md lacks %q", want)
	}
}
