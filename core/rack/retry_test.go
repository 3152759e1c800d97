// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"crypto/x509"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// An answer whose end is lost counts as lost: a read, an attach and a detach are repeated.
func TestCutOffAnswer(t *testing.T) {
	for operation, call := range map[string]func(r *rig, disk string) error{
		"disk_view": func(r *rig, disk string) error { _, err := r.Disk(t.Context(), disk); return err },
		"instance_disk_attach": func(r *rig, disk string) error {
			_, err := r.Attach(t.Context(), DiskID(disk), r.node(t))
			return err
		},
	} {
		t.Run(operation, func(t *testing.T) {
			r := newRig(t, simrack.Options{})
			disk := r.create(t, "d")
			r.node(t)
			var cut atomic.Bool
			r.intercept(func(w http.ResponseWriter, req *http.Request) bool {
				if operationName(req) != operation || !cut.CompareAndSwap(false, true) {
					return false
				}
				w.Header().Set("Content-Type", "application/json")
				w.Header().Set("Content-Length", "1000")
				_, err := w.Write([]byte(`{"id":`))
				must(t, errors.Join(err, http.NewResponseController(w).Flush()))
				panic(http.ErrAbortHandler)
			})
			must(t, call(r, disk.VolumeID))
			if !cut.Load() {
				t.Error("no answer was cut off")
			}
		})
	}
}

// Requests that are safe to repeat are sent a few times after temporary trouble. All others are sent once.
func TestRetries(t *testing.T) {
	disk := func(r *rig, name string) DiskID {
		d, err := r.DiskByName(t.Context(), name)
		must(t, err)
		return d.ID
	}
	calls := map[string]func(r *rig) error{
		"disk_view":            func(r *rig) error { _, err := r.DiskByName(t.Context(), "free"); return err },
		"instance_disk_list":   func(r *rig) error { _, err := r.InstanceDisks(t.Context(), r.node(t)); return err },
		"instance_disk_attach": func(r *rig) error { _, err := r.Attach(t.Context(), disk(r, "free"), r.node(t)); return err },
		"instance_disk_detach": func(r *rig) error { _, err := r.Detach(t.Context(), disk(r, "used"), r.node(t)); return err },
		"disk_create": func(r *rig) error {
			_, err := r.CreateDisk(t.Context(), DiskSpec{Name: "new", SizeBytes: gib, BlockSize: 4096})
			return err
		},
		"disk_delete": func(r *rig) error { return r.DeleteDisk(t.Context(), disk(r, "free")) },
	}
	trouble := map[string]simtest.Fault{
		"503":   {Kind: simtest.FaultStatus, Status: 503, ErrorCode: "ServiceNotAvailable", Message: "Service Unavailable"},
		"500":   {Kind: simtest.FaultStatus, Status: 500, ErrorCode: "Internal", Message: "Internal Server Error"},
		"lost":  {Kind: simtest.FaultLost},
		"reset": {Kind: simtest.FaultReset},
	}
	for _, test := range []struct {
		operation, trouble string
		times, sent        int
		want               error
	}{
		{"disk_view", "503", 2, 3, nil},
		{"disk_view", "503", 3, 3, ErrUnavailable},
		{"disk_view", "lost", 2, 3, nil},
		{"disk_view", "reset", 2, 3, nil},
		{"disk_view", "500", 1, 1, ErrInternal},
		{"instance_disk_list", "503", 2, 3, nil},
		{"instance_disk_attach", "503", 2, 3, nil},
		{"instance_disk_attach", "lost", 2, 3, nil}, // the first attempt attached it
		{"instance_disk_attach", "reset", 3, 3, ErrUnavailable},
		{"instance_disk_attach", "500", 1, 1, ErrInternal},
		{"instance_disk_detach", "503", 2, 3, nil},
		{"instance_disk_detach", "lost", 2, 3, nil},
		{"instance_disk_detach", "500", 1, 1, ErrInternal},
		{"disk_create", "503", 1, 1, ErrUnavailable},
		{"disk_create", "lost", 1, 1, ErrUnavailable},
		{"disk_create", "reset", 1, 1, ErrUnavailable},
		{"disk_delete", "503", 1, 1, ErrUnavailable},
		{"disk_delete", "lost", 1, 1, ErrUnavailable},
	} {
		t.Run(test.operation+" "+test.trouble, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, simrack.Options{})
			r.create(t, "free")
			used := r.create(t, "used")
			_, err := r.Attach(t.Context(), used.ID, r.node(t))
			must(t, err)
			must(t, r.sim.ClearCalls(t.Context()))
			fault := trouble[test.trouble]
			fault.Operation, fault.Count = test.operation, &test.times
			r.inject(t, fault)
			err = calls[test.operation](r)
			switch {
			case test.want == nil:
				must(t, err)
			default:
				wantSentence(t, err, test.want)
			}
			seen, err := r.sim.Calls(t.Context())
			must(t, err)
			sent := seen.Counts[test.operation]
			if test.operation == "disk_view" && test.trouble == "reset" ||
				test.operation == "disk_view" && test.trouble == "lost" {
				// On a reused connection that ends before an answer, net/http itself repeats a GET.
				if sent < test.sent {
					t.Errorf("sent %d times, want %d or more", sent, test.sent)
				}
				return
			}
			if sent != test.sent {
				t.Errorf("sent %d times, want %d", sent, test.sent)
			}
		})
	}
}

