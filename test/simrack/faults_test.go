// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package simrack_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
)

type calls struct {
	Counts map[string]int
	Log    []struct {
		Seq                            int
		Operation, Method, Path, Fault string
		Status                         int
	}
}

func (w *world) calls() calls {
	w.t.Helper()
	var c calls
	w.operate("GET", "/calls", "", 200, &c)
	return c
}

func (w *world) last() string {
	w.t.Helper()
	log := w.calls().Log
	e := log[len(log)-1]
	return fmt.Sprintf("%s %s %s %d %q", e.Operation, e.Method, e.Path, e.Status, e.Fault)
}

// A rack can carry a call out and answer with an error.
func TestFaultDone(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	w.fault(`{"operation":"disk_create","kind":"done"}`)
	w.do("POST", "/disks?project=proj", body("d")).check(t, wants{503, "ServiceNotAvailable", "Service Unavailable"})
	if got := w.must("GET", "/disks?project=proj", ""); len(got.Items) != 1 {
		t.Errorf("disks: %v", got.names())
	}
}

func TestFaultStatus(t *testing.T) {
	tests := []struct {
		name, fault string
		want        wants
	}{
		{"the rack's own message", `{"operation":"disk_create","kind":"status"}`,
			wants{503, "ServiceNotAvailable", "Service Unavailable"}},
		{"an internal error", `{"operation":"disk_create","kind":"status","status":500}`,
			wants{500, "Internal", "Internal Server Error"}},
		{
			"given message",
			`{"operation":"*","kind":"status","status":507,"error_code":"InsufficientCapacity","message":"full"}`,
			wants{507, "InsufficientCapacity", "full"},
		},
		{"without a code", `{"operation":"*","kind":"status","status":503,"error_code":"","message":"moving"}`,
			wants{503, "", "moving"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, simrack.Options{})
			id := w.fault(test.fault)
			w.do("POST", "/disks?project=proj", body("d")).check(t, test.want)
			if got := w.hits(id); got != 1 {
				t.Errorf("%d hits", got)
			}
			if got, want := w.last(), fmt.Sprintf(`disk_create POST /v1/disks %d "status"`, test.want.status); got != want {
				t.Errorf("logged %s, want %s", got, want)
			}
			// It hit once, and the operation was not executed.
			if got := w.must("GET", "/disks?project=proj", ""); len(got.Items) != 0 {
				t.Errorf("disks: %v", got.names())
			}
		})
	}
}

func TestFaultLostIsExecutedAndNotAnswered(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	id := w.fault(`{"operation":"disk_create","kind":"lost"}`)
	if res, _, err := w.request("POST", "/v1/disks?project=proj", body("d")); !errors.Is(err, io.EOF) {
		t.Errorf("got %v, error %v", res, err)
	}
	if w.hits(id) != 1 || w.last() != `disk_create POST /v1/disks 0 "lost"` {
		t.Errorf("%d hits, logged %s", w.hits(id), w.last())
	}
	if got := w.must("GET", "/disks?project=proj", "").names(); len(got) != 1 {
		t.Errorf("disks: %v", got)
	}
}

func TestFaultResetIsNotExecuted(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	id := w.fault(`{"operation":"disk_create","kind":"reset"}`)
	if res, _, err := w.request("POST", "/v1/disks?project=proj", body("d")); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v, error %v", res, err)
	}
	if w.hits(id) != 1 || w.last() != `disk_create POST /v1/disks 0 "reset"` {
		t.Errorf("%d hits, logged %s", w.hits(id), w.last())
	}
	if got := w.must("GET", "/disks?project=proj", "").names(); len(got) != 0 {
		t.Errorf("disks: %v", got)
	}
}

func TestFaultDelayIsExecutedLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTimedWorld(t, simrack.Options{})
		id := w.fault(`{"operation":"disk_create","kind":"delay","delay_ms":40}`)
		begin := time.Now()
		w.must("POST", "/disks?project=proj", body("d"))
		if took := time.Since(begin); took < 40*time.Millisecond {
			t.Errorf("took %v", took)
		}
		if w.hits(id) != 1 || w.last() != `disk_create POST /v1/disks 201 "delay"` {
			t.Errorf("%d hits, logged %s", w.hits(id), w.last())
		}
	})
}

