// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"path/filepath"
	"strings"
	"testing"
)

// TestWrittenBars checks that no bar is looser than in the written results, without a decision record, and that each
// was measured.
func TestWrittenBars(t *testing.T) {
	rows, err := read(filepath.Base(resultsFile))
	if err != nil {
		t.Fatal(err)
	}
	if err := loosened("..", rows); err != nil {
		t.Error(err)
	}
	if err := unmeasured(rows, ""); err != nil {
		t.Error(err)
	}
}

func TestLoosened(t *testing.T) {
	for _, tc := range []struct {
		row, was string
		loosened bool
	}{
		{"calls/CreateVolume", "≤ 1", true},
		{"calls/CreateVolume", "≤ 2", false},
		{"calls/CreateVolume", "≤ 3", false}, // tighter now
		{"calls/CreateVolume", "≥ 2", true},
		{"calls/CreateVolume", "", false},
		{"calls/CreateVolume/foreign-groups", "≤ 1", true},
		{"calls/ControllerPublishVolume", "≤ 3", false}, // with a record
		{"throughput/50ms/20-workers/create/ratio", "≥ 0.95", true},
		{"throughput/50ms/11-on-one-node/publish/ratio", "≥ 0.3333", false},
		{"a row that is gone", "≤ 1", true},
		{"a row that is gone", "", false},
	} {
		if err := loosened("..", []row{{Name: tc.row, Bar: tc.was}}); (err != nil) != tc.loosened {
			t.Errorf("%s was %q: %v", tc.row, tc.was, err)
		}
	}
	if err := loosened(t.TempDir(), []row{{Name: "calls/ControllerPublishVolume", Bar: "≤ 3"}}); err == nil {
		t.Error("the decision record does not exist, and the bar is looser")
	}
}

func TestUnmeasured(t *testing.T) {
	rows := []row{{Name: "wakeups/node"}}
	if err := unmeasured(rows, "wakeups/"); err == nil || !strings.Contains(err.Error(), "wakeups/controller") ||
		strings.Contains(err.Error(), "wakeups/node") {
		t.Errorf("%v, want an error about wakeups/controller alone", err)
	}
	if err := unmeasured(append(rows, row{Name: "wakeups/controller"}), "wakeups/"); err != nil {
		t.Error(err)
	}
}
