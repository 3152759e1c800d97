// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/test/await"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack"
	"github.com/oxidecomputer/oxide-csi-plugin/test/simrack/simtest"
)

// recorder counts observed requests by operation and code, and keeps the longest duration of each operation.
type recorder struct {
	mu      sync.Mutex
	counts  map[string]int
	longest map[string]time.Duration
}

func newRecorder() *recorder {
	return &recorder{counts: map[string]int{}, longest: map[string]time.Duration{}}
}

func (h *recorder) observe(operation, code string, took time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.counts[operation+" "+code]++
	h.longest[operation] = max(h.longest[operation], took)
}

// Observe sees exactly the requests that the rack logs, under the rack's own operation names.
func TestObserveSeesEveryRequest(t *testing.T) {
	h := newRecorder()
	r := newRig(t, simrack.Options{}, func(cfg *Config) { cfg.Observe = h.observe })
	ctx, node := t.Context(), r.node(t)
	failing := func(what string, err error) {
		t.Helper()
		if err == nil {
			t.Errorf("%s succeeded", what)
		}
	}
	_, err := r.Check(ctx)
	must(t, err)
	r.inject(t, simtest.Fault{Operation: "disk_create", Kind: simtest.FaultDelay, DelayMillis: 60})
	disk := r.create(t, "observed")
	blank := DiskSpec{Name: "observed", Description: "d", SizeBytes: gib, BlockSize: 4096}
	_, err = r.CreateDisk(ctx, blank)
	failing("a second disk of the name", err)
	r.inject(t, simtest.Fault{Operation: "disk_create", Kind: simtest.FaultLost})
	blank.Name = "lost"
	_, err = r.CreateDisk(ctx, blank)
	failing("a create whose answer is lost", err)
	_, err = r.DiskByName(ctx, "lost")
	must(t, err)
	r.inject(t, simtest.Fault{Operation: "disk_view", Kind: simtest.FaultStatus, Status: http.StatusServiceUnavailable})
	_, err = r.Disk(ctx, disk.VolumeID)
	must(t, err)
	_, err = r.Disk(ctx, "00000000-0000-0000-0000-000000000000")
	failing("a view of a missing disk", err)
	_, err = r.Instance(ctx, node)
	must(t, err)
	_, err = r.InstanceDisks(ctx, node)
	must(t, err)
	r.inject(t, simtest.Fault{Operation: "instance_disk_attach", Kind: simtest.FaultReset})
	_, err = r.Attach(ctx, disk.ID, node)
	must(t, err)
	failing("deleting an attached disk", r.DeleteDisk(ctx, disk.ID))
	_, err = r.Detach(ctx, disk.ID, node)
	must(t, err)
	must(t, r.DeleteDisk(ctx, disk.ID))

	calls, err := r.sim.Calls(ctx)
	must(t, err)
	want := map[string]int{}
	for _, call := range calls.Log {
		operation, code := call.Operation, strconv.Itoa(call.Status)
		if operation == "" && call.Path == "/v1/ping" {
			operation = "ping" // a rack checks the version before the route
		}
		if call.Status == 0 {
			code = "error"
		}
		want[operation+" "+code]++
	}
	for _, expected := range []string{"disk_create 400", "disk_create error", "disk_view 503", "disk_view 404", "instance_disk_attach error", "disk_delete 400"} {
		if want[expected] == 0 {
			t.Errorf("the rack has not seen %s: the test is too weak", expected)
		}
	}
	if diff := cmp.Diff(want, h.counts); diff != "" {
		t.Errorf("requests (-rack +observer):\n%s", diff)
	}
	if took := h.longest["disk_create"]; took < 60*time.Millisecond || took > 20*time.Second {
		t.Errorf("a create that takes 60 ms took %s", took)
	}
}

// A request that never reaches a rack counts as an error of its operation.
func TestObserveWithoutAnswer(t *testing.T) {
	for _, name := range []string{"refused", "a caller that goes"} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan struct{})
			server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
				cancel()
				<-ended
			}))
			defer server.Close()
			defer close(ended)
			host := server.URL
			if name == "refused" {
				host = "http://127.0.0.1:1" // no process takes this port
			}
			h := newRecorder()
			client, err := New(
				Config{Name: "west", Host: host, Project: testProject, Token: FixedToken(testToken), Observe: h.observe},
			)
			must(t, err)
			if _, err := client.Disk(ctx, "00000000-0000-0000-0000-000000000000"); err == nil {
				t.Error("it succeeded")
			}
			// The first request negotiates the version. It may outlive the call, because others need its result too.
			await.Eventually(t, "an error is observed", func() bool {
				h.mu.Lock()
				defer h.mu.Unlock()
				return h.counts["ping error"] > 0 && len(h.counts) == 1
			})
		})
	}
}

// The number of operations does not grow with the number of disks and their names.
func TestObserveLabelsHaveNoDiskNames(t *testing.T) {
	h := newRecorder()
	r := newRig(t, simrack.Options{}, func(cfg *Config) { cfg.Observe = h.observe })
	for i := range 20 {
		name := fmt.Sprintf("disk-%d", i)
		disk := r.create(t, name)
		_, err := r.DiskByName(t.Context(), name)
		must(t, err)
		must(t, r.DeleteDisk(t.Context(), disk.ID))
	}
	delete(h.counts, "ping 400") // version negotiation
	delete(h.counts, "ping 200")
	want := map[string]int{"disk_create 201": 20, "disk_view 200": 20, "disk_delete 204": 20}
	if diff := cmp.Diff(want, h.counts); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
}

var capital = regexp.MustCompile(`([a-z])([A-Z])`)

// Each SDK call of this package has an operation name for the metrics. The SDK names its methods like the API's
// operations, in another spelling.
func TestEveryOperationHasAName(t *testing.T) {
	calls := reflect.TypeFor[operations]()
	for i := range calls.NumMethod() {
		method := calls.Method(i).Name
		operation := strings.ToLower(capital.ReplaceAllString(method, "${1}_${2}"))
		if !slices.ContainsFunc(
			operationPatterns,
			func(name struct{ pattern, operation string }) bool { return name.operation == operation },
		) {
			t.Errorf("operationPatterns lacks %s, which %s calls: its requests count as other", operation, method)
		}
	}
}

func TestOperationName(t *testing.T) {
	for request, want := range map[string]string{
		"POST /v1/disks":                         "disk_create",
		"GET /v1/disks?project=demo&limit=100":   "disk_list",
		"GET /v1/disks/list":                     "disk_view",
		"DELETE /v1/disks/a-b":                   "disk_delete",
		"GET /v1/disks/a?project=demo":           "disk_view",
		"POST /v1/instances/i/disks/attach":      "instance_disk_attach",
		"POST /v1/instances/attach/disks/detach": "instance_disk_detach",
		"GET /v1/instances/i/disks?limit=100":    "instance_disk_list",
		"GET /v1/instances/i":                    "instance_view",
		"PATCH /v1/disks/a":                      "other",
		"GET /v1/disks/a/b":                      "other",
		"GET /v1/disks/a%2Fb":                    "other",
		"GET /v2/disks/a":                        "other",
		"GET /":                                  "other",
		"POST /v1/instances/i/disks/move":        "other",
	} {
		method, target, _ := strings.Cut(request, " ")
		if got := operationName(httptest.NewRequest(method, target, nil)); got != want {
			t.Errorf("%s: %s, want %s", request, got, want)
		}
	}
}
