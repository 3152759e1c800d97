// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"errors"
	"net/http"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// The error is one sentence that ends with the next step.
func TestCheck(t *testing.T) {
	for _, test := range []struct {
		name     string
		change   func(*Config)
		before   func(http.ResponseWriter, *http.Request) bool
		want     error
		mentions []string
	}{
		{name: "good"},
		{
			name: "token", change: func(cfg *Config) { cfg.Token = FixedToken("oxide-token-wrong") },
			want: ErrUnauthenticated, mentions: []string{`rack "east"`, "HTTP 401", "give a token of this silo"},
		},
		{
			name: "no token", change: func(cfg *Config) { cfg.Token = func() (string, error) { return "", errors.New("token file: gone") } },
			want: ErrUnavailable, mentions: []string{`rack "east"`, "token file: gone"},
		},
		{
			name: "project", change: func(cfg *Config) { cfg.Project = "elsewhere" },
			want: ErrProject, mentions: []string{`rack "east"`, `"elsewhere"`, "HTTP 404", "correct the project"},
		},
		{
			name: "host", change: func(cfg *Config) { cfg.Host = "http://127.0.0.1:1" },
			want: ErrUnavailable, mentions: []string{`rack "east"`, "127.0.0.1:1", "connection refused", "see that the host"},
		},
		{
			name: "no rack", before: func(w http.ResponseWriter, _ *http.Request) bool { w.WriteHeader(404); return true },
			want: ErrUnavailable, mentions: []string{`rack "east"`, "/v1/ping", "HTTP 404", "see that the host"},
		},
		{
			name: "no answer", before: func(http.ResponseWriter, *http.Request) bool { panic(http.ErrAbortHandler) },
			want: ErrUnavailable, mentions: []string{"EOF", "see that the host"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t, simrack.Options{}, func(cfg *Config) {
				if test.change != nil {
					test.change(cfg)
				}
			})
			r.intercept(test.before)
			id, err := r.Check(t.Context())
			if test.want == nil {
				must(t, err)
				if again, err := r.ProjectID(t.Context()); err != nil || again != id || id == "" {
					t.Errorf("project %q, then %q, %v", id, again, err)
				}
				return
			}
			wantSentence(t, err, test.want, test.mentions...)
		})
	}
}

// A check asks the rack each time. A call that the rack denies calls for a check, and another call does not.
func TestCheckAfterADenial(t *testing.T) {
	token := testToken
	r := newRig(t, simrack.Options{}, func(cfg *Config) { cfg.Token = func() (string, error) { return token, nil } })
	denied := func() bool {
		select {
		case <-r.Denied():
			return true
		default:
			return false
		}
	}
	_, err := r.Check(t.Context())
	must(t, err)
	if _, err := r.Disk(t.Context(), "00000000-0000-4000-8000-000000000000"); !errors.Is(err, ErrNotFound) || denied() {
		t.Errorf("a look at no disk: %v, or it counts as denied", err)
	}
	token = "oxide-token-revoked"
	if _, err := r.Instances(t.Context()); !errors.Is(err, ErrUnauthenticated) || !denied() {
		t.Errorf("a call with a revoked token: %v, or it does not count as denied", err)
	}
	if _, err := r.Check(t.Context()); !errors.Is(err, ErrUnauthenticated) {
		t.Errorf("a check with a revoked token: %v", err)
	}
}

// A cancelled check returns the context's error.
func TestCheckCancelled(t *testing.T) {
	r := newRig(t, simrack.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.Check(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
