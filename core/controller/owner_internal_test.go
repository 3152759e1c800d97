// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package controller

import (
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

// Since 0.1.0. The record of an adoption stays as long as the volume.
func TestAdoptionIsPermanent(t *testing.T) {
	const volume = "0f9c5a0e-8c1f-4c6b-9f58-5d2f0b6f2a11"
	want := adoption{Version: 1, Cluster: "new", From: "old", VolumeID: volume}
	const golden = `{"v":1,"cluster":"new","from":"old","disk":"` + volume + `"}`
	if got := rack.RecordText(want); got != golden {
		t.Errorf("got\n%s, want\n%s", got, golden)
	}
	pages.Shows(t, "../../docs/reference/formats.md", golden)
	if got, ok := parseAdoption(rack.Record{Name: "csi-adopt-" + volume, Text: golden}); !ok || got != want {
		t.Errorf("read back: %+v, %t", got, ok)
	}
}
