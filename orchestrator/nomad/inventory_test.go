// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/google/go-cmp/cmp"

	client "github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator"
	"github.com/oxidecomputer/oxide-csi-plugin/orchestrator/nomad"
)

// With ACLs on, Nomad hides volumes from a token without rights and answers no error. So only a management token, or a
// Nomad without ACLs, gives an inventory.
func TestInventory(t *testing.T) {
	for name, test := range map[string]struct {
		status int
		token  string
		ok     bool
	}{
		"ACLs off":         {http.StatusBadRequest, "ACL support disabled", true},
		"management token": {http.StatusOK, `{"Type": "management"}`, true},
		"client token":     {http.StatusOK, `{"Type": "client"}`, false},
		"no token":         {http.StatusForbidden, "Permission denied", false},
		"agent fails":      {http.StatusInternalServerError, "no leader", false},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				query := r.URL.Query()
				for _, header := range []string{"X-Nomad-Index", "X-Nomad-LastContact"} {
					w.Header().Set(header, "1")
				}
				w.Header().Set("X-Nomad-KnownLeader", "true")
				switch {
				case r.URL.Path == "/v1/acl/token/self":
					w.WriteHeader(test.status)
					_, _ = io.WriteString(w, test.token)
				case r.URL.Path != "/v1/volumes" || query.Get("namespace") != "*" || query.Get("type") != "csi":
					w.WriteHeader(http.StatusNotFound)
				case query.Get("next_token") == "":
					w.Header().Set("X-Nomad-NextToken", "b")
					_, _ = io.WriteString(
						w,
						`[{"ID": "a", "Namespace": "default", "ExternalID": "`+idA+`", "Provider": "csi.oxide.computer"},
						{"ID": "x", "Namespace": "default", "ExternalID": "vol-1", "Provider": "other.example"}]`,
					)
				default:
					_, _ = io.WriteString(w, `[{"ID": "b", "Namespace": "prod", "ExternalID": "`+idB+`", "Provider": ""}]`)
				}
			}))
			defer server.Close()
			known, err := nomad.NewOperator(client.Options{Address: server.URL}).Inventory(t.Context())
			if (err == nil) != test.ok {
				t.Fatalf("%+v, %v", known, err)
			}
			want := []orchestrator.KnownObject{
				{ID: idA, Object: "Nomad volume a in namespace default"}, {ID: idB, Object: "Nomad volume b in namespace prod"},
			}
			if !test.ok {
				want = nil
			}
			if diff := cmp.Diff(want, known.Volumes); diff != "" {
				t.Error(diff)
			}
		})
	}
}
