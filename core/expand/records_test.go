// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package expand

import (
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/core/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/pages"
)

// Since 0.1.0. Another process, perhaps of another version, finishes an expansion that was interrupted.
func TestIntentIsPermanent(t *testing.T) {
	const volume, attempt = "0f9c5a0e-8c1f-4c6b-9f58-5d2f0b6f2a11", "5a2d7c34-1b7e-4f0a-8d7f-8b1c2d3e4f50"
	want := intent{Version: 1, Cluster: "prod", Volume: volume, Disk: volume, Attempt: attempt, SizeBytes: 20 << 30}
	const golden = `{"v":1,"cluster":"prod","vol":"` + volume + `","disk":"` + volume + `","try":"` + attempt + `","bytes":21474836480}`
	if got := rack.RecordText(want); got != golden {
		t.Errorf("got\n%s, want\n%s", got, golden)
	}
	pages.Shows(t, "../../docs/reference/formats.md", golden)
	if got, ok := parseIntent(rack.Record{Name: "csi-expand-" + volume, Text: golden}); !ok || got != want {
		t.Errorf("read back: %+v, %t", got, ok)
	}
}