// TestWhichCallsFaultsHit makes eight calls each and compares which of them are hit.
func TestWhichCallsFaultsHit(t *testing.T) {
	tests := []struct {
		name   string
		faults []string
		want   string // one letter a call: the fault by its position, or a point
		left   []int  // remaining faults
	}{
		{"once by default", []string{`"operation":"ping"`}, "a.......", []int{1}},
		{"as often as ordered", []string{`"operation":"ping","count":3`}, "aaa.....", []int{3}},
		{"for ever", []string{`"operation":"ping","count":0`}, "aaaaaaaa", []int{8}},
		{"after some", []string{`"operation":"ping","skip":2,"count":2`}, "..aa....", []int{2}},
		{"never", []string{`"operation":"ping","probability":0,"count":0`}, "........", []int{0}},
		{"another operation", []string{`"operation":"disk_view","count":0`}, "........", []int{0}},
		{"every operation", []string{`"operation":"*","count":2`}, "aa......", []int{2}},
		{"one after another", []string{`"operation":"ping","count":2`, `"operation":"*","count":2`}, "aabb....", []int{2, 2}},
		{
			"the oldest one wins",
			[]string{`"operation":"ping","count":0`, `"operation":"ping","count":0`},
			"aaaaaaaa",
			[]int{8, 0},
		},
		{
			"skip counts the calls that other faults leave",
			[]string{`"operation":"ping","count":1`, `"operation":"ping","skip":2`},
			"a..b....",
			[]int{1, 1},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, simrack.Options{})
			var ids []string
			for n, f := range test.faults {
				ids = append(ids, w.fault(fmt.Sprintf(`{"kind":"status","message":%q,%s}`, string(rune('a'+n)), f)))
			}
			got := ""
			for range 8 {
				if r := w.do("GET", "/ping", ""); r.status == 200 {
					got += "."
				} else {
					got += r.Message
				}
			}
			if got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
			for n, id := range ids {
				if hits := w.hits(id); hits != test.left[n] {
					t.Errorf("fault %d: %d hits, want %d", n, hits, test.left[n])
				}
			}
		})
	}
}

func TestFaultsWithAProbability(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	id := w.fault(`{"operation":"ping","kind":"status","probability":0.5,"count":0}`)
	for range 200 {
		w.do("GET", "/ping", "")
	}
	// 40 and 160 of 200 are more than eight standard deviations from the mean.
	if got := w.hits(id); got < 40 || got > 160 {
		t.Errorf("%d of 200 were hit", got)
	}
}

func TestDeleteFaults(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	one, two := w.fault(
		`{"operation":"ping","kind":"status","count":0}`,
	), w.fault(
		`{"operation":"ping","kind":"lost","count":0}`,
	)
	w.operate("DELETE", "/faults/"+two, "", 204, nil)
	w.operate("DELETE", "/faults/"+two, "", 404, nil)
	if w.do("GET", "/ping", "").status != 503 || w.hits(one) != 1 {
		t.Error("the other fault is gone too")
	}
	w.operate("DELETE", "/faults", "", 204, nil)
	if w.do("GET", "/ping", "").status != 200 {
		t.Error("a fault stayed")
	}
}

func TestCallsAreCountedAndLogged(t *testing.T) {
	w := newWorld(t, simrack.Options{})
	w.disk("d")
	w.do("GET", "/nonexistent", "")
	for range 10100 {
		w.rack.API().ServeHTTP(discard{}, mustRequest("GET", "/v1/ping"))
	}
	c := w.calls()
	if diff := cmp.Diff(map[string]int{"disk_create": 1, "ping": 10100}, c.Counts); diff != "" {
		t.Error(diff)
	}
	if len(c.Log) != 10000 || c.Log[0].Seq != 103 || c.Log[9999].Seq != 10102 {
		t.Errorf("%d entries from %d to %d", len(c.Log), c.Log[0].Seq, c.Log[len(c.Log)-1].Seq)
	}
	w.operate("DELETE", "/calls", "", 204, nil)
	w.do("GET", "/nonexistent", "")
	if c := w.calls(); len(c.Counts) != 0 || len(c.Log) != 1 || w.last() != ` GET /v1/nonexistent 404 ""` {
		t.Errorf("got %v", c)
	}
}

// discard is an http.ResponseWriter that drops the answer.
type discard struct{}

func (discard) Header() http.Header         { return http.Header{} }
func (discard) WriteHeader(int)             {}
func (discard) Write(p []byte) (int, error) { return len(p), nil }

func mustRequest(method, path string) *http.Request {
	req, err := http.NewRequest(method, "http://rack"+path, strings.NewReader(""))
	if err != nil {
		panic(err)
	}
	return req
}
