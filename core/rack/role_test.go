// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// The role counts wherever it is assigned: to the user, to a group of the user, or on the silo.
func TestRole(t *testing.T) {
	for name, tt := range map[string]struct {
		role, via string
		want      Role
	}{
		"viewer":                   {"viewer", "", Viewer},
		"limited collaborator":     {"limited-collaborator", "", LimitedCollaborator},
		"group":                    {"limited-collaborator", "group", LimitedCollaborator},
		"viewer of the silo":       {"viewer", "silo", Viewer},
		"collaborator of the silo": {"limited-collaborator", "silo", LimitedCollaborator},
	} {
		t.Run(name, func(t *testing.T) {
			var token string
			r := newRig(t, simrack.Options{}, func(cfg *Config) {
				cfg.Token = func() (string, error) { return token, nil }
			})
			var err error
			token, err = r.sim.NewTokenVia(t.Context(), tt.role, tt.via)
			must(t, err)
			// Another user's role does not count.
			_, err = r.sim.NewToken(t.Context(), "limited-collaborator")
			must(t, err)
			role, err := r.Role(t.Context())
			if err != nil || role != tt.want {
				t.Errorf("%s, %v, want %s", role, err, tt.want)
			}
		})
	}
}

// An answer that is no policy is an error. It must not look like a user without a role.
func TestRoleOfAWrongAnswer(t *testing.T) {
	for _, path := range []string{"/v1/me", "/v1/me/groups", "/v1/policy", "/v1/projects/" + testProject + "/policy"} {
		t.Run(path, func(t *testing.T) {
			r := newRig(t, simrack.Options{})
			r.intercept(func(w http.ResponseWriter, req *http.Request) bool {
				hit := req.URL.Path == path
				if hit {
					_, _ = io.WriteString(w, "{}")
				}
				return hit
			})
			if role, err := r.Role(t.Context()); !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "wrong") {
				t.Errorf("%s, %v", role, err)
			}
		})
	}
}
