// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package main

import (
	"strings"
	"testing"
)

func TestTimedRows(t *testing.T) {
	const move = `{"Name": "move to another client", "Seconds": 121}`
	rows, err := onNomad.rows(strings.NewReader(
		`{"Name": "redeployment on the same client", "Seconds": 2.5}` + move + `{"Name": "another", "Seconds": 200}`))
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []struct {
		name, bar string
		ok        bool
	}{
		{"nomad/redeployment on the same client", "≤ 5", true},
		{"nomad/move to another client", "≤ 120", false},
		{"nomad/another", "", true},
	} {
		if r := rows[i]; r.Name != want.name || r.Bar != want.bar || r.OK != want.ok || r.Unit != "s" {
			t.Errorf("%+v, want %+v", r, want)
		}
	}
	if _, err := onNomad.rows(strings.NewReader(move)); err == nil {
		t.Error("a redeployment has a bar, was not measured, and nothing fails")
	}
}
