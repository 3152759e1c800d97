// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// U1. The SDK's types stand for the schema, whose file is cut to other paths.
func TestU1TokensOfAUser(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rack := newRack(t, simrack.Options{})
		w := &world{
			t: t, rack: rack, token: mainToken, apiURL: "http://api", controlURL: "http://control",
			client: &http.Client{Transport: inProcess{"api": rack.API(), "control": rack.Control()}},
		}
		w.newToken("viewer") // another user's
		var made struct{ Token string }
		w.operate("POST", "/tokens", fmt.Sprintf(`{"same_user_as":%q,"expires_in_s":3600}`, mainToken), 201, &made)

		raw := w.must("GET", "/me/access-tokens", "").raw
		var read oxide.DeviceAccessTokenResultsPage
		if err := json.Unmarshal([]byte(raw), &read); err != nil {
			t.Fatal(err)
		}
		if len(read.Items) != 2 || strings.Contains(raw, "oxide-token-") || strings.Contains(raw, made.Token) {
			t.Fatalf("got %s", raw)
		}
		for _, item := range decode(t, []byte(raw)).(map[string]any)["items"].([]any) {
			fields := item.(map[string]any)
			if len(fields) != 3 || fields["id"] == nil || fields["time_created"] == nil {
				t.Errorf("a token has %v", fields)
			}
		}
		var expire []string
		for _, token := range read.Items {
			if token.TimeExpires != nil {
				expire = append(expire, time.Until(*token.TimeExpires).String())
			}
		}
		if diff := cmp.Diff([]string{"1h0m0s"}, expire); diff != "" {
			t.Errorf("tokens expire in (-want +got): %s", diff)
		}
		if r := w.as(made.Token).do("GET", "/me/access-tokens?limit=1", ""); r.status != 200 || len(r.Items) != 1 {
			t.Errorf("with the other token: %s", r.raw)
		}

		time.Sleep(time.Hour)
		if got := w.must("GET", "/me/access-tokens", "").Items; len(got) != 1 {
			t.Errorf("%d tokens after one expired", len(got))
		}
		w.as(made.Token).do("GET", "/me", "").check(t, wants{401, "Unauthorized", "credentials missing or invalid"})
	})
}

// U2. A user's role is in the policy of the project or of the silo, by the user's ID or that of a group. The SDK's
// types stand for the schema, whose file is cut to other paths.
func TestU2Policies(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	for name, tt := range map[string]struct {
		role, via     string
		project, silo []string // roles of the user or the group
	}{
		"user":  {role: "viewer", project: []string{"viewer"}},
		"group": {role: "limited-collaborator", via: "group", project: []string{"limited_collaborator"}},
		"silo":  {role: "limited-collaborator", via: "silo", silo: []string{"limited_collaborator"}},
		"none":  {role: "none"},
	} {
		t.Run(name, func(t *testing.T) {
			var made struct{ Token string }
			w.operate("POST", "/tokens", fmt.Sprintf(`{"role":%q,"via":%q}`, tt.role, tt.via), 201, &made)
			with := w.as(made.Token)
			ids := map[string]string{with.must("GET", "/me", "").ID: "silo_user"}
			groups := with.must("GET", "/me/groups", "").Items
			for _, g := range groups {
				ids[g.ID] = "silo_group"
			}
			if (len(groups) == 1) != (tt.via == "group") {
				t.Errorf("groups: %v", groups)
			}
			roles := func(raw string) (found []string) {
				var policy oxide.ProjectRolePolicy
				if err := json.Unmarshal([]byte(raw), &policy); err != nil {
					t.Fatal(err)
				}
				for _, a := range policy.RoleAssignments {
					if kind := ids[a.IdentityId]; kind != "" && kind == string(a.IdentityType) {
						found = append(found, string(a.RoleName))
					}
				}
				return found
			}
			if diff := cmp.Diff(tt.silo, roles(with.must("GET", "/policy", "").raw)); diff != "" {
				t.Errorf("silo, -want +got:\n%s", diff)
			}
			if tt.role == "none" {
				with.do("GET", "/projects/proj/policy", "").
					check(t, wants{404, "ObjectNotFound", `not found: project with name "proj"`})
				return
			}
			if diff := cmp.Diff(tt.project, roles(with.must("GET", "/projects/proj/policy", "").raw)); diff != "" {
				t.Errorf("project, -want +got:\n%s", diff)
			}
		})
	}
	w.operate("POST", "/tokens", `{"role":"viewer","via":"friend"}`, 400, nil)
}
