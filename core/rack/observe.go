// This Source Code Form is subject to the terms of the Mozilla Public
// License, v. 2.0. If a copy of the MPL was not distributed with this
// file, You can obtain one at https://mozilla.org/MPL/2.0/.

package rack

import (
	"net/http"
	"path"
	"strconv"
	"time"
)

// Observe hears of a request to the rack when the head of its answer is there, or when it has failed: the operation by the
// name that the API's schema gives it, the HTTP status ("error" where no answer came), and how long that took. Requests
// that are repeated are heard of each time, but for those that net/http repeats by itself, which it does when an idle
// connection turns out to be closed. It must be safe for concurrent use, and quick.
type Observe func(operation, code string, took time.Duration)

// requestNames has the operations of the API by method and path. Only these names are ever observed: a path has IDs and
// names of disks in it, which must not become labels of a metric.
var requestNames = []struct{ pattern, operation string }{
	{"POST /v1/disks", "disk_create"},
	{"GET /v1/disks", "disk_list"},
	{"GET /v1/disks/*", "disk_view"},
	{"DELETE /v1/disks/*", "disk_delete"},
	{"POST /v1/snapshots", "snapshot_create"},
	{"GET /v1/snapshots", "snapshot_list"},
	{"GET /v1/snapshots/*", "snapshot_view"},
	{"DELETE /v1/snapshots/*", "snapshot_delete"},
	{"GET /v1/instances", "instance_list"},
	{"GET /v1/instances/*", "instance_view"},
	{"GET /v1/instances/*/disks", "instance_disk_list"},
	{"POST /v1/instances/*/disks/attach", "instance_disk_attach"},
	{"POST /v1/instances/*/disks/detach", "instance_disk_detach"},
	{"POST /v1/instances/*/stop", "instance_stop"},
	{"POST /v1/instances/*/start", "instance_start"},
	{"GET /v1/anti-affinity-groups", "anti_affinity_group_list"},
	{"POST /v1/anti-affinity-groups", "anti_affinity_group_create"},
	{"PUT /v1/anti-affinity-groups/*", "anti_affinity_group_update"},
	{"DELETE /v1/anti-affinity-groups/*", "anti_affinity_group_delete"},
	{"GET /v1/projects/*", "project_view"},
	{"GET /v1/utilization", "utilization_view"},
	{"GET /v1/ping", "ping"},
}

// requestName is the name of a request's operation, or "other".
func requestName(req *http.Request) string {
	request := req.Method + " " + req.URL.Path
	for _, name := range requestNames {
		// The only error is that of a bad pattern.
		if matches, err := path.Match(name.pattern, request); err == nil && matches {
			return name.operation
		}
	}
	return "other"
}

// observed tells observe of every request.
type observed struct {
	observe Observe
	next    http.RoundTripper
}

var _ http.RoundTripper = (*observed)(nil)

func (o *observed) RoundTrip(req *http.Request) (*http.Response, error) {
	start := time.Now()
	resp, err := o.next.RoundTrip(req)
	code := "error"
	if err == nil {
		code = strconv.Itoa(resp.StatusCode)
	}
	o.observe(requestName(req), code, time.Since(start))
	return resp, err
}