// If the deadline leaves no time for another attempt, the request returns the answer of the last attempt, at once.
func TestRetriesKeepTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), firstBackoff/2)
		defer cancel()
		start, rack := time.Now(), &unavailable{}
		resp, err := (&retrier{next: rack}).RoundTrip(newRequest(t, ctx))
		if err != nil || resp.StatusCode != http.StatusServiceUnavailable {
			t.Errorf("%v, %v; want the answer 503", resp, err)
		}
		if waited := time.Since(start); waited > 0 || rack.requests != 1 {
			t.Errorf("%d requests in %s, want 1 without a wait", rack.requests, waited)
		}
	})
}

// A call whose caller leaves during the wait for the next attempt ends at once.
func TestRetriesEndWithTheCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		const leavesAfter = firstBackoff / 4
		time.AfterFunc(leavesAfter, cancel)
		start, rack := time.Now(), &unavailable{}
		if _, err := (&retrier{next: rack}).RoundTrip(newRequest(t, ctx)); err != nil {
			t.Error(err)
		}
		if waited := time.Since(start); waited != leavesAfter || rack.requests != 1 {
			t.Errorf("%d requests in %s, want 1 in %s", rack.requests, waited, leavesAfter)
		}
	})
}

// unavailable is a rack that answers every request with 503.
type unavailable struct{ requests int }

func (u *unavailable) RoundTrip(*http.Request) (*http.Response, error) {
	u.requests++
	return &http.Response{StatusCode: http.StatusServiceUnavailable, Body: http.NoBody}, nil
}

func newRequest(t *testing.T, ctx context.Context) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://rack/v1/disks/a", nil)
	must(t, err)
	return req
}

func TestBackoffGrowsAndDiffers(t *testing.T) {
	waits := map[time.Duration]bool{}
	for range 20 {
		for attempt, longest := range []time.Duration{firstBackoff, 2 * firstBackoff} {
			wait := backoff(attempt + 1)
			if wait < longest/2 || wait >= longest {
				t.Errorf("attempt %d waits %s, want %s to %s", attempt+1, wait, longest/2, longest)
			}
			waits[wait] = true
		}
	}
	if len(waits) < 10 {
		t.Errorf("only %d different waits", len(waits))
	}
}

// A rack whose certificate a private CA signed is trusted only with that CA's file.
func TestCertificateOfAPrivateCA(t *testing.T) {
	sim, err := simrack.New(simrack.Options{Token: testToken, Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	t.Cleanup(func() { must(t, sim.Close()) })
	api := httptest.NewUnstartedServer(sim.API())
	api.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	api.StartTLS()
	t.Cleanup(api.Close)
	roots := x509.NewCertPool()
	roots.AddCert(api.Certificate())
	for _, test := range []struct {
		name     string
		roots    *x509.CertPool
		mentions string
	}{
		{"with it", roots, ""},
		{"without it", nil, "--oxide-ca-file"},
		{"with another", x509.NewCertPool(), "--oxide-ca-file"},
	} {
		t.Run(test.name, func(t *testing.T) {
			client, err := New(
				Config{
					Name:       "east",
					Host:       api.URL,
					Project:    testProject,
					Token:      FixedToken(testToken),
					HTTPClient: NewHTTPClient(test.roots),
				},
			)
			must(t, err)
			_, err = client.Check(t.Context())
			if test.mentions == "" {
				must(t, err)
				return
			}
			wantSentence(t, err, ErrUnavailable, test.mentions, "certificate")
		})
	}
}

// A hundred concurrent calls leave their connections for the next hundred.
func TestConnectionsAreKept(t *testing.T) {
	const calls = 100
	var opened int
	waiting := make(chan chan struct{}, calls)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		goOn := make(chan struct{})
		waiting <- goOn
		<-goOn
		_, _ = w.Write([]byte("{}")) // a failed write fails the client's read
	}))
	connections := make(chan struct{}, 10*calls)
	server.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			connections <- struct{}{}
		}
	}
	server.Start()
	t.Cleanup(server.Close)
	client := NewHTTPClient(nil)
	for range 2 {
		answers := make(chan error, calls)
		for range calls {
			go func() {
				resp, err := client.Get(server.URL)
				if err == nil {
					drain(resp)
				}
				answers <- err
			}()
		}
		var all []chan struct{}
		for range calls {
			all = append(all, <-waiting) // all calls are under way at once
		}
		for _, goOn := range all {
			close(goOn)
		}
		for range calls {
			must(t, <-answers)
		}
		opened = len(connections)
	}
	if diff := cmp.Diff(calls, opened); diff != "" {
		t.Errorf("connections opened (-want +got):\n%s", diff)
	}
}
