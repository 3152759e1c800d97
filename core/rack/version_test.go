// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// Every call uses the newest version that both sides support. It is negotiated once and logged once.
func TestAPIVersions(t *testing.T) {
	for _, test := range []struct {
		name, newest, want string
		asked              []string
	}{
		{name: "release 20", newest: "2026060800.0.0", want: "2026060800.0.0", asked: []string{futureVersion, "2026060800.0.0"}},
		{name: "newer", newest: "2026073100.0.0", want: "2026060800.0.0", asked: []string{futureVersion, "2026060800.0.0"}},
		{name: "release 19", newest: "2026032500.0.0", want: "2026032500.0.0", asked: []string{futureVersion, "2026060800.0.0", "2026032500.0.0"}},
		{name: "between two releases", newest: "2026042900.0.0", want: "2026032500.0.0", asked: []string{futureVersion, "2026060800.0.0", "2026032500.0.0"}},
		{name: "release 18", newest: "2026021301.0.0", want: "2026021301.0.0", asked: []string{futureVersion, "2026060800.0.0", "2026032500.0.0", "2026021301.0.0"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t, simrack.Options{APIVersionMax: test.newest})
			node := r.node(t)
			disk := r.create(t, "v")
			for name, call := range map[string]func() error{
				"disk":           func() error { _, err := r.Disk(t.Context(), disk.VolumeID); return err },
				"disk by name":   func() error { _, err := r.DiskByName(t.Context(), "v"); return err },
				"instance":       func() error { _, err := r.Instance(t.Context(), node); return err },
				"instance disks": func() error { _, err := r.InstanceDisks(t.Context(), node); return err },
				"project":        func() error { _, err := r.ProjectID(t.Context()); return err },
			} {
				if err := call(); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
			attached, err := r.Attach(t.Context(), disk.ID, node)
			must(t, err)
			if attached.State != Attached || attached.InstanceID != node || attached.BlockSize != 4096 || attached.Local {
				t.Errorf("the disk is read as %+v", attached)
			}
			_, err = r.Detach(t.Context(), disk.ID, node)
			must(t, err)
			must(t, r.DeleteDisk(t.Context(), disk.ID))

			var asked []string
			for _, request := range r.seenRequests() {
				version, ping := strings.CutPrefix(request, "GET /v1/ping ")
				switch {
				case ping:
					asked = append(asked, version)
				case !strings.HasSuffix(request, " "+test.want):
					t.Errorf("%q is not in version %s", request, test.want)
				}
			}
			if diff := cmp.Diff(test.asked, asked); diff != "" {
				t.Errorf("versions asked for (-want +got):\n%s", diff)
			}
			if log := r.log.String(); strings.Count(log, "api_version="+test.want+" ") != 1 || strings.Count(log, "\n") != 1 ||
				!strings.Contains(log, "rack=east") {
				t.Errorf("the log is: %s", log)
			}
		})
	}
}

// The error names a rack that is too old, and no request except the ping reaches such a rack.
func TestRackTooOld(t *testing.T) {
	for _, test := range []struct {
		name, newest string
		before       func(http.ResponseWriter, *http.Request) bool
		want         error
		mentions     []string
	}{
		{
			name: "release 17, which ignores the header", want: errOldRelease, mentions: []string{"release 17 or older", "update the rack to release 18"},
			before: func(_ http.ResponseWriter, req *http.Request) bool { req.Header.Del("Api-Version"); return false },
		},
		{
			name: "a page that answers everything", want: ErrUnavailable, mentions: []string{ErrProxy.Error(), "--oxide-host"},
			before: func(w http.ResponseWriter, _ *http.Request) bool {
				_, err := w.Write([]byte("<html>"))
				return err == nil
			},
		},
		{
			name: "before read-only disks", newest: "2026013100.0.0", want: errNoCommonVersion,
			mentions: []string{"2026060800.0.0, 2026032500.0.0, 2026021301.0.0", "update the rack to release 18"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t, simrack.Options{APIVersionMax: test.newest})
			r.intercept(test.before)
			for range 2 {
				_, err := r.CreateDisk(t.Context(), DiskSpec{Name: "v", SizeBytes: gib, BlockSize: 4096})
				wantSentence(t, err, ErrUnavailable, test.mentions...)
			}
			if _, err := r.Check(t.Context()); !errors.Is(err, test.want) {
				t.Errorf("Check: %v", err)
			}
			for request := range r.requests() {
				if request != "GET /v1/ping" {
					t.Errorf("%s reached the rack", request)
				}
			}
			if log := r.log.String(); log != "" {
				t.Errorf("the log names a version: %s", log)
			}
		})
	}
}

