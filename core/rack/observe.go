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

// Observe is called for each request when the headers of the answer have arrived, or when the request has failed.
// operation is the request's name in the API's schema, code is the HTTP status or "error" if no answer came. Each
// attempt of a repeated request counts. Only the repetitions that net/http makes itself, on an idle connection that
// turns out to be closed, are not seen. Observe must be safe for concurrent use and must not block.
type Observe func(operation, code string, took time.Duration)

// operationPatterns names the API's operations by method and path. Metrics use only these names: a path contains IDs
// and disk names, which must not become labels.
var operationPatterns = []struct{ pattern, operation string }{
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
	{"GET /v1/anti-affinity-groups/*", "anti_affinity_group_view"},
	{"PUT /v1/anti-affinity-groups/*", "anti_affinity_group_update"},
	{"DELETE /v1/anti-affinity-groups/*", "anti_affinity_group_delete"},
	{"GET /v1/me/access-tokens", "current_user_access_token_list"},
	{"GET /v1/me", "current_user_view"},
	{"GET /v1/me/groups", "current_user_groups"},
	{"GET /v1/policy", "policy_view"},
	{"GET /v1/projects/*", "project_view"},
	{"GET /v1/projects/*/policy", "project_policy_view"},
	{"GET /v1/utilization", "utilization_view"},
	{"GET /v1/ping", "ping"},
}

// operationName returns the name of a request's operation, or "other".
func operationName(req *http.Request) string {
	request := req.Method + " " + req.URL.Path
	for _, name := range operationPatterns {
		// Match fails only for a malformed pattern.
		if matches, err := path.Match(name.pattern, request); err == nil && matches {
			return name.operation
		}
	}
	return "other"
}

// observer calls observe for every request.
type observer struct {
	observe Observe
	next    http.RoundTripper
}

var _ http.RoundTripper = (*observer)(nil)

func (o *observer) RoundTrip(req *http.Request) (*http.Response, error) {
	start := time.Now()
	resp, err := o.next.RoundTrip(req)
	code := "error"
	if err == nil {
		code = strconv.Itoa(resp.StatusCode)
	}
	o.observe(operationName(req), code, time.Since(start))
	return resp, err
}
