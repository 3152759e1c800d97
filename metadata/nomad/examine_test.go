// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata"
	"github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
)

// A plugin is found by its driver, whatever its ID. The worst of its halves counts.
func TestExamine(t *testing.T) {
	const ours = `{"ID": "oxide", "Provider": "csi.oxide.computer", "ControllersExpected": 1, "NodesExpected": 2, `
	for name, test := range map[string]struct {
		status  int
		plugins string
		want    metadata.Status
	}{
		"healthy":       {200, `[` + ours + `"ControllersHealthy": 1, "NodesHealthy": 2}]`, metadata.StatusOK},
		"a node down":   {200, `[` + ours + `"ControllersHealthy": 1, "NodesHealthy": 1}]`, metadata.StatusWarning},
		"no controller": {200, `[` + ours + `"ControllersHealthy": 0, "NodesHealthy": 2}]`, metadata.StatusFailure},
		"not installed": {200, `[{"ID": "x", "Provider": "other.example", "ControllersHealthy": 1}]`, metadata.StatusFailure},
		"not allowed":   {403, `Permission denied`, metadata.StatusFailure},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Method != http.MethodGet {
					t.Errorf("it sent %s %s", r.Method, r.URL)
				}
				w.WriteHeader(test.status)
				_, _ = io.WriteString(w, test.plugins)
			}))
			defer server.Close()
			found := nomad.NewOperator(nomad.Options{Address: server.URL}).Examine(t.Context())
			if len(found) != 1 || found[0].Status != test.want || (found[0].Next == "") != (test.want == metadata.StatusOK) {
				t.Errorf("%+v", found)
			}
		})
	}
}