func wantSentence(t *testing.T, err, want error, mentions ...string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("%v is not %v", err, want)
	}
	for _, mention := range mentions {
		if !strings.Contains(err.Error(), mention) {
			t.Errorf("%q does not mention %q", err, mention)
		}
	}
	if strings.ContainsAny(err.Error(), "\r\n\t") || strings.Contains(err.Error(), testToken) {
		t.Errorf("%q is not one line for an operator", err)
	}
}

// An answer that neither serves nor refuses the version decides nothing. The next call negotiates again.
func TestNegotiationFailureIsNotRemembered(t *testing.T) {
	for _, test := range []struct {
		name     string
		answer   func(http.ResponseWriter)
		mentions string
	}{
		{"no such page", func(w http.ResponseWriter) { w.WriteHeader(404) }, "HTTP 404"},
		{"broken", func(w http.ResponseWriter) { refuse(w, 500, "Internal", testToken) }, "HTTP 500"},
		{"restarting", func(w http.ResponseWriter) { refuse(w, 503, "ServiceNotAvailable", "Service Unavailable") }, "HTTP 503"},
		{"another 400", func(w http.ResponseWriter) { refuse(w, 400, "", "bad value for header") }, "HTTP 400"},
		{"no answer", func(http.ResponseWriter) { panic(http.ErrAbortHandler) }, "EOF"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t, simrack.Options{})
			r.intercept(func(w http.ResponseWriter, req *http.Request) bool { test.answer(w); return true })
			_, err := r.Disk(t.Context(), r.node(t))
			wantSentence(t, err, ErrUnavailable, test.mentions)
			r.intercept(nil)
			r.create(t, "v")
		})
	}
}

func TestConcurrentCallsNegotiateOnce(t *testing.T) {
	r := newRig(t, simrack.Options{APIVersionMax: "2026032500.0.0"})
	var calls sync.WaitGroup
	for range 50 {
		calls.Go(func() {
			if _, err := r.CreateDisk(
				t.Context(),
				DiskSpec{Name: "v", SizeBytes: gib, BlockSize: 4096},
			); err != nil &&
				!errors.Is(err, ErrAlreadyExists) {
				t.Error(err)
			}
		})
	}
	calls.Wait()
	if diff := cmp.Diff(map[string]int{"GET /v1/ping": 3, "POST /v1/disks": 50}, r.requests()); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
}

// One caller negotiates for all. If it leaves, another caller takes over.
func TestNegotiatingCallerLeaves(t *testing.T) {
	r := newRig(t, simrack.Options{})
	asked, goOn := make(chan struct{}, 16), make(chan struct{})
	r.intercept(func(_ http.ResponseWriter, req *http.Request) bool {
		asked <- struct{}{}
		select {
		case <-goOn:
		case <-req.Context().Done():
		}
		return false
	})
	ctx, cancel := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() {
		_, err := r.CreateDisk(ctx, DiskSpec{Name: "a", SizeBytes: gib, BlockSize: 4096})
		first <- err
	}()
	<-asked
	others := make(chan error, 5)
	for range cap(others) {
		go func() { _, err := r.ProjectID(t.Context()); others <- err }()
	}
	impatient, done := context.WithCancel(t.Context())
	done()
	if _, err := r.Disk(impatient, r.node(t)); !errors.Is(err, context.Canceled) {
		t.Errorf("a call that does not wait: %v", err)
	}
	cancel()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("the first call: %v", err)
	}
	<-asked // by another caller
	close(goOn)
	for range cap(others) {
		if err := <-others; err != nil {
			t.Errorf("another call: %v", err)
		}
	}
}

// breaksOnce is a transport whose first request panics.
type breaksOnce struct{ once sync.Once }

func (b *breaksOnce) RoundTrip(req *http.Request) (*http.Response, error) {
	b.once.Do(func() { panic("broken") })
	return http.DefaultTransport.RoundTrip(req)
}

// After a panic in the negotiation the next call negotiates.
func TestPanicInTheNegotiation(t *testing.T) {
	r := newRig(t, simrack.Options{}, func(c *Config) { c.HTTPClient = &http.Client{Transport: &breaksOnce{}} })
	create := func() (err error) {
		defer func() {
			if reason := recover(); reason != nil {
				err = fmt.Errorf("panic: %v", reason)
			}
		}()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err = r.CreateDisk(ctx, DiskSpec{Name: "v", SizeBytes: gib, BlockSize: 4096})
		return err
	}
	if err := create(); err == nil || !strings.Contains(err.Error(), "broken") {
		t.Fatalf("the first call: %v", err)
	}
	must(t, create())
}

