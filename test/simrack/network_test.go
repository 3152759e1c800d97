// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

// newSecureWorld is a world whose API has TLS with HTTP/2.
func newSecureWorld(t *testing.T) *world {
	t.Helper()
	rack := newRack(t, simrack.Options{})
	api, control := httptest.NewUnstartedServer(rack.API()), httptest.NewServer(rack.Control())
	api.Listener, api.Config.ConnContext, api.EnableHTTP2 = simrack.Listener(api.Listener), simrack.ConnContext, true
	api.StartTLS()
	t.Cleanup(control.Close)
	t.Cleanup(api.Close)
	w := &world{t: t, rack: rack, token: mainToken, api: api, apiURL: api.URL, controlURL: control.URL}
	w.client = api.Client()
	t.Cleanup(w.client.CloseIdleConnections)
	return w
}

// With HTTP/2 a fault of one call ends the shared connection, and with it the answers of all calls.
func TestFaultsOfASharedConnection(t *testing.T) {
	for _, test := range []struct {
		kind string
		// disks is how many disks the failed call made.
		disks int
		// silent means that the calls get no answer and no error.
		silent bool
	}{{kind: "lost", disks: 1}, {kind: "reset"}, {kind: "silent", disks: 1, silent: true}} {
		t.Run(test.kind, func(t *testing.T) {
			w := newSecureWorld(t)
			w.must("GET", "/disks?project=proj", "")
			w.fault(`{"operation":"instance_list","kind":"delay","delay_ms":2000}`)
			slow := make(chan error, 1)
			go func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				req, err := http.NewRequestWithContext(ctx, "GET", w.apiURL+"/v1/instances?project=proj", nil)
				if err == nil {
					req.Header.Set("Authorization", "Bearer "+w.token)
					_, err = w.client.Do(req)
				}
				slow <- err
			}()
			w.waitFor("the slow call", func() bool { return w.hits("f1") == 1 })
			w.fault(`{"operation":"disk_create","kind":"` + test.kind + `"}`)
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			req, err := http.NewRequestWithContext(
				ctx, "POST", w.apiURL+"/v1/disks?project=proj", strings.NewReader(body("d")))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", "Bearer "+w.token)
			for _, call := range []func() error{
				func() error { _, err := w.client.Do(req); return err },
				func() error { return <-slow },
			} {
				if err := call(); err == nil || errors.Is(err, context.DeadlineExceeded) != test.silent {
					t.Errorf("error %v, want silence: %t", err, test.silent)
				}
			}
			w.client.CloseIdleConnections()
			w.client = secondClient(t, w.api)
			if got := w.must("GET", "/disks?project=proj", "").names(); len(got) != test.disks {
				t.Errorf("disks %v, want %d", got, test.disks)
			}
		})
	}
}

// secondClient is another client of a server with TLS, with connections of its own.
func secondClient(t *testing.T, s *httptest.Server) *http.Client {
	transport := s.Client().Transport.(*http.Transport).Clone()
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}
