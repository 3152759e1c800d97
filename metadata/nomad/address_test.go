// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package nomad_test

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/metadata/nomad"
)

// Nomad's client would leave out all but host and port. Then the token would go to another service. So such an address
// gets no request. The error does not quote a password.
func TestAddressWithMoreThanAHost(t *testing.T) {
	const password = "canary-password"
	for name, change := range map[string]func(address string) string{
		"a path":                func(a string) string { return a + "/nomad" },
		"a path of slashes":     func(a string) string { return a + "//" },
		"a query":               func(a string) string { return a + "?region=a" },
		"an empty query":        func(a string) string { return a + "/?" },
		"a fragment":            func(a string) string { return a + "#a" },
		"a user and a password": func(a string) string { return strings.Replace(a, "://", "://user:"+password+"@", 1) },
		"a password with a slash": func(a string) string {
			return strings.Replace(a, "://", "://user:"+password+"/x@", 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := newAgent(t)
			a.meta = meta()
			_, err := nomad.New(nomad.Options{Address: change(a.URL), Token: token}).Instance(t.Context())
			if err == nil || strings.Contains(err.Error(), password) || len(a.calls) > 0 {
				t.Errorf("got %v, and the agent got %q", err, a.calls)
			}
		})
	}
	a := newAgent(t)
	a.meta = meta()
	if _, err := nomad.New(nomad.Options{Address: a.URL + "/", Token: token}).Instance(t.Context()); err != nil {
		t.Errorf("a slash after the port: %v", err)
	}
}

// The path of a socket is no URL. Each of these names another file than it would name as a URL, or none.
func TestSocketPathIsNoURL(t *testing.T) {
	for _, name := range []string{"a#b", "a%41", "a%zz", "a?b", "a b", "a%2Fb"} {
		for _, prefix := range []string{"unix://", "unix:"} {
			t.Run(prefix+name, func(t *testing.T) {
				dir := filepath.Join(shortDir(t), name)
				if err := os.Mkdir(dir, 0o755); err != nil {
					t.Fatal(err)
				}
				path := filepath.Join(dir, "api.sock")
				listener, err := net.Listen("unix", path)
				if err != nil {
					t.Fatal(err)
				}
				a := &agent{t: t, token: token, meta: meta()}
				server := &http.Server{Handler: a}
				go func() { _ = server.Serve(listener) }() // Close ends it
				t.Cleanup(func() { _ = server.Close() })
				for _, options := range []nomad.Options{
					{Socket: prefix + path, Token: token}, {Address: prefix + path, Token: token},
				} {
					if got, err := nomad.New(options).Instance(t.Context()); err != nil || got.ID != idA {
						t.Errorf("%+v, %v", got, err)
					}
				}
			})
		}
	}
}

// shortDir is a folder for a socket, whose path must be short.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "n")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// An address of a link with a zone is accepted.
func TestAddressWithAZone(t *testing.T) {
	listener, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{t: t, token: token, meta: meta()}
	server := &http.Server{Handler: a}
	go func() { _ = server.Serve(listener) }() // Close ends it
	t.Cleanup(func() { _ = server.Close() })
	address := "http://" + strings.Replace(listener.Addr().String(), "::1", "::1%25lo", 1)
	if got, err := nomad.New(nomad.Options{Address: address, Token: token}).
		Instance(t.Context()); err != nil ||
		got.ID != idA {
		t.Errorf("%s: %+v, %v", address, got, err)
	}
}
