// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/openapi"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

const (
	testToken   = "oxide-token-rig"
	testProject = "demo"
	gib         = int64(1) << 30
)

// rig is a client of a simulated rack. The test can intercept the requests between the two.
type rig struct {
	*Client
	// sim controls the simulated rack. Its control endpoint is not part of the rack's API.
	sim *simtest.Sim
	log *logBuffer
	cfg Config

	mu sync.Mutex
	// seen are the requests that reached the rack, for instance "GET /v1/ping 2026060800.0.0".
	seen []string
	// before, if set, is called for each request first. It reports whether it has answered the request.
	before func(http.ResponseWriter, *http.Request) bool
}

func newRig(t *testing.T, opts simrack.Options, change ...func(*Config)) *rig {
	t.Helper()
	opts.Token, opts.Project, opts.Hotplug = testToken, testProject, true
	opts.Instances = []string{"node-a"}
	opts.Log = slog.New(slog.DiscardHandler)
	sim, err := simrack.New(opts)
	must(t, err)
	t.Cleanup(func() { must(t, sim.Close()) })
	r := &rig{log: &logBuffer{}}
	rack := openapi.Validator(t)(sim.API())
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.mu.Lock()
		r.seen = append(r.seen, fmt.Sprintf("%s %s %s", req.Method, req.URL.Path, req.Header.Get("Api-Version")))
		before := r.before
		r.mu.Unlock()
		if before == nil || !before(w, req) {
			rack.ServeHTTP(w, req)
		}
	}))
	control := httptest.NewServer(sim.Control())
	t.Cleanup(api.Close)
	t.Cleanup(control.Close)
	r.sim = &simtest.Sim{Host: api.URL, Token: testToken, Project: testProject, Control: control.URL}
	r.cfg = Config{
		Name: "east", Host: api.URL, Project: testProject, Token: FixedToken(testToken), UserAgent: "test/1",
		LostAnswerWait: time.Millisecond,
		Log:            slog.New(slog.NewTextHandler(r.log, nil)),
	}
	for _, c := range change {
		c(&r.cfg)
	}
	r.Client, err = New(r.cfg)
	must(t, err)
	return r
}

// intercept sets a function that sees each request before the rack does.
func (r *rig) intercept(before func(http.ResponseWriter, *http.Request) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.before = before
}

// requests counts the requests since the last call, by method and path.
func (r *rig) requests() map[string]int {
	counts := map[string]int{}
	for _, request := range r.seenRequests() {
		method, rest, _ := strings.Cut(request, " ")
		path, _, _ := strings.Cut(rest, " ")
		counts[method+" "+path]++
	}
	return counts
}

// seenRequests returns the requests since the last call, with their API versions.
func (r *rig) seenRequests() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := r.seen
	r.seen = nil
	return seen
}

func (r *rig) inject(t *testing.T, fault simtest.Fault) {
	t.Helper()
	_, err := r.sim.Inject(t.Context(), fault)
	must(t, err)
}

// node returns the ID of the only instance.
func (r *rig) node(t *testing.T) string {
	t.Helper()
	instances, err := r.sim.ListInstances(t.Context())
	must(t, err)
	return instances[0].ID
}

func (r *rig) create(t *testing.T, name string) Disk {
	t.Helper()
	disk, err := r.CreateDisk(t.Context(), DiskSpec{Name: name, Description: "d", SizeBytes: gib, BlockSize: 4096})
	must(t, err)
	return disk
}

// logBuffer is a log that can be read while it is written.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// refuse answers with an error in the rack's format.
func refuse(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).
		Encode(map[string]string{"request_id": "r", "error_code": code, "message": message})
	// a failed write fails the client's read
}