// A rack that is downgraded refuses the version in use. The refused requests are repeated completely in an older
// version, which is negotiated once for all.
func TestRackIsDowngraded(t *testing.T) {
	r := newRig(t, simrack.Options{})
	r.create(t, "v")
	older := "2026021301.0.0"
	must(t, r.sim.Set(t.Context(), simtest.Settings{APIVersionMax: &older}))
	r.requests()
	var calls sync.WaitGroup
	for _, name := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
		calls.Go(func() {
			disk, err := r.CreateDisk(
				t.Context(),
				DiskSpec{Name: name, Description: "whole " + name, SizeBytes: 2 * gib, BlockSize: 512},
			)
			if err != nil || disk.Description != "whole "+name || disk.SizeBytes != 2*gib {
				t.Errorf("%+v, %v", disk, err)
			}
		})
	}
	calls.Wait()
	requests := r.seenRequests()
	for version, want := range map[string]int{futureVersion: 1, "2026060800.0.0": 1, "2026032500.0.0": 1, older: 1} {
		if n := count(requests, "GET /v1/ping "+version); n != want {
			t.Errorf("version %s was asked for %d times, want %d", version, n, want)
		}
	}
	if n := count(requests, "POST /v1/disks "+older); n != 8 {
		t.Errorf("%d requests in the older version, want 8", n)
	}
	if strings.Count(r.log.String(), "api_version="+older) != 1 {
		t.Errorf("the log is: %s", r.log)
	}
}

// A late refusal does not discard a version that another call has negotiated meanwhile.
func TestVersionRefusedLate(t *testing.T) {
	r := newRig(t, simrack.Options{})
	disk := r.create(t, "v")
	older := "2026021301.0.0"
	must(t, r.sim.Set(t.Context(), simtest.Settings{APIVersionMax: &older}))
	held, goOn := make(chan struct{}), make(chan struct{})
	r.intercept(func(_ http.ResponseWriter, req *http.Request) bool {
		if req.Method == http.MethodDelete && req.Header.Get("Api-Version") != older {
			close(held)
			<-goOn
		}
		return false
	})
	late := make(chan error, 1)
	go func() { late <- r.DeleteDisk(t.Context(), disk.ID) }()
	<-held
	r.create(t, "w")
	r.requests()
	close(goOn)
	must(t, <-late)
	if diff := cmp.Diff(map[string]int{"DELETE /v1/disks/" + disk.VolumeID: 1}, r.requests()); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
}

func count(all []string, one string) int {
	return len(slices.DeleteFunc(slices.Clone(all), func(s string) bool { return s != one }))
}

// A rack that serves a version to a ping and refuses it for everything else gets a limited number of requests.
func TestVersionRefusedAfterPing(t *testing.T) {
	r := newRig(t, simrack.Options{})
	r.intercept(func(w http.ResponseWriter, req *http.Request) bool {
		if req.URL.Path == "/v1/ping" {
			return false
		}
		refuse(w, 400, "", versionRefusedPrefix+": "+req.Header.Get("Api-Version"))
		return true
	})
	_, err := r.CreateDisk(t.Context(), DiskSpec{Name: "v", SizeBytes: gib, BlockSize: 4096})
	wantSentence(t, err, ErrUnavailable, "serves none of the API versions")
	if n := r.requests()["POST /v1/disks"]; n != 2 {
		t.Errorf("%d requests, want 2", n)
	}
}

// Only the rack's own message with status 400 refuses a version. The caller can still read the whole answer.
func TestOtherRefusals(t *testing.T) {
	for _, test := range []struct{ name, code, message string }{
		{"another reason", "", "unable to parse JSON body: EOF"},
		{"a disk of that name", "InvalidRequest", versionRefusedPrefix + " is my name"},
		{"long", "InvalidRequest", strings.Repeat("x", 3*maxRefusal)},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t, simrack.Options{})
			_, err := r.ProjectID(t.Context())
			must(t, err)
			r.requests()
			r.intercept(func(w http.ResponseWriter, _ *http.Request) bool {
				refuse(w, 400, test.code, test.message)
				return true
			})
			_, err = r.CreateDisk(t.Context(), DiskSpec{Name: "v", SizeBytes: gib, BlockSize: 4096})
			wantSentence(t, err, ErrRefused, test.message)
			if diff := cmp.Diff(map[string]int{"POST /v1/disks": 1}, r.requests()); diff != "" {
				t.Errorf("requests (-want +got):\n%s", diff)
			}
		})
	}
}
